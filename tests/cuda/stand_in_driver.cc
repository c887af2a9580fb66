// What the launcher needs of libcuda, for machines without a GPU: writes down what it is asked for.
//
// A stream's handle is also its context's. A kernel's name says how many bytes its parameters take:
// "kernel_128_8_4" has a tensor map, a pointer and an int. There are 228 KB of shared memory, of
// which every kernel has 16 bytes of its own. `stand_in_fail` makes a function fail.

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "stand_in.h"

namespace {

constexpr int kMaxSmemBytes = 232448;
constexpr int kStaticSmemBytes = 16;

struct Kernel {
  std::vector<size_t> parameter_bytes;
  CUcontext context;
  std::atomic<int> max_dynamic_smem_bytes{49152 - kStaticSmemBytes};
};

thread_local std::vector<CUcontext> contexts{nullptr};

template <typename T>
void list(std::ostream& out, const char* name, const T* values, size_t count) {
  out << " " << name << "=";
  for (size_t i = 0; i < count; ++i) out << (i == 0 ? "" : ",") << values[i];
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

CUresult cuGetErrorName(CUresult result, const char** name) {
  static const std::map<int, const char*> kNames = {
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
  };
  auto found = kNames.find(result);
  *name = found == kNames.end() ? nullptr : found->second;
  return found == kNames.end() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "says the stand-in";
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = 13050;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(stream);
  return outcome<CUresult>("cuStreamGetCtx");
}

CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = contexts.back();
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  contexts.push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  if (attribute != CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) std::abort();
  *value = kMaxSmemBytes;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (CUresult result = outcome<CUresult>("cuModuleLoadData")) return result;
  std::this_thread::sleep_for(
      std::chrono::milliseconds(5));  // It takes a while, others come meanwhile.
  *module = static_cast<CUmodule>(const_cast<void*>(image));
  note([&](std::ostream& out) { out << "load context=" << contexts.back(); });
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  std::istringstream parts(name);
  std::string part;
  std::getline(parts, part, '_');
  if (part != "kernel") return CUDA_ERROR_NOT_FOUND;
  auto* kernel = new Kernel;
  kernel->context = contexts.back();
  while (std::getline(parts, part, '_')) kernel->parameter_bytes.push_back(std::stoul(part));
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  if (attribute != CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) std::abort();
  *value = kStaticSmemBytes;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value + kStaticSmemBytes > kMaxSmemBytes) return CUDA_ERROR_INVALID_VALUE;
    reinterpret_cast<Kernel*>(function)->max_dynamic_smem_bytes = value;
  }
  note([&](std::ostream& out) { out << "attribute " << attribute << "=" << value; });
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill) {
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
  }
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) return CUDA_ERROR_INVALID_VALUE;
  map->opaque[0] = reinterpret_cast<cuuint64_t>(address);
  note([&](std::ostream& out) {
    out << "encode dtype=" << dtype << " address=" << address;
    list(out, "sizes", sizes, rank);
    list(out, "strides", strides, rank - 1);
    list(out, "box", box, rank);
    list(out, "element_strides", element_strides, rank);
    out << " interleave=" << interleave << " swizzle=" << swizzle
        << " l2_promotion=" << l2_promotion << " fill=" << fill;
  });
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  if (CUresult result = outcome<CUresult>("cuLaunchKernelEx")) return result;
  const auto* kernel = reinterpret_cast<Kernel*>(function);
  if (kernel->context != contexts.back()) return CUDA_ERROR_INVALID_CONTEXT;
  if (config->sharedMemBytes > static_cast<unsigned>(kernel->max_dynamic_smem_bytes.load())) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  note([&](std::ostream& out) {
    out << "launch stream=" << config->hStream << " grid=" << config->gridDimX << ","
        << config->gridDimY << "," << config->gridDimZ << " block=" << config->blockDimX << ","
        << config->blockDimY << "," << config->blockDimZ << " smem=" << config->sharedMemBytes;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
      if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) std::abort();
      const auto& cluster = config->attrs[i].value.clusterDim;
      out << " cluster=" << cluster.x << "," << cluster.y << "," << cluster.z;
    }
    out << " parameters=" << std::hex;
    for (size_t i = 0; i < kernel->parameter_bytes.size(); ++i) {
      const auto* bytes = static_cast<const unsigned char*>(parameters[i]);
      out << (i == 0 ? "" : ",");
      // The address of a tensor map is all that the stand-in puts into it.
      const size_t count = kernel->parameter_bytes[i] == sizeof(CUtensorMap)
                               ? sizeof(void*)
                               : kernel->parameter_bytes[i];
      for (size_t j = 0; j < count; ++j) out << (bytes[j] < 16 ? "0" : "") << int{bytes[j]};
    }
    out << std::dec;
  });
  return CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
