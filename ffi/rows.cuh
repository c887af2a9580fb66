// Pieces between staging buffers (staging.cuh) and a matrix whose rows are not whole 16-byte units,
// which TMA cannot address. A warp moves a piece row by row, 4 bytes with each lane.
//
//   const RowPiece<BFloat16, 128> rows(data, m, n, batch, row, column);
//   __syncwarp();
//   rows.store(buffer);            // or
//   rows.fetch(buffer, full);
//
// Rows and columns beyond the matrix are left out.

#pragma once

#include "swizzle.cuh"

namespace jaxkernels {

template <typename T, int kSpanBytes>
class RowPiece {
 public:
  // The piece at (batch, row, column) of the row-major matrices of m x n at `data`.
  __device__ __forceinline__ RowPiece(unsigned char* data, int m, int n, int batch, int row,
                                      int column)
      : num_rows_(min(kRows, m - row)),
        num_columns_(n),
        lane_(recomputed(threadIdx.x % 32)),
        column_(column + lane_ * kInWord),
        end_(lane_ < kLanes ? n : 0),
        row_bytes_(n * T::kBytes) {
    const long long first_row = static_cast<long long>(batch) * m + row;
    data_ = data + first_row * row_bytes_ + column_ * T::kBytes;
    begins_odd_ = first_row % 2 != 0;
  }

  // Stores the piece. All threads of the warp call it, after a __syncwarp() behind their writes to
  // the buffer.
  __device__ __forceinline__ void store(unsigned char* buffer) const {
    store_every_other<false>(buffer, begins_odd_ ? 1 : 0);
    if (T::kBytes == 2 && num_columns_ % 2 != 0) {
      store_every_other<true>(buffer, begins_odd_ ? 0 : 1);
    } else {
      store_every_other<false>(buffer, begins_odd_ ? 0 : 1);
    }
    __syncwarp();
  }

  // Fetches the piece; one arrival at `full` says that it is there.
  __device__ __forceinline__ void fetch(unsigned char* buffer, u64* full) const {
#pragma unroll 4
    for (int row = 0; row < num_rows_; ++row) {
      if (column_ >= end_) continue;
      const unsigned char* from = address(row);
      u32 word;
      if constexpr (T::kBytes == 4) {
        word = *reinterpret_cast<const u32*>(from);
      } else {
        const u16* pair = reinterpret_cast<const u16*>(from);
        word = column_ + 1 < end_ ? pair[0] | static_cast<u32>(pair[1]) << 16 : pair[0];
      }
      store_shared(staged(buffer, row), word);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) tma::mbarrier_arrive(full);
    __syncwarp();
  }

 private:
  static constexpr int kRows = 16;
  static constexpr u32 kLanes = kSpanBytes / 4;
  static constexpr int kInWord = 4 / T::kBytes;

  __device__ __forceinline__ unsigned char* address(int row) const {
    return data_ + static_cast<u64>(row) * row_bytes_;
  }
  // Where this lane's 4 bytes of a row lie in the buffer.
  __device__ __forceinline__ u32 staged(unsigned char* buffer, int row) const {
    return tma::shared_address(buffer) + swizzled<kSpanBytes>(row, lane_ % kLanes * 4);
  }

  // Stores every other row, from row 0 or 1 (`first`) on. Four rows are loaded before the first is
  // stored, so that their latencies overlap. `kIsShifted`: the rows of 16-bit values begin in the
  // middle of a 4-byte word. Each lane then stores its second value and its neighbour's first.
  template <bool kIsShifted>
  __device__ __forceinline__ void store_every_other(unsigned char* buffer, int first) const {
    constexpr int kAtOnce = 4;
    const bool has_word =
        kIsShifted ? lane_ + 1 < kLanes && column_ + 3 <= end_ : column_ + kInWord <= end_;
    const bool has_first = column_ < end_ && (kIsShifted ? lane_ == 0 : !has_word);
    const bool has_second = kIsShifted && !has_word && column_ + 2 <= end_;
    static_assert(2 * kAtOnce % 8 == 0, "a period of the swizzle");
    const u32 first_staged = staged(buffer, first);
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += 2 * kAtOnce) {
      u32 words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // `first` has no bit in common with what is added.
        words[i] =
            load_shared((first_staged ^ swizzle<kSpanBytes>(2 * i)) + (begin + 2 * i) * kSpanBytes);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = begin + 2 * i + first;
        unsigned char* to = address(row);
        const u32 next = kIsShifted ? __shfl_down_sync(0xffffffffu, words[i], 1) : 0;
        const bool is_inside = row < num_rows_;
        if (has_word && is_inside) {
          *reinterpret_cast<u32*>(to + (kIsShifted ? 2 : 0)) =
              kIsShifted ? __funnelshift_r(words[i], next, 16) : words[i];
        }
        if (has_first && is_inside) *reinterpret_cast<u16*>(to) = words[i];
        if (has_second && is_inside) *reinterpret_cast<u16*>(to + 2) = words[i] >> 16;
      }
    }
  }

  int num_rows_;     // Inside the matrix.
  int num_columns_;  // The matrix has so many.
  u32 lane_;
  int column_,
      end_;  // This lane's first column, and the end of the columns. Lanes beyond the piece: end 0.
  u32 row_bytes_;        // The bytes of a row of the matrix.
  unsigned char* data_;  // This lane's columns of the first row.
  bool begins_odd_;      // Whether the first row's number in the whole array is odd.
};

}  // namespace jaxkernels
