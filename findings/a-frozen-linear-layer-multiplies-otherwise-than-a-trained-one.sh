#!/usr/bin/env bash
# Guess: under torch.no_grad(), a linear layer computes the same whether its weight requires a gradient or not, so a
# frozen copy of a policy gives the policy's bits, and the KL to it is exactly 0 before the first update.
# What happens: for an input [B, N, C] that is not contiguous, such as latents that were packed by a transpose, torch
# runs one product for all tokens (mm) if the weight requires a gradient and one per sample (bmm) if it does not, also
# under no_grad. Both are right; their sums have other orders on some CPUs and GPUs, so the results differ in the last
# bits. A contiguous input is multiplied by mm in both cases. torch.inference_mode() changes nothing.
# Versions: torch 2.13.0. The choice is read from the profiler, so it is the same on any machine.
# Hurt: tests and checks that demand equal bits of a trained model and of its frozen or reloaded copy: images of a tiny
# FLUX.3 differed by 4e-6 between a process that trains all weights and one that only loads them, on one of two
# kinds of CPUs. Setting requires_grad alike on both gives equal bits.
# Seen 2026-11-30: transposed, frozen: aten::bmm, trained: aten::mm; contiguous: aten::mm and aten::mm.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$tmp/one.py" <<'PY'
import torch
from torch.profiler import profile

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
layer = torch.nn.Linear(64, 32, bias=False)
inputs = {"transposed": torch.randn(2, 64, 96).transpose(1, 2), "contiguous": torch.randn(2, 96, 64)}
print("torch", torch.__version__)
seen = {}
for mode in (torch.no_grad, torch.inference_mode):
    for name, x in inputs.items():
        for trained in (False, True):
            layer.requires_grad_(trained)
            with mode(), profile() as events:
                layer(x)
            products = [event.name for event in events.events() if event.name in PRODUCTS]
            print(mode.__name__, name, "trained" if trained else "frozen", products)
            seen[mode.__name__, name, trained] = products
for mode in ("no_grad", "inference_mode"):
    assert seen[mode, "transposed", False] == ["aten::bmm"] and seen[mode, "transposed", True] == ["aten::mm"]
    assert seen[mode, "contiguous", False] == seen[mode, "contiguous", True] == ["aten::mm"]
PY
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/one.py" 2>/dev/null
