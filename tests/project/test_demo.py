"""A short demo run: its own recipe, assets and command, few steps, in an empty folder.

Why these cases: `prefgrpo demo` is the first thing a new user sees, so the real command runs in a real process, and
the judge must be the only training reward.
"""

import os
import subprocess
import sys

import pytest
import yaml
from world import rows

from prefgrpo.config.loading import load

STEPS = [
    "--train.steps", "3", "--eval.every", "2", "--eval.max-prompts", "2", "--rollout.prompts-per-step", "2",
    "--checkpoint.every", "2", "--eval.samples-per-prompt", "1", "--rollout.group-size", "8",
    "--rollout.batch-size", "8",
]  # fmt: skip
LEFT = ("report.html", "config.yaml", "metrics.jsonl", "lora/pytorch_lora_weights.safetensors")


@pytest.fixture(scope="module")
def demo(root, tmp_path_factory):
    """(process, run folder) of the demo command with few steps."""
    folder = tmp_path_factory.mktemp("anywhere")
    command = [sys.executable, "-m", "prefgrpo", "demo", *STEPS]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done, folder / "runs" / "demo"


@pytest.mark.full
def test_what_it_leaves(demo):
    _, folder = demo
    assert [p.name for p in folder.parent.parent.iterdir()] == ["runs"] and [*folder.parent.iterdir()] == [folder]
    assert all((folder / name).stat().st_size > 0 for name in LEFT)
    found = rows(folder)
    sets = [(r["step"], r["set"]) for r in found if r["kind"] == "eval"]
    assert sets == [(0, "dev"), (0, "test"), (2, "dev"), (3, "dev"), (3, "test")]
    steps = [r for r in found if r["kind"] == "train"]
    assert len(steps) == 3 and all(r["judge/requests"] == 2 * 8 * 4 / 2 and r["judge/failures"] == 0 for r in steps)
    assert all(r["policy/on_policy_error"] <= 1e-6 for r in steps)


@pytest.mark.full
def test_the_scorer_of_the_scenes_is_never_the_reward(demo, root):
    for file in (demo[1] / "config.yaml", *sorted((root / "scripts" / "demo").glob("*.yaml"))):
        config = load(file)
        assert "scenes" not in {entry.name for entry in config.rewards}
        assert (
            "scenes" in {entry.name for entry in config.measured} or config.name == "demo-ocr"
        )  # for words see tests/project/test_demo_ocr.py
    assert not any("scenes" in key for r in rows(demo[1]) if r["kind"] == "train" for key in r)


def test_the_recipes_of_the_published_tables_do_not_follow_the_demo(root):
    """Their values are those that docs/science.md names, and none of the folder extends the demo's recipe."""
    page = (root / "docs" / "science.md").read_text()
    grpo = load(root / "scripts/demo/grpo.yaml")
    assert f"{grpo.rollout.prompts_per_step} prompts × {grpo.rollout.group_size} images per step" in page
    assert "`scripts/demo/grpo.yaml` (GRPO, learning rate 1e-3)" in page
    assert (grpo.train.objective, grpo.train.lr, grpo.train.lr_scheduler) == ("grpo", 1e-3, "constant")
    assert [entry.options for entry in grpo.rewards] == [{"round_verdicts": True, "template": "caption_match"}]
    files = (root / "scripts" / "demo").glob("*.yaml")
    parents = {file.stem: yaml.safe_load(file.read_text())["extends"] for file in files}
    changing = {"demo.yaml", "../../prefgrpo/tiny/demo.yaml"}
    assert {name for name, parent in parents.items() if parent in changing} == {"demo"}


def test_the_recipe_with_few_calls_is_continued_under_the_same_judge(root):
    first, then = (load(root / f"scripts/demo/{name}.yaml") for name in ("few_calls", "few_calls_grpo"))
    assert then.train.lora_from == f"{first.output}/{first.name}/lora"
    assert (then.rollout, then.rewards) == (first.rollout, first.rewards)


def test_the_recipe_for_pairs_trains_on_what_the_one_before_it_keeps(root):
    made, trained = (load(root / f"scripts/demo/{name}.yaml") for name in ("pairs_collect", "pairs"))
    assert trained.data.pairs == f"{made.output}/{made.name}" and "pairs" in made.trackers
    assert trained.rollout.group_size == made.rollout.group_size and trained.rewards == ()
    prompts = (root / made.data.prompts).read_text().splitlines()
    assert made.train.steps * made.rollout.prompts_per_step == len(prompts), "every prompt once"
    commands = (root / "Makefile").read_text().split("\ndemo-pairs:")[1].split("\n\n")[0]
    assert commands.index("pairs_collect.yaml") < commands.index("demo/pairs.yaml")
