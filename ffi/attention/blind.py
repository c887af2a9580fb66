"""Queries that see no key, in kernels of their own: their output after the forward pass (blind_means.cu), and before
the backward pass the sums of its gradients (blind_sums.cu).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxkernels.ffi import compiler, custom_call
from jaxkernels.ffi.attention import launching
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec

__all__ = ["gradient_sums", "num_parts", "with_means"]

#: Rows of a part, unless that makes more parts than `_MAX_PARTS`.
_PART_ROWS = 256
_MAX_PARTS = 32
#: Queries of a CTA that looks for those without keys.
_QUERIES = 1024
# As in blind_means.cu and blind_sums.cu.
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
    batch, num_queries, num_heads, _ = out.shape
    arrays = launching.Arrays(lse, v, out, absent=0)
    extras = [named.get("query_lengths"), named.get("key_lengths"), launching.query_offset(spec, named)]
    extra_buffers = [arrays.add(x) for x in extras]
    compiled = _compile(
        "blind_means", spec, out, are_anywhere=are_anywhere, query_lengths=spec.query_lengths, queries=_QUERIES
    )
    num_blocks = -(-num_queries // _QUERIES)
    problem = launching.struct(
        num_queries,
        spec.k.shape[1],
        num_heads,
        spec.group_size,
        launching.reach(spec.band.left),
        launching.reach(spec.band.right),
        num_blocks,
    )
    (result,) = custom_call.launch(
        compiled.cubin,
        compiled.name,
        arrays.operands,
        [jax.ShapeDtypeStruct(out.shape, out.dtype)],
        parameters=[
            custom_call.Pointer(0),
            custom_call.Pointer(1),
            *map(custom_call.Pointer, extra_buffers),
            custom_call.Pointer(len(arrays.operands)),
            problem,
        ],
        grid=(batch * num_heads * num_blocks,),
        block=(_THREADS,),
        input_output_aliases={2: 0},
        target=spec.target,
        label="attention_blind_means",
    )
    return result


def gradient_sums(spec: AttentionSpec, named: Mapping[str, jax.Array], dout: jax.Array) -> jax.Array:
    """The sums of dout of each head's queries that see no key, in parts.

    Args:
      named: the operands of the pass by name.
      dout: without padding: (B, T, N, D), in whole units of 16 bytes.

    Returns:
      (B, N, parts, D) float32. Of batch elements in which every query sees a key it is not written.
    """
    batch, num_queries, num_heads, columns = dout.shape
    arrays = launching.Arrays(dout, named["lse"], absent=0)
    extra_buffers = [arrays.add(x) for x in (named.get("key_lengths"), launching.query_offset(spec, named))]
    compiled = _compile("blind_sums", spec, dout, are_anywhere=spec.segments)
    parts = num_parts(num_queries)
    problem = launching.struct(
        num_queries,
        spec.k.shape[1],
        num_heads,
        launching.reach(spec.band.left),
        launching.reach(spec.band.right),
        parts,
        _part_rows(num_queries),
    )
    (result,) = custom_call.launch(
        compiled.cubin,
        compiled.name,
        arrays.operands,
        [jax.ShapeDtypeStruct((batch, num_heads, parts, columns), jnp.float32)],
        parameters=[
            custom_call.Pointer(0),
            custom_call.Pointer(len(arrays.operands)),
            custom_call.Pointer(1),
            *map(custom_call.Pointer, extra_buffers),
            problem,
        ],
        grid=(batch * num_heads * parts,),
        block=(_THREADS,),
        target=spec.target,
        label="attention_blind_sums",
    )
    return result


def _compile(
    name: str, spec: AttentionSpec, rows: jax.Array, *, are_anywhere: bool, **choices: int
) -> compiler.CompiledKernel:
    return launching.compile_kernel(
        name,
        frozenset(),
        element=launching.ELEMENTS[jnp.dtype(rows.dtype)],
        columns=rows.shape[3],
        has_left=spec.band.left is not None,
        has_right=spec.band.right is not None,
        key_lengths=spec.key_lengths,
        segments=are_anywhere,
        query_offset=spec.query_offset,
        masked_logit=f"{MASKED_LOGIT!r}f",
        **choices,
    )
