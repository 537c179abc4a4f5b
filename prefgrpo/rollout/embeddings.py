"""Prompt embeddings: each unique prompt is encoded once and cached in memory and, if a folder is given, on disk.

For edits, source images are also encoded once, whatever the prompt; if the text encoder sees them
(`Adapter.text_sees_sources`), texts are cached per source. The key on disk is the hash of (family, encoders, dtype, max
length, content), so any run can use the same folder, and entries never go stale. Invariant: a condition depends only on
its prompt and sources; results with and without the cache are bitwise equal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.models import DTYPES, family, folder
from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.models.condition import collate
from prefgrpo.models.folder import ModelError
from prefgrpo.rollout.sampling import eval_sampling, prompt_sampling

logger = logging.getLogger(__name__)
PER_SHARD, SHARD_BYTES = 64, 256 * 2**20
"""A shard is written when it reaches this number of entries or bytes."""
MODELS_FILE = "models.json"
"""Models whose embeddings are in the cache: fingerprint of all but the encoders → the encoders' fingerprints."""
Sources = tuple[Image.Image, ...]
"""The source images of an edit, in order."""


# ---- on disk --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheKeys:
    """Computes the cache keys of one model."""

    family: type[Adapter]
    fingerprint: str
    """Fingerprint of the encoders (`folder.encoder_fingerprint`)."""
    dtype: torch.dtype
    max_length: int
    source_area: int | None

    def text(self, prompt: str, sources: Sources = ()) -> str:
        """Key of a text's embedding; it includes the sources if the text encoder sees them."""
        seen = b"\0" + _digest(sources) if sources and self.family.text_sees_sources else b""
        return self._name(prompt.encode() + seen)

    def sources(self, sources: Sources, frames: int | None) -> str:
        """Key of the latents of source images; it includes the clip's frame count if the latents depend on it."""
        spanned = self.family.source_spans_clip and (frames or self.family.default_frames)
        return self._name(b"\0sources\0" + (f"{spanned}\0".encode() if spanned else b"") + _digest(sources))

    def _name(self, content: bytes) -> str:
        area = self.family.default_source_area if self.source_area is None else self.source_area
        common = f"{self.family.__name__}:{self.fingerprint}:{self.dtype}:{self.max_length}:{area}"
        return hashlib.sha256(hashlib.sha256(common.encode()).digest() + content).hexdigest()


def _digest(sources: Sources) -> bytes:
    """SHA-256 digests of the images' sizes and pixels, in order."""
    pixels = [image.convert("RGB") for image in sources]
    return b"".join(hashlib.sha256(repr(one.size).encode() + one.tobytes()).digest() for one in pixels)


class Shards:
    """A folder of named tensor groups in safetensors shards; any number of processes may read and write it.

    A shard's name is a hash of its keys. Shards are written atomically, so a killed process loses only what it had not
    yet written. Invariant: reading a key returns exactly the bytes written under it (verified by a checksum in the
    header), or nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shard: dict[str, str] = {}
        """Key → the file that holds it."""
        self._opened: set[str] = set()
        self.scan()

    def __contains__(self, key: str) -> bool:
        return key in self._shard

    def scan(self) -> None:
        """Read the keys of new shards."""
        for name in sorted({file.name for file in self.folder.glob("*.safetensors")} - self._opened):
            self._opened.add(name)
            try:
                with safe_open(self.folder / name, "pt") as file:
                    self._shard.update({k.partition(".")[0]: name for k in file.keys()})  # noqa: SIM118  (no mapping)
            except (OSError, SafetensorError) as error:
                self._damaged(name, error)

    def read(self, key: str) -> dict[str, Tensor] | None:
        """The tensors under a key; None if there are none or the shard is damaged."""
        if key not in self._shard:
            self.scan()  # another process may have written it
        if key not in self._shard:
            return None
        name = self._shard[key]
        try:
            with safe_open(self.folder / name, "pt") as file:
                own = [k for k in file.keys() if k.startswith(f"{key}.")]  # noqa: SIM118  (no mapping)
                tensors = {k.partition(".")[2]: file.get_tensor(k).clone() for k in own}
                written = (file.metadata() or {}).get(key, "")
            if not tensors or written not in ("", _checksum(tensors)):
                raise ValueError(f"the checksum of entry {key[:8]}… does not match")
            return tensors
        except (OSError, ValueError, SafetensorError) as error:
            self._damaged(name, error)
            self._shard = {k: n for k, n in self._shard.items() if n != name}
            return None

    def write(self, content: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add a shard; the same set of keys (without dots) gives the same file name, whichever process writes it."""
        if not content:
            return
        name = hashlib.sha256("\n".join(sorted(content)).encode()).hexdigest()[:32] + ".safetensors"
        tensors = {f"{key}.{k}": v for key in sorted(content) for k, v in content[key].items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / name, save(tensors, {key: _checksum(content[key]) for key in sorted(content)}))
        self._opened.add(name)
        self._shard.update(dict.fromkeys(content, name))

    def _damaged(self, name: str, error: Exception) -> None:
        message = "embedding cache: %s is damaged (%s); its entries are encoded again, so it can be deleted"
        logger.warning(message, self.folder / name, error)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of names and bytes, hex."""
    value = 0
    for name, tensor in sorted(tensors.items()):
        content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        value = zlib.crc32(content, zlib.crc32(name.encode(), value))
    return f"{value:08x}"


# ---- the conditions of prompts --------------------------------------------------------------------------------------


class Embeddings:
    """Conditions by prompt text."""

    def __init__(self, adapter: Adapter, max_length: int, folder: str | Path | None = None, keep: int = 1024) -> None:
        """max_length: in text tokens. folder: the cache on disk. keep: maximum number of entries in memory."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        if folder is not None and not adapter.fingerprint:
            raise ValueError("an embedding folder needs a model loaded from disk: its fingerprint is the key")
        self._adapter, self._max_length, self._keep = adapter, max_length, keep
        self.keys = CacheKeys(type(adapter), adapter.fingerprint, adapter.dtype, max_length, adapter.source_area)
        self._memory: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._shards = None if folder is None else Shards(Path(folder))
        self._pending: dict[str, dict[str, Tensor]] = {}
        self.encoded = 0
        """Number of texts run through the text encoders so far."""

    def __call__(
        self, prompts: Sequence[str], sampling: Sampling, sources: Sequence[Sources] | None = None
    ) -> list[Condition]:
        """One unbatched CPU condition per prompt (and source images), in order; equal texts share their tensors.

        With guidance, each includes the embedding of the negative prompt, encoded once (or once per source).
        """
        asked = zip(prompts, sources or [()] * len(prompts), strict=True)
        conditions = [self._condition(prompt, tuple(own), sampling) for prompt, own in asked]
        self.flush()
        return conditions

    def _condition(self, prompt: str, sources: Sources, sampling: Sampling) -> Condition:
        adapter, condition = self._adapter, self.text(prompt, sources)
        if sources:
            condition = replace(condition, sources=self.sources(sources, sampling.frames))
        if adapter.cfg is not None and adapter.guided(sampling):
            condition = replace(condition, negative=self.text(adapter.cfg.negative, sources))
        return condition

    def text(self, prompt: str, sources: Sources = ()) -> Condition:
        """The embedding of one text; sources are used only if the family's text encoder sees them."""

        def encode() -> dict[str, Tensor]:
            self.encoded += 1
            with self._adapter.offload.on_device("text_encoder"):
                return self._adapter.encode(prompt, self._max_length, sources).tensors()

        return Condition.of_text(self._get_or_encode(self.keys.text(prompt, sources), encode))

    def sources(self, sources: Sources, frames: int | None) -> tuple[Tensor, ...]:
        """The `Condition.sources` of an edit's source images; frames: number of frames of the clip."""

        def encode() -> dict[str, Tensor]:
            with self._adapter.offload.on_device("vae", "text_encoder"):
                tensors = self._adapter.encode_sources(sources, frames)
            return {"source" if k == 1 else f"source_{k}": tensor for k, tensor in enumerate(tensors, 1)}

        kept = self._get_or_encode(self.keys.sources(sources, frames), encode)
        return tuple(kept[name] for name in sorted(kept, key=lambda name: (len(name), name)))

    def _get_or_encode(self, key: str, encode: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The entry from memory, else from disk, else newly encoded."""
        entry = self._memory.pop(key, None) or self._pending.get(key)
        if entry is None and self._shards is not None:
            entry = self._shards.read(key)
        if entry is None:
            entry = encode()
            if self._shards is not None:
                self._pending[key] = entry
                size = sum(tensor.nbytes for pending in self._pending.values() for tensor in pending.values())
                if len(self._pending) >= PER_SHARD or size >= SHARD_BYTES:
                    self.flush()
        self._memory[key] = entry
        if len(self._memory) > self._keep:
            self._memory.popitem(last=False)
        return entry

    def flush(self) -> None:
        """Write all pending entries as one shard."""
        if self._shards is not None:
            self._shards.write(self._pending)
            self._pending = {}


def fitted_sources(prompts: Sequence[Prompt], height: int, width: int) -> list[Sources]:
    """Each prompt's source images, resized and centre-cropped to the output size; each list of files is read once."""
    fitted: dict[tuple[str, ...], Sources] = {}
    for prompt in prompts:
        if prompt.source not in fitted:
            images = prompt.images()
            fitted[prompt.source] = tuple(
                ImageOps.fit(one, (width, height), Image.Resampling.LANCZOS) for one in images
            )
    return [fitted[p.source] for p in prompts]


def conditions(
    embeddings: Embeddings, prompts: Sequence[Prompt], sizes: SamplingConfig, device: torch.device
) -> Condition:
    """The batched condition [B, …] of prompts with their source images."""
    unique = list({(p.text, p.source): p for p in prompts}.values())
    encoded = embeddings([p.text for p in unique], sizes, fitted_sources(unique, sizes.height, sizes.width))
    by = {(p.text, p.source): one for p, one in zip(unique, encoded, strict=True)}
    return collate([by[p.text, p.source] for p in prompts], device)


# ---- everything that a run encodes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodeJob:
    """One text, or one set of source images, to encode."""

    text: str | None
    """None: encode the source images only."""
    source: tuple[str, ...] = ()
    height: int = 0
    width: int = 0
    """Output size, to which the sources are fitted; 0 without sources."""
    frames: int | None = None
    """Frames of the clip, if the latents of the source images depend on them."""

    def images(self) -> Sources:
        """The source images fitted to the output size."""
        return fitted_sources([Prompt(0, self.text or "", source=self.source)], self.height, self.width)[0]


def encoding_jobs(config: Config, trained: Sequence[Prompt], evaluated: Sequence[Prompt] = ()) -> list[EncodeJob]:
    """Everything that a run encodes, without duplicates: prompts, source images and, with guidance, negative prompt.

    If the text encoder sees the source images, prompts and the negative prompt are encoded per source. Raises DataError
    like `check_sources`.
    """
    check_sources(config, trained)
    check_sources(config, evaluated)
    cls, shown = family(config.family), eval_sampling(config)
    used = [(prompt, prompt_sampling(prompt, config.rollout, config.data.own_sizes)) for prompt in trained]
    jobs: dict[EncodeJob, None] = {}
    for prompt, sizes in [*used, *((prompt, shown) for prompt in evaluated)]:
        place = (prompt.source, sizes.height, sizes.width) if prompt.source else ()
        texts = [cls.cfg.negative] if cls.cfg is not None and cls.cfg.active(sizes.guidance) else []
        for text in [*texts, prompt.text]:
            jobs[EncodeJob(text, *(place if cls.text_sees_sources else ()))] = None
        if place:
            frames = (sizes.frames or cls.default_frames) if cls.source_spans_clip else None
            jobs[EncodeJob(None, *place, frames)] = None
    return list(jobs)


def check_sources(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise DataError unless all prompts have the same number of source images, one that the family accepts."""
    cls = family(config.family)
    least, most = int(cls.needs_source), cls.most_sources
    if wrong := [p for p in prompts if not least <= len(p.source) <= most]:
        takes = (
            "no source image"
            if most == 0
            else f"{least} to {most} source images"
            if least < most
            else "one source image"
        )
        message = (
            f"{config.family} takes {takes} per prompt; {len(wrong)} of {len(prompts)} prompts have another number"
        )
        raise DataError(f"{message}; the first: {wrong[0]} has {len(wrong[0].source)}")
    if odd := next((p for p in prompts if len(p.source) != len(prompts[0].source)), None):
        message = "all prompts of a file need the same number of source images, because they share batches"
        raise DataError(f"{message}; {prompts[0]} has {len(prompts[0].source)}, {odd} has {len(odd.source)}")


def uncached(config: Config, jobs: list[EncodeJob]) -> list[EncodeJob]:
    """The jobs not yet in data.cache. Raises ConfigError, or ModelError if they need deleted text encoders."""
    left, cls = jobs, family(config.family)
    if config.data.cache:
        shards, area = Shards(_cache_folder(config)), config.rollout.source_area
        keys = CacheKeys(cls, cached_fingerprint(config), DTYPES[config.dtype], config.data.max_length, area)
        left = [job for job in jobs if _key(keys, job) not in shards]
    if left and folder.lacks_encoders(cls.find(config.model)):
        message = (
            f"the text encoders are not in {config.model}, and {len(left)} of {len(jobs)} texts and sources are not"
        )
        where = config.data.cache or "data.cache, which is not set"
        raise ModelError(f"{message} in {where}, the first: {(left[0].text or left[0].source)!r}")
    return left


def _key(keys: CacheKeys, job: EncodeJob) -> str:
    return keys.sources(job.images(), job.frames) if job.text is None else keys.text(job.text, job.images())


def _cache_folder(config: Config) -> Path:
    """data.cache as a path. Raises ConfigError unless it is a usable folder or can be created."""
    path = Path(config.data.cache)
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.R_OK | os.X_OK if there == path.absolute() else os.W_OK):
        raise ConfigError([f"data.cache: expected a folder that can be written, got {path} ({there} is not)"])
    return path


def cached_fingerprint(config: Config) -> str:
    """Fingerprint of the model's encoders; if they were deleted, the one that `record_encoders` stored for it."""
    path = family(config.family).find(config.model)
    if not folder.lacks_encoders(path):
        return folder.encoder_fingerprint(path)
    noted = _recorded_models(config).get(folder.body_fingerprint(path), [])
    if len(noted) != 1:
        message = f"the text encoders are not in {path}, and {config.data.cache} was filled by {len(noted)} models that"
        raise ModelError(
            f"{message} are otherwise the same; expected one: put them back, or run `prefgrpo preprocess` with them"
        )
    return noted[0]


def record_encoders(config: Config) -> None:
    """Record in data.cache which model its embeddings belong to, so that the text encoders can be deleted."""
    path, noted = family(config.family).find(config.model), _recorded_models(config)
    body, own = folder.body_fingerprint(path), cached_fingerprint(config)
    if own not in noted.setdefault(body, []):
        noted[body].append(own)
        write_atomic(Path(config.data.cache) / MODELS_FILE, json.dumps(noted, indent=1))


def _recorded_models(config: Config) -> dict[str, list[str]]:
    file = Path(config.data.cache) / MODELS_FILE
    return json.loads(file.read_text()) if config.data.cache and file.is_file() else {}
