// dq, dk and dv of attention on Hopper tensor cores, in one kernel.
//
// A CTA has a block of 128 keys of one key head, and walks the blocks of queries that see them, of
// every query head of its part of the group. Two consumer warpgroups have 64 keys each. Tiles of
// logits have keys in rows and queries in columns:
//
//   S  = K Q^T             both from shared memory, kBlockQ columns
//   dP = V dO^T            likewise
//   P  = exp2(S - lse), dS = P (dP - delta)      in registers, rounded to 16 bits
//   dV = dV + P dO         P from registers
//   dK = dK + dS Q         dS from registers
//   dQ = dS^T K            dS from shared memory, of both consumers
//
// dK and dV stay in registers until the CTA ends. dQ of a block of queries is added to memory in
// float32 by TMA, in the order in which CTAs come. Both consumers' dS go into dQ: they meet at a
// barrier in each step. There are two buffers of dS, so that one barrier a step is enough: the
// buffer that a step writes was last read two steps before.
//
// The consumers share the work of dQ. With 128 queries in a step each has 64 of them; with 64
// queries one has the first 64 columns, the other one the rest:
//
//   kBlockQ = 128   | columns |              kBlockQ = 64    columns 0 ... 63 | 64 ...
//     queries 0...  |consumer0|                queries 0...    consumer 0     | consumer 1
//     queries 64... |consumer1|
//
// One producer thread copies keys and values once, and queries, dO, lse and delta for each step.
// The copy engine fills with zeros what lies beyond the last query: with dO and delta of zero, such
// a query adds nothing. Padding must be zero in all operands.
//
// backward.py compiles this file with the macros that `Config` reads. Source: FlashAttention-3
// (arXiv:2407.08608).

#include "masks.cuh"
#include "ring.cuh"
#include "staging.cuh"
#include "tiles.cuh"

namespace jaxkernels {

using namespace tma;

struct Config {
  using Element = JK_ELEMENT;
  // What dk and dv are stored as.
  using Output = JK_OUTPUT;
  // Head dimensions of queries and of values, padded to multiples of 16.
  static constexpr int kHeadDim = JK_HEAD_DIM;
  static constexpr int kValueDim = JK_VALUE_DIM;
  static constexpr int kBlockQ = JK_BLOCK_Q;
  static constexpr int kStages = JK_NUM_STAGES;
  // A query sees keys from `left` before it to `right` behind it.
  static constexpr bool kHasLeft = JK_HAS_LEFT;
  static constexpr bool kHasRight = JK_HAS_RIGHT;
  static constexpr bool kKeyLengths = JK_KEY_LENGTHS;
  static constexpr bool kSegments = JK_SEGMENTS;
  static constexpr bool kQueryOffset = JK_QUERY_OFFSET;
  static constexpr bool kSoftCap = JK_SOFT_CAP;
};

// The sizes of a launch.
struct Problem {
  int num_queries, num_keys, num_kv_heads, group_size;
  int group_parts;  // CTAs that share the query heads of a key head.
  int num_kv_blocks;
  int left, right;
  float factor;  // What a product is multiplied by: to logits in base 2, or to those over the cap.
  float cap;     // The soft cap in base 2.
  float scale;   // What dk is multiplied by.
};

// Arrays that are read by ordinary instructions. Those that Config leaves out are not touched.
struct Arrays {
  const int* key_lengths;
  const int* query_segments;
  const int* key_segments;
  // (batch, block of keys, 4): the blocks of queries that may share a segment, and those of one
  // segment only.
  const int* segment_blocks;
  const int* query_offset;
};

// ---- Constants that follow from Config ---------------------------------------------------------

using Element = Config::Element;
constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kBlockQ = Config::kBlockQ;
constexpr int kBlockKv = kConsumers * kWgmmaM;

// An array's tile serves two products: with its columns as k, and with its rows as k.
using KeyTile = OperandTile<Element, kBlockKv, Config::kHeadDim, true>;
using KeyTileByRows = OperandTile<Element, Config::kHeadDim, kBlockKv, false>;
using ValueTile = OperandTile<Element, kBlockKv, Config::kValueDim, true>;
using QueryTile = OperandTile<Element, kBlockQ, Config::kHeadDim, true>;
using QueryTileByRows = OperandTile<Element, Config::kHeadDim, kBlockQ, false>;
using OutputTile = OperandTile<Element, kBlockQ, Config::kValueDim, true>;  // Of dO.
using OutputTileByRows = OperandTile<Element, Config::kValueDim, kBlockQ, false>;
// dS: keys in rows, queries contiguous. The left operand of dQ, transposed.
using LogitTile = OperandTile<Element, kBlockQ, kBlockKv, false>;
static_assert(KeyTile::kBytes == KeyTileByRows::kBytes, "one tile, read in two ways");
static_assert(QueryTile::kBytes == QueryTileByRows::kBytes, "one tile, read in two ways");
static_assert(OutputTile::kBytes == OutputTileByRows::kBytes, "one tile, read in two ways");

constexpr int kLogits = kBlockQ / 2;  // A thread has so many in a step.
constexpr int kSteps = kBlockQ / kWgmmaK<Element>;
constexpr bool kSplitsQueries = kBlockQ == 2 * kWgmmaM;
// Columns of dQ that a consumer has. Those of the second one may end behind the last column, where
// the copy engine has filled the keys with zeros.
constexpr int kColumns = Config::kHeadDim < 64 ? Config::kHeadDim : 64;
// Whether the second consumer has a part of dQ.
constexpr bool kBothHaveDq = kSplitsQueries || Config::kHeadDim > kColumns;
static_assert(kBlockQ == 64 || kBlockQ == 128, "one or two wgmmas of dQ");
static_assert(!kSplitsQueries || Config::kHeadDim <= 64, "registers for two tiles of logits");
static_assert(Config::kHeadDim <= 128 && Config::kValueDim <= 128, "registers for dK and dV");
static_assert(Config::kHeadDim % 16 == 0 && Config::kValueDim % 16 == 0, "whole steps of wgmma");

constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

using QueryBuffer = StagingBuffer<Float32, 128>;  // Of dQ.
constexpr int kQueryPieces = 2;                   // A warp's columns of dQ.
using ResultBuffer = StagingBuffer<Config::Output, 128>;

struct SharedStorage {
  alignas(1024) unsigned char keys[KeyTile::kBytes];
  alignas(1024) unsigned char values[ValueTile::kBytes];
  alignas(1024) unsigned char queries[Config::kStages][QueryTile::kBytes];
  alignas(1024) unsigned char outputs[Config::kStages][OutputTile::kBytes];
  alignas(1024) unsigned char logits[2][LogitTile::kBytes];
  alignas(1024) unsigned char staging[kConsumers * 4][kQueryPieces][kStagingBytes];
  // Of each query: its logsumexp in base 2, and delta.
  alignas(128) float lse[Config::kStages][kBlockQ];
  alignas(128) float delta[Config::kStages][kBlockQ];
  Ring<Config::kStages> query_ring, output_ring;
  u64 keys_full;
};
static_assert(sizeof(SharedStorage) <= JK_SMEM_BYTES, "what the host gives is enough");

using Place = RingPlace<Config::kStages>;

// ---- Work of a CTA -----------------------------------------------------------------------------

struct Work {
  int batch, kv_head;
  int part;  // The number of this part of the group.
  int first_key;
  int first_head, num_heads;
  int first_block, end_block;  // Blocks of queries that see some of the keys.
  int same_first, same_end;    // Blocks that no mask of segments touches.
  int key_end;
  int offset;  // The position of the first query.
};

__device__ __forceinline__ Work work_of(const Problem& problem, const Arrays& arrays) {
  Work work;
  // Blocks of keys change slowest: with a causal mask the first ones have most work, and come
  // first.
  const int heads = problem.num_kv_heads * problem.group_parts;
  const int num_in_block = gridDim.x / problem.num_kv_blocks;
  const int kv_block = blockIdx.x / num_in_block;
  const int index = blockIdx.x - kv_block * num_in_block;
  work.batch = index / heads;
  const int head_part = index - work.batch * heads;
  work.kv_head = head_part / problem.group_parts;
  work.part = head_part - work.kv_head * problem.group_parts;
  work.num_heads = problem.group_size / problem.group_parts;
  work.first_head = work.kv_head * problem.group_size + work.part * work.num_heads;
  work.first_key = kv_block * kBlockKv;
  work.offset = Config::kQueryOffset ? *arrays.query_offset : 0;
  work.key_end = problem.num_keys;
  if constexpr (Config::kKeyLengths) {
    work.key_end = min(max(arrays.key_lengths[work.batch], 0), problem.num_keys);
  }
  const int last_key = min(work.first_key + kBlockKv, work.key_end) - 1;
  int first = 0, end = problem.num_queries;
  if constexpr (Config::kHasRight) first = max(work.first_key - problem.right - work.offset, 0);
  if constexpr (Config::kHasLeft) {
    end = min(max(last_key + problem.left + 1 - work.offset, 0), problem.num_queries);
  }
  if (last_key < work.first_key) end = 0;
  work.first_block = first / kBlockQ;
  work.end_block = (end + kBlockQ - 1) / kBlockQ;
  work.same_first = 0, work.same_end = 0;
  if constexpr (Config::kSegments) {
    const int* blocks = arrays.segment_blocks + (work.batch * problem.num_kv_blocks + kv_block) * 4;
    work.first_block = max(work.first_block, blocks[0]);
    work.end_block = min(work.end_block, blocks[1]);
    work.same_first = blocks[2], work.same_end = blocks[3];
  }
  return work;
}

// ---- Producer: one thread ----------------------------------------------------------------------

struct Loads {
  const TensorMap& queries;
  const TensorMap& keys;
  const TensorMap& values;
  const TensorMap& outputs;  // dO.
  const TensorMap& lse;
  const TensorMap& delta;
};

__device__ __forceinline__ void produce(SharedStorage& shared, const Loads& loads,
                                        const Work& work) {
  mbarrier_arrive_expect_tx(&shared.keys_full, KeyTile::kBytes + ValueTile::kBytes);
  TileLoad<KeyTile>::load(shared.keys, &loads.keys, &shared.keys_full, work.first_key, 0,
                          work.kv_head, work.batch);
  TileLoad<ValueTile>::load(shared.values, &loads.values, &shared.keys_full, work.first_key, 0,
                            work.kv_head, work.batch);
  Place place;
  for (int head = work.first_head; head < work.first_head + work.num_heads; ++head) {
    for (int block = work.first_block; block < work.end_block; ++block) {
      const int slot = place.slot(), query = block * kBlockQ;
      u64* full =
          shared.query_ring.producer_acquire(place, QueryTile::kBytes + kBlockQ * sizeof(float));
      TileLoad<QueryTile>::load(shared.queries[slot], &loads.queries, full, query, 0, head,
                                work.batch);
      cp_async_bulk_tensor_load(shared.lse[slot], &loads.lse, full, {query, head, work.batch});
      full =
          shared.output_ring.producer_acquire(place, OutputTile::kBytes + kBlockQ * sizeof(float));
      TileLoad<OutputTile>::load(shared.outputs[slot], &loads.outputs, full, query, 0, head,
                                 work.batch);
      cp_async_bulk_tensor_load(shared.delta[slot], &loads.delta, full, {query, head, work.batch});
      place.next();
    }
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

// The named barrier at which both consumers' dS are complete.
constexpr u32 kLogitsWritten = 1;

class Consumer {
 public:
  __device__ __forceinline__ Consumer(SharedStorage& shared, const Problem& problem,
                                      const Arrays& arrays, const Work& work, const TensorMap& dq)
      : shared_(shared),
        problem_(problem),
        arrays_(arrays),
        work_(work),
        dq_map_(dq),
        index_(uniform(threadIdx.x / kWarpgroup) - 1),
        warp_(threadIdx.x % kWarpgroup / kWarp) {}

  __device__ __forceinline__ void run(const TensorMap& dk, const TensorMap& dv) {
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) dk_[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) dv_[i] = 0.0f;
    if constexpr (Config::kSegments) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = min(key_of(h), problem_.num_keys - 1);
        segments_[h] = arrays_.key_segments[work_.batch * problem_.num_keys + key];
      }
    }
    mbarrier_wait_parity(&shared_.keys_full, 0);
    for (int head = work_.first_head; head < work_.first_head + work_.num_heads; ++head) {
      for (int block = work_.first_block; block < work_.end_block; ++block) step(head, block);
    }
    store(dv, dv_, 1.0f);
    store(dk, dk_, problem_.scale);
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
  }

 private:
  __device__ __forceinline__ void step(int head, int block) {
    const int slot = place_.slot();
    shared_.query_ring.consumer_wait(place_);
    issue_logits(slot);
    shared_.output_ring.consumer_wait(place_);
    issue_weight_gradients(slot);
    wgmma_wait<1>();
    pin(s_);
    compute_weights(slot, block);
    wgmma_wait<0>();
    pin(dp_);
    compute_logit_gradients(slot);
    issue_dv(slot);
    named_barrier_sync<kConsumers * kWarpgroup>(kLogitsWritten);
    if (kBothHaveDq || index_ == 0) {
      add_dq(slot, head, block);
    } else {
      issue_dk(slot);
    }
    wgmma_wait<0>();
    pin(dk_);
    pin(dv_);
    shared_.query_ring.consumer_release(slot, 0);
    shared_.output_ring.consumer_release(slot, 0);
    place_.next();
    buffer_ ^= 1;
  }

  // ---- Products ----

  // S = K Q^T.
  __device__ __forceinline__ void issue_logits(int slot) {
    const u32 keys = KeyTile::descriptor(shared_address(shared_.keys)) +
                     (index_ == 0 ? 0 : KeyTile::advance(kWgmmaM, 0));
    const u32 queries = QueryTile::descriptor(shared_address(shared_.queries[slot]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / kWgmmaK<Element>; ++i) {
      wgmma<Element, true, true>(s_, keys + KeyTile::advance(0, i),
                                 queries + QueryTile::advance(0, i), i > 0);
    }
    wgmma_commit();
  }

  // dP = V dO^T.
  __device__ __forceinline__ void issue_weight_gradients(int slot) {
    const u32 values = ValueTile::descriptor(shared_address(shared_.values)) +
                       (index_ == 0 ? 0 : ValueTile::advance(kWgmmaM, 0));
    const u32 outputs = OutputTile::descriptor(shared_address(shared_.outputs[slot]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kValueDim / kWgmmaK<Element>; ++i) {
      wgmma<Element, true, true>(dp_, values + ValueTile::advance(0, i),
                                 outputs + OutputTile::advance(0, i), i > 0);
    }
    wgmma_commit();
  }

  // dV = dV + P dO.
  __device__ __forceinline__ void issue_dv(int slot) {
    const u32 outputs = OutputTileByRows::descriptor(shared_address(shared_.outputs[slot]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wgmma<Element, false>(dv_, p_[i], outputs + OutputTileByRows::advance(0, i), 1);
    }
    wgmma_commit();
  }

  // dK = dK + dS Q.
  __device__ __forceinline__ void issue_dk(int slot) {
    const u32 queries = QueryTileByRows::descriptor(shared_address(shared_.queries[slot]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wgmma<Element, false>(dk_, ds_[i], queries + QueryTileByRows::advance(0, i), 1);
    }
    wgmma_commit();
  }

  // This consumer's part of dQ = dS^T K, added to memory while dK is computed.
  __device__ __forceinline__ void add_dq(int slot, int head, int block) {
    float dq[kColumns / 2];
    const u32 logits = LogitTile::descriptor(shared_address(shared_.logits[buffer_])) +
                       (kSplitsQueries && index_ == 1 ? LogitTile::advance(kWgmmaM, 0) : 0);
    const u32 keys = KeyTileByRows::descriptor(shared_address(shared_.keys)) +
                     (!kSplitsQueries && index_ == 1 ? KeyTileByRows::advance(64, 0) : 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockKv / kWgmmaK<Element>; ++i) {
      wgmma<Element, false, false>(dq, logits + LogitTile::advance(0, i),
                                   keys + KeyTileByRows::advance(0, i), i > 0);
    }
    wgmma_commit();
    issue_dk(slot);
    wgmma_wait<1>();
    pin(dq);
    unsigned char (*staging)[kStagingBytes] = shared_.staging[index_ * 4 + warp_];
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
    __syncwarp();
    const int first_row =
        block * kBlockQ + static_cast<int>(kSplitsQueries ? index_ * kWgmmaM : 0) + warp_ * 16;
    const int first_column = kSplitsQueries || index_ == 0 ? 0 : 64;
#pragma unroll
    for (int piece = 0; piece * QueryBuffer::kColumns < kColumns; ++piece) {
      if (first_column + piece * QueryBuffer::kColumns >= Config::kHeadDim) break;
#pragma unroll
      for (int c = 0; c < QueryBuffer::kColumns / 16; ++c) {
        const int column = piece * QueryBuffer::kColumns + c * 16;
        float values[8];
#pragma unroll
        for (int r = 0; r < 8; ++r) values[r] = column < kColumns ? dq[column / 2 + r] : 0.0f;
        QueryBuffer::write(values, staging[piece], c);
      }
      store_piece<true>(
          &dq_map_, 0, staging[piece],
          {first_column + piece * QueryBuffer::kColumns, first_row, head, work_.batch});
    }
  }

  // ---- Elementwise ----

  // P, from S. With a soft cap, S becomes the capped logits over the cap, and minus infinity where
  // they are masked; else it becomes P.
  __device__ __forceinline__ void compute_weights(int slot, int block) {
    if constexpr (Config::kSoftCap) {
#pragma unroll
      for (int i = 0; i < kLogits; ++i) s_[i] = tanh_by_exp2(s_[i] * problem_.factor);
    } else {
      exponentiate(slot, problem_.factor, s_);
    }
    const float masked = Config::kSoftCap ? __uint_as_float(0xff800000u) : 0.0f;
    if (needs_mask(block)) mask(block, masked);
    if (Config::kSegments && (block < work_.same_first || block >= work_.same_end)) {
      mask_segments(block, masked);
    }
    if constexpr (Config::kSoftCap) {
      float weights[kLogits];
      exponentiate(slot, problem_.cap, weights);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) pack_lhs<Element>(weights, i, p_[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) pack_lhs<Element>(s_, i, p_[i]);
    }
  }

  // weights = exp2(factor * S - lse).
  __device__ __forceinline__ void exponentiate(int slot, float factor, float (&weights)[kLogits]) {
    const u32 lse = shared_address(shared_.lse[slot]) + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < kLogits; i += 4) {
      float even, odd;
      load_shared(lse + i * 8, even, odd);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        weights[i + 2 * h] = exp2_approximate(fmaf(s_[i + 2 * h], factor, -even));
        weights[i + 2 * h + 1] = exp2_approximate(fmaf(s_[i + 2 * h + 1], factor, -odd));
      }
    }
  }

  __device__ __forceinline__ bool needs_mask(int block) const {
    const int position = block * kBlockQ + work_.offset;
    bool needs = work_.first_key + kBlockKv > work_.key_end;
    if constexpr (Config::kHasRight) {
      needs |= work_.first_key + kBlockKv - 1 > position + problem_.right;
    }
    if constexpr (Config::kHasLeft) {
      needs |= work_.first_key < position + kBlockQ - 1 - problem_.left;
    }
    return needs;
  }

  // The index of this thread's first (h = 0) or second key.
  __device__ __forceinline__ int key_of(int h) const {
    return work_.first_key + index_ * kWgmmaM + warp_ * 16 +
           static_cast<int>(threadIdx.x % kWarp / 4) + 8 * h;
  }

  __device__ __forceinline__ void mask(int block, float masked) {
    const int position = block * kBlockQ + work_.offset + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = key_of(h);
      // The key is seen from columns `begin` to `end` - 1.
      int begin = Config::kHasRight ? key - problem_.right - position : 0;
      if (key >= work_.key_end) begin = 2 * kBlockQ;
      const int end = Config::kHasLeft ? key + problem_.left + 1 - position : 0;
      hide_outside<true, Config::kHasLeft>(s_, h, begin, end, masked);
    }
  }

  __device__ __forceinline__ void mask_segments(int block, float masked) {
    const int first_query = block * kBlockQ + threadIdx.x % 4 * 2;
    const int* ids = arrays_.query_segments + work_.batch * problem_.num_queries;
    hide_other_segments(s_, segments_, ids, first_query, problem_.num_queries, masked);
  }

  // dS, from P and dP: in registers, and in shared memory for dQ.
  __device__ __forceinline__ void compute_logit_gradients(int slot) {
    const u32 delta = shared_address(shared_.delta[slot]) + threadIdx.x % 4 * 8;
    [[maybe_unused]] const u32 lse = shared_address(shared_.lse[slot]) + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < kLogits; i += 4) {
      float even, odd;
      load_shared(delta + i * 8, even, odd);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = i + 2 * h + e;
          const float gradient = dp_[at] - (e == 0 ? even : odd);
          if constexpr (Config::kSoftCap) {
            float low, high;
            load_shared(lse + i * 8, low, high);
            const float weight =
                exp2_approximate(fmaf(s_[at], problem_.cap, e == 0 ? -low : -high));
            // Where the weight is zero, the logit may be minus infinity.
            dp_[at] = weight == 0.0f ? 0.0f : weight * gradient * (1.0f - s_[at] * s_[at]);
          } else {
            dp_[at] = s_[at] * gradient;
          }
        }
      }
    }
    // A warp's 16 keys of a box of 64 queries are a piece as those that are staged.
    unsigned char* rows = shared_.logits[buffer_] + (index_ * kWgmmaM + warp_ * 16) * kSwizzleBytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      pack_lhs<Element>(dp_, i, ds_[i]);
      StagingBuffer<Element, 128>::write_packed(ds_[i], rows + i / 4 * LogitTile::kBoxBytes, i % 4);
    }
    fence_proxy_async();
  }

  // ---- Results ----

  // Stores this consumer's 64 keys of dK or dV.
  template <int kCount>
  __device__ __forceinline__ void store(const TensorMap& map, const float (&sums)[kCount],
                                        float factor) {
    constexpr int kColumns = ResultBuffer::kColumns;
    unsigned char* staging = shared_.staging[index_ * 4 + warp_][0];
    const int first_row = work_.first_key + index_ * kWgmmaM + warp_ * 16;
    const int head = work_.kv_head * problem_.group_parts + work_.part;
#pragma unroll
    for (int piece = 0; piece * kColumns < kCount * 2; ++piece) {
      if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < kColumns / 16; ++c) {
        const int column = piece * kColumns + c * 16;
        if (column >= kCount * 2) break;
        float values[8];
#pragma unroll
        for (int r = 0; r < 8; ++r) values[r] = sums[column / 2 + r] * factor;
        ResultBuffer::write(values, staging, c);
      }
      store_piece(&map, 0, staging, {piece * kColumns, first_row, head, work_.batch});
    }
  }

  SharedStorage& shared_;
  const Problem& problem_;
  const Arrays& arrays_;
  const Work& work_;
  const TensorMap& dq_map_;
  const int index_;
  const int warp_;
  Place place_;
  int buffer_ = 0;
  int segments_[2];
  float s_[kLogits], dp_[kLogits];
  u32 p_[kSteps][4], ds_[kSteps][4];
  float dk_[Config::kHeadDim / 2], dv_[Config::kValueDim / 2];
};

// ---- Kernel ------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) attention_backward(
    const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
    const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap outputs,
    const __grid_constant__ TensorMap lse, const __grid_constant__ TensorMap delta,
    const __grid_constant__ TensorMap dq, const __grid_constant__ TensorMap dk,
    const __grid_constant__ TensorMap dv, const int* key_lengths, const int* query_segments,
    const int* key_segments, const int* segment_blocks, const int* query_offset,
    const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const int warpgroup = threadIdx.x / kWarpgroup;

  if (threadIdx.x == 0) {
    prefetch_tensormap(&queries);
    prefetch_tensormap(&keys);
    prefetch_tensormap(&values);
    prefetch_tensormap(&outputs);
    prefetch_tensormap(&lse);
    prefetch_tensormap(&delta);
    shared.query_ring.init(kConsumers * 4);
    shared.output_ring.init(kConsumers * 4);
    mbarrier_init(&shared.keys_full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  const Arrays arrays{key_lengths, query_segments, key_segments, segment_blocks, query_offset};
  const Work work = work_of(problem, arrays);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (uniform(threadIdx.x / kWarp) == 0 && elect_one()) {
      const Loads loads{queries, keys, values, outputs, lse, delta};
      produce(shared, loads, work);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    Consumer(shared, problem, arrays, work, dq).run(dk, dv);
  }
}

}  // namespace jaxkernels
