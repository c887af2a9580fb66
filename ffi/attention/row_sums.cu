// sums = the sum of out * dout of each query and head, and zeros for dQ: what the backward kernel
// needs before it begins. Both are bound by memory, and one kernel for both is faster than two.
//
// A CTA has 64 queries of one head, so that neighbouring sums are stored together. A row of out is
// read by kLanes neighbouring threads, 8 columns (16 bytes) each:
//
//   threads   0 ... kLanes - 1 | kLanes ... 2 kLanes - 1 | ...
//   query     0                | 1                       | ...
//
// backward.py compiles this file with the macros that `Config` reads.

#include "units.cuh"

namespace jaxkernels {

struct Config {
  using Element = JK_ELEMENT;
  // Columns in memory, multiples of 8: of out, and of dQ.
  static constexpr int kValueDim = JK_VALUE_DIM;
  static constexpr int kHeadDim = JK_HEAD_DIM;
};

// The sizes of a launch.
struct Problem {
  int num_queries, num_heads;
  int row_length;  // Sums of a head: one for each query, then zeros.
  int num_blocks;  // Of 64 queries.
};

constexpr int kThreads = 256;
constexpr int kRows = 64;
constexpr int kUnits = Config::kValueDim / kUnit;
constexpr int kLanes = lanes_of(kUnits);
constexpr int kRowsAtOnce = kThreads / kLanes;
static_assert(Config::kValueDim % kUnit == 0 && Config::kHeadDim % kUnit == 0, "whole units");
static_assert(kUnits <= 32, "a warp reads a row at once");

__device__ __forceinline__ float dot(const Unit& a, const Unit& b) {
  using Element = Config::Element;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(Element::low(a.words[i]), Element::low(b.words[i]), sum);
    sum = fmaf(Element::high(a.words[i]), Element::high(b.words[i]), sum);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    attention_row_sums(const Unit* out, const Unit* dout, float* sums, float4* dq,
                       const __grid_constant__ Problem problem) {
  const int head_of_all = blockIdx.x / problem.num_blocks;
  const int block = blockIdx.x - head_of_all * problem.num_blocks;
  const int batch = head_of_all / problem.num_heads;
  const int head = head_of_all - batch * problem.num_heads;
  const int lane = threadIdx.x % kLanes;
#pragma unroll 4
  for (int row = threadIdx.x / kLanes; row < kRows; row += kRowsAtOnce) {
    const int query = block * kRows + row;
    const bool is_inside = query < problem.num_queries;
    const size_t number =
        (static_cast<size_t>(batch) * problem.num_queries + query) * problem.num_heads + head;
    float sum = 0.0f;
    if (is_inside && lane < kUnits) {
      sum = dot(out[number * kUnits + lane], dout[number * kUnits + lane]);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (lane == 0 && query < problem.row_length) {
      sums[static_cast<size_t>(head_of_all) * problem.row_length + query] = sum;
    }
    if (is_inside) {
#pragma unroll
      for (int i = lane; i < Config::kHeadDim / 4; i += kLanes) {
        dq[number * (Config::kHeadDim / 4) + i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
    }
  }
}

}  // namespace jaxkernels
