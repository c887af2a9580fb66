// Tensor core products of a warp on Ampere (sm_80) and later chips: mma.sync, the accesses to
// shared memory that feed it, and clocks. One function each, named after the instruction. ptx.cuh
// has cp.async and ldmatrix.
//
// Section names are those of the PTX ISA 8.x manual. An instruction that orders memory clobbers
// "memory", so that the compiler moves no access across it.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

// ---- Shared memory ------------------------------------------------------------------------------

__device__ __forceinline__ void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- Products of a warp (section "mma") --------------------------------------------------------

// acc (16 x 8) += lhs (16 x K) * rhs (K x 8), where K elements are 32 bytes. With g = lane / 4,
// t = lane % 4 and two 16-bit elements, or one of TF32, in each register:
//
//   lhs[0], lhs[1]   rows g, g + 8     the t-th register's worth of the first half of k
//   lhs[2], lhs[3]   rows g, g + 8     the same in the second half
//   rhs[0], rhs[1]   column g          the same, in the first half and in the second
//   acc[0], acc[1]   row g             columns 2t, 2t + 1
//   acc[2], acc[3]   row g + 8         columns 2t, 2t + 1
template <typename T>
__device__ __forceinline__ void mma(float (&acc)[4], const u32 (&lhs)[4], const u32 (&rhs)[2]);

#define JK_MMA(kType, kInstruction)                                                               \
  template <>                                                                                     \
  __device__ __forceinline__ void mma<kType>(float (&acc)[4], const u32(&lhs)[4],                 \
                                             const u32(&rhs)[2]) {                                \
    asm volatile("mma.sync.aligned." kInstruction                                                 \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"               \
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                         \
                 : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "r"(rhs[0]), "r"(rhs[1])); \
  }

JK_MMA(BFloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
JK_MMA(Float16, "m16n8k16.row.col.f32.f16.f16.f32")
JK_MMA(Float32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef JK_MMA

// Section "cvt": the bits of a float32, rounded to TF32 (10 mantissa bits), ties away from zero.
// mma by itself would cut the other bits off.
__device__ __forceinline__ u32 to_tf32(u32 bits) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

// ---- Clocks (section "Special Registers") ------------------------------------------------------

// The lower 32 bits of the SM's clock, cycles.
__device__ __forceinline__ u32 clock_cycles() {
  u32 cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// The lower 32 bits of the device's timer, nanoseconds.
__device__ __forceinline__ u32 timer_nanoseconds() {
  u64 nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return static_cast<u32>(nanoseconds);
}

}  // namespace jaxkernels
