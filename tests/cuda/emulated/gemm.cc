// ffi/gemm.cu on the emulator. GEMM_SOURCE is a copy of it whose dynamic shared memory is the
// emulator's.

#include "emulator.cuh"
#include GEMM_SOURCE

namespace {

// A matrix that is no TMA operand is an address.
template <typename Matrix>
Matrix matrix(const tma::TensorMap& map) {
  if constexpr (std::is_same_v<Matrix, tma::TensorMap>) {
    return map;
  } else {
    return {map.data};
  }
}

}  // namespace

// Maps are those of lhs, rhs, out, pre-activation and residual. Returns what went wrong, or "".
extern "C" const char* run_gemm(const tma::TensorMap* maps, const float* bias,
                                const jaxkernels::Problem* problem, unsigned num_blocks,
                                unsigned num_threads, unsigned cluster_blocks, unsigned seed) {
  static std::string error;
  gridDim.x = num_blocks;
  blockDim.x = num_threads;
  emulator::kernel = [=] {
    using jaxkernels::Matrix;
    jaxkernels::gemm(maps[0], maps[1], matrix<Matrix>(maps[2]), matrix<Matrix>(maps[3]),
                     matrix<Matrix>(maps[4]), bias, *problem);
  };
  for (unsigned first = 0; first < num_blocks; first += cluster_blocks) {
    error = emulator::run_cluster(first, cluster_blocks, num_threads, seed + first);
    if (!error.empty()) break;
  }
  return error.c_str();
}
