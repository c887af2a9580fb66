"""Matrix product on Hopper tensor cores, with its epilogue, in Pallas Mosaic GPU.

Algorithm. A persistent grid walks the output tiles in an order that keeps operands in L2 (a planar
snake). For each tile one producer warpgroup streams blocks of both operands through a ring of shared
memory slots (`emit_pipeline_warp_specialized` over explicit BlockSpecs), and two consumer warpgroups
multiply them with wgmma, each accumulating its half of the tile in float32 registers. The epilogue
(alpha, bias, activation, residual) works on the accumulators; results leave through a small swizzled staging
buffer by TMA, while the producer already loads the next tile.

    tile (block_m x block_n), split along n            split along m
    +-----------+-----------+                          +-----------------------+
    | consumer0 | consumer1 |                          |       consumer0       |
    |           |           |                          +-----------------------+
    +-----------+-----------+                          |       consumer1       |
                                                       +-----------------------+

Operands lie in memory as "mk" or "km" and "kn" or "nk"; wgmma reads either orientation of 16-bit types
from shared memory, so no layout is copied. TMA fills what a block reads beyond an array's edge with
zeros and drops what it would write there. It cannot take rows that are not whole 16-byte units, and
Mosaic tiles rows by 8 and contiguous dimensions by 64: other sizes are padded by XLA first.

Source: structure after JAX's hopper_matmul_mgpu; the ladder and its figures are in docs/.
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

from jaxkernels import halfprecision
from jaxkernels.epilogue import ACTIVATIONS
from jaxkernels.specs import MatmulSpec

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unsupported"]

VERSION = 1

_Axis = Literal["m", "n"]
_NUM_CONSUMERS = 2
_SWIZZLE_BYTES = 128
#: Results are staged in shared memory and sent out in pieces of _STORE_M rows by one swizzle span.
_STORE_M = 64
_NUM_STORE_SLOTS = 2
#: Registers each producer thread keeps; the consumers share the rest.
_PRODUCER_REGISTERS = 40


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
      minor: the tile dimension walked first, in strips of `strip` tiles.
      strip: see `minor`.
      delay_release: 1 keeps one wgmma group in flight and releases a slot one step late; 0 waits for each.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 4
    split: _Axis = "n"
    cluster: _Axis | None = None
    minor: _Axis = "m"
    strip: int = 8
    delay_release: int = 0

    def __post_init__(self) -> None:
        consumer_m = self.block_m // (_NUM_CONSUMERS if self.split == "m" else 1)
        consumer_n = self.block_n // (_NUM_CONSUMERS if self.split == "n" else 1)
        if consumer_m % 64 or consumer_n % 64 or self.block_k % 64:
            raise ValueError(
                "matmul[pallas]: each consumer's tile and block_k must be multiples of 64; got "
                f"block_m={self.block_m}, block_n={self.block_n}, block_k={self.block_k} split along {self.split}."
            )
        if self.num_stages <= self.delay_release:
            raise ValueError(
                f"matmul[pallas]: num_stages must exceed delay_release={self.delay_release}; got {self.num_stages}."
            )


#: The default is one of these until the model is trusted with the whole space: of 32 shapes measured on an H200
#: (squares, Llama's layers in three layouts, skinny, odd and batched ones; 27 configs each, 2026-11-20) it was within
#: 5 % of the fastest config on 30, and 9 % behind on the worst.
_CANDIDATES = (
    Config(delay_release=1),
    Config(),
    Config(block_m=256, block_n=128, split="m", delay_release=1),
    Config(block_n=128, num_stages=6, delay_release=1),
    Config(block_m=64),
    Config(block_m=64, block_n=128, block_k=128),
    Config(block_m=64, block_n=128, num_stages=6),
)
#: Up to this many rows make one tile: two neighbours along n share it.
_SKINNY = 64
_SKINNY_CANDIDATE = Config(block_m=64, block_n=128, block_k=128, cluster="n")

# Figures of an H200, fitted to those measurements: reachable bf16 FLOP/s and L2 bytes/s of one SM, the time a tile
# spends filling the ring and storing its result, and that from asking for a block to having it.
_FLOPS_PER_SM = 6.4e12
_L2_BYTES_PER_SM = 3.5e11
_TILE_SECONDS = 2.2e-6
_LOAD_SECONDS = 1.4e-6

# The search space: what is tried along each knob, the usual setting first.
_BLOCKS = (128, 64, 256)
_BLOCK_KS = (64, 128)
_SPLITS: tuple[_Axis, ...] = ("n", "m")
_MAX_STAGES = 6
_STRIPS = (8, 4, 16)
#: A consumer's accumulators: 128 registers of each thread. With 256 there is none left for anything else.
_MAX_CONSUMER_TILE = 128 * 128
#: From this many waves of 128 x 256 tiles the last one costs little, and tiles under 128 x 128 read too much.
_MANY_WAVES = 6
#: What barriers and the alignment of buffers to 1 KB add to the buffers' own bytes, at most.
_BARRIER_BYTES = 3072


def unsupported(spec: MatmulSpec) -> str | None:
    return halfprecision.unsupported(spec)


def shortlist(spec: MatmulSpec) -> tuple[Config, ...]:
    return (_SKINNY_CANDIDATE, *_CANDIDATES) if spec.gemm.m <= _SKINNY else _CANDIDATES


def search_space(spec: MatmulSpec) -> Iterator[Config]:
    """Yields the tiles and schedules worth measuring.

    - Tiles: {64, 128, 256} squared, in halves whose sides are multiples of 64 and whose accumulators fit. Blocks of
      256 only for sizes above 128, of 128 along m for m above 64, of 64 along n for n up to 64. With many waves no
      tile under 128 x 128. Halves of 64 columns re-read the lhs: only in tiles up to 128 x 128.
    - block_k 128 halves the barriers of small tiles: up to 128 x 128, for k above 128.
    - The deepest ring of up to 6 slots that fits: a shallower one saves memory that nothing else would use.
    - Clusters where there are two tiles to share an operand; a late release where the ring goes round.
    - Strips and their direction where tiles make more than one wave, and the strip is narrower than the result.
    """
    g = spec.gemm
    tiles = lambda block_m, block_n: (pl.cdiv(g.m, block_m), pl.cdiv(g.n, block_n))
    num_tiles = lambda block_m, block_n: (g.batch or 1) * math.prod(tiles(block_m, block_n))
    many = min(g.m, g.n) > 64 and num_tiles(128, 256) >= _MANY_WAVES * spec.target.num_sms
    for block_m, block_n, split, block_k in itertools.product(_BLOCKS, _BLOCKS, _SPLITS, _BLOCK_KS):
        area = block_m * block_n
        consumer_m = block_m // (_NUM_CONSUMERS if split == "m" else 1)
        consumer_n = block_n // (_NUM_CONSUMERS if split == "n" else 1)
        illegal = consumer_m % 64 or consumer_n % 64 or consumer_m * consumer_n > _MAX_CONSUMER_TILE
        too_large = (block_m == 256 and g.m <= 128) or (block_n == 256 and g.n <= 128) or (block_m > 64 >= g.m)
        too_small = (block_n == 64 and g.n > 64) or (many and area < 128 * 128)
        narrow = consumer_n == 64 and area > 128 * 128
        needlessly_deep = block_k > 64 and (area > 128 * 128 or g.k <= 128)
        num_stages = min(_MAX_STAGES, _max_stages(spec, block_m, block_n, block_k))
        if illegal or too_large or too_small or narrow or needlessly_deep or num_stages < 2:
            continue
        m_iters, n_iters = tiles(block_m, block_n)
        goes_round = pl.cdiv(g.k, block_k) > num_stages
        sides: tuple[tuple[_Axis, int], ...] = (("m", m_iters), ("n", n_iters))
        clusters: list[_Axis | None] = [None, *(axis for axis, iters in sides if iters > 1)]
        walks: list[tuple[_Axis, int]] = [("m", _STRIPS[0])]
        if m_iters * n_iters > spec.target.num_sms:
            walks.extend((axis, strip) for axis, iters in sides for strip in _STRIPS if strip < iters)
        # Without doubles: the usual walk is often one of those added.
        for delay_release, cluster, (minor, strip) in itertools.product(
            (0, 1) if goes_round else (0,), clusters, dict.fromkeys(walks)
        ):
            yield Config(block_m, block_n, block_k, num_stages, split, cluster, minor, strip, delay_release)


def _max_stages(spec: MatmulSpec, block_m: int, block_n: int, block_k: int) -> int:
    """Slots that fit into shared memory beside the stores' staging buffers (rows of 128 bytes) and the barriers."""
    staging = _NUM_CONSUMERS * _NUM_STORE_SLOTS * _STORE_M * _SWIZZLE_BYTES
    slot = 2 * (block_m + block_n) * block_k
    return (spec.target.smem_bytes - staging - _BARRIER_BYTES) // slot


def estimate(spec: MatmulSpec, config: Config) -> float:
    """Waves of tiles, each step of which is bound by the tensor cores or by getting its operands.

    They come from L2 (the one that a cluster shares is read once for both), for the first time from memory (a wave
    covers strip x the rest of the SMs' tiles), and no faster than the ring has slots under way.
    """
    g = spec.gemm
    paired_m, paired_n = (2 if config.cluster == axis else 1 for axis in ("m", "n"))
    m_iters, n_iters = pl.cdiv(g.m, config.block_m), pl.cdiv(g.n, config.block_n)
    groups = (g.batch or 1) * pl.cdiv(m_iters, paired_m) * pl.cdiv(n_iters, paired_n)
    num_groups = spec.target.num_sms // (paired_m * paired_n)
    flops = 2 * config.block_m * config.block_n * config.block_k
    l2_bytes = 2 * (config.block_m / paired_n + config.block_n / paired_m) * config.block_k
    step = max(
        flops / _FLOPS_PER_SM,
        l2_bytes / _L2_BYTES_PER_SM,
        _LOAD_SECONDS / (config.num_stages - config.delay_release),
    )
    if spec.target.memory_bytes_per_s:
        wave = min(spec.target.num_sms, m_iters * n_iters)
        major, minor = (n_iters, m_iters) if config.minor == "m" else (m_iters, n_iters)
        minor = min(config.strip, minor)
        major = min(pl.cdiv(wave, minor), major)
        rows, columns = (minor, major) if config.minor == "m" else (major, minor)
        wave_bytes = 2 * (rows * config.block_m + columns * config.block_n) * config.block_k
        step = max(step, wave_bytes / spec.target.memory_bytes_per_s)
    return pl.cdiv(groups, num_groups) * (_TILE_SECONDS + pl.cdiv(g.k, config.block_k) * step)


def run(spec: MatmulSpec, config: Config, lhs: jax.Array, rhs: jax.Array, *epilogue: jax.Array) -> Any:
    """Returns the product, or [out] / [out, preactivation] when the spec has an epilogue."""
    if lhs.dtype != rhs.dtype:
        return halfprecision.multiply_mixed(lambda part, a, b: run(part, config, a, b), spec, lhs, rhs)
    g = spec.gemm
    lhs, rhs = spec.fold(lhs, rhs)
    lhs, rhs = _pad(lhs), _pad(rhs)
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
    out_type = jax.ShapeDtypeStruct((*lead, m, n), spec.out_dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, spec=spec, config=config),
        out_type=[out_type] * (2 if spec.save_preactivation else 1),
        grid=(spec.target.num_sms // (2 if config.cluster else 1),),
        grid_names=("cta",),
        cluster=(2,) if config.cluster else (1,),
        cluster_names=("cluster",),
        num_threads=_NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        # Approximate exp and tanh are good to about 11 bits: enough for a 16-bit result only.
        compiler_params=plgpu.CompilerParams(approx_math=spec.out_dtype in halfprecision.INPUTS),
    )
    outs = [spec.unfold(out[..., : g.m, : g.n]) for out in kernel(lhs, rhs, *inputs)]
    return outs if spec.fused else outs[0]


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
    consumer_m = block_m // (_NUM_CONSUMERS if config.split == "m" else 1)
    consumer_n = block_n // (_NUM_CONSUMERS if config.split == "n" else 1)
    # Tiles of the whole cluster, which holds two CTAs side by side along `config.cluster`.
    m_iters = pl.cdiv(g.m, block_m * (2 if config.cluster == "m" else 1))
    n_iters = pl.cdiv(g.n, block_n * (2 if config.cluster == "n" else 1))
    store_n = _SWIZZLE_BYTES // jnp.dtype(out_dtype).itemsize

    def operand_spec(layout: str, block: int, tile_idx: jax.Array, batch: Any, shared: bool) -> plgpu.BlockSpec:
        """One pipelined operand: a (block x block_k) block of the tile's row or column, as stored."""
        k_last = layout[1] == "k"
        shape = (block, block_k) if k_last else (block_k, block)
        index = (lambda k: (*batch, tile_idx, k)) if k_last else (lambda k: (*batch, k, tile_idx))
        return plgpu.BlockSpec(
            (*(None for _ in batch), *shape),
            index,
            transforms=_swizzled(shape[1], dtype),
            memory_space=plgpu.SMEM,
            delay_release=config.delay_release,
            collective_axes=("cluster",) if shared else (),
        )

    def pipeline(body: Any, context: Any, m_idx: Any, n_idx: Any, batch: Any) -> Any:
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(pl.cdiv(g.k, block_k),),
            memory_registers=_PRODUCER_REGISTERS,
            in_specs=[
                # CTAs side by side along n work on the same rows, so they share the lhs; along m, the rhs.
                operand_spec(g.lhs_layout, block_m, m_idx, batch, shared=config.cluster == "n"),
                operand_spec(g.rhs_layout, block_n, n_idx, batch, shared=config.cluster == "m"),
            ],
            wg_axis="warpgroup",
            num_compute_wgs=_NUM_CONSUMERS,
            max_concurrent_steps=config.num_stages,
            compute_context=context,
        )

    zero = jnp.int32(0)
    no_batch = () if g.batch is None else (zero,)
    allocations = pipeline(lambda *_: None, lambda *_: None, zero, zero, no_batch).get_allocations(lhs_gmem, rhs_gmem)

    # In a cluster the neighbour's producer writes our slots too.
    in_cluster = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))

    @functools.partial(
        pl.run_scoped,
        allocations=allocations,
        out_smem=plgpu.SMEM(
            (_NUM_CONSUMERS, _NUM_STORE_SLOTS, _STORE_M, store_n), out_dtype, transforms=_swizzled(store_n, out_dtype)
        ),
        residual_full=None if residual_gmem is None else plgpu.Barrier(num_barriers=_NUM_CONSUMERS * _NUM_STORE_SLOTS),
        drained=(in_cluster if config.cluster else plgpu.Barrier)(num_arrivals=_NUM_CONSUMERS)
        if config.delay_release
        else None,
        cluster_done=in_cluster(num_arrivals=_NUM_CONSUMERS + 1) if config.cluster else None,
        collective_axes="warpgroup",
    )
    def _persistent(allocations: Any, out_smem: Any, residual_full: Any, drained: Any, cluster_done: Any) -> None:
        consumer = lax.axis_index("warpgroup")
        cta = lax.axis_index("cluster")

        @plgpu.nd_loop(((g.batch or 1) * m_iters * n_iters,), collective_axes="cta")
        def _tile(loop_info: plgpu.NDLoopInfo) -> None:
            (tile,) = loop_info.index
            batch = () if g.batch is None else (lax.div(tile, jnp.int32(m_iters * n_iters)),)
            m_idx, n_idx = plgpu.planar_snake(
                tile if g.batch is None else lax.rem(tile, jnp.int32(m_iters * n_iters)),
                (m_iters, n_iters),
                0 if config.minor == "m" else 1,
                config.strip,
            )
            if config.cluster == "m":
                m_idx = m_idx * 2 + cta
            elif config.cluster == "n":
                n_idx = n_idx * 2 + cta
            # This consumer's rows and columns: inside the CTA's tile, and in the result.
            my_rows = pl.ds(consumer * consumer_m, consumer_m) if config.split == "m" else slice(None)
            my_columns = pl.ds(consumer * consumer_n, consumer_n) if config.split == "n" else slice(None)
            row = m_idx * block_m + (consumer * consumer_m if config.split == "m" else 0)
            column = n_idx * block_n + (consumer * consumer_n if config.split == "n" else 0)

            def multiply(_: Any, lhs_smem: Any, rhs_smem: Any, acc: Any) -> Any:
                lhs = lhs_smem.at[my_rows] if g.lhs_layout == "mk" else lhs_smem.at[:, my_rows].transpose((1, 0))
                rhs = rhs_smem.at[:, my_columns] if g.rhs_layout == "kn" else rhs_smem.at[my_columns].transpose((1, 0))
                plgpu.wgmma(acc, lhs, rhs)
                plgpu.wgmma_wait(config.delay_release)
                return acc

            def consume(run_pipeline: Any) -> None:
                @functools.partial(pl.run_scoped, acc_ref=plgpu.ACC((consumer_m, consumer_n), jnp.float32))
                def _scope(acc_ref: Any) -> None:
                    run_pipeline(acc_ref)
                    acc = acc_ref[...]
                    if config.delay_release:
                        plgpu.barrier_arrive(drained)
                    store(acc)

            def store(acc: Any) -> None:
                """Applies the epilogue piece by piece and sends each piece out by TMA."""
                slots = itertools.cycle(range(_NUM_STORE_SLOTS))
                # The last tile may have ended on the slot this one begins with.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for i, j in itertools.product(range(consumer_m // _STORE_M), range(consumer_n // store_n)):
                    piece = acc[i * _STORE_M : (i + 1) * _STORE_M, j * store_n : (j + 1) * store_n]
                    rows, columns = pl.ds(row + i * _STORE_M, _STORE_M), pl.ds(column + j * store_n, store_n)
                    target = (*batch, rows, columns)
                    # Mosaic drops a dimension of one tile from the copy, and with it the index that lies outside.
                    is_inside = columns.start < store_n if out_gmem.shape[-1] == store_n else None
                    if spec.alpha != 1:
                        piece = spec.alpha * piece
                    if bias_gmem is not None:
                        bias = plgpu.load(bias_gmem.at[columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                        piece = piece + lax.broadcast_in_dim(bias, piece.shape, [1])
                    if preactivation_gmem:
                        send(piece, next(slots), preactivation_gmem[0].at[target], is_inside)
                    if spec.activation is not None:
                        piece = _ACTIVATIONS[spec.activation](piece)
                    residual = None if residual_gmem is None else residual_gmem.at[target]
                    send(piece, next(slots), out_gmem.at[target], is_inside, residual)

            def send(piece: Any, slot: int, target: Any, is_inside: Any, residual: Any = None) -> None:
                # The slot was last read by the store before the previous one.
                plgpu.wait_smem_to_gmem(_NUM_STORE_SLOTS - 1, wait_read_only=True)
                staging = out_smem.at[consumer, slot]
                if residual is not None:
                    full = residual_full.at[consumer * _NUM_STORE_SLOTS + slot]
                    plgpu.copy_gmem_to_smem(residual, staging, full)
                    plgpu.barrier_wait(full)
                    piece = piece + staging[...].astype(jnp.float32)
                staging[...] = piece.astype(out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging, target, is_inside)

            if config.delay_release:
                # A pipeline that releases late never releases its last slots: the next tile must not fill them
                # before the products that read them are done.
                is_producer = consumer == _NUM_CONSUMERS
                pl.when(jnp.logical_and(is_producer, loop_info.local_index > 0))(lambda: plgpu.barrier_wait(drained))
            pipeline(multiply, consume, m_idx, n_idx, batch)(lhs_gmem, rhs_gmem, allocations=allocations)

        if config.cluster:
            # The neighbour still releases slots of our ring, by barriers in our shared memory: do not leave first.
            plgpu.barrier_arrive(cluster_done)
            plgpu.barrier_wait(cluster_done)

    # The staging buffers must outlive the last stores' reads.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
