"""Scores a step's groups while they are being generated.

A streaming reward is asked as soon as the samples of a question exist; an in-process reward is called on a thread of
the scorer as soon as whole groups exist. `finish` waits for the in-process rewards, then for answers until the
deadline. Invariants: values depend only on (seed, step, group, samples), not on the order of arrival; a metric without
data is left out, never 0.
"""

from __future__ import annotations

import threading
import time
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
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.rewards.base import NOT_GENERATED, Key, Question, Reward, Sample, Tally, answers_in_process, reason_of
from prefgrpo.rewards.log import log_judgements, step_metrics
from prefgrpo.rewards.pairs import Plan, rounded

AT_ONCE = 16
"""Samples that an in-process reward scores in one call: as many whole groups as fit, at least one."""
DEADLINE_PASSED = "no answer before the step's deadline; the server hangs, or deadline_s is too short"


@dataclass
class StepScores:
    """Scores of one step's samples, by reward; groups are in the order given to `begin`."""

    samples: dict[int, dict[int, Sample]]
    """Group → member → sample."""
    values: dict[str, NDArray[np.float64]]
    """[n_groups, G]; NaN = missing."""
    scores: dict[str, list[list[Answer]]]
    """The values of each group's members, with sub-scores and reasons."""
    answers: dict[str, list[dict[Key, Answer]]]
    """Rewards that compare only: the answers about each group's pairs."""
    comparisons: dict[str, NDArray[np.float64]]
    """Rewards that compare only: [n_groups, 2, G, G] sums and numbers of the answers that row beats column."""
    metrics: dict[str, float]
    """judge/… and reward/… metrics of this step."""
    reasons: dict[str, int]
    """'REWARD: reason' → number of comparisons without an answer, or of values missing for another reason."""


@dataclass
class _OpenStep:
    """State of a step between `begin` and `finish`."""

    number: int
    samples: dict[int, dict[int, Sample]]
    """Group → member → added sample."""
    keys: dict[str, dict[int, list[Key]]]
    """Reward → group → what is asked about it."""
    answers: dict[str, dict[tuple[int, Key], Future[Any]]] = field(default_factory=lambda: defaultdict(dict))
    """Reward → (group, key) → its answer; in process: the answers of that call by (group, key)."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Reward → duration of each request or call that was not cancelled."""

    def question(self, group: int, key: Key) -> Question | None:
        """The samples, if they exist."""
        members = self.samples[group]
        return tuple(members[member] for member in key) if all(member in members for member in key) else None

    def expect(self, name: str, keys: Sequence[tuple[int, Key]], answer: Future[Any]) -> None:
        """Record that a reward answers these questions."""
        sent = time.monotonic()
        seconds = self.seconds[name]

        def note(ended: Future[Any]) -> None:
            if not ended.cancelled():
                seconds.append(time.monotonic() - sent)

        answer.add_done_callback(note)
        self.answers[name].update(dict.fromkeys(keys, answer))

    def answer(self, name: str, group: int, key: Key, deadline: float | None) -> Answer:
        """A finite answer; missing, with the reason, if a sample does not exist, it is late, or its reward raised."""
        if (group, key) not in self.answers[name]:
            return Answer(None, NOT_GENERATED)
        awaited = self.answers[name][group, key]
        try:
            found = awaited.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        except (FutureTimeout, CancelledError):
            awaited.cancel()
            return Answer(None, DEADLINE_PASSED)
        except Exception as error:  # noqa: BLE001  (a reward's libraries may raise anything)
            return Answer(None, reason_of(error))
        answer: Answer = found[group, key] if isinstance(found, dict) else found
        return answer.finite()

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
        plan: Plan | None = None,
    ) -> None:
        """deadline_s: how long `finish` waits for judges at most; none: the rewards' longest answer timeout, at least
        the default of judge.deadline_s. log_path: JSONL file for all comparisons. active: False in a process whose
        samples are scored by another one. plan: of an evaluation: which pairs are compared, instead of the rewards' own
        plans; judges' answers then count as won, tied or lost. Raises ValueError if a plan does not fit the group size.
        """
        if deadline_s is None:
            deadline_s = max([JudgeConfig.deadline_s, *(reward.answer_s for reward in rewards.values())])
        self.rewards = rewards
        self.group_size = group_size
        self.plan = plan
        for name in rewards:
            if not self._keys(name, 0):
                raise ValueError(f"pairwise rewards need groups of at least 2 samples, got group_size={group_size}")
        self.deadline_s = deadline_s
        self.seed = seed
        self.active = active
        self._log = Path(log_path) if log_path else None
        self._lock = threading.Lock()
        self._open_steps: list[_OpenStep] = []
        self._worker = ThreadPoolExecutor(1, "rewards")
        self._device: int | None = None  # the process's GPU, if it uses one

    def begin(self, step: int, groups: Sequence[int], ahead: bool = False) -> None:
        """Start a step with these groups. ahead: keep the unfinished step of other groups, otherwise cancel it."""
        if not ahead:
            self.cancel()
        if torch.cuda.is_initialized():
            self._device = torch.cuda.current_device()
        keys = {name: {group: self._keys(name, self._seed(step, group)) for group in groups} for name in self.rewards}
        self._open_steps.append(_OpenStep(step, {group: {} for group in groups}, keys))

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
        answers: dict[str, list[dict[Key, Answer]]] = {n: [] for n, reward in self.rewards.items() if reward.compares}
        tables: dict[str, list[NDArray[np.float64]]] = {name: [] for name in answers}
        deadline = None  # work in this process has none
        started = time.monotonic()
        for name in sorted(self.rewards, key=lambda name: self.rewards[name].streams):
            if self.rewards[name].streams and deadline is None:
                started = time.monotonic()
                deadline = started + self.deadline_s
            elif self.active and not self.rewards[name].streams:
                for call in self._calls(step, name):
                    if not any(group == call[0] for group, _ in step.answers[name]):  # some member was never generated
                        self._start(step, name, call)
            for group in step.samples:
                keys = step.keys[name][group] if self.active else []
                found = {key: step.answer(name, group, key, deadline) for key in keys}
                tally = self._tally(name, found)
                scores[name].append(tally.members)
                if tally.comparisons is not None:
                    answers[name].append(found)
                    tables[name].append(tally.comparisons)
                if deadline is not None:
                    progress(1)
        wait_s = 0.0 if deadline is None else time.monotonic() - started
        self._open_steps.remove(step)
        values = {n: np.array([[s.value for s in row] for row in rows], np.float64) for n, rows in scores.items()}
        values = {name: table.reshape(-1, self.group_size) for name, table in values.items()}  # None: NaN
        shape = (-1, 2, self.group_size, self.group_size)
        comparisons = {name: np.array(rows, np.float64).reshape(shape) for name, rows in tables.items()}
        if not self.active:
            return StepScores(step.samples, values, scores, answers, comparisons, {}, {})
        self._log_answers(step, answers)
        metrics = step_metrics(values, step.seconds, answers, wait_s)
        return StepScores(step.samples, values, scores, answers, comparisons, metrics, _reasons(scores, answers))

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

    def _keys(self, name: str, seed: int) -> list[Key]:
        """What is asked about a group."""
        reward = self.rewards[name]
        plan = self.plan if self.plan and reward.compares else reward.keys
        return plan(self.group_size, seed)

    def _tally(self, name: str, answers: Mapping[Key, Answer]) -> Tally:
        """What the answers about a group are worth."""
        reward = self.rewards[name]
        if self.plan and reward.judged and reward.compares:
            answers = {key: rounded(answer) for key, answer in answers.items()}
        return reward.tally(self.group_size, answers)

    def _calls(self, step: _OpenStep, name: str) -> list[list[int]]:
        """The groups of each call of an in-process reward: always the same ones, whatever arrives first."""
        groups = list(step.samples)
        together = 1 if self.rewards[name].compares else max(AT_ONCE // self.group_size, 1)
        return [groups[k : k + together] for k in range(0, len(groups), together)]

    def _send(self, step: _OpenStep, name: str, group: int, member: int) -> None:
        """Ask a streaming reward the questions that a new member completes."""
        for key in step.keys[name][group]:
            question = step.question(group, key) if member in key else None
            if question is not None:
                answer = loop_thread().submit(self.rewards[name].answer(*question))
                step.expect(name, [(group, key)], answer)

    def _start(self, step: _OpenStep, name: str, groups: list[int]) -> None:
        """Ask an in-process reward all questions about the members of these groups that exist."""
        asked: dict[tuple[int, Key], Question] = {}
        for group in groups:
            for key in step.keys[name][group]:
                question = step.question(group, key)
                if question is not None:
                    asked[group, key] = question

        def work() -> dict[tuple[int, Key], Answer]:
            if self._device is not None:  # the current GPU is a setting of every thread
                torch.cuda.set_device(self._device)
            return dict(zip(asked, answers_in_process(self.rewards[name], list(asked.values())), strict=True))

        step.expect(name, list(asked), self._worker.submit(work))

    def _log_answers(self, step: _OpenStep, answers: Mapping[str, list[dict[Key, Answer]]]) -> None:
        if self._log is None:
            return
        for name, groups in answers.items():
            for (group, members), of_group in zip(step.samples.items(), groups, strict=True):
                prompt = next((sample.prompt for sample in members.values()), "")
                log_judgements(self._log, name, step.number + 1, group, prompt, of_group)


def _reasons(
    scores: Mapping[str, list[list[Answer]]], answers: Mapping[str, list[dict[Key, Answer]]]
) -> dict[str, int]:
    """`StepScores.reasons`: a member without an answer is not counted again."""
    reasons = Counter[str]()
    for name, rows in scores.items():
        judged = answers.get(name) or [{}] * len(rows)
        for row, of_group in zip(rows, judged, strict=True):
            failed = [answer.reason for answer in of_group.values() if answer.value is None]
            lost = [s.reason for s in row if s.value is None and s.reason not in failed]
            reasons.update(f"{name}: {reason}" for reason in failed + lost)
    return dict(reasons.most_common())
