"""Queries that see no key, in kernels of their own: their output after the forward pass (blind_means.cu), and before
the backward pass the sums of its gradients (blind_sums.cu).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxkernels.ffi import custom_call
from jaxkernels.ffi.attention import launching
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec

__all__ = ["gradient_sums", "num_parts", "with_means"]

#: Rows of a part, unless that makes more parts than `_MAX_PARTS`.
_PART_ROWS = 256
_MAX_PARTS = 32
#: Queries of a CTA that looks for those without keys.
_QUERIES = 1024
# As in blind_parts.cuh.
_THREADS = 256


def _part_rows(num_rows: int) -> int:
    return max(_PART_ROWS, -(-num_rows // _MAX_PARTS))


def num_parts(num_rows: int) -> int:
    """Into how many parts the rows of a head are divided."""
    return -(-num_rows // _part_rows(num_rows))


def with_means(
    spec: AttentionSpec,
    named: Mapping[str, jax.Array],
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    *,
    are_anywhere: bool,
) -> jax.Array:
    """The output, in which queries that see no key have the mean of all values.

    Args:
      named: the operands of the pass by name.
      v: (B, S, K, D), in whole units of 16 bytes.
      out: (B, T, N, D), likewise.
      lse: (B, N, T) float32, the masked logit for queries that see no key.
      are_anywhere: whether such queries may be in any batch element.
    """
    lengths = named.get("query_lengths")
    return _launch("blind_means", spec, named, lse, v, out, _QUERIES, are_anywhere, query_lengths=lengths, start=out)


def gradient_sums(spec: AttentionSpec, named: Mapping[str, jax.Array], dout: jax.Array) -> jax.Array:
    """The sums of dout of each head's queries that see no key, in parts.

    Args:
      named: the operands of the pass by name.
      dout: without padding: (B, T, N, D), in whole units of 16 bytes.

    Returns:
      (B, N, parts, D) float32. Of batch elements in which every query sees a key it is not written.
    """
    batch, num_queries, num_heads, columns = dout.shape
    result = jax.ShapeDtypeStruct((batch, num_heads, num_parts(num_queries), columns), jnp.float32)
    return _launch("blind_sums", spec, named, named["lse"], dout, result, _part_rows(num_queries), spec.segments)


def _launch(
    name: str,
    spec: AttentionSpec,
    named: Mapping[str, jax.Array],
    lse: jax.Array,
    rows: jax.Array,
    result: jax.Array | jax.ShapeDtypeStruct,
    part_rows: int,
    are_anywhere: bool,
    *,
    query_lengths: jax.Array | None = None,
    start: jax.Array | None = None,
) -> jax.Array:
    """Launches a kernel whose CTAs have `part_rows` queries of a head each.

    Args:
      rows: the rows that it adds up.
      result: its result's type.
      start: what its result starts out as, or None.
    """
    batch, num_heads, num_queries = lse.shape
    arrays = launching.Arrays(lse, rows, absent=0)
    extras = (query_lengths, named.get("key_lengths"), launching.query_offset(spec, named))
    extra_buffers = [arrays.add(x) for x in extras]
    aliases = {} if start is None else {arrays.add(start): 0}
    compiled = launching.compile_kernel(
        name,
        frozenset(),
        element=launching.ELEMENTS[jnp.dtype(rows.dtype)],
        columns=rows.shape[3],
        has_left=spec.band.left is not None,
        has_right=spec.band.right is not None,
        query_lengths=query_lengths is not None,
        key_lengths=spec.key_lengths,
        segments=are_anywhere,
        query_offset=spec.query_offset,
        masked_logit=f"{MASKED_LOGIT!r}f",
    )
    parts = -(-num_queries // part_rows)
    problem = launching.struct(
        num_queries,
        spec.k.shape[1],
        num_heads,
        spec.group_size,
        launching.reach(spec.band.left),
        launching.reach(spec.band.right),
        parts,
        part_rows,
    )
    (out,) = custom_call.launch(
        compiled.cubin,
        compiled.name,
        arrays.operands,
        [jax.ShapeDtypeStruct(result.shape, result.dtype)],
        parameters=[
            custom_call.Pointer(0),
            custom_call.Pointer(1),
            *map(custom_call.Pointer, extra_buffers),
            custom_call.Pointer(len(arrays.operands)),
            problem,
        ],
        grid=(batch * num_heads * parts,),
        block=(_THREADS,),
        input_output_aliases=aliases,
        target=spec.target,
        label=f"attention_{name}",
    )
    return out
