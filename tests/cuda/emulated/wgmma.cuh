// "wgmma.cuh" for the emulator. A product is computed when it is waited for, by each thread for the
// elements it holds; accumulators that begin anew are not numbers until then.

#pragma once

#include <algorithm>
#include <limits>

#include "ptx.cuh"

namespace jaxkernels {

// Element (i, k) of a matrix with the 128-byte swizzle (PTX ISA, "Matrix descriptor").
template <typename T, bool kIsTransposed>
float element(u32 descriptor_low, u32 i, u32 k, u32 fences) {
  const u64 descriptor = static_cast<u64>(kDescriptorHigh) << 32 | descriptor_low;
  const auto field = [&](int bit) { return static_cast<u32>(descriptor >> bit & 0x3fff) << 4; };
  const u32 leading = field(16), stride = field(32);
  const u32 offset = kIsTransposed ? i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                                   : i / 8 * stride + i % 8 * 128 + k * 2;
  const u32 place = tma::permuted(field(0) + offset, 128);
  const emulator::Block& block = *emulator::thread->block;
  emulator::need_fenced(block.writes.get(), place, 2, "wrote", "a product reads a byte",
                        *emulator::thread, fences);
  u16 bits;
  std::memcpy(&bits, block.smem + place, 2);
  return T::wide(bits);
}

template <typename T, int kN, bool kLhsIsTransposed, bool kRhsIsTransposed>
struct Wgmma {
  static void run(float (&acc)[kN / 2], u32 lhs, u32 rhs, int accumulate) {
    float* const out = acc;
    const u32 fences = emulator::cluster->fences;
    if (!accumulate) std::fill(acc, acc + kN / 2, std::numeric_limits<float>::quiet_NaN());
    emulator::thread->products.back().push_back([=] {
      const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
      float a[2][16];
      for (u32 half = 0; half < 2; ++half) {
        for (u32 k = 0; k < 16; ++k) {
          a[half][k] =
              element<T, kLhsIsTransposed>(lhs, warp * 16 + lane / 4 + half * 8, k, fences);
        }
      }
      for (u32 column = 0; column < kN / 4; ++column) {  // Two of each eight are this thread's.
        const u32 n = column / 2 * 8 + lane % 4 * 2 + column % 2;
        float b[16];
        for (u32 k = 0; k < 16; ++k) b[k] = element<T, kRhsIsTransposed>(rhs, n, k, fences);
        for (u32 half = 0; half < 2; ++half) {
          float& sum = out[column / 2 * 4 + half * 2 + column % 2];
          if (!accumulate) sum = 0.0f;
          for (u32 k = 0; k < 16; ++k) sum += a[half][k] * b[k];
        }
      }
    });
  }
};

}  // namespace jaxkernels
