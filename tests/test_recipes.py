"""Every recipe, dry-run on a tiny pipeline of its family with only the model, the prompts and the sizes changed; and
`prefgrpo plan`.

Why these cases: a recipe rots when a field is renamed or a value stops fitting its family (frames, a second guidance
scale, LoRA targets, a window); and the plan must count what the real run counts, without weights.
"""

import json
import re

import pytest
import yaml
from PIL import Image
from tiny_run import start, tree

from prefgrpo.cli import main
from prefgrpo.config import load
from prefgrpo.models import MODELS
from prefgrpo.tiny import pipelines

FOLDER = __import__("pathlib").Path(__file__).resolve().parent.parent / "recipes"
RECIPES = sorted(p for p in FOLDER.glob("*.yaml") if not p.stem.startswith("demo"))
SMALL = ["--dtype", "fp32", "--rollout.height", "16", "--rollout.width", "16", "--rollout.batch-size", "2"]
SMALL += ["--rollout.prompts-per-step", "4", "--train.lora-rank", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    for family in MODELS:
        pipelines.make(family, folder / family)
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    Image.new("RGB", (20, 30), "red").save(folder / "a.png")
    (folder / "edits.jsonl").write_text(json.dumps({"instruction": "make it blue", "source_image": "a.png"}))
    return folder


def options(place, recipe):
    config = load(recipe)
    prompts = place / ("edits.jsonl" if config.data.prompts.endswith("jsonl") else "prompts.txt")
    small = [*SMALL, "--rollout.frames", "5"] if config.rollout.frames else list(SMALL)
    if not config.train.lora_rank:
        small[small.index("--train.lora-rank") + 1] = "0"
    if config.family == "flux2_klein":  # takes no source below 64 pixels
        small[small.index("--rollout.height") + 1] = small[small.index("--rollout.width") + 1] = "64"
    if config.family in ("qwen_image", "sd3", "z_image"):
        small += ["--data.max-length", "128"]
    return ["--model", str(place / config.family), "--data.prompts", str(prompts), "--data.cache", "", *small]


def test_every_family_has_a_recipe():
    assert {load(p).family for p in RECIPES} == set(MODELS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_dry_runs_and_its_plan_counts(place, recipe, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe), "--dry-run", *options(place, recipe)]) == 0
    told = capsys.readouterr().out
    config = load(recipe)
    assert yaml.safe_load(told[: told.index("\nweights")])["family"] == config.family
    assert "max |ratio − 1| = 0.0e+00" in told and "nothing was written" in told
    assert f"samples [2, {'5, ' if config.rollout.frames else ''}3, " in told
    assert tree(tmp_path) == {}
    assert main(["plan", str(recipe), "--gpus", "1", *options(place, recipe)]) == 0
    planned = capsys.readouterr().out
    for name in ("optimiser", "latents", "images"):
        run, plan = (re.search(rf"{name}\s+(\S+) GiB", text)[1] for text in (told, planned))
        assert run == plan and float(run) > 0, f"{name}: the plan is the run"
    assert "fits" in planned


def test_the_plan_counts_parameters_without_weights(place, capsys, tmp_path):
    """Against the loaded model, from a copy of the folder that has no weights at all."""
    import shutil

    import torch

    from prefgrpo import models

    for file in (place / "wan22").rglob("*.json"):
        target = tmp_path / "configs" / file.relative_to(place / "wan22")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    recipe = FOLDER / "wan22_lora_prefgrpo.yaml"
    argv = options(place, recipe)
    argv[1] = str(tmp_path / "configs")
    assert main(["plan", str(recipe), "--gpus", "2", *argv]) == 0
    told = capsys.readouterr().out
    adapter = models.load("wan22", str(place / "wan22"), torch.float32, torch.device("cpu"), frames=5)
    adapter.add_lora(4, 8.0)
    for name, count in adapter.parameter_counts().items():
        assert re.search(rf"^{name}\s+{count / 1e6:.2f} M parameters", told, re.M), (name, told)
    assert main(["plan", str(recipe), "--memory-gib", "0.00001", *argv]) == 1
    assert "does not fit: weights" in capsys.readouterr().out
    assert main(["plan", str(recipe), "--gpus", "3", *argv]) == 2


def test_a_dry_run_says_what_is_wrong(place):
    recipe = FOLDER / "wan22_lora_prefgrpo.yaml"
    run = start(["train", str(recipe), "--dry-run", *options(place, recipe), "--rollout.frames", "6"], place / "log")
    assert run.wait() == 2 and "frames must be a multiple of 2, plus 1" in run.output
