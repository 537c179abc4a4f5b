"""DPG-Bench (arXiv 2403.05135): 1,065 long prompts, with the four images of each in one 2×2 grid NAME.png.

Its tool asks mPLUG-large about every proposition of every cell (`--pic-num 4`, `--resolution` of one cell). It skips
the first row of its table and computes category scores from the last cell only, so they differ from the overall score.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from pydantic import TypeAdapter

from prefgrpo.data.file_names import read_media
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.parallel.world import World
from prefgrpo.suites.base import Number, Results, Row, SampleFile, Suite, check, read_text, require_folder

_LINE = re.compile(r"\t(?P<name>.+): (?P<value>.*)$")
_SCORE = re.compile(r"DPG-Bench score: (?P<value>.*)$")
_NUMBER: TypeAdapter[float] = TypeAdapter(Number)


class Dpg(Suite):
    """DPG-Bench."""

    title = "DPG-Bench"
    source = "the folder dpg_bench/prompts of TencentQQGYLab/ELLA, one NAME.txt per prompt"
    samples = 4
    results_source = "the dpg-bench_*_results.txt that its compute_dpg_bench.py wrote"

    def read(self, path: Path) -> list[Prompt]:
        """One prompt per text file."""
        files = sorted(require_folder(path, self.title, self.source).glob("*.txt"))
        prompts = [Prompt(k, read_text(f, self.source).strip(), {"name": f.stem}) for k, f in enumerate(files)]
        if empty := [p.meta["name"] for p in prompts if not p.text]:
            raise DataError(f"{path}: no prompt in {', '.join(empty[:5])}; expected {self.source}")
        if not prompts:
            raise DataError(f"{path} contains no .txt file; expected {self.source}")
        return prompts

    def sample_files(self, prompts: Sequence[Prompt], samples: int, out: Path, ending: str) -> list[SampleFile]:
        """samples/NAME_3.png; `write_other_files` assembles the grids."""
        if samples not in (0, 1, 4):
            raise DataError(f"--samples: {self.title} needs 1 or 4 images per prompt, got {samples}")
        numbers = range(samples or self.samples)
        return [(p, k, out / "samples" / f"{p.meta['name']}_{k}{ending}") for p in prompts for k in numbers]

    def write_other_files(self, files: Sequence[SampleFile], out: Path, world: World) -> None:
        """Write images/NAME.png: the samples, row by row."""
        cells: dict[str, list[Path]] = {}
        for prompt, _, file in files:
            cells.setdefault(prompt.meta["name"], []).append(file)
        folder = out / "images"
        folder.mkdir(exist_ok=True)
        for name in list(cells)[world.dp_index :: world.dp_size] if world.is_dp_leader else ():
            if not (image_file := folder / f"{name}.png").exists():
                temporary = out / f".{name}.png"
                _grid([_open(file) for file in cells[name]]).save(temporary)
                temporary.replace(image_file)

    def read_results(self, path: Path) -> Results:
        """The overall and category scores printed by the suite's tool, which prints nan for an empty category."""
        tables: dict[str, list[Row]] = {}
        missing: list[str] = []
        score = None
        for number, line in enumerate(read_text(path, self.results_source).splitlines(), start=1):
            where = f"{path}, line {number}"
            if line.endswith("category scores:"):
                tables[line.removesuffix(" scores:")] = []
            elif tables and (row := _LINE.match(line)):
                lacks = row["value"] == "nan"
                value = None if lacks else check(_NUMBER, row["value"], where, self.results_source) / 100
                tables[list(tables)[-1]].append(Row(row["name"], value, int(not lacks), int(lacks)))
                missing += [f"no score of {row['name']}"] * lacks
            elif found := _SCORE.match(line):
                score = check(_NUMBER, found["value"], where, self.results_source) / 100
        if score is None:
            raise DataError(f"--results: {path}: expected {self.results_source}, found no line 'DPG-Bench score: …'")
        by = f"Read from {path.name}, written by the suite's own evaluation (category scores: last cell only)."
        return Results(self.title, by, {"score": score}, tables, missing)


def _open(file: Path) -> Image.Image:
    """The image of a sample. Raises DataError if it is damaged."""
    try:
        return read_media(file).pil
    except DataError as error:
        hint = "delete the file and repeat the command to generate it again"
        raise DataError(f"{file.parent}: {error}; {hint}") from error


def _grid(cells: Sequence[Image.Image]) -> Image.Image:
    """A single image unchanged, or four as a 2×2 grid."""
    if len(cells) == 1:
        return cells[0]
    width, height = cells[0].size
    grid = Image.new("RGB", (2 * width, 2 * height))
    for k, cell in enumerate(cells):
        grid.paste(cell, (k % 2 * width, k // 2 * height))
    return grid
