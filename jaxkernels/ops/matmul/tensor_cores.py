"""What kernels that multiply on tensor cores have in common: the products that they take, and how operands of different
dtypes become several products of 16-bit operands."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkernels.core.hardware import Chip
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = [
    "INPUTS",
    "OUTPUTS",
    "copies_seconds",
    "fills_parts",
    "gradients_seconds",
    "is_default",
    "multiply_mixed",
    "pass_seconds",
    "result_bytes",
    "unsupported",
    "unsupported_16_bit_precision",
    "unsupported_dtypes",
    "unsupported_sizes",
]

_BFLOAT16, _FLOAT16, _FLOAT32 = (jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
INPUTS = (_BFLOAT16, _FLOAT16)
OUTPUTS = (*INPUTS, _FLOAT32)

#: So many elements of 4 bytes are more than a signed 32-bit number counts.
_MOST = 2**29

#: A kernel's launch, and the share of the memory's bandwidth that a copy reaches.
_LAUNCH_SECONDS, _COPY_SHARE = 1.5e-6, 0.896

#: What accumulates 16-bit products in float32, by any of its names.
_PRESETS = (
    lax.DotAlgorithmPreset.DEFAULT,
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.F16_F16_F32,
)


def unsupported(spec: MatmulSpec) -> str | None:
    """Why a kernel for Hopper that multiplies 16-bit operands cannot compute the spec, whatever its tiles, or None."""
    if not spec.target.is_hopper:
        return f"needs a GPU of compute capability 9.0 (Hopper), the target is {spec.target}"
    if spec.multiplier is not None and spec.residual is not None:
        return "takes a multiplier or a residual, not both"
    return unsupported_dtypes(spec) or unsupported_16_bit_precision(spec) or unsupported_sizes(spec)


def unsupported_dtypes(spec: MatmulSpec, inputs: Sequence[np.dtype] = INPUTS) -> str | None:
    """Why a kernel whose operands both have one dtype of `inputs` cannot take the spec's dtypes, or None.

    Without an epilogue, `multiply_mixed` makes 16-bit products of operands of two dtypes.
    """
    dtypes = (spec.lhs.dtype, spec.rhs.dtype)
    taken = inputs if dtypes[0] == dtypes[1] else () if spec.fused else OUTPUTS
    if not {*dtypes} <= {*taken}:
        *some, last = (f"two {dtype}" for dtype in inputs)
        return (
            f"takes {', '.join(some)} or {last} operands, or without epilogue any two of bfloat16, float16 and "
            f"float32, not {dtypes[0]} and {dtypes[1]}" + (" with an epilogue" if spec.fused else "")
        )
    if spec.out_dtype not in OUTPUTS:
        return f"returns bfloat16, float16 or float32, not {spec.out_dtype}"
    return None


def unsupported_16_bit_precision(spec: MatmulSpec) -> str | None:
    """Why products of 16-bit operands, accumulated in float32, are not what the spec asks for, or None."""
    is_enough = is_default(spec.precision) or spec.precision in _PRESETS
    if _FLOAT32 in (spec.lhs.dtype, spec.rhs.dtype) and not is_enough:
        return f"keeps 16 bits of a float32 operand, the precision asked for is {spec.precision}"
    if isinstance(spec.precision, lax.DotAlgorithmPreset) and spec.precision not in _PRESETS:
        return f"accumulates 16-bit products in float32, the precision asked for is {spec.precision.name}"
    if isinstance(spec.precision, lax.DotAlgorithm):
        return f"accumulates 16-bit products in float32, the precision asked for is {spec.precision}"
    return None


def is_default(precision: Any) -> bool:
    """Whether a precision asks for nothing in particular."""
    return precision in (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2, lax.DotAlgorithmPreset.DEFAULT)


def unsupported_sizes(spec: MatmulSpec) -> str | None:
    """Why a kernel that counts in 32 bits cannot take the spec's sizes, or None."""
    sizes = (spec.gemm.batch, spec.gemm.m, spec.gemm.n, spec.gemm.k)
    if not all(size is None or isinstance(size, int) for size in sizes):
        return "needs static shapes"
    if 0 in sizes:
        return "has no work in an empty product"
    if (most := max(sizes[1:])) >= _MOST:
        return f"counts the bytes of a row in 32 bits, which {most} elements exceed"
    return None


def gradients_seconds(spec: MatmulSpec) -> float:
    """What a kernel takes that computes the gradients of an activation from a product; 0 for other specs.

    It reads the product and two operands, and writes both gradients.
    """
    return pass_seconds(spec.target, 5 * result_bytes(spec)) if spec.is_gradient else 0.0


def copies_seconds(spec: MatmulSpec) -> float:
    """What copies take around a kernel that cannot read and write slices of arrays for all layers."""
    arrays = spec.arrays()
    return sum(pass_seconds(spec.target, 2 * arrays[name].type.num_bytes) for name in spec.copied)


def result_bytes(spec: MatmulSpec) -> int:
    """The size of the result."""
    return spec.out_dtype.itemsize * (spec.gemm.batch or 1) * spec.gemm.m * spec.gemm.n


def pass_seconds(chip: Chip, num_bytes: int) -> float:
    """The time of an elementwise kernel that reads and writes so many bytes."""
    return _LAUNCH_SECONDS + num_bytes / (_COPY_SHARE * (chip.memory_bytes_per_s or math.inf))


def fills_parts(num_steps: int, parts: int) -> bool:
    """Whether every part of k has a step, if each but the last has as many as the first."""
    return -(-num_steps // parts) * (parts - 1) < num_steps


def multiply_mixed(
    multiply: Callable[[MatmulSpec, jax.Array, jax.Array], jax.Array],
    spec: MatmulSpec,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """Multiplies operands of different dtypes as bfloat16 products: of float32 the high and the low 8 bits, of float16,
    whose 11 bits are two bfloat16, both.

    It is how the cotangent of a product whose result has another dtype meets the operands again. Beside bfloat16 there
    are two products, which cost what one TF32 product costs; of float32 and float16 three, as the product of both
    lower halves is less than what float32 has lost. That keeps 16 bits of a float32 significand, to TF32's 11. Each
    part is scaled by alpha.

    Args:
      multiply: (spec, lhs, rhs) -> lhs * rhs, of bfloat16 operands and with a float32 result.
      spec: the product of both operands as they are.
    """
    as_bfloat16 = lambda array: dataclasses.replace(array, dtype=_BFLOAT16)
    part = dataclasses.replace(
        spec, lhs=as_bfloat16(spec.lhs), rhs=as_bfloat16(spec.rhs), out_dtype=_FLOAT32, precision=None
    )
    pairs = itertools.product(enumerate(_halves(lhs)), enumerate(_halves(rhs)))
    parts = [multiply(part, a, b) for (i, a), (j, b) in pairs if i + j < 2]
    # Beside an infinity the lower halves are no correction: 0, NaN or an infinity of the other sign.
    out = jnp.where(jnp.isfinite(parts[0]), functools.reduce(jnp.add, parts[::-1]), parts[0])
    return out.astype(spec.out_dtype)


def _halves(x: jax.Array) -> tuple[jax.Array, ...]:
    if x.dtype == _BFLOAT16:
        return (x,)
    x = x.astype(_FLOAT32)
    # reduce_precision, as XLA may drop a conversion to bfloat16 and back.
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return high.astype(_BFLOAT16), (x - high).astype(_BFLOAT16)
