// ffi/mma.cuh for the emulator: the same functions.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

struct TFloat32 {
  static constexpr int kBytes = 4;
  static float wide(u32 bits) { return __uint_as_float(bits & 0xffffe000u); }
};

constexpr int kMmaM = 16, kMmaN = 8;
template <typename T>
constexpr int kMmaK = 32 / T::kBytes;

template <typename T>
void mma(float (&acc)[4], const u32 (&lhs)[4], const u32 (&rhs)[2]) {
  constexpr u32 kInWord = 4 / T::kBytes, kHalf = kMmaK<T> / 2;
  auto& exchanged = emulator::warp().exchanged;
  const u32 lane = threadIdx.x % 32;
  for (u32 i = 0; i < 4; ++i) exchanged[lane][i] = lhs[i];
  for (u32 i = 0; i < 2; ++i) exchanged[lane][4 + i] = rhs[i];
  emulator::sync_warp();
  const auto wide = [](u32 word, u32 k) {
    return T::wide(T::kBytes == 2 ? word >> k % kInWord * 16 & 0xffff : word);
  };
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (u32 k = 0; k < kMmaK<T>; ++k) {
      const u32 q = k % kHalf / kInWord, j = k / kHalf;
      const u32 left = exchanged[row % 8 * 4 + q][2 * j + row / 8];
      const u32 right = exchanged[column * 4 + q][4 + j];
      acc[i] += wide(left, k) * wide(right, k);
    }
  }
  emulator::sync_warp();
}

inline u32 rounded_to_tf32(u32 bits) { return (bits + 0x1000) & 0xffffe000u; }

}  // namespace jaxkernels
