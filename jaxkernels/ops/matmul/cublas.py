"""How long XLA's products take on a GPU, where cuBLAS computes them: the cost model of the backend "xla".

cuBLAS chooses among many kernels. The model takes the best of a few tiles.

Before that, XLA may divide k: into a batch of products with float32 results, which another kernel adds up. Its rule
compares costs in units of its own. It is the same here, so that the model knows the number of parts. That cuBLAS may
divide k, too, is left out: it would change the estimates of 8 of 717 products, and choices would be no better.

Source of XLA's rule: openxla/xla, xla/backends/gpu/transforms/splitk_rewriter.cc.
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
    """

    flops_per_sm: float
    flops_per_sm_by_elements: float
    flops_per_sm_lhs_by_pairs: float
    flops_per_sm_rhs_by_pairs: float
    l2_bytes_per_sm: float
    memory_bytes: float
    launch_seconds: float
    tile_seconds: float


#: Fitted to times of 153 products on an H200, in docs/benchmarks/gemm*.json. Products that were left out of a fit are
#: estimated with a median error of 2.3 %; the 90th percentile is 8 %.
CONSTANTS = Constants(
    flops_per_sm=6.387e12,
    flops_per_sm_by_elements=1.829e12,
    flops_per_sm_lhs_by_pairs=2.257e12,
    flops_per_sm_rhs_by_pairs=4.782e12,
    l2_bytes_per_sm=8.251e10,
    memory_bytes=4.307e12,
    launch_seconds=1.475e-6,
    tile_seconds=7.589e-7,
)

#: block_m, block_n.
_TILES = (
    (256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (64, 32), (32, 64),
)  # fmt: skip
_BLOCK_K = 64

#: Seconds for each element of a result, if XLA applies an activation in a kernel of its own. cuBLAS applies relu.
#: relu_squared is not measured: it has silu's time, most of which is the copy.
_ACTIVATION_SECONDS = {"gelu": 1.4e-12, "gelu_erf": 3e-12, "silu": 1.3e-12, "relu_squared": 1.3e-12}

#: XLA's rule: its tile, its numbers of parts, and the compute capabilities from which on costs are these: of a FLOP, of
#: a byte of the product, of a byte of the sum, and of the sum's launch.
_XLA_TILE = 128
_XLA_PARTS = tuple(2**i for i in range(12))
_XLA_COSTS = {
    (10, 0): (100.0, 0.0848863, 189.711, 1.21563e8),
    (9, 0): (100.0, 0.194136, 193.1384, 4.36e7),
    (0, 0): (100.0, 0.0666955, 467.815, 5.65307e7),
}

#: XLA pads the rows of each part of k to so many bytes.
_XLA_ALIGNED_BYTES = 16


def estimate(spec: MatmulSpec, config: Any, constants: Constants = CONSTANTS) -> float:
    """Seconds: a launch, and the longer of the tiles and of the operands' way from memory."""
    g, batch, size = spec.gemm, spec.gemm.batch or 1, spec.lhs.dtype.itemsize
    parts = _num_parts(spec)
    out_bytes = 4 * parts if parts > 1 else spec.out_dtype.itemsize
    num_bytes = size * (g.m + g.n) * g.k + out_bytes * g.m * g.n
    # In between, tiles wait for memory now and then.
    seconds = hardware.soft_max(_tiles(spec, parts, constants), batch * num_bytes / constants.memory_bytes)
    if parts > 1:
        seconds += tensor_cores.pass_seconds(spec.target, batch * g.m * g.n * (out_bytes + spec.out_dtype.itemsize))
        if g.k % (parts * _XLA_ALIGNED_BYTES // size):
            seconds += tensor_cores.pass_seconds(spec.target, 2 * batch * size * (g.m + g.n) * g.k)
    if spec.is_gradient:
        epilogue = tensor_cores.gradients_seconds(spec)
    else:
        epilogue = _ACTIVATION_SECONDS.get(spec.activation or "", 0.0) * batch * g.m * g.n
    if spec.adds_apart:
        # Reads the product and the residual, and writes the sum.
        epilogue += tensor_cores.pass_seconds(spec.target, 3 * tensor_cores.result_bytes(spec))
    return constants.launch_seconds + seconds + epilogue + tensor_cores.copies_seconds(spec)


def _num_parts(spec: MatmulSpec) -> int:
    """The number of products into which XLA divides k."""
    g, batch, chip = spec.gemm, spec.gemm.batch or 1, spec.target
    if 0 in (g.m, g.n, g.k):
        return 1
    size, out_size = spec.lhs.dtype.itemsize, spec.out_dtype.itemsize
    of_chip = next(costs for least, costs in _XLA_COSTS.items() if (chip.compute_capability or (0, 0)) >= least)
    flop_cost, byte_cost, sum_byte_cost, sum_cost = of_chip
    tile_m, tile_n = min(g.m, _XLA_TILE), min(g.n, _XLA_TILE)
    num_tiles = batch * -(-g.m // _XLA_TILE) * -(-g.n // _XLA_TILE)
    slots = chip.num_sms * _XLA_TILE**2 / (tile_m * tile_n)

    def cost(parts: int) -> float:
        flops = 2 * tile_m * tile_n * -(-g.k // parts) * max(1.0, parts * num_tiles / slots)
        results = batch * g.m * g.n
        num_bytes = batch * size * (g.m + g.n) * g.k + results * (4 * parts if parts > 1 else out_size)
        product = max(flops * flop_cost, num_bytes * byte_cost)
        return product + (sum_cost + results * (4 * parts + out_size) * sum_byte_cost if parts > 1 else 0.0)

    return min(_XLA_PARTS, key=cost)


def _tiles(spec: MatmulSpec, parts: int, constants: Constants) -> float:
    """Seconds of the best tiles. A step of k is bound by the tensor cores or by L2."""
    g, rate, best = spec.gemm, _flops_per_sm(spec, parts, constants), math.inf
    num_products, k = (g.batch or 1) * parts, -(-g.k // parts)
    for block_m, block_n in _TILES:
        flops, num_bytes = 2 * block_m * block_n * _BLOCK_K, 2 * (block_m + block_n) * _BLOCK_K
        step = max(flops / rate, num_bytes / constants.l2_bytes_per_sm)
        tiles = num_products * -(-g.m // block_m) * -(-g.n // block_n)
        waves = hardware.waves(tiles, spec.target.num_sms)
        best = min(best, waves * (-(-k // _BLOCK_K) * step + constants.tile_seconds))
    return best


def _flops_per_sm(spec: MatmulSpec, parts: int, constants: Constants) -> float:
    g, size = spec.gemm, spec.lhs.dtype.itemsize
    sizes = dict(m=g.m, n=g.n, k=g.k if parts == 1 else _XLA_ALIGNED_BYTES)  # XLA has padded a k with parts.
    lhs, rhs = (size * sizes[layout[1]] for layout in (g.lhs_layout, g.rhs_layout))
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
    if spec.gemm.lhs_perm or spec.gemm.rhs_perm:
        return "XLA transposes an operand"
    return "XLA fuses the epilogue, or not" if spec.fused or spec.alpha != 1 else None
