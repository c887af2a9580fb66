// The sums, in parts, of dO of the queries of a head that see no key (blind.cuh): part of dV of all
// keys.
//
// Batch elements without such queries are left out: nothing of them is read or written.
//
// A CTA adds up a part of the rows of one head.
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
  static constexpr bool kKeyLengths = JK_KEY_LENGTHS;
  static constexpr bool kSegments = JK_SEGMENTS;
  static constexpr bool kQueryOffset = JK_QUERY_OFFSET;
};

// The sizes of a launch.
struct Problem {
  int num_queries, num_keys, num_heads, left, right;
  int num_parts, part_rows;
};

constexpr int kThreads = 256;

using Totals = RowTotals<Config::Element, Config::kColumns, kThreads>;

// `lse`: (batch, head, query).
__global__ void __launch_bounds__(kThreads)
    attention_blind_sums(const Unit* rows, float* sums, const float* lse, const int* key_lengths,
                         const int* query_offset, const __grid_constant__ Problem problem) {
  const int head_of_all = blockIdx.x / problem.num_parts;
  const int part = blockIdx.x - head_of_all * problem.num_parts;
  const int batch = head_of_all / problem.num_heads;
  const int head = head_of_all - batch * problem.num_heads;
  const int offset = Config::kQueryOffset ? *query_offset : 0;
  int key_end = problem.num_keys;
  if constexpr (Config::kKeyLengths) key_end = min(max(key_lengths[batch], 0), key_end);
  if (!may_see_nothing<Config>({offset, problem.num_queries + offset, key_end}, problem.left,
                               problem.right)) {
    return;
  }

  const size_t first_of_all = static_cast<size_t>(head_of_all) * problem.num_queries;
  const size_t first_row = static_cast<size_t>(batch) * problem.num_queries;
  const int begin = part * problem.part_rows;
  const int end = min(begin + problem.part_rows, problem.num_queries);
  __shared__ Totals totals;
  totals.add_up(
      begin, end, [&](int row) { return lse[first_of_all + row] <= JK_MASKED_LOGIT / 2; },
      [&](int row) {
        return rows[((first_row + row) * problem.num_heads + head) * Totals::kUnits +
                    Totals::lane()];
      },
      [](int, float x) { return x; });
  for (int column = threadIdx.x; column < Config::kColumns; column += kThreads) {
    sums[static_cast<size_t>(blockIdx.x) * Config::kColumns + column] = totals.column(column);
  }
}

}  // namespace jaxkernels
