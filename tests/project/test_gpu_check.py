"""scripts/gpu_check.sh and the parts that it runs, each on the CPU with tiny models; a GPU is not needed.

The script gets a stand-in for Python that says it has a GPU and notes its calls, so that order, one failing part and
the exit code are those of the real script.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peers import folder

from benchmarks import levers, sanitize
from benchmarks.experiments import pref_grpo, trials
from prefgrpo.tiny import pipelines

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/bin/bash
echo "$PREFGRPO_BACKEND $*" >> "$CALLS"
case "$*" in
  *get_device_capability*) echo 90 ;;
  *get_device_name*) echo "2.11.0 NVIDIA H100" ;;
  *"benchmarks --device cuda"*) exit 1 ;;
esac
"""


def gpu_check(python, *parts, **env):
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *parts]
    return subprocess.run(command, env=os.environ | env | {"PYTHON": str(python)}, capture_output=True, text=True)


def test_without_a_gpu_it_says_so_in_one_line():
    done = gpu_check(sys.executable)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: ") and line.endswith("nothing was checked")


def test_a_part_that_fails_does_not_stop_the_next(tmp_path):
    tools = {"python": STAND_IN, "compute-sanitizer": '#!/bin/bash\n[[ $2 != racecheck ]] && "${@:5}"\n'}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = gpu_check(tmp_path / "python", CALLS=str(calls), PATH=path, PREFGRPO_BACKEND="")
    assert done.returncode == 1 and done.stderr.endswith("failed: memcheck bench\n")
    parts = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    of_levers = ["fused", "fp8", "attention", "recompute", "traffic", "ulysses"]
    assert parts == [f"== {name}" for name in ("tests", "memcheck", "bench", "families", *of_levers, "train", "peers")]
    lines = [line.strip() for line in calls.read_text().splitlines() if "-m" in line or "setup.py" in line]
    assert lines[0] == "setup.py -q build_ext --inplace" and lines[1].startswith("-m pytest ")
    sanitized = ["cuda -m benchmarks.sanitize", "triton -m benchmarks.sanitize", "cuda -m benchmarks.sanitize"]
    compared = [f"-m benchmarks.levers {name}" for name in of_levers]
    trained = ["-m benchmarks.experiments.trials train", "-m benchmarks.experiments.trials peers"]
    ends = ["-m benchmarks --device cuda --write", "-m benchmarks.experiments.trials families", *compared, *trained]
    assert lines[2:] == [*sanitized, *ends], "memcheck twice, no racecheck, initcheck"


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_what_is_sanitised_runs_every_op(backend):
    with sanitize.ops.use_backend(backend):
        assert sanitize.run("cpu") == 115


def test_the_trained_flux_has_the_published_size():
    """The transformer and the VAE have FLUX.1-dev's numbers of parameters; its text encoders, two layers."""
    pipe = trials.flux(trials.PUBLISHED, "meta", torch.bfloat16)
    sizes = {name: sum(p.numel() for p in getattr(pipe, name).parameters()) for name in ("transformer", "vae")}
    assert sizes == {"transformer": 11_901_408_320, "vae": 83_819_683}
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.bfloat16}
    assert pipe.text_encoder_2.config.d_model == 4096


@pytest.mark.full
def test_families_are_trained_and_an_error_is_a_line(tmp_path, capfd, monkeypatch):
    out = tmp_path / "families.json"
    assert trials.main(["families", "--names", "flux", "wan22", "--processes", "2", "--out", str(out)]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"family"')]
    assert sorted((line["family"], line["trained"]) for line in lines) == [
        ("flux", "LoRA"), ("flux", "all weights"), ("wan22", "LoRA"), ("wan22", "all weights"),
    ]  # fmt: skip
    assert all(line["on_policy_error"] == line["updates_skipped"] == 0 for line in lines)
    assert json.loads(out.read_text())["trials"] == lines
    monkeypatch.setattr(trials, "Trainer", lambda *args, **rest: 1 / 0)
    assert trials.train_family(("flux", "LoRA", str(tmp_path)))["error"].startswith("ZeroDivisionError")


def dies_as_flux(job):
    """Stands for `train_family`: the process of FLUX ends as after a segmentation fault."""
    if job[0] == "flux":
        os.abort()
    return {"family": job[0], "trained": job[1]}


@pytest.mark.full
def test_a_process_that_dies_is_the_line_of_its_own_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "train_family", dies_as_flux)
    found = trials.families(tmp_path, ["flux", "wan22"], 2)
    assert {(line["family"], "error" in line) for line in found} == {("flux", True), ("wan22", False)}


def test_a_trial_that_fails_gives_the_pipeline_back(tmp_path, monkeypatch):
    def fails(trainer):
        raise RuntimeError("injected")

    monkeypatch.setattr(trials.Trainer, "train", fails)
    pipe = trials.flux({}, "cpu", torch.float32)
    weights = set(pipe.transformer.state_dict())
    model = pipelines.make("flux", tmp_path / "flux")
    line = trials.train_flux(pipe, model, tmp_path, "fails", 32, 1.0)
    assert line["error"] == "RuntimeError: injected"
    assert set(pipe.transformer.state_dict()) == weights
    assert not any("forward" in vars(module) for module in pipe.transformer.modules())


@pytest.mark.full
def test_flux_is_trained_twice_from_one_pipeline(tmp_path, capfd):
    out = tmp_path / "train.json"
    assert trials.main(["train", "--tiny", "--out", str(out)]) == 0
    load, *found = json.loads(out.read_text())["trials"]
    assert load["parameters"] > 0 and [line["side"] for line in found] == [32, 64]
    for line in found:
        assert line["on_policy_error"] == 0 and line["time/images_per_s"] > 0 and line["peak GiB"] > 0
        assert line["--dry-run GiB"] > 0 and line["said at start"][0].startswith("memory per process")
    assert capfd.readouterr().out.count('{"trial": ') == 3


@pytest.mark.full
@pytest.mark.parametrize(
    "part, lines", {"fused": 4, "fp8": 6, "attention": 6, "recompute": 1, "traffic": 2, "ulysses": 2}.items()
)
def test_levers_are_compared_and_timed(tmp_path, capfd, part, lines):
    """Rehearsed with small widths: what two ways promise holds, and both are timed."""
    out = tmp_path / "levers.json"
    assert levers.main([part, "--tiny", "--out", str(out)]) == 0, capfd.readouterr().out
    found = json.loads(out.read_text())["trials"]
    assert len(found) == lines
    for line in found:
        timed = [value for name, value in line.items() if name.endswith((" s", ", s"))]
        assert "error" not in line and ("skipped" in line or (len(timed) >= 2 and min(timed) > 0)), line
    assert {line["attention"] for line in found if "skipped" in line} == (
        {"fa3", "fa4"} if part == "attention" else set()
    )


def test_ways_with_other_bits_are_an_error():
    ways = {"one": lambda: [torch.ones(2)], "other": lambda: [torch.ones(2) * (1 + 2**-23)]}
    assert levers.compared(ways, torch.device("cpu"))["error"] == "one and other have other bits"
    assert "error" not in levers.compared(ways, torch.device("cpu"), promised=False)
    assert not levers.equal([torch.tensor(torch.nan)], [torch.tensor(torch.nan)])


THEIRS = """
import torch
from fastvideo.rewards.dispatcher import compute_weighted_advantages
from fastvideo.utils.checkpoint import save_checkpoint

def train_one_step(args, device, net, ref, vae, rewards, optimizer, scheduler, loader, noise, most):
    embeds, pooled, ids, _ = next(loader)
    images = torch.zeros(1, net.config.in_channels)
    for number in range(WITHOUT + args.num_generations * int(args.timestep_fraction * (args.sampling_steps - 1))):
        with torch.set_grad_enabled(number >= WITHOUT):
            net(hidden_states=images[None], encoder_hidden_states=embeds, pooled_projections=pooled,
                timestep=torch.tensor([0.5]), guidance=torch.ones(1),
                img_ids=torch.zeros(1, 3), txt_ids=ids.expand(embeds.shape[1], 3))
"""
"""A training step with as many forwards as Pref-GRPO's, if WITHOUT is 24."""


@pytest.mark.full
@pytest.mark.parametrize("real", [False, True])
def test_trainers_are_compared_on_equally_many_forwards(tmp_path, monkeypatch, real):
    out = tmp_path / "peers.json"
    if real:
        folder("pref_grpo")
    else:
        place = tmp_path / "Pref-GRPO" / "fastvideo"
        place.mkdir(parents=True)
        (place / "train_flux.py").write_text(THEIRS.replace("WITHOUT", "24"))
        monkeypatch.setenv("PREFGRPO_PEERS", str(tmp_path))
    assert trials.main(["peers", "--tiny", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["trials"]
    ways = ("Pref-GRPO", "prefgrpo, batches of 2", "prefgrpo, batches of 4")
    assert [(line["trainer"], line["side"]) for line in found] == [(way, side) for side in (32, 64) for way in ways]
    assert all(line["seconds"] > 0 for line in found)
    if not real:
        (place / "train_flux.py").write_text(THEIRS.replace("WITHOUT", "23"))
        pipe = trials.flux({"transformer": {"in_channels": 64}}, "cpu", torch.float32)
        with pytest.raises(RuntimeError, match=r"'without gradient': 24, .* got {'without gradient': 23, "):
            pref_grpo.their_step(pipe, 32, 24)
    monkeypatch.delenv("PREFGRPO_PEERS")
    (line,) = trials.peers(tmp_path, {}, "cpu", [])
    assert line["skipped"].startswith("PREFGRPO_PEERS names no folder")
