// Rung 5: a thread computes TM x TN results as an outer product in registers. For each l it reads
// TM values of A and TN values of B from shared memory for TM * TN multiplications.
//
//             b: TN registers
//           +---------+
//   a: TM   | sums    |      8 x 8: 16 reads for 64 multiplications; rung 4: 9 for 8.
//           +---------+
//
// The tiles have more elements than the block has threads: each thread loads every kThreads-th.

constexpr int kThreads = (BM / TM) * (BN / TN);

struct Tiles {
  float a[BM][BK];
  float b[BK][BN];
};

__global__ __launch_bounds__(kThreads) void sgemm_block_2d(const float* __restrict__ a,
                                                           const float* __restrict__ b,
                                                           float* __restrict__ c, int m, int n,
                                                           int k, float alpha, float beta) {
  static_assert(BM * BK % kThreads == 0 && BK * BN % kThreads == 0,
                "each thread loads equally many elements");
  __shared__ Tiles tiles;
  const int tiles_n = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / tiles_n * BM, column0 = blockIdx.x % tiles_n * BN;
  const int row = threadIdx.x / (BN / TN) * TM, column = threadIdx.x % (BN / TN) * TN;

  float sums[TM][TN] = {};
  for (int k0 = 0; k0 < k; k0 += BK) {
#pragma unroll
    for (int first = 0; first < BM * BK; first += kThreads) {
      const int i = first + threadIdx.x;
      const int at_row = row0 + i / BK, at_k = k0 + i % BK;
      const bool inside = at_row < m && at_k < k;
      tiles.a[i / BK][i % BK] = inside ? a[static_cast<size_t>(at_row) * k + at_k] : 0;
    }
#pragma unroll
    for (int first = 0; first < BK * BN; first += kThreads) {
      const int i = first + threadIdx.x;
      const int at_k = k0 + i / BN, at_column = column0 + i % BN;
      const bool inside = at_k < k && at_column < n;
      tiles.b[i / BN][i % BN] = inside ? b[static_cast<size_t>(at_k) * n + at_column] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < BK; ++l) {
      float a_values[TM], b_values[TN];
#pragma unroll
      for (int i = 0; i < TM; ++i) a_values[i] = tiles.a[row + i][l];
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
    for (int j = 0; j < TN; ++j) {
      if (row0 + row + i >= m || column0 + column + j >= n) continue;
      float& out = c[static_cast<size_t>(row0 + row + i) * n + column0 + column + j];
      out = beta == 0 ? alpha * sums[i][j] : alpha * sums[i][j] + beta * out;
    }
  }
}
