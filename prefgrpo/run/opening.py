"""Opens a run, in the same order for training and `--dry-run`: prompts before this, then the model, its policy, the
schedules, the groups of its steps and the gradients; and the weights that `generate`, `evaluate` and `export` name.

Invariant: a value that the model rejects raises a ConfigError that names its field.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prefgrpo.config.recipe import ConfigError, UserError
from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import Prompt, fingerprint
from prefgrpo.data.writer import Writer
from prefgrpo.models import DTYPES, family, makes_clips
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError, locate
from prefgrpo.models.weights import locate_lora
from prefgrpo.objectives import make_objective
from prefgrpo.objectives.base import EndpointObjective, Objective, TrajectoryObjective
from prefgrpo.parallel.attention_backend import set_backend
from prefgrpo.parallel.gradient_checkpointing import KEEPING, keep_attention
from prefgrpo.parallel.parallelize import parallelize
from prefgrpo.parallel.world import World
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.plan import Groups
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.run import checkpoint
from prefgrpo.run.errors import model_errors, refuse, window_errors
from prefgrpo.run.evaluation import Evaluator, eval_sets
from prefgrpo.run.folder import RunFolder, run_of
from prefgrpo.run.source import Source
from prefgrpo.update.endpoint import EndpointGradients
from prefgrpo.update.gradients import Gradients
from prefgrpo.update.memory import attention_limit, certain_bytes, check_memory, reduces_once, stored_bytes
from prefgrpo.update.policy import Policy
from prefgrpo.update.trajectory import TrajectoryGradients


@dataclass(frozen=True)
class Run:
    """The opened parts of a run that do not depend on how it ends: in training, or after one batch."""

    config: Config
    world: World
    source: Source
    embeddings: Embeddings
    absent: int
    """Number of entries that `embeddings` did not find in data.cache."""
    objective: Objective
    adapter: Adapter
    """The model, ready to train."""
    policy: Policy
    schedules: Schedules
    groups: Groups
    gradients: Gradients


def open_run(config: Config, world: World, source: Source) -> Run:
    """Open the model of a run, ready to train, and all that depends on it. Raises ConfigError, ModelError."""
    embeddings = Embeddings(config)
    absent = len(embeddings.absent(source.entries()))
    objective = make_objective(config.train)
    adapter = _open_to_train(config, world, encoders=absent > 0)
    policy = open_policy(config, objective, adapter)
    schedules = Schedules(config, adapter, world.device)
    groups = source.open_groups(adapter, embeddings, schedules, world)
    gradients = open_gradients(config, objective, adapter, policy, world)
    return Run(config, world, source, embeddings, absent, objective, adapter, policy, schedules, groups, gradients)


def _open_to_train(config: Config, world: World, encoders: bool) -> Adapter:
    """The model, ready to train, after checking that what is certain fits into the GPU's memory."""
    parts = certain_bytes(config, locate(config.model), encoders) if world.device.type == "cuda" else {}
    check_memory(parts, world.device)
    adapter = open_adapter(config, world.device, encoders, world.layout.fsdp or config.fp8_base)
    refuse(window_errors(config, adapter))
    stored = stored_bytes(config, adapter.latent_shape(config.rollout), world.layout, world.size)
    check_memory(parts | {"stored samples": stored}, world.device)
    parallelize(adapter, config, world)
    return adapter


def open_adapter(config: Config, device: torch.device, encoders: bool = True, mapped: bool = False) -> Adapter:
    """The model, frozen. Raises ConfigError, for sizes and steps that it does not have, or ModelError.

    mapped: leave the denoisers in the mapped files of the checkpoint, for `parallelize` to shard or to keep in fp8.
    """
    refuse(model_errors(config, download=True))
    adapter = family(config.family).load(
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


def open_policy(config: Config, objective: Objective, adapter: Adapter) -> Policy:
    """The trained weights, with the copies that the objective needs: of an old policy, and of the reference policy,
    where that is not the model without its LoRA."""
    t = config.train
    old = objective.compares_with == "old" or objective.sampled_by_old
    reference = t.swaps_reference and (objective.compares_with == "reference" or t.kl_coef > 0)
    return Policy(dict(adapter.trainable()), t, old, reference)


def open_evaluators(run: Run, scorer: Scorer, folder: RunFolder, writer: Writer) -> dict[str, Evaluator]:
    """Evaluation set → what renders and compares it."""
    found: dict[str, Evaluator] = {}
    for eval_set in eval_sets(run.config, run.source.sets):
        parts = (run.adapter, run.schedules, run.embeddings, scorer, run.world, folder, writer)
        found[eval_set.name] = Evaluator(eval_set, run.config.eval_sampling, *parts)
    if "dev" in found:
        found["dev"].pairs = run.source.held_out_pairs(run.groups, run.gradients, folder)
    return found


def open_gradients(config: Config, objective: Objective, adapter: Adapter, policy: Policy, world: World) -> Gradients:
    """The objective's gradients; also lets recomputed blocks keep attention."""

    def reference() -> AbstractContextManager[None]:
        return policy.use_weights(policy.reference) if config.train.swaps_reference else adapter.reference()

    once = reduces_once(config, adapter, policy, world)
    if config.attention in KEEPING and not config.compile:
        blocks = [block for net in adapter.modules().values() for block in adapter.blocks(net)]
        keep_attention(blocks, attention_limit(config, adapter, policy, world, once))
    if isinstance(objective, TrajectoryObjective):
        return TrajectoryGradients(adapter, objective, config, reference, world, once)
    assert isinstance(objective, EndpointObjective)
    old = partial(policy.use_weights, policy.old)
    return EndpointGradients(adapter, objective, config, reference, world, once, old=old)


@contextmanager
def garbage_frozen() -> Iterator[None]:
    """Context in which Python's garbage collector ignores all objects that existed on entry.

    After importing torch, diffusers and transformers there are half a million, and a full collection visits each.
    Processes collect at different times, and each time all the others wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ---- the weights that a command names -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Which weights a command samples with: a configured model's own, with a LoRA, or those of a checkpoint."""

    config: Config
    label: str = "base"
    """Used in folder names."""
    lora: Path | None = None
    """File or folder of a trained LoRA."""
    checkpoint: Path | None = None
    """Folder of a checkpoint, RUN/checkpoints/step_NNNNNN, of the configured run; its EMA is used if it has one."""
    as_trained: bool = False
    """Open the model as for training: with its trainable weights and attention backend, split over processes."""

    def frame_rate(self, fps: float | None) -> float | None:
        """Frames per second of the clips: `fps`, or else those of the family; None for images. Raises ConfigError."""
        if not makes_clips(self.config):
            return None
        if rate := fps or family(self.config.family).frame_rate:
            return rate
        raise ConfigError([f"--fps: expected frames per second, as {self.config.family} has no frame_rate"])

    def facts(self, prompts: Sequence[Prompt], fps: float | None, **more: Any) -> dict[str, Any]:
        """Everything that determines the files that are made for these prompts."""
        c = self.config
        facts = {
            "model": c.model,
            "weights": self.label,
            "lora_from": c.train.lora_from or None,
            "dtype": c.dtype,
            "fp8_base": c.fp8_base and self.as_trained,
            "seed": c.seed,
            "max_length": c.data.max_length,
            "prompts": fingerprint(prompts),
            "fps": self.frame_rate(fps),
            "sampling": {k: v for k, v in asdict(c.eval_sampling).items() if k != "batch_size"},
        }
        if self.checkpoint is not None:
            facts["written"] = checkpoint.read_meta(self.checkpoint)["written"]
        if self.lora is not None:
            files = [self.lora] if self.lora.is_file() else self.lora.rglob("*.safetensors")
            facts["written"] = max((file.stat().st_mtime_ns for file in files), default=0)
        return facts | more

    def open(self, world: World, encoders: bool) -> Adapter:
        """The model with these weights. Raises ConfigError, ModelError or CheckpointError."""
        mapped = self.as_trained and (world.layout.fsdp or self.config.fp8_base)
        adapter = open_adapter(self.config, world.device, encoders, mapped)
        if self.as_trained:
            parallelize(adapter, self.config, world)
        else:
            set_backend(adapter, self.config, world.layout, world.device)
        if self.checkpoint is not None:
            load_checkpoint(adapter, self.checkpoint, self.config.train.ema_decay > 0, world)
        if (lora := self.lora) is not None:
            try:
                adapter.load_lora(str(lora))
            except (FileNotFoundError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).splitlines()[:2])
                raise ModelError(f"--lora {lora}: it does not fit {self.config.model}: {reason}") from error
        return adapter


def weights_of(config: Config, target: str, world: World, lora: Path | None = None) -> Weights:
    """The weights of a target: the checkpoint that it names, or the newest of a run; otherwise the configured model's
    own, with a LoRA if one is given.

    Which one is the newest is decided by rank 0, as the run may be writing checkpoints. Raises UserError.
    """
    run = run_of(Path(target))
    if run is None and lora is None:
        p = config.parallel
        split = p.shard * p.ring * p.ulysses > 1
        return Weights(config, as_trained=split or bool(config.train.lora_from))
    if run is None:
        try:
            return Weights(config, str(lora), locate_lora(str(lora), family(config.family).denoisers[1:]))
        except (OSError, ValueError) as error:  # ValueError: a name that the hub does not allow
            raise ModelError(f"--lora {lora}: {error}") from error
    found = world.on_main(lambda: run.checkpoint_of(Path(target)), UserError)
    if lora is not None:
        raise ConfigError([f"--lora: {target} has weights of its own; expected a recipe or a model with it"])
    newest = world.all_gather_object(found)[0]
    assert newest is not None
    label = f"{newest.name}_{'ema' if config.train.ema_decay else 'live'}"
    return Weights(config, label, checkpoint=newest, as_trained=True)


def load_checkpoint(adapter: Adapter, path: Path, averaged: bool, world: World) -> None:
    """Read the trained weights of a checkpoint, or their EMA, into an adapter that is ready to train.

    Raises CheckpointError, on all ranks.
    """
    prefix = "ema." if averaged else "param."
    checkpoint.read(path, {prefix + name: p.detach() for name, p in adapter.trainable()}, world)
