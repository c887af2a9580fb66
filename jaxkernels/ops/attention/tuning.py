"""What the passes of attention are tuned on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.core import _jax, dispatch
from jaxkernels.core.cases import Cut
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["operands", "part_to_check", "probe"]


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
