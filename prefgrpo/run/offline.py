"""Training on pairs from files: the targets of a step from their verdicts, and the accuracy on held-out pairs.

    implicit reward r = −(d − d_initial)    d = mean_D ‖v − u‖²    correct: r_i > r_j for the pair's winner i

A held-out pair has the same DRAWS of (ε, t) at every evaluation, so its accuracy is comparable over steps, and d of
the initial policy is computed once. Ties are not counted; equal rewards count ½, as before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from prefgrpo.data.atomic import save_images
from prefgrpo.data.media import Media
from prefgrpo.data.pairs import PairGroup
from prefgrpo.objectives.base import Targets
from prefgrpo.ops import winrate_advantage
from prefgrpo.ops.advantage import Std
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.assignment import BatchPlan
from prefgrpo.rollout.buckets import bucket_of, fitted
from prefgrpo.rollout.plan import StepPlan
from prefgrpo.rollout.render import sample
from prefgrpo.rollout.stored_groups import StoredGroups
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.log import Log
from prefgrpo.run.measures import Estimate, Interval, interval
from prefgrpo.run.trackers import MOST_GROUPS, is_shown, show_groups
from prefgrpo.sde.noise import HELD_OUT_GROUPS
from prefgrpo.update.endpoint import EndpointGradients

DRAWS = 4
"""Draws of (ε, t) per held-out pair."""
PAIRS = "pairs"
"""Name in the report for the source of the verdicts."""


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
        games = torch.stack([targets.wins, targets.counts], 1).double().numpy()
        return StepScores(samples, {PAIRS: targets.win_rate().double().numpy()}, {}, {}, {PAIRS: games}, {}, {})


@dataclass
class HeldOutPairs:
    """Ranks held-out groups by the implicit rewards of the current policy; every rank computes its share."""

    groups: StoredGroups
    """Whose `pairs` are the held-out ones."""
    gradients: EndpointGradients
    folder: RunFolder
    before: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    """[n, G] d under the initial policy, on all ranks."""

    def start(self, resumed: bool) -> None:
        """Get the initial policy's d: computed and stored by a new run, loaded by a resumed one."""
        world = self.groups.world
        file = self.folder.initial_errors
        if not resumed:
            self.before = self.errors()
            world.on_main(lambda: save_images(file, errors=self.before), OSError)
            return

        def read() -> NDArray[np.float64]:
            if not file.is_file():
                raise CheckpointError(f"{file}, of the starting policy, is missing; choose another name")
            stored: NDArray[np.float64] = np.load(file, allow_pickle=False)["errors"]
            return stored

        (found, *_) = world.all_gather_object(world.on_main(read, CheckpointError))
        assert found is not None
        self.before = found

    @torch.no_grad()
    def errors(self) -> NDArray[np.float64]:
        """[n, G] d of the current weights, the mean of DRAWS draws, gathered from all ranks."""
        world = self.groups.world
        count = len(self.groups.pairs)
        mine = list(world.slots(count))
        padding = -(-count // world.dp_size) - len(mine) if world.equal_forwards else 0
        drawn = replace(self.gradients, objective=replace(self.gradients.objective, draws=DRAWS))
        size = self.groups.config.rollout.group_size
        step = self.groups.config.rollout.batch_size
        self.groups.encode([self.groups.pairs[k] for k in mine])
        found: list[tuple[int, list[float]]] = []
        for k in mine + [0] * padding:
            row: list[float] = []
            for first in range(0, size, step):
                plan = BatchPlan(0, 0, tuple((0, member) for member in range(first, first + step)), world.dp_index)
                batch = self.groups.batch(self.groups.pairs[k], plan, HELD_OUT_GROUPS + k, 0)
                errors = torch.stack([drawn.error(batch, draw) for draw in range(DRAWS)])
                row += errors.double().mean(0).tolist()
            found.append((k, row))
        of_group = dict(world.gather_items(found))
        return np.array([of_group[k] for k in range(count)])

    def measure(self) -> tuple[Estimate, float]:
        """(share of the judged pairs that the current weights rank correctly, with its interval over prompts; mean of
        the winners' rewards minus the losers')."""
        rewards = self.before - self.errors()
        prompts: dict[tuple[object, ...], int] = {}
        rows: list[tuple[int, float]] = []
        for group, reward in zip(self.groups.pairs, rewards, strict=True):
            prompt = prompts.setdefault((group.prompt.text, group.prompt.source), len(prompts))
            verdicts = np.sign(np.triu(np.nan_to_num(group.wins, nan=0.5) - 0.5, 1))
            for i, j in zip(*np.nonzero(verdicts), strict=True):
                rows.append((prompt, float(verdicts[i, j] * (reward[i] - reward[j]))))
        margins = np.array([margin for _, margin in rows])
        if not rows:
            return Estimate(interval=Interval(prompts=0)), np.nan
        right = (np.sign(margins) + 1) / 2
        prompt_of = np.array([prompt for prompt, _ in rows])
        return Estimate(float(right.mean()), interval=interval(prompt_of, right)), float(margins.mean())
