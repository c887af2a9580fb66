// Rung 15: SPLIT_K blocks share one tile of C when there are fewer tiles than SMs. Each multiplies
// a part of k. They form a cluster and add their sums through each other's shared memory, without
// atomics and always in the same order: results are bitwise repeatable.
//
//   block 0   k part 0 -> partial sums --+--> rows 0 ... BM / 2 of C = part 0 + part 1
//                                        x                                              SPLIT_K = 2
//   block 1   k part 1 -> partial sums --+--> rows BM / 2 ... BM of C = part 0 + part 1
//
// The partial sums take the place of the ring's slots. The main loop is that of rung 13.

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
  union {
    Slot slots[STAGES];
    float partial[SPLIT_K == 1 ? 1 : BM][BN + 4];  // Padded: rows begin in different banks.
  };
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

__global__ __launch_bounds__(kThreads, BLOCKS) void sgemm_split_k(
    const __grid_constant__ tma::TensorMap a_map, const __grid_constant__ tma::TensorMap b_map,
    float* __restrict__ c, int m, int n, int k, float alpha, float beta) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
  const int tiles_n = (n + BN - 1) / BN;
  const int tile_of_c = blockIdx.x / SPLIT_K, part = blockIdx.x % SPLIT_K;
  const int row0 = tile_of_c / tiles_n * BM, column0 = tile_of_c % tiles_n * BN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / kWarpsN * WM + lane / LANES_N;
  const int column = warp % kWarpsN * WN + lane % LANES_N * 4;
  // This block's tiles along k.
  const int all_tiles = (k + BK - 1) / BK;
  const int begin = static_cast<long long>(all_tiles) * part / SPLIT_K;
  const int end = static_cast<long long>(all_tiles) * (part + 1) / SPLIT_K;

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
    for (int tile = begin; tile < min(begin + STAGES - 1, end); ++tile, requested.next()) {
      request(tile, requested);
    }
  }
  __syncthreads();  // The barriers are initialised for all threads.

  float sums[TM][TN] = {};
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    // Refills the slot of the previous tile.
    if (threadIdx.x == 0 && tile + STAGES - 1 < end) {
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

  if constexpr (SPLIT_K == 1) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        update4<N_ALIGNED>(c, m, n, row0 + row + i * LANES_M, column0 + column + j * LANES_N, alpha,
                           &sums[i][j], beta);
      }
    }
  } else {
    __syncthreads();  // All warps have read the slots.
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        copy4(&shared.partial[row + i * LANES_M][column + j * LANES_N], &sums[i][j]);
      }
    }
    tma::barrier_cluster();  // The partial sums of all blocks are complete.
    constexpr int kRows = BM / SPLIT_K;
    static_assert(kRows * (BN / 4) % kThreads == 0, "warps stay whole");
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * (BN / 4); i += kThreads) {
      const int at_row = part * kRows + i / (BN / 4), at_column = i % (BN / 4) * 4;
      float total[4] = {};
#pragma unroll
      for (int other = 0; other < SPLIT_K; ++other) {
        const float4 v = load_cluster(tma::mapa(&shared.partial[at_row][at_column], other));
        total[0] += v.x;
        total[1] += v.y;
        total[2] += v.z;
        total[3] += v.w;
      }
      update4<N_ALIGNED>(c, m, n, row0 + at_row, column0 + at_column, alpha, total, beta);
    }
    tma::barrier_cluster();  // No block leaves while another reads its partial sums.
  }
}
