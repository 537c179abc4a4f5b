"""Krea-2: packed 2×2 latents [L, 4C], time = σ, guidance c + g·(c − u) with g = 4.5.

g is `guidance_scale` of the stock Krea2Pipeline, one less than elsewhere: 0 is off, and distilled models are guided too
unless it is 0. Conditions: states of several layers of Qwen3-VL (the pipeline's `text_encoder_select_layers`), as long
as the prompt; the stock pipeline pads texts and masks the padding everywhere, which is left out here. Invariant: with
`ode` steps the images are those of the stock Krea2Pipeline.
"""

from __future__ import annotations

from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.vae import decode_image, encode, normalise, unnormalise


class Krea2(Adapter):
    """Krea-2 text-to-image, base or distilled."""

    pipeline = "Krea2Pipeline"
    packed = True
    attention_masks = "padding"
    context_parallel = ""  # the model has no plan in diffusers 0.42.1
    cfg = Cfg(from_cond=True)
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_gate", "attn.to_out.0", "ff.gate", "ff.up", "ff.down",
    )  # fmt: skip
    lora_within = "transformer_blocks."  # not in the text blocks, whose layers have the same names
    comfy_names = (
        (r"^transformer\.transformer_blocks\.", "diffusion_model.blocks."),
        (r"^transformer\.text_fusion\.", "diffusion_model.txtfusion."),
        (r"\.attn\.to_(q|k|v)\.", r".attn.w\1."),
        (r"\.attn\.to_out\.0\.", ".attn.wo."),
        (r"\.attn\.to_gate\.", ".attn.gate."),
        (r"\.ff\.", ".mlp."),
    )

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, K, C]: n ≤ max_length tokens, K layers."""
        (embeds,), (mask,) = self.pipe.encode_prompt([prompt], device=self.device, max_sequence_length=max_length)
        return Condition(embeds[mask])

    def mu(self, sampling: Sampling) -> float:
        """1.15 for a distilled model, at every size."""
        return 1.15 if self.pipe.config.is_distilled else super().mu(sampling)

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, L, 4C]."""
        embeds = condition.prompt_embeds
        positions = self.pipe.prepare_position_ids(embeds.shape[1], *self.grid(sampling), x.device)
        return net(
            hidden_states=x,
            encoder_hidden_states=embeds,
            timestep=(sigma * 1000 / 1000).to(x.dtype),
            position_ids=positions,
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Unpack, undo the VAE's normalisation, decode a clip of one frame."""
        grid = self.pipe._unpack_latents(latents, sampling.height, sampling.width)
        return decode_image(self.pipe, unnormalise(self.pipe.vae, grid))

    def latents_of(self, pixels: Tensor) -> Tensor:
        """[B, L, 4C], of a clip of one frame."""
        grid = normalise(self.pipe.vae, encode(self.pipe.vae, pixels.unsqueeze(2)))[:, :, 0]
        return self.pipe._pack_latents(grid, *grid.shape)
