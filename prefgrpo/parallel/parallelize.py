"""Makes a loaded model ready to train on the run's processes, in the one order in which the parts fit together.

Each part changes what the next one wraps: LoRA layers are recomputed, compiled and sharded with their block; attention
is chosen before a block is fused or traced, and a fused block recomputed as such; FSDP2 comes last, as it replaces the
parameters of everything before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, TrainConfig
from prefgrpo.models.base import Adapter, Sampling
from prefgrpo.models.blocks import fuse_blocks
from prefgrpo.models.weights import locate_lora
from prefgrpo.parallel import ring
from prefgrpo.parallel.attention_backend import set_backend
from prefgrpo.parallel.gradient_checkpointing import checkpoint_blocks
from prefgrpo.parallel.shard import quantise_weights, shard_weights
from prefgrpo.parallel.world import Layout, World

GRAPHS = 64
"""Maximum number of compiled graphs per kind of block: one per shape, dtype and set of inputs with gradients."""


def parallelize(adapter: Adapter, config: Config, world: World) -> None:
    """Apply a configuration to a frozen adapter: what is trained, how blocks run, and how processes share the work.

    Raises ConfigError for LoRA targets or an attention backend that the model does not have.
    """
    layout = world.layout
    add_trained_weights(adapter, config.train, config.seed)
    set_backend(adapter, config, layout, world.device)
    for module in adapter.modules().values():
        if not config.compile:  # inductor fuses diffusers' own blocks
            gather = world.all_gather_object
            for changed in fuse_blocks(module, adapter.blocks(module), adapter.dtype, world.device, gather):
                if world.main:
                    warnings.warn(changed, stacklevel=2)
        if config.train.gradient_checkpointing:
            checkpoint_blocks(adapter.blocks(module), config.train.gradient_checkpointing)
    if config.compile:
        compile_blocks(adapter)
    if layout.context > 1:
        split_tokens(adapter, world)
    if layout.fsdp:
        shard_weights(adapter, world, "weights" in config.offload, config.fp8_base)
    elif config.fp8_base:
        quantise_weights(adapter)


def add_trained_weights(adapter: Adapter, train: TrainConfig, seed: int) -> None:
    """A LoRA, new or continued, or all weights if its rank is 0."""
    if not train.lora_rank:
        adapter.enable_full()
        return
    if train.lora_from:
        try:
            adapter.load_lora(str(locate_lora(train.lora_from, adapter.denoisers[1:])))
        except (ValueError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).splitlines()[:2])
            raise ConfigError([f"train.lora_from: {train.lora_from} cannot be continued: {reason}"]) from error
        return
    try:
        adapter.add_lora(train.lora_rank, train.lora_alpha, train.lora_targets or None, seed, train.lora_init)
    except ValueError as error:
        raise ConfigError([f"train.lora_targets: {error}"]) from error


def compile_blocks(adapter: Adapter) -> None:
    """Compile the repeated blocks of all denoisers, one graph per shape."""
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
    for module in adapter.modules().values():
        for block in adapter.blocks(module):
            block.compile(dynamic=False)
    adapter.compiled = True


def split_tokens(adapter: Adapter, world: World) -> None:
    """Split the tokens of every denoiser's forward over the context-parallel processes.

    diffusers' hooks split the inputs and gather the output, so every process computes noise, steps and losses from the
    same bits as without it. Each holds the part of a gradient that flows through its tokens, so gradients are summed
    over all processes (`World.sum_gradients`, or FSDP2).
    """
    from diffusers import ContextParallelConfig

    layout = world.layout
    assert world.mesh is not None
    if layout.ring > 1:
        ring.install()
    adapter.text_multiple = layout.context
    for module in adapter.modules().values():
        mesh = world.mesh["ring", "ulysses"]
        config = ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses, mesh=mesh)
        with _cpu_as_accelerator(world.device):
            module.enable_parallelism(config=config)  # type: ignore[operator]


@contextmanager
def _cpu_as_accelerator(device: torch.device) -> Iterator[None]:
    """Context in which a CPU counts as one accelerator, because diffusers takes the rank modulo their number."""
    real: Any = torch.accelerator.device_count
    if device.type == "cpu":
        torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = real


def context_errors(adapter: Adapter, field: str, sizes: Sampling, max_length: int, layout: Layout) -> list[str]:
    """Why the tokens of these sizes, from the section `field`, cannot be split over the context-parallel processes."""
    count = layout.context
    out = list[str]()
    if count == 1:
        return out
    model: Any = adapter.transformer
    heads = model.config.num_attention_heads
    tokens = adapter.tokens(sizes)
    if heads % layout.ulysses:
        out.append(f"parallel.ulysses: expected a divisor of the {heads} attention heads, got {layout.ulysses}")
    if tokens % count:
        expected = f"expected a multiple of ring × ulysses = {count} tokens"
        out.append(f"{field}.height/width/frames: {expected}, got {tokens}")
    plan = [entry for entry in (model._cp_plan or {}).values() if isinstance(entry, dict)]
    joined = any("encoder_hidden_states" in entry for entry in plan) and adapter.attention_masks == "none"
    if joined and max_length % count:  # else text is not concatenated with the latent tokens, or padded by the model
        message = f"expected a multiple of ring × ulysses = {count}, got {max_length}"
        out.append(f"data.max_length: {message}; the next is {-(-max_length // count) * count}")
    return out
