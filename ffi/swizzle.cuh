// The swizzles of shared memory (PTX ISA, section "Swizzling modes"), for ordinary accesses to
// tiles that TMA or wgmma also accesses.
//
// A swizzle of span S (32, 64 or 128 bytes) permutes the 16-byte units of each span: the unit's
// number is xored with the number of the 128-byte line, modulo S / 16. Eight rows of a column then
// lie in different banks. With a span of 128 bytes:
//
//   row 0   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     the numbers are the units of the row
//   row 1   | 1 | 0 | 3 | 2 | 5 | 4 | 7 | 6 |
//   row 2   | 2 | 3 | 0 | 1 | 6 | 7 | 4 | 5 |
//   ...
//   row 7   | 7 | 6 | 5 | 4 | 3 | 2 | 1 | 0 |     the pattern repeats every 8 lines
//
// A tile's rows are one span wide. It begins on a multiple of 8 spans.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

// What the swizzle xors into the byte's number within row `row`.
template <int kSpanBytes>
constexpr __device__ u32 swizzle(u32 row) {
  static_assert(kSpanBytes == 32 || kSpanBytes == 64 || kSpanBytes == 128, "TMA's spans");
  return row * kSpanBytes / 128 % (kSpanBytes / 16) * 16;
}

// Where byte `byte` of row `row` lies in the tile.
template <int kSpanBytes>
constexpr __device__ __forceinline__ u32 swizzled(u32 row, u32 byte) {
  return row * kSpanBytes + (byte ^ swizzle<kSpanBytes>(row));
}

}  // namespace jaxkernels
