// The output of queries that see no key (blind.cuh), after the forward pass: the mean of all values
// of their key head. Until then it is zero, and their logsumexp is the masked logit.
//
// A CTA has kQueries queries of a head. If none of them is such a query, it ends.
//
// blind.py compiles this file with the macros that `Config` reads.

#include "blind.cuh"
#include "row_totals.cuh"

namespace jaxkernels {

struct Config {
  using Element = JK_ELEMENT;
  static constexpr int kColumns = JK_COLUMNS;  // In memory, a multiple of 8.
  static constexpr bool kHasLeft = JK_HAS_LEFT;
  static constexpr bool kHasRight = JK_HAS_RIGHT;
  static constexpr bool kQueryLengths = JK_QUERY_LENGTHS;
  static constexpr bool kKeyLengths = JK_KEY_LENGTHS;
  // Whether queries that see no key may be anywhere.
  static constexpr bool kSegments = JK_SEGMENTS;
  static constexpr bool kQueryOffset = JK_QUERY_OFFSET;
};

// The sizes of a launch.
struct Problem {
  int num_queries, num_keys, num_heads, group_size;
  int left, right;
  int num_blocks;  // Of queries of a head.
};

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kQueries = JK_QUERIES;

using Totals = RowTotals<Config::Element, Config::kColumns, kThreads>;

struct SharedStorage {
  Totals totals;
  bool found[kThreads / kWarp];  // By each warp.
};

__device__ __forceinline__ bool is_finite(float x) {
  return fabsf(x) < __uint_as_float(0x7f800000u);
}

// `lse`: (batch, head, query).
__global__ void __launch_bounds__(kThreads, 4)
    attention_blind_means(const float* lse, const Unit* values, const int* query_lengths,
                          const int* key_lengths, const int* query_offset, Unit* out,
                          const __grid_constant__ Problem problem) {
  using Element = Config::Element;
  const int head_of_all = blockIdx.x / problem.num_blocks;
  const int block = blockIdx.x - head_of_all * problem.num_blocks;
  const int batch = head_of_all / problem.num_heads;
  const int head = head_of_all - batch * problem.num_heads;
  const int offset = Config::kQueryOffset ? *query_offset : 0;
  int key_end = problem.num_keys, query_end = problem.num_queries + offset;
  if constexpr (Config::kKeyLengths) key_end = min(max(key_lengths[batch], 0), key_end);
  if constexpr (Config::kQueryLengths) query_end = min(max(query_lengths[batch], 0), query_end);
  if (!may_see_nothing<Config>({offset, query_end, key_end}, problem.left, problem.right)) return;

  lse += static_cast<size_t>(head_of_all) * problem.num_queries;
  const int begin = block * kQueries;
  const int end = min(min(begin + kQueries, problem.num_queries), query_end - offset);
  const auto sees_nothing = [&](int query) { return lse[query] <= JK_MASKED_LOGIT / 2; };

  __shared__ SharedStorage shared;
  bool found = false;
#pragma unroll 4
  for (int query = begin + threadIdx.x; query < end; query += kThreads) {
    found = sees_nothing(query) || found;
  }
  found = __any_sync(0xffffffffu, found);
  if (threadIdx.x % kWarp == 0) shared.found[threadIdx.x / kWarp] = found;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) found = shared.found[warp] || found;
  if (!found) return;

  const int num_kv_heads = problem.num_heads / problem.group_size;
  values +=
      (static_cast<size_t>(batch) * problem.num_keys * num_kv_heads + head / problem.group_size) *
      Totals::kUnits;
  Totals& totals = shared.totals;
  // Values that are padding count, unless they are not finite.
  totals.add_up(
      0, problem.num_keys, [](int) { return true; },
      [&](int row) {
        return values[static_cast<size_t>(row) * num_kv_heads * Totals::kUnits + Totals::lane()];
      },
      [&](int row, float x) { return row < key_end || is_finite(x) ? x : 0.0f; });

  if (Totals::lane() >= Totals::kUnits) return;
  Unit mean;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = Totals::lane() * kUnit + 2 * i;
    mean.words[i] = Element::pack(totals.column(column) / problem.num_keys,
                                  totals.column(column + 1) / problem.num_keys);
  }
  out += (static_cast<size_t>(batch) * problem.num_queries * problem.num_heads + head) *
         Totals::kUnits;
  for (int query = begin + Totals::first_row(); query < end; query += Totals::kRowsAtOnce) {
    if (!sees_nothing(query)) continue;
    out[static_cast<size_t>(query) * problem.num_heads * Totals::kUnits + Totals::lane()] = mean;
  }
}

}  // namespace jaxkernels
