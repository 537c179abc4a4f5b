"""Metrics of a step: statistics of its rewards, and of the policy over all ranks.

Invariant: every function that combines ranks is called by all of them, and returns the same values on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from prefgrpo.data.metric import Metric
from prefgrpo.ops import METRICS
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.run.measures import quoted
from prefgrpo.update.endpoint import RANKS

FACTS = ("update", "samples", "k", "loss")
"""Columns before METRICS in a row of `policy_metrics`."""
BY_STEP = "steps/"
"""Prefix of the metrics of single denoising steps, which go to trackers only."""
OF_A_STEP = ("ratio_mean", "approx_kl", "kl", "clip_fraction")
"""Those of METRICS that are also logged for each denoising step: a number and a σ that stay the same, whichever steps
are trained."""
WARN_MISSING = 0.05
"""Share of missing rewards or comparisons at which a step starts to warn."""
THUMBNAIL = 64
THUMBNAIL_FRAMES = 4
"""Shorter side in pixels of the images whose distance is measured, and most frames of a clip."""


class RewardsMissing(RuntimeError):
    """Too large a share of a step's rewards or comparisons is missing."""


def reward_metrics(names: Sequence[str], rewards: NDArray[np.float64], group_size: int) -> dict[str, float]:
    """Mean and mean within-group std per reward over [P · G, R] (NaN = missing)."""
    out: dict[str, float] = {}
    for name, column in zip(names, rewards.T, strict=True):
        ok = ~np.isnan(column)
        if not ok.any():
            continue
        key = f"reward/{quoted(name)}"
        out[key] = float(column[ok].mean())
        groups = column.reshape(-1, group_size)
        groups = groups[~np.isnan(groups).any(1)]
        if len(groups):
            out[f"{key}_std"] = float(groups.std(1).mean())
    return out


def thumbnail(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A small version [h, w, 3] of an image by box averages, or [f, h, w, 3] of evenly spaced frames of a clip."""
    if pixels.ndim == 4:
        count = min(len(pixels), THUMBNAIL_FRAMES)
        return np.stack([thumbnail(pixels[k]) for k in np.linspace(0, len(pixels) - 1, count).astype(int)])
    factor = max(min(pixels.shape[:2]) // THUMBNAIL, 1)
    return np.asarray(Image.fromarray(pixels).reduce(factor))


def pixel_distance(images: NDArray[np.uint8]) -> float:
    """RMS pixel difference between two of G images or clips [G, …], with pixels in 0 … 1: √(2 · variance)."""
    pixels = images.reshape(len(images), -1).astype(np.float32) / 255.0
    return float(np.sqrt(2.0 * pixels.var(axis=0, ddof=1, dtype=np.float64).mean()))


def pixel_distances(groups: Iterable[Mapping[int, Sample]]) -> NDArray[np.float64]:
    """Mean distance between the images of each group (member → sample), from small versions of them; NaN if unknown."""
    small = [[thumbnail(samples[m].media.pixels) for m in sorted(samples)] for samples in groups]
    return np.array([pixel_distance(np.stack(images)) if images else np.nan for images in small])


def missing_shares(
    rewards: NDArray[np.float64], weights: NDArray[np.float64], comparisons: NDArray[np.float64]
) -> dict[str, float]:
    """reward/missing: share of samples (rewards: [P · G, R]) that lack a reward of non-zero weight. judge/missing: of
    these rewards, the largest share of comparisons without a verdict (comparisons: [R, (asked, missing)])."""
    used = weights != 0
    shares = {"reward/missing": float(np.isnan(rewards[:, used]).any(1).mean()) if used.any() else 0.0}
    asked = comparisons[used & (comparisons[:, 0] > 0)]
    return shares | ({"judge/missing": float((asked[:, 1] / asked[:, 0]).max())} if len(asked) else {})


def check_missing(shares: Mapping[str, float], limit: float, reasons: Sequence[str]) -> str:
    """A warning if one of `missing_shares` is WARN_MISSING or more, else ''. Raises RewardsMissing above `limit`."""
    kinds = {"reward/missing": "rewards", "judge/missing": "comparisons"}
    worst = max(shares, key=lambda name: shares[name])
    message = f"{shares[worst]:.0%} of the {kinds[worst]} are missing"
    why = ("; ".join(dict.fromkeys(reasons)) or "none was given")[:600]
    if shares[worst] > limit:
        raise RewardsMissing(f"{message}, more than judge.max_missing = {limit:.0%}. Reasons: {why}")
    return f"{message} ({worst}); above judge.max_missing = {limit:.0%} the run stops" * (shares[worst] >= WARN_MISSING)


def reduced(gathered: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """A step's metrics of all ranks, each by its own reduction (`Metric`); their names may differ between ranks.

    Timed metrics are logged under time/, so that all others are equal in two runs of the same configuration.
    """
    found: dict[str, list[Metric]] = {}
    for name, value in (item for metrics in gathered for item in metrics.items()):
        if not np.isnan(value):
            found.setdefault(name, []).append(value if isinstance(value, Metric) else Metric(value))
    out: dict[str, float] = {}
    for name, metrics in sorted(found.items()):
        kind = metrics[0]
        values = np.array(metrics)
        weights = np.array([m.weight for m in metrics])
        mean = kind.reduction == "mean"
        value = np.average(values, weights=weights / weights.sum()) if mean else getattr(values, kind.reduction)()
        out[f"time/{name}" if kind.timed else name] = float(value)
    return out


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
