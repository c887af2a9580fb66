// Rung 8: padding instead of the order of rung 7. Each row of the tile of B has 5 columns more, so
// that rows begin in different banks.
//
// Rows then begin on no multiple of 16 bytes: stores and reads of B are of 4 bytes. All threads of
// a warp read the same row at one l, at a distance of TN = 8 floats. Padding does not change that:
// they need four words of each of 4 banks.

#include "rows4.cuh"

using namespace jaxkernels;

constexpr int kThreads = (BM / TM) * (BN / TN);
constexpr int kPadding = 5;  // Columns.

struct Tiles {
  float a[BK][BM];  // Transposed.
  float b[BK][BN + kPadding];
};

__global__ __launch_bounds__(kThreads) void sgemm_padded_b(const float* __restrict__ a,
                                                           const float* __restrict__ b,
                                                           float* __restrict__ c, int m, int n,
                                                           int k, float alpha, float beta) {
  static_assert(BM * BK % (4 * kThreads) == 0 && BK * BN % (4 * kThreads) == 0,
                "each thread loads equally many groups of four");
  __shared__ Tiles tiles;
  const int tiles_n = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / tiles_n * BM, column0 = blockIdx.x % tiles_n * BN;
  const int row = threadIdx.x / (BN / TN) * TM, column = threadIdx.x % (BN / TN) * TN;

  float sums[TM][TN] = {};
  for (int k0 = 0; k0 < k; k0 += BK) {
#pragma unroll
    for (int first = 0; first < BM * BK; first += 4 * kThreads) {
      const int i = first + 4 * threadIdx.x;
      const float4 v = load4<K_ALIGNED>(a, m, k, row0 + i / BK, k0 + i % BK);
      tiles.a[i % BK + 0][i / BK] = v.x;
      tiles.a[i % BK + 1][i / BK] = v.y;
      tiles.a[i % BK + 2][i / BK] = v.z;
      tiles.a[i % BK + 3][i / BK] = v.w;
    }
#pragma unroll
    for (int first = 0; first < BK * BN; first += 4 * kThreads) {
      const int i = first + 4 * threadIdx.x;
      const float4 v = load4<N_ALIGNED>(b, k, n, k0 + i / BN, column0 + i % BN);
      tiles.b[i / BN][i % BN + 0] = v.x;
      tiles.b[i / BN][i % BN + 1] = v.y;
      tiles.b[i / BN][i % BN + 2] = v.z;
      tiles.b[i / BN][i % BN + 3] = v.w;
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < BK; ++l) {
      float a_values[TM], b_values[TN];
#pragma unroll
      for (int i = 0; i < TM; i += 4) copy4(&a_values[i], &tiles.a[l][row + i]);
#pragma unroll
      for (int j = 0; j < TN; ++j) b_values[j] = tiles.b[l][column + j];
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) sums[i][j] += a_values[i] * b_values[j];
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      update4<N_ALIGNED>(c, m, n, row0 + row + i, column0 + column + j, alpha, &sums[i][j], beta);
    }
  }
}
