"""File names of generated images and clips, and which prompt each file of a folder belongs to.

Files are matched by the prompts table's `file` column if there is one; else by the names that `prefgrpo generate`
writes; else, in natural order, the same number of files per prompt. Invariant: every file has exactly one prompt and
every prompt has a file; otherwise DataError lists the exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.data.stored import CLIPS

Naming = Literal["plain", "unigenbench", "vbench"]
FILE = ("file", "file_name", "filename", "image_path", "video", "video_path")
"""Columns that name a row's generated file, relative to the folder."""
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Generated:
    """One generated file."""

    prompt: Prompt
    """Its prompt; prompts with the same text and source form one group."""
    file: Path


def file_name(prompt: Prompt, sample: int, naming: Naming, ending: str) -> str:
    """plain: 000012_0.png, from the prompt's position in the file. unigenbench: INDEX_0.png, from the table's `index`
    column, as UniGenBench's scoring tools expect. vbench: PROMPT-0.mp4, at most 255 bytes.

    Raises DataError if the `index` column is missing or cannot be part of a file name.
    """
    if naming == "plain":
        return f"{prompt.id:06d}_{sample}{ending}"
    if naming == "unigenbench":
        if not _has_index(prompt):
            needs = "--naming unigenbench needs an 'index' column with values that can be part of a file name (no /)"
            raise DataError(f"{needs}; prompt {prompt.id + 1} has {prompt.meta.get('index')!r}")
        return f"{prompt.meta['index']}_{sample}{ending}"
    tail = f"-{sample}{ending}"
    stem = prompt.text.replace("/", "_").encode()[: 255 - len(tail)].decode(errors="ignore")
    return stem + tail


def _has_index(prompt: Prompt) -> bool:
    """Whether the column `index` can be part of a file name."""
    return re.fullmatch(r"[^/\x00-\x1f]{1,60}", str(prompt.meta.get("index", ""))) is not None


def find(folder: Path, prompts: Sequence[Prompt]) -> list[Generated]:
    """Every image and clip of a folder with its prompt, ordered by prompt. Raises DataError if they do not match."""
    if not folder.is_dir():
        raise DataError(f"folder not found: {folder}; expected one with images or clips")
    if column := next((c for c in FILE if all(isinstance(p.meta.get(c), str) for p in prompts)), None):
        listed = [Generated(p, folder / p.meta[column]) for p in prompts]
        absent = [str(g.file) for g in listed if not g.file.is_file()]
        _require(absent, f"files named in column '{column}' do not exist")
        return listed
    shown = (f for f in folder.iterdir() if f.name[0] != ".")  # a killed process may have left a hidden part of a file
    files = sorted((f for f in shown if f.suffix.lower() in IMAGES + CLIPS), key=_natural)
    if not files:
        raise DataError(f"{folder} contains no image or clip ({', '.join(IMAGES + CLIPS)})")
    namings: list[Naming] = ["plain", "vbench"]
    if all(map(_has_index, prompts)):
        namings.insert(0, "unigenbench")
    named = max((_by_name(files, prompts, naming) for naming in namings), key=len)
    if not named:
        each, rest = divmod(len(files), len(prompts))
        if rest:
            raise DataError(
                f"{folder} contains {len(files)} files for {len(prompts)} prompts; expected names as `prefgrpo "
                "generate` gives them (000000_0.png), a column 'file' in the prompts file, or the same number of files "
                "per prompt"
            )
        return [Generated(prompts[k // each], file) for k, file in enumerate(files)]
    _require([f.name for f in files if f not in named], f"files in {folder} match no prompt")
    with_file = {(p.text, p.source) for p in named.values()}  # equal prompts may share their files
    without = [repr(p.text[:60]) for p in prompts if (p.text, p.source) not in with_file]
    _require(without, f"prompts have no file in {folder}")
    return sorted((Generated(p, f) for f, p in named.items()), key=lambda g: g.prompt.id)


def _by_name(files: Sequence[Path], prompts: Sequence[Prompt], naming: Naming) -> dict[Path, Prompt]:
    """The files named as by `file_name`, with their prompts."""
    tails = {(int(m[1]), f.suffix) for f in files if (m := re.search(r"[_-](\d{1,4})$", f.stem))}
    names: dict[str, Prompt] = {}
    for prompt in prompts:
        for number, ending in tails:
            names.setdefault(file_name(prompt, number, naming, ending), prompt)
    return {f: names[f.name] for f in files if f.name in names}


def _natural(file: Path) -> list[tuple[int, str]]:
    """Sort key under which 10.png comes after 9.png."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", file.name)]


def _require(lacking: Sequence[str], problem: str) -> None:
    if lacking:
        raise DataError(f"{len(lacking)} {problem}: " + ", ".join(lacking[:5]) + (" …" if len(lacking) > 5 else ""))
