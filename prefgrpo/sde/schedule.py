"""The noise schedule of one trajectory: σ_0 > … > σ_T and one coefficient row per step.

There is one copy of σ, in fp32: the model, the step kernel, rollout and replay read the same values. Coefficient rows
are computed from them in fp64, stored in fp32 [T, 5] and indexed on the device. Steps in `sde_steps` follow the chosen
rule; all others are `ode` rows without a log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prefgrpo.sde.rules import Rule, sde_row


@dataclass(frozen=True)
class Schedule:
    """σ and step coefficients of a T-step trajectory."""

    sigmas: Tensor
    """[T + 1] fp32, strictly decreasing; the last is usually 0."""
    coef: Tensor
    """[T, 5] fp32 rows (a, b, s, w, c)."""
    sde_steps: tuple[int, ...]
    """Indices of the stochastic steps, ascending."""
    times: Tensor
    """[T] fp32, the σ passed to the model at each step: the step's own, or that value truncated."""
    trained: tuple[int, ...]
    """Indices of the steps to train on, ascending; the stochastic ones among them are stored."""
    weights: Tensor | None = None
    """[T] fp32, weight of each step's loss; None: 1."""

    @property
    def steps(self) -> int:
        """T, the number of denoising steps."""
        return self.coef.shape[0]

    def to(self, device: torch.device | str) -> Schedule:
        """The same schedule with its coefficients and weights on `device`; the sigmas stay on the CPU."""
        weights = None if self.weights is None else self.weights.to(device, non_blocking=True)
        return replace(self, coef=self.coef.to(device, non_blocking=True), weights=weights)


def make_schedule(
    sigmas: Tensor,
    rule: str | Rule,
    eta: float,
    sde_steps: tuple[int, ...] | None = None,
    times: Tensor | None = None,
    trained: tuple[int, ...] | None = None,
) -> Schedule:
    """Schedule from `sigmas` [T + 1].

    rule: one of `rules.RULES`, or a function like them. sde_steps: the steps that follow it (None: all; ignored for
    'ode'). times: [T], the σ passed to the model
    (None: each step's own). trained: the steps to train on (None: the stochastic ones). Raises ValueError for an
    unknown rule, sigmas that do not decrease, η out of range, or a step index outside 0 … T − 1.
    """
    sigmas = sigmas.detach().to("cpu", torch.float32)
    total = sigmas.numel() - 1
    if total < 1:
        raise ValueError(f"a schedule needs at least two sigmas, got {sigmas.numel()}")
    chosen = () if rule == "ode" else tuple(range(total)) if sde_steps is None else tuple(sorted(set(sde_steps)))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < total:
        raise ValueError(f"sde_steps must lie in 0 … {total - 1} for {total} steps, got {list(chosen)}")
    values = [float(s) for s in sigmas]
    rows = [
        sde_row(rule if k in chosen else "ode", values[k], values[k + 1], eta, values[1], values[-1])
        for k in range(total)
    ]
    coef = torch.tensor(rows, dtype=torch.float64).to(torch.float32)
    random = tuple(k for k in chosen if rows[k].s > 0.0)
    return Schedule(
        sigmas, coef, random, sigmas[:-1] if times is None else times, random if trained is None else trained
    )


def truncated_times(sigmas: Tensor) -> Tensor:
    """[T] int(1000 σ) / 1000 of `sigmas` [T + 1] fp32: the timesteps that the published trainers pass to the model."""
    return (sigmas[:-1] * 1000).floor() / 1000


def step_weights(schedule: Schedule, kind: str, over: Sequence[int]) -> Tensor:
    """[T] fp32, weight of each step's loss.

    inverse_step: 1 / |Δσ|. noise: s, velocity: s / |b|, each divided by its mean over the steps `over`; 0 where s = 0.
    """
    coef = schedule.coef.double()
    if kind == "inverse_step":
        return (-1.0 / schedule.sigmas.double().diff()).float()
    value = coef[:, 2] if kind == "noise" else coef[:, 2] / coef[:, 1].abs()
    return (value / value[list(over)].mean()).float()


def consecutive(steps: Sequence[int], size: int, draw: int) -> tuple[int, ...]:
    """`size` consecutive entries of `steps` (0: all), from a random start seeded with `draw` (Flow-GRPO-Fast)."""
    size = size or len(steps)
    start = int(torch.randint(len(steps) - size + 1, (1,), generator=torch.Generator().manual_seed(draw)))
    return tuple(steps[start : start + size])


def subset(steps: Sequence[int], size: int, draw: int) -> tuple[int, ...]:
    """A random subset of `size` entries of `steps` (0: all), in order, seeded with `draw` (DanceGRPO, Pref-GRPO)."""
    generator = torch.Generator().manual_seed(draw)
    chosen = torch.randperm(len(steps), generator=generator)[: size or len(steps)]
    return tuple(steps[k] for k in sorted(chosen.tolist()))


def shifted_sigmas(steps: int, shift: float) -> Tensor:
    """σ_i = shift·t / (1 + (shift − 1)·t) for t = 1 … 0 in `steps` equal steps, [steps + 1] fp32.

    In fp32 throughout, as in Pref-GRPO and DanceGRPO, because int(1000 σ) depends on the last bit (with 15 steps and
    shift 3, σ = 0.6 gives 599).
    """
    t = torch.linspace(1.0, 0.0, steps + 1)
    return (shift * t) / (1 + (shift - 1) * t)
