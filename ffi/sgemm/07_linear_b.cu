// Rung 7: no bank conflicts in reads of B. In rung 6 neighbouring threads read B at a distance of
// TN = 8 floats: the 8 threads that a 16-byte read serves at once need two words of each of 16
// banks, and none of the other 16. Here a row of the tile is stored as a
// TN x (BN / TN) matrix, so that neighbouring threads read neighbouring words.
//
//   columns of B, TN = 8:   row j of the matrix: columns j, j + 8, j + 16, ...
//   thread t reads          rows 0 ... 7 at t: columns 8 t ... 8 t + 7
//
// The price: both the stores and the reads of B are of 4 bytes, TN instead of TN / 4.

#include "rows4.cuh"

using namespace jaxkernels;

constexpr int kThreads = (BM / TM) * (BN / TN);
constexpr int kGroups = BN / TN;  // Threads along n.

struct Tiles {
  float a[BK][BM];  // Transposed.
  float b[BK * TN][kGroups];
};

__global__ __launch_bounds__(kThreads) void sgemm_linear_b(const float* __restrict__ a,
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
      const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = i % BN + j;
        tiles.b[i / BN * TN + at % TN][at / TN] = values[j];
      }
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < BK; ++l) {
      float a_values[TM], b_values[TN];
#pragma unroll
      for (int i = 0; i < TM; i += 4) copy4(&a_values[i], &tiles.a[l][row + i]);
#pragma unroll
      for (int j = 0; j < TN; ++j) b_values[j] = tiles.b[l * TN + j][column / TN];
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
