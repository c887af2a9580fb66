// Warpgroup products on the tensor cores (PTX ISA, section "wgmma.mma_async"): the instructions,
// the descriptors of their operands, and where a thread's sums lie.
//
//   acc (64 x kN) = lhs (64 x K) * rhs (K x kN) + acc,   K = kWgmmaK<T>: 32 bytes of elements
//
//   float acc[kN / 2];
//   wgmma_fence();                                    // registers and shared memory are written
//   wgmma<BFloat16, true, true>(acc, lhs, rhs, 0);    // starts from zeros
//   wgmma<BFloat16, true, true>(acc, lhs + kWgmmaStep, rhs + kWgmmaStep, 1);
//   wgmma_commit();
//   wgmma_wait<0>();
//   pin(acc);
//
// All 128 threads of a warpgroup call each function. The rhs lies in shared memory, the lhs in
// shared memory or in registers. A matrix in shared memory has the 128-byte swizzle and is given by
// the lower half of its descriptor (`descriptor_low`); tiles.cuh computes it.
//
// Operand types: BFloat16, Float16, Float8E4M3, Float8E5M2 with float sums, Int8 with int sums. kN
// is a multiple of 8 up to 256; of Int8, above 32, a multiple of 16.
//
// Accumulators: with warp w of the warpgroup and lane l, acc[4 j + 2 h + e] is the element in
//
//   row 16 w + l / 4 + 8 h,   column 8 j + 2 (l % 4) + e      (PTX ISA, "Register fragments")
//
//   columns    0  1 | 2  3 | 4  5 | 6  7 | 8  9 ...
//   row 0      l=0    l=1    l=2    l=3    l=0
//   row 1      l=4    l=5    ...
//   row 8      as row 0, in acc[2], acc[3], ...
//
// The lhs in registers: four words of two 16-bit (four 8-bit) elements each. Word 2 j + h holds row
// 16 w + l / 4 + 8 h, from column (K / 2) j + (2 or 4) (l % 4) on. For 16-bit types this is the
// order of the accumulators: `pack_lhs` makes an operand of the sums of 16 columns.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

constexpr int kWgmmaM = 64;
template <typename T>
constexpr int kWgmmaK = 32 / T::kBytes;

// ---- Descriptors (section "Matrix descriptor") -------------------------------------------------

// A matrix in shared memory with the 128-byte swizzle lies in atoms of 8 rows of 128 bytes, 1024
// bytes each and aligned to as many.
//
//   K-major:   rows are m or n, 128 bytes of k wide. The next 8 rows are the next atom.
//   MN-major:  rows are k, 64 elements of m or n wide. The next 8 of k are the next atom.
//              The next 64 of m or n lie `leading` bytes later. 16-bit types only.
//
// The upper half of the descriptor is the same for all of these. Adding n to the lower half moves
// the matrix by 16 n bytes. The address has 18 bits; the bits above them are the block's rank in
// its cluster.
constexpr u32 kDescriptorHigh = 1u << 30 | 1024 >> 4;
__device__ __forceinline__ u32 descriptor_low(u32 address, u32 leading) {
  return (leading >> 4 << 16) + (address % (1 << 18) >> 4);
}

// What the next K columns of a K-major matrix add to the lower half, within 128 bytes.
constexpr u32 kWgmmaStep = 32 >> 4;

// ---- Products ----------------------------------------------------------------------------------

// One instruction of the type T and kN columns:
//   run<kLhsIsTransposed, kRhsIsTransposed>(acc, lhs, rhs, accumulate), lhs in shared memory
//   run<kRhsIsTransposed>(acc, lhs, rhs, accumulate), lhs in registers
// Transposed means MN-major. wgmma.py writes the specialisations ("wgmma_instructions.cuh").
template <typename T, int kN>
struct WgmmaInstruction;

// acc = lhs * rhs + (accumulate ? acc : 0), both operands in shared memory.
template <typename T, bool kLhsIsKMajor, bool kRhsIsKMajor, typename Sum, int kCount>
__device__ __forceinline__ void wgmma(Sum (&acc)[kCount], u32 lhs, u32 rhs, int accumulate) {
  static_assert(T::kBytes == 2 || (kLhsIsKMajor && kRhsIsKMajor), "8-bit operands are K-major");
  WgmmaInstruction<T, kCount * 2>::template run<!kLhsIsKMajor, !kRhsIsKMajor>(acc, lhs, rhs,
                                                                              accumulate);
}

// The same, the lhs in registers. They must keep their values until the product has been waited
// for.
template <typename T, bool kRhsIsKMajor, typename Sum, int kCount>
__device__ __forceinline__ void wgmma(Sum (&acc)[kCount], const u32 (&lhs)[4], u32 rhs,
                                      int accumulate) {
  static_assert(T::kBytes == 2 || kRhsIsKMajor, "8-bit operands are K-major");
  WgmmaInstruction<T, kCount * 2>::template run<!kRhsIsKMajor>(acc, lhs, rhs, accumulate);
}

// Columns 16 step to 16 step + 15 of accumulators, rounded, as the lhs of a product.
template <typename T, int kCount>
__device__ __forceinline__ void pack_lhs(const float (&acc)[kCount], int step, u32 (&lhs)[4]) {
  static_assert(T::kBytes == 2, "accumulators lie in the order of a 16-bit operand");
#pragma unroll
  for (int i = 0; i < 4; ++i) lhs[i] = T::pack(acc[step * 8 + i * 2], acc[step * 8 + i * 2 + 1]);
}

// ---- Order -------------------------------------------------------------------------------------

// Section "wgmma.fence": the products that follow see the registers and the shared memory that were
// written before.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Section "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Section "wgmma.wait_group": returns when at most `kPending` groups of products are under way.
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

template <int kCount>
__device__ __forceinline__ void pin(int (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

}  // namespace jaxkernels

#include "wgmma_instructions.cuh"
