"""Data and models of the demo: captioned 32x32 scenes, a tiny FluxPipeline and a tiny VLM judge.

`scenes` draws and scores the images; the models in `assets/` load with stock diffusers and transformers classes.
`scripts/demo_world` trained them; README.md has commands and numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from prefgrpo.config.recipe import flatten, merge, read_yaml

FOLDER = Path(__file__).resolve().parent
ASSETS = FOLDER / "assets"
DEMO = FOLDER / "demo.yaml"


def tiny(
    family: Annotated[str, tyro.conf.arg(metavar="FAMILY")],
    folder: Annotated[Path, tyro.conf.arg(metavar="FOLDER")],
    seed: int = 0,
) -> Path:
    """Write a tiny pipeline with random weights, a few prompts and a prefgrpo.yaml with matching values.

    Args:
        family: Model family, e.g. flux (the README lists all).
        folder: Folder to write to.
        seed: Seed of the random weights.
    """
    from prefgrpo.tiny.pipelines import make

    return make(family, folder, seed)


def demo_paths() -> dict[str, Any]:
    """Nested values of the demo's recipe that are files of this package, made absolute so that any folder works."""
    values: dict[str, Any] = {}
    for key, value in flatten(read_yaml(DEMO)).items():
        if str(value).startswith("prefgrpo/tiny/"):
            path: Any = str(FOLDER.parent.parent / value)
            for part in reversed(key.split(".")):
                path = {part: path}
            values = merge(values, path)
    return values
