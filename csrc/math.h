// The arithmetic shared by all compiled backends, for one sample or one element at a time.
//
//   x' = a·x + b·v + s·ε      logp = w · mean_D (x' − a·x − b·v)² + c
//
// Invariant: no expression here may be contracted (-ffp-contract=off, -fmad=false); an intended fused multiply-add is
// written as fmaf. CPU and GPU, vector and scalar code therefore round alike.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__CUDACC__)
#define PG_INLINE __host__ __device__ __forceinline__
#else
#define PG_INLINE static inline __attribute__((always_inline))
#endif

namespace prefgrpo {

PG_INLINE uint32_t bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

PG_INLINE float from_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// ---------------------------------------------------------------- affine map
// The coefficients of sample i: of its index, or the only row, or row i; NaN if its index is outside the table.
PG_INLINE Row row_of(const SdeParams& p, int64_t i) {
  const int64_t k = p.index ? p.index[i] : p.rows == 1 ? 0 : i;
  const float nan = from_bits(0x7fc00000u);
  return k >= 0 && k < p.rows ? p.coef[k] : Row{nan, nan, nan, nan, nan};
}

PG_INLINE float mean_of(const Row& r, float x, float v) { return r.a * x + r.b * v; }

// Factors of the three residuals in one sample's dv, from its gradients ∂/∂logp, ∂/∂kl, ∂/∂log_ratio. `scaled`
// multiplies: a term whose factor is 0 adds exactly 0, even if its residual is NaN or infinite.
struct GradScale {
  float logp, kl, log_ratio;
};

// share: 1 / size, so that a block divides once.
PG_INLINE GradScale grad_scale(const Row& r, double share, float g_logp, float g_kl, float g_log_ratio) {
  GradScale k{};
  if (r.w != 0.f) k.logp = static_cast<float>(-2.0 * r.w * r.b * share * g_logp);
  if (!(r.s > 0.f)) return k;
  const double b_over_s = static_cast<double>(r.b) / r.s;
  k.kl = static_cast<float>(b_over_s * b_over_s * share * g_kl);
  k.log_ratio = static_cast<float>(b_over_s * share * g_log_ratio);
  return k;
}

PG_INLINE float scaled(float factor, float residual) { return factor == 0.f ? 0.f : factor * residual; }

enum Sum { kLogp, kKl, kLogRatio };

// One result of a sample, from its sum over D.
PG_INLINE float finished(Sum what, const Row& r, double sum, int64_t size) {
  const double mean = sum / static_cast<double>(size), b = r.b, s = r.s;
  // a step without a log-prob has 0, whatever x holds
  if (what == kLogp) return r.w == 0.f ? r.c : r.w * static_cast<float>(mean) + r.c;
  if (!(r.s > 0.f)) return 0.f;
  return static_cast<float>(what == kKl ? b * b / (2.0 * s * s) * mean : b / s * mean);
}

// Stores a result, or the sum itself where that is asked for.
PG_INLINE void store_result(const View& out, Sum what, const SdeParams& p, int64_t i, double sum) {
  if (out.dtype == kF64)
    reinterpret_cast<double*>(out.data)[i] = sum;
  else if (out.data)
    reinterpret_cast<float*>(out.data)[i] = finished(what, row_of(p, i), sum, p.size);
}

// ---------------------------------------------------------------- counter-based noise
struct Words {
  uint32_t x[4];
};

// The key of each round of Philox4x32-10.
struct Keys {
  uint32_t low[10], high[10];
};

PG_INLINE Keys keys_of(uint64_t seed) {
  Keys k;
  for (uint32_t round = 0; round < 10; ++round) {
    k.low[round] = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
    k.high[round] = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
  }
  return k;
}

struct Product {
  uint32_t low, high;
};

PG_INLINE Product product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)  // from 64-bit C++ the compiler also multiplies the constant's upper half, which is 0
  Product p;
  asm("{.reg .u64 t; mul.wide.u32 t, %2, %3; mov.b64 {%0, %1}, t;}" : "=r"(p.low), "=r"(p.high) : "r"(a), "r"(b));
  return p;
#else
  const uint64_t p = static_cast<uint64_t>(a) * b;
  return {static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32)};
#endif
}

// Philox4x32-10 (Salmon et al., SC 2011).
PG_INLINE Words philox(Words c, const Keys& keys) {
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const Product p = product(c.x[0], 0xD2511F53u), q = product(c.x[2], 0xCD9E8D57u);
    c = {{q.high ^ c.x[1] ^ keys.low[round], q.low, p.high ^ c.x[3] ^ keys.high[round], p.low}};
  }
  return c;
}

// Word → uniform ((w >> 9) + ½)·2⁻²³: exact in fp32, never 0 or 1; built from the bits of 1 + (w >> 9)·2⁻²³.
PG_INLINE float uniform(uint32_t w) { return from_bits((w >> 9) + 0x3f800000u) - (1.0f - 0x1p-24f); }

// −2 ln u for u in (0, 1), to about 1 ulp: Cephes' logf with every constant times −2, which changes no rounding.
PG_INLINE float minus_two_ln(float u) {
  const uint32_t exponent = (bits(u) - 0x3f3504f3u) & 0xff800000u;  // such that the mantissa lies in [√½, √2)
  const float z = from_bits(bits(u) - exponent) - 1.0f;
  const float k = static_cast<float>(static_cast<int32_t>(exponent));  // times 2²³, exactly
  float p = -2 * 7.0376836292e-2f;
  p = fmaf(p, z, -2 * -1.1514610310e-1f);
  p = fmaf(p, z, -2 * 1.1676998740e-1f);
  p = fmaf(p, z, -2 * -1.2420140846e-1f);
  p = fmaf(p, z, -2 * 1.4249322787e-1f);
  p = fmaf(p, z, -2 * -1.6668057665e-1f);
  p = fmaf(p, z, -2 * 2.0000714765e-1f);
  p = fmaf(p, z, -2 * -2.4999993993e-1f);
  p = fmaf(p, z, -2 * 3.3333331174e-1f);
  const float z2 = z * z;
  const float y = fmaf(z * z2, p, k * (-2 * -2.12194440e-4f * 0x1p-23f)) + z2;
  return fmaf(k, -2 * 0.693359375f * 0x1p-23f, fmaf(z, -2.0f, y));
}

// √x of a normal number, rounded to nearest; on the GPU, the steps that the compiler emits after its range check.
PG_INLINE float root(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  const float s = x * r;
  return fmaf(fmaf(-s, s, x), 0.5f * r, s);
#else
  return sqrtf(x);
#endif
}

struct Pair {
  float cos_part, sin_part;
};

// Box-Muller on two words: √(−2 ln u₀)·(cos, sin)(2π u₁), the angle reduced exactly in turns.
PG_INLINE Pair normal_pair(uint32_t w0, uint32_t w1) {
  const float radius = root(minus_two_ln(uniform(w0)));
  const float t = uniform(w1), shifted = fmaf(t, 4.0f, 0x1.8p23f);  // the lowest bits hold the nearest quadrant
  const uint32_t quadrant = bits(shifted);
  const float x = fmaf(shifted - 0x1.8p23f, -0.25f, t) * 6.283185307179586f;
  const float z = x * x;
  float s = fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f);
  s = fmaf(s, z, -1.6666654611e-1f);
  s = fmaf(s * z, x, x);
  float c = fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f);
  c = fmaf(c, z, 4.166664568298827e-2f);
  c = fmaf(c * z, z, fmaf(z, -0.5f, 1.0f));
  const bool odd = quadrant & 0x80000001u;  // bit 31 is 0; testing both bits is one instruction on the GPU
  const uint32_t flip_sin = quadrant << 30 & 0x80000000u, flip_cos = ((quadrant << 30) + 0x40000000u) & 0x80000000u;
  const uint32_t cos_bits = bits(odd ? s : c) ^ flip_cos, sin_bits = bits(odd ? c : s) ^ flip_sin;
  return {radius * from_bits(cos_bits), radius * from_bits(sin_bits)};
}

// ---------------------------------------------------------------- storage dtypes
PG_INLINE float bf16_to_float(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

PG_INLINE uint32_t round_to_bf16(float x) {  // the bits of the rounded fp32: to nearest even; NaN stays NaN
  const uint32_t u = bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded;
}

// Converts two values, `low` into the low bits; the hardware instruction differs only in the bits of a NaN.
PG_INLINE uint32_t pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
#else
  return round_to_bf16(low) >> 16 | round_to_bf16(high);
#endif
}

// ---------------------------------------------------------------- policy loss
// Bounds of the log-ratio: clipping is decided there, where it is exact for any clip range.
struct PolicyClip {
  double low, high, log_low, log_high;
};

PG_INLINE PolicyClip policy_clip(const PolicyParams& p) {
  const double log_low = p.epsilon_low < 1.0 ? log1p(-p.epsilon_low) : -INFINITY;
  return {1.0 - p.epsilon_low, 1.0 + p.epsilon_high, log_low, log1p(p.epsilon_high)};
}

struct PolicySums {
  double loss, squares, deltas, ratios, kl, above, below;
  double shifts, spreads;  // of ratio − 1 and its square: near 1 a variance of ratios would cancel
  double lowest, highest;  // of the ratio; NaN once a ratio is
};

PG_INLINE PolicySums no_policy_terms() { return {0, 0, 0, 0, 0, 0, 0, 0, 0, INFINITY, -INFINITY}; }

PG_INLINE double min_or_nan(double a, double b) { return a != a || a <= b ? a : b; }
PG_INLINE double max_or_nan(double a, double b) { return a != a || a >= b ? a : b; }

PG_INLINE void merge_policy_sums(const PolicySums& from, PolicySums& to) {
  to.loss += from.loss;
  to.squares += from.squares;
  to.deltas += from.deltas;
  to.ratios += from.ratios;
  to.kl += from.kl;
  to.above += from.above;
  to.below += from.below;
  to.shifts += from.shifts;
  to.spreads += from.spreads;
  to.lowest = min_or_nan(to.lowest, from.lowest);
  to.highest = max_or_nan(to.highest, from.highest);
}

// Adds sample i, max(−A r, −A clip(r)) with r = exp(logp − logp_old), and stores its gradients.
PG_INLINE void add_policy_term(const PolicyParams& p, const PolicyClip& c, int64_t i, PolicySums& s) {
  const double delta = p.logp_old ? p.logp[i] - p.logp_old[i] : p.logp[i];
  const double advantage = p.advantage[i], weight = p.weight ? p.weight[i] : 1.0, kl = p.kl ? p.kl[i] : 0.0;
  const double a = advantage > p.adv_clip ? p.adv_clip : advantage < -p.adv_clip ? -p.adv_clip : advantage;
  const double ratio = exp(delta);
  const bool above = delta > c.log_high, below = delta < c.log_low;
  const bool clipped = (above && a > 0) || (below && a < 0);
  const double term = -a * (clipped ? (above ? c.high : c.low) : ratio) * weight;
  p.d_logp[i] = static_cast<float>(clipped ? 0.0 : term / p.denominator);
  if (p.d_kl) p.d_kl[i] = static_cast<float>(p.kl_coef / p.denominator);
  if (p.per_sample) p.loss[i] = static_cast<float>((p.kl ? term + p.kl_coef * kl : term) / p.denominator);
  const double shift = ratio - 1.0;
  const double is_above = above ? 1.0 : 0.0;
  const double is_below = below ? 1.0 : 0.0;
  const PolicySums one = {term,     delta * delta, delta,         ratio, kl,   is_above,
                          is_below, shift,         shift * shift, ratio, ratio};
  merge_policy_sums(one, s);
}

PG_INLINE void finish_policy(const PolicyParams& p, const PolicySums& s) {
  const double n = static_cast<double>(p.batch > 1 ? p.batch : 1);
  const double clipped = s.above + s.below;
  const double spread = s.spreads - s.shifts * s.shifts / n;
  const double variance = (spread < 0.0 ? 0.0 : spread) / (n > 1.0 ? n - 1.0 : 1.0);
  const double std = p.batch > 1 ? sqrt(variance) : static_cast<double>(NAN);
  const double metrics[10] = {0.5 * s.squares / n, clipped / n, s.above / n, s.below / n, s.lowest,
                              s.ratios / n,        s.highest,   s.kl / n,    std,         0.0 - s.deltas / n};
  if (!p.per_sample) p.loss[0] = static_cast<float>((p.kl ? s.loss + p.kl_coef * s.kl : s.loss) / p.denominator);
  for (int k = 0; k < 10; ++k) p.metrics[k] = static_cast<float>(metrics[k]);
}

// ---------------------------------------------------------------- advantages, one group
PG_INLINE double number_at(const View& t, int64_t k) {
  return t.dtype == kF64 ? reinterpret_cast<const double*>(t.data)[k] : reinterpret_cast<const float*>(t.data)[k];
}

// The win rate of member i of all; NaN (missing) without a comparison.
PG_INLINE float rate_of(const WinrateParams& p, int64_t i) {
  double won = 0, count = 0;
  for (int64_t k = i * p.group; k < (i + 1) * p.group; ++k) {
    won += number_at(p.wins, k);
    count += number_at(p.counts, k);
  }
  return static_cast<float>(count > 0 ? won / count : NAN);
}

struct Moments {
  double mean, deviation;
  bool varies;
};

// Of the values that are not NaN (missing), in order, in two passes.
PG_INLINE Moments moments(const float* values, int64_t size, int64_t ddof) {
  double n = 0, sum = 0, squares = 0;
  float low = INFINITY, high = -INFINITY;
  for (int64_t k = 0; k < size; ++k) {
    const float v = values[k];
    if (v != v) continue;
    n += 1;
    sum += v;
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  const double mean = sum / (n > 1 ? n : 1);
  for (int64_t k = 0; k < size; ++k)
    if (values[k] == values[k]) squares += (values[k] - mean) * (values[k] - mean);
  return {mean, sqrt(squares / (n - ddof > 1 ? n - ddof : 1)), high > low};
}

PG_INLINE float advantage_of(float value, const Moments& m, bool use_std, double eps) {
  if (value != value || !m.varies) return 0.f;
  return static_cast<float>((value - m.mean) / (use_std ? m.deviation + eps : 1.0));
}

}  // namespace prefgrpo
