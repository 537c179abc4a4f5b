"""Prompt embeddings: each unique prompt is encoded once, kept in memory and, if a folder is given, on disk.

In editing, source images are encoded once too, whatever is asked of them; where the text encoder sees them
(`Adapter.text_sees_sources`), a text is one per source. A condition's name on disk is the hash of (family, encoders,
dtype, max length, what it is of), so a folder serves any run and never goes stale. Invariant: a condition depends on
its prompt and sources alone; cache on = cache off, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from prefgrpo.models.base import Adapter, Condition
from prefgrpo.models.guidance import attach
from prefgrpo.rollout.shards import Shards

PER_SHARD, SHARD_BYTES = 64, 256 * 2**20
"""A shard is written when it has so many conditions, or so many bytes."""
Sources = tuple[Image.Image, ...]
"""The source images of an edit, in order."""


class Embeddings:
    """Conditions by prompt text."""

    def __init__(self, adapter: Adapter, max_length: int, folder: str | Path | None = None, keep: int = 1024) -> None:
        """max_length: text tokens. folder: where to keep conditions on disk. keep: how many stay in memory."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._adapter, self._max_length, self._keep = adapter, max_length, keep
        self._memory: OrderedDict[bytes, Condition] = OrderedDict()
        self._salt = salt(type(adapter), adapter.source, adapter.dtype, max_length, adapter.source_area)
        self._shards = None if folder is None else Shards(Path(folder))
        self._pending: dict[str, Condition] = {}
        self.encoded = 0
        """How many texts went through the text encoders so far."""
        if self._shards is not None and not adapter.source:
            raise ValueError("an embedding folder needs a model loaded from disk: its fingerprint is the key")

    def __call__(self, prompts: Sequence[str], sources: Sequence[Sources] | None = None) -> list[Condition]:
        """One unbatched CPU condition per prompt (and source images), in order; equal ones share their tensors.

        With guidance on, each carries the negative prompt's tensors, which are encoded once (per source if seen).
        """
        asked = [(prompt, tuple(own)) for prompt, own in zip(prompts, sources or [()] * len(prompts), strict=True)]
        keys = [(prompt, _digest(own)) for prompt, own in asked]
        found = {key: self._guided(*one) for key, one in dict(zip(keys, asked)).items()}
        self.flush()
        return [found[key] for key in keys]

    def _guided(self, prompt: str, sources: Sources) -> Condition:
        """The condition with its sources' latents and, if guidance is on, its negative prompt's embedding."""
        condition, cfg = self.text(prompt, sources), self._adapter.cfg
        if sources:
            condition = condition | self.latents(sources)
        if cfg is None or not self._adapter.guided:
            return condition
        return attach(condition, self.text(cfg.negative, sources))

    def text(self, prompt: str, sources: Sources = ()) -> Condition:
        """The embedding of one text; sources are looked at only where the family's text encoder sees them."""

        def encode() -> Condition:
            self.encoded += 1
            with self._adapter.parked.present("text_encoder"):
                return self._adapter.encode(prompt, self._max_length, sources)

        return self._kept(text_key(type(self._adapter), prompt, sources), encode)

    def latents(self, sources: Sources) -> Condition:
        """What the source images of an edit add to its condition."""

        def encode() -> Condition:
            with self._adapter.parked.present("vae", "text_encoder"):
                return self._adapter.encode_sources(sources)

        return self._kept(source_key(sources, clip_frames(type(self._adapter), self._adapter.frames)), encode)

    def _kept(self, key: bytes, encode: Callable[[], Condition]) -> Condition:
        """From memory, else from disk, else encoded now."""
        name = self._name(key)
        condition = self._memory.pop(key, None) or self._pending.get(name) or self._read(name)
        if condition is None:
            condition = encode()
            if self._shards is not None:
                self._pending[name] = condition
                if len(self._pending) >= PER_SHARD or sum(map(_bytes, self._pending.values())) >= SHARD_BYTES:
                    self.flush()
        self._memory[key] = condition
        if len(self._memory) > self._keep:
            self._memory.popitem(last=False)
        return condition

    def _read(self, name: str) -> Condition | None:
        if self._shards is None:
            return None
        if name not in self._shards:
            self._shards.scan()  # another process may have written it
        return self._shards.read(name)

    def flush(self) -> None:
        """Write what was encoded since, as one shard."""
        if self._shards is not None:
            self._shards.write(self._pending)
            self._pending = {}

    def _name(self, key: bytes) -> str:
        return cache_key(self._salt, key)

    def key(self, prompt: str, sources: Sources = ()) -> str:
        """The name under which the embedding of a prompt is kept on disk."""
        return self._name(text_key(type(self._adapter), prompt, sources))


def salt(family: type[Adapter], source: str, dtype: torch.dtype, max_length: int, area: int | None = None) -> bytes:
    """What all conditions of a run have in common; source: fingerprint of the encoders; area: pixels of its sources."""
    area = family.default_source_area if area is None else area
    return hashlib.sha256(f"{family.__name__}:{source}:{dtype}:{max_length}:{area}".encode()).digest()


def cache_key(common: bytes, key: bytes) -> str:
    """Under which name what `text_key` or `source_key` names is kept."""
    return hashlib.sha256(common + key).hexdigest()


def texts(family: type[Adapter], guidance: float, prompts: Iterable[str]) -> list[str]:
    """All texts that a run encodes, each once: the prompts, and before them the negative prompt if guidance is on."""
    negative = [family.cfg.negative] if family.cfg is not None and family.cfg.active(guidance) else []
    return list(dict.fromkeys([*negative, *prompts]))


def text_key(family: type[Adapter], prompt: str, sources: Sources) -> bytes:
    """What identifies a text's embedding: its bytes and, where the text encoder sees them, its source images."""
    seen = sources and family.text_sees_sources
    return prompt.encode() + (b"\0" + _digest(sources) if seen else b"")


def source_key(sources: Sources, frames: int | None) -> bytes:
    """What identifies the latents of source images: a digest of their pixels, and `clip_frames`."""
    return b"\0sources\0" + (f"{frames}\0".encode() if frames else b"") + _digest(sources)


def clip_frames(family: type[Adapter], frames: int | None) -> int | None:
    """Frames of a clip (none: the family's own number) where the latents of its source depend on them, else None."""
    return (frames or family.default_frames) if family.source_spans_clip else None


def _digest(sources: Sources) -> bytes:
    """Of the pixels of images, in order; empty for none."""
    pixels = [image.convert("RGB") for image in sources]
    return b"".join(hashlib.sha256(repr(one.size).encode() + one.tobytes()).digest() for one in pixels)


def _bytes(condition: Condition) -> int:
    return sum(tensor.nbytes for tensor in condition.values())


def collate(conditions: Sequence[Condition], device: torch.device | str = "cpu") -> Condition:
    """Batch of conditions: [...] each → [B, ...] on `device`.

    `prompt_embeds` are padded with zeros to the longest; tensors whose name ends in `length` stay
    on the CPU. Raises ValueError for other conditions that differ (source images of two sizes, one image and two).
    """
    if not conditions:
        raise ValueError("collate needs at least one condition")
    if len({tuple(sorted(one)) for one in conditions}) > 1:
        told = sorted({", ".join(sorted(one)) for one in conditions})
        raise ValueError(f"conditions of one batch must have equal parts (as many source images), got {told}")
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
