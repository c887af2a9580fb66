"""Matrix product by cuBLASLt, with its epilogue as far as cuBLASLt has it; XLA computes the rest.

cuBLASLt proposes algorithms for a product, in the order of its own estimates. The first is not always the fastest, and
none is known before the program runs: a configuration is a place in that order.

XLA pads dimensions whose rows are no whole 16 bytes, and crops the result, as it does for its own products: without it
cuBLASLt is up to four times slower on them.

There is no cost model. A call that names no backend gets this one where a measurement found it fastest
(docs/cublaslt.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxkernels.core.arguments import check_fields
from jaxkernels.core.hardware import needs_capability
from jaxkernels.ffi import cublaslt
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.matmul.epilogue import apply_epilogue
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = ["NUM_COMPARED", "VERSION", "Config", "run", "search_space", "unpreferred", "unsupported"]

VERSION = 1

_LABEL = "matmul[cublaslt]"
#: Algorithms that are worth measuring. Of 16 products on an H200, the first was the fastest of eight in six. One of
#: the last four was in three, by up to 4 %.
_NUM_ALGORITHMS = 8
#: No cost model ranks the algorithms: a comparison measures all, and two without padding.
NUM_COMPARED = _NUM_ALGORITHMS + 2
#: Rows of so many bytes are read and written at full speed.
_UNIT_BYTES = 16
_MOST_ALGORITHMS = 64
#: cuBLASLt counts the products of a batch in 32 bits.
_MOST = 2**31 - 1
#: The first compute capability with products of bfloat16.
_OLDEST_CAPABILITY = (8, 0)
#: Activations that cuBLASLt applies.
_ACTIVATIONS = ("relu", "gelu")


@dataclasses.dataclass(frozen=True)
class Config:
    """An algorithm.

    Attributes:
      algorithm: its place among cuBLASLt's proposals for the product; 0 is the first.
      pads: whether rows that are no whole 16 bytes are padded.
    """

    algorithm: int = 0
    pads: bool = True

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        if not 0 <= self.algorithm < _MOST_ALGORITHMS:
            raise ValueError(f"{_LABEL}: algorithm must be from 0 to {_MOST_ALGORITHMS - 1}; got {self.algorithm}.")


def unsupported(spec: MatmulSpec) -> str | None:
    if (needs := needs_capability(spec.target, _OLDEST_CAPABILITY)) is not None:
        return f"{needs}, the target is {spec.target}"
    if spec.lhs.dtype != spec.rhs.dtype or spec.lhs.dtype not in tensor_cores.INPUTS:
        return f"takes two bfloat16 or two float16 operands, not {spec.lhs.dtype} and {spec.rhs.dtype}"
    if spec.out_dtype not in (spec.lhs.dtype, jnp.float32):
        return f"returns {spec.lhs.dtype} or float32 of {spec.lhs.dtype} operands, not {spec.out_dtype}"
    if reason := tensor_cores.unsupported_16_bit_precision(spec) or tensor_cores.unsupported_sizes(spec):
        return reason
    if (spec.gemm.batch or 1) > _MOST:
        return f"counts products in 32 bits, which a batch of {spec.gemm.batch} exceeds"
    return cublaslt.missing()


def unpreferred(spec: MatmulSpec) -> str | None:
    return "taken where a measurement finds it fastest"


def search_space(spec: MatmulSpec) -> tuple[Config, ...]:
    """Padded products, where rows are odd, come first. Unpadded ones can be faster if they are small."""
    pads = (True, False) if _padding(spec) else (True,)
    return tuple(Config(i, x) for x in pads for i in range(_NUM_ALGORITHMS))


def run(spec: MatmulSpec, config: Config, *arrays: jax.Array) -> jax.Array | list[jax.Array]:
    """Returns the product, or the results as a list when the spec has an epilogue."""
    operands, g = spec.named("matmul", arrays), spec.gemm
    padding = _padding(spec) if config.pads else {}
    parts = [part for part in _parts_in_cublaslt(spec) if part != "residual" or not padding]
    lhs, rhs = spec.fold(operands["lhs"], operands["rhs"])
    lhs, rhs = _padded(lhs, g.lhs_layout, padding), _padded(rhs, g.rhs_layout, padding)
    bias = _padded(operands["bias"], "n", padding) if "bias" in parts else None
    residual = operands["residual"].reshape(*lhs.shape[:-2], g.m, g.n) if "residual" in parts else None
    out = cublaslt.multiply(
        lhs, rhs, bias, residual, layouts=(g.lhs_layout, g.rhs_layout), out_dtype=spec.out_dtype, alpha=spec.alpha,
        activation=spec.activation if "activation" in parts else None, algorithm=config.algorithm,
    )  # fmt: skip
    out = spec.unfold(out[..., : g.m, : g.n])
    return out if not spec.fused else apply_epilogue(dataclasses.replace(spec, **dict.fromkeys(parts)), out, operands)


def _padding(spec: MatmulSpec) -> dict[str, int]:
    """Axis -> elements to add, of the axes that are contiguous in an operand or the result."""
    g = spec.gemm
    unit = _UNIT_BYTES // spec.lhs.dtype.itemsize
    missing = {axis: -getattr(g, axis) % unit for axis in {g.lhs_layout[1], g.rhs_layout[1], "n"}}
    return {axis: missing[axis] for axis in "mnk" if missing.get(axis)}


def _padded(x: jax.Array, axes: str, padding: Mapping[str, int]) -> jax.Array:
    """The last axes of an array padded with zeros."""
    widths = [(0, 0)] * (x.ndim - len(axes)) + [(0, padding.get(axis, 0)) for axis in axes]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _parts_in_cublaslt(spec: MatmulSpec) -> list[str]:
    """The parts of the epilogue that cuBLASLt applies. They come before all others."""
    parts = []
    if spec.is_gradient:
        return parts
    if spec.bias is not None:
        if spec.bias.dtype != spec.out_dtype:
            return parts
        parts.append("bias")
    if spec.save_preactivation:
        return parts
    if spec.activation is not None:
        # It applies activations to results of the operands' dtype.
        if spec.activation in _ACTIVATIONS and spec.out_dtype == spec.lhs.dtype:
            parts.append("activation")
        return parts
    if spec.multiplier is None and spec.residual is not None and spec.residual.dtype == spec.out_dtype:
        parts.append("residual")
    return parts
