// PTX instructions beside those of tma.cuh and wgmma.cuh: named barriers, registers, matrices in
// shared memory, types of elements. One function each, named after the instruction.
//
// Section names are those of the PTX ISA 8.x manual. An instruction that orders memory clobbers
// "memory", so that the compiler moves no access across it.

#pragma once

#include "tma.cuh"

namespace jaxkernels {

using tma::u16;
using tma::u32;
using tma::u64;

// ---- Named barriers (section "bar") ------------------------------------------------------------

// A block has 16 barriers. __syncthreads takes number 0.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(u32 barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Counts as one of the threads of the barrier without waiting for the others.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(u32 barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// ---- Asynchronous copies by threads (section "cp.async") ---------------------------------------

// Copies kBytes, 4, 8 or 16, to shared memory; zeros if not `inside`: then nothing is read. Both
// addresses are multiples of kBytes.
template <int kBytes>
__device__ __forceinline__ void cp_async(u32 to, const void* from, bool inside) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes of a copy");
  const u32 bytes = inside ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "n"(kBytes)
                 : "memory");
  }
}

// Arrives at an mbarrier of the block when all copies that the thread has issued have arrived. It
// is one of the barrier's arrivals.
__device__ __forceinline__ void cp_async_arrive(u64* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(tma::shared_address(barrier))
      : "memory");
}

// Copies are waited for in groups, each by the thread that issued it.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when all but the last kGroups groups have arrived. A barrier then shows them to the
// other threads.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// ---- Turns of blocks ---------------------------------------------------------------------------

// One thread waits until the counter in global memory is `turn`. It then sees what threads of other
// blocks wrote before they ended their turns.
__device__ __forceinline__ void wait_for_turn(const int* counter, int turn) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now != turn);
}

// Increments the counter, after all that this thread wrote and saw.
__device__ __forceinline__ void end_turn(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
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

// The same, each matrix transposed: lane l gets elements l / 4 of rows 2 (l % 4) and the next one.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 address, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
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

// Reads the shared memory of any block of the cluster (an address of `mapa`).
__device__ __forceinline__ float4 load_cluster(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Section "st.async": writes to the shared memory of any block of the cluster, and adds 8 bytes to
// that block's barrier. Both are addresses of `mapa`. A thread that has waited for the barrier sees
// the values: neither side needs a fence.
__device__ __forceinline__ void st_async(u32 address, float a, float b, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
      "[%3];" ::"r"(address),
      "f"(a), "f"(b), "r"(barrier)
      : "memory");
}

// ---- Types of elements -------------------------------------------------------------------------

// Each names a format. Two neighbours of 16 bits share a register, the first in the low half.

struct BFloat16 {
  static constexpr int kBytes = 2;
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
  static constexpr int kBytes = 2;
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

struct Float32 {
  static constexpr int kBytes = 4;
};
struct Float8E4M3 {
  static constexpr int kBytes = 1;
};
struct Float8E5M2 {
  static constexpr int kBytes = 1;
};
struct Int8 {
  static constexpr int kBytes = 1;
};

// ---- Functions of the special function units ---------------------------------------------------

// Sections "ex2", "lg2", "rcp": results differ from the exact ones by at most 2 units in the last
// place (of lg2 near 1, by 2^-22). Denormal numbers are zero.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh by one exponential: its error is 2^-22.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  constexpr float kTwoLog2E = 2.8853900817779268f;
  return fmaf(-2.0f, reciprocal(exp2_approximate(kTwoLog2E * x) + 1.0f), 1.0f);
}

// Section "tanh": the relative error is 2^-11.
__device__ __forceinline__ float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Section "max": NaN if either is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// ---- Hints to the compiler ---------------------------------------------------------------------

// True in one thread of a whole warp (section "elect.sync"). ptxas then knows that the code behind
// it runs once. Behind `threadIdx.x == 0` it makes each copy a loop over threads.
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

// The same value, but new to the compiler: it computes what depends on the value at each use, and
// keeps no registers for it from one use to the next.
__device__ __forceinline__ u32 recomputed(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The same value, which must be equal in all threads of the warp. The compiler then knows that it
// is equal, and computes what depends on it once for the warp.
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }

}  // namespace jaxkernels
