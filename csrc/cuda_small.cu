// CUDA kernels of the small ops: policy loss, group advantages and win rates. Each is one launch of one block,
// without a sync.
//
// Statistics are fp64 and two-pass, over a group's members in index order, as on the CPU; members are neighbours if ids
// ascend (large batches are sorted first). Invariant: every sum has a fixed order; a missing value (NaN) enters none.
#include "cuda_launch.cuh"
#include "math.h"

namespace prefgrpo {
namespace {

constexpr int kThreads = 512;

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
  begin();
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

// Which samples form the group of sample i: those of its id or, if id is null, `size` neighbours, or all (size 0).
struct Members {
  const int64_t* id;
  bool sorted;  // ids ascend, so a group's members are neighbours
  int64_t size, batch;

  // The first sample whose id is at least i's (if `more`: greater than i's).
  __device__ int64_t bound(int64_t i, bool more) const {
    int64_t low = 0, high = batch;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (id[middle] < id[i] || (more && id[middle] == id[i]))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  __device__ int64_t from(int64_t i) const { return sorted ? bound(i, false) : id || !size ? 0 : i / size * size; }
  __device__ int64_t to(int64_t i) const {
    return sorted ? bound(i, true) : id || !size ? batch : i / size * size + size;
  }
  __device__ bool has(int64_t i, int64_t j) const { return sorted || !id || id[i] == id[j]; }
};

struct Stats {
  double mean, deviation;
  bool varies;
};

__device__ Stats stats_of(const double* v, const Members& m, int64_t i, int ddof) {
  double n = 0, sum = 0, low = INFINITY, high = -INFINITY, squares = 0;
  for (int64_t j = m.from(i), to = m.to(i); j < to; ++j) {
    if (!m.has(i, j) || isnan(v[j])) continue;
    n += 1, sum += v[j], low = fmin(low, v[j]), high = fmax(high, v[j]);
  }
  const double mean = sum / fmax(n, 1.0);
  for (int64_t j = m.from(i), to = m.to(i); j < to; ++j)
    if (m.has(i, j) && !isnan(v[j])) squares += (v[j] - mean) * (v[j] - mean);
  return {mean, sqrt(squares / fmax(n - ddof, 1.0)), high > low};
}

// The rank of v[i] within its group, scaled to [0, 1]; tied values get their mean rank.
__device__ double rank_of(const double* v, const Members& m, int64_t i) {
  double n = 0, below = 0, equal = 0;
  for (int64_t j = m.from(i), to = m.to(i); j < to; ++j) {
    if (!m.has(i, j) || isnan(v[j])) continue;
    n += 1, below += v[j] < v[i], equal += v[j] == v[i];
  }
  return isnan(v[i]) ? v[i] : (below + 0.5 * (equal - 1)) / fmax(n - 1, 1.0);
}

// out += weight · normalised(v). `scratch` [3, B] holds ranks and, with sorted ids, each group's mean and deviation
// (−1: its values are equal) at its first member, so that each group is summed only once.
__device__ void normalise(const double* v, const Members& m, int std_mode, double eps, int ddof, bool rank,
                          double weight, double* scratch, float* out) {
  if (rank) {
    for (int64_t i = threadIdx.x; i < m.batch; i += kThreads) scratch[i] = rank_of(v, m, i);
    __syncthreads();
    v = scratch;
  }
  double *means = scratch + m.batch, *deviations = means + m.batch;
  for (int64_t i = threadIdx.x; m.sorted && i < m.batch; i += kThreads) {
    if (m.from(i) != i) continue;
    const Stats s = stats_of(v, m, i, ddof);
    means[i] = s.mean, deviations[i] = s.varies ? s.deviation : -1.0;
  }
  __syncthreads();
  const Members all{nullptr, false, 0, m.batch};
  const double global_std = std_mode == kStdGlobal && m.batch ? stats_of(v, all, 0, ddof).deviation : 0;
  for (int64_t i = threadIdx.x; i < m.batch; i += kThreads) {
    if (isnan(v[i])) continue;
    const int64_t first = m.sorted ? m.from(i) : i;
    const Stats s =
        m.sorted ? Stats{means[first], deviations[first], deviations[first] != -1.0} : stats_of(v, m, i, ddof);
    if (!s.varies) continue;
    const double scale = std_mode == kStdGroup ? s.deviation + eps : std_mode == kStdGlobal ? global_std + eps : 1.0;
    out[i] += static_cast<float>(weight * ((v[i] - s.mean) / scale));
  }
  __syncthreads();
}

__device__ double combine_rewards(const AdvantageParams& p, int64_t i) {
  double sum = 0, total = 0;
  bool negative = false;
  for (int64_t r = 0; r < p.rewards; ++r) {
    const double w = p.weights[r], v = load(p.values, p.dtype, r * p.batch + i);
    if (w == 0) continue;
    total += w, negative |= v < 0;
    sum += p.combine == kGeometric ? w * log(v) : p.combine == kHarmonic ? w / v : w * v;
  }
  if (p.combine != kWeightedSum && negative) return NAN;
  return p.combine == kGeometric ? exp(sum / total) : p.combine == kHarmonic ? total / sum : sum;
}

__device__ bool is_missing(const AdvantageParams& p, int64_t i) {
  bool missing = false;
  for (int64_t r = 0; r < p.rewards; ++r)
    missing |= p.weights[r] != 0 && isnan(load(p.values, p.dtype, r * p.batch + i));
  return missing;
}

__global__ void __launch_bounds__(kThreads, 1) advantage_kernel(const __grid_constant__ AdvantageParams p) {
  begin();
  double *value = p.scratch, *scratch = p.scratch + p.batch;
  const Members m{p.group, p.sorted != 0, 0, p.batch};
  bool any = false;
  for (int64_t r = 0; r < p.rewards; ++r) any |= p.weights[r] != 0;
  for (int64_t i = threadIdx.x; i < p.batch; i += kThreads) p.advantage[i] = 0;
  const int64_t rounds = !any ? 0 : p.combine == kWeightedAdvantageSum ? p.rewards : 1;
  for (int64_t r = 0; r < rounds; ++r) {
    const bool combine_first = p.combine != kWeightedAdvantageSum;
    if (!combine_first && p.weights[r] == 0) continue;
    for (int64_t i = threadIdx.x; i < p.batch; i += kThreads)
      value[i] = is_missing(p, i) ? NAN
                 : combine_first  ? combine_rewards(p, i)
                                  : load(p.values, p.dtype, r * p.batch + i);
    __syncthreads();
    normalise(value, m, p.std_mode, p.eps, p.ddof, p.rank, combine_first ? 1.0 : p.weights[r], scratch, p.advantage);
  }
}

__global__ void __launch_bounds__(kThreads, 1) winrate_kernel(const __grid_constant__ WinrateParams p) {
  begin();
  const int64_t n = p.prompts * p.group;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    double wins = 0, count = 0;
    for (int64_t j = 0; j < p.group; ++j) {
      wins += load(p.wins, p.dtype, i * p.group + j);
      count += load(p.counts, p.dtype, i * p.group + j);
    }
    p.rate[i] = static_cast<float>(count > 0 ? wins / count : NAN);
    p.scratch[i] = p.rate[i], p.advantage[i] = 0;  // rounded: sums in another order differ in fp64
  }
  __syncthreads();
  normalise(p.scratch, {nullptr, false, p.group, n}, p.std_mode, p.eps, p.ddof, false, 1.0, nullptr, p.advantage);
}

}  // namespace

namespace cuda {

const char* launch_policy(const PolicyParams& p, Stream s) { return run(policy_kernel, 1, kThreads, s, p); }
const char* launch_advantage(const AdvantageParams& p, Stream s) { return run(advantage_kernel, 1, kThreads, s, p); }
const char* launch_winrate(const WinrateParams& p, Stream s) { return run(winrate_kernel, 1, kThreads, s, p); }

}  // namespace cuda
}  // namespace prefgrpo
