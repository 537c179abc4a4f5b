"""What is recorded of a step's answers: reward/… and judge/… metrics, and the log with a JSON line per comparison,
without pixels, in a file per process.

Invariant: every comparison of a step is logged once; a run that repeats steps first removes their old lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefgrpo.data.answer import Answer
from prefgrpo.data.metric import Metric
from prefgrpo.rewards.base import Key

_HEAD = 500
_TAIL = 1500
"""Characters of an answer that are kept; the verdict is at its end."""


def head_and_tail(text: str) -> str:
    """The beginning and the end of a long text."""
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} […] {text[-_TAIL:]}"


def log_judgements(path: Path, reward: str, step: int, group: int, prompt: str, answers: Mapping[Key, Answer]) -> None:
    """One line per comparison of a group in step `step`, from 1: members, P(first) or why it is missing, answer, …"""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for (first, second), answer in answers.items():
            line = {"step": step, "reward": reward, "group": group, "first": first, "second": second}
            line |= {"p_first": answer.value, "reason": answer.reason}
            line |= {"latency_s": round(answer.seconds, 6), "retries": answer.retries}
            line |= {"parts": answer.parts, "raw": head_and_tail(answer.raw), "prompt": prompt[:2000]}
            file.write(json.dumps(line) + "\n")  # ASCII: some readers treat U+2028 as a line break


def truncate_log(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, which will be judged again, and lines that a dying node left
    incomplete."""
    if not path.is_file():
        return
    kept = path.with_name(f".{path.name}")
    with path.open(encoding="utf-8", errors="replace") as old, kept.open("w", encoding="utf-8") as new:
        for line in old:
            written = re.match(r'{"step": (\d+), ', line)
            if written and int(written[1]) <= step and line.endswith("}\n"):
                new.write(line)
    kept.replace(path)


def step_metrics(
    values: Mapping[str, NDArray[np.float64]],
    seconds: Mapping[str, Sequence[float]],
    answers: Mapping[str, Sequence[Mapping[Key, Answer]]],
    wait_s: float,
) -> dict[str, float]:
    """reward/… and judge/… metrics of a step.

    values: by reward, NaN where missing. seconds: durations of its requests or calls. answers: of rewards that compare,
    about each group's pairs; with several, judge/NAME/… are those of each. wait_s: how long answers were awaited.
    """
    metrics: dict[str, float] = {}
    for name, table in values.items():
        missing = np.isnan(table)
        if missing.size:
            metrics[f"reward/{name}/missing_rate"] = Metric(float(missing.mean()), weight=missing.size)
        if taken := seconds.get(name):
            p50, p95 = np.percentile(taken, [50, 95]).tolist()
            metrics[f"reward/{name}/latency_p50"] = Metric(p50, timed=True)
            metrics[f"reward/{name}/latency_p95"] = Metric(p95, "max", timed=True)
    if judged := [of_group for groups in answers.values() for of_group in groups if of_group]:
        metrics |= judge_metrics(judged) | {"judge/wait_s": Metric(wait_s, "max", timed=True)}
    for name, groups in answers.items() if len(answers) > 1 else ():
        of_judge = judge_metrics(groups)
        metrics |= {key.replace("judge/", f"judge/{name}/"): value for key, value in of_judge.items()}
    return metrics


def judge_metrics(groups: Sequence[Mapping[Key, Answer]]) -> dict[str, float]:
    """judge/… metrics of a step from the answers about all planned pairs of all groups."""
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


def _contradictions(group: Mapping[Key, Answer]) -> list[bool]:
    """For each pair judged in both orders: whether the two orders give different winners."""
    answers = {pair: v.value for pair, v in group.items() if v.value is not None}
    both = [(p, answers[j, i]) for (i, j), p in answers.items() if i < j and (j, i) in answers]
    return [bool(np.sign(p - 0.5) != np.sign(0.5 - swapped)) for p, swapped in both]
