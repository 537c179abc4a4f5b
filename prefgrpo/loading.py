"""From the configuration to a loaded model, and whether its text encoders are needed at all.

Invariant: a value that the model refuses is a ConfigError that names its field.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from prefgrpo.config import Config, ConfigError
from prefgrpo.config import Rollout as Sizes
from prefgrpo.data import DataError, Prompt
from prefgrpo.embed import cache_key, clip_frames, salt, source_key, text_key, texts
from prefgrpo.models import family, folder
from prefgrpo.models import load as load_model
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError
from prefgrpo.render import sources
from prefgrpo.sampling import evaluation, of_prompt
from prefgrpo.shards import Shards

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _TruncatedOnce(logging.Filter):
    """Lets diffusers say once per encoder that a prompt was cut, not once per prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be shown."""
        head, _, cut = record.getMessage().partition(":")
        if "truncated" not in head or not cut:
            return True
        first = head not in self.said
        self.said.add(head)
        record.msg, record.args = f"{head} (said once; data.max_length is the limit of the long encoder):{cut}", ()
        return first


def _calm() -> None:
    """Say a cut prompt once; draw the libraries' progress bars on a terminal only."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for handler in logging.getLogger("diffusers").handlers:
        handler.addFilter(_TruncatedOnce())
    if not sys.stderr.isatty():
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()


@contextmanager
def names(field_name: str) -> Iterator[None]:
    """Inside, a value that the model refuses is a mistake of this field."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except ValueError as error:
        raise ConfigError([f"{field_name}: {error}"]) from error


def open_adapter(config: Config, device: torch.device, encoders: bool = True) -> Adapter:
    """The model of a run, frozen, its size and frames checked. Raises ConfigError or ModelError."""
    r, m = config.rollout, config.memory
    _calm()
    with names("family"):
        family(config.family)
    with names("rollout.frames, rollout.guidance_2, rollout.source_area or train.target_components"):
        adapter = load_model(
            config.family,
            config.model,
            DTYPES[config.dtype],
            torch.device("cpu") if m.offload else device,
            guidance=r.guidance,
            shift=r.shift,
            frames=r.frames,
            guidance_2=r.guidance_2,
            source_area=r.source_area,
            target_components=config.train.target_components,
            encoders=encoders,
        )
    with names("rollout.height/width/frames"):
        adapter.latent_shape(r.height, r.width)
    with names("memory"):
        adapter.vae_options(m.vae_slicing, m.vae_tiling)
    if m.offload:
        adapter.park(m.offload, device)
    return adapter


Use = tuple[Prompt, Sizes]
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

    def images(self, sizes: Sizes) -> tuple[Image.Image, ...]:
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
    with names("family"):
        cls = family(config.family)
    least, most = int(cls.needs_source), cls.most_sources
    for prompt in prompts:
        if not least <= (count := len(prompt.source)) <= most:
            told = "no source image" if most == 0 else f"{least} to {most} source images" if least < most else "one"
            raise DataError(
                f"{config.family} takes {told} per prompt; prompt {prompt.id + 1} has {count}: {prompt.text!r}"
            )
        if count != len(prompts[0].source):
            raise DataError(
                f"every prompt of a file needs as many source images, because they share batches; prompt 1 has "
                f"{len(prompts[0].source)}, prompt {prompt.id + 1} has {count}: {prompt.text!r}"
            )


def to_encode(config: Config, used: Iterable[Use]) -> list[Part]:
    """Everything that a run encodes, each once: prompts, with guidance the negative prompt, and source images.

    Where the text encoder sees the source images, a prompt and the negative prompt are one per source.
    """
    with names("family"):
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
    needed = to_encode(config, used)
    if not config.data.cache:
        return needed
    cls = family(config.family)
    fingerprint = folder.encoder_fingerprint(folder.resolve(config.model, cls.pipeline))
    common = salt(cls, fingerprint, DTYPES[config.dtype], config.data.max_length, config.rollout.source_area)
    place, out = Shards(Path(config.data.cache)), []
    for part in needed:
        images = part.images(config.rollout)
        key = source_key(images, part.frames) if part.text is None else text_key(cls, part.text, images)
        if cache_key(common, key) not in place:
            out.append(part)
    return out
