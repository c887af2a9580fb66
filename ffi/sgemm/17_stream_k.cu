// Rung 17: all blocks multiply the same number of tiles along k.
//
// 512 tiles of C for 132 SMs are 3.88 each. Rung 16 takes the time of 4. Here a block takes whole
// tiles of C while there are enough for all. The rest is divided by its steps along k, not by its
// tiles (stream-K: Osama et al. 2023, arXiv:2301.03598). For 3 tiles of 8 steps and 4 blocks:
//
//   tile     |       0       |       1       |       2       |
//   step      0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7
//   block    |     0     |     1     |     2     |     3     |
//
// Block 1 takes the first 4 steps of tile 1, then the last 2 of tile 0. The block with a tile's
// last steps writes the tile; the others give it their sums through global memory. A block goes
// through its share from the end to the beginning. So it gives sums away before it needs those of
// others, and it waits for blocks of lower numbers only, which the GPU starts no later.
//
// Sums are added in the order of the blocks: results repeat bit by bit.

#include "ptx.cuh"
#include "ring.cuh"
#include "rows4.cuh"

using namespace jaxkernels;

constexpr int WM = LANES_M * TM, WN = LANES_N * TN;
constexpr int kWarpsN = BN / WN;
constexpr int kConsumers = (BM / WM) * kWarpsN;  // Warps.
constexpr int kThreads = 32 * (kConsumers + TRANSPOSERS);
constexpr int kStaged = 2;
// Whether registers move from the transposers to the consumers: both are whole warpgroups.
constexpr bool kMoves = kConsumers % 4 == 0 && TRANSPOSERS % 4 == 0;
// Of 512 for each thread of a warpgroup and SM. With these, ptxas reads shared memory early enough:
// 30 or more products before the values' first use.
constexpr int kConsumerRegisters = BLOCKS == 1 ? 216 : 192;
constexpr int kTransposerRegisters = (504 / BLOCKS - kConsumers / 4 * kConsumerRegisters) / 8 * 8;

struct Slot {
  float a[BK][BM];
  float b[BK][BN];
};
struct Shared {
  float staged[kStaged][BM * BK];
  Slot slots[STAGES];
  Ring<kStaged> staged_ring;
  Ring<STAGES> ring;
};
static_assert(sizeof(Shared) <= SMEM_BYTES, "what the host gives is enough");

// What a block multiplies: parts of tiles of C, one after the other. Few members: the sums of a
// consumer leave few registers.
class Work {
 public:
  // The present part: the tile of C, and its first and end tile along k. `next()` sets them.
  int tile, begin, end;

  __device__ __forceinline__ Work(int tiles, int whole_tiles, int steps)
      : tile(blockIdx.x - gridDim.x), tiles_(tiles), whole_tiles_(whole_tiles), steps_(steps) {}

  __device__ __forceinline__ bool next() {
    int left;  // The block has multiplied its share from here on.
    if (tile < whole_tiles_) {
      tile += gridDim.x, begin = 0, end = steps_;
      if (tile < whole_tiles_) return true;
      left = share(blockIdx.x + 1);
    } else {
      left = first_step() + begin;
    }
    const int first = share(blockIdx.x);
    if (left == first) return false;
    tile = whole_tiles_ + (left - 1) / steps_;
    begin = max(first - first_step(), 0);
    end = left - first_step();
    return true;
  }

  // Whether this block writes the tile.
  __device__ __forceinline__ bool finishes() const { return end == steps_; }
  // Whether the tile's first step belongs to `block`.
  __device__ __forceinline__ bool begins_with(int block) const {
    return share(block) <= first_step();
  }

 private:
  // The steps of all tiles that are not whole have numbers. Returns the first of a block's share.
  __device__ __forceinline__ int share(int block) const {
    const int all = (tiles_ - whole_tiles_) * steps_, blocks = gridDim.x;
    return all / blocks * block + min(all % blocks, block);
  }
  // The number of the tile's first step.
  __device__ __forceinline__ int first_step() const { return (tile - whole_tiles_) * steps_; }

  const int tiles_, whole_tiles_, steps_;
};

// sums += a slot's tile of A times its tile of B, for the results of one thread.
__device__ __forceinline__ void multiply(const Slot& slot, int row, int column,
                                         float (&sums)[TM][TN]) {
#pragma unroll UNROLL
  for (int l = 0; l < BK; ++l) {
    float a_values[TM], b_values[TN];
#pragma unroll
    for (int j = 0; j < TN; j += 4) copy4(&b_values[j], &slot.b[l][column + j * LANES_N]);
#pragma unroll
    for (int i = 0; i < TM; i += 4) copy4(&a_values[i], &slot.a[l][row + i * LANES_M]);
#pragma unroll
    for (int j = 0; j < TN; ++j) {
#pragma unroll
      for (int step = 0; step < TM; ++step) {
        const int i = j % 2 ? step : TM - 1 - step;
        sums[i][j] += a_values[i] * b_values[j];
      }
    }
  }
}

// Requests the tiles of A and B for all the block's work, and transposes those of A. All transposer
// warps call it.
__device__ __forceinline__ void produce(Shared& shared, const tma::TensorMap& a_map,
                                        const tma::TensorMap& b_map, Work work, int tiles_n) {
  static_assert(BK == 32 && BM % 32 == 0, "rows of 128 bytes, 32 of them at once");
  const int warp = threadIdx.x / 32 - kConsumers, lane = threadIdx.x % 32;
  const bool requests = warp == 0 && lane == 0;
  const auto stage = [&](int row0, int step, const RingPlace<kStaged>& place) {
    u64* full = shared.staged_ring.producer_acquire(place, sizeof(shared.staged[0]));
    const int at[2] = {step * BK, row0};
    tma::cp_async_bulk_tensor_load(shared.staged[place.slot()], &a_map, full, at);
  };
  RingPlace<kStaged> requested, read;
  RingPlace<STAGES> filled;
#pragma unroll 1
  while (work.next()) {
    const int row0 = work.tile / tiles_n * BM, column0 = work.tile % tiles_n * BN;
    if (requests) stage(row0, work.begin, requested);
    requested.next();
#pragma unroll 1
    for (int step = work.begin; step < work.end; ++step, read.next(), filled.next()) {
      Slot& slot = shared.slots[filled.slot()];
      if (requests) {
        if (step + 1 < work.end) stage(row0, step + 1, requested);
        u64* full = shared.ring.producer_acquire(filled, sizeof(slot.b));
        const int at[2] = {column0, step * BK};
        tma::cp_async_bulk_tensor_load(slot.b, &b_map, full, at);
      }
      if (step + 1 < work.end) requested.next();
      __syncwarp();
      shared.ring.producer_wait(filled);
      shared.staged_ring.consumer_wait(read);
      // A lane reads 4 neighbours of its row. The swizzle is that of rung 13.
#pragma unroll 1
      for (int row = 32 * warp + lane; row < BM; row += 32 * TRANSPOSERS) {
        const float* from = shared.staged[read.slot()];
        const int swizzled = row * BK + row % 8 * 4;
#pragma unroll
        for (int k4 = 0; k4 < BK; k4 += 4) {
          float values[4];
          copy4(values, &from[swizzled ^ k4]);
#pragma unroll
          for (int l = 0; l < 4; ++l) slot.a[k4 + l][row] = values[l];
        }
      }
      __syncwarp();
      shared.staged_ring.consumer_release(read.slot(), 0);
      if (lane == 0) tma::mbarrier_arrive(&shared.ring.full[filled.slot()]);
    }
  }
}

// Where a consumer thread keeps result (i, j) among a block's partial sums: lanes are neighbours.
__device__ __forceinline__ float* partial_sum(float* partial, int block, int i, int j) {
  const size_t at = (static_cast<size_t>(block) * TM * TN + i * TN + j) * (32 * kConsumers);
  return partial + at + threadIdx.x;
}

__global__ __launch_bounds__(kThreads, BLOCKS) void sgemm_stream_k(
    const __grid_constant__ tma::TensorMap a_map, const __grid_constant__ tma::TensorMap b_map,
    float* __restrict__ c, float* partial, int* has_given, int m, int n, int k, int whole_tiles,
    float alpha, float beta) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
  const int tiles_n = (n + BN - 1) / BN;
  Work work((m + BM - 1) / BM * tiles_n, whole_tiles, (k + BK - 1) / BK);

  if (threadIdx.x == 0) {
    shared.staged_ring.init(TRANSPOSERS);
    shared.ring.init(kConsumers, 1 + TRANSPOSERS);
    tma::fence_mbarrier_init();
  }
  __syncthreads();  // The barriers are initialised for all threads.

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= kConsumers) {
    if constexpr (kMoves) setmaxnreg_dec<kTransposerRegisters>();
    produce(shared, a_map, b_map, work, tiles_n);
    return;
  }

  if constexpr (kMoves) setmaxnreg_inc<kConsumerRegisters>();
  const int lane_m = lane % 2 + lane / 8 * 2, lane_n = lane / 2 % 4;
  static_assert(LANES_M == 8 && LANES_N == 4, "bits 0, 3, 4 of a lane are rows, 1 and 2 columns");
  const int row = warp / kWarpsN * WM + lane_m * 4;
  const int column = warp % kWarpsN * WN + lane_n * 4;
  RingPlace<STAGES> multiplied;
#pragma unroll 1
  while (work.next()) {
    float sums[TM][TN] = {};
#pragma unroll 1
    for (int step = work.begin; step < work.end; ++step, multiplied.next()) {
      shared.ring.consumer_wait(multiplied);
      multiply(shared.slots[multiplied.slot()], row, column, sums);
      __syncwarp();
      shared.ring.consumer_release(multiplied.slot(), 0);
    }
    if (!work.finishes()) {
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) *partial_sum(partial, blockIdx.x, i, j) = sums[i][j];
      }
      named_barrier_sync<32 * kConsumers>(1);  // All consumers have written.
      if (threadIdx.x == 0) end_turn(&has_given[blockIdx.x]);
      continue;
    }
    if (work.begin > 0) {
      int other = blockIdx.x;
      do {
        --other;
        if (threadIdx.x == 0) wait_for_turn(&has_given[other], 1);
        named_barrier_sync<32 * kConsumers>(1);  // The other block's sums are there for all.
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
          for (int j = 0; j < TN; ++j) sums[i][j] += *partial_sum(partial, other, i, j);
        }
      } while (!work.begins_with(other));
    }
    const int row0 = work.tile / tiles_n * BM, column0 = work.tile % tiles_n * BN;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      const int at_row = row0 + row + i / 4 * 4 * LANES_M + i % 4;
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        update4<N_ALIGNED>(c, m, n, at_row, column0 + column + j * LANES_N, alpha, &sums[i][j],
                           beta);
      }
    }
  }
}
