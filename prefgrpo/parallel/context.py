"""Context parallelism: the processes of a data-parallel share split the tokens of each sample, in rollout and training.

diffusers' hooks split the inputs and gather the output, so every process computes noise, steps and losses from the same
bits as without it. Each holds the part of a gradient that flows through its tokens, so gradients are summed over all
processes (`World.sum_gradients`, or FSDP2). Invariant: indivisible sizes are rejected before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from prefgrpo.models.base import Adapter, Sampling
from prefgrpo.parallel.mesh import Layout
from prefgrpo.parallel.world import World

MAX_SUGGESTIONS = 4
"""Maximum number of sizes suggested in an error message."""


def split_tokens(adapter: Adapter, world: World) -> None:
    """Split the tokens of every denoiser's forward over the context-parallel processes."""
    from diffusers import ContextParallelConfig

    layout = world.layout
    assert world.mesh is not None
    adapter.text_multiple = layout.context
    for name in adapter.denoisers:
        mesh = world.mesh["ring", "ulysses"]
        config = ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses, mesh=mesh)
        with _cpu_as_accelerator(world.device):
            getattr(adapter.pipe, name).enable_parallelism(config=config)


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


def unsupported(cls: type[Adapter], family: str, layout: Layout) -> list[str]:
    """Why a family cannot run under this layout, judged from its class alone."""
    if layout.context > 1 and not cls.context_parallel:
        return [f"parallel.ulysses/ring: {family} does not train under context parallelism; expected 1 and 1"]
    if layout.ring > 1 and cls.context_parallel != "ring":
        return [f"parallel.ring: {family} masks its text, which ring attention does not support; use ulysses"]
    return []


def context_errors(
    adapter: Adapter, sizes: Sampling, max_length: int, layout: Layout, name: str = "rollout.height/width/frames"
) -> list[str]:
    """Why these sizes, called `name`, cannot be split over the context-parallel processes."""
    cp, out = layout.context, list[str]()
    if cp == 1:
        return out
    model: Any = adapter.transformer
    heads, tokens = model.config.num_attention_heads, adapter.sequence(sizes)
    if heads % layout.ulysses:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        out.append(
            f"parallel.ulysses: expected a divisor of the {heads} attention heads ({fits}), got {layout.ulysses}"
        )
    if tokens % cp:
        nearby = ", ".join(_nearby_sizes(adapter, sizes, cp))
        message = f"expected a multiple of ring × ulysses = {cp} tokens, got {tokens}"
        out.append(f"{name}: {message}" + (f"; sizes that work: {nearby}" if nearby else ""))
    plan = [entry for entry in (model._cp_plan or {}).values() if isinstance(entry, dict)]
    joined = any("encoder_hidden_states" in entry for entry in plan) and not adapter.own_lengths
    if joined and max_length % cp:  # else text is not concatenated with the latent tokens, or padded by the model
        message = f"expected a multiple of ring × ulysses = {cp}, got {max_length}"
        out.append(f"data.max_length: {message}; the next is {-(-max_length // cp) * cp}")
    return out


def _nearby_sizes(adapter: Adapter, sizes: Any, multiple: int) -> list[str]:
    """Nearby heights and widths whose token count is a multiple of `multiple`, nearest first."""
    unit, rows, columns = adapter.unit, *adapter.grid(sizes)
    around = [(r, c) for r in range(max(rows - 4, 1), rows + 5) for c in range(max(columns - 4, 1), columns + 5)]
    around.sort(key=lambda place: (abs(place[0] - rows) + abs(place[1] - columns), place))
    fits = (p for p in around if not adapter.sequence(replace(sizes, height=p[0] * unit, width=p[1] * unit)) % multiple)
    return [f"{r * unit}×{c * unit}" for r, c in list(fits)[:MAX_SUGGESTIONS]]
