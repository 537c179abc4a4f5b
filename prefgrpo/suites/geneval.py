"""GenEval (arXiv 2310.11513): 553 prompts × 4 images; fraction of correct images per task, and its mean over tasks.

    NNNNN/metadata.jsonl, NNNNN/samples/NNNNN.png      results.jsonl: {filename, tag, prompt, correct, reason, …}

The suite uses mmdet 2's Mask2Former, the reward `geneval` that of transformers, with other weights unless
`detector_options` selects the suite's. Our numbers are therefore labelled. It is saturated: current models solve
most of its tasks (arXiv 2512.16853).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, Json, StrictBool, TypeAdapter

from prefgrpo.data.answer import Answer
from prefgrpo.data.file_names import Generated
from prefgrpo.data.prompts import Prompt
from prefgrpo.rewards.geneval import TAGS
from prefgrpo.suites.base import Results, SampleFile, Suite, check, mean, problems, read_text, rows_by_name

Image = tuple[str, str, float | None]
"""(tag, prompt, 1 if the image is correct, else 0; None: missing)"""


@dataclass(frozen=True)
class _Row:
    """A line of results.jsonl."""

    tag: Annotated[str, Field(pattern=f"^({'|'.join(TAGS)})$")]
    prompt: str
    correct: StrictBool


_ROW: TypeAdapter[_Row] = TypeAdapter(Json[_Row])


class GenEval(Suite):
    """GenEval."""

    title = "GenEval"
    source = "prompts/evaluation_metadata.jsonl of djghosh13/geneval"
    samples = 4
    reward = "geneval"
    reward_options: ClassVar = {"value": "correct"}
    results_source = "the results.jsonl that its evaluation/evaluate_images.py wrote"

    columns = "tag and include"

    def owns(self, prompt: Prompt) -> bool:
        """Rows of its metadata."""
        return prompt.meta.get("tag") in TAGS and "include" in prompt.meta

    def file(self, prompt: Prompt, number: int, ending: str) -> Path:
        """images/00012/samples/00003.png"""
        return _folder(prompt) / "samples" / f"{number:05d}{ending}"

    def write_other_files(self, files: Sequence[SampleFile], out: Path) -> None:
        """Write each prompt's metadata.jsonl."""
        for prompt in {p.id: p for p, _, _ in files}.values():
            row = json.dumps({**prompt.meta, "prompt": prompt.text})
            (out / _folder(prompt) / "metadata.jsonl").write_text(row, encoding="utf-8")

    def results(self, files: Sequence[Generated], scores: Sequence[Answer], options: Mapping[str, Any]) -> Results:
        """From the verdicts of the reward `geneval`."""
        rows = [(g.prompt.meta["tag"], g.prompt.text, s.value) for g, s in zip(files, scores, strict=True)]
        detector = str(options.get("detector", "prefgrpo.rewards.detectors:Transformers"))
        mmdet = detector == "prefgrpo.rewards.detectors:MMDet"
        by = "the suite's detector, mmdet" if mmdet else f"the detector {detector.rpartition(':')[2]}, not mmdet's"
        note = "" if mmdet else ": close to published numbers, but not comparable with them"
        scored_by = f"Counted by the suite's rule from the detections of {by}{note}."
        return table(scored_by, rows, problems(files, scores, 4))

    def read_results(self, path: Path) -> Results:
        """From the suite's results.jsonl."""
        lines = enumerate(read_text(path, self.results_source).split("\n"), start=1)
        rows = [check(_ROW, line, f"{path}, line {k}", self.results_source) for k, line in lines if line.strip()]
        images = [(row.tag, row.prompt, float(row.correct)) for row in rows]
        return table(f"Read from {path.name}, written by the suite's own evaluation.", images, [])


def _folder(prompt: Prompt) -> Path:
    return Path("images", f"{prompt.id:05d}")


def table(scored_by: str, images: Sequence[Image], missing: list[str]) -> Results:
    """One row per task; the overall score is the mean of the six task means. Prompts with a missing image are left out
    of the fraction of prompts."""
    rows = sorted(rows_by_name((tag, value) for tag, _, value in images), key=lambda row: TAGS.index(row.name))
    prompts: dict[str, list[float | None]] = {}
    for _, prompt, value in images:
        prompts.setdefault(prompt, []).append(value)
    all_tasks = len(rows) == len(TAGS)
    summary = {
        "overall (mean of the six tasks)": mean(row.mean for row in rows) if all_tasks else None,
        "correct images": mean(v for _, _, v in images if v is not None),
        "prompts with a correct image": mean(float(1 in values) for values in prompts.values() if None not in values),
    }
    absent = [f"no image of the task {tag}" for tag in TAGS if tag not in {row.name for row in rows}]
    return Results("GenEval", scored_by, summary, {"task": rows}, [*absent, *missing])
