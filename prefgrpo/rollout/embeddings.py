"""Prompt embeddings: each text and each set of source images is encoded once, and kept in memory and on disk.

The key is (model, dtype, max length, text), so any run can use the same folder; the model is named by hub id and
commit, or by the files of its encoders. If the text encoder sees the source images (`Adapter.text_sees_sources`), they
belong to the text's key. Invariant: a condition depends only on its prompt and sources; results with and without the
folder are bitwise equal.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.models import DTYPES, family, folder
from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.condition import collate
from prefgrpo.models.guidance import Cfg
from prefgrpo.rollout.sampling import eval_sampling, prompt_sampling
from prefgrpo.rollout.shards import Shards
from prefgrpo.rollout.sources import Sources, prefetch

SHARD_BYTES = 256 * 2**20
"""A process writes a file when it holds so many bytes of new entries, and at the end."""
MEMORY_BYTES = 2**31
"""Most bytes of entries that a process keeps in memory."""
NONE = Sources()


@dataclass(frozen=True)
class CacheKeys:
    """Computes the cache keys of one model."""

    family: type[Adapter]
    encoders: str
    """Names the model's encoders (`folder.encoder_identity`)."""
    dtype: torch.dtype
    max_length: int
    source_area: int | None

    def text(self, prompt: str, sources: Sources = NONE) -> str:
        """Key of a text's embedding; it includes the sources if the text encoder sees them."""
        seen = sources.identity() if sources.files and self.family.text_sees_sources else ""
        return self._key("text", prompt, seen)

    def sources(self, sources: Sources, frames: int | None) -> str:
        """Key of the latents of source images; it includes the clip's frame count if the latents depend on it."""
        spanned = self.family.source_spans_clip and (frames or self.family.default_frames)
        return self._key("sources", sources.identity(), str(spanned))

    def _key(self, *content: str) -> str:
        area = self.family.default_source_area if self.source_area is None else self.source_area
        common = (self.family.__name__, self.encoders, str(self.dtype), str(self.max_length), str(area))
        return hashlib.sha256("\0".join(common + content).encode("utf-8", "surrogatepass")).hexdigest()


class Embeddings:
    """Conditions by prompt text."""

    def __init__(
        self, adapter: Adapter, max_length: int, folder: str | Path | None = None, most_bytes: int = MEMORY_BYTES
    ) -> None:
        """max_length: in text tokens. folder: the cache on disk. most_bytes: of entries in memory."""
        self._adapter = adapter
        self._max_length = max_length
        self._most_bytes = most_bytes
        self.keys = CacheKeys(type(adapter), adapter.fingerprint, adapter.dtype, max_length, adapter.source_area)
        self._memory: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._shards = None if folder is None else Shards(Path(folder))
        self._pending: dict[str, dict[str, Tensor]] = {}
        """Entries that are not on disk yet."""
        self.encoded = 0
        """Number of texts run through the text encoders so far."""

    def __call__(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        sources: Sequence[Sources] | None = None,
        negatives: Sequence[str | None] | None = None,
    ) -> list[Condition]:
        """One unbatched CPU condition per prompt (and source images), in order; equal texts share their tensors.

        With guidance, each includes the embedding of its negative prompt (None: the run's), encoded once, or once per
        source.
        """
        given = sources or [NONE] * len(prompts)
        others = negatives or [None] * len(prompts)
        asked = zip(prompts, given, others, strict=True)
        return [self._condition(text, one, negative, sampling) for text, one, negative in asked]

    def _condition(self, prompt: str, sources: Sources, negative: str | None, sampling: Sampling) -> Condition:
        adapter, condition = self._adapter, self.text(prompt, sources)
        if sources.files:
            condition = replace(condition, sources=self.sources(sources, sampling.frames))
        if adapter.cfg is not None and adapter.guided(sampling):
            text = negative_text(adapter.cfg, sampling, negative)
            condition = replace(condition, negative=self.text(text, sources))
        return condition

    def text(self, prompt: str, sources: Sources = NONE) -> Condition:
        """The embedding of one text; sources are used only if the family's text encoder sees them."""

        def encode() -> dict[str, Tensor]:
            self.encoded += 1
            images = sources.images() if self._adapter.text_sees_sources else ()
            with self._adapter.offload.on_device("text_encoder"):
                return self._adapter.encode(prompt, self._max_length, images).tensors()

        return Condition.of_text(self._get_or_encode(self.keys.text(prompt, sources), encode))

    def sources(self, sources: Sources, frames: int | None) -> tuple[Tensor, ...]:
        """The `Condition.sources` of an edit's source images; frames: number of frames of the clip."""

        def encode() -> dict[str, Tensor]:
            with self._adapter.offload.on_device("vae", "text_encoder"):
                tensors = self._adapter.encode_sources(sources.images(), frames)
            return {str(k): tensor for k, tensor in enumerate(tensors)}

        entry = self._get_or_encode(self.keys.sources(sources, frames), encode)
        return tuple(entry[name] for name in sorted(entry, key=int))

    def _get_or_encode(self, key: str, encode: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The entry from memory, else from disk, else newly encoded."""
        entry = self._memory.pop(key, None) or self._pending.get(key)
        if entry is None and self._shards is not None:
            entry = self._shards.read(key)
        if entry is None:
            entry = encode()
            if self._shards is not None:
                self._pending[key] = entry
                if _bytes(self._pending) >= SHARD_BYTES:
                    self.flush()
        self._memory[key] = entry
        while len(self._memory) > 1 and _bytes(self._memory) > self._most_bytes:
            self._memory.popitem(last=False)
        return entry

    def flush(self) -> None:
        """Write all new entries to disk."""
        if self._shards is not None:
            self._shards.write(self._pending)
            self._pending = {}


def _bytes(entries: dict[str, dict[str, Tensor]]) -> int:
    return sum(tensor.nbytes for tensors in entries.values() for tensor in tensors.values())


def sources_of(prompt: Prompt, sizes: SamplingConfig) -> Sources:
    """A prompt's source images at the output size."""
    return Sources(prompt.source, sizes.height, sizes.width) if prompt.source else NONE


def conditions(
    embeddings: Embeddings, prompts: Sequence[Prompt], sizes: SamplingConfig, device: torch.device
) -> Condition:
    """The batched condition [B, …] of prompts with their source images."""
    asked = [(prompt.text, sources_of(prompt, sizes), prompt.negative) for prompt in prompts]
    unique = list(dict.fromkeys(asked))
    texts, sources, negatives = zip(*unique, strict=True)
    prefetch(sources)
    condition_of = dict(zip(unique, embeddings(texts, sizes, sources, negatives), strict=True))
    return collate([condition_of[one] for one in asked], device)


def negative_text(cfg: Cfg, sampling: Sampling, own: str | None) -> str:
    """The negative prompt of a prompt: its own, the run's, or the family's."""
    if own is not None:
        return own
    return cfg.negative if sampling.negative_prompt is None else sampling.negative_prompt


# ---- everything that a run encodes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodeJob:
    """One text, or one set of source images, to encode."""

    text: str | None
    """None: encode the source images only."""
    sources: Sources = NONE
    frames: int | None = None
    """Frames of the clip, if the latents of the source images depend on them."""

    def key(self, keys: CacheKeys) -> str:
        """The key of the result."""
        return keys.sources(self.sources, self.frames) if self.text is None else keys.text(self.text, self.sources)

    def run(self, embeddings: Embeddings) -> None:
        """Encode it."""
        if self.text is None:
            embeddings.sources(self.sources, self.frames)
        else:
            embeddings.text(self.text, self.sources)


def encoding_jobs(config: Config, trained: Sequence[Prompt], evaluated: Sequence[Prompt] = ()) -> list[EncodeJob]:
    """Everything that a run encodes, without duplicates: prompts, source images and, with guidance, negative prompt.

    If the text encoder sees the source images, prompts and the negative prompt are encoded per source. Raises DataError
    like `check_sources`.
    """
    check_sources(config, trained)
    check_sources(config, evaluated)
    cls = family(config.family)
    evaluation = eval_sampling(config)
    used = [(prompt, prompt_sampling(prompt, config.rollout, config.data.own_sizes)) for prompt in trained]
    jobs: dict[EncodeJob, None] = {}
    for prompt, sizes in [*used, *((prompt, evaluation) for prompt in evaluated)]:
        sources = sources_of(prompt, sizes)
        texts = []
        if cls.cfg is not None and cls.cfg.active(sizes.guidance):
            texts = [negative_text(cls.cfg, sizes, prompt.negative)]
        for text in [*texts, prompt.text]:
            jobs[EncodeJob(text, sources if cls.text_sees_sources else NONE)] = None
        if sources.files:
            frames = (sizes.frames or cls.default_frames) if cls.source_spans_clip else None
            jobs[EncodeJob(None, sources, frames)] = None
    return list(jobs)


def check_sources(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise DataError unless all prompts have a number of source images that the family accepts."""
    cls = family(config.family)
    least, most = int(cls.needs_source), cls.most_sources
    takes = f"{least} to {most} source images" if least < most else "one source image" if most else "no source image"
    if wrong := [p for p in prompts if not least <= len(p.source) <= most]:
        message = (
            f"{config.family} takes {takes} per prompt; {len(wrong)} of {len(prompts)} prompts have another number"
        )
        raise DataError(f"{message}; the first: {wrong[0]} has {len(wrong[0].source)}")


def uncached(config: Config, jobs: list[EncodeJob]) -> list[EncodeJob]:
    """The jobs whose results are not in data.cache yet. Raises ConfigError for a folder that cannot be used."""
    if not config.data.cache:
        return jobs
    cls = family(config.family)
    encoders = folder.encoder_identity(cls.find(config.model))
    area = config.rollout.source_area
    keys = CacheKeys(cls, encoders, DTYPES[config.dtype], config.data.max_length, area)
    shards = Shards(_cache_folder(config))
    return [job for job in jobs if job.key(keys) not in shards]


def _cache_folder(config: Config) -> Path:
    """data.cache as a path. Raises ConfigError unless it is a usable folder or can be created."""
    path = Path(config.data.cache)
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.R_OK | os.X_OK if there == path.absolute() else os.W_OK):
        raise ConfigError([f"data.cache: expected a folder that can be written, got {path} ({there} is not)"])
    return path
