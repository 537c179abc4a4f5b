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

from prefgrpo.config.schema import Config
from prefgrpo.judge.information import Alarm, extent
from prefgrpo.objectives.base import Targets
from prefgrpo.ops import winrate_advantage
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Reward
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.run.advantage import Parts, advantages, by_comparisons, part_table
from prefgrpo.run.log import Log
from prefgrpo.run.metrics import NoInformation, check_missing, missing_shares, reward_metrics

PATIENCE_STEPS = 3
"""Steps in a row whose verdicts are all the same, after which the run stops with a checkpoint."""


class StepTargets:
    """Computes the targets of a run's steps, one after the other: alarms count consecutive steps."""

    def __init__(
        self, config: Config, rewards: Mapping[str, Reward], weights: Mapping[str, float], world: World, log: Log
    ) -> None:
        """weights: of all rewards, in the order of their columns; 0: only measured."""
        self.config = config
        self.rewards = rewards
        self.weights = weights
        self.world = world
        self.log = log
        self._by_comparisons = by_comparisons(rewards, weights, config.advantage)
        self._alarms = {name: Alarm() for name, weight in weights.items() if weight}

    def compute(self, step: int, scores: StepScores) -> tuple[Targets, dict[str, float]]:
        """(advantages and comparisons of all ranks' samples; metrics). Raises RewardsMissing or NoInformation."""
        c = self.config.advantage
        weights = self.weights
        group_size = self.config.rollout.group_size
        rewards, sub_scores, parts = self._gather_rewards(scores)
        shares = self._missing_shares(step, scores, rewards)
        wins, pair_counts = self._comparisons(scores)
        trained = np.array(list(weights.values())) != 0
        scored = known = torch.from_numpy(~np.isnan(rewards[:, trained]).any(1)).view(-1, group_size)
        if self._by_comparisons:
            _, advantage = winrate_advantage(wins, pair_counts, std=c.std, eps=c.eps, ddof=c.ddof)
        else:
            advantage, known = advantages(rewards, weights, group_size, c, parts, sub_scores, self.world.device)
        if lost := int(scored.sum()) - int(known.sum()):
            why = "advantage.combine has no finite value for these rewards"
            self.log.missing(f"step {step}", Counter({why: lost}))
            shares["reward/missing"] = 1.0 - float(known.float().mean())
        self._check_information(step, scores)
        targets = Targets(advantage, wins.float(), pair_counts.float(), known.to(advantage.device))
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
            own = part_table(scores.groups, parts).reshape(*local.shape[:2], sum(map(len, parts.values())))
            local = np.concatenate([local, own], axis=-1)
        table = self.world.gather_slots(local, self.config.rollout.prompts_per_step).reshape(-1, local.shape[-1])
        return table[:, : len(names)], table[:, len(names) :], parts

    def _missing_shares(self, step: int, scores: StepScores, rewards: NDArray[np.float64]) -> dict[str, float]:
        """Shares of missing rewards and comparisons, whose reasons are logged. Raises RewardsMissing."""
        weights = np.array(list(self.weights.values()))
        verdicts = [[k.verdict.first for g in scores.groups[n] for k in g.comparisons] for n in self.weights]
        counts = self.world.gather(np.array([[(len(v), v.count(None)) for v in verdicts]], np.float64)).sum(0)
        shares = missing_shares(rewards, weights, counts)
        reasons = Counter[str]()
        if np.isnan(rewards).any() or counts[:, 1].any():
            reasons = sum(map(Counter, self.world.gather_items([scores.reasons])), reasons)
        self.log.missing(f"step {step}", reasons)
        if warning := check_missing(shares, self.config.judge.max_missing, list(reasons)):
            self.log.say(f"WARNING: step {step}: {warning}")
        return shares

    def _comparisons(self, scores: StepScores) -> tuple[Tensor, Tensor]:
        """Wins and counts, fp64 [P, G, G] each on the device, of all ranks' groups; rewards count by their weights."""
        size = self.config.rollout.group_size
        total = self.config.rollout.prompts_per_step
        local = np.zeros((len(self.world.slots(total)), 2, size, size))
        for name, weight in self.weights.items():
            for k, group in enumerate(scores.groups[name]):
                if weight > 0 and group.wins is not None and group.counts is not None:
                    local[k] += weight * np.stack([group.wins, group.counts])
        wins, counts = torch.from_numpy(self.world.gather_slots(local, total)).to(self.world.device).unbind(1)
        return wins, counts

    def _check_information(self, step: int, scores: StepScores) -> None:
        """Warn of verdicts without information; raise NoInformation after PATIENCE_STEPS such steps."""
        local = []
        for name in self._alarms:
            reward = self.rewards[name]
            rounded = isinstance(reward, VlmPairwise) and reward.rating.verdict == "hard"
            local.append(extent((c.verdict.first for g in scores.groups[name] for c in g.comparisons), rounded))
        ranks = self.world.gather(np.stack(local)[None])
        for k, (name, alarm) in enumerate(self._alarms.items()):
            if not (problem := alarm.add(ranks[:, k])):
                continue
            message = f"{name}: the judge's verdicts carry no information: {problem}"
            if alarm.steps >= PATIENCE_STEPS:
                raise NoInformation(f"{message}; {alarm.steps} steps in a row")
            self.log.say(f"WARNING: step {step}, {message}; the run stops after {PATIENCE_STEPS} such steps in a row")
