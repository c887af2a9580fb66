// Rung 9: the tiles are found by search. BM, BN, BK, TM and TN are macros; `search_space` in
// ladder.py lists their legal combinations.
//
// A thread's results are groups of 4 x 4, spread over the block tile, so that neighbouring threads
// read neighbouring float4 of the tiles for every TM and TN:
//
//   columns of C, 16 threads along n, TN = 8:   | 0 0 0 0 1 1 1 1 ... 15 15 15 15 | 0 0 0 0 1 ...

#include "rows4.cuh"

using namespace jaxkernels;

constexpr int kThreads = (BM / TM) * (BN / TN);

struct Tiles {
  float a[BK][BM];  // Transposed.
  float b[BK][BN];
};

__global__ __launch_bounds__(kThreads) void sgemm_autotuned(const float* __restrict__ a,
                                                            const float* __restrict__ b,
                                                            float* __restrict__ c, int m, int n,
                                                            int k, float alpha, float beta) {
  static_assert(BM * BK % (4 * kThreads) == 0 && BK * BN % (4 * kThreads) == 0,
                "each thread loads equally many groups of four");
  __shared__ Tiles tiles;
  const int tiles_n = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / tiles_n * BM, column0 = blockIdx.x % tiles_n * BN;
  const int row = threadIdx.x / (BN / TN) * 4, column = threadIdx.x % (BN / TN) * 4;

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
      *reinterpret_cast<float4*>(&tiles.b[i / BN][i % BN]) = v;
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < BK; ++l) {
      float a_values[TM], b_values[TN];
#pragma unroll
      for (int i = 0; i < TM; i += 4) copy4(&a_values[i], &tiles.a[l][row + i * (BM / TM)]);
#pragma unroll
      for (int j = 0; j < TN; j += 4) copy4(&b_values[j], &tiles.b[l][column + j * (BN / TN)]);
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
      const int at_row = row0 + row + i / 4 * 4 * (BM / TM) + i % 4;
      const int at_column = column0 + column + j * (BN / TN);
      update4<N_ALIGNED>(c, m, n, at_row, at_column, alpha, &sums[i][j], beta);
    }
  }
}
