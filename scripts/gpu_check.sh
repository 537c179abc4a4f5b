#!/usr/bin/env bash
# Tests and benchmarks the ops on a GPU machine: builds the extension for the installed GPU, runs the ops' tests on it (if
# pytest and hypothesis are installed), runs compute-sanitizer on a small case, runs the benchmarks, and writes
# benchmarks/results/cuda.json and docs/benchmarks.md. Needs torch with CUDA, nvcc, cmake and ninja; no network.
# Usage: scripts/gpu_check.sh [train]
# With "train": builds the extension and times a LoRA step at FLUX.1-dev's real size (benchmarks/bench_train.py) instead.
# This also needs diffusers, transformers, peft, 30 GB of disk and an 80 GB GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD

"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "torch finds no GPU"; print(torch.__version__, torch.cuda.get_device_name())'
arch=$("$PYTHON" -c 'import torch; major, minor = torch.cuda.get_device_capability(); print(f"{major}{minor}" + ("a" if major >= 9 else ""))')
PREFGRPO_CUDA_ARCHS=${PREFGRPO_CUDA_ARCHS:-$arch} "$PYTHON" setup.py -q build_ext --inplace
"$PYTHON" -c 'from prefgrpo.ops import backend_of; assert backend_of("cuda") == "cuda", backend_of("cuda")'

if [[ ${1:-} == train ]]; then
  exec "$PYTHON" -m benchmarks.bench_train
fi
if "$PYTHON" -c 'import pytest, hypothesis' 2>/dev/null; then
  "$PYTHON" -m pytest -q -o addopts= -p no:cacheprovider tests/test_gpu.py tests/test_ops_*.py tests/test_csrc.py
else
  echo "pytest or hypothesis is not installed: skipping the tests, only the checks in benchmarks/gpu.py will run"
fi
if command -v compute-sanitizer >/dev/null; then
  compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" -c '
import torch
from prefgrpo import ops
x, v = (torch.randn(3, 1003, device="cuda", dtype=torch.bfloat16) for _ in range(2))
coef, index = torch.tensor([[0.9, -0.1, 0.5, -2.0, 0.3]], device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
step = ops.affine_step(x, v, coef, index, noise=ops.NoiseAddress(7, torch.arange(3, device="cuda")))
v.requires_grad_()
logp = ops.affine_logp(x, v, step.x_next, coef, index).logp
ops.policy_loss(logp, step.logp, torch.tensor([1.0, 0.0, -1.0], device="cuda"), clip_low=1e-4).loss.backward()
wins = torch.rand(2, 5, 5, device="cuda")
ops.winrate_advantage(wins, torch.ones_like(wins))
torch.cuda.synchronize()'
else
  echo "compute-sanitizer not found: skipping the memory check"
fi
"$PYTHON" -m benchmarks --device cuda
