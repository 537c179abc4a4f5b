// Loads and stores of 8 neighbours on the device: raw words first, so that all loads are under way before one is used.
//
// A dtype is a template argument, or kAny where only the launch knows it. A tile that is whole and aligned moves 128
// bits at a time; tails and odd addresses fill and empty the same words element by element, so the arithmetic in
// between exists once. Invariant: a value becomes fp32 exactly, and is rounded to nearest even.
#pragma once
#include <cuda_runtime.h>

#include "math.h"
#include "params.h"

namespace prefgrpo {
namespace {

using namespace base;

constexpr int kVector = 8, kAny = -1;

struct Raw {
  uint32_t w[kVector];  // 16-bit elements fill the first four
};

// A tile of 1024 elements, 8 neighbours to a thread. Whole: all lie inside the sample, and every tensor of the launch
// starts on 16 bytes; the same for the whole block.
struct Tile {
  int from, left;  // elements of the block before it, and from it on
  bool whole;

  // How many of this thread's 8 lie inside the sample.
  __device__ __forceinline__ int count() const {
    const int n = left - static_cast<int>(threadIdx.x) * kVector;
    return n < 0 ? 0 : n < kVector ? n : kVector;
  }
};

// One tensor as a thread of the kernel sees it.
template <int kType>
struct Stream {
  const View& t;
  char* p;  // this thread's first element

  __device__ __forceinline__ Stream(const View& view, int64_t i, int64_t block) : t(view) {
    p = static_cast<char*>(t.data) + (i * t.stride + block + threadIdx.x * kVector) * size();
  }

  __device__ __forceinline__ bool f32() const { return (kType == kAny ? t.dtype : kType) == kF32; }
  __device__ __forceinline__ bool bf16() const { return (kType == kAny ? t.dtype : kType) == kBF16; }
  __device__ __forceinline__ int size() const { return f32() ? 4 : 2; }

  // Elements outside the sample are 0.
  __device__ __forceinline__ Raw fetch(const Tile& at) const {
    const char* q = p + at.from * size();
    Raw r{};
    if (at.whole) {
      const uint4 a = *reinterpret_cast<const uint4*>(q);
      r.w[0] = a.x, r.w[1] = a.y, r.w[2] = a.z, r.w[3] = a.w;
      if (f32()) {
        const uint4 b = *reinterpret_cast<const uint4*>(q + 16);
        r.w[4] = b.x, r.w[5] = b.y, r.w[6] = b.z, r.w[7] = b.w;
      }
      return r;
    }
    const int n = at.count();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (j >= n) continue;
      if (f32())
        r.w[j] = reinterpret_cast<const uint32_t*>(q)[j];
      else
        r.w[j / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(q)[j]) << (16 * (j % 2));
    }
    return r;
  }

  // Inverse of `fetch`. __stwb is an ordinary store that the compiler does not cut into the tail's narrow ones.
  __device__ __forceinline__ void flush(const Tile& at, const Raw& r) const {
    char* q = p + at.from * size();
    if (at.whole) {
      __stwb(reinterpret_cast<uint4*>(q), make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]));
      if (f32()) __stwb(reinterpret_cast<uint4*>(q) + 1, make_uint4(r.w[4], r.w[5], r.w[6], r.w[7]));
      return;
    }
    const int n = at.count();
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (j >= n) continue;
      if (f32())
        reinterpret_cast<uint32_t*>(q)[j] = r.w[j];
      else
        reinterpret_cast<uint16_t*>(q)[j] = static_cast<uint16_t>(r.w[j / 2] >> (16 * (j % 2)));
    }
  }

  __device__ __forceinline__ void unpack(const Raw& r, float (&out)[kVector]) const {
    const bool full = f32(), brain = bf16();
    if (full) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) out[j] = from_bits(r.w[j]);
    } else if (brain) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) out[j] = from_bits(j % 2 ? r.w[j / 2] & 0xffff0000u : r.w[j / 2] << 16);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) out[j] = half_to_float(static_cast<uint16_t>(r.w[j / 2] >> (16 * (j % 2))));
    }
  }

  __device__ __forceinline__ Raw pack(const float (&y)[kVector]) const {
    Raw r{};
    const bool full = f32(), brain = bf16();
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      if (full)
        r.w[j] = bits(y[j]), r.w[j + 1] = bits(y[j + 1]);
      else
        r.w[j / 2] = brain ? pack_bf16(y[j], y[j + 1]) : pack_half(y[j], y[j + 1]);
    }
    return r;
  }

  __device__ __forceinline__ void store(const Tile& at, const float (&y)[kVector]) const { flush(at, pack(y)); }
};

__device__ __forceinline__ char* place(const View& t, int64_t i, int64_t k) {
  return static_cast<char*>(t.data) + (i * t.stride + k) * (t.dtype == kF32 ? 4 : 2);
}

__device__ __forceinline__ float one(const View& t, int64_t i, int64_t k) {
  const char* p = place(t, i, k);
  if (t.dtype == kF32) return *reinterpret_cast<const float*>(p);
  const uint16_t h = *reinterpret_cast<const uint16_t*>(p);
  return t.dtype == kBF16 ? bf16_to_float(h) : half_to_float(h);
}

__device__ __forceinline__ void put(const View& t, int64_t i, int64_t k, float y) {
  char* p = place(t, i, k);
  if (t.dtype == kF32)
    *reinterpret_cast<float*>(p) = y;
  else
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(t.dtype == kBF16 ? pack_bf16(y, 0.f) : pack_half(y, 0.f));
}

}  // namespace
}  // namespace prefgrpo
