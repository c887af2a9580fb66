// out = activation(alpha * lhs * rhs + bias) + residual on Hopper tensor cores.
//
// A persistent grid walks the output tiles. In each block one producer thread copies blocks of both
// operands into a ring of shared memory slots (TMA, one mbarrier for "full" and one for "empty" a
// slot), and warpgroups of consumers multiply them with wgmma into float32 registers, apply the
// epilogue there, and send the result out through swizzled staging buffers, a few to each warp,
// by TMA again.
//
//   cooperative consumers                      ping-pong consumers
//   share a tile, each 1/n of its rows:        take tiles in turn, so that one's epilogue
//   each block of operands is read by all      runs beside the other's products
//   +---------------------+                    +---------------------+ +---------------------+
//   |      consumer0      |                    |      consumer0      | |      consumer1      |
//   +---------------------+                    |       tile 0        | |       tile 1        |
//   |      consumer1      |                    |                     | |                     |
//   +---------------------+                    +---------------------+ +---------------------+
//
// Neighbouring blocks may form a cluster: those along m share the rhs, those along n the lhs; each
// loads a part of what it shares, and multicast writes it to all. Or k is divided (split K): by a
// cluster, whose blocks each multiply a part and add up the partial sums through distributed shared
// memory, in a fixed order; or without one, by tiles that TMA adds to the result, in any order.
//
// Operands lie in memory with either dimension contiguous: wgmma transposes 16-bit types in shared
// memory. TMA fills what a block reads beyond an array's edge with zeros and drops what it would
// write there.
//
// No tensor map takes rows that are not whole 16-byte units, and no copy begins off 16 bytes. But
// of an lhs with k contiguous every kResidues-th row (the 8th at the latest) begins as far off them
// as the one before, whole units behind it: the rows of one residue have a map of their own, which
// begins with the unit that the first of them begins in, and a tile has rows of one residue only.
//
//   units       |0.......|1.......|2.......|    the row begins `head` elements (here 4) behind
//   row i       |xxxxaaaaaaaaaaaaaaaaaaaa00|    the map's: x is the end of the row before it in
//   row i + 8   |xxxxbbbbbbbbbbbbbbbbbbbb00|    memory, 0 what TMA fills in
//
// Element head + k of such a row belongs to row k of the rhs, which is therefore read from its row
// -head on, where TMA fills in zeros; so k must not be the rhs' contiguous dimension. The x must be
// cleared nevertheless: zero times infinity is not zero.
//
// Source: the structure is CUTLASS' warp-specialised Hopper GEMM; the ladder and its figures are in
// docs/cuda-gemm.md. matmul.py compiles this file with the macros read by `Config`.

#include "wgmma.cuh"

namespace jaxkernels {

using namespace tma;

// What of a tile is stored while the next one is multiplied. Consumers that share a tile have
// nobody to multiply while they store it.
enum class Deferred {
  kNothing,
  // The results of the second of two wgmmas, behind the products of the next tile's first. They
  // wait in their accumulators.
  kHalf,
  // The last kNumPacked pieces, one by one behind the next tile's first steps. They wait in 16 bits
  // beside the next tile's accumulators, as many as there are registers for.
  kPacked,
};

struct Config {
  using Input = JK_INPUT;
  using Output = JK_OUTPUT;
  static constexpr int kBlockM = JK_BLOCK_M;
  static constexpr int kBlockN = JK_BLOCK_N;
  static constexpr int kBlockK = JK_BLOCK_K;
  static constexpr int kStages = JK_NUM_STAGES;
  static constexpr int kConsumers = JK_NUM_CONSUMERS;
  static constexpr bool kPingPong = JK_PING_PONG;
  // Buffers in which each warp stages pieces of the result.
  static constexpr int kStagingSlots = JK_NUM_STAGING;
  static constexpr Deferred kDeferred = Deferred::JK_DEFERRED;
  static constexpr int kNumPacked = JK_NUM_PACKED;
  static constexpr int kClusterM = JK_CLUSTER_M;
  static constexpr int kClusterN = JK_CLUSTER_N;
  static constexpr int kSplitK = JK_SPLIT_K;
  // Whether the parts of k are tiles of their own that are added to the result.
  static constexpr bool kReduceAdd = JK_REDUCE_ADD;
  // Whether the dimension that is contracted is the contiguous one.
  static constexpr bool kLhsIsKMajor = JK_LHS_IS_K_MAJOR;
  static constexpr bool kRhsIsKMajor = JK_RHS_IS_K_MAJOR;
  // A tile's rows are every so many-th of the result's.
  static constexpr int kResidues = JK_RESIDUES;
  // Whether one copy loads all of a block's boxes: the tensor map has a dimension of boxes.
  static constexpr bool kLhsStacksBoxes = JK_LHS_STACKS_BOXES;
  static constexpr bool kRhsStacksBoxes = JK_RHS_STACKS_BOXES;
  static constexpr bool kHasAlpha = JK_HAS_ALPHA;
  static constexpr bool kHasBias = JK_HAS_BIAS;
  static constexpr bool kHasResidual = JK_HAS_RESIDUAL;
  static constexpr bool kSavePreactivation = JK_SAVE_PREACTIVATION;
  // Whether the result's rows are whole 16-byte units, as TMA takes them.
  static constexpr bool kHasTmaRows = JK_HAS_TMA_ROWS;
};

// Elementwise; on values that end in 16 bits, hardware's approximations are exact enough.
template <bool kIsExact>
struct Activations {
  static __device__ __forceinline__ float none(float x) { return x; }
  static __device__ __forceinline__ float relu(float x) { return x != x ? x : fmaxf(x, 0.0f); }
  static __device__ __forceinline__ float silu(float x) {
    if constexpr (kIsExact) return x / (1.0f + expf(-x));
    return 0.5f * x * (1.0f + tanh(0.5f * x));
  }
  static __device__ __forceinline__ float gelu(float x) {
    constexpr float kSqrt2OverPi = 0.7978845608028654f;
    return 0.5f * x * (1.0f + tanh(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
  }
  static __device__ __forceinline__ float gelu_erf(float x) {
    return 0.5f * x * (1.0f + erff(0.7071067811865476f * x));
  }

 private:
  static __device__ __forceinline__ float tanh(float x) {
    if constexpr (kIsExact) return tanhf(x);
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};

// What a launch works on, in tiles of a whole cluster.
struct Problem {
  int m, n, k;
  int num_batches, m_tiles, n_tiles;
  int k_iters;  // Blocks of k.
  // Tiles are walked in strips: `strip` tiles wide along m (along n if `is_n_minor`), back and
  // forth.
  int strip, is_n_minor;
  float alpha;
};

// ---- Constants that follow from Config ---------------------------------------------------------

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kSwizzleBytes = 128;
constexpr int kAtom = kSwizzleBytes / 2;  // 16-bit elements across a swizzled row.
constexpr int kUnit = 8;                  // Of 16 bytes.

// How one operand's block of (kRows of m or n) x kBlockK lies in a slot, and how it gets there.
template <int kRows, bool kIsKMajor, bool kStacksBoxes, int kSharedBy>
struct Operand {
  // A box is one atom wide: of k with all rows, or of the rows (up to the next whole atom) with all
  // of k.
  static constexpr int kBoxes = ((kIsKMajor ? Config::kBlockK : kRows) + kAtom - 1) / kAtom;
  static constexpr int kBoxBytes = (kIsKMajor ? kRows : Config::kBlockK) * kSwizzleBytes;
  static constexpr int kBytes = kBoxes * kBoxBytes;
  // Blocks of a cluster that share the operand load equal parts of it: whole boxes where there are
  // enough (of an MN-major operand), else as many rows of each.
  static constexpr bool kSharesBoxes = !kIsKMajor && kBoxes % kSharedBy == 0;
  static constexpr int kLoads = kSharesBoxes ? kBoxes / kSharedBy : kBoxes;
  static constexpr int kPartRows =
      (kIsKMajor ? kRows : Config::kBlockK) / (kSharesBoxes ? 1 : kSharedBy);
  static constexpr u32 kStepBytes =
      kIsKMajor ? kWgmmaK<Config::Input> * 2 : kWgmmaK<Config::Input> * kSwizzleBytes;
  static_assert(kBytes % 1024 == 0, "what follows begins on a period of the swizzle");
  static_assert(kPartRows % 8 == 0, "parts begin on a period of the swizzle");
  static_assert(!kStacksBoxes || (kSharesBoxes && kRows % kAtom == 0), "whole boxes");

  // Loads the `part`-th part, for the blocks of the cluster in `sharers`.
  static __device__ __forceinline__ void load(unsigned char* slot, const TensorMap* map, u64* full,
                                              int row, int k, int batch, u32 part, u16 sharers) {
    if constexpr (kStacksBoxes) {
      const int first_box = part * kLoads;
      copy(slot + first_box * kBoxBytes, map, full, {0, k, row / kAtom + first_box, batch},
           sharers);
      return;
    }
    const u32 first_box = kSharesBoxes ? part * kLoads : 0;
    const u32 first_row = kSharesBoxes ? 0 : part * kPartRows;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      unsigned char* to = slot + (first_box + i) * kBoxBytes + first_row * kSwizzleBytes;
      const int across = (first_box + i) * kAtom, along = first_row;
      copy(to, map, full, {(kIsKMajor ? k : row) + across, (kIsKMajor ? row : k) + along, batch},
           sharers);
    }
  }

  // The descriptor of a block, and what to add to it for the rows from `row` on (a multiple of 64)
  // and the `step`-th 16 of k.
  static __device__ __forceinline__ u32 descriptor(u32 address) {
    return descriptor_low(address, kIsKMajor ? 0 : kBoxBytes);
  }
  static constexpr __device__ u32 advance(int row, int step) {
    constexpr int kStepsInBox =
        kIsKMajor ? kAtom / kWgmmaK<Config::Input> : Config::kBlockK / kWgmmaK<Config::Input>;
    const u32 across = kIsKMajor ? row * kSwizzleBytes : row / kAtom * kBoxBytes;
    return (across + step / kStepsInBox * kBoxBytes + step % kStepsInBox * kStepBytes) >> 4;
  }

 private:
  template <int kRank>
  static __device__ __forceinline__ void copy(unsigned char* to, const TensorMap* map, u64* full,
                                              const int (&from)[kRank], u16 sharers) {
    if constexpr (kSharedBy > 1) {
      cp_async_bulk_tensor_multicast(to, map, full, from, sharers);
    } else {
      cp_async_bulk_tensor_load(to, map, full, from);
    }
  }
};

using Lhs =
    Operand<Config::kBlockM, Config::kLhsIsKMajor, Config::kLhsStacksBoxes, Config::kClusterN>;
using Rhs =
    Operand<Config::kBlockN, Config::kRhsIsKMajor, Config::kRhsStacksBoxes, Config::kClusterM>;

// Parts of k that meet in a cluster.
constexpr int kClusterParts = Config::kReduceAdd ? 1 : Config::kSplitK;
constexpr int kClusterBlocks = Config::kClusterM * Config::kClusterN * kClusterParts;
// Blocks that fill one block's slots: its row and its column of the cluster.
constexpr int kSharers = Config::kClusterM + Config::kClusterN - 1;
constexpr int kSlotBytes = Lhs::kBytes + Rhs::kBytes;
constexpr int kConsumersOfTile = Config::kPingPong ? 1 : Config::kConsumers;
constexpr int kConsumerM = Config::kBlockM / kConsumersOfTile;
constexpr int kWgmmasM = kConsumerM / kWgmmaM;
constexpr int kAccumulators = Config::kBlockN / 2;  // Of one thread and wgmma.
constexpr int kThreads = (Config::kConsumers + 1) * kWarpgroup;
constexpr int kConsumerWarps = Config::kConsumers * kWarpgroup / kWarp;

// Results are staged by warps: 16 rows of one swizzle span at a time, which divides the tile's.
constexpr int kPieceM = 16;
constexpr int kPieceBytes = Config::kBlockN * Config::Output::kBytes % 128 == 0 ? 128 : 64;
constexpr int kPieceN = kPieceBytes / Config::Output::kBytes;
constexpr int kPieces = Config::kBlockN / kPieceN;
constexpr int kStagingSlots = Config::kStagingSlots;
constexpr int kStagingBytes = kPieceM * kSwizzleBytes;

// Registers by role: what the block has at launch (launch bounds), shared out anew.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

static_assert(Config::kBlockM % (kWgmmaM * kConsumersOfTile) == 0,
              "whole wgmmas for each consumer");
static_assert(Config::kBlockN % kPieceN == 0 && Config::kBlockN <= 256,
              "whole pieces, one wgmma wide");
static_assert(Config::kBlockK % kAtom == 0, "whole atoms of k");
static_assert(!Config::kPingPong || Config::kConsumers == 2, "two take turns");
static_assert(Config::kResidues == 1 || (Config::kLhsIsKMajor && !Config::kRhsIsKMajor),
              "the rhs is read from any k on");
static_assert(Config::kResidues == 1 || Config::kHasTmaRows, "results are stored by residues");
static_assert(kClusterParts == 1 || kSharers == 1, "a cluster does one thing");
static_assert(Config::kSplitK == 1 || !Config::kPingPong, "all tiles take as many steps");
static_assert(Config::kDeferred == Deferred::kNothing ||
                  (!Config::kPingPong && kClusterParts == 1 && Config::kStages > 1 &&
                   !Config::kHasResidual),
              "a tile is stored from registers, and slots come back meanwhile");
static_assert(Config::kDeferred != Deferred::kHalf || kWgmmasM == 2, "halves");
static_assert(Config::kDeferred != Deferred::kPacked ||
                  (Config::Output::kBytes == 2 && !Config::kSavePreactivation &&
                   0 < Config::kNumPacked && Config::kNumPacked <= kWgmmasM * kPieces),
              "pieces of one result of 16 bits");
static_assert(!Config::kReduceAdd || (Config::kHasTmaRows && Config::Output::kBytes == 4),
              "TMA adds in float32");

struct SharedStorage {
  alignas(1024) unsigned char ring[Config::kStages][kSlotBytes];
  alignas(1024) unsigned char staging[kConsumerWarps][kStagingSlots][kStagingBytes];
  u64 full[Config::kStages];
  u64 empty[Config::kStages];
  u64 turn[2];
  u64 residual_full[kConsumerWarps][kStagingSlots];
};
static_assert(sizeof(SharedStorage) <= JK_SMEM_BYTES, "what the host gives is enough");

// ---- Where the work is -------------------------------------------------------------------------

// A block's place in a cluster that shares operands: its rows lie behind each other.
__device__ __forceinline__ u32 m_rank(u32 rank) { return rank / Config::kClusterN; }
__device__ __forceinline__ u32 n_rank(u32 rank) { return rank % Config::kClusterN; }

// The blocks of the first column (multicast's bits).
constexpr __device__ u32 first_column() {
  u32 blocks = 0;
  for (int i = 0; i < Config::kClusterM; ++i) blocks |= 1u << i * Config::kClusterN;
  return blocks;
}

struct Tile {
  int batch, residue, row, column;  // Rows are counted among those of the residue.
  int k_begin, k_end;               // Its blocks of k.
  int head;                         // Elements that a row of the lhs begins behind its map's.
};

class Schedule {
 public:
  __device__ __forceinline__ Schedule(const Problem& problem, u32 rank)
      : problem_(problem), rank_(rank), index_(blockIdx.x / kClusterBlocks) {}

  __device__ __forceinline__ bool has_tile() const {
    const int parts = Config::kReduceAdd ? Config::kSplitK : 1;
    return index_ < parts * problem_.num_batches * problem_.m_tiles * problem_.n_tiles;
  }

  __device__ __forceinline__ void advance() { index_ += gridDim.x / kClusterBlocks; }

  // Strips of the minor dimension, each walked along the major one; every other strip backwards, so
  // that it begins with the operands the last one ended with.
  __device__ __forceinline__ Tile tile() const {
    const int in_batch = problem_.m_tiles * problem_.n_tiles;
    const int product = index_ / in_batch;
    const int index = index_ - product * in_batch;
    const int batch = Config::kReduceAdd ? product % problem_.num_batches : product;
    const int part = Config::kReduceAdd ? product / problem_.num_batches
                                        : static_cast<int>(kClusterParts > 1 ? rank_ : 0);
    const int minor_tiles = problem_.is_n_minor ? problem_.n_tiles : problem_.m_tiles;
    const int major_tiles = problem_.is_n_minor ? problem_.m_tiles : problem_.n_tiles;
    const int strip = index / (problem_.strip * major_tiles);
    const int in_strip = index - strip * problem_.strip * major_tiles;
    const int width = min(problem_.strip, minor_tiles - strip * problem_.strip);
    int major = in_strip / width;
    const int minor = strip * problem_.strip + in_strip - major * width;
    if (strip % 2) major = major_tiles - 1 - major;
    const int m = problem_.is_n_minor ? major : minor, n = problem_.is_n_minor ? minor : major;
    const int m_in_cluster = kSharers > 1 ? m_rank(rank_) : 0;
    const int n_in_cluster = kSharers > 1 ? n_rank(rank_) : 0;
    // Tiles of the same rows' residues are neighbours. A cluster's have one residue: they share the
    // rhs, from the same k on.
    const int residue = m % Config::kResidues;
    return {batch,
            residue,
            (m / Config::kResidues * Config::kClusterM + m_in_cluster) * Config::kBlockM,
            (n * Config::kClusterN + n_in_cluster) * Config::kBlockN,
            problem_.k_iters * part / Config::kSplitK,
            problem_.k_iters * (part + 1) / Config::kSplitK,
            residue * (problem_.k % kUnit) % kUnit};
  }

 private:
  const Problem& problem_;
  u32 rank_;
  int index_;
};

// A place in the ring, and how often the ring has gone round: the parity its barriers are at.
class Place {
 public:
  __device__ __forceinline__ int slot() const { return slot_; }
  __device__ __forceinline__ u32 parity() const { return round_ & 1; }
  __device__ __forceinline__ void next() {
    if (++slot_ == Config::kStages) slot_ = 0, ++round_;
  }
  __device__ __forceinline__ void skip(int count) {
    slot_ += count;
    round_ += slot_ / Config::kStages;
    slot_ %= Config::kStages;
  }

 private:
  int slot_ = 0;
  u32 round_ = 0;
};

// ---- Producer: one thread ----------------------------------------------------------------------

// A map for each residue, where rows are read or written by residues.
struct TensorMaps {
  TensorMap of[Config::kResidues];
};

__device__ __forceinline__ void produce(SharedStorage& shared, const TensorMaps& lhs,
                                        const TensorMap& rhs, Schedule schedule, u32 rank) {
  const u32 part_of_lhs = kSharers > 1 ? n_rank(rank) : 0;
  const u32 part_of_rhs = kSharers > 1 ? m_rank(rank) : 0;
  const u16 lhs_sharers = ((1u << Config::kClusterN) - 1) << part_of_rhs * Config::kClusterN;
  const u16 rhs_sharers = first_column() << part_of_lhs;
  Place place;
  for (; schedule.has_tile(); schedule.advance()) {
    const Tile tile = schedule.tile();
    for (int k = tile.k_begin; k < tile.k_end; ++k) {
      u64* full = &shared.full[place.slot()];
      unsigned char* slot = shared.ring[place.slot()];
      // The first round finds every slot free: its wait is for the phase before the first.
      mbarrier_wait_parity(&shared.empty[place.slot()], place.parity() ^ 1);
      mbarrier_arrive_expect_tx(full, kSlotBytes);
      const int k_element = k * Config::kBlockK;
      Lhs::load(slot, &lhs.of[tile.residue], full, tile.row, k_element, tile.batch, part_of_lhs,
                lhs_sharers);
      Rhs::load(slot + Lhs::kBytes, &rhs, full, tile.column, k_element - tile.head, tile.batch,
                part_of_rhs, rhs_sharers);
      place.next();
    }
  }
  if constexpr (kSharers > 1) {
    // A peer's last releases are on their way to barriers that must not go before they arrive.
    // Nothing else is: consumers have waited for all that a peer loads for this block.
#pragma unroll 1
    for (int i = 0; i < Config::kStages; ++i, place.next()) {
      mbarrier_wait_parity(&shared.empty[place.slot()], place.parity() ^ 1);
    }
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

using Accumulators = float[kWgmmasM][kAccumulators];

// Gives a slot back to every producer that writes to it, one arrival from each warp.
__device__ __forceinline__ void release(SharedStorage& shared, int slot, u32 rank) {
  const u32 lane = threadIdx.x % kWarp;
  if constexpr (kSharers > 1) {
    const bool fills = m_rank(lane) == m_rank(rank) || n_rank(lane) == n_rank(rank);
    if (lane < kClusterBlocks && fills) mbarrier_arrive_cluster_relaxed(&shared.empty[slot], lane);
  } else {
    if (lane == 0) mbarrier_arrive(&shared.empty[slot]);
  }
}

// Groups of products left in flight: a slot is released when the next one's have been issued. A
// ring of one slot has no next one.
constexpr int kInFlight = Config::kStages > 1 ? 1 : 0;

// Steps of a tile behind whose products the one before is stored.
constexpr int kStepsBefore = Config::kDeferred == Deferred::kPacked ? Config::kNumPacked
                             : Config::kDeferred == Deferred::kHalf ? 1
                                                                    : 0;

// Issues the products of one slot with the wgmmas from kFrom to kTo, as one group; they begin with
// zeros, or add to acc.
template <int kFrom = 0, int kTo = kWgmmasM>
__device__ __forceinline__ void issue(Accumulators& acc, int slot, u32 first_lhs, u32 first_rhs,
                                      bool adds) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockK / kWgmmaK<Config::Input>; ++step) {
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) {
      wgmma<Config::Input, Config::kLhsIsKMajor, Config::kRhsIsKMajor>(
          acc[i], first_lhs + slot * (kSlotBytes >> 4) + Lhs::advance(i * kWgmmaM, step),
          first_rhs + slot * (kSlotBytes >> 4) + Rhs::advance(0, step), adds || step > 0);
    }
  }
  wgmma_commit();
}

// Sets what a tile's rows of the lhs have before their head to zero, in its first slot.
__device__ __forceinline__ void clear_heads(unsigned char* slot, int first_row, int head) {
  for (int i = threadIdx.x % kWarpgroup; i < kConsumerM; i += kWarpgroup) {
    const int row = first_row + i;
    // The first 16 bytes of a row: the swizzle puts them where those of this number are.
    const u32 unit = shared_address(slot) + row * kSwizzleBytes + row % 8 * 16;
#pragma unroll
    for (int element = 0; element < kUnit - 1; ++element) {
      if (element < head) store_shared(unit + element * 2, static_cast<u16>(0));
    }
  }
  fence_proxy_async();
  // A warp's products read rows that other warps of its consumer have cleared, and no others. The
  // barriers below are taken.
  named_barrier_sync<kWarpgroup>(2 + uniform(threadIdx.x / kWarpgroup));
}

// acc = this consumer's rows of lhs times rhs. `behind` is called with 0 to kStepsBefore - 1 when
// products of these steps are under way, `issued` when all are.
template <typename Behind, typename Issued>
__device__ __forceinline__ void multiply(SharedStorage& shared, Accumulators& acc, Place& place,
                                         const Tile& tile, int first_row, u32 rank, Behind behind,
                                         Issued issued) {
  const int k_iters = tile.k_end - tile.k_begin;
  const u32 first_lhs = Lhs::descriptor(shared_address(shared.ring)) + Lhs::advance(first_row, 0);
  const u32 first_rhs = Rhs::descriptor(shared_address(shared.ring) + Lhs::kBytes);
  const auto previous = [](int slot) { return (slot + Config::kStages - 1) % Config::kStages; };
  if (Config::kResidues > 1 && tile.head > 0 && tile.k_begin == 0) {
    mbarrier_wait_parity(&shared.full[place.slot()], place.parity());
    clear_heads(shared.ring[place.slot()], first_row, tile.head);
  }
  int begin = 0;
#pragma unroll
  for (int k = 0; k < kStepsBefore; ++k) {
    if (k < k_iters) {
      mbarrier_wait_parity(&shared.full[place.slot()], place.parity());
      if constexpr (Config::kDeferred == Deferred::kHalf) {
        issue<0, 1>(acc, place.slot(), first_lhs, first_rhs, false);
        behind(k);
        issue<1, 2>(acc, place.slot(), first_lhs, first_rhs, false);
      } else {
        issue(acc, place.slot(), first_lhs, first_rhs, k > 0);
      }
    }
    if constexpr (Config::kDeferred == Deferred::kPacked) behind(k);
    if (k < k_iters) {
      wgmma_wait<kInFlight>();
      if (k > 0) release(shared, previous(place.slot()), rank);
      place.next();
      begin = k + 1;
    }
  }
  // Round by round, with the slots' numbers known to the compiler; the first round begins, and the
  // last one ends, anywhere.
  u32 parity = place.parity();
  for (int round = begin - place.slot(); round < k_iters; round += Config::kStages, parity ^= 1) {
#pragma unroll
    for (int slot = 0; slot < Config::kStages; ++slot) {
      const int k = round + slot;
      if (static_cast<u32>(k - begin) >= static_cast<u32>(k_iters - begin)) continue;
      const bool is_first = kStepsBefore == 0 && k == 0;
      mbarrier_wait_parity(&shared.full[slot], parity);
      issue(acc, slot, first_lhs, first_rhs, !is_first);
      wgmma_wait<kInFlight>();
      if (kInFlight == 0) {
        release(shared, slot, rank);
      } else if (!is_first) {
        release(shared, previous(slot), rank);
      }
    }
  }
  place.skip(k_iters - begin);
  issued();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kWgmmasM; ++i) pin(acc[i]);
  if (kInFlight > 0) release(shared, previous(place.slot()), rank);
}

// ---- Split K: partial sums meet ----------------------------------------------------------------

// Piece (i, j) of the tile is finished by this block of the cluster.
__device__ __forceinline__ u32 owner(int i, int j) { return (i * kPieces + j) % kClusterParts; }

constexpr int kPieceAccumulators = kPieceN / 2;

// Every thread leaves its accumulators in its own block's ring, which nobody uses any more, and
// after the cluster's barrier takes the sum of all blocks' for the pieces that its block owns, in
// the order of ranks. Its own come from memory too: a choice between them and a load would have the
// loads wait for each other.
__device__ __forceinline__ void reduce(SharedStorage& shared, Accumulators& acc, u32 rank) {
  static_assert(
      kClusterParts == 1 || kWgmmasM * kAccumulators * 4 * Config::kConsumers * kWarpgroup <=
                                Config::kStages * kSlotBytes,
      "the partial sums fit into the ring");
  constexpr u32 kThreadsOfTile = Config::kConsumers * kWarpgroup;
  constexpr u32 kStride = kThreadsOfTile * 16;
  unsigned char* const mine = shared.ring[0] + (threadIdx.x - kWarpgroup) * 16;
  // The other consumers' products have read the ring.
  named_barrier_sync<kThreadsOfTile>(1);
#pragma unroll
  for (int i = 0; i < kWgmmasM; ++i) {
#pragma unroll
    for (int r = 0; r < kAccumulators; r += 4) {
      store_shared(shared_address(mine) + (i * kAccumulators + r) / 4 * kStride,
                   make_float4(acc[i][r], acc[i][r + 1], acc[i][r + 2], acc[i][r + 3]));
    }
  }
  barrier_cluster();
  u32 parts[kClusterParts];
#pragma unroll
  for (u32 peer = 0; peer < kClusterParts; ++peer) parts[peer] = mapa(mine, peer);
#pragma unroll
  for (int p = 0; p < kWgmmasM * kPieces; ++p) {
    const int i = p / kPieces, j = p % kPieces;
    if (owner(i, j) != rank) continue;
#pragma unroll
    for (int r = j * kPieceAccumulators; r < (j + 1) * kPieceAccumulators; r += 4) {
      const u32 offset = (i * kAccumulators + r) / 4 * kStride;
      float4 sum = load_cluster(parts[0] + offset);
#pragma unroll
      for (u32 peer = 1; peer < kClusterParts; ++peer) {
        const float4 part = load_cluster(parts[peer] + offset);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      acc[i][r] = sum.x, acc[i][r + 1] = sum.y, acc[i][r + 2] = sum.z, acc[i][r + 3] = sum.w;
      if (r % 16 == 12) __syncwarp();  // Further loads wait here, for registers.
    }
  }
}

// ---- Epilogue ----------------------------------------------------------------------------------

// A row-major matrix of the result's type and shape: tensor maps, or an address where rows are no
// TMA operand, or where there is no such matrix.
struct Address {
  unsigned char* data;
};
template <bool kIsThere>
struct MatrixType {
  using type = Address;
};
template <>
struct MatrixType<true> {
  using type = TensorMaps;
};
template <bool kIsThere>
using Matrix = typename MatrixType<kIsThere && Config::kHasTmaRows>::type;
using Preactivation = Matrix<Config::kSavePreactivation>;
using Residual = Matrix<Config::kHasResidual>;

// One warp's way between a staging buffer and a piece of a matrix in memory.
struct Piece {
  int batch, residue, row, column;
};

// Byte `byte` of row `row` of a staging buffer: 16-byte units are permuted as TMA's swizzle of this
// span does, by the number of the 128 bytes that the row lies in.
constexpr __device__ u32 swizzle(u32 row) {
  return row * kPieceBytes / 128 % (kPieceBytes / 16) * 16;
}
__device__ __forceinline__ u32 swizzled(u32 row, u32 byte) {
  return row * kPieceBytes + (byte ^ swizzle(row));
}

// Where rows are no TMA operand, a warp moves a piece row by row, 4 bytes with each lane. Lanes
// beyond the piece go along: for them the columns end before they begin.
struct Rows {
  int count;  // Inside the matrix.
  u32 lane;
  int column, end;      // This lane's first, and where the columns end.
  unsigned char* data;  // This lane's of the first row.
  u32 bytes;            // Of a row.
  bool is_odd;          // Whether the first row's number is, in the whole array.

  static constexpr u32 kLanes = kPieceBytes / 4;

  __device__ __forceinline__ Rows(const Problem& problem, const Address& matrix, const Piece& piece)
      : count(min(kPieceM, problem.m - piece.row)),
        lane(recomputed(threadIdx.x % kWarp)),
        column(piece.column + lane * (4 / Config::Output::kBytes)),
        end(lane < kLanes ? problem.n : 0),
        bytes(problem.n * Config::Output::kBytes) {
    const long long line = static_cast<long long>(piece.batch) * problem.m + piece.row;
    data = matrix.data + line * bytes + column * Config::Output::kBytes;
    is_odd = line % 2 != 0;
  }

  __device__ __forceinline__ unsigned char* address(int row) const {
    return data + static_cast<u64>(row) * bytes;
  }
  // Of this lane's 4 bytes of a row in the buffer.
  __device__ __forceinline__ u32 staged(unsigned char* staging, int row) const {
    return shared_address(staging) + swizzled(row, lane % kLanes * 4);
  }
};

// Every block of one thread is followed by a barrier of the warp, also where the next one would do:
// ptxas (13.0) joins two blocks of one thread, and has been seen to let the other threads run ahead
// of it from there on, past barriers it then took for needless.
__device__ __forceinline__ void send(const Problem&, const TensorMaps& matrix,
                                     unsigned char* staging, const Piece& piece) {
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % kWarp == 0) {
    const int to[3] = {piece.column, piece.row, piece.batch};
    if constexpr (Config::kReduceAdd) {
      cp_reduce_async_bulk_tensor<Reduction::kAdd>(&matrix.of[piece.residue], staging, to);
    } else {
      cp_async_bulk_tensor_store(&matrix.of[piece.residue], staging, to);
    }
    cp_async_bulk_commit_group();
  }
  __syncwarp();
}

// Stores every other row of a piece from the first or the second on, some at a time: what they wait
// for is then waited for once. Rows of 16-bit results that are shifted begin in the middle of a
// 4-byte word: each lane stores its second value and its neighbour's first.
template <bool kIsShifted>
__device__ __forceinline__ void store_rows(const Rows& rows, unsigned char* staging, int first) {
  constexpr int kValues = 4 / Config::Output::kBytes;
  constexpr int kAtOnce = 4;
  const bool has_word = kIsShifted ? rows.lane + 1 < Rows::kLanes && rows.column + 3 <= rows.end
                                   : rows.column + kValues <= rows.end;
  const bool has_first = rows.column < rows.end && (kIsShifted ? rows.lane == 0 : !has_word);
  const bool has_second = kIsShifted && !has_word && rows.column + 2 <= rows.end;
  static_assert(2 * kAtOnce % 8 == 0, "a period of the swizzle");
  const u32 staged = rows.staged(staging, first);
#pragma unroll 1
  for (int begin = 0; begin < kPieceM; begin += 2 * kAtOnce) {
    u32 words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // `first` has no bit in common with what is added.
      words[i] = load_shared((staged ^ swizzle(2 * i)) + (begin + 2 * i) * kPieceBytes);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = begin + 2 * i + first;
      unsigned char* to = rows.address(row);
      const u32 next = kIsShifted ? __shfl_down_sync(0xffffffffu, words[i], 1) : 0;
      const bool is_inside = row < rows.count;
      if (has_word && is_inside) {
        *reinterpret_cast<u32*>(to + (kIsShifted ? 2 : 0)) =
            kIsShifted ? __funnelshift_r(words[i], next, 16) : words[i];
      }
      if (has_first && is_inside) *reinterpret_cast<u16*>(to) = words[i];
      if (has_second && is_inside) *reinterpret_cast<u16*>(to + 2) = words[i] >> 16;
    }
  }
}

__device__ __forceinline__ void send(const Problem& problem, const Address& matrix,
                                     unsigned char* staging, const Piece& piece) {
  __syncwarp();
  const Rows rows(problem, matrix, piece);
  store_rows<false>(rows, staging, rows.is_odd ? 1 : 0);
  if (Config::Output::kBytes == 2 && problem.n % 2 != 0) {
    store_rows<true>(rows, staging, rows.is_odd ? 0 : 1);
  } else {
    store_rows<false>(rows, staging, rows.is_odd ? 0 : 1);
  }
  __syncwarp();
}

__device__ __forceinline__ void prefetch(const TensorMaps& matrix) {
#pragma unroll
  for (const TensorMap& map : matrix.of) prefetch_tensormap(&map);
}
__device__ __forceinline__ void prefetch(const Address&) {}

// Begins to fetch a piece, for which the barrier then waits.
__device__ __forceinline__ void fetch(const Problem&, const TensorMaps& matrix,
                                      unsigned char* staging, u64* full, const Piece& piece) {
  if (threadIdx.x % kWarp == 0) {
    const int from[3] = {piece.column, piece.row, piece.batch};
    cp_async_bulk_wait_group_read<0>();
    mbarrier_arrive_expect_tx(full, kPieceM * kPieceBytes);
    cp_async_bulk_tensor_load(staging, &matrix.of[piece.residue], full, from);
  }
  __syncwarp();
}

__device__ __forceinline__ void fetch(const Problem& problem, const Address& matrix,
                                      unsigned char* staging, u64* full, const Piece& piece) {
  const Rows rows(problem, matrix, piece);
#pragma unroll 4
  for (int row = 0; row < rows.count; ++row) {
    if (rows.column >= rows.end) continue;
    const unsigned char* from = rows.address(row);
    u32 word;
    if constexpr (Config::Output::kBytes == 4) {
      word = *reinterpret_cast<const u32*>(from);
    } else {
      const u16* pair = reinterpret_cast<const u16*>(from);
      word = rows.column + 1 < rows.end ? pair[0] | static_cast<u32>(pair[1]) << 16 : pair[0];
    }
    store_shared(rows.staged(staging, row), word);
  }
  __syncwarp();
  if (threadIdx.x % kWarp == 0) mbarrier_arrive(full);
  __syncwarp();
}

// Of those that Config does not have, nothing is read or written.
struct Operands {
  const Matrix<true>& out;
  const Preactivation& preactivation;
  const Residual& residual;
  const float* bias;
};

// What one warp does with its 16 rows of each wgmma's result.
class Epilogue {
  static constexpr int kCount = kWgmmasM * kPieces;
  static constexpr int kPacked = Config::kDeferred == Deferred::kPacked ? Config::kNumPacked : 0;
  // Pieces that are stored at once.
  static constexpr int kFirst = Config::kDeferred == Deferred::kHalf ? kPieces : kCount - kPacked;

 public:
  __device__ __forceinline__ Epilogue(SharedStorage& shared, const Problem& problem,
                                      const Operands& operands, u32 rank)
      : problem_(problem),
        operands_(operands),
        rank_(rank),
        warp_((threadIdx.x - kWarpgroup) / kWarp),
        staging_(shared.staging[warp_]),
        residual_full_(shared.residual_full[warp_]) {}

  // Before a tile's products: fetches of the first pieces of the residual fly meanwhile.
  __device__ __forceinline__ void begin(const Tile& tile, int first_row) {
    if constexpr (kFetchesAhead) {
      const int count = kOutSlots < kCount ? kOutSlots : kCount;
#pragma unroll
      for (int p = 0; p < count; ++p) prefetch(tile, first_row, p);
    }
  }

  __device__ __forceinline__ void finish(const Accumulators& acc, const Tile& tile, int first_row,
                                         int from = 0, int to = kCount) {
#pragma unroll
    for (int p = from; p < to; ++p) {
      const int i = p / kPieces, j = p % kPieces;
      if (kClusterParts > 1 && owner(i, j) != rank_) continue;
      const Piece piece = piece_of(tile, first_row, p);
      unsigned char* staging = staging_[out_slot(p)];
      if constexpr (Config::kHasResidual) {
        if constexpr (!kFetchesAhead) prefetch(tile, first_row, p);
        mbarrier_wait_parity(&residual_full_[out_slot(p)], residual_parity_ >> out_slot(p) & 1);
        residual_parity_ ^= 1u << out_slot(p);
      }
      if constexpr (!Config::kHasResidual || Config::kSavePreactivation) wait_free(p);
#pragma unroll
      for (int c = 0; c < kPieceN / 16; ++c) {
        float values[8];
        take(values, acc[i], j, c, piece.column);
        if constexpr (Config::kSavePreactivation) {
          write<Config::Output>(values, staging_[kOutSlots + out_slot(p)], c);
        }
        activate(values);
        if constexpr (Config::kHasResidual) add_staged<Config::Output>(values, staging, c);
        write<Config::Output>(values, staging, c);
      }
      // The store before has had this piece's time to read the buffer that this fetch will fill.
      if (kFetchesAhead && kOutSlots > 1 && p > 0 && p - 1 + kOutSlots < kCount) {
        prefetch(tile, first_row, p - 1 + kOutSlots);
      }
      if constexpr (Config::kSavePreactivation) {
        send(problem_, operands_.preactivation, staging_[kOutSlots + out_slot(p)], piece);
      }
      send(problem_, operands_.out, staging, piece);
      if (kFetchesAhead && kOutSlots == 1 && p + 1 < kCount) prefetch(tile, first_row, p + 1);
    }
  }

  // Or deferred: first what there is no room for, then, behind the next tile's first products, the
  // rest in kStepsBefore parts.
  __device__ __forceinline__ void begin_finish(const Accumulators& acc, const Tile& tile,
                                               int first_row) {
    finish(acc, tile, first_row, 0, kFirst);
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      const int p = kFirst + i;
#pragma unroll
      for (int c = 0; c < kPieceN / 16; ++c) {
        float values[8];
        take(values, acc[p / kPieces], p % kPieces, c, piece_of(tile, first_row, p).column);
        activate(values);
        pack<Config::Output>(values, packed_[i][c]);
        if constexpr (Config::kHasBias) __syncwarp();  // Further loads wait here, for registers.
      }
    }
    last_ = tile;
    has_last_ = true;
  }

  __device__ __forceinline__ void end_finish(const Accumulators& acc, int first_row, int part) {
    if (!has_last_) return;
    if constexpr (Config::kDeferred == Deferred::kHalf) {
      finish(acc, last_, first_row, kFirst, kCount);
    } else {
      const int p = kFirst + part;
      unsigned char* staging = staging_[out_slot(p)];
      wait_free(p);
#pragma unroll
      for (int c = 0; c < kPieceN / 16; ++c) stage(packed_[part][c], staging, c);
      send(problem_, operands_.out, staging, piece_of(last_, first_row, p));
    }
  }

  // Staging buffers must outlive the stores' reads.
  __device__ __forceinline__ void drain() {
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
  }

 private:
  static constexpr bool kIsExact = Config::Output::kBytes == 4;
  // With a pre-activation each kind of result has half of the buffers.
  static constexpr int kOutSlots = kStagingSlots / (Config::kSavePreactivation ? 2 : 1);
  static_assert(kStagingSlots % 2 == 0 || !Config::kSavePreactivation, "halves");
  // Where pieces of a tile are shared out, their order is not known here: each is fetched when it
  // is due.
  static constexpr bool kFetchesAhead = Config::kHasResidual && kClusterParts == 1;
  static __device__ __forceinline__ int out_slot(int p) { return p % kOutSlots; }

  __device__ __forceinline__ Piece piece_of(const Tile& tile, int first_row, int p) const {
    return {tile.batch, tile.residue,
            tile.row + first_row + p / kPieces * kWgmmaM + static_cast<int>(warp_ % 4) * kPieceM,
            tile.column + p % kPieces * kPieceN};
  }

  __device__ __forceinline__ void prefetch(const Tile& tile, int first_row, int p) {
    __syncwarp();
    fetch(problem_, operands_.residual, staging_[out_slot(p)], &residual_full_[out_slot(p)],
          piece_of(tile, first_row, p));
  }

  // Waits until the buffers of piece p have been read by the stores that were last made from them:
  // buffers are used in turn, so all stores but those of the pieces in between. Not so at the start
  // of a tile where the last one ended out of turn, or where pieces are left out.
  __device__ __forceinline__ void wait_free(int p) {
    constexpr int kStores = Config::kSavePreactivation ? 2 : 1;
    if (threadIdx.x % kWarp == 0) {
      if ((p == 0 && kCount % kOutSlots != 0) || kClusterParts > 1) {
        cp_async_bulk_wait_group_read<0>();
      } else {
        cp_async_bulk_wait_group_read<kStagingSlots - kStores>();
      }
    }
    __syncwarp();
  }

  // Pieces are worked on by 16 columns. Of those a thread has columns 2q, 2q + 1, 2q + 8 and 2q + 9
  // (q = lane % 4) of rows lane / 4 and lane / 4 + 8, in the order of wgmma's accumulators:
  // values[4 (column / 8) + 2 (row / 8) + odd].

  // The `c`-th 16 columns of the `j`-th piece of a wgmma's results, scaled and with their bias.
  __device__ __forceinline__ void take(float (&values)[8], const float (&acc)[kAccumulators], int j,
                                       int c, int column) const {
#pragma unroll
    for (int r = 0; r < 8; ++r) values[r] = acc[j * kPieceAccumulators + c * 8 + r];
    if constexpr (Config::kHasAlpha) {
#pragma unroll
      for (float& value : values) value *= problem_.alpha;
    }
    if constexpr (Config::kHasBias) add_bias(values, column + c * 16);
  }

  static __device__ __forceinline__ void activate(float (&values)[8]) {
#pragma unroll
    for (float& value : values) value = Activations<kIsExact>::JK_ACTIVATION(value);
  }

  __device__ __forceinline__ void add_bias(float (&values)[8], int column) const {
    const float* bias = operands_.bias + column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 8; r += 4) {
      const float2 pair = __ldg(reinterpret_cast<const float2*>(bias + r * 2));
      values[r] += pair.x, values[r + 1] += pair.y, values[r + 2] += pair.x,
          values[r + 3] += pair.y;
    }
  }

  // Where this thread's row of stmatrix begins in a buffer, for 16 columns of 16 bits from 16 c on.
  static __device__ __forceinline__ u32 matrix_row(unsigned char* staging, int c) {
    const u32 lane = threadIdx.x % kWarp;
    return shared_address(staging) + swizzled(lane % 16, c * 32 + lane / 16 * 16);
  }

  // Where values[r] and values[r + 1] lie in a buffer, of 16 columns of 32 bits from 16 c on.
  static __device__ __forceinline__ u32 pair(unsigned char* staging, int c, int r) {
    const u32 lane = threadIdx.x % kWarp;
    return shared_address(staging) +
           swizzled(lane / 4 + r % 4 * 4, c * 64 + r / 4 * 32 + lane % 4 * 8);
  }

  template <typename T>
  static __device__ __forceinline__ void pack(const float (&v)[8], u32 (&packed)[4]) {
    if constexpr (T::kBytes == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = T::pack(v[i * 2], v[i * 2 + 1]);
    }
  }

  static __device__ __forceinline__ void stage(const u32 (&packed)[4], unsigned char* staging,
                                               int c) {
    stmatrix_x4(matrix_row(staging, c), packed[0], packed[1], packed[2], packed[3]);
  }

  template <typename T>
  static __device__ __forceinline__ void write(const float (&v)[8], unsigned char* staging, int c) {
    if constexpr (T::kBytes == 2) {
      u32 packed[4];
      pack<T>(v, packed);
      stage(packed, staging, c);
    } else {
#pragma unroll
      for (int r = 0; r < 8; r += 2) store_shared(pair(staging, c, r), v[r], v[r + 1]);
    }
  }

  template <typename T>
  static __device__ __forceinline__ void add_staged(float (&values)[8], unsigned char* staging,
                                                    int c) {
    if constexpr (T::kBytes == 2) {
      u32 packed[4];
      ldmatrix_x4(matrix_row(staging, c), packed[0], packed[1], packed[2], packed[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i * 2] += T::low(packed[i]);
        values[i * 2 + 1] += T::high(packed[i]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 8; r += 2) {
        float low, high;
        load_shared(pair(staging, c, r), low, high);
        values[r] += low, values[r + 1] += high;
      }
    }
  }

  const Problem& problem_;
  const Operands& operands_;
  u32 rank_;
  u32 warp_;
  unsigned char (*staging_)[kStagingBytes];
  u64* residual_full_;
  u32 residual_parity_ = 0;
  // The tile whose stores are deferred, and its packed pieces by 16 columns.
  Tile last_;
  bool has_last_ = false;
  u32 packed_[kPacked > 0 ? kPacked : 1][kPieceN / 16][4];
};

__device__ __forceinline__ void consume(SharedStorage& shared, const Problem& problem,
                                        const Operands& operands, Schedule schedule, u32 rank) {
  const int consumer = uniform(threadIdx.x / kWarpgroup) - 1;
  const int first_row = Config::kPingPong ? 0 : consumer * kConsumerM;
  Epilogue epilogue(shared, problem, operands, rank);
  Place place;
  u32 turn = consumer == 0 ? 1 : 0;  // The first consumer need not wait for its first turn.
  if (Config::kPingPong && consumer == 1) {
    schedule.advance();
    place.skip(problem.k_iters);
  }
  Accumulators acc;
  while (schedule.has_tile()) {
    const Tile tile = schedule.tile();
    epilogue.begin(tile, first_row);
    if constexpr (Config::kPingPong) {
      // Also keeps the parities apart: no slot is waited for more than a round ahead.
      mbarrier_wait_parity(&shared.turn[consumer], turn);
      turn ^= 1;
    }
    multiply(
        shared, acc, place, tile, first_row, rank,
        [&](int part) { epilogue.end_finish(acc, first_row, part); },
        [&] {
          if (Config::kPingPong && threadIdx.x % kWarpgroup == 0) {
            mbarrier_arrive(&shared.turn[consumer ^ 1]);
          }
        });
    if constexpr (Config::kPingPong) place.skip(problem.k_iters);
    if constexpr (kClusterParts > 1) reduce(shared, acc, rank);
    if constexpr (Config::kDeferred == Deferred::kNothing) {
      epilogue.finish(acc, tile, first_row);
    } else {
      epilogue.begin_finish(acc, tile, first_row);
    }
    schedule.advance();
    if constexpr (Config::kPingPong) schedule.advance();
  }
#pragma unroll
  for (int part = 0; part < kStepsBefore; ++part) epilogue.end_finish(acc, first_row, part);
  epilogue.drain();
}

// ---- Kernel ------------------------------------------------------------------------------------

__global__ __launch_bounds__(kThreads, 1) void gemm(
    const __grid_constant__ TensorMaps lhs, const __grid_constant__ TensorMap rhs,
    const __grid_constant__ Matrix<true> out, const __grid_constant__ Preactivation preactivation,
    const __grid_constant__ Residual residual, const float* bias,
    const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const u32 rank = kClusterBlocks > 1 ? cluster_ctarank() : 0;
  const Schedule schedule(problem, rank);
  const int warpgroup = threadIdx.x / kWarpgroup;

  if (threadIdx.x == 0) {
    prefetch(lhs);
    prefetch_tensormap(&rhs);
    prefetch(out);
    constexpr int kReleases = kConsumersOfTile * kWarpgroup / kWarp * kSharers;
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], kReleases);
    }
    for (int i = 0; Config::kPingPong && i < 2; ++i) mbarrier_init(&shared.turn[i], 1);
    for (int i = 0; Config::kHasResidual && i < kConsumerWarps * kStagingSlots; ++i) {
      mbarrier_init(&shared.residual_full[0][i], 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kClusterBlocks > 1) {
    // No block may write to its peers, or arrive at their barriers, before those exist
    // (fence_mbarrier_init).
    barrier_cluster_arrive_relaxed();
    barrier_cluster_wait();
  }

  if (warpgroup == 0) {
    if constexpr (Config::kConsumers > 1) setmaxnreg_dec<kProducerRegisters>();
    if (uniform(threadIdx.x / kWarp) == 0 && elect_one()) {
      produce(shared, lhs, rhs, schedule, rank);
    }
    if constexpr (kClusterParts > 1) {
      __syncwarp();
      barrier_cluster();  // That of `reduce`: it counts every thread.
    }
  } else {
    if constexpr (Config::kConsumers > 1) setmaxnreg_inc<kConsumerRegisters>();
    const Operands operands{out, preactivation, residual, bias};
    consume(shared, problem, operands, schedule, rank);
  }

  if constexpr (kClusterParts > 1) {
    // A peer may still read our shared memory.
    __syncwarp();
    barrier_cluster_arrive_relaxed();
    barrier_cluster_wait();
  }
}

}  // namespace jaxkernels
