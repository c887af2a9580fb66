// out = alpha * x + beta * y: addresses, and numbers of 4, 8 and 8 bytes.

extern "C" __global__ void axpby(const float* x, const float* y, float* out, float alpha,
                                 double beta, long long n) {
  const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = alpha * x[i] + static_cast<float>(beta) * y[i];
}
