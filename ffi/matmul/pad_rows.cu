// padded[row][0 : size] = x[row][0 : size], zeros from there to `stride`, a multiple of 8 elements
// of 16 bits: rows that the Tensor Memory Accelerator takes, from rows that begin anywhere.
//
// A warp takes a row at a time, a lane 16 bytes of the result. It reads them as aligned 4-byte
// words, of which it needs a fifth where the row begins in the middle of one.

namespace jaxkernels {

using u16 = unsigned short;
using u32 = unsigned int;

constexpr int kWarp = 32;
constexpr int kUnit = 8;  // Elements in 16 bytes.

__global__ __launch_bounds__(256) void pad_rows(const u16* __restrict__ x,
                                                uint4* __restrict__ padded, int rows, int size,
                                                int stride) {
  const int units = stride / kUnit;
  const int lane = threadIdx.x % kWarp;
  const int warps = gridDim.x * (blockDim.x / kWarp);
  for (int row = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp; row < rows; row += warps) {
    const u16* from = x + static_cast<long long>(row) * size;
    uint4* to = padded + static_cast<long long>(row) * units;
    const bool is_odd = reinterpret_cast<unsigned long long>(from) % 4 != 0;
#pragma unroll 4
    for (int unit = lane; unit < units; unit += kWarp) {
      const int first = unit * kUnit;
      uint4 result;
      if (first + kUnit < size) {
        const u32* words = reinterpret_cast<const u32*>(from + first - (is_odd ? 1 : 0));
        u32 w[5];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = __ldg(words + i);
        w[4] = is_odd ? __ldg(words + 4) : 0;
        const u32 shift = is_odd ? 16 : 0;
        result.x = __funnelshift_r(w[0], w[1], shift);
        result.y = __funnelshift_r(w[1], w[2], shift);
        result.z = __funnelshift_r(w[2], w[3], shift);
        result.w = __funnelshift_r(w[3], w[4], shift);
      } else {  // The end of the row: no word may reach beyond the array.
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int element = first + 2 * i;
          w[i] = element < size ? from[element] : 0;
          if (element + 1 < size) w[i] |= static_cast<u32>(from[element + 1]) << 16;
        }
        result = make_uint4(w[0], w[1], w[2], w[3]);
      }
      to[unit] = result;
    }
  }
}

}  // namespace jaxkernels
