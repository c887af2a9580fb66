// Rung 13: the Tensor Memory Accelerator (TMA) fills a ring of STAGES slots, and no thread spends
// instructions on copies. One thread requests a tile as soon as all warps have released its slot.
//
// TMA cannot transpose 4-byte elements, so A stays row major. One instruction of a thread reads 4
// neighbours along k of one of its TM rows. A transposed tile would need as many instructions:
//
//   for 4 steps of k:   TM reads of A + 4 TN / 4 reads of B for 4 TM TN multiplications
//   8 x 16:             24 reads for 512 multiplications: 95.5 % of the instructions multiply
//
// Rows of A in the slot are 128 bytes long. The 128-byte swizzle puts unit u (16 bytes) of row r at
// u ^ (r % 8). The 8 rows that a warp reads at once lie in different banks:
//
//   row 0:  0 1 2 3 4 5 6 7        lane_m 0 reads unit 0 here: first column,
//   row 1:  1 0 3 2 5 4 7 6        lane_m 1: second column,
//   row 2:  2 3 0 1 6 7 4 5        lane_m 2: third column, ...

#include "ring.cuh"
#include "rows4.cuh"

using namespace jaxkernels;

constexpr int WM = LANES_M * TM, WN = LANES_N * TN;
constexpr int kWarpsN = BN / WN;
constexpr int kWarps = (BM / WM) * kWarpsN;
constexpr int kThreads = 32 * kWarps;

struct Slot {
  float a[BM * BK];
  float b[BK][BN];
};
struct Shared {
  Slot slots[STAGES];
  Ring<STAGES> ring;
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

__global__ __launch_bounds__(kThreads,
                             BLOCKS) void sgemm_tma(const __grid_constant__ tma::TensorMap a_map,
                                                    const __grid_constant__ tma::TensorMap b_map,
                                                    float* __restrict__ c, int m, int n, int k,
                                                    float alpha, float beta) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
  const int tiles_n = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / tiles_n * BM, column0 = blockIdx.x % tiles_n * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / kWarpsN * WM + lane / LANES_N;
  const int column = warp % kWarpsN * WN + lane % LANES_N * 4;
  const int num_tiles = (k + BK - 1) / BK;

  const auto request = [&](int tile, const Place& place) {
    Slot& slot = shared.slots[place.slot()];
    u64* full = shared.ring.producer_acquire(place, sizeof(Slot));
    const int a_at[2] = {tile * BK, row0}, b_at[2] = {column0, tile * BK};
    tma::cp_async_bulk_tensor_load(slot.a, &a_map, full, a_at);
    tma::cp_async_bulk_tensor_load(slot.b, &b_map, full, b_at);
  };

  Place requested, multiplied;
  if (threadIdx.x == 0) {
    shared.ring.init(kWarps);
    tma::fence_mbarrier_init();
    for (int tile = 0; tile < min(STAGES - 1, num_tiles); ++tile, requested.next()) {
      request(tile, requested);
    }
  }
  __syncthreads();  // The barriers are initialised for all threads.

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
    shared.ring.consumer_release(multiplied.slot(), 0);
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
}
