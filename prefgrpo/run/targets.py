"""From the scores of a step to what it trains on: advantages and comparisons of all ranks' samples.

Every rank scores its own groups; everything is gathered here, so all ranks take the same decisions. Missing rewards and
verdicts keep their reasons, which are printed once; too many of them end the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.schema import COMBINE, Config
from prefgrpo.objectives.advantages import Parts, advantages, by_comparisons, part_table
from prefgrpo.objectives.base import Targets
from prefgrpo.ops import winrate_advantage
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Reward
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.run.log import Log
from prefgrpo.run.metrics import check_missing, missing_shares, reward_metrics

PATIENCE_STEPS = 3
"""Steps in a row whose verdicts are all the same, after which the run stops with a checkpoint."""
MIN_VERDICTS = 16
"""Steps with fewer are not counted: they could be the same by chance."""
SPREAD = 0.002
"""Verdicts that differ by more depend on the images: a judge with a position bias may still rank correctly."""


class NoInformation(RuntimeError):
    """The judge's verdicts have carried no information about the images for several steps."""


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
        self._same_steps = {name: 0 for name, weight in self.weights.items() if weight}

    def compute(self, step: int, scores: StepScores) -> tuple[Targets, dict[str, float]]:
        """(advantages and comparisons of all ranks' samples, on the CPU, as they are small; metrics). Raises
        RewardsMissing or NoInformation."""
        c = self.config.advantage
        weights = self.weights
        group_size = self.config.rollout.group_size
        rewards, sub_scores, parts = self._gather_rewards(scores)
        shares = self._missing_shares(step, scores, rewards)
        wins, pair_counts = self._comparisons(scores)
        trained = np.array(list(weights.values())) != 0
        has_rewards = torch.from_numpy(~np.isnan(rewards[:, trained]).any(1)).view(-1, group_size)
        has_advantage = has_rewards
        if self._by_comparisons:
            assert c.std != "rank"
            _, advantage = winrate_advantage(wins, pair_counts, std=c.std, eps=c.eps, ddof=c.ddof)
        else:
            advantage, has_advantage = advantages(rewards, weights, group_size, c, parts, sub_scores)
            if c.combine not in COMBINE:  # a function of the user's may draw random numbers
                advantage, has_advantage = self.world.all_gather_object((advantage, has_advantage))[0]
        if uncombined := int(has_rewards.sum()) - int(has_advantage.sum()):
            reason = "advantage.combine has no finite value for these rewards"
            self.log.missing(f"step {step}", Counter({reason: uncombined}))
            shares["reward/missing"] = 1.0 - float(has_advantage.float().mean())
        self._check_information(step, scores)
        targets = Targets(advantage, wins.float(), pair_counts.float(), has_advantage)
        return targets, reward_metrics(list(weights), rewards, group_size) | shares | {
            "advantage/zero_groups": float((advantage == 0).all(1).float().mean()),
            "advantage/max": float(advantage.abs().max()),
        }

    def _gather_rewards(self, scores: StepScores) -> tuple[NDArray[np.float64], NDArray[np.float64], Parts]:
        """(rewards [P · G, R] and sub-scores [P · G, K] of all ranks' samples, parts of the sub-scores)."""
        names = list(self.weights)
        local = np.stack([scores.values[n] for n in names], axis=-1)  # [groups scored here, G, R]
        parts = {n: w for n in names if (w := self.rewards[n].part_weights)}
        if parts:
            sub_scores = part_table(scores.scores, parts).reshape(*local.shape[:2], sum(map(len, parts.values())))
            local = np.concatenate([local, sub_scores], axis=-1)
        table = self.world.gather_slots(local, self.config.rollout.prompts_per_step).reshape(-1, local.shape[-1])
        return table[:, : len(names)], table[:, len(names) :], parts

    def _missing_shares(self, step: int, scores: StepScores, rewards: NDArray[np.float64]) -> dict[str, float]:
        """Shares of missing rewards and comparisons, whose reasons are logged. Raises RewardsMissing."""
        weights = np.array(list(self.weights.values()))
        verdicts = [[v.first for g in scores.verdicts.get(n, ()) for v in g.values()] for n in self.weights]
        counts = self.world.gather(np.array([[(len(v), v.count(None)) for v in verdicts]], np.float64)).sum(0)
        shares = missing_shares(rewards, weights, counts)
        reasons = Counter[str]()
        if np.isnan(rewards).any() or counts[:, 1].any():
            reasons = sum(map(Counter, self.world.gather_items([scores.reasons])), reasons)
        self.log.missing(f"step {step}", reasons)
        if warning := check_missing(shares, self.config.judge.max_missing, list(reasons)):
            self.log.once(f"WARNING: step {step}: {warning}", kind="many missing")  # step lines show their share
        return shares

    def _comparisons(self, scores: StepScores) -> tuple[Tensor, Tensor]:
        """Wins and counts, fp64 [P, G, G] each, of all ranks' groups; rewards count by their weights."""
        size = self.config.rollout.group_size
        total = self.config.rollout.prompts_per_step
        local = np.zeros((len(self.world.slots(total)), 2, size, size))
        for name, weight in self.weights.items():
            if weight > 0 and name in scores.games:
                local += weight * scores.games[name]
        wins, counts = torch.from_numpy(self.world.gather_slots(local, total)).unbind(1)
        return wins, counts

    def _check_information(self, step: int, scores: StepScores) -> None:
        """Warn if all verdicts of a step are the same; raise NoInformation after PATIENCE_STEPS such steps in a row."""
        names = list(self._same_steps)
        verdicts = [[v.first for g in scores.verdicts.get(n, ()) for v in g.values()] for n in names]
        answers = [np.array([p for p in some if p is not None]) for some in verdicts]
        local = np.array([[(len(p), p.min(initial=np.inf), p.max(initial=-np.inf)) for p in answers]])
        ranks = self.world.gather(local)
        for k, name in enumerate(names):
            count = ranks[:, k, 0].sum()
            low = ranks[:, k, 1].min()
            high = ranks[:, k, 2].max()
            if count < MIN_VERDICTS:
                continue
            self._same_steps[name] = self._same_steps[name] + 1 if high - low <= SPREAD else 0
            if not self._same_steps[name]:
                continue
            message = f"{name}: the judge's verdicts carry no information: P(first) is {low:.3f} in all {count:.0f}"
            if self._same_steps[name] >= PATIENCE_STEPS:
                raise NoInformation(f"{message}; {PATIENCE_STEPS} steps in a row")
            self.log.say(f"WARNING: step {step}, {message}; the run stops after {PATIENCE_STEPS} such steps in a row")
