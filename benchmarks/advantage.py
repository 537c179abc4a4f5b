"""winrate_advantage against the same arithmetic for all groups at once in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Case, Results, randn
from prefgrpo.ops import winrate_advantage


def ours(i: tuple[Tensor, Tensor]) -> Results:
    """Advantages [P, G]."""
    return {"advantage": winrate_advantage(*i)[1]}


def formula(wins: Tensor, counts: Tensor) -> Tensor:
    """Likewise, without missing values."""
    rate = wins.sum(-1) / counts.sum(-1)
    return (rate - rate.mean(-1, keepdim=True)) / (rate.std(-1, unbiased=False, keepdim=True) + 1e-4)


def cases(device: str) -> Iterator[Case]:
    """An update of 48 groups of 24."""

    def make(k: int) -> tuple[Tensor, Tensor]:
        wins = randn(48, 24, 24, device=device, seed=k).abs().clamp(max=1)
        return wins, torch.ones_like(wins)

    variants: dict[str, Any] = {"ours": ours}
    for name, function in (("eager", formula), ("compile", torch.compile(formula, dynamic=False))):
        variants[name] = lambda i, function=function: {"advantage": function(*i)}
    if device == "cuda":
        variants["triton"] = ours
    truth = lambda i, _: {"advantage": formula(*(t.double() for t in i))}  # noqa: E731
    yield Case("winrate_advantage", "48 groups × 24", "fp32", 0, make, variants, truth)
