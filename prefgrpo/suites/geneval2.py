"""GenEval 2 (arXiv 2512.16853): 800 prompts × 1 image, one question per object, attribute, count, position and verb.

    Soft-TIFA: p = probability of the right answer;   AM, GM: arithmetic, geometric mean of an image's p, over images

The suite reports AM by skill (over all questions of it) and GM by atomicity (3 … 10 requirements in a prompt). An image
without an answer to every question is left out of all means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefgrpo.data.answer import Answer
from prefgrpo.data.file_names import Generated, file_name
from prefgrpo.data.prompts import Prompt
from prefgrpo.suites.base import Results, SampleFile, Suite, asked_by, mean, problems, rows_by_name


class GenEval2(Suite):
    """GenEval 2."""

    title = "GenEval 2"
    source = "geneval2_data.jsonl of facebookresearch/GenEval2"
    samples = 1
    reward = "soft_tifa"
    columns = "atom_count, vqa_list and skills, with one skill per question"

    def owns(self, prompt: Prompt) -> bool:
        """Rows with as many skills as questions."""
        asked = prompt.meta.get("vqa_list")
        skills = prompt.meta.get("skills")
        lists = isinstance(asked, list) and isinstance(skills, list) and len(asked) == len(skills)
        return lists and isinstance(prompt.meta.get("atom_count"), int)

    def file(self, prompt: Prompt, number: int, ending: str) -> Path:
        """images/000012_0.png"""
        return Path("images", file_name(prompt, number, "plain", ending))

    def write_other_files(self, files: Sequence[SampleFile], out: Path) -> None:
        """Write images.json, {prompt: its first image}, which the suite's evaluation.py takes."""
        first = {prompt.text: str(file.resolve()) for prompt, number, file in files if number == 0}
        (out / "images.json").write_text(json.dumps(first, indent=1), encoding="utf-8")

    def results(self, files: Sequence[Generated], scores: Sequence[Answer], options: Mapping[str, Any]) -> Results:
        """From the answers of the reward `soft_tifa`."""
        answers: list[tuple[str, float | None]] = []
        images: list[tuple[str, float | None]] = []
        means: list[float] = []
        for generated, score in zip(files, scores, strict=True):
            meta = generated.prompt.meta
            p = list(score.parts.values())
            means += [sum(p) / len(p)] if score.value is not None else []
            answers += zip(meta["skills"], p if score.value is not None else [None] * len(meta["skills"]), strict=True)
            images.append((f"{meta['atom_count']:2d}", score.value))
        geometric = mean(value for _, value in images if value is not None)
        return Results(
            self.title,
            f"Soft-TIFA from a served judge with {asked_by(options, 'Qwen3-VL-8B-Instruct')}.",
            {"Soft-TIFA GM": geometric, "Soft-TIFA AM": mean(means)},
            {
                "skill, AM": sorted(rows_by_name(answers), key=lambda row: row.name),
                "atomicity, GM": sorted(rows_by_name(images), key=lambda row: row.name),
            },
            problems(files, scores),
        )
