// Rung 3: the block stages tiles of A and B in shared memory. Each element is read from global
// memory once for a block instead of once for each thread that needs it.
//
//          BK            BN
//      +-------+     +-------+
//   BM |   A   |  BK |   B   |     One step of the loop: load both tiles, barrier, multiply,
//      +-------+     +-------+     barrier. Out-of-range elements are zeros.

struct Tiles {
  float a[BM][BK];
  float b[BK][BN];
};

__global__ __launch_bounds__(BM* BN) void sgemm_shared(const float* __restrict__ a,
                                                       const float* __restrict__ b,
                                                       float* __restrict__ c, int m, int n, int k,
                                                       float alpha, float beta) {
  static_assert(BM == BK && BN == BK, "each thread loads one element of each tile");
  __shared__ Tiles tiles;
  const int tiles_n = (n + BN - 1) / BN;
  const int i = threadIdx.x / BN, j = threadIdx.x % BN;
  const int row = blockIdx.x / tiles_n * BM + i;
  const int column = blockIdx.x % tiles_n * BN + j;

  float sum = 0;
  for (int k0 = 0; k0 < k; k0 += BK) {
    const bool a_inside = row < m && k0 + j < k;
    const bool b_inside = k0 + i < k && column < n;
    tiles.a[i][j] = a_inside ? a[static_cast<size_t>(row) * k + k0 + j] : 0;
    tiles.b[i][j] = b_inside ? b[static_cast<size_t>(k0 + i) * n + column] : 0;
    __syncthreads();  // The tiles are complete.
#pragma unroll
    for (int l = 0; l < BK; ++l) sum += tiles.a[i][l] * tiles.b[l][j];
    __syncthreads();  // All threads have read them.
  }

  if (row >= m || column >= n) return;
  float& out = c[static_cast<size_t>(row) * n + column];
  out = beta == 0 ? alpha * sum : alpha * sum + beta * out;
}
