// What every kernel takes, and the table of kernels of one backend. No framework, no ownership: pointers and sizes.
//
// The fields of each struct are the named arguments of its binding (bindings.cpp). Tensors are contiguous; a null
// pointer marks an absent input or result. Invariant: a sample's result depends on that sample and D alone.
#pragma once
#include <cstdint>

namespace prefgrpo {

enum DType : int32_t { kF32 = 0, kBF16 = 1, kF64 = 2 };

// A tensor whose dtype is chosen at run time.
struct View {
  char* data = nullptr;
  int32_t dtype = kF32;
};

// The dtypes of x, v and y at compile time.
template <int32_t kX, int32_t kV, int32_t kY>
struct Types {
  static constexpr int32_t x = kX, v = kV, y = kY;
};

// Coefficients of one sample's step: x' = a·x + b·v + s·ε, logp = w · mean_D (x' − a·x − b·v)² + c.
struct Row {
  float a, b, s, w, c;
};

struct PhiloxNoise {
  int64_t seed = 0;                 // its 64 bits
  const int64_t* sample = nullptr;  // [B]; null: no counter-based noise
  const int64_t* step = nullptr;    // [B]; null: `number`, of all samples
  int64_t number = 0;
  int64_t offset = 0;  // elements of the sample before those of this launch; a multiple of 4
};

// x fp32 or bf16; v and y fp32 or bf16, but bf16 where x is. All [B, D].
struct SdeParams {
  int64_t batch = 0, dim = 0;  // B, D
  int64_t size = 0;            // elements of a whole sample: D, or more if other processes have the others
  View x, v;
  const Row* coef = nullptr;       // [T]
  int64_t rows = 0;                // T
  const int64_t* index = nullptr;  // [B] rows of coef; null: row i, or the only one
  View y;                          // x' of the step, written or read
};

// run(Types<…>), for the dtypes of a launch.
template <class Run>
auto with_types(const SdeParams& p, Run run) {
  if (p.x.dtype == kBF16) return run(Types<kBF16, kBF16, kBF16>{});
  if (p.v.dtype == kBF16)
    return p.y.dtype == kBF16 ? run(Types<kF32, kBF16, kBF16>{}) : run(Types<kF32, kBF16, kF32>{});
  return p.y.dtype == kBF16 ? run(Types<kF32, kF32, kBF16>{}) : run(Types<kF32, kF32, kF32>{});
}

// What is summed over D, [B]: fp32, or fp64 for the sum itself, to be added to those of other processes.
struct SumParams : SdeParams {
  View logp, kl, log_ratio;
  double* partial = nullptr;  // CUDA: scratch [number of results, B, partials_of(D, size)]
};

struct StepParams : SumParams {
  View eps;  // fp32
  PhiloxNoise noise;
  View mean;  // fp32
};

struct LogpParams : SumParams {
  View v_ref, v_old;  // like v
};

struct GradParams : SdeParams {
  View v_ref, v_old;
  const float *g_logp = nullptr, *g_kl = nullptr, *g_log_ratio = nullptr;  // [B]
  View dv;                                                                 // like v
};

struct NormalParams {
  int64_t batch = 0, dim = 0;
  PhiloxNoise noise;
  View out;  // fp32
};

struct PolicyParams {
  int64_t batch = 0;
  const float *logp = nullptr, *logp_old = nullptr, *advantage = nullptr, *weight = nullptr, *kl = nullptr;  // [B]
  double epsilon_low = 0, epsilon_high = 0, adv_clip = 0, kl_coef = 0, denominator = 0;
  bool per_sample = false;  // loss [B], each sample's own; else their sum, []
  float *loss = nullptr, *metrics = nullptr, *d_logp = nullptr, *d_kl = nullptr;  // metrics [10]; d_logp, d_kl [B]
};

struct WinrateParams {
  int64_t prompts = 0, group = 0;
  View wins, counts;  // [P, G, G], both fp32 or both fp64
  bool use_std = false;
  int64_t ddof = 0;
  double eps = 0;
  float *rate = nullptr, *advantage = nullptr;  // [P, G]
};

// `where` is the number of threads on a CPU and the stream (cudaStream_t) on CUDA, where no kernel waits for the device
// and a launch that failed throws std::runtime_error.
struct Kernels {
  void (*sde_step)(const StepParams&, int64_t where);
  void (*sde_logp)(const LogpParams&, int64_t where);
  void (*sde_grad)(const GradParams&, int64_t where);
  void (*normal)(const NormalParams&, int64_t where);
  void (*policy_loss)(const PolicyParams&, int64_t where);
  void (*winrate)(const WinrateParams&, int64_t where);
};

namespace cpu {
extern const Kernels kernels;
}
namespace cuda {
extern const Kernels kernels;
int64_t partials_of(int64_t dim, int64_t size);  // blocks of a sample, each with an fp64 partial sum per result
}  // namespace cuda

}  // namespace prefgrpo
