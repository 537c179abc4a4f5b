#!/usr/bin/env bash
# Guess: a FLUX.1 LoRA with alpha tensors is scaled by alpha / rank, whether its halves are lora_A and lora_B or
# lora_down and lora_up.
# What happens: under diffusers' own layer names lora_A / lora_B has alpha / rank, and lora_down / lora_up has the
# scale 1: any name with lora_down makes the loader call its converter of kohya's names, which passes diffusers' names on
# as they are and forgets the alphas, and the model's loader renames the halves later. The log says nothing of alphas.
# Versions: diffusers 0.42.1, peft 0.21.2. Source: FluxLoraLoaderMixin.lora_state_dict, the branch is_kohya, which also
# returns alphas=None.
# Hurt: whoever renames kohya's layers to diffusers' but not the halves: with alpha = rank / 2, a common choice, the LoRA
# is twice as strong as trained.
# Seen 2026-11-29, strength (rank 4, alpha 2): lora_A / lora_B 0.5; lora_down / lora_up 1.0.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/alpha.py" <<'PY'
import diffusers, torch
from diffusers import FluxPipeline, FluxTransformer2DModel

torch.manual_seed(0)
layer = "transformer_blocks.0.attn.to_q"
down = torch.randn(4, 16)
up = torch.randn(16, 4)
strengths = {}
for first, second in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
    net = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    )
    pipe = FluxPipeline(None, None, None, None, None, None, net)
    name = f"transformer.{layer}"
    pipe.load_lora_weights(
        {f"{name}.{first}.weight": down, f"{name}.{second}.weight": up, f"{name}.alpha": torch.tensor(2.0)}
    )
    x = torch.randn(3, 16)
    module = net.get_submodule(layer)
    with torch.no_grad():
        added = module(x) - module.base_layer(x)
    whole = x @ down.T @ up.T
    strength = float((added * whole).sum() / whole.square().sum())
    assert torch.allclose(added, strength * whole, atol=1e-4)
    strengths[first] = round(strength, 4)
print("diffusers", diffusers.__version__, "rank 4, alpha 2, strength", strengths)
assert strengths == {"lora_A": 0.5, "lora_down": 1.0}
PY
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/alpha.py"
