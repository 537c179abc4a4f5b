"""The fields that may be `auto`, determined once at the start of a run: the largest `rollout.batch_size` that fits into
memory, and with it the smallest `train.checkpointing_share`.

Candidates for the batch size are the divisors of rollout.group_size (for which the first ratio is exactly 1) that do
not make processes wait for each other. On a GPU the search starts at the memory estimate (`run.memory`), on a CPU at
ON_CPU at most. One forward, decode and backward test whether a size runs; if not, the next smaller one is tried. With
sharded weights or split tokens, a process that fails would leave the others waiting, so the estimate is used untested.
The estimate chooses the batch size as if all blocks were recomputed, and then, on any device, the share. Invariant: all
processes use the same values, which are stored in the run folder's config.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import AUTO, Config, recomputed_share
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.objectives import objective
from prefgrpo.parallel.mesh import Layout
from prefgrpo.parallel.world import World
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.rollout.render import decode
from prefgrpo.rollout.sampling import all_sizes, eval_sampling
from prefgrpo.run.memory import Estimate, empty_batch, estimate, free_bytes
from prefgrpo.run.policy import Policy

ON_CPU = 8
"""Largest batch size on a CPU."""
FILLED, FILLED_UNTRIED = 0.9, 0.8
"""Share of the free memory that the estimate may fill, if the values are tested afterwards and if they are not."""
SHARES = [count / 20 for count in range(21)]
"""The values of train.checkpointing_share that `auto` chooses from, in ascending order."""


def initial_values(config: Config, world: World, prompts: Sequence[Prompt]) -> Config:
    """`config` with a number for each `auto`, before the model is loaded; the same on all processes. The batch sizes
    may still become smaller (`probe_batch_sizes`)."""
    if config.rollout.batch_size == AUTO:
        config = initial_batch_sizes(config, world, prompts)
    if not chooses_share(config):
        return config
    free = min(world.all_gather_object(free_bytes(world.device)))
    found, _ = estimate_share(_for_estimate(config, world, prompts), FILLED_UNTRIED * free)
    return _with_share(config, recomputed_share(found.train))


def chooses_share(config: Config) -> bool:
    """Whether train.checkpointing_share has to be determined: it is `auto`, and gradient_checkpointing is on."""
    return config.train.gradient_checkpointing and config.train.checkpointing_share == "auto"


def auto_notes(given: Config, found: Config) -> Iterator[str]:
    """One line for each `auto` of `given`, with its value in `found`."""
    if given.rollout.batch_size == AUTO:
        decoded = found.memory.decode_batch or found.rollout.batch_size
        yield f"rollout.batch_size: auto is {found.rollout.batch_size}, {decoded} decoded at once per process"
    if chooses_share(given):
        yield f"train.checkpointing_share: auto is {recomputed_share(found.train):g}, by the memory estimate"


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


def estimate_share(
    config: Config, free: float, estimate: Callable[[Config], Estimate] = estimate
) -> tuple[Config, Estimate]:
    """`config` with the smallest train.checkpointing_share of SHARES estimated to fit `config.gpus` processes of `free`
    bytes each, 1 if none does; and its estimate.

    Activations are about linear in the share: estimates for 0 and 1 give a first value, which is then estimated itself
    and raised until it fits.
    """

    def at(share: float) -> tuple[Config, Estimate]:
        return (one := _with_share(config, share)), estimate(one)

    def update(whole: Estimate) -> int:
        return whole.total - whole.parts["activations"] + whole.phases["update"]

    def fits(whole: Estimate) -> bool:
        return max(update(whole), whole.total) <= free

    none = at(0.0)
    if fits(none[1]):
        return none
    every = at(1.0)
    if not fits(every[1]):
        return every
    most, least = update(none[1]), update(every[1])
    first = math.ceil((most - free) / (most - least) * (len(SHARES) - 1))
    return next((found for share in SHARES[first:-1] if fits((found := at(share))[1])), every)


def initial_batch_sizes(config: Config, world: World, prompts: Sequence[Prompt]) -> Config:
    """`config` with the initial batch sizes, before the model is loaded; the same on all processes."""
    if world.device.type == "cpu":
        return _with_batch_sizes(config, next(s for s in candidates(config, world.dp_size) if s <= ON_CPU))
    share = FILLED if world.mesh is None else FILLED_UNTRIED
    found = estimate_batch_sizes(_for_estimate(config, world, prompts), share * free_bytes(world.device))
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
    for size in sizes:
        clear_device_cache(garbage_collection=True)
        failed = False
        try:
            work(size)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            failed = True
        if not world.any(failed):
            return size
    advice = "`prefgrpo plan` names a field that needs less"
    raise ConfigError([f"rollout.batch_size: one sample does not fit into memory; {advice}"])


def _with_batch_sizes(config: Config, batch: int, decoded: int = 0) -> Config:
    """`config` with these batch sizes; a memory.decode_batch set in the recipe is kept."""
    memory = replace(config.memory, decode_batch=config.memory.decode_batch or decoded)
    return replace(config, rollout=replace(config.rollout, batch_size=batch), memory=memory)


def _with_share(config: Config, share: float) -> Config:
    """`config` with this train.checkpointing_share."""
    return replace(config, train=replace(config.train, checkpointing_share=share))


def _for_estimate(config: Config, world: World, prompts: Sequence[Prompt]) -> Config:
    """`config` as the memory of this run is estimated: on its devices, at the largest of the prompts' own sizes."""
    largest = _at_largest_size(config, prompts)
    return replace(largest, gpus=world.size, device="cpu" if world.device.type == "cpu" else "cuda")


def _at_largest_size(config: Config, prompts: Sequence[Prompt]) -> Config:
    """`config` at the largest of the prompts' own sizes."""
    sizes = all_sizes(prompts, config.rollout, config.data.own_sizes)
    return replace(config, rollout=max(sizes, key=lambda s: s.height * s.width))
