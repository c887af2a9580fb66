// The sums, in parts, of dO of the queries of a head that see no key (blind.cuh): part of dV of all
// keys.
//
// Batch elements without such queries are left out: nothing of them is read or written.

#include "blind_parts.cuh"

namespace jaxkernels {

__global__ void __launch_bounds__(kThreads)
    attention_blind_sums(const float* lse, const Unit* rows, const int* query_lengths,
                         const int* key_lengths, const int* query_offset, float* sums,
                         const __grid_constant__ Problem problem) {
  const Part part(problem, query_lengths, key_lengths, query_offset);
  if (!may_see_nothing<Config>(part.positions, problem.left, problem.right)) return;

  const size_t first_row = static_cast<size_t>(part.batch) * problem.num_queries;
  __shared__ Totals totals;
  totals.add_up(
      part.begin, part.end, [&](int row) { return sees_nothing(lse, part, problem, row); },
      [&](int row) {
        return rows[((first_row + row) * problem.num_heads + part.head) * Totals::kUnits +
                    Totals::lane()];
      },
      [](int, float x) { return x; });
  for (int column = threadIdx.x; column < Config::kColumns; column += kThreads) {
    sums[static_cast<size_t>(blockIdx.x) * Config::kColumns + column] = totals.column(column);
  }
}

}  // namespace jaxkernels
