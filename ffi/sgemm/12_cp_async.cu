// Rung 12: two buffers filled by cp.async, which copies to shared memory without registers. All
// threads request the next tile, multiply the current one, then wait for the copies.
//
//   tile l + 1:   request ------------------------> wait, barrier | request l + 2
//   tile l:                 multiply
//
// One element of A is one copy of 4 bytes: only so can it be transposed on the way. Four elements
// of a row of B are one copy of 16 bytes, or four of 4 bytes in unaligned rows.

#include "ptx.cuh"
#include "rows4.cuh"

using namespace jaxkernels;

constexpr int WM = LANES_M * TM, WN = LANES_N * TN;
constexpr int kWarpsN = BN / WN;
constexpr int kThreads = 32 * (BM / WM) * kWarpsN;

struct Tiles {
  float a[BK][BM];  // Transposed.
  float b[BK][BN];
};
struct Buffers {
  Tiles tiles[2];
};

// sums += a tile of A times a tile of B, for the results of one thread.
__device__ __forceinline__ void multiply(const Tiles& tiles, int row, int column,
                                         float (&sums)[TM][TN]) {
#pragma unroll
  for (int l = 0; l < BK; ++l) {
    float a_values[TM], b_values[TN];
#pragma unroll
    for (int i = 0; i < TM; i += 4) copy4(&a_values[i], &tiles.a[l][row + i]);
#pragma unroll
    for (int j = 0; j < TN; j += 4) copy4(&b_values[j], &tiles.b[l][column + j * LANES_N]);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; ++j) sums[i][j] += a_values[i] * b_values[j];
    }
  }
}

__global__ __launch_bounds__(kThreads) void sgemm_cp_async(const float* __restrict__ a,
                                                           const float* __restrict__ b,
                                                           float* __restrict__ c, int m, int n,
                                                           int k, float alpha, float beta) {
  constexpr int kCopy = N_ALIGNED ? 4 : 1;  // Elements.
  static_assert(BM * BK % kThreads == 0 && BK * BN % (4 * kThreads) == 0,
                "each thread copies equally many elements");
  __shared__ Buffers buffers;
  const int tiles_n = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / tiles_n * BM, column0 = blockIdx.x % tiles_n * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / kWarpsN * WM + lane / LANES_N * TM;
  const int column = warp % kWarpsN * WN + lane % LANES_N * 4;

  const auto request = [&](int k0, Tiles& to) {
#pragma unroll
    for (int first = 0; first < BM * BK; first += kThreads) {
      const int i = first + threadIdx.x;
      const int at_row = row0 + i / BK, at_k = k0 + i % BK;
      const bool inside = at_row < m && at_k < k;
      const float* from = inside ? a + static_cast<size_t>(at_row) * k + at_k : a;
      cp_async<4>(tma::shared_address(&to.a[i % BK][i / BK]), from, inside);
    }
#pragma unroll
    for (int first = 0; first < BK * BN; first += kCopy * kThreads) {
      const int i = first + kCopy * threadIdx.x;
      const int at_k = k0 + i / BN, at_column = column0 + i % BN;
      const bool inside = at_k < k && at_column < n;
      const float* from = inside ? b + static_cast<size_t>(at_k) * n + at_column : b;
      cp_async<4 * kCopy>(tma::shared_address(&to.b[i / BN][i % BN]), from, inside);
    }
    cp_async_commit_group();
  };

  float sums[TM][TN] = {};
  Tiles* front = &buffers.tiles[0];
  Tiles* back = &buffers.tiles[1];
  request(0, *front);
#pragma unroll 1
  for (int k0 = 0; k0 < k; k0 += BK) {
    cp_async_wait_group<0>();
    __syncthreads();  // The front is complete. All threads have read the back.
    if (k0 + BK < k) request(k0 + BK, *back);
    multiply(*front, row, column, sums);
    Tiles* const read = front;
    front = back;
    back = read;
  }

#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      update4<N_ALIGNED>(c, m, n, row0 + row + i, column0 + column + j * LANES_N, alpha,
                         &sums[i][j], beta);
    }
  }
}
