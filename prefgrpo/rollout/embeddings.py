"""Prompt embeddings: each text, set of source images and sample from a file is encoded once, and kept in memory and on
disk.

The key is (model, dtype, max length, text), so any run can use the same folder; the model is named by hub id and
commit, or by the files of its encoders. If the text encoder sees the source images (`Adapter.text_sees_sources`), they
belong to the text's key. Invariant: a condition depends only on its prompt and sources; results with and without the
folder are bitwise equal.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.models import DTYPES, family
from prefgrpo.models.base import Adapter, Condition
from prefgrpo.models.folder import encoder_identity
from prefgrpo.rollout import samples
from prefgrpo.rollout.embedding_cache import EmbeddingCache, nbytes
from prefgrpo.rollout.samples import Fitted
from prefgrpo.rollout.source_images import NONE, SourceImages, prefetch, sources_of

FORMAT = "2"
"""Format of stored entries; those of another format are encoded again."""
MEMORY_BYTES = 2**31
"""Maximum bytes of entries that a process keeps in memory."""


@dataclass(frozen=True)
class Entry:
    """What is encoded together and stored under one key: a text, the source images of an edit, or a sample."""

    text: str | None
    """None: the source images, or the sample."""
    sources: SourceImages = NONE
    """With a text: the source images that its encoder sees."""
    frames: int | None = None
    """With source images of a clip: its frames, on which their latents may depend."""
    sample: Fitted | None = None
    """An image or a clip to train on."""

    def key(self, model: str) -> str:
        """The entry's name in memory and on disk; model: `Embeddings.model`."""
        content = [FORMAT, model, repr(self.text), self.sources.identity(), str(self.frames)]
        content += [] if self.sample is None else [self.sample.identity()]
        return hashlib.sha256("\0".join(content).encode()).hexdigest()


class PromptEntries(NamedTuple):
    """The entries that make the condition of a prompt."""

    text: Entry
    negative: Entry | None
    sources: Entry | None


def entries_of(
    cls: type[Adapter], prompt: Prompt, sources: SourceImages, sampling: SamplingConfig, guided: bool
) -> PromptEntries:
    """What a family encodes of a prompt and its `sources`; if `guided`, also its negative prompt, else the run's, else
    the family's."""
    seen = sources if cls.text_sees_sources else NONE
    negative = None
    if guided and cls.cfg is not None:
        of_run = cls.cfg.negative if sampling.negative_prompt is None else sampling.negative_prompt
        negative = Entry(of_run if prompt.negative is None else prompt.negative, seen)
    latents = Entry(None, sources, sampling.frames or cls.default_frames) if sources.files else None
    return PromptEntries(Entry(prompt.text, seen), negative, latents)


class Embeddings:
    """The conditions of prompts for the model of a run."""

    def __init__(self, config: Config, most_bytes: int = MEMORY_BYTES) -> None:
        """most_bytes: limit of entries in memory. Raises ConfigError for a data.cache that cannot be used."""
        cls = family(config.family)
        self._max_length = config.data.max_length
        self._most_bytes = most_bytes
        self._memory: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._cache: EmbeddingCache | None = None
        self.model = ""
        """What the entries of a model depend on besides their content."""
        if config.data.cache:
            encoders = encoder_identity(cls.find(config.model))
            area = cls.default_source_area if config.rollout.source_area is None else config.rollout.source_area
            facts = (cls.__name__, encoders, DTYPES[config.dtype], self._max_length, area)
            self.model = "\0".join([*map(str, facts), *["tiled"] * config.vae_tiling])
            cache = Path(config.data.cache)
            try:
                cache.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    [f"data.cache: expected a folder that can be written, got {cache}: {error}"]
                ) from error
            self._cache = EmbeddingCache(cache)
        self.encoded = 0
        """Number of texts run through the text encoders so far."""

    def __call__(self, adapter: Adapter, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Condition]:
        """One unbatched CPU condition per prompt, with its source images at the output size and, with guidance, its
        negative prompt; in order. Equal texts are encoded once and share their tensors."""
        cls = type(adapter)
        guided = adapter.guided(sampling)
        wanted = [entries_of(cls, prompt, sources_of(prompt, sampling), sampling, guided) for prompt in prompts]
        return self.conditions(adapter, wanted)

    def conditions(self, adapter: Adapter, wanted: Sequence[PromptEntries]) -> list[Condition]:
        """The conditions of prompts from their entries."""
        tensors = self.get(adapter, (entry for entries in wanted for entry in entries if entry is not None))
        return [_condition(entries, tensors) for entries in wanted]

    def absent(self, entries: Iterable[Entry]) -> list[Entry]:
        """The entries that are not in data.cache yet."""
        return [entry for entry in entries if self._cache is None or entry.key(self.model) not in self._cache]

    def get(self, adapter: Adapter, entries: Iterable[Entry]) -> dict[Entry, dict[str, Tensor]]:
        """The tensors of entries, on the CPU: from memory, else from disk, else newly encoded, with offloaded encoders
        on the device."""
        keys = {entry: entry.key(self.model) for entry in entries}
        stored = {entry: self._find(key) for entry, key in keys.items()}
        found = {entry: tensors for entry, tensors in stored.items() if tensors is not None}
        absent = [entry for entry in keys if entry not in found]
        prefetch(entry.sources for entry in absent)
        with adapter.on_device(*(("text_encoder", "vae") if absent else ())):
            for number, entry in enumerate(absent):
                samples.prefetch(later.sample for later in absent[number : number + samples.KEPT] if later.sample)
                found[entry] = self._encode(adapter, entry)
                if self._cache is not None:
                    self._cache.add(keys[entry], found[entry])
        self._memory |= {keys[entry]: tensors for entry, tensors in found.items()}
        while len(self._memory) > 1 and nbytes(self._memory) > self._most_bytes:
            self._memory.popitem(last=False)
        return found

    def latents(self, adapter: Adapter, entries: Sequence[Entry]) -> list[Tensor]:
        """The latents of samples, in order, each as one sample of a rollout has them, on the CPU."""
        found = self.get(adapter, entries)
        return [found[entry]["0"] for entry in entries]

    def _find(self, key: str) -> dict[str, Tensor] | None:
        tensors = self._memory.pop(key, None)
        if tensors is None and self._cache is not None:
            tensors = self._cache.read(key)
        return tensors

    def _encode(self, adapter: Adapter, entry: Entry) -> dict[str, Tensor]:
        if entry.sample is not None:
            return {"0": adapter.encode_media(entry.sample.pixels())}
        images = entry.sources.images()
        if entry.text is None:
            latents = adapter.encode_sources(images, entry.frames)
            return {str(k): tensor for k, tensor in enumerate(latents)}
        self.encoded += 1
        return adapter.encode(entry.text, self._max_length, images).tensors()

    def flush(self) -> None:
        """Write all new entries to disk."""
        if self._cache is not None:
            self._cache.flush()


def _condition(entries: PromptEntries, tensors: Mapping[Entry, Mapping[str, Tensor]]) -> Condition:
    """A prompt's condition from the tensors of its entries."""
    latents = {} if entries.sources is None else tensors[entries.sources]
    sources = tuple(latents[name] for name in sorted(latents, key=int))
    negative = None if entries.negative is None else Condition.of_text(tensors[entries.negative])
    return Condition.of_text(tensors[entries.text], sources=sources, negative=negative)


def run_entries(config: Config, trained: Sequence[Prompt], evaluated: Sequence[Prompt] = ()) -> list[Entry]:
    """Everything that a run encodes, without duplicates. Raises DataError like `check_sources`."""
    cls = family(config.family)
    found: dict[Entry, None] = {}
    for prompts, sampling in ((trained, config.rollout), (evaluated, config.eval_sampling)):
        check_sources(config, prompts)
        guided = cls.cfg is not None and cls.cfg.active(sampling.guidance)
        for prompt in prompts:
            entries = entries_of(cls, prompt, sources_of(prompt, sampling), sampling, guided)
            found |= {entry: None for entry in entries if entry is not None}
    return list(found)


def check_sources(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise DataError unless all prompts have a number of source images that the family accepts."""
    cls = family(config.family)
    least = int(cls.needs_source)
    if wrong := [p for p in prompts if not least <= len(p.source) <= cls.most_sources]:
        takes = f"{config.family} takes {least} to {cls.most_sources} source images per prompt"
        message = f"{len(wrong)} of {len(prompts)} prompts have another number"
        raise DataError(f"{takes}; {message}; the first: {wrong[0]} has {len(wrong[0].source)}")
