"""Scores a step's groups while they are being generated.

`add` hands over a sample without blocking: streaming rewards get it at once (a judge gets a pair as soon as both its
members exist), in-process rewards score groups, on a thread of the scorer, as soon as they are complete. `finish` waits
for the in-process rewards, then for answers until the deadline. A second step may begin before the first is finished;
each has its own counts and timings. Invariant: values depend only on (seed, step, group, samples), not on the order of
arrival; a metric without data (latency without an answer) is left out, never 0.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from prefgrpo.data.metric import Metric
from prefgrpo.judge import traffic
from prefgrpo.rewards.base import (
    Comparison,
    GroupScores,
    GroupSession,
    GroupwiseReward,
    PointwiseReward,
    Reward,
    RewardError,
    Sample,
    Score,
)
from prefgrpo.rewards.log import log_judgements
from prefgrpo.rewards.request_stats import DEADLINE_PASSED, RequestStats, latency

AT_ONCE = 16
"""Samples that an in-process pointwise reward scores in one call: as many whole groups as make so many, or one."""
_DEADLINE_S = 600.0
_MISSING = Score(None, "the sample was not generated")


@dataclass
class StepScores:
    """Scores of one step's samples."""

    values: dict[str, NDArray[np.float64]]
    """[n_groups, G] per reward, groups in the order given to `begin`; NaN = missing."""
    groups: dict[str, list[GroupScores]]
    """Per reward and group: sub-scores, wins, counts, all comparisons."""
    metrics: dict[str, float]
    """judge/… and reward/… metrics of this step."""
    reasons: dict[str, int]
    """'REWARD: reason' → number of comparisons without a verdict, or of values missing for another reason, most common
    first."""


@dataclass
class _Step:
    """State of a step between `begin` and `finish`."""

    number: int
    samples: dict[int, dict[int, Sample]]
    """Group → member → added sample."""
    stats: dict[str, RequestStats]
    sessions: dict[str, dict[int, GroupSession]] = field(default_factory=dict)
    """Reward → group → its session."""
    counts: Counter[str] = field(default_factory=Counter)
    """Statistics of the judge clients for this step (`judge.traffic`)."""

    def cancel(self) -> None:
        """Cancel all unanswered requests."""
        for sessions in self.sessions.values():
            for session in sessions.values():
                session.cancel()


class Scorer:
    """Scores groups of `group_size` samples under several rewards."""

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        group_size: int,
        deadline_s: float | None = None,
        seed: int = 0,
        log_path: str | Path | None = None,
        active: bool = True,
    ) -> None:
        """`deadline_s`: longest that `finish` waits for judges; none: ten times the rewards' longest answer timeout, at
        least 600 s. `log_path`: JSONL file for all comparisons. `active`: False in a process whose samples are scored
        by another one; all values are then missing.
        """
        if group_size < 2 and any(isinstance(r, GroupwiseReward) for r in rewards.values()):
            raise ValueError(f"pairwise rewards need groups of at least 2 samples, got group_size={group_size}")
        for reward in rewards.values():
            reward.check(group_size)
        if deadline_s is None:
            deadline_s = max([_DEADLINE_S, *(10 * reward.answer_s for reward in rewards.values())])
        self.rewards, self.group_size, self.deadline_s, self.seed = rewards, group_size, deadline_s, seed
        self.active = active
        self._log = Path(log_path) if log_path else None
        self.samples: dict[int, dict[int, Sample]] = {}
        """Group → member → sample, of the next step to finish or, right after `finish`, of that step."""
        self._lock = threading.Lock()
        self._open_steps: list[_Step] = []
        self._worker = ThreadPoolExecutor(1, "rewards")
        """Runs the in-process rewards, one call at a time."""
        self._device: int | None = None
        """The process's GPU, if it uses one."""

    def begin(self, step: int, groups: Sequence[int], ahead: bool = False) -> None:
        """Start a step with these group ids. ahead: keep the step that has already begun, which must have other groups
        and is finished first; otherwise unfinished steps are cancelled.
        """
        if not ahead:
            self.cancel()
        if torch.cuda.is_initialized():
            self._device = torch.cuda.current_device()
        one = _Step(step, {g: {} for g in groups}, {name: RequestStats() for name in self.rewards})
        if self.active:
            one.sessions = {name: self._sessions(one, name, reward) for name, reward in self.rewards.items()}
        self._open_steps.append(one)
        self.samples = self._open_steps[0].samples

    def add(self, group: int, member: int, sample: Sample) -> None:
        """Hand over a sample as member 0 … G − 1 of a group, from any thread; does not block."""
        one = next(one for one in self._open_steps if group in one.samples)
        with self._lock, traffic.collect_counts(one.counts):
            one.samples[group][member] = sample
            for sessions in one.sessions.values():
                sessions[group].add(member, sample)

    def generated(self) -> dict[int, dict[int, Sample]]:
        """Group → member → sample, of the earliest unfinished step."""
        return self._open_steps[0].samples

    def finish(self, progress: Callable[[int], object] = lambda n: None) -> StepScores:
        """Scores of the earliest unfinished step; takes at most the in-process rewards' time plus `deadline_s`.

        progress: called with 1 for every group scored by a judge or server.
        """
        one = self._open_steps.pop(0)
        self.samples = one.samples
        if not self.active:
            none = {name: [GroupScores([_MISSING] * self.group_size) for _ in one.samples] for name in self.rewards}
            missing = np.full((len(one.samples), self.group_size), np.nan)
            return StepScores(dict.fromkeys(self.rewards, missing), none, {}, {})
        with traffic.collect_counts(one.counts):
            inside = {name: sessions for name, sessions in one.sessions.items() if not self.rewards[name].streams}
            groups = {name: [s.result(math.inf) for s in sessions.values()] for name, sessions in inside.items()}
            started = time.monotonic()
            streaming = {name: sessions for name, sessions in one.sessions.items() if self.rewards[name].streams}
            for name, sessions in streaming.items():
                groups[name] = []
                for session in sessions.values():
                    groups[name].append(session.result(started + self.deadline_s))
                    progress(1)
        wait_s = time.monotonic() - started if streaming else 0.0
        one.cancel()
        return self._collect(one, {name: groups[name] for name in self.rewards}, wait_s)

    def cancel(self) -> None:
        """Cancel all unfinished steps."""
        while self._open_steps:
            self._open_steps.pop().cancel()

    def close(self) -> None:
        """Cancel unfinished steps, and close the rewards."""
        self.cancel()
        self._worker.shutdown()
        for reward in self.rewards.values():
            reward.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seed(self, step: int, group: int) -> int:
        """Seed of a group's pair plan: a function of (seed, step, group)."""
        words = [self.seed & 0xFFFFFFFF, step & 0xFFFFFFFF, group & 0xFFFFFFFF]
        return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])

    def _sessions(self, one: _Step, name: str, reward: Reward) -> dict[int, GroupSession]:
        """Group → its session under a reward."""
        if reward.streams:
            return {group: self._session(one, name, reward, group) for group in one.samples}
        return self._units(one, name, reward)

    def _session(self, one: _Step, name: str, reward: Reward, group: int) -> GroupSession:
        if isinstance(reward, GroupwiseReward):
            return reward.session(self.group_size, self._seed(one.number, group), one.stats[name])
        assert isinstance(reward, PointwiseReward)
        return _PointwiseSession(reward, self.group_size, one.stats[name])

    def _units(self, one: _Step, name: str, reward: Reward) -> dict[int, GroupSession]:
        """Sessions of all groups under an in-process reward, which share calls."""
        groups = list(one.samples)
        together = max(AT_ONCE // self.group_size, 1) if isinstance(reward, PointwiseReward) else 1
        sessions: dict[int, GroupSession] = {}
        for k in range(0, len(groups), together):
            unit = _InProcessUnit(groups[k : k + together], self.group_size, partial(self._start, one, name, reward))
            sessions |= {group: _InProcessSession(unit, group) for group in unit.members}
        return sessions

    def _start(
        self, one: _Step, name: str, reward: Reward, added: dict[int, dict[int, Sample]]
    ) -> Future[dict[int, GroupScores]]:
        """Start to score groups (group → member → sample) under an in-process reward."""
        stats = one.stats[name]

        def work() -> dict[int, GroupScores]:
            started = time.monotonic()
            if self._device is not None:  # the current GPU is a setting of every thread
                torch.cuda.set_device(self._device)
            with traffic.collect_counts(one.counts):
                if isinstance(reward, PointwiseReward):
                    scores = self._pointwise(name, reward, added)
                else:
                    assert isinstance(reward, GroupwiseReward)
                    seeds = {group: self._seed(one.number, group) for group in added}
                    scores = {g: self._groupwise(reward, members, seeds[g]) for g, members in added.items()}
            stats.done(time.monotonic() - started)
            return scores

        stats.sent()
        return self._worker.submit(work)

    def _pointwise(
        self, name: str, reward: PointwiseReward, added: dict[int, dict[int, Sample]]
    ) -> dict[int, GroupScores]:
        """One call, in order of groups and members; if it raises, one call per sample."""
        keys = [(g, m) for g, members in added.items() for m in sorted(members)]
        samples = [added[g][m] for g, m in keys]
        try:
            scores = reward.score(samples) if samples else []
            if len(scores) != len(samples) or not all(isinstance(s, Score) for s in scores):
                kinds = ", ".join(sorted({type(s).__name__ for s in scores})) or "nothing"
                got = f"expected one Score for each of {len(samples)} samples, got {len(scores)} of {kinds}"
                raise RewardError(f"reward '{name}': {got}")
        except RewardError as error:  # it did not return a list of scores, and would not for one sample
            scores = [Score(None, str(error))] * len(samples)
        except Exception:  # noqa: BLE001  (a reward's libraries may raise anything; same as in `reward serve`)
            traceback.print_exc()
            scores = [_score_one(reward, sample) for sample in samples]
        scored = dict(zip(keys, scores, strict=True))
        return {g: GroupScores([scored.get((g, m), _MISSING) for m in range(self.group_size)]) for g in added}

    def _groupwise(self, reward: GroupwiseReward, made: dict[int, Sample], seed: int) -> GroupScores:
        """Run an in-process groupwise reward on the members that exist."""
        members = sorted(made)
        if len(members) < 2:
            return GroupScores([Score(None, "fewer than two samples of the group exist")] * self.group_size)
        try:
            part = reward.score_group([made[m] for m in members], seed)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            return GroupScores([_failed_score(error)] * self.group_size)
        return part if len(members) == self.group_size else _expand_to_group(part, members, self.group_size)

    def _collect(self, one: _Step, groups: dict[str, list[GroupScores]], wait_s: float) -> StepScores:
        reasons: Counter[str] = Counter()
        values: dict[str, NDArray[np.float64]] = {}
        metrics: dict[str, float] = {}
        for name, scored in groups.items():
            checked = [[s.finite() for s in g.scores] for g in scored]
            table = [s.value for row in checked for s in row]
            values[name] = np.array(table, np.float64).reshape(-1, self.group_size)  # None: NaN
            for g, row in zip(scored, checked, strict=True):
                failed = [c.verdict.reason for c in g.comparisons if c.verdict.first is None]
                lost = [s.reason for s in row if s.value is None and s.reason not in failed]
                reasons.update(f"{name}: {reason}" for reason in failed + lost)
            missing = np.isnan(values[name])
            if missing.size:
                metrics[f"reward/{name}/missing_rate"] = Metric(float(missing.mean()), weight=missing.size)
            metrics |= latency(f"reward/{name}/", one.stats[name].seconds)
        judged = [name for name, scored in groups.items() if any(g.comparisons for g in scored)]
        if judged:
            comparisons = [g.comparisons for name in judged for g in groups[name] if g.comparisons]
            metrics |= judge_metrics(comparisons, [one.stats[name] for name in judged], wait_s)
        metrics |= traffic.metrics(one.counts)
        if self._log:
            for name, scored in groups.items():
                for (group, made), scores in zip(one.samples.items(), scored, strict=True):
                    prompt = next((s.prompt for s in made.values()), "")
                    log_judgements(self._log, name, one.number, group, prompt, scores.comparisons)
        return StepScores(values, groups, metrics, dict(reasons.most_common()))


class _InProcessUnit:
    """Consecutive groups that an in-process reward scores in one call, as soon as all of their members exist."""

    def __init__(
        self,
        groups: Sequence[int],
        size: int,
        start: Callable[[dict[int, dict[int, Sample]]], Future[dict[int, GroupScores]]],
    ) -> None:
        self.members: dict[int, dict[int, Sample]] = {group: {} for group in groups}
        self.count = len(groups) * size
        self.start = start
        self.scores: Future[dict[int, GroupScores]] | None = None

    def add(self, group: int, member: int, sample: Sample) -> None:
        self.members[group][member] = sample
        if sum(map(len, self.members.values())) == self.count:
            self.scores = self.start(self.members)

    def result(self, group: int) -> GroupScores:
        """The scores, whenever they come: there is no deadline for work in this process."""
        if self.scores is None:  # some members were never generated
            self.scores = self.start(self.members)
        return self.scores.result()[group]


@dataclass(frozen=True)
class _InProcessSession:
    """One group of a unit."""

    unit: _InProcessUnit
    group: int

    def add(self, member: int, sample: Sample) -> None:
        self.unit.add(self.group, member, sample)

    def result(self, deadline: float) -> GroupScores:
        return self.unit.result(self.group)

    def cancel(self) -> None:
        if self.unit.scores is not None:
            self.unit.scores.cancel()


class _PointwiseSession:
    """A group that is being scored by a streaming pointwise reward."""

    def __init__(self, reward: PointwiseReward, size: int, stats: RequestStats) -> None:
        self.reward, self.size, self.stats = reward, size, stats
        self.answers: dict[int, Future[Score]] = {}

    def add(self, member: int, sample: Sample) -> None:
        sent = time.monotonic()
        self.stats.sent()
        self.answers[member] = self.reward.submit(sample)
        self.answers[member].add_done_callback(lambda _: self.stats.done(time.monotonic() - sent))

    def result(self, deadline: float) -> GroupScores:
        return GroupScores([self._score(member, deadline) for member in range(self.size)])

    def _score(self, member: int, deadline: float) -> Score:
        if member not in self.answers:
            return _MISSING
        try:
            return self.answers[member].result(max(deadline - time.monotonic(), 0.0))
        except (FutureTimeout, CancelledError):
            self.answers[member].cancel()
            return Score(None, DEADLINE_PASSED)
        except Exception as error:  # noqa: BLE001
            return _failed_score(error)

    def cancel(self) -> None:
        for answer in self.answers.values():
            answer.cancel()


def judge_metrics(groups: list[list[Comparison]], stats: Sequence[RequestStats], wait_s: float) -> dict[str, float]:
    """judge/… metrics of a step from all planned comparisons of all groups."""
    every = [c for group in groups for c in group]
    answered = [c for c in every if c.verdict.first is not None]
    sent, done = [f.first_sent for f in stats if f.first_sent], [f.last_done for f in stats if f.last_done]
    busy = max(done) - min(sent) if sent and done else 0.0
    metrics: dict[str, float] = {
        "judge/requests": Metric(len(every), "sum"),
        "judge/retries": Metric(sum(c.verdict.retries for c in every), "sum", timed=True),
        "judge/failures": Metric(len(every) - len(answered), "sum"),
        "judge/busy_s": Metric(busy, "max", timed=True),
        "judge/wait_s": Metric(wait_s, "max", timed=True),
        "judge/queue_max": Metric(sum(f.peak for f in stats), "sum", timed=True),
        "judge/queue_mean": Metric(sum(f.waited_s for f in stats) / busy if busy else 0.0, "sum", timed=True),
    }
    if answered:
        signs = np.sign([float(c.verdict.value or 0.0) - 0.5 for c in answered])
        metrics |= latency("judge/", [c.verdict.latency_s for c in answered])
        metrics["judge/tie_rate"] = Metric(float(np.mean(signs == 0)), weight=len(signs))
        metrics["judge/position_bias"] = Metric(float(np.mean((signs + 1) / 2)), weight=len(signs))
    contradicts = [c for group in groups for c in _contradictions(group)]
    if contradicts:
        metrics["judge/order_inconsistency"] = Metric(float(np.mean(contradicts)), weight=len(contradicts))
    return metrics


def _contradictions(group: list[Comparison]) -> list[bool]:
    """For each pair judged in both orders: whether the two orders give different winners."""
    answers = {(c.first, c.second): p for c in group if (p := c.verdict.first) is not None}
    return [
        np.sign(p - 0.5) != np.sign(0.5 - answers[j, i]) for (i, j), p in answers.items() if i < j and (j, i) in answers
    ]


def _score_one(reward: PointwiseReward, sample: Sample) -> Score:
    """The score of one sample, missing if the reward raises."""
    try:
        return reward.score([sample])[0]
    except Exception as error:  # noqa: BLE001
        return _failed_score(error)


def _failed_score(error: Exception) -> Score:
    return Score(None, f"the reward raised {type(error).__name__}: {str(error)[:200]}")


def _expand_to_group(part: GroupScores, members: list[int], size: int) -> GroupScores:
    """Expand the scores of some members to a group of `size`; the others are missing."""
    whole = GroupScores([_MISSING] * size)
    for member, score in zip(members, part.scores, strict=True):
        whole.scores[member] = score
    if part.wins is not None and part.counts is not None:
        whole.wins, whole.counts = np.zeros((2, size, size))
        whole.wins[np.ix_(members, members)], whole.counts[np.ix_(members, members)] = part.wins, part.counts
    whole.comparisons = [Comparison(members[c.first], members[c.second], c.verdict) for c in part.comparisons]
    return whole
