"""What the Triton kernels of linear cross entropy share: limits, configurations, and the constants of a kernel.

The products are XLA's. Between them one kernel reads the logits of a chunk, and writes g in their place. A program has
the logits of one token. It reads them once for the statistics, in blocks, and again for g, from L2. XLA's fusions read
them three times from memory: for the maximum, for the sum of exponentials, and for g.

The kernels are bound by memory: the least time is the bytes of the logits, and those of g, over the bandwidth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import numpy as np

from jaxkernels.ops.linear_cross_entropy import chunks
from jaxkernels.ops.linear_cross_entropy.spec import LinearCrossEntropySpec
from jaxkernels.triton import calls

__all__ = ["VERSION", "Config", "Problem", "search_space", "shortlist", "unpreferred", "unsupported"]

VERSION = 1

_DTYPES = tuple(np.dtype(dtype) for dtype in (jax.numpy.bfloat16, np.float16, np.float32))

#: (block_vocab, num_warps) worth measuring. A thread has 8 to 32 logits of a block.
_TILES = tuple((block, warps) for block in (1024, 2048, 4096, 8192) for warps in (2, 4, 8, 16))
_LEAST, _MOST = 8, 32

#: Rows of 16-bit logits begin at multiples of 16 bytes if the vocabulary is a multiple of this. Others are read 2 bytes
#: at a time.
_ALIGNED = 8

#: The logits of all tokens are one chunk if they take at most so many bytes: a loop would copy rows of x and dx.
_ONE_CHUNK_BYTES = 2**31

#: (block_vocab, num_warps) of a default configuration: of rows up to _SHORT bytes, of longer ones, and of float32
#: logits and a soft cap, which take more registers. Large programs leave few of them on an SM: their rows stay in L2.
#: On an H100 the first two took 770 and 840 us for 1 GiB of logits of 32,768 and of 50,304 classes, and the others of
#: _TILES 770 to 835 and 880 to 950 us. Without the hints for L2 they took 835 and 1023 us at least.
_SHORT = 2**16
_TILE, _LARGE_TILE, _SMALL_TILE = (4096, 16), (8192, 16), (2048, 8)


@dataclasses.dataclass(frozen=True)
class Config(chunks.Config):
    """The size of a step, and the tile of a kernel.

    Attributes:
      block_vocab: logits that a program reads at a time.
      num_warps: warps of a program.
    """

    label: ClassVar[str] = "linear_cross_entropy[triton]"

    block_vocab: int = _TILE[0]
    num_warps: int = _TILE[1]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_vocab < 32 or self.block_vocab & (self.block_vocab - 1):
            raise ValueError(f"{self.label}: block_vocab must be a power of two, 32 or more; got {self.block_vocab}.")
        calls.check_schedule(self.label, self.num_warps, 1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The constants of a kernel.

    Attributes:
      vocab_size: V.
      block_vocab: as in `Config`.
      bias: whether there is one.
      soft_cap, logit_sum, label_smoothing, z_loss: as in `LinearCrossEntropySpec`.
    """

    vocab_size: int
    block_vocab: int
    bias: bool
    soft_cap: float | None
    logit_sum: bool
    label_smoothing: float
    z_loss: float

    @classmethod
    def of(cls, spec: LinearCrossEntropySpec, config: Config) -> Problem:
        return cls(
            vocab_size=spec.vocab_size,
            block_vocab=config.block_vocab,
            bias=spec.bias is not None,
            soft_cap=spec.soft_cap,
            logit_sum=spec.logit_sum,
            label_smoothing=spec.label_smoothing,
            z_loss=spec.z_loss,
        )


def unsupported(spec: LinearCrossEntropySpec) -> str | None:
    """Why no Triton kernel can compute a pass of this loss, or None."""
    if reason := calls.unsupported_chip(spec.target):
        return reason
    for name, array in dict(x=spec.x, bias=spec.bias).items():
        if array is not None and array.dtype not in _DTYPES:
            return f"takes bfloat16, float16 or float32, {name} is {array.dtype}"
    if not all(isinstance(size, int) for size in (*spec.x.shape, spec.vocab_size)):
        return "needs static shapes"
    if 0 in spec.x.shape:
        return "has no work in an empty array"
    if "bias" in spec.gradients:
        return "does not compute the gradient of the bias"
    return calls.missing()


def unpreferred(spec: LinearCrossEntropySpec) -> str | None:
    """Why a call with backend=None takes XLA, or None."""
    return None if spec.target.is_hopper else f"was not measured on {spec.target.name}"


def search_space(spec: LinearCrossEntropySpec) -> Iterator[Config]:
    """Each chunk with the default tile, and each tile with the default chunk."""
    is_short = spec.vocab_size * spec.logits_dtype.itemsize <= _SHORT
    tile = _TILE if is_short or spec.vocab_size % _ALIGNED else _LARGE_TILE
    if spec.soft_cap is not None or spec.logits_dtype.itemsize == 4:
        tile = _SMALL_TILE
    default, *others = chunks.sizes(spec)
    if spec.num_tokens * spec.vocab_size * spec.logits_dtype.itemsize <= _ONE_CHUNK_BYTES:
        default, others = spec.num_tokens, [chunk for chunk in (default, *others) if chunk < spec.num_tokens]
    yield Config(default, *tile)
    yield from (Config(chunk, *tile) for chunk in others)
    for block, warps in _TILES:
        if (block, warps) != tile and _LEAST <= block / (32 * warps) <= _MOST:
            yield Config(default, block, warps)


def shortlist(spec: LinearCrossEntropySpec) -> tuple[Config, ...]:
    """The default."""
    return (next(search_space(spec)),)
