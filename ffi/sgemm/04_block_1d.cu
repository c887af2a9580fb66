// Rung 4: a thread computes TM results, one below the other. It keeps one value of B in a register
// and uses it TM times: TM + 1 reads of shared memory for TM multiplications, instead of 2 TM.

constexpr int kThreads = BM / TM * BN;

struct Tiles {
  float a[BM][BK];
  float b[BK][BN];
};

__global__ __launch_bounds__(kThreads) void sgemm_block_1d(const float* __restrict__ a,
                                                           const float* __restrict__ b,
                                                           float* __restrict__ c, int m, int n,
                                                           int k, float alpha, float beta) {
  static_assert(BM * BK == kThreads && BK * BN == kThreads,
                "each thread loads one element of each tile");
  __shared__ Tiles tiles;
  const int tiles_n = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / tiles_n * BM, column0 = blockIdx.x % tiles_n * BN;
  const int a_row = threadIdx.x / BK, a_column = threadIdx.x % BK;
  const int b_row = threadIdx.x / BN, b_column = threadIdx.x % BN;
  const int row = threadIdx.x / BN * TM, column = threadIdx.x % BN;

  float sums[TM] = {};
  for (int k0 = 0; k0 < k; k0 += BK) {
    const bool a_inside = row0 + a_row < m && k0 + a_column < k;
    const bool b_inside = k0 + b_row < k && column0 + b_column < n;
    tiles.a[a_row][a_column] =
        a_inside ? a[static_cast<size_t>(row0 + a_row) * k + k0 + a_column] : 0;
    tiles.b[b_row][b_column] =
        b_inside ? b[static_cast<size_t>(k0 + b_row) * n + column0 + b_column] : 0;
    __syncthreads();
#pragma unroll
    for (int l = 0; l < BK; ++l) {
      const float b_value = tiles.b[l][column];
#pragma unroll
      for (int i = 0; i < TM; ++i) sums[i] += tiles.a[row + i][l] * b_value;
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < TM; ++i) {
    if (row0 + row + i >= m || column0 + column >= n) continue;
    float& out = c[static_cast<size_t>(row0 + row + i) * n + column0 + column];
    out = beta == 0 ? alpha * sums[i] : alpha * sums[i] + beta * out;
  }
}
