// The arithmetic of attention's backward pass on tiles in registers, and turns of adding to dQ.
//
// Tiles have keys in rows and queries in columns. With S = K Q^T and dP = V dO^T:
//
//   P  = exp2(factor S - lse)       lse in base 2, one for each column
//   dS = slope (dP - delta)         the slope is P; with a soft cap, P (1 - tanh^2)
//
// A thread has element (key 8 h + lane / 4, query 8 j + 2 (lane % 4) + e) of a warp's 16 keys in
// s[4 j + 2 h + e] (wgmma.cuh). P and dS are rounded to 16 bits and packed as left operands: 16
// queries are four words.

#pragma once

#include "gradient_items.cuh"
#include "masks.cuh"
#include "wgmma.cuh"

namespace jaxkernels {

// The number of this warp in its warpgroup. It is computed where it is needed, so that it takes no
// register meanwhile.
__device__ __forceinline__ int warp_of_group() { return recomputed(threadIdx.x) % 128 / 32; }

// The part of an item that masks read.
struct Edges {
  int first_key, key_end;  // The first key; padding begins at key_end.
  int batch;
};

// The index of this thread's first (h = 0) or second key. A tile begins at first_key.
__device__ __forceinline__ int key_of(int first_key, int h) {
  return first_key + warp_of_group() * 16 + static_cast<int>(threadIdx.x % 32 / 4) + 8 * h;
}

// The segments of this thread's two keys.
__device__ __forceinline__ void load_key_segments(const Problem& problem, const Arrays& arrays,
                                                  int batch, int first_key, int (&segments)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = min(key_of(first_key, h), problem.num_keys - 1);
    segments[h] = arrays.key_segments[batch * problem.num_keys + key];
  }
}

template <typename Config, int kLogits>
__device__ __forceinline__ void mask_by_index(float (&s)[kLogits], const Problem& problem,
                                              const Edges& edges, int offset, int block,
                                              float masked) {
  const int position = block * Config::kBlockQ + offset + threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = key_of(edges.first_key, h);
    // The key is seen from columns `begin` to `end` - 1.
    int begin = Config::kHasRight ? key - problem.right - position : 0;
    if (key >= edges.key_end) begin = 2 * Config::kBlockQ;
    const int end = Config::kHasLeft ? key + problem.left + 1 - position : 0;
    hide_outside<true, Config::kHasLeft>(s, h, begin, end, masked);
  }
}

// Applies the soft cap (S becomes tanh, to be multiplied by the cap) and the masks of a step.
template <typename Config, int kLogits>
__device__ __forceinline__ void change_and_mask(float (&s)[kLogits], const Problem& problem,
                                                const Arrays& arrays, const Edges& edges,
                                                const int (&segments)[2], int offset,
                                                const Step& step) {
  if constexpr (Config::kSoftCap) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) s[i] = tanh_by_exp2(s[i] * problem.factor);
  }
  const float masked = __uint_as_float(0xff800000u);
  if (step.hides_by_index) {
    mask_by_index<Config>(s, problem, edges, offset, step.block, masked);
  }
  if (Config::kSegments && step.hides_by_segment) {
    const int first_query = step.block * Config::kBlockQ + threadIdx.x % 4 * 2;
    const int row = edges.batch * whole_blocks<Config::kBlockQ>(problem.num_queries);
    hide_other_segments(s, segments, arrays.query_segments + row + first_query, masked);
  }
}

// Part `part` of kParts of P in 16 bits, from S. With a soft cap, the slopes too. `lse`: the
// address of the thread's first one in shared memory.
template <typename Config, int kParts, int kLogits, int kSteps>
__device__ __forceinline__ void compute_weights(float (&s)[kLogits], u32 (&p)[kSteps][4],
                                                u32 (&slope_words)[kSteps][4],
                                                const Problem& problem, u32 lse, int part) {
  using Element = typename Config::Element;
  const float factor = Config::kSoftCap ? problem.cap : problem.factor;
#pragma unroll
  for (int j = 0; j < kLogits / kParts; j += 4) {
    const int i = part * (kLogits / kParts) + j;
    float sums[2];
    load_shared(lse + i * 8, sums[0], sums[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float slopes[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[i + 2 * h + e];
        const float capped = x;
        x = exp2_approximate(fmaf(x, factor, -sums[e]));
        // Where the weight is zero, the logit may be minus infinity.
        if constexpr (Config::kSoftCap) slopes[e] = x == 0.0f ? 0.0f : x * (1.0f - capped * capped);
      }
      const int word = i / 4 % 2 * 2 + h;
      p[i / 8][word] = Element::pack(s[i + 2 * h], s[i + 2 * h + 1]);
      if constexpr (Config::kSoftCap)
        slope_words[i / 8][word] = Element::pack(slopes[0], slopes[1]);
    }
  }
}

// The columns of dP from `first` on, four values of a thread (8 queries of its two keys), as words
// of dS. `slopes`: two words. `delta`: the address of the thread's first one in shared memory.
template <typename Element, int kLogits>
__device__ __forceinline__ void logit_gradients(const float (&dp)[kLogits], int first,
                                                const u32 (&slopes)[2], u32 delta, u32& low,
                                                u32& high) {
  float deltas[2];
  load_shared(delta + first * 8, deltas[0], deltas[1]);
  u32* words[2] = {&low, &high};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    *words[h] = Element::pack(Element::low(slopes[h]) * (dp[first + 2 * h] - deltas[0]),
                              Element::high(slopes[h]) * (dp[first + 2 * h + 1] - deltas[1]));
  }
}

// What queries that see no key add to dV, the same for all keys. `add(j, sums)` adds to the
// thread's two columns of the j-th 8.
template <typename Config, typename Add>
__device__ __forceinline__ void add_blind_sums(const Item& item, const Problem& problem,
                                               const Arrays& arrays, int offset, Add add) {
  if constexpr (Config::kSeesNothing) {
    const Positions positions{offset, problem.num_queries + offset, item.key_end};
    if (!may_see_nothing<Config>(positions, problem.left, problem.right)) return;
    const int first_head = item.batch * problem.num_kv_heads * problem.group_size + item.first_head;
#pragma unroll
    for (int j = 0; j < Config::kValueDim / 8; ++j) {
      float sums[2];
      const int column = j * 8 + threadIdx.x % 4 * 2;
      problem.sums.add_up(arrays.blind_sums, first_head, item.num_heads, column, sums);
      add(j, {sums[0] / problem.num_keys, sums[1] / problem.num_keys});
    }
  }
}

// The turns of a warp that adds to dQ in the order of the keys. One thread calls its functions.
class Turns {
 public:
  __device__ __forceinline__ explicit Turns(const Arrays& arrays) : arrays_(arrays) {}

  // Waits until the counter says that `turn` blocks of keys have added. The additions of the turn
  // before are complete by now; a wait behind each of them would take long.
  __device__ __forceinline__ void take(int counter, int turn) {
    end_pending();
    pending_ = counter;
    wait_for_turn(arrays_.turns + pending_, turn);
  }

  __device__ __forceinline__ void end_pending() {
    if (pending_ < 0) return;
    tma::cp_async_bulk_wait_group<0>();
    end_turn(arrays_.turns + pending_);
    pending_ = -1;
  }

 private:
  const Arrays& arrays_;
  int pending_ = -1;  // The number of the counter of the last turn that was taken.
};

}  // namespace jaxkernels
