// Loads and stores of 8 neighbours on the device: raw words first, so that all loads are under way before one is used.
//
// A dtype is a template argument, or kAny where only the launch knows it. A tile that is whole and aligned moves 128
// bits at a time; tails and odd addresses fill and empty the same words element by element, so the arithmetic in
// between exists once. Invariant: a value becomes fp32 exactly, and is rounded to nearest even.
#pragma once
#include "math.h"
#include "params.h"

namespace prefgrpo {
namespace {

using namespace base;

constexpr int kVector = 8, kAny = -1;

struct Raw {
  uint32_t w[kVector];  // 16-bit elements fill the first four
};

// The 8 neighbours that a thread takes from a block's tile.
struct Tile {
  int64_t block;    // the block's first element
  uint32_t thread;  // from there to this thread's first
  int left;         // how many elements the block has
  int n;            // how many of the 8 it has
  bool whole;       // all, and every tensor of the launch starts on 16 bytes
};

__device__ __forceinline__ bool single(const View& t, int type) { return (type == kAny ? t.dtype : type) == kF32; }
__device__ __forceinline__ bool bfloat(const View& t, int type) { return (type == kAny ? t.dtype : type) == kBF16; }

// Where element k of sample i lies.
__device__ __forceinline__ char* place(const View& t, int type, int64_t i, int64_t k) {
  return static_cast<char*>(t.data) + (i * t.stride + k) * (single(t, type) ? 4 : 2);
}

__device__ __forceinline__ char* place(const View& t, int type, int64_t i, const Tile& at) {
  return place(t, type, i, at.block) + at.thread * (single(t, type) ? 4u : 2u);
}

// Elements outside the sample are 0.
template <int kType>
__device__ __forceinline__ Raw fetch(const View& t, int64_t i, const Tile& at) {
  const char* p = place(t, kType, i, at);
  Raw r{};
  if (at.whole) {
    const uint4 a = *reinterpret_cast<const uint4*>(p);
    r.w[0] = a.x, r.w[1] = a.y, r.w[2] = a.z, r.w[3] = a.w;
    if (single(t, kType)) {
      const uint4 b = *reinterpret_cast<const uint4*>(p + 16);
      r.w[4] = b.x, r.w[5] = b.y, r.w[6] = b.z, r.w[7] = b.w;
    }
    return r;
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (j >= at.n) continue;
    if (single(t, kType))
      r.w[j] = reinterpret_cast<const uint32_t*>(p)[j];
    else
      r.w[j / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(p)[j]) << (16 * (j % 2));
  }
  return r;
}

template <int kType>
__device__ __forceinline__ void unpack(const View& t, const Raw& r, float (&out)[kVector]) {
  if (single(t, kType)) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = from_bits(r.w[j]);
    return;
  }
  if (bfloat(t, kType)) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = from_bits(j % 2 ? r.w[j / 2] & 0xffff0000u : r.w[j / 2] << 16);
    return;
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) out[j] = half_to_float(static_cast<uint16_t>(r.w[j / 2] >> (16 * (j % 2))));
}

template <int kType>
__device__ __forceinline__ Raw pack(const View& t, const float (&y)[kVector]) {
  Raw r{};
  if (single(t, kType)) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) r.w[j] = bits(y[j]);
    return r;
  }
  const bool b = bfloat(t, kType);
#pragma unroll
  for (int j = 0; j < kVector; j += 2) r.w[j / 2] = b ? pack_bf16(y[j], y[j + 1]) : pack_half(y[j], y[j + 1]);
  return r;
}

// Inverse of `fetch`. __stwb is an ordinary store that the compiler does not cut into the tail's narrow ones.
template <int kType>
__device__ __forceinline__ void flush(const View& t, int64_t i, const Tile& at, const Raw& r) {
  char* p = place(t, kType, i, at);
  if (at.whole) {
    __stwb(reinterpret_cast<uint4*>(p), make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]));
    if (single(t, kType)) __stwb(reinterpret_cast<uint4*>(p) + 1, make_uint4(r.w[4], r.w[5], r.w[6], r.w[7]));
    return;
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (j >= at.n) continue;
    if (single(t, kType))
      reinterpret_cast<uint32_t*>(p)[j] = r.w[j];
    else
      reinterpret_cast<uint16_t*>(p)[j] = static_cast<uint16_t>(r.w[j / 2] >> (16 * (j % 2)));
  }
}

template <int kType>
__device__ __forceinline__ void store(const View& t, int64_t i, const Tile& at, const float (&y)[kVector]) {
  flush<kType>(t, i, at, pack<kType>(t, y));
}

__device__ __forceinline__ float one(const View& t, int64_t i, int64_t k) {
  const char* p = place(t, kAny, i, k);
  if (single(t, kAny)) return *reinterpret_cast<const float*>(p);
  const uint16_t h = *reinterpret_cast<const uint16_t*>(p);
  return bfloat(t, kAny) ? bf16_to_float(h) : half_to_float(h);
}

__device__ __forceinline__ void put(const View& t, int64_t i, int64_t k, float y) {
  char* p = place(t, kAny, i, k);
  if (single(t, kAny))
    *reinterpret_cast<float*>(p) = y;
  else
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(bfloat(t, kAny) ? pack_bf16(y, 0.f) : pack_half(y, 0.f));
}

}  // namespace
}  // namespace prefgrpo
