// CUDA kernels of the small ops: noise on its own, policy loss (one block) and win rates (one warp per prompt).
//
// Invariant: every sum is fp64 and has a fixed order; a missing value (NaN) enters no statistic.
#include "io.cuh"

namespace prefgrpo {
namespace {

__global__ void __launch_bounds__(kThreads, 8)
    normal_kernel(const __grid_constant__ NormalParams p, const __grid_constant__ Split split) {
  const Counter counter = counter_of(p.noise, blockIdx.x);
  Lane<kF32> out(p.out, first_of(split, p.dim));
  for (Tile tile(split); tile.left > 0; tile.advance()) {
    Values e;
    counter_noise(split, counter, tile, e);
    out.store(tile, e);
  }
}

// Each thread adds its samples in order; thread 0 adds the threads' sums in order.
__global__ void __launch_bounds__(kThreads, 1) policy_kernel(const __grid_constant__ PolicyParams p) {
  __shared__ PolicySums threads[kThreads];
  const PolicyClip clip = policy_clip(p);
  PolicySums sums = no_policy_terms();
  for (int64_t i = threadIdx.x; i < p.batch; i += kThreads) add_policy_term(p, clip, i, sums);
  threads[threadIdx.x] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int k = 1; k < kThreads && k < p.batch; ++k) merge_policy_sums(threads[k], sums);
  finish_policy(p, sums);
}

// Each lane computes the rates of its members, then every lane the same moments of all.
__global__ void __launch_bounds__(kThreads) winrate_kernel(const __grid_constant__ WinrateParams p) {
  const int64_t prompt = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (prompt >= p.prompts) return;
  float* rate = p.rate + prompt * p.group;
  for (int64_t i = threadIdx.x % 32; i < p.group; i += 32) rate[i] = rate_of(p, prompt * p.group + i);
  __syncwarp();
  const Moments m = moments(rate, p.group, p.ddof);
  for (int64_t i = threadIdx.x % 32; i < p.group; i += 32)
    p.advantage[prompt * p.group + i] = advantage_of(rate[i], m, p.use_std, p.eps);
}

}  // namespace

namespace cuda {

void sde_step(const StepParams&, int64_t stream);
void sde_logp(const LogpParams&, int64_t stream);
void sde_grad(const GradParams&, int64_t stream);

static void normal(const NormalParams& p, int64_t stream) { launch_tiles(normal_kernel, p, p.dim, stream, p.noise); }

static void policy_loss(const PolicyParams& p, int64_t stream) {
  launch_kernel(policy_kernel, dim3(1), kThreads, stream, p);
}

static void winrate(const WinrateParams& p, int64_t stream) {
  if (p.prompts == 0 || p.group == 0) return;
  const int64_t warps = kThreads / 32;
  const dim3 blocks(static_cast<unsigned>((p.prompts + warps - 1) / warps));
  launch_kernel(winrate_kernel, blocks, kThreads, stream, p);
}

const Kernels kernels = {sde_step, sde_logp, sde_grad, normal, policy_loss, winrate};

}  // namespace cuda
}  // namespace prefgrpo
