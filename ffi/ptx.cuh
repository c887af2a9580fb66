// The PTX instructions our kernels are made of, one function each, named after the instruction.
//
// Section names are those of the PTX ISA 8.x manual. Whatever orders memory clobbers "memory", so
// that the compiler moves no access across it.

#pragma once

namespace jaxkernels {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// As the driver encodes it (CUtensorMap); passed as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  char opaque[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- Clusters (section "Special registers", "barrier.cluster", "mapa") -------------------------

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without making this thread's writes known: costs no fence.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in the cluster's window of what lies at `address` in the shared memory of block
// `rank`.
__device__ __forceinline__ u32 map_shared(u32 address, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// ---- Named barriers (section "bar") ------------------------------------------------------------

template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Does not wait for the others.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// ---- mbarrier (section "mbarrier") -------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals));
}

// Makes initialised barriers known to the cluster and to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of any block of the cluster: `barrier` is an address from `map_shared`. It
// does not make this thread's writes known there: release at cluster scope costs a fence of the
// whole GPU's scope at each arrival.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// Arrives, and has the phase last until `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// True once the phase of this parity is complete; suspends for a while before it says no.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// With JK_MAX_CYCLES defined (JAXKERNELS_MAX_WAIT_CYCLES), a wait that lasts longer traps: a
// deadlock then fails and does not hang.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
#ifdef JK_MAX_CYCLES
  const long long begin = clock64();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (clock64() - begin > JK_MAX_CYCLES) __trap();
  }
#else
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

// ---- Tensor Memory Accelerator (section "cp.async.bulk.tensor") --------------------------------

// Coordinates are innermost first.

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_3d(u32 smem, const TensorMap* map, u32 barrier, int x,
                                            int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Writes to the same offset in every block of `mask`, and completes on the barrier at that offset
// there.
__device__ __forceinline__ void tma_load_multicast_3d(u32 smem, const TensorMap* map, u32 barrier,
                                                      int x, int y, int z, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap* map, u32 smem, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(smem), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary accesses to shared memory before those of the copy engine and of wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Registers and matrices in shared memory ---------------------------------------------------

// Section "setmaxnreg": executed by all warps of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Section "stmatrix": four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8
// of matrix l / 8, and holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Section "ldmatrix": the inverse of `stmatrix_x4`.
__device__ __forceinline__ void ldmatrix_x4(u32 address, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void load_shared(u32 address, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(address) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

// From the shared memory of any block of the cluster.
__device__ __forceinline__ float4 load_cluster(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- 16-bit floats -----------------------------------------------------------------------------

// Types that name a format: two neighbours travel in one register, the first in the low half.

struct BFloat16 {
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float low(u32 packed) { return __uint_as_float(packed << 16); }
  static __device__ __forceinline__ float high(u32 packed) {
    return __uint_as_float(packed & 0xffff0000u);
  }
};

struct Float16 {
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float low(u32 packed) { return widen(packed & 0xffffu); }
  static __device__ __forceinline__ float high(u32 packed) { return widen(packed >> 16); }

 private:
  static __device__ __forceinline__ float widen(u32 bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(static_cast<u16>(bits)));
    return wide;
  }
};

struct Float32 {};

// ---- wgmma (section "wgmma.mma_async") ---------------------------------------------------------

// The products themselves, one function a shape and type, are written by wgmma.py ("wgmma.cuh").

// Registers and shared memory written before are seen by the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` groups of products are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads of accumulators before the wait that makes them valid.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// A matrix in shared memory with the 128-byte swizzle, as wgmma addresses it (section "Matrix
// descriptor"): it lies in atoms of 8 rows of 128 bytes, 1024 bytes each and aligned to as many.
//
//   K-major:   rows are m or n, 64 elements of k wide. The next 8 rows follow `stride` bytes later.
//   MN-major:  rows are k, 64 elements of m or n wide. The next 8 of k follow `stride` bytes later,
//              the next 64 of m or n `leading` bytes later.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading, u32 stride) {
  constexpr u64 kSwizzle128B = 1;
  return (kSwizzle128B << 62) | (static_cast<u64>(stride >> 4) << 32) |
         (static_cast<u64>(leading >> 4) << 16) | ((address & 0x3ffff) >> 4);
}

}  // namespace jaxkernels
