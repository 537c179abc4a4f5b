#!/usr/bin/env bash
# Checks prefgrpo on a GPU machine: builds the extension for the installed GPU, then runs these parts, about 15 minutes:
#   tests     the ops' tests;
#   memcheck  compute-sanitizer on every kernel, CUDA and Triton: memcheck, racecheck and initcheck;
#   bench     the ops' benchmarks: benchmarks/results/cuda.json, docs/benchmarks.md;
#   families  every model family, tiny, in bf16, LoRA and all weights, stopped and resumed (benchmarks/experiments/trials.py);
#   fused     blocks of FLUX.1, Qwen-Image and Wan 14B at their true sizes: diffusers' own and fused;
#   fp8       the same blocks with fp8_base, and its products alone;
#   attention FlashAttention-2 beside 3 and 4, where their packages are installed;
#   recompute a recomputed block of Wan 14B, without and with attention's output kept;
#   traffic   GELU beside attention and with its LoRA, and what these replace;
#   ulysses   the copies of an attention of eight processes (these six: benchmarks/levers.py, each at most 2 minutes);
#   train     FLUX.1-dev at its true size with random weights; an 80 GB GPU;
#   peers     Pref-GRPO's own training step beside ours, if PREFGRPO_PEERS names a folder with its checkout.
# Every part prints its results as they come; one that fails does not stop the next. Without a GPU nothing is checked: one
# line, exit code 1. Needs torch with CUDA, nvcc, cmake, ninja, pybind11, pytest and hypothesis, from `families` on also
# the extra `train`; no network.
# Usage: scripts/gpu_check.sh [PART …]   (default: all)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if ! found=$("$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' 2>&1); then
  echo "gpu_check: $PYTHON finds no GPU (${found##*$'\n'}); nothing was checked" >&2
  exit 1
fi
echo "$found"
arch=$("$PYTHON" -c 'import torch; major, minor = torch.cuda.get_device_capability(); print(f"{major}{minor}")')
PREFGRPO_CUDA_ARCHS=${PREFGRPO_CUDA_ARCHS:-$arch} "$PYTHON" setup.py -q build_ext --inplace
"$PYTHON" -c 'from prefgrpo.ops import backend_of; assert backend_of("cuda") == "cuda", backend_of("cuda")'

part_tests() {
  timeout 180 "$PYTHON" -m pytest -q -o addopts= -p no:cacheprovider -k "not cuda_kernels_do_not_spill" \
    tests/ops/test_{gpu,sde_step,policy_loss,noise,advantage,block_ops,low_rank_gelu,quantise_rows,compile,csrc}.py
}

sanitize() {  # TOOL BACKEND
  local output
  if output=$(PREFGRPO_BACKEND=$2 timeout 90 compute-sanitizer --tool "$1" --error-exitcode 9 "$PYTHON" -m benchmarks.sanitize 2>&1); then
    echo "$1, $2: $(tail -n 2 <<<"$output" | tr '\n' ' ')"
  elif grep -q "Device not supported" <<<"$output"; then
    echo "$1: compute-sanitizer does not support this machine; memory not checked"
  else
    echo "$output"
    return 1
  fi
}

part_memcheck() {
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer not found: memory not checked"
    return
  fi
  local failed=0
  sanitize memcheck cuda || failed=1
  sanitize memcheck triton || failed=1
  sanitize racecheck cuda || failed=1
  sanitize initcheck cuda || failed=1
  return $failed
}

part_bench() { timeout 180 "$PYTHON" -m benchmarks --device cuda --write; }
part_families() { timeout 180 "$PYTHON" -m benchmarks.experiments.trials families; }
part_fused() { timeout 120 "$PYTHON" -m benchmarks.levers fused; }
part_fp8() { timeout 120 "$PYTHON" -m benchmarks.levers fp8; }
part_attention() { timeout 120 "$PYTHON" -m benchmarks.levers attention; }
part_recompute() { timeout 120 "$PYTHON" -m benchmarks.levers recompute; }
part_traffic() { timeout 120 "$PYTHON" -m benchmarks.levers traffic; }
part_ulysses() { timeout 120 "$PYTHON" -m benchmarks.levers ulysses; }
part_train() { timeout 180 "$PYTHON" -m benchmarks.experiments.trials train; }
part_peers() { timeout 180 "$PYTHON" -m benchmarks.experiments.trials peers; }

failed=()
[[ $# -gt 0 ]] || set -- tests memcheck bench families fused fp8 attention recompute traffic ulysses train peers
for part in "$@"; do
  echo "== $part"
  "part_$part" || failed+=("$part")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed: ${failed[*]}" >&2; exit 1; }
