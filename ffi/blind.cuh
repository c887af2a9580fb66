// Queries that see no key. As in jax.nn, the output of such a query is the mean of all values of
// its key head. Its output's gradient, over the number of keys, is part of dV of each of these.
//
// Kernels of their own store these outputs (attention/blind_means.cu) and add up these gradients
// (attention/blind_sums.cu), in batch elements that may have such queries. They and the kernels
// that read the sums ask the same function.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

// The positions of a batch element's queries and keys. Those from an end on are padding, or none.
struct Positions {
  int first_query, query_end, key_end;
};

// Whether some query may see no key. Config has the masks; `left` and `right` are the band's sides.
template <typename Config>
__device__ __forceinline__ bool may_see_nothing(const Positions& positions, int left, int right) {
  if (Config::kSegments || positions.key_end <= 0) return true;
  if (Config::kHasRight && positions.first_query + right < 0) return true;
  return Config::kHasLeft && positions.query_end > positions.key_end + left;
}

// Sums of rows in parts, as attention/blind_sums.cu stores them: (batch, head, part, column). Its
// number of parts and of columns.
struct BlindSums {
  int num_parts, num_columns;

  // The sums of two columns, over all parts of so many heads. `first`: the first head of all.
  __device__ __forceinline__ void add_up(const float* sums, int first, int num_heads, int column,
                                         float (&total)[2]) const {
    total[0] = total[1] = 0.0f;
    if (column >= num_columns) return;
    const float* from = sums + static_cast<size_t>(first) * num_parts * num_columns + column;
#pragma unroll 1
    for (int i = 0; i < num_heads * num_parts; ++i, from += num_columns) {
      total[0] += from[0];
      total[1] += from[1];
    }
  }
};

}  // namespace jaxkernels
