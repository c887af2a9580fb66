// Copies a matrix, a tile per cluster: each block loads one slice of the tile's rows and the
// hardware writes it to every block of the cluster; each block then stores the slice its neighbour
// has loaded.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  char opaque[128];
};

__device__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

template <int kClusterBlocks, int kSliceRows, int kRowBytes>
__global__ __launch_bounds__(32,
                             1) void multicast_copy(const __grid_constant__ TensorMap source,
                                                    const __grid_constant__ TensorMap destination) {
  constexpr int kSliceBytes = kSliceRows * kRowBytes;
  static_assert(kSliceBytes % 1024 == 0, "each slice starts on a period of the 128-byte swizzle");
  extern __shared__ unsigned char dynamic_smem[];
  __shared__ u64 full;
  // The offsets in shared memory are the same in all blocks, as multicast needs.
  const u32 tile = (shared_address(dynamic_smem) + 1023) / 1024 * 1024;
  const u32 barrier = shared_address(&full);
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int tile_row = blockIdx.x / kClusterBlocks * kClusterBlocks * kSliceRows;

  // Every block waits for its own copy of all slices. No peer may send before the barrier exists.
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(kClusterBlocks * kSliceBytes)
                 : "memory");
  }
  cluster_barrier();

  if (threadIdx.x == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
        "cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(tile + rank * kSliceBytes),
        "l"(&source), "r"(barrier), "r"(0), "r"(tile_row + static_cast<int>(rank) * kSliceRows),
        "h"(static_cast<u16>((1 << kClusterBlocks) - 1))
        : "memory");
    asm volatile(
        "{ .reg .pred done;\n"
        "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra wait; }" ::"r"(barrier)
        : "memory");
    const int neighbour = (rank + 1) % kClusterBlocks;
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
            &destination),
        "r"(tile + neighbour * kSliceBytes), "r"(0), "r"(tile_row + neighbour * kSliceRows)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();
  // A block that left could still be written to by its peers.
  cluster_barrier();
}
