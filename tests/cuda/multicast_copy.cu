// Copies a matrix, a tile per cluster: each block loads one slice of the tile's rows and the
// hardware writes it to every block of the cluster; each block then stores the slice its neighbour
// has loaded.

#include "tma.cuh"

template <int kClusterBlocks, int kSliceRows, int kRowBytes>
__global__ __launch_bounds__(32, 1) void multicast_copy(
    const __grid_constant__ tma::TensorMap source,
    const __grid_constant__ tma::TensorMap destination) {
  constexpr int kSliceBytes = kSliceRows * kRowBytes;
  static_assert(kSliceBytes % 1024 == 0, "each slice starts on a period of the 128-byte swizzle");
  extern __shared__ unsigned char dynamic_smem[];
  __shared__ tma::u64 full;
  // The offsets in shared memory are the same in all blocks, as multicast needs.
  unsigned char* const tile = tma::aligned<1024>(dynamic_smem);
  const int rank = tma::cluster_ctarank();
  const int tile_row = blockIdx.x / kClusterBlocks * kClusterBlocks * kSliceRows;

  // Every block waits for its own copy of all slices. No peer may send before the barrier exists.
  if (threadIdx.x == 0) {
    tma::mbarrier_init(&full, 1);
    tma::fence_mbarrier_init();
    tma::mbarrier_arrive_expect_tx(&full, kClusterBlocks * kSliceBytes);
  }
  __syncwarp();
  tma::barrier_cluster();

  if (threadIdx.x == 0) {
    const int from[2] = {0, tile_row + rank * kSliceRows};
    tma::cp_async_bulk_tensor_multicast(tile + rank * kSliceBytes, &source, &full, from,
                                        (1 << kClusterBlocks) - 1);
    tma::mbarrier_wait_parity(&full, 0);
    const int neighbour = (rank + 1) % kClusterBlocks;
    const int to[2] = {0, tile_row + neighbour * kSliceRows};
    tma::cp_async_bulk_tensor_store(&destination, tile + neighbour * kSliceBytes, to);
    tma::cp_async_bulk_commit_group();
    tma::cp_async_bulk_wait_group<0>();
  }
  __syncwarp();
  // A block that left could still be written to by its peers.
  tma::barrier_cluster();
}
