"""What products are tuned on, and what makes two of them similar."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxkernels.core import dispatch
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.matmul.epilogue import ACTIVATIONS
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = ["beside", "features", "probe", "shared_seconds"]

#: Round rates of the chips that products are measured on. They only say from where on products are more than bytes.
_FLOPS, _BYTES = 8e14, 4e12


def probe(chip: Chip) -> MatmulSpec:
    """A plain product that every backend should take: large, aligned, bfloat16."""
    square = ArrayType((1024, 1024), jnp.dtype(jnp.bfloat16))
    return MatmulSpec(square, square, (((1,), (0,)), ((), ())), jnp.dtype(jnp.bfloat16), chip)


def features(kernel: str, spec: MatmulSpec, config: Any) -> tuple[float, ...] | None:
    """Where a product and a configuration lie among others (`jaxkernels.core.times`); None for kinds of products that
    were not measured.

    Sizes count by their logarithms to base 2: twice as many rows are at distance 1. What changes the kernels of a
    backend counts more: alignment, each part of an epilogue, the tile.
    """
    g, batch = spec.gemm, spec.gemm.batch or 1
    if spec.lhs.dtype != spec.rhs.dtype or spec.lhs.dtype not in tensor_cores.INPUTS or g.lhs_perm or g.rhs_perm:
        return None
    if not tensor_cores.is_default(spec.precision) or tensor_cores.unsupported_sizes(spec) is not None:
        return None
    sizes = dict(m=g.m, n=g.n, k=g.k)
    rows = (sizes[g.lhs_layout[1]], sizes[g.rhs_layout[1]], g.n, g.k)
    compute, memory = g.m * g.n * g.k / _FLOPS, ((g.m + g.n) * g.k + g.m * g.n) / _BYTES
    tile = [(getattr(config, knob, None) or 1) for knob in ("block_m", "block_n", "split_k")]
    return (
        *(math.log2(size) for size in (g.m, g.n, g.k, batch)),
        *(0.0 if row % 8 == 0 else 3.0 if row % 2 == 0 else 4.5 for row in rows),
        1.0 * (g.lhs_layout == "km"),
        1.0 * (g.rhs_layout == "nk"),
        2.0 * (spec.bias is not None),
        *(4.0 * (spec.activation == name) for name in ACTIVATIONS),
        3.0 * (spec.elementwise is not None),
        3.0 * spec.save_preactivation,
        10.0 * spec.is_gradient,
        3.0 * (spec.out_dtype not in tensor_cores.INPUTS),
        2.0 * math.log2(compute / memory),
        *(2.0 * math.log2(knob) for knob in tile),
    )


def beside(
    kernel: str, spec: MatmulSpec
) -> tuple[Callable[[Sequence[Any]], tuple[Any, ...]], Callable[[Callable[..., Any]], Callable[..., Any]]] | None:
    """What a comparison computes in one program with a product. Most multipliers are the other half of a gated layer:
    another product of the same lhs. XLA merges both products if it has both, so a program has both.

    Returns:
      None if the product has no other half. Otherwise two functions:

      - the operands of the product -> the operands of both products;
      - the function of the product -> a function of the operands of both products. It computes the other half with the
        backend that a program takes for that half.
    """
    if kernel != "matmul" or spec.multiplier is None or not spec.has_other_half:
        return None
    half, place = spec.product, spec.inputs(kernel).index("multiplier")
    other = dataclasses.replace(half, out_dtype=spec.multiplier.dtype, alpha=1.0)

    @functools.cache
    def choice() -> dispatch.Choice:
        with dispatch.policy(dispatch.Policy().without_measurements()), dispatch.recording():
            return dispatch.choose(kernel, other, None)

    def operands_of_both(operands: Sequence[Any]) -> tuple[Any, ...]:
        lhs, rhs, *others = operands
        others[place - 2] = rhs
        return lhs, rhs, *others

    def both(run: Callable[..., Any]) -> Callable[..., Any]:
        make = functools.partial(dispatch.load(kernel, choice().backend).run, other, choice().config)

        def function(lhs: Any, rhs: Any, *others: Any) -> Any:
            multiplier = make(lhs, others[place - 2])
            return run(lhs, rhs, *others[: place - 2], multiplier, *others[place - 1 :])

        return function

    return operands_of_both, both


def shared_seconds(kernel: str, spec: MatmulSpec) -> float:
    """What the copy of the shared operand with padded rows takes."""
    array = spec.lhs if spec.shared == "lhs" else spec.rhs
    return tensor_cores.pass_seconds(spec.target, 2 * array.num_bytes)
