"""Parts of a pipeline that wait in the CPU's memory and come to the device only for their work.

Text encoders and the VAE are idle in most of a step, and together may be larger than the denoiser. Invariant: where a
part is when it works, and so what it computes, does not depend on where it waits; on the CPU nothing ever moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

KINDS: dict[str, tuple[str, ...]] = {"text_encoder": ("text_encoder", "image_encoder"), "vae": ("vae",)}
"""Kind of part → how the names of its components begin."""


class Parked:
    """Which kinds of parts wait on the CPU."""

    def __init__(self, parts: Mapping[str, Any], kinds: tuple[str, ...], device: torch.device) -> None:
        """parts: a pipeline's components; those of `kinds` are moved to the CPU, all others to `device`."""
        self.device, kinds = device, () if device.type == "cpu" else kinds
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self.modules = {k: [m for name, m in modules.items() if name.startswith(KINDS[k])] for k in kinds}
        waiting = {id(module) for found in self.modules.values() for module in found}
        for module in modules.values():
            module.to("cpu" if id(module) in waiting else device)

    @contextmanager
    def present(self, *kinds: str) -> Iterator[None]:
        """Inside, these kinds are on the device."""
        called = [module for kind in kinds for module in self.modules.get(kind, ())]
        for module in called:
            module.to(self.device)
        try:
            yield
        finally:
            for module in called:
                module.to("cpu")
