"""Prompt embeddings: each unique prompt is encoded once, kept in memory and, if a folder is given, on disk.

A file's name is the hash of (family, text encoders, dtype, max length, prompt), so a folder serves any run and never
goes stale. Invariant: a condition depends on its prompt alone; cache on = cache off, bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from prefgrpo.models.base import Adapter, Condition
from prefgrpo.models.guidance import attach

logger = logging.getLogger(__name__)


class Embeddings:
    """Conditions by prompt text."""

    def __init__(self, adapter: Adapter, max_length: int, folder: str | Path | None = None, keep: int = 4096) -> None:
        """max_length: text tokens. folder: where to keep conditions on disk. keep: how many stay in memory."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._adapter, self._max_length, self._keep = adapter, max_length, keep
        self._memory: OrderedDict[str, Condition] = OrderedDict()
        key = f"{type(adapter).__name__}:{adapter.source}:{adapter.dtype}:{max_length}"
        self._salt = hashlib.sha256(key.encode()).digest()
        self._folder = None if folder is None else Path(folder)
        self.encoded = 0
        """How many prompts went through the text encoders so far."""
        if self._folder is not None:
            if not adapter.source:
                raise ValueError("an embedding folder needs a model loaded from disk: its fingerprint is the key")
            self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, prompts: Sequence[str]) -> list[Condition]:
        """One unbatched CPU condition per prompt, in order; equal prompts share their tensors.

        With guidance on, each carries the negative prompt's tensors, which are encoded once.
        """
        unique = dict.fromkeys(prompts)
        found = {prompt: self._one(prompt) for prompt in unique}
        if self._adapter.guided and self._adapter.cfg is not None:
            negative = self._one(self._adapter.cfg.negative)
            found = {prompt: attach(condition, negative) for prompt, condition in found.items()}
        return [found[prompt] for prompt in prompts]

    def _one(self, prompt: str) -> Condition:
        condition = self._memory.pop(prompt, None) or self._read(prompt)
        if condition is None:
            condition = self._adapter.encode([prompt], self._max_length)[0]
            self.encoded += 1
            self._write(prompt, condition)
        self._memory[prompt] = condition
        if len(self._memory) > self._keep:
            self._memory.popitem(last=False)
        return condition

    def file(self, prompt: str) -> Path | None:
        """Where the condition of a prompt is kept on disk; None without a folder."""
        if self._folder is None:
            return None
        name = hashlib.sha256(self._salt + prompt.encode()).hexdigest()
        return self._folder / name[:2] / f"{name}.safetensors"

    def _read(self, prompt: str) -> Condition | None:
        file = self.file(prompt)
        if file is None or not file.is_file():
            return None
        try:
            return {key: value.clone() for key, value in load_file(file).items()}
        except SafetensorError as error:
            logger.warning("embedding cache: %s is damaged (%s); encoding its prompt again", file, error)
            return None

    def _write(self, prompt: str, condition: Condition) -> None:
        file = self.file(prompt)
        if file is None:
            return
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.partial")
        save_file(condition, part)
        os.replace(part, file)


def collate(conditions: Sequence[Condition], device: torch.device | str = "cpu") -> Condition:
    """Batch of conditions: [...] each → [B, ...] on `device`; a shorter first dimension is padded with zeros.

    Tensors whose name ends in `length` stay on the CPU.
    """
    if not conditions:
        raise ValueError("collate needs at least one condition")
    batch = {key: _stack([one[key] for one in conditions]) for key in conditions[0]}
    return {key: value if key.endswith("length") else value.to(device) for key, value in batch.items()}


def _stack(parts: list[Tensor]) -> Tensor:
    """torch.stack; if first dimensions differ, zero-padded at the end to the longest."""
    if len({part.shape for part in parts}) == 1:
        return torch.stack(parts)
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def select(condition: Condition, rows: Tensor) -> Condition:
    """The batch rows `rows` (int64) of a batched condition."""
    return {key: value.index_select(0, rows.to(value.device)) for key, value in condition.items()}


def tile(condition: Condition, times: int) -> Condition:
    """A batched condition [B, ...] repeated to [times · B, ...], rows in the order of `replay`'s stacked steps."""
    return {key: value.repeat(times, *[1] * (value.dim() - 1)) for key, value in condition.items()}
