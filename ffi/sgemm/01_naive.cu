// Rung 1: one thread computes one element of C and reads all that it needs from global memory.
//
//   warp (32 threads)       A            B            C
//   thread t            row t        column j     row t, column j
//
// The threads of a warp have neighbouring rows. One load instruction of A therefore touches 32
// rows, 4 k bytes apart, which are 32 memory sectors. One store of C does the same.

__global__ __launch_bounds__(BM* BN) void sgemm_naive(const float* __restrict__ a,
                                                      const float* __restrict__ b,
                                                      float* __restrict__ c, int m, int n, int k,
                                                      float alpha, float beta) {
  const int tiles_n = (n + BN - 1) / BN;
  const int row = blockIdx.x / tiles_n * BM + threadIdx.x % BM;
  const int column = blockIdx.x % tiles_n * BN + threadIdx.x / BM;
  if (row >= m || column >= n) return;

  const float* a_row = a + static_cast<size_t>(row) * k;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += a_row[i] * b[static_cast<size_t>(i) * n + column];

  float& out = c[static_cast<size_t>(row) * n + column];
  out = beta == 0 ? alpha * sum : alpha * sum + beta * out;
}
