"""What `Trainer.train` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    """The run folder."""
    metrics: dict[str, float]
    """Metrics of the last evaluation (all are in the folder's `metrics.jsonl`); empty without one."""
    win_rate: float | None
    """Win rate of held-out images against the initial policy's, by the judge or else by the first evaluation reward;
    None without an evaluation, NaN if all its verdicts are missing."""
    lora: Path | None
    """The LoRA in diffusers format, for `pipe.load_lora_weights`; None after full fine-tuning."""
    pipeline: Path | None
    """The whole pipeline after full fine-tuning."""
    report: Path
    """report.html."""
    summary: str
    """The last evaluation in one line."""
