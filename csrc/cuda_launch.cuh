// How every kernel is launched, and what it does first.
//
// From sm_90 on, a launch may start while the previous one in the stream finishes (programmatic dependent launch): the
// replay's three launches then follow each other without a gap. Not under graph capture, where older drivers reject it.
// Invariant: before it touches memory, a kernel calls `begin`, which waits until everything before it in the stream is
// done and visible.
#pragma once
#include <cuda_runtime.h>

#include "cuda.h"

namespace prefgrpo {
namespace {

__device__ __forceinline__ void begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... Given>
const char* run(void (*kernel)(Given...), dim3 grid, int threads, cuda::Stream stream, Given... given) {
  int device = 0, major = 0;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capturing);
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early, config.numAttrs = major >= 9 && capturing == cudaStreamCaptureStatusNone;
  cudaLaunchKernelEx(&config, kernel, given...);
  const cudaError_t code = cudaGetLastError();
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}

}  // namespace
}  // namespace prefgrpo
