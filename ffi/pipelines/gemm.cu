// C = A B on tensor cores by mma.sync, with three schedules of the loads, each with and without a
// second level of prefetch. It needs compute capability 8.0.
//
// Three levels of tiles: a block has kBlockM x kBlockN results, a warp a part of them, an mma
// instruction 16 x 8. Along k a step is kBlockK wide, an instruction 32 bytes.
//
// First level: global to shared memory, between the steps along k.
//
//   kSingle     one buffer           load 0 | multiply 0 | load 1 | multiply 1 | ...
//   kRegisters  two buffers          load 0 | multiply 0 | multiply 1 | ...
//               the next tile waits           load 1     | load 2     | ...
//               in registers
//   kAsync      kStages slots        copies of kStages - 1 tiles are under way (cp.async), without
//                                    registers, while one is multiplied
//
// Second level (kPrefetches): shared memory to registers, within a step. The operands of the next
// instructions are loaded while the present ones are multiplied. With kRegisters and kAsync the
// last instructions of a step already load from the next tile: the slot is switched before them.
//
//   without   load 0 | mma 0 | load 1 | mma 1 | ...
//   with      load 0 | mma 0 | mma 1 | ...
//                    | load 1| load 2| ...
//
// A (m x k) and B (k x n) are row major, of any size. Rows of whole 16-byte units are loaded by 16
// bytes, others element by element and without cp.async. What lies outside is zero.
//
// Rows in shared memory are swizzled (swizzle.cuh): ldmatrix and the copies have no bank conflicts.

#include "mma.cuh"
#include "swizzle.cuh"

namespace jaxkernels {

enum class Schedule { kSingle, kRegisters, kAsync };

struct Config {
  using Element = JK_ELEMENT;
  static constexpr int kBlockM = JK_BLOCK_M;
  static constexpr int kBlockN = JK_BLOCK_N;
  static constexpr int kBlockK = JK_BLOCK_K;
  static constexpr int kWarpsM = JK_WARPS_M;
  static constexpr int kWarpsN = JK_WARPS_N;
  static constexpr Schedule kSchedule = Schedule::JK_SCHEDULE;
  static constexpr int kStages = JK_NUM_STAGES;
  static constexpr bool kPrefetches = JK_PREFETCHES;
  // Whether rows are whole 16-byte units.
  static constexpr bool kLhsIsAligned = JK_LHS_IS_ALIGNED;
  static constexpr bool kRhsIsAligned = JK_RHS_IS_ALIGNED;
  // Whether the result has the operands' type; else it is float32.
  static constexpr bool kNarrows = JK_NARROWS;
  // Whether the first warp of the first block records when it does what (`Stamp`).
  static constexpr bool kRecords = JK_RECORDS;
};

using Element = Config::Element;
constexpr int kThreads = 32 * Config::kWarpsM * Config::kWarpsN;
constexpr int kUnitBytes = 16;
constexpr int kUnit = kUnitBytes / Element::kBytes;  // Elements.
constexpr int kWarpM = Config::kBlockM / Config::kWarpsM;
constexpr int kWarpN = Config::kBlockN / Config::kWarpsN;
constexpr int kMmasM = kWarpM / kMmaM;
constexpr int kMmasN = kWarpN / kMmaN;
constexpr int kSteps = Config::kBlockK / kMmaK<Element>;  // Instructions along k in a tile.
constexpr int kSlots = Config::kSchedule == Schedule::kSingle      ? 1
                       : Config::kSchedule == Schedule::kRegisters ? 2
                                                                   : Config::kStages;
// Whether the last operands of a step are loaded from the next tile.
constexpr bool kLooksAhead = Config::kPrefetches && Config::kSchedule != Schedule::kSingle;

// A row-major tile in shared memory, and how threads load it.
template <int kTileRows, int kTileColumns, bool kIsAligned>
struct Tile {
  static constexpr int kRows = kTileRows;
  static constexpr int kRowBytes = kTileColumns * Element::kBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kUnits = kBytes / kUnitBytes / kThreads;  // Of a thread.
  static_assert(kBytes % (kUnitBytes * kThreads) == 0, "each thread loads equally many units");
  static_assert(kRowBytes % 64 == 0, "rows fill a swizzle span");

  // Where byte `byte` of a row lies.
  static constexpr __device__ __forceinline__ u32 at(u32 row, u32 byte) {
    return row * kRowBytes + (byte ^ swizzle<(kRowBytes < 128 ? 64 : 128)>(row));
  }

  struct Place {
    int row, column;
    u32 in_tile;
  };
  static __device__ __forceinline__ Place place(int i) {
    const int unit = i * kThreads + threadIdx.x;
    const int row = unit / (kRowBytes / kUnitBytes);
    const int in_row = unit - row * (kRowBytes / kUnitBytes);
    return {row, in_row * kUnit, at(row, in_row * kUnitBytes)};
  }

  // One unit of the matrix; zeros outside of it.
  static __device__ __forceinline__ uint4 load(const unsigned char* x, int rows, int columns,
                                               int row, int column) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row >= rows) return v;
    const unsigned char* from =
        x + (static_cast<long long>(row) * columns + column) * Element::kBytes;
    if constexpr (kIsAligned) {
      if (column < columns) v = __ldg(reinterpret_cast<const uint4*>(from));
    } else {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Element::kBytes == 4) {
          words[i] = column + i < columns ? reinterpret_cast<const u32*>(from)[i] : 0;
        } else {
          const u16* pair = reinterpret_cast<const u16*>(from) + 2 * i;
          const u32 low = column + 2 * i < columns ? pair[0] : 0;
          const u32 high = column + 2 * i + 1 < columns ? pair[1] : 0;
          words[i] = low | high << 16;
        }
      }
      v = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return v;
  }

  static __device__ __forceinline__ void store(u32 address, uint4 v) {
    store_shared(address, make_float4(__uint_as_float(v.x), __uint_as_float(v.y),
                                      __uint_as_float(v.z), __uint_as_float(v.w)));
  }
};

using LhsTile = Tile<Config::kBlockM, Config::kBlockK, Config::kLhsIsAligned>;
using RhsTile = Tile<Config::kBlockK, Config::kBlockN, Config::kRhsIsAligned>;
constexpr int kSlotBytes = LhsTile::kBytes + RhsTile::kBytes;

static_assert(kWarpM % kMmaM == 0 && kWarpN % (2 * kMmaN) == 0, "pairs of instructions along n");
static_assert(Config::kBlockK % kMmaK<Element> == 0, "whole instructions along k");
static_assert(kSlots * kSlotBytes <= JK_SMEM_BYTES, "what the host gives is enough");

struct Problem {
  int m, n, k;
};

// What the first warp does, in the order of a step. `stamps` has as many numbers for each tile.
enum Stamp { kRequested, kWaited, kMultiplied, kEnded, kStamps };

class Gemm {
 public:
  __device__ __forceinline__ Gemm(const Problem& problem, const unsigned char* lhs,
                                  const unsigned char* rhs, unsigned char* smem, long long* stamps)
      : problem_(problem),
        lhs_(lhs),
        rhs_(rhs),
        smem_(tma::shared_address(smem)),
        stamps_(stamps),
        num_tiles_((problem.k + Config::kBlockK - 1) / Config::kBlockK) {
    const int tiles_n = (problem.n + Config::kBlockN - 1) / Config::kBlockN;
    row_ = blockIdx.x / tiles_n * Config::kBlockM;
    column_ = blockIdx.x % tiles_n * Config::kBlockN;
    const int warp = threadIdx.x / 32;
    warp_row_ = warp / Config::kWarpsN * kWarpM;
    warp_column_ = warp % Config::kWarpsN * kWarpN;
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmasN; ++j) {
#pragma unroll
        for (float& x : acc_[i][j]) x = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (Config::kSchedule == Schedule::kSingle) {
      run_single();
    } else if constexpr (Config::kSchedule == Schedule::kRegisters) {
      run_with_registers();
    } else {
      run_with_copies();
    }
  }

  __device__ __forceinline__ void store(void* out) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmasN; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row_ + warp_row_ + i * kMmaM + lane / 4 + 8 * h;
          const int column = column_ + warp_column_ + j * kMmaN + lane % 4 * 2;
          if (row < problem_.m) store_pair(out, row, column, acc_[i][j] + 2 * h);
        }
      }
    }
  }

 private:
  // ---- Schedules ----

  __device__ __forceinline__ void run_single() {
    for (int tile = 0; tile < num_tiles_; ++tile) {
      record(tile, kRequested);
      load(tile);
      write(0);
      __syncthreads();  // The tile is complete.
      record(tile, kWaited);
      multiply(0);
      record(tile, kMultiplied);
      __syncthreads();  // All warps have read it.
      record(tile, kEnded);
    }
  }

  __device__ __forceinline__ void run_with_registers() {
    load(0);
    write(0);
    __syncthreads();
    if constexpr (kLooksAhead) read(0, 0, 0);
    for (int tile = 0; tile < num_tiles_; ++tile) {
      const int slot = tile % 2;
      const bool has_next = tile + 1 < num_tiles_;
      record(tile, kRequested);
      if (has_next) load(tile + 1);
      record(tile, kWaited);
      if constexpr (kLooksAhead) {
        multiply_ahead(slot, slot ^ 1, [&] {
          record(tile, kMultiplied);
          if (has_next) write(slot ^ 1);
          __syncthreads();
        });
      } else {
        multiply(slot);
        record(tile, kMultiplied);
        if (has_next) write(slot ^ 1);
        __syncthreads();
      }
      record(tile, kEnded);
    }
  }

  __device__ __forceinline__ void run_with_copies() {
    // One group of copies for each tile, also for those that do not exist: groups are counted.
#pragma unroll
    for (int tile = 0; tile < kSlots - 1; ++tile) request(tile, tile);
    if constexpr (kLooksAhead) {
      wait_for_oldest();
      read(0, 0, 0);
    }
    int slot = 0, free_slot = kSlots - 1;
    for (int tile = 0; tile < num_tiles_; ++tile) {
      const int next_slot = slot + 1 == kSlots ? 0 : slot + 1;
      record(tile, kRequested);
      if constexpr (kLooksAhead) {
        request(tile + kSlots - 1, free_slot);
        record(tile, kWaited);
        multiply_ahead(slot, next_slot, [&] {
          record(tile, kMultiplied);
          wait_for_oldest();
        });
      } else {
        wait_for_oldest();
        record(tile, kWaited);
        request(tile + kSlots - 1, free_slot);
        multiply(slot);
        record(tile, kMultiplied);
      }
      record(tile, kEnded);
      free_slot = slot;
      slot = next_slot;
    }
    cp_async_wait_group<0>();
  }

  // The oldest tile under way has arrived, of all threads; and all warps have read the tile before.
  __device__ __forceinline__ void wait_for_oldest() {
    cp_async_wait_group<kSlots - 2>();
    __syncthreads();
  }

  // ---- Global to shared memory ----

  __device__ __forceinline__ void load(int tile) {
    const int k = tile * Config::kBlockK;
#pragma unroll
    for (int i = 0; i < LhsTile::kUnits; ++i) {
      const auto place = LhsTile::place(i);
      lhs_units_[i] =
          LhsTile::load(lhs_, problem_.m, problem_.k, row_ + place.row, k + place.column);
    }
#pragma unroll
    for (int i = 0; i < RhsTile::kUnits; ++i) {
      const auto place = RhsTile::place(i);
      rhs_units_[i] =
          RhsTile::load(rhs_, problem_.k, problem_.n, k + place.row, column_ + place.column);
    }
  }

  __device__ __forceinline__ void write(int slot) {
    const u32 to = smem_ + slot * kSlotBytes;
#pragma unroll
    for (int i = 0; i < LhsTile::kUnits; ++i) {
      LhsTile::store(to + LhsTile::place(i).in_tile, lhs_units_[i]);
    }
#pragma unroll
    for (int i = 0; i < RhsTile::kUnits; ++i) {
      RhsTile::store(to + LhsTile::kBytes + RhsTile::place(i).in_tile, rhs_units_[i]);
    }
  }

  __device__ __forceinline__ void request(int tile, int slot) {
    if (tile < num_tiles_) {
      const u32 to = smem_ + slot * kSlotBytes;
      const int k = tile * Config::kBlockK;
      request_tile<LhsTile, Config::kLhsIsAligned>(to, lhs_, problem_.m, problem_.k, row_, k);
      request_tile<RhsTile, Config::kRhsIsAligned>(to + LhsTile::kBytes, rhs_, problem_.k,
                                                   problem_.n, k, column_);
    }
    cp_async_commit_group();
  }

  template <typename ATile, bool kIsAligned>
  static __device__ __forceinline__ void request_tile(u32 to, const unsigned char* x, int rows,
                                                      int columns, int row, int column) {
#pragma unroll
    for (int i = 0; i < ATile::kUnits; ++i) {
      const auto place = ATile::place(i);
      const int at_row = row + place.row, at_column = column + place.column;
      if constexpr (kIsAligned) {
        const bool inside = at_row < rows && at_column < columns;
        const long long element = inside ? static_cast<long long>(at_row) * columns + at_column : 0;
        cp_async<kUnitBytes>(to + place.in_tile, x + element * Element::kBytes, inside);
      } else {
        ATile::store(to + place.in_tile, ATile::load(x, rows, columns, at_row, at_column));
      }
    }
  }

  // ---- Shared memory to registers, and products ----

  // Loads the operands of instructions `step` along k.
  __device__ __forceinline__ void read(int slot, int step, int buffer) {
    const u32 lhs = smem_ + slot * kSlotBytes, rhs = lhs + LhsTile::kBytes;
    const u32 lane = threadIdx.x % 32;
    // Four matrices of 8 rows by 16 bytes: rows 0 to 7 and 8 to 15, of both halves of k.
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
      u32(&to)[4] = lhs_registers_[buffer][i];
      const u32 row = warp_row_ + i * kMmaM + lane % 16;
      ldmatrix_x4(lhs + LhsTile::at(row, step * 32 + lane / 16 * 16), to[0], to[1], to[2], to[3]);
    }
#pragma unroll
    for (int j = 0; j < kMmasN; j += 2) {
      u32(&first)[2] = rhs_registers_[buffer][j];
      u32(&second)[2] = rhs_registers_[buffer][j + 1];
      if constexpr (Element::kBytes == 2) {
        const u32 row = step * kMmaK<Element> + lane % 16;
        const u32 column = warp_column_ + j * kMmaN + lane / 16 * kMmaN;
        ldmatrix_x4_trans(rhs + RhsTile::at(row, column * 2), first[0], first[1], second[0],
                          second[1]);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 row = step * kMmaK<Element> + half * 4 + lane % 4;
          const u32 column = warp_column_ + j * kMmaN + lane / 4;
          first[half] = load_shared(rhs + RhsTile::at(row, column * 4));
          second[half] = load_shared(rhs + RhsTile::at(row, (column + kMmaN) * 4));
        }
      }
    }
    if constexpr (Element::kBytes == 4) round_operands(buffer);
  }

  __device__ __forceinline__ void round_operands(int buffer) {
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (u32& x : lhs_registers_[buffer][i]) x = rounded_to_tf32(x);
    }
#pragma unroll
    for (int j = 0; j < kMmasN; ++j) {
#pragma unroll
      for (u32& x : rhs_registers_[buffer][j]) x = rounded_to_tf32(x);
    }
  }

  __device__ __forceinline__ void multiply_step(int buffer) {
#pragma unroll
    for (int i = 0; i < kMmasM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmasN; ++j) {
        mma<Element>(acc_[i][j], lhs_registers_[buffer][i], rhs_registers_[buffer][j]);
      }
    }
  }

  // One tile. With kPrefetches, operands are read one step ahead.
  __device__ __forceinline__ void multiply(int slot) {
    if constexpr (Config::kPrefetches) read(slot, 0, 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (Config::kPrefetches) {
        if (step + 1 < kSteps) read(slot, step + 1, (step + 1) % 2);
        multiply_step(step % 2);
      } else {
        read(slot, step, 0);
        multiply_step(0);
      }
    }
  }

  // One tile whose first operands have been read. Before the last products it calls `switch_slots`,
  // which makes the next tile readable, and reads that one's first operands.
  template <typename Switch>
  __device__ __forceinline__ void multiply_ahead(int slot, int next_slot, Switch switch_slots) {
    static_assert(!kLooksAhead || kSteps % 2 == 0, "a tile begins with the first registers");
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        read(slot, step + 1, (step + 1) % 2);
      } else {
        switch_slots();
        read(next_slot, 0, 0);
      }
      multiply_step(step % 2);
    }
  }

  // ---- Results ----

  template <typename T = Element>
  __device__ __forceinline__ void store_pair(void* out, int row, int column,
                                             const float* values) const {
    const long long at = static_cast<long long>(row) * problem_.n + column;
    if constexpr (Config::kNarrows && T::kBytes == 2) {
      const u32 packed = T::pack(values[0], values[1]);
      u16* to = static_cast<u16*>(out) + at;
      if (problem_.n % 2 == 0) {
        if (column < problem_.n) *reinterpret_cast<u32*>(to) = packed;
      } else {
        if (column < problem_.n) to[0] = packed & 0xffff;
        if (column + 1 < problem_.n) to[1] = packed >> 16;
      }
    } else {
      float* to = static_cast<float*>(out) + at;
      if (column < problem_.n) to[0] = values[0];
      if (column + 1 < problem_.n) to[1] = values[1];
    }
  }

  __device__ __forceinline__ void record(int tile, Stamp stamp) const {
    if constexpr (Config::kRecords) {
      if (blockIdx.x == 0 && threadIdx.x == 0) stamps_[tile * kStamps + stamp] = clock64();
    }
  }

  const Problem& problem_;
  const unsigned char* lhs_;
  const unsigned char* rhs_;
  const u32 smem_;
  long long* stamps_;
  const int num_tiles_;
  int row_, column_, warp_row_, warp_column_;
  uint4 lhs_units_[LhsTile::kUnits], rhs_units_[RhsTile::kUnits];
  u32 lhs_registers_[Config::kPrefetches ? 2 : 1][kMmasM][4];
  u32 rhs_registers_[Config::kPrefetches ? 2 : 1][kMmasN][2];
  float acc_[kMmasM][kMmasN][4];
};

__global__ void __launch_bounds__(kThreads)
    gemm(const unsigned char* lhs, const unsigned char* rhs, void* out, long long* stamps,
         const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Gemm gemm(problem, lhs, rhs, dynamic_smem, stamps);
  gemm.run();
  gemm.store(out);
}

}  // namespace jaxkernels
