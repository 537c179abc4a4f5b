"""Wan2.2 T2V-A14B: Wan2.1 with two denoisers: `transformer` for t ≥ boundary · 1000, `transformer_2` below.

    expert(σ) = transformer, guidance 4.0, if 1000σ ≥ 1000 · 0.875, else transformer_2, guidance 3.0

σ is compared on the host. Either expert or both may train. Invariant: with `ode` steps the clips are those of the
stock WanPipeline with both experts under an Euler scheduler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefgrpo.models.base import Condition
from prefgrpo.models.wan import Wan
from prefgrpo.ops.args import Guidance


class Wan22(Wan):
    """Wan2.2 T2V with a high-noise and a low-noise expert."""

    default_guidance = 4.0
    default_guidance_2 = 3.0
    denoisers = ("transformer", "transformer_2")

    def stock_call(self, prompts: list[str], max_length: int) -> dict[str, Any]:
        """With the second expert's guidance."""
        return super().stock_call(prompts, max_length) | {"guidance_scale_2": self.guidance_2}

    def high(self, sigma: Tensor) -> Tensor:
        """Which σ [B] belong to the high-noise expert, compared as the stock pipeline compares timesteps."""
        return sigma * 1000 >= self.pipe.config.boundary_ratio * 1000

    def expert(self, high: bool) -> tuple[str, float]:
        """(denoiser, guidance scale) of one side of the boundary."""
        assert self.guidance_2 is not None
        return (self.denoisers[0], self.guidance) if high else (self.denoisers[1], self.guidance_2)

    def trains(self, sigma: float) -> bool:
        """Whether the expert of this σ trains."""
        return self.expert(bool(self.high(torch.tensor(sigma))))[0] in self.trained

    def pair(
        self, x: Tensor, sigma: Tensor, condition: Condition, height: int, width: int
    ) -> tuple[Tensor, Guidance | None]:
        """One expert's pair where the batch lies on one side; else each side's velocity, put back in order."""
        high = self.high(sigma).tolist()
        if all(high) or not any(high):
            return self._of(high[0], x, sigma, condition, height, width)
        sides, parts = [[k for k, h in enumerate(high) if h is side] for side in (True, False)], []
        for side, rows in zip((True, False), sides, strict=True):
            part = {key: value[rows] for key, value in condition.items()}
            parts.append(self.combined(*self._of(side, x[rows], sigma[rows], part, height, width)))
        place = {row: k for k, row in enumerate([*sides[0], *sides[1]])}
        return torch.cat(parts)[[place[row] for row in range(len(high))]], None

    def _of(
        self, high: bool, x: Tensor, sigma: Tensor, condition: Condition, height: int, width: int
    ) -> tuple[Tensor, Guidance | None]:
        """`pair` of one expert."""
        before = self._active
        self._active, scale = self.expert(high)
        try:
            return self.guided_pair(x, sigma.to(x.device, non_blocking=True), condition, height, width, scale)
        finally:
            self._active = before
