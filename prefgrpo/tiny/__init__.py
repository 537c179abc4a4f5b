"""The small world the demo runs on: captioned 32x32 scenes, a tiny FluxPipeline, a tiny VLM judge.

`scenes` draws and scores the pictures; the models in `assets/` load with stock diffusers and transformers classes.
`scripts/demo_world` trained them; README.md has commands and numbers.
"""

from __future__ import annotations

from pathlib import Path

from prefgrpo.config.recipe import flatten, read_yaml

FOLDER = Path(__file__).resolve().parent
ASSETS = FOLDER / "assets"


def demo_options() -> list[str]:
    """The demo's recipe and the paths in it as options of `prefgrpo train`, absolute: they hold in any folder."""
    recipe = FOLDER / "demo.yaml"
    paths = {key: value for key, value in flatten(read_yaml(recipe)).items() if str(value).startswith("prefgrpo/tiny/")}
    return [str(recipe), *(f"--{key}={FOLDER.parent.parent / value}" for key, value in paths.items())]
