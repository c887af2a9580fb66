// ffi/wgmma.cuh for the emulator: the same functions. A product is computed when it is waited for,
// by each thread for the elements it holds; accumulators that begin anew are not numbers until
// then.

#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "ptx.cuh"

namespace jaxkernels {

constexpr int kWgmmaM = 64;
template <typename T>
constexpr int kWgmmaK = 32 / T::kBytes;

constexpr u32 kDescriptorHigh = 1u << 30 | 1024 >> 4;
inline u32 descriptor_low(u32 address, u32 leading) {
  return (leading >> 4 << 16) + (address % (1 << 18) >> 4);
}
constexpr u32 kWgmmaStep = 32 >> 4;

// Element (i, k) of a matrix with the 128-byte swizzle (PTX ISA, "Matrix descriptor").
template <typename T, bool kIsKMajor>
auto element(u32 descriptor_low, u32 i, u32 k, u32 fences) {
  const u64 descriptor = static_cast<u64>(kDescriptorHigh) << 32 | descriptor_low;
  const auto field = [&](int bit) { return static_cast<u32>(descriptor >> bit & 0x3fff) << 4; };
  const u32 leading = field(16), stride = field(32);
  const u32 offset = kIsKMajor ? i / 8 * stride + i % 8 * 128 + k * T::kBytes
                               : i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2;
  const u32 place = tma::permuted(field(0) + offset, 128);
  const emulator::Block& block = *emulator::thread->block;
  emulator::need_fenced(block.writes.get(), place, T::kBytes, "wrote", "a product reads a byte",
                        *emulator::thread, fences);
  u32 bits = 0;
  std::memcpy(&bits, block.smem + place, T::kBytes);
  return T::wide(bits);
}

// Sums that begin anew, until they are waited for.
inline void spoil(float& sum) { sum = std::numeric_limits<float>::quiet_NaN(); }
inline void spoil(int& sum) { sum = std::numeric_limits<int>::min(); }

// lhs(half, k) is called when the product is computed, for element k of the thread's row of that
// half.
template <typename T, bool kRhsIsKMajor, typename Sum, int kCount, typename Lhs>
void multiply_later(Sum (&acc)[kCount], u32 rhs, int accumulate, Lhs lhs) {
  Sum* const out = acc;
  const u32 fences = emulator::cluster->fences;
  if (!accumulate) std::for_each(acc, acc + kCount, [](Sum& sum) { spoil(sum); });
  emulator::thread->products.back().push_back([=] {
    constexpr u32 kK = kWgmmaK<T>;
    const u32 lane = threadIdx.x % 32;
    Sum a[2][kK];
    for (u32 half = 0; half < 2; ++half) {
      for (u32 k = 0; k < kK; ++k) a[half][k] = lhs(half, k);
    }
    for (u32 column = 0; column < kCount / 2; ++column) {  // Two of each eight are this thread's.
      const u32 n = column / 2 * 8 + lane % 4 * 2 + column % 2;
      Sum b[kK];
      for (u32 k = 0; k < kK; ++k) b[k] = element<T, kRhsIsKMajor>(rhs, n, k, fences);
      for (u32 half = 0; half < 2; ++half) {
        Sum& sum = out[column / 2 * 4 + half * 2 + column % 2];
        if (!accumulate) sum = 0;
        for (u32 k = 0; k < kK; ++k) sum += a[half][k] * b[k];
      }
    }
  });
}

template <typename T, bool kLhsIsKMajor, bool kRhsIsKMajor, typename Sum, int kCount>
void wgmma(Sum (&acc)[kCount], u32 lhs, u32 rhs, int accumulate) {
  const u32 fences = emulator::cluster->fences;
  multiply_later<T, kRhsIsKMajor>(acc, rhs, accumulate, [=](u32 half, u32 k) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    return element<T, kLhsIsKMajor>(lhs, warp * 16 + lane / 4 + half * 8, k, fences);
  });
}

template <typename T, bool kRhsIsKMajor, typename Sum, int kCount>
void wgmma(Sum (&acc)[kCount], const u32 (&lhs)[4], u32 rhs, int accumulate) {
  // The words of the four lanes that share this thread's rows.
  auto& exchanged = emulator::warp().exchanged;
  const u32 lane = threadIdx.x % 32;
  std::copy(lhs, lhs + 4, exchanged[lane]);
  emulator::sync_warp();
  std::array<std::array<u32, 4>, 4> words;
  for (u32 i = 0; i < 4; ++i) std::copy_n(exchanged[lane / 4 * 4 + i], 4, words[i].begin());
  emulator::sync_warp();
  multiply_later<T, kRhsIsKMajor>(acc, rhs, accumulate, [=](u32 half, u32 k) {
    constexpr u32 kInWord = 4 / T::kBytes, kHalf = kWgmmaK<T> / 2;
    const u32 word = words[k % kHalf / kInWord][k / kHalf * 2 + half];
    const u32 bits = word >> k % kInWord * T::kBytes * 8;
    return T::wide(T::kBytes == 2 ? bits & 0xffff : bits & 0xff);
  });
}

template <typename T, int kCount>
void pack_lhs(const float (&acc)[kCount], int step, u32 (&lhs)[4]) {
  for (int i = 0; i < 4; ++i) lhs[i] = T::pack(acc[step * 8 + i * 2], acc[step * 8 + i * 2 + 1]);
}

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::thread->products.emplace_back(); }
template <int kPending>
void wgmma_wait() {
  auto& products = emulator::thread->products;
  while (products.size() > kPending + 1) {  // The last group is open.
    for (auto& product : products.front()) product();
    products.pop_front();
  }
  emulator::sync_warp();
}
template <typename Sum, int kCount>
void pin(Sum (&)[kCount]) {}

}  // namespace jaxkernels
