#!/usr/bin/env bash
# Guess: latents= and audio_latents= of LTX2Pipeline are alike: noise in the packed form that the loop denoises is used as it is,
# as in other pipelines of packed latents. What happens: that holds for the clip. Packed audio latents are taken for clean
# ones, so the audio VAE's mean is subtracted and the result divided by its standard deviation; 5D and 4D latents both are
# normalised. The same noise for both is N(0, 1) for the clip and N(-mean/std, 1/std) for the audio. No warning says so.
# Versions: diffusers 0.42.1. Source: prepare_latents normalises under `if latents.ndim == 5`, prepare_audio_latents always.
# Hurt: whoever starts both from noise of their own, to repeat a sample or to compare implementations: audio and clip attend
# to each other, so the clip changes too. Noise must be given as noise * std + mean, which rounds.
# Seen 2026-11-29: clip packed as given, clip 5D normalised, audio packed normalised, audio 4D normalised
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat > "$tmp/noise.py" <<'PY'
import diffusers, torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline

vae = AutoencoderKLLTX2Video(
    latent_channels=4, block_out_channels=(8,), down_block_types=("LTX2VideoDownBlock3D",), decoder_block_out_channels=(8,),
    layers_per_block=(1,), decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,),
    decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False,) * 2, downsample_type=("spatial",),
    upsample_type=("spatiotemporal",), upsample_residual=(False,), upsample_factor=(1,), patch_size=1, decoder_causal=False)
audio_vae = AutoencoderKLLTX2Audio(base_channels=4, ch_mult=(1,), num_res_blocks=1, latent_channels=2, mel_bins=8, resolution=32,
                                   mid_block_add_attention=False)
for part in (vae, audio_vae):  # statistics as a checkpoint has them
    part.latents_mean.fill_(1.0)
    part.latents_std.fill_(2.0)
pipe = LTX2Pipeline(None, vae, audio_vae, None, None, None, None, None)
noise = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
as_5d = noise.transpose(1, 2).unflatten(2, (1, 2, 3))  # [B, C, F, H, W]
as_4d = noise.unflatten(2, (2, 2)).transpose(1, 2)  # [B, C, L, mel bins]
got = {
    "clip, packed": pipe.prepare_latents(dtype=torch.float32, latents=noise),
    "clip, 5D": pipe.prepare_latents(dtype=torch.float32, latents=as_5d),
    "audio, packed": pipe.prepare_audio_latents(dtype=torch.float32, latents=noise),
    "audio, 4D": pipe.prepare_audio_latents(dtype=torch.float32, latents=as_4d),
}
kind = {"as given": noise, "normalised": (noise - 1) / 2}
seen = {name: [k for k, want in kind.items() if torch.allclose(x, want, atol=1e-6)] for name, x in got.items()}
print("diffusers", diffusers.__version__, seen)
assert seen == {
    "clip, packed": ["as given"], "clip, 5D": ["normalised"], "audio, packed": ["normalised"], "audio, 4D": ["normalised"]
}
PY
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/noise.py"
