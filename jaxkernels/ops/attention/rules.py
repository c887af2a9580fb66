"""The three primitives of attention, and their derivatives.

The forward primitive returns (out, lse), lse as (B, N, T): so kernels write and read it. Its derivative
binds the tangent primitive, linear in the tangents of q, k, v and bias, whose transpose is the backward
primitive: a gradient costs one forward and one backward kernel, and forward mode is there too. Derivatives
of those two, for every higher order, are those of the reference in plain JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jaxkernels.core.kernel_op import KernelOp
from jaxkernels.core.reference_rules import differentiate_reference, expand_reference, reference_of
from jaxkernels.core.sharding import Assignment
from jaxkernels.ops.attention import reference_backward, reference_forward, reference_tangent
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["SAVED_NAMES", "backward_op", "forward_op", "tangent_op"]

#: Names of output and logsumexp where they are differentiated, for policies of `jax.checkpoint`.
SAVED_NAMES = ("jk_attention_out", "jk_attention_lse")


class _AttentionOp(KernelOp):
    def local(self, spec: AttentionSpec, assignment: Assignment, **params: Any) -> Callable[..., list[jax.Array]]:
        query_axes = assignment.axes.get("t", ())
        if not query_axes or not spec.depends_on_query_index:
            return super().local(spec, assignment, **params)
        shard = dataclasses.replace(spec, query_offset=True)
        body = super().local(shard, assignment, **params)

        def with_offset(*xs: jax.Array) -> list[jax.Array]:
            # The masks count queries from the start of the sequence: tell the kernel where ours begin.
            operands = spec.named(self.name, xs)
            offset = jax.lax.axis_index(query_axes) * operands["q"].shape[1] + operands.get("query_offset", 0)
            return body(*shard.pack(self.name, operands | {"query_offset": offset.astype(jnp.int32)}))

        return with_offset

    def not_shared(self, spec: AttentionSpec, mapped: frozenset[str]) -> frozenset[str]:
        if spec.bias_gradient:  # Each element of the batch has a gradient of its own.
            return mapped | {"bias"}
        return mapped | {"bias", "dbias"} if mapped & {"bias", "dbias"} else mapped


forward_op = _AttentionOp("attention_forward", "jk_attention_forward", multiple_results=True)
tangent_op = _AttentionOp("attention_tangent", "jk_attention_tangent", multiple_results=True)
backward_op = _AttentionOp("attention_backward", "jk_attention_backward", multiple_results=True)


# A configuration is for the kernel it was given with: the kernels of the derivatives choose their own.


def _forward_jvp(
    primals: Any, tangents: Any, *, static: AttentionSpec, backend: str | None, config: Any
) -> tuple[list, list]:
    operands = static.named(forward_op.name, primals)
    dots = static.named(forward_op.name, tangents)
    dots = {f"d{name}": dots[name] for name in static.linear_names}
    moves = any(type(t) is not ad.Zero for t in dots.values())
    spec = dataclasses.replace(static, drops_lse=False) if moves else static
    outs = forward_op.bind(spec, operands, backend=backend, config=config)
    out, lse = map(checkpoint_name, outs, SAVED_NAMES)
    if not moves:
        return [out, lse], [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse)]
    dots = {name: ad.instantiate_zeros(t) for name, t in dots.items()}
    return [out, lse], tangent_op.bind(spec, dict(operands, out=out, lse=lse, **dots), backend=backend)


def _tangent_transpose(cts: Any, *args: Any, static: AttentionSpec, backend: str | None, config: Any) -> list[Any]:
    operands = static.named(tangent_op.name, args)
    wanted = [f"d{name}" for name in static.linear_names if ad.is_undefined_primal(operands[f"d{name}"])]
    # A bias that is a constant of the differentiation is spared its gradient.
    has_dlse = type(cts[1]) is not ad.Zero
    spec = dataclasses.replace(static, bias_gradient="dbias" in wanted, lse_gradient=has_dlse)
    dout, dlse = (ad.instantiate_zeros(ct) for ct in cts)
    grads = backward_op.bind(spec, dict(operands, dout=dout, dlse=dlse), backend=backend)
    named = dict(zip(spec.outputs(backward_op.name), grads))
    return [named[name] if name in wanted else None for name in operands]


ad.primitive_jvps[forward_op.primitive] = _forward_jvp
ad.primitive_transposes[tangent_op.primitive] = _tangent_transpose
expand_reference(forward_op, reference_of(reference_forward))
differentiate_reference(tangent_op, reference_of(reference_tangent))
differentiate_reference(backward_op, reference_of(reference_backward))
