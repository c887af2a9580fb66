"""Matrix product with its epilogue in Triton.

Tiles of the result are numbered in strips, so that programs that run at the same time share operands in L2. A program
computes one tile. With `programs_per_sm` it computes several, one after the other: Triton then loads for the next tile
while it stores the last. Where tiles are few, k is divided into parts: each gives a float32 product, and XLA adds these
up in order before the epilogue.

Rows and columns need no mask. A dimension shorter than the tile wraps around, and the last tile of a longer one ends
where the result does.

Source: structure after Triton's tutorial "Matrix Multiplication"; ladder and figures: docs/triton.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxkernels.core.arguments import check_fields
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.matmul.epilogue import apply_epilogue
from jaxkernels.ops.matmul.spec import Activation, MatmulSpec
from jaxkernels.triton import calls, chips

__all__ = [
    "CONSTANTS",
    "VERSION",
    "Config",
    "Constants",
    "Params",
    "estimate",
    "not_estimated",
    "run",
    "search_space",
    "unpreferred",
    "unsupported",
]

VERSION = 2

_LABEL = "matmul[triton]"
_FLOAT32 = np.dtype(np.float32)
_INPUTS = (*tensor_cores.INPUTS, _FLOAT32)

#: What Triton calls the ways to multiply float32: one TF32 product, three, or the ordinary fp32 units.
_PRECISIONS = {
    lax.Precision.HIGH: "tf32x3",
    lax.Precision.HIGHEST: "ieee",
    lax.DotAlgorithmPreset.TF32_TF32_F32: "tf32",
    lax.DotAlgorithmPreset.TF32_TF32_F32_X3: "tf32x3",
    lax.DotAlgorithmPreset.F32_F32_F32: "ieee",
}
#: Accumulators and operands in registers of a thread. With more, ptxas spills.
_MOST_REGISTERS = 200
#: The kernel counts tiles in 32 bits. A strip wider than the result has the same order as one as wide as the result.
_MOST = 2**16
#: What 32 bits count.
_MOST_TILES = 2**31
#: Parts of k. XLA adds them up in one pass.
_MOST_PARTS = 32
#: Registers of a thread beside its accumulators, and warps of an SM: they limit how many programs run on it.
_OTHER_REGISTERS, _MOST_WARPS = 24, 64
#: Columns that are stored at once: what they need in shared memory would else take room of the pipeline.
_PIECE_N = 64


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model. The rates that they refer to are those of `jaxkernels.triton.chips`.

    Attributes:
      add_seconds: the launch of XLA's kernel that adds up parts of k.
      tile_seconds: what each wave of tiles takes beside its steps; the first one, with the launch.
      next_tile_seconds: the same if a program computes several tiles. It stores one while it loads for the next.
      reached_flops: the share of the tensor cores' rate that products alone would reach. It exceeds 1, as products wait
        for operands also where the model has the two overlap.
      tile_exponent: a tile below 2^15 elements reaches (elements / 2^15) to this power of it.
      program_exponent: several programs on an SM reach (programs) to this power of what one reaches.
      slow_products, most_slow_products: on Hopper, factor of the rate and the most of it that is reached without wgmma,
        which needs 64 rows and four warps.
      short_rows: factor of the rate on Hopper if block_k elements have fewer than 128 bytes.
      reached_l2: the share of L2's rate that kernels reach.
      reached_bytes: the share of the memory's rate that kernels reach.
      copy_seconds: an asynchronous copy. It has 4, 8 or 16 bytes: the most that divides the bytes of a row.
      element_seconds: loading an element of an operand whose rows are no whole number of 4 bytes. Triton loads it
        without asynchronous copies, element by element.
      waiting_seconds: from an asynchronous copy to its arrival.
      loading_seconds: the same for other loads.
      store_seconds: a store. It has 2 to 16 bytes: the most that divides the bytes of a row.
    """

    add_seconds: float
    tile_seconds: float
    next_tile_seconds: float
    reached_flops: float
    tile_exponent: float
    program_exponent: float
    slow_products: float
    most_slow_products: float
    short_rows: float
    reached_l2: float
    reached_bytes: float
    copy_seconds: float
    element_seconds: float
    waiting_seconds: float
    loading_seconds: float
    store_seconds: float


#: Fitted to measured times: 649 products on an H200 and an H100, most of them drawn at random, and 1,044 configurations
#: of 60 other products. The median errors are 10 % and 12 %, the 90th percentiles 38 % and 34 %.
CONSTANTS = Constants(
    add_seconds=9e-07,
    tile_seconds=1.1e-06,
    next_tile_seconds=1.7e-06,
    reached_flops=1.3,
    tile_exponent=0.19,
    program_exponent=0.61,
    slow_products=0.18,
    most_slow_products=0.24,
    short_rows=0.77,
    reached_l2=3.1,
    reached_bytes=0.9,
    copy_seconds=1.2e-10,
    element_seconds=5.5e-11,
    waiting_seconds=6.2e-07,
    loading_seconds=5.1e-07,
    store_seconds=1.5e-10,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and schedule.

    Attributes:
      block_m, block_n: tile of the result.
      block_k: depth of a step.
      num_warps: warps of a program.
      num_stages: steps in flight.
      strip: rows of tiles that are numbered together.
      split_k: parts of k.
      programs_per_sm: how many programs there are for an SM; 0: one for each tile.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    strip: int = 8
    split_k: int = 1
    programs_per_sm: int = 0

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        for name in ("block_m", "block_n", "block_k"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{_LABEL}: {name} must be a power of two of at least 16; got {size}.")
        calls.check_schedule(_LABEL, self.num_warps, self.num_stages)
        for name, least in (("strip", 1), ("split_k", 1), ("programs_per_sm", 0)):
            if not least <= getattr(self, name) <= _MOST:
                raise ValueError(f"{_LABEL}: {name} must be from {least} to {_MOST}; got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class Params:
    """What the kernel is compiled for.

    Attributes:
      m, n, k, batch: sizes.
      lhs_stride_m, lhs_stride_k, rhs_stride_k, rhs_stride_n: elements from a row or column to the next.
      block_m, block_n, block_k, strip: as in `Config`.
      m_tiles, n_tiles: tiles along the result's dimensions.
      k_iters: steps of a part of k.
      num_items, num_programs: tiles of all batch elements and parts; and what computes them.
      masks_k: whether the last step is not whole.
      is_wide: whether offsets in a batch element need 64 bits.
      alpha, has_bias, activation, has_multiplier, has_residual, saves_preactivation: the epilogue.
      input_precision: how float32 is multiplied.
      lhs_unit, rhs_unit, out_unit: what divides the offset of each tile.
      piece_n: columns that are stored at once.
    """

    m: int
    n: int
    k: int
    batch: int
    lhs_stride_m: int
    lhs_stride_k: int
    rhs_stride_k: int
    rhs_stride_n: int
    block_m: int
    block_n: int
    block_k: int
    strip: int
    m_tiles: int
    n_tiles: int
    k_iters: int
    num_items: int
    num_programs: int
    masks_k: bool
    is_wide: bool
    alpha: float
    has_bias: bool
    activation: Activation | None
    has_multiplier: bool
    has_residual: bool
    saves_preactivation: bool
    input_precision: str
    lhs_unit: int
    rhs_unit: int
    out_unit: int
    piece_n: int

    @classmethod
    def of(cls, spec: MatmulSpec, config: Config) -> Params:
        g, tile = spec.gemm, _Tiles.of(spec, config)
        lhs_contiguous, rhs_contiguous = (g.k if layout[-1] == "k" else 0 for layout in (g.lhs_layout, g.rhs_layout))
        places = config.programs_per_sm * chips.num_sms(spec.target) or tile.items
        return cls(
            m=g.m,
            n=g.n,
            k=g.k,
            batch=g.batch or 1,
            lhs_stride_m=g.k if g.lhs_layout == "mk" else 1,
            lhs_stride_k=1 if g.lhs_layout == "mk" else g.m,
            rhs_stride_k=g.n if g.rhs_layout == "kn" else 1,
            rhs_stride_n=1 if g.rhs_layout == "kn" else g.k,
            block_m=config.block_m,
            block_n=config.block_n,
            block_k=config.block_k,
            strip=min(config.strip, tile.m),
            m_tiles=tile.m,
            n_tiles=tile.n,
            k_iters=tile.k_iters,
            num_items=tile.items,
            num_programs=min(tile.items, places),
            masks_k=tile.k_iters * config.split_k * config.block_k != g.k,
            is_wide=max(g.m * g.k, g.k * g.n, g.m * g.n) >= 2**31,
            alpha=spec.alpha,
            has_bias=spec.bias is not None,
            activation=spec.activation,
            has_multiplier=spec.multiplier is not None,
            has_residual=spec.residual is not None,
            saves_preactivation=spec.save_preactivation,
            input_precision=_input_precision(spec) or "tf32",
            lhs_unit=math.gcd(lhs_contiguous or g.m, 16),
            rhs_unit=math.gcd(rhs_contiguous or g.n, 16),
            out_unit=math.gcd(g.n, 16),
            piece_n=min(config.block_n, _PIECE_N),
        )


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How many tiles there are along m and n, steps in a part of k, and tiles in all."""

    m: int
    n: int
    k_iters: int
    items: int

    @classmethod
    def of(cls, spec: MatmulSpec, config: Config) -> _Tiles:
        g = spec.gemm
        m, n = -(-g.m // config.block_m), -(-g.n // config.block_n)
        k_iters = -(-_steps(spec, config) // config.split_k)
        return cls(m, n, k_iters, (g.batch or 1) * m * n * config.split_k)


def _itemsize(spec: MatmulSpec) -> int:
    """Bytes of an operand's element."""
    return 4 if spec.lhs.dtype == spec.rhs.dtype == _FLOAT32 else 2


def _result_itemsize(spec: MatmulSpec, config: Config) -> int:
    """Bytes of an element that is stored: float32 where products are added up."""
    return 4 if config.split_k > 1 or spec.lhs.dtype != spec.rhs.dtype else spec.out_dtype.itemsize


def _steps(spec: MatmulSpec, config: Config) -> int:
    return -(-spec.gemm.k // config.block_k)


def _input_precision(spec: MatmulSpec) -> str | None:
    """How two float32 operands are multiplied, or None if there is no way."""
    precision = spec.precision
    if isinstance(precision, tuple):
        precision = precision[0] if precision[0] == precision[1] else None
        return None if precision is None else _PRECISIONS.get(precision, "tf32")
    return "tf32" if tensor_cores.is_default(precision) else _PRECISIONS.get(precision)


def unsupported(spec: MatmulSpec) -> str | None:
    if reason := calls.unsupported_chip(spec.target) or tensor_cores.unsupported_dtypes(spec, _INPUTS):
        return reason
    if spec.lhs.dtype == spec.rhs.dtype == _FLOAT32:
        if _input_precision(spec) is None:
            return (
                f"multiplies float32 in TF32, three times TF32 or float32; the precision asked for is {spec.precision}"
            )
    elif reason := tensor_cores.unsupported_16_bit_precision(spec):
        return reason
    if reason := tensor_cores.unsupported_sizes(spec):
        return reason
    if (spec.gemm.batch or 1) * spec.gemm.m * spec.gemm.n >= 16 * 16 * _MOST_TILES:
        return f"counts tiles in 32 bits, which {spec.gemm.batch or 1} of {spec.gemm.m} x {spec.gemm.n} may exceed"
    return calls.missing()


def unpreferred(spec: MatmulSpec) -> str | None:
    """On Hopper XLA calls cuBLAS, which has TMA and warps of different roles."""
    return "cuBLAS, by XLA, is faster on Hopper unless measured otherwise" if spec.target.is_hopper else None


# Configurations.

#: Of products with so few rows or columns, loads take the time.
_FEW = 64

#: Smaller tiles need several programs on an SM: with one for several tiles they took 1.02 to 4.2 times as long.
_LARGE = 128 * 128

#: Bytes of a line of L2.
_LINE = 128

#: (block_m, block_n, block_k, num_warps) for operands of 16 bits; of float32, block_k is half. Of equals, the first.
_TILES = (
    (128, 256, 64, 8), (256, 128, 64, 8), (128, 128, 64, 8), (128, 128, 64, 4), (128, 128, 32, 4), (64, 256, 64, 4),
    (64, 256, 32, 4), (64, 128, 64, 4), (64, 128, 32, 4), (128, 64, 64, 4), (256, 64, 32, 4), (64, 64, 64, 4),
    (64, 64, 32, 4), (64, 64, 128, 4), (64, 32, 64, 4), (64, 32, 32, 4), (64, 32, 128, 4), (128, 32, 64, 4),
    (64, 16, 64, 4), (64, 16, 32, 4), (64, 16, 128, 4), (128, 16, 64, 4), (128, 16, 32, 4), (256, 16, 64, 8),
    (32, 128, 64, 4), (32, 64, 64, 4), (32, 64, 32, 4), (32, 32, 64, 4), (32, 16, 64, 4), (32, 16, 128, 4),
    (16, 128, 64, 4), (16, 128, 32, 4), (16, 256, 32, 4), (16, 64, 128, 4), (16, 64, 64, 4), (16, 64, 32, 4),
    (16, 32, 128, 4), (16, 32, 64, 4), (16, 32, 32, 4), (16, 16, 64, 4), (16, 16, 128, 4), (16, 16, 32, 4),
)  # fmt: skip
_STAGES = (4, 3, 2)


def search_space(spec: MatmulSpec) -> Iterator[Config]:
    """Tiles that fit the problem, shared memory and registers; parts of k where tiles are few."""
    g = spec.gemm
    found = False
    for (block_m, block_n, block_k, num_warps), num_stages in itertools.product(_TILES, _STAGES):
        if _itemsize(spec) == 4:
            block_k = max(16, block_k // 2)
        tile = Config(block_m, block_n, block_k, num_warps, num_stages)
        is_smallest = (block_m, block_n) == (16, 16) and num_stages == 2
        fits = _fits(spec, tile) and block_m < 2 * max(g.m, 16) and block_n < 2 * max(g.n, 16)
        # wgmma needs 64 rows.
        fits &= g.n <= _FEW or block_m >= min(64 if spec.target.is_hopper else 32, g.m)
        if not fits and (found or not is_smallest):
            continue
        found = True
        for split_k in _splits(spec, tile):
            yield dataclasses.replace(tile, split_k=split_k)
        if block_m * block_n >= _LARGE and _Tiles.of(spec, tile).items > chips.num_sms(spec.target):
            several = dataclasses.replace(tile, programs_per_sm=1)
            if _fits(spec, several):
                yield several


def _fits(spec: MatmulSpec, config: Config) -> bool:
    itemsize, threads = _itemsize(spec), 32 * config.num_warps
    operands = 0 if spec.target.is_hopper else (config.block_m + config.block_n) * 16 * itemsize / 4 / 2
    # Elements that are loaded one by one wait in registers.
    registers = (config.block_m * config.block_n + operands + _loads(spec, config)[1]) / threads
    most = _MOST_REGISTERS / 3 if _input_precision(spec) == "ieee" and itemsize == 4 else _MOST_REGISTERS
    return _shared_bytes(spec, config) <= chips.smem_bytes(spec.target) and registers <= most


def _shared_bytes(spec: MatmulSpec, config: Config) -> int:
    """Shared memory of a program. What is stored takes the place of the pipeline, unless that runs on."""
    pipeline = config.num_stages * (config.block_m + config.block_n) * config.block_k * _itemsize(spec)
    piece = config.block_m * min(config.block_n, _PIECE_N) * _result_itemsize(spec, config)
    return (pipeline + piece if config.programs_per_sm else max(pipeline, piece)) + 1024


def _splits(spec: MatmulSpec, tile: Config) -> Iterator[int]:
    """Powers of two: parts of k that fill the chip at most eight times, each of at least two steps."""
    items, num_sms, steps = _Tiles.of(spec, tile).items, chips.num_sms(spec.target), _steps(spec, tile)
    most = max(1, min(_MOST_PARTS, 8 * num_sms // items, steps // 2))
    parts = [2**i for i in range(1, most.bit_length()) if tensor_cores.fills_parts(steps, 2**i)]
    yield 1
    # Fewer leave most SMs idle.
    yield from [x for x in parts if 4 * items * x >= num_sms] or parts[-2:]


def estimate(spec: MatmulSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds. Three things take time: work of the SMs, waiting for operands, and the memory. They overlap in part."""
    g, c, tile = spec.gemm, constants, _Tiles.of(spec, config)
    rates, num_sms = chips.rates_of(spec.target), chips.num_sms(spec.target)
    programs = _programs_per_sm(spec, config, tile.items)
    products, products_of_one = _product_seconds(spec, config, programs, c)
    num_copies, num_elements = _loads(spec, config)
    issue = num_copies * c.copy_seconds + num_elements * c.element_seconds
    lines = _l2_bytes(spec, config) / (rates.l2_bytes * c.reached_l2)
    has_next_tile = config.programs_per_sm > 0
    stores = 0.0 if has_next_tile else _num_stores(spec, config) * c.store_seconds
    # The tiles of the last, partial wave have an SM with fewer others.
    full, rest = divmod(tile.items, num_sms * programs)
    tiles_of_sm = full * programs + -(-rest // num_sms)
    waves = -(-tile.items // (num_sms * programs))
    work = tiles_of_sm * (tile.k_iters * math.hypot(products, lines + issue) + stores)
    if num_elements:  # Without asynchronous copies a program loads, waits and multiplies, one after the other.
        waiting = c.loading_seconds + issue + products_of_one
    else:  # Other steps are in flight meanwhile.
        waiting = c.waiting_seconds / max(1, config.num_stages - 1)
    num_bytes = (g.batch or 1) * ((g.m * g.k + g.k * g.n) * _itemsize(spec) + g.m * g.n * spec.out_dtype.itemsize)
    memory = num_bytes / (rates.memory_bytes * num_sms * c.reached_bytes)
    seconds = math.hypot(work, waves * tile.k_iters * waiting, memory)
    seconds += waves * (c.next_tile_seconds if has_next_tile else c.tile_seconds)
    if config.split_k > 1:
        parts = 2 * config.split_k * (g.batch or 1) * g.m * g.n * 4
        seconds += c.add_seconds + parts / (rates.memory_bytes * num_sms)
    return seconds + tensor_cores.gradients_seconds(spec) + tensor_cores.copies_seconds(spec)


def _programs_per_sm(spec: MatmulSpec, config: Config, items: int) -> int:
    """How many programs run on an SM at a time, if there are so many tiles."""
    of_memory = chips.programs_per_sm(spec.target, _shared_bytes(spec, config))
    threads = 32 * config.num_warps
    of_registers = int(2**16 / (config.block_m * config.block_n + _OTHER_REGISTERS * threads))
    fitting = max(1, min(of_memory, of_registers, _MOST_WARPS // config.num_warps))
    return min(config.programs_per_sm or fitting, fitting, -(-items // chips.num_sms(spec.target)))


def _product_seconds(spec: MatmulSpec, config: Config, programs: int, c: Constants) -> tuple[float, float]:
    """What the products of a step take with so many programs on the SM, and with one."""
    rates, precision = chips.rates_of(spec.target), _input_precision(spec)
    flops = rates.bf16_flops
    if _itemsize(spec) == 4:
        flops = dict(ieee=rates.fp32_flops, tf32x3=rates.tf32_flops / 3).get(precision or "", rates.tf32_flops)
    # Small tiles leave the tensor cores waiting for operands; other programs on the SM fill some of the gaps.
    share, most = min(1.0, config.block_m * config.block_n / 2**15) ** c.tile_exponent, 1.0
    if spec.target.is_hopper:
        if config.block_m < 64 or config.num_warps < 4:
            share, most = share * c.slow_products, c.most_slow_products
        if config.block_k * _itemsize(spec) < 128:
            share *= c.short_rows
    seconds = 2.0 * config.block_m * config.block_n * config.block_k / (flops * c.reached_flops)
    return seconds / min(most, share * programs**c.program_exponent), seconds / share


def _loads(spec: MatmulSpec, config: Config) -> tuple[float, int]:
    """Asynchronous copies of a step, and elements that are loaded one by one."""
    g, itemsize = spec.gemm, _itemsize(spec)
    sizes = dict(m=g.m, n=g.n, k=g.k)
    copies, elements = 0.0, 0
    for layout, block in ((g.lhs_layout, config.block_m), (g.rhs_layout, config.block_n)):
        num_bytes = math.gcd(sizes[layout[1]] * itemsize, 16)
        if num_bytes < 4:  # The least that cp.async copies.
            elements += block * config.block_k
        else:
            copies += block * config.block_k * itemsize / num_bytes
    return copies, elements


def _num_stores(spec: MatmulSpec, config: Config) -> float:
    """Stores of a tile. A store has at most 16 bytes, and its bytes divide those of a row."""
    itemsize = _result_itemsize(spec, config)
    return config.block_m * config.block_n * itemsize / math.gcd(spec.gemm.n * itemsize, 16)


def _l2_bytes(spec: MatmulSpec, config: Config) -> int:
    """Bytes of L2's lines that the blocks of a step touch."""
    g, itemsize = spec.gemm, _itemsize(spec)
    return sum(
        _line_bytes(layout, size, g.k, block, config.block_k, itemsize)
        for layout, size, block in ((g.lhs_layout, g.m, config.block_m), (g.rhs_layout, g.n, config.block_n))
    )


def not_estimated(spec: MatmulSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None. It has the kernel that adds up parts of k."""
    if spec.lhs.dtype != spec.rhs.dtype:
        return "operands of two dtypes take several products"
    if spec.gemm.lhs_perm or spec.gemm.rhs_perm:
        return "XLA transposes an operand"
    return "XLA applies the epilogue" if config.split_k > 1 and spec.fused else None


def _line_bytes(layout: str, size: int, k: int, block: int, block_k: int, itemsize: int) -> int:
    """Bytes of L2's lines that a block of an operand touches. Rows that begin inside a line touch one more each."""
    row, length, rows = (k, block_k, block) if layout.endswith("k") else (size, block, block_k)
    lines = -(-length * itemsize // _LINE) + (row * itemsize % _LINE != 0)
    return rows * lines * _LINE


# Running.


def run(spec: MatmulSpec, config: Config, *arrays: jax.Array) -> Any:
    """Returns the product, or the results as a list when the spec has an epilogue."""
    operands = spec.named("matmul", arrays)
    if spec.is_gradient:  # XLA computes the gradients from the product.
        return apply_epilogue(spec, run(spec.product, config, operands["lhs"], operands["rhs"]), operands)
    if spec.lhs.dtype != spec.rhs.dtype:
        return tensor_cores.multiply_mixed(lambda part, a, b: run(part, config, a, b), spec, **operands)
    if config.split_k == 1:
        outs = [spec.unfold(x) for x in _launch(spec, config, operands)]
        return outs if spec.fused else outs[0]
    if not tensor_cores.fills_parts(_steps(spec, config), config.split_k):
        raise ValueError(
            f"{_LABEL}: every part of split_k={config.split_k} must have some of k={spec.gemm.k}, in blocks of "
            f"{config.block_k}. Use a smaller split_k."
        )
    product = dataclasses.replace(spec.product, out_dtype=_FLOAT32)
    (parts,) = _launch(product, config, operands)
    out = product.unfold(parts.sum(axis=0))
    results = apply_epilogue(spec, out, operands) if spec.fused else out
    return jax.tree.map(lambda x: x.astype(spec.out_dtype), results)


def _loadable(x: jax.Array) -> jax.Array:
    """An operand of the epilogue in a dtype that kernels load."""
    return x if x.dtype in _INPUTS else x.astype(_FLOAT32)


def _launch(spec: MatmulSpec, config: Config, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Returns (batch?, m, n) results. With parts of k, the parts are the first dimension."""
    from jaxkernels.triton.matmul import gemm_kernel

    g, p = spec.gemm, Params.of(spec, config)
    lhs, rhs = spec.fold(operands["lhs"], operands["rhs"])
    lead = (*([config.split_k] if config.split_k > 1 else []), *([] if g.batch is None else [g.batch]))
    result = ArrayType((*lead, g.m, g.n), spec.out_dtype)
    kernel = gemm_kernel.gemm_and_preactivation if spec.save_preactivation else gemm_kernel.gemm
    return calls.call_kernel(
        kernel,
        # For operands that are not given stands another, which is not read as such.
        [lhs, rhs, *(_loadable(operands.get(name, lhs)) for name in ("bias", "multiplier", "residual"))],
        [result] * (2 if spec.save_preactivation else 1),
        target=spec.target,
        grid=(p.num_programs,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p),
    )
