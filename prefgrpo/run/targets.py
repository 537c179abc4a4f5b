"""From the scores of a step to what it trains on: advantages and comparisons of all ranks' samples.

Every rank scores its own groups; everything is gathered here, in one message, so all ranks take the same decisions.
Missing rewards and verdicts keep their reasons, which are printed once; too many of them end the run. Targets of pairs
from files follow from their stored verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import COMBINE, SEPARATE, Config
from prefgrpo.data.media import Media
from prefgrpo.data.metric import Metric
from prefgrpo.data.pairs import PairGroup
from prefgrpo.objectives.advantages import advantages, by_comparisons, part_table
from prefgrpo.objectives.base import Targets
from prefgrpo.ops import winrate_advantage
from prefgrpo.ops.advantage import Std
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.rewards.scorer import Scorer, StepScores
from prefgrpo.rollout.buckets import bucket_of, fitted
from prefgrpo.rollout.plan import StepPlan
from prefgrpo.rollout.render import sample
from prefgrpo.rollout.stored_groups import StoredGroups
from prefgrpo.run.groups import MOST_GROUPS, is_shown, show_groups
from prefgrpo.run.log import Log
from prefgrpo.run.measures import quoted

PAIRS = "pairs"
"""Name in the report for the source of stored verdicts."""
PATIENCE_STEPS = 3
"""Steps in a row whose verdicts are all the same, after which the run stops with a checkpoint."""
MIN_VERDICTS = 16
"""Steps with fewer are not counted: they could be the same by chance."""
SPREAD = 0.002
"""Verdicts that differ by more depend on the images: a judge with a position bias may still rank correctly."""
WARN_MISSING = 0.05
"""Share of missing rewards or comparisons at which a step starts to warn."""
THUMBNAIL = 64
THUMBNAIL_FRAMES = 4
"""Shorter side in pixels of the images whose distance is measured, and most frames of a clip."""


class RewardsMissing(RuntimeError):
    """Too large a share of a step's rewards or comparisons is missing."""


class NoInformation(RuntimeError):
    """The judge's verdicts have carried no information about the images for several steps."""


def training_scorer(config: Config, rewards: Mapping[str, Reward], log: Path, world: World) -> Scorer:
    """The scorer of training groups. log: where this process writes its comparisons."""
    split = [name for name, reward in rewards.items() if reward.part_weights]
    combine = config.advantage.combine
    if split and combine not in SEPARATE:
        message = f"advantage.combine: expected {' or '.join(SEPARATE)}, got {combine}, but {', '.join(split)}"
        raise ConfigError([f"{message} normalises its parts separately; change one of the two"])
    return Scorer(
        rewards, config.rollout.group_size, config.judge.deadline_s, config.seed, log, active=world.is_dp_leader
    )


@dataclass(frozen=True)
class Judged:
    """What all ranks need to know about the n groups that one of them scored; R rewards have K sub-scores."""

    rewards: NDArray[np.float64]
    """[n, G, R + K], the sub-scores last."""
    comparisons: NDArray[np.float64]
    """[n, 2, G, G], wins and counts of the answers about pairs; rewards count by their weights."""
    asked: NDArray[np.float64]
    """[R, 4]: pairs asked about, of these without an answer, lowest and highest P(first)."""
    distances: NDArray[np.float64]
    """[n], of the group's images."""
    reasons: dict[str, int]
    metrics: dict[str, float]


class StepTargets:
    """Computes the targets of a run's steps, one after the other: alarms count consecutive steps."""

    def __init__(self, config: Config, rewards: Mapping[str, Reward], world: World, log: Log) -> None:
        self.config = config
        self.rewards = rewards
        self.weights = {entry.name: entry.weight for entry in config.rewards}
        """Of all rewards, in the order of their columns; 0: only measured."""
        self.world = world
        self.log = log
        self._by_comparisons = by_comparisons(rewards, self.weights, config.advantage)
        self._parts = {name: parts for name in self.weights if (parts := rewards[name].part_weights)}
        self._same_steps = {name: 0 for name, weight in self.weights.items() if weight}

    def compute(
        self, plan: StepPlan, scores: StepScores, distances: NDArray[np.float64]
    ) -> tuple[Targets, dict[str, float]]:
        """(advantages and comparisons of all ranks' samples, on the CPU, as they are small; metrics). Raises
        RewardsMissing or NoInformation.

        scores, distances: of the groups scored here. Everything about them is gathered in one message, because a
        gather of objects is two collectives, for which all processes wait.
        """
        c = self.config.advantage
        step = plan.step + 1
        weights = self.weights
        group_size = self.config.rollout.group_size
        everyone = self.world.gather_items([self._judged(scores, distances)])
        columns = self.world.in_slot_order([judged.rewards for judged in everyone])
        columns = columns.reshape(-1, columns.shape[-1])
        rewards = columns[:, : len(weights)]
        comparisons = self.world.in_slot_order([judged.comparisons for judged in everyone])
        wins, pair_counts = torch.from_numpy(comparisons).unbind(1)
        shares = self._missing_shares(step, rewards, everyone)
        trained = np.array(list(weights.values())) != 0
        has_rewards = torch.from_numpy(~np.isnan(rewards[:, trained]).any(1)).view(-1, group_size)
        has_advantage = has_rewards
        if self._by_comparisons:
            assert c.std != "rank"
            _, advantage = winrate_advantage(wins, pair_counts, std=c.std, eps=c.eps, ddof=c.ddof)
        else:
            sub_scores = columns[:, len(weights) :]
            advantage, has_advantage = advantages(rewards, weights, group_size, c, self._parts, sub_scores)
            if c.combine not in COMBINE:  # a function of the user's may draw random numbers
                advantage, has_advantage = self.world.all_gather_object((advantage, has_advantage))[0]
        if uncombined := int(has_rewards.sum()) - int(has_advantage.sum()):
            reason = "advantage.combine has no finite value for these rewards"
            self.log.missing(f"step {step}", Counter({reason: uncombined}))
            shares["reward/missing"] = 1.0 - float(has_advantage.float().mean())
        self._check_information(step, np.stack([judged.asked for judged in everyone]))
        targets = Targets(advantage, wins.float(), pair_counts.float(), has_advantage)
        every_distance = self.world.in_slot_order([judged.distances for judged in everyone])
        return targets, reward_metrics(list(weights), rewards, group_size) | shares | {
            "advantage/zero_groups": float((advantage == 0).all(1).float().mean()),
            "advantage/max": float(advantage.abs().max()),
            "diversity/pixels": float(every_distance.mean()),
        } | reduced(judged.metrics for judged in everyone)

    def _judged(self, scores: StepScores, distances: NDArray[np.float64]) -> Judged:
        """Of the groups scored here."""
        rewards = np.stack([scores.values[name] for name in self.weights], axis=-1)
        count, size, _ = rewards.shape
        if self._parts:
            columns = sum(map(len, self._parts.values()))
            sub_scores = part_table(scores.scores, self._parts).reshape(count, size, columns)
            rewards = np.concatenate([rewards, sub_scores], axis=-1)
        comparisons = np.zeros((count, 2, size, size))
        for name, weight in self.weights.items():
            if weight > 0 and name in scores.comparisons:
                comparisons += weight * scores.comparisons[name]
        asked = []
        for name in self.weights:
            found = [answer.value for group in scores.answers.get(name, ()) for answer in group.values()]
            known = np.array([p for p in found if p is not None])
            low = known.min(initial=np.inf)
            high = known.max(initial=-np.inf)
            asked.append((len(found), found.count(None), low, high))
        table = np.array(asked, np.float64)
        return Judged(rewards, comparisons, table, distances, scores.reasons, scores.metrics)

    def _missing_shares(self, step: int, rewards: NDArray[np.float64], everyone: Sequence[Judged]) -> dict[str, float]:
        """Shares of missing rewards and comparisons, whose reasons are logged. Raises RewardsMissing."""
        counts = np.stack([judged.asked[:, :2] for judged in everyone]).sum(0)
        shares = missing_shares(rewards, np.array(list(self.weights.values())), counts)
        reasons = sum((Counter(judged.reasons) for judged in everyone), Counter[str]())
        self.log.missing(f"step {step}", reasons)
        if warning := check_missing(shares, self.config.judge.max_missing, list(reasons)):
            self.log.once(f"WARNING: step {step}: {warning}", kind="many missing")  # step lines show their share
        return shares

    def _check_information(self, step: int, asked: NDArray[np.float64]) -> None:
        """Warn if all verdicts of a step are the same; raise NoInformation after PATIENCE_STEPS such steps in a row.

        asked: [shares, R, 4], as in `Judged`.
        """
        for k, (name, weight) in enumerate(self.weights.items()):
            pairs, missing, lows, highs = asked[:, k].T
            count = pairs.sum() - missing.sum()
            low = lows.min()
            high = highs.max()
            if not weight or count < MIN_VERDICTS:
                continue
            self._same_steps[name] = self._same_steps[name] + 1 if high - low <= SPREAD else 0
            if not self._same_steps[name]:
                continue
            message = f"{name}: the judge's verdicts carry no information: P(first) is {low:.3f} in all {count:.0f}"
            if self._same_steps[name] >= PATIENCE_STEPS:
                raise NoInformation(f"{message}; {PATIENCE_STEPS} steps in a row")
            self.log.say(f"WARNING: step {step}, {message}; the run stops after {PATIENCE_STEPS} such steps in a row")


# ---- from files -----------------------------------------------------------------------------------------------------


def targets_of(groups: Sequence[PairGroup], std: Std = "group", eps: float = 1e-4, ddof: int = 0) -> Targets:
    """Verdicts of P groups of equal size, and the advantages of their win rates, on the CPU."""
    counts = torch.from_numpy(np.stack([group.counts for group in groups]))
    wins = torch.from_numpy(np.stack([np.nan_to_num(group.wins) * group.counts for group in groups]))
    _, advantage = winrate_advantage(wins, counts, std=std, eps=eps, ddof=ddof)
    weight = torch.tensor([group.weight for group in groups])
    known = torch.ones_like(advantage, dtype=torch.bool)
    return Targets(advantage, wins.float(), counts.float(), known, weight)


@dataclass(frozen=True)
class PairTargets:
    """The targets of a run's steps, from the verdicts of their groups."""

    groups: StoredGroups
    log: Log

    def compute(
        self, plan: StepPlan, scores: StepScores, distances: NDArray[np.float64]
    ) -> tuple[Targets, dict[str, float]]:
        """As `StepTargets.compute`. Scores and distances are empty."""
        groups = self.groups.groups_of(plan)
        config = self.groups.config
        step = plan.step + 1
        a = config.advantage
        assert a.std != "rank"
        targets = targets_of(groups, a.std, a.eps, a.ddof)
        if self.log.active and is_shown(config, step):
            show_groups(config, step, self._scores(groups), self.log)
        return targets, {"advantage/zero_groups": float((targets.advantage == 0).all(1).float().mean())}

    def _scores(self, groups: Sequence[PairGroup]) -> StepScores:
        """A few groups of one size, as if they had been generated and judged."""
        adapter = self.groups.adapter
        buckets = list(self.groups.schedules)
        sizes = bucket_of(groups[0], buckets)
        some = [group for group in groups if bucket_of(group, buckets) == sizes][:MOST_GROUPS]
        samples: dict[int, dict[int, Sample]] = {}
        for k, group in enumerate(some):
            entries = [entry.sample for entry in fitted(group, adapter, sizes)]
            media = [Media(one.pixels(), adapter.frame_rate) for one in entries if one is not None]
            samples[k] = {m: sample(group.prompt, medium, sizes) for m, medium in enumerate(media)}
        targets = targets_of(some)
        comparisons = torch.stack([targets.wins, targets.counts], 1).double().numpy()
        rates = targets.win_rate().double().numpy()
        return StepScores(samples, {PAIRS: rates}, {}, {}, {PAIRS: comparisons}, {}, {})


# ---- metrics --------------------------------------------------------------------------------------------------------


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
