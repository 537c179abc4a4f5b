"""Gradient checkpointing of some of a model's repeated blocks: memory against one more forward of each.

Block i of the model is recomputed where floor((i + 1) · share) steps up, so half of them are every second one. Blocks
are called as without it (diffusers' own switch leaves arguments out of some models' calls). Invariant: the gradient is
that without checkpointing, and so is the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def enable(blocks: Iterable[nn.Module], share: float) -> None:
    """Recompute a share of a model's blocks."""
    for i, block in enumerate(blocks):
        if int((i + 1) * share) > int(i * share):
            block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward`, whose activations are not kept for the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
