// CUDA launches. Each returns nullptr, or the reason why it failed; none synchronises with the device.
#pragma once
#include "params.h"

namespace prefgrpo {
namespace cuda {

using Stream = void*;  // cudaStream_t

const char* launch_affine_step(const AffineParams&, Stream);
const char* launch_affine_logp(const AffineParams&, Stream);
const char* launch_affine_grad(const AffineParams&, Stream);
const char* launch_guide(const AffineParams&, Stream);
const char* launch_guide_grad(const AffineParams&, Stream);
const char* launch_normal(const NormalParams&, Stream);
const char* launch_policy(const PolicyParams&, Stream);
const char* launch_winrate(const WinrateParams&, Stream);

int64_t partials_of(int64_t dim);      // chunks of a sample
bool fuses_norm(int64_t rescale_dim);  // whether the affine kernels restore this norm themselves

}  // namespace cuda
}  // namespace prefgrpo
