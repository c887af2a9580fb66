"""How a matmul kernel's operands are cut into blocks, and the tensor maps that load them (tiles.cuh)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax

from jaxkernels.ffi import custom_call

__all__ = ["ATOM", "LINE_BYTES", "SWIZZLE_BYTES", "OperandBlocks"]

#: The swizzle's span, as in tiles.cuh, and the 16-bit elements across it.
SWIZZLE_BYTES = 128
ATOM = SWIZZLE_BYTES // 2
#: The bytes of a cache line.
LINE_BYTES = 128


def _l2_promotion(x: jax.Array) -> Literal["128B", "256B"]:
    """The bytes that TMA fetches into L2 at once: 128 if rows are not whole lines.

    With 256 bytes, 1000^3 has 187 TFLOP/s; with 128 bytes it has 209 (H200, 2026-11-21).
    """
    return "128B" if x.shape[-1] * x.dtype.itemsize % LINE_BYTES else "256B"


@dataclasses.dataclass(frozen=True)
class OperandBlocks:
    """How an operand is cut into blocks of m (or n) by block_k.

    Attributes:
      is_k_major: whether k is the contiguous dimension.
      size: of m or n.
      block: of m or n.
      block_k: of k.
      shared_by: CTAs of a cluster that each load a part.
      in_parts: whether the operand is several arrays, and a block may have boxes of two.
    """

    is_k_major: bool
    size: int
    block: int
    block_k: int
    shared_by: int = 1
    in_parts: bool = False

    @property
    def num_boxes(self) -> int:
        """A box is a swizzle span wide; those of a block with k contiguous follow each other along k."""
        return 1 if self.is_k_major else -(-self.block // ATOM)

    @property
    def stacks_boxes(self) -> bool:
        """Whether one copy loads several boxes: they, and those of the whole operand, are whole ones."""
        are_whole = self.size % ATOM == 0 and self.block % (ATOM * self.shared_by) == 0
        return not self.is_k_major and are_whole and self.num_boxes > self.shared_by and not self.in_parts

    @property
    def box_rows(self) -> int:
        """Rows of a box: of m (or n) where k is contiguous, else of k."""
        if self.is_k_major:
            return self.block // self.shared_by
        shares_boxes = self.num_boxes % self.shared_by == 0
        return self.block_k // (1 if shares_boxes else self.shared_by)

    def tensor_map(self, buffer: int, x: jax.Array) -> custom_call.TensorMap:
        """What one copy loads of a block of `x`: all, or this CTA's part of it, of one box or of several."""
        tensor_map = functools.partial(custom_call.TensorMap, buffer, swizzle="128B", l2_promotion=_l2_promotion(x))
        if self.stacks_boxes:
            batch, k, size = x.shape
            return tensor_map(
                box=(1, self.num_boxes // self.shared_by, self.block_k, ATOM),
                shape=(batch, size // ATOM, k, ATOM),
                strides=(2 * k * size, SWIZZLE_BYTES, 2 * size),
            )
        return tensor_map(box=(1, self.box_rows, ATOM))
