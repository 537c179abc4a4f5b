#!/usr/bin/env bash
# Guess: a LoRA file says its alpha once more if it has both diffusers' header (lora_adapter_metadata) and alpha tensors;
# one of the two counts.
# What happens: for Qwen-Image and Z-Image both do. The converter multiplies A by alpha / rank of the tensors, and peft
# then multiplies by lora_alpha / r of the header: with the same alpha = rank / 2 in both, the LoRA has a quarter of its
# strength instead of a half, without a line in the log. FLUX.1 raises for such a file, SD3 raises for any alpha tensor.
# Versions: diffusers 0.42.1, peft 0.21.2. Source: _convert_non_diffusers_qwen_lora_to_diffusers and ..._z_image_...;
# the metadata is read in _fetch_state_dict before them, and nobody takes lora_alpha out of it.
# Hurt: whoever writes alpha tensors for ComfyUI, which ignores headers, next to a header for diffusers.
# Seen 2026-11-29, strength (rank 4, alpha 2): neither 1.0, header 0.5, tensors 0.5, both 0.25, in both families.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/both.py" <<'PY'
import json, sys
import diffusers, torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel, ZImagePipeline, ZImageTransformer2DModel
from safetensors.torch import save_file

def qwen():
    size = dict(in_channels=4, out_channels=4, num_layers=1, joint_attention_dim=8, axes_dims_rope=(2, 2, 4))
    net = QwenImageTransformer2DModel(attention_head_dim=8, num_attention_heads=2, **size)
    return QwenImagePipeline(None, None, None, None, net), "transformer_blocks.0.attn.to_q"

def z_image():
    size = dict(in_channels=4, n_layers=1, n_refiner_layers=1, cap_feat_dim=8, axes_dims=(2, 2, 4), axes_lens=(8, 8, 8))
    return ZImagePipeline(None, None, None, None, ZImageTransformer2DModel(dim=16, n_heads=2, n_kv_heads=2, **size)), "layers.0.attention.to_q"

torch.manual_seed(0)
down = torch.randn(4, 16)
up = torch.randn(16, 4)
x = torch.randn(3, 16)
for make in (qwen, z_image):
    seen = {}
    for kind in ("neither", "header", "tensors", "both"):
        pipe, layer = make()
        tensors = {f"diffusion_model.{layer}.lora_A.weight": down, f"diffusion_model.{layer}.lora_B.weight": up}
        if kind in ("tensors", "both"):
            tensors[f"diffusion_model.{layer}.alpha"] = torch.tensor(2.0)
        options = {"transformer.r": 4, "transformer.lora_alpha": 2, "transformer.target_modules": [layer]}
        header = {"lora_adapter_metadata": json.dumps(options)} if kind in ("header", "both") else None
        save_file(tensors, f"{sys.argv[1]}/lora.safetensors", header)
        pipe.load_lora_weights(sys.argv[1], weight_name="lora.safetensors")
        module = pipe.transformer.get_submodule(layer)
        with torch.no_grad():
            added = module(x) - module.base_layer(x)
            whole = x @ down.T @ up.T
        seen[kind] = round(float((added * whole).sum() / whole.square().sum()), 4)
    print("diffusers", diffusers.__version__, type(pipe).__name__, "rank 4, alpha 2, strength", seen)
    assert seen == {"neither": 1.0, "header": 0.5, "tensors": 0.5, "both": 0.25}
PY
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/both.py" "$tmp"
