"""The sums of rows that queries without keys need (blind_sums.cu): a kernel before each pass."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxkernels.ffi import custom_call
from jaxkernels.ffi.attention import launching
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec

__all__ = ["num_parts", "sums"]

#: Rows of a part, unless that makes more parts than `_MAX_PARTS`.
_PART_ROWS = 256
_MAX_PARTS = 32
# As in blind_sums.cu.
_THREADS = 256


def _part_rows(num_rows: int) -> int:
    return max(_PART_ROWS, -(-num_rows // _MAX_PARTS))


def num_parts(num_rows: int) -> int:
    """Into how many parts the rows of a head are divided."""
    return -(-num_rows // _part_rows(num_rows))


def sums(
    spec: AttentionSpec,
    named: Mapping[str, jax.Array],
    rows: jax.Array,
    *,
    is_backward: bool,
    are_anywhere: bool = False,
) -> jax.Array:
    """The sums of the values of each head, or of dout of each head's queries that see no key, in parts.

    Args:
      named: the operands of the pass by name.
      rows: v, or dout without padding: (B, length, heads, D), in whole units of 16 bytes.
      are_anywhere: whether queries that see no key may be in any batch element.

    Returns:
      (B, heads, parts, D) float32. Of batch elements in which every query sees a key it is not written.
    """
    batch, length, num_heads, columns = rows.shape
    arrays = launching.Arrays(rows, absent=0)
    lse = named["lse"] if is_backward else None
    extras = [arrays.add(x) for x in (lse, named.get("key_lengths"), launching.query_offset(spec, named))]
    compiled = launching.compile_kernel(
        "blind_sums",
        frozenset(),
        element=launching.ELEMENTS[jnp.dtype(rows.dtype)],
        is_backward=is_backward,
        columns=columns,
        has_left=spec.band.left is not None,
        has_right=spec.band.right is not None,
        key_lengths=spec.key_lengths,
        segments=spec.segments or are_anywhere,
        query_offset=spec.query_offset,
        masked_logit=f"{MASKED_LOGIT!r}f",
    )
    parts = num_parts(length)
    (result,) = custom_call.launch(
        compiled.cubin,
        compiled.name,
        arrays.operands,
        [jax.ShapeDtypeStruct((batch, num_heads, parts, columns), jnp.float32)],
        parameters=[
            custom_call.Pointer(0),
            custom_call.Pointer(len(arrays.operands)),
            *map(custom_call.Pointer, extras),
            launching.struct(
                spec.q.shape[1],
                spec.k.shape[1],
                launching.reach(spec.band.left),
                launching.reach(spec.band.right),
                length,
                num_heads,
                parts,
                _part_rows(length),
            ),
        ],
        grid=(batch * num_heads * parts,),
        block=(_THREADS,),
        target=spec.target,
        label="attention_blind_sums",
    )
    return result
