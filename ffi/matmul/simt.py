"""Products of float32 matrices on CUDA cores, without TF32: the best rungs of the SGEMM ladder (`ffi/sgemm`).

It serves products of precision HIGHEST. The rungs take row-major matrices: XLA transposes others, and applies the
epilogue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkernels.core.arguments import check_fields
from jaxkernels.ffi import handler
from jaxkernels.ffi.sgemm import RUNGS, sgemm
from jaxkernels.ffi.sgemm import estimate as sgemm_estimate
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.matmul.epilogue import apply_epilogue
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "unpreferred", "unsupported"]

#: Versions of a backend's designs are added: at 0, what was measured of the other design stays valid.
VERSION = 0

_LABEL = "matmul[cuda]"
_FLOAT32 = jnp.dtype(jnp.float32)
_NUMBERS = [rung.number for rung in RUNGS]
#: The first rung that is worth trying.
_FIRST = 9
_EXACT = (
    lax.Precision.HIGHEST,
    (lax.Precision.HIGHEST, lax.Precision.HIGHEST),
    lax.DotAlgorithmPreset.F32_F32_F32,
)
# Bytes/s of a transposition or of the padding of rows: rough, not fitted.
_COPY_BYTES = 3e12
# With so many FLOPs, rows, columns and steps of k, the last rung was as fast as cuBLAS in 8 shapes on an H200 (0.99 to
# 1.16 of its speed), and with less in none of 5.
_LEAST_FLOPS = 3e9
_LEAST_ROWS, _LEAST_K = 256, 512


@dataclasses.dataclass(frozen=True)
class Config:
    """The kernel.

    Attributes:
      rung: number of the rung of the SGEMM ladder.
    """

    rung: int = RUNGS[-1].number

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        if self.rung not in _NUMBERS:
            raise ValueError(f"{_LABEL}: rung must be from 1 to {len(_NUMBERS)}; got {self}.")


def unsupported(spec: MatmulSpec) -> str | None:
    if not spec.lhs.dtype == spec.rhs.dtype == spec.out_dtype == _FLOAT32:
        return f"on CUDA cores takes and returns float32, not {spec.lhs.dtype}, {spec.rhs.dtype} to {spec.out_dtype}"
    if spec.precision not in _EXACT:
        return (
            f"on CUDA cores multiplies float32 exactly (precision HIGHEST), the precision asked for is {spec.precision}"
        )
    if spec.target.platform != "cuda" or (spec.target.compute_capability or (0, 0)) < (8, 0):
        return f"needs a GPU of compute capability 8.0 or newer, the target is {spec.target}"
    if reason := tensor_cores.unsupported_sizes(spec):
        return reason
    if (spec.gemm.batch or 1) > 1:
        return f"on CUDA cores has no batches, got {spec.gemm.batch} products"
    return handler.missing()


def unpreferred(spec: MatmulSpec) -> str | None:
    """Chosen unasked where it was measured faster than cuBLAS."""
    if not spec.target.is_hopper:
        return "is measured on Hopper only"
    g = spec.gemm
    if copied := _copied_bytes(spec):
        return f"is slower than cuBLAS where operands are transposed or padded first, here {copied / 2e6:.1f} MB"
    if 2 * g.m * g.n * g.k < _LEAST_FLOPS:
        return f"is slower than cuBLAS below {_LEAST_FLOPS / 1e9:.0f} GFLOP"
    if min(g.m, g.n) < _LEAST_ROWS or g.k < _LEAST_K:
        return f"was not measured beside cuBLAS below {_LEAST_ROWS} rows and columns, and a k of {_LEAST_K}"
    return None


def search_space(spec: MatmulSpec) -> Iterator[Config]:
    """Yields the rungs from the autotuned one on that run on the chip, the last one first."""
    for rung in reversed(RUNGS):
        if rung.number >= _FIRST and (spec.target.is_hopper or not rung.uses_tma):
            yield Config(rung.number)


def estimate(spec: MatmulSpec, config: Config) -> float:
    """Seconds: the ladder's own model, and XLA's copies of operands."""
    g, chip = spec.gemm, spec.target
    num_sms = chip.num_sms or 132
    hertz = chip.fp32_flops_per_s / (256 * num_sms) if chip.fp32_flops_per_s else 1.5e9
    rung = sgemm_estimate(g.m, g.n, g.k, config.rung, num_sms=num_sms, hertz=hertz)
    return rung + _copied_bytes(spec) / _COPY_BYTES


def _copied_bytes(spec: MatmulSpec) -> int:
    """Bytes that XLA reads and writes to transpose operands, and to pad rows that are no multiple of 16 bytes."""
    g = spec.gemm
    is_copied = (g.lhs_layout == "km" or g.k % 4 != 0, g.rhs_layout == "nk" or g.n % 4 != 0)
    return sum(8 * size for size, copied in zip((g.m * g.k, g.k * g.n), is_copied) if copied)


def run(spec: MatmulSpec, config: Config, *arrays: jax.Array) -> Any:
    """Returns the product, or the results as a list when the spec has an epilogue."""
    operands = spec.named("matmul", arrays)
    g = spec.gemm
    lhs, rhs = spec.fold(operands["lhs"], operands["rhs"])
    lhs, rhs = lhs.reshape(lhs.shape[-2:]), rhs.reshape(rhs.shape[-2:])
    lhs = lhs.T if g.lhs_layout == "km" else lhs
    rhs = rhs.T if g.rhs_layout == "nk" else rhs
    out = sgemm(lhs, rhs, alpha=spec.alpha, rung=config.rung)
    out = spec.unfold(out if g.batch is None else out[None])
    return apply_epilogue(spec, out, operands) if spec.fused else out
