"""The limits of the attention kernels, and the padding of head dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = [
    "features",
    "least_head_multiple",
    "pad_heads",
    "padded_head_dims",
    "unsupported",
]

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
#: The error of capped logits is 2^-21 of the cap (`logits._cap`): 5e-4 for this cap.
_LARGEST_CAP = 1000.0
#: The largest number of queries or keys. Planning a longer sequence takes minutes, and its items overflow 32 bits.
_MAX_LENGTH = 2**28


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
    if not spec.target.is_hopper:
        return f"needs a GPU of compute capability 9.0 (Hopper), the target is {spec.target}"
    if spec.q.dtype not in _DTYPES:
        return f"takes bfloat16 or float16, not {spec.q.dtype}"
    operands = {"a bias": spec.bias is not None, "a dense mask": spec.mask is not None}
    if missing := [name for name, is_given in operands.items() if is_given]:
        way_out = "; is_causal, a window, lengths or segments are fast in its place" if spec.mask is not None else ""
        return f"does not handle {', '.join(missing)} yet{way_out}"
    if spec.scale <= 0:
        return f"needs a positive scale, got {spec.scale}"
    if spec.soft_cap is not None and spec.soft_cap > _LARGEST_CAP:
        return (
            f"soft_cap must be at most {_LARGEST_CAP:g}: the kernel's tanh resolves 2^-21 of the cap; "
            f"got {spec.soft_cap:g}"
        )
    if max(spec.q.shape[3], spec.v.shape[3]) > 256:
        return f"handles head dimensions up to 256, got {spec.q.shape[3]} and {spec.v.shape[3]}"
    if not all(isinstance(size, int) for size in (*spec.q.shape, *spec.k.shape, *spec.v.shape)):
        return "needs static shapes"
    if 0 in (*spec.q.shape, *spec.k.shape, *spec.v.shape):
        return "has no work in an empty attention"
    if (longest := max(spec.q.shape[1], spec.k.shape[1])) > _MAX_LENGTH:
        return f"needs at most {_MAX_LENGTH} queries and keys, got {longest}"
    return None


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
