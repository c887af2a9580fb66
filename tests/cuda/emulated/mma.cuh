// ffi/mma.cuh for the emulator: the same functions.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

// Each eight lanes access 16 bytes each at once, in different columns of 128-byte lines.
inline void need_distinct_banks(u32 address) {
  auto& exchanged = emulator::warp().exchanged;
  const u32 lane = threadIdx.x % 32;
  exchanged[lane][7] = address;
  emulator::sync_warp();
  for (u32 other = lane / 8 * 8; other < lane; ++other) {
    const u32 theirs = exchanged[other][7];
    if (theirs / 16 != address / 16 && theirs / 16 % 8 == address / 16 % 8) {
      emulator::fail("a bank conflict of 16-byte accesses");
    }
  }
  emulator::sync_warp();
}

inline void store_shared(u32 address, uint4 v) {
  need_distinct_banks(address);
  emulator::write_shared(address, v);
}
inline uint4 load_shared_16(u32 address) {
  need_distinct_banks(address);
  return emulator::read_shared<uint4>(address);
}

// Element k of a row of the lhs, or of a column of the rhs, from a lane's registers for its halves.
template <typename T>
float mma_element(u32 word, u32 k) {
  if constexpr (T::kBytes == 4) {
    return __uint_as_float(word & 0xffffe000u);  // The hardware ignores the other bits.
  } else {
    return T::wide(k % 2 ? word >> 16 : word & 0xffffu);
  }
}

template <typename T>
void mma(float (&acc)[4], const u32 (&lhs)[4], const u32 (&rhs)[2]) {
  constexpr u32 kInWord = 4 / T::kBytes, kHalf = 4 * kInWord;
  auto& exchanged = emulator::warp().exchanged;
  const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  std::copy(lhs, lhs + 4, exchanged[lane]);
  std::copy(rhs, rhs + 2, exchanged[lane] + 4);
  emulator::sync_warp();
  float sums[4];
  for (u32 i = 0; i < 4; ++i) {
    const u32 is_lower = i / 2, column = 2 * t + i % 2;
    double sum = acc[i];
    for (u32 k = 0; k < 2 * kHalf; ++k) {
      const u32 half = k / kHalf, holder = k % kHalf / kInWord;
      const u32 left = exchanged[g * 4 + holder][half * 2 + is_lower];
      const u32 right = exchanged[column * 4 + holder][4 + half];
      sum += static_cast<double>(mma_element<T>(left, k)) * mma_element<T>(right, k);
    }
    sums[i] = static_cast<float>(sum);
  }
  emulator::sync_warp();
  std::copy(sums, sums + 4, acc);
}

inline u32 to_tf32(u32 bits) { return (bits + 0x1000u) & 0xffffe000u; }

// Every reading is later than the one before.
inline u32 clock_cycles() {
  static u32 cycles = 0xfffffff0u;  // Wraps round soon.
  return ++cycles;
}
inline u32 timer_nanoseconds() { return clock_cycles() * 2; }

}  // namespace jaxkernels
