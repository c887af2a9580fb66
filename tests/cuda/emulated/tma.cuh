// ffi/tma.cuh for the emulator: the same functions, as the GEMM uses them (tensors of rank 3 and
// 4).

#pragma once

#include <array>

#include "emulator.cuh"

namespace tma {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Innermost dimension first; of rank 3, the last one is 1.
constexpr int kDimensions = 4;
struct TensorMap {
  unsigned char* data;
  long long sizes[kDimensions];
  long long byte_strides[kDimensions];
  int box[kDimensions];
  int rank;
  int swizzle_bytes;
  int element_bytes;
};

inline u32 shared_address(const void* p) { return emulator::address_of(p, emulator::rank()); }

inline emulator::Mbarrier& mbarrier(emulator::Block& block, u32 address) {
  if (!block.mbarriers.contains(address)) emulator::fail("a barrier must be initialised");
  return block.mbarriers[address];
}
inline emulator::Mbarrier& mbarrier(const u64* barrier) {
  return mbarrier(*emulator::thread->block, emulator::offset_of(barrier));
}
inline void mbarrier_init(u64* barrier, u32 arrivals) {
  const int count = static_cast<int>(arrivals);
  emulator::thread->block->mbarriers[emulator::offset_of(barrier)] = {.count = count,
                                                                      .pending = count};
}
inline void fence_mbarrier_init() {}
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
  emulator::Block* block = emulator::cluster->blocks[rank].get();
  emulator::later([=] {
    emulator::need_alive(*block, "an arrival at a barrier");
    --mbarrier(*block, address).pending;
    mbarrier(*block, address).settle();
  });
}

inline void fence_proxy_async() {}

inline u32 cluster_ctarank() { return emulator::rank(); }
inline void barrier_cluster_arrive() {
  emulator::thread->cluster_phase = emulator::cluster->barrier.phase;
  emulator::cluster->barrier.arrive(static_cast<int>(emulator::cluster->threads.size()));
}
inline void barrier_cluster_arrive_relaxed() { barrier_cluster_arrive(); }
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
    move(permuted(place, map.swizzle_bytes), inside ? element : nullptr);
  }
}

inline void load(void* tile, const TensorMap* map, u64* full, const Place& at, u16 ranks) {
  const u32 to = emulator::offset_of(tile), barrier = emulator::offset_of(full);
  for (u32 rank = 0; rank < emulator::cluster->blocks.size(); ++rank) {
    if (!(ranks >> rank & 1)) continue;
    emulator::Block* block = emulator::cluster->blocks[rank].get();
    // From now on nobody may count on what is there.
    for_each_element(*map, to, at, [&](u32 place, unsigned char*) {
      std::memset(block->smem + place, 0xff, map->element_bytes);
    });
    emulator::later([=] {
      emulator::need_alive(*block, "a copy into the memory");
      int bytes = 0;
      for_each_element(*map, to, at, [&](u32 place, unsigned char* element) {
        bytes += map->element_bytes;
        if (element) std::memcpy(block->smem + place, element, map->element_bytes);
        if (!element) std::memset(block->smem + place, 0, map->element_bytes);
      });
      mbarrier(*block, barrier).bytes -= bytes;
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

enum class Reduction { kAdd };
inline void store(const TensorMap* map, const void* tile, const Place& at, bool adds) {
  const u32 from = emulator::offset_of(tile);
  emulator::Block* block = emulator::thread->block;
  auto open = emulator::thread->open_stores;
  ++*open;
  if (at[0] < 0 || at[1] < 0 || at[2] < 0)
    emulator::fail("a store must not begin before the tensor");
  emulator::later([=] {
    emulator::need_alive(*block, "a store from the memory");
    for_each_element(*map, from, at, [&](u32 place, unsigned char* element) {
      if (!element) return;
      if (!adds) {
        std::memcpy(element, block->smem + place, map->element_bytes);
        return;
      }
      float sum, part;
      if (map->element_bytes != sizeof(sum)) emulator::fail("only float32 is added up");
      std::memcpy(&sum, element, sizeof(sum));
      std::memcpy(&part, block->smem + place, sizeof(part));
      sum += part;
      std::memcpy(element, &sum, sizeof(sum));
    });
    --*open;
  });
}
inline void cp_async_bulk_tensor_store(const TensorMap* map, const void* tile, const int (&at)[3]) {
  store(map, tile, place_of(*map, at), false);
}
template <Reduction>
void cp_reduce_async_bulk_tensor(const TensorMap* map, const void* tile, const int (&at)[3]) {
  store(map, tile, place_of(*map, at), true);
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

}  // namespace tma
