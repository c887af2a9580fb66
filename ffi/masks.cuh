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

// The segments of two neighbouring columns.
struct alignas(8) SegmentPair {
  int ids[2];
};

// The length of a row of segments: whole blocks.
template <int kBlock>
__device__ __forceinline__ int whole_blocks(int count) {
  return (count + kBlock - 1) / kBlock * kBlock;
}

// Sets the pairs of different segments to `masked`. ids[0] is the segment of the thread's first
// column, and all columns of the block follow. `rows` are the segments of the thread's rows.
template <int kCount>
__device__ __forceinline__ void hide_other_segments(float (&values)[kCount], const int (&rows)[2],
                                                    const int* ids, float masked) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const SegmentPair pair = *reinterpret_cast<const SegmentPair*>(ids + i * 2);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (pair.ids[e] != rows[0]) values[i + e] = masked;
      if (pair.ids[e] != rows[1]) values[i + 2 + e] = masked;
    }
  }
}

}  // namespace jaxkernels
