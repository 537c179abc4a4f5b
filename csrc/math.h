// The mathematics that every compiled backend shares, one sample or one element at a time.
//
//   x' = a·x + b·v + s·ε      logp = w · mean_D (x' − a·x − b·v)² + c
//
// Invariant: no expression here may be contracted (-ffp-contract=off, -fmad=false); where a fused multiply-add is
// wanted it is written as fma_(). So CPU and GPU, vector and scalar code round alike.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PG_INLINE __host__ __device__ __forceinline__
#else
#define PG_INLINE static inline __attribute__((always_inline))
#endif
#ifndef PG_ISA  // a namespace per instruction set, so that the linker never merges their code
#define PG_ISA base
#endif

namespace prefgrpo {
namespace PG_ISA {

struct Row {
  float a, b, s, w, c;
};

PG_INLINE float fma_(float a, float b, float c) {
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__aarch64__)
  return fmaf(a, b, c);
#else  // the product is exact in double; one rounding more than fmaf in about 1 of 2^29 cases
  return static_cast<float>(static_cast<double>(a) * b + c);
#endif
}

PG_INLINE uint32_t bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
#endif
}

PG_INLINE float from_bits(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  memcpy(&x, &u, 4);
  return x;
#endif
}

// ---------------------------------------------------------------- affine map
PG_INLINE float mean_of(const Row& r, float x, float v) { return r.a * x + r.b * v; }

// Guidance: u + g·(c − u), or c + g·(c − u).
PG_INLINE float guide(float c, float u, float g, bool from_cond) {
  const float step = g * (c - u);
  return (from_cond ? c : u) + step;
}

// What one sample's gradients ∂/∂logp, ∂/∂kl, ∂/∂guard become in front of the three residuals of dv. A part whose
// factor is 0 adds exactly 0: `scaled`, since its residual may be NaN or infinite.
struct GradScale {
  float logp, kl, guard;
};

PG_INLINE GradScale grad_scale(const Row& r, int64_t dim, float g_logp, float g_kl, float g_guard) {
  const double n = static_cast<double>(dim), b = r.b, s = r.s;
  GradScale k;
  k.logp = r.w == 0.f ? 0.f : static_cast<float>(-2.0 * r.w * b / n * g_logp);
  k.kl = r.s > 0.f ? static_cast<float>(b * b / (s * s) / n * g_kl) : 0.f;
  k.guard = r.s > 0.f ? static_cast<float>(b / (s * n) * g_guard) : 0.f;
  return k;
}

PG_INLINE float scaled(float factor, float residual) { return factor == 0.f ? 0.f : factor * residual; }

PG_INLINE float finish_logp(const Row& r, double sum, int64_t dim) {
  if (r.w == 0.0f) return r.c;  // a step without log-prob, whatever x holds
  const float mean = static_cast<float>(sum / static_cast<double>(dim));
  return r.w * mean + r.c;
}

PG_INLINE float finish_kl(const Row& r, double sum, int64_t dim) {
  if (!(r.s > 0.f)) return 0.f;
  const double b = r.b, s = r.s;
  return static_cast<float>(b * b / (2.0 * s * s) * (sum / static_cast<double>(dim)));
}

PG_INLINE float finish_guard(const Row& r, double sum, int64_t dim) {
  if (!(r.s > 0.f)) return 0.f;
  return static_cast<float>(static_cast<double>(r.b) / r.s * (sum / static_cast<double>(dim)));
}

// ---------------------------------------------------------------- addressed noise
struct Words {
  uint32_t x[4];
};

// Philox4x32-10 (Salmon et al., SC 2011).
PG_INLINE Words philox(Words c, uint32_t k0, uint32_t k1) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c.x[0];
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c.x[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.x[1] ^ k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.x[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Word → uniform ((w >> 9) + ½)·2⁻²³: exact in fp32, never 0 or 1.
PG_INLINE float uniform(uint32_t w) { return (static_cast<float>(static_cast<int32_t>(w >> 9)) + 0.5f) * 0x1p-23f; }

// ln u for u in (0, 1), about 1 ulp (polynomial of Cephes' logf).
PG_INLINE float ln(float u) {
  const uint32_t shifted = bits(u) - 0x3f3504f3u;  // exponent such that the mantissa lies in [√½, √2)
  const int32_t e = static_cast<int32_t>(shifted) >> 23;
  const float z = from_bits((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const float k = static_cast<float>(e);
  float p = 7.0376836292e-2f;
  p = fma_(p, z, -1.1514610310e-1f);
  p = fma_(p, z, 1.1676998740e-1f);
  p = fma_(p, z, -1.2420140846e-1f);
  p = fma_(p, z, 1.4249322787e-1f);
  p = fma_(p, z, -1.6668057665e-1f);
  p = fma_(p, z, 2.0000714765e-1f);
  p = fma_(p, z, -2.4999993993e-1f);
  p = fma_(p, z, 3.3333331174e-1f);
  const float z2 = z * z;
  float y = fma_(z * z2, p, k * -2.12194440e-4f);
  y = fma_(z2, -0.5f, y);
  return fma_(k, 0.693359375f, z + y);
}

struct Pair {
  float cos_part, sin_part;
};

// Box-Muller on two words: √(−2 ln u₀)·(cos, sin)(2π u₁), the angle reduced exactly in turns.
PG_INLINE Pair normal_pair(uint32_t w0, uint32_t w1) {
#if defined(__CUDA_ARCH__)
  const float radius = __fsqrt_rn(-2.0f * ln(uniform(w0)));
#else
  const float radius = sqrtf(-2.0f * ln(uniform(w0)));
#endif
  const float t = uniform(w1);
  const int32_t quadrant = static_cast<int32_t>(fma_(t, 4.0f, 0.5f));
  const float x = fma_(static_cast<float>(quadrant), -0.25f, t) * 6.283185307179586f;
  const float z = x * x;
  float s = fma_(-1.9515295891e-4f, z, 8.3321608736e-3f);
  s = fma_(s, z, -1.6666654611e-1f);
  s = fma_(s * z, x, x);
  float c = fma_(2.443315711809948e-5f, z, -1.388731625493765e-3f);
  c = fma_(c, z, 4.166664568298827e-2f);
  c = fma_(c * z, z, fma_(z, -0.5f, 1.0f));
  const bool odd = quadrant & 1;
  const uint32_t flip_cos = static_cast<uint32_t>((quadrant + 1) & 2) << 30;
  const uint32_t flip_sin = static_cast<uint32_t>(quadrant & 2) << 30;
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

PG_INLINE uint16_t float_to_bf16(float x) { return static_cast<uint16_t>(round_to_bf16(x) >> 16); }

PG_INLINE float half_to_float(uint16_t h) {  // normal numbers by scaling, subnormals by subtraction
  const uint32_t w = static_cast<uint32_t>(h) << 16, two = w + w;
  const float normal = from_bits((two >> 4) + (0xE0u << 23)) * 0x1p-112f;
  const float subnormal = from_bits((two >> 17) | (126u << 23)) - 0.5f;
  return from_bits((w & 0x80000000u) | bits(two < (1u << 27) ? subnormal : normal));
}

PG_INLINE uint16_t float_to_half(float x) {  // to nearest even, by adding a number that pushes out the low bits
  const uint32_t w = bits(x), two = w + w;
  const float scaled = from_bits(w & 0x7fffffffu) * 0x1p+112f * 0x1p-110f;
  const uint32_t top = two & 0xFF000000u;
  const uint32_t bias = top < 0x71000000u ? 0x71000000u : top;
  const uint32_t r = bits(from_bits((bias >> 1) + 0x07800000u) + scaled);
  const uint32_t magnitude = ((r >> 13) & 0x7C00u) + (r & 0x0FFFu);
  return static_cast<uint16_t>((w >> 16 & 0x8000u) | (two > 0xFF000000u ? 0x7E00u : magnitude));
}

// ---------------------------------------------------------------- policy loss, one sample
struct PolicyTerm {
  float loss, d_delta, ratio;
  bool above, below;
};

// max(−A r, −A clip(r)) with r = exp(delta); NaN in anything reaches the loss.
PG_INLINE PolicyTerm policy_term(float delta, float adv, float adv_clip, float low, float high, float weight) {
  const float limit = adv > adv_clip ? adv_clip : adv < -adv_clip ? -adv_clip : adv;
  const float ratio = expf(delta);
  const float lo = 1.0f - low, hi = 1.0f + high;
  const float clipped = ratio < lo ? lo : ratio > hi ? hi : ratio;
  const float free = -limit * ratio, bound = -limit * clipped;
  const bool use_bound = bound > free;
  PolicyTerm t;
  t.loss = (use_bound ? bound : free) * weight;
  t.d_delta = use_bound ? 0.0f : free * weight;  // d/d delta of −A·exp(delta)
  t.ratio = ratio;
  t.above = ratio > hi;
  t.below = ratio < lo;
  return t;
}

}  // namespace PG_ISA
}  // namespace prefgrpo
