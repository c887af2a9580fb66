"""Products as data, for the tests' tables and the benchmarks' suites."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.cases import Case, Direction, Draw, Part, Size
from jaxkernels.ops.matmul.api import dot_general, matmul
from jaxkernels.ops.matmul.oracle import plain_matmul
from jaxkernels.ops.matmul.spec import Activation

__all__ = ["CASE", "MatmulCase"]

#: FLOPs that the reference of a product may take: some 20 ms of an H200's float64 tensor cores.
_MAX_FLOPS = 1e12

_LAYOUTS = {("mk", "kn"): "nn", ("mk", "nk"): "nt", ("km", "kn"): "tn", ("km", "nk"): "tt"}


@dataclasses.dataclass(frozen=True)
class MatmulCase(Case):
    """A product, with what may follow it.

    Attributes:
      m, n, k: sizes.
      batch: leading dimensions of the left operand, and of the right one unless it is shared.
      shared_rhs: the right operand is one matrix for the whole batch.
      lhs_layout: "mk" or "km", how the left operand lies in memory; rhs_layout: "kn" or "nk".
      dtype, out_dtype: of the operands and of the result (None: the operands').
      alpha: factor of the product, of two row-major operands.
      bias, activation, multiplier, residual: the epilogue, of the same.
      gate: a second right operand, whose product the result is multiplied with (SwiGLU where the activation is silu).
      precision: as `jax.lax.dot_general` takes it, by name: "HIGHEST" or a `jax.lax.DotAlgorithmPreset`'s.
      size: "small", or "real" for sizes that only a GPU multiplies in reasonable time.
    """

    kind: ClassVar[str] = "gemm"
    form: ClassVar[str] = "MxNxK or BxMxNxK, then any of :nt :tn :tt :DTYPE :backward"

    m: int
    n: int
    k: int
    batch: tuple[int, ...] = ()
    shared_rhs: bool = False
    lhs_layout: str = "mk"
    rhs_layout: str = "kn"
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    alpha: float = 1.0
    bias: bool = False
    activation: Activation | None = None
    multiplier: bool = False
    residual: bool = False
    gate: bool = False
    precision: str | None = None
    size: Size = "small"

    def __post_init__(self) -> None:
        is_row_major = (self.lhs_layout, self.rhs_layout) == ("mk", "kn")
        has_epilogue = self.alpha != 1 or self.activation or self.bias or self.multiplier or self.residual or self.gate
        if has_epilogue and not is_row_major:
            raise ValueError(
                f"MatmulCase: an epilogue needs row-major operands; got {self.lhs_layout}.{self.rhs_layout}."
            )

    @property
    def id(self) -> str:
        sizes = "x".join(map(str, (*self.batch, self.m, self.n, self.k)))
        parts = [sizes, f"{self.lhs_layout}.{self.rhs_layout}", jnp.dtype(self.dtype).name]
        parts += [f"to_{self.out_dtype}"] if self.out_dtype else []
        parts += ["shared"] if self.shared_rhs else []
        parts += [f"alpha_{self.alpha:g}"] if self.alpha != 1 else []
        parts += ["bias"] * self.bias + ([self.activation] if self.activation else [])
        parts += ["multiplier"] * self.multiplier + ["residual"] * self.residual
        parts += ["gate"] * self.gate + ([self.precision] if self.precision else [])
        return "-".join(parts)

    @property
    def flops(self) -> int:
        """Of the products."""
        return 2 * math.prod(self.batch) * self.m * self.n * self.k * (2 if self.gate else 1)

    @property
    def out_type(self) -> Draw:
        return Draw((*self.batch, self.m, self.n), self.out_dtype or self.dtype)

    @property
    def draws(self) -> dict[str, Draw]:
        """lhs, rhs, and the others that the case has; the product's values are of order 1."""
        sizes = dict(m=self.m, n=self.n, k=self.k)
        lhs_shape = (*self.batch, *(sizes[axis] for axis in self.lhs_layout))
        rhs_shape = (*(() if self.shared_rhs else self.batch), *(sizes[axis] for axis in self.rhs_layout))
        rhs = Draw(rhs_shape, self.dtype, scale=1 / math.sqrt(self.k))
        draws = dict(lhs=Draw(lhs_shape, self.dtype), rhs=rhs)
        if self.bias:
            draws["bias"] = Draw((self.n,), self.dtype)
        for name, is_there in dict(multiplier=self.multiplier, residual=self.residual).items():
            if is_there:
                draws[name] = Draw((*self.batch, self.m, self.n), self.dtype)
        if self.gate:
            draws["gate"] = rhs
        return draws

    def cotangents(self, seed: int = 1) -> np.ndarray:
        return self.out_type.from_numpy(np.random.default_rng(seed))

    @property
    def contraction(self) -> tuple[Any, Any]:
        """The dimension numbers of the product, as `jax.lax.dot_general` takes them."""
        draws, lead = self.draws, tuple(range(len(self.batch)))
        lhs_k = len(draws["lhs"].shape) - 2 + self.lhs_layout.index("k")
        rhs_k = len(draws["rhs"].shape) - 2 + self.rhs_layout.index("k")
        return ((lhs_k,), (rhs_k,)), (lead, lead)

    @property
    def dot_precision(self) -> Any:
        """`precision` as JAX's own type."""
        if self.precision is None:
            return None
        is_algorithm = self.precision in jax.lax.DotAlgorithmPreset.__members__
        return (jax.lax.DotAlgorithmPreset if is_algorithm else jax.lax.Precision)[self.precision]

    def run(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> jax.Array:
        """The case by this package: `matmul` where both operands are row major, else `dot_general`."""
        lhs, rhs = operands["lhs"], operands["rhs"]
        options = dict(precision=self.dot_precision, backend=backend)
        if (self.lhs_layout, self.rhs_layout) != ("mk", "kn"):
            return dot_general(lhs, rhs, self.contraction, preferred_element_type=self.out_dtype, **options)
        epilogue = {name: operands[name] for name in ("bias", "multiplier", "residual") if name in operands}
        if self.gate:
            epilogue["multiplier"] = matmul(lhs, operands["gate"], out_dtype=self.out_dtype, **options)
        options |= dict(alpha=self.alpha, activation=self.activation, out_dtype=self.out_dtype)
        return matmul(lhs, rhs, **epilogue, **options)

    @classmethod
    def parse(cls, sizes: Sequence[int], options: Mapping[str, Any], words: Sequence[str]) -> MatmulCase | None:
        layouts = {name: letters for letters, name in _LAYOUTS.items()}
        if len(sizes) not in (3, 4) or not {*words} <= {*layouts}:
            return None
        *batch, m, n, k = sizes
        case = cls(m, n, k, batch=tuple(batch), **options)
        for word in words:
            lhs, rhs = layouts[word]
            case = dataclasses.replace(case, lhs_layout=lhs, rhs_layout=rhs)
        return case

    @property
    def description(self) -> str:
        words = ["x".join(map(str, (*self.batch, self.m, self.n, self.k)))]
        words += [_LAYOUTS[self.lhs_layout, self.rhs_layout]]
        words += ["shared"] * self.shared_rhs + ([f"alpha {self.alpha:g}"] if self.alpha != 1 else [])
        words += ["bias"] * self.bias + ([self.activation] if self.activation else [])
        words += ["multiplier"] * self.multiplier + ["gate"] * self.gate + ["residual"] * self.residual
        words += [self.precision] if self.precision else []
        words += [f"to {self.out_dtype}"] if self.out_dtype else []
        return " ".join(words)

    @property
    def moving(self) -> tuple[str, ...]:
        """Every operand."""
        return tuple(self.draws)

    @property
    def gradient_flops(self) -> float:
        """Two products for each product of the forward pass."""
        return 2 * self.flops

    def num_bytes(self, direction: Direction) -> int:
        operands = sum(draw.num_bytes for draw in self.draws.values())
        return (operands if direction == "forward" else 2 * operands) + self.out_type.num_bytes

    def forward(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> jax.Array:
        return self.run(operands, backend=backend)

    def letters(self, name: str, num_axes: int) -> str:
        return dict(lhs=self.lhs_layout, out="mn", multiplier="mn", residual="mn").get(name, "").rjust(num_axes)

    def part_to_check(self, *, is_gradient: bool = False) -> Part:
        """Every so many-th row, up to the last, at least one in a warpgroup's 64; all of a gradient."""
        step = min(math.ceil(self.flops / _MAX_FLOPS), 61) | 1  # Odd: tiles begin at even rows.
        if step == 1 or is_gradient:
            return Part(self)
        rows = slice((self.m - 1) % step, None, step)
        part = dataclasses.replace(self, m=len(range(self.m)[rows]))
        return Part(part, f"one of {step} rows", (("m", rows),))

    def plain(self, operands: dict[str, Any]) -> jax.Array:
        return plain_matmul(self, operands)


CASE = MatmulCase
