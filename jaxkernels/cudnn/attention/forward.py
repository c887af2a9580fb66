"""Attention's forward pass by cuDNN.

cuDNN computes the output and the logsumexp of all queries that see a key. XLA writes the others: the mean of all values
for a query that sees no key, and zero for padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkernels.cudnn import calls
from jaxkernels.cudnn.attention.problem import Config, Inputs, search_space, unsupported
from jaxkernels.ops.attention.blind import mean_of_values
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec

__all__ = ["VERSION", "Config", "run", "search_space", "unsupported"]

VERSION = 1


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
