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

// Tiles per block, a function of D alone: one up to 2^21 elements, so that small batches fill the GPU; more where a
// sample has thousands of blocks anyway, so that there are few partial sums. Never more than 65,535 blocks.
inline int tiles_of(int64_t dim) {
  const int64_t few = dim >> 21 < 1 ? 1 : dim >> 21 > 8 ? 8 : dim >> 21, many = dim >> 25;
  return static_cast<int>(few > many ? few : many);
}

// Elements per block, elements of a sample's last block, and the least number of remaining elements for a full tile
// (1024; no tile is full if a tensor of the launch is not 16-byte aligned at every sample).
struct Split {
  int block, last, min_full;
  Keys keys;  // of the noise
};

template <class Params>
void launch_tiles(void (*kernel)(Params, Split), const Params& p, bool is_aligned, int64_t stream, int64_t seed = 0) {
  if (p.batch == 0 || p.dim == 0) return;
  if (p.batch > 0x7fffffffll) throw std::runtime_error("more than 2^31 samples are too many for one launch; split it");
  const int64_t chunks = cuda::partials_of(p.dim);
  const int block = kTile * tiles_of(p.dim);
  const Split split{block, static_cast<int>(p.dim - (chunks - 1) * block), is_aligned ? kTile : 0x7fffffff,
                    keys_of(static_cast<uint64_t>(seed))};
  const dim3 grid(static_cast<unsigned>(p.batch), static_cast<unsigned>(chunks));
  launch_kernel(kernel, grid, kThreads, stream, p, split);
}

// Whether every sample of every tensor begins at a multiple of 16 bytes.
template <class... Views>
bool all_aligned(int64_t dim, const Views&... views) {
  bool aligned = true;
  for (const View& t : {views...}) {
    const uintptr_t size = static_cast<uintptr_t>(dim * (t.dtype == kF32 ? 4 : 2));
    aligned &= t.data == nullptr || ((reinterpret_cast<uintptr_t>(t.data) | size) & 15) == 0;
  }
  return aligned;
}

}  // namespace
}  // namespace prefgrpo
