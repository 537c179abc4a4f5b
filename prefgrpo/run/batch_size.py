"""`rollout.batch_size: auto`: the largest batch size that fits into memory, determined once at the start of a run.

Candidates are the divisors of rollout.group_size (for which the first ratio is exactly 1) that do not make processes
wait for each other. On a GPU the search starts at the memory estimate (`run.memory`), on a CPU at ON_CPU at most. One
forward, decode and backward test whether a size runs; if not, the next smaller one is tried. With sharded weights or
split tokens, a process that fails would leave the others waiting, so the estimate is used untested. Invariant: all
processes use the same sizes, which are stored in the run folder's config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.objectives import objective
from prefgrpo.parallel.mesh import Layout
from prefgrpo.parallel.world import World
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.rollout.render import decode
from prefgrpo.rollout.sampling import all_sizes, eval_sampling
from prefgrpo.run.memory import empty_batch, estimate, free_bytes
from prefgrpo.run.policy import Policy

ON_CPU = 8
"""Largest batch size on a CPU."""
FILLED, FILLED_UNTRIED = 0.9, 0.8
"""Share of the free memory that the estimate may fill, if the sizes are tested afterwards and if they are not."""


def divisors(count: int) -> list[int]:
    """All divisors of a number, in descending order."""
    return [size for size in range(count, 0, -1) if count % size == 0]


def candidates(config: Config, indices: int) -> list[int]:
    """The candidate batch sizes, in descending order: those with which no data-parallel index (of `indices`) has more
    samples to process in the updates of a step than with batches of one sample."""
    r, whole_groups = config.rollout, objective(config.train).whole_groups

    def longest(size: int) -> int:
        made = Counter[tuple[int, int]]()
        sized = replace(config, rollout=replace(r, batch_size=size))
        for b in assign_batches(sized, [r] * r.prompts_per_step, indices, whole_groups):
            made[b.update, b.index] += len(b.places)
        return sum(max(n for (u, _), n in made.items() if u == update) for update in {u for u, _ in made})

    return [size for size in divisors(r.group_size) if longest(size) <= longest(1)]


def estimate_batch_sizes(config: Config, free: float) -> Config:
    """`config` with the largest batch sizes estimated to fit `config.gpus` processes of `free` bytes each; at least 1.

    The estimate is linear in the batch size, so two evaluations suffice.
    """
    context = Layout.of(config, config.gpus).context  # each process decodes this fraction of a batch
    one, two = (estimate(_with_batch_sizes(config, size)) for size in (1, 1 + context))
    rest = one.total - one.parts["activations"]

    def fits(phase: str, more: float) -> bool:
        return rest + one.phases[phase] + more * (two.phases[phase] - one.phases[phase]) <= free

    sizes = candidates(config, Layout.of(config, config.gpus).data)
    batch = next((s for s in sizes if all(fits(phase, (s - 1) / context) for phase in ("rollout", "update"))), 1)
    part = -(-batch // context)
    decoded = next((s for s in divisors(part) if fits("decode", s - 1)), 1)
    return _with_batch_sizes(config, batch, 0 if decoded == part else decoded)


def initial_batch_sizes(config: Config, world: World, prompts: Sequence[Prompt]) -> Config:
    """`config` with the initial batch sizes, before the model is loaded; the same on all processes."""
    if world.device.type == "cpu":
        return _with_batch_sizes(config, next(s for s in candidates(config, world.dp_size) if s <= ON_CPU))
    share = FILLED if world.mesh is None else FILLED_UNTRIED
    here = replace(_at_largest_size(config, prompts), gpus=world.size, device="cuda")
    found = estimate_batch_sizes(here, share * free_bytes(world.device))
    sizes = world.all_gather_object((found.rollout.batch_size, found.memory.decode_batch or found.rollout.batch_size))
    batch, decoded = (min(each) for each in zip(*sizes, strict=True))
    return _with_batch_sizes(config, batch, 0 if decoded == batch else decoded)


def probe_batch_sizes(
    config: Config, adapter: Adapter, policy: Policy, world: World, prompts: Sequence[Prompt]
) -> Config:
    """`config` with the largest batch sizes, up to its own, that actually run. Raises ConfigError if none does."""
    if world.mesh is not None:
        return config
    shown, largest = eval_sampling(config), _at_largest_size(config, prompts)
    kinds = [largest, replace(largest, rollout=shown)] if config.eval.every else [largest]
    moments = [torch.zeros_like(p) for p in policy.params for _ in range(2)]  # AdamW allocates them at its first step

    def forward(size: int) -> None:
        for kind in kinds:
            sized = _with_batch_sizes(kind, size)
            with adapter.offload.on_device("vae"):
                x, sigma, condition = empty_batch(sized, adapter)
            x, condition = x.to(world.device), condition.to(world.device)
            with torch.no_grad():
                adapter.velocity(x, sigma, condition, sized.rollout)
            if kind is largest:
                adapter.velocity(x, sigma, condition, sized.rollout).float().square().mean().backward()

    def decoder(size: int) -> None:
        for kind in kinds:
            x = torch.zeros(config.rollout.batch_size, *adapter.latent_shape(kind.rollout), device=world.device)
            decode(adapter, x, kind.rollout, size)

    try:
        sizes = [s for s in candidates(config, world.dp_size) if s <= config.rollout.batch_size]
        config = _with_batch_sizes(config, _largest_that_runs(forward, sizes, world), config.memory.decode_batch)
        most = config.memory.decode_batch or config.rollout.batch_size
        decoded = _largest_that_runs(decoder, [s for s in divisors(config.rollout.batch_size) if s <= most], world)
    finally:
        policy.optimizer.zero_grad()
        moments.clear()
    return _with_batch_sizes(config, config.rollout.batch_size, 0 if decoded == config.rollout.batch_size else decoded)


def _largest_that_runs(work: Callable[[int], None], sizes: Sequence[int], world: World) -> int:
    """The first size with which `work` does not run out of memory on any process. Raises ConfigError if none does."""
    smaller = iter(sizes[1:])

    @find_executable_batch_size(starting_batch_size=sizes[0], reduce_batch_size_fn=lambda: next(smaller, 0))
    def attempt(size: int) -> int:
        failed = False
        try:
            work(size)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            failed = True
        if world.any(failed):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return size

    try:
        return int(attempt())
    except RuntimeError as error:
        if "reached zero" not in str(error):
            raise
        advice = "`prefgrpo plan` names what makes it smaller"
        raise ConfigError([f"rollout.batch_size: one sample does not fit into memory; {advice}"]) from error


def _with_batch_sizes(config: Config, batch: int, decoded: int = 0) -> Config:
    """`config` with these batch sizes; a memory.decode_batch set in the recipe is kept."""
    memory = replace(config.memory, decode_batch=config.memory.decode_batch or decoded)
    return replace(config, rollout=replace(config.rollout, batch_size=batch), memory=memory)


def _at_largest_size(config: Config, prompts: Sequence[Prompt]) -> Config:
    """`config` at the largest of the prompts' own sizes."""
    sizes = all_sizes(prompts, config.rollout, config.data.own_sizes)
    return replace(config, rollout=max(sizes, key=lambda s: s.height * s.width))
