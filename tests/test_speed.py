"""`prefgrpo plan`'s FLOPs, model passes and traffic against formulas written here, and its choice of a mesh.

Why these cases: estimated times are only as good as the counts behind them. FLOPs at the published models' true configs
are compared with sums over the layers of their architectures; passes with the forwards and backwards that a tiny run
really makes; traffic with the definitions of the collectives.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import model_configs
import pytest
import torch
from families import folder

from prefgrpo.commands.cli import main
from prefgrpo.config.loading import from_dict
from prefgrpo.models import family
from prefgrpo.objectives.base import Targets
from prefgrpo.run.memory import GIB, DenoiserSizes, estimate
from prefgrpo.run.session import Clock
from prefgrpo.run.speed import HARDWARE, Machines, judge_servers, meshes, step_time, work

SIZES = {"flux": (1024, None), "sd3": (1024, None), "qwen_image": (512, None), "wan": (480, 17)}
MODELS = {
    "flux": "black-forest-labs/FLUX.1-dev",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "qwen_image": "Qwen/Qwen-Image",
    "wan": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
}
TEXT = {"flux": 512, "sd3": 512, "qwen_image": 512, "wan": 512}


def by_hand(name, config, times=4):
    """FLOPs of one forward without guidance: 2 per weight and token, `times` · L² · width per attention; modulation and
    embeddings (under 1 %) are left out."""
    path = family(name).find(MODELS[name], configs_only=True)
    c = json.loads((path / "transformer" / "config.json").read_text())
    d = c["num_attention_heads"] * c["attention_head_dim"]
    r, text = config.rollout, TEXT[name]
    image = (r.height // 16) * (r.width // 16)
    if name == "flux":
        whole = image + text
        double = 2 * 12 * d * d * whole + times * whole**2 * d
        single = 2 * 12 * d * d * whole + times * whole**2 * d
        return c["num_layers"] * double + c["num_single_layers"] * single
    if name == "qwen_image":
        whole = image + text
        return c["num_layers"] * (2 * 12 * d * d * whole + times * whole**2 * d)
    if name == "sd3":  # 77 CLIP tokens before T5's; 13 blocks with a second image attention; the last drops text
        whole, layers = image + text + 77, c["num_layers"]
        joint = layers * (2 * 12 * d * d * whole + times * whole**2 * d) - 2 * 9 * d * d * (whole - image)
        return joint + len(c["dual_attention_layers"]) * (2 * 4 * d * d * image + times * image**2 * d)
    tokens, ffn = image * ((r.frames - 1) // 4 + 1), c["ffn_dim"]
    own, cross = (
        2 * 4 * d * d * tokens + times * tokens**2 * d,
        2 * 2 * d * d * (tokens + text) + times * tokens * text * d,
    )
    return c["num_layers"] * (own + cross + 4 * d * ffn * tokens)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.full
def test_flop_of_the_published_models(name, tmp_path):
    size, frames = SIZES[name]
    rollout = {"height": size, "width": size, "frames": frames, "batch_size": 1, "guidance": 1.0}
    content = {"model": MODELS[name], "family": name, "data": {"prompts": "p", "cache": "c"}, "rollout": rollout}
    config = from_dict(content | {"train": {"gradient_checkpointing": True}})
    flop = model_configs.estimate(config, tmp_path).flop
    assert flop["rollout"] == pytest.approx(by_hand(name, config), rel=0.03)
    backward = 3 * by_hand(name, config, 1.5 * 4)  # forward, recomputed, backward; attention's backward is 2.5 forwards
    assert flop["update"] == pytest.approx(backward, rel=0.05)


RUNS = {
    "kl": {"train": {"kl_coef": 0.1}},
    "reuse": {"train": {"reuse_rollout_forward": True, "updates_per_rollout": 2}},
    "awm": {"train": {"objective": "awm", "objective_options": {"draws": 2, "ratio": True}, "kl_coef": 0.1}},
    "dpo, batches of part of a group": {"train": {"objective": "dpo"}, "rollout": {"batch_size": 2}},
    "same noise": {"train": {}, "rollout": {"same_noise": True, "window_low": 2}},
    "best of 2": {"train": {"objective_options": {"best_of": 2}}},
}


@pytest.mark.parametrize("name", RUNS)
def test_passes_are_those_of_a_run(trainer, name):
    rollout = {"steps": 5, "group_size": 4, "batch_size": 4} | RUNS[name].get("rollout", {})
    train = {"lora_rank": 4, "reuse_rollout_forward": False, "lr": 1e-8} | RUNS[name]["train"]
    loop = trainer(eval={"every": 0}, rollout=rollout, train=train)
    seen, updating = {"rollout": 0, "graph": 0, "none": 0}, []

    def count(module, args, kwargs):
        kind = "graph" if torch.is_grad_enabled() else "none" if updating else "rollout"
        seen[kind] += len(kwargs["hidden_states"])

    loop.adapter.transformer.register_forward_pre_hook(count, with_kwargs=True)
    advantage = torch.tensor([[1.0, -0.5, 0.2, -0.7], [0.4, -0.9, 1.1, -0.6]])
    loop.targets = lambda step, scores: (updating.append(1), (Targets.of(advantage), {}))[1]
    loop._targets = lambda given, scores: Targets.of(given)
    loop.step(0, Clock())
    want = work(loop.config, 1, train["reuse_rollout_forward"])
    assert (
        seen["rollout"] + seen["graph"] + seen["none"] == want.rollout + want.trained + want.forward_only - want.reused
    )
    assert seen["graph"] == want.trained and seen["none"] == want.forward_only


FACTS = DenoiserSizes(trained=10**8, gathered=24 * 10**9, hidden=10**9)
FLOP = {"rollout": 1e13, "update": 3e13, "decode": 1e12, "text": 0.0}


def planned(nodes=1, gpus=8, **over):
    rollout = {"steps": 10, "window_size": 4, "prompts_per_step": 8, "group_size": 8, "batch_size": 4}
    content = {"model": "m", "data": {"prompts": "p", "cache": "c"}, "rollout": rollout, "gpus": gpus}
    config = from_dict(content | over)
    return step_time(config, FLOP, FACTS, Machines(HARDWARE["h100"], gpus, nodes, 0.5), False)


def test_traffic_and_seconds_are_those_of_the_definitions():
    rate = 0.5 * 989e12
    one = planned()
    assert one.seconds["rollout"] == pytest.approx(8 * 10 * 1e13 / rate)
    assert one.seconds["update"] == pytest.approx(8 * 4 * 3e13 / rate)
    assert one.traffic == {"reduce": pytest.approx(2 * 7 / 8 * 4e8)} and one.links["reduce"] == "nvlink"
    assert planned(nodes=2).links["reduce"] == "network"
    assert planned(nodes=2).seconds["reduce"] == pytest.approx(9 * one.seconds["reduce"])
    shard = planned(parallel={"shard": 8})
    assert shard.traffic["gather in rollout"] == pytest.approx(7 / 8 * 24e9 * 2 * 10), "two batches × ten steps"
    assert shard.traffic["gather in update"] == pytest.approx(7 / 8 * 24e9 * 2 * 4 * 2), "forward and backward"
    context = planned(parallel={"ulysses": 4})
    assert context.seconds["rollout"] == pytest.approx(one.seconds["rollout"]), "4 × the samples, 4 × the GPUs"
    forwards = 32 * 10 + 2 * 32 * 4
    assert context.traffic["all-to-all"] == pytest.approx(4 * 3 / 4 * forwards * 1e9 / 4)
    both = planned(gpus=16, nodes=2, parallel={"shard": 4, "ulysses": 4})
    assert both.links["all-to-all"] == "nvlink" and both.links["gather in rollout"] == "network"
    full = planned(parallel={"shard": 4}, train={"lora_rank": 0})
    assert full.traffic["reduce"] == pytest.approx(2 * 1 / 2 * 4e8 / 4 * 2 * 4), "one shard per backward"


@pytest.mark.parametrize("staleness", [0, 1])
def test_judges_are_hidden_behind_the_rollout_or_the_whole_step(staleness):
    step, machines = planned(gpus=64), Machines(HARDWARE["h100"], 64, 8, 0.5)
    config = from_dict({"model": "m", "data": {"prompts": "p"}, "rollout": {"staleness": staleness}})
    asked, each, servers = judge_servers(config, step, machines, 8.0)
    s = step.seconds
    beside = s["rollout"] + s["decode"] + staleness * (s["text"] + s["update"] + s["reduce"])
    assert asked == 8 * 8 * 7 and servers == math.ceil(asked * each / beside) > 1


@pytest.mark.full
def test_the_plan_prints_a_mesh_that_fits(place, capsys, tmp_path):
    """If weights fit only when sharded, the plan reports that the recipe does not fit and names a mesh that does."""
    content = {"model": str(folder("flux")), "family": "flux", "data": {"prompts": "p", "cache": "c", "max_length": 32}}
    content |= {"rollout": {"height": 32, "width": 32, "prompts_per_step": 4, "batch_size": 1, "group_size": 2}}
    content |= {"train": {"lora_rank": 0, "gradient_checkpointing": True}, "gpus": 4, "dtype": "fp32"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(content))
    config = from_dict(content)
    machines = Machines(HARDWARE["h100"], 4, 1, 0.3)
    whole = estimate(config, lambda adapter: meshes(config, adapter, machines))
    sizes = {(p.shard, p.ulysses): held for p, held in whole.other_meshes.items()}
    assert {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)} <= sizes.keys() and sizes[1, 1] == whole.total
    for p, held in whole.other_meshes.items():
        assert abs(held / estimate(replace(config, parallel=p)).total - 1) < 0.2, p
    memory = (sizes[1, 1] + min(sizes.values())) / 2 / GIB
    assert main(["plan", str(recipe), "--memory-gib", str(memory), "--levers"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and "fastest mesh that fits: replicate" in out and "--parallel.shard" in out
    assert "judging: 8 comparisons" in out and "no train.gradient_checkpointing" in out
    assert main(["plan", str(recipe), "--gpus", "4", "--nodes", "3"]) == 2


def test_the_true_hardware_is_in_one_table():
    page = (Path(__file__).parent.parent / "docs" / "scale.md").read_text()
    for name, gpu in HARDWARE.items():
        row = f"| `{name}` | {gpu.flops / 1e12:g} | {gpu.memory_gib:g} | {gpu.nvlink / 1e9:g} | {gpu.network / 1e9:g} |"
        assert row in page
