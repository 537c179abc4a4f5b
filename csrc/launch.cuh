// How every kernel is launched: on the caller's stream, without waiting for it; and how a sample is split into blocks.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels.h"
#include "math.h"

namespace prefgrpo {
namespace {

constexpr int kThreads = 128, kVector = 8, kTile = kThreads * kVector;

template <class... Taken>
void launch_kernel(void (*kernel)(Taken...), dim3 grid, int threads, int64_t stream, Taken... taken) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  const cudaError_t code = cudaLaunchKernelEx(&config, kernel, taken...);
  cudaGetLastError();  // clears what this launch left, so that torch does not report it again
  if (code != cudaSuccess) throw std::runtime_error(std::string("CUDA launch failed: ") + cudaGetErrorString(code));
}

// Tiles per block, a function of the size of a whole sample: one up to 2^21 elements, so that small batches fill the
// GPU; more where a sample has thousands of blocks anyway, so that there are few partial sums. Never more than 65,535
// blocks.
inline int tiles_of(int64_t size) {
  const int64_t few = size >> 21 < 1 ? 1 : size >> 21 > 8 ? 8 : size >> 21, many = size >> 25;
  return static_cast<int>(few > many ? few : many);
}

// Elements per block and of a sample's last block; `counter`: the first counter block of the noise.
struct Split {
  int block, last;
  uint32_t counter;
  double share;  // 1 / size
  Keys keys;     // of the noise
};

template <class Params>
void launch_tiles(void (*kernel)(Params, Split), const Params& p, int64_t size, int64_t stream,
                  const PhiloxNoise& noise = {}) {
  if (p.batch == 0 || p.dim == 0) return;
  if (p.batch > 0x7fffffffll) throw std::runtime_error("more than 2^31 samples are too many for one launch; split it");
  const int64_t chunks = cuda::partials_of(p.dim, size);
  const int block = kTile * tiles_of(size);
  const Split split{block, static_cast<int>(p.dim - (chunks - 1) * block), static_cast<uint32_t>(noise.offset / 4),
                    1.0 / static_cast<double>(size), keys_of(static_cast<uint64_t>(noise.seed))};
  const dim3 grid(static_cast<unsigned>(p.batch), static_cast<unsigned>(chunks));
  launch_kernel(kernel, grid, kThreads, stream, p, split);
}

}  // namespace
}  // namespace prefgrpo
