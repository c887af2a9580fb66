"""The rungs of the SGEMM ladder, and the function that calls them.

A rung is one CUDA file in this folder, with one kernel. All have the same operands: A (m x k), B (k x n) and C (m x n),
row major, float32, of any size. Rungs from 13 on load tiles by TMA (Hopper). TMA takes rows of multiples of 16 bytes:
`sgemm` pads A and B for these rungs where needed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkernels.ffi.custom_call import Pointer, TensorMap
from jaxkernels.ffi.kernel import CudaKernel, LaunchPlan

__all__ = ["RUNGS", "Config", "Rung", "choose", "estimate", "lookup", "search_space", "sgemm"]

_FOLDER = pathlib.Path(__file__).parent
_FLOAT_BYTES = 4
_STATIC_SMEM_BYTES = 48 * 1024
_MAX_REGISTERS, _SM_REGISTERS = 255, 65536
_MAX_SIZE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes of a rung; a kernel sees each field as a macro.

    Attributes:
      BM, BN, BK: the tile of a block along m, n and k.
      TM, TN: the results of a thread along m and n.
      LANES_M, LANES_N: the lanes of a warp along m and n; 0: threads are not grouped by warps.
      STAGES: slots of the ring of tiles; 0: no ring.
      UNROLL: steps along k between two branches of the inner loop; 0: all of the tile.
      CLUSTER: blocks that share B by multicast.
      SPLIT_K: blocks that share the k dimension of one tile.
      BLOCKS: blocks per SM that the compiler leaves registers for; 0: no limit.
      TRANSPOSERS: further warps of a block, which transpose A.
    """

    BM: int
    BN: int
    BK: int = 1
    TM: int = 1
    TN: int = 1
    LANES_M: int = 0
    LANES_N: int = 0
    STAGES: int = 0
    UNROLL: int = 0
    CLUSTER: int = 1
    SPLIT_K: int = 1
    BLOCKS: int = 0
    TRANSPOSERS: int = 0

    @property
    def consumers(self) -> int:
        """Threads of a block that multiply."""
        return (self.BM // self.TM) * (self.BN // self.TN)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.consumers + 32 * self.TRANSPOSERS

    @property
    def ring_bytes(self) -> int:
        """Dynamic shared memory of the rungs with a ring."""
        return self.STAGES * (self.BM + self.BN) * self.BK * _FLOAT_BYTES

    @property
    def staged_bytes(self) -> int:
        """Shared memory for two tiles of A that wait to be transposed."""
        return 2 * self.BM * self.BK * _FLOAT_BYTES if self.TRANSPOSERS else 0

    @property
    def partial_bytes(self) -> int:
        """Shared memory of a block's partial sums, padded by four columns."""
        return 0 if self.SPLIT_K == 1 else self.BM * (self.BN + 4) * _FLOAT_BYTES

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={v}" for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default)


@dataclasses.dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    Attributes:
      number, name: its place and its name.
      idea: what it adds, in one sentence.
      prediction: what that should change, said before it was measured.
      config: the default tiles.
      uses_tma: whether tiles are loaded by TMA. It then needs Hopper and padded rows.
      streams: whether blocks share the last tiles' steps along k (stream-K) through global memory.
      tiles: what `choose` chooses among by the size of the product, each with the speed of its main loop relative to
        the largest; none: always `config`. Each is tried with several SPLIT_K, unless the rung streams.
    """

    number: int
    name: str
    idea: str
    prediction: str
    config: Config
    uses_tma: bool = False
    streams: bool = False
    tiles: tuple[tuple[Config, float], ...] = ()

    @property
    def path(self) -> pathlib.Path:
        return _FOLDER / f"{self.number:02d}_{self.name}.cu"

    @property
    def kernel(self) -> CudaKernel:
        return _kernel(self)


def _ring(bm: int, bn: int, blocks: int, stages: int, **options: int) -> Config:
    """Tiles of the rungs with a ring."""
    return Config(bm, bn, 32, 8, 16, 8, 4, STAGES=stages, BLOCKS=blocks, **dict(UNROLL=8) | options)


#: The speeds are estimates: smaller tiles load more for each product.
_SPLIT_K_TILES = (
    (_ring(128, 256, 1, 4), 0.88),
    (_ring(128, 128, 2, 3), 0.87),
    (_ring(64, 128, 4, 2), 0.84),
    (_ring(64, 64, 6, 2), 0.79),
)
#: These speeds are fitted to 15 sizes on an H200, as the other constants of the model of `choose`.
_TRANSPOSED_TILES = (
    (_ring(128, 256, 1, 4, UNROLL=16, TRANSPOSERS=4), 1.0),
    (_ring(128, 128, 2, 2, UNROLL=16, TRANSPOSERS=2), 0.91),
    (_ring(64, 128, 3, 2, UNROLL=16, TRANSPOSERS=1), 0.68),
    (_ring(64, 64, 4, 2, UNROLL=16, TRANSPOSERS=1), 0.65),
)
#: Four transposers are a warpgroup, which can give registers away.
_STREAM_K_TILES = (
    (_ring(128, 256, 1, 4, UNROLL=16, TRANSPOSERS=4), 1.0),
    (_ring(128, 128, 2, 2, UNROLL=16, TRANSPOSERS=4), 0.965),
    (_ring(64, 128, 3, 2, UNROLL=16, TRANSPOSERS=1), 0.75),
    (_ring(64, 64, 4, 2, UNROLL=16, TRANSPOSERS=1), 0.68),
)

RUNGS: tuple[Rung, ...] = (
    Rung(
        1, "naive",
        "One thread computes one result; the lanes of a warp are rows.",
        "Each load of A touches 32 sectors to use 4 bytes of each, so the L1 cache limits the speed to a few percent.",
        Config(32, 32),
    ),
    Rung(
        2, "coalesced",
        "The lanes of a warp are columns.",
        "A load of B touches 4 sectors instead of 1 and one of A 1 instead of 32: about 8 times as fast as rung 1.",
        Config(32, 32),
    ),
    Rung(
        3, "shared",
        "The block stages 32 x 32 tiles of A and B in shared memory.",
        "Each multiplication still reads shared memory twice, the new limit: less than twice as fast as rung 2.",
        Config(32, 32, 32),
    ),
    Rung(
        4, "block_1d",
        "A thread computes 8 results in a column and keeps the value of B in a register.",
        "9 reads of shared memory for 8 multiplications instead of 16: up to twice as fast as rung 3.",
        Config(64, 64, 8, 8),
    ),
    Rung(
        5, "block_2d",
        "A thread computes 8 x 8 results as an outer product.",
        "16 reads of shared memory for 64 multiplications instead of 72: up to twice as fast as rung 4.",
        Config(128, 128, 8, 8, 8),
    ),
    Rung(
        6, "vectorised",
        "A is stored transposed, and all accesses are of 16 bytes.",
        "4 read instructions for 64 multiplications instead of 16: about a fifth faster than rung 5.",
        Config(128, 128, 8, 8, 8),
    ),
    Rung(
        7, "linear_b",
        "The tile of B is stored in the order in which neighbouring threads read it.",
        "No bank conflicts, but 4-byte accesses of B: 10 read instructions instead of 4, slower than rung 6.",
        Config(128, 128, 8, 8, 8),
    ),
    Rung(
        8, "padded_b",
        "The rows of the tile of B are padded by 5 columns.",
        "4-byte accesses of B as in rung 7, and the conflicts within a row remain: slower than rung 6.",
        Config(128, 128, 8, 8, 8),
    ),
    Rung(
        9, "autotuned",
        "Tile sizes are found by search, and a thread's results are spread over the tile.",
        "A larger BK halves the barriers, and spread results read B without conflicts: a tenth faster than rung 6.",
        Config(128, 128, 16, 8, 8),
    ),
    Rung(
        10, "warp_tile",
        "Each warp has a tile of 64 x 64 and each thread 8 x 16 results.",
        "6 read instructions for 128 multiplications instead of 4 for 64, at twice the registers of rung 9.",
        Config(128, 128, 16, 8, 16, 8, 4),
    ),
    Rung(
        11, "half_loads",
        "Two buffers: one half of the warps loads a tile while the other half multiplies the previous one.",
        "The wait for global memory is hidden, but while one half loads, only half of the warps multiply.",
        Config(128, 128, 16, 8, 8, 8, 4),
    ),
    Rung(
        12, "cp_async",
        "Two buffers: copies without registers fill one while all warps multiply the other.",
        "The wait is hidden from all warps, but A takes one copy instruction for each 4 bytes.",
        Config(128, 128, 16, 8, 8, 8, 4),
    ),
    Rung(
        13, "tma",
        "TMA fills a ring of slots at the request of one thread; A stays row major in a swizzled tile.",
        "95 % of the instructions multiply, so about 95 % of the peak if nothing else waits: above cuBLAS.",
        _ring(128, 256, 1, 4, UNROLL=16),
        uses_tma=True,
    ),
    Rung(
        14,
        "multicast",
        "Two blocks form a cluster, and each loads half of the tile of B for both.",
        "A third less traffic from L2, which is no limit (6 bytes a clock and SM): the same speed at less power.",
        _ring(128, 256, 1, 4, UNROLL=16, CLUSTER=2),
        uses_tma=True,
    ),
    Rung(
        15,
        "split_k",
        "Blocks of a cluster divide k among themselves and add their sums through distributed shared memory.",
        "Nothing at 4096 and 8192, where all SMs have tiles; several times as fast as rung 13 at 512 and 1024.",
        _ring(128, 256, 1, 4),
        uses_tma=True,
        tiles=_SPLIT_K_TILES,
    ),
    Rung(
        16,
        "transposed",
        "Further warps transpose A in shared memory, and the order of the products suits the banks of registers.",
        "By a model of register banks and shared memory, a scheduler issues an FFMA in 92 % of the clocks, not 81 %: "
        "53 to 54 TFLOP/s at 4096, above cuBLAS.",
        _ring(128, 256, 1, 4, UNROLL=16, TRANSPOSERS=4),
        uses_tma=True,
        tiles=_TRANSPOSED_TILES,
    ),
    Rung(
        17,
        "stream_k",
        "All blocks multiply the same number of tiles along k: the last tiles of C are divided among them.",
        "4096 and 8192 are 3.88 and 15.5 waves of tiles: 3 % less time, without the half percent for the sums that "
        "pass through global memory: 52 TFLOP/s at 4096.",
        _ring(128, 256, 1, 4, UNROLL=16, TRANSPOSERS=4),
        uses_tma=True,
        streams=True,
        tiles=_STREAM_K_TILES,
    ),
)  # fmt: skip

_BY_NAME = {rung.name: rung for rung in RUNGS}
_BY_NUMBER = {rung.number: rung for rung in RUNGS}


def lookup(rung: int | str | Rung) -> Rung:
    """Returns a rung by its number or name.

    Raises:
      ValueError: there is no such rung.
    """
    if isinstance(rung, Rung):
        return rung
    found = _BY_NAME.get(rung) if isinstance(rung, str) else _BY_NUMBER.get(rung)
    if found is None:
        known = ", ".join(f"{known.number} ({known.name})" for known in RUNGS)
        raise ValueError(_message("rung must be a number or name of the ladder", repr(rung), f"Use one of {known}."))
    return found


def sgemm(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    c: Float[Array, "m n"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    rung: int | str | Rung = RUNGS[-1],
    config: Config | None = None,
) -> Float[Array, "m n"]:
    """Multiplies matrices on CUDA cores: alpha * a @ b + beta * c.

    Products and sums are in float32: no tensor cores and no TF32.

    Args:
      a, b: float32 matrices of any size of at least 1.
      c: added with the factor `beta`. It is overwritten in place if XLA can, as when it is donated. Not read if beta is
        0, as in BLAS.
      alpha, beta: constants of the program.
      rung: the kernel, by number or name; by default the last one.
      config: tile sizes. None: the rung's own.

    Returns:
      The float32 result.

    Raises:
      ValueError: another dtype or rank, sizes that do not fit each other, an unknown rung, beta without c.
      NotImplementedError: lowered for another platform than CUDA, or a rung with TMA for a GPU before Hopper.

    Differentiability: none. vmap launches once for each example.
    """
    step = lookup(rung)
    operands = {"a": jnp.asarray(a), "b": jnp.asarray(b)} | ({} if c is None else {"c": jnp.asarray(c)})
    _check(operands)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if isinstance(value, jax.Array | np.ndarray) or not _is_finite(value):
            got = type(value).__name__ if isinstance(value, jax.Array | np.ndarray) else repr(value)
            raise ValueError(_message(f"{name} must be a finite Python number", got, "Scale the result for an array."))
    if c is None and beta != 0:
        raise ValueError(_message("beta must be 0 if c is not given", f"beta={beta!r}", "Give c."))
    if step.uses_tma:
        operands |= {name: _whole_rows(operands[name]) for name in ("a", "b")}
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    config = config or (choose(m, n, k, step) if step.tiles else step.config)
    if step.streams:
        operands["has_given"] = jnp.zeros(_stream(config, m, n, k).blocks, jnp.int32)
    results = step.kernel(*operands.values(), sizes=(m, n, k), alpha=float(alpha), beta=float(beta), config=config)
    return results[0] if step.streams else results


#: SPLIT_K -> the share of the SMs that clusters of so many blocks can fill. An H200 has room for 120 blocks in clusters
#: of four (docs/pipeline.md); for eight it is an estimate.
_SPLITS = {1: 1.0, 2: 1.0, 4: 120 / 132, 8: 112 / 132}
#: Rung 17: the least steps along k of a block, and the most blocks of a tile.
_LEAST_STEPS, _MOST_PARTS = 4, 16
#: In clocks of an SM: from the launch of a block to its first product and from its last product to its end; and for
#: each 16 bytes of partial sums that pass from block to block, through distributed shared memory and through global
#: memory (rung 17). Fitted to 15 sizes on an H200.
_BLOCK_CLOCKS, _PARTIAL_CLOCKS, _GIVEN_CLOCKS = 9000, 0.1, 0.24
#: With tiles for more waves than these, k is not divided.
_FEW_WAVES = 1
_FFMA_PER_CLOCK, _FFMA_SHARE = 128, 0.81
#: The speed of the main loop of rungs without tiles to choose from, as that of a tile.
_OTHER_SPEED = 0.85
#: A launch.
_LAUNCH_SECONDS = 3e-6
#: One warp on each of the four schedulers of an SM waits for shared memory in between. Two hide it.
_FULL_WARPS = 8


def choose(m: int, n: int, k: int, rung: int | str | Rung = RUNGS[-1], num_sms: int = 132) -> Config:
    """Chooses the tile and SPLIT_K of a rung by a model of its time: waves of blocks times the clocks of a block."""
    step = lookup(rung)
    few = lambda config: -(-m // config.BM) * -(-n // config.BN) <= _FEW_WAVES * num_sms * config.BLOCKS
    configs = {config: speed for config, speed in candidates(k, step).items() if config.SPLIT_K == 1 or few(config)}
    return min(configs, key=lambda config: _clocks(step, config, m, n, k, num_sms, configs[config]))


def estimate(
    m: int, n: int, k: int, rung: int | str | Rung = RUNGS[-1], *, num_sms: int = 132, hertz: float = 1.98e9
) -> float:
    """Seconds of a rung on a chip of so many SMs and clocks a second, by the model of `choose`; without padding."""
    step = lookup(rung)
    config = choose(m, n, k, step, num_sms) if step.tiles else step.config
    speed = candidates(k, step).get(config, _OTHER_SPEED)
    return _LAUNCH_SECONDS + _clocks(step, config, m, n, k, num_sms, speed) / hertz


def candidates(k: int, rung: int | str | Rung = RUNGS[-1]) -> dict[Config, float]:
    """What `choose` chooses among, each with the relative speed of its main loop."""
    step = lookup(rung)
    return {
        dataclasses.replace(config, SPLIT_K=split): speed
        for config, speed in step.tiles
        for split in ([1] if step.streams else _SPLITS)
        if split == 1 or k >= 64 * split
    }


class _Stream(NamedTuple):
    """How rung 17 divides a product: blocks, and tiles of C that a block multiplies alone."""

    blocks: int
    whole_tiles: int


def _stream(config: Config, m: int, n: int, k: int, num_sms: int = 132) -> _Stream:
    """Whole tiles for all blocks but in the last one or two waves, whose steps along k all blocks share."""
    tiles, steps = -(-m // config.BM) * -(-n // config.BN), -(-k // config.BK)
    most = num_sms * config.BLOCKS
    if tiles % most == 0:
        return _Stream(most, tiles)
    if tiles > most:
        return _Stream(most, (tiles // most - 1) * most)
    return _Stream(max(tiles, min(most, tiles * _MOST_PARTS, tiles * steps // _LEAST_STEPS)), 0)


def _clocks(rung: Rung, config: Config, m: int, n: int, k: int, num_sms: int, speed: float) -> float:
    tiles, most = -(-m // config.BM) * -(-n // config.BN), max(1, config.BLOCKS)
    # These describe the busiest SM. It holds up to BLOCKS blocks at once. The others run in further waves.
    clocks_of_16_bytes = _GIVEN_CLOCKS if rung.streams else _PARTIAL_CLOCKS
    if rung.streams:
        blocks, whole_tiles = _stream(config, m, n, k, num_sms)
        at_once = min(most, -(-blocks // num_sms))
        tiles_of_one_sm = tiles / blocks * at_once
        # A block of the last waves gives its sums once, and takes those of the others of a tile.
        partial_reads = 0 if whole_tiles == tiles else at_once * (1 + max(1, blocks // tiles))
        waves = -(-tiles // blocks)
    else:
        blocks = tiles * config.SPLIT_K
        on_one_sm = -(-blocks // int(num_sms * _SPLITS[config.SPLIT_K]))
        at_once = min(on_one_sm, most)
        tiles_of_one_sm = on_one_sm / config.SPLIT_K
        partial_reads = 0 if config.SPLIT_K == 1 else on_one_sm
        waves = -(-on_one_sm // most)
    share = speed * _FFMA_SHARE * min(1.0, 0.5 + 0.5 * at_once * config.consumers / 32 / _FULL_WARPS)
    products = tiles_of_one_sm * config.BM * config.BN * k / (_FFMA_PER_CLOCK * share)
    return products + partial_reads * config.BM * config.BN / 4 * clocks_of_16_bytes + _BLOCK_CLOCKS * waves


def _check(operands: Mapping[str, jax.Array]) -> None:
    for name, x in operands.items():
        if x.ndim != 2 or x.dtype != jnp.float32:
            what = f"{name} must be a float32 matrix"
            raise ValueError(_message(what, f"{x.dtype.name}{list(x.shape)}", "Convert it, or use jk.matmul."))
        if not all(1 <= size <= _MAX_SIZE for size in x.shape):
            raise ValueError(_message(f"sizes of {name} must be 1 to 2^31 - 1", f"{x.shape}", "Use jnp.matmul."))
    a, b = operands["a"].shape, operands["b"].shape
    if a[1] != b[0]:
        raise ValueError(_message("a must have as many columns as b has rows", f"{a} and {b}", "Transpose one."))
    if "c" in operands and operands["c"].shape != (a[0], b[1]):
        got = f"{operands['c'].shape}"
        raise ValueError(_message(f"c must have the shape of the product, {(a[0], b[1])}", got, "Broadcast it first."))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def _whole_rows(x: jax.Array) -> jax.Array:
    """Pads rows with zeros to a multiple of 16 bytes."""
    missing = -x.shape[1] % (16 // _FLOAT_BYTES)
    return jnp.pad(x, ((0, 0), (0, missing))) if missing else x


def _message(rule: str, got: str, way_out: str) -> str:
    return f"sgemm[cuda]: {rule}; got {got}. {way_out}"


@functools.cache
def _kernel(rung: Rung) -> CudaKernel:
    return CudaKernel(rung.path, f"sgemm_{rung.name}", functools.partial(_plan, rung), strict=True)


def _plan(
    rung: Rung,
    *x: jax.ShapeDtypeStruct,
    sizes: tuple[int, int, int],
    alpha: float,
    beta: float,
    config: Config,
) -> LaunchPlan:
    """Operands: x0 = A, x1 = B, then C, which the result replaces, if given, then zeros if the rung streams."""
    m, n, k = sizes
    # Blocks of a cluster are neighbours along m. Some may have no rows.
    tiles = -(-m // (config.BM * config.CLUSTER)) * config.CLUSTER * -(-n // config.BN)
    results: dict[str, Any] = {"out": jax.ShapeDtypeStruct((m, n), jnp.float32)}
    scalars: list[Any] = [np.int32(m), np.int32(n), np.int32(k)]
    has_c = len(x) == 3 + rung.streams
    aliases = {"x2": "out"} if has_c else {}
    grid = tiles * config.SPLIT_K
    if rung.streams:
        grid, whole_tiles = _stream(config, m, n, k)
        results["partial"] = jax.ShapeDtypeStruct((grid, config.BM * config.BN), jnp.float32)
        results["has_given"] = x[-1]
        aliases[f"x{len(x) - 1}"] = "has_given"
        scalars.append(np.int32(whole_tiles))
    scalars += [np.float32(alpha), np.float32(beta)]
    defines = dataclasses.asdict(config) | {"K_ALIGNED": k % 4 == 0, "N_ALIGNED": n % 4 == 0}
    operands: list[Any] = [Pointer("x0"), Pointer("x1")]
    smem_bytes = 0
    if rung.uses_tma:
        operands = [
            TensorMap("x0", box=(config.BM, config.BK), swizzle="128B"),
            TensorMap("x1", box=(config.BK // config.CLUSTER, config.BN)),
        ]
        smem_bytes = config.staged_bytes + max(config.ring_bytes, config.partial_bytes) + 16 * (config.STAGES + 2)
        defines["SMEM_BYTES"] = smem_bytes
    return LaunchPlan(
        results=results,
        parameters=[*operands, *map(Pointer, results), *scalars],
        grid=(grid,),
        block=(config.threads,),
        cluster=(config.SPLIT_K * config.CLUSTER,),
        smem_bytes=smem_bytes,
        defines=defines,
        aliases=aliases,
    )


def search_space() -> tuple[list[Config], collections.Counter[str]]:
    """Lists the configurations of rung 9.

    Returns:
      The legal ones, and the number of combinations that each rule excluded. A combination that breaks several rules
      counts for the first.
    """
    legal, refused = [], collections.Counter[str]()
    for bm, bn, bk, tm, tn in itertools.product((64, 128, 256), (64, 128, 256), (8, 16, 32), (4, 8, 16), (4, 8, 16)):
        config = Config(bm, bn, bk, tm, tn)
        if reason := _illegal(config):
            refused[reason] += 1
        else:
            legal.append(config)
    return legal, refused


def _illegal(config: Config) -> str | None:
    """Why rung 9 cannot have this configuration, or would be slow with it."""
    threads = config.threads
    tiles = (config.BM * config.BK, config.BK * config.BN)
    # Results, two sets of values of A and B, elements on their way to shared memory, the rest (tried with ptxas).
    registers = config.TM * config.TN + 2 * (config.TM + config.TN) + sum(tiles) // threads + 30
    if not 64 <= threads <= 1024:
        return "threads of a block: 64 to 1024"
    if sum(tiles) * _FLOAT_BYTES > _STATIC_SMEM_BYTES:
        return "static shared memory of a block: 48 KB"
    if registers > min(_MAX_REGISTERS, _SM_REGISTERS // threads):
        return "registers do not fit: the results would spill"
    if any(tile % (4 * threads) for tile in tiles):
        return "threads must load equally many float4"
    return None
