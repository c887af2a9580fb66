// One XLA FFI handler that launches any CUDA kernel, handed to it as a cubin.
//
// XLA calls three stages. Instantiate, once per custom call of a compiled program, reads the
// attributes into a `Launch`. Initialize, before a run, loads the cubin into the device's context.
// Execute encodes the tensor maps from the buffers' addresses, fills in the kernel's parameters and
// launches; it neither allocates device memory nor synchronises, so XLA may capture it in a CUDA
// graph. Nothing is kept between calls but the loaded cubins.
//
// The attributes, written by custom_call.py beside this file ("parameter0." stands for every
// parameter):
//
//   cubin                          u8[]    the code, an ELF image
//   kernel                         string  the kernel's symbol in it
//   label                          string  what messages call it; older programs have none
//   grid, block, cluster           i64[3]  blocks, threads per block, blocks per cluster; x y z
//   smem_bytes                     i64     dynamic shared memory per block
//   num_parameters                 i64     how many parameters the kernel takes
//   parameter0.kind                string  "value", "pointer", "tensor_map" or "tensor_maps"
//
//   parameter0.value               u8[]    value: its bytes
//
//   parameter0.buffer              i64     pointer, tensor_map: operands, then results
//   parameter0.byte_offset         i64     from the start of the buffer
//
//   parameter0.dtype               string  tensor_map: a name of kDtypes below
//   parameter0.sizes               i64[r]  elements, innermost dimension first, as CUDA has it
//   parameter0.byte_strides        i64[r-1] of the dimensions but the innermost
//   parameter0.box                 i64[r]  elements of one copy
//   parameter0.element_strides     i64[r]
//   parameter0.interleave, .swizzle, .l2_promotion, .fill    strings: names of the tables below
//
//   parameter0.count               i64     tensor_maps: how many lie one after the other; what a
//                                          tensor_map has, each has as parameter0.0., .1. and so on
//
// custom_call.py explains the limits of the hardware to the user. Here, what would make the launch
// read or write outside the memory it was given is refused, and the driver is the judge of the
// rest. Every failure is an ffi::Error.

#include <cuda.h>
#include <elf.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "attributes.h"
#include "driver.h"
#include "xla/ffi/api/ffi.h"

namespace jaxkernels {
namespace {

// ---- What is to be launched ---------------------------------------------------------------------

struct Dtype {
  CUtensorMapDataType code;
  uint64_t bytes;
};

constexpr Named<Dtype> kDtypes[] = {
    {"uint8", {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1}},
    {"uint16", {CU_TENSOR_MAP_DATA_TYPE_UINT16, 2}},
    {"uint32", {CU_TENSOR_MAP_DATA_TYPE_UINT32, 4}},
    {"int32", {CU_TENSOR_MAP_DATA_TYPE_INT32, 4}},
    {"uint64", {CU_TENSOR_MAP_DATA_TYPE_UINT64, 8}},
    {"int64", {CU_TENSOR_MAP_DATA_TYPE_INT64, 8}},
    {"float16", {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2}},
    {"bfloat16", {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2}},
    {"float32", {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4}},
    {"float32_ftz", {CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ, 4}},
    {"tfloat32", {CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, 4}},
    {"tfloat32_ftz", {CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ, 4}},
    {"float64", {CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8}},
};
constexpr Named<CUtensorMapInterleave> kInterleaves[] = {
    {"none", CU_TENSOR_MAP_INTERLEAVE_NONE},
    {"16B", CU_TENSOR_MAP_INTERLEAVE_16B},
    {"32B", CU_TENSOR_MAP_INTERLEAVE_32B},
};
constexpr Named<CUtensorMapSwizzle> kSwizzles[] = {
    {"none", CU_TENSOR_MAP_SWIZZLE_NONE},
    {"32B", CU_TENSOR_MAP_SWIZZLE_32B},
    {"64B", CU_TENSOR_MAP_SWIZZLE_64B},
    {"128B", CU_TENSOR_MAP_SWIZZLE_128B},
};
constexpr Named<CUtensorMapL2promotion> kL2Promotions[] = {
    {"none", CU_TENSOR_MAP_L2_PROMOTION_NONE},
    {"64B", CU_TENSOR_MAP_L2_PROMOTION_L2_64B},
    {"128B", CU_TENSOR_MAP_L2_PROMOTION_L2_128B},
    {"256B", CU_TENSOR_MAP_L2_PROMOTION_L2_256B},
};
constexpr Named<CUtensorMapFloatOOBfill> kFills[] = {
    {"zeros", CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE},
    {"nan", CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA},
};
constexpr size_t kMaxRank = 5;

// A parameter passed by value.
struct Value {
  std::vector<uint8_t> bytes;
};

// A place in one of the call's buffers, passed as a pointer.
struct Pointer {
  int64_t buffer;
  uint64_t byte_offset;
};

// A tensor map over one of the call's buffers.
struct TensorMap {
  Pointer start;
  Dtype dtype;
  std::vector<cuuint64_t> sizes;
  std::vector<cuuint64_t> byte_strides;
  std::vector<cuuint32_t> box;
  std::vector<cuuint32_t> element_strides;
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  CUtensorMapFloatOOBfill fill;

  // Whether every element lies in a buffer of `bytes` bytes. Subtracts, so that nothing overflows.
  bool fits(uint64_t bytes) const {
    if (start.byte_offset > bytes) return false;
    uint64_t room = bytes - start.byte_offset;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const uint64_t step = i == 0 ? dtype.bytes : byte_strides[i - 1];
      if (step == 0) continue;
      if (sizes[i] - 1 > room / step) return false;
      room -= (sizes[i] - 1) * step;
    }
    return room >= dtype.bytes;
  }
};

// One or several, passed by value (`const __grid_constant__`).
using TensorMaps = std::vector<TensorMap>;

using Parameter = std::variant<Value, Pointer, TensorMaps>;

class Cubin;

// One custom call of a compiled program: what XLA keeps for it between the stages.
struct Launch {
  static ffi::TypeId id;

  std::string kernel;
  std::string label;
  Cubin* cubin;
  std::array<unsigned, 3> grid;
  std::array<unsigned, 3> block;
  std::array<unsigned, 3> cluster;
  unsigned smem_bytes;
  std::vector<Parameter> parameters;

  uint64_t cluster_blocks() const { return uint64_t{cluster[0]} * cluster[1] * cluster[2]; }

  ffi::Error error(ffi::ErrorCode code, const std::string& what) const {
    return error_for(label, code, what);
  }
  ffi::Error driver_error(const Driver& driver, CUresult result, const std::string& what,
                          const char* way_out) const {
    const bool is_memory = result == CUDA_ERROR_OUT_OF_MEMORY;
    return error(is_memory ? ffi::ErrorCode::kResourceExhausted : ffi::ErrorCode::kInternal,
                 concat(what, "; got ", driver.describe(result), ". ", way_out));
  }
};

ffi::TypeId Launch::id = {};

// ---- Loaded code --------------------------------------------------------------------------------

// The driver is handed a pointer and no length: an image that was cut short must be found out here.
bool is_whole_elf(std::string_view image) {
  Elf64_Ehdr header;
  if (image.size() < sizeof(header)) return false;
  std::memcpy(&header, image.data(), sizeof(header));
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return false;
  if (header.e_ident[EI_CLASS] != ELFCLASS64) return false;
  const auto inside = [&](uint64_t offset, uint64_t bytes) {
    return offset <= image.size() && bytes <= image.size() - offset;
  };
  if (!inside(header.e_phoff, uint64_t{header.e_phnum} * header.e_phentsize)) return false;
  if (!inside(header.e_shoff, uint64_t{header.e_shnum} * header.e_shentsize)) return false;
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    if (header.e_shentsize < sizeof(section)) return false;
    std::memcpy(&section, image.data() + header.e_shoff + i * header.e_shentsize, sizeof(section));
    if (section.sh_type == SHT_NOBITS) continue;
    if (!inside(section.sh_offset, section.sh_size)) return false;
  }
  return true;
}

// One distinct cubin of the process and the kernels loaded from it, per context.
class Cubin {
 public:
  explicit Cubin(std::string_view image) : image_(image) {}

  std::string_view image() const { return image_; }

  // Finds the kernel in the current context, loading it on first use. Initialize does so for every
  // run, so that execute, which may be under capture, only looks it up.
  ffi::Error find(const Driver& driver, const CurrentContext& context, const Launch& launch,
                  CUfunction* function) {
    Loaded& loaded = loaded_in(context.id());
    std::lock_guard<std::mutex> lock(loaded.mutex);
    Kernel& kernel = loaded.kernels[launch.kernel];
    if (kernel.function == nullptr) {
      if (auto error = load(driver, launch, &loaded.module, &kernel); error.failure()) return error;
    }
    if (auto error = allow(driver, launch, &kernel); error.failure()) return error;
    *function = kernel.function;
    return ffi::Error::Success();
  }

 private:
  struct Kernel {
    CUfunction function = nullptr;
    int smem_bytes = -1;  // -1: no limit has been set yet.
    bool large_clusters = false;
  };

  // A context has a lock of its own: loading may wait for what runs on the device, and that, in a
  // collective, for another device, whose thread must then not wait here.
  struct Loaded {
    std::mutex mutex;
    CUmodule module = nullptr;
    std::map<std::string, Kernel> kernels;
  };

  Loaded& loaded_in(unsigned long long context_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return contexts_[context_id];  // Stays where it is when others are added.
  }

  ffi::Error load(const Driver& driver, const Launch& launch, CUmodule* module,
                  Kernel* kernel) const {
    if (*module == nullptr) {
      if (CUresult result = driver.module_load_data(module, image_.data())) {
        *module = nullptr;
        int version = 0;
        driver.driver_get_version(&version);
        return launch.driver_error(
            driver, result,
            concat("the driver (CUDA ", version / 1000, ".", version % 1000 / 10,
                   ") cannot load the cubin of ", image_.size(), " bytes on this device"),
            "Compile it for the device's architecture, with an NVRTC of the driver's major version "
            "or an older one.");
      }
    }
    CUfunction function = nullptr;
    if (CUresult result = driver.module_get_function(&function, *module, launch.kernel.c_str())) {
      return launch.driver_error(driver, result, concat("the cubin has no kernel ", launch.kernel),
                                 "C++ names are mangled: use the one compile_kernel returned.");
    }
    kernel->function = function;
    return ffi::Error::Success();
  }

  // Raises the limits that a kernel has to opt in to. Setting an attribute also makes the driver
  // load the kernel's code now, where it would otherwise wait for the first launch.
  static ffi::Error allow(const Driver& driver, const Launch& launch, Kernel* kernel) {
    const int smem_bytes = static_cast<int>(launch.smem_bytes);
    if (smem_bytes > kernel->smem_bytes) {
      if (CUresult result = driver.func_set_attribute(
              kernel->function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)) {
        int fixed = 0;
        int limit = 0;
        CUdevice device = 0;
        driver.func_get_attribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel->function);
        driver.ctx_get_device(&device);
        driver.device_get_attribute(&limit, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                                    device);
        return launch.driver_error(
            driver, result,
            concat("cannot have ", smem_bytes, " bytes of dynamic shared memory beside ", fixed,
                   " static ones, the device allows ", limit, " together"),
            "Use smaller tiles or fewer stages.");
      }
      kernel->smem_bytes = smem_bytes;
    }
    constexpr uint64_t kPortableClusterBlocks = 8;
    if (launch.cluster_blocks() > kPortableClusterBlocks && !kernel->large_clusters) {
      if (CUresult result = driver.func_set_attribute(
              kernel->function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)) {
        return launch.driver_error(
            driver, result, concat("cannot have clusters of ", launch.cluster_blocks(), " blocks"),
            "Use up to 8, which every device has.");
      }
      kernel->large_clusters = true;
    }
    return ffi::Error::Success();
  }

  const std::string image_;
  std::mutex mutex_;
  std::map<unsigned long long, Loaded> contexts_;
};

// The process's copy of an image: a model calls one kernel from each of its layers. Cubins are
// never unloaded: a CUDA graph may outlive the custom call it was captured from, and at exit the
// driver may be gone before either.
Cubin* intern(std::string_view image) {
  static auto* mutex = new std::mutex;
  static auto* cubins = new std::unordered_map<std::string_view, std::unique_ptr<Cubin>>;
  std::lock_guard<std::mutex> lock(*mutex);
  if (auto found = cubins->find(image); found != cubins->end()) return found->second.get();
  auto cubin = std::make_unique<Cubin>(image);
  const std::string_view key = cubin->image();
  return cubins->emplace(key, std::move(cubin)).first->second.get();
}

// ---- Instantiate: attributes to a Launch --------------------------------------------------------

Pointer read_pointer(AttributeReader& attributes, const std::string& prefix) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  return {attributes.number(prefix + "buffer", 0, kMax),
          static_cast<uint64_t>(attributes.number(prefix + "byte_offset", 0, kMax))};
}

TensorMap read_tensor_map(AttributeReader& attributes, const std::string& prefix) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMax32 = std::numeric_limits<uint32_t>::max();
  TensorMap map = {};
  map.start = read_pointer(attributes, prefix);
  map.dtype = attributes.choice(prefix + "dtype", kDtypes);
  const size_t rank = attributes.get<ffi::Span<const int64_t>>(prefix + "sizes").size();
  if (rank < 1 || rank > kMaxRank) {
    attributes.refuse(
        concat("attribute ", prefix, "sizes must have 1 to 5 elements; got ", rank, "."));
    return map;
  }
  map.sizes = attributes.numbers<cuuint64_t>(prefix + "sizes", rank, 1, kMax);
  map.byte_strides = attributes.numbers<cuuint64_t>(prefix + "byte_strides", rank - 1, 0, kMax);
  map.box = attributes.numbers<cuuint32_t>(prefix + "box", rank, 1, kMax32);
  map.element_strides = attributes.numbers<cuuint32_t>(prefix + "element_strides", rank, 1, kMax32);
  map.interleave = attributes.choice(prefix + "interleave", kInterleaves);
  map.swizzle = attributes.choice(prefix + "swizzle", kSwizzles);
  map.l2_promotion = attributes.choice(prefix + "l2_promotion", kL2Promotions);
  map.fill = attributes.choice(prefix + "fill", kFills);
  return map;
}

constexpr int64_t kMaxParameterBytes = 32764;  // More no kernel can have.

Parameter read_parameter(AttributeReader& attributes, const std::string& prefix) {
  const auto kind = attributes.get<std::string_view>(prefix + "kind");
  if (kind == "pointer") return read_pointer(attributes, prefix);
  if (kind == "tensor_map") return TensorMaps{read_tensor_map(attributes, prefix)};
  if (kind == "tensor_maps") {
    const int64_t count = attributes.number(prefix + "count", 1, kMaxParameterBytes);
    TensorMaps maps;
    for (int64_t i = 0; i < count && attributes.are_right(); ++i) {
      maps.push_back(read_tensor_map(attributes, concat(prefix, i, ".")));
    }
    return maps;
  }
  if (kind == "value") {
    const auto bytes = attributes.get<ffi::Span<const uint8_t>>(prefix + "value");
    if (bytes.size() == 0) {
      attributes.refuse(concat("attribute ", prefix, "value must have bytes; got none."));
    }
    return Value{std::vector<uint8_t>(bytes.begin(), bytes.end())};
  }
  attributes.refuse(concat("attribute ", prefix,
                           "kind must be one of (value, pointer, tensor_map, tensor_maps); got \"",
                           kind, "\"."));
  return Value{};
}

std::array<unsigned, 3> read_extents(AttributeReader& attributes, const std::string& name) {
  const auto xyz = attributes.numbers<unsigned>(name, 3, 1, std::numeric_limits<int32_t>::max());
  return {xyz[0], xyz[1], xyz[2]};
}

ffi::ErrorOr<std::unique_ptr<Launch>> instantiate(ffi::Dictionary dictionary) {
  AttributeReader attributes(dictionary, "jaxkernels.ffi.launch");
  auto launch = std::make_unique<Launch>();
  launch->kernel = std::string(attributes.get<std::string_view>("kernel"));
  launch->label = launch->kernel;
  if (dictionary.contains("label")) {
    const auto label = attributes.get<std::string_view>("label");
    if (attributes.are_right()) launch->label = std::string(label);
  }
  launch->grid = read_extents(attributes, "grid");
  launch->block = read_extents(attributes, "block");
  launch->cluster = read_extents(attributes, "cluster");
  launch->smem_bytes = static_cast<unsigned>(
      attributes.number("smem_bytes", 0, std::numeric_limits<int32_t>::max()));
  const int64_t num_parameters = attributes.number("num_parameters", 0, kMaxParameterBytes);
  for (int64_t i = 0; i < num_parameters && attributes.are_right(); ++i) {
    launch->parameters.push_back(read_parameter(attributes, concat("parameter", i, ".")));
  }
  const auto cubin = attributes.get<ffi::Span<const uint8_t>>("cubin");
  const std::string_view image(reinterpret_cast<const char*>(cubin.begin()), cubin.size());
  if (attributes.are_right() && !is_whole_elf(image)) {
    attributes.refuse(concat("attribute cubin must be a whole ELF image; got ", image.size(),
                             " bytes that are none."));
  }
  if (!attributes.are_right()) {
    return ffi::Unexpected(
        error_for(launch->label, ffi::ErrorCode::kInvalidArgument, attributes.problem()));
  }
  launch->cubin = intern(image);
  return ffi::ErrorOr<std::unique_ptr<Launch>>(std::move(launch));
}

// ---- Initialize: load the kernel before the run -------------------------------------------------

ffi::Error initialize(CUstream stream, Launch* launch) {
  auto driver = Driver::get(launch->label);
  if (driver.has_error()) return driver.error();
  CurrentContext context(**driver, stream);
  if (CUresult result = context.result()) {
    return launch->driver_error(**driver, result, kNoContext, kNoContextWayOut);
  }
  CUfunction function;
  return launch->cubin->find(**driver, context, *launch, &function);
}

// ---- Execute: parameters, tensor maps, launch ---------------------------------------------------

std::atomic<uint64_t> launch_count{0};

struct Buffer {
  char* data;
  uint64_t bytes;
};

ffi::ErrorOr<std::vector<Buffer>> buffers_of(ffi::RemainingArgs operands,
                                             ffi::RemainingRets results) {
  std::vector<Buffer> buffers;
  const auto add = [&](const ffi::AnyBuffer& buffer) {
    buffers.push_back({static_cast<char*>(buffer.untyped_data()), buffer.size_bytes()});
  };
  for (size_t i = 0; i < operands.size(); ++i) {
    auto operand = operands.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return ffi::Unexpected(operand.error());
    add(*operand);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return ffi::Unexpected(result.error());
    add(**result);
  }
  return buffers;
}

std::string describe(const TensorMap& map) {
  return concat("sizes=", listed(map.sizes), " byte_strides=", listed(map.byte_strides),
                " box=", listed(map.box), " element_strides=", listed(map.element_strides),
                " element_bytes=", map.dtype.bytes, " byte_offset=", map.start.byte_offset,
                " swizzle=", static_cast<int>(map.swizzle),
                " interleave=", static_cast<int>(map.interleave));
}

// The kernel's parameters with the addresses of one run. The driver copies them during the launch.
class Arguments {
 public:
  explicit Arguments(const Launch& launch)
      : launch_(launch),
        maps_(launch.parameters.size()),
        addresses_(launch.parameters.size()),
        values_(launch.parameters.size()) {}

  void** values() { return values_.data(); }

  ffi::Error fill(const Driver& driver, const std::vector<Buffer>& buffers) {
    for (size_t i = 0; i < values_.size(); ++i) {
      const Parameter& parameter = launch_.parameters[i];
      ffi::Error error;
      if (const auto* value = std::get_if<Value>(&parameter)) {
        values_[i] = const_cast<uint8_t*>(value->bytes.data());
      } else if (const auto* pointer = std::get_if<Pointer>(&parameter)) {
        values_[i] = &addresses_[i];
        error = locate(i, *pointer, buffers, [&](uint64_t bytes) {
          return pointer->byte_offset <= bytes ? "" : concat("byte_offset=", pointer->byte_offset);
        });
      } else {
        const auto& maps = std::get<TensorMaps>(parameter);
        maps_[i].resize(maps.size());
        values_[i] = maps_[i].data();
        for (size_t j = 0; j < maps.size() && error.success(); ++j) {
          const TensorMap& map = maps[j];
          error = locate(i, map.start, buffers,
                         [&](uint64_t bytes) { return map.fits(bytes) ? "" : describe(map); });
          if (error.success()) error = encode(i, map, driver, &maps_[i][j]);
        }
      }
      if (error.failure()) return error;
    }
    return ffi::Error::Success();
  }

 private:
  // Takes the address of a place in a buffer. `reaching_out` describes what of the parameter lies
  // outside a buffer of so many bytes.
  template <typename ReachingOut>
  ffi::Error locate(size_t i, const Pointer& place, const std::vector<Buffer>& buffers,
                    ReachingOut reaching_out) {
    if (static_cast<uint64_t>(place.buffer) >= buffers.size()) {
      return launch_.error(
          ffi::ErrorCode::kInvalidArgument,
          concat("parameter ", i, " names a buffer the call has not; got buffer ", place.buffer,
                 " of ", buffers.size(), ". Operands count from 0, results follow them."));
    }
    const Buffer& buffer = buffers[place.buffer];
    if (const std::string outside = reaching_out(buffer.bytes); !outside.empty()) {
      return launch_.error(ffi::ErrorCode::kInvalidArgument,
                           concat("parameter ", i, " reaches outside buffer ", place.buffer, " of ",
                                  buffer.bytes, " bytes; got ", outside, ". Sizes count elements, ",
                                  "strides and offsets bytes."));
    }
    addresses_[i] = buffer.data + place.byte_offset;
    return ffi::Error::Success();
  }

  // At the address taken last.
  ffi::Error encode(size_t i, const TensorMap& map, const Driver& driver, CUtensorMap* encoded) {
    // A map of one dimension has no strides, but the driver takes no null pointer for them.
    const cuuint64_t none = 0;
    const cuuint64_t* byte_strides = map.byte_strides.empty() ? &none : map.byte_strides.data();
    const CUresult result = driver.tensor_map_encode_tiled(
        encoded, map.dtype.code, static_cast<cuuint32_t>(map.sizes.size()), addresses_[i],
        map.sizes.data(), byte_strides, map.box.data(), map.element_strides.data(), map.interleave,
        map.swizzle, map.l2_promotion, map.fill);
    if (result == CUDA_SUCCESS) return ffi::Error::Success();
    return launch_.driver_error(driver, result,
                                concat("parameter ", i, " is no valid tensor map: ", describe(map)),
                                "Compare it with the limits of cuTensorMapEncodeTiled.");
  }

  const Launch& launch_;
  std::vector<std::vector<CUtensorMap>> maps_;
  std::vector<void*> addresses_;
  std::vector<void*> values_;
};

ffi::Error execute(CUstream stream, Launch* launch, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  auto found = Driver::get(launch->label);
  if (found.has_error()) return found.error();
  const Driver& driver = **found;
  CurrentContext context(driver, stream);
  if (CUresult result = context.result()) {
    return launch->driver_error(driver, result, kNoContext, kNoContextWayOut);
  }
  CUfunction function;
  if (auto error = launch->cubin->find(driver, context, *launch, &function); error.failure()) {
    return error;
  }
  auto buffers = buffers_of(operands, results);
  if (buffers.has_error()) return buffers.error();
  Arguments arguments(*launch);
  if (auto error = arguments.fill(driver, *buffers); error.failure()) return error;

  CUlaunchAttribute cluster = {};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim = {launch->cluster[0], launch->cluster[1], launch->cluster[2]};
  CUlaunchConfig config = {};
  config.gridDimX = launch->grid[0];
  config.gridDimY = launch->grid[1];
  config.gridDimZ = launch->grid[2];
  config.blockDimX = launch->block[0];
  config.blockDimY = launch->block[1];
  config.blockDimZ = launch->block[2];
  config.sharedMemBytes = launch->smem_bytes;
  config.hStream = stream;
  config.attrs = &cluster;
  config.numAttrs = launch->cluster_blocks() > 1 ? 1 : 0;
  if (CUresult result = driver.launch_kernel_ex(&config, function, arguments.values(), nullptr)) {
    return launch->driver_error(
        driver, result,
        concat("the launch failed with grid=", listed(launch->grid),
               " block=", listed(launch->block), " cluster=", listed(launch->cluster),
               " smem_bytes=", launch->smem_bytes),
        "Compare it with the kernel's __launch_bounds__ and the limits of the device.");
  }
  launch_count.fetch_add(1, std::memory_order_relaxed);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkernels

// ---- What launcher.py finds in the library ------------------------------------------------------
// Everything else is hidden: the library is built with -fvisibility=hidden.

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkernels_instantiate, jaxkernels::instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkernels_initialize, jaxkernels::initialize,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
                                  .Ctx<xla::ffi::PlatformStream<CUstream>>()
                                  .Ctx<xla::ffi::State<jaxkernels::Launch>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkernels_execute, jaxkernels::execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<CUstream>>()
                                  .Ctx<xla::ffi::State<jaxkernels::Launch>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

extern "C" XLA_FFI_TypeId* jaxkernels_launch_type_id() { return &jaxkernels::Launch::id; }

extern "C" const XLA_FFI_TypeInfo* jaxkernels_launch_type_info() {
  static const XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<jaxkernels::Launch>();
  return &info;
}

// Launches so far. One replayed from a CUDA graph does not pass here: that tells the two apart.
extern "C" uint64_t jaxkernels_launch_count() { return jaxkernels::launch_count.load(); }

#pragma GCC visibility pop
