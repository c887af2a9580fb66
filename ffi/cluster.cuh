// A cluster whose blocks (CTAs) share operands by multicast (PTX ISA, section
// "cp.async.bulk.tensor").
//
// kClusterM x kClusterN blocks work on neighbouring tiles of a product. Blocks along m share the
// rhs, blocks along n share the lhs. Each block loads a part of what it shares; multicast writes
// the part to all sharers.
//
//                 n_rank 0    n_rank 1
//   m_rank 0   |  rank 0   |  rank 1   |   ranks 0 and 1 share the lhs: row_of(0)
//   m_rank 1   |  rank 2   |  rank 3   |   ranks 1 and 3 share the rhs: column_of(1)
//
//   using Grid = ClusterGrid<2, 2>;
//   cp_async_bulk_tensor_multicast(part of the lhs, ..., Grid::row_of(Grid::m_rank(rank)));

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

template <int kClusterM, int kClusterN>
struct ClusterGrid {
  static constexpr int kM = kClusterM;
  static constexpr int kN = kClusterN;
  static constexpr int kBlocks = kClusterM * kClusterN;
  // Blocks that write to one block's shared memory: its row and its column.
  static constexpr int kSharers = kClusterM + kClusterN - 1;
  static constexpr bool kShares = kSharers > 1;

  // A CTA's place in the grid. Only for grids that share: other clusters have ranks of their own.
  static __device__ __forceinline__ u32 m_rank(u32 rank) { return rank / kClusterN; }
  static __device__ __forceinline__ u32 n_rank(u32 rank) { return rank % kClusterN; }

  // The blocks that share an operand, as the mask of multicast.
  static __device__ __forceinline__ u16 row_of(u32 m_rank) {
    return ((1u << kClusterN) - 1) << m_rank * kClusterN;
  }
  static __device__ __forceinline__ u16 column_of(u32 n_rank) { return first_column() << n_rank; }

 private:
  static constexpr __device__ u32 first_column() {
    u32 blocks = 0;
    for (int i = 0; i < kClusterM; ++i) blocks |= 1u << i * kClusterN;
    return blocks;
  }
};

}  // namespace jaxkernels
