// CPU entry points: choice of the instruction set, scratch memory, and the tiny ops that need no vector code.
//
// Invariant: a launch writes only to the pointers it is given, and neither the instruction set nor the thread count
// changes the order of a sum.
#include "cpu.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

#include "math.h"

namespace prefgrpo {
namespace plain {
extern const CpuKernels kernels;
}
#if defined(PG_X86)
namespace avx2 {
extern const CpuKernels kernels;
}
namespace avx512 {
extern const CpuKernels kernels;
}
#endif

namespace cpu {
namespace {

struct Choice {
  const char* name;
  const CpuKernels* kernels;
};

bool find(const char* name, Choice& out) {
#if defined(PG_X86)
  if (!std::strcmp(name, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    out = {"avx512", &avx512::kernels};
    return true;
  }
  if (!std::strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    out = {"avx2", &avx2::kernels};
    return true;
  }
#endif
  if (std::strcmp(name, "plain")) return false;
  out = {"plain", &plain::kernels};
  return true;
}

Choice& selected() {
  static Choice choice = [] {
    Choice best{};
    for (const char* name : {"avx512", "avx2", "plain"})
      if (find(name, best)) break;
    return best;
  }();
  return choice;
}

using Launch = void (*CpuKernels::*)(const AffineParams&);

void with_scratch(const AffineParams& given, Launch launch, int num_sums) {
  if (given.batch == 0 || given.dim == 0) return;
  for (int64_t i = 0; given.index && i < given.batch; ++i)
    if (given.index[i] < 0 || given.index[i] >= given.rows)
      throw std::out_of_range("index: " + std::to_string(given.index[i]) + " is not within the " +
                              std::to_string(given.rows) + " rows of coef");
  const CpuKernels& k = *selected().kernels;
  AffineParams p = given;
  const int64_t size = num_sums * p.batch * k.partials_of(p.dim, p.rescale_dim);
  std::unique_ptr<double[]> partial(new double[size + 1]());
  p.partial = partial.get();
  (k.*launch)(p);
}

}  // namespace

const char* isa() { return selected().name; }
bool use_isa(const char* name) { return find(name, selected()); }

void launch_affine_step(const AffineParams& p, Stream) { with_scratch(p, &CpuKernels::affine_step, 1); }
void launch_affine_logp(const AffineParams& p, Stream) { with_scratch(p, &CpuKernels::affine_logp, 3); }
void launch_affine_grad(const AffineParams& p, Stream) { with_scratch(p, &CpuKernels::affine_grad, 0); }
void launch_normal(const NormalParams& p, Stream) {
  if (p.batch && p.dim) selected().kernels->normal(p);
}

void launch_policy(const PolicyParams& p, Stream) {
  double sum = 0, squares = 0, ratios = 0, kls = 0;
  float low = std::numeric_limits<float>::infinity(), high = -low;
  int64_t above = 0, below = 0;
  const double n = static_cast<double>(p.batch > 1 ? p.batch : 1), norm = p.denominator != 0 ? p.denominator : n;
  for (int64_t i = 0; i < p.batch; ++i) {
    if (p.d_kl) p.d_kl[i] = static_cast<float>(p.kl_coef / norm);
    const float delta = p.log_ratio ? p.log_ratio[i] : p.logp[i] - p.logp_old[i];
    const base::PolicyTerm t =
        base::policy_term(delta, p.advantage[i], p.adv_clip, p.clip_low, p.clip_high, p.weight ? p.weight[i] : 1.0f);
    p.d_delta[i] = static_cast<float>(t.d_delta / norm);
    const double kl = p.kl ? p.kl[i] : 0.0;
    sum += t.loss + (p.kl ? p.kl_coef * kl : 0.0), kls += kl, squares += static_cast<double>(delta) * delta,
        ratios += t.ratio;
    low = low <= t.ratio || std::isnan(low) ? low : t.ratio;  // NaN stays
    high = high >= t.ratio || std::isnan(high) ? high : t.ratio;
    above += t.above, below += t.below;
  }
  p.loss[0] = static_cast<float>(sum / norm);
  const double metrics[8] = {
      0.5 * squares / n, (above + below) / n, above / n, below / n, low, ratios / n, high, kls / n};
  for (int k = 0; k < 8; ++k) p.metrics[k] = static_cast<float>(metrics[k]);
}

static double load(const void* data, int32_t dtype, int64_t k) {
  return dtype == kF64 ? static_cast<const double*>(data)[k] : static_cast<const float*>(data)[k];
}

// fp64 and two-pass, over a prompt's members in order, of the rates as returned: rounded, so that equal ones are equal.
void launch_winrate(const WinrateParams& p, Stream) {
  for (int64_t i = 0; i < p.prompts * p.group; ++i) {
    double wins = 0, count = 0;
    for (int64_t j = i * p.group; j < (i + 1) * p.group; ++j) {
      wins += load(p.wins, p.dtype, j);
      count += load(p.counts, p.dtype, j);
    }
    p.rate[i] = static_cast<float>(count > 0 ? wins / count : std::numeric_limits<double>::quiet_NaN());
  }
  for (int64_t prompt = 0; prompt < p.prompts; ++prompt) {
    const float* rate = p.rate + prompt * p.group;
    float* advantage = p.advantage + prompt * p.group;
    const base::Moments m = base::moments(rate, p.group, p.ddof);
    for (int64_t i = 0; i < p.group; ++i) advantage[i] = base::advantage_of(rate[i], m, p.use_std, p.eps);
  }
}

}  // namespace cpu
}  // namespace prefgrpo
