// One XLA FFI handler that multiplies matrices with cuBLASLt, NVIDIA's library:
//
//   out = activation(alpha * lhs @ rhs + bias)   or   alpha * lhs @ rhs + bias + residual
//
// XLA calls three stages, as in launcher.cc. Instantiate reads the attributes into a `Product`.
// Initialize asks cuBLASLt for its algorithms, once for each context. Execute runs one of them; it
// neither allocates device memory nor synchronises, so XLA may capture it in a CUDA graph.
//
// The operands are lhs, rhs, then the bias and the residual if the product has them. The results
// are out and the workspace. The attributes, written by cublaslt.py beside this file:
//
//   label                     string  what messages call the product
//   m, n, k, batch            i64     sizes; all matrices of a batch follow each other
//   lhs_layout                string  "mk" or "km", last letter contiguous
//   rhs_layout                string  "kn" or "nk"
//   dtype, out_dtype          string  of the operands, and of out, bias and residual
//   alpha                     f32
//   activation                string  "none", "relu" or "gelu"
//   has_bias, has_residual    bool
//   algorithm                 i64     which of cuBLASLt's proposals; 0 is the first
//   workspace_bytes           i64     the most that an algorithm may need
//
// cuBLASLt's wheel has 400 MB, so nothing of it is needed to build this: the part of its interface
// that is used here is declared below (cublasLt.h of CUDA 12 and 13), and the library is opened at
// run time. cuBLASLt stores matrices by columns. It computes out^T = rhs^T lhs^T.

#include <cuda.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attributes.h"
#include "driver.h"
#include "xla/ffi/api/ffi.h"

// The library's names, the newest first. The tests put a stand-in here.
#ifndef JAXKERNELS_LIBCUBLASLT
#define JAXKERNELS_LIBCUBLASLT "libcublasLt.so.13", "libcublasLt.so.12"
#endif

namespace jaxkernels {
namespace {

// ---- cuBLASLt -----------------------------------------------------------------------------------

struct Algorithm {
  uint64_t data[8];
};

struct Proposal {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

using Object = void*;

// cudaDataType, cublasComputeType_t and cublasOperation_t.
constexpr int kFloat32 = 0, kFloat16 = 2, kBfloat16 = 14;
constexpr int kComputeFloat32 = 68;
constexpr int32_t kTranspose = 1;
// cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t,
// cublasLtMatmulPreferenceAttributes_t.
constexpr int kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8;
constexpr int kBatchCount = 5, kBatchStride = 6;
constexpr int kWorkspaceBytes = 1, kReductionSchemes = 3;
// cublasLtReductionScheme_t: parts of k are added up in float32.
constexpr uint32_t kInComputeType = 2;
// cublasLtEpilogue_t.
constexpr uint32_t kPlain = 1, kRelu = 2, kBias = 4, kGelu = 32;

class Library {
 public:
  int (*create)(Object*);
  int (*desc_create)(Object*, int compute_type, int scale_type);
  int (*desc_set)(Object, int attribute, const void*, size_t);
  int (*layout_create)(Object*, int type, uint64_t rows, uint64_t columns, int64_t stride);
  int (*layout_set)(Object, int attribute, const void*, size_t);
  int (*preference_create)(Object*);
  int (*preference_set)(Object, int attribute, const void*, size_t);
  int (*preference_destroy)(Object);
  int (*propose)(Object handle, Object desc, Object a, Object b, Object c, Object d,
                 Object preference, int wanted, Proposal*, int* found);
  int (*multiply)(Object handle, Object desc, const void* alpha, const void* a, Object a_layout,
                  const void* b, Object b_layout, const void* beta, const void* c, Object c_layout,
                  void* d, Object d_layout, const Algorithm*, void* workspace,
                  size_t workspace_bytes, CUstream);
  const char* (*status_string)(int);

  // The library, opened on first use. The outcome is final for the process.
  static ffi::ErrorOr<const Library*> get(std::string_view label);

 private:
  Library() {
    void* library = nullptr;
    for (const char* name : {JAXKERNELS_LIBCUBLASLT}) {
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) {
      const char* why = dlerror();
      problem_ = concat("cuBLASLt cannot be opened; got: ", why == nullptr ? "" : why,
                        ". Install jax[cuda13] or jax[cuda12], which have it.");
      return;
    }
    load(library, create, "cublasLtCreate");
    load(library, desc_create, "cublasLtMatmulDescCreate");
    load(library, desc_set, "cublasLtMatmulDescSetAttribute");
    load(library, layout_create, "cublasLtMatrixLayoutCreate");
    load(library, layout_set, "cublasLtMatrixLayoutSetAttribute");
    load(library, preference_create, "cublasLtMatmulPreferenceCreate");
    load(library, preference_set, "cublasLtMatmulPreferenceSetAttribute");
    load(library, preference_destroy, "cublasLtMatmulPreferenceDestroy");
    load(library, propose, "cublasLtMatmulAlgoGetHeuristic");
    load(library, multiply, "cublasLtMatmul");
    load(library, status_string, "cublasLtGetStatusString");
  }

  template <typename Function>
  void load(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr && problem_.empty()) {
      problem_ = concat("cuBLASLt is too old; it has no ", name, ". Install jax[cuda13].");
    }
  }

  std::string problem_;
};

// ---- The product --------------------------------------------------------------------------------

struct Dtype {
  int code;
  uint64_t bytes;
};
constexpr Named<Dtype> kOperands[] = {{"bfloat16", {kBfloat16, 2}}, {"float16", {kFloat16, 2}}};
constexpr Named<Dtype> kResults[] = {
    {"bfloat16", {kBfloat16, 2}}, {"float16", {kFloat16, 2}}, {"float32", {kFloat32, 4}}};
constexpr Named<bool> kLhsLayouts[] = {{"mk", false}, {"km", true}};
constexpr Named<bool> kRhsLayouts[] = {{"kn", false}, {"nk", true}};
constexpr Named<uint32_t> kActivations[] = {{"none", 0}, {"relu", kRelu}, {"gelu", kGelu}};

// The description of a product for cuBLASLt, in one context.
struct Plan {
  std::mutex mutex;  // The descriptor has the address of one run's bias.
  Object handle = nullptr;
  Object desc = nullptr;
  Object lhs = nullptr;
  Object rhs = nullptr;
  Object out = nullptr;
  Algorithm algorithm = {};
};

// One custom call of a compiled program: what XLA keeps for it between the stages.
struct Product {
  static ffi::TypeId id;

  std::string label;
  uint64_t m, n, k, batch;
  bool is_lhs_transposed;  // "km"
  bool is_rhs_transposed;  // "nk"
  Dtype dtype, out_dtype;
  float alpha;
  uint32_t epilogue;
  bool has_bias, has_residual;
  int algorithm;
  uint64_t workspace_bytes;
  std::mutex mutex;
  // By context. Plans are small, and stay for the life of the process.
  std::map<unsigned long long, Plan*> plans;

  ffi::Error error(ffi::ErrorCode code, const std::string& what) const {
    return ffi::Error(code, concat(label, "[cublaslt]: ", what));
  }
};

ffi::TypeId Product::id = {};

ffi::ErrorOr<const Library*> Library::get(std::string_view label) {
  static const Library library;
  if (library.problem_.empty()) return &library;
  return ffi::Unexpected(
      ffi::Error(ffi::ErrorCode::kUnavailable, concat(label, "[cublaslt]: ", library.problem_)));
}

// ---- Instantiate: attributes to a Product -------------------------------------------------------

// cuBLASLt counts sizes in 32 bits.
constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxAlgorithms = 64;

ffi::ErrorOr<std::unique_ptr<Product>> instantiate_product(ffi::Dictionary dictionary) {
  AttributeReader attributes(dictionary, "jaxkernels.ffi.cublaslt");
  const auto size = [&](const char* name) {
    return static_cast<uint64_t>(attributes.number(name, 1, kMaxSize));
  };
  auto product = std::make_unique<Product>();
  product->label = std::string(attributes.get<std::string_view>("label"));
  product->m = size("m");
  product->n = size("n");
  product->k = size("k");
  product->batch = size("batch");
  product->is_lhs_transposed = attributes.choice("lhs_layout", kLhsLayouts);
  product->is_rhs_transposed = attributes.choice("rhs_layout", kRhsLayouts);
  product->dtype = attributes.choice("dtype", kOperands);
  product->out_dtype = attributes.choice("out_dtype", kResults);
  product->alpha = attributes.get<float>("alpha");
  product->epilogue = attributes.choice("activation", kActivations);
  product->has_bias = attributes.get<bool>("has_bias");
  product->has_residual = attributes.get<bool>("has_residual");
  if (product->has_bias) product->epilogue |= kBias;
  if (product->epilogue == 0) product->epilogue = kPlain;
  product->algorithm = static_cast<int>(attributes.number("algorithm", 0, kMaxAlgorithms - 1));
  product->workspace_bytes = static_cast<uint64_t>(
      attributes.number("workspace_bytes", 0, std::numeric_limits<int64_t>::max()));
  if (!attributes.are_right()) {
    return ffi::Unexpected(product->error(ffi::ErrorCode::kInvalidArgument, attributes.problem()));
  }
  return ffi::ErrorOr<std::unique_ptr<Product>>(std::move(product));
}

// ---- Initialize: an algorithm before the run ----------------------------------------------------

// A handle for each context. It is never destroyed: at exit the driver may be gone before it.
ffi::Error handle_of(const Library& library, const Product& product, unsigned long long context,
                     Object* handle) {
  static auto* mutex = new std::mutex;
  static auto* handles = new std::map<unsigned long long, Object>;
  std::lock_guard<std::mutex> lock(*mutex);
  Object& found = (*handles)[context];
  if (found == nullptr) {
    if (int status = library.create(&found)) {
      found = nullptr;
      return product.error(ffi::ErrorCode::kInternal,
                           concat("cuBLASLt cannot start; got ", library.status_string(status),
                                  ". Leave it some memory of the GPU."));
    }
  }
  *handle = found;
  return ffi::Error::Success();
}

// Describes the product to cuBLASLt and takes the algorithm that is wanted of its proposals.
ffi::Error make_plan(const Library& library, const Product& product, Plan* plan) {
  int status = 0;
  const auto check = [&](int result) {
    if (status == 0) status = result;
  };
  const auto layout = [&](Object* made, const Dtype& dtype, uint64_t rows, uint64_t columns) {
    check(library.layout_create(made, dtype.code, rows, columns, static_cast<int64_t>(rows)));
    if (product.batch > 1 && status == 0) {
      const auto count = static_cast<int32_t>(product.batch);
      const auto stride = static_cast<int64_t>(rows * columns);
      check(library.layout_set(*made, kBatchCount, &count, sizeof(count)));
      check(library.layout_set(*made, kBatchStride, &stride, sizeof(stride)));
    }
  };
  const bool is_rhs_transposed = product.is_rhs_transposed;
  const bool is_lhs_transposed = product.is_lhs_transposed;
  layout(&plan->rhs, product.dtype, is_rhs_transposed ? product.k : product.n,
         is_rhs_transposed ? product.n : product.k);
  layout(&plan->lhs, product.dtype, is_lhs_transposed ? product.m : product.k,
         is_lhs_transposed ? product.k : product.m);
  layout(&plan->out, product.out_dtype, product.n, product.m);
  check(library.desc_create(&plan->desc, kComputeFloat32, kFloat32));
  if (is_rhs_transposed && status == 0) {
    check(library.desc_set(plan->desc, kTransposeA, &kTranspose, sizeof(kTranspose)));
  }
  if (is_lhs_transposed && status == 0) {
    check(library.desc_set(plan->desc, kTransposeB, &kTranspose, sizeof(kTranspose)));
  }
  if (product.epilogue != kPlain && status == 0) {
    check(library.desc_set(plan->desc, kEpilogue, &product.epilogue, sizeof(product.epilogue)));
  }
  if (product.has_bias && status == 0) {
    // Proposals depend on the alignment of the bias: this is that of XLA's buffers.
    const void* aligned = reinterpret_cast<const void*>(uintptr_t{128});
    check(library.desc_set(plan->desc, kBiasPointer, &aligned, sizeof(aligned)));
  }
  Object preference = nullptr;
  std::vector<Proposal> proposals(static_cast<size_t>(product.algorithm) + 1);
  int found = 0;
  if (status == 0) check(library.preference_create(&preference));
  if (status == 0) {
    check(library.preference_set(preference, kWorkspaceBytes, &product.workspace_bytes,
                                 sizeof(product.workspace_bytes)));
    check(library.preference_set(preference, kReductionSchemes, &kInComputeType,
                                 sizeof(kInComputeType)));
    if (status == 0) {
      check(library.propose(plan->handle, plan->desc, plan->rhs, plan->lhs, plan->out, plan->out,
                            preference, static_cast<int>(proposals.size()), proposals.data(),
                            &found));
    }
    library.preference_destroy(preference);
  }
  if (status != 0) {
    return product.error(ffi::ErrorCode::kUnimplemented,
                         concat("cuBLASLt does not multiply these operands; got ",
                                library.status_string(status), ". Use backend=\"xla\"."));
  }
  if (found == 0) {
    return product.error(ffi::ErrorCode::kUnimplemented,
                         "cuBLASLt has no algorithm for this product. Use backend=\"xla\".");
  }
  if (found <= product.algorithm) {
    return product.error(ffi::ErrorCode::kInvalidArgument,
                         concat("cuBLASLt has ", found, " algorithms for this product; got ",
                                "algorithm=", product.algorithm, ". Use a smaller number."));
  }
  plan->algorithm = proposals.back().algorithm;
  return ffi::Error::Success();
}

ffi::Error plan_of(const Library& library, Product* product, unsigned long long context,
                   Plan** plan) {
  std::lock_guard<std::mutex> lock(product->mutex);
  if (auto found = product->plans.find(context); found != product->plans.end()) {
    *plan = found->second;
    return ffi::Error::Success();
  }
  auto made = std::make_unique<Plan>();
  if (auto error = handle_of(library, *product, context, &made->handle); error.failure()) {
    return error;
  }
  if (auto error = make_plan(library, *product, made.get()); error.failure()) return error;
  *plan = product->plans.emplace(context, made.release()).first->second;
  return ffi::Error::Success();
}

// The context of a run, and what cuBLASLt needs in it.
struct Session {
  const Library* library = nullptr;
  std::optional<CurrentContext> context;
  Plan* plan = nullptr;

  ffi::Error enter(CUstream stream, Product* product) {
    auto driver = Driver::get(product->label);
    if (driver.has_error()) return driver.error();
    auto opened = Library::get(product->label);
    if (opened.has_error()) return opened.error();
    library = *opened;
    context.emplace(**driver, stream);
    if (CUresult result = context->result()) {
      return product->error(
          ffi::ErrorCode::kInternal,
          concat(kNoContext, "; got ", (*driver)->describe(result), ". ", kNoContextWayOut));
    }
    return plan_of(*library, product, context->id(), &plan);
  }
};

ffi::Error initialize_product(CUstream stream, Product* product) {
  return Session().enter(stream, product);
}

// ---- Execute ------------------------------------------------------------------------------------

// A buffer that has the bytes it must have.
ffi::Error take(const Product& product, const char* name, const ffi::AnyBuffer& buffer,
                uint64_t bytes, void** address) {
  if (buffer.size_bytes() != bytes) {
    return product.error(ffi::ErrorCode::kInvalidArgument,
                         concat(name, " must have ", bytes, " bytes; got ", buffer.size_bytes(),
                                ". Have jaxkernels.ffi.cublaslt call the handler."));
  }
  *address = buffer.untyped_data();
  return ffi::Error::Success();
}

ffi::Error multiply(CUstream stream, Product* product, ffi::RemainingArgs operands,
                    ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace) {
  Session session;
  if (auto error = session.enter(stream, product); error.failure()) return error;
  const Library& library = *session.library;
  Plan& plan = *session.plan;
  const Product& p = *product;
  struct Operand {
    const char* name;
    uint64_t bytes;
    bool is_given;
    void* address;
  };
  const uint64_t out_bytes = p.batch * p.m * p.n * p.out_dtype.bytes;
  Operand wanted[] = {
      {"lhs", p.batch * p.m * p.k * p.dtype.bytes, true, nullptr},
      {"rhs", p.batch * p.k * p.n * p.dtype.bytes, true, nullptr},
      {"bias", p.n * p.out_dtype.bytes, p.has_bias, nullptr},
      {"residual", out_bytes, p.has_residual, nullptr},
  };
  size_t next = 0;
  for (Operand& operand : wanted) {
    if (!operand.is_given) continue;
    auto buffer = operands.get<ffi::AnyBuffer>(next++);
    if (buffer.has_error()) return buffer.error();
    if (auto error = take(p, operand.name, *buffer, operand.bytes, &operand.address);
        error.failure()) {
      return error;
    }
  }
  void* result = nullptr;
  void* scratch = nullptr;
  if (auto error = take(p, "out", *out, out_bytes, &result); error.failure()) return error;
  if (auto error = take(p, "workspace", *workspace, p.workspace_bytes, &scratch); error.failure()) {
    return error;
  }
  const void* lhs = wanted[0].address;
  const void* rhs = wanted[1].address;
  const void* bias = wanted[2].address;
  const void* residual = p.has_residual ? wanted[3].address : result;

  const float beta = p.has_residual ? 1.0f : 0.0f;
  std::lock_guard<std::mutex> lock(plan.mutex);
  int status = 0;
  if (p.has_bias) status = library.desc_set(plan.desc, kBiasPointer, &bias, sizeof(bias));
  if (status == 0) {
    status = library.multiply(plan.handle, plan.desc, &p.alpha, rhs, plan.rhs, lhs, plan.lhs, &beta,
                              residual, plan.out, result, plan.out, &plan.algorithm, scratch,
                              p.workspace_bytes, stream);
  }
  if (status != 0) {
    return p.error(ffi::ErrorCode::kInternal,
                   concat("cuBLASLt failed; got ", library.status_string(status),
                          " of algorithm=", p.algorithm, ". Use backend=\"xla\"."));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkernels

// ---- The library's symbols, for handler.py ------------------------------------------------------

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkernels_cublaslt_instantiate, jaxkernels::instantiate_product,
                              xla::ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkernels_cublaslt_initialize, jaxkernels::initialize_product,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
                                  .Ctx<xla::ffi::PlatformStream<CUstream>>()
                                  .Ctx<xla::ffi::State<jaxkernels::Product>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxkernels_cublaslt_execute, jaxkernels::multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<CUstream>>()
                                  .Ctx<xla::ffi::State<jaxkernels::Product>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

extern "C" XLA_FFI_TypeId* jaxkernels_cublaslt_type_id() { return &jaxkernels::Product::id; }

extern "C" const XLA_FFI_TypeInfo* jaxkernels_cublaslt_type_info() {
  static const XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<jaxkernels::Product>();
  return &info;
}

#pragma GCC visibility pop
