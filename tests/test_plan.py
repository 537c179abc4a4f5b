"""`prefgrpo plan`'s memory estimate against measured allocations.

Why these cases: an estimate that was never measured is a guess. The forward, decode and training step of every family
(except those whose text length depends on their images) are run under torch's memory profiler, also with checkpointing,
in bf16 and for full fine-tuning (the decoder without the profiler, which also sees scratch memory of CPU convolutions
that no plan can predict). The shapes of conditions, which the plan derives without text encoders, must be those that
the encoders return.
"""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
import torch.nn.functional as F
import yaml
from families import CASES, folder, load
from torch.profiler import ProfilerActivity, profile

from prefgrpo import models
from prefgrpo.commands.cli import main
from prefgrpo.config.loading import from_dict, to_dict
from prefgrpo.config.loading import load as load_recipe
from prefgrpo.config.schema import MemoryConfig
from prefgrpo.models.condition import collate
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.run import memory as plan
from prefgrpo.run.loading import open_adapter, trainable
from prefgrpo.run.memory import MemoryTracker

SIDE, BATCH = 64, 2
LONG = f'"{"a very long prompt " * 60}"'
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
RECIPES = {path: load_recipe(path) for path in sorted([*SCRIPTS.glob("*/lora_*.yaml"), *SCRIPTS.glob("*/full_*.yaml")])}
ONCE = list({case.family: case for case in CASES if not models.family(case.family).text_sees_sources}.values())


def config(case, **train):
    rollout = {
        "height": SIDE,
        "width": SIDE,
        "batch_size": BATCH,
        "frames": case.call.get("num_frames"),
        "guidance": case.guidance,
    }
    content = {"model": str(folder(case.family)), "family": case.family, "dtype": "fp32", "rollout": rollout}
    content["device"] = "cpu"
    data = {"prompts": "none.txt", "max_length": case.max_length}
    return from_dict(content | {"data": data, "train": {"lora_rank": 4, "lora_alpha": 8} | train})


def measured(work):
    """Peak bytes allocated at once; the larger of two runs, as the profiler may lose events."""
    most = 0
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            work()
        events = (e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
        most = max(most, *itertools.accumulate(size for _, size in sorted((e.start_ns(), e.nbytes()) for e in events)))
    return most


def real(case, c):
    """The three phases of the estimate, measured on the loaded model."""
    adapter, r = trainable(c, open_adapter(c, torch.device("cpu"))), c.rollout
    sources = [(case.images(0, (SIDE, SIDE))[:1])] * BATCH if case.edit else None
    condition = collate(Embeddings(adapter, case.max_length)([LONG] * BATCH, r, sources))
    text = replace(condition, sources=(), negative=None)
    condition = replace(condition, negative=text if adapter.guided(r) else None)  # the plan counts it so
    x, sigma = torch.randn(BATCH, *adapter.latent_shape(r)), torch.full((BATCH,), 0.9)
    for _, p in adapter.trainable():
        p.grad = torch.zeros_like(p)

    def forward():
        with torch.no_grad(), adapter.merged_lora():
            return adapter.velocity(x, sigma, condition, r)

    def update():
        adapter.velocity(x, sigma, condition, r).float().square().mean().backward()

    forward(), update()  # fill the position caches
    modules = [part for part in adapter.pipe.components.values() if isinstance(part, torch.nn.Module)]
    with MemoryTracker([x, *(t for m in modules for t in [*m.parameters(), *m.buffers()])]) as tracker:
        adapter.decode(x, r)
    return {"rollout": measured(forward), "decode": tracker.peak, "update": measured(update)}


def agree(case, c):
    got, want = plan.estimate(c).phases, real(case, c)
    for name in want:
        assert abs(got[name] / want[name] - 1) <= 0.15, (name, got[name], want[name])


FEW = ("flux", "sd3", "wan22")
EVERY = [pytest.param(case, marks=[pytest.mark.full] * (case.family not in FEW)) for case in ONCE]
"""All families; those not in FEW are marked `full`."""


@pytest.mark.parametrize("case", EVERY, ids=lambda case: str(case))
def test_the_estimate_is_what_a_real_step_holds(case):
    agree(case, config(case))


SD3 = next(case for case in CASES if case.family == "sd3")
FLUX = next(case for case in CASES if case.family == "flux")
HARDER = {
    "checkpointing": (FLUX, {"gradient_checkpointing": True}, {}),
    "half of the blocks": (SD3, {"gradient_checkpointing": True, "checkpointing_share": 0.5}, {}),
    "bf16": (FLUX, {}, {"dtype": "bf16"}),
    "all weights": (SD3, {"lora_rank": 0}, {}),
}


@pytest.mark.parametrize("name", HARDER)
def test_the_estimate_with_other_settings(name):
    case, train, top = HARDER[name]
    c = replace(config(case, **train), **top)
    agree(case, c)


def test_norms_hold_what_a_gpu_holds():
    """Under autocast, norms on torch's list run in fp32; rms_norm saves its input, weight and one number per row."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    listed = header.split("define AT_FORALL_FP32(_)")[1].split("#define")[0]
    x = torch.randn(2, 6, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    calls = {
        "layer_norm": lambda: F.layer_norm(x, (64,), weight),
        "rms_norm": lambda: F.rms_norm(x, (64,), weight),
        "group_norm": lambda: F.group_norm(x, 2),
    }
    gpu = replace(config(FLUX), device="cuda")
    for name, call in calls.items():
        assert f"_({name})" in listed
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call().dtype == torch.bfloat16
            with plan.norms_of(gpu):
                assert call().dtype == torch.float32
            assert call().dtype == torch.bfloat16
        with plan.norms_of(gpu):
            assert call().dtype == torch.bfloat16, "dtype changed without autocast"
    with torch.autocast("cpu", dtype=torch.bfloat16), plan.norms_of(gpu):
        assert torch.equal(calls["layer_norm"](), F.layer_norm(x.float(), (64,), weight.float()))
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            calls["rms_norm"]().sum().backward()
    assert sum(saved) == 4 * x.numel() + 4 * 64 + 4 * 12, "expected input, weight and a number per row"
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


def test_what_is_recomputed_goes_through_the_same_norms():
    gpu = replace(config(FLUX, gradient_checkpointing=True), dtype="bf16", device="cuda")
    held, on_cpu = plan.estimate(gpu).phases, plan.estimate(replace(gpu, device="cpu")).phases
    assert 0.9 * on_cpu["update"] < held["update"] < 2 * on_cpu["update"] and held["update"] != on_cpu["update"]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: str(case))
def test_conditions_have_the_shapes_that_the_plan_knows(case):
    adapter = load(case, folder(case.family))
    want = {key: tuple(value.shape) for key, value in adapter.encode_prompt(LONG, case.max_length).tensors().items()}
    assert adapter.condition_shapes(case.max_length) == want


@pytest.mark.full
def test_what_the_hints_name_makes_the_estimate_smaller():
    shares = [{}, {"gradient_checkpointing": True, "checkpointing_share": 0.5}, {"gradient_checkpointing": True}]
    most = [plan.estimate(config(SD3, **train)).phases["update"] for train in shares]
    assert most[0] > most[1] > most[2]
    c = config(FLUX)
    plain, sliced = plan.estimate(c), plan.estimate(replace(c, memory=MemoryConfig(vae_slicing=True)))
    assert sliced.phases["decode"] < plain.phases["decode"] and sliced.phases["update"] == plain.phases["update"]
    texts = plain.parts["text encoders"]
    parked = plan.estimate(replace(c, memory=MemoryConfig(offload=("text_encoder",))))
    assert "text encoders" not in parked.parts and parked.phases["text encoders"] == texts > 0
    cached = plan.estimate(replace(c, data=replace(c.data, cache="x")))
    assert not {"text encoders"} & {*cached.parts, *cached.phases} and cached.total < plain.total


@pytest.mark.full
def test_every_hint_is_a_field_that_is_free_to_turn(tmp_path, monkeypatch, capsys):
    """Following each hint gives the sum that it promises, until no hint is left."""
    monkeypatch.chdir(tmp_path)
    content = to_dict(config(FLUX, gradient_checkpointing=True, checkpointing_share=0.5))
    content["rollout"] |= {"prompts_per_step": 2, "group_size": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    argv = ["plan", "recipe.yaml", "--memory-gib", "1e-9"]
    turned, promised = [], None
    while True:
        assert main(argv) == 1
        told = capsys.readouterr().out
        total = re.search(r"sum +(\S+) GiB", told)[1]
        assert promised in (None, total), f"{turned[-1]}: promised {promised}, got {total}"
        if "no field reduces it" in told:
            break
        option, promised = re.search(r": try (--.*) \(now .*\): less for .*, (\S+) GiB in total", told).groups()
        turned.append(option)
        argv += option.split()
    names = [option.split()[0] for option in turned]
    assert not {"--train.gradient-checkpointing", "--rollout.batch-size 0"} & {*turned}
    assert {"--train.checkpointing-share", "--rollout.batch-size", "--gpus"} <= {*names}
    assert {"--data.cache", "--memory.offload", "--train.lora-rank"} <= {*names}


PUBLISHED = {
    "black-forest-labs/FLUX.1-dev": 11.9,
    "black-forest-labs/FLUX.1-Kontext-dev": 11.9,
    "black-forest-labs/FLUX.2-dev": 32.0,
    "black-forest-labs/FLUX.2-klein-base-9B": 9.1,
    "hunyuanvideo-community/HunyuanVideo": 12.8,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": 8.3,
    "Lightricks/LTX-2": 18.9,  # "19B"
    "Qwen/Qwen-Image": 20.4,
    "Qwen/Qwen-Image-2.1": 7.1,  # "7B"
    "Qwen/Qwen-Image-Edit": 20.4,
    "Qwen/Qwen-Image-Edit-2509": 20.4,
    "stabilityai/stable-diffusion-3.5-medium": 2.24,
    "Tongyi-MAI/Z-Image": 6.15,
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": 16.4,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.42,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14.3,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": 14.3,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": 14.3,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 5.0,
}
"""Billions of parameters of the (first) denoiser, as the models' authors give them."""


@pytest.mark.parametrize("model", [pytest.param(m, marks=[pytest.mark.full] * (m[:2] != "bl")) for m in PUBLISHED])
def test_the_shipped_configs_have_the_published_size(model, monkeypatch):
    """For a hub id `prefgrpo plan` reads the shipped configs, without network access."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    config = load_recipe(next(path for path, c in RECIPES.items() if c.model == model))
    path = models.family(config.family).find(model, configs_only=True)
    name = models.family(config.family).denoisers[0]
    entry = json.loads((path / "model_index.json").read_text())[name][1]
    cls = getattr(diffusers, entry)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls.from_config(cls.load_config(path / name)).parameters())
    assert count / 1e9 == pytest.approx(PUBLISHED[model], rel=0.02)


def test_every_recipe_has_its_models_configs():
    assert {c.model for c in RECIPES.values()} == set(PUBLISHED)


def test_a_mesh_that_cannot_divide_the_clip_has_no_plan(root, capsys):
    """Training would refuse it before the model loads: 9·15·26 = 3510 tokens over 8 processes."""
    argv = ["plan", str(root / "scripts/prefgrpo/lora_wan.yaml"), "--gpus", "8", "--parallel.ulysses", "8"]
    code = main(argv)
    assert code == 2 and "expected a multiple of ring × ulysses = 8 tokens, got 3510" in capsys.readouterr().err
