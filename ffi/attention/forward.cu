// out, lse = softmax(mask(soft_cap(scale q k^T))) v on Hopper tensor cores.
//
// A persistent grid works on items. An item is a block of queries of one head, 64 for each consumer
// warpgroup, and the blocks of keys that they see. One producer thread copies queries, keys and
// values into shared memory by TMA. Consumers multiply with wgmma:
//
//   S = Q K^T     queries and keys from shared memory, 64 x kBlockKv in float32 registers
//   P = exp2(S - max), rounded to 16 bits in registers, where it is the left operand of
//   O = O + P V   64 x kValueDim in float32 registers
//
// A step issues two products at once: S of the next block of keys, and O of the block before. The
// softmax of the next block runs while O is still being added to:
//
//   tensor cores    S1 | O0 | S2 | O1 | S3 | O2 | ...
//   other units          softmax1  | softmax2 | ...
//
// The next block after an item's last one is the first block of the next item, so that the tensor
// cores have work while results are stored. If `kTakesTurns`, the consumers issue their products in
// turn: the softmax of one runs beside the products of another.
//
// Blocks of keys are visited from the last one to the first one, so that the blocks at the causal
// edge come first. A block inside [whole_first, whole_end) needs no mask.
//
// A bias is copied by TMA, too: of each block of keys, 64 rows for each consumer, which adds it to
// its logits before the soft cap and the masks.
//
// Rows in registers: a thread has rows 16 w + l / 4 and 8 further of its warpgroup's 64 (warp w,
// lane l), and of each 8 columns two (wgmma.cuh). Four neighbouring lanes share a row.
//
// forward.py compiles this file with the macros that `Config` reads. Source: FlashAttention-3
// (arXiv:2407.08608), with the step across items of our Pallas kernel (docs/pallas-kernels.md).

#include "masks.cuh"
#include "padding.cuh"
#include "ring.cuh"
#include "staging.cuh"

namespace jaxkernels {

using namespace tma;

struct Config {
  using Element = JK_ELEMENT;
  // Head dimensions of queries and of values, padded to multiples of 16.
  static constexpr int kHeadDim = JK_HEAD_DIM;
  static constexpr int kValueDim = JK_VALUE_DIM;
  static constexpr int kBlockKv = JK_BLOCK_KV;
  static constexpr int kStages = JK_NUM_STAGES;
  static constexpr int kConsumers = JK_NUM_CONSUMERS;
  static constexpr bool kTakesTurns = JK_TAKES_TURNS;
  // Whether O is rescaled only if a maximum has grown by more than 2^8.
  static constexpr bool kLazyRescale = JK_LAZY_RESCALE;
  // Of each 8 exponentials of a thread, so many are polynomials on the FMA units.
  static constexpr int kPolynomials = JK_NUM_POLYNOMIALS;
  // A query sees keys from `left` before it to `right` behind it.
  static constexpr bool kHasLeft = JK_HAS_LEFT;
  static constexpr bool kHasRight = JK_HAS_RIGHT;
  // Whether the last block of keys is not whole.
  static constexpr bool kIsRagged = JK_IS_RAGGED;
  static constexpr bool kQueryLengths = JK_QUERY_LENGTHS;
  static constexpr bool kKeyLengths = JK_KEY_LENGTHS;
  static constexpr bool kSegments = JK_SEGMENTS;
  static constexpr bool kQueryOffset = JK_QUERY_OFFSET;
  static constexpr bool kSoftCap = JK_SOFT_CAP;
  static constexpr bool kBias = JK_BIAS_STAGES > 0;
  static constexpr int kBiasStages = kBias ? JK_BIAS_STAGES : 1;
  // Bytes that rows of the bias are a multiple of: 16, or 8 or 4, for which TMA has no copies.
  static constexpr int kBiasUnit = JK_BIAS_UNIT;
};

// The sizes of a launch.
struct Problem {
  int num_queries, num_keys, num_heads, group_size;
  int num_q_blocks;  // Items of a head.
  int plan_columns;
  int left, right;
  float factor;  // What a product is multiplied by: to logits in base 2, or to those over the cap.
  float cap;     // The soft cap in base 2.
  float bias_factor;             // What the bias is multiplied by, to be added to a product.
  int bias_batches, bias_heads;  // 1, or as many as there are.
};

// Arrays that are read or written by ordinary instructions. Those that Config leaves out are not
// touched.
struct Arrays {
  float* lse;       // (batch, head, query)
  const int* plan;  // For each CTA: how many items it has, and their numbers.
  const int* query_lengths;
  const int* key_lengths;
  const int* query_segments;
  const int* key_segments;  // Rows are whole blocks.
  // (batch, block of queries, 4): the blocks of keys that may share a segment, and those of one
  // segment only.
  const int* segment_blocks;
  const int* query_offset;
};

// ---- Constants that follow from Config ---------------------------------------------------------

using Element = Config::Element;
constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = Config::kConsumers;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kRows = kConsumers * kWgmmaM;  // Queries of an item.
constexpr int kBlockKv = Config::kBlockKv;

using QueryTile = OperandTile<Element, kWgmmaM, Config::kHeadDim, true>;
using KeyTile = OperandTile<Element, kBlockKv, Config::kHeadDim, true>;
using ValueTile = OperandTile<Element, Config::kValueDim, kBlockKv, false>;

constexpr int kLogits = kBlockKv / 2;  // A thread has so many in a block.
constexpr int kOutputs = Config::kValueDim / 2;
constexpr int kSteps = kBlockKv / kWgmmaK<Element>;  // Of P V.

// The bias of a consumer's queries. A warp's rows of a box are laid out as in a staging buffer.
using BiasTile = OperandTile<Element, kWgmmaM, kBlockKv, true>;
constexpr int kBiasBytes = Config::kBias ? BiasTile::kBytes : 16;
// Warps copy the bias, one for each consumer.
constexpr bool kWarpsCopyBias = Config::kBias && Config::kBiasUnit < 16;

using Buffer = StagingBuffer<Element, 128>;
constexpr int kPieces = (Config::kValueDim + Buffer::kColumns - 1) / Buffer::kColumns;

// Registers of a thread by role. Together they are those that the CTA has at launch.
constexpr int kCopierRegisters = !kWarpsCopyBias ? 0 : kConsumers == 3 ? 24 : 16;
constexpr int kProducerRegisters = (kConsumers == 3 ? 32 : 24) + kCopierRegisters;
constexpr int kConsumerRegisters = (kConsumers == 3 ? 160 : 240) - kCopierRegisters / kConsumers;

static_assert(Config::kHeadDim % 16 == 0 && Config::kValueDim % 16 == 0, "whole steps of wgmma");
static_assert(kBlockKv % 16 == 0 && kBlockKv <= 256, "one wgmma wide, whole steps of P V");
static_assert(1 <= kConsumers && kConsumers <= 3, "registers for three consumers at most");
static_assert(Config::kStages >= 2, "values are read while the next keys are");
static_assert(0 <= Config::kPolynomials && Config::kPolynomials < 8, "of each 8 exponentials");

struct SharedStorage {
  alignas(1024) unsigned char queries[kConsumers][QueryTile::kBytes];
  alignas(1024) unsigned char keys[Config::kStages][KeyTile::kBytes];
  alignas(1024) unsigned char values[Config::kStages][ValueTile::kBytes];
  // Each consumer warp stages 16 rows of 64 columns of the output.
  alignas(1024) unsigned char staging[kConsumers * 4][kStagingBytes];
  alignas(Config::kBias ? 1024 : 16) unsigned char biases[Config::kBias ? kConsumers : 1]
                                                         [Config::kBiasStages][kBiasBytes];
  Ring<Config::kStages> key_ring, value_ring;
  Ring<Config::kBiasStages> bias_rings[Config::kBias ? kConsumers : 1];
  u64 queries_full[kConsumers], queries_empty[kConsumers];
};
static_assert(sizeof(SharedStorage) <= JK_SMEM_BYTES, "what the host gives is enough");

using Place = RingPlace<Config::kStages>;
using BiasPlace = RingPlace<Config::kBiasStages>;

// ---- Items -------------------------------------------------------------------------------------

struct Item {
  int batch, head;
  int first_query;  // Its index.
  int first_block, end_block;
  int whole_first, whole_end;  // Blocks that no mask of indices or lengths touches.
  int same_first, same_end;    // Blocks that no mask of segments touches.
  int key_end;                 // Keys from here on are padding.
  int query_end;               // Positions of queries from here on are padding.

  // The blocks of keys that are visited first and last.
  __device__ __forceinline__ int begin() const { return end_block - 1; }
  __device__ __forceinline__ int last() const { return first_block; }
};

// The items of this CTA, in the order of the plan.
class Schedule {
 public:
  __device__ __forceinline__ Schedule(const Problem& problem, const Arrays& arrays)
      : problem_(problem),
        arrays_(arrays),
        plan_(arrays.plan + blockIdx.x * problem.plan_columns),
        count_(plan_[0]) {
    if constexpr (Config::kQueryOffset) offset_ = *arrays.query_offset;
  }

  __device__ __forceinline__ bool has_item() const { return nth_ < count_; }
  __device__ __forceinline__ void advance() { ++nth_; }
  // The position of the first query in the sequence.
  __device__ __forceinline__ int offset() const { return offset_; }

  __device__ __forceinline__ Item item() const {
    const int number = plan_[1 + nth_];
    const int head = number / problem_.num_q_blocks;
    const int q_block = number - head * problem_.num_q_blocks;
    Item item;
    item.batch = head / problem_.num_heads;
    item.head = head - item.batch * problem_.num_heads;
    item.first_query = q_block * kRows;
    item.key_end = problem_.num_keys;
    if constexpr (Config::kKeyLengths) {
      item.key_end = min(max(arrays_.key_lengths[item.batch], 0), problem_.num_keys);
    }
    item.query_end = problem_.num_queries + offset_;
    if constexpr (Config::kQueryLengths) {
      item.query_end = min(max(arrays_.query_lengths[item.batch], 0), item.query_end);
    }
    find_blocks(item, q_block);
    return item;
  }

 private:
  // Which blocks of keys the queries see: at least one, as every item has the same structure.
  __device__ __forceinline__ void find_blocks(Item& item, int q_block) const {
    const int begin = item.first_query + offset_;
    const int end = min(begin + kRows, item.query_end);
    int first = 0, last = item.key_end, whole_first = 0, whole_last = item.key_end;
    if constexpr (Config::kHasLeft) {
      first = max(begin - problem_.left, 0);
      whole_first = max(begin + kRows - 1 - problem_.left, 0);
    }
    if constexpr (Config::kHasRight) {
      last = min(max(end + problem_.right, 0), item.key_end);
      whole_last = min(max(begin + problem_.right + 1, 0), item.key_end);
    }
    if (Config::kQueryLengths && end <= begin) last = 0;
    item.first_block = first / kBlockKv;
    item.end_block = (last + kBlockKv - 1) / kBlockKv;
    item.whole_first = (whole_first + kBlockKv - 1) / kBlockKv;
    item.whole_end = whole_last / kBlockKv;
    item.same_first = 0, item.same_end = 0;
    if constexpr (Config::kSegments) {
      const int* blocks =
          arrays_.segment_blocks + (item.batch * problem_.num_q_blocks + q_block) * 4;
      item.first_block = max(item.first_block, blocks[0]);
      item.end_block = min(item.end_block, blocks[1]);
      item.same_first = blocks[2], item.same_end = blocks[3];
    }
    // The block of the last key: values of the blocks behind it may be no numbers.
    const int last_block = max(item.key_end - 1, 0) / kBlockKv;
    item.first_block = min(item.first_block, last_block);
    item.end_block = max(item.end_block, item.first_block + 1);
  }

  const Problem& problem_;
  const Arrays& arrays_;
  const int* plan_;
  int count_;
  int nth_ = 0;
  int offset_ = 0;
};

// ---- Producer: one thread ----------------------------------------------------------------------

struct Loads {
  const TensorMap& queries;
  const TensorMap& keys;
  const TensorMap& values;
  const TensorMap& bias;
};

class Producer {
 public:
  __device__ __forceinline__ Producer(SharedStorage& shared, const Loads& loads)
      : shared_(shared), loads_(loads) {}

  // The order is that in which consumers wait: keys of a block, the values of the block before, the
  // bias of the block.
  __device__ __forceinline__ void run(Schedule schedule, const Problem& problem) {
    u32 parity = 1;
    for (; schedule.has_item(); schedule.advance(), parity ^= 1) {
      const Item item = schedule.item();
      kv_head_ = item.head / problem.group_size;
      bias_batch_ = problem.bias_batches > 1 ? item.batch : 0;
      bias_head_ = problem.bias_heads > 1 ? item.head : 0;
      load_keys(item, item.begin());
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) load_queries(item, c, parity);
      if constexpr (Config::kBias && !kWarpsCopyBias) load_bias(item, item.begin());
      for (int block = item.begin(); block != item.last(); --block) {
        load_keys(item, block - 1);
        load_values(item, block);
        if constexpr (Config::kBias && !kWarpsCopyBias) load_bias(item, block - 1);
      }
      load_values(item, item.last());
    }
  }

 private:
  __device__ __forceinline__ void load_queries(const Item& item, int consumer, u32 parity) {
    u64* full = &shared_.queries_full[consumer];
    mbarrier_wait_parity(&shared_.queries_empty[consumer], parity);
    mbarrier_arrive_expect_tx(full, QueryTile::kBytes);
    TileLoad<QueryTile>::load(shared_.queries[consumer], &loads_.queries, full,
                              item.first_query + consumer * kWgmmaM, 0, item.head, item.batch);
  }

  __device__ __forceinline__ void load_keys(const Item& item, int block) {
    u64* full = shared_.key_ring.producer_acquire(keys_, KeyTile::kBytes);
    TileLoad<KeyTile>::load(shared_.keys[keys_.slot()], &loads_.keys, full, block * kBlockKv, 0,
                            kv_head_, item.batch);
    keys_.next();
  }

  __device__ __forceinline__ void load_values(const Item& item, int block) {
    u64* full = shared_.value_ring.producer_acquire(values_, ValueTile::kBytes);
    TileLoad<ValueTile>::load(shared_.values[values_.slot()], &loads_.values, full, 0,
                              block * kBlockKv, kv_head_, item.batch);
    values_.next();
  }

  __device__ __forceinline__ void load_bias(const Item& item, int block) {
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      u64* full = shared_.bias_rings[c].producer_acquire(biases_, BiasTile::kBytes);
      TileLoad<BiasTile>::load(shared_.biases[c][biases_.slot()], &loads_.bias, full,
                               item.first_query + c * kWgmmaM, block * kBlockKv, bias_head_,
                               bias_batch_);
    }
    biases_.next();
  }

  SharedStorage& shared_;
  const Loads& loads_;
  Place keys_, values_;
  BiasPlace biases_;
  int kv_head_ = 0, bias_batch_ = 0, bias_head_ = 0;
};

// ---- A bias that TMA cannot copy ---------------------------------------------------------------

// A warp that copies the bias of a consumer's queries where the rows are no whole units of 16
// bytes. It has copies of 4 or 8 bytes in flight (cp.async). Rows of all sizes begin at a multiple
// of them.
class BiasCopier {
 public:
  __device__ __forceinline__ BiasCopier(SharedStorage& shared, const Problem& problem,
                                        const unsigned char* bias, int consumer)
      : problem_(problem),
        ring_(shared.bias_rings[consumer]),
        tiles_(tma::shared_address(shared.biases[consumer])),
        bias_(bias + lane_across()),
        consumer_(consumer) {}

  __device__ __forceinline__ void run(Schedule schedule) {
    const long long row_bytes = problem_.num_keys * Config::Element::kBytes;
    for (; schedule.has_item(); schedule.advance()) {
      const Item item = schedule.item();
      const int batch = problem_.bias_batches > 1 ? item.batch : 0;
      const int head = problem_.bias_heads > 1 ? item.head : 0;
      const int first = item.first_query + consumer_ * kWgmmaM;
      const long long row =
          static_cast<long long>(batch * problem_.bias_heads + head) * problem_.num_queries + first;
      const unsigned char* rows = bias_ + (row + lane_row()) * row_bytes;
      for (int block = item.begin(); block >= item.last(); --block) {
        copy(rows, block, problem_.num_queries - first, row_bytes);
      }
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();  // A thread leaves no copies behind.
  }

 private:
  // A few lanes copy 32 bytes of a row.
  static constexpr int kLanes = 32 / Config::kBiasUnit;
  static constexpr int kRowsAtOnce = kWarp / kLanes;
  static __device__ __forceinline__ int lane_across() {
    return threadIdx.x % kLanes * Config::kBiasUnit;
  }
  static __device__ __forceinline__ int lane_row() { return threadIdx.x % kWarp / kLanes; }

  __device__ __forceinline__ void copy(const unsigned char* rows, int block, int num_rows,
                                       long long row_bytes) {
    ring_.producer_wait(place_);
    const u32 tile = tiles_ + place_.slot() * kBiasBytes;
    const int first_byte = block * kBlockKv * Config::Element::kBytes;
    const int num_bytes = static_cast<int>(row_bytes) - first_byte - lane_across();
    const unsigned char* from = rows + first_byte;
#pragma unroll 1
    for (int row = lane_row(); row < kWgmmaM; row += kRowsAtOnce, from += kRowsAtOnce * row_bytes) {
#pragma unroll
      for (int i = 0; i < kBlockKv / 16; ++i) {
        const u32 to = i / 4 * BiasTile::kBoxBytes + swizzled<128>(row, i % 4 * 32 + lane_across());
        cp_async<Config::kBiasUnit>(tile + to, from + i * 32, row < num_rows && i * 32 < num_bytes);
      }
    }
    cp_async_arrive(&ring_.full[place_.slot()]);
    place_.next();
  }

  const Problem& problem_;
  Ring<Config::kBiasStages>& ring_;
  const u32 tiles_;
  const unsigned char* bias_;
  const int consumer_;
  BiasPlace place_;
};

// ---- Softmax -----------------------------------------------------------------------------------

// Finite: a row that has seen no key yet has no maximum, and -inf - -inf is no number.
constexpr float kNoMaximum = -3.0e38f;
// A logit that is masked.
__device__ __forceinline__ float hidden() { return __uint_as_float(0xff800000u); }
// What the logsumexp of a query that sees no key is: the reference's masked logit.
constexpr float kMaskedLogit = JK_MASKED_LOGIT;
constexpr float kLn2 = 0.6931471805599453f;
// The growth of a maximum, in base 2, that a lazy rescale passes over: P is at most 2^8.
constexpr float kMaxGrowth = 8.0f;

// 2^x on the FMA units. x is split into the nearest integer and a rest in [-1/2, 1/2], whose power
// is a polynomial (its relative error is 2e-7). NaN stays NaN.
__device__ __forceinline__ float exp2_polynomial(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the integer.
  x = max_nan(x, -126.0f);
  const float shifted = x + kRound;
  const float rest = x - (shifted - kRound);
  float power = 0.0013276472f;
  power = fmaf(power, rest, 0.009675542f);
  power = fmaf(power, rest, 0.05550713f);
  power = fmaf(power, rest, 0.2402212f);
  power = fmaf(power, rest, 0.69314694f);
  power = fmaf(power, rest, 1.0000001f);
  return power * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
}

// The running maxima and sums of a thread's two rows. A thread adds up its own columns only.
struct Statistics {
  float maximum[2] = {kNoMaximum, kNoMaximum};
  float sum[2] = {0.0f, 0.0f};

  // S becomes P, in float32. Returns what O and the sums of the blocks before are to be scaled by.
  // Logits are `factor` times S, in base 2.
  __device__ __forceinline__ void update(float (&s)[kLogits], float factor, float (&fade)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = s[2 * h];
#pragma unroll
      for (int i = 0; i < kLogits; i += 4) {
        top = fmaxf(top, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      top *= factor;
      const bool grows = top > maximum[h] + (Config::kLazyRescale ? kMaxGrowth : 0.0f);
      const float next = grows ? top : maximum[h];
      fade[h] = grows ? exp2_approximate(maximum[h] - next) : 1.0f;
      maximum[h] = next;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kLogits; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[i + 2 * h + e];
          const float power = fmaf(x, factor, -next);
          const bool is_polynomial = (i / 4 * 2 + e) % 8 < Config::kPolynomials;
          x = is_polynomial ? exp2_polynomial(power) : exp2_approximate(power);
          total += x;
        }
      }
      sum[h] = fmaf(sum[h], fade[h], total);
    }
  }

  // Adds up the columns of the four threads that share a row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
    }
  }
};

// ---- Consumers ---------------------------------------------------------------------------------

// Named barriers from here on: one for each consumer's turn, then one for each consumer.
constexpr u32 kFirstTurn = 1;
constexpr u32 kFirstBarrier = kFirstTurn + kConsumers;

class Consumer {
 public:
  __device__ __forceinline__ Consumer(SharedStorage& shared, const Problem& problem,
                                      const Arrays& arrays, const TensorMap& out)
      : shared_(shared),
        problem_(problem),
        arrays_(arrays),
        out_(out),
        index_(uniform(threadIdx.x / kWarpgroup) - 1),
        queries_(QueryTile::descriptor(shared_address(shared.queries[index_]))),
        first_keys_(KeyTile::descriptor(shared_address(shared.keys))),
        first_values_(ValueTile::descriptor(shared_address(shared.values))) {}

  __device__ __forceinline__ void run(Schedule schedule) {
    if (!schedule.has_item()) return;
    offset_ = schedule.offset();
    free_everything();
    Item item = schedule.item();
    begin(item);
    while (true) {
      for (int block = item.begin(); block != item.last();) step(item, --block);
      schedule.advance();
      if (!schedule.has_item()) break;
      const Item next = schedule.item();
      bridge(item, next);
      item = next;
    }
    end(item);
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
  }

 private:
  // Consumers wait for their turn to issue products. The first one's turn is the first.
  __device__ __forceinline__ void free_everything() {
    if (Config::kTakesTurns && kConsumers > 1 && index_ == kConsumers - 1) {
      named_barrier_arrive<2 * kWarpgroup>(kFirstTurn);
    }
  }
  __device__ __forceinline__ void wait_for_turn() {
    if constexpr (Config::kTakesTurns && kConsumers > 1) {
      named_barrier_sync<2 * kWarpgroup>(kFirstTurn + index_);
    }
  }
  // `is_last`: no consumer's turn comes after the last consumer's last one.
  __device__ __forceinline__ void end_turn(bool is_last = false) {
    if constexpr (Config::kTakesTurns && kConsumers > 1) {
      if (is_last && index_ == kConsumers - 1) return;
      named_barrier_arrive<2 * kWarpgroup>(kFirstTurn + (index_ + 1) % kConsumers);
    }
  }

  // ---- Products ----

  __device__ __forceinline__ void issue_logits() {
    wgmma_fence();
    const u32 keys = first_keys_ + keys_.slot() * (KeyTile::kBytes >> 4);
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / kWgmmaK<Element>; ++i) {
      wgmma<Element, true, true>(s_, queries_ + QueryTile::advance(0, i),
                                 keys + KeyTile::advance(0, i), i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_outputs() {
    wgmma_fence();
    const u32 values = first_values_ + values_.slot() * (ValueTile::kBytes >> 4);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wgmma<Element, false>(o_, p_[i], values + ValueTile::advance(0, i), adds_ || i > 0);
    }
    wgmma_commit();
    adds_ = true;
  }

  // Waits for logits, and gives their keys back; after an item's last block its queries, too.
  template <int kPending>
  __device__ __forceinline__ void take_logits(const Item& item, int block) {
    wgmma_wait<kPending>();
    pin(s_);
    shared_.key_ring.consumer_release(keys_.slot(), 0);
    keys_.next();
    if (block == item.last() && threadIdx.x % kWarp == 0) {
      mbarrier_arrive(&shared_.queries_empty[index_]);
    }
  }

  __device__ __forceinline__ void take_outputs() {
    wgmma_wait<0>();
    pin(o_);
    shared_.value_ring.consumer_release(values_.slot(), 0);
    values_.next();
  }

  __device__ __forceinline__ void wait_for_queries() {
    mbarrier_wait_parity(&shared_.queries_full[index_], queries_parity_);
    queries_parity_ ^= 1;
  }

  // Waits for the values of a block. Padding in it becomes zero.
  __device__ __forceinline__ void wait_for_values(const Item& item, int block) {
    shared_.value_ring.consumer_wait(values_);
    const int first_of_padding = item.key_end - block * kBlockKv;
    // The copy engine has filled with zeros what lies beyond the last key.
    if (Config::kKeyLengths && first_of_padding < kBlockKv && item.key_end < problem_.num_keys) {
      clear_rows<ValueTile>(shared_.values[values_.slot()], first_of_padding, kBlockKv);
      end_clearing(kFirstBarrier + index_);
    }
  }

  // P of the products that follow.
  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) pack_lhs<Element>(s_, i, p_[i]);
  }

  __device__ __forceinline__ void rescale(const float (&fade)[2]) {
    if (Config::kLazyRescale && !__any_sync(0xffffffffu, fade[0] != 1.0f || fade[1] != 1.0f)) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o_[i] *= fade[i / 2 % 2];
  }

  // ---- Steps ----

  // The first logits of all.
  __device__ __forceinline__ void begin(const Item& item) {
    wait_for_queries();
    shared_.key_ring.consumer_wait(keys_);
    wait_for_turn();
    issue_logits();
    end_turn();
    take_logits<0>(item, item.begin());
    float fade[2];
    start_item(item);
    change_and_mask(item, item.begin());
    rows_.update(s_, factor(), fade);
    round_weights();
  }

  // O of the block before `block`, and the logits and weights of `block`.
  __device__ __forceinline__ void step(const Item& item, int block) {
    shared_.key_ring.consumer_wait(keys_);
    wait_for_turn();
    issue_logits();
    wait_for_values(item, block + 1);
    issue_outputs();
    end_turn();
    take_logits<1>(item, block);
    change_and_mask(item, block);
    float fade[2];
    rows_.update(s_, factor(), fade);
    take_outputs();
    rescale(fade);
    round_weights();
  }

  // O of an item's last block, and the logits and weights of the next item's first one.
  __device__ __forceinline__ void bridge(const Item& item, const Item& next) {
    const int block = next.begin();
    wait_for_queries();
    shared_.key_ring.consumer_wait(keys_);
    wait_for_turn();
    issue_logits();
    wait_for_values(item, item.last());
    issue_outputs();
    end_turn();
    finish_rows(item);
    take_logits<1>(next, block);
    start_item(next);
    change_and_mask(next, block);
    float fade[2];
    rows_.update(s_, factor(), fade);
    take_outputs();
    store(item);
    round_weights();
  }

  // O of the last block of all.
  __device__ __forceinline__ void end(const Item& item) {
    wait_for_values(item, item.last());
    wait_for_turn();
    issue_outputs();
    end_turn(true);
    finish_rows(item);
    take_outputs();
    store(item);
  }

  __device__ __forceinline__ void start_item(const Item& item) {
    rows_ = Statistics();
    if constexpr (Config::kSegments) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = min(query_of(item, h), problem_.num_queries - 1);
        segments_[h] = arrays_.query_segments[item.batch * problem_.num_queries + query];
      }
    }
  }

  // ---- Logits ----

  // The index of this thread's first (h = 0) or second row.
  __device__ __forceinline__ int query_of(const Item& item, int h) const {
    return item.first_query + index_ * kWgmmaM + threadIdx.x % kWarpgroup / kWarp * 16 +
           threadIdx.x % kWarp / 4 + 8 * h;
  }

  // What the logits are multiplied by, to be in base 2.
  __device__ __forceinline__ float factor() const {
    return Config::kSoftCap ? problem_.cap : problem_.factor;
  }

  __device__ __forceinline__ void add_bias() {
    auto& ring = shared_.bias_rings[index_];
    ring.consumer_wait(biases_);
    unsigned char* rows =
        shared_.biases[index_][biases_.slot()] + threadIdx.x % kWarpgroup / kWarp * kStagingBytes;
#pragma unroll
    for (int c = 0; c < kBlockKv / 16; ++c) {
      float bias[8];
      Buffer::read(bias, rows + c / 4 * BiasTile::kBoxBytes, c % 4);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        s_[8 * c + r] = fmaf(bias[r], problem_.bias_factor, s_[8 * c + r]);
      }
    }
    if constexpr (!kWarpsCopyBias) fence_proxy_async();  // The copy engine overwrites the bias.
    __syncwarp();
    ring.consumer_release(biases_.slot(), 0);
    biases_.next();
  }

  __device__ __forceinline__ void change_and_mask(const Item& item, int block) {
    if constexpr (Config::kBias) add_bias();
    if constexpr (Config::kSoftCap) {
#pragma unroll
      for (int i = 0; i < kLogits; ++i) s_[i] = tanh_by_exp2(s_[i] * problem_.factor);
    }
    constexpr bool kHasEdges =
        Config::kHasLeft || Config::kHasRight || Config::kIsRagged || Config::kKeyLengths;
    if (kHasEdges && (block < item.whole_first || block >= item.whole_end)) mask(item, block);
    if (Config::kSegments && (block < item.same_first || block >= item.same_end)) {
      mask_segments(item, block);
    }
  }

  __device__ __forceinline__ void mask(const Item& item, int block) {
    const int first_key = block * kBlockKv + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = query_of(item, h) + offset_;
      int end = item.key_end;
      if constexpr (Config::kHasRight) end = min(end, position + problem_.right + 1);
      end -= first_key;
      const int begin = Config::kHasLeft ? position - problem_.left - first_key : 0;
      hide_outside<Config::kHasLeft, true>(s_, h, begin, end, hidden());
    }
  }

  __device__ __forceinline__ void mask_segments(const Item& item, int block) {
    const int first_key = block * kBlockKv + threadIdx.x % 4 * 2;
    const int row = item.batch * whole_blocks<kBlockKv>(problem_.num_keys);
    hide_other_segments(s_, segments_, arrays_.key_segments + row + first_key, hidden());
  }

  // ---- Results ----

  // Stores an item's logsumexps, and keeps what its output is to be multiplied by: 0 for padding.
  // Queries that see no key have 0, too: blind_means.cu stores their output.
  __device__ __forceinline__ void finish_rows(const Item& item) {
    rows_.finish();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = query_of(item, h);
      const bool is_padding = Config::kQueryLengths && query + offset_ >= item.query_end;
      // The largest logit that a query sees has a weight of 1. Polynomials give masked ones 2^-126.
      const bool is_blind = rows_.sum[h] < 0.5f || is_padding;
      normalizer_[h] = is_blind ? 0.0f : 1.0f / rows_.sum[h];
      const float lse =
          is_blind ? kMaskedLogit : (rows_.maximum[h] + log2_approximate(rows_.sum[h])) * kLn2;
      if (threadIdx.x % 4 == 0 && query < problem_.num_queries) {
        arrays_.lse[(item.batch * problem_.num_heads + item.head) * problem_.num_queries + query] =
            lse;
      }
    }
  }

  // Stores an item's output. The next item's products begin with zeros.
  __device__ __forceinline__ void store(const Item& item) {
    adds_ = false;
    const u32 warp = threadIdx.x / kWarp - 4;
    unsigned char* staging = shared_.staging[warp];
    const int first_row = item.first_query + static_cast<int>(warp) * 16;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < Buffer::kColumns / 16; ++c) {
        if (piece * Buffer::kColumns + c * 16 >= Config::kValueDim) break;
        float values[8];
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          const float factor = normalizer_[r / 2 % 2];
          const float value = o_[(piece * Buffer::kColumns + c * 16) / 2 + r];
          // Padding may hold anything.
          values[r] = Config::kQueryLengths && factor == 0.0f ? 0.0f : value * factor;
        }
        Buffer::write(values, staging, c);
      }
      store_piece(&out_, 0, staging, {piece * Buffer::kColumns, first_row, item.head, item.batch});
    }
  }

  SharedStorage& shared_;
  const Problem& problem_;
  const Arrays& arrays_;
  const TensorMap& out_;
  const int index_;
  const u32 queries_, first_keys_, first_values_;
  Place keys_, values_;
  BiasPlace biases_;
  u32 queries_parity_ = 0;
  int offset_ = 0;
  bool adds_ = false;
  int segments_[2];
  Statistics rows_;
  float normalizer_[2];
  float s_[kLogits];
  u32 p_[kSteps][4];
  float o_[kOutputs];
};

// ---- Kernel ------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1)
    attention_forward(const __grid_constant__ TensorMap queries,
                      const __grid_constant__ TensorMap keys,
                      const __grid_constant__ TensorMap values,
                      const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap bias,
                      const unsigned char* bias_rows, float* lse, const int* plan,
                      const int* query_lengths, const int* key_lengths, const int* query_segments,
                      const int* key_segments, const int* segment_blocks, const int* query_offset,
                      const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const Arrays arrays{lse,          plan,           query_lengths, key_lengths, query_segments,
                      key_segments, segment_blocks, query_offset};
  const int warpgroup = threadIdx.x / kWarpgroup;

  if (threadIdx.x == 0) {
    prefetch_tensormap(&queries);
    prefetch_tensormap(&keys);
    prefetch_tensormap(&values);
    prefetch_tensormap(&out);
    if constexpr (Config::kBias && !kWarpsCopyBias) prefetch_tensormap(&bias);
    shared.key_ring.init(kConsumers * 4);
    shared.value_ring.init(kConsumers * 4);
    for (int c = 0; c < kConsumers; ++c) {
      if constexpr (Config::kBias) shared.bias_rings[c].init(4, kWarpsCopyBias ? kWarp : 1);
      mbarrier_init(&shared.queries_full[c], 1);
      mbarrier_init(&shared.queries_empty[c], 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const Schedule schedule(problem, arrays);
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / kWarp);
    if (warp == 0 && elect_one()) {
      const Loads loads{queries, keys, values, bias};
      Producer(shared, loads).run(schedule, problem);
    }
    if constexpr (kWarpsCopyBias) {
      if (1 <= warp && warp <= kConsumers) {
        BiasCopier(shared, problem, bias_rows, warp - 1).run(schedule);
      }
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    Consumer(shared, problem, arrays, out).run(schedule);
  }
}

}  // namespace jaxkernels
