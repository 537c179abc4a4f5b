"""CPU offload of pipeline components, which are on the device only while they are used.

Text encoders and the VAE are idle for most of a step, and together may be larger than the denoiser. Their weights never
change, so they leave the device without being copied back; in CPU memory they may lie in mapped files, which the
processes of a machine share. Invariant: a component always runs on the same device, so offloading does not change its
results; on the CPU nothing ever moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KINDS: dict[str, tuple[str, ...]] = {"text_encoder": ("text_encoder", "image_encoder", "connectors"), "vae": ("vae",)}
"""Kind of part → prefixes of its component names."""


def offloaded(names: Iterable[str], kinds: Iterable[str]) -> list[str]:
    """Which of these components belong to one of these kinds; other kinds have no components."""
    prefixes = tuple(prefix for kind in kinds for prefix in KINDS.get(kind, ()))
    return [name for name in names if name.startswith(prefixes)]


class ComponentOffload:
    """The pipeline's components, some kinds of which are in CPU memory while they are not used."""

    def __init__(self, parts: Mapping[str, Any], kinds: tuple[str, ...], device: torch.device) -> None:
        """parts: a pipeline's components, of which those of `kinds` are in CPU memory and run on `device`."""
        self.device = device
        self._modules: dict[str, list[nn.Module]] = {}
        for kind in KINDS.keys() & set(kinds) if device.type != "cpu" else ():
            named = offloaded(parts, [kind])
            self._modules[kind] = [parts[name] for name in named if isinstance(parts[name], nn.Module)]
        self._stored: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Kind that is on the device → its tensors, each with its data in CPU memory."""
        self._depth = 0

    @contextmanager
    def on_device(self, *kinds: str) -> Iterator[None]:
        """Inside, these kinds are on the device; they leave it at the end, or at that of `keep_on_device`."""
        with self.keep_on_device():
            for kind in kinds:
                if kind in self._modules and kind not in self._stored:
                    self._load(kind)
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
                self._unload()

    def _load(self, kind: str) -> None:
        """Copy the tensors of a kind to the device."""
        tensors = [t for module in self._modules[kind] for t in [*module.parameters(), *module.buffers()]]
        self._stored[kind] = [(tensor, tensor.data) for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.to(self.device)

    def _unload(self) -> None:
        """Point all tensors at their data in CPU memory again."""
        for pairs in self._stored.values():
            for tensor, data in pairs:
                tensor.data = data
        self._stored.clear()
