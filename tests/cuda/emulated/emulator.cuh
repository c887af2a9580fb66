// Runs a CUDA kernel of warps, clusters and asynchronous copies on a CPU, to see whether it can
// wait for ever, reuse a buffer too early or leave too early: the headers beside this file stand in
// for those of the engine.
//
// Every CUDA thread is a fiber; blocks of one cluster run together, clusters one after the other
// or, for kernels whose blocks wait for each other, all of the grid at once. What the hardware does
// by itself (copies, products, arrivals at another block) is done as late as the program allows, or
// at a random moment before, and blocks run at random speeds. Registers and time are not modelled.
//
// Proxies are: the copy engine and wgmma (the async proxy) may not touch a byte of shared memory
// that a thread last wrote or, for a copy into it, read the ordinary way (the generic proxy) and
// did not fence with fence.proxy.async before the copy or product was issued.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct Extent {
  unsigned x;
};
inline Extent threadIdx, blockIdx, gridDim, blockDim;

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
using std::max;
using std::min;

namespace emulator {

// Arrivals of a known number of threads.
struct Barrier {
  int arrived = 0, phase = 0;
  void arrive(int count) {
    if (++arrived == count) arrived = 0, ++phase;
  }
};

struct Mbarrier {
  int count = 0, pending = 0, bytes = 0, phase = 0;
  bool is_fenced = false;  // Since it was initialised: the engine and other blocks know it.
  void settle() {
    if (pending == 0 && bytes == 0) ++phase, pending = count;
  }
};

struct Warp {
  Barrier barrier;
  uint32_t exchanged[32][8];
};

constexpr size_t kSmemBytes = 256 * 1024;
// Static shared memory comes before it. Dynamic memory is aligned as its declaration asks for, and
// to no more: `smem_alignment` bytes behind the multiple of 1024.
constexpr size_t kDynamicSmem = 1024;

// The last ordinary access of a thread to a byte of shared memory, and its fence since.
struct Access {
  uint32_t thread;     // 1 + its index in the cluster; 0 where there was none.
  uint32_t fenced_at;  // The number of the fence; 0 where there was none.
};
// Zeros, of which the system makes pages when they are touched.
struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Accesses = std::unique_ptr<Access[], Free>;
inline Accesses no_accesses() {
  return Accesses(static_cast<Access*>(std::calloc(kSmemBytes, sizeof(Access))));
}

struct Block {
  alignas(1024) unsigned char smem[kSmemBytes];
  uint32_t rank = 0;   // In its cluster,
  uint32_t first = 0;  // whose first block has this index.
  int alive = 0;
  std::map<int, Barrier> barriers;  // 0 is __syncthreads.
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<Warp> warps;
  Accesses writes = no_accesses(), reads = no_accesses();
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  unsigned block_idx, index;
  bool done = false;
  const char* waits_for = "";
  // Whether it can go on; the scheduler asks, as to switch to a thread that cannot takes longer.
  std::function<bool()> is_ready;
  int cluster_phase = 0;
  int remote_arrivals = 0;  // At barriers of other blocks: how many have not happened.
  // Products: groups that were committed, the last one open.
  std::deque<std::vector<std::function<void()>>> products{1};
  // Stores: of each committed group, how many have not read their tile.
  std::deque<std::shared_ptr<int>> stores;
  std::shared_ptr<int> open_stores = std::make_shared<int>(0);
  // The same of its own copies (cp.async): how many have not arrived.
  std::deque<std::shared_ptr<int>> copies;
  std::shared_ptr<int> open_copies = std::make_shared<int>(0);
  // Accesses and barriers that its next fence is for.
  std::vector<Access*> unfenced;
  std::vector<Mbarrier*> unfenced_mbarriers;
};

// A cluster, or the grid if its clusters are of one block each.
struct Cluster {
  uint32_t size;  // Of a cluster.
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Thread>> threads;
  Barrier barrier;
  std::vector<std::function<void()>> operations;  // What the hardware has been asked to do.
  std::mt19937 random;
  uint64_t events = 0;
  uint32_t fences = 0;
  ucontext_t scheduler;
  std::string error;
};

inline Cluster* cluster;
inline Thread* thread;
inline std::function<void()> kernel;
inline const char* kernel_name = "";
inline size_t smem_alignment = 1024, smem_bytes = 0;  // The dynamic shared memory's.

inline std::string name_of(const Thread& t) {
  return "block " + std::to_string(t.block_idx) + " thread " + std::to_string(t.index);
}

// Fibers cannot throw past their end: the scheduler gives up in their place.
inline void fail(const std::string& what, const Thread& t = *thread) {
  if (cluster->error.empty()) {
    cluster->error = std::string(kernel_name) + ": " + name_of(t) + ": " + what;
  }
}

template <typename Condition>
void wait_until(const char* what, Condition is_true) {
  if (!is_true()) {
    thread->waits_for = what;
    thread->is_ready = std::ref(is_true);
    swapcontext(&thread->context, &cluster->scheduler);
    thread->is_ready = nullptr;
  }
  ++cluster->events;
}

inline void meet(Barrier& barrier, int count, const char* what) {
  const int phase = barrier.phase;
  barrier.arrive(count);
  wait_until(what, [&] { return barrier.phase != phase; });
}

inline Warp& warp() { return thread->block->warps[thread->index / 32]; }
inline void sync_warp() { meet(warp().barrier, 32, "its warp"); }

inline uint32_t rank() { return thread->block->rank; }

// Where the dynamic shared memory begins.
inline size_t dynamic_smem() { return kDynamicSmem + smem_alignment % 1024; }
inline unsigned char* shared_memory() { return thread->block->smem + dynamic_smem(); }
// The one static variable of a kernel.
template <typename T>
T& static_shared() {
  return *reinterpret_cast<T*>(thread->block->smem);
}

// Addresses of shared memory count from the block's first byte, with its rank in the cluster on
// top.
constexpr int kRankShift = 24;
inline uint32_t offset_of(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - thread->block->smem);
}
inline uint32_t address_of(const void* p, uint32_t rank) {
  return rank << kRankShift | offset_of(p);
}
// A block of this thread's cluster.
inline Block& block_of(uint32_t rank) { return *cluster->blocks[thread->block->first + rank]; }
inline Block& block_at(uint32_t address) { return block_of(address >> kRankShift); }
inline uint32_t offset_at(uint32_t address) { return address & ((1u << kRankShift) - 1); }
inline unsigned char* at_address(uint32_t address) {
  return block_at(address).smem + offset_at(address);
}

// ---- Proxies -----------------------------------------------------------------------------------

inline void note_accesses(Access* accesses, size_t bytes) {
  const uint32_t block = thread->block->first + thread->block->rank;
  const uint32_t me =
      1 + block * (cluster->threads.size() / cluster->blocks.size()) + thread->index;
  for (Access* access = accesses; access < accesses + bytes; ++access) {
    if (access->thread == me && access->fenced_at == 0) continue;
    *access = {me, 0};
    thread->unfenced.push_back(access);
  }
}
// Ordinary accesses of this thread to shared memory.
template <typename T>
void write_shared(uint32_t address, const T& value) {
  note_accesses(&block_at(address).writes[offset_at(address)], sizeof(T));
  std::memcpy(at_address(address), &value, sizeof(T));
}
template <typename T>
T read_shared(uint32_t address) {
  note_accesses(&block_at(address).reads[offset_at(address)], sizeof(T));
  T value;
  std::memcpy(&value, at_address(address), sizeof(T));
  return value;
}

inline void fence_proxy_async() {
  ++cluster->fences;
  const size_t threads = cluster->threads.size();
  for (Access* access : thread->unfenced) {
    // Another thread's access since is that one's to fence.
    const bool is_mine = 1 <= access->thread && access->thread <= threads &&
                         cluster->threads[access->thread - 1].get() == thread &&
                         access->fenced_at == 0;
    if (is_mine) access->fenced_at = cluster->fences;
  }
  thread->unfenced.clear();
}

inline void fail_unfenced(const Access& access, const char* verb, const char* what, uint32_t offset,
                          const Thread& issuer) {
  char address[16];
  std::snprintf(address, sizeof(address), "0x%x", offset);
  fail(std::string(what) + " at " + address + " of shared memory, which " +
           name_of(*cluster->threads[access.thread - 1]) + " " + verb +
           " without fence.proxy.async before it was issued",
       issuer);
}
// Whether the bytes' last accesses were fenced when something was issued, after so many fences.
inline bool are_fenced(const Access* accesses, int bytes, uint32_t fences) {
  for (const Access* access = accesses; access < accesses + bytes; ++access) {
    if (access->thread != 0 && access->fenced_at - 1 >= fences) return false;
  }
  return true;
}
// Fails where they were not; `issuer` issued it.
inline void need_fenced(const Access* accesses, uint32_t offset, int bytes, const char* verb,
                        const char* what, const Thread& issuer, uint32_t fences) {
  if (are_fenced(accesses + offset, bytes, fences)) return;
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    if (!are_fenced(accesses + i, 1, fences)) {
      return fail_unfenced(accesses[i], verb, what, i, issuer);
    }
  }
}

// Lets the hardware do something for this thread at a later moment.
inline void later(std::function<void()> run) {
  cluster->operations.push_back([asked_by = thread, run = std::move(run)] {
    thread = asked_by;
    run();
  });
}

inline void need_alive(const Block& block, const char* what) {
  if (block.alive == 0) fail(std::string(what) + " of a block that has left");
}

inline void run_fiber() {
  kernel();
  thread->done = true;
  --thread->block->alive;
  ++cluster->events;
  swapcontext(&thread->context, &cluster->scheduler);
}

inline void run_operations() {
  auto waiting = std::move(cluster->operations);
  cluster->operations.clear();
  std::shuffle(waiting.begin(), waiting.end(), cluster->random);
  for (auto& operation : waiting) {
    if (cluster->random() % 4 == 0) {
      operation();
      ++cluster->events;
    } else {
      cluster->operations.push_back(std::move(operation));
    }
  }
}

// Runs the blocks of one cluster, or of several at once, to their end; returns what went wrong.
inline std::string run_blocks(unsigned first_block, int num_blocks, unsigned cluster_blocks,
                              unsigned num_threads, unsigned seed) {
  Cluster here{.size = cluster_blocks};
  cluster = &here;
  here.random.seed(seed);
  constexpr size_t kStack = 64 * 1024;
  for (int b = 0; b < num_blocks; ++b) {
    auto block = std::make_unique<Block>();
    std::memset(block->smem, 0xff, kSmemBytes);
    block->rank = b % cluster_blocks;
    block->first = b - block->rank;
    block->alive = num_threads;
    block->warps.resize(num_threads / 32);
    for (unsigned t = 0; t < num_threads; ++t) {
      auto fiber = std::make_unique<Thread>();
      fiber->stack = std::make_unique_for_overwrite<char[]>(kStack);
      fiber->block = block.get();
      fiber->block_idx = first_block + b;
      fiber->index = t;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStack;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, run_fiber, 0);
      here.threads.push_back(std::move(fiber));
    }
    here.blocks.push_back(std::move(block));
  }
  // Whether the hardware does nothing while a thread can go on.
  const bool is_late = here.random() % 2;
  // Otherwise some blocks are slow. Some warps always are: they are passed over most times.
  struct Turn {
    size_t warp;
    unsigned one_in;
  };
  std::vector<Turn> turns;
  unsigned block_one_in = 1;
  for (size_t w = 0; w < here.threads.size() / 32; ++w) {
    if (w % (num_threads / 32) == 0) block_one_in = is_late || here.random() % 2 ? 1 : 64;
    turns.push_back({w, block_one_in << here.random() % 2});
  }
  constexpr int kManyRounds = 2000;
  int idle_rounds = 0;
  while (here.error.empty()) {
    bool all_done = true, can_go_on = false;
    const uint64_t events = here.events;
    std::shuffle(turns.begin(), turns.end(), here.random);
    for (const Turn& turn : turns) {
      const bool is_passed_over = here.random() % turn.one_in != 0;
      const size_t last_first = here.random() % 2 * 31;  // Lanes in either order.
      for (size_t lane = 0; lane < 32; ++lane) {
        thread = here.threads[turn.warp * 32 + (lane ^ last_first)].get();
        if (thread->done) continue;
        all_done = false;
        if (is_passed_over && !is_late) break;
        if (thread->is_ready && !thread->is_ready()) continue;
        can_go_on = true;
        if (is_passed_over) break;
        threadIdx.x = thread->index;
        blockIdx.x = thread->block_idx;
        swapcontext(&here.scheduler, &thread->context);
      }
    }
    const bool idle = here.operations.empty();
    if (!is_late || !can_go_on) run_operations();
    if (all_done && here.operations.empty()) break;
    // Nothing under way, and everyone had a turn: nothing will come.
    idle_rounds = here.events == events && idle ? idle_rounds + 1 : 0;
    if (idle_rounds == kManyRounds) {
      for (const auto& fiber : here.threads) {
        thread = fiber.get();
        if (!thread->done) fail(std::string("waits for ever for ") + thread->waits_for);
      }
    }
  }
  return here.error;
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::meet(emulator::thread->block->barriers[0], blockDim.x, "its block");
}
inline void __syncwarp() { emulator::sync_warp(); }
inline long long clock64() { return emulator::cluster->events; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> shift % 32);
}
inline float __shfl_xor_sync(uint32_t, float value, int mask) {
  using namespace emulator;
  const uint32_t lane = thread->index % 32;
  warp().exchanged[lane][0] = __float_as_uint(value);
  sync_warp();
  const float result = __uint_as_float(warp().exchanged[lane ^ mask][0]);
  sync_warp();
  return result;
}
inline bool __any_sync(uint32_t, bool value) {
  using namespace emulator;
  const uint32_t lane = thread->index % 32;
  warp().exchanged[lane][0] = value;
  sync_warp();
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= warp().exchanged[i][0] != 0;
  sync_warp();
  return any;
}
inline uint32_t __shfl_down_sync(uint32_t, uint32_t value, int delta) {
  using namespace emulator;
  const uint32_t lane = thread->index % 32;
  warp().exchanged[lane][0] = value;
  sync_warp();
  const uint32_t result = warp().exchanged[lane + delta < 32 ? lane + delta : lane][0];
  sync_warp();
  return result;
}
