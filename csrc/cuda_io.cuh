// Device loads and stores of 8 neighbours: raw words first, so that all loads are in flight before one is used.
//
// A dtype is a template argument, or kAny if only the launch knows it. A full, aligned tile moves 128 bits at a time;
// tails and unaligned addresses fill and empty the same words element by element, so the arithmetic in between exists
// once. Invariant: the conversion to fp32 is exact, and stores round to nearest even.
#pragma once
#include <cuda_runtime.h>

#include "math.h"
#include "params.h"

#define PG_DEVICE __device__ __forceinline__

namespace prefgrpo {
namespace {

using namespace base;

constexpr int kVector = 8, kAny = -1;

struct Raw {
  uint32_t w[kVector];  // 16-bit elements fill the first four
};

// A tile of 1024 elements, 8 neighbours per thread. Full: all lie inside the sample, and every tensor of the launch is
// 16-byte aligned; the value is the same for all threads of the block.
struct Tile {
  int from, left;  // elements of the block before this tile, and from its start on
  bool full;

  // How many of this thread's 8 elements lie inside the sample.
  PG_DEVICE int count() const {
    const int n = left - static_cast<int>(threadIdx.x) * kVector;
    return n < 0 ? 0 : n < kVector ? n : kVector;
  }
};

struct Values {
  float v[kVector];
  PG_DEVICE float& operator[](int j) { return v[j]; }
  PG_DEVICE float operator[](int j) const { return v[j]; }
};

// A thread's view of one tensor; `raw` is the tile that was last fetched or stored.
template <int kType>
struct Stream {
  const View& t;
  char* p;  // this thread's first element
  Raw raw{};

  PG_DEVICE Stream(const View& view, int64_t i, int64_t block) : t(view) {
    p = static_cast<char*>(t.data) + (i * t.stride + block + threadIdx.x * kVector) * size();
  }

  PG_DEVICE bool f32() const { return (kType == kAny ? t.dtype : kType) == kF32; }
  PG_DEVICE int size() const { return f32() ? 4 : 2; }

  // Elements outside the sample are 0.
  PG_DEVICE void fetch(const Tile& tile) {
    const char* q = p + tile.from * size();
    raw = {};
    if (tile.full) {
      const uint4 a = *reinterpret_cast<const uint4*>(q);
      raw.w[0] = a.x, raw.w[1] = a.y, raw.w[2] = a.z, raw.w[3] = a.w;
      if (!f32()) return;
      const uint4 b = *reinterpret_cast<const uint4*>(q + 16);
      raw.w[4] = b.x, raw.w[5] = b.y, raw.w[6] = b.z, raw.w[7] = b.w;
      return;
    }
    const int n = tile.count();
    for (int j = 0; j < kVector; ++j) {
      if (j >= n) continue;
      if (f32())
        raw.w[j] = reinterpret_cast<const uint32_t*>(q)[j];
      else
        raw.w[j / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(q)[j]) << (16 * (j % 2));
    }
  }

  PG_DEVICE Values values() const {
    Values y;
    const bool is_f32 = f32();
    for (int j = 0; j < kVector; ++j)
      y[j] = from_bits(is_f32 ? raw.w[j] : j % 2 ? raw.w[j / 2] & 0xffff0000u : raw.w[j / 2] << 16);
    return y;
  }

  // __stwb is an ordinary store that the compiler does not split into the narrow stores of the tail.
  PG_DEVICE void store(const Tile& tile, const Values& y) {
    char* q = p + tile.from * size();
    const bool is_f32 = f32();
    for (int j = 0; j < kVector; j += 2) {
      if (is_f32)
        raw.w[j] = bits(y[j]), raw.w[j + 1] = bits(y[j + 1]);
      else
        raw.w[j / 2] = pack_bf16(y[j], y[j + 1]);
    }
    if (tile.full) {
      __stwb(reinterpret_cast<uint4*>(q), make_uint4(raw.w[0], raw.w[1], raw.w[2], raw.w[3]));
      if (is_f32) __stwb(reinterpret_cast<uint4*>(q) + 1, make_uint4(raw.w[4], raw.w[5], raw.w[6], raw.w[7]));
      return;
    }
    const int n = tile.count();
    for (int j = 0; j < kVector; ++j) {
      if (j >= n) continue;
      if (is_f32)
        reinterpret_cast<uint32_t*>(q)[j] = raw.w[j];
      else
        reinterpret_cast<uint16_t*>(q)[j] = static_cast<uint16_t>(raw.w[j / 2] >> (16 * (j % 2)));
    }
  }
};

PG_DEVICE char* element_ptr(const View& t, int64_t i, int64_t k) {
  return static_cast<char*>(t.data) + (i * t.stride + k) * (t.dtype == kF32 ? 4 : 2);
}

PG_DEVICE float load_element(const View& t, int64_t i, int64_t k) {
  const char* p = element_ptr(t, i, k);
  if (t.dtype == kF32) return *reinterpret_cast<const float*>(p);
  return bf16_to_float(*reinterpret_cast<const uint16_t*>(p));
}

PG_DEVICE void store_element(const View& t, int64_t i, int64_t k, float y) {
  char* p = element_ptr(t, i, k);
  if (t.dtype == kF32)
    *reinterpret_cast<float*>(p) = y;
  else
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(pack_bf16(y, 0.f));
}

}  // namespace
}  // namespace prefgrpo
