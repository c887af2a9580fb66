// sums = the sum of out * dout of each query and head, and zeros for dQ: what the backward kernel
// needs before it begins. Both are bound by memory, and one kernel for both is faster than two.
// Padding is not read, and its sums are zeros.
//
// If `kAddsMeans`, also the sum of dout over the block's queries that see no key. It is their part
// of the gradient of each value, times the number of keys.
//
// A CTA has 64 queries of one head, so that neighbouring sums are stored together. A row of out is
// read by kLanes neighbouring threads, 8 columns (16 bytes) each:
//
//   threads   0 ... kLanes - 1 | kLanes ... 2 kLanes - 1 | ...
//   query     0                | 1                       | ...
//
// gradients.py compiles this file with the macros that `Config` reads.

#include "ptx.cuh"

namespace jaxkernels {

struct Config {
  using Element = JK_ELEMENT;
  // Columns in memory, multiples of 8: of out, and of dQ.
  static constexpr int kValueDim = JK_VALUE_DIM;
  static constexpr int kHeadDim = JK_HEAD_DIM;
  // Columns of the sums of dout. Those behind kValueDim are zeros.
  static constexpr int kMeanColumns = JK_MEAN_COLUMNS;
  static constexpr bool kAddsMeans = JK_ADDS_MEANS;
  static constexpr bool kQueryLengths = JK_QUERY_LENGTHS;
  static constexpr bool kQueryOffset = JK_QUERY_OFFSET;
  // Whether queries may see no key although there are keys.
  static constexpr bool kHidesKeys = JK_HIDES_KEYS;
};

// The sizes of a launch.
struct Problem {
  int num_queries, num_heads;
  int row_length;  // Sums of a head: one for each query, then zeros.
  int num_blocks;  // Of 64 queries.
};

constexpr int kThreads = 256;
constexpr int kRows = 64;
constexpr int kUnit = 8;
constexpr int kUnits = Config::kValueDim / kUnit;
constexpr int kLanes = kUnits <= 1    ? 1
                       : kUnits <= 2  ? 2
                       : kUnits <= 4  ? 4
                       : kUnits <= 8  ? 8
                       : kUnits <= 16 ? 16
                                      : 32;
constexpr int kRowsAtOnce = kThreads / kLanes;
static_assert(Config::kValueDim % kUnit == 0 && Config::kHeadDim % kUnit == 0, "whole units");
static_assert(kUnits <= 32, "a warp reads a row at once");

// The logsumexp of a query that sees no key: the reference's masked logit.
constexpr float kMaskedLogit = JK_MASKED_LOGIT;

struct alignas(16) Unit {
  u32 words[4];
};

// Arrays that are read only if Config has the lengths or the means.
struct Arrays {
  const int* query_lengths;
  const int* key_lengths;
  const int* query_offset;
  const float* lse;  // (batch, head, query).
  float* means;      // (batch, head, block, kMeanColumns).
};

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

// Queries of the batch element from here on are padding.
__device__ __forceinline__ int query_end(const Problem& problem, const Arrays& arrays, int batch) {
  if constexpr (!Config::kQueryLengths) return problem.num_queries;
  const int offset = Config::kQueryOffset ? *arrays.query_offset : 0;
  return min(max(arrays.query_lengths[batch] - offset, 0), problem.num_queries);
}

// Sums dout over the queries of a block that see no key. A thread has a column.
__device__ __forceinline__ void sum_unseeing(const Unit* dout, const Problem& problem,
                                             const Arrays& arrays, int batch, int head_of_all,
                                             int block, int end) {
  const bool may_see_nothing = Config::kHidesKeys || arrays.key_lengths[batch] <= 0;
  const int head = head_of_all - batch * problem.num_heads;
  const int first = block * kRows, last = min(first + kRows, end);
  const float* lse = arrays.lse + static_cast<size_t>(head_of_all) * problem.num_queries;
  for (int column = threadIdx.x; column < Config::kMeanColumns; column += kThreads) {
    float sum = 0.0f;
    if (may_see_nothing && column < Config::kValueDim) {
      const size_t start =
          static_cast<size_t>(batch) * problem.num_queries * problem.num_heads + head;
      const u16* elements = reinterpret_cast<const u16*>(dout) + column;
#pragma unroll 4
      for (int query = first; query < last; ++query) {
        if (lse[query] > kMaskedLogit / 2) continue;
        const size_t number = start + static_cast<size_t>(query) * problem.num_heads;
        sum += Config::Element::low(elements[number * Config::kValueDim]);
      }
    }
    const size_t place = static_cast<size_t>(head_of_all) * problem.num_blocks + block;
    arrays.means[place * Config::kMeanColumns + column] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    attention_row_sums(const Unit* out, const Unit* dout, float* sums, float4* dq,
                       const __grid_constant__ Problem problem, const int* query_lengths,
                       const int* key_lengths, const int* query_offset, const float* lse,
                       float* means) {
  const Arrays arrays{query_lengths, key_lengths, query_offset, lse, means};
  const int head_of_all = blockIdx.x / problem.num_blocks;
  const int block = blockIdx.x - head_of_all * problem.num_blocks;
  const int batch = head_of_all / problem.num_heads;
  const int head = head_of_all - batch * problem.num_heads;
  const int lane = threadIdx.x % kLanes;
  const int end = query_end(problem, arrays, batch);
#pragma unroll 4
  for (int row = threadIdx.x / kLanes; row < kRows; row += kRowsAtOnce) {
    const int query = block * kRows + row;
    const bool is_inside = query < problem.num_queries;
    const size_t number =
        (static_cast<size_t>(batch) * problem.num_queries + query) * problem.num_heads + head;
    float sum = 0.0f;
    const bool is_read = Config::kQueryLengths ? query < end : is_inside;
    if (is_read && lane < kUnits) {
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
  if constexpr (Config::kAddsMeans) {
    sum_unseeing(dout, problem, arrays, batch, head_of_all, block, end);
  }
}

}  // namespace jaxkernels
