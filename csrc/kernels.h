// The table of kernels of one backend, and which tables there are.
//
// `where` is the number of threads on a CPU and the stream (cudaStream_t) on CUDA, where no kernel waits for the
// device. They throw std::out_of_range for an index outside the table (CPU) and std::runtime_error for a launch that
// failed.
#pragma once
#include <cstdlib>
#include <string>

#include "params.h"

namespace prefgrpo {

struct Kernels {
  const char* name;
  void (*sde_step)(const SdeParams&, int64_t where);
  void (*sde_logp)(const SdeParams&, int64_t where);
  void (*sde_grad)(const SdeParams&, int64_t where);
  void (*normal)(const NormalParams&, int64_t where);
  void (*policy_loss)(const PolicyParams&, int64_t where);
  void (*winrate)(const WinrateParams&, int64_t where);
};

namespace cuda {
extern const Kernels kernels;
int64_t partials_of(int64_t dim);  // blocks of a sample, each with an fp64 partial sum per result
}  // namespace cuda

// cpu.cpp is compiled once per instruction set.
namespace plain {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

// The widest that this machine has; PREFGRPO_ISA=plain or avx2 limits it, for tests.
inline const Kernels& cpu_kernels() {
#if defined(PG_X86)
  const char* limit = std::getenv("PREFGRPO_ISA");
  const std::string isa = limit ? limit : "avx512";
  static const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (v4 && isa == "avx512") return avx512::kernels;
  if (v3 && isa != "plain") return avx2::kernels;
#endif
  return plain::kernels;
}

}  // namespace prefgrpo
