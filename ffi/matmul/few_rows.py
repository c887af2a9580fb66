"""Matrix product with few rows on Hopper tensor cores, with its epilogue, in CUDA C++ (few_rows.cu says how it works).

One operand has at most 64 rows (of m or n), as in decoding. The other one, the weights, is read once: memory is the
limit. Operands lie in memory as "mk" or "km" and "kn" or "nk" and are read as they are. Their rows are whole 16-byte
units; sizes need no multiple of anything else.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core import hardware
from jaxkernels.core.arguments import check_fields, check_smem
from jaxkernels.ffi import compiler, custom_call, handler, wgmma
from jaxkernels.ffi.matmul.operand_blocks import ATOM, SWIZZLE_BYTES, OperandBlocks
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.matmul.epilogue import apply_epilogue
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = [
    "CONSTANTS",
    "VERSION",
    "Config",
    "Constants",
    "compile_few_rows",
    "estimate",
    "not_estimated",
    "run",
    "search_space",
    "unsupported",
]

#: Versions of a backend's designs are added: at 0, what was measured of the other designs stays valid.
VERSION = 0

_LABEL = "matmul[cuda]"
_INPUTS = {jnp.dtype(jnp.bfloat16): "BFloat16", jnp.dtype(jnp.float16): "Float16"}
_OUTPUTS = _INPUTS | {jnp.dtype(jnp.float32): "Float32"}

# As in few_rows.cu.
_WGMMA_M = 64
_WARP, _WARPGROUP = 32, 128
#: Columns of a wgmma are multiples of it.
_COLUMNS = 8
#: Rows of a tile for each consumer warpgroup: two wgmmas.
_CONSUMER_ROWS = 2 * _WGMMA_M
#: The elements that rows must be multiples of to be TMA operands.
_UNIT = 8
#: Rows of a box.
_MAX_BOX = 256
#: Half of what a signed 32-bit number counts: the kernel's loop counts on past the last tile.
_MAX_COUNT = 2**30
#: Shared memory that the chip takes for each CTA.
_RESERVED_BYTES = 1024
#: The barriers of a slot.
_BARRIER_BYTES = 16
#: Rows or columns that count as few. More of them were not tried: the general design is as fast as cuBLAS there.
_MOST_FEW = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_rows: rows of the weights (of n, or of m if n is few) in one CTA's tile; the few rows are all in it.
      block_k: depth of one pipeline step.
      num_stages: slots of the operand ring. It decides how many CTAs share an SM.
      split_k: parts of k. The CTAs of a cluster each multiply one and add up what they have, in a fixed order.
    """

    block_rows: int = 128
    block_k: int = 64
    num_stages: int = 6
    split_k: int = 1

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        got = f"got {self}."
        if self.block_rows not in (64, 128, 256):
            raise ValueError(f"{_LABEL}: block_rows must be 64, 128 or 256; {got}")
        if not 0 < self.block_k <= _MAX_BOX or self.block_k % ATOM:
            raise ValueError(f"{_LABEL}: block_k must be a multiple of {ATOM} up to {_MAX_BOX}; {got}")
        if self.num_stages < 2:
            raise ValueError(f"{_LABEL}: num_stages must be at least 2; {got}")
        if self.split_k not in (1, 2, 4, 8):
            raise ValueError(f"{_LABEL}: split_k must be 1, 2, 4 or 8; {got}")

    @property
    def num_consumers(self) -> int:
        """Warpgroups that multiply."""
        return -(-self.block_rows // _CONSUMER_ROWS)

    @property
    def num_threads(self) -> int:
        return self.num_consumers * _WARPGROUP + _WARP

    @property
    def most_per_sm(self) -> int:
        """CTAs of an SM that there are registers for."""
        return 2 // self.num_consumers


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model.

    Attributes:
      memory_share: share of the memory's bandwidth by the data sheet that the kernel reaches.
      deep: factor of the memory's time if a ring takes more than half of an SM's shared memory. Then more loads are
        under way than memory serves well.
      load_bytes_per_sm: bytes/s that are loaded into shared memory of one SM.
      load_seconds: from a request to the arrival of its data.
      launch_seconds: a launch, with the first load's way, and the last tile's from its products to memory.
      gather_seconds: sending sums to the CTAs of a cluster.
      cluster_seconds: the start of a cluster, for each of its CTAs.
    """

    memory_share: float
    deep: float
    load_bytes_per_sm: float
    load_seconds: float
    launch_seconds: float
    gather_seconds: float
    cluster_seconds: float


#: Fitted to 115 times of 12 products (1, 16 and 64 rows) on an H100. Products that were left out of a fit are estimated
#: with a median error of 5 %; the 90th percentile is 23 %. `cluster_seconds` was not fitted.
CONSTANTS = Constants(
    memory_share=0.9275,
    deep=1.048,
    load_bytes_per_sm=1.403e11,
    load_seconds=1.516e-6,
    launch_seconds=1.955e-6,
    gather_seconds=7.576e-7,
    cluster_seconds=5e-8,
)

# The search space.
_BLOCKS = tuple(itertools.product((128, 64, 256), (64, 128)))
_SPLITS = (1, 2, 4, 8)
_MAX_STAGES = 16
_MIN_STAGES = 3
_MIN_SPLIT_STEPS = 4


def unsupported(spec: MatmulSpec) -> str | None:
    if reason := tensor_cores.unsupported(spec):
        return reason
    if spec.lhs.dtype != spec.rhs.dtype:
        return f"takes operands of one dtype, not {spec.lhs.dtype} and {spec.rhs.dtype}"
    g = spec.gemm
    if min(g.m, g.n) > _MOST_FEW:
        return f"takes at most {_MOST_FEW} rows or columns, the result has {g.m} and {g.n}"
    sides = _Sides.of(spec)
    for name, operand in (("weights", sides.weights), ("few rows", sides.few)):
        if operand.contiguous % _UNIT:
            return f"loads rows of whole {2 * _UNIT}-byte units, those of the {name} have {operand.contiguous} elements"
    if (tiles := sides.num_batches * -(-sides.weights.rows // _WGMMA_M)) > _MAX_COUNT:
        return f"counts tiles in 32 bits, and a batch may have {tiles}"
    return handler.missing()


@dataclasses.dataclass(frozen=True)
class _Side:
    """An operand: `rows` of m or n, by k."""

    rows: int
    k: int
    is_k_major: bool

    @property
    def contiguous(self) -> int:
        """Elements along the contiguous dimension."""
        return self.k if self.is_k_major else self.rows


@dataclasses.dataclass(frozen=True)
class _Sides:
    """The product as the kernel sees it.

    Attributes:
      weights, few: the operands.
      num_batches: products, 1 without batch dimensions.
      columns_are_n: whether the few rows are those of n: the rhs is `few`, and n is contiguous in the result.
    """

    weights: _Side
    few: _Side
    num_batches: int
    columns_are_n: bool

    @classmethod
    def of(cls, spec: MatmulSpec) -> _Sides:
        g = spec.gemm
        # A single row is contiguous along k in either layout.
        lhs = _Side(g.m, g.k, g.lhs_layout == "mk" or g.m == 1)
        rhs = _Side(g.n, g.k, g.rhs_layout == "nk" or g.n == 1)
        columns_are_n = g.n < g.m
        weights, few = (lhs, rhs) if columns_are_n else (rhs, lhs)
        return cls(weights, few, g.batch or 1, columns_are_n)

    @property
    def columns(self) -> int:
        """Columns of a wgmma."""
        return -(-self.few.rows // _COLUMNS) * _COLUMNS

    def weights_blocks(self, config: Config) -> OperandBlocks:
        return OperandBlocks(self.weights.is_k_major, self.weights.rows, config.block_rows, config.block_k)

    def few_blocks(self, config: Config) -> OperandBlocks:
        return OperandBlocks(self.few.is_k_major, self.few.rows, self.few.rows, config.block_k)

    def slot_bytes(self, config: Config) -> int:
        """Bytes of one slot. Contiguous columns take a whole swizzle span."""
        few = 2 * self.columns if self.few.is_k_major else SWIZZLE_BYTES
        return (2 * config.block_rows + few) * config.block_k

    def smem_bytes(self, config: Config) -> int:
        """Dynamic shared memory: ring, sums and barriers."""
        pitch = self.columns if self.columns // _COLUMNS % 2 else self.columns + _COLUMNS
        sums = 4 * config.block_rows * pitch
        storage = config.num_stages * (self.slot_bytes(config) + _BARRIER_BYTES) + sums + _BARRIER_BYTES
        return storage + -storage % 1024

    def num_tiles(self, config: Config) -> int:
        return self.num_batches * -(-self.weights.rows // config.block_rows)

    def k_iters(self, config: Config) -> int:
        return -(-self.weights.k // config.block_k)

    def num_blocks(self, config: Config, target: hardware.Chip) -> int:
        """CTAs of the grid: with split K one cluster for each tile, else as many as run at once."""
        tiles = self.num_tiles(config)
        return tiles * config.split_k if config.split_k > 1 else min(tiles, self.places(config, target))

    def places(self, config: Config, target: hardware.Chip) -> int:
        """CTAs that the chip holds at once."""
        per_sm = (target.smem_bytes + _RESERVED_BYTES) // (self.smem_bytes(config) + _RESERVED_BYTES)
        clusters = hardware.clusters_at_once(target, config.split_k)
        return clusters * config.split_k * min(per_sm, config.most_per_sm)


def search_space(spec: MatmulSpec) -> Iterator[Config]:
    """Yields the tiles and schedules worth measuring.

    - Tiles of 64, 128 and 256 rows that are not needlessly large (half of the tile has work), in steps of 64 and 128 of
      k unless k is short.
    - Rings with which one or two CTAs share an SM, of up to 16 slots that there are steps for.
    - Split k where all parts of all tiles run at once, each of at least 4 steps.
    """
    sides, target = _Sides.of(spec), spec.target
    for block_rows, block_k in _BLOCKS:
        if block_rows >= 2 * max(sides.weights.rows, _WGMMA_M) or (block_k > ATOM and sides.few.k <= 2 * ATOM):
            continue
        found: dict[Config, None] = {}
        for split_k, per_sm in itertools.product(_SPLITS, (2, 1)):
            config = Config(block_rows, block_k, _MIN_STAGES, split_k)
            room = (target.smem_bytes + _RESERVED_BYTES) // per_sm - _RESERVED_BYTES
            rings = (dataclasses.replace(config, num_stages=n) for n in range(_MAX_STAGES, _MIN_STAGES - 1, -1))
            ring = next((ring for ring in rings if sides.smem_bytes(ring) <= room), None)
            if ring is None or per_sm > config.most_per_sm:
                continue
            k_iters, parts, places = sides.k_iters(ring), sides.num_tiles(ring) * split_k, sides.places(ring, target)
            if split_k > 1 and (k_iters < _MIN_SPLIT_STEPS * split_k or parts > places):
                continue
            steps = k_iters // split_k * -(-parts // places)
            found[dataclasses.replace(ring, num_stages=max(min(ring.num_stages, steps), 2))] = None
        yield from found


def estimate(spec: MatmulSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds: a launch, and the slowest of memory, of the SM with most work and of the CTA with most work. A CTA has a
    ring of loads under way."""
    g, target, sides = spec.gemm, spec.target, _Sides.of(spec)
    num_bytes = sides.num_batches * (2 * (g.m + g.n) * g.k + spec.out_dtype.itemsize * g.m * g.n)
    parts = sides.num_tiles(config) * config.split_k
    steps = -(-sides.k_iters(config) // config.split_k)
    loaded = 2 * (config.block_rows + sides.few.rows) * config.block_k
    of_sm = -(-parts // target.num_sms) * steps * loaded / constants.load_bytes_per_sm
    of_cta = hardware.waves(parts, sides.places(config, target)) * steps * constants.load_seconds / config.num_stages
    of_memory = num_bytes / (constants.memory_share * (target.memory_bytes_per_s or math.inf))
    if sides.smem_bytes(config) > target.smem_bytes / 2:
        of_memory *= constants.deep
    seconds = constants.launch_seconds + hardware.soft_max(of_memory, of_sm, of_cta)
    if config.split_k > 1:
        seconds += constants.gather_seconds + constants.cluster_seconds * config.split_k
    return seconds + tensor_cores.gradients_seconds(spec)


def not_estimated(spec: MatmulSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    if spec.gemm.lhs_perm or spec.gemm.rhs_perm:
        return "XLA transposes an operand"
    if spec.bias is not None and spec.bias.dtype not in _OUTPUTS:
        return "XLA converts the bias"
    if spec.elementwise_type is not None and spec.elementwise_type.dtype not in _OUTPUTS:
        return f"XLA converts the {spec.elementwise}"
    return None


def run(spec: MatmulSpec, config: Config, *arrays: jax.Array) -> Any:
    """Returns the product, or the results as a list when the spec has an epilogue."""
    named = spec.named("matmul", arrays)
    if spec.is_gradient:  # XLA computes the gradients from the product.
        return apply_epilogue(spec, run(spec.product, config, named["lhs"], named["rhs"]), named)
    g, sides = spec.gemm, _Sides.of(spec)
    _check_limits(spec, config, sides)
    lhs, rhs = spec.fold(named["lhs"], named["rhs"])
    weights, few = (lhs, rhs) if sides.columns_are_n else (rhs, lhs)
    # One batch dimension, always: of one product, it is 1.
    shape = lambda side: (side.rows, side.k) if side.is_k_major else (side.k, side.rows)
    operands = [
        weights.reshape(sides.num_batches, *shape(sides.weights)),
        few.reshape(sides.num_batches, *shape(sides.few)),
    ]
    # The first result takes the place of an absent operand: the kernel does not touch it.
    first_result = 2 + (spec.bias is not None) + (spec.elementwise is not None)
    bias = residual = first_result
    if spec.bias is not None:
        bias = len(operands)
        operands.append(named["bias"].astype(_stored_dtype(spec.bias.dtype)))
    if spec.elementwise is not None:
        residual = len(operands)
        x = named[spec.elementwise]
        operands.append(x.astype(_stored_dtype(x.dtype)))

    compiled = compile_few_rows(spec, config)
    out = jax.ShapeDtypeStruct((sides.num_batches, g.m, g.n), spec.out_dtype)
    num_results = 2 if spec.save_preactivation else 1
    outs = custom_call.launch(
        compiled.cubin,
        compiled.name,
        operands,
        [out] * num_results,
        parameters=[
            sides.weights_blocks(config).tensor_map(0, operands[0]),
            sides.few_blocks(config).tensor_map(1, operands[1]),
            custom_call.Pointer(first_result),
            custom_call.Pointer(first_result + num_results - 1),
            custom_call.Pointer(bias),
            custom_call.Pointer(residual),
            _problem(spec, config, sides),
        ],
        grid=(sides.num_blocks(config, spec.target),),
        block=(config.num_threads,),
        cluster=(config.split_k,),
        smem_bytes=sides.smem_bytes(config),
        target=spec.target,
        label="matmul",
    )
    outs = [spec.unfold(x) for x in outs]
    return outs if spec.fused else outs[0]


def _check_limits(spec: MatmulSpec, config: Config, sides: _Sides) -> None:
    """Raises ValueError where a configuration is more than the chip or the product takes: before the kernel is
    compiled."""
    check_smem(_LABEL, spec.target, config, sides.smem_bytes(config), "Use fewer stages or smaller blocks.")
    if config.split_k > sides.k_iters(config):
        raise ValueError(
            f"{_LABEL}: every part of split_k={config.split_k} must have a step of {config.block_k} of k; "
            f"got k={spec.gemm.k}. Use a smaller split_k."
        )


def _stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which the kernel reads a bias or a residual."""
    return dtype if dtype in _OUTPUTS else jnp.dtype(jnp.float32)


def compile_few_rows(spec: MatmulSpec, config: Config) -> compiler.CompiledKernel:
    """Compiles the kernel that serves the spec: sizes (few rows in steps of 8) and the value of alpha are not part of
    it."""
    sides = _Sides.of(spec)
    type_of = lambda array: _OUTPUTS[_stored_dtype(array.dtype)] if array is not None else "Float32"
    return _compile_cached(
        tuple(
            dict(
                input=_INPUTS[spec.lhs.dtype],
                output=_OUTPUTS[spec.out_dtype],
                bias=type_of(spec.bias),
                residual=type_of(spec.elementwise_type),
                block_rows=config.block_rows,
                columns=sides.columns,
                block_k=config.block_k,
                num_stages=config.num_stages,
                num_consumers=config.num_consumers,
                most_per_sm=config.most_per_sm,
                split_k=config.split_k,
                weights_are_k_major=sides.weights.is_k_major,
                few_is_k_major=sides.few.is_k_major,
                stacks_boxes=sides.weights_blocks(config).stacks_boxes,
                columns_are_n=sides.columns_are_n,
                has_alpha=spec.alpha != 1,
                has_bias=spec.bias is not None,
                has_residual=spec.elementwise is not None,
                multiplies=spec.multiplier is not None,
                save_preactivation=spec.save_preactivation,
                activation=spec.activation or "none",
                smem_bytes=sides.smem_bytes(config),
            ).items()
        )
    )


@functools.lru_cache(maxsize=512)
def _compile_cached(choices: tuple[tuple[str, Any], ...]) -> compiler.CompiledKernel:
    defines = dict(choices)
    return compiler.compile_kernel(
        (importlib.resources.files("jaxkernels.ffi.matmul") / "few_rows.cu").read_text(),
        "jaxkernels::few_rows",
        filename="few_rows.cu",
        headers={wgmma.NAME: wgmma.instructions(defines["input"], defines["columns"])},
        defines={f"JK_{name.upper()}": value for name, value in defines.items()},
        strict=True,
    )


def _problem(spec: MatmulSpec, config: Config, sides: _Sides) -> np.generic:
    """The kernel's `Problem`."""
    row_tiles = sides.num_tiles(config) // sides.num_batches
    fields = [sides.weights.rows, sides.few.rows, sides.num_batches, row_tiles, sides.k_iters(config)]
    fields.append(int(np.float32(spec.alpha).view(np.int32)))
    return np.array(fields, np.int32).view(f"V{4 * len(fields)}")[0]
