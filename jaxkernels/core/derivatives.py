"""Derivatives of kernels that have none of their own: those of the reference in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkernels.core.kernel_op import KernelOp, usual_promotion
from jaxkernels.core.operands import Spec
from jaxkernels.core.types import ArrayType

__all__ = ["check_computes", "differentiate", "jvp_of_reference", "reference"]


def check_computes(op: KernelOp, order: str, backend: str | None) -> None:
    """Raises NotImplementedError if a backend is named that has no derivatives of its kernel."""
    if backend not in (None, "xla"):
        raise NotImplementedError(
            f'{op.name}[{backend}]: {order} are computed by XLA only. Use backend=None or backend="xla".'
        )


def reference(op: KernelOp, module: Any, spec: Spec) -> Callable[..., list[jax.Array]]:
    """The op in plain JAX, of its operands in order.

    Args:
      op: the primitive.
      module: the design of the backend "xla".
      spec: what is computed, without types.
    """

    def run(*xs: jax.Array) -> list[jax.Array]:
        typed = spec.typed(op.name, [ArrayType.of(x) for x in xs])
        return module.run(typed, next(iter(module.search_space(typed))), *xs)

    return run


def differentiate(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangents of f, by jax.jvp in its floating arguments that move; the others are constants."""
    floating = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]
    moving = [i for i in floating if type(tangents[i]) is not ad.Zero]

    def g(*xs: jax.Array) -> Any:
        args = list(primals)
        for i, x in zip(moving, xs):
            args[i] = x
        return f(*args)

    with usual_promotion():
        return jax.jvp(g, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))[1]


def jvp_of_reference(op: KernelOp, module: Any) -> Callable[..., Any]:
    """The rule for `ad.primitive_jvps` of a kernel that is itself a derivative."""

    def jvp(primals: Any, tangents: Any, *, static: Spec, backend: str | None, config: Any) -> Any:
        check_computes(op, "second derivatives", backend)
        outs = op.bind(static, static.named(op.name, primals), backend=backend, config=config)
        return outs, differentiate(reference(op, module, static), primals, tangents)

    return jvp
