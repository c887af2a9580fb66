"""The custom call of cuBLASLt: the one place that knows its attributes (`ffi/cublaslt.cc`)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkernels.ffi import handler

__all__ = ["missing", "multiply"]

#: Bytes of workspace for an algorithm. NVIDIA recommends so many for Hopper (cuBLAS Library, "cuBLAS workspace
#: configuration").
_WORKSPACE_BYTES = 32 * 2**20


@functools.cache
def missing() -> str | None:
    """Why this installation cannot run products by cuBLASLt, or None.

    A machine without a GPU needs nothing, and can lower programs for one that has.
    """
    if (reason := handler.missing_launcher()) is not None:
        return reason
    if not handler.has_cuda_device():
        return None
    if (reason := handler.load_cublaslt()) is not None:
        return f'needs cuBLASLt, and cuda-pathfinder to find it: {reason} (pip install "jaxkernels[cuda13]", or cuda12)'
    return None


def multiply(
    lhs: Float[Array, "*batch m k"],
    rhs: Float[Array, "*batch k n"],
    bias: Float[Array, " n"] | None = None,
    residual: Float[Array, "*batch m n"] | None = None,
    *,
    layouts: tuple[str, str],
    out_dtype: np.dtype,
    alpha: float,
    activation: str | None,
    algorithm: int,
) -> Float[Array, "*batch m n"]:
    """activation(alpha * lhs @ rhs + bias), or alpha * lhs @ rhs + bias + residual, accumulated in float32.

    Args:
      lhs, rhs: of one dtype, bfloat16 or float16; stored as `layouts` says. At most one batch dimension.
      bias, residual: of `out_dtype`. An activation goes without a residual.
      layouts: "mk" or "km", and "kn" or "nk"; the last letter is contiguous.
      out_dtype: the dtype of the operands, or float32.
      alpha: a factor of the product.
      activation: "relu", "gelu" (the one with tanh), or None.
      algorithm: which of cuBLASLt's proposals; 0 is the first.

    Raises (when the program runs): XlaRuntimeError if cuBLASLt has fewer proposals.
    """
    sizes = {axis: size for x, layout in zip((lhs, rhs), layouts) for axis, size in zip(layout, x.shape[-2:])}
    batch = lhs.shape[:-2]
    if handler.has_cuda():
        handler.register()
    results = [
        jax.ShapeDtypeStruct((*batch, sizes["m"], sizes["n"]), out_dtype),
        jax.ShapeDtypeStruct((_WORKSPACE_BYTES,), jnp.uint8),
    ]
    operands = [x for x in (lhs, rhs, bias, residual) if x is not None]
    out, _ = jax.ffi.ffi_call(handler.CUBLASLT_TARGET, results)(
        *operands,
        label="matmul",
        **{name: np.int64(size) for name, size in sizes.items()},
        batch=np.int64(batch[0] if batch else 1),
        lhs_layout=layouts[0],
        rhs_layout=layouts[1],
        dtype=lhs.dtype.name,
        out_dtype=jnp.dtype(out_dtype).name,
        alpha=np.float32(alpha),
        activation=activation or "none",
        has_bias=bias is not None,
        has_residual=residual is not None,
        algorithm=np.int64(algorithm),
        workspace_bytes=np.int64(_WORKSPACE_BYTES),
    )
    return out
