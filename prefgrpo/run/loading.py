"""Loads the model of a configuration.

Invariant: a value that the model rejects raises a ConfigError that names its field.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.models import DTYPES, family
from prefgrpo.models import load as load_model
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError
from prefgrpo.models.vae import tile
from prefgrpo.parallel import attention, context
from prefgrpo.parallel.mesh import Layout
from prefgrpo.parallel.world import World
from prefgrpo.run import checkpoint
from prefgrpo.run.log import quiet_libraries


@contextmanager
def config_errors_as(field_name: str) -> Iterator[None]:
    """Context that turns a ValueError into a ConfigError for this field."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except ValueError as error:
        raise ConfigError([f"{field_name}: {error}"]) from error


def unsupported(config: Config) -> list[str]:
    """Errors for options that the family does not support, found from its class alone."""
    try:
        cls = family(config.family)
    except ValueError as error:
        return [f"family: {error}"]
    p, unknown = config.parallel, set(config.train.target_components) - set(cls.denoisers)
    layout = Layout(ring=p.ring, ulysses=p.ulysses)
    errors = context.unsupported(cls, config.family, layout)
    errors += attention.unsupported(cls, config.family, config.attention, layout)
    r = config.rollout
    if r.frames is not None and cls.default_frames is None:
        errors.append(f"rollout.frames: {config.family} makes images, expected none, got {r.frames}")
    if r.guidance_2 is not None and cls.default_guidance_2 is None:
        errors.append(f"rollout.guidance_2: {config.family} has one denoiser, expected none, got {r.guidance_2}")
    if r.negative_prompt is not None and (cls.cfg is None or not cls.cfg.active(r.guidance)):
        why = f"guidance {r.guidance:g} is off" if cls.cfg else f"{config.family} has no classifier-free guidance"
        errors.append(f"rollout.negative_prompt: {why}, expected none, got {r.negative_prompt!r}")
    if r.source_area is not None and cls.default_source_area is None:
        errors.append(f"rollout.source_area: {config.family} resizes no sources, expected none")
    if unknown:
        expected = f"expected some of {', '.join(cls.denoisers)}"
        errors.append(f"train.target_components: {expected}, got {', '.join(sorted(unknown))}")
    return errors


def open_adapter(config: Config, device: torch.device, encoders: bool = True, split: bool = False) -> Adapter:
    """The run's model, frozen, after checking image size and frames. Raises ConfigError or ModelError.

    split: leave the denoisers in the mapped files of the checkpoint, for `parallelize` to shard.
    """
    m = config.memory
    quiet_libraries()
    if errors := unsupported(config):
        raise ConfigError(errors)
    with config_errors_as("rollout.source_area"):
        adapter = load_model(
            config.family,
            config.model,
            DTYPES[config.dtype],
            device,
            encoders=encoders,
            split=split,
            offload=m.offload,
            **model_options(config),
        )
    with config_errors_as("rollout.height/width/frames"):
        adapter.latent_shape(config.rollout)
    if m.vae_tiling:
        with config_errors_as("memory.vae_tiling"):
            tile(adapter.pipe.vae)
    return adapter


def model_options(config: Config) -> dict[str, Any]:
    """The configuration's keyword arguments for an adapter."""
    return {
        "source_area": config.rollout.source_area,
        "target_components": config.train.target_components,
        "guidance_gradient": config.train.guidance_gradient,
    }


def load_checkpoint(adapter: Adapter, path: Path, averaged: bool, world: World) -> None:
    """Read the trained weights of a checkpoint, or their EMA, into an adapter that is ready to train.

    Raises CheckpointError, on all ranks.
    """
    prefix = "ema." if averaged else "param."
    checkpoint.read(path, {prefix + name: p.detach() for name, p in adapter.trainable()}, world)
