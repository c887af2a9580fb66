"""The wgmma instructions as C++ functions: text for a header, as every shape needs an operand list of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

__all__ = ["header"]

#: PTX names of the operand types, by those that ptx.cuh gives them.
_TYPES = {"BFloat16": "bf16", "Float16": "f16"}


@functools.cache
def header(columns: Sequence[int]) -> str:
    """Text of "wgmma.cuh": `wgmma<T, n, lhs_is_transposed, rhs_is_transposed>(acc, lhs, rhs, accumulate)` for each n.

    One call multiplies a 64 x 16 by a 16 x n matrix of 16-bit floats, both in shared memory, into float32 registers
    (PTX ISA, wgmma.mma_async). Transposed means that the contracted dimension is not the contiguous one. Matrices are
    given by the lower halves of their descriptors (ptx.cuh): additions to them are then of 32 bits.

    Args:
      columns: the values of n, multiples of 8 from 8 to 256.
    """
    functions = "".join(_function(name, ptx, n) for name, ptx in _TYPES.items() for n in columns)
    return f"#pragma once\n\nnamespace jaxkernels {{\n\n{_DECLARATION}{functions}}}  // namespace jaxkernels\n"


_DECLARATION = """template <typename T, int kN, bool kLhsIsTransposed, bool kRhsIsTransposed>
struct Wgmma;

"""


def _function(name: str, ptx: str, n: int) -> str:
    count = n // 2  # Accumulators of one thread: 64 n / 128.
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    lhs, rhs, accumulate, lhs_trans, rhs_trans, high = range(count, count + 6)
    return f"""template <bool kLhsIsTransposed, bool kRhsIsTransposed>
struct Wgmma<{name}, {n}, kLhsIsTransposed, kRhsIsTransposed> {{
  // acc = lhs * rhs + (accumulate ? acc : 0)
  static __device__ __forceinline__ void run(float (&acc)[{count}], u32 lhs, u32 rhs, int accumulate) {{
    asm volatile(
        "{{\\n"
        ".reg .pred accumulate;\\n"
        ".reg .b64 lhs, rhs;\\n"
        "setp.ne.b32 accumulate, %{accumulate}, 0;\\n"
        "mov.b64 lhs, {{%{lhs}, %{high}}};\\n"
        "mov.b64 rhs, {{%{rhs}, %{high}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} {{{accumulators}}}, "
        "lhs, rhs, accumulate, 1, 1, %{lhs_trans}, %{rhs_trans};\\n"
        "}}\\n"
        : {outputs}
        : "r"(lhs), "r"(rhs), "r"(accumulate), "n"(int(kLhsIsTransposed)), "n"(int(kRhsIsTransposed)),
          "n"(kDescriptorHigh));
  }}
}};

"""
