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

PG_DEVICE double sum_partials(const LogpParams& p, int plane, int64_t chunks) {
  const double* partial = p.partial + (plane * p.batch + blockIdx.x) * chunks;
  double sum = 0;
  for (int64_t j = threadIdx.x; j < chunks; j += 32) sum += partial[j];
  return warp_sum(sum);
}

// One warp per sample: logp and, if asked, KL and log-ratio. The planes of `partial`: logp, KL (if any), log-ratio.
__global__ void __launch_bounds__(32) finish_kernel(const __grid_constant__ LogpParams p, const int64_t chunks) {
  const int64_t i = blockIdx.x;
  const Row r = row_of(p, i);
  const double logp = sum_partials(p, 0, chunks);
  const double kl = p.kl ? sum_partials(p, 1, chunks) : 0;
  const double log_ratio = p.log_ratio ? sum_partials(p, p.kl ? 2 : 1, chunks) : 0;
  if (threadIdx.x != 0) return;
  p.logp[i] = finish_logp(r, logp, p.dim);
  if (p.kl) p.kl[i] = finish_kl(r, kl, p.dim);
  if (p.log_ratio) p.log_ratio[i] = finish_log_ratio(r, log_ratio, p.dim);
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
  Tile tile = first_tile(split);
  bool first = true;
  do {
    x_lane.fetch(tile);
    v_lane.fetch(tile);
    if (kNoise == kGiven) eps_lane.fetch(tile);
    if (first) {
      r = row_of(p, i);
      if (kNoise == kCounter) counter = counter_of(p.noise, i);
    }
    first = false;
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
    y = y_lane.values();
    for (int j = 0; j < kVector; ++j) acc = fmaf(y[j] - mean[j], y[j] - mean[j], acc);
  } while (next(split, tile));
  const float sums[1] = {acc};
  store_partial(p.partial, p.batch, sums);
}

template <int kX, int kV, bool kKl, bool kGuard>
__global__ void __launch_bounds__(kThreads, 8)
    logp_kernel(const __grid_constant__ LogpParams p, const __grid_constant__ Split split) {
  const int64_t i = blockIdx.x, at = first_of(split, p.dim);
  Lane<kX> x_lane(p.x, at), y_lane(p.y, at);
  Lane<kV> v_lane(p.v, at), ref_lane(p.v_ref, at), old_lane(p.v_old, at);
  Row r{};
  float sums[1 + kKl + kGuard] = {};
  Tile tile = first_tile(split);
  bool first = true;
  do {
    x_lane.fetch(tile);
    v_lane.fetch(tile);
    y_lane.fetch(tile);
    if (kKl) ref_lane.fetch(tile);
    if (kGuard) old_lane.fetch(tile);
    if (first) r = row_of(p, i);
    first = false;
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
  } while (next(split, tile));
  store_partial(p.partial, p.batch, sums);
}

template <int kX, int kV, bool kKl, bool kGuard>
__global__ void __launch_bounds__(kThreads, kKl&& kGuard    ? 5
                                            : kKl || kGuard ? 6
                                                            : 8)
    grad_kernel(const __grid_constant__ GradParams p, const __grid_constant__ Split split) {
  __shared__ GradScale scale;
  const int64_t i = blockIdx.x, at = first_of(split, p.dim);
  Lane<kX> x_lane(p.x, at), y_lane(p.y, at);
  Lane<kV> v_lane(p.v, at), dv_lane(p.dv, at), ref_lane(p.v_ref, at), old_lane(p.v_old, at);
  Row r{};
  Tile tile = first_tile(split);
  bool first = true;
  do {
    x_lane.fetch(tile);
    v_lane.fetch(tile);
    y_lane.fetch(tile);
    if (kKl) ref_lane.fetch(tile);
    if (kGuard) old_lane.fetch(tile);
    if (first) {
      r = row_of(p, i);
      if (threadIdx.x == 0)  // fp64 divisions, once per block
        scale =
            grad_scale(r, p.dim, p.g_logp ? p.g_logp[i] : 0.f, kKl ? p.g_kl[i] : 0.f, kGuard ? p.g_log_ratio[i] : 0.f);
      __syncthreads();
    }
    first = false;
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
  } while (next(split, tile));
}

// The log-prob of each sample, and what else is asked for, from the sums of its blocks.
void launch_finish(const LogpParams& p, int64_t stream) {
  if (p.batch == 0) return;
  launch_kernel(finish_kernel, dim3(static_cast<unsigned>(p.batch)), 32, stream, p, cuda::partials_of(p.dim));
}

template <int kX, int kV, int kY>
void launch_step(const StepParams& p, int64_t stream) {
  const auto kernel = p.noise.sample ? step_kernel<kX, kV, kY, kCounter>
                      : p.eps.data   ? step_kernel<kX, kV, kY, kGiven>
                                     : step_kernel<kX, kV, kY, kNone>;
  launch_tiles(kernel, p, all_aligned(p.dim, p.x, p.v, p.y, p.eps, p.mean), stream, p.noise.seed);
  LogpParams sums{p};
  sums.logp = p.logp;
  sums.partial = p.partial;
  launch_finish(sums, stream);
}

}  // namespace

namespace cuda {

int64_t partials_of(int64_t dim) {
  const int64_t block = static_cast<int64_t>(kTile) * tiles_of(dim);
  return (dim + block - 1) / block;
}

void sde_step(const StepParams& p, int64_t stream) {
  if (p.x.dtype == kBF16) return launch_step<kBF16, kBF16, kBF16>(p, stream);
  if (p.y.dtype == kBF16)
    return p.v.dtype == kBF16 ? launch_step<kF32, kBF16, kBF16>(p, stream) : launch_step<kF32, kF32, kBF16>(p, stream);
  return p.v.dtype == kBF16 ? launch_step<kF32, kBF16, kF32>(p, stream) : launch_step<kF32, kF32, kF32>(p, stream);
}

// `kernel` of one op for the dtypes and for what is asked for.
#define PG_OPTIONS(kernel, x, v)                                                         \
  {                                                                                      \
    {kernel<x, v, 0, 0>, kernel<x, v, 0, 1>}, { kernel<x, v, 1, 0>, kernel<x, v, 1, 1> } \
  }
#define PG_KERNELS(kernel) \
  {PG_OPTIONS(kernel, kF32, kF32), PG_OPTIONS(kernel, kF32, kBF16), PG_OPTIONS(kernel, kBF16, kBF16)}

void sde_logp(const LogpParams& p, int64_t stream) {
  static constexpr void (*kernels[3][2][2])(LogpParams, Split) = PG_KERNELS(logp_kernel);
  const auto kernel = kernels[p.x.dtype + p.v.dtype][p.kl != nullptr][p.log_ratio != nullptr];
  launch_tiles(kernel, p, all_aligned(p.dim, p.x, p.v, p.y, p.v_ref, p.v_old), stream);
  launch_finish(p, stream);
}

void sde_grad(const GradParams& p, int64_t stream) {
  static constexpr void (*kernels[3][2][2])(GradParams, Split) = PG_KERNELS(grad_kernel);
  const auto kernel = kernels[p.x.dtype + p.v.dtype][p.g_kl != nullptr][p.g_log_ratio != nullptr];
  launch_tiles(kernel, p, all_aligned(p.dim, p.x, p.v, p.y, p.v_ref, p.v_old, p.dv), stream);
}

}  // namespace cuda
}  // namespace prefgrpo
