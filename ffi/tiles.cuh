// Tiles of operands in shared memory, as TMA writes them and wgmma reads them.
//
//   using Lhs = OperandTile<BFloat16, 128, 64, true>;    // 128 rows of m, 64 of k, k contiguous
//   using LhsLoad = TileLoad<Lhs>;
//
//   LhsLoad::load(slot, &map, full, row, k, batch);      // producer: one thread
//   const u32 lhs = Lhs::descriptor(shared_address(slot));
//   wgmma<BFloat16, ...>(acc, lhs + Lhs::advance(64 * i, step), rhs + Rhs::advance(0, step), 1);
//
// A tile is a sequence of boxes. A box is one swizzle span (128 bytes) wide along the contiguous
// dimension and as long as the tile along the other:
//
//   K-major:    box 0          box 1                MN-major:   box 0          box 1
//               k 0 ... 63     k 64 ... 127                     row 0 ... 63   row 64 ... 127
//     row 0   | 128 bytes  |  | 128 bytes  |          k 0     | 128 bytes  |  | 128 bytes  |
//     row 1   | 128 bytes  |  | 128 bytes  |          k 1     | 128 bytes  |  | 128 bytes  |
//     ...                                             ...
//
// (64 elements of 16 bits; 128 of 8 bits.) The tensor map has the 128-byte swizzle and a box of
// 1 x (rows or k) x one span, innermost dimension last.

#pragma once

#include "cluster.cuh"
#include "wgmma.cuh"

namespace jaxkernels {

constexpr int kSwizzleBytes = 128;
// Elements across a swizzle span.
template <typename T>
constexpr int kAtom = kSwizzleBytes / T::kBytes;

// kRows of m or n by kK of k. `kIsKMajor`: k is the contiguous dimension.
template <typename T, int kTileRows, int kTileK, bool kTileIsKMajor>
struct OperandTile {
  using Element = T;
  static constexpr int kRows = kTileRows;
  static constexpr int kK = kTileK;
  static constexpr bool kIsKMajor = kTileIsKMajor;
  // Elements along the contiguous dimension, and along the other. A last box may be partly used.
  static constexpr int kAcross = kIsKMajor ? kK : kRows;
  static constexpr int kAlong = kIsKMajor ? kRows : kK;
  static constexpr int kBoxes = (kAcross + kAtom<T> - 1) / kAtom<T>;
  static constexpr int kBoxBytes = kAlong * kSwizzleBytes;
  static constexpr int kBytes = kBoxes * kBoxBytes;
  static_assert(T::kBytes == 2 || kIsKMajor, "wgmma transposes 16-bit operands only");
  static_assert(kK % kWgmmaK<T> == 0, "whole wgmmas along k");
  static_assert(kBoxBytes % 1024 == 0, "each box begins on a period of the swizzle");

  // The lower half of the descriptor of a tile at this address.
  static __device__ __forceinline__ u32 descriptor(u32 address) {
    return descriptor_low(address, kIsKMajor ? 0 : kBoxBytes);
  }
  // What to add to the descriptor for the rows from `row` on (a multiple of 64) and the `step`-th
  // kWgmmaK of k.
  static constexpr __device__ u32 advance(int row, int step) {
    constexpr int kSteps = (kIsKMajor ? kAtom<T> : kK) / kWgmmaK<T>;  // A box has so many.
    constexpr u32 kStepBytes = kWgmmaK<T> * (kIsKMajor ? T::kBytes : kSwizzleBytes);
    const u32 across = kIsKMajor ? row * kSwizzleBytes : row / kAtom<T> * kBoxBytes;
    return (across + step / kSteps * kBoxBytes + step % kSteps * kStepBytes) >> 4;
  }
};

// How TMA loads a tile. kSharedBy blocks of a cluster share it: each loads an equal part, whole
// boxes of an MN-major tile if there are enough, else as many rows of each box. `kStacksBoxes`: the
// tensor map has a dimension of boxes (MN-major tiles, whole boxes), so that one copy loads all
// boxes of a part.
template <typename Tile, int kSharedBy = 1, bool kStacksBoxes = false>
struct TileLoad {
  static constexpr bool kSharesBoxes = !Tile::kIsKMajor && Tile::kBoxes % kSharedBy == 0;
  static constexpr int kLoads = kSharesBoxes ? Tile::kBoxes / kSharedBy : Tile::kBoxes;
  static constexpr int kPartRows = Tile::kAlong / (kSharesBoxes ? 1 : kSharedBy);
  static constexpr int kAcrossBox = kAtom<typename Tile::Element>;
  static_assert(kPartRows % 8 == 0, "parts begin on a period of the swizzle");
  static_assert(!kStacksBoxes || (kSharesBoxes && Tile::kRows % kAcrossBox == 0), "whole boxes");

  // Loads the tile from (row, k); `outer` are the coordinates of the tensor's further dimensions.
  template <typename... Outer>
  static __device__ __forceinline__ void load(unsigned char* slot, const tma::TensorMap* map,
                                              u64* full, int row, int k, Outer... outer) {
    static_assert(kSharedBy == 1, "a shared tile is loaded by parts");
    load_part(slot, map, full, 0, 0, row, k, outer...);
  }

  // Loads the `part`-th part for the blocks in `sharers`, a mask of multicast.
  template <typename... Outer>
  static __device__ __forceinline__ void load_part(unsigned char* slot, const tma::TensorMap* map,
                                                   u64* full, u32 part, u16 sharers, int row, int k,
                                                   Outer... outer) {
    if constexpr (kStacksBoxes) {
      const int first_box = part * kLoads;
      copy(slot + first_box * Tile::kBoxBytes, map, full,
           {0, k, row / kAcrossBox + first_box, outer...}, sharers);
    } else {
      const auto box_at = [&](int across) { return Box{map, across}; };
      load_boxes(slot, box_at, full, part, sharers, row, k, outer...);
    }
  }

  // Where a box lies: its tensor map, and its coordinate along the contiguous dimension.
  struct Box {
    const tma::TensorMap* map;
    int across;
  };

  // `load_part` of an operand in several arrays: `box_at` of a box's place in the operand says
  // where it lies.
  template <typename BoxAt, typename... Outer>
  static __device__ __forceinline__ void load_boxes(unsigned char* slot, BoxAt box_at, u64* full,
                                                    u32 part, u16 sharers, int row, int k,
                                                    Outer... outer) {
    static_assert(!kStacksBoxes, "box by box");
    const u32 first_box = kSharesBoxes ? part * kLoads : 0;
    const u32 first_row = kSharesBoxes ? 0 : part * kPartRows;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      unsigned char* to = slot + (first_box + i) * Tile::kBoxBytes + first_row * kSwizzleBytes;
      const Box box = box_at((Tile::kIsKMajor ? k : row) + (first_box + i) * kAcrossBox);
      const int along = (Tile::kIsKMajor ? row : k) + first_row;
      copy(to, box.map, full, {box.across, along, outer...}, sharers);
    }
  }

 private:
  template <int kRank>
  static __device__ __forceinline__ void copy(unsigned char* to, const tma::TensorMap* map,
                                              u64* full, const int (&from)[kRank], u16 sharers) {
    if constexpr (kSharedBy > 1) {
      tma::cp_async_bulk_tensor_multicast(to, map, full, from, sharers);
    } else {
      tma::cp_async_bulk_tensor_load(to, map, full, from);
    }
  }
};

}  // namespace jaxkernels
