"""The primitives of linear cross entropy, and their derivatives.

The forward primitive returns statistics of each token's logits. Its derivative binds the tangent primitive, linear in
the tangents of x, w and the bias, whose transpose is the backward primitive. That computes the logits again: value and
gradient take four products.

`total_loss` is a sum of losses with given weights. Its gradient with respect to x, w and bias is known up to a factor
when the logits are: its derivative binds the fused primitive, which computes the gradients with the losses, in three
products.

Second derivatives are those of the reference in plain JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from jaxkernels.core.kernel_op import KernelOp
from jaxkernels.core.reference_rules import differentiate, differentiate_reference, reference_of
from jaxkernels.core.sharding import Assignment
from jaxkernels.ops.linear_cross_entropy import reference_backward, reference_tangent
from jaxkernels.ops.linear_cross_entropy.losses import cotangents, token_losses
from jaxkernels.ops.linear_cross_entropy.spec import BACKWARD, FORWARD, FUSED, TANGENT, LinearCrossEntropySpec

__all__ = ["backward_op", "forward_op", "fused_op", "tangent_op", "total_loss"]


class _LinearCrossEntropyOp(KernelOp):
    loops = True

    def local(
        self, spec: LinearCrossEntropySpec, assignment: Assignment, **params: Any
    ) -> Callable[..., list[jax.Array]]:
        axes = assignment.axes.get("v", ())
        if not axes:
            return super().local(spec, assignment, **params)

        def body(*xs: jax.Array) -> list[jax.Array]:
            operands = spec.named(self.name, xs)
            shard_size = operands["w"].shape[spec.vocab_axis]
            # A label of another shard is outside of this one's vocabulary.
            operands["labels"] -= (jax.lax.axis_index(axes) * shard_size).astype(jnp.int32)
            vocab_size = shard_size * math.prod(map(jax.lax.axis_size, axes))
            if self.name == FORWARD:
                outs = list(_statistics(spec, operands, axes, **params).values())
            elif self.name == FUSED:  # The gradients need the logsumexp over all shards.
                outs = _in_two_passes(spec, operands, vocab_size, axes, **params)
            else:
                outs = self.bind(spec, operands, **params)
            return _add_up(assignment, outs, whole=len(spec.statistics) if self.name in (FORWARD, FUSED) else 0)

        return body


forward_op = _LinearCrossEntropyOp(FORWARD, "jk_linear_cross_entropy_forward", multiple_results=True)
tangent_op = _LinearCrossEntropyOp(TANGENT, "jk_linear_cross_entropy_tangent", multiple_results=True)
backward_op = _LinearCrossEntropyOp(BACKWARD, "jk_linear_cross_entropy_backward", multiple_results=True)
fused_op = _LinearCrossEntropyOp(FUSED, "jk_linear_cross_entropy_fused", multiple_results=True)


# A vocabulary in shards.


def _statistics(
    spec: LinearCrossEntropySpec,
    operands: Mapping[str, jax.Array],
    axes: tuple[str, ...],
    backend: str | None,
    config: Any = None,
) -> dict[str, jax.Array]:
    """The statistics over all shards of the vocabulary; one pmax and one psum of numbers for each token."""
    spec = dataclasses.replace(spec.without_losses, gradients=())
    operands = {name: operands[name] for name in spec.inputs(FORWARD)}
    lse, *sums = forward_op.bind(spec, operands, backend=backend, config=config)
    if axes:
        top = jax.lax.pmax(jax.lax.stop_gradient(lse), axes)
        top = jnp.where(jnp.isfinite(top), top, 0)
        total, *sums = jax.lax.psum(jnp.stack([jnp.exp(lse - top), *sums]), axes)
        lse = top + jnp.log(total)
    return dict(zip(spec.statistics, (lse, *sums)))


def _in_two_passes(
    spec: LinearCrossEntropySpec,
    operands: Mapping[str, jax.Array],
    vocab_size: int,
    axes: tuple[str, ...],
    backend: str | None,
    config: Any = None,
) -> list[jax.Array]:
    """The results of the fused kernel by the forward and the backward kernel."""
    statistics = _statistics(spec, operands, axes, backend)
    cts = cotangents(spec, statistics["lse"], operands["weights"], vocab_size)
    given = {name: x for name, x in operands.items() if name != "weights"}
    gradients = backward_op.bind(spec.without_losses, dict(given, lse=statistics["lse"], **cts), backend=backend)
    return [*statistics.values(), *(gradient.astype(statistics["lse"].dtype) for gradient in gradients)]


def _add_up(assignment: Assignment, outs: list[jax.Array], whole: int) -> list[jax.Array]:
    """Adds up the results over shards, but for the first `whole` ones, of which every shard has the sum."""
    kept = []
    for out, scatters in zip(outs[:whole], assignment.scatters):
        for axis, dim in scatters:
            size = out.shape[dim] // jax.lax.axis_size(axis)
            out = jax.lax.dynamic_slice_in_dim(out, jax.lax.axis_index(axis) * size, size, dim)
        kept.append(out)
    rest = dataclasses.replace(
        assignment,
        sums=assignment.sums[whole:],
        scatters=assignment.scatters[whole:],
        unreduced=assignment.unreduced[whole:],
    )
    return kept + rest.add_up(outs[whole:])


# Derivatives of the statistics.


def _forward_jvp(
    primals: Any, tangents: Any, *, static: LinearCrossEntropySpec, backend: str | None, config: Any
) -> tuple[list, list]:
    operands = static.named(FORWARD, primals)
    outs = forward_op.bind(static, operands, backend=backend, config=config)
    dots = static.named(FORWARD, tangents)
    dots = {f"d{name}": dots[name] for name in static.linear_names}
    if all(type(dot) is ad.Zero for dot in dots.values()):
        return outs, [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    dots = {name: ad.instantiate_zeros(dot) for name, dot in dots.items()}
    return outs, tangent_op.bind(static, dict(operands, lse=outs[0], **dots), backend=backend, config=config)


def _tangent_transpose(
    cts: Any, *args: Any, static: LinearCrossEntropySpec, backend: str | None, config: Any
) -> list[Any]:
    operands = static.named(TANGENT, args)
    wanted = tuple(name for name in static.linear_names if ad.is_undefined_primal(operands[f"d{name}"]))
    given = {name: operands[name] for name in (*static.linear_names, "labels", "lse")}
    given |= {f"d{name}": ad.instantiate_zeros(ct) for name, ct in zip(static.statistics, cts)}
    spec = dataclasses.replace(static, gradients=wanted)
    grads = dict(zip(spec.outputs(BACKWARD), backward_op.bind(spec, given, backend=backend, config=config)))
    return [grads.get(name) for name in operands]


def _fused_jvp(primals: Any, tangents: Any, *, static: LinearCrossEntropySpec, backend: str | None, config: Any) -> Any:
    outs = fused_op.bind(static, static.named(FUSED, primals), backend=backend, config=config)

    def in_two_passes(*xs: jax.Array) -> list[jax.Array]:
        operands = static.named(FUSED, xs)
        return _in_two_passes(static, operands, operands["w"].shape[static.vocab_axis], (), backend)

    return outs, differentiate(in_two_passes, primals, tangents)


ad.primitive_jvps[forward_op.primitive] = _forward_jvp
ad.primitive_transposes[tangent_op.primitive] = _tangent_transpose
ad.primitive_jvps[fused_op.primitive] = _fused_jvp
differentiate_reference(tangent_op, reference_of(reference_tangent))
differentiate_reference(backward_op, reference_of(reference_backward))


# The sum of the losses.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def total_loss(
    spec: LinearCrossEntropySpec, backend: str | None, config: Any, operands: dict[str, jax.Array]
) -> jax.Array:
    """The sum of the losses times the weights; `operands` are those of the fused kernel."""
    plain = spec.without_losses
    given = {name: operands[name] for name in plain.inputs(FORWARD)}
    statistics = forward_op(plain, given, backend=backend, config=config)
    return _weighted_sum(spec, statistics, operands)[0]


def _weighted_sum(
    spec: LinearCrossEntropySpec, statistics: list[jax.Array], operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The sum, and the losses."""
    vocab_size = operands["w"].shape[spec.vocab_axis]
    losses = token_losses(spec, dict(zip(spec.statistics, statistics)), vocab_size)
    return jnp.sum(losses * operands["weights"]), losses


@functools.partial(total_loss.defjvp, symbolic_zeros=True)
def _total_loss_jvp(
    spec: LinearCrossEntropySpec, backend: str | None, config: Any, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (operands,), (dots,) = primals, tangents
    moving = tuple(name for name in spec.linear_names if not isinstance(dots[name], SymbolicZero))
    spec = dataclasses.replace(spec, gradients=moving)
    # On a mesh the gradients are wanted as their operands are.
    specs = [*[PartitionSpec()] * len(spec.statistics), *(jax.typeof(operands[name]).sharding.spec for name in moving)]
    outs = fused_op(spec, operands, backend=backend, config=config, result_specs=specs)
    statistics, gradients = outs[: len(spec.statistics)], outs[len(spec.statistics) :]
    total, losses = _weighted_sum(spec, statistics, operands)
    terms = [_inner(gradient, dots[name], total.dtype) for name, gradient in zip(moving, gradients)]
    if not isinstance(dots["weights"], SymbolicZero):
        terms.append(_inner(losses, dots["weights"], total.dtype))
    return total, functools.reduce(jnp.add, terms, jnp.zeros_like(total))


def _inner(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    return jnp.sum(x.astype(dtype) * y.astype(dtype))
