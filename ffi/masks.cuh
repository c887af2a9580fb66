// Masks of a tile of logits in registers. wgmma gives a thread two rows, h = 0 and h = 1. Of each 8
// columns it has two, from 2 (lane % 4) on (wgmma.cuh).
//
// Columns count from the thread's first one: column 8 j + e of row h is values[4 j + 2 h + e].

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

// Sets the columns of row `h` before `begin` and from `end` on to `masked`. A bound that is not
// checked is not read.
template <bool kChecksBegin, bool kChecksEnd, int kCount>
__device__ __forceinline__ void hide_outside(float (&values)[kCount], int h, int begin, int end,
                                             float masked) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = i * 2 + e;
      const bool is_hidden = (kChecksEnd && column >= end) || (kChecksBegin && column < begin);
      if (is_hidden) values[i + 2 * h + e] = masked;
    }
  }
}

// Sets the pairs of different segments to `masked`. ids[first] is the segment of the thread's first
// column; ids has `size` elements. `rows` are the segments of the thread's rows.
template <int kCount>
__device__ __forceinline__ void hide_other_segments(float (&values)[kCount], const int (&rows)[2],
                                                    const int* ids, int first, int size,
                                                    float masked) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int id = ids[min(first + i * 2 + e, size - 1)];
      if (id != rows[0]) values[i + e] = masked;
      if (id != rows[1]) values[i + 2 + e] = masked;
    }
  }
}

}  // namespace jaxkernels
