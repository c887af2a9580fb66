"""Products of wgmma.cuh: each shape compiles, and each type and form of the lhs is right, on a Hopper GPU and on the
emulator (tests/cuda/emulated)."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import DYNAMIC_SMEM, NEEDS_COMPILER, Emulator

from jaxkernels import ffi
from jaxkernels.core import hardware
from jaxkernels.ffi import compiler, wgmma

#: Each instruction's sums are stored, so that none is dropped.
EVERY_SHAPE = """
#include "wgmma.cuh"
using namespace jaxkernels;

template <typename T, typename Sum, int kN, bool kLhsIsKMajor, bool kRhsIsKMajor>
__global__ __launch_bounds__(128) void products(Sum* out, u32 lhs, u32 rhs) {
  Sum acc[kN / 2];
  const u32 words[4] = {lhs, rhs, lhs + 1, rhs + 1};
  wgmma_fence();
  wgmma<T, kLhsIsKMajor, kRhsIsKMajor>(acc, lhs, rhs, 0);
  wgmma<T, kRhsIsKMajor>(acc, words, rhs, 1);
  wgmma_commit();
  wgmma_wait<0>();
  pin(acc);
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) out[i * 128 + threadIdx.x] = acc[i];
}
"""
_MAJORS = ["true, true", "false, true", "true, false", "false, false"]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("t", wgmma._TYPES, ids=lambda t: t.name)
def test_every_shape_compiles(t: wgmma._Type) -> None:
    majors = _MAJORS[:1] if t.num_bytes == 1 else _MAJORS
    kernels = [
        f"products<{t.name}, {t.accumulator}, {n}, {major}>" for n, major in zip(t.columns, itertools.cycle(majors))
    ]
    instances = [f"template __global__ void {kernel}({t.accumulator}*, u32, u32);\n" for kernel in kernels]
    compiled = ffi.compile_kernel(EVERY_SHAPE + "".join(instances), kernels[-1], strict=True)
    assert compiled.log.count("Compiling entry function") == len(kernels)
    assert "Performance Loss" not in compiled.log


@pytest.mark.parametrize("majors", _MAJORS[1:3])
def test_8_bit_operands_are_k_major(majors: str) -> None:
    with pytest.raises(ffi.CompileError, match="8-bit operands are K-major"):
        ffi.compile_kernel(EVERY_SHAPE, f"products<Int8, int, 64, {majors}>")


def test_one_shape_is_a_part_of_the_whole_text() -> None:
    one = wgmma.instructions("Float16", 64)
    struct = one[one.index("template <>") : one.rindex("}  // namespace")]
    assert struct.count("wgmma.mma_async") == 2
    assert struct in wgmma.instructions()


_FROM_REGISTERS = """
#include "wgmma.cuh"
using namespace jaxkernels;
extern "C" __global__ __launch_bounds__(128) void product(u32 a, u32 b, u32 c, u32 d, u32 rhs, float* out) {
  float acc[32];
  const u32 lhs[4] = {a, b, c, d};
  wgmma_fence();
  wgmma<BFloat16, false>(acc, lhs, rhs, 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin(acc);
#pragma unroll
  for (int i = 0; i < 32; ++i) out[i * 128 + threadIdx.x] = acc[i];
}
"""


def test_ptx_of_an_lhs_in_registers() -> None:
    """The instruction takes the four words in order, then the descriptor; the rhs is transposed."""
    ptx = ptx_of(_FROM_REGISTERS)
    (words,) = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n64k16\.f32\.bf16\.bf16 "
        r"\{(?:%f\d+, ){31}%f\d+\}, \{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}, rhs, accumulate, 1, 1, 1;",
        ptx,
    )
    parameters = dict(re.findall(r"ld\.param\.[ub]32 \t?(%r\d+), \[product_param_(\d)\];", ptx))
    assert [parameters[word] for word in words] == ["0", "1", "2", "3"]
    assert re.search(rf"mov\.b64 rhs, \{{%r\d+, {1 << 30 | 1024 >> 4}\}};", ptx)


def ptx_of(source: str) -> str:
    nvrtc = compiler._nvrtc()
    headers = compiler._with_own_headers(source, {})
    texts, names = ([x.encode() for x in xs] for xs in (headers.values(), headers))
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"product.cu", len(texts), texts, names)
    options = [b"--gpu-architecture=compute_90a", b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    return compiler._fetch(nvrtc, program, "PTX").decode()


# Values.

_DTYPES = {
    "BFloat16": jnp.bfloat16,
    "Float16": jnp.float16,
    "Float8E4M3": jnp.float8_e4m3fn,
    "Float8E5M2": jnp.float8_e5m2,
    "Int8": jnp.int8,
}
_NUM_BLOCKS = 3


def operand_map(name: str, x: Any, rows: int, is_k_major: bool) -> ffi.TensorMap:
    span = 128 // x.dtype.itemsize
    return ffi.TensorMap(name, box=(rows if is_k_major else span, span), dtype=_map_type(x), swizzle="128B")


def _map_type(x: Any) -> str:
    """A type of elements that tensor maps have; copies only move them."""
    return x.dtype.name if x.dtype.itemsize == 2 else "uint8"


def plan(
    lhs: Any, rhs: Any, identity: Any, *, type_name: str, n: int, lhs_is_k_major: bool, rhs_is_k_major: bool, form: str
) -> ffi.LaunchPlan:
    (t,) = (t for t in wgmma._TYPES if t.name == type_name)
    span = 128 // t.num_bytes
    width = n if rhs_is_k_major else -(-n // span) * span
    return ffi.LaunchPlan(
        results={"out": jax.ShapeDtypeStruct((64, n), jnp.float32 if t.is_float else jnp.int32)},
        parameters=[
            operand_map("lhs", lhs, 64, lhs_is_k_major),
            operand_map("rhs", rhs, n, rhs_is_k_major),
            operand_map("identity", identity, span, True),
            ffi.Pointer("lhs"),
            ffi.Pointer("out"),
        ],
        grid=(1,),
        block=(256,),
        smem_bytes=2 * 128 * (64 + width + span) + 1024,
        template=(
            f"jaxkernels::{t.name}", t.accumulator, n, _NUM_BLOCKS, lhs_is_k_major, rhs_is_k_major,
            f"jaxkernels::Form::{form}",
        ),
    )  # fmt: skip


_product = ffi.CudaKernel(
    pathlib.Path(__file__).parent / "cuda" / "product.cu", "jaxkernels::product", plan, strict=True
)


@pytest.fixture(
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("emulator", marks=[NEEDS_COMPILER, pytest.mark.sampled(one_in=4)]),
    ],
)
def product(request: pytest.FixtureRequest, libraries: pathlib.Path) -> Iterator[Callable[..., jax.Array]]:
    """The kernel on the GPU, or on the emulator."""
    if request.param == "gpu":
        yield _product
        return
    with Emulator(libraries, {"jaxkernels::product": DYNAMIC_SMEM}).installed():
        yield lambda *xs, **constants: _product._run(constants, hardware.lookup("NVIDIA H200"), *xs)[0]


def check(product: Callable[..., jax.Array], t: wgmma._Type, n: int, majors: str, form: str) -> None:
    """Small whole numbers, so that every order of the sums has the same bits."""
    k = _NUM_BLOCKS * 128 // t.num_bytes
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((64, k), (n, k)))
    as_operand = lambda x, is_k_major: jnp.asarray(x if is_k_major else x.T, _DTYPES[t.name])
    lhs_is_k_major, rhs_is_k_major = ("true" in major for major in majors.split(", "))
    out = product(
        as_operand(lhs, lhs_is_k_major), as_operand(rhs, rhs_is_k_major),
        jnp.eye(128 // t.num_bytes, dtype=_DTYPES[t.name]),
        type_name=t.name, n=n, lhs_is_k_major=lhs_is_k_major, rhs_is_k_major=rhs_is_k_major, form=form,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(out), lhs @ rhs.T)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("form", ["kShared", "kRegisters"])
@pytest.mark.parametrize("n", [8, 96])
@pytest.mark.parametrize("t", wgmma._TYPES, ids=lambda t: t.name)
def test_types(t: wgmma._Type, n: int, form: str, product: Callable[..., jax.Array]) -> None:
    check(product, t, n, "true, true", form)


@pytest.mark.parametrize("form", ["kShared", "kRegisters", "kChained"])
@pytest.mark.parametrize("majors", _MAJORS)
def test_majors(majors: str, form: str, product: Callable[..., jax.Array]) -> None:
    """With n of one and a half spans. From global memory, registers take an lhs with k contiguous."""
    if form == "kRegisters" and majors.startswith("false"):
        majors = majors.replace("false", "true", 1)
    check(product, wgmma._TYPES[0], 96, majors, form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["kShared", "kRegisters"])
@pytest.mark.parametrize("t", wgmma._TYPES, ids=lambda t: t.name)
def test_every_shape(t: wgmma._Type, form: str) -> None:
    for n in t.columns:
        check(_product, t, n, "true, true", form)
