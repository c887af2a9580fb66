"""Projections to queries, keys and values as data, for the benchmarks' suites."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxkernels.core.cases import Case, Direction, Draw, Operands
from jaxkernels.ops.qkv_projection.api import qkv_projection
from jaxkernels.ops.qkv_projection.oracle import plain_projection
from jaxkernels.ops.qkv_projection.spec import Pairs

__all__ = ["CASE", "QkvProjectionCase"]

#: The base of the angles' wavelengths (Su et al. 2021, arXiv:2104.09864).
_THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class QkvProjectionCase(Case):
    """The projection of a batch of sequences.

    Attributes:
      batch, tokens, embed_dim: B, T and D of x.
      num_heads, num_kv_heads, head_dim: N, K and H.
      pairs: as in `qkv_projection`; None: no rotation.
      dtype: of x and w.
    """

    kind: ClassVar[str] = "qkv"
    form: ClassVar[str] = "BxTxDxNxKxH, then any of :neighbours :plain (no rotation) :DTYPE :backward"

    batch: int
    tokens: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    pairs: Pairs | None = "halves"
    dtype: str = "bfloat16"

    @property
    def description(self) -> str:
        heads = f"N{self.num_heads}" + (f"/{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else "")
        return f"B{self.batch} T{self.tokens} D{self.embed_dim} {heads} H{self.head_dim} {self.pairs or 'plain'}"

    @property
    def _columns(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def draws(self) -> dict[str, Draw]:
        """x and w; the product's values are of order 1."""
        return dict(
            x=Draw((self.batch, self.tokens, self.embed_dim), self.dtype),
            w=Draw((self.embed_dim, self._columns), self.dtype, scale=1 / math.sqrt(self.embed_dim)),
        )

    def masks(self, rng: np.random.Generator) -> Operands:
        """The cosines and sines of the positions' angles."""
        del rng
        if self.pairs is None:
            return {}
        frequencies = _THETA ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.arange(self.tokens)[:, None] * frequencies
        return dict(cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32))

    @property
    def out_type(self) -> Draw:
        """The queries."""
        return Draw((self.batch, self.tokens, self.num_heads, self.head_dim), self.dtype)

    @property
    def further_out_types(self) -> dict[str, Draw]:
        part = Draw((self.batch, self.tokens, self.num_kv_heads, self.head_dim), self.dtype)
        return dict(key=part, value=part)

    @property
    def moving(self) -> tuple[str, ...]:
        return ("x", "w")

    @property
    def flops(self) -> int:
        """The FLOPs of the product."""
        return 2 * self.batch * self.tokens * self.embed_dim * self._columns

    @property
    def gradient_flops(self) -> float:
        return 2 * self.flops

    def num_bytes(self, direction: Direction) -> int:
        operands = sum(draw.num_bytes for draw in self.draws.values())
        results = sum(draw.num_bytes for draw in (self.out_type, *self.further_out_types.values()))
        angles = 4 * self.tokens * self.head_dim if self.pairs else 0
        return (operands if direction == "forward" else 2 * operands) + results + angles

    @classmethod
    def parse(cls, sizes: Sequence[int], options: Mapping[str, Any], words: Sequence[str]) -> QkvProjectionCase | None:
        if len(sizes) != 6 or not {*words} <= {"neighbours", "plain"}:
            return None
        return cls(*sizes, pairs=None if "plain" in words else "neighbours" if words else "halves", **options)

    def forward(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> tuple[jax.Array, ...]:
        rotation = (operands["cos"], operands["sin"]) if self.pairs else None
        heads: dict[str, Any] = dict(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        pairs: Pairs = self.pairs or "halves"
        return qkv_projection(operands["x"], operands["w"], rotation, **heads, pairs=pairs, backend=backend)

    def letters(self, name: str, num_axes: int) -> str:
        return "".rjust(num_axes)

    def plain(self, operands: dict[str, Any]) -> tuple[jax.Array, ...]:
        return plain_projection(self, operands)


CASE = QkvProjectionCase
