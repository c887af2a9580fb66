// The kernels of tma.py: tiles between a tensor of one to five dimensions and a stack of tiles, one
// tile per block (or per cluster).
//
// The stack is a tensor of the same rank, its tiles one after the other along the outermost
// dimension. `starts` holds each tile's first element in the tensor as JAX writes it, outermost
// dimension first; in here, the innermost comes first.
//
// The copy engine takes a box that begins on a multiple of 16 bytes in its row; any other is an
// illegal instruction, which would cost the process its CUDA context. It loads boxes that begin
// before the tensor (at a negative coordinate) but does not store them (CUDA C++ programming guide,
// tensor memory access). Such tiles are therefore moved by the threads (loads, stores), or laid out
// anew in shared memory first (reductions).

#include "tma.cuh"

constexpr int kThreads = 128;
constexpr int kAlignment = 16;

// What the threads know of a tensor and its tiles: elements, innermost dimension first.
template <int kRank>
struct Layout {
  long long sizes[kRank];    // of the tensor
  long long strides[kRank];  // of the tensor
  long long box[kRank];      // of a tile in the stack, where it is contiguous
  long long columns;         // of a tile's row; the rest of the box only makes it 16 bytes

  __device__ long long box_elements() const {
    long long product = 1;
#pragma unroll
    for (int i = 0; i < kRank; ++i) product *= box[i];
    return product;
  }
};

template <int kBytes>
struct Bits;
template <>
struct Bits<1> {
  using Type = unsigned char;
};
template <>
struct Bits<2> {
  using Type = unsigned short;
};
template <>
struct Bits<4> {
  using Type = unsigned int;
};
template <>
struct Bits<8> {
  using Type = unsigned long long;
};

namespace {

extern __shared__ unsigned char dynamic_smem[];

template <int kRank>
__device__ void read_start(const int* starts, long long tile_idx, int (&at)[kRank]) {
#pragma unroll
  for (int i = 0; i < kRank; ++i) at[i] = starts[tile_idx * kRank + kRank - 1 - i];
}

// How many elements behind a multiple of 16 bytes a column lies, also where it is negative.
template <int kBytes>
__device__ int elements_off(int column) {
  constexpr int kStep = kAlignment / kBytes;
  static_assert((kStep & (kStep - 1)) == 0, "so that the mask is the remainder");
  return column & (kStep - 1);
}

// Calls move(where in the tensor, where in the tile, whether inside the tensor) for each element of
// a tile, the block's threads in turns.
template <int kRank, typename Move>
__device__ void for_each_element(const Layout<kRank>& layout, const int (&start)[kRank],
                                 Move move) {
  const long long count = layout.box_elements();
  for (long long i = threadIdx.x; i < count; i += kThreads) {
    long long rest = i, offset = 0;
    bool inside = rest % layout.box[0] < layout.columns;
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      const long long at = start[d] + rest % layout.box[d];
      rest /= layout.box[d];
      inside = inside && 0 <= at && at < layout.sizes[d];
      offset += at * layout.strides[d];
    }
    move(offset, i, inside);
  }
}

template <int kBytes, int kRank>
__device__ bool engine_stores_at(const int (&start)[kRank]) {
  bool may = elements_off<kBytes>(start[0]) == 0;
#pragma unroll
  for (int i = 0; i < kRank; ++i) may = may && start[i] >= 0;
  return may;
}

template <typename T, int kRank>
__device__ void load_by_threads(const T* x, const Layout<kRank>& layout, const int (&start)[kRank],
                                T* tile, T fill) {
  for_each_element(layout, start, [&](long long from, long long to, bool inside) {
    tile[to] = inside ? x[from] : fill;
  });
}

template <typename T, int kRank>
__device__ void store_by_threads(const T* tile, T* x, const Layout<kRank>& layout,
                                 const int (&start)[kRank]) {
  for_each_element(layout, start, [&](long long to, long long from, bool inside) {
    if (inside) x[to] = tile[from];
  });
}

// Lays a box of `columns` columns, else of the tile's size, out in shared memory: its element c is
// the tile's element c + move, or `neutral` where the tile has none.
template <typename T, int kRank>
__device__ void lay_out(T* box_smem, int columns, const T* tile, const Layout<kRank>& layout,
                        const long long (&move)[kRank], T neutral) {
  const long long count = layout.box_elements() / layout.box[0] * columns;
  for (long long i = threadIdx.x; i < count; i += kThreads) {
    long long rest = i / columns, pitch = layout.box[0], from = i % columns + move[0];
    bool inside = 0 <= from && from < layout.columns;
#pragma unroll
    for (int d = 1; d < kRank; ++d) {
      const long long at = rest % layout.box[d] + move[d];
      rest /= layout.box[d];
      inside = inside && at < layout.box[d];
      from += at * pitch;
      pitch *= layout.box[d];
    }
    box_smem[i] = inside ? tile[from] : neutral;
  }
}

// Loads one box and waits for it. To be called by one thread.
template <int kRank>
__device__ void load_and_wait(unsigned char* tile, const tma::TensorMap* map, tma::u64* full,
                              const int (&at)[kRank], int bytes) {
  tma::mbarrier_init(full, 1);
  tma::fence_mbarrier_init();
  tma::mbarrier_arrive_expect_tx(full, bytes);
  tma::cp_async_bulk_tensor_load(tile, map, full, at);
  tma::mbarrier_wait_parity(full, 0);
}

__device__ void wait_for_stores() {
  tma::cp_async_bulk_commit_group();
  tma::cp_async_bulk_wait_group<0>();
}

}  // namespace

template <int kRank, int kBytes>
__global__ __launch_bounds__(kThreads, 1) void load_tiles(
    const __grid_constant__ tma::TensorMap x, const typename Bits<kBytes>::Type* x_data,
    const __grid_constant__ Layout<kRank> layout, const int* starts,
    const __grid_constant__ tma::TensorMap tiles, typename Bits<kBytes>::Type* tiles_data,
    int tile_bytes, typename Bits<kBytes>::Type fill) {
  __shared__ tma::u64 full;
  int from[kRank], to[kRank] = {};
  read_start(starts, blockIdx.x, from);
  if (elements_off<kBytes>(from[0]) != 0) {
    load_by_threads(x_data, layout, from, tiles_data + blockIdx.x * layout.box_elements(), fill);
    return;
  }
  // One thread does the rest: the copy engine reads only what it wrote itself, so between the load
  // it waits for and the store no proxy fence is needed.
  if (threadIdx.x != 0) return;
  unsigned char* const tile = tma::aligned<128>(dynamic_smem);
  to[kRank - 1] = blockIdx.x * static_cast<int>(layout.box[kRank - 1]);
  load_and_wait(tile, &x, &full, from, tile_bytes);
  tma::cp_async_bulk_tensor_store(&tiles, tile, to);
  wait_for_stores();
}

template <int kRank, int kBytes>
__global__ __launch_bounds__(kThreads, 1) void store_tiles(
    const __grid_constant__ tma::TensorMap tiles, const typename Bits<kBytes>::Type* tiles_data,
    const int* starts, const __grid_constant__ tma::TensorMap x,
    typename Bits<kBytes>::Type* x_data, const __grid_constant__ Layout<kRank> layout,
    int tile_bytes) {
  __shared__ tma::u64 full;
  int from[kRank] = {}, to[kRank];
  read_start(starts, blockIdx.x, to);
  if (!engine_stores_at<kBytes>(to) || layout.columns != layout.box[0]) {
    store_by_threads(tiles_data + blockIdx.x * layout.box_elements(), x_data, layout, to);
    return;
  }
  if (threadIdx.x != 0) return;  // As in load_tiles.
  unsigned char* const tile = tma::aligned<128>(dynamic_smem);
  from[kRank - 1] = blockIdx.x * static_cast<int>(layout.box[kRank - 1]);
  load_and_wait(tile, &tiles, &full, from, tile_bytes);
  tma::cp_async_bulk_tensor_store(&x, tile, to);
  wait_for_stores();
}

// Where the engine cannot store the tile as it is, it is laid out anew: what lies before the tensor
// is left out, and if it begins `off` elements behind a multiple of 16 bytes, it becomes two boxes
// that begin on one, its columns moved to the right and what that pushed out of the row:
//
//   tile     | a b c d e f g h |               at column 6 of x, off = 2 where 16 bytes are 4
//   boxes    | n n a b c d e f | g h n n |     at columns 4 and 12; n changes nothing
template <int kRank, int kBytes, tma::Reduction kReduction>
__global__ __launch_bounds__(kThreads, 1) void reduce_tiles(
    const __grid_constant__ tma::TensorMap tiles, const typename Bits<kBytes>::Type* tiles_data,
    const int* starts, const __grid_constant__ tma::TensorMap x,
    const __grid_constant__ tma::TensorMap x_rest, const __grid_constant__ Layout<kRank> layout,
    int tile_bytes, typename Bits<kBytes>::Type neutral) {
  using T = typename Bits<kBytes>::Type;
  constexpr int kStep = kAlignment / kBytes;
  __shared__ tma::u64 full;
  unsigned char* const tile = tma::aligned<128>(dynamic_smem);
  unsigned char* const rest = tma::aligned<128>(tile + tile_bytes);
  int from[kRank] = {}, to[kRank];
  from[kRank - 1] = blockIdx.x * static_cast<int>(layout.box[kRank - 1]);
  read_start(starts, blockIdx.x, to);
  if (engine_stores_at<kBytes>(to)) {
    if (threadIdx.x != 0) return;
    load_and_wait(tile, &tiles, &full, from, tile_bytes);
    tma::cp_reduce_async_bulk_tensor<kReduction>(&x, tile, to);
    wait_for_stores();
    return;
  }

  const T* const source = tiles_data + blockIdx.x * layout.box_elements();
  const int off = to[0] < 0 ? 0 : elements_off<kBytes>(to[0]);
  long long move[kRank];
#pragma unroll
  for (int i = 0; i < kRank; ++i) {
    move[i] = to[i] < 0 ? -static_cast<long long>(to[i]) : 0;
    to[i] = max(to[i], 0);
  }
  move[0] -= off;
  to[0] -= off;
  lay_out(reinterpret_cast<T*>(tile), static_cast<int>(layout.box[0]), source, layout, move,
          neutral);
  move[0] += layout.box[0];
  if (off != 0) lay_out(reinterpret_cast<T*>(rest), kStep, source, layout, move, neutral);
  tma::fence_proxy_async();
  __syncthreads();

  if (threadIdx.x != 0) return;
  tma::cp_reduce_async_bulk_tensor<kReduction>(&x, tile, to);
  if (off != 0) {
    to[0] += static_cast<int>(layout.box[0]);
    tma::cp_reduce_async_bulk_tensor<kReduction>(&x_rest, rest, to);
  }
  wait_for_stores();
}

// A tile per cluster. Each block loads one slice of its rows and sends it to every block; each then
// stores the whole tile to a place of its own in the stack. In shared memory, slices begin every
// `slice_pitch` bytes, at the same place in every block.
template <int kRank, int kBytes, int kBlocks>
__global__ __launch_bounds__(kThreads, 1) void multicast_tiles(
    const __grid_constant__ tma::TensorMap x, const typename Bits<kBytes>::Type* x_data,
    const __grid_constant__ Layout<kRank> layout, const int* starts,
    const __grid_constant__ tma::TensorMap tiles, typename Bits<kBytes>::Type* tiles_data,
    int slice_bytes, int slice_pitch, typename Bits<kBytes>::Type fill) {
  __shared__ tma::u64 full;
  unsigned char* const tile = tma::aligned<128>(dynamic_smem);
  const int rank = tma::cluster_ctarank();
  const int slice_rows = layout.box[kRank - 1] / kBlocks;
  int from[kRank], to[kRank] = {};
  read_start(starts, blockIdx.x / kBlocks, from);
  if (elements_off<kBytes>(from[0]) != 0) {  // The same for all blocks of the cluster.
    load_by_threads(x_data, layout, from, tiles_data + blockIdx.x * layout.box_elements(), fill);
    return;
  }

  // No neighbour may send before the barrier stands and knows what to wait for.
  if (threadIdx.x == 0) {
    tma::mbarrier_init(&full, 1);
    tma::fence_mbarrier_init();
    tma::mbarrier_arrive_expect_tx(&full, kBlocks * slice_bytes);
  }
  __syncwarp();
  tma::barrier_cluster();

  if (threadIdx.x == 0) {
    from[kRank - 1] += rank * slice_rows;
    tma::cp_async_bulk_tensor_multicast(tile + rank * slice_pitch, &x, &full, from,
                                        (1 << kBlocks) - 1);
    tma::mbarrier_wait_parity(&full, 0);

    for (int slice = 0; slice < kBlocks; ++slice) {
      to[kRank - 1] = (blockIdx.x * kBlocks + slice) * slice_rows;
      tma::cp_async_bulk_tensor_store(&tiles, tile + slice * slice_pitch, to);
    }
    wait_for_stores();
  }
  __syncwarp();
  // A block that left could still be written to by its neighbours.
  tma::barrier_cluster();
}
