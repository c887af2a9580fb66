// dq, dk and dv of attention on Hopper tensor cores above head dimension 128, in one kernel.
//
// dK and dV of 64 keys take 256 registers a thread of one warpgroup at head dimension 256. So two
// warpgroups divide the products of 64 keys, and two CTAs, a cluster, divide an item of 128 keys:
//
//   producers     one thread copies keys, queries and lse by TMA, another one values, dO and delta.
//                 Each CTA loads half of a block of queries and of dO for both CTAs (multicast).
//                 Two more threads describe items and steps
//   weights       S  = K Q^T, P = exp2(S - lse), dV = dV + P dO
//                                  | P in 16 bits, through shared memory
//   gradients     dP = V dO^T, dS = P (dP - delta), dK = dK + dS Q
//                                  | dS in 16 bits, to the shared memory of both CTAs
//   dQ            dQ = dS^T K of all 128 keys, half of the columns in each CTA
//
// Tiles of logits have keys in rows, queries in columns, as in backward.cu. The two CTAs add
// different columns to dQ in memory (float32, by TMA): half of what they would add alone, from half
// of the shared memory traffic. If `kInOrder`, clusters add in the order of their keys; each CTA
// has counters of its own.
//
//   columns of dQ   0 ... 127      128 ... 255
//   keys 0-63     |  CTA 0       |  CTA 1       |    the CTA's own keys, or a second tile of keys:
//   keys 64-127   |  CTA 0       |  CTA 1       |    the CTA's columns of the other's keys
//
// A slot of queries or of dO is free if four warpgroups of two CTAs have released it. A slot of dS
// is full if the warps of this CTA have written their half, and the other CTA's half has arrived.
//
// The copy engine fills with zeros what lies beyond the last query: with dO and delta of zero, such
// a query adds nothing. Padding must be zero in queries and dO. In keys and values it may be NaN:
// each warpgroup clears it in the tiles that it reads.
//
// backward_wide.py compiles this file with the macros that `Config` reads. Source: FlashAttention-3
// (arXiv:2407.08608); the division of 64 keys as in our Pallas kernel (docs/pallas-kernels.md).

#include "gradients.cuh"
#include "padding.cuh"
#include "ring.cuh"
#include "staging.cuh"

namespace jaxkernels {

using namespace tma;

struct Config : GradientConfig {
  static constexpr int kBlockQ = 64;
  // Slots of queries, of dO and of dS.
  static constexpr int kStages = JK_NUM_STAGES;
  static constexpr int kOutputStages = JK_OUTPUT_STAGES;
  static constexpr int kLogitStages = JK_LOGIT_STAGES;
};

// ---- Constants that follow from Config ---------------------------------------------------------

using Element = Config::Element;
constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kThreads = 4 * kWarpgroup;
constexpr int kCtas = 2;        // CTAs of a cluster.
constexpr int kKeys = kWgmmaM;  // Keys of a CTA.
constexpr int kBlockKv = kCtas * kKeys;
constexpr int kBlockQ = Config::kBlockQ;
using Pair = ClusterGrid<kCtas, 1>;
using Schedule = ItemSchedule<Config, kBlockKv, kCtas>;

// Columns of dQ that CTA 0 adds; CTA 1 has the rest. Whole boxes of 64.
constexpr int kPiece = kAtom<Element>;
constexpr int kQueryColumns = ((Config::kHeadDim + kPiece - 1) / kPiece + 1) / kCtas * kPiece;

// An array's tile serves two products: with its columns as k, and with its rows as k.
using KeyTile = OperandTile<Element, kKeys, Config::kHeadDim, true>;
using KeyTileByRows = OperandTile<Element, Config::kHeadDim, kKeys, false>;
// The other CTA's keys, in the columns of dQ that this CTA adds.
using OtherKeyTile = OperandTile<Element, kQueryColumns, kKeys, false>;
using ValueTile = OperandTile<Element, kKeys, Config::kValueDim, true>;
using QueryTile = OperandTile<Element, kBlockQ, Config::kHeadDim, true>;
using QueryTileByRows = OperandTile<Element, Config::kHeadDim, kBlockQ, false>;
using OutputTile = OperandTile<Element, kBlockQ, Config::kValueDim, true>;  // Of dO.
using OutputTileByRows = OperandTile<Element, Config::kValueDim, kBlockQ, false>;
// dS: keys in rows, queries contiguous. The left operand of dQ, transposed.
using LogitTile = OperandTile<Element, kBlockQ, kBlockKv, false>;
constexpr int kHalfOfLogits = LogitTile::kBytes / kCtas;  // A CTA's keys: one box, half its rows.
static_assert(KeyTile::kBytes == KeyTileByRows::kBytes, "one tile, read in two ways");
static_assert(QueryTile::kBytes == QueryTileByRows::kBytes, "one tile, read in two ways");
static_assert(OutputTile::kBytes == OutputTileByRows::kBytes, "one tile, read in two ways");
static_assert(LogitTile::kBoxes == 1 && kHalfOfLogits == 4 * kStagingBytes, "pieces of warps");
static_assert(Config::kHeadDim <= 256 && Config::kValueDim <= 256, "registers for dK and dV");
static_assert(Config::kHeadDim % 16 == 0 && Config::kValueDim % 16 == 0, "whole steps of wgmma");

constexpr int kLogits = kBlockQ / 2;  // A thread has so many in a step.
constexpr int kSteps = kBlockQ / kWgmmaK<Element>;
// P is computed in so many parts: dV of one part runs beside the arithmetic of the next.
constexpr int kParts = 2;

// Registers of a thread by role. Together they are those that the CTA has at launch.
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = 208;
constexpr int kQueryRegisters = 64;

// Named barriers of the warpgroups that clear padding in what they read.
constexpr u32 kKeyBarrier = 1, kValueBarrier = 2, kOtherKeyBarrier = 3;

// A warp of the warpgroup of dQ has so many staging buffers, of 32 columns each.
constexpr int kQueryPieces = 2;                   // Of 64 columns.
using QueryBuffer = StagingBuffer<Float32, 128>;  // Of dQ.
using ResultBuffer = StagingBuffer<Config::Output, 128>;
using LogitBuffer = StagingBuffer<Element, 128>;  // Of P and dS: a warp's 16 keys, 64 queries.

// Slots of descriptions: steps for the consumer of weights and the warpgroup of dQ, items for all.
constexpr int kStepStages = 4;
constexpr int kItemStages = 2;

struct SharedStorage {
  alignas(1024) unsigned char keys[KeyTile::kBytes];
  alignas(1024) unsigned char other_keys[OtherKeyTile::kBytes];
  alignas(1024) unsigned char values[ValueTile::kBytes];
  alignas(1024) unsigned char queries[Config::kStages][QueryTile::kBytes];
  alignas(1024) unsigned char outputs[Config::kOutputStages][OutputTile::kBytes];
  // P of each warp; with a soft cap, the slopes. Between items it stages dV.
  alignas(1024) unsigned char weights[4][kStagingBytes];
  // dS. Between items the next slot stages dK.
  alignas(1024) unsigned char logits[Config::kLogitStages][LogitTile::kBytes];
  alignas(1024) unsigned char query_staging[4][kQueryPieces][kStagingBytes];
  // Of each query: its logsumexp in base 2, and delta.
  alignas(128) float lse[Config::kStages][kBlockQ];
  alignas(128) float delta[Config::kOutputStages][kBlockQ];
  Step steps[kStepStages];
  Item items[kItemStages];
  Ring<kStepStages> step_ring;
  Ring<kItemStages> item_ring;
  Ring<1> key_ring, value_ring;
  Ring<Config::kStages, Pair> query_ring;
  Ring<Config::kOutputStages, Pair> output_ring;
  Ring<1> weight_ring;
  Ring<Config::kLogitStages, Pair> logit_ring;
};
static_assert(sizeof(SharedStorage) <= JK_SMEM_BYTES, "what the host gives is enough");

using QueryPlace = RingPlace<Config::kStages>;
using OutputPlace = RingPlace<Config::kOutputStages>;
using LogitPlace = RingPlace<Config::kLogitStages>;

// The number of this CTA in its cluster. It is read where it is needed, so that it takes no
// register meanwhile.
__device__ __forceinline__ int cta_rank() {
  return static_cast<int>(recomputed(cluster_ctarank()));
}

// The place in a ring of consumers that have passed so many slots. They pass one slot of each ring
// in a step, so that a number of steps is all that they keep.
template <int kStages>
__device__ __forceinline__ RingPlace<kStages> place_at(int steps) {
  RingPlace<kStages> place;
  place.skip(steps);
  return place;
}

// The items of this CTA in their order, as shared memory has them. Behind the last one is an item
// of no batch element. An item is read where it is needed, so that it takes no registers meanwhile.
class Items {
 public:
  __device__ __forceinline__ explicit Items(SharedStorage& shared) : shared_(shared) {}

  // Waits for the item; false behind the last one.
  __device__ __forceinline__ bool has_item() {
    shared_.item_ring.consumer_wait(place_);
    return item().batch >= 0;
  }
  __device__ __forceinline__ const Item& item() const { return shared_.items[place_.slot()]; }
  // A whole warp has read the item for the last time.
  __device__ __forceinline__ void next() {
    shared_.item_ring.consumer_release(place_.slot(), 0);
    place_.next();
  }
  // Likewise one thread, which is the only one of its warp.
  __device__ __forceinline__ void next_of_thread() {
    mbarrier_arrive(&shared_.item_ring.empty[place_.slot()]);
    place_.next();
  }

 private:
  SharedStorage& shared_;
  RingPlace<kItemStages> place_;
};

// ---- Producers: four threads -------------------------------------------------------------------

struct Loads {
  const TensorMap& queries;
  const TensorMap& keys;
  const TensorMap& values;
  const TensorMap& outputs;  // dO.
  const TensorMap& sums;     // lse in base 2, then delta.
};

__device__ __forceinline__ int first_key_of(const Item& item, int rank) {
  return item.first_key + rank * kKeys;
}

// Clears the padding in a tile of the keys or values of a CTA.
template <typename Tile>
__device__ __forceinline__ void clear_padding(unsigned char* tile, const Problem& problem,
                                              const Item& item, int rank, u32 barrier) {
  if constexpr (Config::kKeyLengths) {
    const int begin = max(item.key_end - first_key_of(item, rank), 0);
    if (begin >= kKeys || item.key_end == problem.num_keys) return;
    clear_rows<Tile>(tile, begin, kKeys);
    end_clearing(barrier);
  }
}

// Loads keys and queries.
class QueryProducer {
 public:
  __device__ __forceinline__ QueryProducer(SharedStorage& shared, const Problem& problem,
                                           const Loads& loads)
      : shared_(shared), problem_(problem), loads_(loads) {}

  __device__ __forceinline__ void run(Items items) {
#pragma unroll 1
    for (; items.has_item(); items.next_of_thread()) {
      const Item& item = items.item();
      load_keys(item);
      Steps steps(item, problem_);
#pragma unroll 1
      for (int n = item.num_steps(); n > 0; --n, steps.next()) load_queries(item, steps);
    }
  }

 private:
  // This CTA's keys, and its columns of the other CTA's keys.
  __device__ __forceinline__ void load_keys(const Item& item) {
    u64* full = shared_.key_ring.producer_acquire(keys_, KeyTile::kBytes + OtherKeyTile::kBytes);
    TileLoad<KeyTile>::load(shared_.keys, &loads_.keys, full, first_key_of(item, cta_rank()), 0,
                            item.kv_head, item.batch);
    TileLoad<OtherKeyTile>::load(shared_.other_keys, &loads_.keys, full, cta_rank() * kQueryColumns,
                                 first_key_of(item, 1 - cta_rank()), item.kv_head, item.batch);
    keys_.next();
  }

  // Half of the queries, for both CTAs.
  __device__ __forceinline__ void load_queries(const Item& item, const Steps& steps) {
    const int slot = queries_.slot(), query = steps.block() * kBlockQ;
    u64* full =
        shared_.query_ring.producer_acquire(queries_, QueryTile::kBytes + kBlockQ * sizeof(float));
    TileLoad<QueryTile, kCtas>::load_part(shared_.queries[slot], &loads_.queries, full, cta_rank(),
                                          Pair::column_of(0), query, 0, steps.head(), item.batch);
    cp_async_bulk_tensor_load(shared_.lse[slot], &loads_.sums, full,
                              {query, steps.head(), item.batch, 0});
    queries_.next();
  }

  SharedStorage& shared_;
  const Problem& problem_;
  const Loads& loads_;
  RingPlace<1> keys_;
  QueryPlace queries_;
};

// Loads values and dO.
class OutputProducer {
 public:
  __device__ __forceinline__ OutputProducer(SharedStorage& shared, const Problem& problem,
                                            const Loads& loads)
      : shared_(shared), problem_(problem), loads_(loads) {}

  __device__ __forceinline__ void run(Items items) {
#pragma unroll 1
    for (; items.has_item(); items.next_of_thread()) {
      const Item& item = items.item();
      u64* full = shared_.value_ring.producer_acquire(values_, ValueTile::kBytes);
      TileLoad<ValueTile>::load(shared_.values, &loads_.values, full,
                                first_key_of(item, cta_rank()), 0, item.kv_head, item.batch);
      values_.next();
      Steps steps(item, problem_);
#pragma unroll 1
      for (int n = item.num_steps(); n > 0; --n, steps.next()) load_outputs(item, steps);
    }
  }

 private:
  // Half of dO of the queries, for both CTAs.
  __device__ __forceinline__ void load_outputs(const Item& item, const Steps& steps) {
    const int slot = outputs_.slot(), query = steps.block() * kBlockQ;
    u64* full = shared_.output_ring.producer_acquire(outputs_,
                                                     OutputTile::kBytes + kBlockQ * sizeof(float));
    TileLoad<OutputTile, kCtas>::load_part(shared_.outputs[slot], &loads_.outputs, full, cta_rank(),
                                           Pair::column_of(0), query, 0, steps.head(), item.batch);
    cp_async_bulk_tensor_load(shared_.delta[slot], &loads_.sums, full,
                              {query, steps.head(), item.batch, 1});
    outputs_.next();
  }

  SharedStorage& shared_;
  const Problem& problem_;
  const Loads& loads_;
  RingPlace<1> values_;
  OutputPlace outputs_;
};

// Describes items: the others have no registers to find out themselves.
class ItemProducer {
 public:
  __device__ __forceinline__ explicit ItemProducer(SharedStorage& shared) : shared_(shared) {}

  __device__ __forceinline__ void run(Schedule schedule) {
#pragma unroll 1
    for (; schedule.has_item(); schedule.advance()) describe(schedule.item());
    Item end = {};
    end.batch = -1;
    describe(end);
  }

 private:
  __device__ __forceinline__ void describe(const Item& item) {
    shared_.item_ring.producer_wait(place_);
    shared_.items[place_.slot()] = item;
    mbarrier_arrive(&shared_.item_ring.full[place_.slot()]);
    place_.next();
  }

  SharedStorage& shared_;
  RingPlace<kItemStages> place_;
};

// Describes steps, for the consumer of weights and the warpgroup of dQ.
class StepProducer {
 public:
  __device__ __forceinline__ StepProducer(SharedStorage& shared, const Problem& problem)
      : shared_(shared), problem_(problem) {}

  __device__ __forceinline__ void run(const Schedule& schedule, Items items) {
    const int offset = schedule.offset();
#pragma unroll 1
    for (; items.has_item(); items.next_of_thread()) {
      const Item& item = items.item();
      Steps steps(item, problem_);
#pragma unroll 1
      for (int n = item.num_steps(); n > 0; --n, steps.next()) {
        shared_.step_ring.producer_wait(place_);
        shared_.steps[place_.slot()] = schedule.describe<kKeys>(
            item, first_key_of(item, cta_rank()), offset, steps.block(), steps.head());
        mbarrier_arrive(&shared_.step_ring.full[place_.slot()]);
        place_.next();
      }
    }
  }

 private:
  SharedStorage& shared_;
  const Problem& problem_;
  RingPlace<kStepStages> place_;
};

// ---- Consumers ---------------------------------------------------------------------------------

// dK or dV of 64 keys: 64 rows of kColumns sums, in two products of up to 128 columns. ptxas (13.5)
// refuses an instruction of 256 columns in a kernel that has 128 registers a thread at launch.
template <int kColumns>
struct Accumulators {
  static constexpr int kLow = kColumns < 128 ? kColumns : 128;
  static constexpr int kHigh = kColumns - kLow;
  float low[kLow / 2];
  float high[kHigh > 0 ? kHigh / 2 : 4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& x : low) x = 0.0f;
#pragma unroll
    for (float& x : high) x = 0.0f;
  }
  // += lhs times kWgmmaK rows of a tile that is read by rows.
  template <typename Tile>
  __device__ __forceinline__ void add_product(const u32 (&lhs)[4], u32 tile, int step) {
    static_assert(Tile::kRows == kColumns && !Tile::kIsKMajor, "one tile for all columns");
    wgmma<Element, false>(low, lhs, tile + Tile::advance(0, step), 1);
    if constexpr (kHigh > 0) wgmma<Element, false>(high, lhs, tile + Tile::advance(128, step), 1);
  }
  __device__ __forceinline__ void wait() {
    wgmma_wait<0>();
    pin(low);
    if constexpr (kHigh > 0) pin(high);
  }
  // Adds to both rows of this thread, to its two columns of 8: those from 8 `pair` on.
  __device__ __forceinline__ void add(int pair, const float (&x)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = pair < 16 ? low[pair * 4 + i] : high[(pair - 16) * 4 + i];
      sum += x[i % 2];
    }
  }
  // Sum r of 8 of this thread in the 16 columns from `column` on.
  __device__ __forceinline__ float at(int column, int r) const {
    return column < 128 ? low[column / 2 + r] : high[(column - 128) / 2 + r];
  }
};

// Stores this CTA's 64 keys of dK or dV. `staging`: this warp's buffer, which is free, also
// afterwards.
template <int kColumns>
__device__ __forceinline__ void store_result(const TensorMap& map, const Problem& problem,
                                             const Item& item, const Accumulators<kColumns>& sums,
                                             float factor, unsigned char* staging) {
  constexpr int kPieceColumns = ResultBuffer::kColumns;
  const int first_row = first_key_of(item, cta_rank()) + warp_of_group() * 16;
  const int head = item.kv_head * problem.group_parts + item.part;
#pragma unroll
  for (int piece = 0; piece * kPieceColumns < kColumns; ++piece) {
#pragma unroll
    for (int c = 0; c < kPieceColumns / 16; ++c) {
      const int column = piece * kPieceColumns + c * 16;
      if (column >= kColumns) break;
      float values[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) values[r] = sums.at(column, r) * factor;
      ResultBuffer::write(values, staging, c);
    }
    store_piece(&map, 0, staging, {piece * kPieceColumns, first_row, head, item.batch});
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
    __syncwarp();
  }
}

// S, P and dV.
class WeightConsumer {
 public:
  __device__ __forceinline__ WeightConsumer(SharedStorage& shared, const Problem& problem,
                                            const Arrays& arrays)
      : shared_(shared), problem_(problem), arrays_(arrays) {}

  __device__ __forceinline__ void run(const Schedule& schedule, Items items, const TensorMap& dv) {
    offset_ = schedule.offset();
#pragma unroll 1
    for (; items.has_item(); items.next()) {
      const Item& item = items.item();
      const int count = begin(item);
      if (count > 0) add_up(count);
      __syncwarp();  // Without steps, all threads have seen that the keys are there.
      shared_.key_ring.consumer_release(0, 0);
      keys_.next();
      // The weights of the last step have been read: their buffer is free.
      shared_.weight_ring.producer_wait(weight_place());
      add_blind_sums<Config>(item, problem_, arrays_, offset_,
                             [&](int pair, const float (&sums)[2]) { dv_.add(pair, sums); });
      store_result(dv, problem_, item, dv_, 1.0f, shared_.weights[warp_of_group()]);
    }
  }

 private:
  // Returns the number of steps.
  __device__ __forceinline__ int begin(const Item& item) {
    dv_.clear();
    edges_ = {first_key_of(item, cta_rank()), item.key_end, item.batch};
    if constexpr (Config::kSegments) {
      load_key_segments(problem_, arrays_, item.batch, edges_.first_key, segments_);
    }
    shared_.key_ring.consumer_wait(keys_);
    clear_padding<KeyTile>(shared_.keys, problem_, item, cta_rank(), kKeyBarrier);
    return item.num_steps();
  }

  // dV of an item.
  __device__ __forceinline__ void add_up(int count) {
#pragma unroll 1
    for (int n = count; n > 0; --n) step(n < count);
    dv_.wait();
    release_previous_outputs();
  }

  // In the beginning dV of the step before is on its way, in the end that of this one.
  __device__ __forceinline__ void step(bool has_previous) {
    shared_.query_ring.consumer_wait(query_place());
    issue_logits();
    wgmma_wait<1>();
    if (has_previous) release_previous_outputs();
    wgmma_wait<0>();
    pin(s_);
    shared_.step_ring.consumer_wait(step_place());
    change_and_mask<Config>(s_, problem_, arrays_, edges_, segments_, offset_,
                            shared_.steps[step_place().slot()]);
    shared_.weight_ring.producer_wait(weight_place());
    shared_.output_ring.consumer_wait(output_place());
    const u32 lse = shared_address(shared_.lse[query_place().slot()]) + threadIdx.x % 4 * 8;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      compute_weights<Config, kParts>(s_, p_, slopes_, problem_, lse, part);
      send_weights(part);
      issue_dv(part);
    }
    wgmma_commit();
    fence_proxy_async();  // The copy engine overwrites lse.
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(&shared_.weight_ring.full[0]);
    __syncwarp();
    shared_.query_ring.consumer_release(query_place().slot(), cta_rank());
    shared_.step_ring.consumer_release(step_place().slot(), 0);
    ++steps_;
  }

  // Gives back dO of the step before.
  __device__ __forceinline__ void release_previous_outputs() {
    const int slot = place_at<Config::kOutputStages>(steps_ - 1).slot();
    shared_.output_ring.consumer_release(slot, cta_rank());
  }

  // S = K Q^T.
  __device__ __forceinline__ void issue_logits() {
    const u32 keys = KeyTile::descriptor(shared_address(shared_.keys));
    const u32 queries =
        QueryTile::descriptor(shared_address(shared_.queries[query_place().slot()]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / kWgmmaK<Element>; ++i) {
      wgmma<Element, true, true>(s_, keys + KeyTile::advance(0, i),
                                 queries + QueryTile::advance(0, i), i > 0);
    }
    wgmma_commit();
  }

  // A part of P for the consumer of dK; with a soft cap, of the slopes, which are all it needs.
  __device__ __forceinline__ void send_weights(int part) {
    const auto& words = Config::kSoftCap ? slopes_ : p_;
#pragma unroll
    for (int j = 0; j < kSteps / kParts; ++j) {
      const int i = part * (kSteps / kParts) + j;
      LogitBuffer::write_packed(words[i], shared_.weights[warp_of_group()], i);
    }
  }

  // dV = dV + P dO.
  __device__ __forceinline__ void issue_dv(int part) {
    const u32 outputs =
        OutputTileByRows::descriptor(shared_address(shared_.outputs[output_place().slot()]));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kSteps / kParts; ++j) {
      const int i = part * (kSteps / kParts) + j;
      dv_.add_product<OutputTileByRows>(p_[i], outputs, i);
    }
  }

  // Places in rings.
  __device__ __forceinline__ RingPlace<kStepStages> step_place() const {
    return place_at<kStepStages>(steps_);
  }
  __device__ __forceinline__ QueryPlace query_place() const {
    return place_at<Config::kStages>(steps_);
  }
  __device__ __forceinline__ OutputPlace output_place() const {
    return place_at<Config::kOutputStages>(steps_);
  }
  __device__ __forceinline__ RingPlace<1> weight_place() const { return place_at<1>(steps_); }

  SharedStorage& shared_;
  const Problem& problem_;
  const Arrays& arrays_;
  RingPlace<1> keys_;
  int steps_ = 0;
  Edges edges_;
  int segments_[2];
  int offset_ = 0;
  float s_[kLogits];
  u32 p_[kSteps][4];
  u32 slopes_[kSteps][4];  // With a soft cap.
  Accumulators<Config::kValueDim> dv_;
};

// dP, dS and dK.
class GradientConsumer {
 public:
  __device__ __forceinline__ GradientConsumer(SharedStorage& shared, const Problem& problem)
      : shared_(shared), problem_(problem) {}

  __device__ __forceinline__ void run(Items items, const TensorMap& dk) {
#pragma unroll 1
    for (; items.has_item(); items.next()) {
      const Item& item = items.item();
      const int count = item.num_steps();
      shared_.value_ring.consumer_wait(values_);
      clear_padding<ValueTile>(shared_.values, problem_, item, cta_rank(), kValueBarrier);
      dk_.clear();
      if (count > 0) add_up(count);
      __syncwarp();  // As in WeightConsumer.
      shared_.value_ring.consumer_release(0, 0);
      values_.next();
      // dQ of both CTAs has been multiplied from the slot.
      shared_.logit_ring.producer_wait(logit_place());
      store_result(dk, problem_, item, dk_, problem_.scale, rows_of_slot());
    }
  }

 private:
  // dK of an item.
  __device__ __forceinline__ void add_up(int count) {
#pragma unroll 1
    for (int n = count; n > 0; --n) step(n < count);
    dk_.wait();
    release_previous_queries();
  }

  // In the beginning dK of the step before is on its way, in the end that of this one.
  __device__ __forceinline__ void step(bool has_previous) {
    shared_.output_ring.consumer_wait(output_place());
    issue_weight_gradients();
    wgmma_wait<1>();
    if (has_previous) release_previous_queries();
    shared_.weight_ring.consumer_wait(weight_place());
    wgmma_wait<0>();
    pin(dp_);
    compute_logit_gradients();
    shared_.weight_ring.consumer_release(0, 0);
    shared_.output_ring.consumer_release(output_place().slot(), cta_rank());
    shared_.query_ring.consumer_wait(query_place());
    write_logit_gradients();
    issue_dk();
    ++steps_;
  }

  // Gives back the queries of the step before.
  __device__ __forceinline__ void release_previous_queries() {
    const int slot = place_at<Config::kStages>(steps_ - 1).slot();
    shared_.query_ring.consumer_release(slot, cta_rank());
  }

  // dP = V dO^T.
  __device__ __forceinline__ void issue_weight_gradients() {
    const u32 values = ValueTile::descriptor(shared_address(shared_.values));
    const u32 outputs =
        OutputTile::descriptor(shared_address(shared_.outputs[output_place().slot()]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kValueDim / kWgmmaK<Element>; ++i) {
      wgmma<Element, true, true>(dp_, values + ValueTile::advance(0, i),
                                 outputs + OutputTile::advance(0, i), i > 0);
    }
    wgmma_commit();
  }

  // dS in 16 bits, from the weights of the other consumer and dP.
  __device__ __forceinline__ void compute_logit_gradients() {
    const u32 delta = shared_address(shared_.delta[output_place().slot()]) + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      u32 words[4];
      LogitBuffer::read_packed(words, shared_.weights[warp_of_group()], i);
#pragma unroll
      for (int word = 0; word < 4; word += 2) {
        const u32 slopes[2] = {words[word], words[word + 1]};
        logit_gradients<Element>(dp_, i * 8 + word * 2, slopes, delta, ds_[i][word],
                                 ds_[i][word + 1]);
      }
    }
    fence_proxy_async();  // The copy engine overwrites delta.
    __syncwarp();
  }

  // This warp's 16 keys of the slot of dS: a piece like those that are staged.
  __device__ __forceinline__ unsigned char* rows_of_slot() {
    return shared_.logits[logit_place().slot()] + cta_rank() * kHalfOfLogits +
           warp_of_group() * kStagingBytes;
  }

  // Writes dS here, and copies it to the other CTA.
  __device__ __forceinline__ void write_logit_gradients() {
    const int slot = logit_place().slot();
    shared_.logit_ring.producer_wait(logit_place());
    unsigned char* rows = rows_of_slot();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) LogitBuffer::write_packed(ds_[i], rows, i);
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      u64* full = &shared_.logit_ring.full[slot];
      cp_async_bulk_to_block(rows, rows, kStagingBytes, full, 1 - cta_rank());
      // The other CTA's warp of this number sends as many bytes.
      mbarrier_arrive_expect_tx(full, kStagingBytes);
    }
    __syncwarp();
  }

  // dK = dK + dS Q.
  __device__ __forceinline__ void issue_dk() {
    const u32 queries =
        QueryTileByRows::descriptor(shared_address(shared_.queries[query_place().slot()]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      dk_.add_product<QueryTileByRows>(ds_[i], queries, i);
    }
    wgmma_commit();
  }

  // Places in rings.
  __device__ __forceinline__ QueryPlace query_place() const {
    return place_at<Config::kStages>(steps_);
  }
  __device__ __forceinline__ OutputPlace output_place() const {
    return place_at<Config::kOutputStages>(steps_);
  }
  __device__ __forceinline__ RingPlace<1> weight_place() const { return place_at<1>(steps_); }
  __device__ __forceinline__ LogitPlace logit_place() const {
    return place_at<Config::kLogitStages>(steps_);
  }

  SharedStorage& shared_;
  const Problem& problem_;
  RingPlace<1> values_;
  int steps_ = 0;
  float dp_[kLogits];
  u32 ds_[kSteps][4];
  Accumulators<Config::kHeadDim> dk_;
};

// ---- The warpgroup of dQ -----------------------------------------------------------------------

class QueryGradients {
 public:
  __device__ __forceinline__ QueryGradients(SharedStorage& shared, const Problem& problem,
                                            const Arrays& arrays, const TensorMap& dq)
      : shared_(shared), problem_(problem), dq_(dq), turns_(arrays) {}

  __device__ __forceinline__ void run(Items items) {
#pragma unroll 1
    for (; items.has_item(); items.next()) {
      const Item& item = items.item();
      shared_.key_ring.consumer_wait(keys_);
      clear_padding<OtherKeyTile>(shared_.other_keys, problem_, item, 1 - cta_rank(),
                                  kOtherKeyBarrier);
#pragma unroll 1
      for (int n = item.num_steps(); n > 0; --n) step(item);
      if constexpr (Config::kInOrder) {
        if (threadIdx.x % kWarp == 0) turns_.end_pending();
      }
      __syncwarp();  // As in WeightConsumer.
      shared_.key_ring.consumer_release(0, 0);
      keys_.next();
    }
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
  }

 private:
  __device__ __forceinline__ void step(const Item& item) {
    shared_.step_ring.consumer_wait(step_place());
    const Step& step = shared_.steps[step_place().slot()];
    shared_.logit_ring.consumer_wait(logit_place());
    if constexpr (Config::kInOrder) take_turn(item, step);
    add_columns<0>(item, step);
    if constexpr (kQueryColumns > kPiece) add_columns<kPiece>(item, step);
    shared_.step_ring.consumer_release(step_place().slot(), 0);
    ++steps_;
  }

  // 64 queries of dQ = dS^T K: of this CTA's columns, 64 from kColumn on. CTA 1 may have fewer than
  // CTA 0. The copy engine leaves out columns behind the head dimension.
  template <int kColumn>
  __device__ __forceinline__ void add_columns(const Item& item, const Step& step) {
    constexpr bool kIsLast = kColumn + kPiece == kQueryColumns;
    const int first_column = cta_rank() * kQueryColumns + kColumn;
    const bool is_inside = uniform(first_column < Config::kHeadDim) != 0;
    if (is_inside) multiply(first_column, kColumn);
    if constexpr (kIsLast) shared_.logit_ring.consumer_release(logit_place().slot(), cta_rank());
    __syncwarp();
    if (is_inside) add_sums(item, step, first_column);
  }

  __device__ __forceinline__ void add_sums(const Item& item, const Step& step, int first_column) {
#pragma unroll
    for (int piece = 0; piece * QueryBuffer::kColumns < kPiece; ++piece) {
      const int to = first_column + piece * QueryBuffer::kColumns;
      unsigned char* staging = shared_.query_staging[warp_of_group()][piece];
      if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<kQueryPieces - 1>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < QueryBuffer::kColumns / 16; ++c) {
        float values[8];
#pragma unroll
        for (int r = 0; r < 8; ++r)
          values[r] = sums_[piece * QueryBuffer::kColumns / 2 + c * 8 + r];
        QueryBuffer::write(values, staging, c);
      }
      store_piece<true>(&dq_, 0, staging,
                        {to, step.block * kBlockQ + warp_of_group() * 16, step.head, item.batch});
    }
  }

  // Both tiles of keys: the other CTA's has this CTA's columns only.
  __device__ __forceinline__ void multiply(int first_column, int column) {
    const u32 logits = LogitTile::descriptor(shared_address(shared_.logits[logit_place().slot()]));
    const u32 own = KeyTileByRows::descriptor(shared_address(shared_.keys)) +
                    first_column / kPiece * (KeyTileByRows::kBoxBytes >> 4);
    const u32 other = OtherKeyTile::descriptor(shared_address(shared_.other_keys)) +
                      column / kPiece * (OtherKeyTile::kBoxBytes >> 4);
    constexpr int kStepsOfKeys = kKeys / kWgmmaK<Element>;
    const u32 own_logits = logits + cta_rank() * LogitTile::advance(0, kStepsOfKeys);
    const u32 other_logits = logits + (1 - cta_rank()) * LogitTile::advance(0, kStepsOfKeys);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepsOfKeys; ++i) {
      wgmma<Element, false, false>(sums_, other_logits + LogitTile::advance(0, i),
                                   other + OtherKeyTile::advance(0, i), i > 0);
    }
#pragma unroll
    for (int i = 0; i < kStepsOfKeys; ++i) {
      wgmma<Element, false, false>(sums_, own_logits + LogitTile::advance(0, i),
                                   own + KeyTileByRows::advance(0, i), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(sums_);
  }

  // Waits until all blocks of keys before this one have added to this warp's queries.
  __device__ __forceinline__ void take_turn(const Item& item, const Step& step) {
    if (threadIdx.x % kWarp == 0) {
      const int num_heads = problem_.num_kv_heads * problem_.group_size;
      const int num_blocks = (problem_.num_queries + kBlockQ - 1) / kBlockQ;
      const int queries =
          ((item.batch * num_heads + step.head) * num_blocks + step.block) * (kBlockQ / 16) +
          warp_of_group();
      turns_.take(queries * kCtas + cta_rank(), step.turn);
    }
    __syncwarp();
  }

  // Places in rings.
  __device__ __forceinline__ RingPlace<kStepStages> step_place() const {
    return place_at<kStepStages>(steps_);
  }
  __device__ __forceinline__ LogitPlace logit_place() const {
    return place_at<Config::kLogitStages>(steps_);
  }

  SharedStorage& shared_;
  const Problem& problem_;
  const TensorMap& dq_;
  Turns turns_;
  RingPlace<1> keys_;
  int steps_ = 0;
  float sums_[kPiece / 2];
};

// ---- Kernel ------------------------------------------------------------------------------------

// Before another CTA copies to this one or arrives at its barriers.
__device__ __forceinline__ void init_rings(SharedStorage& shared) {
  if (threadIdx.x == 0) {
    shared.item_ring.init(3 * 4 + 3);  // The warps of consumers, and three producers.
    shared.key_ring.init(2 * 4);
    shared.value_ring.init(4);
    shared.step_ring.init(2 * 4);
    shared.query_ring.init(2 * 4);
    shared.output_ring.init(2 * 4);
    shared.weight_ring.init(4, 4);
    shared.logit_ring.init(4, 4);
    fence_mbarrier_init();
  }
  __syncwarp();
  barrier_cluster();
}

__global__ void __launch_bounds__(kThreads, 1) attention_backward_wide(
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
  init_rings(shared);

  const Schedule schedule(problem, arrays);
  const Items items(shared);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / kWarp);
    const Loads loads{queries, keys, values, outputs, sums};
    if (warp == 0 && elect_one()) QueryProducer(shared, problem, loads).run(items);
    if (warp == 1 && elect_one()) OutputProducer(shared, problem, loads).run(items);
    if (warp == 2 && elect_one()) StepProducer(shared, problem).run(schedule, items);
    if (warp == 3 && elect_one()) ItemProducer(shared).run(schedule);
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kConsumerRegisters>();
    WeightConsumer(shared, problem, arrays).run(schedule, items, dv);
  } else if (warpgroup == 2) {
    setmaxnreg_inc<kConsumerRegisters>();
    GradientConsumer(shared, problem).run(items, dk);
  } else {
    setmaxnreg_dec<kQueryRegisters>();
    QueryGradients(shared, problem, arrays, dq).run(items);
  }
  __syncwarp();
  // The other CTA releases slots of this one, and copies to it, until it has ended, too.
  barrier_cluster();
}

}  // namespace jaxkernels
