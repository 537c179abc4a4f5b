"""Training on an emulated GPU: device tensors that live apart from the CPU's, CUDA's rules, and a count of host waits.

Why these cases: a CPU accepts mixed devices, numpy on tensors and hidden synchronisations, so no other test sees them.
The environment variable PREFGRPO_GPU_EMULATOR names the emulator's folder (`emulator.py`, `site/sitecustomize.py`);
without it, these tests are skipped. It cannot show speed, memory, CUDA's numerics, Triton or C++ kernels.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from ranks import environment
from safetensors.torch import load_file, save_file
from world import case_of, folder, merged

import prefgrpo
from prefgrpo.data.answer import Answer
from prefgrpo.models import MODELS, family
from prefgrpo.parallel.world import pick_device
from prefgrpo.rewards.base import Reward

EMULATOR = os.environ.get("PREFGRPO_GPU_EMULATOR", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not EMULATOR, reason="PREFGRPO_GPU_EMULATOR is not set: no emulated GPU"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="the emulator needs a torch without CUDA"),
]


def recipe(place, name, model, **over):
    """A run of 2 steps of 2 × 2 samples on the emulated GPU, in bf16, as a YAML file."""
    case = case_of(model)
    edits = family(model).most_sources > 0
    prompts = place / ("edits.jsonl" if edits else "prompts.txt")
    frames = {} if family(model).default_frames is None else {"frames": 5}
    values = {
        "model": str(folder(model)), "family": model, "name": name, "output": str(place / "runs"),
        "data": {"prompts": str(prompts), "max_length": case.max_length},
        "rollout": {
            "height": 32, "width": 32, "steps": 3, "prompts_per_step": 2, "group_size": 2, "batch_size": 2, **frames,
        },
        "rewards": "jpeg_compressibility", "trackers": [],
        "train": {"steps": 2, "lora_rank": 2, "lora_alpha": 4, "clip_range": 0.1},
        "eval": {"every": 0}, "checkpoint": {"every": 2},
    }  # fmt: skip
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(merged(values, over)))
    return ["train", str(file)]


def run(place, gpu=0, **commands):
    """The results of `emulated_gpu.py` on one of two GPUs; every command must succeed, and nothing be refused."""
    (place / "prompts.txt").write_text("a red cube\ntwo very blue balls on a table\na small dog\n")
    from PIL import Image

    Image.linear_gradient("L").convert("RGB").resize((48, 48)).save(place / "source.png")
    edits = [{"prompt": text, "source_image": "source.png"} for text in ("make it blue", "remove the small dog")]
    (place / "edits.jsonl").write_text("".join(json.dumps(edit) + "\n" for edit in edits))
    root = Path(__file__).parents[2]
    out = place / "out.json"
    path = os.pathsep.join([str(Path(EMULATOR) / "site"), EMULATOR, str(root), environment()["PYTHONPATH"]])
    env = environment(PYTHONPATH=path, GPU_EMULATOR="2", LOCAL_RANK=str(gpu), PREFGRPO_BACKEND="torch")
    argv = [sys.executable, str(Path(__file__).with_name("emulated_gpu.py")), str(out)]
    done = subprocess.run(argv, input=json.dumps(commands), env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(out.read_text())
    for name, result in results.items():
        assert result["code"] == 0, f"{name}: {result['output']}"
        assert not result["problems"], f"{name}: {result['problems']}"
        assert result["device"] > 0, f"{name} did not use the device"
    return results


@pytest.mark.parametrize("part", range(4))
def test_a_training_step_of_every_family(part, tmp_path):
    """LoRA, and all weights with KL, EMA, offload and recomputation. Families that edit do so. A process has several
    families, as it starts more slowly than it trains one."""
    runs = {}
    for model in [*MODELS][part::4]:
        full = {"lora_rank": 0, "kl_coef": 0.01, "ema_decay": 0.5, "gradient_checkpointing": 0.5}
        full["steps"] = 2 if model in ("flux", "wan22") else 1  # its LoRA takes two
        sizes = {"source_area": 32 * 32} if family(model).default_source_area else {}
        sizes |= {"height": 64, "width": 64} if model.startswith("flux2") else {}
        for name, over in {"lora": {}, "full": {"train": full, "offload": ["text_encoder", "vae"]}}.items():
            runs[f"{model}_{name}"] = recipe(tmp_path, f"{model}_{name}", model, rollout=sizes, **over)
    run(tmp_path, **runs)


@pytest.mark.parametrize("model", ["flux", "wan"])
def test_blocks_are_fused_with_flash_attention(model, tmp_path):
    """The default on a GPU, and by name; CUDA's flash kernels refuse the fp32 of the start check's exact copy."""
    runs = {
        attention: recipe(tmp_path, f"run{attention}", model, attention=attention, train={"steps": 1})
        for attention in ("native", "_native_flash", "_native_math")
    }
    for attention, result in run(tmp_path, **runs).items():
        assert "runs as in diffusers" not in result["output"]
        backend = "_native_flash" if attention == "native" else attention
        assert f"attention: {attention} runs diffusers' {backend}\n" in result["output"], result["output"]
        (note,) = [line for line in result["output"].splitlines() if "fused blocks: " in line]
        fused, _, whole = note.partition("fused blocks: ")[2].partition(" of ")
        assert fused == whole != "0", note


def test_evaluation_checkpoints_and_resuming(tmp_path):
    (tmp_path / "held.txt").write_text("a green cube\na cat\n")
    held = {"every": 1, "prompts": str(tmp_path / "held.txt"), "rewards": "jpeg_incompressibility"}
    first = recipe(tmp_path, "run", "flux", eval=held, train={"steps": 2}, checkpoint={"every": 1})
    more = [*first, "--train.steps", "3", "--resume"]
    clip = recipe(tmp_path, "clip", "wan22", eval=held)
    judge = {"endpoints": [], "model": str(Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge")}
    judged = recipe(tmp_path, "judged", "flux", rewards="vlm_pairwise", judge=judge)
    results = run(tmp_path, first=first, resumed=more, clip=clip, judged=judged)
    assert "resumed from" in results["resumed"]["output"]
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_000003").is_dir()


class Contrast(Reward):
    """Computed on this process's GPU, in the scorer's thread."""

    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        gpu = pick_device()
        return [Answer(float(torch.from_numpy(s.media.pixels).to(gpu).float().std())) for s in samples]


def test_every_thread_uses_the_gpu_of_its_process(tmp_path):
    """A thread starts with GPU 0, where the first wait for an event makes a context of half a GB."""
    (tmp_path / "held.txt").write_text("a green cube\na cat\n")
    held = {"every": 1, "prompts": str(tmp_path / "held.txt"), "rewards": "jpeg_incompressibility"}
    over = {"eval": held, "checkpoint": {"every": 1}, "rewards": f"{__name__}.Contrast", "offload": ["vae"]}
    found = run(tmp_path, gpu=1, second=recipe(tmp_path, "second", "flux", **over))["second"]["gpus"]
    assert {name.rpartition(" ")[2] for name in found} == {"1"}, found
    assert any(name.startswith("samples") for name in found) and any(name.startswith("rewards") for name in found)


def test_masters_are_cast_on_the_device(tmp_path):
    """Weights cross to it in the dtype of their files, 2 bytes each: on a CPU, one core casts them."""
    files = list(folder("flux").rglob("transformer/*.safetensors"))
    shutil.copytree(folder("flux"), tmp_path / "flux")
    stored = 0
    for file in files:
        weights = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        stored += sum(tensor.nbytes for tensor in weights.values())
        save_file(weights, tmp_path / "flux" / file.relative_to(folder("flux")), {"format": "pt"})
    file = recipe(tmp_path, "full", "flux", train={"lora_rank": 0, "steps": 1})
    found = run(tmp_path, full=[*file, "--model", str(tmp_path / "flux")])["full"]["copied"]
    assert sum(count for line, count in found.items() if "parallel/shard.py" in line) == stored > 0, found


ENDS = ("policy.py", "metrics.py", "trainer.py", "throughput.py")
"""Where an update may wait: for the gradient's norm, and for the metrics of the step. The FLOP counter of a first step
passes these waits on, so they seem to be its own."""


@pytest.mark.parametrize("objective", ["grpo", "nft"])
def test_host_waits_of_a_step(objective, tmp_path):
    """At most three times in a step: a rollout at its end, an update for its norm and its metrics, and texts before."""
    train = {"objective": objective, "steps": 1}
    results = run(
        tmp_path,
        warm=recipe(tmp_path, "warm", "flux", train=train),  # position ids are made once per process
        few=recipe(tmp_path, "few", "flux", train=train),
        steps=recipe(tmp_path, "steps", "flux", train=train, rollout={"steps": 6}),
        batches=recipe(tmp_path, "batches", "flux", train=train, rollout={"batch_size": 1}),
    )
    waits = {name: result["syncs"] for name, result in results.items() if name != "warm"}
    for name, syncs in waits.items():
        inside = {place: n for place, n in syncs["update"].items() if not any(end in place for end in ENDS)}
        assert not inside, (name, inside)
        assert sum(syncs["update"].values()) == sum(waits["few"]["update"].values()), waits
    assert waits["steps"]["rollout"] == waits["few"]["rollout"], "it waits between steps"
    texts = ("encode_prompt", "base.py")  # without a cache
    aside = "wait (event)"  # a thread takes the pixels of each batch
    for name, syncs in waits.items():
        rollout = {
            place: n for place, n in syncs["rollout"].items() if not any(end in place for end in (*texts, aside))
        }
        assert sum(rollout.values()) + sum(syncs["update"].values()) <= 3, (name, rollout, "it waits between batches")
