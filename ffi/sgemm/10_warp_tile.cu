// Rung 10: a tile for each warp between the block's and the thread's. A warp computes WM x WN, its
// lanes as LANES_M x LANES_N, and a thread TM x TN in groups of 4 columns:
//
//   block tile BM x BN            warp tile WM x WN = (LANES_M TM) x (LANES_N TN)
//   +------+------+               lane:  0 1 2 3 | 0 1 2 3 | ...   4 columns each
//   | warp | warp |                      4 5 6 7 | 4 5 6 7 | ...   TM rows each
//   +------+------+                      ...
//   | warp | warp |
//   +------+------+               A warp reads only WM + WN values for each l.

#include "rows4.cuh"

using namespace jaxkernels;

constexpr int WM = LANES_M * TM, WN = LANES_N * TN;
constexpr int kWarpsN = BN / WN;
constexpr int kThreads = 32 * (BM / WM) * kWarpsN;

struct Tiles {
  float a[BK][BM];  // Transposed.
  float b[BK][BN];
};

__global__ __launch_bounds__(kThreads) void sgemm_warp_tile(const float* __restrict__ a,
                                                            const float* __restrict__ b,
                                                            float* __restrict__ c, int m, int n,
                                                            int k, float alpha, float beta) {
  static_assert(LANES_M * LANES_N == 32 && BM % WM == 0 && BN % WN == 0, "warps tile the block");
  static_assert(BM * BK % (4 * kThreads) == 0 && BK * BN % (4 * kThreads) == 0,
                "each thread loads equally many groups of four");
  __shared__ Tiles tiles;
  const int tiles_n = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / tiles_n * BM, column0 = blockIdx.x % tiles_n * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / kWarpsN * WM + lane / LANES_N * TM;
  const int column = warp % kWarpsN * WN + lane % LANES_N * 4;

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
      for (int i = 0; i < TM; i += 4) copy4(&a_values[i], &tiles.a[l][row + i]);
#pragma unroll
      for (int j = 0; j < TN; j += 4) copy4(&b_values[j], &tiles.b[l][column + j * LANES_N]);
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
      update4<N_ALIGNED>(c, m, n, row0 + row + i, column0 + column + j * LANES_N, alpha,
                         &sums[i][j], beta);
    }
  }
}
