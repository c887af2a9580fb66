// Copies a tensor through shared memory, a tile per block: one TMA load, one TMA store.

#include "tma.cuh"

// One thread does it all: TMA reads and writes shared memory itself (the asynchronous proxy), so no
// proxy fence is needed between the load it waited for and the store.
template <int kRank>
__global__ __launch_bounds__(32,
                             1) void tile_copy(const __grid_constant__ tma::TensorMap source,
                                               const __grid_constant__ tma::TensorMap destination,
                                               int box_x, int box_y, int box_z, int box_bytes) {
  extern __shared__ unsigned char dynamic_smem[];
  __shared__ tma::u64 full;
  if (threadIdx.x != 0) return;
  // The 128-byte swizzle repeats every 1024 bytes of shared memory.
  unsigned char* const tile = tma::aligned<1024>(dynamic_smem);
  const int box[3] = {box_x, box_y, box_z};
  const int block[3] = {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                        static_cast<int>(blockIdx.z)};
  int at[kRank];
#pragma unroll
  for (int i = 0; i < kRank; ++i) at[i] = block[i] * box[i];

  tma::mbarrier_init(&full, 1);
  tma::fence_mbarrier_init();
  // A box past the edge arrives whole: elements outside are zeros, and count as bytes.
  tma::mbarrier_arrive_expect_tx(&full, box_bytes);
  tma::cp_async_bulk_tensor_load(tile, &source, &full, at);
  tma::mbarrier_wait_parity(&full, 0);

  tma::cp_async_bulk_tensor_store(&destination, tile, at);
  tma::cp_async_bulk_commit_group();
  tma::cp_async_bulk_wait_group<0>();
}
