// Products of one warp on tensor cores (PTX ISA, section "mma"), from compute capability 8.0 on.
//
//   mma<BFloat16>(acc, lhs, rhs);    // acc += lhs rhs: 16 x 8 += (16 x kMmaK) (kMmaK x 8)
//
// Registers of lane l, with g = l / 4 and q = l % 4:
//
//   acc[2 h + e]   row g + 8 h, column 2 q + e
//   16 bits: lhs[2 j + h]   row g + 8 h, columns 8 j + 2 q and the next one
//            rhs[j]         rows 8 j + 2 q and the next one, column g
//   TF32:    lhs[2 j + h]   row g + 8 h, column 4 j + q
//            rhs[j]         row 4 j + q, column g
//
// ldmatrix (ptx.cuh) loads the lhs so; its transposing form loads a row-major rhs of 16 bits.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

// Float32 of which tensor cores read 19 bits.
struct TFloat32 {
  static constexpr int kBytes = 4;
};

constexpr int kMmaM = 16, kMmaN = 8;
template <typename T>
constexpr int kMmaK = 32 / T::kBytes;

template <typename T>
__device__ __forceinline__ void mma(float (&acc)[4], const u32 (&lhs)[4], const u32 (&rhs)[2]);

#define JK_MMA(type, shape, name)                                                                 \
  template <>                                                                                     \
  __device__ __forceinline__ void mma<type>(float (&acc)[4], const u32(&lhs)[4],                  \
                                            const u32(&rhs)[2]) {                                 \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." name "." name                          \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                         \
                 : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "r"(rhs[0]), "r"(rhs[1])); \
  }
JK_MMA(BFloat16, "m16n8k16", "bf16")
JK_MMA(Float16, "m16n8k16", "f16")
JK_MMA(TFloat32, "m16n8k8", "tf32")
#undef JK_MMA

// The nearest number of TF32. Tensor cores would cut the lower bits off.
__device__ __forceinline__ u32 rounded_to_tf32(u32 bits) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

}  // namespace jaxkernels
