"""Scores a step's groups while they are being generated.

A streaming reward gets a sample at once (a judge gets a pair as soon as both its members exist); an in-process reward
is called on a thread of the scorer as soon as whole groups exist. `finish` waits for the in-process rewards, then for
answers until the deadline. Invariants: values depend only on (seed, step, group, samples), not on the order of arrival;
a metric without data is left out, never 0.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.metric import Metric
from prefgrpo.judge.pairs import Pair
from prefgrpo.rewards.base import PointwiseReward, Reward, Sample, reason_of, score_in_process
from prefgrpo.rewards.log import log_judgements
from prefgrpo.rewards.pairwise import VlmPairwise

AT_ONCE = 16
"""Samples that an in-process pointwise reward scores in one call: as many whole groups as make so many, or one."""
DEADLINE_PASSED = "no answer before the step's deadline; the server hangs, or deadline_s is too short"
NOT_GENERATED = "the sample was not generated"
Key = tuple[int, ...]
"""(group, member) of a sample, or (group, first, second) of a pair."""


@dataclass
class StepScores:
    """Scores of one step's samples, by reward; groups are in the order given to `begin`."""

    samples: dict[int, dict[int, Sample]]
    """Group → member → sample."""
    values: dict[str, NDArray[np.float64]]
    """[n_groups, G]; NaN = missing."""
    scores: dict[str, list[list[Answer]]]
    """The scores of each group's members, with sub-scores and reasons."""
    verdicts: dict[str, list[dict[Pair, Answer]]]
    """Pairwise rewards only: the verdicts on each group's pairs."""
    games: dict[str, NDArray[np.float64]]
    """Pairwise rewards only: [n_groups, 2, G, G] sums and numbers of the verdicts that row beats column."""
    metrics: dict[str, float]
    """judge/… and reward/… metrics of this step."""
    reasons: dict[str, int]
    """'REWARD: reason' → number of comparisons without a verdict, or of values missing for another reason."""


@dataclass
class _Step:
    """State of a step between `begin` and `finish`."""

    number: int
    samples: dict[int, dict[int, Sample]]
    """Group → member → added sample."""
    pairs: dict[str, dict[int, list[Pair]]]
    """Pairwise reward → group → its planned pairs."""
    answers: dict[str, dict[Key, Future[Any]]] = field(default_factory=lambda: defaultdict(dict))
    """Reward → sample or pair → its result; in process: the results by key of all samples or pairs of that call."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Reward → duration of each request or call that was not cancelled."""

    def expect(self, name: str, keys: Sequence[Key], answer: Future[Any]) -> None:
        """Record that a reward answers for these samples or pairs."""
        sent = time.monotonic()
        seconds = self.seconds[name]

        def note(ended: Future[Any]) -> None:
            if not ended.cancelled():
                seconds.append(time.monotonic() - sent)

        answer.add_done_callback(note)
        self.answers[name].update(dict.fromkeys(keys, answer))

    def result(self, name: str, key: Key, deadline: float | None, absent: str) -> Answer:
        """The score or verdict; missing, with the reason, if it is `absent`, late, or its reward raised."""
        if key not in self.answers[name]:
            return Answer(None, absent)
        answer = self.answers[name][key]
        try:
            found = answer.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        except (FutureTimeout, CancelledError):
            answer.cancel()
            return Answer(None, DEADLINE_PASSED)
        except Exception as error:  # noqa: BLE001  (a reward's libraries may raise anything)
            return Answer(None, reason_of(error))
        result: Answer = found[key] if isinstance(found, dict) else found
        return result

    def cancel(self) -> None:
        """Cancel all unanswered requests."""
        for answer in chain.from_iterable(answers.values() for answers in self.answers.values()):
            answer.cancel()


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
        """deadline_s: longest that `finish` waits for judges; none: the rewards' longest answer timeout, at least the
        default of judge.deadline_s. log_path: JSONL file for all comparisons. active: False in a process whose samples
        are scored by another one. Raises ValueError if a pair plan does not fit the group size.
        """
        self.pairwise = {name: reward for name, reward in rewards.items() if isinstance(reward, VlmPairwise)}
        if group_size < 2 and self.pairwise:
            raise ValueError(f"pairwise rewards need groups of at least 2 samples, got group_size={group_size}")
        for reward in self.pairwise.values():
            reward.plan_pairs(group_size, 0)
        if deadline_s is None:
            deadline_s = max([JudgeConfig.deadline_s, *(reward.answer_s for reward in rewards.values())])
        self.rewards = rewards
        self.group_size = group_size
        self.deadline_s = deadline_s
        self.seed = seed
        self.active = active
        self._log = Path(log_path) if log_path else None
        self._lock = threading.Lock()
        self._open_steps: list[_Step] = []
        self._worker = ThreadPoolExecutor(1, "rewards")
        self._device: int | None = None  # the process's GPU, if it uses one

    def begin(self, step: int, groups: Sequence[int], ahead: bool = False) -> None:
        """Start a step with these groups. ahead: keep the unfinished step of other groups, otherwise cancel it."""
        if not ahead:
            self.cancel()
        if torch.cuda.is_initialized():
            self._device = torch.cuda.current_device()
        pairs = {
            name: {group: reward.plan_pairs(self.group_size, self._seed(step, group)) for group in groups}
            for name, reward in self.pairwise.items()
        }
        self._open_steps.append(_Step(step, {group: {} for group in groups}, pairs))

    def add(self, group: int, member: int, sample: Sample) -> None:
        """Hand over a sample as member 0 … G − 1 of a group, from any thread; does not block."""
        step = next(step for step in self._open_steps if group in step.samples)
        with self._lock:
            step.samples[group][member] = sample
            for name, reward in self.rewards.items() if self.active else ():
                if reward.streams:
                    self._send(step, name, group, member)
                    continue
                call = next(groups for groups in self._calls(step, name) if group in groups)
                if all(len(step.samples[g]) == self.group_size for g in call):
                    self._start(step, name, call)

    def generated(self) -> dict[int, dict[int, Sample]]:
        """Group → member → sample, of the earliest unfinished step."""
        return self._open_steps[0].samples

    def waits(self) -> bool:
        """Whether answers to the earliest unfinished step are outstanding."""
        answers = self._open_steps[0].answers.values()
        return any(not answer.done() for of_reward in answers for answer in of_reward.values())

    def finish(self, progress: Callable[[int], object] = lambda n: None) -> StepScores:
        """Scores of the earliest unfinished step. progress: called with 1 per group scored by a judge or server."""
        step = self._open_steps[0]  # which `cancel` ends if this is interrupted
        scores: dict[str, list[list[Answer]]] = {name: [] for name in self.rewards}
        verdicts: dict[str, list[dict[Pair, Answer]]] = {name: [] for name in self.pairwise}
        tables: dict[str, list[NDArray[np.float64]]] = {name: [] for name in self.pairwise}
        deadline = None  # work in this process has none
        started = time.monotonic()
        for name in sorted(self.rewards, key=lambda name: self.rewards[name].streams):
            if self.rewards[name].streams and deadline is None:
                started = time.monotonic()
                deadline = started + self.deadline_s
            elif self.active and not self.rewards[name].streams:
                for call in self._calls(step, name):
                    if not any(key[0] == call[0] for key in step.answers[name]):  # some member was never generated
                        self._start(step, name, call)
            for group in step.samples:
                if name in self.pairwise:
                    pairs = step.pairs[name][group] if self.active else []
                    absent = "one image of the pair was not generated"
                    found = {p: step.result(name, (group, *p), deadline, absent) for p in pairs}
                    of_group, wins, counts = self.pairwise[name].tally(self.group_size, found)
                    verdicts[name].append(found)
                    tables[name].append(np.stack([wins, counts]))
                else:
                    keys = [(group, member) for member in range(self.group_size)]
                    of_group = [step.result(name, key, deadline, NOT_GENERATED) for key in keys]
                scores[name].append([score.finite() for score in of_group])
                if deadline is not None:
                    progress(1)
        wait_s = 0.0 if deadline is None else time.monotonic() - started
        self._open_steps.remove(step)
        values = {n: np.array([[s.value for s in row] for row in rows], np.float64) for n, rows in scores.items()}
        values = {name: table.reshape(-1, self.group_size) for name, table in values.items()}  # None: NaN
        shape = (-1, 2, self.group_size, self.group_size)
        games = {name: np.array(rows, np.float64).reshape(shape) for name, rows in tables.items()}
        metrics = self._metrics(step, values, verdicts, wait_s) if self.active else {}
        reasons = _reasons(scores, verdicts) if self.active else {}
        return StepScores(step.samples, values, scores, verdicts, games, metrics, reasons)

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

    def _calls(self, step: _Step, name: str) -> list[list[int]]:
        """The groups of each call of an in-process reward: always the same ones, whatever arrives first."""
        groups = list(step.samples)
        together = 1 if name in self.pairwise else max(AT_ONCE // self.group_size, 1)
        return [groups[k : k + together] for k in range(0, len(groups), together)]

    def _send(self, step: _Step, name: str, group: int, member: int) -> None:
        """Send a new member, or its pairs with the members that exist."""
        reward = self.rewards[name]
        members = step.samples[group]
        if isinstance(reward, PointwiseReward):
            step.expect(name, [(group, member)], reward.submit(members[member]))
            return
        for first, second in step.pairs[name][group]:
            if member in (first, second) and first in members and second in members:
                answer = self.pairwise[name].submit(members[first], members[second])
                step.expect(name, [(group, first, second)], answer)

    def _start(self, step: _Step, name: str, groups: list[int]) -> None:
        """Call an in-process reward for the members of these groups that exist."""
        reward = self.rewards[name]
        members = step.samples
        keys: list[Key] = [(group, member) for group in groups for member in sorted(members[group])]
        if name in self.pairwise:
            pairs = [(group, i, j) for group in groups for i, j in step.pairs[name][group]]
            keys = [(g, i, j) for g, i, j in pairs if i in members[g] and j in members[g]]

        def work() -> dict[Key, Answer]:
            if self._device is not None:  # the current GPU is a setting of every thread
                torch.cuda.set_device(self._device)
            if isinstance(reward, PointwiseReward):
                scores = score_in_process(name, reward, [members[g][m] for g, m in keys])
                return dict(zip(keys, scores, strict=True))
            try:
                verdicts = self.pairwise[name].judge_pairs(members[groups[0]], [(i, j) for _, i, j in keys])
            except Exception:  # whatever a pairwise function of the user raises: its pairs are missing, with this trace
                traceback.print_exc()
                raise
            return dict(zip(keys, verdicts.values(), strict=True))

        step.expect(name, keys, self._worker.submit(work))

    def _metrics(
        self,
        step: _Step,
        values: Mapping[str, NDArray[np.float64]],
        verdicts: Mapping[str, list[dict[Pair, Answer]]],
        wait_s: float,
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, table in values.items():
            missing = np.isnan(table)
            if missing.size:
                metrics[f"reward/{name}/missing_rate"] = Metric(float(missing.mean()), weight=missing.size)
            if seconds := step.seconds[name]:
                p50, p95 = np.percentile(seconds, [50, 95]).tolist()
                metrics[f"reward/{name}/latency_p50"] = Metric(p50, timed=True)
                metrics[f"reward/{name}/latency_p95"] = Metric(p95, "max", timed=True)
        if judged := [of_group for groups in verdicts.values() for of_group in groups if of_group]:
            metrics |= judge_metrics(judged) | {"judge/wait_s": Metric(wait_s, "max", timed=True)}
        for name, groups in verdicts.items() if len(verdicts) > 1 else ():
            of_judge = judge_metrics(groups)
            metrics |= {key.replace("judge/", f"judge/{name}/"): value for key, value in of_judge.items()}
        for name, groups in verdicts.items():
            for (group, members), of_group in zip(step.samples.items(), groups, strict=True):
                prompt = next((sample.prompt for sample in members.values()), "")
                if self._log:
                    log_judgements(self._log, name, step.number + 1, group, prompt, of_group)
        return metrics


def judge_metrics(groups: Sequence[Mapping[Pair, Answer]]) -> dict[str, float]:
    """judge/… metrics of a step from the verdicts on all planned pairs of all groups."""
    every = [v for group in groups for v in group.values()]
    p = np.array([v.value for v in every if v.value is not None])
    metrics: dict[str, float] = {
        "judge/requests": Metric(len(every), "sum"),
        "judge/retries": Metric(sum(v.retries for v in every), "sum", timed=True),
        "judge/failures": Metric(len(every) - len(p), "sum"),
    }
    if every:
        unread = [v.value is None and bool(v.raw) for v in every]
        metrics["judge/parse_failure_rate"] = Metric(float(np.mean(unread)), weight=len(unread))
        metrics["judge/thinking_rate"] = Metric(float(np.mean(["</think" in v.raw for v in every])), weight=len(every))
    if len(p):
        signs = np.sign(p - 0.5)
        metrics["judge/tie_rate"] = Metric(float(np.mean(signs == 0)), weight=len(signs))
        metrics["judge/position_bias"] = Metric(float(np.mean((signs + 1) / 2)), weight=len(signs))
    contradicts = [c for group in groups for c in _contradictions(group)]
    if contradicts:
        metrics["judge/order_inconsistency"] = Metric(float(np.mean(contradicts)), weight=len(contradicts))
    return metrics


def _contradictions(group: Mapping[Pair, Answer]) -> list[bool]:
    """For each pair judged in both orders: whether the two orders give different winners."""
    answers = {pair: v.value for pair, v in group.items() if v.value is not None}
    both = [(p, answers[j, i]) for (i, j), p in answers.items() if i < j and (j, i) in answers]
    return [bool(np.sign(p - 0.5) != np.sign(0.5 - swapped)) for p, swapped in both]


def _reasons(
    scores: Mapping[str, list[list[Answer]]], verdicts: Mapping[str, list[dict[Pair, Answer]]]
) -> dict[str, int]:
    """`StepScores.reasons`: a member without a verdict is not counted again."""
    reasons = Counter[str]()
    for name, rows in scores.items():
        judged = verdicts.get(name) or [{}] * len(rows)
        for row, of_group in zip(rows, judged, strict=True):
            failed = [v.reason for v in of_group.values() if v.value is None]
            lost = [s.reason for s in row if s.value is None and s.reason not in failed]
            reasons.update(f"{name}: {reason}" for reason in failed + lost)
    return dict(reasons.most_common())
