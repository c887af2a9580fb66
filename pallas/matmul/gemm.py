"""Matrix product on Hopper tensor cores, with its epilogue, in Pallas Mosaic GPU.

Algorithm. A persistent grid processes the output tiles in an order that keeps operands in L2 (a planar snake). A
producer warpgroup loads blocks of both operands, described by BlockSpecs, into a ring of shared memory slots. Two
consumer warpgroups multiply them with wgmma; each accumulates half of the tile in float32 registers. The ring continues
across tiles: the producer runs ahead while slots are free. (JAX's `emit_pipeline_warp_specialized` fills and drains its
pipeline for each tile.)

The epilogue (alpha, bias, activation, multiplier or residual) works on the accumulators. TMA stores the results from a
small swizzled staging buffer. A consumer stores some pieces later, during the first products of the next tile. Until
then it keeps them in registers, in 16 bits: as many pieces as fit.

    tile (block_m x block_n), split along m            split along n
    +-----------------------+                          +-----------+-----------+
    |       consumer0       |                          | consumer0 | consumer1 |
    +-----------------------+                          |           |           |
    |       consumer1       |                          +-----------+-----------+
    +-----------------------+

Operands are stored as "mk" or "km" and "kn" or "nk". wgmma reads both orientations of 16-bit types from shared memory,
so no layout needs a copy. Past the edge of an array TMA reads zeros and writes nothing. TMA needs rows of whole 16-byte
units, and Mosaic tiles rows by 8 and contiguous dimensions by 64. XLA pads other sizes first.

Source: structure after JAX's hopper_matmul_mgpu; ladder and figures: docs/pallas-kernels.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.core import hardware
from jaxkernels.core.arguments import check_fields
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.matmul.epilogue import ACTIVATIONS, apply_epilogue
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.pallas.names import named_kernel

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unsupported"]

VERSION = 2

_Axis = Literal["m", "n"]
_NUM_CONSUMERS = 2
_WARPGROUP = 128
_SWIZZLE_BYTES = 128
#: Results are staged in shared memory and stored in pieces of _STORE_M rows by one swizzle span.
_STORE_M = 64
_NUM_STORE_SLOTS = 2
#: Registers of a thread of the producer, and of a consumer.
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 232
#: Registers of a consumer's thread for accumulators and deferred results. With more, ptxas spills.
_MAX_TILE_REGISTERS = 160


def _erf(x: jax.Array) -> jax.Array:
    """The error function, with an error of 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26). Mosaic GPU has none."""
    t = 1 / (1 + 0.3275911 * jnp.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = series * jnp.exp(-x * x)
    return jnp.where(x < 0, tail - 1, 1 - tail)


#: Mosaic cannot lower two of jax.nn's functions: relu uses custom_jvp, the exact gelu uses erfc.
_ACTIVATIONS = ACTIVATIONS | {
    "relu": lambda x: jnp.maximum(x, 0),
    "relu_squared": lambda x: jnp.square(jnp.maximum(x, 0)),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x * math.sqrt(0.5))),
}

#: The kernel counts tiles in 32 bits. A strip wider than the result has the same order as one as wide as the result.
_MAX_STRIP = 2**16


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_m, block_n: output tile of one CTA.
      block_k: depth of one pipeline step.
      num_stages: slots of the operand ring.
      split: the dimension along which the two consumers divide the tile.
      cluster: the dimension along which two neighbouring CTAs form a cluster and multicast the operand
        they share, or None.
      minor: the dimension along which consecutive tiles lie, in strips of `strip` tiles.
      strip: see `minor`.
      split_k: the number of parts of k. Each is a product in float32. XLA sums them in order, and applies the epilogue.
      delay_release: 1 keeps one wgmma group in flight and releases a slot one step late; 0 waits for each.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 4
    split: _Axis = "m"
    cluster: _Axis | None = None
    minor: _Axis = "m"
    strip: int = 8
    split_k: int = 1
    delay_release: int = 1

    def __post_init__(self) -> None:
        check_fields("matmul[pallas]", self)
        consumer_m, consumer_n = self.consumer_tile
        if consumer_m % 64 or consumer_n % 64 or self.block_k % 64 or min(consumer_m, consumer_n, self.block_k) <= 0:
            raise ValueError(
                "matmul[pallas]: each consumer's tile and block_k must be positive multiples of 64; got "
                f"block_m={self.block_m}, block_n={self.block_n}, block_k={self.block_k} split along {self.split}."
            )
        if self.split_k < 1:
            raise ValueError(f"matmul[pallas]: split_k must be positive; got {self.split_k}.")
        if not 1 <= self.strip <= _MAX_STRIP:
            raise ValueError(f"matmul[pallas]: strip must be from 1 to {_MAX_STRIP}; got {self.strip}.")
        if self.delay_release not in (0, 1):
            raise ValueError(f"matmul[pallas]: delay_release must be 0 or 1; got {self.delay_release}.")
        if self.num_stages <= self.delay_release:
            raise ValueError(
                f"matmul[pallas]: num_stages must exceed delay_release={self.delay_release}; got {self.num_stages}."
            )

    @property
    def consumer_tile(self) -> tuple[int, int]:
        """Rows and columns that one consumer multiplies."""
        return (
            self.block_m // (_NUM_CONSUMERS if self.split == "m" else 1),
            self.block_n // (_NUM_CONSUMERS if self.split == "n" else 1),
        )


#: The default is one of these: the model is not accurate enough for the whole space (docs/pallas-kernels.md).
_CANDIDATES = (
    Config(),
    Config(256, 128),
    Config(128, 192),
    Config(128, 128, num_stages=6),
    Config(128, 128, num_stages=6, split_k=2),
    Config(128, 128, num_stages=6, split_k=4),
    Config(128, 64, 128),
    Config(64, 256, split="n", delay_release=0),
    Config(64, 128, 128, split="n", delay_release=0),
    Config(64, 128, 128, split="n", delay_release=0, split_k=2),
    Config(64, 128, 128, split="n", delay_release=0, split_k=4),
    Config(64, 128, 128, split="n", delay_release=0, split_k=8),
    Config(64, 128, num_stages=6, split="n", delay_release=0),
)
#: Up to this many rows are one tile, which two neighbours along n share.
_SKINNY = 64
_SKINNY_CANDIDATE = Config(64, 128, 128, split="n", delay_release=0, cluster="n")

# Figures of an H200, fitted to 240 times of 20 shapes (2026-11-21).
# Rates of one SM: bf16 FLOP/s; bytes/s from shared memory into the tensor cores, and from L2.
_FLOPS_PER_SM = 8.3e12
_SMEM_BYTES_PER_SM = 5.2e11
_L2_BYTES_PER_SM = 1.07e11
# Seconds: a launch, with the load of the first tile; the store of a tile of 128 x 256; the latency of a load; a kernel
# that sums parts of k; a copy, beside its bytes.
_LAUNCH_SECONDS = 1.4e-6
_STORE_SECONDS = 0.8e-6
_LOAD_SECONDS = 1.0e-6
_SUM_SECONDS = 1.2e-6
_COPY_SECONDS = 1.2e-6
#: The time of a store with an activation, relative to one without.
_EPILOGUE = 2.0
#: The share of a deferred piece's store that the next tile's products hide.
_HIDDEN = 0.6

# The search space: the values of each knob, the usual one first.
_BLOCKS_M = (128, 64, 256)
_BLOCKS_N = (256, 192, 128, 64)
_BLOCK_KS = (64, 128)
_SPLITS: tuple[_Axis, ...] = ("m", "n")
_MAX_STAGES = 6
_PARTS = (2, 4, 8)
_MIN_SPLIT_STEPS = 4
_STRIPS = (8, 4, 16)
#: The largest tile of a consumer: 128 registers of each thread for accumulators. 256 would leave none for other values.
_MAX_CONSUMER_TILE = 128 * 128
#: With this many waves the last one costs little, and tiles smaller than 128 x 128 read too much.
_MANY_WAVES = 6
#: Upper bound of the shared memory for barriers and for the alignment of buffers to 1 KB.
_BARRIER_BYTES = 3072


def unsupported(spec: MatmulSpec) -> str | None:
    return tensor_cores.unsupported(spec)


def shortlist(spec: MatmulSpec) -> tuple[Config, ...]:
    candidates = (_SKINNY_CANDIDATE, *_CANDIDATES) if spec.gemm.m <= _SKINNY else _CANDIDATES
    return tuple(_trimmed(spec, config) for config in candidates)


def _trimmed(spec: MatmulSpec, config: Config) -> Config:
    """The configuration, without a late release if the ring is longer than k."""
    goes_round = pl.cdiv(spec.gemm.k, config.block_k) > config.num_stages
    return config if goes_round else dataclasses.replace(config, delay_release=0)


def search_space(spec: MatmulSpec) -> Iterator[Config]:
    """Yields the tiles and schedules worth measuring.

    - Tiles: {64, 128, 256} x {64, 128, 192, 256}. The sides of a consumer's half are multiples of 64, and its
      accumulators fit into registers. Tiles of 64 rows are split along n, others along m, because a wgmma of 256
      columns reads least. Blocks of 192 or 256 only for sizes above 128; blocks of 128 along m for m above 64; blocks
      of 64 along n for n up to 64, or in a tile of 128 rows. With many waves no tile is smaller than 128 x 128.
    - block_k 128, which halves the barriers: tiles up to 128 x 128, for k above 128.
    - The deepest ring of up to 6 slots that fits. A shallower ring saves memory that nothing else uses.
    - Clusters, if two tiles can share an operand; a late release, if k is longer than the ring.
    - Parts of k of at least 4 steps, if all parts of all tiles run at once.
    - Strips and their direction, if there is more than one wave, and the strip is narrower than the result.
    """
    g = spec.gemm
    tiles = lambda block_m, block_n: (pl.cdiv(g.m, block_m), pl.cdiv(g.n, block_n))
    num_tiles = lambda block_m, block_n: (g.batch or 1) * math.prod(tiles(block_m, block_n))
    many = min(g.m, g.n) > 64 and num_tiles(128, 256) >= _MANY_WAVES * spec.target.num_sms
    for block_m, block_n, split, block_k in itertools.product(_BLOCKS_M, _BLOCKS_N, _SPLITS, _BLOCK_KS):
        area = block_m * block_n
        consumer_m = block_m // (_NUM_CONSUMERS if split == "m" else 1)
        consumer_n = block_n // (_NUM_CONSUMERS if split == "n" else 1)
        reads_more = split == "n" and block_m > 64
        illegal = consumer_m % 64 or consumer_n % 64 or consumer_m * consumer_n > _MAX_CONSUMER_TILE
        too_large = (block_m == 256 and g.m <= 128) or (block_n > 128 >= g.n) or (block_m > 64 >= g.m)
        too_small = (block_n == 64 and g.n > 64 and block_m != 128) or (many and area < 128 * 128)
        needlessly_deep = block_k > 64 and (area > 128 * 128 or g.k <= 128)
        num_stages = min(_MAX_STAGES, _max_stages(spec, block_m, block_n, block_k))
        if illegal or reads_more or too_large or too_small or needlessly_deep or num_stages < 2:
            continue
        config = Config(block_m, block_n, block_k, num_stages, split)
        m_iters, n_iters = tiles(block_m, block_n)
        sides: tuple[tuple[_Axis, int], ...] = (("m", m_iters), ("n", n_iters))
        clusters: list[_Axis | None] = [None, *(axis for axis, iters in sides if iters > 1)]
        walks: list[tuple[_Axis, int]] = [("m", _STRIPS[0])]
        if m_iters * n_iters > spec.target.num_sms:
            walks.extend((axis, strip) for axis, iters in sides for strip in _STRIPS if strip < iters)
        parts = [
            split_k for split_k in _PARTS
            if num_tiles(block_m, block_n) * split_k <= spec.target.num_sms
            and pl.cdiv(g.k, block_k) >= _MIN_SPLIT_STEPS * split_k
            and tensor_cores.fills_parts(pl.cdiv(g.k, block_k), split_k)
        ]  # fmt: skip
        # dict.fromkeys removes duplicates: the usual order is often among the others.
        for delay_release in dict.fromkeys(_trimmed(spec, config).delay_release * late for late in (1, 0)):
            late = dataclasses.replace(config, delay_release=delay_release)
            for cluster, (minor, strip) in itertools.product(clusters, dict.fromkeys(walks)):
                yield dataclasses.replace(late, cluster=cluster, minor=minor, strip=strip)
            for split_k in parts:
                yield dataclasses.replace(late, split_k=split_k)


def _max_stages(spec: MatmulSpec, block_m: int, block_n: int, block_k: int) -> int:
    """The number of slots that fit into shared memory, beside staging buffers (rows of 128 bytes) and barriers."""
    staging = _NUM_CONSUMERS * _NUM_STORE_SLOTS * _STORE_M * _SWIZZLE_BYTES
    slot = 2 * (block_m + block_n) * block_k
    return (spec.target.smem_bytes - staging - _BARRIER_BYTES) // slot


def estimate(spec: MatmulSpec, config: Config) -> float:
    """Estimates waves of tiles. A step is bound by the tensor cores or by loading its operands.

    - A wgmma of 64 rows reads both operands from shared memory, which takes time beside the products. With fewer
      columns it reads more bytes for each FLOP.
    - Blocks come from L2; a block that a cluster shares is read once for both CTAs. The first time they come from
      memory; a wave covers strip x (SMs / strip) tiles. The slots of the ring limit the loads in flight.
    - Parts of k are written, and read again by the kernel that sums them.
    """
    g = spec.gemm
    paired_m, paired_n = (2 if config.cluster == axis else 1 for axis in ("m", "n"))
    m_iters, n_iters = pl.cdiv(g.m, config.block_m), pl.cdiv(g.n, config.block_n)
    groups = config.split_k * _num_groups(spec, config)
    consumer_m, consumer_n = config.consumer_tile
    flops = 2 * config.block_m * config.block_n * config.block_k
    smem_bytes = 2 * _NUM_CONSUMERS * consumer_m // 64 * (64 + consumer_n) * config.block_k
    l2_bytes = 2 * (config.block_m / paired_n + config.block_n / paired_m) * config.block_k
    step = max(
        flops / _FLOPS_PER_SM + smem_bytes / _SMEM_BYTES_PER_SM,
        l2_bytes / _L2_BYTES_PER_SM,
        _LOAD_SECONDS / (config.num_stages - config.delay_release),
    )
    if spec.target.memory_bytes_per_s:
        wave = min(spec.target.num_sms // config.split_k, m_iters * n_iters)
        major, minor = (n_iters, m_iters) if config.minor == "m" else (m_iters, n_iters)
        minor = min(config.strip, minor)
        major = min(pl.cdiv(wave, minor), major)
        rows, columns = (minor, major) if config.minor == "m" else (major, minor)
        wave_bytes = 2 * (rows * config.block_m + columns * config.block_n) * config.block_k
        step = max(step, config.split_k * wave_bytes / spec.target.memory_bytes_per_s)
    waves = hardware.waves(groups, _num_clusters(spec, config))
    steps = pl.cdiv(g.k, config.block_k * config.split_k) * step
    store = _STORE_SECONDS * config.block_m * config.block_n / (128 * 256) * (_EPILOGUE if spec.activation else 1.0)
    hidden = store * _HIDDEN * _num_deferred(spec, config) / _num_pieces(spec, config)
    seconds = waves * (steps + store - hidden) + hidden
    if config.split_k > 1:
        sums_bytes = 8 * config.split_k * (g.batch or 1) * g.m * g.n
        seconds += _SUM_SECONDS + sums_bytes / (spec.target.memory_bytes_per_s or math.inf)
    return _LAUNCH_SECONDS + seconds + _padding_seconds(spec) + tensor_cores.gradients_seconds(spec)


def _padding_seconds(spec: MatmulSpec) -> float:
    """What XLA takes to pad operands, and to cut the result: each is a copy. Rows at the end are cut without one."""
    g = spec.gemm
    sizes = dict(m=g.m, n=g.n, k=g.k)
    arrays = [(sizes[rows], sizes[columns]) for rows, columns in (g.lhs_layout, g.rhs_layout)]
    arrays += [(g.m, g.n)] * (spec.elementwise is not None)
    if g.batch or _padded(g.n, rows=False) != g.n:
        arrays.append((g.m, g.n))
    seconds = 0.0
    for rows, columns in arrays:
        padded = _padded(rows, rows=True) * _padded(columns, rows=False)
        if padded != rows * columns:
            num_bytes = spec.lhs.dtype.itemsize * (g.batch or 1) * (padded + rows * columns)
            seconds += _COPY_SECONDS + num_bytes / (spec.target.memory_bytes_per_s or math.inf)
    return seconds


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
    if not tensor_cores.fills_parts(pl.cdiv(spec.gemm.k, config.block_k), config.split_k):
        raise ValueError(
            f"matmul[pallas]: every part of split_k={config.split_k} must have some of k={spec.gemm.k}, in blocks of "
            f"{config.block_k}. Use a smaller split_k."
        )
    product = dataclasses.replace(spec.product, out_dtype=jnp.dtype(jnp.float32))
    (parts,) = _launch(product, config, operands)
    out = product.unfold(parts.sum(axis=0))
    results = apply_epilogue(spec, out, operands) if spec.fused else out
    return jax.tree.map(lambda x: x.astype(spec.out_dtype), results)


def _launch(spec: MatmulSpec, config: Config, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Returns (batch?, m, n) results. With parts of k, the parts are the first dimension."""
    g = spec.gemm
    lhs, rhs = (_pad(x) for x in spec.fold(operands["lhs"], operands["rhs"]))
    m, n = _padded(g.m, rows=True), _padded(g.n, rows=False)
    lead = () if g.batch is None else (g.batch,)
    inputs = []
    if spec.bias is not None:
        # The last tiles read the bias of all their columns, also past n.
        columns = config.block_n * (2 if config.cluster == "n" else 1)
        inputs.append(jnp.pad(operands["bias"].astype(jnp.float32), (0, -g.n % columns)))
    if spec.elementwise is not None:
        inputs.append(_pad(operands[spec.elementwise].astype(spec.out_dtype).reshape(*lead, g.m, g.n)))
    parts = () if config.split_k == 1 else (config.split_k,)
    out_type = jax.ShapeDtypeStruct((*parts, *lead, m, n), spec.out_dtype)
    kernel = plgpu.kernel(
        named_kernel("matmul", _kernel, spec=spec, config=config),
        out_type=[out_type] * (2 if spec.save_preactivation else 1),
        grid=(_num_clusters(spec, config),),
        grid_names=("cta",),
        cluster=(2,) if config.cluster else (1,),
        cluster_names=("cluster",),
        num_threads=_NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        # Approximate exp and tanh have about 11 bits: enough for a 16-bit result only.
        compiler_params=plgpu.CompilerParams(approx_math=spec.out_dtype in tensor_cores.INPUTS),
    )
    return [out[..., : g.m, : g.n] for out in kernel(lhs, rhs, *inputs)]


def _padded(size: int, *, rows: bool) -> int:
    """The next size that Mosaic can tile: a multiple of 8 for rows, of 64 for the contiguous dimension."""
    tile = 8 if rows else 64
    return size + -size % tile


def _pad(x: jax.Array) -> jax.Array:
    """Pads a (batch?, rows, columns) array to sizes that can be tiled."""
    *lead, rows, columns = x.shape
    add = (_padded(rows, rows=True) - rows, _padded(columns, rows=False) - columns)
    return jnp.pad(x, ((0, 0),) * len(lead) + ((0, add[0]), (0, add[1]))) if any(add) else x


def _swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms of a row-major tile in shared memory that wgmma and TMA read without bank conflicts."""
    swizzle = plgpu.find_swizzle(columns * jnp.dtype(dtype).itemsize * 8)
    # The two classes have an abstract method that JAX never implements.
    return (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]


@dataclasses.dataclass(frozen=True)
class _Loops:
    """Numbers of a kernel that are known before it runs.

    Attributes:
      m_iters, n_iters: tiles of the result along m and n. A tile is that of a whole cluster (two neighbouring CTAs).
      k_iters: steps of a tile.
      num_tiles: all work items: the tiles of every batch element and part of k.
      store_n: columns of a piece of the result.
      pieces: row and column of each piece in a consumer's part of a tile.
      num_deferred: the number of pieces, the last ones, that are stored during the next tile's first steps.
    """

    m_iters: int
    n_iters: int
    k_iters: int
    num_tiles: int
    store_n: int
    pieces: tuple[tuple[int, int], ...]
    num_deferred: int

    @classmethod
    def of(cls, spec: MatmulSpec, config: Config) -> _Loops:
        g = spec.gemm
        consumer_m, consumer_n = config.consumer_tile
        store_n = _SWIZZLE_BYTES // spec.out_dtype.itemsize
        return cls(
            m_iters=pl.cdiv(g.m, config.block_m * (2 if config.cluster == "m" else 1)),
            n_iters=pl.cdiv(g.n, config.block_n * (2 if config.cluster == "n" else 1)),
            k_iters=pl.cdiv(pl.cdiv(g.k, config.block_k), config.split_k),
            num_tiles=config.split_k * _num_groups(spec, config),
            store_n=store_n,
            pieces=tuple(itertools.product(range(consumer_m // _STORE_M), range(consumer_n // store_n))),
            num_deferred=_num_deferred(spec, config),
        )

    @property
    def num_now(self) -> int:
        """The number of pieces that are stored right after the tile's products."""
        return len(self.pieces) - self.num_deferred


@dataclasses.dataclass(frozen=True)
class _Gmem:
    """Arrays in global memory. `elementwise` is the multiplier or the residual. `results` are the preactivation, if it
    is saved, and the output."""

    lhs: Any
    rhs: Any
    bias: Any
    elementwise: Any
    results: tuple[Any, ...]

    @classmethod
    def of(cls, spec: MatmulSpec, lhs: Any, rhs: Any, refs: tuple[Any, ...]) -> _Gmem:
        rest = list(refs)
        bias = rest.pop(0) if spec.bias is not None else None
        elementwise = rest.pop(0) if spec.elementwise is not None else None
        out, *preactivation = rest
        return cls(lhs, rhs, bias, elementwise, (*preactivation, out))

    @property
    def out(self) -> Any:
        return self.results[-1]


@dataclasses.dataclass(frozen=True)
class _Smem:
    """Buffers and barriers of a CTA.

    Attributes:
      rings: slots of the lhs and of the rhs.
      full, empty: barriers of the slots.
      out: each consumer's staging buffers.
      elementwise_full: barriers of the staging buffers, if a multiplier or a residual is loaded into them.
      cluster_done: barrier at which the CTAs of a cluster end together; None without a cluster.
    """

    rings: list[Any]
    full: Any
    empty: Any
    out: Any
    elementwise_full: Any
    cluster_done: Any


@dataclasses.dataclass(frozen=True)
class _Place:
    """The position of a tile: part of k and batch element (tuples of one index, or empty), tile row and column."""

    part: tuple[Any, ...]
    batch: tuple[Any, ...]
    m_idx: Any
    n_idx: Any


@dataclasses.dataclass(frozen=True)
class _Cta:
    """A CTA and its `num_tiles` tiles: `index`, `index + num_ctas`, ...

    CTAs are counted along the grid; the CTAs of a cluster have the same index.
    """

    spec: MatmulSpec
    config: Config
    loops: _Loops
    gmem: _Gmem
    smem: _Smem
    index: Any
    num_ctas: Any
    num_tiles: Any

    def tile(self, nth: Any) -> Any:
        return self.index + nth * self.num_ctas

    # Loops carry the slot index: a remainder by a number that is not a power of two would slow down every step.

    def following(self, slot: Any) -> Any:
        return jnp.where(slot == self.config.num_stages - 1, 0, slot + 1)

    def previous(self, slot: Any) -> Any:
        return jnp.where(slot == 0, self.config.num_stages - 1, slot - 1)

    def place(self, tile: Any) -> _Place:
        config, m_iters, n_iters = self.config, self.loops.m_iters, self.loops.n_iters
        product, tile = lax.div(tile, jnp.int32(m_iters * n_iters)), lax.rem(tile, jnp.int32(m_iters * n_iters))
        num_batches = jnp.int32(self.spec.gemm.batch or 1)
        part = () if config.split_k == 1 else (lax.div(product, num_batches),)
        batch = product if config.split_k == 1 or self.spec.gemm.batch is None else lax.rem(product, num_batches)
        m_idx, n_idx = plgpu.planar_snake(tile, (m_iters, n_iters), 0 if config.minor == "m" else 1, config.strip)
        if config.cluster == "m":
            m_idx = m_idx * 2 + lax.axis_index("cluster")
        elif config.cluster == "n":
            n_idx = n_idx * 2 + lax.axis_index("cluster")
        return _Place(part, () if self.spec.gemm.batch is None else (batch,), m_idx, n_idx)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup; `rows` and `columns` are its part of the CTA's tile."""

    cta: _Cta
    index: Any
    rows: Any
    columns: Any

    @classmethod
    def of(cls, cta: _Cta, index: Any) -> _Consumer:
        (consumer_m, consumer_n), split = cta.config.consumer_tile, cta.config.split
        rows = pl.ds(index * consumer_m, consumer_m) if split == "m" else slice(None)
        columns = pl.ds(index * consumer_n, consumer_n) if split == "n" else slice(None)
        return cls(cta, index, rows, columns)


def _kernel(lhs_gmem: Any, rhs_gmem: Any, *refs: Any, spec: MatmulSpec, config: Config) -> None:
    """Allocates shared memory and starts the producer and the consumers. All warpgroups of a CTA run it."""
    gmem = _Gmem.of(spec, lhs_gmem, rhs_gmem, refs)
    loops = _Loops.of(spec, config)

    def walk_tiles(**smem: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        is_producer = warpgroup == _NUM_CONSUMERS
        index, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
        num_tiles = lax.div(loops.num_tiles - 1 - index + num_ctas, num_ctas)
        cta = _Cta(spec, config, loops, gmem, _Smem(**smem), index, num_ctas, num_tiles)
        pl.when(is_producer)(lambda: _produce(cta))
        pl.when(jnp.logical_not(is_producer))(lambda: _consume(cta, warpgroup))
        if config.cluster:
            # The neighbour still arrives at barriers in our shared memory to release slots, so wait for it.
            plgpu.barrier_arrive(cta.smem.cluster_done)
            plgpu.barrier_wait(cta.smem.cluster_done)

    pl.run_scoped(walk_tiles, **_allocations(spec, config, loops), collective_axes="warpgroup")
    # The staging buffers must outlive the last stores' reads.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _allocations(spec: MatmulSpec, config: Config, loops: _Loops) -> dict[str, Any]:
    """The fields of `_Smem`."""
    num_stages, blocks = config.num_stages, _operand_blocks(spec, config)

    def ring(block: Any) -> Any:
        shape = (num_stages, *(size for size in block.block_shape if size is not None))
        return plgpu.SMEM(shape, spec.lhs.dtype, transforms=block.transforms)

    # In a cluster the neighbour's producer also writes our slots.
    in_cluster = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    return dict(
        rings=[ring(block) for block in blocks],
        full=plgpu.Barrier(num_arrivals=len(blocks), num_barriers=num_stages),
        empty=(in_cluster if config.cluster else plgpu.Barrier)(num_arrivals=_NUM_CONSUMERS, num_barriers=num_stages),
        out=plgpu.SMEM(
            (_NUM_CONSUMERS, _NUM_STORE_SLOTS, _STORE_M, loops.store_n),
            spec.out_dtype,
            transforms=_swizzled(loops.store_n, spec.out_dtype),
        ),
        elementwise_full=plgpu.Barrier(num_barriers=_NUM_CONSUMERS * _NUM_STORE_SLOTS) if spec.elementwise else None,
        cluster_done=in_cluster(num_arrivals=_NUM_CONSUMERS + 1) if config.cluster else None,
    )


def _operand_blocks(spec: MatmulSpec, config: Config) -> tuple[Any, Any]:
    """Blocks of the lhs and the rhs in their memory layout: (block x block_k) of a tile's rows or columns."""
    g = spec.gemm

    def block_of(layout: str, axis: _Axis, block: int) -> Any:
        k_last = layout[1] == "k"
        shape = (block, config.block_k) if k_last else (config.block_k, block)
        index = (lambda batch, i, k: (*batch, i, k)) if k_last else (lambda batch, i, k: (*batch, k, i))
        return plgpu.BlockSpec(
            (*(() if g.batch is None else (None,)), *shape),
            index,
            transforms=_swizzled(shape[1], spec.lhs.dtype),
            memory_space=plgpu.SMEM,
            # CTAs of a cluster along n have the same rows, so they share the lhs; along m they share the rhs.
            collective_axes=("cluster",) if config.cluster not in (None, axis) else (),
        )

    return block_of(g.lhs_layout, "m", config.block_m), block_of(g.rhs_layout, "n", config.block_n)


def _produce(cta: _Cta) -> None:
    """Loads the blocks of all tiles of the CTA into the ring."""
    plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
    lax.fori_loop(0, cta.num_tiles, functools.partial(_load_tile, cta), jnp.int32(0))


def _load_tile(cta: _Cta, nth: Any, slot: Any) -> Any:
    """Loads the blocks of the CTA's nth tile, starting with `slot`. Returns the slot after the last block."""
    k_iters, place = cta.loops.k_iters, cta.place(cta.tile(nth))
    first = place.part[0] * k_iters if place.part else 0
    blocks = _operand_blocks(cta.spec, cta.config)
    operands = list(zip((cta.gmem.lhs, cta.gmem.rhs), blocks, (place.m_idx, place.n_idx), cta.smem.rings))

    def load(k: Any, slot: Any) -> Any:
        goes_round = nth * k_iters + k >= cta.config.num_stages
        pl.when(goes_round)(lambda: plgpu.barrier_wait(cta.smem.empty.at[slot]))
        for gmem, block, i, ring in operands:
            source = tuple(
                index if size is None else pl.ds(index * size, size)
                for index, size in zip(block.index_map(place.batch, i, first + k), block.block_shape)
            )
            plgpu.copy_gmem_to_smem(
                gmem.at[source], ring.at[slot], cta.smem.full.at[slot], collective_axes=block.collective_axes or None
            )
        return cta.following(slot)

    return lax.fori_loop(0, k_iters, load, slot)


def _consume(cta: _Cta, index: Any) -> None:
    """Multiplies and stores a consumer's part of each tile."""
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
    consumer, loops = _Consumer.of(cta, index), cta.loops
    nothing = plgpu.layout_cast(jnp.zeros((_STORE_M, loops.store_n), cta.spec.out_dtype), plgpu.Layout.WGMMA)
    carry = jnp.int32(0), [nothing] * loops.num_deferred
    _, deferred = lax.fori_loop(0, cta.num_tiles, functools.partial(_run_tile, consumer), carry)
    for k, x in enumerate(deferred):
        _store(consumer, x, cta.tile(cta.num_tiles - 1), loops.num_now + k)


def _run_tile(consumer: _Consumer, nth: Any, carry: tuple[Any, list[jax.Array]]) -> tuple[Any, list[jax.Array]]:
    """Multiplies and stores a consumer's part of the CTA's nth tile.

    Args:
      carry: the slot of the tile's first blocks, and the deferred pieces of the previous tile.
    """
    slot, before = carry
    cta, loops = consumer.cta, consumer.cta.loops
    tile = cta.tile(nth)

    def store_deferred(k: int) -> None:
        pl.when(nth > 0)(lambda: _store(consumer, before[k], tile - cta.num_ctas, loops.num_now + k))

    acc, slot = _multiply_tile(consumer, slot, store_deferred)
    for piece in range(loops.num_now):
        preactivation, result = _finish(consumer, acc, tile, piece)
        if cta.spec.save_preactivation:
            _store(consumer, preactivation, tile, piece, nth_result=0)
        _store(consumer, result, tile, piece)
    last_pieces = range(loops.num_now, len(loops.pieces))
    deferred = [_finish(consumer, acc, tile, piece)[1].astype(cta.spec.out_dtype) for piece in last_pieces]
    return slot, deferred


def _multiply_tile(consumer: _Consumer, slot: Any, store_deferred: Callable[[int], None]) -> tuple[jax.Array, Any]:
    """Returns the products of the tile whose first blocks are in `slot`, and the slot after its last block.

    Args:
      store_deferred: called with 0, 1, ... while the products of that step run.
    """
    cta, loops = consumer.cta, consumer.cta.loops

    def multiply(acc_ref: Any) -> tuple[jax.Array, Any]:
        next_slot = slot
        for k in range(loops.num_deferred):
            next_slot = _multiply_blocks(consumer, acc_ref, next_slot, k, functools.partial(store_deferred, k))
        step = lambda k, slot: _multiply_blocks(consumer, acc_ref, slot, k)
        next_slot = lax.fori_loop(loops.num_deferred, loops.k_iters, step, next_slot)
        products = acc_ref[...]
        if cta.config.delay_release:
            plgpu.barrier_arrive(cta.smem.empty.at[cta.previous(next_slot)])
        return products, next_slot

    return pl.run_scoped(multiply, plgpu.ACC(cta.config.consumer_tile, jnp.float32))


def _multiply_blocks(
    consumer: _Consumer, acc_ref: Any, slot: Any, k: Any, store_deferred: Callable[[], None] | None = None
) -> Any:
    """Adds the product of a slot's blocks, the kth of the tile. Returns the next slot.

    With a late release it releases the slot of the previous step. The first step has none.
    """
    cta, g, is_late = consumer.cta, consumer.cta.spec.gemm, consumer.cta.config.delay_release
    plgpu.barrier_wait(cta.smem.full.at[slot])
    lhs, rhs = (ring.at[slot] for ring in cta.smem.rings)
    lhs = lhs.at[consumer.rows] if g.lhs_layout == "mk" else lhs.at[:, consumer.rows].transpose((1, 0))
    rhs = rhs.at[:, consumer.columns] if g.rhs_layout == "kn" else rhs.at[consumer.columns].transpose((1, 0))
    plgpu.wgmma(acc_ref, lhs, rhs)
    if store_deferred is not None:
        store_deferred()
    plgpu.wgmma_wait(is_late)
    release = lambda: plgpu.barrier_arrive(cta.smem.empty.at[cta.previous(slot) if is_late else slot])
    if store_deferred is None and cta.loops.num_deferred >= is_late:
        release()
    else:
        pl.when(k >= is_late)(release)
    return cta.following(slot)


def _finish(consumer: _Consumer, acc: jax.Array, tile: Any, piece: int) -> tuple[jax.Array, jax.Array]:
    """Returns a piece of the products, scaled and with bias, before and after the activation."""
    spec, store_n = consumer.cta.spec, consumer.cta.loops.store_n
    i, j = consumer.cta.loops.pieces[piece]
    x = acc[i * _STORE_M : (i + 1) * _STORE_M, j * store_n : (j + 1) * store_n]
    if spec.alpha != 1:
        x = spec.alpha * x
    if spec.bias is not None:
        bias_gmem = consumer.cta.gmem.bias.at[_target(consumer, tile, piece)[0][-1]]
        bias = plgpu.load(bias_gmem, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        x = x + lax.broadcast_in_dim(bias, x.shape, [1])
    return x, x if spec.activation is None else _ACTIVATIONS[spec.activation](x)


def _store(consumer: _Consumer, x: jax.Array, tile: Any, piece: int, nth_result: int = -1) -> None:
    """Stores a piece of a result by TMA. The output (the default) is multiplied with the multiplier, or the residual is
    added to it."""
    gmem, smem = consumer.cta.gmem, consumer.cta.smem
    num_results = len(gmem.results)
    nth_result %= num_results
    to, is_inside = _target(consumer, tile, piece)
    if piece == 0 and nth_result == 0:  # The previous tile may have ended with the slot that this tile starts with.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    slot = (piece * num_results + nth_result) % _NUM_STORE_SLOTS
    out_gmem = gmem.results[nth_result].at[to]
    is_output = nth_result == num_results - 1
    elementwise = gmem.elementwise.at[to] if gmem.elementwise is not None and is_output else None
    # The slot was last read by the store before the previous one.
    plgpu.wait_smem_to_gmem(_NUM_STORE_SLOTS - 1, wait_read_only=True)
    staging = smem.out.at[consumer.index, slot]
    if elementwise is not None:
        fetched = smem.elementwise_full.at[consumer.index * _NUM_STORE_SLOTS + slot]
        plgpu.copy_gmem_to_smem(elementwise, staging, fetched)
        plgpu.barrier_wait(fetched)
        other = staging[...].astype(jnp.float32)
        x = x * other if consumer.cta.spec.multiplier is not None else x + other
    staging[...] = x.astype(consumer.cta.spec.out_dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, out_gmem, is_inside)


def _target(consumer: _Consumer, tile: Any, piece: int) -> tuple[Any, Any]:
    """The position of a piece in the result, and whether it is inside; None: TMA clips the columns outside.

    The check is needed if the result has one tile along n: Mosaic then drops that dimension from the copy, and with it
    the index that lies outside.
    """
    config, store_n = consumer.cta.config, consumer.cta.loops.store_n
    place = consumer.cta.place(tile)
    i, j = consumer.cta.loops.pieces[piece]
    consumer_m, consumer_n = config.consumer_tile
    row = place.m_idx * config.block_m + (consumer.index * consumer_m if config.split == "m" else 0) + i * _STORE_M
    column = place.n_idx * config.block_n + (consumer.index * consumer_n if config.split == "n" else 0) + j * store_n
    is_inside = column < store_n if consumer.cta.gmem.out.shape[-1] == store_n else None
    return (*place.part, *place.batch, pl.ds(row, _STORE_M), pl.ds(column, store_n)), is_inside


def _num_deferred(spec: MatmulSpec, config: Config) -> int:
    """The number of deferred pieces: a consumer keeps them in registers, in 16 bits, and stores them during the first
    steps of the next tile. It is the number that fits into the registers, and 0 if CTAs have one tile only."""
    has_next = config.split_k * _num_groups(spec, config) > _num_clusters(spec, config)
    if not has_next or spec.out_dtype.itemsize != 2 or spec.elementwise is not None or spec.save_preactivation:
        return 0
    accumulators = math.prod(config.consumer_tile) // _WARPGROUP  # Of one thread.
    packed = _STORE_M * _SWIZZLE_BYTES // 4 // _WARPGROUP
    return min(
        _num_pieces(spec, config), (_MAX_TILE_REGISTERS - accumulators) // packed, pl.cdiv(spec.gemm.k, config.block_k)
    )


def _num_pieces(spec: MatmulSpec, config: Config) -> int:
    """The number of pieces of a consumer's part of a tile."""
    return math.prod(config.consumer_tile) * spec.out_dtype.itemsize // (_STORE_M * _SWIZZLE_BYTES)


def _num_clusters(spec: MatmulSpec, config: Config) -> int:
    """The number of clusters (or of CTAs without clusters) that are resident at once."""
    return spec.target.num_sms // (2 if config.cluster else 1)


def _num_groups(spec: MatmulSpec, config: Config) -> int:
    """The number of tiles of a whole cluster, in one part of k."""
    paired_m, paired_n = (2 if config.cluster == axis else 1 for axis in ("m", "n"))
    g = spec.gemm
    return (g.batch or 1) * pl.cdiv(g.m, config.block_m * paired_m) * pl.cdiv(g.n, config.block_n * paired_n)
