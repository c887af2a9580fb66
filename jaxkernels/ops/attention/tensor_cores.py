"""The attentions that kernels for Hopper take."""

from __future__ import annotations

import jax.numpy as jnp

from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["unsupported"]

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
#: The error of a capped logit is 2^-21 of the cap or less: 5e-4 for this cap.
_LARGEST_CAP = 1000.0
#: The largest number of queries or keys. Planning a longer sequence takes minutes, and its items overflow 32 bits.
_MAX_LENGTH = 2**28


def unsupported(spec: AttentionSpec, *, operands: str | None, cap_bits: int) -> str | None:
    """Why a kernel for Hopper cannot compute the spec, or None.

    Args:
      operands: why the kernel does not take the spec's operands and terms, or None.
      cap_bits: the kernel's tanh has an error of 2^-cap_bits.
    """
    if not spec.target.is_hopper:
        return f"needs a GPU of compute capability 9.0 (Hopper), the target is {spec.target}"
    if spec.q.dtype not in _DTYPES:
        return f"takes bfloat16 or float16, not {spec.q.dtype}"
    if operands is not None:
        return operands
    if spec.scale <= 0:
        return f"needs a positive scale, got {spec.scale}"
    if spec.soft_cap is not None and spec.soft_cap > _LARGEST_CAP:
        return (
            f"soft_cap must be at most {_LARGEST_CAP:g}: the kernel's tanh resolves 2^-{cap_bits} of the cap; "
            f"got {spec.soft_cap:g}"
        )
    if max(spec.q.shape[3], spec.v.shape[3]) > 256:
        return f"handles head dimensions up to 256, got {spec.q.shape[3]} and {spec.v.shape[3]}"
    if reason := spec.unsupported_sizes():
        return reason
    if (longest := max(spec.q.shape[1], spec.k.shape[1])) > _MAX_LENGTH:
        return f"needs at most {_MAX_LENGTH} queries and keys, got {longest}"
    return None
