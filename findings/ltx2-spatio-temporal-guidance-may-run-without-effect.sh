#!/usr/bin/env bash
# Guess: spatio-temporal guidance of LTX-2 (stg_scale, on by default in LTX2Pipeline) guides, or an argument that cannot
# take effect is refused. What happens: only the self-attention of a model with perturbed_attn in its configuration can be
# left out, and its default is False; there, and for a block that does not exist, the third forward of every step gives the
# first one's values again. A step takes as long as with STG, and its term is 0: no error, no warning.
# Versions: diffusers 0.42.1. Source: transformer_ltx2.py hands the perturbation on `if self.perturbed_attn`, and compares
# indices of blocks with a set.
# Hurt: whoever tunes stg_scale for a model converted without that key, or counts blocks from another release (the default
# is block 28; 29 is recommended for LTX-2.0).
# Seen 2026-11-29, largest change of the velocity: perturbed_attn and block 1 0.0895, default configuration and block 1 0.0,
#   perturbed_attn and block 28 of 2 0.0
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/stg.py" <<'PY'
import diffusers, torch
from diffusers import LTX2VideoTransformer3DModel

SIZE = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
            audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=8,
            audio_cross_attention_dim=16, num_layers=2, caption_channels=8, rope_type="split")
torch.manual_seed(1)
INPUTS = dict(hidden_states=torch.randn(1, 8, 4), audio_hidden_states=torch.randn(1, 3, 4),
              encoder_hidden_states=torch.randn(1, 5, 8), audio_encoder_hidden_states=torch.randn(1, 5, 8),
              timestep=torch.tensor([500.0]), num_frames=2, height=2, width=2, audio_num_frames=3, return_dict=False)

def change(blocks, **config):
    torch.manual_seed(0)
    net = LTX2VideoTransformer3DModel(**SIZE, **config).eval()
    with torch.no_grad():
        plain, _ = net(**INPUTS)
        other, _ = net(**INPUTS, spatio_temporal_guidance_blocks=blocks)
    return round(float((plain - other).abs().max()), 4)

seen = {
    "perturbed_attn, block 1": change([1], perturbed_attn=True),
    "default config, block 1": change([1]),
    "perturbed_attn, block 28 of 2": change([28], perturbed_attn=True),
}
print("diffusers", diffusers.__version__, "largest change by STG's forward:", seen)
assert seen["perturbed_attn, block 1"] > 0.001
assert seen["default config, block 1"] == seen["perturbed_attn, block 28 of 2"] == 0
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/stg.py"
