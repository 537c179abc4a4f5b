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

KINDS: dict[str, tuple[str, ...]] = {"text_encoder": ("text_encoder", "image_encoder", "connectors"), "vae": ("vae",)}
"""Kind of part → how the names of its components begin."""


class Parked:
    """Which kinds of parts wait on the CPU."""

    def __init__(self, parts: Mapping[str, Any], kinds: tuple[str, ...], device: torch.device) -> None:
        """parts: a pipeline's components; those of `kinds` are moved to the CPU, all others to `device`."""
        self.device, kinds = device, () if device.type == "cpu" else kinds
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self.modules = {k: [m for name, m in modules.items() if name.startswith(KINDS[k])] for k in kinds}
        self._here, self._held = set[str](), 0
        waiting = {id(module) for found in self.modules.values() for module in found}
        for module in modules.values():
            module.to("cpu" if id(module) in waiting else device)

    @contextmanager
    def present(self, *kinds: str) -> Iterator[None]:
        """Inside, these kinds are on the device; afterwards they go back, or stay until the end of `hold`."""
        with self.hold():
            for kind in kinds:
                if kind in self.modules and kind not in self._here:
                    self._move(kind, self.device)
                    self._here.add(kind)
            yield

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, what comes to the device stays: for work on many items, of which some need a part and some do not."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                for kind in self._here:
                    self._move(kind, torch.device("cpu"))
                self._here.clear()

    def _move(self, kind: str, device: torch.device) -> None:
        for module in self.modules[kind]:
            module.to(device)
