// The PTX instructions of the GEMM beside those of tma.cuh: named barriers, registers, matrices in
// shared memory, wgmma. One function each, named after the instruction.
//
// Section names are those of the PTX ISA 8.x manual. Whatever orders memory clobbers "memory", so
// that the compiler moves no access across it.

#pragma once

#include "tma.cuh"

namespace jaxkernels {

using tma::u16;
using tma::u32;
using tma::u64;

// ---- Named barriers (section "bar") ------------------------------------------------------------

// Of 16 barriers, __syncthreads takes number 0.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(u32 barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
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

__device__ __forceinline__ void store_shared(u32 address, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u16 half) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(half) : "memory");
}

__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
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

// True in one thread of a whole warp; ptxas then knows that what is behind it runs once, which
// `threadIdx.x == 0` does not tell it: it would make a loop over threads of each copy.
__device__ __forceinline__ bool elect_one() {
  u32 is_elected;
  asm volatile(
      "{\n"
      ".reg .pred is_elected;\n"
      "elect.sync _|is_elected, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, is_elected;\n"
      "}\n"
      : "=r"(is_elected));
  return is_elected;
}

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

// The same value, of which the compiler does not know that: what follows from it is computed where
// it is needed, and does not take registers from one use to the next.
__device__ __forceinline__ u32 recomputed(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A matrix in shared memory with the 128-byte swizzle, as wgmma addresses it (section "Matrix
// descriptor"): it lies in atoms of 8 rows of 128 bytes, 1024 bytes each and aligned to as many.
//
//   K-major:   rows are m or n, 64 elements of k wide. The next 8 rows are the next atom.
//   MN-major:  rows are k, 64 elements of m or n wide. The next 8 of k are the next atom; the
//              next 64 of m or n lie `leading` bytes later.
//
// Of the descriptor's 64 bits the upper half is the same for all of these. The lower half is moved
// by adding to it 1/16 of the bytes. Above an address' 18 bits stands the block's rank in its
// cluster.
constexpr u32 kDescriptorHigh = 1u << 30 | 1024 >> 4;
__device__ __forceinline__ u32 descriptor_low(u32 address, u32 leading) {
  return (leading >> 4 << 16) + (address % (1 << 18) >> 4);
}

// The same value in every thread of a warp, and known as such to the compiler: what is computed
// from it is computed once for the warp.
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }

}  // namespace jaxkernels
