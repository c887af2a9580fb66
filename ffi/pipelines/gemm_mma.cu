// out (m x n) = lhs (m x k) * rhs (k x n) by mma.sync, with a choice of schedules. The instructions
// are those of Ampere (sm_80): cp.async, ldmatrix, mma.sync.
//
// Three levels of tiles: a CTA computes kBlockM x kBlockN of the result, each of its warps
// kWarpM x kWarpN of that, each mma 16 x 8. The CTA loads tiles of kBlockK along k into slots of
// shared memory. A warp loads fragments (32 bytes along k) of a slot into registers.
//
// Two levels of latency can be hidden. The schedule hides that of global memory:
//
//   kSingleStage     one slot        load | barrier | multiply | barrier | load ...
//   kDoubleBuffered  two slots       the next tile is loaded into registers while this one is
//                                    multiplied, then stored to the other slot
//   kMultiStage      kStages slots   cp.async writes kStages - 1 tiles to shared memory while
//                                    one is multiplied; a ring of slots
//
// kPrefetch hides that of shared memory: a warp loads fragment i + 1 while it multiplies fragment
// i, and loads the first fragment of the next tile while it multiplies the last of this one.
//
// Both operands are row-major. An operand whose rows are whole 16-byte units is loaded in such
// units, any other element by element. Elements outside an operand are zeros in shared memory.
//
// Layouts in shared memory (16-byte units, swizzle.cuh):
//
//   lhs, kBlockM rows of kBlockK       the swizzle of TMA: ldmatrix reads a column of 8 rows, which
//                                      lie in 8 different units of a 128-byte line
//   rhs, kBlockK rows of kBlockN       16-bit types: unit xor row % 8. ldmatrix.trans reads 8 rows
//                                      of one column of units, and transposes
//                                      TF32: unit xor 2 (row % 4). ldmatrix transposes no 32-bit
//                                      elements; see `load_rhs`
//
// gemm_mma.py compiles this file with the macros that `Config` reads. With JK_TIMELINE the kernel
// also records when the warps of one CTA load, wait and multiply.

#include "mma.cuh"
#include "swizzle.cuh"

namespace jaxkernels {

enum class Schedule { kSingleStage, kDoubleBuffered, kMultiStage };

struct Config {
  using Input = JK_INPUT;
  using Output = JK_OUTPUT;
  static constexpr int kBlockM = JK_BLOCK_M;
  static constexpr int kBlockN = JK_BLOCK_N;
  static constexpr int kBlockK = JK_BLOCK_K;
  static constexpr int kWarpsM = JK_WARPS_M;
  static constexpr int kWarpsN = JK_WARPS_N;
  static constexpr Schedule kSchedule = Schedule::JK_SCHEDULE;
  static constexpr int kStages = JK_NUM_STAGES;
  static constexpr bool kPrefetch = JK_PREFETCH_FRAGMENTS;
  // Rows of the result's tiles that are walked together, for reuse in L2.
  static constexpr int kStrip = JK_STRIP;
  // Whether rows are whole 16-byte units.
  static constexpr bool kLhsIsAligned = JK_LHS_IS_ALIGNED;
  static constexpr bool kRhsIsAligned = JK_RHS_IS_ALIGNED;
};

constexpr int kUnitBytes = 16;
// Bytes of a fragment along k: 16 elements of 16 bits, or 8 of TF32.
constexpr int kFragmentBytes = 32;
constexpr int kMmaM = 16, kMmaN = 8;

using Input = Config::Input;
constexpr bool kIsTf32 = Input::kBytes == 4;
constexpr int kThreads = 32 * Config::kWarpsM * Config::kWarpsN;
constexpr int kWarpM = Config::kBlockM / Config::kWarpsM;
constexpr int kWarpN = Config::kBlockN / Config::kWarpsN;
constexpr int kMmasM = kWarpM / kMmaM, kMmasN = kWarpN / kMmaN;
constexpr int kFragmentK = kFragmentBytes / Input::kBytes;
constexpr int kFragments = Config::kBlockK / kFragmentK;
static_assert(kWarpM % kMmaM == 0 && kWarpN % 32 == 0, "a warp stores 32 columns at a time");
static_assert(kFragments % 2 == 0, "the buffer of a fragment is its number in the tile, modulo 2");

constexpr int kLhsRowBytes = Config::kBlockK * Input::kBytes;
constexpr int kRhsRowBytes = Config::kBlockN * Input::kBytes;
constexpr int kLhsBytes = Config::kBlockM * kLhsRowBytes;
constexpr int kRhsBytes = Config::kBlockK * kRhsRowBytes;
constexpr int kSlotBytes = kLhsBytes + kRhsBytes;
static_assert(Config::kStages * kSlotBytes == JK_SMEM_BYTES, "what the host gives is enough");

// Where a byte of a tile lies in its slot.
struct LhsLayout {
  static constexpr int kRows = Config::kBlockM, kRowBytes = kLhsRowBytes;
  static __device__ __forceinline__ u32 offset(u32 row, u32 byte) {
    return swizzled<kRowBytes>(row, byte);
  }
};
struct RhsLayout {
  static constexpr int kRows = Config::kBlockK, kRowBytes = kRhsRowBytes;
  static __device__ __forceinline__ u32 offset(u32 row, u32 byte) {
    if constexpr (kIsTf32) return row * kRowBytes + (byte ^ row % 4 * 2 * kUnitBytes);
    if constexpr (kRowBytes < 128) return swizzled<kRowBytes>(row, byte);
    return row * kRowBytes + (byte ^ row % 8 * kUnitBytes);
  }
};

// ---- Global to shared memory -------------------------------------------------------------------

// One thread's part of an operand's tiles: kUnits units, kRowStep rows apart.
template <typename Layout, bool kIsAligned>
struct TileLoader {
  static constexpr int kUnitsInRow = Layout::kRowBytes / kUnitBytes;
  static constexpr int kUnits = Layout::kRows * kUnitsInRow / kThreads;
  static constexpr int kRowStep = kThreads / kUnitsInRow;
  static_assert(kUnits * kThreads == Layout::kRows * kUnitsInRow, "threads have equal parts");
  static_assert(kRowStep * kUnitsInRow == kThreads, "a thread's units lie in one column");

  const unsigned char* from;  // The thread's first unit in the next tile.
  long long row_bytes;        // A row of the operand.
  int rows_left, bytes_left;  // How much of the operand follows that unit; negative outside.
  u32 row, byte;              // Where that unit lies in the tile.
  uint4 units[kUnits];        // They hold a tile between `fetch` and `put`.

  // `first_row` and `first_byte`: where the first tile begins in the operand.
  __device__ __forceinline__ TileLoader(const unsigned char* operand, int rows, int row_bytes,
                                        int first_row, int first_byte)
      : row_bytes(row_bytes),
        row(threadIdx.x / kUnitsInRow),
        byte(threadIdx.x % kUnitsInRow * kUnitBytes) {
    const int at_row = first_row + row, at_byte = first_byte + byte;
    from = operand + at_row * this->row_bytes + at_byte;
    rows_left = rows - at_row;
    bytes_left = row_bytes - at_byte;
  }

  __device__ __forceinline__ void advance(int rows, int bytes) {
    from += rows * row_bytes + bytes;
    rows_left -= rows;
    bytes_left -= bytes;
  }

  __device__ __forceinline__ uint4 fetch_unit(int i) const {
    const unsigned char* p = from + i * kRowStep * row_bytes;
    uint4 unit = make_uint4(0, 0, 0, 0);
    if (i * kRowStep >= rows_left) return unit;
    if constexpr (kIsAligned) {
      if (bytes_left > 0) unit = __ldg(reinterpret_cast<const uint4*>(p));
    } else if constexpr (kIsTf32) {
      const u32* words = reinterpret_cast<const u32*>(p);
      if (bytes_left > 0) unit.x = __ldg(words);
      if (bytes_left > 4) unit.y = __ldg(words + 1);
      if (bytes_left > 8) unit.z = __ldg(words + 2);
      if (bytes_left > 12) unit.w = __ldg(words + 3);
    } else {
      const u16* halves = reinterpret_cast<const u16*>(p);
      const auto half = [&](int j) { return bytes_left > 2 * j ? u32{__ldg(halves + j)} : 0; };
      const auto word = [&](int j) { return half(2 * j) | half(2 * j + 1) << 16; };
      unit = make_uint4(word(0), word(1), word(2), word(3));
    }
    return unit;
  }

  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i] = fetch_unit(i);
  }

  __device__ __forceinline__ void put(u32 tile) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      store_shared(tile + Layout::offset(row + i * kRowStep, byte), units[i]);
    }
  }

  // Copies a tile without registers in between. Units that are loaded by elements have arrived when
  // this returns.
  __device__ __forceinline__ void copy(u32 tile) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const u32 to = tile + Layout::offset(row + i * kRowStep, byte);
      if constexpr (kIsAligned) {
        cp_async<16>(to, from + i * kRowStep * row_bytes,
                     i * kRowStep < rows_left && bytes_left > 0);
      } else {
        store_shared(to, fetch_unit(i));
      }
    }
  }
};

// Both operands' tiles, one after the other along k.
struct Loader {
  TileLoader<LhsLayout, Config::kLhsIsAligned> lhs;
  TileLoader<RhsLayout, Config::kRhsIsAligned> rhs;

  __device__ __forceinline__ void advance() {
    lhs.advance(0, kLhsRowBytes);
    rhs.advance(Config::kBlockK, 0);
  }
  // The next tile into registers.
  __device__ __forceinline__ void fetch() {
    lhs.fetch();
    rhs.fetch();
    advance();
  }
  // From there into a slot.
  __device__ __forceinline__ void put(u32 slot) const {
    lhs.put(slot);
    rhs.put(slot + kLhsBytes);
  }
  // The next tile into a slot, asynchronously.
  __device__ __forceinline__ void copy(u32 slot) {
    lhs.copy(slot);
    rhs.copy(slot + kLhsBytes);
    advance();
  }
};

// ---- Shared memory to registers, and products --------------------------------------------------

struct Fragment {
  u32 lhs[kMmasM][4];
  u32 rhs[kMmasN][2];
};

// One warp's part of the CTA's tile.
struct WarpTile {
  int row, column;             // Where its first element lies in the CTA's tile.
  u32 lhs_offset, rhs_offset;  // In a slot, where this lane begins to read.
  float acc[kMmasM][kMmasN][4];

  __device__ __forceinline__ WarpTile() : acc{} {
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    row = warp / Config::kWarpsN * kWarpM;
    column = warp % Config::kWarpsN * kWarpN;
    // The four matrices of ldmatrix: the upper and lower 8 of 16 rows, in two units.
    lhs_offset = LhsLayout::offset(row + lane % 16, lane / 16 * kUnitBytes);
    const u32 columns = column * Input::kBytes;
    rhs_offset =
        kLhsBytes + (kIsTf32 ? RhsLayout::offset(lane % 4, columns + lane / 4 * kUnitBytes)
                             : RhsLayout::offset(lane % 16, columns + lane / 16 * kUnitBytes));
  }

  // Moves by a power of two of bytes along a row are an xor, as the swizzle is: at the lane's first
  // place these bits of the byte number are those of the swizzle alone.
  __device__ __forceinline__ void load_lhs(u32 slot, int fragment, u32 (&to)[kMmasM][4]) const {
    const u32 address = (slot + lhs_offset) ^ (fragment * kFragmentBytes);
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
      ldmatrix_x4(address + i * kMmaM * kLhsRowBytes, to[i][0], to[i][1], to[i][2], to[i][3]);
    }
  }

  // 16-bit types: one ldmatrix transposes 16 rows of 16 columns.
  //
  // TF32: lane (g, t) needs column g of rows t and t + 4 for each mma. It reads 16 bytes of them at
  // once, four neighbouring columns, and gives one to each of four mma: column g of mma j is column
  // 4g + j of these 32. The results have the same order. `store` undoes it.
  __device__ __forceinline__ void load_rhs(u32 slot, int fragment, u32 (&to)[kMmasN][2]) const {
    const u32 rows = fragment * kFragmentK * kRhsRowBytes;
    if constexpr (kIsTf32) {
#pragma unroll
      for (int j = 0; j < kMmasN; j += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 v = load_shared_16(slot + rhs_offset + rows + half * 4 * kRhsRowBytes +
                                         j * kMmaN * Input::kBytes);
          to[j][half] = v.x;
          to[j + 1][half] = v.y;
          to[j + 2][half] = v.z;
          to[j + 3][half] = v.w;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kMmasN; j += 2) {
        const u32 address = (slot + rhs_offset) ^ (j * kMmaN * Input::kBytes);
        ldmatrix_x4_trans(address + rows, to[j][0], to[j][1], to[j + 1][0], to[j + 1][1]);
      }
    }
  }

  __device__ __forceinline__ void load(u32 slot, int fragment, Fragment& to) const {
    load_lhs(slot, fragment, to.lhs);
    load_rhs(slot, fragment, to.rhs);
  }

  __device__ __forceinline__ void multiply(Fragment& with) {
    if constexpr (kIsTf32) {
#pragma unroll
      for (auto& registers : with.lhs) {
#pragma unroll
        for (u32& bits : registers) bits = to_tf32(bits);
      }
#pragma unroll
      for (auto& registers : with.rhs) {
#pragma unroll
        for (u32& bits : registers) bits = to_tf32(bits);
      }
    }
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmasN; ++j) mma<Input>(acc[i][j], with.lhs[i], with.rhs[j]);
    }
  }

  // All fragments of a slot.
  __device__ __forceinline__ void multiply_slot(u32 slot) {
    if constexpr (Config::kPrefetch) {
      Fragment fragments[2];
      load(slot, 0, fragments[0]);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        if (i + 1 < kFragments) load(slot, i + 1, fragments[(i + 1) % 2]);
        multiply(fragments[i % 2]);
      }
    } else {
      // Unrolled, ptxas would issue loads of the next fragment among the products of this one.
#pragma unroll 1
      for (int i = 0; i < kFragments; ++i) {
        Fragment fragment;
        load(slot, i, fragment);
        multiply(fragment);
      }
    }
  }
};

// ---- The timeline ------------------------------------------------------------------------------

// The events of a tile that are recorded. gemm_mma.py names them in the same order.
enum Event { kLoadBegin, kLoadEnd, kWaitBegin, kWaitEnd, kComputeBegin, kComputeEnd, kEvents };

#ifdef JK_TIMELINE
// stamps[warp][tile][event], cycles. After the tiles: the clock and the timer at the warp's begin
// and end.
struct Timeline {
  u32* stamps;  // Of this warp, or null in a thread that records nothing.
  int tiles;

  __device__ __forceinline__ Timeline(u32* all_stamps, int recorded_cta, int tiles)
      : stamps(nullptr), tiles(tiles) {
    if (blockIdx.x == recorded_cta && threadIdx.x % 32 == 0) {
      stamps = all_stamps + threadIdx.x / 32 * (tiles + 1LL) * kEvents;
    }
  }
  __device__ __forceinline__ void stamp(int tile, Event event) const {
    if (stamps != nullptr) stamps[tile * kEvents + event] = clock_cycles();
  }
  __device__ __forceinline__ void begin() const {
    if (stamps == nullptr) return;
    stamps[tiles * kEvents] = clock_cycles();
    stamps[tiles * kEvents + 1] = timer_nanoseconds();
  }
  __device__ __forceinline__ void end() const {
    if (stamps == nullptr) return;
    stamps[tiles * kEvents + 2] = clock_cycles();
    stamps[tiles * kEvents + 3] = timer_nanoseconds();
  }
};
#else
struct Timeline {
  __device__ __forceinline__ void stamp(int, Event) const {}
};
#endif

// ---- The schedules -----------------------------------------------------------------------------

// One slot. Loads and products of a CTA never overlap; only another CTA of the SM can fill the gap.
__device__ __forceinline__ void single_stage(Loader& loader, WarpTile& warp_tile, u32 smem,
                                             int tiles, const Timeline& timeline) {
  for (int tile = 0; tile < tiles; ++tile) {
    timeline.stamp(tile, kLoadBegin);
    loader.fetch();
    timeline.stamp(tile, kLoadEnd);
    timeline.stamp(tile, kWaitBegin);
    loader.put(smem);  // Waits for the loads.
    __syncthreads();   // All threads have stored.
    timeline.stamp(tile, kWaitEnd);
    timeline.stamp(tile, kComputeBegin);
    warp_tile.multiply_slot(smem);
    timeline.stamp(tile, kComputeEnd);
    __syncthreads();  // All warps have read the slot: it may be overwritten.
  }
}

// Stores a fetched tile to the slot that the tile before the last one was read from. All warps had
// read it when they met at the last barrier.
__device__ __forceinline__ void put_and_meet(const Loader& loader, u32 slot, int tile,
                                             const Timeline& timeline) {
  timeline.stamp(tile, kWaitBegin);
  loader.put(slot);
  __syncthreads();
  timeline.stamp(tile, kWaitEnd);
}

__device__ __forceinline__ void fetch_tile(Loader& loader, int tile, const Timeline& timeline) {
  timeline.stamp(tile, kLoadBegin);
  loader.fetch();
  timeline.stamp(tile, kLoadEnd);
}

// Two slots. The loads of the next tile are in flight, to registers, during the products of this
// one.
__device__ __forceinline__ void double_buffered(Loader& loader, WarpTile& warp_tile, u32 smem,
                                                int tiles, const Timeline& timeline) {
  u32 slot = smem;
  const auto other = [&](u32 slot) { return smem + (slot == smem ? kSlotBytes : 0); };
  fetch_tile(loader, 0, timeline);
  put_and_meet(loader, slot, 0, timeline);
  if constexpr (!Config::kPrefetch) {
    for (int tile = 0; tile < tiles; ++tile) {
      const bool has_next = tile + 1 < tiles;
      if (has_next) fetch_tile(loader, tile + 1, timeline);
      timeline.stamp(tile, kComputeBegin);
      warp_tile.multiply_slot(slot);
      timeline.stamp(tile, kComputeEnd);
      slot = other(slot);
      if (has_next) put_and_meet(loader, slot, tile + 1, timeline);
    }
  } else {
    Fragment fragments[2];
    warp_tile.load(slot, 0, fragments[0]);
    for (int tile = 0; tile < tiles; ++tile) {
      const bool has_next = tile + 1 < tiles;
      timeline.stamp(tile, kComputeBegin);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        if (i == kFragments - 1) {
          // This warp has read all of its slot. The next tile's first fragment comes from the
          // other.
          slot = other(slot);
          if (has_next) put_and_meet(loader, slot, tile + 1, timeline);
        }
        if (i + 1 < kFragments || has_next) {
          warp_tile.load(slot, (i + 1) % kFragments, fragments[(i + 1) % 2]);
        }
        if (i == 0 && has_next) fetch_tile(loader, tile + 1, timeline);
        warp_tile.multiply(fragments[i % 2]);
      }
      timeline.stamp(tile, kComputeEnd);
    }
  }
}

// A ring of slots. Tile i is in slot i % kStages.
struct Ring {
  u32 begin, read, write;  // Slots: the first, the next to be read, the next to be written.

  __device__ __forceinline__ u32 after(u32 slot) const {
    slot += kSlotBytes;
    return slot == begin + Config::kStages * kSlotBytes ? begin : slot;
  }
};

// Issues the copy of a tile. Behind the last tile it makes an empty group, so that `wait_and_meet`
// may count groups.
__device__ __forceinline__ void copy_tile(Loader& loader, Ring& ring, int tile, int tiles,
                                          const Timeline& timeline) {
  if (tile < tiles) {
    timeline.stamp(tile, kLoadBegin);
    loader.copy(ring.write);
    timeline.stamp(tile, kLoadEnd);
  }
  ring.write = ring.after(ring.write);
  cp_async_commit_group();
}

// Waits for the oldest of kStages - 1 tiles in flight. After the barrier every thread's part of it
// has arrived, and all warps have read the slot before it, which may be overwritten.
__device__ __forceinline__ void wait_and_meet(int tile, int tiles, const Timeline& timeline) {
  if (tile < tiles) timeline.stamp(tile, kWaitBegin);
  cp_async_wait_group<Config::kStages - 2>();
  __syncthreads();
  if (tile < tiles) timeline.stamp(tile, kWaitEnd);
}

__device__ __forceinline__ void multi_stage(Loader& loader, WarpTile& warp_tile, u32 smem,
                                            int tiles, const Timeline& timeline) {
  constexpr int kAhead = Config::kStages - 1;
  Ring ring{smem, smem, smem};
#pragma unroll
  for (int tile = 0; tile < kAhead; ++tile) copy_tile(loader, ring, tile, tiles, timeline);
  if constexpr (!Config::kPrefetch) {
    for (int tile = 0; tile < tiles; ++tile) {
      wait_and_meet(tile, tiles, timeline);
      copy_tile(loader, ring, tile + kAhead, tiles, timeline);
      timeline.stamp(tile, kComputeBegin);
      warp_tile.multiply_slot(ring.read);
      timeline.stamp(tile, kComputeEnd);
      ring.read = ring.after(ring.read);
    }
  } else {
    Fragment fragments[2];
    wait_and_meet(0, tiles, timeline);
    warp_tile.load(ring.read, 0, fragments[0]);
    for (int tile = 0; tile < tiles; ++tile) {
      timeline.stamp(tile, kComputeBegin);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        if (i == kFragments - 1) {
          // This warp has read all of its slot. The next tile's first fragment comes from the next.
          wait_and_meet(tile + 1, tiles, timeline);
          ring.read = ring.after(ring.read);
        }
        // Behind the last tile, loads a fragment that no product uses.
        warp_tile.load(ring.read, (i + 1) % kFragments, fragments[(i + 1) % 2]);
        if (i == 0) copy_tile(loader, ring, tile + kAhead, tiles, timeline);
        warp_tile.multiply(fragments[i % 2]);
      }
      timeline.stamp(tile, kComputeEnd);
    }
  }
  cp_async_wait_group<0>();  // Only empty groups are left.
}

// ---- Registers to global memory ----------------------------------------------------------------

template <typename Output>
__device__ __forceinline__ void store_element(unsigned char* out, long long at, float value) {
  if constexpr (Output::kBytes == 4) {
    reinterpret_cast<float*>(out)[at] = value;
  } else {
    reinterpret_cast<u16*>(out)[at] = static_cast<u16>(Output::pack(value, 0.f));
  }
}

template <typename Output>
__device__ __forceinline__ void store_pair(unsigned char* out, long long at, float a, float b) {
  if constexpr (Output::kBytes == 4) {
    reinterpret_cast<float2*>(out)[at / 2] = float2{a, b};
  } else {
    reinterpret_cast<u32*>(out)[at / 2] = Output::pack(a, b);
  }
}

// Stores neighbouring elements of a row: kCount of them, of which those left of `n` exist.
template <typename Output, int kCount>
__device__ __forceinline__ void store_run(unsigned char* out, long long row, int column, int n,
                                          const float (&values)[kCount]) {
  const long long at = row * n + column;
  if (n % 2 == 0) {  // Pairs are aligned, and lie inside or outside as a whole.
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      if (column + i < n) store_pair<Output>(out, at + i, values[i], values[i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (column + i < n) store_element<Output>(out, at + i, values[i]);
    }
  }
}

template <typename Output>
__device__ __forceinline__ void store(const WarpTile& warp_tile, unsigned char* out, int first_row,
                                      int first_column, int m, int n) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_tile.row + i * kMmaM + half * 8 + g;
      if (row >= m) continue;
      const int column = first_column + warp_tile.column;
      const auto& acc = warp_tile.acc[i];
#pragma unroll
      for (int j = 0; j < kMmasN; j += 4) {
        if constexpr (kIsTf32) {
          // Column c of mma j is column 4c + j: this lane's are eight neighbours (see `load_rhs`).
          const float run[8] = {acc[j][2 * half],         acc[j + 1][2 * half],
                                acc[j + 2][2 * half],     acc[j + 3][2 * half],
                                acc[j][2 * half + 1],     acc[j + 1][2 * half + 1],
                                acc[j + 2][2 * half + 1], acc[j + 3][2 * half + 1]};
          store_run<Output>(out, row, column + j * kMmaN + 8 * t, n, run);
        } else {
#pragma unroll
          for (int l = j; l < j + 4; ++l) {
            const float run[2] = {acc[l][2 * half], acc[l][2 * half + 1]};
            store_run<Output>(out, row, column + l * kMmaN + 2 * t, n, run);
          }
        }
      }
    }
  }
}

// ---- The kernel --------------------------------------------------------------------------------

struct Place {
  int row, column;
};

// The CTA's tile of the result. Strips of kStrip rows of tiles are walked column by column, so that
// CTAs that run at the same time share operands in L2.
__device__ __forceinline__ Place place_of(int m, int n) {
  const int rows = (m - 1) / Config::kBlockM + 1, columns = (n - 1) / Config::kBlockN + 1;
  const int strip = blockIdx.x / (Config::kStrip * columns);
  const int in_strip = blockIdx.x % (Config::kStrip * columns);
  const int first = strip * Config::kStrip;
  const int height = min(Config::kStrip, rows - first);
  return {(first + in_strip % height) * Config::kBlockM, in_strip / height * Config::kBlockN};
}

__global__ __launch_bounds__(kThreads,
                             JK_CTAS_PER_SM) void gemm_mma(const unsigned char* __restrict__ lhs,
                                                           const unsigned char* __restrict__ rhs,
                                                           unsigned char* __restrict__ out,
#ifdef JK_TIMELINE
                                                           u32* __restrict__ stamps,
                                                           int recorded_cta,
#endif
                                                           int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const u32 smem = tma::shared_address(dynamic_smem);
  const Place place = place_of(m, n);
  const int tiles = (k - 1) / Config::kBlockK + 1;
#ifdef JK_TIMELINE
  const Timeline timeline(stamps, recorded_cta, tiles);
  timeline.begin();
#else
  const Timeline timeline;
#endif

  Loader loader{{lhs, m, k * Input::kBytes, place.row, 0},
                {rhs, k, n * Input::kBytes, 0, place.column * Input::kBytes}};
  WarpTile warp_tile;
  if constexpr (Config::kSchedule == Schedule::kSingleStage) {
    single_stage(loader, warp_tile, smem, tiles, timeline);
  } else if constexpr (Config::kSchedule == Schedule::kDoubleBuffered) {
    double_buffered(loader, warp_tile, smem, tiles, timeline);
  } else {
    multi_stage(loader, warp_tile, smem, tiles, timeline);
  }
  store<Config::Output>(warp_tile, out, place.row, place.column, m, n);
#ifdef JK_TIMELINE
  timeline.end();
#endif
}

}  // namespace jaxkernels
