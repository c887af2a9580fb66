"""The limits of the attention kernels, and the padding of head dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkernels.ops.attention import tensor_cores
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = [
    "features",
    "least_head_multiple",
    "pad_heads",
    "padded_head_dims",
    "unsupported",
]


def features(spec: AttentionSpec) -> list[str]:
    """Names of the features in the spec that not every kernel supports."""
    asked = {
        "a local window": spec.window is not None,
        "a soft cap": spec.soft_cap is not None,
        "sequence lengths": spec.query_lengths or spec.key_lengths,
        "segment ids": spec.segments,
    }
    asked |= {f"the term {term}": True for term in spec.terms}
    return [name for name, is_asked in asked.items() if is_asked]


def unsupported(spec: AttentionSpec) -> str | None:
    operands = {"a bias": spec.bias is not None, "a dense mask": spec.mask is not None}
    refusal = None
    if missing := [name for name, is_given in operands.items() if is_given]:
        way_out = "; is_causal, a window, lengths or segments are fast in its place" if spec.mask is not None else ""
        refusal = f"does not handle {', '.join(missing)} yet{way_out}"
    return tensor_cores.unsupported(spec, operands=refusal, cap_bits=21)  # `logits._cap`


def pad_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """Pads (B, T, N, H) for TMA's tiles: T to a multiple of 8, H to `head_dim`."""
    add = (-x.shape[1] % 8, head_dim - x.shape[3])
    return jnp.pad(x, ((0, 0), (0, add[0]), (0, 0), (0, add[1]))) if any(add) else x


def padded_head_dims(spec: AttentionSpec, multiple: int = 64) -> tuple[int, int]:
    """Head dimensions of queries and of values, padded to multiples of `multiple`."""
    head_dim, value_dim = spec.q.shape[3], spec.v.shape[3]
    return head_dim + -head_dim % multiple, value_dim + -value_dim % multiple


def least_head_multiple(spec: AttentionSpec) -> int:
    """The padding multiple of head dimensions: 32 if that needs less padding and neither exceeds 128, else 64."""
    wide = padded_head_dims(spec)
    return 32 if max(wide) <= 128 and padded_head_dims(spec, 32) != wide else 64
