// One tile of a product, for tests/test_ffi_wgmma.py: out (64 x kN) = lhs (64 x kBlocks * kBlockK)
// * rhs.
//
// A smallest kernel of the headers: one producer thread, one consumer warpgroup, a ring of two
// slots.

#include "ring.cuh"
#include "tiles.cuh"

namespace jaxkernels {

using namespace tma;

// How the consumer reads the lhs.
enum class Form {
  kShared,     // By TMA, from shared memory.
  kRegisters,  // From global memory to registers; k is contiguous.
  kChained,    // Sums of an earlier product, rounded: lhs * identity.
};

template <typename T, typename Sum, int kN, int kBlocks, bool kLhsIsKMajor, bool kRhsIsKMajor,
          Form kForm>
__global__ __launch_bounds__(256) void product(const __grid_constant__ TensorMap lhs_map,
                                               const __grid_constant__ TensorMap rhs_map,
                                               const __grid_constant__ TensorMap identity_map,
                                               const unsigned char* lhs, Sum* out) {
  constexpr int kStages = 2;
  constexpr int kBlockK = kAtom<T>;
  constexpr int kStep = kWgmmaK<T>, kSteps = kBlockK / kStep;
  using Lhs = OperandTile<T, 64, kBlockK, kLhsIsKMajor>;
  using Rhs = OperandTile<T, kN, kBlockK, kRhsIsKMajor>;
  using Identity = OperandTile<T, kBlockK, kBlockK, true>;
  constexpr bool kIsChained = kForm == Form::kChained;
  struct SharedStorage {
    alignas(1024) unsigned char lhs[kStages][Lhs::kBytes];
    alignas(1024) unsigned char rhs[kStages][Rhs::kBytes];
    alignas(1024) unsigned char identity[kStages][Identity::kBytes];
    Ring<kStages> ring;
  };
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem);

  if (threadIdx.x == 0) {
    shared.ring.init(4);
    fence_mbarrier_init();
  }
  __syncthreads();

  RingPlace<kStages> place;
  if (threadIdx.x / 128 == 0) {
    if (uniform(threadIdx.x / 32) != 0 || !elect_one()) return;
    for (int block = 0; block < kBlocks; ++block, place.next()) {
      constexpr int kBytes = Lhs::kBytes + Rhs::kBytes + (kIsChained ? Identity::kBytes : 0);
      const int slot = place.slot(), k = block * kBlockK;
      u64* full = shared.ring.producer_acquire(place, kBytes);
      TileLoad<Lhs>::load(shared.lhs[slot], &lhs_map, full, 0, k);
      TileLoad<Rhs>::load(shared.rhs[slot], &rhs_map, full, 0, k);
      if (kIsChained) TileLoad<Identity>::load(shared.identity[slot], &identity_map, full, 0, 0);
    }
    return;
  }

  Sum acc[kN / 2];
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  for (int block = 0; block < kBlocks; ++block, place.next()) {
    const int slot = place.slot();
    shared.ring.consumer_wait(place);
    const u32 left = Lhs::descriptor(shared_address(shared.lhs[slot]));
    const u32 right = Rhs::descriptor(shared_address(shared.rhs[slot]));
    u32 words[kSteps][4];
    if constexpr (kForm == Form::kRegisters) {
      constexpr int kInWord = 4 / T::kBytes;
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i) {
        const int step = i / 4, row = warp * 16 + lane / 4 + i % 2 * 8;
        const int k = block * kBlockK + step * kStep + i / 2 % 2 * (kStep / 2) + lane % 4 * kInWord;
        words[step][i % 4] =
            *reinterpret_cast<const u32*>(lhs + (row * kBlocks * kBlockK + k) * T::kBytes);
      }
    } else if constexpr (kIsChained) {
      const u32 identity = Identity::descriptor(shared_address(shared.identity[slot]));
      float rows[kBlockK / 2];
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        wgmma<T, kLhsIsKMajor, true>(rows, left + Lhs::advance(0, step),
                                     identity + Identity::advance(0, step), step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(rows);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) pack_lhs<T>(rows, step, words[step]);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int adds = block > 0 || step > 0;
      if constexpr (kForm == Form::kShared) {
        wgmma<T, kLhsIsKMajor, kRhsIsKMajor>(acc, left + Lhs::advance(0, step),
                                             right + Rhs::advance(0, step), adds);
      } else {
        wgmma<T, kRhsIsKMajor>(acc, words[step], right + Rhs::advance(0, step), adds);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
    shared.ring.consumer_release(slot, 0);
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    out[row * kN + column] = acc[i];
  }
}

}  // namespace jaxkernels
