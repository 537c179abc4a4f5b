// Kernel parameters: raw pointers, sizes and dtype enums. No framework, no ownership.
//
// Each op is `launch_x(const XParams&, stream)`, once for the CPU (stream unused) and once for CUDA.
// Invariant: a sample's result depends on that sample and D alone; null pointers mark absent inputs and results.
#pragma once
#include <cstdint>

namespace prefgrpo {

enum DType : int32_t { kF32 = 0, kBF16 = 1, kF64 = 2 };

// [B, D] with contiguous D; `stride` elements from one sample to the next.
struct View {
  void* data = nullptr;
  int64_t stride = 0;
  int32_t dtype = kF32;
};

struct NoiseAddress {
  uint64_t seed = 0;
  const int64_t* sample = nullptr;  // [B]; null: no addressed noise
  const int64_t* step = nullptr;    // [B]
  int64_t offset = 0;
};

// The velocity of a step: v alone, or guidance over the pair (v = cond, u). A norm that the CUDA kernels do not restore
// themselves gets separate launches: guide (out = v in fp32) before, guide_grad (eps = dv in fp32 → dv, du) after.
struct AffineParams {
  int64_t batch = 0, dim = 0;
  View x, v, u;
  float guidance = 0.f;
  int32_t from_cond = 0;           // base of the guidance: c instead of u
  int64_t rescale_dim = 0;         // length of the last dimension whose norm is restored to ‖c‖; 0: off
  const float* coef = nullptr;     // [T, 5]
  int64_t rows = 0;                // T
  const int64_t* index = nullptr;  // [B] rows of coef; null: row i. Outside: CPU throws, CUDA gives NaN
  // step
  View eps, out, mean;
  NoiseAddress noise;
  // replay: `out` is the stored x'
  View v_ref, v_old;
  const float *g_logp = nullptr, *g_kl = nullptr, *g_guard = nullptr;  // [B]
  View dv, du;
  // results
  float *logp = nullptr, *kl = nullptr, *guard = nullptr;  // [B] fp32
  // scratch
  double* partial = nullptr;  // [3, B, partials_of(...)]
  int32_t threads = 1;        // CPU
};

struct NormalParams {
  int64_t batch = 0, dim = 0;
  NoiseAddress noise;
  View out;
  int32_t threads = 1;
};

struct PolicyParams {
  int64_t batch = 0;  // tensors [B]
  const float *logp = nullptr, *logp_old = nullptr, *advantage = nullptr;
  const float *weight = nullptr, *kl = nullptr, *log_ratio = nullptr;
  float clip_low = 0, clip_high = 0, adv_clip = 0, kl_coef = 0;
  double denominator = 0;  // 0: batch
  float *loss = nullptr, *metrics = nullptr, *d_delta = nullptr, *d_kl = nullptr;
};

struct WinrateParams {
  int64_t prompts = 0, group = 0;
  const void *wins = nullptr, *counts = nullptr;  // [P, G, G]
  int32_t dtype = kF64, use_std = 0, ddof = 0;
  double eps = 0;
  float *rate = nullptr, *advantage = nullptr;  // [P, G]
};

}  // namespace prefgrpo
