"""Step rules: each maps (σ, σ', η) to the five coefficients (a, b, s, w, c) of one affine step.

    x' = a·x + b·v + s·ε          logp = w · mean_D (x' − a·x − b·v)² + c

A rule is one small function of Python floats or, elementwise, of fp64 tensors; a new rule needs no new kernel, and
`rollout.rule` may name one in a file (docs/extend.md).
Invariant: a rule's standard deviation s is 0 exactly where the step is deterministic, and then w = c = 0, so that a
log-prob is never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Number = Any
"""A float, or an fp64 tensor."""


class StepInfo(NamedTuple):
    """The inputs of a rule; σ' < σ, both in [0, 1]."""

    sigma: Number
    sigma_next: Number
    eta: Number
    sigma_max: Number
    """Second value of the schedule, σ_1: replaces σ where 1 − σ would be 0."""
    sigma_min: Number
    """Last value of the schedule."""


class Row(NamedTuple):
    """Coefficients of one step: x' = a·x + b·v + s·ε and logp = w · mean_D (x' − a·x − b·v)² + c."""

    a: Number
    b: Number
    s: Number
    w: Number
    c: Number


Rule = Callable[[StepInfo], Row]


def _sqrt(x: Number) -> Number:
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def _log(x: Number) -> Number:
    return x.log() if isinstance(x, Tensor) else math.log(x)


def _sin(x: Number) -> Number:
    return x.sin() if isinstance(x, Tensor) else math.sin(x)


def _where(condition: Any, x: Number, y: Number) -> Number:
    return torch.where(condition, x, y) if isinstance(condition, Tensor) else x if condition else y


def gaussian(a: Number, b: Number, s: Number) -> Row:
    """Row of a step whose log-prob is the Gaussian one, of N(a·x + b·v, s²)."""
    noisy = s != 0.0
    safe = _where(noisy, s, 1.0)
    c = -_log(safe) - 0.5 * math.log(2.0 * math.pi)
    return Row(a, b, s, _where(noisy, -1.0 / (2.0 * safe * safe), 0.0), _where(noisy, c, 0.0))


def flow_with_std(i: StepInfo, st: Number) -> Row:
    """Flow-GRPO's reverse SDE with diffusion coefficient `st` (arXiv 2505.05470, eq. 9)."""
    delta = i.sigma_next - i.sigma
    a = 1.0 + st * st * delta / (2.0 * i.sigma)
    b = (1.0 + st * st * (1.0 - i.sigma) / (2.0 * i.sigma)) * delta
    return gaussian(a, b, st * _sqrt(-delta))


def ode(i: StepInfo) -> Row:
    """Euler step of the probability-flow ODE; it has no log-prob."""
    return Row(1.0, i.sigma_next - i.sigma, 0.0, 0.0, 0.0)


def flow(i: StepInfo) -> Row:
    """Flow-GRPO: st = η·sqrt(σ / (1 − σ)), with σ_1 in the denominator where σ = 1 (UniPC's first σ is 1 − 1e-6)."""
    return flow_with_std(i, i.eta * _sqrt(i.sigma / (1.0 - _where(i.sigma > 1.0 - 2e-6, i.sigma_max, i.sigma))))


def wan(i: StepInfo) -> Row:
    """Flow-GRPO's form for Wan: st = σ_min + (σ_1 − σ_min)·σ; η is not used."""
    return flow_with_std(i, i.sigma_min + (i.sigma_max - i.sigma_min) * i.sigma)


def dance(i: StepInfo) -> Row:
    """DanceGRPO: constant diffusion η (arXiv 2505.07818, eq. 8)."""
    delta = i.sigma_next - i.sigma
    k = i.eta * i.eta / (2.0 * i.sigma * i.sigma)
    return gaussian(1.0 + k * i.sigma * delta, (1.0 + k * i.sigma * (1.0 - i.sigma)) * delta, i.eta * _sqrt(-delta))


def cps_normalised(i: StepInfo) -> Row:
    """Coefficient-preserving sampling (arXiv 2509.05952) with the Gaussian log-prob.

    x' = (1 − σ')·x₀ + sqrt(σ'² − st²)·ε̂ + st·ε with st = σ'·sin(ηπ/2) and the predicted x₀ and ε̂, so that x' has noise
    level σ'.
    """
    st = i.sigma_next * _sin(i.eta * math.pi / 2.0)
    left = i.sigma_next**2 - st**2
    r = _sqrt(_where(left > 0.0, left, 0.0))
    a, b = (1.0 - i.sigma_next) + r, -i.sigma * (1.0 - i.sigma_next) + (1.0 - i.sigma) * r
    return gaussian(a, b, st)


def cps(i: StepInfo) -> Row:
    """`cps_normalised` with the published log-prob, which drops the variance (w = −1, c = 0)."""
    a, b, st, _, _ = cps_normalised(i)
    return Row(a, b, st, _where(st != 0.0, -1.0, 0.0), 0.0)


RULES: dict[str, Rule] = {
    "flow": flow,
    "dance": dance,
    "cps": cps,
    "cps_normalised": cps_normalised,
    "wan": wan,
    "ode": ode,
}


def sde_row(
    rule: str | Rule,
    sigma: Number,
    sigma_next: Number,
    eta: Number = 0.0,
    sigma_max: Number | None = None,
    sigma_min: Number = 0.0,
) -> Row:
    """Coefficients of the step σ → σ' under a rule, or one of `RULES`, for floats or, elementwise, for fp64 tensors.

    eta: the rule's η. sigma_max, sigma_min: the schedule's second and last σ. sigma_max defaults to σ', which is right
    for every rule but `wan`: the others read it in the first step only. Raises ValueError for an unknown rule, and
    for sigmas that do not fall within [0, 1] or an η out of range (tensors are not checked).
    """
    if isinstance(rule, str) and rule not in RULES:
        raise ValueError(f"unknown step rule '{rule}': expected one of {', '.join(RULES)}")
    function = RULES[rule] if isinstance(rule, str) else rule
    if rule == "wan" and sigma_max is None:
        raise ValueError("the rule 'wan' needs sigma_max, the second σ of the schedule")
    info = StepInfo(sigma, sigma_next, eta, sigma_next if sigma_max is None else sigma_max, sigma_min)
    if any(isinstance(n, Tensor) for n in info):
        return function(info)
    if not 0.0 <= sigma_next < sigma <= 1.0:
        expected = "expected 0 <= sigma_next < sigma <= 1"
        raise ValueError(f"sigmas must fall within [0, 1]: {expected}, got sigma={sigma}, sigma_next={sigma_next}")
    top = 1.0 if rule in ("cps", "cps_normalised") else math.inf
    if not 0.0 <= eta <= top:
        raise ValueError(f"eta must be in [0, {top:g}] for rule '{rule}', got {eta}")
    return function(info)
