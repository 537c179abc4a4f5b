"""Video and image-editing runs of `prefgrpo train`, two steps each, and the commands used after training.

Why these cases: an image trainer breaks on clips in rewards, report pages and export; editing needs one group per
(prompt, source) whatever the source's size; a reward that does not accept clips must be refused before the run starts.
"""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import all_end, attempt, ranks, start, trained
from servers import JudgeServer, images
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from world import merged, recipe, rows, tree

from prefgrpo.config.loading import from_dict
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.judge.uploads import encode
from prefgrpo.rollout.embeddings import run_entries
from prefgrpo.rollout.render import stills
from prefgrpo.tiny import pipelines

SMALL = {"train": {"steps": 2}, "rollout": {"prompts_per_step": 2, "group_size": 2, "batch_size": 2}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    pipelines.make("wan22", folder / "wan22")
    (folder / "train.txt").write_text("a red circle\na blue square\na dot\n")
    (folder / "dev.txt").write_text("a green ball\ntwo lines\n")
    return folder


def written(place, name, family, **over):
    return recipe(place, name, **merged(SMALL, over), family=family, model=str(place / family))


@pytest.mark.full
def test_a_video_model_with_two_experts(place):
    rollout = {"frames": 5, "guidance": 4.0, "guidance_2": 3.0, "height": 16, "width": 16, "steps": 4}
    with JudgeServer() as server:
        judge = {"endpoints": [server.url]}
        over = {"rollout": rollout, "rewards": "vlm_pairwise", "judge": judge}
        output = trained(written(place, "video", "wan22", **over))
    asked = [body for body in server.requests if len(images(body)) == 10]
    assert len(asked) >= 2 * 2 * 2, "2 steps × 2 groups × 1 pair in both orders, five frames of each clip"
    assert "clips of 5 frames" in output and "on-policy check: max |ratio - 1| = 0.0e+00 (exact)" in output
    folder = place / "runs" / "video"
    assert [r["step"] for r in rows(folder) if r["kind"] == "train"] == [1, 2]
    assert (folder / "lora" / "transformer_2" / "pytorch_lora_weights.safetensors").is_file()
    shown = np.load(folder / "eval" / "dev_000002.npz")
    assert shown["now"].shape == (2, 5, 16, 16, 3), "the report needs every frame of a clip"
    assert shown["seconds"] == 5 / 16
    assert (folder / "report.html").is_file()
    groups = np.load(folder / "groups" / "step_000001.npz")["images"]
    assert groups.shape == (2, 2, 16, 4 * 16, 3)
    imageio = pytest.importorskip("imageio.v3")
    argv = ["generate", str(folder / "config.yaml"), "--lora", str(folder), "--samples", "1", "--naming", "vbench"]
    after = start([*argv, "--out", str(place / "clips")], place / "generate.log")
    assert after.wait() == 0, after.output
    assert sorted(set(tree(place / "clips")) - {".about.json"}) == ["a green ball-0.mp4", "two lines-0.mp4"]
    assert imageio.imread(place / "clips" / "two lines-0.mp4", plugin="FFMPEG").shape == (5, 16, 16, 3)
    assert imageio.immeta(place / "clips" / "two lines-0.mp4")["fps"] == 16
    assert json.loads((place / "clips" / ".about.json").read_text())["fps"] == 16
    after = start([*argv, "--out", str(place / "clips"), "--fps", "24"], place / "generate.log")
    assert after.wait() == 2 and "made differently (other: fps)" in after.output


SIZES = {"frames": 5, "guidance": 4.0, "guidance_2": 3.0, "height": 16, "width": 16, "steps": 4}
ALL = {"train": {"lora_rank": 0, "lr": 1e-3}}
LAYOUTS = {
    "LoRA": (1, {}),
    "all weights": (1, ALL),
    "LoRA on two processes": (2, {}),
    "sharded and offloaded": (2, ALL | {"parallel": {"shard": 2}, "offload": ["weights"]}),
    "masters on two processes": (2, ALL | {"dtype": "bf16"}),
}


def content(checkpoint):
    """Name → tensor of a checkpoint."""
    reader = FileSystemReader(checkpoint)
    tensors = {name: torch.empty(kind.size) for name, kind in reader.read_metadata().state_dict_metadata.items()}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_that_no_step_of_the_window_runs_stays_as_it_is(place, layout):
    """Weights, AdamW's state and EMA of the other expert, to the last bit, whatever weight decay and momentum."""
    size, over = LAYOUTS[layout]
    train = {"steps": 2, "weight_decay": 0.1, "ema_decay": 0.5}
    given = {"rollout": {**SIZES, "window_high": 1}, "train": train, "checkpoint": {"every": 1}, "eval": {"every": 0}}
    file = written(place, layout.replace(" ", "_"), "wan22", **merged(given, over))
    all_end(ranks(file, size) if size > 1 else [start(["train", str(file)], file.with_suffix(".log"))])
    first, second = (content(place / "runs" / file.stem / "checkpoints" / f"step_00000{k}") for k in (1, 2))
    unused = [name for name in first if ".transformer_2." in name]
    assert 0 < len(unused) < len(first)
    moved = {name.partition(".")[0] for name in first if not torch.equal(first[name], second[name])}
    assert moved == {"param", "ema", "adamw"}
    for name in unused:
        assert torch.equal(first[name], second[name]), name
        kind, _, of = name.partition(".")
        assert kind != "adamw" or not second[name].any(), name
        assert kind != "ema" or torch.equal(second[name], second[f"param.{of}"]), name


@pytest.mark.full
def test_a_run_whose_windows_change_the_expert_is_resumed_to_the_last_bit(place):
    """At the checkpoint, one expert has had fewer updates than the other."""
    rollout = {**SIZES, "window_size": 1}
    over = {"rollout": rollout, "train": {"steps": 4, "ema_decay": 0.5}, "eval": {"every": 0}, "seed": 5}
    trained(written(place, "straight", "wan22", **over))
    stopped = written(place, "stopped", "wan22", **merged(over, {"train": {"steps": 3}, "checkpoint": {"every": 3}}))
    trained(stopped)
    trained(stopped, "--resume", "--train.steps", "4")
    runs = place / "runs"
    for step in (3, 4):
        made = content(runs / "stopped" / "checkpoints" / f"step_00000{step}")
        updates = {".transformer_2." in n: int(t) for n, t in made.items() if n.startswith("adamw.step.")}
        assert sum(updates.values()) == step and min(updates.values()) > 0, updates
    want = content(runs / "straight" / "checkpoints" / "step_000004")
    assert made.keys() == want.keys() and all(torch.equal(made[name], want[name]) for name in want)
    assert rows(runs / "stopped") == rows(runs / "straight")


def test_a_reward_that_takes_images_refuses_clips(place, capsys):
    for spec, field in (("scenes", "rewards: scenes"), ("jpeg_compressibility,scenes:0", "rewards: scenes")):
        code, output = attempt(capsys, "train", written(place, f"no_{len(spec)}", "wan22", rewards=spec))
        assert code == 2 and f"{field} takes image, but these are clips" in output


EDITS = {
    "flux_kontext": ([["0"], ["1"], ["2"], []], {}),
    "qwen_image_edit_plus": ([["0"], ["1", "2"], ["2"], ["0", "1", "2"]], {"source_area": 1024}),
}
"""Family → (source images of each prompt, sizes)."""


@pytest.mark.full
@pytest.mark.parametrize("family", EDITS)
def test_edits_with_any_number_of_sources_of_any_size(place, family):
    named, sizes = EDITS[family]
    for number, size in enumerate([(40, 24), (24, 24), (64, 64)]):
        noise = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(noise).save(place / f"{number}.png")
    edits = [{"instruction": "make it red", "image": [f"{n}.png" for n in names]} for names in named]
    (place / "edits.jsonl").write_text("\n".join(map(json.dumps, edits)))
    files = {"data": {"prompts": str(place / "edits.jsonl")}, "eval": {"prompts": str(place / "edits.jsonl")}}
    redder = (
        "def redder(prompt, image_a, image_b):\n    return float(image_a[..., 0].mean() > image_b[..., 0].mean())\n"
    )
    (place / "pairs.py").write_text(redder)
    files["rewards"] = f"{place}/pairs.py:redder"
    pipelines.make(family, place / family)
    output = trained(written(place, family, family, **files, rollout={"prompts_per_step": 4, **sizes}))
    assert "(exact)" in output and "from 4 prompts" in output
    run = place / "runs" / family
    with np.load(run / "eval" / "dev_sources.npz") as stored:
        assert stored["source_counts"].tolist() == [len(names) for names in named]
        assert len(np.unique(stored["sources"], axis=0)) == 3
        evaluated = {source.tobytes() for source in stored["sources"]}
    with np.load(run / "groups" / "step_000001.npz") as stored:
        assert len(stored["prompts"]) == len(stored["source_counts"]) == 3
        assert {source.tobytes() for source in stored["sources"]} <= evaluated
    assert "<small>source</small>" in (run / "report.html").read_text()
    argv = ["generate", str(run / "config.yaml"), "--lora", str(run), "--samples", "1"]
    after = start([*argv, "--out", str(place / f"edited_{family}")], place / "generate.log")
    assert after.wait() == 0, after.output
    edited = [content for name, content in tree(place / f"edited_{family}").items() if name.endswith(".png")]
    assert len(edited) == 4 and len(set(edited)) == 4, "expected four edits with one instruction to differ"


LACK = "per prompt; 1 of 2 prompts have another number; the first: line 2, 'b' has"
COUNTS = [
    ("flux", [0, 1], f"flux takes 0 to 0 source images {LACK} 1"),
    ("flux_kontext", [1, 2], f"takes 0 to 1 source images {LACK} 2"),
    ("qwen_image_edit_plus", [2, 0], f"takes 1 to 3 source images {LACK} 0"),
]


@pytest.mark.parametrize(("family", "counts", "told"), COUNTS)
def test_sources_are_counted_before_anything_runs(family, counts, told):
    prompts = [Prompt(k, "abc"[k], source=("x.png",) * count, line=k + 1) for k, count in enumerate(counts)]
    with pytest.raises(DataError, match=re.escape(told)):
        run_entries(from_dict({"model": "m", "family": family, "data": {"prompts": "p"}}), prompts)
    ours = [Prompt(0, "a"), Prompt(1, "b")]
    assert len(run_entries(from_dict({"model": "m", "family": "flux", "data": {"prompts": "p"}}), ours)) == 2


def test_a_judge_sees_eight_even_frames():
    clip = Media(np.random.default_rng(0).integers(0, 256, (33, 32, 32, 3), dtype=np.uint8))
    encoded = encode(clip, "png")
    parts = json.loads(b"[" + encoded.part({encoded.uuid}) + b"]")
    assert len(parts) == 8 and len({p["uuid"] for p in parts}) == 8
    want = [Media(clip.pixels[k]).digest for k in (0, 4, 9, 13, 18, 22, 27, 32)]
    assert [frame.digest for frame in clip.frames(8)] == want
    assert len(json.loads(b"[" + encode(Media(clip.pixels[:3]), "png").part(None) + b"]")) == 3
    assert stills(clip.pixels).shape == (32, 128, 3) and stills(clip.pixels[0]).shape == (32, 32, 3)
