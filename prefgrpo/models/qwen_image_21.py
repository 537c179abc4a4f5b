"""Qwen-Image-2.1: packed latents [L, C] of one place of 16² pixels per token, time = σ, no guidance unless asked for.

Conditions: states of the Qwen3-VL language model, as long as the prompt, to which the stock pipeline sets no limit. The
VAE has an alpha channel; images are shown on white. Invariant: with `ode` steps the images are those of the stock
QwenImage21Pipeline for one prompt, with negative prompt " " where guidance is on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg
from prefgrpo.models.video_vae import unnormalise


class QwenImage21(Adapter):
    """Qwen-Image-2.1 text-to-image."""

    pipeline = "QwenImage21Pipeline"
    packed = True
    own_lengths = True
    cfg = Cfg(negative=" ")
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out",
    )  # fmt: skip

    def grid(self, sampling: Sampling) -> tuple[int, int]:
        """Rows and columns of tokens, both even: the language model's image slots are 2 × 2 tokens."""
        rows, columns = super().grid(sampling)
        return 2 * rows, 2 * columns

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [n, C] with n ≤ max_length tokens, and text_length = n."""
        embeds, _, _ = self.pipe.encode_prompt([prompt], device=self.device)
        embeds = embeds[0, :max_length]
        return Condition(embeds, text_length=torch.tensor(len(embeds)))

    def schedule_options(self, sampling: Sampling) -> dict[str, Any]:
        """The sigmas that a few-step model comes with; else even ones. ValueError for another number of steps."""
        sigmas = self.pipe.config.sample_sigmas
        if sigmas is None:
            return super().schedule_options(sampling)
        if len(sigmas) != sampling.steps:
            raise ValueError(
                f"this model has {len(sigmas)} sampling sigmas: expected as many steps, got {sampling.steps}"
            )
        return {"sigmas": np.array(sigmas), "mu": self.mu(sampling)}

    def stock_call(self, prompts: list[str], max_length: int, sampling: Sampling) -> dict[str, Any]:
        """Guidance is called true_cfg_scale, and takes one negative prompt per prompt."""
        call: dict[str, Any] = {"prompt": prompts, "true_cfg_scale": sampling.guidance}
        return call | ({"negative_prompt": [self.cfg.negative] * len(prompts)} if self.guided(sampling) else {})

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, L, C]; the transformer sees text and image as one sequence, of which the image is the end.

        Where the image begins changes it, so that a prompt is never padded: a forward per length.
        """
        lengths, (count, tokens) = condition.text_length, x.shape[:2]
        assert lengths is not None
        rows = _at_once(net, lengths)
        if len(rows) > 1:
            v = [self.predict(net, x[row], sigma[row], condition.select(row), sampling) for row in rows]
            return torch.cat(v)[torch.cat(rows).argsort()]
        text = int(lengths[0])
        slots = torch.cat([lengths.new_zeros(count, text), lengths.new_ones(count, tokens // 4)], dim=1).bool()
        return net(
            hidden_states=x,
            timestep=sigma * 1000 / 1000,
            encoder_hidden_states=condition.prompt_embeds[:, :text],
            img_shapes=[[(1, *self.grid(sampling))]] * count,
            img_mask=slots.to(x.device, non_blocking=True),
            return_dict=False,
        )[0][:, -tokens:]

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Unpack, undo the VAE's normalisation, decode a clip of one frame, put it on white."""
        rows, columns = self.grid(sampling)
        grid = latents.transpose(1, 2).reshape(len(latents), -1, 1, rows, columns)
        image = self.decode_image(unnormalise(self.pipe.vae, grid))
        return image[:, :3] * image[:, 3:] + (1 - image[:, 3:])


def _at_once(net: nn.Module, lengths: Tensor) -> list[Tensor]:
    """Rows of a batch that share a forward: those of one length; of split weights, which all processes must gather
    equally often, each row alone."""
    if hasattr(net, "unshard"):  # split by FSDP2
        return list(torch.arange(len(lengths)).split(1))
    return [(lengths == length).nonzero().flatten() for length in lengths.unique()]
