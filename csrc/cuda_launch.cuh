// How every kernel is launched: on the caller's stream, without waiting for it.
#pragma once
#include <cuda_runtime.h>

#include "cuda.h"

namespace prefgrpo {
namespace {

template <class... Given>
const char* run(void (*kernel)(Given...), dim3 grid, int threads, cuda::Stream stream, Given... given) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t code = cudaLaunchKernelEx(&config, kernel, given...);
  cudaGetLastError();  // clears what this launch left, so that torch does not report it again
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}

}  // namespace
}  // namespace prefgrpo
