// CUDA kernels of the SDE step, its replay and their gradient.
//
// Partial sums go to fp64 scratch, and a second small kernel adds them in a fixed order: there is no state between
// launches. Kernels are specialised on the dtypes and on what is asked for. Invariant: the order of every sum depends
// on D alone (no float atomics) and is the same in step and replay, so log-probs are bitwise equal.
#include "io.cuh"

namespace prefgrpo {
namespace {

enum NoiseKind { kNone, kGiven, kCounter };

PG_DEVICE double warp_sum(double x) {
  for (int width = 16; width > 0; width >>= 1) x += __shfl_xor_sync(0xffffffffu, x, width);
  return x;
}

// Adds this block's sums in a fixed order and stores them for finish_kernel.
template <int kSums>
PG_DEVICE void store_partial(double* partial, int64_t batch, const float (&sums)[kSums]) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double warps[kSums][kWarps];
  for (int k = 0; k < kSums; ++k) {
    const double sum = warp_sum(sums[k]);
    if (threadIdx.x % 32 == 0) warps[k][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int k = 0; k < kSums; ++k) {
    double sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += warps[k][w];
    partial[(k * batch + blockIdx.x) * gridDim.y + blockIdx.y] = sum;
  }
}

// One warp per sample and result: adds the partial sums of that plane of `partial` in a fixed order.
__global__ void __launch_bounds__(96) finish_kernel(const __grid_constant__ SumParams p, const int64_t chunks) {
  const int64_t i = blockIdx.x;
  const int plane = threadIdx.x / 32;
  const double* partial = p.partial + (plane * p.batch + i) * chunks;
  double sum = 0;
#pragma unroll 8
  for (int64_t j = threadIdx.x % 32; j < chunks; j += 32) sum += partial[j];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 != 0) return;
  if (plane == 0)
    store_result(p.logp, kLogp, p, i, sum);
  else if (plane == 1 && p.kl.data)
    store_result(p.kl, kKl, p, i, sum);
  else
    store_result(p.log_ratio, kLogRatio, p, i, sum);
}

template <int kX, int kV, int kY, int kNoise>
__global__ void __launch_bounds__(kThreads, 8)
    step_kernel(const __grid_constant__ StepParams p, const __grid_constant__ Split split) {
  const int64_t i = blockIdx.x, at = first_of(split, p.dim);
  Lane<kX> x_lane(p.x, at);
  Lane<kV> v_lane(p.v, at);
  Lane<kY> y_lane(p.y, at);
  Lane<kF32> eps_lane(p.eps, at);
  Row r{};
  Counter counter{};
  float acc = 0.f;
  for (Tile tile(split); tile.left > 0; tile.advance()) {
    x_lane.fetch(tile);
    v_lane.fetch(tile);
    if (kNoise == kGiven) eps_lane.fetch(tile);
    if (tile.from == 0) {  // these loads wait for an index: after those of the latents
      r = row_of(p, i);
      if (kNoise == kCounter) counter = counter_of(p.noise, i);
    }
    Values e{}, mean, y;
    if (kNoise == kCounter) counter_noise(split, counter, tile, e);
    if (kNoise == kGiven) e = eps_lane.values();
    const Values x = x_lane.values(), v = v_lane.values();
    for (int j = 0; j < kVector; ++j) {
      mean[j] = mean_of(r, x[j], v[j]);
      y[j] = kNoise == kNone ? mean[j] : mean[j] + r.s * e[j];
    }
    if (p.mean.data) Lane<kF32>(p.mean, at).store(tile, mean);
    y_lane.store(tile, y);
    if (kNoise == kNone) continue;
    y = y_lane.values();
    for (int j = 0; j < kVector; ++j) acc = fmaf(y[j] - mean[j], y[j] - mean[j], acc);
  }
  if (kNoise == kNone) {
    if (blockIdx.y == 0 && threadIdx.x == 0) reinterpret_cast<float*>(p.logp.data)[i] = r.c;
    return;
  }
  const float sums[1] = {acc};
  store_partial(p.partial, p.batch, sums);
}

template <int kX, int kV, int kY, bool kKl, bool kGuard>
__global__ void __launch_bounds__(kThreads, 8)
    logp_kernel(const __grid_constant__ LogpParams p, const __grid_constant__ Split split) {
  const int64_t i = blockIdx.x, at = first_of(split, p.dim);
  Lane<kX> x_lane(p.x, at);
  Lane<kY> y_lane(p.y, at);
  Lane<kV> v_lane(p.v, at), ref_lane(p.v_ref, at), old_lane(p.v_old, at);
  Row r{};
  float sums[1 + kKl + kGuard] = {};
  for (Tile tile(split); tile.left > 0; tile.advance()) {
    x_lane.fetch(tile);
    v_lane.fetch(tile);
    y_lane.fetch(tile);
    if (kKl) ref_lane.fetch(tile);
    if (kGuard) old_lane.fetch(tile);
    if (tile.from == 0) r = row_of(p, i);
    const Values x = x_lane.values(), v = v_lane.values(), y = y_lane.values();
    for (int j = 0; j < kVector; ++j) {
      const float d = y[j] - mean_of(r, x[j], v[j]);
      sums[0] = fmaf(d, d, sums[0]);
    }
    if (kKl) {
      const Values ref = ref_lane.values();
      for (int j = 0; j < kVector; ++j) sums[kKl] = fmaf(v[j] - ref[j], v[j] - ref[j], sums[kKl]);
    }
    if (kGuard) {
      const Values old = old_lane.values();
      for (int j = 0; j < kVector; ++j)
        sums[kKl + kGuard] = fmaf(y[j] - mean_of(r, x[j], old[j]), v[j] - old[j], sums[kKl + kGuard]);
    }
  }
  store_partial(p.partial, p.batch, sums);
}

constexpr int grad_blocks(int others) { return others == 0 ? 8 : others == 1 ? 6 : 5; }  // per multiprocessor

template <int kX, int kV, int kY, bool kKl, bool kGuard>
__global__ void __launch_bounds__(kThreads, grad_blocks(kKl + kGuard))
    grad_kernel(const __grid_constant__ GradParams p, const __grid_constant__ Split split) {
  __shared__ GradScale scale;
  const int64_t i = blockIdx.x, at = first_of(split, p.dim);
  Lane<kX> x_lane(p.x, at);
  Lane<kY> y_lane(p.y, at);
  Lane<kV> v_lane(p.v, at), dv_lane(p.dv, at), ref_lane(p.v_ref, at), old_lane(p.v_old, at);
  Row r{};
  for (Tile tile(split); tile.left > 0; tile.advance()) {
    x_lane.fetch(tile);
    v_lane.fetch(tile);
    y_lane.fetch(tile);
    if (kKl) ref_lane.fetch(tile);
    if (kGuard) old_lane.fetch(tile);
    if (tile.from == 0) {
      r = row_of(p, i);
      if (threadIdx.x == 0)  // an fp64 division, once per block
        scale = grad_scale(r, split.share, p.g_logp ? p.g_logp[i] : 0.f, kKl ? p.g_kl[i] : 0.f,
                           kGuard ? p.g_log_ratio[i] : 0.f);
      __syncthreads();
    }
    const Values x = x_lane.values(), v = v_lane.values(), y = y_lane.values();
    Values d;
    for (int j = 0; j < kVector; ++j) d[j] = scaled(scale.logp, y[j] - mean_of(r, x[j], v[j]));
    if (kKl) {
      const Values ref = ref_lane.values();
      for (int j = 0; j < kVector; ++j) d[j] += scaled(scale.kl, v[j] - ref[j]);
    }
    if (kGuard) {
      const Values old = old_lane.values();
      for (int j = 0; j < kVector; ++j) d[j] += scaled(scale.log_ratio, y[j] - mean_of(r, x[j], old[j]));
    }
    dv_lane.store(tile, d);
  }
}

void launch_finish(const SumParams& p, int64_t stream) {
  if (p.batch == 0) return;
  const int planes = 1 + (p.kl.data != nullptr) + (p.log_ratio.data != nullptr);
  const dim3 grid(static_cast<unsigned>(p.batch));
  launch_kernel(finish_kernel, grid, 32 * planes, stream, p, cuda::partials_of(p.dim, p.size));
}

// kernel<x, v, y, …> of a Types<x, v, y> and two options.
#define PG_KERNEL(kernel, t, kl, guard)                                                         \
  ((kl)      ? (guard) ? kernel<t.x, t.v, t.y, true, true> : kernel<t.x, t.v, t.y, true, false> \
   : (guard) ? kernel<t.x, t.v, t.y, false, true>                                               \
             : kernel<t.x, t.v, t.y, false, false>)

}  // namespace

namespace cuda {

int64_t partials_of(int64_t dim, int64_t size) {
  const int64_t block = static_cast<int64_t>(kTile) * tiles_of(size);
  return (dim + block - 1) / block;
}

void sde_step(const StepParams& p, int64_t stream) {
  const auto kernel = with_types(p, [&p](auto t) {
    return p.noise.sample ? step_kernel<t.x, t.v, t.y, kCounter>
           : p.eps.data   ? step_kernel<t.x, t.v, t.y, kGiven>
                          : step_kernel<t.x, t.v, t.y, kNone>;
  });
  launch_tiles(kernel, p, p.size, stream, p.noise);
  if (p.noise.sample || p.eps.data) launch_finish(p, stream);
}

void sde_logp(const LogpParams& p, int64_t stream) {
  const auto kernel = with_types(p, [&p](auto t) { return PG_KERNEL(logp_kernel, t, p.kl.data, p.log_ratio.data); });
  launch_tiles(kernel, p, p.size, stream);
  launch_finish(p, stream);
}

void sde_grad(const GradParams& p, int64_t stream) {
  const auto kernel = with_types(p, [&p](auto t) { return PG_KERNEL(grad_kernel, t, p.g_kl, p.g_log_ratio); });
  launch_tiles(kernel, p, p.size, stream);
}

}  // namespace cuda
}  // namespace prefgrpo
