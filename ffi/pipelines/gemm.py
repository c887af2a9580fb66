"""One product on tensor cores whose schedule of loads is a configuration (gemm.cu says how each works).

    out = matmul(a, b, config=Config(schedule="async", num_stages=4))

It is there to be studied: `jk.matmul` has faster kernels for Hopper. Its instructions (mma.sync, ldmatrix, cp.async)
are those of Ampere, so it runs on GPUs of compute capability 8.0 or newer.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int64

from jaxkernels.core.arguments import check_fields
from jaxkernels.ffi.custom_call import Pointer
from jaxkernels.ffi.kernel import CudaKernel, LaunchPlan

__all__ = ["STAMPS", "Config", "configs", "matmul", "timeline"]

_LABEL = "pipelines[cuda]"
_SOURCE = pathlib.Path(__file__).parent / "gemm.cu"
_ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "TFloat32"}
_SCHEDULES = {"single": "kSingle", "registers": "kRegisters", "async": "kAsync"}
_UNIT_BYTES = 16
_MAX_THREADS = 1024
#: Blocks and element offsets are counted in 32 and 64 bits.
_MAX_SIZE = 2**31 - 2**16
#: What the first warp records for each tile, in order.
STAMPS = ("requested", "waited", "multiplied", "ended")


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and schedule.

    Attributes:
      schedule: "single": one buffer, loads and products take turns. "registers": two buffers, the next tile waits in
        registers while this one is multiplied. "async": a ring of buffers filled by cp.async.
      num_stages: slots of the ring of "async", 2 to 6. The others ignore it.
      prefetches: whether operands are loaded from shared memory to registers one instruction ahead.
      block_m, block_n, block_k: the tile of a block.
      warps_m, warps_n: warps of a block along m and n.
    """

    schedule: Literal["single", "registers", "async"] = "async"
    num_stages: int = 3
    prefetches: bool = True
    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    warps_m: int = 2
    warps_n: int = 4

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        per_warp = self.warps_m < 1 or self.warps_n < 1
        rules = {
            "num_stages must be from 2 to 6": not 2 <= self.num_stages <= 6,
            "warps_m and warps_n must be positive": per_warp,
            "block_m must be a multiple of 16 for each warp": per_warp or self.block_m % (16 * self.warps_m),
            "block_n must be a multiple of 16 for each warp": per_warp or self.block_n % (16 * self.warps_n),
            "block_k must be a multiple of 32": self.block_k < 32 or self.block_k % 32,
            f"a block must have at most {_MAX_THREADS} threads": self.num_threads > _MAX_THREADS,
            "tiles must be positive": min(self.block_m, self.block_n) < 1,
        }
        for rule, is_broken in rules.items():
            if is_broken:
                raise ValueError(f"{_LABEL}: {rule}; got {self}.")

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def num_slots(self) -> int:
        """Tiles that shared memory holds."""
        return {"single": 1, "registers": 2, "async": self.num_stages}[self.schedule]

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of a block for operands of this many bytes an element."""
        return self.num_slots * (self.block_m + self.block_n) * self.block_k * itemsize


def configs() -> Iterator[Config]:
    """Yields each schedule with its default tiles, with and without the second level of prefetch."""
    for prefetches in (False, True):
        yield Config("single", prefetches=prefetches)
        yield Config("registers", prefetches=prefetches)
        for num_stages in range(2, 7):
            yield Config("async", num_stages, prefetches)


def matmul(
    a: Float[Array, "m k"],
    b: Float[Array, "k n"],
    *,
    config: Config | None = None,
    out_dtype: Any = None,
) -> Float[Array, "m n"]:
    """Multiplies matrices on tensor cores: a @ b.

    Args:
      a, b: matrices of one dtype: bfloat16, float16, or float32, which is rounded to TF32.
      config: tiles and schedule. None: the default.
      out_dtype: that of the operands, or float32. None: that of the operands.

    Returns:
      The product. Sums are in float32.

    Raises:
      ValueError: other dtypes, ranks or sizes; tiles that the block cannot share equally, or that need more shared
        memory than it has.

    Differentiability: none.
    """
    a, b, config = jnp.asarray(a), jnp.asarray(b), config or Config()
    out_dtype = _check(a, b, config, out_dtype)
    return _kernel(a, b, config=config, out_dtype=out_dtype.name, records=False)[0]


def timeline(a: Float[Array, "m k"], b: Float[Array, "k n"], *, config: Config) -> Int64[np.ndarray, "tiles 4"]:
    """Returns when the first warp of the first block does what, for each tile along k, in clock cycles.

    The columns are `STAMPS`: the loads of a later tile are requested, this tile is there, its products are issued (or,
    with a look ahead, all but the last), the step has ended. Cycles count from the first stamp. Recording takes time
    of its own.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    out_dtype = _check(a, b, config, None)
    words = np.asarray(_kernel(a, b, config=config, out_dtype=out_dtype.name, records=True)[1])
    stamps = words.view(np.int64).reshape(-1, len(STAMPS))
    return stamps - stamps[0, 0]


def _check(a: jax.Array, b: jax.Array, config: Config, out_dtype: Any) -> np.dtype:
    """Raises ValueError for what the kernel does not take. Returns the result's dtype."""
    for name, x in (("a", a), ("b", b)):
        if x.ndim != 2 or x.dtype.name not in _ELEMENTS:
            raise ValueError(
                f"{_LABEL}: {name} must be a matrix of {', '.join(_ELEMENTS)}; got {x.dtype.name}{list(x.shape)}. "
                "Use jk.matmul."
            )
        if not all(1 <= size <= _MAX_SIZE for size in x.shape):
            raise ValueError(f"{_LABEL}: sizes of {name} must be 1 to {_MAX_SIZE}; got {x.shape}. Use jnp.matmul.")
    if a.dtype != b.dtype:
        raise ValueError(f"{_LABEL}: a and b must have one dtype; got {a.dtype.name} and {b.dtype.name}. Convert one.")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{_LABEL}: a must have as many columns as b has rows; got {a.shape} and {b.shape}. Transpose one."
        )
    out_dtype = jnp.dtype(a.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (a.dtype, jnp.dtype(jnp.float32)):
        raise ValueError(
            f"{_LABEL}: out_dtype must be {a.dtype.name} or float32; got {out_dtype.name}. Convert the result."
        )
    itemsize = a.dtype.itemsize
    units = [rows * columns * itemsize // _UNIT_BYTES for rows, columns in _tiles(config)]
    if any(count % config.num_threads for count in units):
        raise ValueError(
            f"{_LABEL}: the {config.num_threads} threads of a block must load equally many 16-byte units of each tile; "
            f"got {config} for {a.dtype.name}. Use a larger block_k, or fewer warps."
        )
    return out_dtype


def _tiles(config: Config) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of both operands' tiles."""
    return (config.block_m, config.block_k), (config.block_k, config.block_n)


def _plan(a: Any, b: Any, *, config: Config, out_dtype: str, records: bool) -> LaunchPlan:
    (m, k), n = a.shape, b.shape[1]
    itemsize = a.dtype.itemsize
    num_tiles = -(-k // config.block_k)
    return LaunchPlan(
        results={
            "out": jax.ShapeDtypeStruct((m, n), out_dtype),
            # 64-bit numbers as pairs, whatever jax_enable_x64 says.
            "stamps": jax.ShapeDtypeStruct((2 * len(STAMPS) * (num_tiles if records else 1),), np.int32),
        },
        parameters=[
            *map(Pointer, ("a", "b", "out", "stamps")),
            np.array([m, n, k], np.int32).view("V12")[0],
        ],
        grid=(-(-m // config.block_m) * -(-n // config.block_n),),
        block=(config.num_threads,),
        smem_bytes=config.smem_bytes(itemsize),
        defines=_defines(config, a.dtype.name, out_dtype, k, n, records=records),
    )


def _defines(config: Config, dtype: str, out_dtype: str, k: int, n: int, *, records: bool) -> dict[str, Any]:
    itemsize = jnp.dtype(dtype).itemsize
    values = dict(
        element=_ELEMENTS[dtype],
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        warps_m=config.warps_m,
        warps_n=config.warps_n,
        schedule=_SCHEDULES[config.schedule],
        num_stages=config.num_stages,
        prefetches=config.prefetches,
        lhs_is_aligned=k * itemsize % _UNIT_BYTES == 0,
        rhs_is_aligned=n * itemsize % _UNIT_BYTES == 0,
        narrows=out_dtype == dtype,
        records=records,
        smem_bytes=config.smem_bytes(itemsize),
    )
    return {f"JK_{name.upper()}": value for name, value in values.items()}


_kernel = CudaKernel(_SOURCE, "jaxkernels::gemm", _plan, strict=True)
