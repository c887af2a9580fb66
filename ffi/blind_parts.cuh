// What the kernels for queries that see no key (blind.cuh) have in common: attention/blind_means.cu
// and attention/blind_sums.cu. A CTA has a part of the queries of one head.
//
// blind.py compiles them with the macros that `Config` reads.

#pragma once

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
  int num_parts, part_rows;  // Parts of a head, and queries of a part.
};

constexpr int kThreads = 256;

using Totals = RowTotals<Config::Element, Config::kColumns, kThreads>;

// The part of this CTA.
struct Part {
  int head_of_all, batch, head;
  int begin, end;  // Its queries.
  Positions positions;

  __device__ __forceinline__ Part(const Problem& problem, const int* query_lengths,
                                  const int* key_lengths, const int* query_offset) {
    head_of_all = blockIdx.x / problem.num_parts;
    batch = head_of_all / problem.num_heads;
    head = head_of_all - batch * problem.num_heads;
    const int offset = Config::kQueryOffset ? *query_offset : 0;
    positions = {offset, problem.num_queries + offset, problem.num_keys};
    if constexpr (Config::kQueryLengths) {
      positions.query_end = min(max(query_lengths[batch], 0), positions.query_end);
    }
    if constexpr (Config::kKeyLengths) {
      positions.key_end = min(max(key_lengths[batch], 0), positions.key_end);
    }
    begin = (blockIdx.x - head_of_all * problem.num_parts) * problem.part_rows;
    end = min(min(begin + problem.part_rows, problem.num_queries), positions.query_end - offset);
  }
};

// Whether a query sees no key, by the logsumexps (batch, head, query).
__device__ __forceinline__ bool sees_nothing(const float* lse, const Part& part,
                                             const Problem& problem, int query) {
  return lse[static_cast<size_t>(part.head_of_all) * problem.num_queries + query] <=
         JK_MASKED_LOGIT / 2;
}

}  // namespace jaxkernels
