// A ring of shared memory slots between producers and consumers (PTX ISA, section "mbarrier").
//
// Each slot has two barriers. `full` completes a phase when all bytes of the slot have arrived by
// TMA. `empty` completes a phase when every consumer warp has released the slot; in a cluster that
// multicasts, the warps of all blocks that the producer writes to.
//
//   producer: one thread                             consumers: warps
//     u64* full = ring.producer_acquire(place, n);     ring.consumer_wait(place);
//     cp_async_bulk_tensor_load(slot, map, full, at);  ... read slot place.slot() ...
//     place.next();                                    ring.consumer_release(place.slot(), rank);
//                                                      place.next();
//
// One thread calls `init` before fence_mbarrier_init() and the barrier of the block (of the
// cluster). Each role has a RingPlace of its own, which counts the slots it has passed:
//
//   slot     0  1  2  0  1  2  0 ...      kStages = 3
//   parity   0  0  0  1  1  1  0 ...      of the phase that a consumer waits for
//
// The first producer_acquire of each slot returns at once: a new barrier takes the phase before its
// first, of parity 1, for completed.

#pragma once

#include "cluster.cuh"

namespace jaxkernels {

template <int kStages>
class RingPlace {
 public:
  __device__ __forceinline__ int slot() const { return slot_; }
  __device__ __forceinline__ u32 parity() const { return round_ & 1; }
  __device__ __forceinline__ void next() {
    if (++slot_ == kStages) slot_ = 0, ++round_;
  }
  __device__ __forceinline__ void skip(int count) {
    slot_ += count;
    round_ += slot_ / kStages;
    slot_ %= kStages;
  }

 private:
  int slot_ = 0;
  u32 round_ = 0;
};

// The ring's barriers, a part of the kernel's shared memory. The slots' bytes are the kernel's own.
template <int kStages, typename Grid = ClusterGrid<1, 1>>
struct Ring {
  using Place = RingPlace<kStages>;

  u64 full[kStages];
  u64 empty[kStages];

  // `consumer_warps`: those of one block that release each slot. `producers`: arrivals that fill
  // it; above 1 if warps write a part of the slot and arrive at `full` themselves.
  __device__ __forceinline__ void init(int consumer_warps, int producers = 1) {
    for (int i = 0; i < kStages; ++i) {
      tma::mbarrier_init(&full[i], producers);
      tma::mbarrier_init(&empty[i], consumer_warps * Grid::kSharers);
    }
  }

  // Waits until the slot is empty.
  __device__ __forceinline__ void producer_wait(const Place& place) {
    tma::mbarrier_wait_parity(&empty[place.slot()], place.parity() ^ 1);
  }

  // Waits until the slot is empty. Returns the barrier that the loads of `bytes` bytes complete on.
  __device__ __forceinline__ u64* producer_acquire(const Place& place, u32 bytes) {
    u64* barrier = &full[place.slot()];
    producer_wait(place);
    tma::mbarrier_arrive_expect_tx(barrier, bytes);
    return barrier;
  }

  // Returns when all slots have been released. In a cluster, the producer's block must not exit
  // before: a release that arrives at a block that has left is an error.
  __device__ __forceinline__ void producer_drain(Place place) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i, place.next()) producer_wait(place);
  }

  // Waits until the slot's bytes are there.
  __device__ __forceinline__ void consumer_wait(int slot, u32 parity) {
    tma::mbarrier_wait_parity(&full[slot], parity);
  }
  __device__ __forceinline__ void consumer_wait(const Place& place) {
    tma::mbarrier_wait_parity(&full[place.slot()], place.parity());
  }

  // Gives the slot back to every producer that writes to it. All threads of a warp call it, after
  // the warp's last read of the slot. `rank`: this block's, in its cluster.
  __device__ __forceinline__ void consumer_release(int slot, u32 rank) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (Grid::kShares) {
      const bool fills =
          Grid::m_rank(lane) == Grid::m_rank(rank) || Grid::n_rank(lane) == Grid::n_rank(rank);
      if (lane < Grid::kBlocks && fills) {
        tma::mbarrier_arrive_cluster_relaxed(&empty[slot], lane);
      }
    } else {
      if (lane == 0) tma::mbarrier_arrive(&empty[slot]);
    }
  }
};

}  // namespace jaxkernels
