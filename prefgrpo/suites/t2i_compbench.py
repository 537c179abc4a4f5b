"""T2I-CompBench++ (arXiv 2307.06350): 8 categories × 300 prompts × 10 images, one folder per category.

    CATEGORY/samples/PROMPT_NNNNNN.png, numbered consecutively      CATEGORY/…/vqa_result.json: [{question_id, answer}]

Its tools (BLIP-VQA, UniDet, CLIP, 3-in-1) take the prompt from the file name, up to the first '_', and need diffusers
0.15. Run each with a category's folder as its output folder; results are read from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, Json, TypeAdapter

from prefgrpo.data.prompts import DataError, Prompt, read_prompts
from prefgrpo.suites.base import Number, Results, Row, SampleFile, Suite, check, mean, read_text, require_folder

RESULTS = {
    "color": "annotation_blip",
    "shape": "annotation_blip",
    "texture": "annotation_blip",
    "spatial": "labels/annotation_obj_detection_2d",
    "3d_spatial": "labels/annotation_obj_detection_3d",
    "numeracy": "annotation_num",
    "non_spatial": "annotation_clip",
    "complex": "annotation_3_in_1",
}
"""Category → folder where its tool writes vqa_result.json."""
_MAX_PROMPT_BYTES = 255 - len("_000000.png")


@dataclass(frozen=True)
class _Answer:
    """A row of vqa_result.json."""

    answer: Number


_ANSWERS: TypeAdapter[list[_Answer]] = TypeAdapter(Json[Annotated[list[_Answer], Field(min_length=1)]])


class T2ICompBench(Suite):
    """T2I-CompBench++."""

    title = "T2I-CompBench++"
    source = "the folder examples/dataset of Karine-Huang/T2I-CompBench, or one CATEGORY_val.txt of it"
    samples = 10
    results_source = "the folder with a folder per category, in which its tools wrote vqa_result.json"

    def read(self, path: Path) -> list[Prompt]:
        """The prompts of all categories found, in the suite's order."""
        files = {name: path / f"{name}_val.txt" for name in RESULTS} if path.is_dir() else {_category(path): path}
        prompts: list[Prompt] = []
        for name, file in files.items():
            for k, p in enumerate(read_prompts(file, unique=False) if file.is_file() or not path.is_dir() else ()):
                text = p.text.split("\t")[0]
                if set("/_") & set(text) or len(text.encode()) > _MAX_PROMPT_BYTES:
                    raise DataError(f"{file}: {p}: cannot be part of a file name: too long, or contains / or _")
                prompts.append(Prompt(len(prompts), text, {"category": name, "number": k}, line=p.line))
        if not prompts:
            raise DataError(f"{path} contains no CATEGORY_val.txt; expected {self.source}")
        return prompts

    def sample_files(self, prompts: Sequence[Prompt], samples: int, out: Path, ending: str) -> list[SampleFile]:
        """color/samples/PROMPT_000123.png"""
        n, files = samples or self.samples, []
        for p in prompts:
            folder, first = out / p.meta["category"] / "samples", n * p.meta["number"]
            files += [(p, k, folder / f"{p.text}_{first + k:06d}{ending}") for k in range(n)]
        return files

    def read_results(self, path: Path) -> Results:
        """Mean answer of each category whose tool has been run."""
        require_folder(path, self.title, self.results_source)
        rows, missing = [], []
        for name, folder in RESULTS.items():
            file = path / name / folder / "vqa_result.json"
            if not file.is_file():
                rows.append(Row(name, None, 0, 1))
                missing.append(f"{name}: {file.relative_to(path)} is missing")
                continue
            expected = "[{question_id, answer}]"
            answers = [row.answer for row in check(_ANSWERS, read_text(file, expected), file, expected)]
            rows.append(Row(name, mean(answers), len(answers)))
        if len(missing) == len(RESULTS):
            raise DataError(f"--results: {path}: expected {self.results_source}; found none")
        by = f"Read from {path.name}, written by the suite's own tools; each category has its own scale."
        return Results(self.title, by, {}, {"category": rows}, missing)


def _category(file: Path) -> str:
    """The category of a file CATEGORY_val.txt. Raises DataError for any other name."""
    name = file.stem.removesuffix("_val")
    if name not in RESULTS:
        raise DataError(f"{file}: expected a file CATEGORY_val.txt of {', '.join(RESULTS)}")
    return name
