"""Data and models of the demo: captioned 32x32 scenes, a tiny FluxPipeline and a tiny VLM judge.

`scenes` draws and scores the images; the models in `assets/` load with stock diffusers and transformers classes.
`scripts/demo_world` trained them; README.md has commands and numbers.
"""

from __future__ import annotations

from pathlib import Path

from prefgrpo.config.recipe import flatten, read_yaml

FOLDER = Path(__file__).resolve().parent
ASSETS = FOLDER / "assets"


def demo_options() -> list[str]:
    """Arguments for `prefgrpo train`: the demo's recipe, and its paths made absolute so that any folder works."""
    recipe = FOLDER / "demo.yaml"
    paths = {key: value for key, value in flatten(read_yaml(recipe)).items() if str(value).startswith("prefgrpo/tiny/")}
    return [str(recipe), *(f"--{key}={FOLDER.parent.parent / value}" for key, value in paths.items())]
