"""The cases every suite and every benchmark shares: one table of products, one of attentions.

Axes are distinct and greater than 1, so that a wrong order of axes cannot hide. Small cases run
everywhere; real ones are for a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxkernels as jk

__all__ = ["ATTENTION_CASES", "MATMUL_CASES", "AttentionCase", "MatmulCase", "random_array"]

Size = Literal["small", "real"]
Operands = dict[str, np.ndarray]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    """Normal random numbers, drawn in float32 and rounded to `dtype`."""
    return (scale * rng.standard_normal(shape, dtype=np.float32)).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class MatmulCase:
    """A product, with what may follow it.

    Attributes:
      m, n, k: sizes.
      batch: leading dimensions of the left operand, and of the right one unless it is shared.
      shared_rhs: the right operand is one matrix for the whole batch.
      lhs_layout: "mk" or "km", how the left operand lies in memory; rhs_layout: "kn" or "nk".
      dtype, out_dtype: of the operands and of the result (None: the operands').
      bias, activation, residual: the epilogue.
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
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    size: Size = "small"

    @property
    def id(self) -> str:
        sizes = "x".join(map(str, (*self.batch, self.m, self.n, self.k)))
        parts = [sizes, f"{self.lhs_layout}.{self.rhs_layout}", jnp.dtype(self.dtype).name]
        parts += [f"to_{self.out_dtype}"] if self.out_dtype else []
        parts += ["shared"] if self.shared_rhs else []
        parts += ["bias"] * self.bias + ([self.activation] if self.activation else []) + ["residual"] * self.residual
        return "-".join(parts)

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.batch) * self.m * self.n * self.k

    def operands(self, seed: int = 0) -> Operands:
        """lhs, rhs, and bias and residual where the case has them; the product's values are of order 1."""
        rng = np.random.default_rng(seed)
        sizes = dict(m=self.m, n=self.n, k=self.k)
        lhs_shape = (*self.batch, *(sizes[axis] for axis in self.lhs_layout))
        rhs_shape = (*(() if self.shared_rhs else self.batch), *(sizes[axis] for axis in self.rhs_layout))
        operands = dict(
            lhs=random_array(rng, lhs_shape, self.dtype),
            rhs=random_array(rng, rhs_shape, self.dtype, scale=1 / math.sqrt(self.k)),
        )
        if self.bias:
            operands["bias"] = random_array(rng, (self.n,), self.dtype)
        if self.residual:
            operands["residual"] = random_array(rng, (*self.batch, self.m, self.n), self.dtype)
        return operands

    def cotangents(self, seed: int = 1) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return random_array(rng, (*self.batch, self.m, self.n), self.out_dtype or self.dtype)

    def run(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> jax.Array:
        """The case by this package: `matmul` where both operands are row major, else `dot_general`."""
        lhs, rhs = operands["lhs"], operands["rhs"]
        if (self.lhs_layout, self.rhs_layout) == ("mk", "kn"):
            epilogue = dict(bias=operands.get("bias"), activation=self.activation, residual=operands.get("residual"))
            return jk.matmul(lhs, rhs, **epilogue, out_dtype=self.out_dtype, backend=backend)
        lead = tuple(range(len(self.batch)))
        contracting = (lhs.ndim - 2 + self.lhs_layout.index("k"),), (rhs.ndim - 2 + self.rhs_layout.index("k"),)
        return jk.dot_general(
            lhs, rhs, (contracting, (lead, lead)), preferred_element_type=self.out_dtype, backend=backend
        )


def _matmul_cases() -> tuple[MatmulCase, ...]:
    case = MatmulCase
    small = [
        # Ragged sizes: 1 in each place, and one less or more than a tile.
        case(1, 7, 63),
        case(63, 1, 100),
        case(100, 63, 1),
        case(63, 100, 7, dtype="float16"),
        case(127, 129, 65, dtype="float32"),
        case(64, 128, 192),
        # The four layouts.
        *(
            case(48, 56, 72, lhs_layout=lhs, rhs_layout=rhs, dtype=dtype)
            for (lhs, rhs), dtype in zip(
                [("mk", "nk"), ("km", "kn"), ("km", "nk"), ("km", "nk")], ["bfloat16", "float16", "bfloat16", "float32"]
            )
        ),
        case(40, 50, 60, batch=(3,), lhs_layout="km", rhs_layout="nk"),
        # Batches, and rows that are not a multiple of 16 bytes.
        case(33, 20, 28, batch=(3,), dtype="float16"),
        case(9, 20, 28, batch=(2, 3)),
        case(9, 20, 36, batch=(2, 3), shared_rhs=True, dtype="float32"),
        # Dtypes of the result.
        case(40, 48, 56, out_dtype="float32"),
        case(40, 48, 56, dtype="float32", out_dtype="bfloat16"),
        case(40, 48, 56, batch=(3,), lhs_layout="km", rhs_layout="nk", dtype="float16", out_dtype="float32"),
        # Epilogues.
        case(40, 48, 56, bias=True),
        case(40, 48, 56, activation="relu", dtype="float16"),
        case(40, 48, 56, residual=True),
        case(40, 47, 56, bias=True, activation="gelu", residual=True),
        case(40, 48, 55, bias=True, activation="gelu_erf", dtype="float32"),
        case(40, 48, 56, batch=(3,), shared_rhs=True, activation="silu", residual=True, out_dtype="float32"),
        case(1, 48, 56, batch=(3,), bias=True, activation="silu", residual=True, dtype="float16"),
    ]
    real = [
        case(1024, 1024, 1024),
        case(4096, 4096, 4096),
        case(4096, 4096, 4096, lhs_layout="mk", rhs_layout="nk"),
        case(4096, 4096, 4096, lhs_layout="km", rhs_layout="kn"),
        case(4096, 4096, 4096, lhs_layout="km", rhs_layout="nk", dtype="float16"),
        case(2048, 2048, 2048, dtype="float32"),
        case(1000, 1000, 1000),
        case(4095, 4097, 4093),
        case(799, 1023, 511, dtype="float16"),
        case(16, 4096, 4096),
        case(64, 28672, 4096),
        case(256, 4096, 14336),
        case(2048, 50257, 768),
        case(2048, 768, 50257, lhs_layout="mk", rhs_layout="nk"),
        case(50257, 768, 2048, lhs_layout="km", rhs_layout="kn", out_dtype="float32"),
        case(8192, 3072, 768, bias=True, activation="gelu"),
        case(8192, 768, 3072, bias=True, residual=True),
        case(8192, 3072, 768, bias=True, activation="gelu_erf", residual=True, dtype="float16"),
        case(8192, 2048, 1024, activation="silu", out_dtype="float32"),
        case(1024, 512, 768, batch=(12,)),
        case(1023, 511, 767, batch=(7,), bias=True, activation="relu"),
        case(512, 768, 768, batch=(16,), shared_rhs=True, residual=True),
    ]
    return (*small, *(dataclasses.replace(c, size="real") for c in real))


MATMUL_CASES = _matmul_cases()


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """An attention, with its masks.

    Attributes:
      batch, queries, keys, heads, kv_heads, head_dim, value_dim: B, T, S, N, K, H, D (None: H).
      dtype: of query, key and value.
      causal, window, soft_cap: as `jaxkernels.dot_product_attention` takes them.
      query_lengths, key_lengths, segments: whether these are given; lengths include 0 and the whole.
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
        valued = dict(window=self.window, cap=self.soft_cap, bias=self.bias, mask=self.mask, of=self.bias_dtype)
        parts += [f"{name}_{value}".replace(" ", "") for name, value in valued.items() if value is not None]
        return "-".join(parts)

    @property
    def flops(self) -> int:
        """Of the forward pass; a causal mask halves it, other masks are not counted."""
        per_pair = 2 * (self.head_dim + (self.value_dim or self.head_dim))
        return self.batch * self.heads * self.queries * self.keys * per_pair // (2 if self.causal else 1)

    def shape_of(self, letters: str) -> tuple[int, ...]:
        """The shape a bias or a mask of these letters has."""
        sizes = dict(B=self.batch, N=self.heads, T=self.queries, S=self.keys)
        return tuple(sizes.get(letter, 1) for letter in letters)

    def operands(self, seed: int = 0) -> Operands:
        """query, key, value, and the optional operands under the names of the public function."""
        rng = np.random.default_rng(seed)
        draw = functools.partial(random_array, rng)
        kv_shape = (self.batch, self.keys, self.kv_heads)
        operands = dict(
            query=draw((self.batch, self.queries, self.heads, self.head_dim), self.dtype),
            key=draw((*kv_shape, self.head_dim), self.dtype),
            value=draw((*kv_shape, self.value_dim or self.head_dim), self.dtype),
        )
        if self.bias is not None:
            operands["bias"] = draw(self.shape_of(self.bias), self.bias_dtype or self.dtype)
        if self.mask is not None:
            mask = rng.random(self.shape_of(self.mask)) < 0.7
            if self.masked_rows:
                mask[..., ::3, :] = False
            operands["mask"] = mask
        if self.query_lengths:
            operands["query_seq_lengths"] = np.linspace(self.queries, 0, self.batch, dtype=np.int32)
        if self.key_lengths:
            operands["key_value_seq_lengths"] = np.linspace(0, self.keys, self.batch, dtype=np.int32)
        if self.segments:  # Documents packed one after the other, cut elsewhere in each row.
            for name, length in (("query_segment_ids", self.queries), ("key_value_segment_ids", self.keys)):
                cuts = rng.random((self.batch, length)) < 0.2
                operands[name] = np.cumsum(cuts, axis=1, dtype=np.int32)
        return operands

    def cotangents(self, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """For the output and for the logsumexp, whose cotangent is float32."""
        rng = np.random.default_rng(seed)
        rows = (self.batch, self.queries, self.heads)
        out = random_array(rng, (*rows, self.value_dim or self.head_dim), self.dtype)
        return out, random_array(rng, rows, "float32", scale=0.1)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not arrays."""
        return dict(is_causal=self.causal, local_window_size=self.window, logits_soft_cap=self.soft_cap)

    def run(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> tuple[jax.Array, jax.Array]:
        """The case by this package: (out, lse)."""
        attention: Callable[..., Any] = jk.dot_product_attention
        return attention(**operands, **self.options, return_lse=True, backend=backend)


def _attention_cases() -> tuple[AttentionCase, ...]:
    case = AttentionCase
    small = [
        # Grouped heads, lengths that differ, length 1.
        case(2, 24, 40, 6, 6, 16),
        case(2, 24, 40, 6, 2, 16, causal=True),
        case(2, 40, 24, 6, 1, 16, causal=True, dtype="float16"),
        case(3, 1, 40, 4, 2, 32),
        case(3, 24, 1, 4, 2, 32, causal=True),
        case(1, 1, 1, 3, 3, 16),
        # Head dimensions.
        case(1, 33, 65, 2, 1, 64, causal=True),
        case(1, 33, 65, 2, 1, 80),
        case(1, 33, 65, 2, 2, 96, dtype="float16"),
        case(1, 65, 33, 2, 1, 128, dtype="float32"),
        case(1, 33, 65, 2, 1, 256, causal=True),
        case(2, 24, 40, 4, 2, 48, value_dim=32, causal=True),
        case(2, 24, 40, 4, 2, 16, value_dim=64, dtype="float32"),
        # Windows.
        case(2, 40, 40, 4, 2, 16, window=(5, 3)),
        case(2, 40, 40, 4, 2, 16, window=(5, None), causal=True, dtype="float32"),
        case(2, 24, 40, 4, 2, 16, window=(None, 2)),
        case(2, 40, 24, 4, 2, 16, window=(3, 0)),  # The last queries see no key.
        # Lengths.
        case(3, 24, 40, 4, 2, 16, key_lengths=True),
        case(3, 24, 40, 4, 2, 16, query_lengths=True, dtype="float32"),
        case(3, 24, 40, 4, 2, 16, query_lengths=True, key_lengths=True, causal=True, dtype="float16"),
        # Masks.
        case(2, 24, 40, 4, 2, 16, mask="BNTS", masked_rows=True),
        case(2, 24, 40, 4, 2, 16, mask="B11S", dtype="float32"),
        case(2, 24, 40, 4, 2, 16, mask="11TS", masked_rows=True, causal=True, dtype="float16"),
        case(2, 24, 192, 4, 1, 64, mask="1N1S"),  # 192 % 128 == 64
        # Biases of every kind of broadcast.
        *(
            case(2, 12, 20, 4, 2, 16, bias=letters, dtype=dtype, causal=letters == "1NTS")
            for letters, dtype in [
                ("BNTS", "bfloat16"),
                ("1NTS", "float32"),
                ("B1TS", "float16"),
                ("11TS", "bfloat16"),
                ("B11S", "float32"),
                ("1N1S", "bfloat16"),
                ("BNT1", "float32"),
                ("1111", "float32"),
            ]
        ),
        case(2, 12, 20, 4, 1, 16, bias="1NTS", bias_dtype="float32"),
        # Segments and soft cap.
        case(2, 40, 40, 4, 2, 16, segments=True, causal=True),
        case(2, 24, 40, 4, 2, 16, segments=True, dtype="float32"),
        case(2, 24, 40, 4, 2, 16, soft_cap=2.5),
        case(2, 24, 40, 4, 2, 16, soft_cap=2.5, bias="1NTS", mask="B1TS", causal=True, dtype="float32"),
        # Everything at once.
        case(
            3, 24, 40, 6, 2, 16, value_dim=32, dtype="float32", causal=True, window=(9, None), soft_cap=5.0,
            query_lengths=True, key_lengths=True, segments=True, bias="BNTS", mask="1NTS", masked_rows=True,
        ),
    ]  # fmt: skip
    real = [
        case(4, 1024, 1024, 16, 16, 64, causal=True),
        case(4, 1024, 1024, 16, 16, 128, causal=True, dtype="float16"),
        case(2, 1024, 1024, 8, 8, 256, causal=True),
        case(1, 4096, 4096, 16, 16, 128),
        case(1, 4096, 4096, 16, 4, 128, causal=True),
        case(1, 4096, 4096, 16, 1, 64, causal=True),
        case(2, 799, 1023, 12, 4, 64, causal=True),
        case(2, 1023, 799, 12, 12, 128),
        case(2, 1000, 1000, 8, 8, 80, causal=True),
        case(2, 1000, 1000, 8, 2, 96, dtype="float16"),
        case(8, 1, 4096, 32, 8, 128),
        case(2, 1024, 1024, 16, 8, 192, value_dim=128, causal=True),
        case(2, 2048, 2048, 16, 8, 128, window=(255, 0), causal=True),
        case(2, 1024, 1088, 8, 4, 64, mask="B1TS", masked_rows=True),
        case(4, 1024, 1024, 8, 4, 64, query_lengths=True, key_lengths=True, causal=True),
        case(4, 2048, 2048, 8, 4, 128, segments=True, causal=True),
        case(2, 1024, 1024, 8, 4, 128, bias="1NTS", causal=True),
        case(2, 1024, 1024, 8, 4, 64, bias="B11S", bias_dtype="float32"),
        case(2, 1024, 1024, 8, 4, 128, soft_cap=30.0, causal=True),
        case(2, 1024, 1024, 8, 4, 64, dtype="float32", causal=True),
    ]
    return (*small, *(dataclasses.replace(c, size="real") for c in real))


ATTENTION_CASES = _attention_cases()
