// Lane-wise sums, and the affine map in one pass over fp32 and bf16 tensors for calls without options.
//
// Element k belongs to lane k mod 32; lanes are added as a tree. Invariant: a pass does the operations and sums of the
// general tiles (cpu_kernels.cpp), so it is bitwise equal to them; it just does not stage tiles in L1.
#pragma once
#include "math.h"
#include "params.h"

namespace prefgrpo {
namespace PG_ISA {

constexpr int kLanes = 32;

static double lanes_sum(const float* acc) {
  float t[kLanes];
  for (int k = 0; k < kLanes; ++k) t[k] = acc[k];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) t[k] += t[k + width];
  return t[0];
}

// Calls body(k, k % kLanes) for every k < n, in an order that depends on n only.
template <class Body>
PG_INLINE void for_lanes(int n, Body body) {
  int k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int l = 0; l < kLanes; ++l) body(k + l, l);
  for (int l = 0; k + l < n; ++l) body(k + l, l);
}

// Σ p·q in 32 lanes.
static double dot(const float* __restrict p, const float* __restrict q, int n) {
  alignas(64) float acc[kLanes] = {};
  for_lanes(n, [&](int k, int l) __attribute__((always_inline)) { acc[l] += p[k] * q[k]; });
  return lanes_sum(acc);
}

static double squared_distance(const float* __restrict p, const float* __restrict q, int n) {
  alignas(64) float acc[kLanes] = {};
  for_lanes(n, [&](int k, int l) __attribute__((always_inline)) {
    const float d = p[k] - q[k];
    acc[l] += d * d;
  });
  return lanes_sum(acc);
}

template <int kType>
PG_INLINE float get(const void* p, int k) {
  return kType == kF32 ? static_cast<const float*>(p)[k] : bf16_to_float(static_cast<const uint16_t*>(p)[k]);
}

template <int kType>
PG_INLINE float put(void* p, int k, float y) {  // returns what is stored
  if (kType == kF32) return static_cast<float*>(p)[k] = y;
  const uint32_t word = round_to_bf16(y);
  static_cast<uint16_t*>(p)[k] = static_cast<uint16_t>(word >> 16);
  return from_bits(word);
}

template <int kX, int kV, int kY>
static double step_pass(const Row& r, const void* __restrict x, const void* __restrict v, const float* __restrict e,
                        void* __restrict y, int n) {
  alignas(64) float acc[kLanes] = {};
  for_lanes(n, [&](int k, int l) __attribute__((always_inline)) {
    const float mean = mean_of(r, get<kX>(x, k), get<kV>(v, k));
    const float noise = r.s * e[k];
    const float d = put<kY>(y, k, mean + noise) - mean;
    acc[l] += d * d;
  });
  return lanes_sum(acc);
}

template <int kX, int kV, int kY>
static double logp_pass(const Row& r, const void* __restrict x, const void* __restrict v, const void* __restrict y,
                        int n) {
  alignas(64) float acc[kLanes] = {};
  for_lanes(n, [&](int k, int l) __attribute__((always_inline)) {
    const float d = get<kY>(y, k) - mean_of(r, get<kX>(x, k), get<kV>(v, k));
    acc[l] += d * d;
  });
  return lanes_sum(acc);
}

template <int kX, int kV, int kY>
static void grad_pass(const Row& r, float g, const void* __restrict x, const void* __restrict v,
                      const void* __restrict y, void* __restrict dv, int n) {
  for (int k = 0; k < n; ++k) put<kV>(dv, k, g * (get<kY>(y, k) - mean_of(r, get<kX>(x, k), get<kV>(v, k))));
}

}  // namespace PG_ISA
}  // namespace prefgrpo
