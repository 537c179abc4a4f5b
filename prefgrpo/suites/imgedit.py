"""ImgEdit-Bench, basic part (arXiv 2505.20275): 737 edits of nine types, three grades from 1 to 5 each by its judge.

    images/KEY.png      result.json: {key: the judge's reply}      an edit's grade: mean of the lines 'NAME: N'

Its own basic_bench.py asks the judge (published: gpt-4o); the replies are read here. Numbers are comparable with
published ones only from the same judge. The suite rounds grades and means to two digits; here nothing is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Json, TypeAdapter

from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.suites.base import Results, SampleFile, Suite, check, mean, read_text, rows_by_name

EDITS = "basic_edit.json"


@dataclass(frozen=True)
class _Edit:
    """An entry of basic_edit.json."""

    id: str
    prompt: str
    edit_type: str


_KEY = Annotated[str, Field(pattern=r"^\w{1,60}$")]
_EDITS: TypeAdapter[dict[str, _Edit]] = TypeAdapter(Json[dict[_KEY, _Edit]])
_REPLIES: TypeAdapter[dict[str, Any]] = TypeAdapter(Json[dict[str, Any]])


class ImgEdit(Suite):
    """ImgEdit-Bench."""

    title = "ImgEdit-Bench"
    source = f"Benchmark/Basic/{EDITS} of PKU-YuanGroup/ImgEdit, in the folder of its source images (Benchmark.tar)"
    samples = 1
    results_source = "the result.json that its Benchmark/Basic/basic_bench.py wrote to OUT/images"

    def read(self, path: Path) -> list[Prompt]:
        """The edits in the file's order, with their source images relative to its folder."""
        edits = check(_EDITS, read_text(path, self.source), path, self.source)
        sources = {key: path.parent / edit.id for key, edit in edits.items()}
        if absent := [str(file) for file in sources.values() if not file.is_file()]:
            raise DataError(f"{path}: {len(absent)} source images not found, e.g. {absent[0]}; expected {self.source}")
        return [
            Prompt(k, edit.prompt, {"key": key, "id": edit.id, "edit_type": edit.edit_type}, (str(sources[key]),))
            for k, (key, edit) in enumerate(edits.items())
        ]

    def file(self, prompt: Prompt, number: int, ending: str) -> Path:
        """images/KEY.png, further samples images/KEY_1.png"""
        key = prompt.meta["key"]
        return Path("images", f"{key}_{number}{ending}" if number else f"{key}{ending}")

    def write_other_files(self, files: Sequence[SampleFile], out: Path) -> None:
        """Write the entries of the edits that were made, for basic_bench.py and `read_results`."""
        made = {
            p.meta["key"]: {"id": p.meta["id"], "prompt": p.text, "edit_type": p.meta["edit_type"]} for p, *_ in files
        }
        (out / EDITS).write_text(json.dumps(made, indent=1), encoding="utf-8")

    def read_results(self, path: Path) -> Results:
        """Grades by edit type, from the judge's replies."""
        file = path.resolve().parents[1] / EDITS
        edits = check(_EDITS, read_text(file, f"the {EDITS} of this command"), file, self.source)
        replies = check(_REPLIES, read_text(path, self.results_source), path, self.results_source)
        grades = {key: grade(replies.get(key)) for key in edits}
        types = rows_by_name((edit.edit_type, grades[key]) for key, edit in edits.items())
        graded = [value for value in grades.values() if value is not None]
        summary = {"mean of all edits": mean(graded), "mean of the edit types": mean(row.mean for row in types)}
        by = f"Read from {path.name}, grades 1 to 5; comparable with published numbers of the same judge (gpt-4o)."
        missing = [
            f"{key}: no grade in {str(replies.get(key))!r:.80}" for key, value in grades.items() if value is None
        ]
        return Results(self.title, by, summary, {"edit type": types}, missing, percent=False)


def grade(reply: Any) -> float | None:
    """Mean of the whole numbers in lines 'NAME: N', as in the suite; None without one."""
    lines = [line.strip().split(": ") for line in reply.splitlines()] if isinstance(reply, str) else []
    return mean(int(parts[1]) for parts in lines if len(parts) == 2 and parts[1].isdecimal())
