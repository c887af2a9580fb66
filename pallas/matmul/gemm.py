"""Matrix product on Hopper tensor cores, with its epilogue, in Pallas Mosaic GPU.

Algorithm. A persistent grid walks the output tiles in an order that keeps operands in L2 (a planar
snake). One producer warpgroup streams blocks of both operands, described by BlockSpecs, through a ring of
shared memory slots, and two consumer warpgroups multiply them with wgmma, each accumulating its half of
the tile in float32 registers. The ring never stops: the producer is tiles ahead, as far as slots are free
(JAX's `emit_pipeline_warp_specialized` makes a pipeline of each tile, which fills and drains). The epilogue
(alpha, bias, activation, residual) works on the accumulators; results leave through a small swizzled staging
buffer by TMA. Pieces for which there are registers wait for that, as 16 bits, until the next tile's first
products are under way.

    tile (block_m x block_n), split along m            split along n
    +-----------------------+                          +-----------+-----------+
    |       consumer0       |                          | consumer0 | consumer1 |
    +-----------------------+                          |           |           |
    |       consumer1       |                          +-----------+-----------+
    +-----------------------+

Operands lie in memory as "mk" or "km" and "kn" or "nk"; wgmma reads either orientation of 16-bit types
from shared memory, so no layout is copied. TMA fills what a block reads beyond an array's edge with
zeros and drops what it would write there. It cannot take rows that are not whole 16-byte units, and
Mosaic tiles rows by 8 and contiguous dimensions by 64: other sizes are padded by XLA first.

Source: structure after JAX's hopper_matmul_mgpu; ladder and figures: docs/pallas-kernels.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.core import hardware
from jaxkernels.core.arguments import check_fields
from jaxkernels.ops.matmul import tensor_cores as halfprecision
from jaxkernels.ops.matmul.epilogue import ACTIVATIONS, apply_epilogue
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unsupported"]

VERSION = 2

_Axis = Literal["m", "n"]
_NUM_CONSUMERS = 2
_WARPGROUP = 128
_SWIZZLE_BYTES = 128
#: Results are staged in shared memory and sent out in pieces of _STORE_M rows by one swizzle span.
_STORE_M = 64
_NUM_STORE_SLOTS = 2
#: Registers of each producer's and consumer's thread.
_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 232
#: Of these, for accumulators and results that wait; with more ptxas spills.
_MAX_TILE_REGISTERS = 160


def _erf(x: jax.Array) -> jax.Array:
    """The error function to 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26); Mosaic GPU lacks one."""
    t = 1 / (1 + 0.3275911 * jnp.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = series * jnp.exp(-x * x)
    return jnp.where(x < 0, tail - 1, 1 - tail)


#: Two of jax.nn's definitions stand on what Mosaic cannot lower: relu on a custom_jvp, gelu_erf on erfc.
_ACTIVATIONS = ACTIVATIONS | {
    "relu": lambda x: jnp.maximum(x, 0),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x * math.sqrt(0.5))),
}

#: The kernel counts tiles in 32 bits; a wider strip than the result is no other order.
_MAX_STRIP = 2**16


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_m, block_n: output tile of one CTA.
      block_k: depth of one pipeline step.
      num_stages: slots of the operand ring.
      split: the dimension along which the two consumers divide the tile; None: they take tiles in turn (ping-pong),
        so that one stores beside the other's products.
      cluster: the dimension along which two neighbouring CTAs form a cluster and multicast the operand
        they share, or None.
      minor: the tile dimension walked first, in strips of `strip` tiles.
      strip: see `minor`.
      split_k: parts of k, each a product of its own in float32; XLA adds them up, in order, and applies the epilogue.
      delay_release: 1 keeps one wgmma group in flight and releases a slot one step late; 0 waits for each.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 4
    split: _Axis | None = "m"
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


#: The default is one of these until the model is trusted with the whole space (measured: docs/pallas-kernels.md).
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
#: Up to this many rows make one tile: two neighbours along n share it.
_SKINNY = 64
_SKINNY_CANDIDATE = Config(64, 128, 128, split="n", delay_release=0, cluster="n")

# Figures of an H200, fitted to 240 times of 20 shapes (2026-11-21).
# Of one SM: bf16 FLOP/s, bytes/s from shared memory into the tensor cores and from L2.
_FLOPS_PER_SM = 8.3e12
_SMEM_BYTES_PER_SM = 5.2e11
_L2_BYTES_PER_SM = 1.07e11
# Seconds: a launch, with the first tile's way; storing a tile of 128 x 256; getting a block that was asked for; a
# kernel that adds up parts of k.
_LAUNCH_SECONDS = 1.4e-6
_STORE_SECONDS = 0.8e-6
_LOAD_SECONDS = 1.0e-6
_SUM_SECONDS = 1.2e-6
#: Times as long as a store takes one with an activation.
_EPILOGUE = 2.0
#: The share of a deferred piece's store that the next tile's products hide.
_HIDDEN = 0.6

# The search space: what is tried along each knob, the usual setting first.
_BLOCKS_M = (128, 64, 256)
_BLOCKS_N = (256, 192, 128, 64)
_BLOCK_KS = (64, 128)
_SPLITS: tuple[_Axis | None, ...] = ("m", "n", None)
_MAX_STAGES = 6
_PARTS = (2, 4, 8)
_MIN_SPLIT_STEPS = 4
_STRIPS = (8, 4, 16)
#: A consumer's accumulators: 128 registers of each thread. With 256 there is none left for anything else.
_MAX_CONSUMER_TILE = 128 * 128
#: From this many waves on the last one costs little, and tiles under 128 x 128 read too much.
_MANY_WAVES = 6
#: What barriers and the alignment of buffers to 1 KB add to the buffers' own bytes, at most.
_BARRIER_BYTES = 3072


def unsupported(spec: MatmulSpec) -> str | None:
    return halfprecision.unsupported(spec)


def shortlist(spec: MatmulSpec) -> tuple[Config, ...]:
    candidates = (_SKINNY_CANDIDATE, *_CANDIDATES) if spec.gemm.m <= _SKINNY else _CANDIDATES
    return tuple(_trimmed(spec, config) for config in candidates)


def _trimmed(spec: MatmulSpec, config: Config) -> Config:
    """Without a late release where the ring does not go round."""
    goes_round = pl.cdiv(spec.gemm.k, config.block_k) > config.num_stages
    return config if goes_round else dataclasses.replace(config, delay_release=0)


def search_space(spec: MatmulSpec) -> Iterator[Config]:
    """Yields the tiles and schedules worth measuring.

    - Tiles: {64, 128, 256} x {64, 128, 192, 256}, in halves whose sides are multiples of 64 and whose accumulators
      fit: along n where there are 64 rows, else along m, as a wgmma of 256 columns reads least. Blocks of 192 or 256
      only for sizes above 128, of 128 along m for m above 64, of 64 along n for n up to 64 or a tile of 128 rows. With
      many waves no tile under 128 x 128.
    - Consumers take tiles of 128 columns in turn where a CTA has two and there is an activation to hide; in the usual
      walk.
    - block_k 128 halves the barriers of small tiles: up to 128 x 128, for k above 128.
    - The deepest ring of up to 6 slots that fits: a shallower one saves memory that nothing else would use.
    - Clusters where there are two tiles to share an operand; a late release where the ring goes round.
    - Parts of k where all parts of all tiles run at once, of at least 4 steps each.
    - Strips and their direction where tiles make more than one wave, and the strip is narrower than the result.
    """
    g = spec.gemm
    tiles = lambda block_m, block_n: (pl.cdiv(g.m, block_m), pl.cdiv(g.n, block_n))
    num_tiles = lambda block_m, block_n: (g.batch or 1) * math.prod(tiles(block_m, block_n))
    many = min(g.m, g.n) > 64 and num_tiles(128, 256) >= _MANY_WAVES * spec.target.num_sms
    for block_m, block_n, split, block_k in itertools.product(_BLOCKS_M, _BLOCKS_N, _SPLITS, _BLOCK_KS):
        area = block_m * block_n
        consumer_m = block_m // (_NUM_CONSUMERS if split == "m" else 1)
        consumer_n = block_n // (_NUM_CONSUMERS if split == "n" else 1)
        in_turn = split is None
        needless = in_turn and (
            block_n != 128 or spec.activation is None or num_tiles(block_m, block_n) <= spec.target.num_sms
        )
        reads_more = split == "n" and block_m > 64
        illegal = consumer_m % 64 or consumer_n % 64 or consumer_m * consumer_n > _MAX_CONSUMER_TILE
        too_large = (block_m == 256 and g.m <= 128) or (block_n > 128 >= g.n) or (block_m > 64 >= g.m)
        too_small = (block_n == 64 and g.n > 64 and block_m != 128) or (many and area < 128 * 128)
        needlessly_deep = block_k > 64 and (area > 128 * 128 or g.k <= 128)
        num_stages = min(_MAX_STAGES, _max_stages(spec, block_m, block_n, block_k))
        if illegal or needless or reads_more or too_large or too_small or needlessly_deep or num_stages < 2:
            continue
        config = Config(block_m, block_n, block_k, num_stages, split)
        m_iters, n_iters = tiles(block_m, block_n)
        sides: tuple[tuple[_Axis, int], ...] = (("m", m_iters), ("n", n_iters))
        clusters: list[_Axis | None] = [None, *(axis for axis, iters in sides if iters > 1)]
        walks: list[tuple[_Axis, int]] = [("m", _STRIPS[0])]
        if m_iters * n_iters > spec.target.num_sms and not in_turn:
            walks.extend((axis, strip) for axis, iters in sides for strip in _STRIPS if strip < iters)
        parts = [
            split_k for split_k in _PARTS
            if num_tiles(block_m, block_n) * split_k <= spec.target.num_sms and not in_turn
            and pl.cdiv(g.k, block_k) >= _MIN_SPLIT_STEPS * split_k
        ]  # fmt: skip
        # Without doubles: the usual walk is often one of those added.
        for delay_release in dict.fromkeys(_trimmed(spec, config).delay_release * late for late in (1, 0)):
            late = dataclasses.replace(config, delay_release=delay_release)
            for cluster, (minor, strip) in itertools.product(clusters, dict.fromkeys(walks)):
                yield dataclasses.replace(late, cluster=cluster, minor=minor, strip=strip)
            for split_k in parts:
                yield dataclasses.replace(late, split_k=split_k)


def _max_stages(spec: MatmulSpec, block_m: int, block_n: int, block_k: int) -> int:
    """Slots that fit into shared memory beside the stores' staging buffers (rows of 128 bytes) and the barriers."""
    staging = _NUM_CONSUMERS * _NUM_STORE_SLOTS * _STORE_M * _SWIZZLE_BYTES
    slot = 2 * (block_m + block_n) * block_k
    return (spec.target.smem_bytes - staging - _BARRIER_BYTES) // slot


def estimate(spec: MatmulSpec, config: Config) -> float:
    """Waves of tiles, each step of which is bound by the tensor cores or by getting its operands.

    A wgmma of 64 rows reads both of its operands from shared memory, which costs beside the products: fewer columns
    read more for each FLOP. Blocks come from L2 (the one that a cluster shares is read once for both), for the first
    time from memory (a wave covers strip x the rest of the SMs' tiles), and no faster than the ring has slots under
    way. Sums of parts of k are written and read once more, by another kernel.
    """
    g = spec.gemm
    paired_m, paired_n = (2 if config.cluster == axis else 1 for axis in ("m", "n"))
    m_iters, n_iters = pl.cdiv(g.m, config.block_m), pl.cdiv(g.n, config.block_n)
    groups = config.split_k * _num_groups(spec, config)
    consumer_m, consumer_n = config.consumer_tile
    num_consumers = 1 if config.split is None else _NUM_CONSUMERS
    flops = 2 * config.block_m * config.block_n * config.block_k
    smem_bytes = 2 * num_consumers * consumer_m // 64 * (64 + consumer_n) * config.block_k
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
    if config.split is None:  # One consumer's stores hide behind the other's products.
        seconds = waves * max(steps, store) + store
    else:
        hidden = store * _HIDDEN * _num_deferred(spec, config) / _num_pieces(spec, config)
        seconds = waves * (steps + store - hidden) + hidden
    if config.split_k > 1:
        sums_bytes = 8 * config.split_k * (g.batch or 1) * g.m * g.n
        seconds += _SUM_SECONDS + sums_bytes / (spec.target.memory_bytes_per_s or math.inf)
    return _LAUNCH_SECONDS + seconds


def run(spec: MatmulSpec, config: Config, lhs: jax.Array, rhs: jax.Array, *epilogue: jax.Array) -> Any:
    """Returns the product, or [out] / [out, preactivation] when the spec has an epilogue."""
    if lhs.dtype != rhs.dtype:
        return halfprecision.multiply_mixed(lambda part, a, b: run(part, config, a, b), spec, lhs, rhs)
    if config.split_k == 1:
        outs = [spec.unfold(x) for x in _launch(spec, config, lhs, rhs, *epilogue)]
        return outs if spec.fused else outs[0]
    num_steps = pl.cdiv(spec.gemm.k, config.block_k)
    if pl.cdiv(num_steps, config.split_k) * (config.split_k - 1) >= num_steps:
        raise ValueError(
            f"matmul[pallas]: every part of split_k={config.split_k} must have some of k={spec.gemm.k}, in blocks of "
            f"{config.block_k}. Use a smaller split_k."
        )
    product = dataclasses.replace(
        spec, out_dtype=jnp.dtype(jnp.float32), bias=None, activation=None, residual=None, save_preactivation=False
    )
    (parts,) = _launch(product, config, lhs, rhs)
    out = product.unfold(parts.sum(axis=0))
    results = apply_epilogue(spec, out, *epilogue) if spec.fused else out
    return jax.tree.map(lambda x: x.astype(spec.out_dtype), results)


def _launch(spec: MatmulSpec, config: Config, lhs: jax.Array, rhs: jax.Array, *epilogue: jax.Array) -> list[jax.Array]:
    """Returns (batch?, m, n) results; of parts of k, with the parts in front."""
    g = spec.gemm
    lhs, rhs = (_pad(x) for x in spec.fold(lhs, rhs))
    m, n = _padded(g.m, rows=True), _padded(g.n, rows=False)
    lead = () if g.batch is None else (g.batch,)
    operands = list(epilogue)
    inputs = []
    if spec.bias is not None:
        # The columns beyond n are dropped with the tile's, but the last tiles read all of theirs.
        columns = config.block_n * (2 if config.cluster == "n" else 1)
        inputs.append(jnp.pad(operands.pop(0).astype(jnp.float32), (0, -g.n % columns)))
    if spec.residual is not None:
        inputs.append(_pad(operands.pop(0).astype(spec.out_dtype).reshape(*lead, g.m, g.n)))
    parts = () if config.split_k == 1 else (config.split_k,)
    out_type = jax.ShapeDtypeStruct((*parts, *lead, m, n), spec.out_dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, spec=spec, config=config),
        out_type=[out_type] * (2 if spec.save_preactivation else 1),
        grid=(_num_clusters(spec, config),),
        grid_names=("cta",),
        cluster=(2,) if config.cluster else (1,),
        cluster_names=("cluster",),
        num_threads=_NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        # Approximate exp and tanh are good to about 11 bits: enough for a 16-bit result only.
        compiler_params=plgpu.CompilerParams(approx_math=spec.out_dtype in halfprecision.INPUTS),
    )
    return [out[..., : g.m, : g.n] for out in kernel(lhs, rhs, *inputs)]


def _padded(size: int, *, rows: bool) -> int:
    """The next size that Mosaic can tile: rows by 8, the contiguous dimension by 64."""
    tile = 8 if rows else 64
    return size + -size % tile


def _pad(x: jax.Array) -> jax.Array:
    """Pads a (batch?, rows, columns) array to sizes that can be tiled; usually there is nothing to do."""
    *lead, rows, columns = x.shape
    add = (_padded(rows, rows=True) - rows, _padded(columns, rows=False) - columns)
    return jnp.pad(x, ((0, 0),) * len(lead) + ((0, add[0]), (0, add[1]))) if any(add) else x


def _swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms of a row-major tile in shared memory that wgmma and TMA read without bank conflicts."""
    swizzle = plgpu.find_swizzle(columns * jnp.dtype(dtype).itemsize * 8)
    # JAX gives the two an abstract method that it never implements.
    return (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]


def _kernel(lhs_gmem: Any, rhs_gmem: Any, *refs: Any, spec: MatmulSpec, config: Config) -> None:
    g = spec.gemm
    rest = list(refs)
    bias_gmem = rest.pop(0) if spec.bias is not None else None
    residual_gmem = rest.pop(0) if spec.residual is not None else None
    out_gmem, *preactivation_gmem = rest
    dtype, out_dtype = lhs_gmem.dtype, out_gmem.dtype
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    num_stages, is_late = config.num_stages, config.delay_release
    consumer_m, consumer_n = config.consumer_tile
    # Consumers that take tiles in turn have barriers of their own to wait for: each misses the other's phases.
    in_turn = _NUM_CONSUMERS if config.split is None else 1
    # Tiles of the whole cluster, which holds two CTAs side by side along `config.cluster`.
    m_iters = pl.cdiv(g.m, block_m * (2 if config.cluster == "m" else 1))
    n_iters = pl.cdiv(g.n, block_n * (2 if config.cluster == "n" else 1))
    k_iters = pl.cdiv(pl.cdiv(g.k, block_k), config.split_k)
    num_tiles = config.split_k * (g.batch or 1) * m_iters * n_iters
    num_results = 1 + len(preactivation_gmem)
    store_n = _SWIZZLE_BYTES // jnp.dtype(out_dtype).itemsize
    pieces = list(itertools.product(range(consumer_m // _STORE_M), range(consumer_n // store_n)))
    num_deferred = _num_deferred(spec, config)
    num_now = len(pieces) - num_deferred

    def operand_spec(layout: str, axis: _Axis, block: int) -> Any:
        """One pipelined operand: a (block x block_k) block of a tile's row or column, as stored."""
        k_last = layout[1] == "k"
        shape = (block, block_k) if k_last else (block_k, block)
        index = (lambda batch, i, k: (*batch, i, k)) if k_last else (lambda batch, i, k: (*batch, k, i))
        return plgpu.BlockSpec(
            (*(() if g.batch is None else (None,)), *shape),
            index,
            transforms=_swizzled(shape[1], dtype),
            memory_space=plgpu.SMEM,
            # CTAs side by side along n work on the same rows, so they share the lhs; along m, the rhs.
            collective_axes=("cluster",) if config.cluster not in (None, axis) else (),
        )

    operands = (
        (lhs_gmem, operand_spec(g.lhs_layout, "m", block_m)),
        (rhs_gmem, operand_spec(g.rhs_layout, "n", block_n)),
    )
    ring = lambda block: plgpu.SMEM(
        (num_stages, *(size for size in block.block_shape if size is not None)), dtype, transforms=block.transforms
    )
    # In a cluster the neighbour's producer writes our slots too.
    in_cluster = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))

    @functools.partial(
        pl.run_scoped,
        rings=[ring(block) for _, block in operands],
        full=plgpu.Barrier(num_arrivals=len(operands), num_barriers=num_stages * in_turn),
        empty=(in_cluster if config.cluster else plgpu.Barrier)(
            num_arrivals=_NUM_CONSUMERS // in_turn, num_barriers=num_stages
        ),
        out_smem=plgpu.SMEM(
            (_NUM_CONSUMERS, _NUM_STORE_SLOTS, _STORE_M, store_n), out_dtype, transforms=_swizzled(store_n, out_dtype)
        ),
        residual_full=None if residual_gmem is None else plgpu.Barrier(num_barriers=_NUM_CONSUMERS * _NUM_STORE_SLOTS),
        cluster_done=in_cluster(num_arrivals=_NUM_CONSUMERS + 1) if config.cluster else None,
        collective_axes="warpgroup",
    )
    def _persistent(rings: Any, full: Any, empty: Any, out_smem: Any, residual_full: Any, cluster_done: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        is_producer = warpgroup == _NUM_CONSUMERS
        # This CTA's tiles are cta, cta + num_ctas, ...
        cta, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
        num_local = lax.div(num_tiles - 1 - cta + num_ctas, num_ctas)
        tile_of = lambda local: cta + local * num_ctas
        # Places in the ring are carried along: a remainder by a number that is no power of two costs every step dearly.
        following = lambda slot: jnp.where(slot == num_stages - 1, 0, slot + 1)
        previous = lambda slot: jnp.where(slot == 0, num_stages - 1, slot - 1)
        full_of = lambda local, slot: full.at[slot * in_turn + lax.rem(local, jnp.int32(in_turn))]

        def place(tile: Any) -> tuple[Any, Any, Any, Any]:
            """The part of k, batch, row and column of a tile."""
            product, tile = lax.div(tile, jnp.int32(m_iters * n_iters)), lax.rem(tile, jnp.int32(m_iters * n_iters))
            num_batches = jnp.int32(g.batch or 1)
            part = () if config.split_k == 1 else (lax.div(product, num_batches),)
            batch = () if g.batch is None else (product if config.split_k == 1 else lax.rem(product, num_batches),)
            m_idx, n_idx = plgpu.planar_snake(tile, (m_iters, n_iters), 0 if config.minor == "m" else 1, config.strip)
            if config.cluster == "m":
                m_idx = m_idx * 2 + lax.axis_index("cluster")
            elif config.cluster == "n":
                n_idx = n_idx * 2 + lax.axis_index("cluster")
            return part, batch, m_idx, n_idx

        @pl.when(is_producer)
        def _produce() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def load_tile(local: Any, slot: Any) -> Any:
                part, batch, *indices = place(tile_of(local))
                first = part[0] * k_iters if part else 0

                def load(k: Any, slot: Any) -> Any:
                    goes_round = local * k_iters + k >= num_stages
                    pl.when(goes_round)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    for (gmem, block), i, smem in zip(operands, indices, rings):
                        source = tuple(
                            index if size is None else pl.ds(index * size, size)
                            for index, size in zip(block.index_map(batch, i, first + k), block.block_shape)
                        )
                        plgpu.copy_gmem_to_smem(
                            gmem.at[source],
                            smem.at[slot],
                            full_of(local, slot),
                            collective_axes=block.collective_axes or None,
                        )
                    return following(slot)

                return lax.fori_loop(0, k_iters, load, slot)

            lax.fori_loop(0, num_local, load_tile, jnp.int32(0))

        @pl.when(jnp.logical_not(is_producer))
        def _consume() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            consumer = warpgroup
            # This consumer's rows and columns inside the CTA's tile.
            my_rows = pl.ds(consumer * consumer_m, consumer_m) if config.split == "m" else slice(None)
            my_columns = pl.ds(consumer * consumer_n, consumer_n) if config.split == "n" else slice(None)

            def multiply_tile(local: Any, slot: Any, behind: Any) -> tuple[jax.Array, Any]:
                """Returns the products and the next slot; `behind` is called with 0, 1, ... while that step's are under
                way."""

                def step(acc_ref: Any, k: Any, slot: Any) -> Any:
                    plgpu.barrier_wait(full_of(local, slot))
                    lhs, rhs = (smem.at[slot] for smem in rings)
                    lhs = lhs.at[my_rows] if g.lhs_layout == "mk" else lhs.at[:, my_rows].transpose((1, 0))
                    rhs = rhs.at[:, my_columns] if g.rhs_layout == "kn" else rhs.at[my_columns].transpose((1, 0))
                    plgpu.wgmma(acc_ref, lhs, rhs)
                    if isinstance(k, int):
                        behind(k)
                    plgpu.wgmma_wait(is_late)
                    release = lambda: plgpu.barrier_arrive(empty.at[previous(slot) if is_late else slot])
                    if num_deferred >= is_late and not isinstance(k, int):
                        release()
                    else:
                        pl.when(k >= is_late)(release)
                    return following(slot)

                @functools.partial(pl.run_scoped, acc_ref=plgpu.ACC((consumer_m, consumer_n), jnp.float32))
                def result(acc_ref: Any) -> tuple[jax.Array, Any]:
                    next_slot = slot
                    for k in range(num_deferred):
                        next_slot = step(acc_ref, k, next_slot)
                    next_slot = lax.fori_loop(num_deferred, k_iters, functools.partial(step, acc_ref), next_slot)
                    products = acc_ref[...]
                    if is_late:
                        plgpu.barrier_arrive(empty.at[previous(next_slot)])
                    return products, next_slot

                return result

            def target(tile: Any, piece: int) -> tuple[Any, Any]:
                """Where a piece lies in the result, and whether it does: Mosaic drops a dimension of one tile from the
                copy, and with it the index that lies outside."""
                part, batch, m_idx, n_idx = place(tile)
                i, j = pieces[piece]
                row = m_idx * block_m + (consumer * consumer_m if config.split == "m" else 0) + i * _STORE_M
                column = n_idx * block_n + (consumer * consumer_n if config.split == "n" else 0) + j * store_n
                is_inside = column < store_n if out_gmem.shape[-1] == store_n else None
                return (*part, *batch, pl.ds(row, _STORE_M), pl.ds(column, store_n)), is_inside

            def finish(acc: jax.Array, tile: Any, piece: int) -> tuple[jax.Array, jax.Array]:
                """A piece of the products, scaled and with its bias; and after the activation."""
                i, j = pieces[piece]
                x = acc[i * _STORE_M : (i + 1) * _STORE_M, j * store_n : (j + 1) * store_n]
                if spec.alpha != 1:
                    x = spec.alpha * x
                if bias_gmem is not None:
                    columns = target(tile, piece)[0][-1]
                    bias = plgpu.load(bias_gmem.at[columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    x = x + lax.broadcast_in_dim(bias, x.shape, [1])
                return x, x if spec.activation is None else _ACTIVATIONS[spec.activation](x)

            def send(x: jax.Array, slot: int, to: Any, is_inside: Any, residual: Any = None) -> None:
                # The slot was last read by the store before the previous one.
                plgpu.wait_smem_to_gmem(_NUM_STORE_SLOTS - 1, wait_read_only=True)
                staging = out_smem.at[consumer, slot]
                if residual is not None:
                    fetched = residual_full.at[consumer * _NUM_STORE_SLOTS + slot]
                    plgpu.copy_gmem_to_smem(residual, staging, fetched)
                    plgpu.barrier_wait(fetched)
                    x = x + staging[...].astype(jnp.float32)
                staging[...] = x.astype(out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging, to, is_inside)

            def store(x: jax.Array, tile: Any, piece: int, gmem: Any = out_gmem, nth: int = 0) -> None:
                """Sends a piece out by TMA: of the results, or as the `nth` of the two kinds that there are."""
                to, is_inside = target(tile, piece)
                if piece == 0 and nth == 0:  # The last tile may have ended on the slot that this one begins with.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                residual = residual_gmem.at[to] if residual_gmem is not None and gmem is out_gmem else None
                send(x, (piece * num_results + nth) % _NUM_STORE_SLOTS, gmem.at[to], is_inside, residual)

            def run_tile(nth: Any, carry: tuple[Any, list[jax.Array]]) -> tuple[Any, list[jax.Array]]:
                """The last pieces of the tile before are stored behind the first products of this one."""
                slot, packed = carry
                local = nth * in_turn + consumer if in_turn > 1 else nth
                tile = tile_of(local)

                def behind(k: int) -> None:
                    pl.when(local > 0)(lambda: store(packed[k], tile - num_ctas, num_now + k))

                acc, slot = multiply_tile(local, slot, behind)
                for piece in range(num_now):
                    before, after = finish(acc, tile, piece)
                    if preactivation_gmem:
                        store(before, tile, piece, preactivation_gmem[0])
                    store(after, tile, piece, nth=num_results - 1)
                packed = [finish(acc, tile, piece)[1].astype(out_dtype) for piece in range(num_now, len(pieces))]
                return skip_others(slot), packed

            # The other consumer's tile lies between two of this one's.
            skip_others = lambda slot: lax.rem(slot + k_iters, jnp.int32(num_stages)) if in_turn > 1 else slot
            first_slot = lax.rem(consumer * k_iters, jnp.int32(num_stages)) if in_turn > 1 else jnp.int32(0)
            mine = lax.div(num_local - consumer + 1, jnp.int32(in_turn)) if in_turn > 1 else num_local
            nothing = plgpu.layout_cast(jnp.zeros((_STORE_M, store_n), out_dtype), plgpu.Layout.WGMMA)
            _, packed = lax.fori_loop(0, mine, run_tile, (first_slot, [nothing] * num_deferred))
            for k, x in enumerate(packed):
                store(x, tile_of(num_local - 1), num_now + k)

        if config.cluster:
            # The neighbour still releases slots of our ring, by barriers in our shared memory: do not leave first.
            plgpu.barrier_arrive(cluster_done)
            plgpu.barrier_wait(cluster_done)

    # The staging buffers must outlive the last stores' reads.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _num_deferred(spec: MatmulSpec, config: Config) -> int:
    """How many pieces of a consumer's part of a tile wait, as 16 bits in registers, to be stored behind the next tile's
    first steps: as many as there are registers for, where CTAs have a next tile."""
    has_next = config.split_k * _num_groups(spec, config) > _num_clusters(spec, config)
    if (
        not has_next
        or config.split is None
        or spec.out_dtype.itemsize != 2
        or spec.residual is not None
        or spec.save_preactivation
    ):
        return 0
    accumulators = math.prod(config.consumer_tile) // _WARPGROUP  # Of one thread.
    packed = _STORE_M * _SWIZZLE_BYTES // 4 // _WARPGROUP
    return min(
        _num_pieces(spec, config), (_MAX_TILE_REGISTERS - accumulators) // packed, pl.cdiv(spec.gemm.k, config.block_k)
    )


def _num_pieces(spec: MatmulSpec, config: Config) -> int:
    """Pieces in which a consumer's part of a tile is stored."""
    return math.prod(config.consumer_tile) * spec.out_dtype.itemsize // (_STORE_M * _SWIZZLE_BYTES)


def _num_clusters(spec: MatmulSpec, config: Config) -> int:
    """How many clusters (or CTAs alone) the chip holds at once."""
    return spec.target.num_sms // (2 if config.cluster else 1)


def _num_groups(spec: MatmulSpec, config: Config) -> int:
    """Tiles of a whole cluster, of one part of k."""
    paired_m, paired_n = (2 if config.cluster == axis else 1 for axis in ("m", "n"))
    g = spec.gemm
    return (g.batch or 1) * pl.cdiv(g.m, config.block_m * paired_m) * pl.cdiv(g.n, config.block_n * paired_n)
