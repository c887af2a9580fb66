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
template <typename Tile, bool kHasEnd>
struct SequenceLoad {
  static __device__ __forceinline__ void load(unsigned char* slot, const tma::TensorMap* map,
                                              u64* full, int column, int first, int end, int head,
                                              int batch) {
    if constexpr (kHasEnd) {
      const int valid = min(end - first, kRows);
      copy(slot, map, full, column, kRows - valid, head, batch, first + valid);
    } else {
      copy(slot, map, full, column, first, head, batch);
    }
  }

 private:
  static constexpr int kRows = TileLoad<Tile>::kPartRows;

  template <typename... Outer>
  static __device__ __forceinline__ void copy(unsigned char* slot, const tma::TensorMap* map,
                                              u64* full, int column, int row, Outer... outer) {
    if constexpr (Tile::kIsKMajor) {
      TileLoad<Tile>::load(slot, map, full, row, column, outer...);
    } else {
      TileLoad<Tile>::load(slot, map, full, column, row, outer...);
    }
  }
};

}  // namespace jaxkernels
