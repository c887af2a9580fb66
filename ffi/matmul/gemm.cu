// out = activation(alpha * lhs * rhs + bias) + residual on Hopper tensor cores, or, with a
// multiplier in place of the residual, times that. Or both gradients of such a gated layer, whose
// cotangent is the product.
//
// A persistent grid works on the output tiles. In each CTA one producer thread copies blocks of
// both operands into a ring of shared memory slots by TMA. Consumer warpgroups multiply the blocks
// with wgmma into float32 registers and apply the epilogue there. Each warp stores its results by
// TMA, from swizzled staging buffers of its own.
//
//   cooperative consumers                      ping-pong consumers
//   share a tile, each has 1/n of its rows     take tiles in turn: the epilogue of one
//   and reads the whole rhs block:             runs beside the products of the other:
//   +---------------------+                    +---------------------+ +---------------------+
//   |      consumer0      |                    |      consumer0      | |      consumer1      |
//   +---------------------+                    |       tile 0        | |       tile 1        |
//   |      consumer1      |                    |                     | |                     |
//   +---------------------+                    +---------------------+ +---------------------+
//
// Neighbouring CTAs may form a cluster that shares operands by multicast (cluster.cuh). k may be
// divided (split K), in one of three ways:
//
// - The CTAs of a cluster each multiply a part of k. They add up the partial sums through
//   distributed shared memory, in a fixed order.
// - The parts are tiles of their own. The CTA with a tile's last part takes the sums of the others
//   from global memory, in a fixed order (kThroughMemory). It waits for tiles of lower numbers
//   only, which the GPU starts no later.
// - The parts are tiles of their own, which TMA adds to the result in any order (kReduceAdd).
//
// Either dimension of an operand may be contiguous: wgmma transposes 16-bit types in shared memory.
// TMA fills with zeros what a block reads beyond an array's edge, and drops what it would write
// there.
//
// A tensor map needs rows of whole 16-byte units, and a copy begins on 16 bytes. The lhs may have
// other rows if k is contiguous in it. Then every kResidues-th row (at most 8th) has the same
// offset from 16 bytes, and these rows are whole units apart. They have a tensor map of their own,
// which begins with the unit that their first row begins in. A tile has rows of one residue only.
//
//   units       |0.......|1.......|2.......|    row i begins `head` elements (here 4) after the
//   row i       |xxxxaaaaaaaaaaaaaaaaaaaa00|    map's row: x is the end of the row before it in
//   row i + 8   |xxxxbbbbbbbbbbbbbbbbbbbb00|    memory, 0 is filled in by TMA
//
// Element head + k of such a row belongs to row k of the rhs. The rhs is therefore read from its
// row -head on, where TMA fills in zeros; so k must not be contiguous in the rhs. The x must be
// cleared nevertheless: zero times infinity is not zero.
//
// One of the arrays may be three, side by side along its last dimension: query, key and value, or
// their gradients. A box of 64 columns lies in one of the three. The sums may be rotated by
// positions before they are stored (rotary positions).
//
// The parts that other kernels share are headers: ring.cuh, tiles.cuh, wgmma.cuh, scheduler.cuh,
// staging.cuh, rows.cuh, activations.cuh. Source: the structure is that of CUTLASS'
// warp-specialised Hopper GEMM; the ladder and its figures are in docs/cuda-gemm.md. gemm.py
// compiles this file with the macros that `Config` reads.

#include "activations.cuh"
#include "ring.cuh"
#include "rows.cuh"
#include "scheduler.cuh"
#include "staging.cuh"
#include "tiles.cuh"

namespace jaxkernels {

using namespace tma;

// The part of a tile that is stored during the next tile's products. Without it, consumers that
// share a tile store while the tensor cores are idle.
enum class Deferred {
  kNothing,
  // The results of the second of two wgmmas, stored behind the next tile's first products. They
  // wait in their accumulators.
  kHalf,
  // The last kNumPacked pieces, stored one by one behind the next tile's first steps. They wait in
  // 16 bits beside the next tile's accumulators: as many as there are registers for.
  kPacked,
};

// The array that is three: along k of the lhs, or along n of the rhs or of the result.
enum class InParts { kNone, kLhs, kRhs, kOut };
constexpr int kParts = 3;

// Which two columns of a head are rotated as a pair: i and i + kHeadDim / 2, or 2 i and 2 i + 1.
enum class Rotation { kNone, kHalves, kNeighbours };

struct Config {
  using Input = JK_INPUT;
  using Output = JK_OUTPUT;
  static constexpr int kBlockM = JK_BLOCK_M;
  static constexpr int kBlockN = JK_BLOCK_N;
  static constexpr int kBlockK = JK_BLOCK_K;
  static constexpr int kStages = JK_NUM_STAGES;
  static constexpr int kConsumers = JK_NUM_CONSUMERS;
  static constexpr bool kPingPong = JK_PING_PONG;
  // Staging buffers of each warp.
  static constexpr int kStagingSlots = JK_NUM_STAGING;
  static constexpr Deferred kDeferred = Deferred::JK_DEFERRED;
  static constexpr int kNumPacked = JK_NUM_PACKED;
  static constexpr int kClusterM = JK_CLUSTER_M;
  static constexpr int kClusterN = JK_CLUSTER_N;
  static constexpr int kSplitK = JK_SPLIT_K;
  // Whether the parts of k are tiles of their own that TMA adds to the result.
  static constexpr bool kReduceAdd = JK_REDUCE_ADD;
  // Whether they are tiles of their own that are added up through global memory.
  static constexpr bool kThroughMemory = JK_THROUGH_MEMORY;
  // Whether k is the contiguous dimension.
  static constexpr bool kLhsIsKMajor = JK_LHS_IS_K_MAJOR;
  static constexpr bool kRhsIsKMajor = JK_RHS_IS_K_MAJOR;
  // A tile has every kResidues-th row of the result.
  static constexpr int kResidues = JK_RESIDUES;
  // Whether one copy loads all boxes of a block: the tensor map has a dimension of boxes.
  static constexpr bool kLhsStacksBoxes = JK_LHS_STACKS_BOXES;
  static constexpr bool kRhsStacksBoxes = JK_RHS_STACKS_BOXES;
  static constexpr bool kHasAlpha = JK_HAS_ALPHA;
  static constexpr bool kHasBias = JK_HAS_BIAS;
  static constexpr bool kHasResidual = JK_HAS_RESIDUAL;
  // Whether what lies in the residual's place multiplies.
  static constexpr bool kMultiplies = JK_MULTIPLIES;
  static constexpr bool kSavePreactivation = JK_SAVE_PREACTIVATION;
  // Whether the results are the gradients of activation(preactivation) * gate. The pre-activation
  // lies in the residual's place.
  static constexpr bool kIsGradient = JK_IS_GRADIENT;
  // Whether the result's rows are whole 16-byte units, as TMA needs them.
  static constexpr bool kHasTmaRows = JK_HAS_TMA_ROWS;
  static constexpr InParts kInParts = InParts::JK_IN_PARTS;
  static constexpr Rotation kRotation = Rotation::JK_ROTATION;
  static constexpr int kHeadDim = JK_HEAD_DIM;
};

// The sizes of a launch. Tiles are those of a whole cluster.
struct Problem {
  int m, n, k;
  int num_batches, m_tiles, n_tiles;
  int k_iters;            // Blocks of k.
  int strip, is_n_minor;  // The order of tiles: see strip_order.
  float alpha;
  int second, third;  // Where the second and the third part begin.
  int num_rotated;    // Columns that are rotated.
  int num_positions;  // Row i has position i % num_positions.
};

// ---- Constants that follow from Config ---------------------------------------------------------

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kUnit = 8;  // Operands' elements in 16 bytes.

using Lhs = OperandTile<Config::Input, Config::kBlockM, Config::kBlockK, Config::kLhsIsKMajor>;
using Rhs = OperandTile<Config::Input, Config::kBlockN, Config::kBlockK, Config::kRhsIsKMajor>;
using LhsLoad = TileLoad<Lhs, Config::kClusterN, Config::kLhsStacksBoxes>;
using RhsLoad = TileLoad<Rhs, Config::kClusterM, Config::kRhsStacksBoxes>;
using Grid = ClusterGrid<Config::kClusterM, Config::kClusterN>;

// Whether parts of k are tiles of their own.
constexpr bool kPartsAreTiles = Config::kReduceAdd || Config::kThroughMemory;
// Parts of k that one cluster adds up.
constexpr int kClusterParts = kPartsAreTiles ? 1 : Config::kSplitK;
constexpr int kClusterBlocks = Grid::kBlocks * kClusterParts;
constexpr int kSlotBytes = Lhs::kBytes + Rhs::kBytes;
constexpr int kConsumersOfTile = Config::kPingPong ? 1 : Config::kConsumers;
constexpr int kConsumerM = Config::kBlockM / kConsumersOfTile;
constexpr int kWgmmasM = kConsumerM / kWgmmaM;
constexpr int kAccumulators = Config::kBlockN / 2;  // A thread has so many in a wgmma.
constexpr int kThreadsOfTile = kConsumersOfTile * kWarpgroup;
constexpr int kThreads = (Config::kConsumers + 1) * kWarpgroup;
constexpr int kConsumerWarps = Config::kConsumers * kWarpgroup / kWarp;

// A warp stages pieces of 16 rows by one swizzle span. The span divides the tile's row.
constexpr int kPieceBytes = Config::kBlockN * Config::Output::kBytes % 128 == 0 ? 128 : 64;
using Buffer = StagingBuffer<Config::Output, kPieceBytes>;
constexpr int kPieceN = Buffer::kColumns;
constexpr int kPieces = Config::kBlockN / kPieceN;  // Across a tile.
constexpr int kPieceAccumulators = kPieceN / 2;
constexpr int kStagingSlots = Config::kStagingSlots;

// Registers of a thread by role. Together they are those that the CTA has at launch.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

static_assert(Config::kBlockM % (kWgmmaM * kConsumersOfTile) == 0,
              "whole wgmmas for each consumer");
static_assert(Config::kBlockN % kPieceN == 0 && Config::kBlockN <= 256,
              "whole pieces, one wgmma wide");
static_assert(Config::kBlockK % kAtom<Config::Input> == 0, "whole atoms of k");
static_assert(!Config::kPingPong || Config::kConsumers == 2, "two take turns");
static_assert(Config::kResidues == 1 || (Config::kLhsIsKMajor && !Config::kRhsIsKMajor),
              "the rhs is read from any k on");
static_assert(Config::kResidues == 1 || Config::kHasTmaRows, "results are stored by residues");
static_assert(kClusterParts == 1 || !Grid::kShares, "a cluster does one thing");
static_assert(Config::kSplitK == 1 || !Config::kPingPong, "all tiles take as many steps");
static_assert(!Config::kThroughMemory || Config::kDeferred == Deferred::kNothing,
              "a tile's sums are given or stored at once");
static_assert(Config::kDeferred == Deferred::kNothing ||
                  (!Config::kPingPong && kClusterParts == 1 && Config::kStages > 1 &&
                   !Config::kHasResidual),
              "a tile is stored from registers, and slots come back meanwhile");
static_assert(Config::kDeferred != Deferred::kHalf || kWgmmasM == 2, "halves");
static_assert(Config::kDeferred != Deferred::kPacked ||
                  (Config::Output::kBytes == 2 && !Config::kSavePreactivation &&
                   0 < Config::kNumPacked && Config::kNumPacked <= kWgmmasM * kPieces),
              "pieces of one result of 16 bits");
static_assert(!Config::kIsGradient || (Config::kHasResidual && !Config::kSavePreactivation),
              "a gradient has two operands and two results");
static_assert(Config::kInParts == InParts::kNone ||
                  (Config::kResidues == 1 && Config::kHasTmaRows && !Config::kHasResidual &&
                   !Config::kSavePreactivation),
              "a plain product of aligned arrays");
static_assert(Config::kRotation == Rotation::kNone ||
                  (Config::kHeadDim % 32 == 0 && Config::kBlockN % Config::kHeadDim == 0 &&
                   kClusterParts == 1),
              "whole heads");
static_assert(!Config::kReduceAdd || (Config::kHasTmaRows && Config::Output::kBytes == 4),
              "TMA adds in float32");

struct SharedStorage {
  alignas(1024) unsigned char slots[Config::kStages][kSlotBytes];
  alignas(1024) unsigned char staging[kConsumerWarps][kStagingSlots][kStagingBytes];
  Ring<Config::kStages, Grid> ring;
  u64 turn[2][kWarpgroup / kWarp];
  u64 residual_full[kConsumerWarps][kStagingSlots];
};
static_assert(sizeof(SharedStorage) <= JK_SMEM_BYTES, "what the host gives is enough");

// A place along the dimension of an array that may be in parts.
struct PartPlace {
  int part, index;
};

// Where `index` lies of the array kOf, which is in parts or not.
template <InParts kOf>
__device__ __forceinline__ PartPlace part_of(const Problem& problem, int index) {
  if constexpr (kOf == InParts::kNone || Config::kInParts != kOf) return {0, index};
  if (index >= problem.third) return {2, index - problem.third};
  if (index >= problem.second) return {1, index - problem.second};
  return {0, index};
}

// ---- Schedule ----------------------------------------------------------------------------------

struct Tile {
  int batch, residue, row, column;  // `row` counts the rows of the residue.
  int k_begin, k_end;               // Its blocks of k.
  int head;                         // A row of the lhs begins so many elements after its map's row.
};

// The tiles of this CTA, in order.
class Schedule {
 public:
  __device__ __forceinline__ Schedule(const Problem& problem, u32 rank)
      : problem_(problem), rank_(rank) {}

  __device__ __forceinline__ bool has_tile() const {
    return tiles_.index() < (kPartsAreTiles ? Config::kSplitK : 1) * num_tiles();
  }

  __device__ __forceinline__ void advance() { tiles_.advance(); }

  __device__ __forceinline__ Tile tile() const {
    const int in_batch = problem_.m_tiles * problem_.n_tiles;
    const int product = tiles_.index() / in_batch;
    const int index = tiles_.index() - product * in_batch;
    const int batch = kPartsAreTiles ? product % problem_.num_batches : product;
    const int part = kPartsAreTiles ? part_of_k() : static_cast<int>(kClusterParts > 1 ? rank_ : 0);
    const auto [m, n] = strip_order(problem_, index);
    const int m_in_cluster = Grid::kShares ? Grid::m_rank(rank_) : 0;
    const int n_in_cluster = Grid::kShares ? Grid::n_rank(rank_) : 0;
    // Tiles of the same rows' residues are neighbours. The tiles of a cluster have one residue:
    // they share the rhs, from the same k on.
    const int residue = m % Config::kResidues;
    return {batch,
            residue,
            (m / Config::kResidues * Config::kClusterM + m_in_cluster) * Config::kBlockM,
            (n * Config::kClusterN + n_in_cluster) * Config::kBlockN,
            problem_.k_iters * part / Config::kSplitK,
            problem_.k_iters * (part + 1) / Config::kSplitK,
            residue * (problem_.k % kUnit) % kUnit};
  }

  // With kPartsAreTiles: the part of k that the present tile is, and the number of this CTA's tile
  // among those of all clusters and parts.
  __device__ __forceinline__ int part_of_k() const { return tiles_.index() / num_tiles(); }
  __device__ __forceinline__ int number() const { return tiles_.index() * kClusterBlocks + rank_; }
  // Tiles between those of two parts.
  __device__ __forceinline__ int num_between() const { return num_tiles() * kClusterBlocks; }

 private:
  __device__ __forceinline__ int num_tiles() const {
    return problem_.num_batches * problem_.m_tiles * problem_.n_tiles;
  }

  const Problem& problem_;
  u32 rank_;
  PersistentTiles<kClusterBlocks> tiles_;
};

using Place = RingPlace<Config::kStages>;

// ---- Producer: one thread ----------------------------------------------------------------------

// A map for each part of an array, or for the rows of each residue.
template <InParts kOf>
struct TensorMaps {
  static constexpr bool kIsInParts = kOf != InParts::kNone && Config::kInParts == kOf;
  static constexpr int kCount = kIsInParts ? kParts : kOf == InParts::kRhs ? 1 : Config::kResidues;
  TensorMap of[kCount];
};
using LhsMaps = TensorMaps<InParts::kLhs>;
using RhsMaps = TensorMaps<InParts::kRhs>;

// Loads this CTA's part of an operand's block, from the map `map` or, box by box, from the arrays
// that the operand is divided into.
template <typename Load, InParts kOf>
__device__ __forceinline__ void load(unsigned char* slot, const Problem& problem,
                                     const TensorMaps<kOf>& maps, int map, u64* full, u32 part,
                                     u16 sharers, int row, int k, int batch) {
  if constexpr (TensorMaps<kOf>::kIsInParts) {
    const auto box_at = [&](int across) {
      const PartPlace at = part_of<kOf>(problem, across);
      return typename Load::Box{&maps.of[at.part], at.index};
    };
    Load::load_boxes(slot, box_at, full, part, sharers, row, k, batch);
  } else {
    Load::load_part(slot, &maps.of[map], full, part, sharers, row, k, batch);
  }
}

__device__ __forceinline__ void produce(SharedStorage& shared, const Problem& problem,
                                        const LhsMaps& lhs, const RhsMaps& rhs, Schedule schedule,
                                        u32 rank) {
  const u32 part_of_lhs = Grid::kShares ? Grid::n_rank(rank) : 0;
  const u32 part_of_rhs = Grid::kShares ? Grid::m_rank(rank) : 0;
  const u16 lhs_sharers = Grid::row_of(part_of_rhs), rhs_sharers = Grid::column_of(part_of_lhs);
  Place place;
  for (; schedule.has_tile(); schedule.advance()) {
    const Tile tile = schedule.tile();
    for (int k = tile.k_begin; k < tile.k_end; ++k) {
      unsigned char* slot = shared.slots[place.slot()];
      u64* full = shared.ring.producer_acquire(place, kSlotBytes);
      const int k_element = k * Config::kBlockK;
      load<LhsLoad>(slot, problem, lhs, tile.residue, full, part_of_lhs, lhs_sharers, tile.row,
                    k_element, tile.batch);
      load<RhsLoad>(slot + Lhs::kBytes, problem, rhs, 0, full, part_of_rhs, rhs_sharers,
                    tile.column, k_element - tile.head, tile.batch);
      place.next();
    }
  }
  // Only releases of peers are still on their way: consumers have waited for all loads.
  if constexpr (Grid::kShares) shared.ring.producer_drain(place);
}

// ---- Consumers ---------------------------------------------------------------------------------

using Accumulators = float[kWgmmasM][kAccumulators];

// Groups of products in flight when a step ends. A slot is released when the next slot's products
// have been issued. A ring of one slot has no next one.
constexpr int kInFlight = Config::kStages > 1 ? 1 : 0;

// Steps of a tile behind whose products the tile before is stored.
constexpr int kStepsBefore = Config::kDeferred == Deferred::kPacked ? Config::kNumPacked
                             : Config::kDeferred == Deferred::kHalf ? 1
                                                                    : 0;

// Issues the products of one slot, for the wgmmas kFrom to kTo - 1 along m, as one group. They
// start from zeros unless `adds`.
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

// Clears the elements before the head of a tile's rows of the lhs, in the tile's first slot.
__device__ __forceinline__ void clear_heads(unsigned char* slot, int first_row, int head) {
  for (int i = threadIdx.x % kWarpgroup; i < kConsumerM; i += kWarpgroup) {
    const int row = first_row + i;
    // The row's first 16 bytes, swizzled. (`swizzled` compiles to other machine code.)
    const u32 unit = shared_address(slot) + row * kSwizzleBytes + row % 8 * 16;
#pragma unroll
    for (int element = 0; element < kUnit - 1; ++element) {
      if (element < head) store_shared(unit + element * 2, static_cast<u16>(0));
    }
  }
  fence_proxy_async();
  // A warp's products read rows that other warps of its consumer have cleared. Barriers 0 and 1 are
  // taken.
  named_barrier_sync<kWarpgroup>(2 + uniform(threadIdx.x / kWarpgroup));
}

// acc = this consumer's rows of lhs times rhs. Calls `behind` with 0 to kStepsBefore - 1 when the
// products of these steps are under way, and `issued` when all products are.
template <typename Behind, typename Issued>
__device__ __forceinline__ void multiply(SharedStorage& shared, Accumulators& acc, Place& place,
                                         const Tile& tile, int first_row, u32 rank, Behind behind,
                                         Issued issued) {
  const int k_iters = tile.k_end - tile.k_begin;
  const u32 first_lhs = Lhs::descriptor(shared_address(shared.slots)) + Lhs::advance(first_row, 0);
  const u32 first_rhs = Rhs::descriptor(shared_address(shared.slots) + Lhs::kBytes);
  const auto previous = [](int slot) { return (slot + Config::kStages - 1) % Config::kStages; };
  if (Config::kResidues > 1 && tile.head > 0 && tile.k_begin == 0) {
    shared.ring.consumer_wait(place);
    clear_heads(shared.slots[place.slot()], first_row, tile.head);
  }
  int begin = 0;
#pragma unroll
  for (int k = 0; k < kStepsBefore; ++k) {
    if (k < k_iters) {
      shared.ring.consumer_wait(place);
      if constexpr (Config::kDeferred == Deferred::kHalf) {
        issue<0, 1>(acc, place.slot(), first_lhs, first_rhs, false);
        behind(k);
        issue<1, 2>(acc, place.slot(), first_lhs, first_rhs, false);
      } else {
        issue(acc, place.slot(), first_lhs, first_rhs, k > 0);
      }
      wgmma_wait<kInFlight>();
      if (k > 0) shared.ring.consumer_release(previous(place.slot()), rank);
      place.next();
      begin = k + 1;
    }
    // The slot before goes back first: the producer fills it meanwhile.
    if constexpr (Config::kDeferred == Deferred::kPacked) behind(k);
  }
  // Round by round, so that the compiler knows the slots' numbers. The first round may begin, and
  // the last one end, at any slot.
  u32 parity = place.parity();
  for (int round = begin - place.slot(); round < k_iters; round += Config::kStages, parity ^= 1) {
#pragma unroll
    for (int slot = 0; slot < Config::kStages; ++slot) {
      const int k = round + slot;
      if (static_cast<u32>(k - begin) >= static_cast<u32>(k_iters - begin)) continue;
      const bool is_first = kStepsBefore == 0 && k == 0;
      shared.ring.consumer_wait(slot, parity);
      issue(acc, slot, first_lhs, first_rhs, !is_first);
      wgmma_wait<kInFlight>();
      if (kInFlight == 0) {
        shared.ring.consumer_release(slot, rank);
      } else if (!is_first) {
        shared.ring.consumer_release(previous(slot), rank);
      }
    }
  }
  place.skip(k_iters - begin);
  issued();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kWgmmasM; ++i) pin(acc[i]);
  if (kInFlight > 0) shared.ring.consumer_release(previous(place.slot()), rank);
}

// ---- Split K in a cluster ----------------------------------------------------------------------

// The rank of the CTA that finishes piece (i, j) of the tile.
__device__ __forceinline__ u32 owner(int i, int j) { return (i * kPieces + j) % kClusterParts; }

// Adds up the partial sums. Every thread writes its accumulators to its own CTA's slots, which are
// free now. After the cluster's barrier it reads all CTAs' sums for the pieces that its CTA owns,
// in the order of ranks. Its own come from memory too: a choice between them and a load would make
// the loads wait for each other.
__device__ __forceinline__ void reduce(SharedStorage& shared, Accumulators& acc, u32 rank) {
  static_assert(
      kClusterParts == 1 || kWgmmasM * kAccumulators * 4 * Config::kConsumers * kWarpgroup <=
                                Config::kStages * kSlotBytes,
      "the partial sums fit into the ring");
  constexpr u32 kStride = kThreadsOfTile * 16;
  unsigned char* const mine = shared.slots[0] + (threadIdx.x - kWarpgroup) * 16;
  // The other consumers' products must have read the slots.
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
      if (r % 16 == 12) __syncwarp();  // Bounds the loads in flight, and so their registers.
    }
  }
}

// ---- Split K through global memory -------------------------------------------------------------

struct Exchange {
  float* sums;     // Of each tile: float4s in the order of its CTA's threads.
  int* has_given;  // Of each tile: whether its sums are there.
};

// The first four sums of this thread among those of a tile.
__device__ __forceinline__ float4* sums_of(const Exchange& exchange, int tile) {
  constexpr size_t kFloats = static_cast<size_t>(Config::kBlockM) * Config::kBlockN;
  return reinterpret_cast<float4*>(exchange.sums + tile * kFloats) + threadIdx.x - kWarpgroup;
}

__device__ __forceinline__ void give(const Exchange& exchange, const Accumulators& acc, int tile) {
  float4* to = sums_of(exchange, tile);
#pragma unroll
  for (int i = 0; i < kWgmmasM; ++i) {
#pragma unroll
    for (int r = 0; r < kAccumulators; r += 4, to += kThreadsOfTile) {
      *to = make_float4(acc[i][r], acc[i][r + 1], acc[i][r + 2], acc[i][r + 3]);
    }
  }
  named_barrier_sync<kThreadsOfTile>(1);  // All consumers have written.
  if (threadIdx.x == kWarpgroup) end_turn(&exchange.has_given[tile]);
}

// Adds the sums of the tile's other parts, of which this one is the last.
__device__ __forceinline__ void take(const Exchange& exchange, Accumulators& acc,
                                     const Schedule& schedule) {
  int other = schedule.number();
#pragma unroll 1
  for (int part = schedule.part_of_k(); part > 0; --part) {
    other -= schedule.num_between();
    if (threadIdx.x == kWarpgroup) wait_for_turn(&exchange.has_given[other], 1);
    named_barrier_sync<kThreadsOfTile>(1);  // The other part's sums are there for all.
    const float4* from = sums_of(exchange, other);
#pragma unroll
    for (int i = 0; i < kWgmmasM; ++i) {
#pragma unroll
      for (int r = 0; r < kAccumulators; r += 4, from += kThreadsOfTile) {
        const float4 sum = *from;
        acc[i][r] += sum.x, acc[i][r + 1] += sum.y, acc[i][r + 2] += sum.z, acc[i][r + 3] += sum.w;
        if (r % 32 == 28) __syncwarp();  // Bounds the loads in flight, and so their registers.
      }
    }
  }
}

// ---- Epilogue ----------------------------------------------------------------------------------

// A row-major matrix of the result's type and shape: tensor maps if TMA can address it, else an
// address. An absent matrix is an address that is not used.
struct Address {
  unsigned char* data;
};
template <bool kIsThere, InParts kOf>
struct MatrixType {
  using type = Address;
};
template <InParts kOf>
struct MatrixType<true, kOf> {
  using type = TensorMaps<kOf>;
};
template <bool kIsThere, InParts kOf = InParts::kNone>
using Matrix = typename MatrixType<kIsThere && Config::kHasTmaRows, kOf>::type;
using Out = Matrix<true, InParts::kOut>;
constexpr bool kHasSecond = Config::kSavePreactivation || Config::kIsGradient;
using Second = Matrix<kHasSecond>;
using Residual = Matrix<Config::kHasResidual>;
using Gate = Matrix<Config::kIsGradient>;

// 16 rows of one swizzle span, which a warp stages.
struct Piece {
  int batch, residue, row, column;
};

using Rows = RowPiece<Config::Output, kPieceBytes>;
__device__ __forceinline__ Rows rows_of(const Problem& problem, const Address& matrix,
                                        const Piece& piece) {
  return Rows(matrix.data, problem.m, problem.n, piece.batch, piece.row, piece.column);
}

template <InParts kOf>
__device__ __forceinline__ void send(const Problem& problem, const TensorMaps<kOf>& matrix,
                                     unsigned char* staging, const Piece& piece) {
  const PartPlace place = part_of<kOf>(problem, piece.column);
  const int map = TensorMaps<kOf>::kIsInParts ? place.part : piece.residue;
  store_piece<Config::kReduceAdd>(matrix.of, map, staging, {place.index, piece.row, piece.batch});
}
__device__ __forceinline__ void send(const Problem& problem, const Address& matrix,
                                     unsigned char* staging, const Piece& piece) {
  __syncwarp();
  rows_of(problem, matrix, piece).store(staging);
}

// Begins to fetch a piece. `full` completes a phase when it is there.
__device__ __forceinline__ void fetch(const Problem&, const TensorMaps<InParts::kNone>& matrix,
                                      unsigned char* staging, u64* full, const Piece& piece) {
  fetch_piece(matrix.of, piece.residue, staging, full, Buffer::kPieceBytes,
              {piece.column, piece.row, piece.batch});
}
__device__ __forceinline__ void fetch(const Problem& problem, const Address& matrix,
                                      unsigned char* staging, u64* full, const Piece& piece) {
  rows_of(problem, matrix, piece).fetch(staging, full);
}

template <InParts kOf>
__device__ __forceinline__ void prefetch(const TensorMaps<kOf>& matrix) {
#pragma unroll
  for (const TensorMap& map : matrix.of) prefetch_tensormap(&map);
}
__device__ __forceinline__ void prefetch(const Address&) {}

// Operands that Config leaves out are neither read nor written. The second result is the saved
// pre-activation, or the gate's gradient.
struct Operands {
  const Out& out;
  const Second& second;
  const Residual& residual;
  const Gate& gate;
  const float* bias;
  const float *cos, *sin;  // Of each position, of the pairs of a head.
};

// Rotates this thread's sums. Both columns of a pair are its own.
__device__ __forceinline__ void rotate(Accumulators& acc, const Problem& problem,
                                       const Operands& operands, const Tile& tile, int first_row) {
  constexpr bool kAreHalves = Config::kRotation == Rotation::kHalves;
  constexpr int kHeads = Config::kBlockN / Config::kHeadDim;
  constexpr int kHead = Config::kHeadDim / 2;  // A thread's sums of two rows of a head.
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpgroup / kWarp;
#pragma unroll
  for (int i = 0; i < kWgmmasM; ++i) {
    const int row = tile.row + first_row + i * kWgmmaM + warp * kPieceM + lane / 4;
    const int of_rows[2] = {row % problem.num_positions * (Config::kHeadDim / 2),
                            (row + 8) % problem.num_positions * (Config::kHeadDim / 2)};
    // 16 columns of each head at a time, and of halves the 16 that belong to them.
#pragma unroll
    for (int c = 0; c < kHead / (kAreHalves ? 16 : 8); ++c) {
      // values[r] and values[r + 1] of the 16 columns (staging.cuh) have these cosines and sines.
      float cosine[8], sine[8];
#pragma unroll
      for (int r = 0; r < 8; r += 2) {
        const int column = c * 16 + r / 4 * 8 + lane % 4 * 2;
        if constexpr (kAreHalves) {
          const int at = of_rows[r / 2 % 2] + column;
          const float2 both_cosines = __ldg(reinterpret_cast<const float2*>(operands.cos + at));
          const float2 both_sines = __ldg(reinterpret_cast<const float2*>(operands.sin + at));
          cosine[r] = both_cosines.x, cosine[r + 1] = both_cosines.y;
          sine[r] = both_sines.x, sine[r + 1] = both_sines.y;
        } else {
          cosine[r] = __ldg(operands.cos + of_rows[r / 2 % 2] + column / 2);
          sine[r] = __ldg(operands.sin + of_rows[r / 2 % 2] + column / 2);
        }
      }
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (tile.column + head * Config::kHeadDim >= problem.num_rotated) break;
        float* const first = &acc[i][head * kHead + c * 8];
        if constexpr (kAreHalves) {
          float* const second = first + kHead / 2;
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            const float x = first[r], y = second[r];
            first[r] = x * cosine[r] - y * sine[r];
            second[r] = y * cosine[r] + x * sine[r];
          }
        } else {
#pragma unroll
          for (int r = 0; r < 8; r += 2) {
            const float x = first[r], y = first[r + 1];
            first[r] = x * cosine[r] - y * sine[r];
            first[r + 1] = y * cosine[r] + x * sine[r];
          }
        }
      }
    }
  }
}

// Turns a warp's 16 rows of each wgmma's sums into results, piece by piece.
class Epilogue {
  static constexpr int kCount = kWgmmasM * kPieces;
  static constexpr int kPacked = Config::kDeferred == Deferred::kPacked ? Config::kNumPacked : 0;
  // Pieces that are not deferred.
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

  // Before a tile's products: begins to fetch the first pieces of the residual and of the gate.
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
          Buffer::write(values, staging_[kOutSlots + out_slot(p)], c);
        }
        if constexpr (Config::kIsGradient) {
          differentiate(values, staging, staging_[kOutSlots + out_slot(p)], c);
          continue;
        }
        activate(values);
        if constexpr (Config::kHasResidual) {
          float others[8];
          Buffer::read(others, staging, c);
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            values[r] = Config::kMultiplies ? values[r] * others[r] : values[r] + others[r];
          }
        }
        Buffer::write(values, staging, c);
      }
      // This fetch fills the buffer of the store before, which has had this piece's time to read
      // it.
      if (kFetchesAhead && kOutSlots > 1 && p > 0 && p - 1 + kOutSlots < kCount) {
        prefetch(tile, first_row, p - 1 + kOutSlots);
      }
      if constexpr (kHasSecond) {
        send(problem_, operands_.second, staging_[kOutSlots + out_slot(p)], piece);
      }
      send(problem_, operands_.out, staging, piece);
      if (kFetchesAhead && kOutSlots == 1 && p + 1 < kCount) prefetch(tile, first_row, p + 1);
    }
  }

  // `finish` with deferred pieces. `begin_finish` stores the others; `end_finish` stores the
  // deferred ones in kStepsBefore parts, behind the next tile's first products.
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
        Buffer::pack(values, packed_[i][c]);
        if constexpr (Config::kHasBias) __syncwarp();  // Bounds the loads in flight.
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
      for (int c = 0; c < kPieceN / 16; ++c) Buffer::write_packed(packed_[part][c], staging, c);
      send(problem_, operands_.out, staging, piece_of(last_, first_row, p));
    }
  }

  // Staging buffers must outlive the stores' reads.
  __device__ __forceinline__ void drain() {
    if (threadIdx.x % kWarp == 0) cp_async_bulk_wait_group_read<0>();
  }

 private:
  static constexpr bool kIsExact = Config::Output::kBytes == 4;
  // The results have half of the buffers each. Those of a gradient hold its operands before.
  static constexpr int kOutSlots = kStagingSlots / (kHasSecond ? 2 : 1);
  static_assert(kStagingSlots % 2 == 0 || !kHasSecond, "halves");
  // In a cluster that splits k, each CTA finishes some pieces only. Each piece is then fetched when
  // it is due.
  static constexpr bool kFetchesAhead = Config::kHasResidual && kClusterParts == 1;
  static __device__ __forceinline__ int out_slot(int p) { return p % kOutSlots; }

  __device__ __forceinline__ Piece piece_of(const Tile& tile, int first_row, int p) const {
    return {tile.batch, tile.residue,
            tile.row + first_row + p / kPieces * kWgmmaM + static_cast<int>(warp_ % 4) * kPieceM,
            tile.column + p % kPieces * kPieceN};
  }

  __device__ __forceinline__ void prefetch(const Tile& tile, int first_row, int p) {
    __syncwarp();
    const Piece piece = piece_of(tile, first_row, p);
    u64* full = &residual_full_[out_slot(p)];
    fetch(problem_, operands_.residual, staging_[out_slot(p)], full, piece);
    if constexpr (Config::kIsGradient) {
      fetch(problem_, operands_.gate, staging_[kOutSlots + out_slot(p)], full, piece);
    }
  }

  // Waits until the last stores from the buffers of piece p have read them. Buffers are used in
  // turn, so only the stores of the pieces in between may be under way. The turn is broken at the
  // start of a tile if the tile before ended out of turn, and if pieces are left out: then it waits
  // for all stores.
  __device__ __forceinline__ void wait_free(int p) {
    constexpr int kStores = kHasSecond ? 2 : 1;
    if (threadIdx.x % kWarp == 0) {
      if ((p == 0 && kCount % kOutSlots != 0) || kClusterParts > 1) {
        cp_async_bulk_wait_group_read<0>();
      } else {
        cp_async_bulk_wait_group_read<kStagingSlots - kStores>();
      }
    }
    __syncwarp();
  }

  // The `c`-th 16 columns of the `j`-th piece of a wgmma's sums (staging.cuh has their order),
  // scaled and with the bias added.
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

  // 16 columns of the cotangent in, those of both gradients out. The buffers hold the
  // pre-activation and the gate before, and the gradients by them after.
  static __device__ __forceinline__ void differentiate(float (&cotangent)[8], unsigned char* first,
                                                       unsigned char* second, int c) {
    float preactivation[8], gate[8];
    Buffer::read(preactivation, first, c);
    Buffer::read(gate, second, c);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const ValueAndSlope at = Activations<kIsExact>::JK_ACTIVATION_AND_SLOPE(preactivation[r]);
      gate[r] *= cotangent[r] * at.slope;
      cotangent[r] *= at.value;
    }
    Buffer::write(gate, first, c);
    Buffer::write(cotangent, second, c);
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

  const Problem& problem_;
  const Operands& operands_;
  u32 rank_;
  u32 warp_;
  unsigned char (*staging_)[kStagingBytes];
  u64* residual_full_;
  u32 residual_parity_ = 0;
  // The tile whose pieces are deferred, and its packed pieces by 16 columns.
  Tile last_;
  bool has_last_ = false;
  u32 packed_[kPacked > 0 ? kPacked : 1][kPieceN / 16][4];
};

__device__ __forceinline__ void consume(SharedStorage& shared, const Problem& problem,
                                        const Operands& operands, const Exchange& exchange,
                                        Schedule schedule, u32 rank) {
  const int consumer = uniform(threadIdx.x / kWarpgroup) - 1;
  const int warp = uniform(threadIdx.x % kWarpgroup / kWarp);
  const int first_row = Config::kPingPong ? 0 : consumer * kConsumerM;
  Epilogue epilogue(shared, problem, operands, rank);
  Place place;
  u32 turn = consumer == 0 ? 1 : 0;  // The first consumer does not wait for its first turn.
  if (Config::kPingPong && consumer == 1) {
    schedule.advance();
    place.skip(problem.k_iters);
  }
  Accumulators acc;
  while (schedule.has_tile()) {
    const Tile tile = schedule.tile();
    const bool is_given = Config::kThroughMemory && schedule.part_of_k() < Config::kSplitK - 1;
    if (!is_given) epilogue.begin(tile, first_row);
    if constexpr (Config::kPingPong) {
      // Also keeps the parities apart: no consumer is more than a round ahead of a slot.
      mbarrier_wait_parity(&shared.turn[consumer][warp], turn);
      turn ^= 1;
    }
    multiply(
        shared, acc, place, tile, first_row, rank,
        [&](int part) { epilogue.end_finish(acc, first_row, part); },
        [&] {
          // A warp gives the turn to the warp of the other consumer that shares its tensor core.
          if (Config::kPingPong && threadIdx.x % kWarp == 0) {
            mbarrier_arrive(&shared.turn[consumer ^ 1][warp]);
          }
        });
    if constexpr (Config::kPingPong) place.skip(problem.k_iters);
    if constexpr (kClusterParts > 1) reduce(shared, acc, rank);
    if (is_given) {
      give(exchange, acc, schedule.number());
      schedule.advance();
      continue;
    }
    if constexpr (Config::kThroughMemory) take(exchange, acc, schedule);
    if constexpr (Config::kRotation != Rotation::kNone) {
      rotate(acc, problem, operands, tile, first_row);
    }
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
    const __grid_constant__ LhsMaps lhs, const __grid_constant__ RhsMaps rhs,
    const __grid_constant__ Out out, const __grid_constant__ Second second,
    const __grid_constant__ Residual residual, const __grid_constant__ Gate gate, const float* bias,
    const float* cos, const float* sin, float* sums, int* has_given,
    const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const u32 rank = kClusterBlocks > 1 ? cluster_ctarank() : 0;
  const Schedule schedule(problem, rank);
  const int warpgroup = threadIdx.x / kWarpgroup;

  if (threadIdx.x == 0) {
    prefetch(lhs);
    prefetch(rhs);
    prefetch(out);
    shared.ring.init(kConsumersOfTile * kWarpgroup / kWarp);
    for (int i = 0; Config::kPingPong && i < 2 * kWarpgroup / kWarp; ++i) {
      mbarrier_init(&shared.turn[0][i], 1);
    }
    for (int i = 0; Config::kHasResidual && i < kConsumerWarps * kStagingSlots; ++i) {
      mbarrier_init(&shared.residual_full[0][i], Config::kIsGradient ? 2 : 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kClusterBlocks > 1) {
    // The peers' barriers must exist before this CTA writes to their memory or arrives at them.
    barrier_cluster_arrive_relaxed();
    barrier_cluster_wait();
  }

  if (warpgroup == 0) {
    if constexpr (Config::kConsumers > 1) setmaxnreg_dec<kProducerRegisters>();
    if (uniform(threadIdx.x / kWarp) == 0 && elect_one()) {
      produce(shared, problem, lhs, rhs, schedule, rank);
    }
    if constexpr (kClusterParts > 1) {
      __syncwarp();
      barrier_cluster();  // The barrier in `reduce`, which counts every thread.
    }
  } else {
    if constexpr (Config::kConsumers > 1) setmaxnreg_inc<kConsumerRegisters>();
    const Operands operands{out, second, residual, gate, bias, cos, sin};
    consume(shared, problem, operands, {sums, has_given}, schedule, rank);
  }

  if constexpr (kClusterParts > 1) {
    // A peer may still read this CTA's shared memory.
    __syncwarp();
    barrier_cluster_arrive_relaxed();
    barrier_cluster_wait();
  }
}

}  // namespace jaxkernels
