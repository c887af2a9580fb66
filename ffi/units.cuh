// Rows in global memory, read in units of 16 bytes: 8 elements of 16 bits. Neighbouring threads
// read neighbouring units of a row.

#pragma once

#include "ptx.cuh"

namespace jaxkernels {

constexpr int kUnit = 8;

struct alignas(16) Unit {
  u32 words[4];
};

// How many threads read a row of so many units: a power of two, at most a warp.
constexpr __device__ int lanes_of(int units) {
  int lanes = 1;
  while (lanes < units && lanes < 32) lanes *= 2;
  return lanes;
}

}  // namespace jaxkernels
