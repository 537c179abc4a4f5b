// Loads and stores of fp32, bf16 and fp16 tensors on the device, 8 neighbours at a time where alignment allows.
//
// The dtype is a run-time branch, uniform over a launch, so one kernel serves all mixtures. Invariant: a value becomes
// fp32 exactly, and is rounded to storage by math.h alone.
#pragma once
#include "math.h"
#include "params.h"

namespace prefgrpo {
namespace {

using namespace base;

constexpr int kVector = 8;

// A view whose samples all start on 16 bytes may be read 8 elements at a time.
__device__ __forceinline__ bool wide(const View& t) {
  const int64_t size = t.dtype == kF32 ? 4 : 2;
  return ((reinterpret_cast<uintptr_t>(t.data) | static_cast<uintptr_t>(t.stride * size)) & 15) == 0;
}

__device__ __forceinline__ void unpack(uint32_t word, bool bf16, float& low, float& high) {
  const uint16_t l = static_cast<uint16_t>(word), h = static_cast<uint16_t>(word >> 16);
  low = bf16 ? bf16_to_float(l) : half_to_float(l);
  high = bf16 ? bf16_to_float(h) : half_to_float(h);
}

__device__ __forceinline__ void load(const View& t, int64_t i, int64_t k, int n, float (&out)[kVector]) {
  const int64_t at = i * t.stride + k;
  if (t.dtype == kF32) {
    const float* p = static_cast<const float*>(t.data) + at;
    if (n == kVector && wide(t)) {
      const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
      out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
      return;
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = j < n ? p[j] : 0.f;
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(t.data) + at;
  const bool bf16 = t.dtype == kBF16;
  if (n == kVector && wide(t)) {
    const uint4 a = *reinterpret_cast<const uint4*>(p);
    unpack(a.x, bf16, out[0], out[1]), unpack(a.y, bf16, out[2], out[3]);
    unpack(a.z, bf16, out[4], out[5]), unpack(a.w, bf16, out[6], out[7]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) out[j] = j < n ? (bf16 ? bf16_to_float(p[j]) : half_to_float(p[j])) : 0.f;
}

__device__ __forceinline__ uint16_t narrow(float x, bool bf16) { return bf16 ? float_to_bf16(x) : float_to_half(x); }
__device__ __forceinline__ uint32_t pack(float low, float high, bool bf16) {
  return narrow(low, bf16) | static_cast<uint32_t>(narrow(high, bf16)) << 16;
}

__device__ __forceinline__ float rounded(float x, int32_t dtype) {
  if (dtype == kF32) return x;
  return dtype == kBF16 ? bf16_to_float(float_to_bf16(x)) : half_to_float(float_to_half(x));
}

__device__ __forceinline__ void store(const View& t, int64_t i, int64_t k, int n, const float (&y)[kVector]) {
  const int64_t at = i * t.stride + k;
  if (t.dtype == kF32) {
    float* p = static_cast<float*>(t.data) + at;
    if (n == kVector && wide(t)) {
      reinterpret_cast<float4*>(p)[0] = make_float4(y[0], y[1], y[2], y[3]);
      reinterpret_cast<float4*>(p)[1] = make_float4(y[4], y[5], y[6], y[7]);
      return;
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (j < n) p[j] = y[j];
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(t.data) + at;
  const bool bf16 = t.dtype == kBF16;
  if (n == kVector && wide(t)) {
    *reinterpret_cast<uint4*>(p) =
        make_uint4(pack(y[0], y[1], bf16), pack(y[2], y[3], bf16), pack(y[4], y[5], bf16), pack(y[6], y[7], bf16));
    return;
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    if (j < n) p[j] = narrow(y[j], bf16);
}

__device__ __forceinline__ float one(const View& t, int64_t i, int64_t k) {
  const int64_t at = i * t.stride + k;
  if (t.dtype == kF32) return static_cast<const float*>(t.data)[at];
  const uint16_t h = static_cast<const uint16_t*>(t.data)[at];
  return t.dtype == kBF16 ? bf16_to_float(h) : half_to_float(h);
}

__device__ __forceinline__ void put(const View& t, int64_t i, int64_t k, float y) {
  const int64_t at = i * t.stride + k;
  if (t.dtype == kF32)
    static_cast<float*>(t.data)[at] = y;
  else
    static_cast<uint16_t*>(t.data)[at] = narrow(y, t.dtype == kBF16);
}

}  // namespace
}  // namespace prefgrpo
