"""What the passes of attention are tuned on, and what makes two of them similar."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.core import _jax, dispatch
from jaxkernels.core.cases import Cut
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["features", "operands", "part_to_check", "probe"]

#: Round rates of the chips that attentions are measured on. They only say from where on they are more than bytes.
_FLOPS, _BYTES = 6e14, 4e12
#: Queries of a tile, and the SMs of these chips.
_TILE, _NUM_SMS = 128, 132


def operands(kernel: str, spec: AttentionSpec, device: Any) -> tuple[jax.Array, ...]:
    """The operands of a pass on a device: the same ones every time."""
    made = spec.draw(spec.inputs("attention_forward"), device)
    if kernel != "attention_forward":
        # The backward pass also takes the forward pass's results, and their cotangents.
        choice = dispatch.choose("attention_forward", spec, None)
        run = dispatch.load("attention_forward", choice.backend).run
        given = spec.pack("attention_forward", made)
        with _jax.ignore_x64(given):
            outs = jax.jit(lambda *xs: run(spec, choice.config, *xs))(*given)
        made |= dict(zip(spec.outputs("attention_forward"), outs)) | spec.draw(("dout", "dlse"), device, seed=1)
    return spec.pack(kernel, made)


def part_to_check(kernel: str, spec: AttentionSpec) -> tuple[AttentionSpec, Cut, Cut]:
    """The part of an attention that belongs to the first batch element and key head, as a smaller attention.

    The reference in plain JAX holds all logits at once: that of a long sequence with many heads does not fit a chip.
    An attention whose bias has a gradient is left whole: the gradient adds up over batch and heads.

    Returns:
      The smaller spec, and what cuts its part out of the operands and out of the results.
    """
    whole = spec.bias_gradient
    return spec.part(kernel, {} if whole else {"b": 1} if spec.k.shape[2] == 1 else {"b": 1, "n": 1})


def probe(chip: Chip) -> AttentionSpec:
    """A plain attention that every backend should take: large, aligned, bfloat16, causal."""
    heads = ArrayType((2, 1024, 8, 128), jnp.dtype(jnp.bfloat16))
    return AttentionSpec(heads, heads, heads, scale=1.0, target=chip, causal=True)


def features(kernel: str, spec: AttentionSpec, config: Any) -> tuple[float, ...] | None:
    """Where an attention lies among others (`jaxkernels.core.times`); None for kinds that were not measured. Features
    of configurations did not help.

    Sizes count by their logarithms to base 2: twice as many queries are at distance 1. What changes the kernels of a
    backend is at a distance of 3 or more: masks, biases, head dimensions.
    """
    if spec.terms or spec.soft_cap is not None or spec.unsupported_sizes() is not None:
        return None
    if not {spec.q.dtype, spec.k.dtype, spec.v.dtype} <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return None
    (batch, num_queries, num_heads, head_dim), (num_keys, num_kv_heads) = spec.q.shape, spec.k.shape[1:3]
    heads, shape_of = batch * num_heads, lambda array: (1, 1, 1, 1) if array is None else array.shape
    flops = 4 * heads * num_queries * num_keys * head_dim
    num_bytes = 4 * head_dim * (heads * num_queries + batch * num_kv_heads * num_keys)
    return (
        *(math.log2(size) for size in (heads, num_queries, num_keys, spec.group_size)),
        4.0 * math.log2(head_dim / 64),
        6.0 * (spec.v.shape[3] != head_dim),
        4.0 * (head_dim % 64 != 0),
        4.0 * spec.causal,
        4.0 * (spec.causal and num_queries != num_keys),
        4.0 * (spec.window is not None),
        6.0 * spec.key_lengths,
        3.0 * spec.query_lengths,
        5.0 * spec.segments,
        3.0 * spec.bias_gradient,
        *(
            value
            for x in (spec.bias, spec.mask)
            for value in (5.0 * (x is not None), 1.0 * (shape_of(x)[0] > 1), 2.0 * (shape_of(x)[2] > 1))
        ),
        2.0 * math.log2(1 + heads * -(-num_queries // _TILE) / _NUM_SMS),
        math.log2(1e-6 + flops / _FLOPS + num_bytes / _BYTES),
    )
