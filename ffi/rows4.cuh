// Four neighbouring floats of a row of a row-major matrix in global memory.
//
// kAligned: rows are multiples of 16 bytes and `column` is a multiple of 4. Then four floats are
// one 16-byte access, all inside the matrix or all outside. Otherwise they are up to four accesses.
// Elements outside the matrix are read as zeros and not written.

#pragma once

namespace jaxkernels {

template <bool kAligned>
__device__ __forceinline__ float4 load4(const float* x, int rows, int columns, int row,
                                        int column) {
  float4 v = make_float4(0, 0, 0, 0);
  if (row >= rows) return v;
  const float* from = x + static_cast<size_t>(row) * columns + column;
  if constexpr (kAligned) {
    if (column < columns) v = *reinterpret_cast<const float4*>(from);
  } else {
    if (column + 0 < columns) v.x = from[0];
    if (column + 1 < columns) v.y = from[1];
    if (column + 2 < columns) v.z = from[2];
    if (column + 3 < columns) v.w = from[3];
  }
  return v;
}

// alpha * sum + beta * old. `old` is not read if beta is 0: it may be uninitialised.
__device__ __forceinline__ float updated(float alpha, float sum, float beta, const float& old) {
  return beta == 0 ? alpha * sum : alpha * sum + beta * old;
}

// c = alpha * sums + beta * c for the four elements.
template <bool kAligned>
__device__ __forceinline__ void update4(float* c, int rows, int columns, int row, int column,
                                        float alpha, const float* sums, float beta) {
  if (row >= rows) return;
  float* out = c + static_cast<size_t>(row) * columns + column;
  if constexpr (kAligned) {
    if (column >= columns) return;
    float4 v = beta == 0 ? make_float4(0, 0, 0, 0) : *reinterpret_cast<const float4*>(out);
    v.x = updated(alpha, sums[0], beta, v.x);
    v.y = updated(alpha, sums[1], beta, v.y);
    v.z = updated(alpha, sums[2], beta, v.z);
    v.w = updated(alpha, sums[3], beta, v.w);
    *reinterpret_cast<float4*>(out) = v;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column + j < columns) out[j] = updated(alpha, sums[j], beta, out[j]);
    }
  }
}

// Copies four floats between registers and shared memory in one access.
__device__ __forceinline__ void copy4(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

}  // namespace jaxkernels
