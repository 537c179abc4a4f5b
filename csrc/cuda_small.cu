// CUDA kernels of the small ops: policy loss (one block) and win rates (one warp per prompt). One launch each, no sync.
//
// Statistics are fp64 and two-pass, over a group's members in index order, as on the CPU. Invariant: every sum has a
// fixed order; a missing value (NaN) enters none.
#include "cuda_launch.cuh"
#include "math.h"

namespace prefgrpo {
namespace {

constexpr int kThreads = 512, kWinrateThreads = 128;

// Σ over the block in a fixed order, returned to every thread.
__device__ double block_sum(double x) {
  __shared__ double part[kThreads / 32];
#pragma unroll
  for (int width = 16; width > 0; width >>= 1) x += __shfl_xor_sync(0xffffffffu, x, width);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  double sum = 0;
  for (int k = 0; k < kThreads / 32; ++k) sum += part[k];
  return sum;
}

// The minimum; NaN if either is NaN.
__device__ __forceinline__ float min_or_nan(float a, float b) { return isnan(a) || a <= b ? a : b; }

__device__ float block_min(float x) {
  __shared__ float part[kThreads / 32];
#pragma unroll
  for (int width = 16; width > 0; width >>= 1) x = min_or_nan(x, __shfl_xor_sync(0xffffffffu, x, width));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = x;
  __syncthreads();
  float low = part[0];
  for (int k = 1; k < kThreads / 32; ++k) low = min_or_nan(low, part[k]);
  return low;
}

__global__ void __launch_bounds__(kThreads, 1) policy_kernel(const __grid_constant__ PolicyParams p) {
  const double count = fmax(static_cast<double>(p.batch), 1.0), norm = p.denominator != 0 ? p.denominator : count;
  double sum = 0, squares = 0, ratios = 0, kls = 0, above = 0, below = 0;
  float low = INFINITY, high = INFINITY;  // high holds −ratio
  for (int64_t i = threadIdx.x; i < p.batch; i += kThreads) {
    if (p.d_kl) p.d_kl[i] = static_cast<float>(p.kl_coef / norm);
    const float delta = p.log_ratio ? p.log_ratio[i] : p.logp[i] - p.logp_old[i];
    const base::PolicyTerm t =
        base::policy_term(delta, p.advantage[i], p.adv_clip, p.clip_low, p.clip_high, p.weight ? p.weight[i] : 1.0f);
    p.d_delta[i] = static_cast<float>(t.d_delta / norm);
    sum += t.loss + (p.kl ? static_cast<double>(p.kl_coef) * p.kl[i] : 0.0), kls += p.kl ? p.kl[i] : 0.f;
    squares += static_cast<double>(delta) * delta, ratios += t.ratio, above += t.above, below += t.below;
    low = min_or_nan(low, t.ratio), high = min_or_nan(high, -t.ratio);
  }
  sum = block_sum(sum), squares = block_sum(squares), ratios = block_sum(ratios), kls = block_sum(kls);
  above = block_sum(above), below = block_sum(below), low = block_min(low), high = block_min(high);
  if (threadIdx.x) return;
  p.loss[0] = static_cast<float>(sum / norm);
  const double m[8] = {0.5 * squares / count, (above + below) / count,    above / count, below / count, low,
                       ratios / count,        -static_cast<double>(high), kls / count};
#pragma unroll
  for (int k = 0; k < 8; ++k) p.metrics[k] = static_cast<float>(m[k]);
}

__device__ double load(const void* data, int32_t dtype, int64_t k) {
  return dtype == kF64 ? static_cast<const double*>(data)[k] : static_cast<const float*>(data)[k];
}

// One warp per prompt: each lane computes the rates of its members, then every lane the same moments of all.
__global__ void __launch_bounds__(kWinrateThreads) winrate_kernel(const __grid_constant__ WinrateParams p) {
  const int64_t prompt = static_cast<int64_t>(blockIdx.x) * (kWinrateThreads / 32) + threadIdx.x / 32;
  if (prompt >= p.prompts) return;
  float* rate = p.rate + prompt * p.group;
  for (int64_t i = threadIdx.x % 32; i < p.group; i += 32) {
    double wins = 0, count = 0;
    const int64_t row = (prompt * p.group + i) * p.group;
    for (int64_t j = row; j < row + p.group; ++j) {
      wins += load(p.wins, p.dtype, j);
      count += load(p.counts, p.dtype, j);
    }
    rate[i] = static_cast<float>(count > 0 ? wins / count : NAN);
  }
  __syncwarp();
  const base::Moments m = base::moments(rate, p.group, p.ddof);
  for (int64_t i = threadIdx.x % 32; i < p.group; i += 32)
    p.advantage[prompt * p.group + i] = base::advantage_of(rate[i], m, p.use_std, p.eps);
}

}  // namespace

namespace cuda {

const char* launch_policy(const PolicyParams& p, Stream s) { return run(policy_kernel, 1, kThreads, s, p); }
const char* launch_winrate(const WinrateParams& p, Stream s) {
  if (p.prompts == 0 || p.group == 0) return nullptr;
  const int64_t warps = kWinrateThreads / 32, blocks = (p.prompts + warps - 1) / warps;
  return run(winrate_kernel, static_cast<unsigned>(blocks), kWinrateThreads, s, p);
}

}  // namespace cuda
}  // namespace prefgrpo
