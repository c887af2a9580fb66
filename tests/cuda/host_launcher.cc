// The launcher as XLA's CPU backend can run it. That backend has no streams and skips the
// initialize stage: execute makes a stream from the number of the CPU device, and initializes
// first. The driver is the one that STAND_IN_DRIVER names.

#include "host.h"

#define jaxkernels_execute jaxkernels_execute_with_stream
#include "launcher.cc"
#undef jaxkernels_execute

namespace jaxkernels {
namespace {

ffi::Error execute_on_host(int32_t device, Launch* launch, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  auto stream = reinterpret_cast<CUstream>(static_cast<uintptr_t>(device) + 1);
  if (auto error = initialize(stream, launch); error.failure()) return error;
  return execute(stream, launch, operands, results);
}

}  // namespace
}  // namespace jaxkernels

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkernels_execute, jaxkernels::execute_on_host,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::State<jaxkernels::Launch>>()
                                  .RemainingArgs()
                                  .RemainingRets());

#pragma GCC visibility pop
