// Results between registers and memory, by way of staging buffers in shared memory.
//
// A warp stages a piece of 16 rows by one swizzle span (64 or 128 bytes) at a time, in a buffer of
// its own, 16 columns at a time. It needs no barrier with other warps:
//
//   using Buffer = StagingBuffer<BFloat16, 128>;
//   for (int c = 0; c < Buffer::kColumns / 16; ++c) Buffer::write(values[c], buffer, c);
//   store_piece(&map, 0, buffer, {column, row, batch});
//   ...
//   cp_async_bulk_wait_group_read<0>();    // lane 0, before the buffer is written again
//   __syncwarp();
//
// The 16 columns of a step lie in a warp's registers as wgmma leaves sums (wgmma.cuh): a thread has
// columns 2q, 2q + 1, 2q + 8 and 2q + 9 (q = lane % 4) of rows lane / 4 and lane / 4 + 8, in
// values[4 (column / 8) + 2 (row / 8) + odd].
//
// Every code block for one thread is followed by __syncwarp(), even before another __syncwarp().
// ptxas (13.0) joins two such code blocks, and has been seen to let the other threads run ahead
// from there on, past barriers that it then dropped (docs/cuda-gemm.md, "A thread that ran ahead").

#pragma once

#include "swizzle.cuh"

namespace jaxkernels {

constexpr int kPieceM = 16;
constexpr int kStagingBytes = kPieceM * 128;

template <typename T, int kSpanBytes>
struct StagingBuffer {
  static constexpr int kColumns = kSpanBytes / T::kBytes;
  static constexpr int kPieceBytes = kPieceM * kSpanBytes;
  static_assert(T::kBytes == 2 || T::kBytes == 4, "16 columns are one or two 32-byte units");

  // Columns 16 c to 16 c + 15 of the buffer = values.
  static __device__ __forceinline__ void write(const float (&values)[8], unsigned char* buffer,
                                               int c) {
    if constexpr (T::kBytes == 2) {
      u32 packed[4];
      pack(values, packed);
      write_packed(packed, buffer, c);
    } else {
#pragma unroll
      for (int r = 0; r < 8; r += 2) {
        store_shared(pair(buffer, c, r), values[r], values[r + 1]);
      }
    }
  }

  // Columns 16 c to 16 c + 15 of the buffer.
  static __device__ __forceinline__ void read(float (&values)[8], unsigned char* buffer, int c) {
    if constexpr (T::kBytes == 2) {
      u32 packed[4];
      read_packed(packed, buffer, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i * 2] = T::low(packed[i]);
        values[i * 2 + 1] = T::high(packed[i]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 8; r += 2) {
        load_shared(pair(buffer, c, r), values[r], values[r + 1]);
      }
    }
  }

  // `write` in two steps, for 16-bit values that wait in registers, and its inverse.
  static __device__ __forceinline__ void pack(const float (&values)[8], u32 (&packed)[4]) {
    if constexpr (T::kBytes == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = T::pack(values[i * 2], values[i * 2 + 1]);
    }
  }
  static __device__ __forceinline__ void write_packed(const u32 (&packed)[4], unsigned char* buffer,
                                                      int c) {
    stmatrix_x4(matrix_row(buffer, c), packed[0], packed[1], packed[2], packed[3]);
  }
  static __device__ __forceinline__ void read_packed(u32 (&packed)[4], unsigned char* buffer,
                                                     int c) {
    ldmatrix_x4(matrix_row(buffer, c), packed[0], packed[1], packed[2], packed[3]);
  }

 private:
  // Where this thread's row of stmatrix begins, for 16 columns of 16 bits.
  static __device__ __forceinline__ u32 matrix_row(unsigned char* buffer, int c) {
    const u32 lane = threadIdx.x % 32;
    return tma::shared_address(buffer) + swizzled<kSpanBytes>(lane % 16, c * 32 + lane / 16 * 16);
  }

  // Where values[r] and values[r + 1] lie, for 16 columns of 32 bits.
  static __device__ __forceinline__ u32 pair(unsigned char* buffer, int c, int r) {
    const u32 lane = threadIdx.x % 32;
    return tma::shared_address(buffer) +
           swizzled<kSpanBytes>(lane / 4 + r % 4 * 4, c * 64 + r / 4 * 32 + lane % 4 * 8);
  }
};

// Stores a staged piece to the box at `to` of tensor map maps[map_idx], or adds it to what is
// there. All threads of the warp call it. Lane 0 may wait for the store, which is a bulk group of
// its own. (The map is indexed behind the fence: indexed before, it takes registers across it.)
template <bool kAdds = false, int kRank>
__device__ __forceinline__ void store_piece(const tma::TensorMap* maps, int map_idx,
                                            const unsigned char* buffer, const int (&to)[kRank]) {
  tma::fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    if constexpr (kAdds) {
      tma::cp_reduce_async_bulk_tensor<tma::Reduction::kAdd>(&maps[map_idx], buffer, to);
    } else {
      tma::cp_async_bulk_tensor_store(&maps[map_idx], buffer, to);
    }
    tma::cp_async_bulk_commit_group();
  }
  __syncwarp();
}

// Fetches the box at `from`, of `bytes` bytes, into a buffer. Lane 0 first waits until its stores
// have read their buffers. `full` completes a phase when the bytes have arrived.
template <int kRank>
__device__ __forceinline__ void fetch_piece(const tma::TensorMap* maps, int map_idx,
                                            unsigned char* buffer, u64* full, int bytes,
                                            const int (&from)[kRank]) {
  if (threadIdx.x % 32 == 0) {
    tma::cp_async_bulk_wait_group_read<0>();
    tma::mbarrier_arrive_expect_tx(full, bytes);
    tma::cp_async_bulk_tensor_load(buffer, &maps[map_idx], full, from);
  }
  __syncwarp();
}

}  // namespace jaxkernels
