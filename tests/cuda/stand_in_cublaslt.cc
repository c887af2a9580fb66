// The part of libcublasLt that ffi/cublaslt.cc calls, for machines without a GPU. It multiplies
// matrices in the host's memory, with float32 sums, and writes its calls down.
//
// It has four algorithms for a product, or none with float16 operands and a float32 result.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "stand_in.h"

namespace {

constexpr int kAlgorithms = 4;
constexpr int kFloat32 = 0, kFloat16 = 2;
constexpr uint32_t kRelu = 2, kBias = 4, kGelu = 32;

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t stride;
  int32_t batch = 1;
  int64_t batch_stride = 0;
};

struct Desc {
  int32_t transpose_a = 0, transpose_b = 0;
  uint32_t epilogue = 1;
  const void* bias = nullptr;
};

struct Preference {
  uint64_t workspace_bytes = 0;
  uint32_t reduction_schemes = 7;
};

struct Proposal {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

// The status of an attribute or an argument that cuBLASLt does not take.
constexpr int kInvalid = 7;

template <typename T>
int set(T* field, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) return kInvalid;
  std::memcpy(field, value, bytes);
  return 0;
}

float load(int type, const void* data, uint64_t i) {
  if (type == kFloat32) return static_cast<const float*>(data)[i];
  if (type == kFloat16) return static_cast<float>(static_cast<const _Float16*>(data)[i]);
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(data)[i]} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void store(int type, void* data, uint64_t i, float value) {
  if (type == kFloat32) {
    static_cast<float*>(data)[i] = value;
  } else if (type == kFloat16) {
    static_cast<_Float16*>(data)[i] = static_cast<_Float16>(value);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits += 0x7fff + (bits >> 16 & 1);
    static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits >> 16);
  }
}

// An element of a matrix that is stored by columns, of one product of the batch.
uint64_t at(const Layout& layout, int32_t product, uint64_t row, uint64_t column) {
  return static_cast<uint64_t>(product * layout.batch_stride) + row +
         column * static_cast<uint64_t>(layout.stride);
}

float activated(float x, uint32_t epilogue) {
  if (epilogue & kRelu) return x > 0 ? x : 0;
  if (epilogue & kGelu) {
    return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
  }
  return x;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* cublasLtGetStatusString(int status) {
  return status == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INTERNAL_ERROR";
}

int cublasLtCreate(void** handle) {
  *handle = &events;
  return outcome<int>("cublasLtCreate");
}

int cublasLtMatmulDescCreate(void** desc, int compute_type, int scale_type) {
  *desc = new Desc;
  return compute_type == 68 && scale_type == kFloat32 ? 0 : kInvalid;
}

int cublasLtMatmulDescSetAttribute(void* object, int attribute, const void* value, size_t bytes) {
  auto* desc = static_cast<Desc*>(object);
  switch (attribute) {
    case 3:
      return set(&desc->transpose_a, value, bytes);
    case 4:
      return set(&desc->transpose_b, value, bytes);
    case 7:
      return set(&desc->epilogue, value, bytes);
    case 8:
      return set(&desc->bias, value, bytes);
    default:
      return kInvalid;
  }
}

int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns,
                               int64_t stride) {
  *layout = new Layout{type, rows, columns, stride};
  return 0;
}

int cublasLtMatrixLayoutSetAttribute(void* object, int attribute, const void* value, size_t bytes) {
  auto* layout = static_cast<Layout*>(object);
  if (attribute == 5) return set(&layout->batch, value, bytes);
  return attribute == 6 ? set(&layout->batch_stride, value, bytes) : kInvalid;
}

int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = new Preference;
  return 0;
}

int cublasLtMatmulPreferenceSetAttribute(void* object, int attribute, const void* value,
                                         size_t bytes) {
  auto* preference = static_cast<Preference*>(object);
  if (attribute == 1) return set(&preference->workspace_bytes, value, bytes);
  return attribute == 3 ? set(&preference->reduction_schemes, value, bytes) : kInvalid;
}

int cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<Preference*>(preference);
  return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void* a, void*, void*, void* d, void* preference,
                                   int wanted, Proposal* proposals, int* found) {
  if (int status = outcome<int>("cublasLtMatmulAlgoGetHeuristic")) return status;
  const bool has_any =
      static_cast<Layout*>(a)->type != kFloat16 || static_cast<Layout*>(d)->type != kFloat32;
  *found = has_any ? (wanted < kAlgorithms ? wanted : kAlgorithms) : 0;
  for (int i = 0; i < *found; ++i) {
    proposals[i] = Proposal{};
    proposals[i].algorithm[0] = static_cast<uint64_t>(i);
  }
  const auto& preferred = *static_cast<Preference*>(preference);
  note([&](std::ostream& out) {
    out << "propose wanted=" << wanted << " workspace=" << preferred.workspace_bytes
        << " reductions=" << preferred.reduction_schemes;
  });
  return 0;
}

int cublasLtMatmul(void*, void* description, const float* alpha, const void* a, Layout* a_layout,
                   const void* b, Layout* b_layout, const float* beta, const void* c,
                   Layout* c_layout, void* d, Layout* d_layout, const uint64_t* algorithm, void*,
                   size_t workspace_bytes, void* stream) {
  if (int status = outcome<int>("cublasLtMatmul")) return status;
  const Desc& desc = *static_cast<Desc*>(description);
  const uint64_t depth = desc.transpose_a ? a_layout->rows : a_layout->columns;
  if (depth != (desc.transpose_b ? b_layout->columns : b_layout->rows)) return kInvalid;
  for (int32_t product = 0; product < d_layout->batch; ++product) {
    for (uint64_t column = 0; column < d_layout->columns; ++column) {
      for (uint64_t row = 0; row < d_layout->rows; ++row) {
        float sum = 0;
        for (uint64_t i = 0; i < depth; ++i) {
          const uint64_t of_a =
              desc.transpose_a ? at(*a_layout, product, i, row) : at(*a_layout, product, row, i);
          const uint64_t of_b = desc.transpose_b ? at(*b_layout, product, column, i)
                                                 : at(*b_layout, product, i, column);
          sum += load(a_layout->type, a, of_a) * load(b_layout->type, b, of_b);
        }
        const uint64_t place = at(*d_layout, product, row, column);
        float result = *alpha * sum;
        if (*beta != 0) result += *beta * load(c_layout->type, c, place);
        if (desc.epilogue & kBias) result += load(d_layout->type, desc.bias, row);
        store(d_layout->type, d, place, activated(result, desc.epilogue));
      }
    }
  }
  note([&](std::ostream& out) {
    out << "multiply algorithm=" << *algorithm << " workspace=" << workspace_bytes
        << " stream=" << stream;
  });
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
