// CUDA launches. Each returns nullptr, or the reason why it failed; none synchronises with the device.
#pragma once
#include "params.h"

namespace prefgrpo {
namespace cuda {

using Stream = void*;  // cudaStream_t

const char* sde_step(const SdeParams&, Stream);
const char* sde_logp(const SdeParams&, Stream);
const char* sde_grad(const SdeParams&, Stream);
const char* normal(const NormalParams&, Stream);
const char* policy_loss(const PolicyParams&, Stream);
const char* winrate(const WinrateParams&, Stream);

int64_t partials_of(int64_t dim);  // blocks of a sample

}  // namespace cuda
}  // namespace prefgrpo
