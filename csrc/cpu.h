// The CPU kernels of one instruction set; cpu.cpp is compiled once for each, and `cpu_kernels` chooses at run time.
#pragma once
#include "params.h"

namespace prefgrpo {

struct CpuKernels {
  const char* isa;
  void (*sde_step)(const SdeParams&, int threads);
  void (*sde_logp)(const SdeParams&, int threads);
  void (*sde_grad)(const SdeParams&, int threads);
  void (*normal)(const NormalParams&, int threads);
  void (*policy_loss)(const PolicyParams&);
  void (*winrate)(const WinrateParams&);
};

namespace plain {
extern const CpuKernels kernels;
}
#if defined(PG_X86)
namespace avx2 {
extern const CpuKernels kernels;
}
namespace avx512 {
extern const CpuKernels kernels;
}
#endif

inline const CpuKernels& cpu_kernels() {
#if defined(PG_X86)
  static const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return v4 ? avx512::kernels : v3 ? avx2::kernels : plain::kernels;
#else
  return plain::kernels;
#endif
}

}  // namespace prefgrpo
