// Rung 16: the order of the products and the layout of A suit the register file.
//
// The registers of a scheduler lie in two banks, even and odd numbers. A bank reads one register a
// clock, and an FFMA needs three. So one of them should come from the reuse cache (the register
// that the FFMA before read at the same place), and the other two should lie in different banks.
//
//   rung 13:  a 16-byte read gives a thread 4 neighbours of A along k, so the 8 values of A of one
//             step lie in one bank, those of the next step in the other
//   here:     a 16-byte read gives 4 neighbours along m, so the values lie in alternate banks
//
// The products go up one column of the sums and down the next. B is reused within a column, A where
// the column changes. Then the sums alternate like A, in the other bank. That B is read first and
// that the first column goes up has no reason but ptxas, which then spreads the reads best.
//
// TMA cannot transpose A. TRANSPOSERS warps do it, and request all loads:
//
//   A  --TMA-->  staged, row major  --transposers-->  slot.a[k][m]  --+-->  consumers
//   B  --TMA--------------------------------------->  slot.b[k][n]  --+
//
// A 16-byte read of a warp takes two turns instead of four if lanes l and l ^ 1 (or l and l ^ 2)
// read the same address. So bit 0 of a lane counts rows and bit 1 columns:
//
//   lane      0  1  2  3  4  5  6  7 | 8  9 10 11 ...
//   rows      0  1  0  1  0  1  0  1 | 2  3  2  3 ...     in units of 4
//   columns   0  0  1  1  2  2  3  3 | 0  0  1  1 ...     in units of 4

#include "ring.cuh"
#include "rows4.cuh"

using namespace jaxkernels;

constexpr int WM = LANES_M * TM, WN = LANES_N * TN;
constexpr int kWarpsN = BN / WN;
constexpr int kConsumers = (BM / WM) * kWarpsN;  // Warps.
constexpr int kThreads = 32 * (kConsumers + TRANSPOSERS);
constexpr int kStaged = 2;

struct Slot {
  float a[BK][BM];
  float b[BK][BN];
};
struct Shared {
  float staged[kStaged][BM * BK];
  union {
    Slot slots[STAGES];
    float partial[SPLIT_K == 1 ? 1 : BM][BN + 4];  // Padded: rows begin in different banks.
  };
  Ring<kStaged> staged_ring;
  Ring<STAGES> ring;
};
static_assert(sizeof(Shared) <= SMEM_BYTES, "what the host gives is enough");

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

// Requests the tiles [begin, end) of A and B and transposes those of A. All transposer warps call
// it.
__device__ __forceinline__ void produce(Shared& shared, const tma::TensorMap& a_map,
                                        const tma::TensorMap& b_map, int row0, int column0,
                                        int begin, int end) {
  static_assert(BK == 32 && BM % 32 == 0, "rows of 128 bytes, 32 of them at once");
  const int warp = threadIdx.x / 32 - kConsumers, lane = threadIdx.x % 32;
  const bool requests = warp == 0 && lane == 0;
  const auto stage = [&](int tile, const RingPlace<kStaged>& place) {
    u64* full = shared.staged_ring.producer_acquire(place, sizeof(shared.staged[0]));
    const int at[2] = {tile * BK, row0};
    tma::cp_async_bulk_tensor_load(shared.staged[place.slot()], &a_map, full, at);
  };
  RingPlace<kStaged> requested, read;
  RingPlace<STAGES> filled;
  if (requests && begin < end) stage(begin, requested);
  requested.next();
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile, requested.next(), read.next(), filled.next()) {
    Slot& slot = shared.slots[filled.slot()];
    if (requests) {
      if (tile + 1 < end) stage(tile + 1, requested);
      u64* full = shared.ring.producer_acquire(filled, sizeof(slot.b));
      const int at[2] = {column0, tile * BK};
      tma::cp_async_bulk_tensor_load(slot.b, &b_map, full, at);
    }
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

__global__ __launch_bounds__(kThreads, BLOCKS) void sgemm_transposed(
    const __grid_constant__ tma::TensorMap a_map, const __grid_constant__ tma::TensorMap b_map,
    float* __restrict__ c, int m, int n, int k, float alpha, float beta) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_smem);
  const int tiles_n = (n + BN - 1) / BN;
  const int tile_of_c = blockIdx.x / SPLIT_K, part = blockIdx.x % SPLIT_K;
  const int row0 = tile_of_c / tiles_n * BM, column0 = tile_of_c % tiles_n * BN;
  // This block's tiles along k.
  const int all_tiles = (k + BK - 1) / BK;
  const int begin = static_cast<long long>(all_tiles) * part / SPLIT_K;
  const int end = static_cast<long long>(all_tiles) * (part + 1) / SPLIT_K;

  if (threadIdx.x == 0) {
    shared.staged_ring.init(TRANSPOSERS);
    shared.ring.init(kConsumers, 1 + TRANSPOSERS);
    tma::fence_mbarrier_init();
  }
  __syncthreads();  // The barriers are initialised for all threads.

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= kConsumers) {
    produce(shared, a_map, b_map, row0, column0, begin, end);
    if constexpr (SPLIT_K > 1) {
      // The two barriers of the consumers, below.
      tma::barrier_cluster();
      tma::barrier_cluster();
    }
    return;
  }

  const int lane_m = lane % 2 + lane / 8 * 2, lane_n = lane / 2 % 4;
  static_assert(LANES_M == 8 && LANES_N == 4, "bits 0, 3, 4 of a lane are rows, 1 and 2 columns");
  const int row = warp / kWarpsN * WM + lane_m * 4;
  const int column = warp % kWarpsN * WN + lane_n * 4;
  float sums[TM][TN] = {};
  RingPlace<STAGES> multiplied;
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile, multiplied.next()) {
    shared.ring.consumer_wait(multiplied);
    multiply(shared.slots[multiplied.slot()], row, column, sums);
    __syncwarp();
    shared.ring.consumer_release(multiplied.slot(), 0);
  }

  // Row i of a thread's results.
  const auto at_row = [&](int i) { return row + i / 4 * 4 * LANES_M + i % 4; };
  if constexpr (SPLIT_K == 1) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        update4<N_ALIGNED>(c, m, n, row0 + at_row(i), column0 + column + j * LANES_N, alpha,
                           &sums[i][j], beta);
      }
    }
  } else {
    named_barrier_sync<32 * kConsumers>(1);  // All consumers have read the slots.
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        // Scaled here: sums that are stored themselves could not alternate between the banks.
        float scaled[4];
#pragma unroll
        for (int l = 0; l < 4; ++l) scaled[l] = alpha * sums[i][j + l];
        copy4(&shared.partial[at_row(i)][column + j * LANES_N], scaled);
      }
    }
    tma::barrier_cluster();  // The partial sums of all blocks are complete.
    constexpr int kRows = BM / SPLIT_K;
    static_assert(kRows * (BN / 4) % (32 * kConsumers) == 0, "warps stay whole");
#pragma unroll 4
    for (int i = threadIdx.x; i < kRows * (BN / 4); i += 32 * kConsumers) {
      const int total_row = part * kRows + i / (BN / 4), at_column = i % (BN / 4) * 4;
      float total[4] = {};
#pragma unroll
      for (int other = 0; other < SPLIT_K; ++other) {
        const float4 v = load_cluster(tma::mapa(&shared.partial[total_row][at_column], other));
        total[0] += v.x;
        total[1] += v.y;
        total[2] += v.z;
        total[3] += v.w;
      }
      update4<N_ALIGNED>(c, m, n, row0 + total_row, column0 + at_column, 1.0f, total, beta);
    }
    tma::barrier_cluster();  // No block leaves while another reads its partial sums.
  }
}
