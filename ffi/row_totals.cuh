// The sums of the columns of rows in global memory, by a CTA of kThreads.
//
// A row is read by kLanes neighbouring threads, 8 columns (16 bytes) each; then the sums of the
// same columns are added up in a fixed order.

#pragma once

#include "units.cuh"

namespace jaxkernels {

template <typename Element, int kColumns, int kThreads>
struct RowTotals {
  static constexpr int kUnits = kColumns / kUnit;
  static constexpr int kLanes = lanes_of(kUnits);
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static_assert(kColumns % kUnit == 0 && kUnits <= 32, "a warp reads a row at once");

  float of[kRowsAtOnce][kLanes * kUnit];

  // This thread's unit of a row, and the first row that it reads.
  static __device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / kLanes; }

  // Rows begin to end - 1. `counts(row)` tells whether a row is added, `unit(row)` reads this
  // thread's part, and `value(row, x)` is what an element x counts as.
  template <typename Counts, typename Read, typename Value>
  __device__ __forceinline__ void add_up(int begin, int end, Counts counts, Read unit,
                                         Value value) {
    float total[kUnit] = {};
    if (lane() < kUnits) {
#pragma unroll 4
      for (int row = begin + first_row(); row < end; row += kRowsAtOnce) {
        if (!counts(row)) continue;
        const Unit read = unit(row);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
          const u32 word = read.words[i / 2];
          total[i] += value(row, i % 2 == 0 ? Element::low(word) : Element::high(word));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) of[first_row()][lane() * kUnit + i] = total[i];
    __syncthreads();
  }

  // The sum of a column, after `add_up`.
  __device__ __forceinline__ float column(int number) const {
    float sum = 0.0f;
#pragma unroll 8
    for (int row = 0; row < kRowsAtOnce; ++row) sum += of[row][number];
    return sum;
  }
};

}  // namespace jaxkernels
