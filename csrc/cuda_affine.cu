// CUDA kernels of the affine step, its replay and their gradient.
//
// A block takes 4096 elements of one sample, 8 neighbours per thread by 128-bit accesses; partial sums go to fp64
// scratch and the block that finishes last adds them in a fixed order. Invariant: the order of every sum depends on D
// alone (no float atomics), and step and replay share it, so their log-probs are equal bit for bit.
#include <cuda_runtime.h>

#include "cuda.h"
#include "cuda_io.cuh"
#include "math.h"

namespace prefgrpo {
namespace {

using namespace base;

constexpr int kThreads = 256, kTiles = 2, kBlock = kThreads * kVector * kTiles;

struct Sums {
  double v[3];
};

__device__ __forceinline__ void four(const NoiseAddress& a, int64_t i, int64_t block, float (&z)[4]) {
  const uint64_t id = static_cast<uint64_t>(a.sample[i]);
  const Words w = philox({{static_cast<uint32_t>(block), static_cast<uint32_t>(a.step[i]), static_cast<uint32_t>(id),
                           static_cast<uint32_t>(id >> 32)}},
                         static_cast<uint32_t>(a.seed), static_cast<uint32_t>(a.seed >> 32));
  const Pair p = normal_pair(w.x[0], w.x[1]), q = normal_pair(w.x[2], w.x[3]);
  z[0] = p.cos_part, z[1] = p.sin_part, z[2] = q.cos_part, z[3] = q.sin_part;
}

__device__ __forceinline__ void addressed(const NoiseAddress& a, int64_t i, int64_t k, float (&e)[kVector]) {
  const int64_t from = a.offset + k;
  const int skip = static_cast<int>(from & 3);
  float z[4];
  four(a, i, from >> 2, z);
  if (skip == 0) {
    e[0] = z[0], e[1] = z[1], e[2] = z[2], e[3] = z[3];
    four(a, i, (from >> 2) + 1, z);
    e[4] = z[0], e[5] = z[1], e[6] = z[2], e[7] = z[3];
    return;
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int lane = (skip + j) & 3;
    if (j > 0 && lane == 0) four(a, i, (from + j) >> 2, z);
    e[j] = lane == 0 ? z[0] : lane == 1 ? z[1] : lane == 2 ? z[2] : z[3];
  }
}

// Row i of the table; NaN where the index lies outside.
__device__ __forceinline__ Row row_of(const AffineParams& p, int64_t i) {
  const int64_t k = p.index ? p.index[i] : i;
  if (k < 0 || k >= p.rows) {
    const float nan = from_bits(0x7fc00000u);
    return {nan, nan, nan, nan, nan};
  }
  const float* r = p.coef + 5 * k;
  return {r[0], r[1], r[2], r[3], r[4]};
}

__device__ __forceinline__ void velocity(const AffineParams& p, int64_t i, int64_t k, int n, float (&v)[kVector]) {
  load(p.v, i, k, n, v);
  if (!p.u.data) return;
  float u[kVector];
  load(p.u, i, k, n, u);
#pragma unroll
  for (int j = 0; j < kVector; ++j) v[j] = guide(v[j], u[j], p.guidance, p.from_cond);
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int width = 16; width > 0; width >>= 1) x += __shfl_xor_sync(0xffffffffu, x, width);
  return x;
}

// Sum over the block in a fixed order; valid in thread 0.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double warps[kThreads / 32];
  x = warp_sum(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = x;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0)
    for (int k = 0; k < kThreads / 32; ++k) sum += warps[k];
  return sum;
}

// Adds this block's sums; in the sample's last block, true in thread 0 with the totals.
template <int kPlanes>
__device__ bool reduce(const AffineParams& p, int64_t i, int64_t chunk, int64_t chunks, Sums& sums) {
  __shared__ bool last;
#pragma unroll
  for (int k = 0; k < kPlanes; ++k) {
    const double sum = block_sum(sums.v[k]);
    if (threadIdx.x == 0) p.partial[(k * p.batch + i) * chunks + chunk] = sum;
  }
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(p.ticket + i, 1u) == static_cast<uint32_t>(chunks - 1);
  }
  __syncthreads();
  if (!last) return false;
  __threadfence();
#pragma unroll
  for (int k = 0; k < kPlanes; ++k) {
    double sum = 0;
    for (int64_t j = threadIdx.x; j < chunks; j += kThreads) sum += __ldcg(p.partial + (k * p.batch + i) * chunks + j);
    sums.v[k] = block_sum(sum);
  }
  if (threadIdx.x == 0) p.ticket[i] = 0;
  return threadIdx.x == 0;
}

__global__ void __launch_bounds__(kThreads, 4) step_kernel(const __grid_constant__ AffineParams p, int64_t chunks) {
  const int64_t i = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const Row r = row_of(p, i);
  float acc = 0.f;
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t k = chunk * kBlock + tile * (kThreads * kVector) + static_cast<int64_t>(threadIdx.x) * kVector;
    if (k >= p.dim) break;
    const int n = p.dim - k < kVector ? static_cast<int>(p.dim - k) : kVector;
    float x[kVector], v[kVector], e[kVector], mean[kVector];
    load(p.x, i, k, n, x);
    velocity(p, i, k, n, v);
    if (p.x0.data) {
      const int64_t t = p.index ? p.index[i] : i;
      const float sigma = t >= 0 && t < p.rows ? p.sigma[t] : r.a;
#pragma unroll
      for (int j = 0; j < kVector; ++j) mean[j] = x[j] - sigma * v[j];
      store(p.x0, i, k, n, mean);
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) mean[j] = mean_of(r, x[j], v[j]);
    if (p.mean.data) store(p.mean, i, k, n, mean);
    const bool noisy = p.noise.sample || p.eps.data;
    if (p.noise.sample)
      addressed(p.noise, i, k, e);
    else if (p.eps.data)
      load(p.eps, i, k, n, e);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float y = noisy ? mean[j] + r.s * e[j] : mean[j];
      x[j] = rounded(y, p.out.dtype);
      const float d = j < n ? x[j] - mean[j] : 0.f;
      acc += d * d;
    }
    store(p.out, i, k, n, x);
  }
  Sums sums{{acc, 0, 0}};
  if (reduce<1>(p, i, chunk, chunks, sums)) p.logp[i] = finish_logp(r, sums.v[0], p.dim);
}

template <int kPlanes>
__global__ void __launch_bounds__(kThreads) logp_kernel(const __grid_constant__ AffineParams p, int64_t chunks) {
  const int64_t i = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const Row r = row_of(p, i);
  float acc = 0.f, kl = 0.f, guard = 0.f;
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t k = chunk * kBlock + tile * (kThreads * kVector) + static_cast<int64_t>(threadIdx.x) * kVector;
    if (k >= p.dim) break;
    const int n = p.dim - k < kVector ? static_cast<int>(p.dim - k) : kVector;
    float x[kVector], v[kVector], y[kVector], o[kVector];
    load(p.x, i, k, n, x);
    velocity(p, i, k, n, v);
    load(p.out, i, k, n, y);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float d = j < n ? y[j] - mean_of(r, x[j], v[j]) : 0.f;
      acc += d * d;
    }
    if (kPlanes == 1) continue;
    if (p.v_ref.data) {
      load(p.v_ref, i, k, n, o);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float d = j < n ? v[j] - o[j] : 0.f;
        kl += d * d;
      }
    }
    if (p.v_old.data) {
      load(p.v_old, i, k, n, o);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float d = j < n ? (y[j] - mean_of(r, x[j], o[j])) * (v[j] - o[j]) : 0.f;
        guard += d;
      }
    }
  }
  Sums sums{{acc, kl, guard}};
  if (!reduce<kPlanes>(p, i, chunk, chunks, sums)) return;
  p.logp[i] = finish_logp(r, sums.v[0], p.dim);
  if (kPlanes == 1) return;
  if (p.kl) p.kl[i] = finish_kl(r, sums.v[1], p.dim);
  if (p.guard) p.guard[i] = finish_guard(r, sums.v[2], p.dim);
}

__global__ void __launch_bounds__(kThreads) grad_kernel(const __grid_constant__ AffineParams p, int64_t chunks) {
  const int64_t i = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const Row r = row_of(p, i);
  const GradScale g =
      grad_scale(r, p.dim, p.g_logp ? p.g_logp[i] : 0.f, p.g_kl ? p.g_kl[i] : 0.f, p.g_guard ? p.g_guard[i] : 0.f);
  const float to_c = p.from_cond ? 1.0f + p.guidance : p.guidance, to_u = p.from_cond ? -p.guidance : 1.0f - p.guidance;
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t k = chunk * kBlock + tile * (kThreads * kVector) + static_cast<int64_t>(threadIdx.x) * kVector;
    if (k >= p.dim) break;
    const int n = p.dim - k < kVector ? static_cast<int>(p.dim - k) : kVector;
    float x[kVector], v[kVector], y[kVector], o[kVector], d[kVector];
    load(p.x, i, k, n, x);
    velocity(p, i, k, n, v);
    load(p.out, i, k, n, y);
#pragma unroll
    for (int j = 0; j < kVector; ++j) d[j] = scaled(g.logp, y[j] - mean_of(r, x[j], v[j]));
    if (p.v_ref.data && g.kl != 0.f) {
      load(p.v_ref, i, k, n, o);
#pragma unroll
      for (int j = 0; j < kVector; ++j) d[j] += g.kl * (v[j] - o[j]);
    }
    if (p.v_old.data && g.guard != 0.f) {
      load(p.v_old, i, k, n, o);
#pragma unroll
      for (int j = 0; j < kVector; ++j) d[j] += g.guard * (y[j] - mean_of(r, x[j], o[j]));
    }
    if (p.u.data) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) o[j] = to_u * d[j], d[j] = to_c * d[j];
      store(p.du, i, k, n, o);
    }
    store(p.dv, i, k, n, d);
  }
}

__global__ void __launch_bounds__(kThreads) normal_kernel(const __grid_constant__ NormalParams p, int64_t chunks) {
  const int64_t i = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t k = chunk * kBlock + tile * (kThreads * kVector) + static_cast<int64_t>(threadIdx.x) * kVector;
    if (k >= p.dim) break;
    float e[kVector];
    addressed(p.noise, i, k, e);
    store(p.out, i, k, p.dim - k < kVector ? static_cast<int>(p.dim - k) : kVector, e);
  }
}

// ------------------------------------------------ guidance with the norm restored: one warp per row of the last
// dimension
template <bool kBackward>
__global__ void __launch_bounds__(kThreads, 1) guide_kernel(const __grid_constant__ AffineParams p, int64_t rows) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> 5;
  if (warp >= p.batch * rows) return;
  const int64_t i = warp / rows, from = (warp % rows) * p.rescale_dim;
  const int lane = threadIdx.x & 31;
  double cc = 0, qq = 0, gq = 0, gg = 0;
  for (int64_t k = lane; k < p.rescale_dim; k += 32) {
    const float c = one(p.v, i, from + k), q = guide(c, one(p.u, i, from + k), p.guidance, p.from_cond);
    cc += static_cast<double>(c) * c, qq += static_cast<double>(q) * q;
    if (kBackward) {
      const float g = one(p.eps, i, from + k);
      gq += static_cast<double>(g) * q, gg += fabsf(g);
    }
  }
  const bool used = kBackward && warp_sum(gg) != 0;  // a row whose dv is 0 gets 0, whatever c and u hold
  cc = warp_sum(cc), qq = warp_sum(qq), gq = kBackward ? warp_sum(gq) : 0;
  const float ratio = qq > 0 ? static_cast<float>(sqrt(cc / qq)) : 0.f;
  const double along = qq > 0 ? gq / qq : 0;
  const float on_q = static_cast<float>(ratio * along), on_c = cc > 0 ? static_cast<float>(along * sqrt(qq / cc)) : 0.f;
  const float to_c = p.from_cond ? 1.0f + p.guidance : p.guidance, to_u = p.from_cond ? -p.guidance : 1.0f - p.guidance;
  for (int64_t k = lane; k < p.rescale_dim; k += 32) {
    const float c = one(p.v, i, from + k), q = guide(c, one(p.u, i, from + k), p.guidance, p.from_cond);
    if (!kBackward) {
      put(p.out, i, from + k, q * ratio);
      continue;
    }
    const float dq = ratio * one(p.eps, i, from + k) - on_q * q;
    put(p.dv, i, from + k, used ? to_c * dq + on_c * c : 0.f);
    put(p.du, i, from + k, used ? to_u * dq : 0.f);
  }
}

const char* status() {
  const cudaError_t code = cudaGetLastError();
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}

template <class Params>
const char* launch(void (*kernel)(Params, int64_t), const Params& p, cuda::Stream stream) {
  if (p.batch == 0 || p.dim == 0) return nullptr;
  const int64_t chunks = cuda::partials_of(p.dim), blocks = chunks * p.batch;
  if (blocks > 0x7fffffffll) return "the batch is too large for one launch (more than 2^31 blocks); split it";
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, chunks);
  return status();
}

template <bool kBackward>
const char* launch_rows(const AffineParams& p, cuda::Stream stream) {
  if (p.batch == 0 || p.dim == 0) return nullptr;
  const int64_t rows = p.dim / p.rescale_dim, blocks = (p.batch * rows + kThreads / 32 - 1) / (kThreads / 32);
  if (blocks > 0x7fffffffll) return "the batch is too large for one launch (more than 2^31 blocks); split it";
  guide_kernel<kBackward><<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, rows);
  return status();
}

}  // namespace

namespace cuda {

int64_t partials_of(int64_t dim) { return (dim + kBlock - 1) / kBlock; }

const char* launch_affine_step(const AffineParams& p, Stream s) { return launch(step_kernel, p, s); }
const char* launch_affine_logp(const AffineParams& p, Stream s) {
  return p.kl || p.guard ? launch(logp_kernel<3>, p, s) : launch(logp_kernel<1>, p, s);
}
const char* launch_affine_grad(const AffineParams& p, Stream s) { return launch(grad_kernel, p, s); }
const char* launch_normal(const NormalParams& p, Stream s) { return launch(normal_kernel, p, s); }
const char* launch_guide(const AffineParams& p, Stream s) { return launch_rows<false>(p, s); }
const char* launch_guide_grad(const AffineParams& p, Stream s) { return launch_rows<true>(p, s); }

}  // namespace cuda
}  // namespace prefgrpo
