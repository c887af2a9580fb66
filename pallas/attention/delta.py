"""The kernel before the fused backward pass: computes rowsum(dO * O), and fills dQ's sum with zeros if needed.

Both are bound by memory: two arrays are read, and one with twice the bytes of each is written. XLA would take a kernel
for each. Or it would fuse the sums into a concatenation, where one thread computes a whole sum, which takes seven times
as long. A CTA has 64 queries of one head. An SM holds enough CTAs at once to hide memory latency.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxkernels.pallas.attention.layouts import ROWS, TILE, TRANSFORMS_FLOAT32, swizzle_span, transforms_of
from jaxkernels.pallas.names import named_kernel

__all__ = ["row_sums"]

_ROWS = 64


def row_sums(
    out: Float[Array, "B T N D"], dout: Float[Array, "B T N D"], zeros_dim: int | None
) -> tuple[Float32[Array, "B N T"], Float32[Array, "B T N H"] | None]:
    """Returns the sums of out * dout along D, with queries padded to whole blocks, and zeros.

    Args:
      out, dout: padded by `pad_heads`.
      zeros_dim: H, a multiple of 32, or None for no zeros.
    """
    batch, num_queries, num_heads, _ = out.shape
    num_blocks = pl.cdiv(num_queries, _ROWS)
    results = plgpu.kernel(
        named_kernel("attention_row_sums", _kernel),
        out_type=[
            # Whole blocks: Mosaic clips a store of contiguous bytes at the end of the array, not of the row.
            jax.ShapeDtypeStruct((batch, num_heads, num_blocks * _ROWS), jnp.float32),
            *([jax.ShapeDtypeStruct((batch, num_queries, num_heads, zeros_dim), jnp.float32)] if zeros_dim else []),
        ],
        grid=(num_heads, num_blocks, batch),
        grid_names=("head", "block", "batch"),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )(out, dout)
    sums, zeros = results if zeros_dim else (*results, None)
    return sums, zeros


def _kernel(out_gmem: Any, dout_gmem: Any, sums_gmem: Any, zeros_gmem: Any = None) -> None:
    columns, zeros_dim = out_gmem.shape[3], 0 if zeros_gmem is None else zeros_gmem.shape[3]
    # Columns that are multiplied and summed at once, and columns of a tile of zeros.
    span, zeros_span = swizzle_span(columns), swizzle_span(zeros_dim)
    batch, block, head = (lax.axis_index(name) for name in ("batch", "block", "head"))
    rows = pl.ds(block * _ROWS, _ROWS)

    def scope(out_smem: Any, dout_smem: Any, zeros_smem: Any, sums_smem: Any, full: Any) -> None:
        plgpu.copy_gmem_to_smem(out_gmem.at[batch, rows, head], out_smem, full)
        plgpu.copy_gmem_to_smem(dout_gmem.at[batch, rows, head], dout_smem, full)
        if zeros_gmem is not None:
            zeros_smem[...] = plgpu.layout_cast(jnp.zeros((_ROWS, zeros_span), jnp.float32), TILE)
            plgpu.commit_smem()
            for first in range(0, zeros_dim, zeros_span):
                plgpu.copy_smem_to_gmem(zeros_smem, zeros_gmem.at[batch, rows, head, pl.ds(first, zeros_span)])
        plgpu.barrier_wait(full)
        sums = plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), ROWS)
        for first in range(0, columns, span):
            part = pl.ds(first, span)
            out, dout = (plgpu.load(smem.at[:, part], layout=TILE) for smem in (out_smem, dout_smem))
            sums += (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=1)
        sums_smem[...] = sums
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums_smem, sums_gmem.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tile = functools.partial(plgpu.SMEM, (_ROWS, columns), transforms=transforms_of(columns))
    pl.run_scoped(
        scope,
        tile(out_gmem.dtype),
        tile(dout_gmem.dtype),
        plgpu.SMEM((_ROWS, zeros_span), jnp.float32, transforms=TRANSFORMS_FLOAT32) if zeros_dim else None,
        plgpu.SMEM((_ROWS,), jnp.float32),
        plgpu.Barrier(num_arrivals=2),
    )
