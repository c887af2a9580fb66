// The order in which a persistent grid works on tiles.
//
// Each cluster takes every so many-th tile of a one-dimensional order, until there are no more:
//
//   for (PersistentTiles<kClusterBlocks> tiles; tiles.index() < count; tiles.advance()) {
//     const TileIndex tile = strip_order(order, tiles.index());
//   }
//
// Clusters that run at the same time work on neighbours in the order, so it decides which operands
// L2 holds.

#pragma once

namespace jaxkernels {

// The tiles of one cluster of kClusterBlocks blocks.
template <int kClusterBlocks>
class PersistentTiles {
 public:
  __device__ __forceinline__ PersistentTiles() : index_(blockIdx.x / kClusterBlocks) {}

  __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ void advance() { index_ += gridDim.x / kClusterBlocks; }

 private:
  int index_;
};

struct TileIndex {
  int m, n;
};

// Tile `index` of order.m_tiles x order.n_tiles, in strips. A strip is order.strip tiles wide along
// the minor dimension: n if order.is_n_minor, else m. It is walked along the major dimension. Every
// other strip is walked backwards, so that it begins with the operands that the last one ended
// with. With m minor and strips of 2:
//
//            m ->
//   n   |  0   1 | 10  11 |
//   |   |  2   3 |  8   9 |
//   v   |  4   5 |  6   7 |
//
// `order` has these fields; it is the kernel's parameter, or a part of it.
template <typename Order>
__device__ __forceinline__ TileIndex strip_order(const Order& order, int index) {
  const int minor_tiles = order.is_n_minor ? order.n_tiles : order.m_tiles;
  const int major_tiles = order.is_n_minor ? order.m_tiles : order.n_tiles;
  const int strip = index / (order.strip * major_tiles);
  const int in_strip = index - strip * order.strip * major_tiles;
  const int width = min(order.strip, minor_tiles - strip * order.strip);
  int major = in_strip / width;
  const int minor = strip * order.strip + in_strip - major * width;
  if (strip % 2) major = major_tiles - 1 - major;
  return {order.is_n_minor ? major : minor, order.is_n_minor ? minor : major};
}

}  // namespace jaxkernels
