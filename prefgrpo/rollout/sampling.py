"""Sampling settings (sizes, steps, guidance) of training, of evaluation and of single prompts, and their schedules.

All settings are in a `SamplingConfig`; evaluation, and prompts with their own size, override some of its fields. The
time shift may depend on the size, so each size has its own schedule. Invariant: the window of a training step is a
function of (seed, step), so neither sizes nor processes change it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.objectives import objective
from prefgrpo.objectives.base import TrajectoryObjective
from prefgrpo.sde.schedule import (
    Schedule,
    consecutive,
    make_schedule,
    shifted_sigmas,
    step_weights,
    subset,
    truncated_times,
)


def eval_sampling(config: Config) -> SamplingConfig:
    """Sampling settings of evaluation and `generate`: those of training, with the fields set in `eval` replaced."""
    keys = ("height", "width", "steps")
    given = {key: getattr(config.eval, key) for key in keys}
    return replace(config.rollout, **{key: value for key, value in given.items() if value is not None})


def prompt_sampling(prompt: Prompt, sizes: SamplingConfig, own_sizes: bool) -> SamplingConfig:
    """`sizes` at the prompt's own height and width, if it has them and `data.own_sizes` is on."""
    size = prompt.size() if own_sizes else None
    return sizes if size is None else replace(sizes, height=size[0], width=size[1])


def all_sizes(prompts: Iterable[Prompt], sizes: SamplingConfig, own_sizes: bool) -> list[SamplingConfig]:
    """The distinct sizes among the prompts."""
    found = (prompt_sampling(p, sizes, own_sizes) for p in prompts)
    return list({(s.height, s.width): s for s in found}.values()) if own_sizes else [sizes]


class Schedules:
    """The schedules of a run, by size."""

    def __init__(self, config: Config, adapter: Adapter, device: torch.device) -> None:
        self.config, self.adapter, self.device = config, adapter, device
        self.goal = objective(config.train)
        self._tables: dict[SamplingConfig, tuple[Tensor, Tensor]] = {}

    def _table(self, sizes: SamplingConfig) -> tuple[Tensor, Tensor]:
        """Sigmas [T + 1], and the σ passed to the model at each step [T], both fp32."""
        if sizes not in self._tables:
            if sizes.shift is None:
                sigmas, times = self.adapter.sigmas(sizes), self.adapter.times(sizes)
            else:
                sigmas = shifted_sigmas(sizes.steps, sizes.shift)
                times = truncated_times(sigmas)
            self._tables[sizes] = sigmas, times
        return self._tables[sizes]

    def ode(self, sizes: SamplingConfig) -> Schedule:
        """Deterministic schedule for these sizes."""
        sigmas, times = self._table(sizes)
        return make_schedule(sigmas, "ode", 0.0, times=times).to(self.device)

    def step(self, sizes: SamplingConfig, step: int) -> Schedule:
        """Schedule with the window of training step `step`; deterministic if the objective needs only final latents."""
        chosen = window(sizes, self.config.seed, step)
        return self._with(sizes, self.trained(sizes, chosen)).to(self.device)

    def trained(self, sizes: SamplingConfig, window: Iterable[int]) -> tuple[int, ...]:
        """The steps of a window whose denoiser is trained; the others stay deterministic."""
        times = self._table(sizes)[1]
        return tuple(k for k in window if self.adapter.trains(float(times[k])))

    def _with(self, sizes: SamplingConfig, steps: tuple[int, ...]) -> Schedule:
        sigmas, times = self._table(sizes)
        if self.goal.collector == "endpoint":
            return make_schedule(sigmas, "ode", 0.0, times=times, trained=steps)
        made = make_schedule(sigmas, sizes.rule, sizes.eta, None if sizes.sde_everywhere else steps, times)
        made = replace(made, trained=tuple(k for k in made.sde_steps if k in steps))
        kind = self.goal.step_weight if isinstance(self.goal, TrajectoryObjective) else "none"
        if kind == "none":
            return made
        all_steps = make_schedule(sigmas, sizes.rule, sizes.eta, tuple(window_range(sizes)), times)
        return replace(made, weights=step_weights(all_steps, kind, all_steps.sde_steps))

    def check(self, sizes: SamplingConfig) -> None:
        """Raise ConfigError unless every possible window has a stochastic step of a trained denoiser."""
        steps = window_range(sizes)
        trained, size = self.trained(sizes, steps), sizes.window_size or len(steps)
        random = self._with(sizes, trained).trained
        empty = [steps[p] for p in range(len(steps) - size + 1) if not set(random) & set(steps[p : p + size])]
        if sizes.window_policy == "subset":
            idle = [k for k in steps if k not in random]
            empty = idle if len(idle) >= size else []
        if empty:
            windows = f"{'chosen from' if sizes.window_policy == 'subset' else 'that start at'} step(s) {empty}"
            why = f"rule {sizes.rule}" + " and train.target_components" * (len(trained) < len(steps))
            raise ConfigError(
                [
                    f"rollout.window_low/high: windows {windows} have no step to train, as {why} leave(s) only step(s) "
                    f"{list(random)}; expected windows that train"
                ]
            )


def window(sizes: SamplingConfig, seed: int, step: int) -> tuple[int, ...]:
    """The trainable steps of training step `step`, ascending."""
    draw = (seed * 1_000_003 + step) % 2**63
    choose = consecutive if sizes.window_policy == "random" else subset
    return choose(window_range(sizes), sizes.window_size, draw)


def window_range(sizes: SamplingConfig) -> range:
    """The steps that may be trained."""
    return range(sizes.window_low, sizes.window_high or sizes.steps - 1)
