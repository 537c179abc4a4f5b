#!/usr/bin/env bash
# Guess: guidance_scale=1 turns guidance of LTX2Pipeline off, one forward per step, as its docstring's defaults (4, 0, 1, 0)
# suggest; audio_stg_scale=0.0 turns spatio-temporal guidance of the audio off.
# What happens: by default a step runs four branches in three forwards. guidance_scale=1 leaves all of them on, since the
# audio has scales of its own (7, 1, 3, 0.7), which also keep branches alive whose clip's scale is off. And an audio scale of
# 0.0 means "as the clip's": STG of the audio alone cannot be turned off, except by a tiny number.
# Versions: diffusers 0.42.1. Source: __call__ has `audio_stg_scale = audio_stg_scale or stg_scale`, likewise for the others;
# the docstring says that None does this, and has defaults from before.
# Hurt: whoever compares guided with unguided samples, or samples a distilled model at guidance_scale=1: four times the work
# and another distribution.
# Seen 2026-11-29, samples in each forward of a step: default [2, 1, 1], guidance_scale=1 [2, 1, 1], the clip's four scales off
#   [2, 1, 1], all eight off [1]; audio_stg_scale as the clip's 1.0: 0.0 True, 1e-9 False
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/zero.py" <<'PY'
import diffusers, torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, FlowMatchEulerDiscreteScheduler, LTX2Pipeline
from diffusers import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2TextConnectors

torch.manual_seed(0)
net = LTX2VideoTransformer3DModel(
    in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32, audio_in_channels=4,
    audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=8, audio_cross_attention_dim=16, num_layers=2,
    caption_channels=16, rope_type="split", perturbed_attn=True)
connectors = LTX2TextConnectors(
    caption_channels=16, text_proj_in_factor=3, rope_type="split", video_connector_num_attention_heads=2,
    video_connector_attention_head_dim=8, video_connector_num_layers=1, video_connector_num_learnable_registers=16,
    audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
    audio_connector_num_learnable_registers=16)
vae = AutoencoderKLLTX2Video(
    latent_channels=4, block_out_channels=(8,), down_block_types=("LTX2VideoDownBlock3D",), decoder_block_out_channels=(8,),
    layers_per_block=(1,), decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,),
    decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False,) * 2, downsample_type=("spatial",),
    upsample_type=("spatiotemporal",), upsample_residual=(False,), upsample_factor=(1,), patch_size=1, decoder_causal=False)
audio = AutoencoderKLLTX2Audio(base_channels=4, ch_mult=(1,), num_res_blocks=1, latent_channels=2, mel_bins=8, resolution=32,
                               mid_block_add_attention=False)
pipe = LTX2Pipeline(FlowMatchEulerDiscreteScheduler(), vae, audio, None, None, connectors, net, None)
pipe.set_progress_bar_config(disable=True)
rows = []
net.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True)
embeds = {f"{kind}prompt_embeds": torch.randn(1, 16, 16, 3).flatten(2) for kind in ("", "negative_")}
masks = {f"{kind}prompt_attention_mask": torch.ones(1, 16) for kind in ("", "negative_")}

def call(**options):
    rows.clear()
    size = dict(height=32, width=32, num_frames=5, num_inference_steps=1, spatio_temporal_guidance_blocks=[1])
    made = pipe(**embeds, **masks, **size, **options, output_type="latent", generator=torch.Generator().manual_seed(0))
    return list(rows), made.audio

off = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
audio_off = {f"audio_{name}": value for name, value in off.items()} | {"audio_guidance_scale": 1.0}
forwards = {
    "default": call()[0], "guidance_scale=1": call(guidance_scale=1.0)[0], "clip off": call(guidance_scale=1.0, **off)[0],
    "clip and audio off": call(guidance_scale=1.0, **off, **audio_off)[0],
}
zero, tiny, default = (call(**more)[1] for more in ({"audio_stg_scale": 0.0}, {"audio_stg_scale": 1e-9}, {}))
same = {"0.0": torch.equal(zero, default), "1e-9": torch.equal(tiny, default)}
print("diffusers", diffusers.__version__, "samples in each forward of a step:", forwards, "audio_stg_scale as the clip's 1.0:", same)
assert [forwards[name] for name in ("default", "guidance_scale=1", "clip off")] == [[2, 1, 1]] * 3
assert forwards["clip and audio off"] == [1] and same == {"0.0": True, "1e-9": False}
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/zero.py"
