"""What the kernels of linear cross entropy are tuned on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.core import _jax, dispatch
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.linear_cross_entropy.spec import FORWARD, LinearCrossEntropySpec

__all__ = ["operands", "probe"]


def operands(kernel: str, spec: LinearCrossEntropySpec, device: Any) -> tuple[jax.Array, ...]:
    """The operands of a kernel on a device: the same ones every time. The logsumexp is that of the logits."""
    names = [name for name in spec.inputs(kernel) if name != "lse"]
    made = spec.draw(names, device)
    if "lse" in spec.inputs(kernel):
        choice = dispatch.choose(FORWARD, spec, None)
        run = dispatch.load(FORWARD, choice.backend).run
        given = spec.pack(FORWARD, made)
        with _jax.ignore_x64(given):
            made["lse"] = jax.jit(lambda *xs: run(spec, choice.config, *xs))(*given)[0]
    return spec.pack(kernel, made)


def probe(chip: Chip) -> LinearCrossEntropySpec:
    """A plain loss that every backend should take: large, aligned, bfloat16."""
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.bfloat16))
    return LinearCrossEntropySpec(
        array(4096, 1024), array(1024, 32768), jnp.dtype(jnp.bfloat16), chip, gradients=("x", "w")
    )
