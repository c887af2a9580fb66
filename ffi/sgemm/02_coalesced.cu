// Rung 2: as rung 1, but the threads of a warp have neighbouring columns.
//
//   warp (32 threads)       A            B            C
//   thread t            row i        column t     row i, column t
//
// One load instruction of B touches 128 consecutive bytes, which are 4 sectors. All threads of the
// warp read the same element of A: one sector.

__global__ __launch_bounds__(BM* BN) void sgemm_coalesced(const float* __restrict__ a,
                                                          const float* __restrict__ b,
                                                          float* __restrict__ c, int m, int n,
                                                          int k, float alpha, float beta) {
  const int tiles_n = (n + BN - 1) / BN;
  const int row = blockIdx.x / tiles_n * BM + threadIdx.x / BN;
  const int column = blockIdx.x % tiles_n * BN + threadIdx.x % BN;
  if (row >= m || column >= n) return;

  const float* a_row = a + static_cast<size_t>(row) * k;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += a_row[i] * b[static_cast<size_t>(i) * n + column];

  float& out = c[static_cast<size_t>(row) * n + column];
  out = beta == 0 ? alpha * sum : alpha * sum + beta * out;
}
