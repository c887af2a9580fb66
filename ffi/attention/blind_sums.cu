// What queries that see no key (blind.cuh) need of all rows of a head, as sums in parts:
//
//   forward    the sum of the values of each key head: their output is its mean
//   backward   the sum of dO of these queries, of each query head: part of dV of all keys
//
// Batch elements without such queries are left out: nothing of them is read or written.
//
// A CTA adds up a part of the rows of one head. A row is read by kLanes neighbouring threads, 8
// columns (16 bytes) each; then the sums of the same columns are added up in a fixed order.
//
// blind.py compiles this file with the macros that `Config` reads.

#include "blind.cuh"
#include "units.cuh"

namespace jaxkernels {

struct Config {
  using Element = JK_ELEMENT;
  // Whether rows are dO, not values.
  static constexpr bool kIsBackward = JK_IS_BACKWARD;
  static constexpr int kColumns = JK_COLUMNS;  // In memory, a multiple of 8.
  static constexpr bool kHasLeft = JK_HAS_LEFT;
  static constexpr bool kHasRight = JK_HAS_RIGHT;
  static constexpr bool kKeyLengths = JK_KEY_LENGTHS;
  static constexpr bool kSegments = JK_SEGMENTS;
  static constexpr bool kQueryOffset = JK_QUERY_OFFSET;
};

// The sizes of a launch.
struct Problem {
  int num_queries, num_keys, left, right;
  int num_rows, num_heads;  // A batch element has so many.
  int num_parts, part_rows;
};

constexpr int kThreads = 256;
constexpr int kUnits = Config::kColumns / kUnit;
constexpr int kLanes = lanes_of(kUnits);
constexpr int kRowsAtOnce = kThreads / kLanes;
static_assert(Config::kColumns % kUnit == 0 && kUnits <= 32, "a warp reads a row at once");

// Of each row that is read at once.
struct Totals {
  float of[kRowsAtOnce][kLanes * kUnit];
};

__device__ __forceinline__ bool is_finite(float x) {
  return fabsf(x) < __uint_as_float(0x7f800000u);
}

// `lse`: (batch, head, query), in the backward pass.
__global__ void __launch_bounds__(kThreads)
    attention_blind_sums(const Unit* rows, float* sums, const float* lse, const int* key_lengths,
                         const int* query_offset, const __grid_constant__ Problem problem) {
  using Element = Config::Element;
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

  const int lane = threadIdx.x % kLanes, first_row = threadIdx.x / kLanes;
  const int begin = part * problem.part_rows;
  const int end = min(begin + problem.part_rows, problem.num_rows);
  float total[kUnit] = {};
  if (lane < kUnits) {
#pragma unroll 4
    for (int row = begin + first_row; row < end; row += kRowsAtOnce) {
      if constexpr (Config::kIsBackward) {
        const size_t number = static_cast<size_t>(head_of_all) * problem.num_rows + row;
        if (lse[number] > JK_MASKED_LOGIT / 2) continue;
      }
      const size_t number = static_cast<size_t>(batch) * problem.num_rows + row;
      const Unit unit = rows[(number * problem.num_heads + head) * kUnits + lane];
      // Values that are padding count, unless they are not finite.
      const bool is_padding = !Config::kIsBackward && row >= key_end;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        const u32 word = unit.words[i / 2];
        const float x = i % 2 == 0 ? Element::low(word) : Element::high(word);
        if (!is_padding || is_finite(x)) total[i] += x;
      }
    }
  }
  __shared__ Totals totals;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) totals.of[first_row][lane * kUnit + i] = total[i];
  __syncthreads();
  for (int column = threadIdx.x; column < Config::kColumns; column += kThreads) {
    float sum = 0.0f;
#pragma unroll 8
    for (int row = 0; row < kRowsAtOnce; ++row) sum += totals.of[row][column];
    sums[static_cast<size_t>(blockIdx.x) * Config::kColumns + column] = sum;
  }
}

}  // namespace jaxkernels
