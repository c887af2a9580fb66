"""What the designs of attention's backward pass on Hopper tensor cores share: the work around their kernels.

With P = exp(c S - lse) computed anew from the saved logsumexp, dP = dO V^T and delta = rowsum(dO * O) - dlse, the
gradient of the logits is dS = P * (dP - delta), and

    dQ = c dS K          dK = c dS^T Q          dV = P^T dO

There are three designs:

    backward_fused         one kernel, five products for each block, up to head dimension 128. dQ's sum is in any order,
                           or in a fixed order that is slower.
    backward_two_kernels   seven products in two kernels. Each sums in registers, in a fixed order. No windows, lengths,
                           segments or soft cap.
    backward_wide          two kernels above head dimension 128, where the accumulators of dK and dV are in the
                           registers of two warpgroups.

XLA does the rest: it takes NaN out of padding before the kernels, makes the logsumexp of queries that see no key
infinite, and adds to dV what these queries have averaged. If there are too few heads of keys for all SMs, it also
divides groups of query heads into parts, and adds up the parts' gradients.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.pallas.attention.limits import pad_heads, padded_head_dims
from jaxkernels.pallas.attention.logits import LOG2E
from jaxkernels.pallas.attention.planning import FLOPS_PER_SM, LAUNCH_SECONDS, visible_pairs
from jaxkernels.pallas.attention.visibility import keys_inside, may_see_nothing, queries_inside

__all__ = ["Given", "Operands", "add_up", "gradients", "in_parts", "kernel_seconds", "with_parts"]

#: What more parts of a group must gain, by the model.
_GAIN_OF_PARTS = 1.05
#: What a step takes beside its products: the elementwise part, for which the tensor cores wait.
_STEP_SECONDS = 0.5e-6


class Operands(NamedTuple):
    """What the kernels read, padded as TMA asks.

    Attributes:
      q, k, v, dout: (B, T or S, heads, columns).
      lse: (B, N, T), in base 2; infinite for queries that add nothing to a gradient.
      delta: (B, N, T).
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array


@dataclasses.dataclass(frozen=True)
class Given:
    """The operands of a backward pass, with zeros for padding in q, k, v and dout.

    Attributes:
      extras: the optional operands by name.
      is_query: (B, T), which queries are not padding; None where all are.
      num_parts: in how many parts a group of query heads is dealt with.
    """

    spec: AttentionSpec
    q: jax.Array
    k: jax.Array
    v: jax.Array
    extras: dict[str, jax.Array]
    out: jax.Array
    lse: jax.Array
    dout: jax.Array
    dlse: jax.Array
    is_query: jax.Array | None
    num_parts: int

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Sequence[jax.Array], num_parts: int) -> Given:
        """From the operands of the primitive: the optional ones follow v, then come out, lse, dout and dlse."""
        if spec.group_size % num_parts:
            raise ValueError(
                f"attention_backward[pallas]: group_parts must divide the {spec.group_size} query heads of a key head; "
                f"got {num_parts}."
            )
        q, k, v, *rest = operands
        *given, out, lse, dout, dlse = rest
        extras = dict(zip(spec.extra_names, given))
        is_query = queries_inside(spec, extras) if spec.query_lengths else None
        if is_query is not None:
            q, dout = (jnp.where(is_query[:, :, None, None], x, 0) for x in (q, dout))
        if spec.key_lengths:
            is_key = keys_inside(spec, extras)
            k, v = (jnp.where(is_key[:, :, None, None], x, 0) for x in (k, v))
        return cls(spec, q, k, v, extras, out, lse, dout, dlse, is_query, num_parts)


def gradients(
    given: Given,
    sums: Float[Array, "B N T"],
    kernels: Callable[[AttentionSpec, Operands], Sequence[jax.Array]],
    head_multiple: int = 64,
) -> list[jax.Array]:
    """Returns [dq, dk, dv].

    Args:
      sums: rowsum(dO * O), of `add_up` or of a kernel.
      kernels: the design. It takes the spec with a head of keys for each part of a group, and returns padded gradients.
      head_multiple: to multiples of which head dimensions are padded.
    """
    spec, num_parts = given.spec, given.num_parts
    lse, delta, mean_gradient = given.lse, sums - given.dlse, None
    if spec.query_lengths or may_see_nothing(spec):
        # A query that sees nothing has no gradients but dV's. P is 0, and so must dS be, whatever was averaged.
        is_blind = lse <= MASKED_LOGIT / 2
        if given.is_query is not None:
            is_blind |= ~given.is_query[:, None]
        if may_see_nothing(spec):
            mean_gradient = _mean_gradient(spec, given.dout, is_blind)
        lse, delta = jnp.where(is_blind, jnp.inf, lse), jnp.where(is_blind, 0, delta)
    k, v = given.k, given.v
    if num_parts > 1:
        k, v = (jnp.repeat(x, num_parts, axis=2) for x in (k, v))
    head_dim, value_dim = padded_head_dims(spec, head_multiple)
    rows = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 8)))
    operands = Operands(
        q=pad_heads(given.q, head_dim),
        k=pad_heads(k, head_dim),
        v=pad_heads(v, value_dim),
        dout=pad_heads(given.dout, value_dim),
        lse=rows(lse * LOG2E),
        delta=rows(delta),
    )
    padded = kernels(in_parts(spec, num_parts), operands)
    dq, dk, dv = (grad[:, : x.shape[1], :, : x.shape[3]] for grad, x in zip(padded, (given.q, k, v)))
    if num_parts > 1:
        apart = lambda x: x.reshape(*x.shape[:2], -1, num_parts, x.shape[3])
        dk, dv = (apart(x).sum(3, dtype=jnp.float32).astype(x.dtype) for x in (dk, dv))
    if mean_gradient is not None:
        dv = (dv.astype(jnp.float32) + mean_gradient).astype(dv.dtype)
    return [dq, dk, dv]


def add_up(given: Given) -> Float[Array, "B N T"]:
    """rowsum(dO * O), computed by XLA."""
    return jnp.swapaxes(jnp.sum(given.out.astype(jnp.float32) * given.dout.astype(jnp.float32), axis=-1), 1, 2)


def _mean_gradient(spec: AttentionSpec, dout: jax.Array, is_blind: jax.Array) -> Float[Array, "B 1 K D"]:
    """What queries that see no key, padding aside, add to the gradient of every value: they averaged all of them.

    Args:
      dout: zero in padding.
      is_blind: (B, N, T).
    """
    batch, num_keys, num_kv_heads, value_dim = spec.v.shape
    summed = jnp.where(jnp.swapaxes(is_blind, 1, 2)[..., None], dout.astype(jnp.float32), 0).sum(1)
    return summed.reshape(batch, 1, num_kv_heads, spec.group_size, value_dim).sum(3) / num_keys


# Parts of groups, and the cost model.


def in_parts(spec: AttentionSpec, num_parts: int) -> AttentionSpec:
    """The spec with a head of keys and values for each part of a group of query heads."""
    repeat = lambda x: dataclasses.replace(x, shape=(*x.shape[:2], num_parts * x.shape[2], x.shape[3]))
    return dataclasses.replace(spec, k=repeat(spec.k), v=repeat(spec.v))


def with_parts(spec: AttentionSpec, config: Any, estimate: Callable[[AttentionSpec, Any], float]) -> Any:
    """The configuration with the fewest parts of a group than which no others are much faster, by the model.

    With 8192 tokens, 8 query heads and one key head, 64 SMs would have a block of keys each. With a causal mask the
    first of these would have almost twice the average work.
    """
    num_parts = [n for n in range(1, spec.group_size + 1) if spec.group_size % n == 0]
    configs = [dataclasses.replace(config, group_parts=n) for n in num_parts]
    seconds = [estimate(spec, config) for config in configs]
    return next(config for config, time in zip(configs, seconds) if time < _GAIN_OF_PARTS * min(seconds))


def kernel_seconds(spec: AttentionSpec, *, ctas: int, longest: int, step_flops: float, num_stages: int) -> float:
    """What a kernel takes: the steps of all CTAs over the SMs, or the longest CTA's.

    Args:
      longest: steps of the CTA that has most of them, if nothing were masked.
      step_flops: FLOPs of a step's products.
      num_stages: slots of the ring; with a single one nothing is loaded beside a step.
    """
    step = step_flops / FLOPS_PER_SM + _STEP_SECONDS * (2 if num_stages == 1 else 1)
    steps = longest * pl.cdiv(ctas, spec.target.num_sms)
    if spec.causal:
        average = min(longest, longest * visible_pairs(spec) + 0.5)
        steps = max(longest, average * ctas / spec.target.num_sms)
    return LAUNCH_SECONDS * max(1.0, ctas / spec.target.num_sms) + steps * step
