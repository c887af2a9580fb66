// ffi/tma.cuh for the emulator: the same functions.

#pragma once

#include <array>

#include "emulator.cuh"

namespace tma {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The type in which a reducing copy computes. Plain copies have no type.
enum class Type { kNone, kFloat32, kFloat16, kBFloat16, kInt32, kUInt32 };

// Innermost dimension first; those beyond the rank are 1.
constexpr int kDimensions = 5;
struct TensorMap {
  unsigned char* data;
  long long sizes[kDimensions];
  long long byte_strides[kDimensions];
  int box[kDimensions];
  int rank;
  int swizzle_bytes;  // 16, the unit that is permuted, where nothing is.
  int element_bytes;
  Type type;
  int fills_nan;
};

inline u32 shared_address(const void* p) { return emulator::address_of(p, emulator::rank()); }

template <int kBytes>
unsigned char* aligned(unsigned char* p) {
  return p + (kBytes - shared_address(p) % kBytes) % kBytes;
}

inline emulator::Mbarrier& mbarrier(emulator::Block& block, u32 address) {
  if (!block.mbarriers.contains(address)) emulator::fail("a barrier must be initialised");
  return block.mbarriers[address];
}
inline emulator::Mbarrier& mbarrier(const u64* barrier) {
  return mbarrier(*emulator::thread->block, emulator::offset_of(barrier));
}
inline void mbarrier_init(u64* barrier, u32 arrivals) {
  const int count = static_cast<int>(arrivals);
  auto& made = emulator::thread->block->mbarriers[emulator::offset_of(barrier)];
  made = {.count = count, .pending = count};
  emulator::thread->unfenced_mbarriers.push_back(&made);
}
inline void fence_mbarrier_init() {
  for (auto* made : emulator::thread->unfenced_mbarriers) made->is_fenced = true;
  emulator::thread->unfenced_mbarriers.clear();
}
// For the copy engine and for other blocks.
inline emulator::Mbarrier& fenced_mbarrier(emulator::Block& block, u32 address) {
  auto& found = mbarrier(block, address);
  if (!found.is_fenced) emulator::fail("a barrier needs fence.mbarrier_init");
  return found;
}
inline void mbarrier_arrive(u64* barrier) {
  --mbarrier(barrier).pending;
  mbarrier(barrier).settle();
}
inline void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  mbarrier(barrier).bytes += static_cast<int>(bytes);
  mbarrier_arrive(barrier);
}
inline void mbarrier_wait_parity(u64* barrier, u32 parity) {
  emulator::wait_until("an mbarrier",
                       [&] { return (mbarrier(barrier).phase & 1) != static_cast<int>(parity); });
}
inline void mbarrier_arrive_cluster_relaxed(u64* barrier, u32 rank) {
  const u32 address = emulator::offset_of(barrier);
  emulator::Block* block = &emulator::block_of(rank);
  ++emulator::thread->remote_arrivals;
  emulator::later([=] {
    emulator::need_alive(*block, "an arrival at a barrier");
    --emulator::thread->remote_arrivals;
    --fenced_mbarrier(*block, address).pending;
    mbarrier(*block, address).settle();
  });
}

inline void fence_proxy_async() { emulator::fence_proxy_async(); }

inline u32 cluster_ctarank() { return emulator::rank(); }
inline void barrier_cluster_arrive_relaxed() {
  emulator::thread->cluster_phase = emulator::cluster->barrier.phase;
  emulator::cluster->barrier.arrive(static_cast<int>(emulator::cluster->threads.size()));
}
// It releases: what the thread did before has happened.
inline void barrier_cluster_arrive() {
  emulator::wait_until("its arrivals", [] { return emulator::thread->remote_arrivals == 0; });
  barrier_cluster_arrive_relaxed();
}
inline void barrier_cluster_wait() {
  emulator::wait_until("its cluster", [] {
    return emulator::cluster->barrier.phase != emulator::thread->cluster_phase;
  });
}
inline void barrier_cluster() {
  barrier_cluster_arrive();
  barrier_cluster_wait();
}
inline u32 mapa(const void* p, u32 rank) { return emulator::address_of(p, rank); }

inline void prefetch_tensormap(const TensorMap*) {}

// Where the swizzle puts a byte of shared memory.
inline u32 permuted(u32 address, int swizzle_bytes) {
  return address ^ ((address >> 7) % (swizzle_bytes / 16) * 16);
}

using Place = std::array<int, kDimensions>;
template <int kRank>
Place place_of(const TensorMap& map, const int (&at)[kRank]) {
  if (map.rank != kRank) emulator::fail("a copy must have as many coordinates as its tensor map");
  Place place = {};
  std::copy(at, at + kRank, place.begin());
  return place;
}

// Calls move(address in shared memory, address in the tensor or null outside) for each element.
template <typename Move>
void for_each_element(const TensorMap& map, u32 tile, const Place& at, Move move) {
  if (tile % 128 != 0) emulator::fail("a tile must begin on 128 bytes");
  if (reinterpret_cast<u64>(map.data) % 16 != 0) emulator::fail("a tensor must begin on 16 bytes");
  if (at[0] * map.element_bytes % 16 != 0) emulator::fail("a box must begin on 16 bytes");
  int count = 1;
  for (int n : map.box) count *= n;
  for (int i = 0; i < count; ++i) {
    bool inside = true;
    unsigned char* element = map.data;
    for (int d = 0, rest = i; d < kDimensions; rest /= map.box[d++]) {
      const long long index = at[d] + rest % map.box[d];
      inside = inside && 0 <= index && index < map.sizes[d];
      element += index * map.byte_strides[d];
    }
    const u32 place = tile + i * map.element_bytes;
    if (place + map.element_bytes > emulator::dynamic_smem() + emulator::smem_bytes) {
      emulator::fail("a tile must lie in the shared memory that the launch gives");
      return;
    }
    move(permuted(place, map.swizzle_bytes), inside ? element : nullptr);
  }
}

inline void load(void* tile, const TensorMap* map, u64* full, const Place& at, u16 ranks) {
  const u32 to = emulator::offset_of(tile), barrier = emulator::offset_of(full);
  const u32 fences = emulator::cluster->fences;
  for (u32 rank = 0; rank < emulator::cluster->size; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    emulator::Block* block = &emulator::block_of(rank);
    // From now on the content must not be read until the copy is complete.
    for_each_element(*map, to, at, [&](u32 place, unsigned char*) {
      const int bytes = map->element_bytes;
      const auto need_fenced = [&](emulator::Access* accesses, const char* verb) {
        emulator::need_fenced(accesses, place, bytes, verb, "a load overwrites a byte",
                              *emulator::thread, fences);
        std::fill_n(accesses + place, bytes, emulator::Access{});
      };
      need_fenced(block->writes.get(), "wrote");
      need_fenced(block->reads.get(), "read");
      std::memset(block->smem + place, 0xff, bytes);
    });
    emulator::later([=] {
      emulator::need_alive(*block, "a copy into the memory");
      int bytes = 0;
      for_each_element(*map, to, at, [&](u32 place, unsigned char* element) {
        bytes += map->element_bytes;
        if (element) std::memcpy(block->smem + place, element, map->element_bytes);
        // All bits are set in a NaN of any type.
        const int fill = map->fills_nan ? 0xff : 0;
        if (!element) std::memset(block->smem + place, fill, map->element_bytes);
      });
      fenced_mbarrier(*block, barrier).bytes -= bytes;
      mbarrier(*block, barrier).settle();
    });
  }
}
template <int kRank>
void cp_async_bulk_tensor_load(void* tile, const TensorMap* map, u64* full,
                               const int (&at)[kRank]) {
  load(tile, map, full, place_of(*map, at), 1 << cluster_ctarank());
}
template <int kRank>
void cp_async_bulk_tensor_multicast(void* tile, const TensorMap* map, u64* full,
                                    const int (&at)[kRank], u16 blocks) {
  load(tile, map, full, place_of(*map, at), blocks);
}

// Between blocks. From now on the content must not be read until the copy is complete.
inline void cp_async_bulk_to_block(void* to, const void* from, u32 bytes, u64* full, u32 rank) {
  const u32 target = emulator::offset_of(to), source = emulator::offset_of(from);
  const u32 barrier = emulator::offset_of(full), fences = emulator::cluster->fences;
  const emulator::Thread* issuer = emulator::thread;
  emulator::Block *sender = emulator::thread->block, *receiver = &emulator::block_of(rank);
  if (target % 16 != 0 || source % 16 != 0 || bytes % 16 != 0) {
    emulator::fail("a copy between blocks must have whole units of 16 bytes");
  }
  for (emulator::Access* accesses : {receiver->writes.get(), receiver->reads.get()}) {
    const char* verb = accesses == receiver->writes.get() ? "wrote" : "read";
    emulator::need_fenced(accesses, target, bytes, verb, "a copy overwrites a byte", *issuer,
                          fences);
    std::fill_n(accesses + target, bytes, emulator::Access{});
  }
  std::memset(receiver->smem + target, 0xff, bytes);
  emulator::later([=] {
    emulator::need_alive(*sender, "a copy from the memory");
    emulator::need_alive(*receiver, "a copy into the memory");
    emulator::need_fenced(sender->writes.get(), source, bytes, "wrote", "a copy reads a byte",
                          *issuer, fences);
    std::memcpy(receiver->smem + target, sender->smem + source, bytes);
    fenced_mbarrier(*receiver, barrier).bytes -= static_cast<int>(bytes);
    mbarrier(*receiver, barrier).settle();
  });
}

enum class Reduction { kAdd, kMin, kMax };
struct BFloat16 {
  u16 bits;
};
inline float value_of(BFloat16 x) { return std::bit_cast<float>(static_cast<u32>(x.bits) << 16); }
template <typename T>
T value_of(T x) {
  return x;
}
template <typename T>
T narrow(auto x) {
  if constexpr (std::is_same_v<T, BFloat16>) {  // To nearest, ties to even; a NaN stays one.
    const u32 bits = std::bit_cast<u32>(x);
    return {static_cast<u16>((x != x ? bits : bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  } else {
    return static_cast<T>(x);
  }
}
// With a NaN and a number, min and max return the number. -0.0 is less than 0.0 (PTX ISA, "min").
template <typename T>
void combine(Reduction reduction, unsigned char* element, const unsigned char* part) {
  T old, added;
  std::memcpy(&old, element, sizeof(T));
  std::memcpy(&added, part, sizeof(T));
  const auto x = value_of(old), y = value_of(added);
  T result;
  if (reduction == Reduction::kAdd) {
    result = narrow<T>(x + y);
  } else {
    bool is_less = x < y, is_number = true;
    if constexpr (!std::is_integral_v<T>) {
      is_less = x < y || (x == y && std::signbit(static_cast<float>(x)));
      is_number = x == x;
      if (y != y) is_less = reduction == Reduction::kMin;
    }
    result = is_number && is_less == (reduction == Reduction::kMin) ? old : added;
  }
  std::memcpy(element, &result, sizeof(T));
}
inline void combine(Type type, Reduction reduction, unsigned char* element,
                    const unsigned char* part) {
  switch (type) {
    case Type::kFloat32:
      if (reduction != Reduction::kAdd) emulator::fail("float32 is not compared");
      return combine<float>(reduction, element, part);
    case Type::kFloat16:
      return combine<_Float16>(reduction, element, part);
    case Type::kBFloat16:
      return combine<BFloat16>(reduction, element, part);
    case Type::kInt32:
      return combine<int>(reduction, element, part);
    case Type::kUInt32:
      return combine<u32>(reduction, element, part);
    case Type::kNone:
      emulator::fail("this type is not reduced");
  }
}

// Calls move(element in the tensor, in shared memory) for each that lies inside.
template <typename Move>
void store(const TensorMap* map, const void* tile, const Place& at, Move move) {
  const u32 from = emulator::offset_of(tile), fences = emulator::cluster->fences;
  const emulator::Thread* issuer = emulator::thread;
  emulator::Block* block = emulator::thread->block;
  auto open = emulator::thread->open_stores;
  ++*open;
  for (int first : at) {
    if (first < 0) emulator::fail("a store must not begin before the tensor");
  }
  emulator::later([=] {
    emulator::need_alive(*block, "a store from the memory");
    for_each_element(*map, from, at, [&](u32 place, unsigned char* element) {
      emulator::need_fenced(block->writes.get(), place, map->element_bytes, "wrote",
                            "a store reads a byte", *issuer, fences);
      if (element) move(element, block->smem + place);
    });
    --*open;
  });
}
template <int kRank>
void cp_async_bulk_tensor_store(const TensorMap* map, const void* tile, const int (&at)[kRank]) {
  store(map, tile, place_of(*map, at), [=](unsigned char* element, const unsigned char* part) {
    std::memcpy(element, part, map->element_bytes);
  });
}
template <Reduction kReduction, int kRank>
void cp_reduce_async_bulk_tensor(const TensorMap* map, const void* tile, const int (&at)[kRank]) {
  store(map, tile, place_of(*map, at), [=](unsigned char* element, const unsigned char* part) {
    combine(map->type, kReduction, element, part);
  });
}
inline void cp_async_bulk_commit_group() {
  emulator::thread->stores.push_back(emulator::thread->open_stores);
  emulator::thread->open_stores = std::make_shared<int>(0);
}
template <int kGroups>
void cp_async_bulk_wait_group_read() {
  auto& stores = emulator::thread->stores;
  while (stores.size() > kGroups) {
    emulator::wait_until("its stores", [&] { return *stores.front() == 0; });
    stores.pop_front();
  }
}
// A store is read and written in one step here.
template <int kGroups>
void cp_async_bulk_wait_group() {
  cp_async_bulk_wait_group_read<kGroups>();
}

}  // namespace tma
