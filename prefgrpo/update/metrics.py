"""Metrics of the policy in a step, over all ranks.

Invariant: every function that combines ranks is called by all of them, and returns the same values on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.ops import METRICS
from prefgrpo.parallel.world import World
from prefgrpo.update.endpoint import RANKS

FACTS = ("update", "samples", "k", "loss")
"""Columns before METRICS in a row of `policy_metrics`."""
BY_STEP = "steps/"
"""Prefix of the metrics of single denoising steps, which go to trackers only."""
OF_A_STEP = ("ratio_mean", "approx_kl", "kl", "clip_fraction")
"""Those of METRICS that are also logged for each denoising step: a number and a σ that stay the same, whichever steps
are trained."""


def policy_metrics(rows: list[Tensor], world: World, names: Sequence[str] = METRICS) -> dict[str, float]:
    """Combine rows [update, samples, k, loss, *names] of all ranks: sample-weighted means; the ratio's min, max and
    std. Where k, the denoising step of a row, is not NaN, also the means of its rows."""
    columns = (*FACTS, *names)
    table = torch.stack(rows).double().cpu().numpy() if rows else np.zeros((0, len(columns)))
    column = dict(zip(columns, world.gather(table).T, strict=True))
    samples = column["samples"]
    out = {"loss": column["loss"].sum()}
    for name in names:
        if name not in ("ratio_min", "ratio_max", "ratio_std"):
            out[f"policy/{name}"] = (samples * column[name]).sum() / max(samples.sum(), 1.0)
    if "ratio_min" in names:
        first = column["update"] == 0
        off = [np.abs(column[name][first] - 1.0).max(initial=0.0) for name in ("ratio_min", "ratio_max")]
        out["policy/on_policy_error"] = max(off)
        if len(samples):
            out |= {"policy/ratio_min": column["ratio_min"].min(), "policy/ratio_max": column["ratio_max"].max()}
    if "ratio_std" in names and samples.sum() > 1:
        out["policy/ratio_std"] = _pooled_std(samples, column["ratio_mean"], column["ratio_std"])
    if RANKS[0] in names:
        right, pairs, margin = (out.pop(f"policy/{name}") for name in RANKS)
        out |= {"pairs/accuracy": right / pairs, "pairs/margin": margin / pairs} if pairs else {}
    for k in np.unique(column["k"][~np.isnan(column["k"])]):
        here = column["k"] == k
        for name in (name for name in OF_A_STEP if name in names):
            out[f"{BY_STEP}{k:02.0f}/{name}"] = np.average(column[name][here], weights=samples[here])
    return {name: float(value) for name, value in out.items()}


def _pooled_std(n: NDArray[np.float64], mean: NDArray[np.float64], std: NDArray[np.float64]) -> float:
    """Standard deviation (n − 1) of all numbers of groups with these sizes, means and standard deviations."""
    within = np.where(n > 1, (n - 1) * std**2, 0.0)
    between = n * (mean - np.average(mean, weights=n)) ** 2
    return float(np.sqrt((within + between).sum() / (n.sum() - 1)))
