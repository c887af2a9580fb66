// Elementwise functions of epilogues, of one float. The hardware's approximations are exact enough
// for results of 16 bits; `kIsExact` is for results in float32.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

struct ValueAndSlope {
  float value, slope;
};

template <bool kIsExact>
struct Activations {
  static __device__ __forceinline__ float none(float x) { return x; }
  static __device__ __forceinline__ float relu(float x) { return x != x ? x : fmaxf(x, 0.0f); }
  static __device__ __forceinline__ float relu_squared(float x) { return relu(x) * relu(x); }
  static __device__ __forceinline__ float silu(float x) {
    if constexpr (kIsExact) return x / (1.0f + expf(-x));
    return 0.5f * x * (1.0f + tanh(0.5f * x));
  }
  static __device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.0f + tanh(kSqrt2OverPi * (x + 0.044715f * x * x * x)));
  }
  static __device__ __forceinline__ float gelu_erf(float x) {
    return 0.5f * x * (1.0f + erff(kSqrtHalf * x));
  }

  // Each with its derivative.
  static __device__ __forceinline__ ValueAndSlope none_and_slope(float x) { return {x, 1.0f}; }
  static __device__ __forceinline__ ValueAndSlope relu_and_slope(float x) {
    return {relu(x), x > 0.0f ? 1.0f : 0.0f};
  }
  static __device__ __forceinline__ ValueAndSlope relu_squared_and_slope(float x) {
    return {relu_squared(x), 2.0f * fmaxf(x, 0.0f)};
  }
  static __device__ __forceinline__ ValueAndSlope silu_and_slope(float x) {
    const float s = kIsExact ? 1.0f / (1.0f + expf(-x)) : 0.5f + 0.5f * tanh(0.5f * x);
    return {x * s, s + x * s * (1.0f - s)};
  }
  static __device__ __forceinline__ ValueAndSlope gelu_and_slope(float x) {
    const float t = tanh(kSqrt2OverPi * (x + 0.044715f * x * x * x));
    const float inner = kSqrt2OverPi * (1.0f + 3.0f * 0.044715f * x * x);
    return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner};
  }
  static __device__ __forceinline__ ValueAndSlope gelu_erf_and_slope(float x) {
    constexpr float kInvSqrt2Pi = 0.3989422804014327f;
    const float below = 0.5f * (1.0f + erff(kSqrtHalf * x));
    return {x * below, below + x * kInvSqrt2Pi * expf(-0.5f * x * x)};
  }

 private:
  static constexpr float kSqrt2OverPi = 0.7978845608028654f;
  static constexpr float kSqrtHalf = 0.7071067811865476f;

  static __device__ __forceinline__ float tanh(float x) {
    if constexpr (kIsExact) return tanhf(x);
    return tanh_approximate(x);
  }
};

}  // namespace jaxkernels
