// CPU kernels; this file is compiled once per instruction set (PG_ISA), one of which is chosen at run time (cpu.cpp).
//
// A sample is split into tasks of 8 tiles; a tile is converted to fp32 in L1, mapped, rounded, and its squared
// residuals are summed in 32 lanes. Invariant: the split depends only on D (and on the last dimension if a norm is
// restored), so results depend neither on the batch nor on the number of threads.
#include "cpu.h"
#include "cpu_pass.h"
#include "math.h"
#if defined(__AVX512BW__)
#include "cpu_pass_avx512.h"
#endif

namespace prefgrpo {
namespace PG_ISA {

constexpr int64_t kMinElementsForThreads = 65536;  // below this, waking threads costs more than it saves
constexpr int kTile = 1024, kTilesPerTask = 8, kNoiseBlocks = 32;

struct Buffers {
  alignas(64) float x[kTile], v[kTile], u[kTile], q[kTile], y[kTile], m[kTile], o[kTile], r[kTile];
  alignas(64) float noise[kTile + 8 * kNoiseBlocks];
};

static const float* load(const View& t, int64_t i, int64_t start, int n, float* buffer) {
  const int64_t at = i * t.stride + start;
  if (t.dtype == kF32) return static_cast<const float*>(t.data) + at;
  const uint16_t* h = static_cast<const uint16_t*>(t.data) + at;
  for (int k = 0; k < n; ++k) buffer[k] = bf16_to_float(h[k]);
  return buffer;
}

// Where to compute a result tile: in the tensor itself if it is fp32, else in `buffer`, for `store` to convert.
static float* result_buffer(const View& t, int64_t i, int64_t start, float* buffer) {
  return t.dtype == kF32 ? static_cast<float*>(t.data) + i * t.stride + start : buffer;
}

// Rounds `y` to the storage dtype in place and stores it; `y` is what `result_buffer` returned if the tensor is fp32.
static void store(const View& t, int64_t i, int64_t start, int n, float* y, bool keep_rounded) {
  if (t.dtype == kF32) return;
  uint16_t* h = static_cast<uint16_t*>(t.data) + i * t.stride + start;
  for (int k = 0; k < n; ++k) h[k] = float_to_bf16(y[k]);
  if (keep_rounded)
    for (int k = 0; k < n; ++k) y[k] = bf16_to_float(h[k]);
}

// Noise of the counter blocks first … first + blocks − 1, 4 values each; writes up to kNoiseBlocks − 1 further blocks.
static void normals(const NoiseAddress& a, int64_t i, int64_t first, int blocks, float* __restrict out) {
  const Keys keys = keys_of(a.seed);
  const uint32_t step = static_cast<uint32_t>(a.step[i]);
  const uint32_t low = static_cast<uint32_t>(a.sample[i]), high = static_cast<uint32_t>(a.sample[i] >> 32);
  for (int at = 0; at < blocks; at += kNoiseBlocks) {
    alignas(64) float z0[kNoiseBlocks], z1[kNoiseBlocks], z2[kNoiseBlocks], z3[kNoiseBlocks];
    const uint32_t block = static_cast<uint32_t>(first + at);
    for (int k = 0; k < kNoiseBlocks; ++k) {
      const Words w = philox({{block + static_cast<uint32_t>(k), step, low, high}}, keys);
      const Pair p = normal_pair(w.x[0], w.x[1]), q = normal_pair(w.x[2], w.x[3]);
      z0[k] = p.cos_part, z1[k] = p.sin_part, z2[k] = q.cos_part, z3[k] = q.sin_part;
    }
    float* o = out + 4 * at;
    for (int k = 0; k < kNoiseBlocks; ++k)
      o[4 * k] = z0[k], o[4 * k + 1] = z1[k], o[4 * k + 2] = z2[k], o[4 * k + 3] = z3[k];
  }
}

static const float* addressed_noise(const NoiseAddress& a, int64_t i, int64_t start, int n, float* buffer) {
  const int64_t from = a.offset + start, first = from / 4;
  const int skip = static_cast<int>(from - 4 * first);
  normals(a, i, first, (skip + n + 3) / 4, buffer);
  return buffer + skip;
}

// The step's velocity in fp32: v, or the guided velocity, its norm over the last dimension restored to ‖c‖ if asked.
static const float* velocity(const AffineParams& p, int64_t i, int64_t start, int n, Buffers& s) {
  const float* c = load(p.v, i, start, n, s.v);
  if (!p.u.data) return c;
  const float* u = load(p.u, i, start, n, s.u);
  for (int k = 0; k < n; ++k) s.q[k] = guide(c[k], u[k], p.guidance, p.from_cond);
  if (const int length = static_cast<int>(p.rescale_dim))
    for (int row = 0; row < n; row += length) {
      const double cc = dot(c + row, c + row, length), qq = dot(s.q + row, s.q + row, length);
      const float ratio = qq > 0.0 ? static_cast<float>(std::sqrt(cc / qq)) : 0.0f;
      for (int k = row; k < row + length; ++k) s.q[k] *= ratio;
    }
  return s.q;
}

static bool all_zero(const float* g, int n) {
  for (int k = 0; k < n; ++k)
    if (g[k] != 0.f) return false;
  return true;
}

// dv → (dc, du) through the guidance: dc overwrites dv in `g`; a row of the last dimension whose dv is 0 gets 0.
static void guide_backward(const AffineParams& p, int64_t i, int64_t start, int n, float* g, float* du, Buffers& s) {
  const float to_c = p.from_cond ? 1.0f + p.guidance : p.guidance, to_u = p.from_cond ? -p.guidance : 1.0f - p.guidance;
  if (!p.rescale_dim) {
    for (int k = 0; k < n; ++k) du[k] = to_u * g[k], g[k] = to_c * g[k];
    return;
  }
  const float* c = load(p.v, i, start, n, s.v);
  const float* u = load(p.u, i, start, n, s.u);
  const int length = static_cast<int>(p.rescale_dim);
  for (int row = 0; row < n; row += length) {
    if (all_zero(g + row, length)) {
      for (int k = row; k < row + length; ++k) du[k] = 0.f;
      continue;
    }
    for (int k = row; k < row + length; ++k) s.q[k] = guide(c[k], u[k], p.guidance, p.from_cond);
    const double cc = dot(c + row, c + row, length), qq = dot(s.q + row, s.q + row, length);
    const double ratio = qq > 0.0 ? std::sqrt(cc / qq) : 0.0;
    const double projection = qq > 0.0 ? dot(g + row, s.q + row, length) / qq : 0.0;  // (g·q)/‖q‖²
    const float r = static_cast<float>(ratio), on_q = static_cast<float>(ratio * projection);
    const float on_c = cc > 0.0 ? static_cast<float>(projection * std::sqrt(qq / cc)) : 0.0f;
    for (int k = row; k < row + length; ++k) {
      const float dq = r * g[k] - on_q * s.q[k];
      g[k] = to_c * dq + on_c * c[k];
      du[k] = to_u * dq;
    }
  }
}

static Row row_of(const AffineParams& p, int64_t i) {
  const float* r = p.coef + 5 * (p.index ? p.index[i] : i);
  return {r[0], r[1], r[2], r[3], r[4]};
}

static int tile_of(int64_t rescale_dim) { return rescale_dim ? static_cast<int>(kTile - kTile % rescale_dim) : kTile; }

// indexed by the dtypes [x][v][x'], fp32 or bf16 each
#define PG_PASSES(name)                                                 \
  {                                                                     \
    {{name<0, 0, 0>, name<0, 0, 1>}, {name<0, 1, 0>, name<0, 1, 1>}}, { \
      {name<1, 0, 0>, name<1, 0, 1>}, { name<1, 1, 0>, name<1, 1, 1> }  \
    }                                                                   \
  }
constexpr decltype(&step_pass<0, 0, 0>) kStepPass[2][2][2] = PG_PASSES(step_pass);
constexpr decltype(&logp_pass<0, 0, 0>) kLogpPass[2][2][2] = PG_PASSES(logp_pass);
constexpr decltype(&grad_pass<0, 0, 0>) kGradPass[2][2][2] = PG_PASSES(grad_pass);

static char* address(const View& t, int64_t i, int64_t start) {
  return static_cast<char*>(t.data) + (i * t.stride + start) * (t.dtype == kF32 ? 4 : 2);
}

// ---------------------------------------------------------------- step
static double step_tile(const AffineParams& p, const Row& r, int64_t i, int64_t start, int n, Buffers& s) {
  const float* e = p.noise.sample ? addressed_noise(p.noise, i, start, n, s.noise)
                   : p.eps.data   ? load(p.eps, i, start, n, s.noise)
                                  : nullptr;
  if (e && r.w != 0.0f && !p.u.data && !p.mean.data)
    return kStepPass[p.x.dtype][p.v.dtype][p.out.dtype](r, address(p.x, i, start), address(p.v, i, start), e,
                                                        address(p.out, i, start), n);
  const float* x = load(p.x, i, start, n, s.x);
  const float* v = velocity(p, i, start, n, s);
  float* m = p.mean.data ? result_buffer(p.mean, i, start, s.m) : s.m;
  float* y = result_buffer(p.out, i, start, s.y);
  if (e)
    for (int k = 0; k < n; ++k) {
      const float mean = mean_of(r, x[k], v[k]);
      const float noise = r.s * e[k];
      m[k] = mean;
      y[k] = mean + noise;
    }
  else
    for (int k = 0; k < n; ++k) y[k] = m[k] = mean_of(r, x[k], v[k]);
  store(p.out, i, start, n, y, true);
  const double sum = r.w != 0.0f ? squared_distance(y, m, n) : 0.0;
  if (p.mean.data) store(p.mean, i, start, n, m, false);
  return sum;
}

// ---------------------------------------------------------------- replay
struct Sums {
  double logp = 0, kl = 0, guard = 0;
};

static void logp_tile(const AffineParams& p, const Row& r, int64_t i, int64_t start, int n, Buffers& s, Sums& sum) {
  if (r.w != 0.0f && !p.u.data && !p.v_ref.data && !p.v_old.data) {
    sum.logp += kLogpPass[p.x.dtype][p.v.dtype][p.out.dtype](r, address(p.x, i, start), address(p.v, i, start),
                                                             address(p.out, i, start), n);
    return;
  }
  const float* x = load(p.x, i, start, n, s.x);
  const float* y = load(p.out, i, start, n, s.y);
  const float* v = velocity(p, i, start, n, s);
  for (int k = 0; k < n; ++k) s.m[k] = mean_of(r, x[k], v[k]);
  if (r.w != 0.0f) sum.logp += squared_distance(y, s.m, n);
  if (p.v_ref.data) sum.kl += squared_distance(v, load(p.v_ref, i, start, n, s.o), n);
  if (p.v_old.data) {
    const float* old = load(p.v_old, i, start, n, s.o);
    for (int k = 0; k < n; ++k) {
      s.r[k] = y[k] - mean_of(r, x[k], old[k]);
      s.m[k] = v[k] - old[k];
    }
    sum.guard += dot(s.r, s.m, n);
  }
}

static void grad_tile(const AffineParams& p, const Row& r, const GradScale& g, int64_t i, int64_t start, int n,
                      Buffers& s) {
  if (g.logp != 0.f && !p.u.data && p.dv.dtype == p.v.dtype && !p.v_ref.data && !p.v_old.data) {
    kGradPass[p.x.dtype][p.v.dtype][p.out.dtype](r, g.logp, address(p.x, i, start), address(p.v, i, start),
                                                 address(p.out, i, start), address(p.dv, i, start), n);
    return;
  }
  const float* x = load(p.x, i, start, n, s.x);
  const float* y = load(p.out, i, start, n, s.y);
  const float* v = velocity(p, i, start, n, s);
  float* d = result_buffer(p.dv, i, start, s.r);
  for (int k = 0; k < n; ++k) d[k] = scaled(g.logp, y[k] - mean_of(r, x[k], v[k]));
  if (p.v_ref.data && g.kl != 0.f) {
    const float* ref = load(p.v_ref, i, start, n, s.o);
    for (int k = 0; k < n; ++k) d[k] += g.kl * (v[k] - ref[k]);
  }
  if (p.v_old.data && g.guard != 0.f) {
    const float* old = load(p.v_old, i, start, n, s.o);
    for (int k = 0; k < n; ++k) d[k] += g.guard * (y[k] - mean_of(r, x[k], old[k]));
  }
  if (p.u.data) {
    float* du = result_buffer(p.du, i, start, s.o);
    guide_backward(p, i, start, n, d, du, s);
    store(p.du, i, start, n, du, false);
  }
  store(p.dv, i, start, n, d, false);
}

// ---------------------------------------------------------------- loops
// Calls body(sample, start, n, task, buffers) for every tile; tasks are distributed over the threads.
template <class Body>
static void for_tiles(int64_t batch, int64_t dim, int tile, int threads, Body body) {
  const int64_t span = static_cast<int64_t>(tile) * kTilesPerTask, per_sample = (dim + span - 1) / span;
  const int64_t tasks = batch * per_sample;
  if (batch * dim < kMinElementsForThreads) threads = 1;
  if (threads > tasks) threads = static_cast<int>(tasks);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tasks; ++t) {
    Buffers s;
    const int64_t i = t / per_sample, from = (t % per_sample) * span, to = from + span < dim ? from + span : dim;
    for (int64_t at = from; at < to; at += tile) body(i, at, static_cast<int>(to - at < tile ? to - at : tile), t, s);
  }
}

static int64_t partials_of(int64_t dim, int64_t rescale_dim) {
  const int64_t span = static_cast<int64_t>(tile_of(rescale_dim)) * kTilesPerTask;
  return (dim + span - 1) / span;
}

static double sum_partials(const double* partial, int64_t i, int64_t n) {
  double sum = 0.0;
  for (int64_t k = 0; k < n; ++k) sum += partial[i * n + k];
  return sum;
}

static void affine_step(const AffineParams& p) {
  const int64_t n = partials_of(p.dim, p.rescale_dim);
  for_tiles(p.batch, p.dim, tile_of(p.rescale_dim), p.threads,
            [&p](int64_t i, int64_t at, int len, int64_t task, Buffers& s) {
              p.partial[task] += step_tile(p, row_of(p, i), i, at, len, s);
            });
  for (int64_t i = 0; i < p.batch; ++i) p.logp[i] = finish_logp(row_of(p, i), sum_partials(p.partial, i, n), p.dim);
}

static void affine_logp(const AffineParams& p) {
  const int64_t n = partials_of(p.dim, p.rescale_dim), plane = p.batch * n;
  for_tiles(p.batch, p.dim, tile_of(p.rescale_dim), p.threads,
            [&p, plane](int64_t i, int64_t at, int len, int64_t task, Buffers& s) {
              Sums sum;
              logp_tile(p, row_of(p, i), i, at, len, s, sum);
              p.partial[task] += sum.logp;
              if (p.kl) p.partial[plane + task] += sum.kl;
              if (p.guard) p.partial[2 * plane + task] += sum.guard;
            });
  for (int64_t i = 0; i < p.batch; ++i) {
    const Row r = row_of(p, i);
    p.logp[i] = finish_logp(r, sum_partials(p.partial, i, n), p.dim);
    if (p.kl) p.kl[i] = finish_kl(r, sum_partials(p.partial + plane, i, n), p.dim);
    if (p.guard) p.guard[i] = finish_guard(r, sum_partials(p.partial + 2 * plane, i, n), p.dim);
  }
}

static void affine_grad(const AffineParams& p) {
  for_tiles(p.batch, p.dim, tile_of(p.rescale_dim), p.threads,
            [&p](int64_t i, int64_t at, int len, int64_t, Buffers& s) {
              const Row r = row_of(p, i);
              const GradScale g = grad_scale(r, p.dim, p.g_logp ? p.g_logp[i] : 0.f, p.g_kl ? p.g_kl[i] : 0.f,
                                             p.g_guard ? p.g_guard[i] : 0.f);
              grad_tile(p, r, g, i, at, len, s);
            });
}

static void normal(const NormalParams& p) {
  for_tiles(p.batch, p.dim, kTile, p.threads, [&p](int64_t i, int64_t at, int len, int64_t, Buffers& s) {
    const float* z = addressed_noise(p.noise, i, at, len, s.noise);
    float* y = result_buffer(p.out, i, at, s.y);
    for (int k = 0; k < len; ++k) y[k] = z[k];
    store(p.out, i, at, len, y, false);
  });
}

extern const CpuKernels kernels;
const CpuKernels kernels = {affine_step, affine_logp, affine_grad, normal, partials_of};

}  // namespace PG_ISA
}  // namespace prefgrpo
