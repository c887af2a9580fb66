// Shared by the package's XLA FFI handlers: text for messages, CUDA's driver, and the context of a
// stream. Nothing of CUDA is linked: libcuda is opened at run time.

#ifndef JAXKERNELS_DRIVER_H_
#define JAXKERNELS_DRIVER_H_

#include <cuda.h>
#include <dlfcn.h>

#include <string>
#include <string_view>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

// The driver's library; the tests, which have no device, put a recording stand-in here.
#ifndef JAXKERNELS_LIBCUDA
#define JAXKERNELS_LIBCUDA "libcuda.so.1"
#endif

namespace jaxkernels {

namespace ffi = ::xla::ffi;

// ---- Text for the messages ----------------------------------------------------------------------

// Without streams: where the toolchain links libstdc++ statically, their locale is not the
// process's and printing a number crashes (seen with jaxlib's plugin for CUDA and g++ 13).
template <typename T>
std::string text(const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return std::to_string(value);
  } else {
    return std::string(value);
  }
}

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string out;
  (out.append(text(parts)), ...);
  return out;
}

template <typename Sequence>
std::string listed(const Sequence& values) {
  std::string out = "(";
  for (const auto& value : values) {
    if (out.size() > 1) out.append(", ");
    out.append(text(value));
  }
  return out + ")";
}

// All messages have the form `label[cuda]: what is wrong; got value. way out.`
inline ffi::Error error_for(std::string_view label, ffi::ErrorCode code, const std::string& what) {
  return ffi::Error(code, concat(label.empty() ? "launch" : label, "[cuda]: ", what));
}

// ---- The driver ---------------------------------------------------------------------------------

// cuda.h renames functions whose ABI changed (cuCtxPushCurrent is cuCtxPushCurrent_v2); the second
// macro lets that happen before the name becomes text, so that pointer and symbol agree.
#define JAXKERNELS_TEXT(name) #name
#define JAXKERNELS_SYMBOL(name) JAXKERNELS_TEXT(name)

class Driver {
 public:
  decltype(&cuCtxGetCurrent) ctx_get_current;
  decltype(&cuCtxGetDevice) ctx_get_device;
  decltype(&cuCtxGetId) ctx_get_id;
  decltype(&cuCtxPopCurrent) ctx_pop_current;
  decltype(&cuCtxPushCurrent) ctx_push_current;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuDriverGetVersion) driver_get_version;
  decltype(&cuFuncGetAttribute) func_get_attribute;
  decltype(&cuFuncSetAttribute) func_set_attribute;
  decltype(&cuGetErrorName) get_error_name;
  decltype(&cuGetErrorString) get_error_string;
  decltype(&cuLaunchKernelEx) launch_kernel_ex;
  decltype(&cuModuleGetFunction) module_get_function;
  decltype(&cuModuleLoadData) module_load_data;
  decltype(&cuStreamGetCtx) stream_get_ctx;
  decltype(&cuTensorMapEncodeTiled) tensor_map_encode_tiled;

  // The driver, opened on first use. The outcome is final for the process.
  static ffi::ErrorOr<const Driver*> get(std::string_view label) {
    static const Driver driver;
    if (driver.problem_.empty()) return &driver;
    return ffi::Unexpected(error_for(label, ffi::ErrorCode::kUnavailable, driver.problem_));
  }

  // "CUDA_ERROR_INVALID_VALUE (invalid argument)"
  std::string describe(CUresult result) const {
    const char* name = nullptr;
    const char* meaning = nullptr;
    get_error_name(result, &name);
    get_error_string(result, &meaning);
    if (name == nullptr) return concat("CUDA error ", static_cast<int>(result));
    return concat(name, " (", meaning == nullptr ? "" : meaning, ")");
  }

 private:
  Driver() {
    void* library = dlopen(JAXKERNELS_LIBCUDA, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = dlerror();
      problem_ = concat("the CUDA driver cannot be opened; got: ", why == nullptr ? "" : why,
                        ". Install NVIDIA's driver.");
      return;
    }
    load(library, ctx_get_current, JAXKERNELS_SYMBOL(cuCtxGetCurrent));
    load(library, ctx_get_device, JAXKERNELS_SYMBOL(cuCtxGetDevice));
    load(library, ctx_get_id, JAXKERNELS_SYMBOL(cuCtxGetId));
    load(library, ctx_pop_current, JAXKERNELS_SYMBOL(cuCtxPopCurrent));
    load(library, ctx_push_current, JAXKERNELS_SYMBOL(cuCtxPushCurrent));
    load(library, device_get_attribute, JAXKERNELS_SYMBOL(cuDeviceGetAttribute));
    load(library, driver_get_version, JAXKERNELS_SYMBOL(cuDriverGetVersion));
    load(library, func_get_attribute, JAXKERNELS_SYMBOL(cuFuncGetAttribute));
    load(library, func_set_attribute, JAXKERNELS_SYMBOL(cuFuncSetAttribute));
    load(library, get_error_name, JAXKERNELS_SYMBOL(cuGetErrorName));
    load(library, get_error_string, JAXKERNELS_SYMBOL(cuGetErrorString));
    load(library, launch_kernel_ex, JAXKERNELS_SYMBOL(cuLaunchKernelEx));
    load(library, module_get_function, JAXKERNELS_SYMBOL(cuModuleGetFunction));
    load(library, module_load_data, JAXKERNELS_SYMBOL(cuModuleLoadData));
    load(library, stream_get_ctx, JAXKERNELS_SYMBOL(cuStreamGetCtx));
    load(library, tensor_map_encode_tiled, JAXKERNELS_SYMBOL(cuTensorMapEncodeTiled));
  }

  template <typename Function>
  void load(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr && problem_.empty()) {
      problem_ = concat("the CUDA driver is too old; it has no ", name,
                        ". Install a driver of CUDA 12.0 or newer.");
    }
  }

  std::string problem_;
};

// Makes the stream's context the thread's current one: XLA runs several devices from one process,
// and no thread of it is tied to one of them.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUstream stream) : driver_(driver) {
    CUcontext current = nullptr;
    result_ = driver.stream_get_ctx(stream, &context_);
    if (result_ == CUDA_SUCCESS) result_ = driver.ctx_get_id(context_, &id_);
    if (result_ == CUDA_SUCCESS) result_ = driver.ctx_get_current(&current);
    if (result_ == CUDA_SUCCESS && current != context_) {
      result_ = driver.ctx_push_current(context_);
      pushed_ = result_ == CUDA_SUCCESS;
    }
  }
  ~CurrentContext() {
    CUcontext popped;
    if (pushed_) driver_.ctx_pop_current(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  CUresult result() const { return result_; }

  // Unlike the handle, an id is never used again for another context.
  unsigned long long id() const { return id_; }

 private:
  const Driver& driver_;
  CUresult result_;
  CUcontext context_ = nullptr;
  unsigned long long id_ = 0;
  bool pushed_ = false;
};

constexpr const char* kNoContext = "the stream's context cannot be entered";
constexpr const char* kNoContextWayOut =
    "An earlier kernel may have broken it: restart the process.";

}  // namespace jaxkernels

#endif  // JAXKERNELS_DRIVER_H_
