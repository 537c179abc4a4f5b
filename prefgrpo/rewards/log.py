"""The judgement log: one JSON line per comparison, without pixels, appended and flushed once per group."""

from __future__ import annotations

import json
from pathlib import Path

from prefgrpo.rewards.base import Comparison

_RAW_CHARACTERS = 500


class JudgementLog:
    """Appends judgements to a JSONL file."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open for the run, closed by close())

    def write(self, reward: str, step: int, group: int, prompt: str, comparisons: list[Comparison]) -> None:
        """One line per comparison of a group: who, P(first) or why it is missing, latency, retries, the answer."""
        for c in comparisons:
            v = c.verdict
            line = {"step": step, "reward": reward, "group": group, "first": c.first, "second": c.second}
            line |= {"p_first": v.first, "reason": v.reason, "latency_s": round(v.latency_s, 6), "retries": v.retries}
            line |= {"parts": v.parts, "raw": v.raw[:_RAW_CHARACTERS], "prompt": prompt}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
