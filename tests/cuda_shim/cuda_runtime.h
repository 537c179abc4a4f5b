// Enough of CUDA to run the project's kernels on a CPU, one block after the other, each thread a fiber.
//
// Barriers and shuffles switch fibers; a fiber that returned counts no more. It shows whether indices, tails, alignment
// branches and reductions are right; it says nothing of races between blocks, of speed or of a GPU's rounding.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define threadIdx (cuda_shim::me->thread)

struct float4 {
  float x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 blockIdx, gridDim;

namespace cuda_shim {

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 thread;
  bool done = false;
  int waits = 0;  // how many barriers of the present kind it has reached
  double slot = 0;
};

inline Fiber* me = nullptr;
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline const std::function<void()>* body = nullptr;

inline void enter() {
  (*body)();
  me->done = true;
  swapcontext(&me->context, &scheduler);
}

// Waits until every living fiber of [from, to) has arrived as often.
inline void barrier(unsigned from, unsigned to) {
  const int goal = ++me->waits;
  for (;;) {
    bool all = true;
    for (unsigned k = from; k < to; ++k) all &= fibers[k].done || fibers[k].waits >= goal;
    if (all) return;
    swapcontext(&me->context, &scheduler);
  }
}

inline void launch(dim3 blocks, unsigned threads, const std::function<void()>& kernel) {
  constexpr size_t kStack = 64 << 10;
  body = &kernel, gridDim = blocks;
  if (fibers.size() != threads) {
    fibers = std::vector<Fiber>(threads);
    for (Fiber& f : fibers) f.stack.reset(new char[kStack]);
  }
  for (unsigned b = 0; b < blocks.x * blocks.y; ++b) {
    blockIdx.x = b % blocks.x, blockIdx.y = b / blocks.x;
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = fibers[t];
      f.done = false, f.waits = 0, f.thread.x = t;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = kStack, f.context.uc_link = nullptr;
      makecontext(&f.context, enter, 0);
    }
    for (bool alive = true; alive;) {
      alive = false;
      for (Fiber& f : fibers) {
        if (f.done) continue;
        me = &f;
        swapcontext(&scheduler, &f.context);
        alive |= !f.done;
      }
    }
  }
}

}  // namespace cuda_shim

inline void __syncthreads() { cuda_shim::barrier(0, static_cast<unsigned>(cuda_shim::fibers.size())); }
inline void __syncwarp() {
  const unsigned warp = cuda_shim::me->thread.x & ~31u;
  cuda_shim::barrier(warp, warp + 32);
}

template <class T>
T __shfl_xor_sync(uint32_t, T value, int width) {
  const unsigned t = cuda_shim::me->thread.x, warp = t & ~31u;
  cuda_shim::me->slot = static_cast<double>(value);
  cuda_shim::barrier(warp, warp + 32);
  const T other = static_cast<T>(cuda_shim::fibers[t ^ static_cast<unsigned>(width)].slot);
  cuda_shim::barrier(warp, warp + 32);
  return other;
}

template <class T>
void __stwb(T* p, T value) {
  *p = value;
}

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};
template <class... Taken, class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Taken...), const Given&... given) {
  cuda_shim::launch(config->gridDim, config->blockDim.x, [&] { kernel(given...); });
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
using std::isnan;
