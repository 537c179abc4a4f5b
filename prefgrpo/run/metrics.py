"""Metrics of a step: reward statistics, policy metrics over all ranks, and the readable summary lines.

Invariant: every function that combines ranks is called by all of them, and returns the same values on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from prefgrpo.config.schema import Config
from prefgrpo.data.metric import Metric
from prefgrpo.ops import METRICS
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Sample
from prefgrpo.run.memory import peak_memory

FACTS = ("update", "samples", "loss")
"""Columns before METRICS in a row of `policy_metrics`."""


WARN_MISSING = 0.05
"""Share of missing rewards or comparisons at which a step starts to warn."""


THUMBNAIL, THUMBNAIL_FRAMES = 64, 4
"""Shorter side in pixels of the images whose distance is measured, and most frames of a clip."""


class RewardsMissing(RuntimeError):
    """Too large a share of a step's rewards or comparisons is missing."""


class NoInformation(RuntimeError):
    """The judge's verdicts have carried no information about the images for several steps."""


def reward_metrics(names: Sequence[str], rewards: NDArray[np.float64], group_size: int) -> dict[str, float]:
    """Mean and mean within-group std per reward over [P · G, R] (NaN = missing)."""
    out: dict[str, float] = {}
    for name, column in zip(names, rewards.T, strict=True):
        ok = ~np.isnan(column)
        if not ok.any():
            continue
        out[f"reward/{name}"] = float(column[ok].mean())
        groups = column.reshape(-1, group_size)
        groups = groups[~np.isnan(groups).any(1)]
        if len(groups):
            out[f"reward/{name}_std"] = float(groups.std(1).mean())
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


def over_ranks(local: Mapping[str, float], world: World) -> dict[str, float]:
    """Reduce a step's metrics over ranks, each with its own reduction (`Metric`); their names may differ between ranks.

    Timed metrics are logged under time/, so that all others are equal in two runs of the same configuration.
    """
    found: dict[str, list[Metric]] = {}
    for name, value in world.gather_items(local.items()):
        if not np.isnan(value):
            found.setdefault(name, []).append(value if isinstance(value, Metric) else Metric(value))
    out: dict[str, float] = {}
    for name, metrics in sorted(found.items()):
        kind, values, weights = metrics[0], np.array(metrics), np.array([m.weight for m in metrics])
        mean = kind.reduction == "mean"
        value = np.average(values, weights=weights / weights.sum()) if mean else getattr(values, kind.reduction)()
        out[f"time/{name}" if kind.timed else name] = float(value)
    return out


def policy_metrics(rows: list[Tensor], world: World, names: Sequence[str] = METRICS) -> dict[str, float]:
    """Combine rows [update, samples, loss, *names] of all ranks: sample-weighted means; min and max of the ratio."""
    columns = (*FACTS, *names)
    table = torch.stack(rows).double().cpu().numpy() if rows else np.zeros((0, len(columns)))
    at = {name: k for k, name in enumerate(columns)}
    means = [name for name in names if name not in ("ratio_min", "ratio_max")]
    samples = table[:, at["samples"]]
    sums = [samples.sum(), table[:, at["loss"]].sum(), *((samples * table[:, at[name]]).sum() for name in means)]
    bounds, ratios = [-np.inf, -np.inf, 0.0], "ratio_min" in at
    if len(table) and ratios:
        ratio = table[:, [at["ratio_min"], at["ratio_max"]]]
        first = ratio[table[:, at["update"]] == 0]
        bounds = [-ratio[:, 0].min(), ratio[:, 1].max(), np.abs(first - 1.0).max() if len(first) else 0.0]
    total = world.gather(np.array([sums])).sum(0)
    top = world.gather(np.array([bounds])).max(0)
    out = {"loss": total[1]} | {f"policy/{n}": total[2 + k] / max(total[0], 1.0) for k, n in enumerate(means)}
    if np.isfinite(top[0]):
        out |= {"policy/ratio_min": -top[0], "policy/ratio_max": top[1]}
    out |= {"policy/on_policy_error": top[2]} if ratios else {}
    return {k: float(v) for k, v in out.items()}


REWARD = re.compile(r"reward/(?!missing$)([^/]+|.+:[^/]+)(?<!_std)")
"""Matches the key of a reward's mean; a user's reward may be named by a path, my/rewards.py:function."""
PARTS_OF_WINS = ("_low", "_high", "_missing", "_prompts", "_first", "_second")
"""Key suffixes of a win rate's details: interval bounds, share of missing comparisons, win rate in either order."""


def taken_name(name: str) -> str:
    """Why a reward cannot have this name, because its metrics would have the keys of others; '' if it can."""
    if name in ("missing", "judge", "judge2"):
        return f"metrics use the name {name!r} for something else"
    if name.startswith("win_"):
        return "metrics use the prefix 'win_' for win rates"
    ending = next((end for end in ("_std", "_before", *PARTS_OF_WINS) if name.endswith(end)), "")
    return f"metrics use the ending {ending!r} for details of a reward" if ending else ""


def step_line(
    step: int,
    total: int,
    values: Mapping[str, float],
    seconds: Mapping[str, float],
    left_s: float = 0.0,
    win_rate: float | None = None,
) -> str:
    """The summary line of a step: progress, last evaluation's win rate, rewards, judge, update, times."""
    parts = [f"step {step:>{len(str(total))}}/{total} ({step / total:.0%}, {tqdm.format_interval(left_s)} left)"]
    if win_rate is not None:
        parts.append(f"held-out win rate {win_rate:.3f}")
    for key, value in values.items():
        if REWARD.fullmatch(key):
            spread = values.get(f"{key}_std", 0.0)
            mean = f"{value:.3f}" + f"±{spread:.3f}" * (spread > 0)
            always_half = spread > 0 and abs(value - 0.5) < 5e-4  # the mean of win rates within a group
            parts.append(f"{key[7:]} std {spread:.3f}" if always_half else f"{key[7:]} {mean}")
    if "judge/requests" in values:
        lost, busy, waited = (values.get(k, 0.0) for k in ("judge/failures", "time/judge/busy_s", "time/judge/wait_s"))
        judged = f"judged {values['judge/requests']:.0f}" + f", {lost:.0f} failed" * (lost > 0)
        if "judge/tie_rate" in values:
            judged += f", {1 - values['judge/tie_rate']:.0%} decided"
        if "judge/order_inconsistency" in values:
            judged += f", {values['judge/order_inconsistency']:.0%} flip when swapped"
        parts.append(judged + f" in {busy:.2f} s, waited {waited:.2f}" * (busy > 0 and waited > 0))
    if values["reward/missing"]:
        parts.append(f"missing {values['reward/missing']:.0%}")
    if "policy/clip_fraction" in values:
        low, high = values.get("policy/ratio_min", 1.0), values.get("policy/ratio_max", 1.0)
        parts += [f"clipped {values['policy/clip_fraction']:.0%}", f"|Δratio| ≤ {max(1 - low, high - 1):.1e}"]
    if "policy/error" in values:
        parts.append(f"error {values['policy/error']:.3g}")
    if "policy/drift" in values:
        parts.append(f"drift {values['policy/drift']:.1e}")
    trains = values.get("samples_trained", 1.0) > 0
    parts.append(f"grad {values['grad_norm']:.1e}" if trains else "nothing to train on: no group's rewards differ")
    if skipped := values.get("updates_skipped"):
        parts.append(f"{skipped:.0f} updates skipped: gradient not finite")
    if values.get("policy/kl"):
        parts.append(f"kl {values['policy/kl']:.1e}")
    phases = " ".join(f"{name} {s:.2f}" for name, s in seconds.items())
    return " · ".join([*parts, f"{sum(seconds.values()):.2f} s ({phases})"])


def step_notes(
    config: Config, step: int, values: Mapping[str, float], first: bool, device: torch.device
) -> Iterator[str]:
    """Lines about a finished step: the on-policy check, in a run's first step or where it is off; peak memory."""
    error = values.get("policy/on_policy_error")
    limit = config.train.clip_range / 10
    r = config.rollout
    if error is not None and values["samples_trained"] and (first or error > limit):
        verdict = "exact" if error == 0 else "fine" if error <= limit else f"above clip_range / 10 = {limit:.1e}"
        if error and values["advantage/zero_groups"] > 0 and r.group_size % r.batch_size:
            verdict += "; zero-advantage groups were dropped from batches of several groups: it is exact if "
            verdict += "rollout.batch_size divides rollout.group_size"
        yield f"on-policy check, step {step}: max |ratio - 1| = {error:.1e} ({verdict})"
    if first:
        yield f"peak memory after step {step}: {peak_memory(device) / 2**30:.2f} GiB"


def staleness_line(values: Mapping[str, float]) -> str:
    """What it means for a step that its samples are older than the policy (rollout.staleness)."""
    ratio = max(abs(values.get(f"policy/ratio_{end}", 1.0) - 1.0) for end in ("min", "max"))
    return (
        f"trains on samples of a policy {values['policy/staleness']:.0f} update(s) old (rollout.staleness), so the "
        f"on-policy check is skipped: max |ratio - 1| = {ratio:.1e}"
    )
