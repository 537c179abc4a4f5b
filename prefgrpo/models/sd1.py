"""Stable Diffusion 1.x (ε-prediction, DDIM) as a flow model: latents [C, h, w], guidance 7.5.

A noised latent x = √ᾱ x₀ + √(1−ᾱ) ε, divided by √ᾱ + √(1−ᾱ), is (1 − σ) x₀ + σ ε with σ = √(1−ᾱ) / (√ᾱ + √(1−ᾱ)).
In this scaling a deterministic DDIM step is an Euler step along v = ε − x₀, and every step rule applies; rule `ddim` is
DDIM with η. The model's integer timestep is looked up from σ. Invariant: with `ode` steps the images are those of the
stock StableDiffusionPipeline with a DDIMScheduler and η = 0.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import Tensor, nn

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.guidance import Cfg


class StableDiffusion1(Adapter):
    """Stable Diffusion 1.4, 1.5."""

    pipeline = "StableDiffusionPipeline"
    cfg = Cfg()
    whole_times = True
    denoisers = ("unet",)
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    @property
    def unit(self) -> int:
        """Image sides are multiples of 8."""
        return 8

    def encode_prompt(self, prompt: str, max_length: int) -> Condition:
        """prompt_embeds [77, C]; max_length is ignored, because the text encoder's length is fixed."""
        embeds, _ = self.pipe.encode_prompt(prompt, self.device, 1, do_classifier_free_guidance=False)
        return Condition(embeds[0])

    def stock_scheduler(self) -> Any:
        """DDIM with the betas of the folder's own scheduler. ValueError if DDIM would not match that scheduler."""
        scheduler = DDIMScheduler.from_config(self.pipe.scheduler.config, clip_sample=False, thresholding=False)
        if scheduler.config.prediction_type != "epsilon":
            raise ValueError(f"expected a model that predicts epsilon, got {scheduler.config.prediction_type}")
        if scheduler.config.timestep_spacing == "linspace":
            raise ValueError(
                "expected timestep_spacing leading or trailing: with linspace, DDIM's steps do not end at its timesteps"
            )
        return scheduler

    def sigmas(self, sampling: Sampling) -> Tensor:
        """[steps + 1] fp32: σ at DDIM's timesteps, and at its final ᾱ."""
        scheduler, steps = self.stock_scheduler(), sampling.steps
        scheduler.set_timesteps(steps)
        whole, trained = scheduler.config.num_train_timesteps % steps == 0, scheduler.config.num_train_timesteps
        if scheduler.config.timestep_spacing == "trailing" and not whole:
            raise ValueError(
                f"timestep_spacing trailing: expected steps that divide {trained}, got {steps}: a DDIM step of "
                f"{trained} // {steps} does not end where the next one starts"
            )
        table = _sigma(scheduler.alphas_cumprod)
        return torch.cat([table[scheduler.timesteps], _sigma(scheduler.final_alpha_cumprod)[None]])

    def times(self, sampling: Sampling) -> Tensor:
        """[steps] fp32 σ: `predict` looks up the integer timestep that belongs to it."""
        return self.sigmas(sampling)[:-1]

    def prior(self, x: Tensor, sigma: Tensor) -> Tensor:
        """DDIM starts from unit noise."""
        return x * _norm(sigma)

    def predict(self, net: nn.Module, x: Tensor, sigma: Tensor, condition: Condition, sampling: Sampling) -> Tensor:
        """Velocity [B, C, h, w]."""
        table = _sigma(self.pipe.scheduler.alphas_cumprod).to(x.device)  # σ of every integer timestep, ascending
        time = (table[None, :] - sigma[:, None]).abs().argmin(1)
        s = sigma[:, None, None, None]
        scaled = (x / _norm(s)).to(self.dtype)
        noise = net(scaled, time, encoder_hidden_states=condition.prompt_embeds, return_dict=False)[0]
        return (noise.float() - x) / (1.0 - s)

    def decode(self, latents: Tensor, sampling: Sampling) -> Tensor:
        """Rescale to x, undo the VAE's scale, decode."""
        last = _norm(_sigma(self.stock_scheduler().final_alpha_cumprod)).to(latents.device)
        return self.decode_image(latents / last / self.pipe.vae.config.scaling_factor)


def _sigma(alpha: Tensor) -> Tensor:
    """σ for ᾱ = `alpha`."""
    alpha = alpha.double()
    return ((1 - alpha).sqrt() / (alpha.sqrt() + (1 - alpha).sqrt())).float()


def _norm(sigma: Tensor) -> Tensor:
    """1 / (√ᾱ + √(1−ᾱ)) at σ."""
    return torch.hypot(1 - sigma, sigma)
