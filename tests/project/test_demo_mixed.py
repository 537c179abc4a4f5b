"""Mixed rewards in the demo world: Flex over HTTP, CLIP in process, and a monitor, in one training run.

Why this case: each part is tested elsewhere; here they share a run. The judge answers in Flex's format. Checked: all
three rewards are reported, no training reward is missing, a monitor without any value is reported once and does not
stop the run, and the weights change.
"""

import json

import pytest
import yaml
from ranks import trained
from reward_cases import MAKERS
from safetensors.torch import load_file
from servers import JudgeServer
from world import merged, rows

from prefgrpo.config.recipe import read_yaml
from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Reward
from prefgrpo.tiny import ASSETS, FOLDER

NEVER = f"{__name__}:Never"


class Never(Reward):
    """A monitor that never returns a value."""

    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        return [Answer(None, "no idea") for _ in samples]


def flex(brightness, text):
    """A verdict as the winner and two of Flex's categories, by the brightness of the two images."""
    winner = f"Image {1 if brightness[0] > brightness[1] else 2}"
    verdicts = {"Alignment": winner, "Quality": "tie", "Aesthetics": winner}
    categories = [{"name": name, "analysis": "…", "cat_winner": who} for name, who in verdicts.items()]
    return json.dumps({"categories": categories, "winner": winner})


def recipe(place, url):
    mixed = {
        "model": str(ASSETS / "base"),
        "name": "demo",
        "output": str(place / "runs"),
        "trackers": [],
        "data": {"prompts": str(ASSETS / "prompts/train.txt")},
        "judge": {"model": "", "endpoints": [url]},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "batch_size": 4},
        "train": {"steps": 2},
        "eval": {"every": 0, "prompts": 0, "final_prompts": str(ASSETS / "prompts/test.txt"), "max_prompts": 4},
        "rewards": [
            {
                "name": "unifiedreward_flex",
                "weight": 0.7,
                "options": {"category_weights": [1.0, 0.7, 0.7], "plan": "round_robin", "round_verdicts": True},
            },
            {"name": "clip", "weight": 0.3, "options": MAKERS["clip"](place / "clip")},
            {"name": "jpeg_compressibility", "weight": 0.0},
            {"name": NEVER, "weight": 0.0},
        ],
        "advantage": {"combine": "weighted_advantage_sum"},
    }
    file = place / "mixed.yaml"
    file.write_text(yaml.safe_dump(merged(read_yaml(FOLDER / "world.yaml"), mixed)), encoding="utf-8")
    return file


@pytest.mark.full
def test_all_rewards_are_scored_and_reported_and_the_policy_moves(tmp_path):
    with JudgeServer() as server:
        server.answer = flex
        output = trained(recipe(tmp_path, server.url))
    folder = tmp_path / "runs" / "demo"
    steps = [row for row in rows(folder, timeless=False) if row["kind"] == "train"]
    assert len(steps) == 2
    for row in steps:
        assert {"reward/unifiedreward_flex", "reward/clip", "reward/jpeg_compressibility"} <= set(row)
        assert row["reward/missing"] == 0 and row["judge/failures"] == 0 and row["judge/requests"] == 12
        assert 0 <= row["reward/unifiedreward_flex"] <= 1 and row["reward/jpeg_compressibility"] < 0
        assert row[f"reward/{NEVER}/missing_rate"] == 1 and f"reward/{NEVER}" not in row
        assert {"time/reward/clip/latency_p50", "time/reward/unifiedreward_flex/latency_p95"} <= set(row)
    assert "unifiedreward_flex" in output and "jpeg_compressibility" in output
    assert output.count(f"missing in step 1: 8 × {NEVER}: no idea") == output.count("no idea") == 1
    asked = (folder / "judgements.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(asked) == 24 and {"Alignment", "Quality", "Aesthetics"} <= set(json.loads(asked[0])["parts"])
    (lora,) = (folder / "lora").glob("*.safetensors")
    assert any(w.abs().max() > 0 for name, w in load_file(lora).items() if "lora_B" in name)
    assert (folder / "report.html").is_file()
