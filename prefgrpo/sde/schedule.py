"""The noise schedule of one trajectory: σ_0 > … > σ_T and one coefficient row per step.

σ is held once, in fp32: model and step, rollout and replay read the same numbers. Rows are computed in
fp64 from those fp32 values and stored fp32, [T, 5], indexed on the device. Steps in `sde_steps` follow the
chosen rule; all others are `ode` rows and carry no log-prob.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prefgrpo.sde.rules import RULES, StepInfo, check


@dataclass(frozen=True)
class Schedule:
    """σ and step coefficients of a T-step trajectory."""

    sigmas: Tensor
    """[T + 1] fp32, strictly falling; the last is usually 0."""
    coef: Tensor
    """[T, 5] fp32 rows (a, b, s, w, c)."""
    sde_steps: tuple[int, ...]
    """Indices of the stochastic steps, rising."""
    times: Tensor
    """[T] fp32, the σ that the model is shown at each step: its own, or the truncated one."""
    trained: tuple[int, ...]
    """Indices of the steps that are trained, rising: where stochastic, they are stored."""

    @property
    def steps(self) -> int:
        """T, the number of denoising steps."""
        return self.coef.shape[0]

    def to(self, device: torch.device | str) -> Schedule:
        """The same schedule with its table on `device`; the sigmas stay on the host."""
        return replace(self, coef=self.coef.to(device))


def make_schedule(
    sigmas: Tensor,
    rule: str,
    eta: float,
    sde_steps: tuple[int, ...] | None = None,
    times: Tensor | None = None,
    trained: tuple[int, ...] | None = None,
) -> Schedule:
    """Schedule from `sigmas` [T + 1].

    `sde_steps`: which steps follow `rule` (None: all; a rule of 'ode' has none). times: [T] the σ that the model is
    shown (None: the step's own). trained: the steps that are trained (None: the stochastic
    ones). Raises ValueError for an unknown rule, sigmas that do not fall, η out of range, or a step index outside
    0 … T − 1.
    """
    if rule not in RULES:
        raise ValueError(f"unknown step rule '{rule}': expected one of {', '.join(RULES)}")
    sigmas = sigmas.detach().to("cpu", torch.float32)
    total = sigmas.numel() - 1
    if total < 1:
        raise ValueError(f"a schedule needs at least two sigmas, got {sigmas.numel()}")
    chosen = () if rule == "ode" else tuple(range(total)) if sde_steps is None else tuple(sorted(set(sde_steps)))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < total:
        raise ValueError(f"sde_steps must lie in 0 … {total - 1} for {total} steps, got {list(chosen)}")
    values = [float(s) for s in sigmas]
    rows = []
    for k in range(total):
        name = rule if k in chosen else "ode"
        info = StepInfo(values[k], values[k + 1], eta, sigma_max=values[1], sigma_min=values[-1])
        check(info, name)
        rows.append(RULES[name](info))
    coef = torch.tensor(rows, dtype=torch.float64).to(torch.float32)
    random = tuple(k for k in chosen if rows[k][2] > 0.0)
    return Schedule(
        sigmas, coef, random, sigmas[:-1] if times is None else times, random if trained is None else trained
    )


def truncated_times(sigmas: Tensor) -> Tensor:
    """[T] int(1000 σ) / 1000 of `sigmas` [T + 1] fp32, which the published trainers show the model at each step."""
    return (sigmas[:-1] * 1000).floor() / 1000


def sde_window(steps: int, size: int, low: int, high: int, seed: int, draw: int) -> tuple[int, ...]:
    """`size` consecutive steps whose start is drawn from low … high − size by (seed, draw): the same on all ranks.

    Flow-GRPO-Fast / MixGRPO windows. `size` 0 means every step from low to high. Raises ValueError if the range
    does not hold the window.
    """
    if not 0 <= low < high <= steps:
        raise ValueError(
            f"window range must satisfy 0 <= low < high <= steps, got low={low}, high={high}, steps={steps}"
        )
    if size == 0:
        return tuple(range(low, high))
    if size > high - low:
        raise ValueError(f"a window of {size} steps does not fit into steps {low} … {high - 1}")
    generator = torch.Generator().manual_seed((seed * 1_000_003 + draw) % 2**63)
    start = low + int(torch.randint(high - low - size + 1, (1,), generator=generator))
    return tuple(range(start, start + size))


def shifted_sigmas(steps: int, shift: float) -> Tensor:
    """σ_i = shift·t / (1 + (shift − 1)·t) for t = 1 … 0 in `steps` equal steps, [steps + 1] fp32.

    As Pref-GRPO and DanceGRPO, in fp32 throughout: int(1000 σ) depends on the last bit (σ = 0.6 of
    15 steps at shift 3 gives 599).
    """
    t = torch.linspace(1.0, 0.0, steps + 1)
    return (shift * t) / (1 + (shift - 1) * t)
