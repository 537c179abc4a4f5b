"""Gradient checkpointing of some of a model's repeated blocks: memory against one more forward of each.

Block i of the model is recomputed where floor((i + 1) · share) steps up, so half of them are every second one.
Invariant: the gradient is that without checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def enable(model: nn.Module, block_classes: Iterable[str], share: float) -> None:
    """Recompute a share of the modules of these classes; model: a diffusers denoiser."""
    names = set(block_classes)
    blocks = [block for block in model.modules() if type(block).__name__ in names]
    chosen = {id(block) for i, block in enumerate(blocks) if int((i + 1) * share) > int(i * share)}

    def call(block: nn.Module, *args: Any) -> Any:
        if id(block) in chosen:
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)

    model.enable_gradient_checkpointing(call)  # type: ignore[operator]
