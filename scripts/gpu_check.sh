#!/usr/bin/env bash
# Tests and benchmarks the ops on a GPU machine: builds the extension for the installed GPU, then
#   tests     runs the ops' tests on it;
#   memcheck  runs compute-sanitizer on a small case;
#   bench     runs the benchmarks, and writes benchmarks/results/cuda.json and docs/benchmarks.md;
#   train     times a LoRA step at FLUX.1-dev's real size (benchmarks/bench_train.py), which also needs diffusers,
#             transformers, peft, 30 GB of disk and an 80 GB GPU.
# A part that fails does not stop the next one. Needs torch with CUDA, nvcc, cmake, ninja, pybind11, pytest and hypothesis;
# no network.
# Usage: scripts/gpu_check.sh [PART …]   (default: tests memcheck bench)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD

"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "torch finds no GPU"; print(torch.__version__, torch.cuda.get_device_name())'
arch=$("$PYTHON" -c 'import torch; major, minor = torch.cuda.get_device_capability(); print(f"{major}{minor}")')
PREFGRPO_CUDA_ARCHS=${PREFGRPO_CUDA_ARCHS:-$arch} "$PYTHON" setup.py -q build_ext --inplace
"$PYTHON" -c 'from prefgrpo.ops import backend_of; assert backend_of("cuda") == "cuda", backend_of("cuda")'

MEMCHECK='import torch
from prefgrpo import ops
x, v = (torch.randn(3, 1003, device="cuda", dtype=torch.bfloat16) for _ in range(2))
coef, index = torch.tensor([[0.9, -0.1, 0.5, -2.0, 0.3]], device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
step = ops.sde_step(x, v, coef, index, noise=ops.PhiloxNoise(7, torch.arange(3, device="cuda")))
v.requires_grad_()
logp = ops.sde_logp(x, v, step.x_next, coef, index).logp
ops.policy_loss(logp, step.logp, torch.tensor([1.0, 0.0, -1.0], device="cuda"), clip_low=1e-4).loss.backward()
wins = torch.rand(2, 5, 5, device="cuda")
ops.winrate_advantage(wins, torch.ones_like(wins))
torch.cuda.synchronize()'

part_tests() {
  "$PYTHON" -m pytest -q -o addopts= -p no:cacheprovider -k "not cuda_kernels_do_not_spill" \
    tests/test_{gpu,sde_step,policy_loss,noise,ops_advantage,compile,csrc}.py
}

part_memcheck() {
  local output
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer not found: skipping the memory check"
  elif output=$(compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" -c "$MEMCHECK" 2>&1); then
    echo "$output"
  else
    echo "$output"
    grep -q "Device not supported" <<<"$output" && echo "compute-sanitizer does not support this machine: memory not checked"
  fi
}

part_bench() { "$PYTHON" -m benchmarks --device cuda; }
part_train() { "$PYTHON" -m benchmarks.bench_train; }

failed=()
[[ $# -gt 0 ]] || set -- tests memcheck bench
for part in "$@"; do
  "part_$part" || failed+=("$part")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed: ${failed[*]}" >&2; exit 1; }
