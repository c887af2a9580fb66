"""Matrix product on Hopper tensor cores, with its epilogue, in CUDA C++ (gemm.cu says how it works).

Operands lie in memory as "mk" or "km" and "kn" or "nk" and are read as they are. The Tensor Memory Accelerator
takes rows that are whole 16-byte units: an operand with other rows is padded first (pad_rows.cu) or, an lhs of "mk" and
"kn", read in tiles of every so many-th row (`Config.in_place`); a result with other rows is stored, and a residual
loaded, by ordinary instructions. Sizes need no multiple of anything else.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core import hardware
from jaxkernels.core.arguments import check_fields, check_smem
from jaxkernels.ffi import compiler, custom_call, handler, wgmma
from jaxkernels.ffi.matmul import few_rows
from jaxkernels.ffi.matmul.operand_blocks import ATOM, LINE_BYTES, SWIZZLE_BYTES, OperandBlocks
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.matmul.epilogue import apply_epilogue
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = [
    "CONSTANTS",
    "MAX_EPILOGUE_ACCUMULATORS",
    "RANKING",
    "VERSION",
    "Config",
    "Constants",
    "Parts",
    "compile_gemm",
    "estimate",
    "not_estimated",
    "num_tiles",
    "run",
    "run_in_parts",
    "search_space",
    "shortlist",
    "unsupported",
]

VERSION = 5

_Axis = Literal["m", "n"]
_INPUTS = {jnp.dtype(jnp.bfloat16): "BFloat16", jnp.dtype(jnp.float16): "Float16"}
_OUTPUTS = _INPUTS | {jnp.dtype(jnp.float32): "Float32"}

# As in gemm.cu.
_WGMMA_M = 64
_WARPGROUP = 128
_STAGING_BYTES = 16 * SWIZZLE_BYTES
#: Accumulators of one thread: of its 232 registers these leave enough for addresses and an epilogue.
_MAX_ACCUMULATORS = 192
#: The same where an epilogue needs more registers, or sums of other blocks arrive.
MAX_EPILOGUE_ACCUMULATORS = 128
#: The bytes that rows must be multiples of to be TMA operands.
_TMA_BYTES = 16
#: The same, in elements of an operand.
_UNIT = _TMA_BYTES // 2
#: Rows that a block of pad_rows.cu works on at a time, and blocks that fill an SM.
_PAD_WARPS = 8
_PAD_BLOCKS_PER_SM = 8
#: Blocks of a cluster on every Hopper GPU.
_MAX_CLUSTER = 8
#: Elements of a box along one dimension.
_MAX_BOX = 256
#: Half of what a signed 32-bit number counts: the kernels' loops count on past the last tile or row.
_MAX_COUNT = 2**30
#: Tiles: a wider strip than the result is no other order.
_MAX_STRIP = 2**16


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_m, block_n: output tile of one CTA.
      block_k: depth of one pipeline step.
      num_stages: slots of the operand ring.
      ping_pong: the two consumers take tiles in turn, instead of sharing one by rows.
      num_staging: buffers in which each warp stages pieces of the result, 16 rows of 128 bytes.
      cluster_m, cluster_n: CTAs of a cluster along m and n; those along m multicast the rhs to each other, those
        along n the lhs.
      split_k: parts of k. The CTAs of a cluster each multiply one and add up what they have, in a fixed order.
      through_memory: parts of k are tiles of their own instead, as many as one likes, whose sums are added up through
        global memory, in a fixed order.
      reduce_add: parts of k are tiles of their own instead, as many as one likes, which TMA adds to a float32 result
        in whatever order they end: the same operands may then give other bits. Never chosen, only given.
      in_place: an lhs with k contiguous whose rows are not whole 16-byte units is not padded: a tile has rows of one
        residue, which begin alike. The rhs has n contiguous, and the result has rows of whole 16-byte units.
      minor: the tile dimension walked first, in strips of `strip` tiles.
      strip: see `minor`.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 4
    ping_pong: bool = False
    num_staging: int = 2
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    through_memory: bool = False
    reduce_add: bool = False
    in_place: bool = False
    minor: _Axis = "m"
    strip: int = 8

    def __post_init__(self) -> None:
        check_fields("matmul[cuda]", self)
        consumer_m = self.block_m // self.num_consumers_of_tile
        way_out = f"got {self}."
        if consumer_m <= 0 or consumer_m % _WGMMA_M or self.block_m % self.num_consumers_of_tile:
            raise ValueError(f"matmul[cuda]: block_m must be a multiple of {_WGMMA_M} for each consumer; {way_out}")
        if self.block_n % 32 or not 0 < self.block_n <= 256:
            raise ValueError(f"matmul[cuda]: block_n must be a multiple of 32 up to 256; {way_out}")
        if self.block_k % ATOM or self.block_k <= 0:
            raise ValueError(f"matmul[cuda]: block_k must be a multiple of {ATOM}; {way_out}")
        if self.num_accumulators > _MAX_ACCUMULATORS:
            raise ValueError(
                f"matmul[cuda]: a consumer's tile must leave each thread {_MAX_ACCUMULATORS} accumulators; {way_out}"
            )
        if self.num_stages < 1 or self.split_k < 1:
            raise ValueError(f"matmul[cuda]: num_stages and split_k must be positive; {way_out}")
        if not 1 <= self.strip <= _MAX_STRIP:
            raise ValueError(f"matmul[cuda]: strip must be from 1 to {_MAX_STRIP}; {way_out}")
        if self.num_staging not in (2, 4):
            raise ValueError(f"matmul[cuda]: num_staging must be 2 or 4; {way_out}")
        # The kernel's ring has no less than whole slots of both blocks.
        ring_bytes = 2 * (self.block_m + self.block_n) * self.block_k * self.num_stages
        if self.cluster_parts > 1 and 4 * self.block_m * self.block_n > ring_bytes:
            raise ValueError(f"matmul[cuda]: the partial sums of split_k must fit into the ring; {way_out}")
        if self.cluster_parts > _MAX_CLUSTER:
            raise ValueError(f"matmul[cuda]: split_k must be at most {_MAX_CLUSTER} without through_memory; {way_out}")
        sizes = (1, 2, 4)
        if self.cluster_m not in sizes or self.cluster_n not in sizes or self.num_sharing > _MAX_CLUSTER:
            raise ValueError(
                f"matmul[cuda]: cluster_m and cluster_n must be 1, 2 or 4, and {_MAX_CLUSTER} CTAs at most; {way_out}"
            )
        if self.split_k > 1 and self.ping_pong:
            raise ValueError(f"matmul[cuda]: split_k excludes ping_pong; {way_out}")
        if self.through_memory and (self.split_k == 1 or self.reduce_add):
            raise ValueError(
                f"matmul[cuda]: through_memory needs a split_k above 1, and excludes reduce_add; {way_out}"
            )
        if self.through_memory and self.num_accumulators > MAX_EPILOGUE_ACCUMULATORS:
            raise ValueError(
                f"matmul[cuda]: with through_memory, a consumer's tile must leave each thread "
                f"{MAX_EPILOGUE_ACCUMULATORS} accumulators; {way_out}"
            )
        if self.cluster_parts > 1 and self.num_sharing > 1:
            raise ValueError(f"matmul[cuda]: split_k excludes multicast clusters without through_memory; {way_out}")

    @property
    def num_consumers(self) -> int:
        """Warpgroups that multiply; a tile of 64 rows cannot be shared."""
        return 2 if self.ping_pong or self.block_m > _WGMMA_M else 1

    @property
    def num_consumers_of_tile(self) -> int:
        return 1 if self.ping_pong else self.num_consumers

    @property
    def num_accumulators(self) -> int:
        """Of one thread."""
        return self.block_m // self.num_consumers_of_tile * self.block_n // _WARPGROUP

    @property
    def ring_bytes(self) -> int:
        """The slots; of an rhs with n contiguous, whole atoms."""
        return 2 * (self.block_m + self.block_n + -self.block_n % ATOM) * self.block_k * self.num_stages

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: ring, staging buffers and barriers."""
        warps = 4 * self.num_consumers
        barriers = 8 * (2 * self.num_stages + 8 + self.num_staging * warps)
        storage = self.ring_bytes + warps * self.num_staging * _STAGING_BYTES + barriers
        return storage + -storage % 1024

    @property
    def num_sharing(self) -> int:
        """CTAs of a cluster that multicasts."""
        return self.cluster_m * self.cluster_n

    @property
    def parts_are_tiles(self) -> bool:
        """Whether the parts of k are tiles of their own."""
        return self.reduce_add or self.through_memory

    @property
    def cluster_parts(self) -> int:
        """Parts of k that meet in a cluster."""
        return 1 if self.parts_are_tiles else self.split_k

    @property
    def cluster_blocks(self) -> int:
        """CTAs of a cluster of either kind."""
        return self.num_sharing * self.cluster_parts


#: The default is one of these, with as many stages as fit, until the model is trusted with the whole space (measured:
#: docs/cuda-gemm.md).
_CANDIDATES = (
    Config(256, 192, cluster_n=2),
    Config(128, 256, cluster_m=2),
    Config(128, 256),
    Config(128, 192),
    Config(256, 128, cluster_n=2),
    Config(128, 160),
    Config(128, 160, cluster_m=4),
    Config(128, 128, ping_pong=True),
    Config(128, 128, ping_pong=True, cluster_m=2),
    Config(128, 128),
    Config(128, 128, num_staging=4, split_k=2),
    Config(128, 128, num_staging=4, split_k=4),
    Config(64, 160, cluster_m=4),
    Config(64, 128, 128),
    Config(64, 128, 128, cluster_m=2),
    Config(64, 128, 128, split_k=2),
    Config(64, 128, 128, split_k=4),
    Config(64, 64, 128),
    Config(64, 64),
    Config(64, 32, 128),
)

#: The same with parts of k through memory, as many as run at once: the fastest of 54 configurations for three products
#: with few tiles (H200; docs/cuda-gemm.md).
_CANDIDATES_IN_PARTS = (
    Config(128, 192),
    Config(128, 192, cluster_m=2),
    Config(128, 128),
    Config(64, 128, 128),
)


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model.

    Attributes:
      flops_per_sm: FLOP/s of one SM.
      read_bytes_per_sm: bytes/s that wgmma reads from shared memory of one SM. They only cost power.
      load_bytes_per_sm: bytes/s that are loaded into shared memory of one SM. They only cost power.
      l2_bytes_per_sm: bytes/s of one SM from L2.
      l2_bytes_per_sm_off_lines: the same of rows that are not whole cache lines.
      l2_bytes_per_sm_in_place: the same of rows read in place: each 128 bytes of one lie in two lines.
      memory_bytes_per_sm: bytes/s from and to memory that the loads under way of one SM allow.
      copy_bytes: bytes/s of a kernel that pads rows, on the whole chip.
      launch_seconds: a launch, with the first block's way.
      store_seconds: storing a tile of 128 x 256 by TMA.
      store_rows_seconds: storing a tile of 128 x 256 by rows.
      load_seconds: from a request to the arrival of its data.
      reduction_seconds: adding up a split product.
      exchange_seconds: taking the sums of a tile of 128 x 256 from global memory. Giving them takes twice as long: all
        blocks do it at once.
      cluster_seconds: waiting of a cluster's blocks for each other, for each tile.
      clear_seconds: clearing heads of rows that are read in place, for each tile.
      epilogue: factor of a store with an activation.
      gradients: factor of storing the gradients of an activation.
      exposed: the share of a store by rows that products of the other consumer do not hide.
      exposed_half: the share of a deferred second half that the next tile's products do not hide.
      exposed_packed: the share of deferred packed pieces that the next tile's products do not hide.
    """

    flops_per_sm: float
    read_bytes_per_sm: float
    load_bytes_per_sm: float
    l2_bytes_per_sm: float
    l2_bytes_per_sm_off_lines: float
    l2_bytes_per_sm_in_place: float
    memory_bytes_per_sm: float
    copy_bytes: float
    launch_seconds: float
    store_seconds: float
    store_rows_seconds: float
    load_seconds: float
    reduction_seconds: float
    exchange_seconds: float
    cluster_seconds: float
    clear_seconds: float
    epilogue: float
    gradients: float
    exposed: float
    exposed_half: float
    exposed_packed: float


#: Fitted to 470 times of 40 shapes on an H200 (2026-11-21); rows read in place, to 36 times of 8 shapes; the memory, to
#: 165 times in docs/benchmarks, 28 of them with few rows. `exchange_seconds` was not fitted: in a trial of
#: stream-K (docs/cuda-gemm.md, "The ladder"), all blocks gave and took such a tile each in 8 us.
CONSTANTS = Constants(
    flops_per_sm=8.3e12,
    read_bytes_per_sm=8.9e11,
    load_bytes_per_sm=1.4e12,
    l2_bytes_per_sm=1.5e11,
    l2_bytes_per_sm_off_lines=7.2e10,
    l2_bytes_per_sm_in_place=3.9e10,
    memory_bytes_per_sm=3.159e10,
    copy_bytes=3.5e12,
    launch_seconds=2.3e-6,
    store_seconds=1.0e-6,
    store_rows_seconds=2.4e-6,
    load_seconds=0.85e-6,
    reduction_seconds=1.6e-6,
    exchange_seconds=2.0e-6,
    cluster_seconds=0.2e-6,
    clear_seconds=1.0e-6,
    epilogue=2.0,
    gradients=8.5,
    exposed=0.8,
    exposed_half=0.4,
    exposed_packed=0.45,
)
#: Memory bounds products with few rows. Which tiles draw most from it has not been measured.
RANKING = dataclasses.replace(CONSTANTS, memory_bytes_per_sm=math.inf)

# The search space. Tiles: block_m, block_n, block_k, ping_pong.
_TILES = (
    (128, 256, 64, False),
    (256, 192, 64, False),
    (256, 128, 64, False),
    (128, 192, 64, False),
    (128, 160, 64, False),
    (128, 128, 64, False),
    (128, 128, 128, False),
    (64, 256, 64, False),
    (64, 128, 128, False),
    (64, 128, 64, False),
    (64, 64, 128, False),
    (64, 64, 64, False),
    (64, 32, 128, False),
    (64, 160, 64, False),
    (128, 64, 128, False),
    (128, 192, 64, True),
    (128, 128, 64, True),
)
#: cluster_m, cluster_n.
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))
_STRIPS = (8, 4, 16)
_SPLITS = (2, 4, 8)
_MAX_STAGES = 8
_MIN_SPLIT_STEPS = 4
#: Parts through memory. The block with a tile's last part adds up the others one after the other.
_MAX_PARTS = 16
#: Tiles that leave too few registers for sums from memory: block_m, block_n.
_SPILLS = ((64, 256),)
#: From this many waves on the last one costs little, and smaller tiles read too much.
_MANY_WAVES = 6


def unsupported(spec: MatmulSpec) -> str | None:
    return tensor_cores.unsupported(spec) or _too_many(spec) or handler.missing()


def _too_many(spec: MatmulSpec) -> str | None:
    """What there is more of than the kernels count, or None."""
    g = spec.gemm
    if (tiles := num_tiles(spec, _WGMMA_M, 32)) > _MAX_COUNT:
        return f"counts tiles in 32 bits, and a batch of {g.batch} may have {tiles}"
    sizes = dict(m=g.m, n=g.n, k=g.k)
    for outer, inner in (g.lhs_layout, g.rhs_layout):
        if sizes[inner] % _UNIT and (rows := (g.batch or 1) * sizes[outer]) > _MAX_COUNT:
            return f"counts rows that it pads in 32 bits, and an operand has {rows}"
    return None


def shortlist(spec: MatmulSpec) -> tuple[Config, ...]:
    """The candidates; none for few rows, which `few_rows` multiplies in 0.75 of the time (12 products on an H100)."""
    if few_rows.unsupported(spec) is None:
        return ()
    fits = lambda config: dataclasses.replace(config, num_stages=_num_stages(spec, config))
    candidates = [_trimmed(spec, fits(config)) for config in _candidates(spec)]
    dividing = () if spec.is_gradient else _CANDIDATES_IN_PARTS
    in_parts = [part for config in dividing for part in _through_memory(spec, fits(config))]
    return tuple(_with_in_place(spec, candidates + in_parts))


def _candidates(spec: MatmulSpec) -> Iterable[Config]:
    """`_CANDIDATES`. If a piece has two buffers: those with registers for its epilogue, with four buffers a warp; and
    tiles of 128 x 192 in turns."""
    if not _has_two_buffers(spec):
        return _CANDIDATES
    small = [config for config in _CANDIDATES if config.num_accumulators <= MAX_EPILOGUE_ACCUMULATORS]
    four = dict.fromkeys(dataclasses.replace(config, num_staging=4) for config in small)
    wide = Config(128, 192, ping_pong=True)
    return (*four, wide) if _has_wide_gate(spec, wide) else four


def _has_two_buffers(spec: MatmulSpec) -> bool:
    """Whether a piece has two results, and operands, which are fetched one piece ahead."""
    return spec.elementwise is not None and len(spec.outputs("matmul")) == 2


def _has_wide_gate(spec: MatmulSpec, config: Config) -> bool:
    """Whether a tile of 192 accumulators leaves registers for two results and other operands, in two buffers a warp.

    NVRTC 13.0 spills with a bias, and with the gradients of the exact gelu.
    """
    is_wide = config.ping_pong and (config.block_m, config.block_n) == (128, 192)
    fits = spec.bias is None and spec.activation != "gelu_erf" and spec.out_dtype.itemsize == 2
    return is_wide and fits and _has_two_buffers(spec) and _has_tma_rows(spec)


def _with_in_place(spec: MatmulSpec, configs: Iterable[Config]) -> Iterator[Config]:
    """Yields each also with `in_place`, where the lhs can be read so; but for ping-pong: other tiles are faster then
    (docs/cuda-gemm.md)."""
    has_in_place = _not_in_place(spec) is None
    for config in configs:
        yield config
        if has_in_place and not config.ping_pong:
            yield dataclasses.replace(config, in_place=True)


def _trimmed(spec: MatmulSpec, config: Config) -> Config:
    """Without slots that no step of k will ever use: their barriers take time, which short products notice."""
    if config.cluster_parts > 1 or num_tiles(spec, config.block_m, config.block_n) > spec.target.num_sms:
        return config
    return dataclasses.replace(config, num_stages=min(config.num_stages, -(-spec.gemm.k // config.block_k)))


def search_space(spec: MatmulSpec) -> Iterator[Config]:
    """Yields the tiles and schedules worth measuring, padding an lhs and reading it in place.

    - Tiles: `_TILES` that are not needlessly large (half of the tile has work); with many waves, but for ping-pong,
      none under 128 x 192; 64 x 32 where most SMs would have nothing to do. 192 accumulators a thread leave registers
      for a bare store by TMA, and for a residual of 16 bits, only; 256 rows none for the exact gelu and stores by rows.
    - The deepest ring of up to 8 slots that fits beside two staging buffers and that there are steps for; also beside
      four, where 3 slots stay and a tile has as many pieces or tiles are few. Pieces with two results and with
      other operands (a gate and its gradients) have four, two for each, but for tiles of 128 x 192.
    - Clusters of two where there are tiles to share an operand, of four where tiles make one wave: they leave SMs
      unused.
    - Split k where all parts of all tiles run at once, each of at least 4 steps.
    - Split k through memory, alone and in pairs, in as many parts as run at once, up to 16.
    - Strips of several widths, or in the other direction, where tiles make more than one wave and the strip is
      narrower than the result.
    """
    return _with_in_place(spec, _schedules(spec))


def _schedules(spec: MatmulSpec) -> Iterator[Config]:
    g = spec.gemm
    tiles_of = functools.partial(num_tiles, spec)
    many = min(g.m, g.n) > _WGMMA_M and tiles_of(128, 256) >= _MANY_WAVES * spec.target.num_sms
    few = tiles_of(64, 64) <= spec.target.num_sms // 4
    plain = _has_tma_rows(spec) and spec.bias is None and spec.activation is None and not spec.save_preactivation
    plain &= spec.elementwise is None or (spec.out_dtype.itemsize == 2 and not spec.is_gradient)
    for block_m, block_n, block_k, ping_pong in _TILES:
        too_large = block_m >= 2 * max(g.m, _WGMMA_M) or block_n >= 2 * max(g.n, ATOM)
        is_sliver = block_n == 32 and not few
        too_small = many and not ping_pong and block_m * block_n < 128 * 192
        needlessly_deep = block_k > ATOM and g.k <= 2 * ATOM
        tile = Config(block_m, block_n, block_k, num_stages=1, ping_pong=ping_pong)
        has_wide_gate = _has_wide_gate(spec, tile)
        would_spill = tile.num_accumulators > MAX_EPILOGUE_ACCUMULATORS and not (plain or has_wide_gate)
        would_spill |= block_m > 128 and spec.activation == "gelu_erf" and not _has_tma_rows(spec)
        if too_large or too_small or is_sliver or needlessly_deep or would_spill:
            continue
        m_iters, n_iters, k_iters = -(-g.m // block_m), -(-g.n // block_n), -(-g.k // block_k)
        tiles = tiles_of(block_m, block_n)
        sides: tuple[tuple[_Axis, int], ...] = (("m", m_iters), ("n", n_iters))
        clusters = [
            (cluster_m, cluster_n) for cluster_m, cluster_n in _CLUSTERS
            if cluster_m <= m_iters and cluster_n <= n_iters
            and (cluster_m * cluster_n <= 2 or tiles <= spec.target.num_sms)
        ]  # fmt: skip
        walks: list[tuple[_Axis, int]] = [("m", _STRIPS[0])]
        if tiles > spec.target.num_sms:
            widths = {"m": _STRIPS, "n": _STRIPS[:1]}
            walks.extend((axis, strip) for axis, iters in sides for strip in widths[axis] if strip < iters)
        many_buffers = block_n > 192 or tiles < spec.target.num_sms
        two_buffers = _has_two_buffers(spec)
        for num_staging in (2,) if has_wide_gate else (4,) if two_buffers else (2, 4) if many_buffers else (2,):
            num_stages = _num_stages(spec, dataclasses.replace(tile, num_staging=num_staging))
            if num_stages < (2 if num_staging == 2 else 3):
                continue
            config = dataclasses.replace(tile, num_stages=num_stages, num_staging=num_staging)
            for (cluster_m, cluster_n), (minor, strip) in itertools.product(clusters, dict.fromkeys(walks)):
                yield _trimmed(
                    spec,
                    dataclasses.replace(config, cluster_m=cluster_m, cluster_n=cluster_n, minor=minor, strip=strip),
                )
            splits = [
                split for split in _SPLITS
                if not ping_pong and tiles <= hardware.clusters_at_once(spec.target, split)
                and k_iters >= _MIN_SPLIT_STEPS * split
                and 4 * block_m * block_n <= 2 * (block_m + block_n) * block_k * num_stages
            ]  # fmt: skip
            for split in splits:
                yield dataclasses.replace(config, split_k=split)
            if ping_pong or tile.num_accumulators > MAX_EPILOGUE_ACCUMULATORS or (block_m, block_n) in _SPILLS:
                continue
            for cluster_m, cluster_n in clusters:
                pair = dataclasses.replace(config, cluster_m=cluster_m, cluster_n=cluster_n)
                if pair.cluster_blocks <= 2:
                    yield from _through_memory(spec, pair)


def _through_memory(spec: MatmulSpec, config: Config) -> Iterator[Config]:
    """The configuration with as many parts of k as run at once, if these are several."""
    at_once = hardware.clusters_at_once(spec.target, config.cluster_blocks)
    k_iters = -(-spec.gemm.k // config.block_k)
    parts = min(at_once // _num_groups(spec, config), k_iters // _MIN_SPLIT_STEPS, _MAX_PARTS)
    if parts > 1:
        yield dataclasses.replace(config, split_k=parts, through_memory=True)


def _num_stages(spec: MatmulSpec, tile: Config) -> int:
    """Slots that fit into shared memory, as far as they are of use."""
    ring = lambda num_stages: dataclasses.replace(tile, num_stages=num_stages, split_k=1)
    fits = lambda num_stages: ring(num_stages).smem_bytes <= spec.target.smem_bytes
    return max((num_stages for num_stages in range(1, _MAX_STAGES + 1) if fits(num_stages)), default=0)


def estimate(spec: MatmulSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds: waves of tiles. Each step is bound by the tensor cores, by L2 or by the loads that are under way.

    A cluster reads the operand it shares once. What goes through shared memory costs a little beside the products:
    power, which they lack. A wgmma reads both operands: the fewer its columns, the more for each FLOP. Rows read in
    place are slow to come from L2, and of each tile's the heads are cleared; but nothing is spent on padding them. Few
    CTAs draw less than the memory gives.
    """
    g = spec.gemm
    waves = hardware.waves(_num_clusters(spec, config), hardware.clusters_at_once(spec.target, config.cluster_blocks))
    flops = 2 * config.block_m * config.block_n * config.block_k
    read_bytes = 2 * config.block_m // _WGMMA_M * (_WGMMA_M + config.block_n) * config.block_k
    load_bytes = 2 * (config.block_m + config.block_n) * config.block_k
    l2_bytes = [2 * x * config.block_k for x in (config.block_m / config.cluster_n, config.block_n / config.cluster_m)]
    operands = ((g.lhs_layout, g.m * g.k), (g.rhs_layout, g.k * g.n))
    rows = [(2 * dict(m=g.m, n=g.n, k=g.k)[layout[1]], size) for layout, size in operands]
    is_off_lines = any(row % LINE_BYTES and row % _TMA_BYTES == 0 for row, _ in rows)
    l2_rates = [constants.l2_bytes_per_sm_off_lines if is_off_lines else constants.l2_bytes_per_sm] * 2
    if config.in_place:
        l2_rates[0] = constants.l2_bytes_per_sm_in_place
        rows = rows[1:]  # The lhs is not padded.
    step = max(
        flops / constants.flops_per_sm
        + read_bytes / constants.read_bytes_per_sm
        + load_bytes / constants.load_bytes_per_sm,
        sum(size / rate for size, rate in zip(l2_bytes, l2_rates)),
        constants.load_seconds / config.num_stages,
    )
    clear = constants.clear_seconds if config.in_place else 0.0
    steps = -(-_k_iters(spec, config) // config.split_k) * step + clear
    by_tma = _has_tma_rows(spec)
    tile = config.block_m * config.block_n / (128 * 256)
    store = tile * (constants.store_seconds if by_tma else constants.store_rows_seconds)
    if spec.is_gradient:
        store *= constants.gradients
    elif spec.activation:
        store *= constants.epilogue
    # The stores of one consumer hide behind the products of the other.
    if not config.ping_pong:
        exposed = store * _exposed(spec, config, constants)
        per_wave, at_end = steps + exposed, store - exposed
    elif by_tma:
        per_wave, at_end = max(steps, store), store
    else:
        per_wave, at_end = steps + constants.exposed * store, 0.0
    padding = sum(
        constants.launch_seconds + 4 * (g.batch or 1) * size / constants.copy_bytes
        for row, size in rows
        if row % _TMA_BYTES
    )
    reduction = constants.reduction_seconds if config.split_k > 1 else 0.0
    if config.through_memory:  # XLA clears flags before.
        reduction = (config.split_k + 1) * tile * constants.exchange_seconds + constants.launch_seconds
    clusters = waves * constants.cluster_seconds if config.cluster_blocks > 1 else 0.0
    tiles = waves * per_wave + at_end + clusters
    return constants.launch_seconds + hardware.soft_max(tiles, _memory(spec, config, constants)) + padding + reduction


def _memory(spec: MatmulSpec, config: Config, constants: Constants) -> float:
    """Seconds to read the operands from memory and to write the result: of gradients two of each more."""
    g = spec.gemm
    num_like_out = 4 if spec.is_gradient else 1
    num_bytes = (g.batch or 1) * (2 * (g.m + g.n) * g.k + num_like_out * spec.out_dtype.itemsize * g.m * g.n)
    ctas = min(_num_blocks(spec, config), spec.target.num_sms)
    return num_bytes / (ctas * constants.memory_bytes_per_sm)


def not_estimated(spec: MatmulSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None. It has the kernels that pad rows."""
    if spec.lhs.dtype != spec.rhs.dtype:
        return "operands of two dtypes take several products"
    if spec.gemm.lhs_perm or spec.gemm.rhs_perm:
        return "XLA transposes an operand"
    if spec.bias is not None:
        return "XLA converts and pads the bias"
    if spec.elementwise_type is not None and spec.elementwise_type.dtype != spec.out_dtype:
        return f"XLA converts the {spec.elementwise}"
    return "XLA clears the result that parts are added to" if config.reduce_add else None


def run(spec: MatmulSpec, config: Config, *arrays: jax.Array) -> Any:
    """Returns the product, or the results as a list when the spec has an epilogue."""
    named = spec.named("matmul", arrays)
    if spec.lhs.dtype != spec.rhs.dtype:
        return tensor_cores.multiply_mixed(lambda part, a, b: run(part, config, a, b), spec, **named)
    g = spec.gemm
    if config.split_k > 1 and config.split_k * config.block_k > g.k:
        raise ValueError(
            f"matmul[cuda]: every part of split_k={config.split_k} must have {config.block_k} of k; got k={g.k}. "
            "Use a smaller split_k."
        )
    if config.reduce_add and (spec.fused or spec.out_dtype != jnp.float32):
        product = dataclasses.replace(spec.product, out_dtype=jnp.dtype(jnp.float32))
        out = run(product, config, named["lhs"], named["rhs"])
        results = apply_epilogue(spec, out, named) if spec.fused else out
        return jax.tree.map(lambda x: x.astype(spec.out_dtype), results)
    if config.reduce_add and not _has_tma_rows(spec):
        raise ValueError(
            f"matmul[cuda]: reduce_add needs n to be a multiple of 4; got n={g.n}. Use split_k without it."
        )
    if config.in_place and (reason := _not_in_place(spec)):
        raise ValueError(f"matmul[cuda]: in_place needs {reason}. Leave it out.")
    lhs, rhs = spec.fold(named["lhs"], named["rhs"])
    if not config.in_place:
        lhs = _pad_rows(spec, lhs)
    outs = [spec.unfold(x) for x in _launch(spec, config, [lhs], [_pad_rows(spec, rhs)], named)]
    return outs if spec.fused else outs[0]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The array of a product that is three, side by side along its last dimension; and how the result is rotated.

    Attributes:
      of: which array: the lhs along k, or the rhs or the result along n.
      sizes: elements of the three along this dimension, multiples of 64.
      pairs: which columns of a head are rotated as a pair, or None.
      head_dim: columns of a head.
      num_rotated: columns that are rotated, from the first on.
      num_positions: row i has position i % num_positions.
    """

    of: Literal["lhs", "rhs", "out"]
    sizes: tuple[int, int, int]
    pairs: Literal["halves", "neighbours"] | None = None
    head_dim: int = 64
    num_rotated: int = 0
    num_positions: int = 1

    @property
    def problem(self) -> list[int]:
        """The fields of the kernel's `Problem`."""
        first, second, _ = self.sizes
        return [first, first + second, self.num_rotated, self.num_positions]


def run_in_parts(
    spec: MatmulSpec,
    config: Config,
    parts: Parts,
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    angles: Mapping[str, jax.Array],
) -> list[jax.Array]:
    """Returns the result, or its three parts, as matrices.

    Args:
      spec: the product, as if the three were one array; without an epilogue or a batch.
      parts: the array that is three.
      lhs, rhs: an operand, or its parts, as matrices in the layouts of the spec.
      angles: cos and sin, shapes (num_positions, head_dim / 2), if the result is rotated.
    """
    return [x[0] for x in _launch(spec, config, lhs, rhs, angles, parts)]


def _launch(
    spec: MatmulSpec,
    config: Config,
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    named: Mapping[str, jax.Array],
    parts: Parts | None = None,
) -> list[jax.Array]:
    """Returns the results, (batch, m, n) each. The operands have rows that the kernel takes."""
    g = spec.gemm
    _check_limits(spec, config)
    # One batch dimension, always: of one product, it is 1.
    lead = (g.batch or 1,)
    matrices = [x.reshape(*lead, *x.shape[-2:]) for x in (*lhs, *rhs)]
    operands = list(matrices)
    place: dict[str, int] = {}

    def add(name: str, x: jax.Array) -> None:
        place[name] = len(operands)
        operands.append(x)

    if spec.bias is not None:
        _, n_tiles = _grid_of_tiles(spec, config)
        columns = n_tiles * config.block_n * config.cluster_n
        # The columns beyond n are dropped with the tile's, but the last tiles read all of theirs.
        add("bias", jnp.pad(named["bias"].astype(jnp.float32), (0, columns - g.n)))
    if spec.elementwise is not None:
        like_out = lambda name: named[name].astype(spec.out_dtype).reshape(*lead, g.m, g.n)
        if spec.is_gradient:
            add("residual", like_out("preactivation"))
        add("gate" if spec.is_gradient else "residual", like_out(spec.elementwise))
    for name in ("cos", "sin") if parts is not None and parts.pairs else ():
        add(name, named[name])

    widths = parts.sizes if parts is not None and parts.of == "out" else (g.n,) * len(spec.outputs("matmul"))
    results = [jax.ShapeDtypeStruct((*lead, g.m, width), spec.out_dtype) for width in widths]
    num_results = len(results)
    aliases = {}
    if config.reduce_add:  # What parts are added to.
        aliases = {len(operands): 0}
        operands.append(jnp.zeros((*lead, g.m, g.n), jnp.float32))
    if config.through_memory:
        aliases = {len(operands): num_results + 1}
        tiles = _num_clusters(spec, config) * config.cluster_blocks
        operands.append(jnp.zeros(tiles, jnp.int32))
        results.append(jax.ShapeDtypeStruct((tiles, config.block_m * config.block_n), jnp.float32))
        results.append(jax.ShapeDtypeStruct((tiles,), jnp.int32))
    first_result = len(operands)
    if config.through_memory:
        place |= dict(sums=first_result + num_results, has_given=first_result + num_results + 1)

    residues = _num_residues(spec, config)
    pieces = lambda i: _pieces(first_result + i, results[i], config, residues)
    # The first result takes the place of an absent operand: the kernel does not touch it.
    absent = custom_call.Pointer(first_result)
    pointer = lambda name: custom_call.Pointer(place[name]) if name in place else absent

    def like_result(name: str) -> custom_call.Parameter:
        by_tma = name in place and _has_tma_rows(spec)
        return _pieces(place[name], results[0], config, residues) if by_tma else pointer(name)

    if not _has_tma_rows(spec):
        out, second = (custom_call.Pointer(first_result + i) for i in (0, num_results - 1))
    elif parts is not None and parts.of == "out":
        out, second = tuple(pieces(i)[0] for i in range(num_results)), absent
    else:
        out, second = pieces(0), pieces(1) if num_results == 2 else absent
    compiled = compile_gemm(spec, config, parts)
    outs = custom_call.launch(
        compiled.cubin,
        compiled.name,
        operands,
        results,
        parameters=[
            _lhs(matrices[: len(lhs)], spec, config),
            tuple(_rhs_blocks(spec, config, parts).tensor_map(i, x) for i, x in enumerate(matrices) if i >= len(lhs)),
            out,
            second,
            like_result("residual"),
            like_result("gate"),
            *map(pointer, ("bias", "cos", "sin", "sums", "has_given")),
            _problem(spec, config, parts),
        ],
        grid=(_num_blocks(spec, config),),
        block=((config.num_consumers + 1) * _WARPGROUP,),
        cluster=(config.cluster_blocks,),
        smem_bytes=config.smem_bytes,
        input_output_aliases=aliases,
        target=spec.target,
        label="matmul",
    )
    return outs[:num_results]


def _check_limits(spec: MatmulSpec, config: Config) -> None:
    """Raises ValueError where a configuration is more than the chip, its copies or the kernel's counts take: before
    the kernel is compiled, which takes long with many stages."""
    check_smem("matmul[cuda]", spec.target, config, config.smem_bytes, "Use fewer stages or smaller blocks.")
    for name, blocks in (("lhs", _lhs_blocks(spec, config)), ("rhs", _rhs_blocks(spec, config))):
        if (rows := blocks.box_rows) > _MAX_BOX:
            raise ValueError(
                f"matmul[cuda]: one copy loads at most {_MAX_BOX} rows; got {config}, which needs {rows} of {name}. "
                "Use smaller blocks."
            )
    # Parts that are tiles may be of any number: the products of steps, and of tiles, and parts must be counted, too.
    most = max(_num_groups(spec, config), _k_iters(spec, config)) * config.split_k
    if config.split_k > 1 and most > _MAX_COUNT:
        raise ValueError(
            f"matmul[cuda]: tiles, and steps of k, times split_k must be at most {_MAX_COUNT}; "
            f"got split_k={config.split_k}, which makes {most}. Use a smaller split_k."
        )


def compile_gemm(spec: MatmulSpec, config: Config, parts: Parts | None = None) -> compiler.CompiledKernel:
    """Compiles the kernel that serves the spec: sizes and the value of alpha are not part of it."""
    g = spec.gemm
    choices: dict[str, Any] = dict(
        input=_INPUTS[spec.lhs.dtype],
        output=_OUTPUTS[spec.out_dtype],
        lhs_is_k_major=g.lhs_layout == "mk",
        rhs_is_k_major=g.rhs_layout == "nk",
        residues=_num_residues(spec, config),
        has_alpha=spec.alpha != 1,
        has_bias=spec.bias is not None,
        has_residual=spec.elementwise is not None,
        multiplies=spec.multiplier is not None,
        save_preactivation=spec.save_preactivation,
        is_gradient=spec.is_gradient,
        has_tma_rows=_has_tma_rows(spec),
        activation=spec.activation or "none",
        activation_and_slope=f"{spec.activation or 'none'}_and_slope",
        lhs_stacks_boxes=_lhs_blocks(spec, config).stacks_boxes,
        rhs_stacks_boxes=_rhs_blocks(spec, config, parts).stacks_boxes,
        deferred=_deferred(spec, config),
        num_packed=_num_packed(spec, config),
        in_parts="kNone" if parts is None else f"k{parts.of.capitalize()}",
        rotation="kNone" if parts is None or parts.pairs is None else f"k{parts.pairs.capitalize()}",
        head_dim=64 if parts is None else parts.head_dim,
    )
    try:
        return _compile(config, **choices)
    except compiler.CompileError as e:
        e.add_note(f"matmul[cuda]: compiled for {spec} with {config}. Use a smaller tile, or leave config out.")
        raise


def _compile(config: Config, **choices: Any) -> compiler.CompiledKernel:
    # How tiles are walked is a matter of parameters: kernels that differ in nothing else are one.
    config = dataclasses.replace(config, in_place=False, minor="m", strip=1)
    return _compile_cached(config, tuple(sorted(choices.items())))


@functools.lru_cache(maxsize=512)
def _compile_cached(config: Config, choices: tuple[tuple[str, Any], ...]) -> compiler.CompiledKernel:
    defines: dict[str, Any] = dict(
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        num_stages=config.num_stages,
        num_consumers=config.num_consumers,
        ping_pong=config.ping_pong,
        num_staging=config.num_staging,
        cluster_m=config.cluster_m,
        cluster_n=config.cluster_n,
        split_k=config.split_k,
        reduce_add=config.reduce_add,
        through_memory=config.through_memory,
        smem_bytes=config.smem_bytes,
        **dict(choices),
    )
    sources = importlib.resources.files("jaxkernels.ffi.matmul")
    return compiler.compile_kernel(
        (sources / "gemm.cu").read_text(),
        "jaxkernels::gemm",
        filename="gemm.cu",
        headers={wgmma.NAME: wgmma.instructions(defines["input"], config.block_n)},
        defines={f"JK_{name.upper()}": value for name, value in defines.items()},
        strict=True,
    )


def _pad_rows(spec: MatmulSpec, x: jax.Array) -> jax.Array:
    """Pads rows that are not whole 16-byte units, to whole cache lines; usually there is nothing to do."""
    *lead, size = x.shape
    if size * x.dtype.itemsize % _TMA_BYTES == 0:
        return x
    stride = -(-size * x.dtype.itemsize // LINE_BYTES) * LINE_BYTES // x.dtype.itemsize
    rows = math.prod(lead)
    compiled = _compile_pad()
    (padded,) = custom_call.launch(
        compiled.cubin,
        compiled.name,
        [x],
        [jax.ShapeDtypeStruct((*lead, stride), x.dtype)],
        parameters=[custom_call.Pointer(0), custom_call.Pointer(1), np.int32(rows), np.int32(size), np.int32(stride)],
        grid=(min(-(-rows // _PAD_WARPS), _PAD_BLOCKS_PER_SM * spec.target.num_sms),),
        block=(32 * _PAD_WARPS,),
        target=spec.target,
        label="matmul",
    )
    return padded


@functools.cache
def _compile_pad() -> compiler.CompiledKernel:
    source = (importlib.resources.files("jaxkernels.ffi.matmul") / "pad_rows.cu").read_text()
    return compiler.compile_kernel(source, "jaxkernels::pad_rows", filename="pad_rows.cu", strict=True)


def _lhs_blocks(spec: MatmulSpec, config: Config) -> OperandBlocks:
    g = spec.gemm
    return OperandBlocks(g.lhs_layout == "mk", g.m, config.block_m, config.block_k, config.cluster_n)


def _rhs_blocks(spec: MatmulSpec, config: Config, parts: Parts | None = None) -> OperandBlocks:
    g = spec.gemm
    in_parts = parts is not None and parts.of == "rhs"
    return OperandBlocks(g.rhs_layout == "nk", g.n, config.block_n, config.block_k, config.cluster_m, in_parts)


def _lhs(xs: Sequence[jax.Array], spec: MatmulSpec, config: Config) -> tuple[custom_call.TensorMap, ...]:
    """A map for each part, or for the rows of each residue, from the 16 bytes on that hold the first one's begin."""
    blocks = _lhs_blocks(spec, config)
    residues = _num_residues(spec, config)
    whole = [blocks.tensor_map(i, x) for i, x in enumerate(xs)]
    if residues == 1:
        return tuple(whole)
    batch, m, k = xs[0].shape
    maps = []
    for residue in range(residues):
        begin = residue * k // _UNIT * _UNIT
        shape = (batch, _num_rows(m, residues, residue), residue * k - begin + k)
        # The step from one matrix to the next is that of rows where there is no next.
        strides = (2 * m * k if batch > 1 else 2 * residues * k, 2 * residues * k)
        maps.append(dataclasses.replace(whole[0], offset=2 * begin, shape=shape, strides=strides))
    return tuple(maps)


def _pieces(buffer: int, out: jax.ShapeDtypeStruct, config: Config, residues: int) -> tuple[custom_call.TensorMap, ...]:
    """Of a matrix like the result, whose pieces are stored or loaded, a map for the rows of each residue."""
    itemsize = out.dtype.itemsize
    span = _piece_bytes(config, itemsize)
    swizzle: Literal["64B", "128B"] = "64B" if span == 64 else "128B"
    batch, m, n = out.shape
    row_bytes = n * itemsize
    return tuple(
        custom_call.TensorMap(
            buffer,
            box=(1, 16, span // itemsize),
            shape=(batch, _num_rows(m, residues, residue), n),
            strides=(m * row_bytes, residues * row_bytes),
            offset=residue * row_bytes,
            swizzle=swizzle,
        )
        for residue in range(residues)
    )


def _num_rows(m: int, residues: int, residue: int) -> int:
    """Of m rows, those that leave this rest when divided by `residues`."""
    return -(-(m - residue) // residues)


def _num_kinds_of_rows(k: int) -> int:
    """Of rows of k elements, by where they begin between multiples of 16 bytes: every so many-th begins alike."""
    return _UNIT // math.gcd(k, _UNIT)


def _num_residues(spec: MatmulSpec, config: Config) -> int:
    """How many kinds of rows are told apart: of an lhs that is read in place all, else one."""
    return _num_kinds_of_rows(spec.gemm.k) if config.in_place else 1


def _not_in_place(spec: MatmulSpec) -> str | None:
    """What is missing for the lhs to be read in place, or None."""
    g = spec.gemm
    residues = _num_kinds_of_rows(g.k)
    if residues == 1:
        return f"rows of the lhs that are not whole {_TMA_BYTES}-byte units; got k={g.k}"
    if (g.lhs_layout, g.rhs_layout) != ("mk", "kn"):  # The rhs is read from rows before its first on.
        return f"k to be the contiguous dimension of the lhs, and n of the rhs; got {g.lhs_layout} and {g.rhs_layout}"
    if not _has_tma_rows(spec):  # Could be done; measured, it is slower than padding.
        return f"rows of the result that are whole {_TMA_BYTES}-byte units; got n={g.n} of {spec.out_dtype}"
    if g.m < residues:
        return f"rows of each of {residues} residues; got m={g.m}"
    if (g.batch or 1) > 1 and g.m * g.k % _UNIT:
        return f"matrices that are whole {_TMA_BYTES}-byte units in a batch; got m={g.m}, k={g.k}"
    # Drivers before CUDA 12.1 take 4 KB of parameters: 31 tensor maps.
    if residues == _UNIT and spec.save_preactivation and spec.elementwise is not None:
        return (
            f"rows of no more than 4 residues beside both a {spec.elementwise} and a saved pre-activation; got k={g.k}"
        )
    if residues == _UNIT and spec.is_gradient:
        return f"rows of no more than 4 residues for gradients of an activation; got k={g.k}"
    return None


def _deferred(spec: MatmulSpec, config: Config) -> Literal["kNothing", "kHalf", "kPacked"]:
    """What of a tile is stored while its block multiplies the next one, if there is one (see gemm.cu)."""
    has_next = _num_groups(spec, config) > hardware.clusters_at_once(spec.target, config.cluster_blocks)
    is_shared = config.num_consumers_of_tile == 2 and config.cluster_parts == 1 and not config.through_memory
    by_tma = _has_tma_rows(spec) and spec.elementwise is None
    if not (has_next and is_shared and by_tma) or config.num_stages == 1:
        return "kNothing"
    if _num_packed(spec, config):
        return "kPacked"
    return "kHalf" if config.block_m == 4 * _WGMMA_M else "kNothing"


def _num_packed(spec: MatmulSpec, config: Config) -> int:
    """Pieces of a consumer's tile that there are registers for as 16 bits, beside its accumulators."""
    if config.num_accumulators > MAX_EPILOGUE_ACCUMULATORS or spec.out_dtype.itemsize != 2 or spec.save_preactivation:
        return 0
    if spec.activation == "gelu_erf":
        return _num_pieces(config) // 4
    return _num_pieces(config) * (3 if spec.bias is not None and spec.activation is not None else 4) // 4


def _num_pieces(config: Config) -> int:
    """Of a consumer's tile, of 16-bit results."""
    wgmmas = config.block_m // config.num_consumers_of_tile // _WGMMA_M
    return wgmmas * (2 * config.block_n // _piece_bytes(config, itemsize=2))


def _piece_bytes(config: Config, itemsize: int) -> int:
    """Across a piece in which results are staged: a swizzle span that divides the tile's row."""
    return 64 if config.block_n * itemsize % SWIZZLE_BYTES else SWIZZLE_BYTES


def _exposed(spec: MatmulSpec, config: Config, constants: Constants) -> float:
    """The share of a tile's store that takes time of its own."""
    deferred = _deferred(spec, config)
    if deferred == "kHalf":
        return 1 - (1 - constants.exposed_half) / 2
    if deferred == "kPacked":
        return 1 - (1 - constants.exposed_packed) * _num_packed(spec, config) / _num_pieces(config)
    return 1.0


def _has_tma_rows(spec: MatmulSpec) -> bool:
    """Whether the result's rows are whole 16-byte units."""
    return spec.gemm.n * spec.out_dtype.itemsize % _TMA_BYTES == 0


def num_tiles(spec: MatmulSpec, block_m: int, block_n: int) -> int:
    return (spec.gemm.batch or 1) * -(-spec.gemm.m // block_m) * -(-spec.gemm.n // block_n)


def _num_groups(spec: MatmulSpec, config: Config) -> int:
    """Tiles of a whole cluster."""
    return (spec.gemm.batch or 1) * math.prod(_grid_of_tiles(spec, config))


def _grid_of_tiles(spec: MatmulSpec, config: Config) -> tuple[int, int]:
    """Tiles of a cluster along m, as many for the rows of each residue, and n."""
    residues = _num_residues(spec, config)
    rows = _num_rows(spec.gemm.m, residues, 0)
    m_tiles = residues * -(-rows // (config.block_m * config.cluster_m))
    return m_tiles, -(-spec.gemm.n // (config.block_n * config.cluster_n))


def _k_iters(spec: MatmulSpec, config: Config) -> int:
    """Blocks of k, from as many elements before the first as a row may begin behind a multiple of 16 bytes."""
    residues = _num_residues(spec, config)
    longest_head = _UNIT - _UNIT // residues
    return -(-(longest_head + spec.gemm.k) // config.block_k)


def _num_clusters(spec: MatmulSpec, config: Config) -> int:
    """Clusters, if each has one tile, or one part of a tile."""
    return _num_groups(spec, config) * (config.split_k if config.parts_are_tiles else 1)


def _num_blocks(spec: MatmulSpec, config: Config) -> int:
    clusters = _num_clusters(spec, config)
    if config.cluster_parts == 1:
        clusters = min(clusters, hardware.clusters_at_once(spec.target, config.cluster_blocks))
    return clusters * config.cluster_blocks


def _problem(spec: MatmulSpec, config: Config, parts: Parts | None) -> np.generic:
    """The kernel's `Problem`."""
    g = spec.gemm
    m_tiles, n_tiles = _grid_of_tiles(spec, config)
    k_iters = _k_iters(spec, config)
    # A strip that is wider than all tiles is as wide as they are, and no product of its width is beyond 32 bits.
    strip = min(config.strip, n_tiles if config.minor == "n" else m_tiles)
    fields = [g.m, g.n, g.k, g.batch or 1, m_tiles, n_tiles, k_iters, strip, config.minor == "n"]
    fields.append(np.float32(spec.alpha).view(np.int32))
    fields += [0, 0, 0, 1] if parts is None else parts.problem
    return np.array(fields, np.int32).view(f"V{4 * len(fields)}")[0]
