"""Other ways to compute a product in JAX: XLA, cuBLASLt and JAX's own Pallas kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.core.hardware import Chip
from jaxkernels.core.problems import Baseline, Contender, Problem, needs_cuda
from jaxkernels.ops.matmul.cases import MatmulCase

__all__ = ["BASELINES"]

Operands = dict[str, jax.Array]

_JAX_ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
}


def _jax_matmul(case: MatmulCase, operands: Operands) -> jax.Array:
    """The case as one writes it with JAX: a dot_general, and an epilogue for XLA to fuse."""

    def product(rhs: jax.Array) -> jax.Array:
        if case.shared_rhs:
            return jnp.matmul(operands["lhs"], rhs, precision=case.dot_precision, preferred_element_type=case.out_dtype)
        return jax.lax.dot_general(
            operands["lhs"], rhs, case.contraction, case.dot_precision, preferred_element_type=case.out_dtype
        )

    out = product(operands["rhs"])
    if case.alpha != 1:
        out *= case.alpha
    if case.bias:
        out += operands["bias"].astype(out.dtype)
    out = _JAX_ACTIVATIONS[case.activation](out)
    if case.multiplier:
        out *= operands["multiplier"].astype(out.dtype)
    if case.gate:
        out *= product(operands["gate"])
    return out + operands["residual"].astype(out.dtype) if case.residual else out


#: XLA's autotuner times all it has, as it does by itself (at level 4), but does not check each one's result: we check
#: that of the chosen one, and a run is shorter by a third.
_AUTOTUNED = dict(xla_gpu_autotune_level=2)


def _gemm_xla(problem: Problem[MatmulCase]) -> Iterator[Contender]:
    yield Contender("xla", functools.partial(_jax_matmul, problem.case), compiler_options=(_AUTOTUNED,))


#: cuBLASLt for every product. The first set takes the other code generators out of the choice, the second names the
#: one library; XLA has replaced the first by the second, and not every product arrives there both ways.
_CUBLASLT = tuple(
    options | _AUTOTUNED | dict(xla_gpu_gemm_rewrite_size_threshold=0)
    for options in (
        dict(xla_gpu_enable_cublaslt=True, xla_gpu_enable_triton_gemm=False),
        dict(xla_gpu_experimental_autotune_backends="CUBLASLT"),
    )
)


def _gemm_cublaslt(problem: Problem[MatmulCase]) -> Iterator[Contender]:
    function = functools.partial(_jax_matmul, problem.case)
    yield Contender("cublaslt", function, compiler_options=_CUBLASLT, wanted="__cublas$lt$")


def _pallas_matmul_configs(case: MatmulCase) -> Iterator[tuple[str, Any]]:
    """Tilings of JAX's Hopper matmul that divide the problem, for large and for small ones."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as lib

    dims = lib.MatmulDimension
    for tile_m, tile_n, cluster in ((128, 128, dims.M), (128, 128, None), (64, 128, None), (64, 64, None)):
        config = lib.TuningConfig(
            tile_m=tile_m, tile_n=tile_n, tile_k=64, max_concurrent_steps=4, epi_tile_m=64, epi_tile_n=64,
            grid_minor_dim=dims.M, grid_tile_width=8, wg_dimension=dims.N, cluster_dimension=cluster,
        )  # fmt: skip
        if case.m % (tile_m * (2 if cluster is not None else 1)) == 0 and case.n % (2 * tile_n) == 0:
            yield f"{tile_m}x{2 * tile_n}" + (" cluster" if cluster is not None else ""), config


def _jax_pallas_matmul_refuses(problem: Problem[MatmulCase], chip: Chip) -> str | None:
    case = problem.case
    if not chip.is_hopper:
        return f"needs a GPU of compute capability 9.0 (Hopper), this is {chip}"
    if case.dtype not in ("bfloat16", "float16") or case.out_dtype not in (None, case.dtype):
        return f"multiplies 16-bit operands to the same dtype, not {case.dtype} to {case.out_dtype or case.dtype}"
    if (case.lhs_layout, case.rhs_layout) != ("mk", "kn") or case.batch:
        return "multiplies two row-major matrices only"
    if case.alpha != 1 or case.bias or case.activation or case.multiplier or case.residual or case.gate:
        return "has no epilogue"
    if problem.direction == "backward":
        return "has no gradient"
    if case.m % 64 or case.n % 128 or case.k % 64:
        return f"needs m in steps of 64, n of 128 and k of 64, not {case.m}, {case.n}, {case.k}"
    return None


def _gemm_jax_pallas(problem: Problem[MatmulCase]) -> Iterator[Contender]:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as lib

    # The largest tiling that fits, with its cluster: the others only serve what it cannot divide.
    for label, config in list(_pallas_matmul_configs(problem.case))[:1]:
        function = lambda x, config=config: lib.matmul(x["lhs"], x["rhs"], None, config)
        yield Contender(f"jax-pallas {label}", function)


#: Name -> baseline.
BASELINES: dict[str, Baseline] = {
    "xla": Baseline(lambda problem, chip: None, _gemm_xla),
    "cublaslt": Baseline(lambda problem, chip: needs_cuda(chip), _gemm_cublaslt),
    "jax-pallas": Baseline(_jax_pallas_matmul_refuses, _gemm_jax_pallas),
}
