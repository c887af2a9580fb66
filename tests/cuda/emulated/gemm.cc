// ffi/gemm.cu on the emulator. GEMM_SOURCE is a copy of it whose dynamic shared memory is the
// emulator's.

#include "emulator.cuh"
#include GEMM_SOURCE

namespace {

// The parameter that begins with the next map: a matrix that is no TMA operand is an address.
template <typename Parameter>
Parameter take(const tma::TensorMap*& next) {
  if constexpr (std::is_same_v<Parameter, jaxkernels::Address>) {
    return {next++->data};
  } else {
    Parameter maps;
    std::memcpy(&maps, next, sizeof(maps));
    next += sizeof(maps) / sizeof(*next);
    return maps;
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
    const tma::TensorMap* next = maps;
    const auto lhs = take<jaxkernels::TensorMaps>(next);
    const auto rhs = take<tma::TensorMap>(next);
    const auto out = take<jaxkernels::Matrix<true>>(next);
    const auto preactivation = take<jaxkernels::Preactivation>(next);
    const auto residual = take<jaxkernels::Residual>(next);
    jaxkernels::gemm(lhs, rhs, out, preactivation, residual, bias, *problem);
  };
  for (unsigned first = 0; first < num_blocks; first += cluster_blocks) {
    error = emulator::run_cluster(first, cluster_blocks, num_threads, seed + first);
    if (!error.empty()) break;
  }
  return error.c_str();
}
