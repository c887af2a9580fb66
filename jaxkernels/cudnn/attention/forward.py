"""Attention's forward pass by cuDNN.

cuDNN computes the output and the logsumexp of all queries that see a key. XLA writes the others: the mean of all values
for a query that sees no key, and zero for padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkernels.cudnn import calls
from jaxkernels.cudnn.attention import costs
from jaxkernels.cudnn.attention.costs import Constants, not_estimated
from jaxkernels.cudnn.attention.problem import Config, Inputs, search_space, unsupported
from jaxkernels.ops.attention.blind import mean_of_values
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec

__all__ = [
    "CONSTANTS", "VERSION", "Config", "Constants", "estimate", "not_estimated", "run", "search_space",
    "unsupported",
]  # fmt: skip

VERSION = 1

#: Fitted to 77 times on an H200 (cuDNN 9.19), in docs/benchmarks/attention*.json. Attentions that were left out of a
#: fit are estimated with a median error of 6.2 %; the 90th percentile is 11 %. `launch_seconds` was not fitted.
CONSTANTS = Constants(
    flops_per_sm=5.286e12,
    flops_per_sm_wide=5.235e12,
    logits_per_sm=1.635e10,
    bias_bytes_per_sm=3.601e10,
    item_seconds=1.361e-6,
    memory_bytes=3.254e12,
    launch_seconds=3e-6,
)


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds, by the cost model of `jaxkernels.cudnn.attention.costs`: the products q k^T and p v."""
    arrays = ("q", "k", "v", "out")
    widths = spec.q.shape[3] + spec.v.shape[3]
    return costs.seconds(spec, constants, widths=widths, arrays=arrays, divides_keys=True)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [out (B, T, N, D), lse (B, N, T) float32]."""
    named = spec.named("attention_forward", operands)
    x = Inputs.of(spec, named)
    out, lse = calls.forward(x.q, x.k, x.v, x.bias, x.lengths, scale=spec.scale, masks=x.masks)
    out = out[..., : spec.v.shape[3]]
    if x.is_blind is not None:
        mean = mean_of_values(spec, named["v"], named).astype(out.dtype)
        out = jnp.where(jnp.swapaxes(x.is_blind, 1, 2)[..., None], mean, out)
        lse = jnp.where(x.is_blind, MASKED_LOGIT, lse)
    if x.is_query is not None:
        out = jnp.where(x.is_query[:, :, None, None], out, 0)
    return [out, lse]
