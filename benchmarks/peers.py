"""The baselines: the published formulas in torch ops, as in the peers' training loops (arXiv 2505.05470, eq. 9).

Coefficients are given per sample, as if their look-up (with its host reads) were free. Invariant: same results as the
ops up to rounding, which `python -m benchmarks` checks before timing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def columns(sigma: Tensor, sigma_next: Tensor, eta: float, dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """(σ, st, Δ), each [B, 1, …]."""
    shape = (-1, *[1] * (dims - 1))
    st = eta * torch.sqrt(sigma / (1 - sigma))
    return sigma.view(shape), st.view(shape), (sigma_next - sigma).view(shape)


def flow_mean(x: Tensor, v: Tensor, sigma: Tensor, st: Tensor, delta: Tensor) -> Tensor:
    """μ of one reverse step, in fp32."""
    x, v = x.float(), v.float()
    return x * (1 + st**2 / (2 * sigma) * delta) + v * (1 + st**2 * (1 - sigma) / (2 * sigma)) * delta


def gaussian_logp(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Mean over a sample's elements of ln N(y; mean, std²)."""
    density = -((y.float() - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
    return density.mean(dim=tuple(range(1, y.dim())))


def flow_step(
    x: Tensor, v: Tensor, eps: Tensor | None, sigma: Tensor, st: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """(x', logp); if eps is None, it is drawn here."""
    mean = flow_mean(x, v, sigma, st, delta)
    std = st * torch.sqrt(-delta)
    noise = torch.randn_like(mean) if eps is None else eps
    y = (mean + std * noise).to(x.dtype)
    return y, gaussian_logp(y, mean, std)


def flow_replay(
    x: Tensor, v: Tensor, y: Tensor, sigma: Tensor, st: Tensor, delta: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    """(logp,) of a stored x'; with v_ref and v_old also the KL and GRPO-Guard's log-ratio (arXiv 2510.22319)."""
    mean, *means = (flow_mean(x, u, sigma, st, delta) for u in (v, *others))
    std = st * torch.sqrt(-delta)
    if not means:
        return (gaussian_logp(y, mean, std),)
    reference, before = means
    dims = tuple(range(1, x.dim()))
    kl = ((mean - reference) ** 2 / (2 * std**2)).mean(dim=dims)
    return gaussian_logp(y, mean, std), kl, ((y.float() - before) * (mean - before) / std).mean(dim=dims)


def policy(logp: Tensor, old: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, list[Tensor]]:
    """(loss, metrics) of one micro-batch."""
    adv = torch.clamp(advantage, -5, 5)
    ratio = torch.exp(logp - old)
    loss = torch.mean(torch.maximum(-adv * ratio, -adv * torch.clamp(ratio, 1 - clip, 1 + clip)))
    with torch.no_grad():
        metrics = [
            0.5 * torch.mean((logp - old) ** 2),
            torch.mean((torch.abs(ratio - 1.0) > clip).float()),
            torch.mean((ratio - 1.0 > clip).float()),
            torch.mean((1.0 - ratio > clip).float()),
            ratio.min(),
            ratio.mean(),
            ratio.max(),
        ]
    return loss, metrics
