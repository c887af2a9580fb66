"""What is computed: products and attentions as data, for the tests' tables and the benchmarks' suites."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxkernels as jk
from jaxkernels.ops.matmul.spec import Activation

__all__ = ["AttentionCase", "Draw", "MatmulCase", "Operands", "random_array"]

Size = Literal["small", "real"]
Operands = dict[str, np.ndarray]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    """Normal random numbers, drawn in float32 and rounded to `dtype`."""
    return (scale * rng.standard_normal(shape, dtype=np.float32)).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Draw:
    """An operand of normal random numbers: its shape, dtype and standard deviation."""

    shape: tuple[int, ...]
    dtype: str
    scale: float = 1.0

    def from_numpy(self, rng: np.random.Generator) -> np.ndarray:
        return random_array(rng, self.shape, self.dtype, self.scale)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class MatmulCase:
    """A product, with what may follow it.

    Attributes:
      m, n, k: sizes.
      batch: leading dimensions of the left operand, and of the right one unless it is shared.
      shared_rhs: the right operand is one matrix for the whole batch.
      lhs_layout: "mk" or "km", how the left operand lies in memory; rhs_layout: "kn" or "nk".
      dtype, out_dtype: of the operands and of the result (None: the operands').
      alpha: factor of the product, of two row-major operands.
      bias, activation, residual: the epilogue.
      gate: a second right operand, whose product the result is multiplied with (SwiGLU where the activation is silu).
      precision: as `jax.lax.dot_general` takes it, by name: "HIGHEST" or a `jax.lax.DotAlgorithmPreset`'s.
      size: "small", or "real" for sizes that only a GPU multiplies in reasonable time.
    """

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
    residual: bool = False
    gate: bool = False
    precision: str | None = None
    size: Size = "small"

    @property
    def id(self) -> str:
        sizes = "x".join(map(str, (*self.batch, self.m, self.n, self.k)))
        parts = [sizes, f"{self.lhs_layout}.{self.rhs_layout}", jnp.dtype(self.dtype).name]
        parts += [f"to_{self.out_dtype}"] if self.out_dtype else []
        parts += ["shared"] if self.shared_rhs else []
        parts += [f"alpha_{self.alpha:g}"] if self.alpha != 1 else []
        parts += ["bias"] * self.bias + ([self.activation] if self.activation else []) + ["residual"] * self.residual
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
        """lhs, rhs, and bias, residual and gate where the case has them; the product's values are of order 1."""
        sizes = dict(m=self.m, n=self.n, k=self.k)
        lhs_shape = (*self.batch, *(sizes[axis] for axis in self.lhs_layout))
        rhs_shape = (*(() if self.shared_rhs else self.batch), *(sizes[axis] for axis in self.rhs_layout))
        rhs = Draw(rhs_shape, self.dtype, scale=1 / math.sqrt(self.k))
        draws = dict(lhs=Draw(lhs_shape, self.dtype), rhs=rhs)
        if self.bias:
            draws["bias"] = Draw((self.n,), self.dtype)
        if self.residual:
            draws["residual"] = Draw((*self.batch, self.m, self.n), self.dtype)
        if self.gate:
            draws["gate"] = rhs
        return draws

    def operands(self, seed: int = 0) -> Operands:
        rng = np.random.default_rng(seed)
        return {name: draw.from_numpy(rng) for name, draw in self.draws.items()}

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
            return jk.dot_general(lhs, rhs, self.contraction, preferred_element_type=self.out_dtype, **options)
        epilogue = dict(bias=operands.get("bias"), activation=self.activation, residual=operands.get("residual"))
        out = jk.matmul(lhs, rhs, alpha=self.alpha, **epilogue, out_dtype=self.out_dtype, **options)
        if self.gate:
            out *= jk.matmul(lhs, operands["gate"], out_dtype=self.out_dtype, **options)
        return out


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """An attention, with its masks.

    Attributes:
      batch, queries, keys, heads, kv_heads, head_dim, value_dim: B, T, S, N, K, H, D (None: H).
      dtype: of query, key and value.
      causal, window, soft_cap: as `jaxkernels.dot_product_attention` takes them.
      query_lengths, key_lengths, segments: whether these are given; lengths include 0 and the whole.
      documents: how many segments a row holds, of lengths in the ratio 1 : 2 : 3 : ...; 0: cut at random.
      equal_documents: whether they are of one length.
      bias, mask: shape as four letters of "BNTS", "1" where it broadcasts; None: not given.
      bias_dtype: the bias's; None: the query's.
      masked_rows: whether the mask hides every key from some queries.
      size: "small", or "real" for sizes only a GPU computes in reasonable time.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    query_lengths: bool = False
    key_lengths: bool = False
    segments: bool = False
    documents: int = 0
    equal_documents: bool = False
    bias: str | None = None
    bias_dtype: str | None = None
    mask: str | None = None
    masked_rows: bool = False
    size: Size = "small"

    @property
    def id(self) -> str:
        head = str(self.head_dim) if self.value_dim is None else f"{self.head_dim}to{self.value_dim}"
        parts = [f"{self.batch}x{self.queries}x{self.keys}x{self.heads}x{self.kv_heads}x{head}", self.dtype]
        named = dict(
            causal=self.causal,
            query_lengths=self.query_lengths,
            key_lengths=self.key_lengths,
            segments=self.segments,
            masked_rows=self.masked_rows,
        )
        parts += [name for name, given in named.items() if given]
        parts += [f"{self.documents}{'equal' * self.equal_documents}documents"] if self.documents else []
        valued = dict(window=self.window, cap=self.soft_cap, bias=self.bias, mask=self.mask, of=self.bias_dtype)
        parts += [f"{name}_{value}".replace(" ", "") for name, value in valued.items() if value is not None]
        return "-".join(parts)

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, in one head of the whole batch.

        By convention a causal mask alone leaves half of them. Windows and documents are counted exactly; lengths,
        random segments and masks are not counted.
        """
        causal, window = self.causal, self.window or (None, None)
        if self.documents:
            starts = self._document_starts(self.keys)
            squares = sum((end - start) ** 2 for start, end in zip(starts, (*starts[1:], self.keys)))
            return self.batch * squares * (0.5 if causal else 1)
        if window == (None, None):
            return self.batch * self.queries * self.keys * (0.5 if causal else 1)
        i = np.arange(self.queries)
        first = 0 if window[0] is None else np.maximum(i - window[0], 0)
        last = self.keys - 1 if window[1] is None else np.minimum(i + window[1], self.keys - 1)
        last = np.minimum(last, i) if causal else last
        return float(self.batch * np.sum(np.maximum(last - first + 1, 0)))

    def _document_starts(self, length: int) -> tuple[int, ...]:
        """Where the documents begin, which fill `length`."""
        weights = [1 if self.equal_documents else 1 + i for i in range(self.documents)]
        return tuple(length * before // sum(weights) for before in itertools.accumulate(weights[:-1], initial=0))

    @property
    def flops(self) -> int:
        """Of the forward pass: two products over the pairs a query sees (`pairs`)."""
        return int(self.heads * self.pairs * 2 * (self.head_dim + (self.value_dim or self.head_dim)))

    @property
    def out_type(self) -> Draw:
        return Draw((self.batch, self.queries, self.heads, self.value_dim or self.head_dim), self.dtype)

    def shape_of(self, letters: str) -> tuple[int, ...]:
        """The shape a bias or a mask of these letters has."""
        sizes = dict(B=self.batch, N=self.heads, T=self.queries, S=self.keys)
        return tuple(sizes.get(letter, 1) for letter in letters)

    @property
    def draws(self) -> dict[str, Draw]:
        """query, key, value and bias."""
        kv_shape = (self.batch, self.keys, self.kv_heads)
        draws = dict(
            query=Draw((self.batch, self.queries, self.heads, self.head_dim), self.dtype),
            key=Draw((*kv_shape, self.head_dim), self.dtype),
            value=Draw((*kv_shape, self.value_dim or self.head_dim), self.dtype),
        )
        if self.bias is not None:
            draws["bias"] = Draw(self.shape_of(self.bias), self.bias_dtype or self.dtype)
        return draws

    def masks(self, rng: np.random.Generator) -> Operands:
        """The operands that are no numbers to compute with: mask, lengths and segments."""
        operands = {}
        if self.mask is not None:
            mask = rng.random(self.shape_of(self.mask)) < 0.7
            if self.masked_rows:
                mask[..., ::3, :] = False
            operands["mask"] = mask
        if self.query_lengths:
            operands["query_seq_lengths"] = np.linspace(self.queries, 0, self.batch, dtype=np.int32)
        if self.key_lengths:
            operands["key_value_seq_lengths"] = np.linspace(0, self.keys, self.batch, dtype=np.int32)
        if self.segments:  # Documents packed one after the other, cut elsewhere in each row if at random.
            for name, length in (("query_segment_ids", self.queries), ("key_value_segment_ids", self.keys)):
                if self.documents:
                    cuts = np.zeros((self.batch, length), bool)
                    cuts[:, self._document_starts(length)[1:]] = True
                else:
                    cuts = rng.random((self.batch, length)) < 0.2
                operands[name] = np.cumsum(cuts, axis=1, dtype=np.int32)
        return operands

    def operands(self, seed: int = 0) -> Operands:
        """query, key, value, and the optional operands under the names of the public function."""
        rng = np.random.default_rng(seed)
        return {name: draw.from_numpy(rng) for name, draw in self.draws.items()} | self.masks(rng)

    def cotangents(self, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """For the output and for the logsumexp, whose cotangent is float32."""
        rng = np.random.default_rng(seed)
        return self.out_type.from_numpy(rng), Draw(self.out_type.shape[:-1], "float32", scale=0.1).from_numpy(rng)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not arrays."""
        return dict(is_causal=self.causal, local_window_size=self.window, logits_soft_cap=self.soft_cap)

    def run(self, operands: dict[str, jax.Array], *, return_lse: bool = True, **options: Any) -> Any:
        """The case by this package: (out, lse), or out alone; `options` are more of the function's."""
        if self.documents and self.queries == self.keys:  # Of one sequence, whose ids are one array.
            operands = operands | dict(key_value_segment_ids=operands["query_segment_ids"])
        return jk.dot_product_attention(**operands, **self.options, return_lse=return_lse, **options)
