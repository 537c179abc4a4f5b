"""Makes a loaded model ready to train on the run's processes, in the one order in which the parts fit together.

Each part changes what the next one wraps: LoRA layers are recomputed, compiled and sharded with their block; attention
is chosen before a block is traced; FSDP2 comes last, as it replaces the parameters of everything before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, TrainConfig
from prefgrpo.models.base import Adapter
from prefgrpo.models.lora import locate as lora_place
from prefgrpo.parallel.attention import set_backend
from prefgrpo.parallel.context import split_tokens
from prefgrpo.parallel.shard import shard_weights
from prefgrpo.parallel.world import World

GRAPHS = 64
"""Maximum number of compiled graphs per kind of block: one per shape, dtype and set of inputs with gradients."""


def parallelize(adapter: Adapter, config: Config, world: World) -> None:
    """Apply a configuration to a frozen adapter: what is trained, how blocks run, and how processes share the work.

    Raises ConfigError for LoRA targets or an attention backend that the model does not have.
    """
    layout = world.layout
    add_trained_weights(adapter, config.train, config.seed)
    if config.train.gradient_checkpointing:
        for module in adapter.modules().values():
            recompute(adapter.blocks(module), config.train.gradient_checkpointing)
    set_backend(adapter, config, layout, world.device)
    if config.compile:
        compile_blocks(adapter)
    if layout.context > 1:
        split_tokens(adapter, world)
    if layout.fsdp:
        shard_weights(adapter, world, offload="weights" in config.memory.offload)


def add_trained_weights(adapter: Adapter, train: TrainConfig, seed: int) -> None:
    """A LoRA, new or continued, or all weights if its rank is 0."""
    if not train.lora_rank:
        adapter.enable_full()
        return
    if train.lora_from:
        try:
            adapter.load_lora(str(lora_place(train.lora_from)))
        except (ValueError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).splitlines()[:2])
            raise ConfigError([f"train.lora_from: {train.lora_from} cannot be continued: {reason}"]) from error
        return
    try:
        adapter.add_lora(train.lora_rank, train.lora_alpha, train.lora_targets or None, seed, train.lora_init)
    except ValueError as error:
        raise ConfigError([f"train.lora_targets: {error}"]) from error


def recompute(blocks: Iterable[nn.Module], share: float) -> None:
    """Checkpoint the activations of every block i at which floor((i + 1) · share) increases: for ½, every second one.

    Blocks keep their call arguments; diffusers' own gradient checkpointing drops some of them in some models.
    """
    for i, block in enumerate(blocks):
        if int((i + 1) * share) > int(i * share):
            block.forward = partial(_recomputed, block.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` without keeping its activations for the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)  # nothing is random


def compile_blocks(adapter: Adapter) -> None:
    """Compile the repeated blocks of all denoisers, one graph per shape."""
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
    for name in adapter.denoisers:
        for block in adapter.blocks(getattr(adapter.pipe, name)):
            block.compile(dynamic=False)
    adapter.compiled = True
