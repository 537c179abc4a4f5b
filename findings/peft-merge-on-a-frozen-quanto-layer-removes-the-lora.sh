#!/usr/bin/env bash
# Guess: merging a LoRA into an int8 or fp8 layer of optimum-quanto either raises, or rounds the sum to int8.
# What happens: with frozen weights, merge() says that it has merged and nothing is added: the output is the base's. peft
# takes quanto's QLinear for an nn.Linear and assigns to weight.data, which on quanto's tensor subclass changes nothing,
# and then leaves the LoRA out, as it counts as merged. No error, no warning, also with safe_merge. unmerge() brings the
# LoRA back, so a round trip proves nothing. Before freeze() the same merge is right.
# Versions: peft 0.21.2, optimum-quanto 0.2.7, torch 2.13.0. Source: merge of peft's tuners/lora/layer.py.
# Hurt: whoever fuses a LoRA into a quantised denoiser before sampling or exporting: the samples are the base model's.
# Seen 2026-11-29, share of the LoRA that is left after merge: qint8 frozen 0.0, not frozen 1.0; qfloat8 0.0 and 1.0
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 peft==0.21.2 optimum-quanto==0.2.7 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/merge.py" <<'PY'
import peft, torch
from optimum.quanto import freeze, qfloat8, qint8, quantize
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

seen = {}
for kind in (qint8, qfloat8):
    for frozen in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64, bias=False))
        x = torch.randn(8, 64)
        quantize(net, weights=kind)
        if frozen:
            freeze(net)
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=["0"], init_lora_weights=False), net)
        layer = net[0]
        with torch.no_grad():
            base = layer.base_layer(x)
            whole = net(x)
            lora = whole - base
            assert lora.norm() > 0.3 * base.norm()
            layer.merge(safe_merge=True)
            assert layer.merged
            left = ((net(x) - base) * lora).sum() / lora.square().sum()
            layer.unmerge()
            assert torch.allclose(net(x), whole, atol=1e-4)
        seen[kind.name, frozen] = round(float(left), 2)
print("peft", peft.__version__, "(type, frozen): share of the LoRA after merge", seen)
assert all(abs(left - (not frozen)) < 0.05 for (_, frozen), left in seen.items())
PY
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/merge.py"
