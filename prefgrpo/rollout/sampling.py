"""Sampling settings (size, steps, guidance) of training and of evaluation, and the schedules of a run's steps.

Invariant: the window of a training step is a function of (seed, step), so processes cannot change it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from prefgrpo.config.by_path import load_function
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import RULES, Config, SamplingConfig
from prefgrpo.models.base import Adapter
from prefgrpo.objectives import make_objective
from prefgrpo.objectives.base import TrajectoryObjective
from prefgrpo.sde.rules import Row, Rule, StepInfo
from prefgrpo.sde.schedule import (
    Schedule,
    consecutive,
    make_schedule,
    shifted_sigmas,
    step_weights,
    subset,
    truncated_times,
)


def load_rule(name: str) -> str | Rule:
    """The rule that `rollout.rule` names: one of RULES, or a user's function. Raises ValueError."""
    if name in RULES:
        return name
    function = load_function(name, RULES)

    def rule(info: StepInfo) -> Row:
        try:
            row = Row(*map(float, function(info)))
        except Exception as error:
            raise ValueError(f"{name} raised {type(error).__name__}: {error}, for {info}") from error
        if not all(map(math.isfinite, row)):
            raise ValueError(f"expected finite numbers of {name}, got {row} for {info}")
        return row

    return rule


class Schedules:
    """The schedules of a run."""

    def __init__(self, config: Config, adapter: Adapter, device: torch.device) -> None:
        self.config = config
        self.adapter = adapter
        self.device = device
        self.objective = make_objective(config.train)
        self.rule = load_rule(config.rollout.rule)
        self._sigmas, self._times = self._levels(config.rollout)

    def _levels(self, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
        """Sigmas [T + 1], and the σ passed to the model at each step [T], both fp32."""
        if sampling.shift is None:
            return self.adapter.sigmas(sampling), self.adapter.times(sampling)
        sigmas = shifted_sigmas(sampling.steps, sampling.shift)
        return sigmas, truncated_times(sigmas)

    def ode(self, sampling: SamplingConfig) -> Schedule:
        """Deterministic schedule for these settings."""
        sigmas, times = self._levels(sampling)
        return make_schedule(sigmas, "ode", 0.0, times=times).to(self.device)

    def step(self, step: int) -> Schedule:
        """Schedule with the window of training step `step`; deterministic if the objective needs only final latents."""
        return self._with(window(self.config.rollout, self.config.seed, step)).to(self.device)

    def _with(self, steps: tuple[int, ...]) -> Schedule:
        r = self.config.rollout
        if self.objective.inputs == "endpoint":
            return make_schedule(self._sigmas, "ode", 0.0, times=self._times, trained=steps)
        made = make_schedule(self._sigmas, self.rule, r.eta, None if r.sde_everywhere else steps, self._times)
        made = replace(made, trained=tuple(k for k in made.sde_steps if k in steps))
        kind = self.objective.step_weight if isinstance(self.objective, TrajectoryObjective) else "none"
        if kind == "none":
            return made
        all_steps = make_schedule(self._sigmas, self.rule, r.eta, tuple(window_range(r)), self._times)
        return replace(made, weights=step_weights(all_steps, kind, all_steps.sde_steps))

    def check(self) -> None:
        """Raise ConfigError unless every step that may be trained is stochastic."""
        r = self.config.rollout
        steps = tuple(window_range(r))
        try:
            trained = self._with(steps).trained
        except ValueError as error:
            raise ConfigError([f"rollout.rule: {error}"]) from error
        if idle := [k for k in steps if k not in trained]:
            why = f"step(s) {idle} cannot be trained, as they are deterministic under rule {r.rule} with eta {r.eta:g}"
            raise ConfigError([f"rollout.window_low/high: {why}; expected a range without them"])


def window(sampling: SamplingConfig, seed: int, step: int) -> tuple[int, ...]:
    """The trainable steps of training step `step`, ascending."""
    draw = (seed * 1_000_003 + step) % 2**63
    choose = consecutive if sampling.window_policy == "random" else subset
    return choose(window_range(sampling), sampling.window_size, draw)


def window_range(sampling: SamplingConfig) -> range:
    """The steps that may be trained."""
    return range(sampling.window_low, sampling.window_high or sampling.steps - 1)
