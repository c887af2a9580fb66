// Rung 14: CLUSTER blocks along m form a cluster. They need the same tile of B: each loads a part
// of it, and multicast writes the part to the shared memory of all. The main loop is that of
// rung 13.
//
//   block 0:  A rows 0 ... BM       loads B rows 0 ... 15   --+--> slots of both blocks
//   block 1:  A rows BM ... 2 BM    loads B rows 16 ... 31  --+                        CLUSTER = 2
//
// A slot is empty when the warps of all blocks have released it. A block leaves when all releases
// have arrived at its barriers.

#include "ring.cuh"
#include "rows4.cuh"

using namespace jaxkernels;

constexpr int WM = LANES_M * TM, WN = LANES_N * TN;
constexpr int kWarpsN = BN / WN;
constexpr int kWarps = (BM / WM) * kWarpsN;
constexpr int kThreads = 32 * kWarps;

using Grid = ClusterGrid<CLUSTER, 1>;
constexpr int kPart = BK / CLUSTER;  // Rows of B that a block loads.

struct Slot {
  float a[BM * BK];
  float b[BK][BN];
};
struct Shared {
  Slot slots[STAGES];
  Ring<STAGES, Grid> ring;
};
static_assert(sizeof(Shared) <= SMEM_BYTES, "what the host gives is enough");
using Place = RingPlace<STAGES>;

// sums += a slot's tile of A times its tile of B, for the results of one thread.
__device__ __forceinline__ void multiply(const Slot& slot, int row, int column,
                                         float (&sums)[TM][TN]) {
  static_assert(BK == 32 && LANES_M == 8, "rows of 128 bytes, 8 of them at once");
  const int swizzled = row * BK + row % 8 * 4;
#pragma unroll UNROLL / 4
  for (int k4 = 0; k4 < BK; k4 += 4) {
    float a_values[TM][4];
#pragma unroll
    for (int i = 0; i < TM; ++i) copy4(a_values[i], &slot.a[(swizzled ^ k4) + i * LANES_M * BK]);
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      float b_values[TN];
#pragma unroll
      for (int j = 0; j < TN; j += 4) copy4(&b_values[j], &slot.b[k4 + l][column + j * LANES_N]);
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) sums[i][j] += a_values[i][l] * b_values[j];
      }
    }
  }
}

__global__ __launch_bounds__(kThreads, BLOCKS) void sgemm_multicast(
    const __grid_constant__ tma::TensorMap a_map, const __grid_constant__ tma::TensorMap b_map,
    float* __restrict__ c, int m, int n, int k, float alpha, float beta) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
  const int tiles_n = (n + BN - 1) / BN;
  const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER;
  const int row0 = (cluster / tiles_n * CLUSTER + rank) * BM, column0 = cluster % tiles_n * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / kWarpsN * WM + lane / LANES_N;
  const int column = warp % kWarpsN * WN + lane % LANES_N * 4;
  const int num_tiles = (k + BK - 1) / BK;

  const auto request = [&](int tile, const Place& place) {
    Slot& slot = shared.slots[place.slot()];
    u64* full = shared.ring.producer_acquire(place, sizeof(Slot));
    const int a_at[2] = {tile * BK, row0}, b_at[2] = {column0, tile * BK + rank * kPart};
    tma::cp_async_bulk_tensor_load(slot.a, &a_map, full, a_at);
    tma::cp_async_bulk_tensor_multicast(slot.b[rank * kPart], &b_map, full, b_at,
                                        Grid::column_of(0));
  };

  Place requested, multiplied;
  if (threadIdx.x == 0) {
    shared.ring.init(kWarps);
    tma::fence_mbarrier_init();
  }
  __syncwarp();
  tma::barrier_cluster();  // The barriers of all blocks are initialised.
  if (threadIdx.x == 0) {
    for (int tile = 0; tile < min(STAGES - 1, num_tiles); ++tile, requested.next()) {
      request(tile, requested);
    }
  }
  __syncwarp();

  float sums[TM][TN] = {};
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    // Refills the slot of the previous tile.
    if (threadIdx.x == 0 && tile + STAGES - 1 < num_tiles) {
      request(tile + STAGES - 1, requested);
      requested.next();
    }
    __syncwarp();
    shared.ring.consumer_wait(multiplied);
    multiply(shared.slots[multiplied.slot()], row, column, sums);
    __syncwarp();
    shared.ring.consumer_release(multiplied.slot(), rank);
    multiplied.next();
  }

#pragma unroll
  for (int i = 0; i < TM; ++i) {
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      update4<N_ALIGNED>(c, m, n, row0 + row + i * LANES_M, column0 + column + j * LANES_N, alpha,
                         &sums[i][j], beta);
    }
  }
  if (threadIdx.x == 0) shared.ring.producer_drain(requested);
}
