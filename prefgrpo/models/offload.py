"""CPU offload of pipeline components, which move to the device only while they are used.

Text encoders and the VAE are idle for most of a step, and together may be larger than the denoiser. Invariant: a
component always runs on the same device, so offloading does not change its results; on the CPU nothing ever moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

KINDS: dict[str, tuple[str, ...]] = {"text_encoder": ("text_encoder", "image_encoder", "connectors"), "vae": ("vae",)}
"""Kind of part → prefixes of its component names."""


class ComponentOffload:
    """The pipeline's components, some kinds of which are offloaded to the CPU."""

    def __init__(self, parts: Mapping[str, Any], kinds: tuple[str, ...], device: torch.device) -> None:
        """parts: a pipeline's components; those of `kinds` move to the CPU, all others to `device`."""
        self.device = device
        kinds = () if device.type == "cpu" else tuple(kind for kind in kinds if kind in KINDS)
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self.modules = {k: [m for name, m in modules.items() if name.startswith(KINDS[k])] for k in kinds}
        self._on_device, self._depth = set[str](), 0
        waiting = {id(module) for found in self.modules.values() for module in found}
        for module in modules.values():
            module.to("cpu" if id(module) in waiting else device)

    @contextmanager
    def on_device(self, *kinds: str) -> Iterator[None]:
        """Inside, these kinds are on the device; then they go back to the CPU, or stay until `keep_on_device` ends."""
        with self.keep_on_device():
            for kind in kinds:
                if kind in self.modules and kind not in self._on_device:
                    self._move(kind, self.device)
                    self._on_device.add(kind)
            yield

    @contextmanager
    def keep_on_device(self) -> Iterator[None]:
        """Inside, parts that were moved to the device stay there: for loops in which only some items need a part."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for kind in self._on_device:
                    self._move(kind, torch.device("cpu"))
                self._on_device.clear()

    def _move(self, kind: str, device: torch.device) -> None:
        for module in self.modules[kind]:
            module.to(device)
