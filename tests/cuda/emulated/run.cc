// A kernel on the emulator: KERNEL, of KERNEL_SOURCE, a copy of its source in which the emulator
// stands for what no C++ compiler takes.

#include <type_traits>
#include <utility>

#include "emulator.cuh"
#include KERNEL_SOURCE

namespace {

// Calls the kernel with its parameters, each given by its address as cuLaunchKernel takes them.
template <typename... Parameters, size_t... kIndices>
void call(void (*kernel)(Parameters...), void** parameters, std::index_sequence<kIndices...>) {
  kernel(*static_cast<std::remove_cvref_t<Parameters>*>(parameters[kIndices])...);
}
template <typename... Parameters>
void call(void (*kernel)(Parameters...), void** parameters) {
  call(kernel, parameters, std::index_sequence_for<Parameters...>());
}

}  // namespace

// `is_at_once`: the blocks of the grid run together. Returns what went wrong, or "".
extern "C" const char* run(void** parameters, unsigned num_blocks, unsigned num_threads,
                           unsigned cluster_blocks, unsigned smem_bytes, unsigned smem_alignment,
                           bool is_at_once, unsigned seed) {
  static std::string error;
  gridDim.x = num_blocks;
  blockDim.x = num_threads;
  emulator::kernel_name = KERNEL_NAME;
  emulator::smem_bytes = smem_bytes;
  emulator::smem_alignment = smem_alignment;
  emulator::kernel = [=] { call(&KERNEL, parameters); };
  const unsigned at_once = is_at_once ? num_blocks : cluster_blocks;
  for (unsigned first = 0; first < num_blocks; first += at_once) {
    error = emulator::run_blocks(first, at_once, cluster_blocks, num_threads, seed + first);
    if (!error.empty()) break;
  }
  return error.c_str();
}
