"""From the configuration to a loaded model, and whether its text encoders are needed at all.

Invariant: a value that the model refuses is a ConfigError that names its field.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from prefgrpo.config.schema import Config, ConfigError, SamplingConfig
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.models import family, folder
from prefgrpo.models import load as load_model
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError
from prefgrpo.rollout.embed import cache_key, clip_frames, salt, source_key, text_key, texts
from prefgrpo.rollout.render import sources
from prefgrpo.rollout.sampling import evaluation, of_prompt
from prefgrpo.rollout.shards import Shards
from prefgrpo.run.checkpoint import write_atomic
from prefgrpo.run.log import quiet_libraries

NOTES = "models.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def config_errors_as(field_name: str) -> Iterator[None]:
    """Inside, a value that the model refuses is a mistake of this field."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except ValueError as error:
        raise ConfigError([f"{field_name}: {error}"]) from error


def misfits(config: Config) -> list[str]:
    """What a family does not take, from its class alone."""
    try:
        cls = family(config.family)
    except ValueError as error:
        return [f"family: {error}"]
    found, unknown = [], set(config.train.target_components) - set(cls.denoisers)
    for name, part in (("rollout", config.rollout), ("eval", config.eval)):
        if part.frames is not None and cls.default_frames is None:
            found.append(f"{name}.frames: {config.family} makes images, expected none, got {part.frames}")
        if part.guidance_2 is not None and cls.default_guidance_2 is None:
            found.append(f"{name}.guidance_2: {config.family} has one denoiser, expected none, got {part.guidance_2}")
    if config.rollout.sigmas == "published" and cls.whole_times:
        found.append(f"rollout.sigmas: {config.family} has no time shift, expected pipeline, got published")
    if config.rollout.source_area is not None and cls.default_source_area is None:
        found.append(f"rollout.source_area: {config.family} resizes no sources, expected none")
    if unknown:
        told = f"expected some of {', '.join(cls.denoisers)}, got {', '.join(sorted(unknown))}"
        found.append(f"train.target_components: {told}")
    return found


def open_adapter(config: Config, device: torch.device, encoders: bool = True) -> Adapter:
    """The model of a run, frozen, its size and frames checked. Raises ConfigError or ModelError."""
    m = config.memory
    quiet_libraries()
    if found := misfits(config):
        raise ConfigError(found)
    with config_errors_as("rollout.frames or rollout.source_area"):
        adapter = load_model(
            config.family,
            config.model,
            DTYPES[config.dtype],
            torch.device("cpu") if m.offload else device,
            encoders=encoders,
            **model_options(config),
        )
    with config_errors_as("rollout.height/width/frames"):
        adapter.latent_shape(config.rollout.height, config.rollout.width)
    with config_errors_as("memory"):
        adapter.vae_options(m.vae_slicing, m.vae_tiling)
    if m.offload:
        adapter.park(m.offload, device)
    if not encoders:
        adapter.source = _encoders(config)
    return adapter


def model_options(config: Config) -> dict[str, Any]:
    """What an adapter takes of the configuration."""
    r = config.rollout
    options = {"guidance": r.guidance, "guidance_2": r.guidance_2, "frames": r.frames}
    return options | {"source_area": r.source_area, "target_components": config.train.target_components}


def trainable(config: Config, adapter: Adapter) -> Adapter:
    """The adapter with what trains switched on. Raises ConfigError."""
    t = config.train
    if t.lora_rank:
        with config_errors_as("train.lora_targets"):
            adapter.add_lora(t.lora_rank, t.lora_alpha, t.lora_targets or None, seed=config.seed)
    else:
        adapter.enable_full()
    if t.gradient_checkpointing:
        adapter.checkpoint_gradients(t.checkpointing_share)
    return adapter


Use = tuple[Prompt, SamplingConfig]
"""A prompt and how a run makes samples of it."""


@dataclass(frozen=True)
class Part:
    """What is encoded at once."""

    text: str | None
    """None: the source images alone."""
    source: tuple[str, ...] = ()
    height: int = 0
    width: int = 0
    """Size of the output, to which the sources are fitted; 0 without sources."""
    frames: int | None = None
    """As `embed.clip_frames`."""

    def images(self, sizes: SamplingConfig) -> tuple[Image.Image, ...]:
        """The source images at the output's size."""
        prompt = Prompt(0, self.text or "", source=self.source)
        return sources([prompt], replace(sizes, height=self.height, width=self.width))[0]


def uses(config: Config, prompts: Iterable[Prompt], held: Iterable[Prompt] = ()) -> list[Use]:
    """All that training (`prompts`) and evaluation (`held`) make samples of. Raises DataError as `check_sources`."""
    prompts, held, shown = list(prompts), list(held), evaluation(config)
    check_sources(config, prompts)
    check_sources(config, held)
    trained = [(prompt, of_prompt(prompt, config.rollout, config.data.own_sizes)) for prompt in prompts]
    return trained + [(prompt, shown) for prompt in held]


def check_sources(config: Config, prompts: list[Prompt]) -> None:
    """All prompts of a file must have as many source images, and as many as the family takes. Raises DataError."""
    with config_errors_as("family"):
        cls = family(config.family)
    least, most = int(cls.needs_source), cls.most_sources
    if wrong := [p for p in prompts if not least <= len(p.source) <= most]:
        told = "no source image" if most == 0 else f"{least} to {most} source images" if least < most else "one"
        told = f"{config.family} takes {told} per prompt, which {len(wrong)} of {len(prompts)} do not have"
        raise DataError(f"{told}; the first: {wrong[0]} has {len(wrong[0].source)}")
    if odd := next((p for p in prompts if len(p.source) != len(prompts[0].source)), None):
        told = "every prompt of a file needs as many source images, because they share batches"
        raise DataError(f"{told}; {prompts[0]} has {len(prompts[0].source)}, {odd} has {len(odd.source)}")


def to_encode(config: Config, used: Iterable[Use]) -> list[Part]:
    """Everything that a run encodes, each once: prompts, with guidance the negative prompt, and source images.

    Where the text encoder sees the source images, a prompt and the negative prompt are one per source.
    """
    with config_errors_as("family"):
        cls = family(config.family)
    found: dict[Part, None] = {}
    for prompt, sizes in used:
        place = (prompt.source, sizes.height, sizes.width) if prompt.source else ()
        seen = place if cls.text_sees_sources else ()
        found |= {Part(text, *seen): None for text in texts(cls, sizes.guidance, [prompt.text])}
        found |= {Part(None, *place, clip_frames(cls, sizes.frames)): None} if place else {}
    return list(found)


def missing(config: Config, used: Iterable[Use]) -> list[Part]:
    """Those of `to_encode` that are not in data.cache. Raises ConfigError or ModelError."""
    needed, cls = to_encode(config, used), family(config.family)
    out = _uncached(config, needed, cls) if config.data.cache else needed
    if out and folder.lacks_encoders(cls.find(config.model)):
        told = f"the text encoders are not in {config.model}, and {len(out)} of {len(needed)} texts and sources are not"
        where = config.data.cache or "data.cache, which is not set"
        raise ModelError(f"{told} in {where}, the first: {(out[0].text or out[0].source)!r}")
    return out


def _uncached(config: Config, needed: list[Part], cls: type[Adapter]) -> list[Part]:
    """Those of `needed` that are not in data.cache."""
    common = salt(cls, _encoders(config), DTYPES[config.dtype], config.data.max_length, config.rollout.source_area)
    place, out = Shards(_cache(config)), []
    for part in needed:
        images = part.images(config.rollout)
        key = source_key(images, part.frames) if part.text is None else text_key(cls, part.text, images)
        if cache_key(common, key) not in place:
            out.append(part)
    return out


def _cache(config: Config) -> Path:
    """data.cache, which is a folder or can become one. Raises ConfigError."""
    path = Path(config.data.cache)
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.R_OK | os.X_OK if there == path.absolute() else os.W_OK):
        raise ConfigError([f"data.cache: expected a folder that can be written, got {path} ({there} is none)"])
    return path


def _encoders(config: Config) -> str:
    """Fingerprint of the model's encoders; where they were deleted, the one that `note_encoders` has of the rest."""
    path = family(config.family).find(config.model)
    if not folder.lacks_encoders(path):
        return folder.encoder_fingerprint(path)
    noted = _notes(config).get(folder.body_fingerprint(path), [])
    if len(noted) != 1:
        told = (
            f"the text encoders are not in {path}, and {config.data.cache} was filled by {len(noted)} models that are"
        )
        raise ModelError(
            f"{told} otherwise the same; expected one: put them back, or run `prefgrpo preprocess` with them"
        )
    return noted[0]


def note_encoders(config: Config) -> None:
    """Note in data.cache whose embeddings it holds, so that the text encoders can be deleted."""
    path, notes = family(config.family).find(config.model), _notes(config)
    body, own = folder.body_fingerprint(path), _encoders(config)
    if own not in notes.setdefault(body, []):
        notes[body].append(own)
        write_atomic(Path(config.data.cache) / NOTES, json.dumps(notes, indent=1))


def _notes(config: Config) -> dict[str, list[str]]:
    """Models whose embeddings are in data.cache: what they are beside their encoders → the encoders' fingerprints."""
    file = Path(config.data.cache) / NOTES
    return json.loads(file.read_text()) if config.data.cache and file.is_file() else {}
