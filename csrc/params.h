// Kernel parameters: raw pointers, sizes and dtypes. No framework, no ownership.
//
// Invariant: a sample's result depends on that sample and D alone; null pointers mark absent inputs and results.
#pragma once
#include <cstdint>

namespace prefgrpo {

enum DType : int32_t { kF32 = 0, kBF16 = 1, kF64 = 2 };

// [B, D] with contiguous D; `stride` elements from one sample to the next.
struct View {
  char* data = nullptr;
  int64_t stride = 0;
  int32_t dtype = kF32;
};

struct PhiloxNoise {
  uint64_t seed = 0;
  const int64_t* sample = nullptr;  // [B]; null: no counter-based noise
  const int64_t* step = nullptr;    // [B]
  int64_t offset = 0;
};

// x fp32 or bf16; v fp32 or bf16, but bf16 where x is; v_ref, v_old and dv like v; eps fp32.
struct SdeParams {
  int64_t batch = 0, dim = 0;
  View x, v;
  const float* coef = nullptr;     // [T, 5]
  int64_t rows = 0;                // T
  const int64_t* index = nullptr;  // [B] rows of coef; null: row i. Outside: CPU throws, CUDA gives NaN
  View y;                          // x': of a step fp32 or bf16, but bf16 where x is; of a replay like x
  // step
  View eps;
  PhiloxNoise noise;
  View mean;  // fp32
  // replay
  View v_ref, v_old;
  const float *g_logp = nullptr, *g_kl = nullptr, *g_log_ratio = nullptr;  // [B]
  View dv;
  // results
  float *logp = nullptr, *kl = nullptr, *log_ratio = nullptr;  // [B]
  double* partial = nullptr;                                   // CUDA: scratch [3, B, partials_of(D)]
};

struct NormalParams {
  int64_t batch = 0, dim = 0;
  PhiloxNoise noise;
  View out;
};

struct PolicyParams {
  int64_t batch = 0;
  const float *logp = nullptr, *logp_old = nullptr, *advantage = nullptr;  // [B]
  const float *weight = nullptr, *kl = nullptr, *log_ratio = nullptr;
  double clip_low = 0, clip_high = 0, adv_clip = 0, kl_coef = 0, denominator = 0;
  float *loss = nullptr, *metrics = nullptr, *d_log_ratio = nullptr, *d_kl = nullptr;
};

struct WinrateParams {
  int64_t prompts = 0, group = 0;
  const void *wins = nullptr, *counts = nullptr;  // [P, G, G]
  int32_t dtype = kF64;                           // or kF32
  bool use_std = false;
  int32_t ddof = 0;
  double eps = 0;
  float *rate = nullptr, *advantage = nullptr;  // [P, G]
};

}  // namespace prefgrpo
