// Products by cuBLASLt as XLA's CPU backend can run them, like host_launcher.cc. cuBLASLt is the
// library that STAND_IN_CUBLASLT names.

#include "host.h"

#define jaxkernels_cublaslt_execute jaxkernels_cublaslt_execute_with_stream
#include "cublaslt.cc"
#undef jaxkernels_cublaslt_execute

namespace jaxkernels {
namespace {

ffi::Error multiply_on_host(int32_t device, Product* product, ffi::RemainingArgs operands,
                            ffi::Result<ffi::AnyBuffer> out,
                            ffi::Result<ffi::AnyBuffer> workspace) {
  auto stream = reinterpret_cast<CUstream>(static_cast<uintptr_t>(device) + 1);
  if (auto error = initialize_product(stream, product); error.failure()) return error;
  return multiply(stream, product, operands, out, workspace);
}

}  // namespace
}  // namespace jaxkernels

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkernels_cublaslt_execute, jaxkernels::multiply_on_host,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::State<jaxkernels::Product>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());

#pragma GCC visibility pop
