// out = activation(alpha * lhs * rhs + bias) + residual on Hopper tensor cores, or, with a
// multiplier in place of the residual, times that. One operand has at most 64 rows (of m or n). The
// other one, the weights, is a large matrix.
//
// Memory is the limit: the weights are read once, and every other byte is small beside them. So the
// weights are the left side of wgmma, 64 rows at a time, and the few rows are its columns:
//
//                            columns (at most 64, in steps of 8)
//                           +----+
//              k            |    | k          weights: rows x k, a block of rows for each tile
//         +-----------+     |    |            few:     columns x k
//   rows  |  weights  |     +----+
//         +-----------+     |    | rows       sums:    rows x columns, in float32
//                           +----+
//
// If the rhs is the large operand, rows are n and columns are m: the kernel computes the transposed
// result, and stores it by addresses of either order.
//
// In each CTA one producer thread copies blocks of both operands into a deep ring of shared memory
// slots by TMA. Consumer warpgroups multiply them with wgmma. Without split K, CTAs are persistent:
// the producer runs ahead into the next tile while consumers finish the last one.
//
// With split K, the CTAs of a cluster each multiply a part of k of the same tile. Each CTA finishes
// an equal part of the tile's rows. It gets the sums of these rows from all CTAs of the cluster:
//
//             rows of the tile, by the CTA that finishes them
//             |   rank 0    |   rank 1    |   rank 2    |   rank 3    |
//   rank 0    |      *  ----------->          sums of rank 0
//   rank 1    |   <-----------  *             ...
//
// Sums are written to the receiver's shared memory asynchronously, one place for each sender. When
// all bytes have arrived, the receiver adds them in the order of ranks. Same inputs give the same
// bits. Only the start of the cluster takes a barrier of all its CTAs.
//
// TMA fills with zeros what a block reads beyond an array's edge, but for columns: those beyond the
// few rows are computed from whatever shared memory holds, and not stored. few_rows.py compiles
// this file with the macros that `Config` reads. docs/cuda-gemm.md has the reasons.

#include "activations.cuh"
#include "ring.cuh"
#include "scheduler.cuh"
#include "tiles.cuh"

namespace jaxkernels {

using namespace tma;

struct Config {
  using Input = JK_INPUT;
  using Output = JK_OUTPUT;
  using Bias = JK_BIAS;
  using Residual = JK_RESIDUAL;
  static constexpr int kBlockRows = JK_BLOCK_ROWS;
  static constexpr int kColumns = JK_COLUMNS;  // Those of a tile: all, rounded up to 8.
  static constexpr int kBlockK = JK_BLOCK_K;
  static constexpr int kStages = JK_NUM_STAGES;
  static constexpr int kConsumers = JK_NUM_CONSUMERS;
  static constexpr int kSplitK = JK_SPLIT_K;
  static constexpr int kMostPerSm = JK_MOST_PER_SM;  // CTAs.
  // Whether k is the contiguous dimension.
  static constexpr bool kWeightsAreKMajor = JK_WEIGHTS_ARE_K_MAJOR;
  static constexpr bool kFewIsKMajor = JK_FEW_IS_K_MAJOR;
  // Whether one copy loads all boxes of a block of weights.
  static constexpr bool kStacksBoxes = JK_STACKS_BOXES;
  // Whether n, the contiguous dimension of the result, is along the columns. If not, it is along
  // the rows.
  static constexpr bool kColumnsAreN = JK_COLUMNS_ARE_N;
  static constexpr bool kHasAlpha = JK_HAS_ALPHA;
  static constexpr bool kHasBias = JK_HAS_BIAS;
  static constexpr bool kHasResidual = JK_HAS_RESIDUAL;
  // Whether what lies in the residual's place multiplies.
  static constexpr bool kMultiplies = JK_MULTIPLIES;
  static constexpr bool kSavePreactivation = JK_SAVE_PREACTIVATION;
};

// The sizes of a launch.
struct Problem {
  int rows, columns;
  int num_batches, row_tiles;
  int k_iters;  // Blocks of k.
  float alpha;
};

// Operands that Config leaves out are neither read nor written.
struct Operands {
  unsigned char* out;
  unsigned char* preactivation;
  const unsigned char* bias;
  const unsigned char* residual;
};

// ---- Constants that follow from Config ---------------------------------------------------------

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;

using Weights =
    OperandTile<Config::Input, Config::kBlockRows, Config::kBlockK, Config::kWeightsAreKMajor>;
using Few = OperandTile<Config::Input, Config::kColumns, Config::kBlockK, Config::kFewIsKMajor>;
using WeightsLoad = TileLoad<Weights, 1, Config::kStacksBoxes>;
using FewLoad = TileLoad<Few>;

constexpr int kSlotBytes = Weights::kBytes + Few::kBytes;
constexpr int kConsumerRows = Config::kBlockRows / Config::kConsumers;
constexpr int kWgmmas = kConsumerRows / kWgmmaM;
constexpr int kConsumerThreads = Config::kConsumers * kWarpgroup;
constexpr int kThreads = kConsumerThreads + kWarp;  // The producer's warp is the last one.

// Rows of a tile that one CTA finishes.
constexpr int kPartRows = Config::kBlockRows / Config::kSplitK;
// Floats from one row of sums to the next: 8 or 24 modulo 32, so that 4 rows of 8 columns, which
// half a warp writes at once, lie in different banks.
constexpr int kPitch = Config::kColumns / 8 % 2 ? Config::kColumns : Config::kColumns + 8;

static_assert(Config::kBlockRows % (kWgmmaM * Config::kConsumers) == 0, "whole wgmmas");
static_assert(Config::kColumns % 8 == 0 && Config::kColumns <= 64, "columns of one wgmma");
static_assert(Config::kStages > 1, "a slot is released during the products of the next one");
static_assert(kPartRows % 8 == 0 && kPartRows * Config::kSplitK == Config::kBlockRows,
              "a thread's rows of a wgmma are 8 apart");

struct SharedStorage {
  alignas(1024) unsigned char slots[Config::kStages][kSlotBytes];
  // The rows that this CTA finishes, from each CTA of the cluster.
  alignas(16) float sums[Config::kSplitK][kPartRows][kPitch];
  Ring<Config::kStages> ring;
  u64 sums_full;  // With split K.
};
static_assert(sizeof(SharedStorage) <= JK_SMEM_BYTES, "what the host gives is enough");

// ---- Tiles -------------------------------------------------------------------------------------

struct Tile {
  int batch, row;
};

__device__ __forceinline__ Tile tile_of(const Problem& problem, int index) {
  const int batch = index / problem.row_tiles;
  return {batch, (index - batch * problem.row_tiles) * Config::kBlockRows};
}

// The blocks of k that this CTA multiplies: at least one, as the host sees to it.
struct Steps {
  int begin, end;
};

__device__ __forceinline__ Steps steps_of(const Problem& problem, u32 rank) {
  return {static_cast<int>(problem.k_iters * rank / Config::kSplitK),
          static_cast<int>(problem.k_iters * (rank + 1) / Config::kSplitK)};
}

// A cluster that splits k has one tile, so `sums_full` has one phase.
using Tiles = PersistentTiles<Config::kSplitK>;
using Place = RingPlace<Config::kStages>;

// ---- Producer: one thread ----------------------------------------------------------------------

__device__ __forceinline__ void produce(SharedStorage& shared, const TensorMap& weights,
                                        const TensorMap& few, const Problem& problem, u32 rank) {
  const Steps steps = steps_of(problem, rank);
  // A box with k contiguous has the few rows only. What the slot holds behind them makes columns
  // that are not stored. Rows of zeros would cost more: TMA is slow to fill them in.
  const u32 few_bytes = Config::kFewIsKMajor
                            ? problem.columns * Config::kBlockK * Config::Input::kBytes
                            : Few::kBytes;
  Place place;
  for (Tiles tiles; tiles.index() < problem.num_batches * problem.row_tiles; tiles.advance()) {
    const Tile tile = tile_of(problem, tiles.index());
    for (int k = steps.begin; k < steps.end; ++k, place.next()) {
      unsigned char* slot = shared.slots[place.slot()];
      u64* full = shared.ring.producer_acquire(place, Weights::kBytes + few_bytes);
      WeightsLoad::load(slot, &weights, full, tile.row, k * Config::kBlockK, tile.batch);
      FewLoad::load(slot + Weights::kBytes, &few, full, 0, k * Config::kBlockK, tile.batch);
    }
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

using Accumulators = float[kWgmmas][Config::kColumns / 2];

// acc = this consumer's rows of the weights times the few rows, over this CTA's part of k.
__device__ __forceinline__ void multiply(SharedStorage& shared, Accumulators& acc, Place& place,
                                         const Steps& steps, int first_row) {
  const u32 first_weights =
      Weights::descriptor(shared_address(shared.slots)) + Weights::advance(first_row, 0);
  const u32 first_few = Few::descriptor(shared_address(shared.slots) + Weights::kBytes);
  int previous = 0;
#pragma unroll 1
  for (int k = steps.begin; k < steps.end; ++k, place.next()) {
    const u32 slot = place.slot() * (kSlotBytes >> 4);
    shared.ring.consumer_wait(place);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kBlockK / kWgmmaK<Config::Input>; ++step) {
#pragma unroll
      for (int i = 0; i < kWgmmas; ++i) {
        wgmma<Config::Input, Config::kWeightsAreKMajor, Config::kFewIsKMajor>(
            acc[i], first_weights + slot + Weights::advance(i * kWgmmaM, step),
            first_few + slot + Few::advance(0, step), k > steps.begin || step > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (k > steps.begin) shared.ring.consumer_release(previous, 0);
    previous = place.slot();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kWgmmas; ++i) pin(acc[i]);
  shared.ring.consumer_release(previous, 0);
}

constexpr u32 kSumsBytes = Config::kBlockRows * Config::kColumns * sizeof(float);

// Writes this consumer's sums to the CTAs that finish their rows, as the `rank`-th of the cluster.
// Returns when the sums of all CTAs are there.
__device__ __forceinline__ void gather(SharedStorage& shared, const Accumulators& acc,
                                       int first_row, u32 rank) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpgroup / kWarp;
  if constexpr (Config::kSplitK == 1) {
    named_barrier_sync<kConsumerThreads>(1);  // All have read the sums of the last tile.
  } else {
    barrier_cluster_wait();  // All CTAs have started: `few_rows` arrived at this barrier.
  }
#pragma unroll
  for (int i = 0; i < kWgmmas; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + i * kWgmmaM + warp * 16 + half * 8 + lane / 4;
      const u32 owner = row / kPartRows;
      float* const sums = &shared.sums[rank][row % kPartRows][lane % 4 * 2];
      const u32 to = Config::kSplitK == 1 ? shared_address(sums) : mapa(sums, owner);
      const u32 full = Config::kSplitK == 1 ? 0 : mapa(&shared.sums_full, owner);
#pragma unroll
      for (int j = 0; j < Config::kColumns / 8; ++j) {
        const u32 pair = to + j * 8 * sizeof(float);
        const float a = acc[i][j * 4 + half * 2], b = acc[i][j * 4 + half * 2 + 1];
        if constexpr (Config::kSplitK == 1) {
          store_shared(pair, a, b);
        } else {
          st_async(pair, a, b, full);
        }
      }
    }
  }
  if constexpr (Config::kSplitK == 1) {
    named_barrier_sync<kConsumerThreads>(1);
  } else {
    mbarrier_wait_parity(&shared.sums_full, 0);
  }
}

// ---- Epilogue ----------------------------------------------------------------------------------

// How an element of a type lies in memory.
template <typename T>
struct Element {
  using Stored = u16;
  static __device__ __forceinline__ u16 narrow(float x) {
    return static_cast<u16>(T::pack(x, 0.0f) & 0xffff);
  }
  static __device__ __forceinline__ float widen(u16 bits) { return T::low(bits); }
};
template <>
struct Element<Float32> {
  using Stored = float;
  static __device__ __forceinline__ float narrow(float x) { return x; }
  static __device__ __forceinline__ float widen(float x) { return x; }
};

template <typename T>
__device__ __forceinline__ float load_element(const unsigned char* data, long long index) {
  return Element<T>::widen(reinterpret_cast<const typename Element<T>::Stored*>(data)[index]);
}
template <typename T>
__device__ __forceinline__ void store_element(unsigned char* data, long long index, float x) {
  reinterpret_cast<typename Element<T>::Stored*>(data)[index] = Element<T>::narrow(x);
}

// Adds up the sums of the rows that this CTA finishes, and turns them into results. A thread has 4
// columns of a row at a time; neighbouring threads are neighbours in the result.
__device__ __forceinline__ void finish(const SharedStorage& shared, const Problem& problem,
                                       const Operands& operands, const Tile& tile, u32 rank) {
  constexpr int kQuads = Config::kColumns / 4;
  const int first_row = tile.row + rank * kPartRows;
  const long long batch = static_cast<long long>(tile.batch) * problem.rows * problem.columns;
  for (int i = threadIdx.x; i < kPartRows * kQuads; i += kConsumerThreads) {
    const int in_part = Config::kColumnsAreN ? i / kQuads : i % kPartRows;
    const int column = 4 * (Config::kColumnsAreN ? i % kQuads : i / kPartRows);
    const int row = first_row + in_part;
    if (row >= problem.rows) continue;
    float values[4] = {};
#pragma unroll
    for (int part = 0; part < Config::kSplitK; ++part) {
      const float4 sum = *reinterpret_cast<const float4*>(&shared.sums[part][in_part][column]);
      values[0] += sum.x, values[1] += sum.y, values[2] += sum.z, values[3] += sum.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column + j >= problem.columns) continue;
      const long long index =
          batch + (Config::kColumnsAreN ? static_cast<long long>(row) * problem.columns + column + j
                                        : static_cast<long long>(column + j) * problem.rows + row);
      float value = values[j];
      if constexpr (Config::kHasAlpha) value *= problem.alpha;
      if constexpr (Config::kHasBias) {
        value += load_element<Config::Bias>(operands.bias, Config::kColumnsAreN ? column + j : row);
      }
      if constexpr (Config::kSavePreactivation) {
        store_element<Config::Output>(operands.preactivation, index, value);
      }
      value = Activations<Config::Output::kBytes == 4>::JK_ACTIVATION(value);
      if constexpr (Config::kHasResidual) {
        const float other = load_element<Config::Residual>(operands.residual, index);
        value = Config::kMultiplies ? value * other : value + other;
      }
      store_element<Config::Output>(operands.out, index, value);
    }
  }
}

__device__ __forceinline__ void consume(SharedStorage& shared, const Problem& problem,
                                        const Operands& operands, u32 rank) {
  const int first_row = uniform(threadIdx.x / kWarpgroup) * kConsumerRows;
  const Steps steps = steps_of(problem, rank);
  Place place;
  Accumulators acc;
  for (Tiles tiles; tiles.index() < problem.num_batches * problem.row_tiles; tiles.advance()) {
    multiply(shared, acc, place, steps, first_row);
    gather(shared, acc, first_row, rank);
    finish(shared, problem, operands, tile_of(problem, tiles.index()), rank);
  }
}

// ---- Kernel ------------------------------------------------------------------------------------

__global__ __launch_bounds__(kThreads, Config::kMostPerSm) void few_rows(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap few,
    unsigned char* out, unsigned char* preactivation, const unsigned char* bias,
    const unsigned char* residual, const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const u32 rank = Config::kSplitK > 1 ? cluster_ctarank() : 0;

  if (threadIdx.x == 0) {
    prefetch_tensormap(&weights);
    prefetch_tensormap(&few);
    shared.ring.init(kConsumerThreads / kWarp);
    if constexpr (Config::kSplitK > 1) mbarrier_init(&shared.sums_full, 1);
    fence_mbarrier_init();
    if constexpr (Config::kSplitK > 1) mbarrier_arrive_expect_tx(&shared.sums_full, kSumsBytes);
  }
  __syncthreads();
  // A CTA writes to its peers' shared memory only after they have started, and leaves only after
  // they have written: it waits for their sums.
  if constexpr (Config::kSplitK > 1) barrier_cluster_arrive_relaxed();

  if (threadIdx.x >= kConsumerThreads) {
    if (elect_one()) produce(shared, weights, few, problem, rank);
    if constexpr (Config::kSplitK > 1) {
      __syncwarp();
      barrier_cluster_wait();
    }
  } else {
    consume(shared, problem, {out, preactivation, bias, residual}, rank);
  }
}

}  // namespace jaxkernels
