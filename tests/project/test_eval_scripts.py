"""scripts/eval_quality.sh, called as a user of Pref-GRPO's scripts would.

Why these cases: third-party tools read their JSON, so it must equal what the original writes for the same scores,
including which file belongs to which row.
"""

import csv
import json
import os
import subprocess
import sys
from types import ModuleType

import numpy as np
import peers
import pytest
import torch
from PIL import Image

from prefgrpo.data.media import Media
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample

SPEC = '["jpeg_compressibility", "jpeg_incompressibility"]'


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three prompts with two images each (one in a subfolder), and stray images; indices written in three ways."""
    folder = tmp_path_factory.mktemp("eval_scripts")
    with (folder / "bench.csv").open("w", newline="") as file:
        rows = [["index", "prompt_en"], ["0", "a red circle"], ["1.0", "a blue, square box"], ["12", "a tree"]]
        csv.writer(file).writerows([*rows, ["", "no index"], ["13", ""]])
    (folder / "images" / "more").mkdir(parents=True)
    names = ["0_0.png", "0_1.png", "1_0.jpg", "01_1.png", "12_0.webp", "more/12_1.png", "13_0.png", "x.png", "12.txt"]
    for k, name in enumerate(names[:-1]):
        size = (8 * (k + 2), 24, 3)
        Image.fromarray(np.random.default_rng(k).integers(0, 256, size, np.uint8)).save(folder / "images" / name)
    (folder / "images" / names[-1]).write_text("no image")
    return folder


def script(root, name, *argv, **env):
    own = {"PYTHON": sys.executable, "PYTHONPATH": str(root), "GPU_NUM": "1"} | env
    command = [str(root / "scripts" / name), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | own)


def value(path, name):
    with Image.open(path) as image:
        return build(name)[name].score([Sample("", Media(np.array(image.convert("RGB"))))])[0].value


class Dispatcher:
    """Stands in for Pref-GRPO's reward dispatcher, with rewards that the test can compute itself."""

    def __init__(self, args, device, reward_weights, modality):
        self.names = list(reward_weights)

    def build_reward_inputs(self):
        return {name: [] for name in self.names}

    def compute_rewards(self, inputs):
        return {name: torch.tensor([value(i["path"], name) for i in rows]) for name, rows in inputs.items()}, None


def original(argv, monkeypatch):
    """Output of Pref-GRPO's own script, run with the scores of `Dispatcher`."""
    stub = ModuleType("fastvideo.rewards.dispatcher")
    stub.RewardDispatcher, stub.parse_reward_spec = Dispatcher, lambda spec: dict.fromkeys(json.loads(spec), 1.0)
    for name in ("fastvideo", "fastvideo.rewards"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    module = peers.file_module("pref_grpo", "tools/image_reward_eval.py", "image_reward_eval", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["image_reward_eval.py", *map(str, argv)])
    module.main()


@pytest.mark.full
@pytest.mark.dist
def test_eval_quality_is_the_originals(place, root, monkeypatch):
    argv = ["--image_dir", place / "images", "--prompt_csv", place / "bench.csv", "--reward_spec", SPEC]
    flags = ["--recursive", "--chunk_size", 2, "--image_exts", ".png,.jpg,.webp", "--device", "cpu"]
    done = script(root, "eval_quality.sh", *argv, *flags, "--output_json", place / "ours.json", GPU_NUM="2")
    assert done.returncode == 0, done.stdout + done.stderr
    ours = json.loads((place / "ours.json").read_text())
    shown = {"0_0.png": 0, "0_1.png": 0, "1_0.jpg": 1, "01_1.png": 1, "12_0.webp": 2, "more/12_1.png": 2}
    texts = ["a red circle", "a blue, square box", "a tree"]
    folder = f"{place / 'images'}/"
    assert [(r["path"].removeprefix(folder), r["caption"]) for r in ours["records"]] == [
        (name, texts[shown[name]]) for name in sorted(shown)
    ]
    for name in json.loads(SPEC):
        values = [value(r["path"], name) for r in ours["records"]]
        assert [r["scores"][name] for r in ours["records"]] == pytest.approx(values)
        assert ours["mean_scores"][name] == pytest.approx(sum(values) / 6)
    assert "skipped 2 images" in done.stdout and f"jpeg_incompressibility: {np.mean(values):.6f}" in done.stdout
    original([*argv, *flags, "--output_json", place / "theirs.json"], monkeypatch)
    theirs = json.loads((place / "theirs.json").read_text())
    assert theirs.keys() == ours.keys() and theirs["mean_scores"] == pytest.approx(ours["mean_scores"])
    assert [r["path"] for r in theirs["records"]] == [r["path"] for r in ours["records"]]
    for a, b in zip(theirs["records"], ours["records"], strict=True):
        assert a["caption"] == b["caption"] and a["scores"] == pytest.approx(b["scores"], rel=1e-6)
