"""Mixed rewards in the demo world: Flex over HTTP, CLIP in this process, and a monitor, trained together.

Why this case: every part alone is tested elsewhere; here they share a run. The judge is the demo's real one, asked over
HTTP and answering in Flex's words. Held: all three are reported, nothing that trains is missing, a monitor that never
has a value is told once and stops nothing, and the weights change.
"""

import base64
import io
import json
import re
import threading

import numpy as np
import pytest
import yaml
from judge_server import JudgeServer, images, reply, text_of
from PIL import Image
from safetensors.torch import load_file
from tiny_rewards import MAKERS
from tiny_run import merged, rows, train

from prefgrpo.config.recipe import read_yaml
from prefgrpo.data.media import Media
from prefgrpo.judge.local import LocalJudge, LocalJudgeConfig
from prefgrpo.rewards.base import PointwiseReward, Score

ROOT = __import__("pathlib").Path(__file__).resolve().parent.parent
ASSETS = ROOT / "prefgrpo" / "tiny" / "assets"


class Never(PointwiseReward):
    """A monitor that has nothing to say."""

    def score(self, samples):
        return [Score(None, "no idea") for _ in samples]


class FlexServer(JudgeServer):
    """The demo's judge behind the chat API: its verdict becomes two of Flex's categories and the winner."""

    def __init__(self):
        super().__init__()
        self.judge = LocalJudge(LocalJudgeConfig(str(ASSETS / "judge"), "caption_match"))
        self.pixels: dict[str, Media] = {}
        self._one = threading.Lock()

    def _answer(self, body):
        from aiohttp import web

        first, second = (self._picture(part) for part in images(body))
        caption = re.search(r"Caption: (.*)\n", text_of(body))[1]
        with self._one:
            p = self.judge.judge_group(caption, [first, second], [(0, 1)])[0].first
        better, brighter = (1 if one else 2 for one in (p > 0.5, first.pixels.mean() > second.pixels.mean()))
        verdicts = {"Alignment": f"Image {better}", "Quality": "tie", "Aesthetics": f"Image {brighter}"}
        categories = [{"name": name, "analysis": "…", "cat_winner": winner} for name, winner in verdicts.items()]
        return web.json_response(reply(json.dumps({"categories": categories, "winner": f"Image {better}"})))

    def _picture(self, part):
        if part["image_url"] is not None:
            data = base64.b64decode(part["image_url"]["url"].split(",", 1)[1])
            self.pixels[part["uuid"]] = Media(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
        return self.pixels[part["uuid"]]


def recipe(place, url, **over):
    base = read_yaml(ROOT / "scripts" / "demo" / "demo.yaml")
    clip = MAKERS["clip"](place / "clip")
    mixed = {
        "model": str(ASSETS / "base"),
        "output": str(place / "runs"),
        "tensorboard": False,
        "judge": {"backend": "http", "model": "", "endpoints": [url], "plan": "round_robin", "log": True},
        "reward": {
            "spec": "unifiedreward_flex:0.7,clip:0.3,jpeg_compressibility:0,test_demo_mixed:Never:0",
            "combine": "weighted_advantage_sum",
            "options": {"clip": clip, "unifiedreward_flex": {"category_weights": [1.0, 0.7, 0.7]}},
        },
    }
    for section, names in (("data", ("prompts",)), ("eval", ("prompts", "final_prompts"))):
        mixed[section] = {name: str(ASSETS / "prompts" / base[section][name].rsplit("/", 1)[1]) for name in names}
    file = place / "mixed.yaml"
    file.write_text(yaml.safe_dump(merged(merged(base, mixed), over)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("mixed")
    with FlexServer() as server:
        small = {"prompts_per_step": 2, "group_size": 4, "batch_size": 8}
        over = {"rollout": small, "train": {"steps": 3, "max_minutes": 0}, "eval": {"every": 0}}
        code, output = train(recipe(place, server.url, **over))
    assert code == 0, output
    return place / "runs" / "demo", output


def test_all_rewards_are_scored_and_reported(run):
    folder, output = run
    steps = [row for row in rows(folder, timeless=False) if row["kind"] == "train"]
    assert len(steps) == 3
    for row in steps:
        assert {"reward/unifiedreward_flex", "reward/clip", "reward/jpeg_compressibility"} <= set(row)
        assert row["reward/missing"] == 0 and row["judge/failures"] == 0 and row["judge/requests"] == 12
        assert 0 <= row["reward/unifiedreward_flex"] <= 1 and row["reward/jpeg_compressibility"] < 0
        assert row["reward/test_demo_mixed:Never/missing_rate"] == 1 and "reward/test_demo_mixed:Never" not in row
        assert {"time/reward/clip/latency_p50", "time/reward/unifiedreward_flex/latency_p95"} <= set(row)
    assert "unifiedreward_flex" in output and "jpeg_compressibility" in output
    assert output.count("missing in step 1: 8 × test_demo_mixed:Never: no idea") == output.count("no idea") == 1
    asked = (folder / "judgements.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(asked) == 36 and {"Alignment", "Quality", "Aesthetics"} <= set(json.loads(asked[0])["parts"])


def test_the_policy_moved(run):
    lora = load_file(next((run[0] / "lora").glob("*.safetensors")))
    changed = [float(w.abs().max()) for name, w in lora.items() if "lora_B" in name or "lora.up" in name]
    assert changed and max(changed) > 0
    assert (run[0] / "report.html").is_file()
