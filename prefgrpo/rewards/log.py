"""The judgement log: one JSON line per comparison, without pixels, in a file per process.

Invariant: every comparison of a step is logged once; a run that repeats steps first removes their old lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from prefgrpo.data.answer import Answer
from prefgrpo.judge.pairs import Pair

_HEAD = 500
_TAIL = 1500
"""Characters of an answer that are kept; a verdict stands at its end."""


def head_and_tail(text: str) -> str:
    """The beginning and the end of a long text."""
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} […] {text[-_TAIL:]}"


def log_judgements(
    path: Path, reward: str, step: int, group: int, prompt: str, verdicts: Mapping[Pair, Answer]
) -> None:
    """One line per comparison of a group in step `step`, from 1: members, P(first) or why it is missing, answer, …"""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for (first, second), v in verdicts.items():
            line = {"step": step, "reward": reward, "group": group, "first": first, "second": second}
            line |= {"p_first": v.value, "reason": v.reason, "latency_s": round(v.seconds, 6), "retries": v.retries}
            line |= {"parts": v.parts, "raw": head_and_tail(v.raw), "prompt": prompt[:2000]}
            file.write(json.dumps(line) + "\n")  # ASCII: some readers treat U+2028 as a line break


def truncate_log(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, which will be judged again, and lines that a dying node left broken."""
    if not path.is_file():
        return
    kept = path.with_name(f".{path.name}")
    with path.open(encoding="utf-8", errors="replace") as old, kept.open("w", encoding="utf-8") as new:
        for line in old:
            written = re.match(r'{"step": (\d+), ', line)
            if written and int(written[1]) <= step and line.endswith("}\n"):
                new.write(line)
    kept.replace(path)
