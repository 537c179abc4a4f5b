"""What the shared code needs from a model family; one file per family implements it.

An adapter owns a stock diffusers pipeline and knows its conventions: conditioning, time, guidance, packing. It
knows nothing of rules, noise, rewards or training. Invariant: `velocity` at the same (x, σ, condition, batch
shape) and the same weights returns the same bits in rollout and in replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

Condition = dict[str, Tensor]
"""Encoded prompt(s): named tensors; [...] for one prompt, [B, ...] for a batch."""


class Adapter(ABC):
    """A loaded model family."""

    pipe: Any
    """The stock diffusers pipeline."""
    transformer: nn.Module
    """The trained denoiser (peft adapters are injected into it in place)."""
    lora_targets: tuple[str, ...]
    """Module name suffixes that LoRA wraps."""

    @classmethod
    @abstractmethod
    def load(cls, model: str, dtype: torch.dtype, device: torch.device) -> Adapter:
        """Load from a folder or hub id, frozen, in eval mode, parameters aligned (cloned out of mmap)."""

    @abstractmethod
    def encode(self, prompts: list[str], max_length: int) -> list[Condition]:
        """One unbatched condition per prompt, on the CPU."""

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latents as the transformer sees them."""

    @abstractmethod
    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """[steps + 1] fp32 sigmas that the stock pipeline would use for this size."""

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, condition: Condition, height: int, width: int) -> Tensor:
        """Model velocity v [B, …] at latents x [B, …], σ [B] fp32, for a batched condition."""

    @abstractmethod
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Images [B, 3, H, W] fp32 in [0, 1] from final latents."""

    @abstractmethod
    def save_lora(self, folder: str) -> None:
        """Write the LoRA in diffusers format with its alpha: `pipe.load_lora_weights(folder)` must reproduce it."""
