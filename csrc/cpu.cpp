// The CPU kernels, compiled for AVX2 and FMA on x86 (bindings.cpp says whether the machine has them).
//
// A sample is split into tasks of 8 tiles of 1024 elements; a tile is read, mapped and summed in 32 lanes in one pass.
// Invariant: the split depends on D alone, so results depend neither on the batch nor on the number of threads.
#include <cmath>
#include <memory>

#include "kernels.h"
#include "math.h"

// Compiles a function for AVX-512 too; the loader picks. Its results are the same: no expression is contracted.
#if defined(PG_X86) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define PG_CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#else
#define PG_CLONES
#endif

namespace prefgrpo {
namespace cpu {
namespace {

constexpr int64_t kMinElementsForThreads = 65536;  // below this, waking threads costs more than it saves
constexpr int kLanes = 32, kTile = 1024, kTask = 8 * kTile, kNoiseBlocks = 32;

// ---------------------------------------------------------------- elements and lanes
template <int kType>
PG_INLINE float get(const char* p, int k) {
  if (kType == kF32) return reinterpret_cast<const float*>(p)[k];
  return bf16_to_float(reinterpret_cast<const uint16_t*>(p)[k]);
}

template <int kType>
PG_INLINE float put(char* p, int k, float y) {  // returns what is stored
  if (kType == kF32) return reinterpret_cast<float*>(p)[k] = y;
  const uint32_t word = round_to_bf16(y);
  reinterpret_cast<uint16_t*>(p)[k] = static_cast<uint16_t>(word >> 16);
  return from_bits(word);
}

// Element `k` of all; null if the tensor is absent.
char* at(const View& t, int64_t k) { return t.data ? t.data + k * (t.dtype == kF32 ? 4 : 2) : nullptr; }

// Element k belongs to lane k mod 32; lanes are added as a tree.
struct Lanes {
  alignas(64) float sum[kLanes] = {};

  double total() {
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int k = 0; k < width; ++k) sum[k] += sum[k + width];
    return sum[0];
  }
};

// Calls body(k, k % kLanes) for every k < n.
template <class Body>
PG_INLINE void for_lanes(int n, Body body) {
  int k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int l = 0; l < kLanes; ++l) body(k + l, l);
  for (int l = 0; k + l < n; ++l) body(k + l, l);
}

// ---------------------------------------------------------------- tasks
// Calls body(sample, start, n, task) for every tile; tasks are distributed over the threads.
template <class Body>
void for_tiles(int64_t batch, int64_t dim, int64_t threads, Body body) {
  const int64_t per_sample = (dim + kTask - 1) / kTask, tasks = batch * per_sample;
  if (batch * dim < kMinElementsForThreads) threads = 1;
  if (threads > tasks) threads = tasks;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads)) if (threads > 1)
  for (int64_t t = 0; t < tasks; ++t) {
    const int64_t i = t / per_sample, from = (t % per_sample) * kTask, to = from + kTask < dim ? from + kTask : dim;
    for (int64_t start = from; start < to; start += kTile)
      body(i, start, static_cast<int>(to - start < kTile ? to - start : kTile), t);
  }
}

struct Sums {
  double logp = 0, kl = 0, log_ratio = 0;

  void add(const Sums& s) {
    logp += s.logp;
    kl += s.kl;
    log_ratio += s.log_ratio;
  }
};

// Adds what `tile` returns over each task, then each sample's tasks in order, and stores the results.
template <class Tile>
void reduce(const SumParams& p, int64_t threads, Tile tile) {
  const int64_t per_sample = (p.dim + kTask - 1) / kTask;
  std::unique_ptr<Sums[]> partial(new Sums[p.batch * per_sample]);
  for_tiles(p.batch, p.dim, threads,
            [&](int64_t i, int64_t start, int n, int64_t task) { partial[task].add(tile(i, start, n)); });
  for (int64_t i = 0; i < p.batch; ++i) {
    Sums sum;
    for (int64_t k = i * per_sample; k < (i + 1) * per_sample; ++k) sum.add(partial[k]);
    store_result(p.logp, kLogp, p, i, sum.logp);
    store_result(p.kl, kKl, p, i, sum.kl);
    store_result(p.log_ratio, kLogRatio, p, i, sum.log_ratio);
  }
}

// ---------------------------------------------------------------- counter-based noise
// Writes the numbers of elements start … start + n − 1, n rounded up to a multiple of 4·kNoiseBlocks; 4 divides start.
PG_CLONES void counter_noise(const PhiloxNoise& a, int64_t i, int64_t start, int n, float* __restrict out) {
  const Keys keys = keys_of(static_cast<uint64_t>(a.seed));
  const uint32_t first = static_cast<uint32_t>((a.offset + start) / 4);
  const uint32_t step = static_cast<uint32_t>(a.step ? a.step[i] : a.number);
  const uint32_t low = static_cast<uint32_t>(a.sample[i]), high = static_cast<uint32_t>(a.sample[i] >> 32);
  for (int done = 0; done < (n + 3) / 4; done += kNoiseBlocks) {
    alignas(64) float z0[kNoiseBlocks], z1[kNoiseBlocks], z2[kNoiseBlocks], z3[kNoiseBlocks];
    const uint32_t block = first + static_cast<uint32_t>(done);
    for (int k = 0; k < kNoiseBlocks; ++k) {
      const Words w = philox({{block + static_cast<uint32_t>(k), step, low, high}}, keys);
      const Pair p = normal_pair(w.x[0], w.x[1]), q = normal_pair(w.x[2], w.x[3]);
      z0[k] = p.cos_part;
      z1[k] = p.sin_part;
      z2[k] = q.cos_part;
      z3[k] = q.sin_part;
    }
    float* o = out + 4 * done;
    for (int k = 0; k < kNoiseBlocks; ++k) {
      o[4 * k] = z0[k];
      o[4 * k + 1] = z1[k];
      o[4 * k + 2] = z2[k];
      o[4 * k + 3] = z3[k];
    }
  }
}

void normal(const NormalParams& p, int64_t threads) {
  for_tiles(p.batch, p.dim, threads, [&p](int64_t i, int64_t start, int n, int64_t) {
    alignas(64) float buffer[kTile];
    counter_noise(p.noise, i, start, n, buffer);
    char* y = at(p.out, i * p.dim + start);
    for (int k = 0; k < n; ++k) put<kF32>(y, k, buffer[k]);
  });
}

// ---------------------------------------------------------------- step, replay, gradient
// x' and, with noise, the sum of its squared distances from the mean.
template <int kX, int kV, int kY>
PG_CLONES double step_tile(const Row& r, const char* __restrict x, const char* __restrict v, const float* __restrict e,
                           char* __restrict y, float* __restrict mean, int n) {
  Lanes acc;
  if (mean)
    for (int k = 0; k < n; ++k) mean[k] = mean_of(r, get<kX>(x, k), get<kV>(v, k));
  if (!e) {
    for (int k = 0; k < n; ++k) put<kY>(y, k, mean_of(r, get<kX>(x, k), get<kV>(v, k)));
    return 0;
  }
  for_lanes(n, [&](int k, int l) __attribute__((always_inline)) {
    const float m = mean_of(r, get<kX>(x, k), get<kV>(v, k));
    const float noise = r.s * e[k];
    const float d = put<kY>(y, k, m + noise) - m;
    acc.sum[l] += d * d;
  });
  return acc.total();
}

template <int kX, int kV, int kY>
PG_CLONES Sums logp_tile(const Row& r, const char* __restrict x, const char* __restrict v, const char* __restrict y,
                         const char* __restrict ref, const char* __restrict old, int n) {
  Lanes logp, kl, log_ratio;
  for_lanes(n, [&](int k, int l) __attribute__((always_inline)) {
    const float d = get<kY>(y, k) - mean_of(r, get<kX>(x, k), get<kV>(v, k));
    logp.sum[l] += d * d;
  });
  if (ref)
    for_lanes(n, [&](int k, int l) __attribute__((always_inline)) {
      const float d = get<kV>(v, k) - get<kV>(ref, k);
      kl.sum[l] += d * d;
    });
  if (old)
    for_lanes(n, [&](int k, int l) __attribute__((always_inline)) {
      const float residual = get<kY>(y, k) - mean_of(r, get<kX>(x, k), get<kV>(old, k));
      log_ratio.sum[l] += residual * (get<kV>(v, k) - get<kV>(old, k));
    });
  return {logp.total(), kl.total(), log_ratio.total()};
}

// A velocity that is absent is replaced by v, and its factor is 0.
template <int kX, int kV, int kY>
PG_CLONES void grad_tile(const Row& r, const GradScale& g, const char* __restrict x, const char* v,
                         const char* __restrict y, const char* ref, const char* old, char* __restrict dv, int n) {
  for (int k = 0; k < n; ++k) {
    const float at_x = get<kX>(x, k), at_v = get<kV>(v, k), at_y = get<kY>(y, k);
    float d = scaled(g.logp, at_y - mean_of(r, at_x, at_v));
    d += scaled(g.kl, at_v - get<kV>(ref, k));
    d += scaled(g.log_ratio, at_y - mean_of(r, at_x, get<kV>(old, k)));
    put<kV>(dv, k, d);
  }
}

void sde_step(const StepParams& p, int64_t threads) {
  const auto step = with_types(p, [](auto t) { return &step_tile<t.x, t.v, t.y>; });
  const bool is_noisy = p.noise.sample || p.eps.data;
  const auto tile = [&p, step](int64_t i, int64_t start, int n) {
    alignas(64) float buffer[kTile];
    const int64_t k = i * p.dim + start;
    const float* e = p.noise.sample ? buffer : reinterpret_cast<const float*>(at(p.eps, k));
    if (p.noise.sample) counter_noise(p.noise, i, start, n, buffer);
    float* mean = reinterpret_cast<float*>(at(p.mean, k));
    return Sums{step(row_of(p, i), at(p.x, k), at(p.v, k), e, at(p.y, k), mean, n), 0, 0};
  };
  if (is_noisy) return reduce(p, threads, tile);
  for_tiles(p.batch, p.dim, threads, [&tile](int64_t i, int64_t start, int n, int64_t) { tile(i, start, n); });
  for (int64_t i = 0; i < p.batch; ++i) reinterpret_cast<float*>(p.logp.data)[i] = row_of(p, i).c;
}

void sde_logp(const LogpParams& p, int64_t threads) {
  const auto logp = with_types(p, [](auto t) { return &logp_tile<t.x, t.v, t.y>; });
  reduce(p, threads, [&p, logp](int64_t i, int64_t start, int n) {
    const int64_t k = i * p.dim + start;
    return logp(row_of(p, i), at(p.x, k), at(p.v, k), at(p.y, k), at(p.v_ref, k), at(p.v_old, k), n);
  });
}

void sde_grad(const GradParams& p, int64_t threads) {
  const auto grad = with_types(p, [](auto t) { return &grad_tile<t.x, t.v, t.y>; });
  const double share = 1.0 / static_cast<double>(p.size);
  for_tiles(p.batch, p.dim, threads, [&p, grad, share](int64_t i, int64_t start, int n, int64_t) {
    const int64_t k = i * p.dim + start;
    const char* v = at(p.v, k);
    const char* ref = p.g_kl ? at(p.v_ref, k) : v;
    const char* old = p.g_log_ratio ? at(p.v_old, k) : v;
    const Row r = row_of(p, i);
    const GradScale g = grad_scale(r, share, p.g_logp ? p.g_logp[i] : 0.f, p.g_kl ? p.g_kl[i] : 0.f,
                                   p.g_log_ratio ? p.g_log_ratio[i] : 0.f);
    grad(r, g, at(p.x, k), v, at(p.y, k), ref, old, at(p.dv, k), n);
  });
}

// ---------------------------------------------------------------- small ops, on one thread
void policy_loss(const PolicyParams& p, int64_t) {
  PolicySums sums = no_policy_terms();
  const PolicyClip clip = policy_clip(p);
  for (int64_t i = 0; i < p.batch; ++i) add_policy_term(p, clip, i, sums);
  finish_policy(p, sums);
}

void winrate(const WinrateParams& p, int64_t) {
  for (int64_t i = 0; i < p.prompts * p.group; ++i) p.rate[i] = rate_of(p, i);
  for (int64_t first = 0; first < p.prompts * p.group; first += p.group) {
    const Moments m = moments(p.rate + first, p.group, p.ddof);
    for (int64_t i = first; i < first + p.group; ++i) p.advantage[i] = advantage_of(p.rate[i], m, p.use_std, p.eps);
  }
}

}  // namespace

const Kernels kernels = {sde_step, sde_logp, sde_grad, normal, policy_loss, winrate};

}  // namespace cpu
}  // namespace prefgrpo
