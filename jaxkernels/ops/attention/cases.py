"""Attentions as data, for the tests' tables and the benchmarks' suites."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.cases import Case, Direction, Draw, Operands, Part, Size
from jaxkernels.ops.attention.api import dot_product_attention
from jaxkernels.ops.attention.oracle import plain_attention, plain_attention_by_heads

__all__ = ["CASE", "AttentionCase"]

Alignment = Literal["top_left", "bottom_right"]

#: Elements of the (B, N, T, S) logits that a reference may hold at once: 1 GiB in float64.
_MAX_LOGITS = 2**27


@dataclasses.dataclass(frozen=True)
class AttentionCase(Case):
    """An attention, with its masks.

    Attributes:
      batch, queries, keys, heads, kv_heads, head_dim, value_dim: B, T, S, N, K, H, D (None: H).
      dtype: of query, key and value.
      causal, window, soft_cap, alignment: as `jaxkernels.dot_product_attention` takes them.
      query_lengths, key_lengths, segments: whether these are given.
      shortest: the shortest length as a share of the longest, which is the whole; lengths between are evenly spaced.
      documents: how many segments a row holds, of lengths in the ratio 1 : 2 : 3 : ...; 0: cut at random.
      equal_documents: whether they are of one length.
      bias, mask: shape as four letters of "BNTS", "1" where it broadcasts; None: not given.
      bias_dtype: the bias's; None: the query's.
      masked_rows: whether the mask hides every key from some queries.
      size: "small", or "real" for sizes only a GPU computes in reasonable time.
    """

    kind: ClassVar[str] = "attention"
    form: ClassVar[str] = "BxSxNxH or BxTxSxNxKxH, then any of :causal :DTYPE :backward"
    one_reference: ClassVar[bool] = True

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
    alignment: Alignment = "top_left"
    query_lengths: bool = False
    key_lengths: bool = False
    shortest: float = 0.0
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
        parts += [self.alignment] if self.alignment != "top_left" else []
        parts += [f"from_{self.shortest:g}"] if self.shortest else []
        parts += [f"{self.documents}{'equal' * self.equal_documents}documents"] if self.documents else []
        valued = dict(window=self.window, cap=self.soft_cap, bias=self.bias, mask=self.mask, of=self.bias_dtype)
        parts += [f"{name}_{value}".replace(" ", "") for name, value in valued.items() if value is not None]
        return "-".join(parts)

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, in one head of the whole batch.

        By convention a causal mask alone leaves half of them if there are as many keys as queries. Windows, documents
        and other causal masks are counted exactly; lengths, random segments and masks are not counted.
        """
        causal, window = self.causal, self.window or (None, None)
        if self.documents:
            starts = self._document_starts(self.keys)
            squares = sum((end - start) ** 2 for start, end in zip(starts, (*starts[1:], self.keys)))
            return self.batch * squares * (0.5 if causal else 1)
        if window == (None, None) and not (causal and self.queries != self.keys):
            return self.batch * self.queries * self.keys * (0.5 if causal else 1)
        i = np.arange(self.queries) + self.query_offset
        first = 0 if window[0] is None else np.maximum(i - window[0], 0)
        last = self.keys - 1 if window[1] is None else np.minimum(i + window[1], self.keys - 1)
        last = np.minimum(last, i) if causal else last
        return float(self.batch * np.sum(np.maximum(last - first + 1, 0)))

    @property
    def query_offset(self) -> int:
        """The place of the first query, from which a causal mask and a window count."""
        return self.keys - self.queries if self.alignment == "bottom_right" else 0

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
            rows = np.arange(mask.shape[-2])  # Each query sees a key, also under a causal mask.
            mask[..., rows, np.minimum(rows, mask.shape[-1] - 1)] = True
            if self.masked_rows:
                mask[..., ::3, :] = False
            operands["mask"] = mask
        if self.query_lengths:
            shortest = round(self.shortest * self.queries)
            operands["query_seq_lengths"] = np.linspace(self.queries, shortest, self.batch, dtype=np.int32)
        if self.key_lengths:
            shortest = round(self.shortest * self.keys)
            operands["key_value_seq_lengths"] = np.linspace(shortest, self.keys, self.batch, dtype=np.int32)
        if self.segments:  # Documents packed one after the other, cut elsewhere in each row if at random.
            for name, length in (("query_segment_ids", self.queries), ("key_value_segment_ids", self.keys)):
                if self.documents:
                    cuts = np.zeros((self.batch, length), bool)
                    cuts[:, self._document_starts(length)[1:]] = True
                else:
                    cuts = rng.random((self.batch, length)) < 0.2
                operands[name] = np.cumsum(cuts, axis=1, dtype=np.int32)
        return operands

    def cotangents(self, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """For the output and for the logsumexp, whose cotangent is float32."""
        rng = np.random.default_rng(seed)
        return self.out_type.from_numpy(rng), Draw(self.out_type.shape[:-1], "float32", scale=0.1).from_numpy(rng)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not arrays."""
        return dict(
            is_causal=self.causal,
            local_window_size=self.window,
            logits_soft_cap=self.soft_cap,
            alignment=self.alignment,
        )

    def run(self, operands: dict[str, jax.Array], *, return_lse: bool = True, **options: Any) -> Any:
        """The case by this package: (out, lse), or out alone; `options` are more of the function's."""
        if self.documents and self.queries == self.keys:  # Of one sequence, whose ids are one array.
            operands = operands | dict(key_value_segment_ids=operands["query_segment_ids"])
        return dot_product_attention(**operands, **self.options, return_lse=return_lse, **options)

    @classmethod
    def parse(cls, sizes: Sequence[int], options: Mapping[str, Any], words: Sequence[str]) -> AttentionCase | None:
        if len(sizes) not in (4, 6) or not {*words} <= {"causal"}:
            return None
        if len(sizes) == 4:
            batch, length, heads, head_dim = sizes
            sizes = [batch, length, length, heads, heads, head_dim]
        batch, queries, keys, heads, kv_heads, head_dim = sizes
        if heads % kv_heads:
            raise ValueError("query heads must be a multiple of key/value heads")
        return cls(batch, queries, keys, heads, kv_heads, head_dim, causal="causal" in words, **options)

    @property
    def description(self) -> str:
        lengths = f"S{self.keys}" if self.queries == self.keys else f"T{self.queries} S{self.keys}"
        heads = f"N{self.heads}" if self.heads == self.kv_heads else f"N{self.heads}/{self.kv_heads}"
        head = f"H{self.head_dim}" if self.value_dim is None else f"H{self.head_dim} D{self.value_dim}"
        words = [f"B{self.batch} {lengths} {heads} {head}", "causal" if self.causal else "full"]
        words += [self.alignment.replace("_", " ")] if self.alignment != "top_left" else []
        words += [f"cap {self.soft_cap:g}"] if self.soft_cap is not None else []
        words += [f"window {self.window[0]},{self.window[1]}"] if self.window else []
        words += [f"{self.documents} {'equal ' * self.equal_documents}documents"] if self.documents else []
        words += ["segments"] if self.segments and not self.documents else []
        words += ["query lengths"] * self.query_lengths + ["key lengths"] * self.key_lengths
        words += [f"from {self.shortest:.0%}"] if self.shortest else []
        words += [f"bias {self.bias}"] if self.bias else []
        words += [self.bias_dtype] if self.bias and self.bias_dtype else []
        words += [f"mask {self.mask}"] if self.mask else []
        words += ["masked rows"] if self.masked_rows else []
        return " ".join(words)

    @property
    def moving(self) -> tuple[str, ...]:
        return ("query", "key", "value")

    @property
    def gradient_flops(self) -> float:
        """Five products for two, one of them the logits again (Dao 2023, arXiv:2307.08691, section 4.1)."""
        return 2.5 * self.flops

    @property
    def num_exps(self) -> float:
        """One for each pair of a query and a key that it sees."""
        return self.heads * self.pairs

    def num_bytes(self, direction: Direction) -> int:
        operands = {name: draw.num_bytes for name, draw in self.draws.items()}
        out = self.out_type.num_bytes
        if direction == "forward":
            return sum(operands.values()) + out
        lse = self.batch * self.queries * self.heads * 4
        return sum(operands[name] for name in self.moving) + sum(operands.values()) + 2 * out + lse

    def forward(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> jax.Array:
        return self.run(operands, return_lse=False, backend=backend)

    def letters(self, name: str, num_axes: int) -> str:
        letters = dict(query="BTN", key="BSK", value="BSK", out="BTN", bias="BN", mask="BN").get(name, "B")
        return letters.ljust(num_axes)

    def part_to_check(self, *, is_gradient: bool = False) -> Part:
        """The last rows of the batch and the last heads, at least one of each.

        Heads come in whole groups, so that gradients of keys are whole.
        """
        del is_gradient
        group_size = self.heads // self.kv_heads
        affordable = max(_MAX_LOGITS // (self.queries * self.keys * group_size), 1)
        kv_heads = min(self.kv_heads, affordable)
        batch = min(self.batch, max(affordable // kv_heads, 1))
        if (batch, kv_heads) == (self.batch, self.kv_heads):
            return Part(self)
        part = dataclasses.replace(self, batch=batch, kv_heads=kv_heads, heads=kv_heads * group_size)
        described = f"the last {batch} of {self.batch} batch rows, the last {part.heads} of {self.heads} heads"
        last = dict(B=batch, N=part.heads, K=kv_heads)
        return Part(part, described, tuple((letter, slice(-count, None)) for letter, count in last.items()))

    def for_reference(self) -> AttentionCase:
        """The case with its causal mask as an operand, so that both share a compiled reference."""
        return self if self.mask is not None else dataclasses.replace(self, causal=False, mask="11TS")

    def with_masks(self, operands: dict[str, Any]) -> dict[str, Any]:
        if "mask" in operands:
            return operands
        if isinstance(operands["query"], jax.ShapeDtypeStruct):
            return operands | {"mask": jax.ShapeDtypeStruct(self.shape_of("11TS"), np.bool)}
        mask = jnp.ones(self.shape_of("11TS"), bool)
        return operands | {"mask": jnp.tril(mask, self.query_offset) if self.causal else mask}

    def plain(self, operands: dict[str, Any]) -> jax.Array:
        return plain_attention(self, operands)[0]

    def reference(self, operands: dict[str, Any]) -> jax.Array:
        return plain_attention_by_heads(self, operands)


CASE = AttentionCase
