#!/usr/bin/env bash
# Guess: whether diffusers finds the layers of a Qwen-Image LoRA depends on the names of the layers.
# What happens: it depends on alpha tensors too, and turns round with them. Under diffusers' own names (transformer.X) a
# file loads without alpha tensors and raises with them; without a prefix (X) it loads nothing, with a line in the log
# only, but adding alpha tensors makes the same file load. Any alpha starts a converter that puts "transformer." before
# every name, also before one that has it; without alpha nothing does. ai-toolkit's diffusion_model.X loads both ways.
# Versions: diffusers 0.42.1, peft 0.21.2: QwenImageLoraLoaderMixin.lora_state_dict; Z-Image's has the same lines.
# Hurt: writers of LoRA files that add alpha for other programs, and loops over files that take silence for success.
# Seen 2026-11-29, strength (rank 4, alpha 2): transformer. 1.0, with alpha NoMatchingPeftModuleError; bare: nothing,
#   with alpha 0.5; diffusion_model. 1.0, with alpha 0.5
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/prefix.py" <<'PY'
import diffusers, torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

torch.manual_seed(0)
layer = "transformer_blocks.0.attn.to_q"
down = torch.randn(4, 16)
up = torch.randn(16, 4)
x = torch.randn(3, 16)
seen = {}
for prefix in ("transformer.", "", "diffusion_model."):
    for alpha in (False, True):
        size = dict(in_channels=4, out_channels=4, num_layers=1, joint_attention_dim=8, axes_dims_rope=(2, 2, 4))
        net = QwenImageTransformer2DModel(attention_head_dim=8, num_attention_heads=2, **size)
        tensors = {f"{prefix}{layer}.lora_A.weight": down, f"{prefix}{layer}.lora_B.weight": up}
        if alpha:
            tensors[f"{prefix}{layer}.alpha"] = torch.tensor(2.0)
        try:
            QwenImagePipeline(None, None, None, None, net).load_lora_weights(tensors)
        except ValueError as error:
            seen[prefix, alpha] = type(error).__name__
            continue
        module = net.get_submodule(layer)
        if not hasattr(module, "base_layer"):
            seen[prefix, alpha] = "nothing"
            continue
        with torch.no_grad():
            added = module(x) - module.base_layer(x)
            whole = x @ down.T @ up.T
        seen[prefix, alpha] = round(float((added * whole).sum() / whole.square().sum()), 4)
print("diffusers", diffusers.__version__, "(prefix, with alpha): strength", seen)
assert list(seen.values()) == [1.0, "NoMatchingPeftModuleError", "nothing", 0.5, 1.0, 0.5]
PY
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/prefix.py"
