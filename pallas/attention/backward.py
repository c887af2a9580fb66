"""The work around the kernels of attention's backward pass, shared by all designs.

P = exp(c S - lse) is recomputed from the saved logsumexp. With dP = dO V^T and delta = rowsum(dO * O) - dlse, the
gradient of the logits is dS = P * (dP - delta), and

    dQ = c dS K          dK = c dS^T Q          dV = P^T dO

There are three designs:

    backward_fused         one kernel, five products for each block, up to head dimension 128. dQ is summed in any
                           order, or in a fixed order, which is slower.
    backward_two_kernels   seven products in two kernels. Each sums in registers, in a fixed order. No windows, lengths,
                           segments or soft cap.
    backward_wide          two kernels above head dimension 128. The accumulators of dK and dV are in the registers of
                           two warpgroups.

XLA does the rest. Before the kernels it sets padding to zero, since it may hold NaN, and sets the logsumexp of queries
that see no key to infinity. Afterwards it adds the contribution of these queries to dV. If there are too few key heads
for all SMs, it also splits groups of query heads into parts, and sums the gradients of the parts.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.ops.attention.blind import mean_gradient
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.ops.attention.visibility import keys_inside, may_see_nothing, queries_inside
from jaxkernels.pallas.attention.limits import pad_heads, padded_head_dims
from jaxkernels.pallas.attention.logits import LOG2E

__all__ = ["Given", "Operands", "add_up", "gradients", "in_parts", "with_parts"]

#: A split into more parts must be faster by this factor, by the model.
_GAIN_OF_PARTS = 1.05


class Operands(NamedTuple):
    """The operands of the kernels, padded as TMA requires.

    Attributes:
      q, k, v, dout: (B, T or S, heads, columns).
      lse: (B, N, T), in base 2; infinite for padding queries and for queries that see no key.
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
      is_query: (B, T), False for padding; None if there is no padding.
      num_parts: the number of parts of a group of query heads.
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
        """Takes the primitive's operands: q, k, v, the optional operands, out, lse, dout, dlse."""
        if spec.group_size % num_parts:
            raise ValueError(
                f"attention_backward[pallas]: group_parts must divide the {spec.group_size} query heads of a key head; "
                f"got {num_parts}."
            )
        named = spec.named("attention_backward", operands)
        q, k, v, out, lse, dout, dlse = (named[name] for name in ("q", "k", "v", "out", "lse", "dout", "dlse"))
        extras = {name: named[name] for name in spec.extra_names}
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
      sums: rowsum(dO * O), from `add_up` or from a kernel.
      kernels: the design's kernels. Their spec has a key head for each part of a group. They return padded gradients.
      head_multiple: head dimensions are padded to multiples of this.
    """
    spec, num_parts = given.spec, given.num_parts
    lse, delta, of_means = given.lse, sums - given.dlse, None
    if spec.query_lengths or may_see_nothing(spec):
        # A query that sees no key contributes to dV only. With an infinite lse its P is 0, and with delta = 0 its dS.
        is_blind = lse <= MASKED_LOGIT / 2
        if given.is_query is not None:
            is_blind |= ~given.is_query[:, None]
        if may_see_nothing(spec):
            of_means = mean_gradient(spec, given.dout, is_blind)
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
    if of_means is not None:
        dv = (dv.astype(jnp.float32) + of_means).astype(dv.dtype)
    return [dq, dk, dv]


def add_up(given: Given) -> Float[Array, "B N T"]:
    """rowsum(dO * O), computed by XLA."""
    return jnp.swapaxes(jnp.sum(given.out.astype(jnp.float32) * given.dout.astype(jnp.float32), axis=-1), 1, 2)


# Parts of groups.


def in_parts(spec: AttentionSpec, num_parts: int) -> AttentionSpec:
    """The spec with a head of keys and values for each part of a group of query heads."""
    repeat = lambda x: dataclasses.replace(x, shape=(*x.shape[:2], num_parts * x.shape[2], x.shape[3]))
    return dataclasses.replace(spec, k=repeat(spec.k), v=repeat(spec.v))


def with_parts(spec: AttentionSpec, config: Any, estimate: Callable[[AttentionSpec, Any], float]) -> Any:
    """The configuration with the fewest parts of a group that the model finds about as fast as the fastest.

    Example: 8192 tokens, 8 query heads, one key head. Without parts only 64 SMs have a block of keys each, and with a
    causal mask the first of these has almost twice the average work.
    """
    num_parts = [n for n in range(1, spec.group_size + 1) if spec.group_size % n == 0]
    configs = [dataclasses.replace(config, group_parts=n) for n in num_parts]
    seconds = [estimate(spec, config) for config in configs]
    return next(config for config, time in zip(configs, seconds) if time < _GAIN_OF_PARTS * min(seconds))
