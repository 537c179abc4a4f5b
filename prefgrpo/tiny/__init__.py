"""Data and models of the demo: captioned 32x32 scenes, a tiny FluxPipeline and a tiny VLM judge.

`scenes` draws and scores the images; the models in `assets/` load with stock diffusers and transformers classes.
`scripts/demo_world` trained them; README.md has commands and numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefgrpo.config.recipe import flatten, merge, read_yaml

FOLDER = Path(__file__).resolve().parent
ASSETS = FOLDER / "assets"
DEMO = FOLDER / "demo.yaml"


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
