"""Prompts: reading them, and which ones a training step uses.

Invariant: the prompts of step k depend on (seed, k) alone, so a resumed run and any world size see the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Prompt:
    """One prompt; its position in the file is its group id."""

    id: int
    text: str
    meta: dict[str, Any] = field(default_factory=dict)


class DataError(ValueError):
    """A prompts file that cannot be used; the message says where and what to do."""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a .txt file, one per line, blank lines skipped; duplicates keep their first place.

    Raises DataError for a missing or empty file and for every line that is not UTF-8, with line numbers.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"prompts file not found: {file}; expected a text file with one prompt per line")
    texts: dict[str, None] = {}
    bad: list[int] = []
    for number, raw in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            bad.append(number)
            continue
        if text:
            texts.setdefault(text)
    if bad:
        shown = ", ".join(map(str, bad[:10])) + (" …" if len(bad) > 10 else "")
        raise DataError(f"{file}: {len(bad)} line(s) are not valid UTF-8 (line {shown}); re-save the file as UTF-8")
    if not texts:
        raise DataError(f"{file} holds no prompt: every line is blank; expected one prompt per line")
    return [Prompt(i, text) for i, text in enumerate(texts)]


def step_prompts(total: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the prompts of training step `step`: consecutive slices of one seeded permutation per epoch."""
    indices: list[int] = []
    position = step * per_step
    while len(indices) < per_step:
        epoch, start = divmod(position + len(indices), total)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(total, generator=generator)
        indices += order[start : start + per_step - len(indices)].tolist()
    return indices
