"""Bytes that a forward, a backward or a decode holds, counted without weights, data or a GPU.

The model runs on fake tensors, which have shapes and no content, while every storage that comes into being is weighed
until it is freed. Invariant: on real tensors the same count is what the allocator saw (tests/test_plan.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Weigh(TorchDispatchMode):
    """Inside, `most` is the largest number of bytes that new tensors held at once, and `now()` what they hold."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """known: tensors that were there before, and their views, do not count."""
        super().__init__()
        self._known = {StorageWeakRef(t.untyped_storage()) for t in known}
        self._live: dict[StorageWeakRef, int] = {}
        self._total = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation and weigh what it returns; one on real tensors alone is really done (lengths, σ, pixels)."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        real = given and not any(isinstance(t, FakeTensor) for t in given)
        with unset_fake_temporarily() if real else nullcontext():
            out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = StorageWeakRef(storage)
        if place in self._known or place in self._live:
            return
        self._live[place] = storage.nbytes()
        self._total += storage.nbytes()
        if self._total > self.most:  # it may hold what is freed by now
            self.most = max(self.most, self.now())

    def now(self) -> int:
        """Bytes that are still held."""
        self._live = {place: size for place, size in self._live.items() if not place.expired()}
        self._total = sum(self._live.values())
        return self._total


def forget(package: str) -> None:
    """Empty the caches of a package's functions: a fake tensor in one would make what follows fake too."""
    for module in [m for name, m in sys.modules.items() if name.startswith(package)]:
        for value in vars(module).values():
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


def fake(modules: Iterable[nn.Module], mode: FakeTensorMode) -> list[Tensor]:
    """Replace all tensors of (meta) modules by fake ones on the CPU, in place; returns them."""
    made: list[Tensor] = []

    def like(tensor: Tensor) -> Tensor:
        made.append(torch.empty(tensor.shape, dtype=tensor.dtype))
        return made[-1]

    with mode:
        for module in (part for whole in modules for part in whole.modules()):
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(like(p), requires_grad=p.requires_grad)
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = like(b)
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    setattr(module, name, like(value))
    return made
