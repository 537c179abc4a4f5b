"""Prompt embeddings: each unique prompt is encoded once, kept in memory and, if a folder is given, on disk.

In editing the unit is a prompt with its source image. A file's name is the hash of (family, encoders, dtype, max
length, prompt, source), so a folder serves any run and never goes stale. Invariant: a condition depends on its prompt
and source alone; cache on = cache off, bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from prefgrpo.models.base import Adapter, Condition
from prefgrpo.models.guidance import attach

logger = logging.getLogger(__name__)


class Embeddings:
    """Conditions by prompt text."""

    def __init__(self, adapter: Adapter, max_length: int, folder: str | Path | None = None, keep: int = 1024) -> None:
        """max_length: text tokens. folder: where to keep conditions on disk. keep: how many stay in memory."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._adapter, self._max_length, self._keep = adapter, max_length, keep
        self._memory: OrderedDict[bytes, Condition] = OrderedDict()
        self._salt = salt(type(adapter), adapter.source, adapter.dtype, max_length)
        self._folder = None if folder is None else Path(folder)
        self.encoded = 0
        """How many prompts went through the text encoders so far."""
        if self._folder is not None:
            if not adapter.source:
                raise ValueError("an embedding folder needs a model loaded from disk: its fingerprint is the key")
            self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, prompts: Sequence[str], sources: Sequence[Image.Image | None] | None = None) -> list[Condition]:
        """One unbatched CPU condition per prompt (and source image), in order; equal ones share their tensors.

        With guidance on, each carries the negative prompt's tensors, which are encoded once (per source).
        """
        asked = list(zip(prompts, sources or [None] * len(prompts), strict=True))
        keys = [_key(prompt, source) for prompt, source in asked]
        found = {key: self._guided(*one) for key, one in dict(zip(keys, asked)).items()}
        return [found[key] for key in keys]

    def _guided(self, prompt: str, source: Image.Image | None) -> Condition:
        """The condition with its negative prompt's, if guidance is on."""
        condition, cfg = self.one(prompt, source), self._adapter.cfg
        if cfg is None or not self._adapter.guided:
            return condition
        return attach(condition, self.one(cfg.negative, source))

    def one(self, prompt: str, source: Image.Image | None = None) -> Condition:
        """The condition of one text (and source image), without a negative prompt."""
        key = _key(prompt, source)
        condition = self._memory.pop(key, None) or self._read(self.file(prompt, source))
        if condition is None:
            condition = self._adapter.encode(prompt, self._max_length, source)
            self.encoded += 1
            _write(self.file(prompt, source), condition)
        self._memory[key] = condition
        if len(self._memory) > self._keep:
            self._memory.popitem(last=False)
        return condition

    def file(self, prompt: str, source: Image.Image | None = None) -> Path | None:
        """Where the condition of a prompt is kept on disk; None without a folder."""
        return None if self._folder is None else cache_file(self._folder, self._salt, prompt, source)

    def _read(self, file: Path | None) -> Condition | None:
        if file is None or not file.is_file():
            return None
        try:
            return {key: value.clone() for key, value in load_file(file).items()}
        except SafetensorError as error:
            logger.warning("embedding cache: %s is damaged (%s); encoding its prompt again", file, error)
            return None


def salt(family: type[Adapter], source: str, dtype: torch.dtype, max_length: int) -> bytes:
    """What all conditions of a run have in common; source: fingerprint of the encoders."""
    return hashlib.sha256(f"{family.__name__}:{source}:{dtype}:{max_length}".encode()).digest()


def cache_file(folder: Path, common: bytes, prompt: str, source: Image.Image | None = None) -> Path:
    """Where the condition of a text (and source image) is kept."""
    name = hashlib.sha256(common + _key(prompt, source)).hexdigest()
    return folder / name[:2] / f"{name}.safetensors"


def texts(family: type[Adapter], guidance: float, prompts: Iterable[str]) -> list[str]:
    """All texts that a run encodes, each once: the prompts, and before them the negative prompt if guidance is on."""
    negative = [family.cfg.negative] if family.cfg is not None and family.cfg.active(guidance) else []
    return list(dict.fromkeys([*negative, *prompts]))


def _key(prompt: str, source: Image.Image | None) -> bytes:
    """What identifies a condition: the prompt's bytes, and a digest of the source's pixels."""
    if source is None:
        return prompt.encode()
    pixels = source.convert("RGB")
    return prompt.encode() + b"\0" + hashlib.sha256(repr(pixels.size).encode() + pixels.tobytes()).digest()


def _write(file: Path | None, condition: Condition) -> None:
    """Write a condition so that a reader sees all of it or nothing."""
    if file is None:
        return
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.partial")
    save_file(condition, part)
    os.replace(part, file)


def collate(conditions: Sequence[Condition], device: torch.device | str = "cpu") -> Condition:
    """Batch of conditions: [...] each → [B, ...] on `device`.

    `prompt_embeds` are padded with zeros to the longest; tensors whose name ends in `length` stay
    on the CPU. Raises ValueError for other conditions that differ in shape (source images of two sizes).
    """
    if not conditions:
        raise ValueError("collate needs at least one condition")
    batch = {key: _stack(key, [one[key] for one in conditions]) for key in conditions[0]}
    return {key: value if key.endswith("length") else value.to(device) for key, value in batch.items()}


def _stack(key: str, parts: list[Tensor]) -> Tensor:
    """torch.stack; text is zero-padded at the end to the longest."""
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) == 1:
        return torch.stack(parts)
    if not key.endswith("prompt_embeds"):
        raise ValueError(f"conditions of one batch must have equal shapes, but '{key}' has {sorted(shapes)}")
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def select(condition: Condition, rows: Tensor) -> Condition:
    """The batch rows `rows` (int64) of a batched condition."""
    return {key: value.index_select(0, rows.to(value.device)) for key, value in condition.items()}


def tile(condition: Condition, times: int) -> Condition:
    """A batched condition [B, ...] repeated to [times · B, ...], rows in the order of `replay`'s stacked steps."""
    return {key: value.repeat(times, *[1] * (value.dim() - 1)) for key, value in condition.items()}
