"""Wan2.2 T2V-A14B: Wan2.1 with two denoisers: `transformer` for t ≥ boundary · 1000, `transformer_2` below.

    expert(σ) = transformer, guidance 4.0, if 1000σ ≥ 1000 · 0.875, else transformer_2, guidance 3.0

σ is compared on the host. Either expert or both may train. Invariant: with `ode` steps the clips are those of the
stock WanPipeline with both experts under an Euler scheduler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.models.base import Sampling
from prefgrpo.models.wan import Wan


class Wan22(Wan):
    """Wan2.2 T2V with a high-noise and a low-noise expert."""

    default_guidance_2 = 3.0
    denoisers = ("transformer", "transformer_2")

    def stock_call(self, prompts: list[str], max_length: int, sampling: Sampling) -> dict[str, Any]:
        """With the second expert's guidance."""
        return super().stock_call(prompts, max_length, sampling) | {"guidance_scale_2": self._guidance_2(sampling)}

    def _guidance_2(self, sampling: Sampling) -> float:
        return self.default_guidance_2 if sampling.guidance_2 is None else sampling.guidance_2

    def high(self, sigma: Tensor) -> Tensor:
        """Which σ [B] belong to the high-noise expert, compared as the stock pipeline compares timesteps."""
        return sigma * 1000 >= self.pipe.config.boundary_ratio * 1000

    def expert(self, sigma: Tensor, sampling: Sampling) -> tuple[str, float]:
        """The expert of a batch, and its guidance scale. Raises ValueError for σ on both sides of the boundary."""
        high = self.high(sigma)
        if bool(high.any()) != bool(high.all()):
            raise ValueError(f"expected a batch of one expert's σ, got {sigma.tolist()}")
        return (self.denoisers[0], sampling.guidance) if high.all() else (self.denoisers[1], self._guidance_2(sampling))

    def trains(self, sigma: float) -> bool:
        """Whether the expert of this σ trains."""
        return self.denoisers[0 if self.high(torch.tensor(sigma)) else 1] in self.trained
