// Copies a tensor through shared memory, a tile per block: one TMA load, one TMA store.

using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  char opaque[128];
};

__device__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// PTX ISA, cp.async.bulk.tensor: coordinates innermost first.
template <int kRank>
__device__ void load_tile(u32 tile, const TensorMap* map, u32 full, int x, int y, int z) {
  if constexpr (kRank == 1) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3}], [%2];" ::"r"(tile),
        "l"(map), "r"(full), "r"(x)
        : "memory");
  } else if constexpr (kRank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %4}], [%2];" ::"r"(tile),
        "l"(map), "r"(full), "r"(x), "r"(y)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %4, %5}], [%2];" ::"r"(tile),
        "l"(map), "r"(full), "r"(x), "r"(y), "r"(z)
        : "memory");
  }
}

template <int kRank>
__device__ void store_tile(const TensorMap* map, u32 tile, int x, int y, int z) {
  if constexpr (kRank == 1) {
    asm volatile(
        "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%2}], [%1];" ::"l"(map),
        "r"(tile), "r"(x)
        : "memory");
  } else if constexpr (kRank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(tile), "r"(x), "r"(y)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            map),
        "r"(tile), "r"(x), "r"(y), "r"(z)
        : "memory");
  }
}

__device__ void wait_parity(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// One thread does it all: TMA reads and writes shared memory itself (the asynchronous proxy), so no
// proxy fence is needed between the load it waited for and the store.
template <int kRank>
__global__ __launch_bounds__(32, 1) void tile_copy(const __grid_constant__ TensorMap source,
                                                   const __grid_constant__ TensorMap destination,
                                                   int box_x, int box_y, int box_z, int box_bytes) {
  extern __shared__ unsigned char dynamic_smem[];
  __shared__ u64 full;
  if (threadIdx.x != 0) return;
  // The 128-byte swizzle repeats every 1024 bytes of shared memory.
  const u32 tile = (shared_address(dynamic_smem) + 1023) / 1024 * 1024;
  const u32 barrier = shared_address(&full);
  const int x = blockIdx.x * box_x, y = blockIdx.y * box_y, z = blockIdx.z * box_z;

  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  // A box that hangs over the edge arrives whole: what lies outside counts, as zeros.
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(box_bytes)
               : "memory");
  load_tile<kRank>(tile, &source, barrier, x, y, z);
  wait_parity(barrier, 0);

  store_tile<kRank>(&destination, tile, x, y, z);
  asm volatile("cp.async.bulk.commit_group;");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
