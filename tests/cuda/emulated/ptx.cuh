// ffi/ptx.cuh for the emulator: the same functions.

#pragma once

#include "tma.cuh"

namespace jaxkernels {

using tma::u16;
using tma::u32;
using tma::u64;

template <int kThreads>
void named_barrier_sync(u32 barrier) {
  emulator::meet(emulator::thread->block->barriers[barrier], kThreads, "a named barrier");
}

template <int kThreads>
void named_barrier_arrive(u32 barrier) {
  emulator::thread->block->barriers[barrier].arrive(kThreads);
  ++emulator::cluster->events;
}

// The bytes are not to be read until the copy is complete.
template <int kBytes>
void cp_async(u32 to, const void* from, bool inside) {
  unsigned char* const bytes = emulator::at_address(to);
  if (to % kBytes != 0 || reinterpret_cast<u64>(from) % kBytes != 0) {
    emulator::fail("cp.async needs addresses that are multiples of its size");
  }
  std::memset(bytes, 0xff, kBytes);
  auto open = emulator::thread->open_copies;
  ++*open;
  emulator::later([=] {
    if (inside) std::memcpy(bytes, from, kBytes);
    if (!inside) std::memset(bytes, 0, kBytes);
    --*open;
  });
}
// When all copies that the thread has issued have arrived.
inline void arrive_after(std::vector<std::shared_ptr<int>> copies, emulator::Mbarrier* barrier) {
  emulator::later([=] {
    for (const auto& open : copies) {
      if (*open != 0) return arrive_after(copies, barrier);
    }
    --barrier->pending;
    barrier->settle();
  });
}
inline void cp_async_arrive(u64* barrier) {
  const auto& groups = emulator::thread->copies;
  std::vector<std::shared_ptr<int>> copies(groups.begin(), groups.end());
  copies.push_back(emulator::thread->open_copies);
  arrive_after(copies, &tma::mbarrier(barrier));
}
inline void cp_async_commit_group() {
  emulator::thread->copies.push_back(emulator::thread->open_copies);
  emulator::thread->open_copies = std::make_shared<int>(0);
}
template <int kGroups>
void cp_async_wait_group() {
  auto& copies = emulator::thread->copies;
  while (copies.size() > kGroups) {
    emulator::wait_until("its copies", [&] { return *copies.front() == 0; });
    copies.pop_front();
  }
}

template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

// Calls move(address, register) for each of the four matrices' words that this lane holds.
template <typename Move>
void for_each_matrix(u32 address, u32 (&registers)[4], Move move) {
  auto& exchanged = emulator::warp().exchanged;
  const u32 lane = threadIdx.x % 32;
  exchanged[lane][0] = address;
  emulator::sync_warp();
  for (u32 i = 0; i < 4; ++i) move(exchanged[8 * i + lane / 4][0] + lane % 4 * 4, registers[i]);
  emulator::sync_warp();
}
inline void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  u32 registers[4] = {a, b, c, d};
  for_each_matrix(address, registers, [](u32 to, u32& word) { emulator::write_shared(to, word); });
}
inline void ldmatrix_x4(u32 address, u32& a, u32& b, u32& c, u32& d) {
  u32 registers[4];
  for_each_matrix(address, registers,
                  [](u32 from, u32& word) { word = emulator::read_shared<u32>(from); });
  a = registers[0], b = registers[1], c = registers[2], d = registers[3];
}
inline void ldmatrix_x4_trans(u32 address, u32& a, u32& b, u32& c, u32& d) {
  auto& exchanged = emulator::warp().exchanged;
  const u32 lane = threadIdx.x % 32;
  exchanged[lane][0] = address;
  emulator::sync_warp();
  u32 words[4];
  for (u32 i = 0; i < 4; ++i) {
    const auto element = [&](u32 row) {
      return emulator::read_shared<u16>(exchanged[8 * i + row][0] + lane / 4 * 2);
    };
    words[i] = element(lane % 4 * 2) | static_cast<u32>(element(lane % 4 * 2 + 1)) << 16;
  }
  emulator::sync_warp();
  a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void wait_for_turn(const int* counter, int turn) {
  emulator::wait_until("for its turn", [=] { return *counter == turn; });
}
inline void end_turn(int* counter) { ++*counter; }
inline void store_shared(u32 address, float a, float b) {
  emulator::write_shared(address, float2{a, b});
}
inline void load_shared(u32 address, float& a, float& b) {
  const auto v = emulator::read_shared<float2>(address);
  a = v.x, b = v.y;
}
inline void store_shared(u32 address, float4 v) { emulator::write_shared(address, v); }
inline void store_shared(u32 address, u32 word) { emulator::write_shared(address, word); }
inline void store_shared(u32 address, u16 half) { emulator::write_shared(address, half); }
inline u32 load_shared(u32 address) { return emulator::read_shared<u32>(address); }
inline float4 load_cluster(u32 address) {
  emulator::need_alive(emulator::block_at(address), "a read of the memory");
  return emulator::read_shared<float4>(address);
}
inline void st_async(u32 address, float a, float b, u32 barrier) {
  emulator::Block* block = &emulator::block_at(address);
  if (block != &emulator::block_at(barrier)) emulator::fail("st.async needs both in one block");
  emulator::later([=] {
    emulator::need_alive(*block, "a write to the memory");
    emulator::write_shared(address, float2{a, b});
    tma::fenced_mbarrier(*block, emulator::offset_at(barrier)).bytes -= 8;
    tma::mbarrier(*block, emulator::offset_at(barrier)).settle();
  });
}
inline u32 recomputed(u32 value) { return value; }

template <typename Format>
struct Packed {
  static u32 pack(float low, float high) {
    return Format::narrow(low) | static_cast<u32>(Format::narrow(high)) << 16;
  }
  static float low(u32 packed) { return Format::wide(packed & 0xffffu); }
  static float high(u32 packed) { return Format::wide(packed >> 16); }
};
struct BFloat16 : Packed<BFloat16> {
  static constexpr int kBytes = 2;
  static u16 narrow(float x) {  // To nearest, ties to even; a NaN's upper half stays one.
    const u32 bits = std::bit_cast<u32>(x);
    return (x != x ? bits : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static float wide(u32 bits) { return __uint_as_float(bits << 16); }
};
struct Float16 : Packed<Float16> {
  static constexpr int kBytes = 2;
  static u16 narrow(float x) { return std::bit_cast<u16>(static_cast<_Float16>(x)); }
  static float wide(u32 bits) { return std::bit_cast<_Float16>(static_cast<u16>(bits)); }
};
struct Float32 {
  static constexpr int kBytes = 4;
};
struct Float8E4M3 {  // Four exponent bits with a bias of 7, three mantissa bits, no infinities.
  static constexpr int kBytes = 1;
  static float wide(u32 bits) {
    const float sign = bits & 0x80 ? -1.0f : 1.0f;
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return sign * std::numeric_limits<float>::quiet_NaN();
    return sign * std::ldexp(exponent ? 8 + mantissa : mantissa, (exponent ? exponent : 1) - 10);
  }
};
struct Float8E5M2 {  // The upper half of a Float16.
  static constexpr int kBytes = 1;
  static float wide(u32 bits) { return Float16::wide(bits << 8); }
};
struct Int8 {
  static constexpr int kBytes = 1;
  static int wide(u32 bits) { return static_cast<signed char>(bits); }
};

inline float exp2_approximate(float x) { return std::exp2(x); }
inline float log2_approximate(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1 / x; }
inline float tanh_by_exp2(float x) { return std::tanh(x); }
inline float tanh_approximate(float x) { return std::tanh(x); }
inline float max_nan(float a, float b) { return a != a || b != b ? a + b : std::max(a, b); }

inline u32 uniform(u32 value) { return value; }
inline bool elect_one() { return threadIdx.x % 32 == 0; }

}  // namespace jaxkernels
