// Elementwise functions of epilogues, of one float. The hardware's approximations are exact enough
// for results of 16 bits; `kIsExact` is for results in float32.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

template <bool kIsExact>
struct Activations {
  static __device__ __forceinline__ float none(float x) { return x; }
  static __device__ __forceinline__ float relu(float x) { return x != x ? x : fmaxf(x, 0.0f); }
  static __device__ __forceinline__ float silu(float x) {
    if constexpr (kIsExact) return x / (1.0f + expf(-x));
    return 0.5f * x * (1.0f + tanh(0.5f * x));
  }
  static __device__ __forceinline__ float gelu(float x) {
    constexpr float kSqrt2OverPi = 0.7978845608028654f;
    return 0.5f * x * (1.0f + tanh(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
  }
  static __device__ __forceinline__ float gelu_erf(float x) {
    return 0.5f * x * (1.0f + erff(0.7071067811865476f * x));
  }

 private:
  static __device__ __forceinline__ float tanh(float x) {
    if constexpr (kIsExact) return tanhf(x);
    return tanh_approximate(x);
  }
};

}  // namespace jaxkernels
