"""policy_loss with its metrics and gradient, against one eager call for the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import Case, Results, randn
from prefgrpo.ops import policy_loss

CLIP = 1e-4


def ours(i: dict[str, Any]) -> Results:
    """Loss, metrics and gradient."""
    logp = i["logp"].detach().requires_grad_()
    loss, metrics = policy_loss(logp, i["old"], i["advantage"], epsilon_low=CLIP)
    return {"loss": loss, "metrics": metrics, "d_logp": torch.autograd.grad(loss, logp, i["upstream"])[0]}


def eager(i: dict[str, Any], function: Any = peers.policy) -> Results:
    """Likewise, of the published loss, its metrics one by one."""
    logp = i["logp"].detach().requires_grad_()
    loss, metrics = function(logp, i["old"], i["advantage"], CLIP)
    gradient = torch.autograd.grad(loss, logp, i["upstream"])[0]
    return {"loss": loss, "d_logp": gradient} | {str(k): metric for k, metric in enumerate(metrics)}


def truth(i: dict[str, Any], _: Results) -> Results:
    """Loss and gradient in fp64."""
    delta = i["logp"].double() - i["old"].double()
    advantage = i["advantage"].double().clamp(-5, 5)
    bounded = delta.exp().clamp(1 - CLIP, 1 + CLIP)
    is_clipped = (delta.exp() - bounded) * advantage > 0
    term = -advantage * torch.where(is_clipped, bounded, delta.exp())
    return {"loss": term.mean(), "d_logp": i["upstream"] * torch.where(is_clipped, 0.0, term) / len(delta)}


def cases(device: str) -> Iterator[Case]:
    """A micro-batch, and a whole update of 48 groups of 24."""
    for batch in (8, 1152):

        def make(k: int, batch: int = batch) -> dict[str, Any]:
            old, change, advantage = (randn(batch, device=device, seed=3 * k + n) for n in range(3))
            # exact in fp32: log-ratios are multiples of 31·2⁻²⁰ = .296 clip ranges, so that none is near a bound
            old = (old * 2**10).round() / 2**10
            logp = old + (change * 2).round() * 31 / 2**20
            return {"logp": logp, "old": old, "advantage": advantage, "upstream": torch.ones((), device=device)}

        fast = torch.compile(peers.policy, dynamic=False)
        variants: dict[str, Any] = {"ours": ours, "eager": eager, "compile": lambda i, fast=fast: eager(i, fast)}
        if device == "cuda":
            variants["triton"] = ours
        yield Case("policy_loss, with gradient", f"{batch} samples", "fp32", 0, make, variants, truth)
