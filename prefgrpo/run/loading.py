"""Opens the parts of a run that depend on the model: the model, the policy, its schedules and its gradients.

Invariant: a value that the model rejects raises a ConfigError that names its field.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import DataError
from prefgrpo.models import DTYPES, family
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError, locate
from prefgrpo.objectives.base import EndpointObjective, Objective, TrajectoryObjective
from prefgrpo.parallel import attention_backend
from prefgrpo.parallel.gradient_checkpointing import KEEPING, keep_attention
from prefgrpo.parallel.parallelize import context_errors, parallelize
from prefgrpo.parallel.world import Layout, World
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.run import checkpoint
from prefgrpo.run.fits import model_bytes, refusal, static_bytes, stored_bytes, whole_gradients
from prefgrpo.update.endpoint import EndpointGradients
from prefgrpo.update.gradients import Gradients
from prefgrpo.update.policy import Policy
from prefgrpo.update.trajectory import TrajectoryGradients

T = TypeVar("T")


@contextmanager
def config_errors_as(field_name: str) -> Iterator[None]:
    """Context that turns a ValueError into a ConfigError for this field."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except ValueError as error:
        raise ConfigError([f"{field_name}: {error}"]) from error


@contextmanager
def garbage_frozen() -> Iterator[None]:
    """Context in which Python's garbage collector ignores all objects that existed on entry.

    After importing torch, diffusers and transformers there are half a million, and a full collection visits each.
    Processes collect at different times, and every time all others wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which diffusers shows its progress bars on a terminal only."""
    from diffusers.utils import logging

    hidden = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def unsupported(config: Config) -> list[str]:
    """Errors for options that the family does not support, found from its class alone."""
    try:
        cls = family(config.family)
    except ValueError as error:
        return [f"family: {error}"]
    layout = Layout(ring=config.parallel.ring, ulysses=config.parallel.ulysses)
    errors = attention_backend.unsupported(cls, config.family, config.attention, layout)
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
    return errors


def outline(config: Config) -> Adapter:
    """The run's model without weights (`Adapter.outline`). Raises ModelError."""
    cls = family(config.family)
    with _quiet():
        return cls.outline(cls.find(config.model))


def open_adapter(config: Config, device: torch.device, encoders: bool = True, mapped: bool = False) -> Adapter:
    """The run's model, frozen, after checking sizes and schedules. Raises ConfigError or ModelError.

    mapped: leave the denoisers in the mapped files of the checkpoint, for `parallelize` to shard or to keep in fp8.
    """
    if errors := unsupported(config):
        raise ConfigError(errors)
    cls = family(config.family)
    with _quiet():
        check_sizes(config, cls.outline(cls.find(config.model)))
        adapter = cls.load(
            config.model,
            DTYPES[config.dtype],
            device,
            encoders=encoders,
            mapped=mapped,
            offload=config.offload,
            source_area=config.rollout.source_area,
            guidance_gradient=config.train.guidance_gradient,
        )
    if config.vae_tiling:
        adapter.pipe.vae.enable_tiling()
    return adapter


def check_sizes(config: Config, outline: Adapter) -> None:
    """Raise ConfigError for a size, a number of frames or of steps that the model does not have."""
    for section, sizes in {"rollout": config.rollout, "eval": config.eval_sampling}.items():
        with config_errors_as(f"{section}.height/width/frames"):
            outline.latent_shape(sizes)
    with config_errors_as("rollout.steps"):
        schedules = Schedules(config, outline, torch.device("cpu"))
        schedules.ode(config.rollout)
    schedules.check()
    with config_errors_as("eval.steps"):
        schedules.ode(config.eval_sampling)


def load_checkpoint(adapter: Adapter, path: Path, averaged: bool, world: World) -> None:
    """Read the trained weights of a checkpoint, or their EMA, into an adapter that is ready to train.

    Raises CheckpointError, on all ranks.
    """
    prefix = "ema." if averaged else "param."
    checkpoint.read(path, {prefix + name: p.detach() for name, p in adapter.trainable()}, world)


def open_model(config: Config, objective: Objective, world: World, encoders: bool) -> tuple[Adapter, Policy]:
    """(the model ready to train, its policy), after checking that it fits, and that sizes can be split. Raises
    ConfigError."""
    parts = model_bytes(config, locate(config.model), encoders) if world.device.type == "cuda" else {}
    _check_memory(parts, world.device)
    adapter = open_adapter(config, world.device, encoders, world.layout.fsdp or config.fp8_base)
    shape = adapter.latent_shape(config.rollout)
    _check_memory(parts | {"stored samples": stored_bytes(config, shape, world.layout, world.size)}, world.device)
    problems: list[str] = []
    for sizes, field in {config.eval_sampling: "eval", config.rollout: "rollout"}.items():
        problems += context_errors(adapter, field, sizes, config.data.max_length, world.layout)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    parallelize(adapter, config, world)
    return adapter, open_policy(config, objective, adapter)


def _check_memory(parts: Mapping[str, int], device: torch.device) -> None:
    """Raise ConfigError if so many bytes do not fit on the GPU."""
    if device.type == "cuda" and (why := refusal(parts, torch.cuda.get_device_properties(device).total_memory)):
        raise ConfigError([why])


def open_prompts(read: Callable[..., T], world: World) -> T:
    """`read(decode=…)`: only rank 0 decodes all source images, and what it refuses ends all ranks. Raises DataError."""
    found = world.on_main(partial(read, decode=True), DataError)
    return read(decode=False) if found is None else found


def open_policy(config: Config, objective: Objective, adapter: Adapter) -> Policy:
    """The trained weights, with the copies that the objective needs: of an old policy, and of the reference
    policy, where that is not the model without its LoRA."""
    t = config.train
    old = objective.compares_with == "old" or objective.sampled_by_old
    reference = t.swaps_reference and (objective.compares_with == "reference" or t.kl_coef > 0)
    return Policy(dict(adapter.trainable()), t, old, reference)


def open_schedules(config: Config, adapter: Adapter, world: World) -> Schedules:
    """The schedules of a run."""
    return Schedules(config, adapter, world.device)


def open_gradients(config: Config, objective: Objective, adapter: Adapter, policy: Policy, world: World) -> Gradients:
    """The objective's gradients; also lets recomputed blocks keep attention. Raises ConfigError for a `times` that a
    family with several denoisers rejects."""

    def reference() -> AbstractContextManager[None]:
        return policy.use_weights(policy.reference) if config.train.swaps_reference else adapter.reference()

    once = reduces_once(config, adapter, policy, world)
    if config.attention in KEEPING and not config.compile:
        blocks = [block for net in adapter.modules().values() for block in adapter.blocks(net)]
        keep_attention(blocks, attention_limit(config, adapter, policy, world, once))
    if isinstance(objective, TrajectoryObjective):
        return TrajectoryGradients(adapter, objective, config, reference, world, once)
    assert isinstance(objective, EndpointObjective)
    if len(adapter.denoisers) > 1 and objective.times not in ("window", "schedule"):
        which = f"{config.family} has a denoiser for each part of the schedule: expected window or schedule"
        raise ConfigError([f"train.objective_options.times: {which}, got {objective.times}"])
    old = partial(policy.use_weights, policy.old)
    return EndpointGradients(adapter, objective, config, reference, world, once, old=old)


def reduces_once(config: Config, adapter: Adapter, policy: Policy, world: World) -> bool:
    """Whether an update sums the gradients of sharded weights once, as half of the memory of every GPU holds whole
    gradients too (`whole_gradients`); the other half is for activations. A run that is resumed decides alike.

    Never with several denoisers, one of which an update's last backward does not run.
    """
    whole = whole_gradients(policy)
    if not whole or not world.equal_forwards or len(adapter.denoisers) > 1:
        return False
    needed = held_bytes(config, adapter, policy, world) + whole
    full = world.device.type == "cuda" and needed > torch.cuda.get_device_properties(world.device).total_memory / 2
    return not world.any(full)


def held_bytes(config: Config, adapter: Adapter, policy: Policy, world: World) -> int:
    """Bytes that a process holds during an update, without activations and unsharded gradients (`whole_gradients`)."""
    stored = stored_bytes(config, adapter.latent_shape(config.rollout), world.layout, world.size)
    return sum(static_bytes(adapter, policy).values()) + stored


def attention_limit(config: Config, adapter: Adapter, policy: Policy, world: World, once: bool) -> float:
    """Bytes of attention outputs that recomputed blocks may keep: a quarter of the GPU memory that is left, times their
    share of the blocks, as the others keep everything. Their inputs take another quarter; half remains for the running
    block's activations and for what is not counted. Changes no result."""
    if world.device.type != "cuda":
        return math.inf
    memory = torch.cuda.get_device_properties(world.device).total_memory
    held = held_bytes(config, adapter, policy, world) + once * whole_gradients(policy)
    return max(memory - held, 0) / 4 * config.train.gradient_checkpointing
