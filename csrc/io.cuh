// A block's tiles of 1024 elements, 8 neighbours per thread: raw words are fetched first, so that all loads are in
// flight before one is used.
//
// Where a thread's elements all lie inside the sample and begin at a multiple of 16 bytes, 128 bits move at a time;
// else the same words are filled and emptied element by element, so the arithmetic in between exists once. Invariant:
// the conversion to fp32 is exact, and stores round to nearest even.
#pragma once
#include <cuda_runtime.h>

#include "launch.cuh"

#define PG_DEVICE __device__ __forceinline__

namespace prefgrpo {
namespace {

struct Tile {
  int from, left;  // elements of the block before this tile, and from its start on

  PG_DEVICE explicit Tile(const Split& split) : from(0), left(blockIdx.y + 1 == gridDim.y ? split.last : split.block) {}

  PG_DEVICE void advance() {
    from += kTile;
    left -= kTile;
  }

  // How many of this thread's 8 elements lie inside the sample.
  PG_DEVICE int count() const {
    const int n = left - static_cast<int>(threadIdx.x) * kVector;
    return n < 0 ? 0 : n < kVector ? n : kVector;
  }

  // Whether a thread moves its elements at address q 128 bits at a time.
  PG_DEVICE bool is_wide(const char* q) const { return left >= kTile && (reinterpret_cast<uintptr_t>(q) & 15) == 0; }
};

PG_DEVICE int64_t block_start(const Split& split) {
  return static_cast<int64_t>(blockIdx.y) * static_cast<unsigned>(split.block);
}

// The block's first element in a tensor [B, D].
PG_DEVICE int64_t first_of(const Split& split, int64_t dim) { return blockIdx.x * dim + block_start(split); }

struct Values {
  float v[kVector];
  PG_DEVICE float& operator[](int j) { return v[j]; }
  PG_DEVICE float operator[](int j) const { return v[j]; }
};

// A thread's 8 elements of one tensor, in the tile that was last fetched or stored.
template <int kType>
struct Lane {
  static constexpr int kSize = kType == kF32 ? 4 : 2, kWords = kType == kF32 ? 8 : 4;
  char* p;  // the thread's first element in the block; not used if the tensor is absent
  uint32_t w[kWords] = {};

  PG_DEVICE Lane(const View& t, int64_t first) : p(t.data + (first + threadIdx.x * kVector) * kSize) {}

  // Elements outside the sample are 0.
  PG_DEVICE void fetch(const Tile& tile) {
    const char* q = p + tile.from * kSize;
    if (tile.is_wide(q)) {
      for (int k = 0; k < kWords; k += 4) {
        const uint4 a = reinterpret_cast<const uint4*>(q)[k / 4];
        memcpy(w + k, &a, sizeof a);
      }
      return;
    }
    const int n = tile.count();
    for (int k = 0; k < kWords; ++k) w[k] = 0;
    for (int j = 0; j < kVector; ++j) {
      if (j >= n) continue;
      if (kType == kF32)
        w[j % kWords] = reinterpret_cast<const uint32_t*>(q)[j];
      else
        w[j / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(q)[j]) << (16 * (j % 2));
    }
  }

  PG_DEVICE Values values() const {
    Values y;
    for (int j = 0; j < kVector; ++j)
      y[j] = from_bits(kType == kF32 ? w[j % kWords] : j % 2 ? w[j / 2] & 0xffff0000u : w[j / 2] << 16);
    return y;
  }

  // __stwb keeps the compiler from splitting the wide stores into the narrow ones of the tail.
  PG_DEVICE void store(const Tile& tile, const Values& y) {
    char* q = p + tile.from * kSize;
    for (int j = 0; j < kVector; j += 2) {
      if (kType == kF32) {
        w[j % kWords] = bits(y[j]);
        w[(j + 1) % kWords] = bits(y[j + 1]);
      } else {
        w[j / 2] = pack_bf16(y[j], y[j + 1]);
      }
    }
    if (tile.is_wide(q)) {
      for (int k = 0; k < kWords; k += 4)
        __stwb(reinterpret_cast<uint4*>(q) + k / 4, make_uint4(w[k], w[k + 1], w[k + 2], w[k + 3]));
      return;
    }
    const int n = tile.count();
    for (int j = 0; j < kVector; ++j) {
      if (j >= n) continue;
      if (kType == kF32)
        reinterpret_cast<uint32_t*>(q)[j] = w[j % kWords];
      else
        reinterpret_cast<uint16_t*>(q)[j] = static_cast<uint16_t>(w[j / 2] >> (16 * (j % 2)));
    }
  }
};

// ---------------------------------------------------------------- counter-based noise
struct Counter {
  uint32_t step, low, high;
};

PG_DEVICE Counter counter_of(const PhiloxNoise& a, int64_t i) {
  const uint64_t id = static_cast<uint64_t>(a.sample[i]);
  const int64_t step = a.step ? a.step[i] : a.number;
  return {static_cast<uint32_t>(step), static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)};
}

PG_DEVICE void four_normals(const Keys& keys, const Counter& c, uint32_t block, float* z) {
  const Words w = philox({{block, c.step, c.low, c.high}}, keys);
  const Pair p = normal_pair(w.x[0], w.x[1]), q = normal_pair(w.x[2], w.x[3]);
  z[0] = p.cos_part;
  z[1] = p.sin_part;
  z[2] = q.cos_part;
  z[3] = q.sin_part;
}

// Noise of a tile, two counter blocks per thread; 0 past D.
PG_DEVICE void counter_noise(const Split& split, const Counter& c, const Tile& tile, Values& e) {
  const uint32_t first = split.counter + static_cast<uint32_t>(block_start(split) >> 2);
  const uint32_t block = first + (tile.from / 4 + threadIdx.x * 2);
  four_normals(split.keys, c, block, e.v);
  four_normals(split.keys, c, block + 1, e.v + 4);
  if (tile.left >= kTile) return;
  const int n = tile.count();
  for (int j = 0; j < kVector; ++j) e[j] = j < n ? e[j] : 0.f;
}

}  // namespace
}  // namespace prefgrpo
