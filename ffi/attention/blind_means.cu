// The output of queries that see no key (blind.cuh), after the forward pass: the mean of all values
// of their key head. Until then it is zero, and their logsumexp is the masked logit.
//
// A CTA whose queries all see a key ends.

#include "blind_parts.cuh"

namespace jaxkernels {

constexpr int kWarp = 32;

struct SharedStorage {
  Totals totals;
  bool found[kThreads / kWarp];  // By each warp.
};

__device__ __forceinline__ bool is_finite(float x) {
  return fabsf(x) < __uint_as_float(0x7f800000u);
}

__global__ void __launch_bounds__(kThreads, 4)
    attention_blind_means(const float* lse, const Unit* values, const int* query_lengths,
                          const int* key_lengths, const int* query_offset, Unit* out,
                          const __grid_constant__ Problem problem) {
  using Element = Config::Element;
  const Part part(problem, query_lengths, key_lengths, query_offset);
  if (!may_see_nothing<Config>(part.positions, problem.left, problem.right)) return;

  __shared__ SharedStorage shared;
  bool found = false;
#pragma unroll 4
  for (int query = part.begin + threadIdx.x; query < part.end; query += kThreads) {
    found = sees_nothing(lse, part, problem, query) || found;
  }
  found = __any_sync(0xffffffffu, found);
  if (threadIdx.x % kWarp == 0) shared.found[threadIdx.x / kWarp] = found;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) found = shared.found[warp] || found;
  if (!found) return;

  const int num_kv_heads = problem.num_heads / problem.group_size;
  values += (static_cast<size_t>(part.batch) * problem.num_keys * num_kv_heads +
             part.head / problem.group_size) *
            Totals::kUnits;
  Totals& totals = shared.totals;
  // Values that are padding count, unless they are not finite.
  totals.add_up(
      0, problem.num_keys, [](int) { return true; },
      [&](int row) {
        return values[static_cast<size_t>(row) * num_kv_heads * Totals::kUnits + Totals::lane()];
      },
      [&](int row, float x) { return row < part.positions.key_end || is_finite(x) ? x : 0.0f; });

  if (Totals::lane() >= Totals::kUnits) return;
  Unit mean;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = Totals::lane() * kUnit + 2 * i;
    mean.words[i] = Element::pack(totals.column(column) / problem.num_keys,
                                  totals.column(column + 1) / problem.num_keys);
  }
  out += (static_cast<size_t>(part.batch) * problem.num_queries * problem.num_heads + part.head) *
         Totals::kUnits;
  for (int query = part.begin + Totals::first_row(); query < part.end;
       query += Totals::kRowsAtOnce) {
    if (!sees_nothing(lse, part, problem, query)) continue;
    out[static_cast<size_t>(query) * problem.num_heads * Totals::kUnits + Totals::lane()] = mean;
  }
}

}  // namespace jaxkernels
