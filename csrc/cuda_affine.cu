// CUDA kernels of the affine step, its replay and their gradient.
//
// A block handles 1 to 8 tiles (more in huge samples) of 1024 elements of one sample, 8 neighbours per thread with
// 128-bit accesses; partial sums go to fp64 scratch, and a second kernel adds them in a fixed order. The usual
// pairs of dtypes have specialised kernels; <kAny, kAny> is for all others and for options. Invariant: the order of
// every sum depends on D alone (no float atomics) and is the same in step and replay, so log-probs are bitwise equal.
#include <initializer_list>

#include "cuda_io.cuh"
#include "cuda_launch.cuh"

namespace prefgrpo {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kTile = kThreads * kVector;

enum Noise { kNone, kGiven, kAddressed };

// How a launch is split: elements per block, elements of a sample's last block, and the least number of remaining
// elements for a full tile (1024; no tile is full if any tensor's samples are not 16-byte aligned). Also noise keys.
struct Split {
  int block, last, min_full;
  Keys keys;
};

PG_DEVICE int64_t block_start(const Split& split) {
  return static_cast<int64_t>(blockIdx.y) * static_cast<unsigned>(split.block);
}

PG_DEVICE Tile first_tile(const Split& split) {
  const int left = blockIdx.y + 1 == gridDim.y ? split.last : split.block;
  return {0, left, left >= split.min_full};
}

// Advances to the next tile; false after the block's last.
PG_DEVICE bool next(const Split& split, Tile& tile) {
  tile.from += kTile, tile.left -= kTile, tile.full = tile.left >= split.min_full;
  return tile.left > 0;
}

// ---------------------------------------------------------------- addressed noise
struct Counter {
  uint32_t step, low, high;
};

PG_DEVICE Counter counter_of(const NoiseAddress& a, int64_t i) {
  const uint64_t id = static_cast<uint64_t>(a.sample[i]);
  return {static_cast<uint32_t>(a.step[i]), static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)};
}

PG_DEVICE void four_normals(const Keys& keys, const Counter& c, uint32_t block, float* z) {
  const Words w = philox({{block, c.step, c.low, c.high}}, keys);
  const Pair p = normal_pair(w.x[0], w.x[1]), q = normal_pair(w.x[2], w.x[3]);
  z[0] = p.cos_part, z[1] = p.sin_part, z[2] = q.cos_part, z[3] = q.sin_part;
}

// Noise of a tile: two counter blocks per thread, a third if `any_offset` and 4 does not divide the offset; 0 past D.
PG_DEVICE void addressed_noise(const Split& split, const NoiseAddress& a, const Counter& c, const Tile& tile,
                               bool any_offset, Values& e) {
  const uint32_t block =
      static_cast<uint32_t>((a.offset + block_start(split)) >> 2) + (tile.from / 4 + threadIdx.x * 2);
  const int skip = any_offset ? static_cast<int>(a.offset & 3) : 0;
  four_normals(split.keys, c, block, e.v), four_normals(split.keys, c, block + 1, e.v + 4);
  if (skip != 0) {
    float extra[4];
    four_normals(split.keys, c, block + 2, extra);
    for (int s = 0; s < skip; ++s) {
      for (int j = 0; j < kVector - 1; ++j) e[j] = e[j + 1];
      e[kVector - 1] = extra[0], extra[0] = extra[1], extra[1] = extra[2];
    }
  }
  if (tile.full) return;
  const int n = tile.count();
  for (int j = 0; j < kVector; ++j) e[j] = j < n ? e[j] : 0.f;
}

// ---------------------------------------------------------------- per sample and per tile
// The row of sample i; NaN if its index is outside the table.
PG_DEVICE Row row_of(const AffineParams& p, int64_t i) {
  const int64_t k = p.index ? p.index[i] : i;
  if (k < 0 || k >= p.rows) {
    const float nan = from_bits(0x7fc00000u);
    return {nan, nan, nan, nan, nan};
  }
  const float* r = p.coef + 5 * k;
  return {r[0], r[1], r[2], r[3], r[4]};
}

PG_DEVICE double warp_sum(double x, int lanes = 32) {
  for (int width = lanes / 2; width > 0; width >>= 1) x += __shfl_xor_sync(0xffffffffu, x, width);
  return x;
}

// Factors that restore the norm of a row of the last dimension, shared by `lanes` neighbouring threads: ‖c‖/‖q‖, the
// factors of q and c in the gradient, and whether its dv is not all 0 (else its gradient is 0, whatever c and u hold).
struct Norm {
  float ratio, on_q, on_c;
  bool used;
};

template <bool kBackward>
PG_DEVICE Norm norm_of(double cc, double qq, double gq, double gg, int lanes) {
  cc = warp_sum(cc, lanes), qq = warp_sum(qq, lanes);
  const double ratio = qq > 0 ? sqrt(cc / qq) : 0;
  if (!kBackward) return {static_cast<float>(ratio), 0.f, 0.f, true};
  gq = warp_sum(gq, lanes), gg = warp_sum(gg, lanes);
  const double projection = qq > 0 ? gq / qq : 0;
  return {static_cast<float>(ratio), static_cast<float>(ratio * projection),
          cc > 0 ? static_cast<float>(projection * sqrt(qq / cc)) : 0.f, gg != 0};
}

template <bool kBackward>
PG_DEVICE Norm norm_of(const AffineParams& p, const Values& c, const Values& q, const Values& g) {
  double cc = 0, qq = 0, gq = 0, gg = 0;
  for (int j = 0; j < kVector; ++j) {
    cc += static_cast<double>(c[j]) * c[j], qq += static_cast<double>(q[j]) * q[j];
    if (kBackward) gq += static_cast<double>(g[j]) * q[j], gg += fabsf(g[j]);
  }
  return norm_of<kBackward>(cc, qq, gq, gg, static_cast<int>(p.rescale_dim) / kVector);
}

// Turns dv of the guided velocity (in d) into the gradients in c (in d) and in u (in du).
PG_DEVICE void guide_backward(const AffineParams& p, const Norm& n, float c, float q, float& d, float& du) {
  const float to_c = p.from_cond ? 1.0f + p.guidance : p.guidance, to_u = p.from_cond ? -p.guidance : 1.0f - p.guidance;
  const float dq = p.rescale_dim ? n.ratio * d - n.on_q * q : d;
  du = n.used ? to_u * dq : 0.f;
  d = !n.used ? 0.f : p.rescale_dim ? to_c * dq + n.on_c * c : to_c * dq;
}

// The velocity, after guidance if there is a pair.
template <int kType>
PG_DEVICE Values velocity(const AffineParams& p, const Stream<kType>& v, const Stream<kAny>& u) {
  const Values c = v.values();
  if (kType != kAny || !p.u.data) return c;
  Values q = u.values();
  for (int j = 0; j < kVector; ++j) q[j] = guide(c[j], q[j], p.guidance, p.from_cond);
  if (!p.rescale_dim) return q;
  const float ratio = norm_of<false>(p, c, q, q).ratio;
  for (int j = 0; j < kVector; ++j) q[j] *= ratio;
  return q;
}

// Adds this block's sums in a fixed order and stores them for finish_kernel.
template <int kSums>
PG_DEVICE void reduce(const AffineParams& p, const double (&sums)[kSums]) {
  __shared__ double warps[kSums][kWarps];
  for (int k = 0; k < kSums; ++k) {
    const double sum = warp_sum(sums[k]);
    if (threadIdx.x % 32 == 0) warps[k][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int k = 0; k < kSums; ++k) {
    double sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += warps[k][w];
    p.partial[(k * p.batch + blockIdx.x) * gridDim.y + blockIdx.y] = sum;
  }
}

// One warp per sample: logp and, if asked, KL and Guard log-ratio from the partial sums, in a fixed order.
__global__ void __launch_bounds__(32) finish_kernel(const __grid_constant__ AffineParams p, const int64_t chunks) {
  const int64_t i = blockIdx.x;
  const Row r = row_of(p, i);
  for (int k = 0; k < 3; ++k) {
    if ((k == 1 && !p.kl) || (k == 2 && !p.guard)) continue;
    double sum = 0;
    for (int64_t j = threadIdx.x; j < chunks; j += 32) sum += p.partial[(k * p.batch + i) * chunks + j];
    sum = warp_sum(sum);
    if (threadIdx.x != 0) continue;
    if (k == 0) p.logp[i] = finish_logp(r, sum, p.dim);
    if (k == 1) p.kl[i] = finish_kl(r, sum, p.dim);
    if (k == 2) p.guard[i] = finish_guard(r, sum, p.dim);
  }
}

// ---------------------------------------------------------------- kernels: kLatent is the dtype of x and x'
template <int kLatent, int kVelocity, int kNoise>
__global__ void __launch_bounds__(kThreads, kVelocity == kAny ? 5 : 9)
    step_kernel(const __grid_constant__ AffineParams p, const __grid_constant__ Split split) {
  constexpr bool kGeneral = kVelocity == kAny;
  const int64_t i = blockIdx.x, start = block_start(split);
  Stream<kLatent> x_(p.x, i, start), out_(p.out, i, start);
  Stream<kVelocity> v_(p.v, i, start);
  Stream<kAny> u_(p.u, i, start), eps_(p.eps, i, start);
  Row r{};
  Counter counter{};
  float acc = 0.f;
  Tile tile = first_tile(split);
  bool first = true;
  do {
    x_.fetch(tile), v_.fetch(tile);
    if (kGeneral && p.u.data) u_.fetch(tile);
    if (kNoise == kGiven) eps_.fetch(tile);
    if (first) {
      r = row_of(p, i);
      if (kNoise == kAddressed) counter = counter_of(p.noise, i);
    }
    first = false;
    Values e{}, mean, y;
    if (kNoise == kAddressed) addressed_noise(split, p.noise, counter, tile, kGeneral, e);
    if (kNoise == kGiven) e = eps_.values();
    const Values x = x_.values(), v = velocity(p, v_, u_);
    for (int j = 0; j < kVector; ++j) {
      mean[j] = mean_of(r, x[j], v[j]);
      y[j] = kNoise == kNone ? mean[j] : mean[j] + r.s * e[j];
    }
    if (kGeneral && p.mean.data) Stream<kF32>(p.mean, i, start).store(tile, mean);
    out_.store(tile, y);
    y = out_.values();
    for (int j = 0; j < kVector; ++j) acc = fma_(y[j] - mean[j], y[j] - mean[j], acc);
  } while (next(split, tile));
  const double sums[1] = {acc};
  reduce(p, sums);
}

template <int kLatent, int kVelocity>
__global__ void __launch_bounds__(kThreads, kVelocity == kAny ? 5 : 9)
    logp_kernel(const __grid_constant__ AffineParams p, const __grid_constant__ Split split) {
  constexpr bool kGeneral = kVelocity == kAny;
  const int64_t i = blockIdx.x, start = block_start(split);
  Stream<kLatent> x_(p.x, i, start), y_(p.out, i, start);
  Stream<kVelocity> v_(p.v, i, start);
  Stream<kAny> u_(p.u, i, start), ref_(p.v_ref, i, start), old_(p.v_old, i, start);
  Row r{};
  float acc = 0.f, kl = 0.f, guard = 0.f;
  Tile tile = first_tile(split);
  bool first = true;
  do {
    x_.fetch(tile), v_.fetch(tile), y_.fetch(tile);
    if (kGeneral && p.u.data) u_.fetch(tile);
    if (kGeneral && p.kl) ref_.fetch(tile);
    if (kGeneral && p.guard) old_.fetch(tile);
    if (first) r = row_of(p, i);
    first = false;
    const Values x = x_.values(), v = velocity(p, v_, u_), y = y_.values();
    for (int j = 0; j < kVector; ++j) {
      const float d = y[j] - mean_of(r, x[j], v[j]);
      acc = fma_(d, d, acc);
    }
    if (kGeneral && p.kl) {
      const Values o = ref_.values();
      for (int j = 0; j < kVector; ++j) kl = fma_(v[j] - o[j], v[j] - o[j], kl);
    }
    if (kGeneral && p.guard) {
      const Values o = old_.values();
      for (int j = 0; j < kVector; ++j) guard = fma_(y[j] - mean_of(r, x[j], o[j]), v[j] - o[j], guard);
    }
  } while (next(split, tile));
  double sums[kGeneral ? 3 : 1] = {acc};
  if (kGeneral) sums[kGeneral] = kl, sums[2 * kGeneral] = guard;
  reduce(p, sums);
}

template <int kLatent, int kVelocity>
__global__ void __launch_bounds__(kThreads, kVelocity == kAny ? 5 : 9)
    grad_kernel(const __grid_constant__ AffineParams p, const __grid_constant__ Split split) {
  constexpr bool kGeneral = kVelocity == kAny;
  __shared__ GradScale scale;
  const int64_t i = blockIdx.x, start = block_start(split);
  Stream<kLatent> x_(p.x, i, start), y_(p.out, i, start);
  Stream<kVelocity> v_(p.v, i, start), dv_(p.dv, i, start);
  Stream<kAny> u_(p.u, i, start), ref_(p.v_ref, i, start), old_(p.v_old, i, start), du_(p.du, i, start);
  Row r{};
  Tile tile = first_tile(split);
  bool first = true;
  do {
    x_.fetch(tile), v_.fetch(tile), y_.fetch(tile);
    if (kGeneral && p.u.data) u_.fetch(tile);
    if (kGeneral && p.g_kl) ref_.fetch(tile);
    if (kGeneral && p.g_guard) old_.fetch(tile);
    if (first) {
      r = row_of(p, i);
      if (threadIdx.x == 0)  // fp64 divisions, once per block
        scale = grad_scale(r, p.dim, p.g_logp ? p.g_logp[i] : 0.f, kGeneral && p.g_kl ? p.g_kl[i] : 0.f,
                           kGeneral && p.g_guard ? p.g_guard[i] : 0.f);
      __syncthreads();
    }
    first = false;
    const GradScale g = scale;
    const Values x = x_.values(), v = velocity(p, v_, u_), y = y_.values();
    Values d, o;
    for (int j = 0; j < kVector; ++j) d[j] = scaled(g.logp, y[j] - mean_of(r, x[j], v[j]));
    if (kGeneral && p.g_kl && g.kl != 0.f) {
      o = ref_.values();
      for (int j = 0; j < kVector; ++j) d[j] += g.kl * (v[j] - o[j]);
    }
    if (kGeneral && p.g_guard && g.guard != 0.f) {
      o = old_.values();
      for (int j = 0; j < kVector; ++j) d[j] += g.guard * (y[j] - mean_of(r, x[j], o[j]));
    }
    if (kGeneral && p.u.data) {
      const Values c = v_.values(), u = u_.values();
      Values q{};
      Norm n{1.f, 0.f, 0.f, true};
      if (p.rescale_dim) {
        for (int j = 0; j < kVector; ++j) q[j] = guide(c[j], u[j], p.guidance, p.from_cond);
        n = norm_of<true>(p, c, q, d);
      }
      for (int j = 0; j < kVector; ++j) guide_backward(p, n, c[j], q[j], d[j], o[j]);
      du_.store(tile, o);
    }
    dv_.store(tile, d);
  } while (next(split, tile));
}

__global__ void __launch_bounds__(kThreads, 9)
    normal_kernel(const __grid_constant__ NormalParams p, const __grid_constant__ Split split) {
  const int64_t i = blockIdx.x;
  const Counter counter = counter_of(p.noise, i);
  Stream<kAny> out(p.out, i, block_start(split));
  Tile tile = first_tile(split);
  do {
    Values e;
    addressed_noise(split, p.noise, counter, tile, true, e);
    out.store(tile, e);
  } while (next(split, tile));
}

// Guidance with the norm restored, for rows that the affine kernels cannot handle (`fuses_norm`): one warp per row.
template <bool kBackward>
__global__ void __launch_bounds__(kThreads) guide_kernel(const __grid_constant__ AffineParams p, const int64_t rows) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (warp >= p.batch * rows) return;
  const int64_t i = warp / rows, from = (warp % rows) * p.rescale_dim;
  double cc = 0, qq = 0, gq = 0, gg = 0;
  for (int64_t k = from + threadIdx.x % 32; k < from + p.rescale_dim; k += 32) {
    const float c = load_element(p.v, i, k), q = guide(c, load_element(p.u, i, k), p.guidance, p.from_cond);
    cc += static_cast<double>(c) * c, qq += static_cast<double>(q) * q;
    if (!kBackward) continue;
    const float g = load_element(p.eps, i, k);
    gq += static_cast<double>(g) * q, gg += fabsf(g);
  }
  const Norm n = norm_of<kBackward>(cc, qq, gq, gg, 32);
  for (int64_t k = from + threadIdx.x % 32; k < from + p.rescale_dim; k += 32) {
    const float c = load_element(p.v, i, k), q = guide(c, load_element(p.u, i, k), p.guidance, p.from_cond);
    if (!kBackward) {
      store_element(p.out, i, k, q * n.ratio);
      continue;
    }
    float d = load_element(p.eps, i, k), du;
    guide_backward(p, n, c, q, d, du);
    store_element(p.dv, i, k, d), store_element(p.du, i, k, du);
  }
}

// ---------------------------------------------------------------- launches
bool all_aligned(std::initializer_list<View> views) {
  for (const View& t : views)
    if ((reinterpret_cast<uintptr_t>(t.data) | static_cast<uintptr_t>(t.stride * (t.dtype == kF32 ? 4 : 2))) & 15)
      return false;
  return true;
}

// More tiles per block for larger samples: a batch of 4 at FLUX 512² still fills 132 multiprocessors, and a video has
// few partial sums to add. A sample has at most 2^15 blocks.
int tiles_of(int64_t dim) {
  const int64_t small = dim >> 17 < 1 ? 1 : dim >> 17 > 8 ? 8 : dim >> 17, large = dim >> 25;
  return static_cast<int>(small > large ? small : large);
}

template <class Params>
const char* launch(void (*kernel)(Params, Split), const Params& p, bool is_aligned, cuda::Stream stream) {
  if (p.batch == 0 || p.dim == 0) return nullptr;
  const int64_t chunks = cuda::partials_of(p.dim);
  if (p.batch > 0x7fffffffll) return "the batch is too large for one launch (more than 2^31 samples); split it";
  const int block = kTile * tiles_of(p.dim);
  const Split split{block, static_cast<int>(p.dim - (chunks - 1) * block), is_aligned ? kTile : 0x7fffffff,
                    keys_of(p.noise.seed)};
  const dim3 grid(static_cast<unsigned>(p.batch), static_cast<unsigned>(chunks));
  return run(kernel, grid, kThreads, stream, p, split);
}

// `error` is that of the kernel which wrote the partial sums.
const char* finish(const char* error, const AffineParams& p, cuda::Stream stream) {
  if (error || p.batch == 0 || p.dim == 0) return error;
  return run(finish_kernel, static_cast<unsigned>(p.batch), 32, stream, p, cuda::partials_of(p.dim));
}

template <int kLatentType, int kVelocityType>
struct Types {
  static constexpr int kLatent = kLatentType, kVelocity = kVelocityType;
};

// Calls `launch_as` with the Types of a launch: kAny if `general`, if x and x' differ in dtype, or if v's is rare.
template <class Launch>
const char* dispatch_types(const AffineParams& p, bool general, Launch launch_as) {
  if (!general && p.x.dtype == p.out.dtype) switch (2 * p.x.dtype + p.v.dtype) {
      case 2 * kF32 + kF32:
        return launch_as(Types<kF32, kF32>());
      case 2 * kF32 + kBF16:
        return launch_as(Types<kF32, kBF16>());
      case 2 * kBF16 + kBF16:
        return launch_as(Types<kBF16, kBF16>());
    }
  return launch_as(Types<kAny, kAny>());
}

template <bool kBackward>
const char* launch_rows(const AffineParams& p, cuda::Stream stream) {
  if (p.batch == 0 || p.dim == 0) return nullptr;
  const int64_t rows = p.dim / p.rescale_dim, blocks = (p.batch * rows + kWarps - 1) / kWarps;
  if (blocks > 0x7fffffffll) return "the batch is too large for one launch (more than 2^31 blocks); split it";
  return run(guide_kernel<kBackward>, dim3(static_cast<unsigned>(blocks)), kThreads, stream, p, rows);
}

}  // namespace

namespace cuda {

int64_t partials_of(int64_t dim) {
  const int64_t chunk = static_cast<int64_t>(kTile) * tiles_of(dim);
  return (dim + chunk - 1) / chunk;
}

bool fuses_norm(int64_t rescale_dim) {
  return rescale_dim >= kVector && rescale_dim <= 32 * kVector && (rescale_dim & (rescale_dim - 1)) == 0;
}

const char* launch_affine_step(const AffineParams& p, Stream s) {
  const bool is_aligned = all_aligned({p.x, p.v, p.u, p.eps, p.out, p.mean});
  const char* error = dispatch_types(p, p.u.data || p.mean.data || (p.noise.offset & 3), [&](auto t) {
    constexpr int x = decltype(t)::kLatent, v = decltype(t)::kVelocity;
    if (p.noise.sample) return launch(step_kernel<x, v, kAddressed>, p, is_aligned, s);
    return launch(p.eps.data ? step_kernel<x, v, kGiven> : step_kernel<x, v, kNone>, p, is_aligned, s);
  });
  return finish(error, p, s);
}

const char* launch_affine_logp(const AffineParams& p, Stream s) {
  const bool is_aligned = all_aligned({p.x, p.v, p.u, p.out, p.v_ref, p.v_old});
  const char* error = dispatch_types(p, p.u.data || p.kl || p.guard, [&](auto t) {
    return launch(logp_kernel<decltype(t)::kLatent, decltype(t)::kVelocity>, p, is_aligned, s);
  });
  return finish(error, p, s);
}

const char* launch_affine_grad(const AffineParams& p, Stream s) {
  const bool is_aligned = all_aligned({p.x, p.v, p.u, p.out, p.v_ref, p.v_old, p.dv, p.du});
  return dispatch_types(p, p.u.data || p.g_kl || p.g_guard, [&](auto t) {
    return launch(grad_kernel<decltype(t)::kLatent, decltype(t)::kVelocity>, p, is_aligned, s);
  });
}

const char* launch_normal(const NormalParams& p, Stream s) { return launch(normal_kernel, p, all_aligned({p.out}), s); }
const char* launch_guide(const AffineParams& p, Stream s) { return launch_rows<false>(p, s); }
const char* launch_guide_grad(const AffineParams& p, Stream s) { return launch_rows<true>(p, s); }

}  // namespace cuda
}  // namespace prefgrpo
