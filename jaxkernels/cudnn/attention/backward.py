"""Attention's backward pass by cuDNN.

cuDNN computes P = exp(S - lse), dP = dO V^T and dS = P * (dP - rowsum(dO * O)), and from dS the gradients. It has no
operand for the logsumexp's cotangent, which belongs to dP: dS = P * (dP - rowsum(dO * O) + dlse). Further columns of
the heads bring it in. There dO holds dlse, V holds ones, O, Q and K hold zeros:

    [dO dlse] [V 1]^T = dP + dlse        rowsum([dO dlse] * [O 0]) = rowsum(dO * O)

An infinite logsumexp makes P zero for queries that see no key. XLA adds their contribution to dV.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxkernels.cudnn import calls
from jaxkernels.cudnn.attention import costs
from jaxkernels.cudnn.attention.costs import Constants, not_estimated
from jaxkernels.cudnn.attention.problem import Config, Inputs, folds_masks, needs_bias, pad_heads, search_space
from jaxkernels.cudnn.attention.problem import unsupported as unsupported_by_both
from jaxkernels.ops.attention import cudnn_limits
from jaxkernels.ops.attention.blind import row_sums
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = [
    "CONSTANTS", "VERSION", "Config", "Constants", "estimate", "not_estimated", "run", "search_space",
    "unsupported",
]  # fmt: skip

VERSION = 1

#: Head dimensions that the logsumexp's cotangent takes: cuDNN's step. It uses `_DLSE_PARTS` of them.
_DLSE_DIMS = 8
#: The cotangent is a sum of so many 16-bit numbers: of 24 bits in bfloat16, of 33 in float16.
_DLSE_PARTS = 3

#: Fitted to 65 times on an H200 (cuDNN 9.19), in docs/benchmarks/attention*.json. Attentions that were left out of a
#: fit are estimated with a median error of 5.3 %; the 90th percentile is 17 %. `launch_seconds` was not fitted.
CONSTANTS = Constants(
    flops_per_sm=4.603e12,
    flops_per_sm_wide=2.973e12,
    logits_per_sm=7.259e9,
    bias_bytes_per_sm=4.9e9,
    item_seconds=1.091e-5,
    memory_bytes=8.839e11,
    launch_seconds=3e-6,
)


def unsupported(spec: AttentionSpec) -> str | None:
    """Why cuDNN cannot compute the gradients, or None."""
    if reason := unsupported_by_both(spec):
        return reason
    num_queries, num_keys, num_heads = spec.q.shape[1], spec.k.shape[1], spec.q.shape[2]
    if needs_bias(spec) and (reason := cudnn_limits.odd_lengths_of_gradients(num_queries, num_keys)):
        return reason
    if spec.bias_gradient:
        assert spec.bias is not None
        whole = (1, num_heads, num_queries, num_keys)
        if spec.bias.shape != whole:
            return f"has the gradient of a bias of shape {whole} only, not of {spec.bias.shape}"
        if folds_masks(spec):
            return "has no gradient of a bias beside masks other than the causal one and lengths"
    largest = cudnn_limits.largest_head_dim(spec.target)
    if spec.lse_gradient and spec.q.shape[3] + _DLSE_DIMS > largest:
        return (
            f"takes the gradient of the logsumexp with head dimensions up to {largest - _DLSE_DIMS}, "
            f"not {spec.q.shape[3]}"
        )
    return None


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds, by the cost model of `jaxkernels.cudnn.attention.costs`: five products."""
    arrays = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    return costs.seconds(spec, constants, widths=3 * spec.q.shape[3] + 2 * spec.v.shape[3], arrays=arrays)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv] (and dbias), of the operands' shapes and dtypes."""
    named = spec.named("attention_backward", operands)
    x = Inputs.of(spec, named)
    lse, _, mean = row_sums(spec, named)
    dout = named["dout"]
    if x.is_query is not None:
        dout = jnp.where(x.is_query[:, :, None, None], dout, 0)
    q, k, v = x.q, x.k, x.v
    out, dout = (pad_heads(y, spec.q.shape[3]) for y in (named["out"], dout))
    if spec.lse_gradient:
        wide = spec.q.shape[3] + _DLSE_DIMS
        q, k, out = (pad_heads(y, wide) for y in (q, k, out))
        v = jnp.concatenate([v, _columns([jnp.ones(v.shape[:3], v.dtype)] * _DLSE_PARTS)], axis=3)
        dout = jnp.concatenate([dout, _columns(_parts(named["dlse"], x, dout.dtype))], axis=3)
    dq, dk, dv, *dbias = calls.backward(
        q, k, v, x.bias, x.lengths, out, lse, dout, scale=spec.scale, masks=x.masks, bias_gradient=spec.bias_gradient
    )  # fmt: skip
    dq, dk, dv = (y[..., : z.shape[3]] for y, z in ((dq, spec.q), (dk, spec.k), (dv, spec.v)))
    if x.is_query is not None:
        dq = jnp.where(x.is_query[:, :, None, None], dq, 0)
    if x.is_key is not None:
        dk, dv = (jnp.where(x.is_key[:, :, None, None], y, 0) for y in (dk, dv))
    if mean is not None:
        dv = (dv.astype(jnp.float32) + mean).astype(dv.dtype)
    return [dq, dk, dv, *dbias]


def _parts(dlse: Float32[Array, "B N T"], x: Inputs, dtype: jnp.dtype) -> list[Float[Array, "B T N"]]:
    """The logsumexp's cotangent as a sum of 16-bit numbers; zero for padding."""
    rest = jnp.swapaxes(dlse, 1, 2)
    if x.is_query is not None:
        rest = jnp.where(x.is_query[:, :, None], rest, 0)
    parts = []
    for _ in range(_DLSE_PARTS):
        # The optimiser must not take the rounding back: in float32 it would leave no rest.
        parts.append(jax.lax.optimization_barrier(rest.astype(dtype)))
        rest = rest - parts[-1].astype(jnp.float32)
    return parts


def _columns(parts: list[Float[Array, "B T N"]]) -> Float[Array, "B T N 8"]:
    """The parts as columns of a head, and zeros."""
    return pad_heads(jnp.stack(parts, axis=3), _DLSE_DIMS)
