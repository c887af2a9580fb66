"""Derivatives of a primitive that are those of its reference in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkernels.core import _jax
from jaxkernels.core.kernel_op import KernelOp, usual_promotion
from jaxkernels.core.operands import Spec
from jaxkernels.core.types import ArrayType

__all__ = ["differentiate", "differentiate_reference", "expand_reference", "reference_of"]

#: A kernel in plain JAX: of its spec and operands, its results.
Reference = Callable[..., list[jax.Array]]


def reference_of(module: Any) -> Reference:
    """The kernel of a design of the backend "xla", with its first configuration."""
    return lambda spec, *operands: module.run(spec, next(iter(module.search_space(spec))), *operands)


def differentiate_reference(op: KernelOp, reference: Reference) -> None:
    """Registers the JVP of the op's primitive: the reference's, in the floating operands that move.

    A named backend other than "xla" refuses it. The message calls it a second derivative: the primitives that get this
    rule compute first derivatives.
    """

    def jvp(primals: Any, tangents: Any, *, static: Spec, backend: str | None, config: Any) -> Any:
        _reference_only(op, "second derivatives", backend)
        outs = op.bind(static, static.named(op.name, primals), backend=backend, config=config)
        return outs, differentiate(_typed(op, reference, static), primals, tangents)

    ad.primitive_jvps[op.primitive] = jvp


def expand_reference(op: KernelOp, reference: Reference) -> None:
    """Registers the Taylor series of the op's primitive: the reference's. A backend other than "xla" refuses it."""

    def taylor(primals: Any, series: Any, *, static: Spec, backend: str | None, config: Any) -> Any:
        _reference_only(op, "Taylor series", backend)
        with usual_promotion():
            return _jax.taylor(_typed(op, reference, static), primals, series)

    _jax.register_taylor(op.primitive, taylor)


def _reference_only(op: KernelOp, order: str, backend: str | None) -> None:
    if backend not in (None, "xla"):
        raise NotImplementedError(
            f'{op.name}[{backend}]: {order} are computed by XLA only. Use backend=None or backend="xla".'
        )


def _typed(op: KernelOp, reference: Reference, spec: Spec) -> Callable[..., list[jax.Array]]:
    """The reference, of the op's operands in order."""
    return lambda *xs: reference(spec.typed(op.name, [ArrayType.of(x) for x in xs]), *xs)


def differentiate(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangents of f, by jax.jvp in its inexact arguments that move; the others are constants."""
    inexact = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]
    moving = [i for i in inexact if type(tangents[i]) is not ad.Zero]

    def g(*xs: jax.Array) -> Any:
        args = list(primals)
        for i, x in zip(moving, xs):
            args[i] = x
        return f(*args)

    with usual_promotion():
        return jax.jvp(g, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))[1]
