// The CPU kernels of one instruction set, and the entry points that choose among the sets.
#pragma once
#include "params.h"

namespace prefgrpo {

struct CpuKernels {
  void (*affine_step)(const AffineParams&);
  void (*affine_logp)(const AffineParams&);
  void (*affine_grad)(const AffineParams&);
  void (*normal)(const NormalParams&);
  int64_t (*partials_of)(int64_t dim, int64_t rescale_dim);
};

constexpr int64_t kMaxRescaleDim = 1024;  // one tile

namespace cpu {

using Stream = void*;  // unused: a CPU launch has finished when it returns

void launch_affine_step(const AffineParams&, Stream);
void launch_affine_logp(const AffineParams&, Stream);
void launch_affine_grad(const AffineParams&, Stream);
void launch_normal(const NormalParams&, Stream);
void launch_policy(const PolicyParams&, Stream);
void launch_winrate(const WinrateParams&, Stream);

const char* isa();               // the instruction set in use: plain, avx2, avx512
bool use_isa(const char* name);  // false if this machine or build lacks it

}  // namespace cpu
}  // namespace prefgrpo
