"""Matrix product by mma.sync, with a choice of schedules for its pipeline (gemm_mma.cu describes them).

    out = matmul(a, b, config=Config(schedule="multi_stage", num_stages=4))
    stamps = timeline(a, b, config=Config(schedule="single_stage"))

The kernel serves measurements of pipelines; `jaxkernels.matmul` is faster on Hopper. It uses the instructions of Ampere
only. So it runs on every GPU since compute capability 8.0.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkernels.core.arguments import check_fields
from jaxkernels.ffi.custom_call import Pointer
from jaxkernels.ffi.kernel import CudaKernel, LaunchPlan

__all__ = ["EVENTS", "SCHEDULES", "Config", "Schedule", "Timeline", "kernel", "matmul", "timeline", "timeline_kernel"]

Schedule = Literal["single_stage", "double_buffered", "multi_stage"]
SCHEDULES: tuple[Schedule, ...] = ("single_stage", "double_buffered", "multi_stage")

#: What `timeline` records for each tile of k, in the order of the kernel's `Event`.
EVENTS = ("load_begin", "load_end", "wait_begin", "wait_end", "compute_begin", "compute_end")

_LABEL = "pipelines[cuda]"
_STAGES = {"single_stage": (1, 1), "double_buffered": (2, 2), "multi_stage": (2, 6)}
_DEFAULT_STAGES = {"single_stage": 1, "double_buffered": 2, "multi_stage": 3}
_FORMATS = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}
_SIDES = (32, 64, 128, 256)
_DEPTHS = (16, 32, 64)
_WARPS = (1, 2, 4, 8)
_WARP = 32
_MAX_WARPS = 16
#: Rows of a warp's tile must be whole mma, columns the 32 that a warp stores at a time.
_MMA_M, _STORED_N = 16, 32
_UNIT_BYTES = 16
#: Bytes of an lhs row in shared memory: two or four fragments of 32 bytes.
_ROW_BYTES = (64, 128)
#: 32-bit registers that a thread has for accumulators; the rest of 255 is for fragments and addresses.
_MAX_ACCUMULATORS = 128
#: The kernel counts bytes of a row, rows and tiles in 32-bit numbers.
_MAX_SIZE = 2**28
_MAX_STRIP = 128


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_m, block_n: output tile of one CTA; powers of two from 32 to 256.
      block_k: depth of a tile, elements: 32 or 64 of 16 bits, 16 or 32 of float32.
      warps_m, warps_n: warps of a CTA along m and n.
      schedule: "single_stage", "double_buffered" (through registers) or "multi_stage" (by cp.async).
      num_stages: slots of shared memory: 1, 2, or 2 to 6 for "multi_stage". None becomes 1, 2 or 3.
      prefetch_fragments: whether a warp loads the next fragment while it multiplies one.
      strip: rows of tiles that the grid walks together.
      ctas_per_sm: CTAs of an SM for which the compiler must leave registers.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    warps_m: int = 2
    warps_n: int = 4
    schedule: Schedule = "multi_stage"
    num_stages: int | None = None
    prefetch_fragments: bool = True
    strip: int = 8
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        if self.num_stages is None:
            object.__setattr__(self, "num_stages", _DEFAULT_STAGES[self.schedule])
        _require(
            self.block_m in _SIDES and self.block_n in _SIDES,
            f"block_m and block_n must each be one of {_SIDES}",
            f"block_m={self.block_m}, block_n={self.block_n}",
            "Use 128 and 128.",
        )
        _require(
            self.block_k in _DEPTHS, f"block_k must be one of {_DEPTHS}", f"block_k={self.block_k}", "Use block_k=32."
        )
        _require(
            self.warps_m in _WARPS and self.warps_n in _WARPS and self.num_warps <= _MAX_WARPS,
            f"warps_m and warps_n must each be one of {_WARPS}, and at most {_MAX_WARPS} warps together",
            f"warps_m={self.warps_m}, warps_n={self.warps_n}",
            "Use 2 and 4.",
        )
        _require(
            self.warp_m % _MMA_M == 0 and self.warp_n % _STORED_N == 0 and self.warp_m > 0 and self.warp_n > 0,
            f"a warp's tile must be a multiple of {_MMA_M} x {_STORED_N}",
            f"{self.block_m}/{self.warps_m} x {self.block_n}/{self.warps_n}",
            "Use fewer warps or a larger block.",
        )
        _require(
            self.warp_m * self.warp_n <= _MAX_ACCUMULATORS * _WARP,
            f"a warp's tile must leave each thread at most {_MAX_ACCUMULATORS} accumulators",
            f"{self.warp_m} x {self.warp_n} of {_WARP} threads",
            "Use more warps or a smaller block.",
        )
        least, most = _STAGES[self.schedule]
        _require(
            least <= self.num_slots <= most,
            f"num_stages of {self.schedule} must be " + (f"{least}" if least == most else f"from {least} to {most}"),
            f"num_stages={self.num_stages}",
            "Leave it out for the default.",
        )
        _require(
            1 <= self.strip <= _MAX_STRIP,
            f"strip must be from 1 to {_MAX_STRIP}",
            f"strip={self.strip}",
            "Use strip=8.",
        )
        _require(
            1 <= self.ctas_per_sm <= 8,
            "ctas_per_sm must be from 1 to 8",
            f"ctas_per_sm={self.ctas_per_sm}",
            "Use ctas_per_sm=1.",
        )

    @property
    def num_slots(self) -> int:
        """Slots of shared memory."""
        assert self.num_stages is not None, "set by __post_init__"
        return self.num_stages

    @property
    def num_warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        """Rows of one warp's tile."""
        return self.block_m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of one warp's tile."""
        return self.block_n // self.warps_n

    def smem_bytes(self, dtype: Any) -> int:
        """Shared memory of one CTA for operands of a dtype, bytes."""
        return self.num_slots * (self.block_m + self.block_n) * self.block_k * jnp.dtype(dtype).itemsize

    def check(self, dtype: Any) -> None:
        """Raises ValueError if the kernel cannot load tiles of this dtype with these warps."""
        dtype = jnp.dtype(dtype)
        depths = tuple(size // dtype.itemsize for size in _ROW_BYTES)
        _require(
            self.block_k in depths,
            f"block_k must be {depths[0]} or {depths[1]} for {dtype.name}",
            f"block_k={self.block_k}",
            f"Use block_k={depths[0]}.",
        )
        units = _UNIT_BYTES // dtype.itemsize
        parts = (self.block_m * self.block_k // units, self.block_k * self.block_n // units)
        threads = _WARP * self.num_warps
        _require(
            min(parts) >= threads and self.block_n // units <= threads,
            f"a tile of each operand must have a {_UNIT_BYTES}-byte unit for each thread, and a row of it at most one",
            f"{parts[0]} and {parts[1]} units, {threads} threads",
            "Use fewer warps or a larger block.",
        )


def _require(condition: bool, rule: str, got: str, way_out: str) -> None:
    if not condition:
        raise ValueError(f"{_LABEL}: {rule}; got {got}. {way_out}")


def matmul(
    a: Float[Array, "m k"], b: Float[Array, "k n"], *, config: Config | None = None, out_dtype: Any = None
) -> Float[Array, "m n"]:
    """Multiplies two row-major matrices: out[i, j] = sum_l a[i, l] b[l, j].

    Sums are float32. float32 operands are rounded to TF32 (10 mantissa bits), ties away from zero.

    Args:
      a: bfloat16, float16 or float32.
      b: of the same dtype.
      config: None takes `Config()`.
      out_dtype: float32 or the operands' dtype. None takes the operands'.

    Returns:
      The product.

    Raises:
      ValueError: wrong shapes or dtypes, or a config that does not fit the dtype or the device's shared memory.
      NotImplementedError: the platform is not CUDA.

    Differentiability: none. vmap launches once for each example.

    References: PTX ISA, mma, cp.async, ldmatrix.
    """
    config = Config() if config is None else config
    a, b, out_dtype = _checked(a, b, config, out_dtype)
    return kernel(a, b, config=config, out_dtype=out_dtype)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When the warps of one CTA load, wait and multiply.

    Attributes:
      config: the configuration.
      cycles: [warps, tiles of k, len(EVENTS)] cycles since the CTA's first warp began. A tile's "load" is the issue of
        its loads. Its "wait" ends when all threads have stored the tile to shared memory. Its "compute" ends when the
        warp's last mma is issued. If fragments are prefetched, the wait for the next tile lies inside "compute".
      begin, end: [warps] cycles of the warp's first and last instruction.
      nanoseconds_per_cycle: from the device's timer, over the longest warp. NaN if the timer did not advance.
    """

    config: Config
    cycles: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    nanoseconds_per_cycle: float


def timeline(a: Float[Array, "m k"], b: Float[Array, "k n"], *, config: Config | None = None, cta: int = 0) -> Timeline:
    """Runs the product once and records when the warps of one CTA load, wait and multiply.

    The kernel is a build of its own: recording takes registers and a few instructions for each tile. Use it to see the
    order of events, and `matmul` to measure speed. It cannot be traced.

    Args:
      a, b, config: as for `matmul`.
      cta: the number of the CTA in the grid. CTAs of a small number start with cold caches.

    Returns:
      The stamps.

    Raises:
      ValueError, NotImplementedError: as `matmul`; a `cta` outside the grid.
    """
    config = Config() if config is None else config
    a, b, out_dtype = _checked(a, b, config, None)
    ctas = _num_ctas(a.shape[0], b.shape[1], config)
    _require(0 <= cta < ctas, f"cta must be from 0 to {ctas - 1} for these sizes", f"cta={cta}", "Use cta=0.")
    _, stamps = timeline_kernel(a, b, config=config, out_dtype=out_dtype, cta=cta)
    return _timeline_of(config, np.asarray(stamps))


def _timeline_of(config: Config, stamps: np.ndarray) -> Timeline:
    """Unpacks what the kernel wrote: 32-bit numbers that may have wrapped round since the CTA began."""
    cycles, ends = stamps[:, :-1], stamps[:, -1]
    begins = (ends[:, 0] - ends[0, 0]).astype(np.int32)
    start = ends[begins.argmin(), 0]
    since = lambda x: (x - start).astype(np.int64)
    durations = (ends[:, 2] - ends[:, 0]).astype(np.float64)
    nanoseconds = (ends[:, 3] - ends[:, 1]).astype(np.float64)
    longest = int(durations.argmax())
    scale = nanoseconds[longest] / durations[longest] if nanoseconds[longest] else float("nan")
    return Timeline(config, since(cycles), since(ends[:, 0]), since(ends[:, 2]), float(scale))


def _checked(a: Any, b: Any, config: Any, out_dtype: Any) -> tuple[jax.Array, jax.Array, str]:
    """Returns the operands as arrays, and the name of the result's dtype."""
    _require(isinstance(config, Config), "config must be a Config of this kernel", f"{config!r}", "Use Config().")
    a, b = jnp.asarray(a), jnp.asarray(b)
    _require(
        a.dtype == b.dtype and a.dtype.name in _FORMATS,
        f"operands must both be one of {', '.join(_FORMATS)}",
        f"{a.dtype.name} and {b.dtype.name}",
        "Cast them with .astype.",
    )
    _require(
        a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0],
        "operands must be matrices of m x k and k x n",
        f"shapes {a.shape} and {b.shape}",
        "Use jax.vmap for batches.",
    )
    sizes = (*a.shape, b.shape[1])
    _require(
        all(1 <= size <= _MAX_SIZE for size in sizes),
        f"m, k and n must be from 1 to {_MAX_SIZE}",
        f"m={sizes[0]}, k={sizes[1]}, n={sizes[2]}",
        "Use jax.numpy.matmul for empty or larger matrices.",
    )
    result = a.dtype if out_dtype is None else jnp.dtype(out_dtype)
    _require(
        result in (a.dtype, jnp.dtype("float32")),
        "out_dtype must be float32 or the operands' dtype",
        f"out_dtype={result.name}, operands of {a.dtype.name}",
        "Cast the result with .astype.",
    )
    config.check(a.dtype)
    return a, b, result.name


def _num_ctas(m: int, n: int, config: Config) -> int:
    return -(-m // config.block_m) * -(-n // config.block_n)


def _plan(a: Any, b: Any, *, config: Config, out_dtype: str) -> LaunchPlan:
    (m, k), n = a.shape, b.shape[1]
    is_aligned = lambda size: size * a.dtype.itemsize % _UNIT_BYTES == 0
    camel = config.schedule.title().replace("_", "")
    smem_bytes = config.smem_bytes(a.dtype)
    defines: dict[str, int | str] = dict(
        input=_FORMATS[a.dtype.name],
        output=_FORMATS[out_dtype],
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        warps_m=config.warps_m,
        warps_n=config.warps_n,
        schedule=f"k{camel}",
        num_stages=config.num_slots,
        prefetch_fragments=config.prefetch_fragments,
        strip=config.strip,
        ctas_per_sm=config.ctas_per_sm,
        lhs_is_aligned=is_aligned(k),
        rhs_is_aligned=is_aligned(n),
        smem_bytes=smem_bytes,
    )
    return LaunchPlan(
        results={"out": jax.ShapeDtypeStruct((m, n), jnp.dtype(out_dtype))},
        parameters=[Pointer("a"), Pointer("b"), Pointer("out"), np.int32(m), np.int32(n), np.int32(k)],
        grid=(_num_ctas(m, n, config),),
        block=(_WARP * config.num_warps,),
        smem_bytes=smem_bytes,
        defines={f"JK_{name.upper()}": value for name, value in defines.items()},
    )


def _plan_timeline(a: Any, b: Any, *, config: Config, out_dtype: str, cta: int) -> LaunchPlan:
    plan = _plan(a, b, config=config, out_dtype=out_dtype)
    tiles = -(-a.shape[1] // config.block_k)
    stamps = jax.ShapeDtypeStruct((config.num_warps, tiles + 1, len(EVENTS)), jnp.uint32)
    return dataclasses.replace(
        plan,
        results={**plan.results, "stamps": stamps},
        parameters=[*plan.parameters[:3], Pointer("stamps"), np.int32(cta), *plan.parameters[3:]],
        defines={**plan.defines, "JK_TIMELINE": 1},
    )


_SOURCE = pathlib.Path(__file__).with_name("gemm_mma.cu")
_kernel = functools.partial(CudaKernel, _SOURCE, "jaxkernels::gemm_mma")

#: The kernel as a JAX function of a and b, with the constants config and out_dtype (a name). `matmul` checks them.
kernel = _kernel(_plan, strict=True)
#: The recording build. Its results are the product and the stamps. Recording may take registers to memory.
timeline_kernel = _kernel(_plan_timeline)
