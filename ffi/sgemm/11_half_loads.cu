// Rung 11: two buffers. One half of the warps loads the even tiles along k, the other half the odd
// ones; every warp multiplies all tiles. While one half loads, the other multiplies:
//
//   half 0   load 0 | multiply 0 | multiply 1 | load 2     | multiply 2 | ...
//   half 1          | load 1     | multiply 0 | multiply 1 | load 3     | ...
//
// The halves are at different places of the code, where __syncthreads is not allowed. Named
// barriers order them:
//   full    of each buffer: all threads wait, the loading half after its stores, the other before
//           its reads.
//   empty   of buffer 1: half 0 arrives after its reads, half 1 waits before its stores. Buffer 0
//           needs none: all threads have read it before they wait for buffer 1 to be full.

#include "ptx.cuh"
#include "rows4.cuh"

using namespace jaxkernels;

constexpr int WM = LANES_M * TM, WN = LANES_N * TN;
constexpr int kWarpsN = BN / WN;
constexpr int kThreads = 32 * (BM / WM) * kWarpsN;
constexpr int kHalf = kThreads / 2;
constexpr int kFull = 1;   // Barriers 1 and 2, for each buffer one.
constexpr int kEmpty = 3;  // Barrier 3, for buffer 1.

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

__global__ __launch_bounds__(kThreads) void sgemm_half_loads(const float* __restrict__ a,
                                                             const float* __restrict__ b,
                                                             float* __restrict__ c, int m, int n,
                                                             int k, float alpha, float beta) {
  static_assert(BM * BK % (4 * kHalf) == 0 && BK * BN % (4 * kHalf) == 0,
                "each thread loads equally many groups of four");
  static_assert(kHalf % 32 == 0, "a warp is in one half");
  __shared__ Buffers buffers;
  const int tiles_n = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / tiles_n * BM, column0 = blockIdx.x % tiles_n * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / kWarpsN * WM + lane / LANES_N * TM;
  const int column = warp % kWarpsN * WN + lane % LANES_N * 4;
  const int half = threadIdx.x / kHalf, thread = threadIdx.x % kHalf;
  const int num_tiles = (k + BK - 1) / BK;

  const auto load = [&](int tile) {
    Tiles& to = buffers.tiles[tile % 2];
#pragma unroll
    for (int first = 0; first < BM * BK; first += 4 * kHalf) {
      const int i = first + 4 * thread;
      const float4 v = load4<K_ALIGNED>(a, m, k, row0 + i / BK, tile * BK + i % BK);
      to.a[i % BK + 0][i / BK] = v.x;
      to.a[i % BK + 1][i / BK] = v.y;
      to.a[i % BK + 2][i / BK] = v.z;
      to.a[i % BK + 3][i / BK] = v.w;
    }
#pragma unroll
    for (int first = 0; first < BK * BN; first += 4 * kHalf) {
      const int i = first + 4 * thread;
      const float4 v = load4<N_ALIGNED>(b, k, n, tile * BK + i / BN, column0 + i % BN);
      *reinterpret_cast<float4*>(&to.b[i / BN][i % BN]) = v;
    }
  };

  float sums[TM][TN] = {};
  if (half == 0) load(0);
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int buffer = tile % 2;
    const bool has_next = tile + 1 < num_tiles;
    if (half == 1 && buffer == 0 && has_next) {
      if (tile > 0) named_barrier_sync<kThreads>(kEmpty);
      load(tile + 1);
    }
    named_barrier_sync<kThreads>(kFull + buffer);
    multiply(buffers.tiles[buffer], row, column, sums);
    if (half == 0 && buffer == 1 && has_next) {
      if (tile + 2 < num_tiles) named_barrier_arrive<kThreads>(kEmpty);
      load(tile + 1);
    }
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
