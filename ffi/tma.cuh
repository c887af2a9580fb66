// The instructions of Hopper's Tensor Memory Accelerator and what orders them, one function each,
// for kernels that NVRTC compiles: `#include "tma.cuh"` finds this file from any CudaKernel.
//
//   load   one thread: mbarrier_arrive_expect_tx(&full, bytes), cp_async_bulk_tensor_load(...);
//          every thread that reads the tile: mbarrier_wait_parity(&full, phase).
//   store  every thread that wrote the tile: fence_proxy_async(); then a barrier among them; one
//          thread: cp_async_bulk_tensor_store(...), cp_async_bulk_commit_group(), and, before the
//          tile is written again or the block ends, cp_async_bulk_wait_group*<0>().
//
// Each is described in the PTX ISA under its own name. A coordinate counts elements, innermost
// dimension first: the other way round than JAX writes shapes.
#pragma once

namespace tma {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// A tensor map, as the launcher passes it: `const __grid_constant__ tma::TensorMap map`.
struct alignas(64) TensorMap {
  char opaque[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// The first address at or behind `p` that is a multiple of kBytes. A box lands on multiples of 128
// bytes; with a swizzle, on multiples of the bytes after which its pattern repeats (8 rows: 256,
// 512 or 1024).
template <int kBytes>
__device__ __forceinline__ unsigned char* aligned(unsigned char* p) {
  return p + (kBytes - shared_address(p) % kBytes) % kBytes;
}

// ---- Barriers that count bytes ------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Shows the initialised barriers of this block to the copy engine and to the blocks of the cluster;
// those must then meet at a cluster barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// One arrival; the phase also waits for so many bytes. A box counts whole, also what of it lies
// outside the tensor.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Whether the phase of this parity is over; suspends the thread for a while before it says no.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns once the phase of this parity is over: the first phase has parity 0, and a new barrier
// takes the phase before it, of parity 1, for over. Compiled with JAXKERNELS_MAX_WAIT_CYCLES set, a
// wait that lasts longer traps: a deadlock then fails and does not hang.
__device__ __forceinline__ void mbarrier_wait_parity(u64* barrier, u32 parity) {
#ifdef JK_MAX_WAIT_CYCLES
  const long long begin = clock64();
  while (!mbarrier_try_wait_parity(barrier, parity)) {
    if (clock64() - begin > JK_MAX_WAIT_CYCLES) __trap();
  }
#else
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
#endif
}

// ---- Proxies: PTX ISA, memory consistency model -------------------------------------------------

// Shared memory this thread wrote or read the ordinary way, before the copy engine reads or writes
// it. Needless where the engine itself wrote what it reads.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Clusters -----------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_ctarank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of every block of the cluster arrives and waits, all threads of a warp together.
// What it wrote before it arrived is known to the others after they waited.
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// The same, but its writes need not be known: costs no fence.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster() {
  barrier_cluster_arrive();
  barrier_cluster_wait();
}

// The address, in the cluster's window, of what lies where `p` does in the shared memory of block
// `rank`.
__device__ __forceinline__ u32 mapa(const void* p, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_address(p)), "r"(rank));
  return mapped;
}

// Arrives at the barrier where `barrier` lies, of block `rank`. That does not make this thread's
// writes known there: a release at the cluster's scope costs a fence of the whole GPU's scope.
__device__ __forceinline__ void mbarrier_arrive_cluster_relaxed(u64* barrier, u32 rank) {
  asm volatile(
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(barrier, rank))
      : "memory");
}

// Copies `bytes` bytes of this block's shared memory to where `to` lies in block `rank`, and adds
// them to that block's `full`. Addresses and sizes are multiples of 16 bytes. (Section
// "cp.async.bulk".)
__device__ __forceinline__ void cp_async_bulk_to_block(void* to, const void* from, u32 bytes,
                                                       u64* full, u32 rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(mapa(to, rank)),
      "r"(shared_address(from)), "r"(bytes), "r"(mapa(full, rank))
      : "memory");
}

// ---- Tensor copies ------------------------------------------------------------------------------

// Brings the map into the cache ahead of its first use.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The instructions name their rank and list as many coordinates. Operands 0 to 4 are the
// coordinates, whether listed or not, so that the others have the same numbers for every rank.
#define TMA_COORDINATE(i) "r"((i) < kRank ? at[(i) < kRank ? (i) : 0] : 0)
#define TMA_COORDINATES \
  TMA_COORDINATE(0), TMA_COORDINATE(1), TMA_COORDINATE(2), TMA_COORDINATE(3), TMA_COORDINATE(4)
#define TMA_FOR_EACH_RANK(name, suffix, before, after, ...)                                       \
  static_assert(1 <= kRank && kRank <= 5, "a tensor map has one to five dimensions");             \
  if constexpr (kRank == 1) {                                                                     \
    asm volatile(name ".1d." suffix " " before "{%0}" after::TMA_COORDINATES, __VA_ARGS__         \
                 : "memory");                                                                     \
  } else if constexpr (kRank == 2) {                                                              \
    asm volatile(name ".2d." suffix " " before "{%0, %1}" after::TMA_COORDINATES, __VA_ARGS__     \
                 : "memory");                                                                     \
  } else if constexpr (kRank == 3) {                                                              \
    asm volatile(name ".3d." suffix " " before "{%0, %1, %2}" after::TMA_COORDINATES, __VA_ARGS__ \
                 : "memory");                                                                     \
  } else if constexpr (kRank == 4) {                                                              \
    asm volatile(name ".4d." suffix " " before "{%0, %1, %2, %3}" after::TMA_COORDINATES,         \
                 __VA_ARGS__                                                                      \
                 : "memory");                                                                     \
  } else {                                                                                        \
    asm volatile(name ".5d." suffix " " before "{%0, %1, %2, %3, %4}" after::TMA_COORDINATES,     \
                 __VA_ARGS__                                                                      \
                 : "memory");                                                                     \
  }

// In all of these, at[0] must lie on a multiple of 16 bytes: any other is an illegal instruction.

// Loads the box at `at` into `tile` and adds its bytes to `full`. Coordinates may be negative; what
// lies outside the tensor is filled as the map says.
template <int kRank>
__device__ __forceinline__ void cp_async_bulk_tensor_load(void* tile, const TensorMap* map,
                                                          u64* full, const int (&at)[kRank]) {
  TMA_FOR_EACH_RANK("cp.async.bulk.tensor", "shared::cluster.global.mbarrier::complete_tx::bytes",
                    "[%5], [%6, ", "], [%7];", "r"(shared_address(tile)), "l"(map),
                    "r"(shared_address(full)))
}

// The same into every block of the cluster whose bit is set, at the same place in its shared
// memory, counted by its own `full` at the same place.
template <int kRank>
__device__ __forceinline__ void cp_async_bulk_tensor_multicast(void* tile, const TensorMap* map,
                                                               u64* full, const int (&at)[kRank],
                                                               u16 blocks) {
  TMA_FOR_EACH_RANK("cp.async.bulk.tensor",
                    "shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
                    "[%5], [%6, ", "], [%7], %8;", "r"(shared_address(tile)), "l"(map),
                    "r"(shared_address(full)), "h"(blocks))
}

// Stores `tile` to the box at `at`, which must not be negative; what lies outside the tensor is
// left out.
template <int kRank>
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap* map, const void* tile,
                                                           const int (&at)[kRank]) {
  TMA_FOR_EACH_RANK("cp.async.bulk.tensor", "global.shared::cta.bulk_group", "[%5, ", "], [%6];",
                    "l"(map), "r"(shared_address(tile)))
}

enum class Reduction { kAdd, kMin, kMax };

// The same, combining with what is there, element by element and atomically.
template <Reduction kReduction, int kRank>
__device__ __forceinline__ void cp_reduce_async_bulk_tensor(const TensorMap* map, const void* tile,
                                                            const int (&at)[kRank]) {
  if constexpr (kReduction == Reduction::kAdd) {
    TMA_FOR_EACH_RANK("cp.reduce.async.bulk.tensor", "global.shared::cta.add.tile.bulk_group",
                      "[%5, ", "], [%6];", "l"(map), "r"(shared_address(tile)))
  } else if constexpr (kReduction == Reduction::kMin) {
    TMA_FOR_EACH_RANK("cp.reduce.async.bulk.tensor", "global.shared::cta.min.tile.bulk_group",
                      "[%5, ", "], [%6];", "l"(map), "r"(shared_address(tile)))
  } else {
    TMA_FOR_EACH_RANK("cp.reduce.async.bulk.tensor", "global.shared::cta.max.tile.bulk_group",
                      "[%5, ", "], [%6];", "l"(map), "r"(shared_address(tile)))
  }
}

#undef TMA_FOR_EACH_RANK
#undef TMA_COORDINATES
#undef TMA_COORDINATE

// Stores and reductions are waited for in groups, each by the thread that issued it.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Returns when all but the last kGroups groups have read their tiles: those may be written again.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// Returns when all but the last kGroups groups have been written.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace tma
