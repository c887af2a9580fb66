"""The wgmma instructions of wgmma.cuh: each shape compiles."""

from __future__ import annotations

import itertools

import pytest

from jaxkernels import ffi
from jaxkernels.ffi import wgmma

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
