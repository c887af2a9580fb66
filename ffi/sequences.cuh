// Loads of rows of sequences whose lengths the kernel reads: rows from the end on are zeros.
//
// The copy engine writes zeros for what lies outside a tensor, but a tensor map has one size for
// all sequences of a batch. So a map of sequences has two dimensions y and z of the same stride,
// and starts a block of kRows rows before the array (launching.py, rows_of_a_sequence):
//
//   row = y + z - kRows        y < kRows, the rows of a copy; z counts the rows before the end
//
// A copy that begins at y = kRows - valid has `valid` rows inside. z then moves it to its place:
//
//   rows 4 ... 7, the sequence ends at 6, kRows = 4:  valid = 2, y from 2 on, z = 6
//
//     y      2   3 | 4   5          4 and 5 lie outside: zeros
//     row    4   5 | -   -
//
// If no row is inside, `valid` is not positive and y begins outside. Padding is neither read nor
// multiplied: it may be NaN.

#pragma once

#include "tiles.cuh"

namespace jaxkernels {

// Loads a tile of a head's rows `first`, `first` + 1, ..., from column `column` on. If `kHasEnd`,
// rows from `end` on are zeros and the map is one of sequences; else the array's own size ends it.
template <typename Tile, bool kHasEnd, int kSharedBy = 1>
struct SequenceLoad {
  using Load = TileLoad<Tile, kSharedBy>;

  static __device__ __forceinline__ void load(unsigned char* slot, const tma::TensorMap* map,
                                              u64* full, int column, int first, int end, int head,
                                              int batch) {
    static_assert(kSharedBy == 1, "a shared tile is loaded by parts");
    load_part(slot, map, full, 0, 0, column, first, end, head, batch);
  }

  // The `part`-th part for the blocks in `sharers`, as TileLoad::load_part.
  static __device__ __forceinline__ void load_part(unsigned char* slot, const tma::TensorMap* map,
                                                   u64* full, u32 part, u16 sharers, int column,
                                                   int first, int end, int head, int batch) {
    if constexpr (kHasEnd) {
      constexpr int kRows = Load::kPartRows;
      // TileLoad adds the rows of the parts before.
      const int before = static_cast<int>(part) * (Load::kSharesBoxes ? 0 : kRows);
      const int valid = min(end - first - before, kRows);
      copy(slot, map, full, part, sharers, column, kRows - valid - before, head, batch,
           first + before + valid);
    } else {
      copy(slot, map, full, part, sharers, column, first, head, batch);
    }
  }

 private:
  template <typename... Outer>
  static __device__ __forceinline__ void copy(unsigned char* slot, const tma::TensorMap* map,
                                              u64* full, u32 part, u16 sharers, int column, int row,
                                              Outer... outer) {
    if constexpr (Tile::kIsKMajor) {
      Load::load_part(slot, map, full, part, sharers, row, column, outer...);
    } else {
      Load::load_part(slot, map, full, part, sharers, column, row, outer...);
    }
  }
};

}  // namespace jaxkernels
