// dq, dk and dv of attention on Hopper tensor cores, in one kernel.
//
// A persistent grid works on items. An item is a block of 128 keys of one key head, and the blocks
// of queries that see them, of every query head of its part of the group. Four warpgroups:
//
//   producer      one thread copies keys, values, queries, dO, lse and delta by TMA
//   consumers     two, of 64 keys each. Tiles of logits have keys in rows, queries in columns:
//                   S  = K Q^T             both from shared memory, kBlockQ columns
//                   dP = V dO^T            likewise
//                   P  = exp2(S - lse), dS = P (dP - delta)      in registers, rounded to 16 bits
//                   dV = dV + P dO         P from registers
//                   dK = dK + dS Q         dS from registers
//   dQ            dQ = dS^T K              dS of both consumers, from a ring in shared memory
//
// dK and dV stay in registers until the item ends. The last warpgroup adds dQ of a block of queries
// to memory, in float32 by TMA, in the order in which CTAs come. If `kInOrder`, blocks of keys add
// in their own order: 16 queries of a head have a counter, and a warp waits until it says that all
// blocks of keys before its own have added. Every CTA waits for earlier ones only.
//
// A consumer issues S of the next step behind dK of the present one:
//
//   tensor cores    S1 | dV1 dP1 | dK1 S2 | dV2 dP2 | dK2 S3 | ...
//   other units        P1       dS1      P2       dS2
//
// The two consumers and the warpgroup of dQ are not in step: the gaps of one are filled by others.
//
// The copy engine fills with zeros what lies beyond the last query: with dO and delta of zero, such
// a query adds nothing. Padding must be zero in queries and dO. In keys and values it may be NaN:
// consumers clear it in shared memory.
//
// backward.py compiles this file with the macros that `Config` reads. Source: FlashAttention-3
// (arXiv:2407.08608); a warpgroup of its own for dQ as in our Pallas kernel
// (docs/pallas-kernels.md).

#include "gradients.cuh"
#include "padding.cuh"
#include "ring.cuh"
#include "staging.cuh"

namespace jaxkernels {

using namespace tma;

struct Config : GradientConfig {
  static constexpr int kBlockQ = JK_BLOCK_Q;
  static constexpr int kStages = JK_NUM_STAGES;
  // Whether dP is multiplied beside the exponentials of P, not after them. It takes more registers.
  static constexpr bool kEarlyGradients = JK_EARLY_GRADIENTS;
};

// ---- Constants that follow from Config ---------------------------------------------------------

using Element = Config::Element;
constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = (kConsumers + 2) * kWarpgroup;
constexpr int kBlockQ = Config::kBlockQ;
constexpr int kBlockKv = kConsumers * kWgmmaM;
using Schedule = ItemSchedule<Config, kBlockKv>;

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
// A step's weights and their gradients are computed in so many parts. Products of one part run
// beside the arithmetic of the next. Slopes and segments leave no registers for it.
constexpr int kParts = Config::kSoftCap || Config::kSegments ? 1 : 2;
// Whether dS is written for dQ before dK is multiplied. With 64 queries in a step it is 1 to 3 %
// faster, with 128 it is 7 % slower.
constexpr bool kWritesFirst = kBlockQ == 64;
static_assert(kBlockQ % kWgmmaM == 0, "whole wgmmas of dQ");
static_assert(Config::kHeadDim <= 128 && Config::kValueDim <= 128, "registers for dK and dV");
static_assert(Config::kHeadDim % 16 == 0 && Config::kValueDim % 16 == 0, "whole steps of wgmma");

// Registers of a thread by role. Together they are those that the CTA has at launch.
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = 208;
constexpr int kQueryRegisters = 64;

// Named barriers from here on, one for each consumer.
constexpr u32 kFirstBarrier = 1;

// A warp of the warpgroup of dQ has so many staging buffers, of 32 columns each.
constexpr int kQueryPieces = 2;
using QueryBuffer = StagingBuffer<Float32, 128>;  // Of dQ.
using ResultBuffer = StagingBuffer<Config::Output, 128>;

struct SharedStorage {
  alignas(1024) unsigned char keys[KeyTile::kBytes];
  alignas(1024) unsigned char values[ValueTile::kBytes];
  alignas(1024) unsigned char queries[Config::kStages][QueryTile::kBytes];
  alignas(1024) unsigned char outputs[Config::kStages][OutputTile::kBytes];
  alignas(1024) unsigned char logits[Config::kStages][LogitTile::kBytes];
  alignas(1024) unsigned char query_staging[4][kQueryPieces][kStagingBytes];
  alignas(1024) unsigned char staging[kConsumers * 4][kStagingBytes];
  // Of each query: its logsumexp in base 2, and delta.
  alignas(128) float lse[Config::kStages][kBlockQ];
  alignas(128) float delta[Config::kStages][kBlockQ];
  // The step of each slot of queries, and of each slot of dS.
  Step steps[Config::kStages], summed[Config::kStages];
  Ring<1> key_ring, value_ring;
  Ring<Config::kStages> query_ring, output_ring;
  Ring<Config::kStages> logit_ring;  // Of dS, from the warps of consumers to those of dQ.
};
static_assert(sizeof(SharedStorage) <= JK_SMEM_BYTES, "what the host gives is enough");

using Place = RingPlace<Config::kStages>;

// ---- Producer: one thread ----------------------------------------------------------------------

struct Loads {
  const TensorMap& queries;
  const TensorMap& keys;
  const TensorMap& values;
  const TensorMap& outputs;  // dO.
  const TensorMap& sums;     // lse in base 2, then delta.
};

class Producer {
 public:
  __device__ __forceinline__ Producer(SharedStorage& shared, const Problem& problem,
                                      const Arrays& arrays, const Loads& loads)
      : shared_(shared), problem_(problem), arrays_(arrays), loads_(loads) {}

  __device__ __forceinline__ void run(Schedule schedule) {
    offset_ = schedule.offset();
#pragma unroll 1
    for (; schedule.has_item(); schedule.advance()) {
      const Item item = schedule.item();
      u64* full = shared_.key_ring.producer_acquire(kv_, KeyTile::kBytes);
      TileLoad<KeyTile>::load(shared_.keys, &loads_.keys, full, item.first_key, 0, item.kv_head,
                              item.batch);
      Steps steps(item, problem_);
      const int count = item.num_steps();
      if (count > 0) load_queries(schedule, item, steps);
      full = shared_.value_ring.producer_acquire(kv_, ValueTile::kBytes);
      TileLoad<ValueTile>::load(shared_.values, &loads_.values, full, item.first_key, 0,
                                item.kv_head, item.batch);
      kv_.next();
      if (count > 0) load_outputs(item, steps);
#pragma unroll 1
      for (int n = 1; n < count; ++n) {
        steps.next();
        load_queries(schedule, item, steps);
        load_outputs(item, steps);
      }
    }
  }

 private:
  __device__ __forceinline__ void load_queries(const Schedule& schedule, const Item& item,
                                               const Steps& steps) {
    const int slot = place_.slot(), query = steps.block() * kBlockQ;
    u64* full =
        shared_.query_ring.producer_acquire(place_, QueryTile::kBytes + kBlockQ * sizeof(float));
    // Consumers read it behind the wait for dO.
    shared_.steps[slot] =
        schedule.describe<kBlockKv>(item, item.first_key, offset_, steps.block(), steps.head());
    TileLoad<QueryTile>::load(shared_.queries[slot], &loads_.queries, full, query, 0, steps.head(),
                              item.batch);
    cp_async_bulk_tensor_load(shared_.lse[slot], &loads_.sums, full,
                              {query, steps.head(), item.batch, 0});
  }

  __device__ __forceinline__ void load_outputs(const Item& item, const Steps& steps) {
    const int slot = place_.slot(), query = steps.block() * kBlockQ;
    u64* full =
        shared_.output_ring.producer_acquire(place_, OutputTile::kBytes + kBlockQ * sizeof(float));
    TileLoad<OutputTile>::load(shared_.outputs[slot], &loads_.outputs, full, query, 0, steps.head(),
                               item.batch);
    cp_async_bulk_tensor_load(shared_.delta[slot], &loads_.sums, full,
                              {query, steps.head(), item.batch, 1});
    place_.next();
  }

  SharedStorage& shared_;
  const Problem& problem_;
  const Arrays& arrays_;
  const Loads& loads_;
  int offset_ = 0;
  RingPlace<1> kv_;
  Place place_;
};

// ---- Consumers ---------------------------------------------------------------------------------

class Consumer {
 public:
  __device__ __forceinline__ Consumer(SharedStorage& shared, const Problem& problem,
                                      const Arrays& arrays)
      : shared_(shared),
        problem_(problem),
        arrays_(arrays),
        index_(uniform(threadIdx.x / kWarpgroup) - 1) {}

  __device__ __forceinline__ void run(Schedule schedule, const TensorMap& dk, const TensorMap& dv) {
    offset_ = schedule.offset();
#pragma unroll 1
    for (; schedule.has_item(); schedule.advance()) {
      const int count = begin(schedule.item());
      if (count > 0) add_up(count);
      __syncwarp();  // Without steps, all threads have seen that the keys are there.
      shared_.key_ring.consumer_release(0, 0);
      shared_.value_ring.consumer_release(0, 0);
      kv_.next();
      // The item is read again, so that it takes no registers meanwhile.
      const Item item = schedule.item();
      add_blind_sums<Config>(item, problem_, arrays_, offset_,
                             [&](int pair, const float (&sums)[2]) {
#pragma unroll
                               for (int i = 0; i < 4; ++i) dv_[pair * 4 + i] += sums[i % 2];
                             });
      store(dv, item, dv_, 1.0f);
      store(dk, item, dk_, problem_.scale);
    }
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
  }

 private:
  // Returns the number of steps.
  __device__ __forceinline__ int begin(const Item& item) {
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) dk_[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) dv_[i] = 0.0f;
    edges_ = {item.first_key, item.key_end, item.batch};
    if constexpr (Config::kSegments) {
      load_key_segments(problem_, arrays_, item.batch, tile_edges().first_key, segments_);
    }
    shared_.key_ring.consumer_wait(kv_);
    shared_.value_ring.consumer_wait(kv_);
    if constexpr (Config::kKeyLengths) clear_padding(item);
    return item.num_steps();
  }

  // Of this consumer's keys and values. The warpgroup of dQ reads keys behind its wait for dS.
  __device__ __forceinline__ void clear_padding(const Item& item) {
    const int end = (index_ + 1) * kWgmmaM;
    const int begin = max(item.key_end - item.first_key, index_ * kWgmmaM);
    if (begin >= end || item.key_end == problem_.num_keys) return;
    clear_rows<KeyTile>(shared_.keys, begin, end);
    clear_rows<ValueTile>(shared_.values, begin, end);
    end_clearing(kFirstBarrier + index_);
  }

  // dK and dV of an item.
  __device__ __forceinline__ void add_up(int count) {
#pragma unroll 1
    for (int n = 0; n < count; ++n) step(n > 0);
    wgmma_wait<0>();
    pin(dk_);
    pin(dv_);
    release_before();
  }

  // In the beginning dK of the step before is on its way, in the end that of this one.
  __device__ __forceinline__ void step(bool has_previous) {
    const int slot = place_.slot();
    shared_.query_ring.consumer_wait(place_);
    issue_logits(slot);
    wgmma_wait<1>();
    if (has_previous) release_before();
    shared_.output_ring.consumer_wait(place_);
    if constexpr (Config::kEarlyGradients) issue_weight_gradients(slot);
    wgmma_wait<Config::kEarlyGradients ? 1 : 0>();
    pin(s_);
    change_and_mask<Config>(s_, problem_, arrays_, tile_edges(), segments_, offset_,
                            shared_.steps[slot]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      compute_weights(slot, part);
      issue_dv(slot, part);
    }
    wgmma_commit();
    if constexpr (Config::kSoftCap) wgmma_wait<0>();  // P leaves its registers to the slopes.
    if constexpr (!Config::kEarlyGradients) issue_weight_gradients(slot);
    wgmma_wait<0>();
    pin(dp_);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      compute_logit_gradients(slot, part);
      if constexpr (!kWritesFirst) issue_dk(slot, part);
    }
    if constexpr (kWritesFirst) {
      write_logit_gradients();
#pragma unroll
      for (int part = 0; part < kParts; ++part) issue_dk(slot, part);
    }
    wgmma_commit();
    if constexpr (!kWritesFirst) write_logit_gradients();
    place_.next();
  }

  // Gives back the slot of the step before.
  __device__ __forceinline__ void release_before() {
    const int slot = place_.slot() == 0 ? Config::kStages - 1 : place_.slot() - 1;
    shared_.query_ring.consumer_release(slot, 0);
    shared_.output_ring.consumer_release(slot, 0);
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
  __device__ __forceinline__ void issue_dv(int slot, int part) {
    const u32 outputs = OutputTileByRows::descriptor(shared_address(shared_.outputs[slot]));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kSteps / kParts; ++j) {
      const int i = part * (kSteps / kParts) + j;
      wgmma<Element, false>(dv_, p_[i], outputs + OutputTileByRows::advance(0, i), 1);
    }
  }

  // dK = dK + dS Q.
  __device__ __forceinline__ void issue_dk(int slot, int part) {
    const u32 queries = QueryTileByRows::descriptor(shared_address(shared_.queries[slot]));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kSteps / kParts; ++j) {
      const int i = part * (kSteps / kParts) + j;
      wgmma<Element, false>(dk_, ds_[i], queries + QueryTileByRows::advance(0, i), 1);
    }
  }

  // ---- Elementwise ----

  // Of this consumer's tile. They are computed at each use, so that they take no register
  // meanwhile.
  __device__ __forceinline__ Edges tile_edges() const {
    return {edges_.first_key + index_ * kWgmmaM, edges_.key_end, edges_.batch};
  }

  // A part of P, from S.
  __device__ __forceinline__ void compute_weights(int slot, int part) {
    const u32 lse = shared_address(shared_.lse[slot]) + threadIdx.x % 4 * 8;
    jaxkernels::compute_weights<Config, kParts>(s_, p_, slopes_, problem_, lse, part);
  }

  // A part of dS, from P and dP.
  __device__ __forceinline__ void compute_logit_gradients(int slot, int part) {
    const u32 delta = shared_address(shared_.delta[slot]) + threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < kLogits / kParts; j += 4) {
      const int i = part * (kLogits / kParts) + j, word = i / 4 % 2 * 2;
      const auto& weights = Config::kSoftCap ? slopes_[i / 8] : p_[i / 8];
      const u32 slopes[2] = {weights[word], weights[word + 1]};
      logit_gradients<Element>(dp_, i, slopes, delta, ds_[i / 8][word], ds_[i / 8][word + 1]);
    }
  }

  // A slot of dS. A warp's 16 keys of a box of 64 queries are a piece as those that are staged.
  __device__ __forceinline__ void write_logit_gradients() {
    const int slot = place_.slot();
    shared_.logit_ring.producer_wait(place_);
    if (threadIdx.x == kWarpgroup) shared_.summed[slot] = shared_.steps[slot];
    unsigned char* rows =
        shared_.logits[slot] + (index_ * kWgmmaM + warp_of_group() * 16) * kSwizzleBytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      StagingBuffer<Element, 128>::write_packed(ds_[i], rows + i / 4 * LogitTile::kBoxBytes, i % 4);
    }
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(&shared_.logit_ring.full[slot]);
    __syncwarp();
  }

  // ---- Results ----

  // Stores this consumer's 64 keys of dK or dV.
  template <int kCount>
  __device__ __forceinline__ void store(const TensorMap& map, const Item& item,
                                        const float (&sums)[kCount], float factor) {
    constexpr int kColumns = ResultBuffer::kColumns;
    unsigned char* staging = shared_.staging[index_ * 4 + warp_of_group()];
    const int first_row = item.first_key + index_ * kWgmmaM + warp_of_group() * 16;
    const int head = item.kv_head * problem_.group_parts + item.part;
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
      store_piece(&map, 0, staging, {piece * kColumns, first_row, head, item.batch});
    }
  }

  SharedStorage& shared_;
  const Problem& problem_;
  const Arrays& arrays_;
  const int index_;
  RingPlace<1> kv_;
  Place place_;
  Edges edges_;  // The item's.
  int segments_[2];
  int offset_ = 0;
  float s_[kLogits], dp_[kLogits];
  u32 p_[kSteps][4], ds_[kSteps][4];
  u32 slopes_[kSteps][4];  // With a soft cap.
  float dk_[Config::kHeadDim / 2], dv_[Config::kValueDim / 2];
};

// ---- The warpgroup of dQ -----------------------------------------------------------------------

class QueryGradients {
 public:
  __device__ __forceinline__ QueryGradients(SharedStorage& shared, const Problem& problem,
                                            const Arrays& arrays, const TensorMap& dq)
      : shared_(shared), problem_(problem), dq_(dq), turns_(arrays) {}

  __device__ __forceinline__ void run(Schedule schedule) {
#pragma unroll 1
    for (; schedule.has_item(); schedule.advance()) {
      const Item item = schedule.item();
      shared_.key_ring.consumer_wait(kv_);
      const int count = item.num_steps();
#pragma unroll 1
      for (int n = 0; n < count; ++n) step(item);
      if constexpr (Config::kInOrder) {
        if (threadIdx.x % kWarp == 0) turns_.end_pending();
      }
      __syncwarp();  // As in consumers.
      shared_.key_ring.consumer_release(0, 0);
      kv_.next();
    }
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
  }

 private:
  __device__ __forceinline__ void step(const Item& item) {
    shared_.logit_ring.consumer_wait(place_);
    const Step step = shared_.summed[place_.slot()];
    // Turns leave no registers for the addresses of all rows.
    constexpr int kRowsAtOnce = Config::kInOrder ? 1 : kBlockQ / kWgmmaM;
#pragma unroll kRowsAtOnce
    for (int row = 0; row < kBlockQ; row += kWgmmaM) {
      add_columns<0>(item, step, row);
      if constexpr (Config::kHeadDim > 64) add_columns<64>(item, step, row);
    }
    place_.next();
  }

  // 64 queries of dQ = dS^T K, up to 64 columns from kFirst on.
  template <int kFirst>
  __device__ __forceinline__ void add_columns(const Item& item, const Step& step, int row) {
    // Of products of two widths ptxas makes a queue, unless the widths are 64 and 32. The copy
    // engine has filled columns behind the last one with zeros.
    constexpr int kLeft = Config::kHeadDim - kFirst;
    constexpr int kColumns = Config::kHeadDim <= 64 || kLeft == 32 ? kLeft : 64;
    constexpr bool kIsLast = kLeft <= 64;
    float dq[kColumns / 2];
    const u32 logits = LogitTile::descriptor(shared_address(shared_.logits[place_.slot()])) +
                       LogitTile::advance(row, 0);
    const u32 keys =
        KeyTileByRows::descriptor(shared_address(shared_.keys)) + KeyTileByRows::advance(kFirst, 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockKv / kWgmmaK<Element>; ++i) {
      wgmma<Element, false, false>(dq, logits + LogitTile::advance(0, i),
                                   keys + KeyTileByRows::advance(0, i), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(dq);
    if (kIsLast && row + kWgmmaM == kBlockQ) {
      shared_.logit_ring.consumer_release(place_.slot(), 0);
    }
    __syncwarp();
    if constexpr (Config::kInOrder && kFirst == 0) take_turn(item, step, row);
#pragma unroll
    for (int piece = 0; piece * QueryBuffer::kColumns < kColumns; ++piece) {
      unsigned char* staging = shared_.query_staging[warp_of_group()][piece_];
      if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<kQueryPieces - 1>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < QueryBuffer::kColumns / 16; ++c) {
        const int column = piece * QueryBuffer::kColumns + c * 16;
        float values[8];
#pragma unroll
        for (int r = 0; r < 8; ++r) values[r] = column < kColumns ? dq[column / 2 + r] : 0.0f;
        QueryBuffer::write(values, staging, c);
      }
      store_piece<true>(&dq_, 0, staging,
                        {kFirst + piece * QueryBuffer::kColumns,
                         step.block * kBlockQ + row + warp_of_group() * 16, step.head, item.batch});
      piece_ = (piece_ + 1) % kQueryPieces;
    }
  }

  // Waits until all blocks of keys before this one have added to this warp's queries.
  __device__ __forceinline__ void take_turn(const Item& item, const Step& step, int row) {
    if (threadIdx.x % kWarp == 0) {
      const int num_heads = problem_.num_kv_heads * problem_.group_size;
      const int num_blocks = (problem_.num_queries + kBlockQ - 1) / kBlockQ;
      const int queries =
          ((item.batch * num_heads + step.head) * num_blocks + step.block) * (kBlockQ / 16);
      turns_.take(queries + row / 16 + warp_of_group(), step.turn);
    }
    __syncwarp();
  }

  SharedStorage& shared_;
  const Problem& problem_;
  const TensorMap& dq_;
  Turns turns_;
  int piece_ = 0;
  RingPlace<1> kv_;
  Place place_;
};

// ---- Kernel ------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) attention_backward(
    const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
    const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap outputs,
    const __grid_constant__ TensorMap sums, const __grid_constant__ TensorMap dq,
    const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv, const int* plan,
    const int* key_lengths, const int* query_segments, const int* key_segments,
    const int* segment_blocks, const int* first_kv_blocks, const int* query_offset,
    const float* blind_sums, int* turns, const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const Arrays arrays{plan,         key_lengths,    query_segments,
                      key_segments, segment_blocks, first_kv_blocks,
                      query_offset, blind_sums,     turns};
  const int warpgroup = threadIdx.x / kWarpgroup;

  if (threadIdx.x == 0) {
    prefetch_tensormap(&queries);
    prefetch_tensormap(&keys);
    prefetch_tensormap(&values);
    prefetch_tensormap(&outputs);
    prefetch_tensormap(&sums);
    shared.key_ring.init((kConsumers + 1) * 4);
    shared.value_ring.init(kConsumers * 4);
    shared.query_ring.init(kConsumers * 4);
    shared.output_ring.init(kConsumers * 4);
    shared.logit_ring.init(4, kConsumers * 4);
    fence_mbarrier_init();
  }
  __syncthreads();

  const Schedule schedule(problem, arrays);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (uniform(threadIdx.x / kWarp) == 0 && elect_one()) {
      const Loads loads{queries, keys, values, outputs, sums};
      Producer(shared, problem, arrays, loads).run(schedule);
    }
  } else if (warpgroup <= kConsumers) {
    setmaxnreg_inc<kConsumerRegisters>();
    Consumer(shared, problem, arrays).run(schedule, dk, dv);
  } else {
    setmaxnreg_dec<kQueryRegisters>();
    QueryGradients(shared, problem, arrays, dq).run(schedule);
  }
}

}  // namespace jaxkernels
