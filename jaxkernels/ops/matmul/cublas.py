"""How long XLA's products take on a GPU, where cuBLAS computes them: the cost model of the backend "xla".

cuBLAS chooses among many kernels. The model takes the best of a few tiles and of a few numbers of parts of k.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jaxkernels.core import hardware
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = ["CONSTANTS", "Constants", "estimate", "not_estimated"]


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model.

    Attributes:
      flops_per_sm: FLOP/s of one SM.
      flops_per_sm_by_elements: the same if rows of an operand are no whole number of 4 bytes.
      flops_per_sm_lhs_by_pairs: the same if rows of the lhs are whole numbers of 4, but not of 16 bytes.
      flops_per_sm_rhs_by_pairs: the same of the rhs.
      l2_bytes_per_sm: bytes/s of one SM from L2.
      memory_bytes: bytes/s of the chip's memory.
      launch_seconds: a launch.
      tile_seconds: beginning and storing a tile.
      split_seconds: adding up a split product.
    """

    flops_per_sm: float
    flops_per_sm_by_elements: float
    flops_per_sm_lhs_by_pairs: float
    flops_per_sm_rhs_by_pairs: float
    l2_bytes_per_sm: float
    memory_bytes: float
    launch_seconds: float
    tile_seconds: float
    split_seconds: float


#: Fitted to 165 times of 153 products on an H200, in docs/benchmarks/gemm*.json. Products that were left out of a fit
#: are estimated with a median error of 2.4 %; the 90th percentile is 13 %.
CONSTANTS = Constants(
    flops_per_sm=6.387e12,
    flops_per_sm_by_elements=1.829e12,
    flops_per_sm_lhs_by_pairs=2.257e12,
    flops_per_sm_rhs_by_pairs=4.782e12,
    l2_bytes_per_sm=8.251e10,
    memory_bytes=4.307e12,
    launch_seconds=1.475e-6,
    tile_seconds=7.589e-7,
    split_seconds=3.205e-6,
)

#: block_m, block_n.
_TILES = (
    (256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (64, 32), (32, 64),
)  # fmt: skip
_BLOCK_K = 64
_SPLITS = (1, 2, 3, 4, 6, 8, 16)

#: Seconds for each element of a result, if XLA applies an activation in a kernel of its own. cuBLAS applies relu.
#: relu_squared is not measured: it has silu's time, most of which is the copy.
_ACTIVATION_SECONDS = {"gelu": 1.4e-12, "gelu_erf": 3e-12, "silu": 1.3e-12, "relu_squared": 1.3e-12}

#: The times of the fit have few tiles for many steps of k only with few rows or columns.
_FEW_ROWS, _LONG_K = 64, 8192


def estimate(spec: MatmulSpec, config: Any, constants: Constants = CONSTANTS) -> float:
    """Seconds: a launch, and the longer of the tiles and of the operands' way from memory."""
    g, batch = spec.gemm, spec.gemm.batch or 1
    num_bytes = spec.lhs.dtype.itemsize * (g.m + g.n) * g.k + spec.out_dtype.itemsize * g.m * g.n
    # In between, tiles wait for memory now and then.
    seconds = hardware.soft_max(_tiles(spec, constants), batch * num_bytes / constants.memory_bytes)
    if spec.is_gradient:
        epilogue = tensor_cores.gradients_seconds(spec)
    else:
        epilogue = _ACTIVATION_SECONDS.get(spec.activation or "", 0.0) * batch * g.m * g.n
    if spec.adds_apart:
        # Reads the product and the residual, and writes the sum.
        epilogue += tensor_cores.pass_seconds(spec.target, 3 * tensor_cores.result_bytes(spec))
    return constants.launch_seconds + seconds + epilogue + tensor_cores.copies_seconds(spec)


def _tiles(spec: MatmulSpec, constants: Constants) -> float:
    """Seconds of the best tiles. A step of k is bound by the tensor cores or by L2."""
    g, rate, best = spec.gemm, _flops_per_sm(spec, constants), math.inf
    out_size = (g.batch or 1) * g.m * g.n
    for block_m, block_n in _TILES:
        flops, num_bytes = 2 * block_m * block_n * _BLOCK_K, 2 * (block_m + block_n) * _BLOCK_K
        step = max(flops / rate, num_bytes / constants.l2_bytes_per_sm)
        tiles = (g.batch or 1) * -(-g.m // block_m) * -(-g.n // block_n)
        for parts in _SPLITS:
            waves = hardware.waves(tiles * parts, spec.target.num_sms)
            seconds = waves * (-(-g.k // (_BLOCK_K * parts)) * step + constants.tile_seconds)
            if parts > 1:  # Each part is written and read in float32.
                seconds += constants.split_seconds + 8 * parts * out_size / constants.memory_bytes
            best = min(best, seconds)
    return best


def _flops_per_sm(spec: MatmulSpec, constants: Constants) -> float:
    g, size = spec.gemm, spec.lhs.dtype.itemsize
    lhs, rhs = (size * dict(m=g.m, n=g.n, k=g.k)[layout[1]] for layout in (g.lhs_layout, g.rhs_layout))
    if lhs % 4 or rhs % 4:
        return constants.flops_per_sm_by_elements
    if lhs % 16:
        return constants.flops_per_sm_lhs_by_pairs
    return constants.flops_per_sm_rhs_by_pairs if rhs % 16 else constants.flops_per_sm


def not_estimated(spec: MatmulSpec, config: Any) -> str | None:
    """Which part of the time of a product the estimate leaves out, or None."""
    if {spec.lhs.dtype, spec.rhs.dtype} - {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
        return "operands are not of 16 bits"
    if spec.lhs.dtype != spec.rhs.dtype:
        return "operands of two dtypes are converted"
    g = spec.gemm
    tiles = (g.batch or 1) * -(-g.m // 128) * -(-g.n // 128)
    if min(g.m, g.n) > _FEW_ROWS and g.k > _LONG_K and tiles < spec.target.num_sms:
        return "how cuBLAS divides a long k among few tiles has not been measured"
    if spec.gemm.lhs_perm or spec.gemm.rhs_perm:
        return "XLA transposes an operand"
    return "XLA fuses the epilogue, or not" if spec.fused or spec.alpha != 1 else None
