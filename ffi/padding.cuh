// Padding in tiles of keys or values that TMA has loaded. It may be NaN, and a weight of zero does
// not hide NaN from a product: rows of padding become zeros before wgmma reads them.
//
//   clear_rows<ValueTile>(tile, first_of_padding, ValueTile::kAlong);   // a warpgroup
//   end_clearing(barrier);
//
// If several warpgroups read a tile, each one clears the rows that it reads: all write zeros.

#pragma once

#include "tiles.cuh"

namespace jaxkernels {

// Rows `begin` to `end` - 1 of a tile become zeros; a row is 128 bytes of each box. A warpgroup
// calls it.
template <typename Tile>
__device__ __forceinline__ void clear_rows(unsigned char* tile, int begin, int end) {
  constexpr int kUnits = kSwizzleBytes / 16;
#pragma unroll 1
  for (int box = 0; box < Tile::kBoxes; ++box) {
    uint4* units = reinterpret_cast<uint4*>(tile + box * Tile::kBoxBytes);
#pragma unroll 1
    for (int i = begin * kUnits + threadIdx.x % 128; i < end * kUnits; i += 128) {
      units[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Afterwards the products of this warpgroup see the zeros.
__device__ __forceinline__ void end_clearing(u32 barrier) {
  tma::fence_proxy_async();
  named_barrier_sync<128>(barrier);
}

}  // namespace jaxkernels
