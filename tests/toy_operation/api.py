"""The public function, its primitive and its derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkernels.core import dispatch
from jaxkernels.core.hardware import Chip
from jaxkernels.core.kernel_op import KernelOp
from jaxkernels.core.sharding import Factors
from jaxkernels.core.types import ArrayType
from toy_operation.spec import ScaleRowsSpec

__all__ = ["scale_rows"]


class _ScaleRows(KernelOp):
    def results(self, static: None, operands: Sequence[ArrayType]) -> list[ArrayType]:
        return [operands[0]]

    def spec(self, static: None, operands: Sequence[ArrayType], target: Chip) -> ScaleRowsSpec:
        return ScaleRowsSpec(*operands, target)

    def factors(self, static: None, operands: Sequence[ArrayType]) -> Factors:
        return Factors(operands=(("m", "n"), ("m",)), results=(("m", "n"),))

    def batch(
        self, args: Sequence[Any], dims: Sequence[int | None], *, static: None, **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        """A mapped axis joins the rows."""
        size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        x, s = (
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)
        )
        out = self.bind(x.reshape(-1, x.shape[2]), s.reshape(-1), static=static, **params)
        return [out.reshape(x.shape)], [0]


_op = _ScaleRows("scale_rows", "toy_scale_rows", multiple_results=False)


def _x_transpose(ct: jax.Array, x: Any, s: jax.Array, **params: Any) -> jax.Array:
    return _op.bind(ct, s, **params)


def _s_transpose(ct: jax.Array, x: jax.Array, s: Any, **params: Any) -> jax.Array:
    return jnp.sum(ct * x, axis=1)


ad.defbilinear(_op.primitive, _x_transpose, _s_transpose)


def scale_rows(x: jax.Array, s: jax.Array, *, backend: str | None = None) -> jax.Array:
    """x * s[:, None], for x (M, N) and s (M,)."""
    if x.ndim != 2 or s.shape != x.shape[:1]:
        raise ValueError(f"scale_rows: s must have shape {x.shape[:1]} for x {x.shape}; got {s.shape}.")
    dispatch.check_backend("scale_rows", backend)
    return _op(x, s, static=None, backend=backend)
