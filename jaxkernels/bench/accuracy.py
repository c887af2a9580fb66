"""When a result may be called right: references in plain JAX, and the rule for the distance from them.

A kernel may be at most twice as far from a reference in float64 as the same formula in plain JAX and the operands' own
dtype is. The tests hold every kernel to it, and a benchmark times nothing that breaks it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.bench.cases import AttentionCase, MatmulCase

__all__ = [
    "ALLOWED", "Part", "error_ratio", "largest_difference", "part_to_check", "plain_attention",
    "plain_attention_by_heads", "plain_matmul", "visible_keys", "widen",
]  # fmt: skip

#: The largest `error_ratio` that is accepted.
ALLOWED = 2.0

#: Elements of the (B, N, T, S) logits that a reference may hold at once: 1 GiB in float64.
_MAX_LOGITS = 2**27

#: FLOPs that the reference of a product may take: some 20 ms of an H200's float64 tensor cores.
_MAX_FLOPS = 1e12

_ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: jnp.maximum(x, 0),
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * jax.lax.erfc(-x / np.sqrt(2).astype(x.dtype)),
}

_MASKED = float(-0.7 * np.finfo(np.float32).max)  # As jax.nn's: finite, so that a row without keys is a mean.


def plain_matmul(case: MatmulCase, operands: dict[str, Any]) -> jax.Array:
    """`case` as jnp operations in the dtype of the operands."""
    lhs, rhs = operands["lhs"], operands["rhs"]
    out_dtype, precision = jnp.dtype(case.out_dtype or case.dtype), case.dot_precision
    if lhs.dtype != jnp.dtype(case.dtype):  # The operands have been widened: widen the rest too.
        out_dtype, precision = lhs.dtype, None
    wide = jnp.promote_types(lhs.dtype, out_dtype)
    if case.lhs_layout == "km":
        lhs = jnp.swapaxes(lhs, -1, -2)
    turned = lambda x: jnp.swapaxes(x, -1, -2) if case.rhs_layout == "nk" else x
    product = lambda rhs: jnp.matmul(lhs, turned(rhs), precision=precision, preferred_element_type=wide).astype(
        out_dtype
    )
    out = case.alpha * product(rhs)
    if case.bias:
        out = out + operands["bias"].astype(out_dtype)
    out = _ACTIVATIONS[case.activation](out)
    if case.residual:
        out = out + operands["residual"].astype(out_dtype)
    if case.gate:
        out = out * product(operands["gate"])
    return out


def plain_attention(case: AttentionCase, operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """`case` with every array of logits spelled out: (out, lse)."""
    q, k, v = operands["query"], operands["key"], operands["value"]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    group_size = case.heads // case.kv_heads
    k, v = jnp.repeat(k, group_size, axis=2), jnp.repeat(v, group_size, axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=dtype) / np.sqrt(case.head_dim).astype(dtype)
    if case.bias is not None:
        logits = logits + operands["bias"].astype(dtype)
    if case.soft_cap is not None:
        logits = case.soft_cap * jnp.tanh(logits / case.soft_cap)
    logits = jnp.where(visible_keys(case, operands), logits, _MASKED)
    lse = jax.nn.logsumexp(logits, axis=-1)
    out = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1).astype(k.dtype), v)
    if case.query_lengths:
        is_real = np.arange(case.queries) < operands["query_seq_lengths"][:, None]
        out = jnp.where(is_real[:, :, None, None], out, 0)
    return out, jnp.moveaxis(lse, 1, 2)


def plain_attention_by_heads(case: AttentionCase, operands: dict[str, Any]) -> jax.Array:
    """The output of `plain_attention`, one head after the other: one head's logits in memory at a time."""
    one = dataclasses.replace(case, heads=1, kv_heads=1)
    head_axis = dict(query=2, key=2, value=2, bias=1, mask=1)

    @jax.checkpoint
    def head(n: jax.Array) -> jax.Array:
        of_head = dict(operands)
        for name, axis in head_axis.items():
            if name in operands and operands[name].shape[axis] > 1:
                group_size = case.heads // operands[name].shape[axis]
                of_head[name] = jax.lax.dynamic_slice_in_dim(operands[name], n // group_size, 1, axis)
        return plain_attention(one, of_head)[0][:, :, 0]

    return jnp.moveaxis(jax.lax.map(head, jnp.arange(case.heads)), 0, 2)


def visible_keys(case: AttentionCase, operands: dict[str, Any]) -> jax.Array:
    """Which query sees which key: (B, N, T, S) bool."""
    i, j = np.arange(case.queries)[:, None], np.arange(case.keys)[None, :]
    visible = jnp.ones(case.shape_of("BNTS"), bool)
    if case.causal:
        visible &= j <= i
    if case.window is not None:
        left, right = case.window
        visible &= i - j <= (case.keys + case.queries if left is None else left)
        visible &= j - i <= (case.keys + case.queries if right is None else right)
    if case.mask is not None:
        visible &= operands["mask"]
    if case.query_lengths:
        visible &= i < operands["query_seq_lengths"][:, None, None, None]
    if case.key_lengths:
        visible &= j < operands["key_value_seq_lengths"][:, None, None, None]
    if case.segments:
        of_queries, of_keys = operands["query_segment_ids"], operands["key_value_segment_ids"]
        visible &= of_queries[:, None, :, None] == of_keys[:, None, None, :]
    return visible


@dataclasses.dataclass(frozen=True)
class Part:
    """What is checked of a result.

    Attributes:
      case: the part, as a case of its own.
      description: for the record: "all", or which part.
      slices: (letter, slice) of each axis that is not taken whole.
    """

    case: MatmulCase | AttentionCase
    description: str = "all"
    slices: tuple[tuple[str, slice], ...] = ()

    def of(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The part of operands, results or gradients ("d_query"); axes of length 1, which broadcast, stay."""
        slices, taken = dict(self.slices), {}
        for name, x in arrays.items():
            letters = self._letters(name.removeprefix("d_"), x.ndim)
            taken[name] = x[
                tuple(slices.get(y, slice(None)) if size > 1 else slice(None) for y, size in zip(letters, x.shape))
            ]
        return taken

    def _letters(self, name: str, num_axes: int) -> str:
        if isinstance(self.case, AttentionCase):
            letters = dict(query="BTN", key="BSK", value="BSK", out="BTN", bias="BN", mask="BN").get(name, "B")
            return letters.ljust(num_axes)
        letters = dict(lhs=self.case.lhs_layout, out="mn", residual="mn").get(name, "")
        return letters.rjust(num_axes)


def part_to_check(case: MatmulCase | AttentionCase, *, is_gradient: bool = False) -> Part:
    """The part of a result that a reference has time and memory for.

    Of an attention that is the last rows of the batch and the last heads, at least one of each; heads come in whole
    groups, so that gradients of keys are whole. Of a product it is every so many-th row, up to the last, at least one
    in a warpgroup's 64; its gradients are checked in whole.
    """
    if isinstance(case, MatmulCase):
        step = min(math.ceil(case.flops / _MAX_FLOPS), 61) | 1  # Odd: tiles begin at even rows.
        if step == 1 or is_gradient:
            return Part(case)
        rows = slice((case.m - 1) % step, None, step)
        part = dataclasses.replace(case, m=len(range(case.m)[rows]))
        return Part(part, f"one of {step} rows", (("m", rows),))
    group_size = case.heads // case.kv_heads
    affordable = max(_MAX_LOGITS // (case.queries * case.keys * group_size), 1)
    kv_heads = min(case.kv_heads, affordable)
    batch = min(case.batch, max(affordable // kv_heads, 1))
    if (batch, kv_heads) == (case.batch, case.kv_heads):
        return Part(case)
    part = dataclasses.replace(case, batch=batch, kv_heads=kv_heads, heads=kv_heads * group_size)
    described = f"the last {batch} of {case.batch} batch rows, the last {part.heads} of {case.heads} heads"
    last = dict(B=batch, N=part.heads, K=kv_heads)
    return Part(part, described, tuple((letter, slice(-count, None)) for letter, count in last.items()))


def widen(operands: Any) -> Any:
    """The floating-point operands in float64 (under `jax.enable_x64`)."""
    return jax.tree.map(lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, operands)


def largest_difference(x: jax.Array, reference: jax.Array) -> jax.Array:
    """max|x - reference|, NaN if either has a NaN or an infinity (under `jax.enable_x64`)."""
    return jnp.max(jnp.abs(x.astype(reference.dtype) - reference))


def error_ratio(distance: float, plain_distance: float, largest: float, dtype: Any) -> float:
    """How far a result is from the reference, in units of how far plain JAX is; at most `ALLOWED` is right.

    max|x - reference| / (max|plain - reference| + a little of the largest value). That little is an eighth of the
    dtype's ulp, and for float32 the 2^-21 that a sum of float32 terms may lose where plain JAX happens to lose less:
    tensor cores truncate their float32 accumulators, while XLA may split the same sum.

    Args:
      distance: max|x - reference|; NaN where x has a NaN or an infinity that the reference lacks.
      plain_distance: max|plain - reference|.
      largest: max|reference|.
      dtype: the result's.
    """
    unit = plain_distance + max(float(jnp.finfo(dtype).eps) / 4, 2.0**-20) * largest / ALLOWED
    return float(distance / unit) if unit else (0.0 if distance == 0 else float("inf"))
