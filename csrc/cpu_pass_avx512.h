// The passes of cpu_pass.h for x, v and x' all in bf16, 32 elements at a time.
//
// Even and odd elements are the halves of 32-bit words, which avoids widening and narrowing shuffles. Invariant: a lane
// sums the same elements in the same order as the template that is specialised here, so results are bitwise equal.
#pragma once
#include <immintrin.h>

#include "cpu_pass.h"

namespace prefgrpo {
namespace PG_ISA {

struct Halves {
  __m512 even, odd;
};

PG_INLINE Halves halves(const void* p, int k) {
  const __m512i w = _mm512_loadu_si512(static_cast<const uint16_t*>(p) + k);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(-65536)))};
}

PG_INLINE __m512i round_words(__m512 y) {  // round_to_bf16 of 16 numbers
  const __m512i u = _mm512_castps_si512(y);
  const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
  const __m512i half = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  const __m512i up = _mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
  const __m512i bits = _mm512_and_si512(up, _mm512_set1_epi32(-65536));
  return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}

PG_INLINE __m512 mean_of(const Row& r, __m512 x, __m512 v) {
  return _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(r.a), x), _mm512_mul_ps(_mm512_set1_ps(r.b), v));
}

PG_INLINE __m512 add_square(__m512 acc, __m512 y, __m512 mean) {
  const __m512 d = _mm512_sub_ps(y, mean);
  return _mm512_add_ps(acc, _mm512_mul_ps(d, d));
}

PG_INLINE void to_lanes(__m512 even, __m512 odd, float* acc) {
  alignas(64) float e[16], o[16];
  _mm512_store_ps(e, even), _mm512_store_ps(o, odd);
  for (int k = 0; k < 16; ++k) acc[2 * k] = e[k], acc[2 * k + 1] = o[k];
}

template <>
double step_pass<1, 1, 1>(const Row& r, const void* __restrict x, const void* __restrict v, const float* __restrict e,
                          void* __restrict y, int n) {
  const __m512i first = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(1));
  const __m512 s = _mm512_set1_ps(r.s);
  __m512 even = _mm512_setzero_ps(), odd = even;
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    const Halves a = halves(x, k), b = halves(v, k);
    const __m512 e0 = _mm512_loadu_ps(e + k), e1 = _mm512_loadu_ps(e + k + 16);
    const __m512 m0 = mean_of(r, a.even, b.even), m1 = mean_of(r, a.odd, b.odd);
    const __m512i w0 = round_words(_mm512_add_ps(m0, _mm512_mul_ps(s, _mm512_permutex2var_ps(e0, first, e1))));
    const __m512i w1 = round_words(_mm512_add_ps(m1, _mm512_mul_ps(s, _mm512_permutex2var_ps(e0, second, e1))));
    _mm512_storeu_si512(static_cast<uint16_t*>(y) + k, _mm512_or_si512(_mm512_srli_epi32(w0, 16), w1));
    even = add_square(even, _mm512_castsi512_ps(w0), m0), odd = add_square(odd, _mm512_castsi512_ps(w1), m1);
  }
  alignas(64) float acc[kLanes];
  to_lanes(even, odd, acc);
  for (int l = 0; k + l < n; ++l) {
    const float mean = mean_of(r, get<1>(x, k + l), get<1>(v, k + l));
    const float noise = r.s * e[k + l];
    const float d = put<1>(y, k + l, mean + noise) - mean;
    acc[l] += d * d;
  }
  return lanes_sum(acc);
}

template <>
double logp_pass<1, 1, 1>(const Row& r, const void* __restrict x, const void* __restrict v, const void* __restrict y,
                          int n) {
  __m512 even = _mm512_setzero_ps(), odd = even;
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    const Halves a = halves(x, k), b = halves(v, k), c = halves(y, k);
    even = add_square(even, c.even, mean_of(r, a.even, b.even));
    odd = add_square(odd, c.odd, mean_of(r, a.odd, b.odd));
  }
  alignas(64) float acc[kLanes];
  to_lanes(even, odd, acc);
  for (int l = 0; k + l < n; ++l) {
    const float d = get<1>(y, k + l) - mean_of(r, get<1>(x, k + l), get<1>(v, k + l));
    acc[l] += d * d;
  }
  return lanes_sum(acc);
}

template <>
void grad_pass<1, 1, 1>(const Row& r, float g, const void* __restrict x, const void* __restrict v,
                        const void* __restrict y, void* __restrict dv, int n) {
  const __m512 scale = _mm512_set1_ps(g);
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    const Halves a = halves(x, k), b = halves(v, k), c = halves(y, k);
    const __m512i w0 = round_words(_mm512_mul_ps(scale, _mm512_sub_ps(c.even, mean_of(r, a.even, b.even))));
    const __m512i w1 = round_words(_mm512_mul_ps(scale, _mm512_sub_ps(c.odd, mean_of(r, a.odd, b.odd))));
    _mm512_storeu_si512(static_cast<uint16_t*>(dv) + k, _mm512_or_si512(_mm512_srli_epi32(w0, 16), w1));
  }
  for (; k < n; ++k) put<1>(dv, k, g * (get<1>(y, k) - mean_of(r, get<1>(x, k), get<1>(v, k))));
}

}  // namespace PG_ISA
}  // namespace prefgrpo
