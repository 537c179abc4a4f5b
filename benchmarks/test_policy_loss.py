"""policy_loss with its metrics and gradient, against one eager call for the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Case, benchmarked, each_variant, randn
from prefgrpo.ops import policy_loss


def ours(i: dict[str, Any]) -> Tensor:
    """The gradient."""
    logp = i["logp"].detach().requires_grad_()
    return torch.autograd.grad(policy_loss(logp, i["old"], i["advantage"], clip_low=1e-4).loss, logp)[0]


def eager(i: dict[str, Any], function: Any = peers.policy) -> Tensor:
    """Likewise, of the published loss."""
    logp = i["logp"].detach().requires_grad_()
    return torch.autograd.grad(function(logp, i["old"], i["advantage"], 1e-4)[0], logp)[0]


def cases(device: str) -> Iterator[Case]:
    """A micro-batch, and a whole update of 48 groups of 24."""
    for batch in (8, 1152):

        def make(k: int, batch: int = batch) -> dict[str, Any]:
            logp, old, advantage = (randn(batch, device=device, seed=3 * k + n) for n in range(3))
            return {"logp": logp, "old": logp + 1e-4 * old, "advantage": advantage}

        fast = torch.compile(peers.policy, dynamic=False)
        variants: dict[str, Any] = {"ours": ours, "eager": eager, "compile": lambda i, fast=fast: eager(i, fast)}
        if device == "cuda":
            variants["triton"] = ours
        yield Case("policy_loss, with gradient", f"{batch} samples", "fp32", 0, make, variants)


@each_variant(cases)
def test_policy_loss(benchmark: Any, case: Case, variant: str) -> None:
    benchmarked(benchmark, case, variant)
