"""The three primitives of norms, and their derivatives.

The forward primitive also returns the statistics of each row, and the sum if a residual is given. Its derivative binds
the tangent primitive, linear in the tangents of x, residual, scale and bias, whose transpose is the backward
primitive: a gradient costs one forward and one backward kernel. Derivatives of those two, for every higher order, are
those of the reference in plain JAX.

The statistics are functions of x: the rules take the derivative through them from x, so that the operands "mean" and
"rstd" count as constants, and as results they have no tangents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import ad

from jaxkernels.core import _jax
from jaxkernels.core.kernel_op import KernelOp, usual_promotion
from jaxkernels.core.reference_rules import differentiate_reference, expand_reference
from jaxkernels.core.sharding import Assignment
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm import reference
from jaxkernels.ops.norm.spec import NormSpec

__all__ = ["backward_op", "forward_op", "tangent_op"]


class _NormOp(KernelOp):
    """A pass of a norm.

    Args:
      compute: the pass in plain JAX.
    """

    def __init__(self, name: str, compute: Callable[..., dict[str, jax.Array]]):
        super().__init__(name, f"jk_{name}", multiple_results=True)
        self.compute = compute

    def local(self, spec: NormSpec, assignment: Assignment, **params: Any) -> Callable[..., list[jax.Array]]:
        axes = assignment.axes.get("f", ())
        if not axes:
            return super().local(spec, assignment, **params)
        # No kernel has a part of a row only. Each mean costs a sum over the shards, as in jnp's expression.
        mean = lambda x: jax.lax.pmean(reference.mean_of_features(x), axes)
        sums = [tuple(axis for axis in of_result if axis not in axes) for of_result in assignment.sums]
        assignment = dataclasses.replace(assignment, sums=tuple(sums))

        def body(*xs: jax.Array) -> list[jax.Array]:
            xs = _jax.match_varying_axes(*xs)
            typed = spec.typed(self.name, [ArrayType.of(x) for x in xs])
            with usual_promotion():
                results = self.compute(typed, typed.named(self.name, xs), mean)
            return assignment.add_up([results[name] for name in typed.outputs(self.name)])

        return body

    def not_shared(self, spec: NormSpec, mapped: frozenset[str]) -> frozenset[str]:
        """Each element of a mapped axis has a gradient of its own. A parameter and its tangent have one type."""
        gradients = dict(scale=spec.scale_gradient, bias=spec.bias_gradient)
        own = {name for name, is_wanted in gradients.items() if is_wanted}
        own |= {name for name in gradients if mapped & {name, f"d{name}"}}
        return mapped | own | {f"d{name}" for name in own}


forward_op = _NormOp("norm_forward", reference.forward)
tangent_op = _NormOp("norm_tangent", reference.tangent)
backward_op = _NormOp("norm_backward", reference.backward)


# A configuration is for the kernel it was given with: the kernels of the derivatives choose their own.


def _forward_jvp(
    primals: Any, tangents: Any, *, static: NormSpec, backend: str | None, config: Any
) -> tuple[list[Any], list[Any]]:
    operands = static.named(forward_op.name, primals)
    outs = forward_op.bind(static, operands, backend=backend, config=config)
    named = dict(zip(static.outputs(forward_op.name), outs))
    dots: dict[str, Any] = {f"d{name}": t for name, t in static.named(forward_op.name, tangents).items()}
    moved = dict.fromkeys(static.outputs(tangent_op.name))
    if any(type(t) is not ad.Zero for t in dots.values()):
        dots = {name: ad.instantiate_zeros(t) for name, t in dots.items()}
        saved = operands | named | (dict(x=named["sum"]) if static.residual else {})
        moved = dict(zip(moved, tangent_op.bind(static, saved | dots, backend=backend)))
    zero = lambda name: ad.Zero(jax.typeof(named[name]).to_tangent_aval())
    douts = [moved.get(f"d{name}") for name in named]
    return outs, [zero(name) if dout is None else dout for name, dout in zip(named, douts)]


def _tangent_transpose(cts: Any, *args: Any, static: NormSpec, backend: str | None, config: Any) -> list[Any]:
    operands = static.named(tangent_op.name, args)
    named = dict(zip(static.outputs(tangent_op.name), cts))
    wanted = [name for name, x in operands.items() if ad.is_undefined_primal(x)]
    has_dsum = "dsum" in named and type(named["dsum"]) is not ad.Zero
    if type(named["dout"]) is ad.Zero:
        grads = dict(dx=named["dsum"]) if has_dsum else {}
    else:
        spec = dataclasses.replace(
            static,
            residual=False,
            sum_gradient=has_dsum,
            scale_gradient="dscale" in wanted,
            bias_gradient="dbias" in wanted,
        )
        outs = backward_op.bind(spec, operands | named, backend=backend)
        grads = dict(zip(spec.outputs(backward_op.name), outs))
    grads["dresidual"] = grads.get("dx")  # Both are added.
    zero = lambda name: ad.Zero(operands[name].aval)
    return [None if name not in wanted else zero(name) if (g := grads.get(name)) is None else g for name in operands]


def _reference(op: _NormOp) -> Callable[..., list[jax.Array]]:
    """The op in plain JAX, with the statistics as functions of x."""

    def run(spec: NormSpec, *operands: jax.Array) -> list[jax.Array]:
        named = spec.named(op.name, operands)
        results = op.compute(spec, named | reference.statistics(spec, named["x"]))
        return [results[name] for name in spec.outputs(op.name)]

    return run


ad.primitive_jvps[forward_op.primitive] = _forward_jvp
ad.primitive_transposes[tangent_op.primitive] = _tangent_transpose
expand_reference(forward_op, _reference(forward_op))
differentiate_reference(tangent_op, _reference(tangent_op))
differentiate_reference(backward_op, _reference(backward_op))
