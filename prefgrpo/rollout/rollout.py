"""Denoises a batch and stores the transitions to train on: x_{k+1} = a·x_k + b·v(x_k, σ_k) + s·ε at every step k.

Steps outside `schedule.sde_steps` are deterministic; only the stochastic steps in `schedule.trained` are stored. Before
the first stochastic step, samples with the same initial noise are equal, so one of them is denoised for all.
Invariants: noise is a function of the global sample id, so any batch split gives the same samples; a stored log-prob
is computed for x_{k+1} as stored; the loop never synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from prefgrpo.models.base import Adapter, Condition, Sampling
from prefgrpo.ops import PhiloxNoise, sde_step
from prefgrpo.sde.noise import initial_latents
from prefgrpo.sde.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Transition:
    """A stochastic denoising step of B samples, as input of `replay`."""

    k: int
    """Row of the schedule."""
    x: Tensor
    """[B, …] latents before the step, as stored."""
    x_next: Tensor
    """[B, …] latents after the step, as stored (the same tensor as the next transition's x)."""
    logp: Tensor
    """fp32 [B], log-prob of x_next under the policy that generated it."""
    v: Tensor | None = None
    """[B, …] velocity of the policy that generated it, after guidance; None: not stored."""
    v_ref: Tensor | None = None
    """[B, …] velocity of the reference policy, likewise; None: not computed, or not needed."""


def changed(transitions: Iterable[Transition], change: Callable[[Tensor], Tensor]) -> tuple[Transition, ...]:
    """The transitions with `change` applied to each of their tensors, once to one that two of them share."""
    results: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in results:
            results[id(tensor)] = change(tensor)
        return results[id(tensor)]

    return tuple(Transition(**tree_map_only(Tensor, once, vars(one))) for one in transitions)


class Trajectory(NamedTuple):
    """Result of `rollout`."""

    latents: Tensor
    """[B, …] final latents, input of the adapter's `decode`."""
    transitions: tuple[Transition, ...]
    """The stored transitions, by ascending k."""


@torch.no_grad()
def rollout(
    adapter: Adapter,
    schedule: Schedule,
    condition: Condition,
    sample: Tensor,
    sampling: Sampling,
    *,
    seed: int,
    initial_sample: Sequence[int] | None = None,
    keep_velocity: bool = False,
    published: bool = False,
) -> Trajectory:
    """Denoise B samples along `schedule` (on the adapter's device) for a batched condition [B, …].

    sample: int64 [B] ids that determine the noise, unique per sample in the run. seed: the run's noise seed.
    initial_sample: B ids for the initial noise only. Samples with equal ids must have equal conditions.
    keep_velocity: also store the velocities of the transitions. published: sample as the stock call does by default.
    """
    velocity = adapter.published_velocity if published else adapter.velocity

    def on_device(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers).to(sample.device, non_blocking=True)

    starts = sample if initial_sample is None else on_device(initial_sample)
    active = condition
    branch = 0 if initial_sample is None else min(schedule.sde_steps, default=0)
    if initial_sample is not None and branch:
        distinct = list(dict.fromkeys(initial_sample))
        starts = on_device(distinct)
        active = condition.select(on_device([initial_sample.index(i) for i in distinct]))
        copies = on_device([distinct.index(i) for i in initial_sample])
    x = initial_latents(seed, starts, adapter.latent_shape(sampling))
    stored: list[Transition] = []
    for k in range(schedule.steps):
        if branch and k == branch:
            x = x.index_select(0, copies)
            active = condition
        sigma = schedule.times[k].expand(len(x))
        noise = PhiloxNoise(seed, sample) if k in schedule.sde_steps else None
        kept = noise is not None and k in schedule.trained
        v = velocity(x, sigma, active, sampling)
        out = sde_step(x, v, schedule.coef, k, noise=noise)
        if kept:
            stored.append(Transition(k, x, out.x_next, out.logp, v if keep_velocity else None))
        x = out.x_next
    return Trajectory(adapter.final(x, condition), tuple(stored))
