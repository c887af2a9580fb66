"""Layouts of the attention kernels' tiles in registers and in shared memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector

__all__ = [
    "COLUMNS",
    "ROWS",
    "TILE",
    "TRANSFORMS_FLOAT32",
    "scale_rows",
    "swizzle_span",
    "transforms_of",
]

#: Transforms of a (rows, columns) tile of 32-bit values in shared memory: TMA reads it without bank conflicts.
#: (The two classes have an abstract method that JAX never implements.)
TRANSFORMS_FLOAT32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
#: Layouts in registers: an accumulator, and one value for each of its rows or columns.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def swizzle_span(*columns: int) -> int:
    """The 16-bit columns in a swizzle span that divides all of `columns`: 64, or 32."""
    return math.gcd(64, *columns)


def transforms_of(*columns: int) -> tuple[Any, ...]:
    """Transforms of a (rows, columns) tile of 16-bit values in shared memory, for wgmma and TMA without bank conflicts.

    Args:
      columns: the columns of the tile, and of the tiles that it is multiplied by. Operands of a product need the same
        swizzle.
    """
    span = swizzle_span(*columns)
    return plgpu.TilingTransform((8, span)), plgpu.SwizzleTransform(2 * span)  # pyright: ignore[reportAbstractUsage]


def scale_rows(tile: jax.Array, factors: jax.Array) -> jax.Array:
    """tile * factors[:, None], in `TILE` and `ROWS`. A warp skips it if the factors of all its rows are 1.

    This is MLIR, because a branch in Pallas needs a scalar on which all 128 threads agree.
    """
    like_tile = plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE)
    inline: Any = plgpu.inline_mgpu(arg_types=(TILE, ROWS), return_type=like_tile)
    return inline(_scale_rows)(tile, factors)


def _scale_rows(ctx: Any, tile: Any, factors: Any) -> Any:
    """`scale_rows` in MLIR, on a thread's registers."""
    del ctx
    one, all_lanes = mgpu.c(1.0, ir.F32Type.get()), mgpu.c(0xFFFFFFFF, ir.IntegerType.get_signless(32))
    values = [vector.extract(register, [], [0]) for register in factors.registers.flat]
    differ = [arith.cmpf(arith.CmpFPredicate.UNE, value, one) for value in values]
    any_differs = nvvm.vote_sync(all_lanes, functools.reduce(arith.ori, differ), "any")
    unscaled = list(tile.registers.flat)
    branch: Any = scf.IfOp(any_differs, [register.type for register in unscaled], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scaled = tile * factors.broadcast_in_dim(tile.shape, (0,), tile.layout)
        scf.yield_(list(scaled.registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(unscaled)
    registers = np.array(list(branch.results), dtype=object).reshape(tile.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=tile.is_signed)
