"""Writes the output of queries that see no key, the mean of all values of their head, into a finished output.

Usually few or no batch elements have such queries. The kernel neither reads nor writes the other batch elements. A CTA
has some columns of a query head.
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

from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.ops.attention.visibility import (
    blind_are_scattered,
    ends_of,
    first_blind,
    queries_inside,
    query_offset,
)
from jaxkernels.pallas.attention.layouts import ROWS, TILE, swizzle_span, transforms_of
from jaxkernels.pallas.names import named_kernel

__all__ = ["fill_in_means"]

_ROWS = 64
_SLOTS = 4


def fill_in_means(
    spec: AttentionSpec,
    out: Float[Array, "B T N D"],
    lse: Float32[Array, "B N T"],
    v: Float[Array, "B S K D"],
    inputs: dict[str, jax.Array],
) -> Float[Array, "B T N D"]:
    """Returns out, with the mean of v along S in the rows of queries that see no key. Padding queries are left out.

    Args:
      out, v: padded by `pad_heads`, v with zeros.
      lse: padded to whole blocks of 64 queries. It is at most `MASKED_LOGIT` / 2 if a query sees no key.
      inputs: the optional operands as kernels read them (`kernel_inputs`).
    """
    batch, _, num_heads, columns = out.shape
    if blind_are_scattered(spec):  # All heads have the same masks.
        is_blind = (lse[:, 0, : spec.q.shape[1]] <= MASKED_LOGIT / 2) & queries_inside(spec, inputs)
        inputs = inputs | {"blind": is_blind.any(axis=1).astype(jnp.int32)}
    ref = jax.new_ref(out)
    plgpu.kernel(
        named_kernel("attention_means", _kernel, spec=spec),
        out_type=[],
        grid=(columns // swizzle_span(columns), num_heads, batch),
        grid_names=("part", "head", "batch"),
    )(ref, lse, v, inputs)
    return ref[...]


def _kernel(out_gmem: Any, lse_gmem: Any, v_gmem: Any, inputs: dict[str, Any], *, spec: AttentionSpec) -> None:
    span, num_blocks = swizzle_span(v_gmem.shape[3]), pl.cdiv(v_gmem.shape[1], _ROWS)
    batch, head, part = (lax.axis_index(name) for name in ("batch", "head", "part"))
    columns = pl.ds(part * span, span)
    offset = query_offset(inputs)
    query_end, key_end = ends_of(spec, inputs, batch, offset)
    is_scattered = blind_are_scattered(spec)
    first = jnp.where(inputs["blind"][batch] != 0, 0, query_end) if is_scattered else first_blind(spec, key_end)
    # From here on, queries are counted from the beginning of the array.
    first, end = jnp.maximum(first - offset, 0), query_end - offset
    # JAX refuses slices that end beyond the array, as the last block may. A traced start prevents that check.
    rows_of = lambda block: pl.ds(batch * 0 + block * _ROWS, _ROWS)

    def scope(v_smem: Any, mean_smem: Any, mixed_smem: Any, full: Any, mixed_full: Any) -> None:
        def load(block: Any, slot: Any) -> None:
            kv_head = lax.div(head, jnp.int32(spec.group_size))
            values = v_gmem.at[batch, rows_of(block), kv_head, columns]
            plgpu.copy_gmem_to_smem(values, v_smem.at[slot], full.at[slot])

        def add(block: Any, total: jax.Array) -> jax.Array:
            slot = lax.rem(block, jnp.int32(_SLOTS))
            plgpu.barrier_wait(full.at[slot])
            values = plgpu.load(v_smem.at[slot], layout=TILE).astype(jnp.float32)
            if spec.key_lengths:  # Padding counts unless it is NaN or infinite, as in the reference.
                row = block * _ROWS + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=TILE)
                values = jnp.where((row < key_end) | (jnp.abs(values) < jnp.inf), values, 0.0)
            total += values
            # The copy begins when all warps have read the slot.
            pl.when(block + _SLOTS < num_blocks)(lambda: load(block + _SLOTS, slot))
            return total

        def fill(block: Any, _: Any) -> None:
            to = out_gmem.at[batch, rows_of(block), head, columns]
            is_mixed = (block * _ROWS < first) | ((block + 1) * _ROWS > end) | is_scattered

            @pl.when(is_mixed)
            def _fill_some_rows() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.copy_gmem_to_smem(to, mixed_smem, mixed_full)
                plgpu.barrier_wait(mixed_full)
                lse = plgpu.load(lse_gmem.at[batch, head, rows_of(block)], layout=ROWS, optimized=False)
                query = block * _ROWS + plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=ROWS)
                is_blind = (lse <= MASKED_LOGIT / 2) & (query < end)
                mean, mixed = (plgpu.load(smem, layout=TILE) for smem in (mean_smem, mixed_smem))
                mixed_smem[...] = jnp.where(lax.broadcast_in_dim(is_blind, mixed.shape, [0]), mean, mixed)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(mixed_smem, to)

            pl.when(~is_mixed)(lambda: plgpu.copy_smem_to_gmem(mean_smem, to))

        for block in range(min(_SLOTS, num_blocks)):
            load(block, block)
        zeros = plgpu.layout_cast(jnp.zeros((_ROWS, span), jnp.float32), TILE)
        mean = lax.fori_loop(0, num_blocks, add, zeros).sum(axis=0) / spec.k.shape[1]
        mean_smem[...] = lax.broadcast_in_dim(mean, (_ROWS, span), [1]).astype(v_gmem.dtype)
        plgpu.commit_smem()
        lax.fori_loop(lax.div(first, jnp.int32(_ROWS)), lax.div(end + (_ROWS - 1), jnp.int32(_ROWS)), fill, None)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(first < end)
    def _run() -> None:
        tile = functools.partial(plgpu.SMEM, dtype=v_gmem.dtype, transforms=transforms_of(span))
        pl.run_scoped(
            scope,
            tile((_SLOTS, _ROWS, span)),
            tile((_ROWS, span)),
            tile((_ROWS, span)),
            plgpu.Barrier(num_barriers=_SLOTS),
            plgpu.Barrier(),
        )
