"""Recipes that reproduce a published script, compared with that script (needs PREFGRPO_PEERS).

The shell flags of Pref-GRPO and DanceGRPO and the YAML of Flow-Factory are parsed; the Python configurations of
Flow-GRPO and PaCo-RL are executed. Why this oracle: a recipe copies someone else's numbers, so only the originals can
confirm them. The first lines of each recipe name its script and what differs; docs/recipes.md lists the differences of
whole codebases.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import peers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from prefgrpo.config.loading import load, to_dict
from prefgrpo.config.recipe import flatten, read_yaml
from prefgrpo.objectives import make_objective

RECIPES = Path(__file__).parents[2] / "scripts"
NAMED = re.compile(r"^# Script: [\w-]+'s ([\w./:]*\w)(.*(?:\n#.*)*)", re.M)
"""The comment of a recipe that names the script and says what differs."""
HEADS = {
    p.relative_to(RECIPES).with_suffix("").as_posix(): NAMED.search(p.read_text(encoding="utf-8"))
    for p in sorted(RECIPES.glob("*/[!_]*.yaml")) if p.parent.name not in ("demo", "prefgrpo")
}  # fmt: skip
SCRIPTS = {recipe: head[1] for recipe, head in HEADS.items() if head}
"""Recipe → the script that it copies, in the peer's checkout."""
BY_HAND = {"mixgrpo/full_flux"}


def scripts_of(folder):
    """Parametrises a test with the recipes of a folder and their scripts."""
    rows = [(recipe, script) for recipe, script in SCRIPTS.items() if recipe.startswith(f"{folder}/")]
    return pytest.mark.parametrize(("recipe", "script"), [row for row in rows if row[0] not in BY_HAND])


OTHERWISE = {"unifiedreward/full_think_wan": {"train.kl_coef"}}
"""Recipe → fields that deviate from the script, as stated in the recipe."""
FLAGS = {
    "rollout.steps": "sampling_steps", "rollout.eta": "eta", "rollout.group_size": "num_generations",
    "rollout.shift": "shift",
    "rollout.height": "h", "rollout.width": "w", "rollout.guidance_2": "cfg_infer_2", "train.lr": "learning_rate",
    "train.weight_decay": "weight_decay", "train.max_grad_norm": "max_grad_norm", "train.clip_range": "clip_range",
    "train.kl_coef": "kl_beta", "train.adv_clip_max": "adv_clip_max", "train.steps": "max_train_steps",
    "checkpoint.every": "checkpointing_steps", "eval.max_prompts": "eval_num_prompts", "eval.every": "eval_every_steps",
    "rollout.guidance": "guidance", "seed": "seed",
}  # fmt: skip


def ours(recipe):
    config = load(RECIPES / f"{recipe}.yaml")
    return config, flatten(to_dict(config)) | {"rewards": {entry.name: entry.weight for entry in config.rewards}}


def options_of(recipe, reward):
    return next(entry.options for entry in ours(recipe)[0].rewards if entry.name == reward)


def equal(recipe, published):
    _, values = ours(recipe)
    for field in OTHERWISE.get(recipe, ()):
        assert values[field] != published.pop(field), f"{field} equals the script's: remove it from OTHERWISE"
    assert {field: values[field] for field in published} == published


def flags(*files):
    """({flag: its last value, or True if it has none}, {exported variable: value}), ignoring comments."""
    text = "\n".join(re.sub(r"^\s*#.*", "", file.read_text(), flags=re.M) for file in files)
    found = re.findall(r"--(\w+)(?:[ =]+('[^']*'|\"[^\"]*\"|[\w.{}$-]+(?<!\\)))?", text.replace(" \\\n", "\n"))
    exported = dict(re.findall(r"^export (\w+)=([\d.,]+)$", text, flags=re.M))
    return {key: (value if value and not value.startswith("--") else True) for key, value in found}, exported


def shared(given):
    """The config values that follow from flags which both codebases share."""
    number = {k: float(v) for k, v in given.items() if v is not True and re.fullmatch(r"\d*\.?\d+(e-?\d+)?", v)}
    window = int((number["sampling_steps"] - 1) * number["timestep_fraction"])
    out = {field: number[flag] for field, flag in FLAGS.items() if flag in number}
    out |= {"rollout.window_size": window, "rollout.same_noise": True, "advantage.ddof": 1}
    out |= {"advantage.std": "group", "advantage.eps": 1e-8}
    samples = number["num_generations"] * number.get("train_batch_size", 1)
    out |= {"rollout.window_policy": "subset", "rollout.sde_everywhere": True, "train.update_slices": "members"}
    out["train.objective"] = "grpo_guard" if "rationorm" in given else "grpo"
    if "bestofn" in number:
        out["train.objective_options.best_of"] = number["bestofn"]
    out["train.updates_per_rollout"] = samples // number["gradient_accumulation_steps"]
    if number.get("t", 1) > 1:
        out["rollout.frames"] = number["t"]
    if "nproc_per_node" in number and re.fullmatch(r"\d+", str(given.get("nnodes", 1))):
        nodes = number.get("nnodes", 1)
        out["rollout.prompts_per_step"] = nodes * number["nproc_per_node"] * number["train_batch_size"]
    lora = ("lora_rank", "lora_alpha") if "lora_rank" in number else ()
    return out | ({f"train.{key}": number[key] for key in lora} or {"train.lora_rank": 0})


@scripts_of("unifiedreward")
def test_the_values_of_a_pref_grpo_script(recipe, script):
    place = peers.folder("pref_grpo")
    given, exported = flags(place / "scripts" / "_common_finetune.sh", place / script)
    given = {"learning_rate": given.get("learning"), "h": "720", "w": "720", **given}
    scales = ("train_guidance_scale", "cfg_infer", "rollout_guidance_scale")
    given["guidance"] = next((given[key] for key in scales if key in given), True)
    spec = json.loads(given["reward_spec"].strip("'"))
    published = shared(given) | {"rewards": spec}
    published["advantage.combine"] = "gdpo" if given["apply_gdpo"] else "weighted_advantage_sum"
    if "unifiedreward_flex" in spec:
        flex = options_of(recipe, "unifiedreward_flex")
        weights = [float(w) for w in exported.get("CATEGORY_WEIGHTS", "1,1,1").split(",")]
        assert flex["normalise_parts"] and list(flex.get("category_weights", (1.0, 0.7, 0.7))) == weights
        assert flex.get("overall_weight", 0.3) == float(exported.get("OVERALL_WEIGHT", 1))
        assert flex.get("category_weight", 0.7) == float(exported.get("DIM_WEIGHT", 1))
    equal(recipe, published)


@scripts_of("dancegrpo")
def test_the_values_of_a_dance_grpo_script(recipe, script):
    given, _ = flags(peers.folder("dance_grpo") / script)
    if "bestofn" in given:  # the same number of updates as on the samples that best-of-n keeps
        given["gradient_accumulation_steps"] = str(24 // (8 // int(given["gradient_accumulation_steps"])))
    given["guidance"] = given.get("cfg_infer", "3.5" if "flux" in script else "6.018" if "hunyuan" in script else "1.0")
    published = shared(given) | {"rollout.rule": "dance", "advantage.combine": "weighted_sum", "train.kl_coef": 0.0}
    if "lora" in script:
        published["train.lora_targets"] = ["to_q", "to_k", "to_v", "to_out.0"]
    if "use_videoalign" in given:
        assert options_of(recipe, "videoalign")["dimensions"] == ["VQ"]
    published["rewards"] = {"hpsv2": 1.0} if "use_hpsv2" in given else {"videoalign": 1.0}
    equal(recipe, published)


class ConfigDict(dict):
    """The part of ml_collections.ConfigDict that the configurations use."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


def configuration(codebase, script, monkeypatch):
    """(return value, source code) of a function in the peer's checkout, given as FILE:NAME."""
    stubs = {"ml_collections": ModuleType("ml_collections"), "imp": ModuleType("imp")}
    stubs["ml_collections"].ConfigDict = ConfigDict
    stubs["imp"].load_source = lambda name, file: peers.file_module(codebase, "config/base.py", name, monkeypatch)
    for stub, module in stubs.items():
        monkeypatch.setitem(sys.modules, stub, module)
    file, name = script.split(":")
    module = peers.file_module(codebase, file, f"{codebase}_config", monkeypatch)
    function = getattr(module, name, None)
    if function is None:
        pytest.skip(f"the checkout of {codebase} is another version: its {file} has no {name}")
    return function(), inspect.getsource(function)


def common(config, lora):
    """The config values that follow from settings which both codebases share."""
    s, t = config.sample, config.train
    return {
        "rollout.steps": s.num_steps, "rollout.guidance": s.guidance_scale, "rollout.shift": None,
        "rollout.same_noise": s.get("same_latent", False), "rewards": dict(config.reward_fn or t.reward_fn),
        "advantage.std": "global" if s.global_std else "group", "advantage.combine": "weighted_sum",
        "advantage.ddof": 0,
        "train.lr": t.learning_rate, "train.clip_range": t.clip_range, "train.max_grad_norm": t.max_grad_norm,
        "train.kl_coef": t.beta, "train.ema_decay": 0.9 if t.ema else 0.0, "train.updates_per_rollout": 2,
        "checkpoint.every": config.save_freq, "eval.every": config.eval_freq, "train.adv_clip_max": t.adv_clip_max,
        "train.lora_rank": lora, "train.lora_alpha": 2 * lora, "train.lora_init": "gaussian",
        "train.update_slices": "members", **({"train.ema_every": 8} if t.ema else {}),
    }  # fmt: skip


@scripts_of("flowgrpo")
def test_the_values_of_a_flow_grpo_configuration(recipe, script, monkeypatch):
    config, source = configuration("flow_grpo", script, monkeypatch)
    s, t, wan = config.sample, config.train, "wan" in script
    published = common(config, 32 if wan or "sd3" in script else 64) | {
        "rollout.group_size": s.num_image_per_prompt, "eval.steps": s.eval_num_steps,
        "rollout.rule": "wan" if wan else "cps" if s.get("sde_type") == "cps" else "flow",
        "train.kl_form": "flow_grpo" if t.beta and not wan else "gaussian",
        "train.objective": "grpo_guard" if config.get("rationorm") else "grpo",
    }  # fmt: skip
    if wan:
        published |= {"rollout.height": config.height, "rollout.width": config.width, "rollout.frames": config.frames}
    else:
        published |= {"rollout.height": config.resolution, "rollout.width": config.resolution}
        published["rollout.eta"] = s.noise_level
        gpus = int(re.search(r"gpu_number *= *(\d+)", source)[1])
        groups = gpus * s.train_batch_size * s.num_batches_per_epoch // s.num_image_per_prompt
        published["rollout.prompts_per_step"] = groups
    if s.get("sde_window_size") and "sde_window_range" in source:
        high = s.sde_window_range[1]
        published |= {"rollout.window_size": s.sde_window_size, "rollout.window_high": high}
    equal(recipe, published)


@scripts_of("pacogrpo")
def test_the_values_of_a_paco_grpo_configuration(recipe, script, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    config, _ = configuration("paco", script, monkeypatch)
    s = config.sample
    equal(recipe, common(config, 64) | {
        "rollout.group_size": s.num_images_per_prompt, "rollout.prompts_per_step": s.unique_sample_num_per_epoch,
        "rollout.height": config.train.resolution, "rollout.width": config.train.resolution,
        "rollout.eta": s.noise_level, "rollout.window_low": s.noise_steps[0],
        "rollout.window_high": s.noise_steps[-1] + 1,
        "eval.height": config.test.resolution, "eval.width": config.test.resolution,
        "eval.steps": config.test.num_steps, "seed": config.seed,
    })  # fmt: skip


FACTORY_OPTIONS = {
    "nft": {"beta": "nft_beta", "decay_rate": "ramp_rate", "decay_max": "ema_decay", "draws": "num_train_timesteps",
            "sample_with_old": "off_policy"},
    "awm": {"weight": "awm_weighting", "draws": "num_train_timesteps"},
    "dpo": {"beta": "beta", "draws": "num_train_timesteps", "times": "weighting_scheme"},
}  # fmt: skip


@scripts_of("flowfactory")
def test_the_values_of_a_flow_factory_configuration(recipe, script, monkeypatch):
    given = read_yaml(peers.folder("flow_factory").parent / script)
    m, t, e, noise = given["model"], given["train"], given["eval"], given["scheduler"]
    config, _ = ours(recipe)
    kind, options = t["trainer_type"], make_objective(config.train)
    for field, key in FACTORY_OPTIONS.get(kind, {}).items():
        assert getattr(options, field) == t[key], field
    published = {
        "train.objective": kind, "train.lora_rank": m["lora_rank"], "train.lora_alpha": m["lora_alpha"],
        "train.lr": t["learning_rate"], "train.weight_decay": t["adam_weight_decay"],
        "train.max_grad_norm": t["max_grad_norm"], "train.adv_clip_max": t.get("adv_clip_range", 5.0),
        "train.kl_coef": t.get("kl_beta", 0.0), "train.lora_init": "gaussian", "rollout.height": t["resolution"],
        "rollout.steps": t["num_inference_steps"], "rollout.guidance": t["guidance_scale"],
        "rollout.group_size": t["group_size"], "rollout.prompts_per_step": t["unique_sample_num_per_epoch"],
        "train.updates_per_rollout": t.get("gradient_step_per_epoch", 1), "seed": t["seed"],
        "advantage.std": "global" if t["global_std"] else "group", "eval.steps": e["num_inference_steps"],
        "eval.every": e["eval_freq"], "checkpoint.every": given["log"]["save_freq"],
    }  # fmt: skip
    if kind != "nft":  # its EMA settings define the old policy
        published |= {"train.ema_decay": t["ema_decay"], "train.ema_every": t["ema_update_interval"]}
    if kind == "grpo":
        steps, size = noise["sde_steps"], noise["num_sde_steps"]
        published |= {"rollout.window_low": min(steps), "rollout.window_high": max(steps) + 1}
        published |= {"rollout.window_size": size, "rollout.eta": noise["noise_level"]}
        published["train.clip_range"] = t["clip_range"]
    else:
        assert noise["dynamics_type"] == "ODE"
    if (way := t.get("time_sampling_strategy", "")).startswith("discrete"):
        code = peers.file_module("flow_factory", "flow_factory/utils/noise_schedule.py", "noise_schedule", monkeypatch)
        scheduler, n = FlowMatchEulerDiscreteScheduler(shift=3.0), t["num_inference_steps"]
        if config.family == "flux":
            scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
            shift = calculate_shift((t["resolution"] // 16) ** 2)
            scheduler.set_timesteps(sigmas=np.linspace(1, 1 / n, n), mu=shift)
        else:
            scheduler.set_timesteps(n)
        first, times = way != "discrete_wo_init", scheduler.timesteps
        many = [code.TimeSampler.discrete(1, t["num_train_timesteps"], times, t["timestep_range"], first)
                for _ in range(200)]  # fmt: skip
        seen = [times.tolist().index(time) for time in torch.cat(many).unique()]
        published |= {"rollout.window_low": min(seen), "rollout.window_high": max(seen) + 1}
    equal(recipe, published)


def test_every_recipe_names_its_script():
    assert [recipe for recipe, head in HEADS.items() if not head] == []
    compared = ("unifiedreward", "dancegrpo", "flowgrpo", "pacogrpo", "flowfactory")
    assert {r for r in SCRIPTS if not r.startswith(compared)} <= BY_HAND <= SCRIPTS.keys()
    assert len(set(SCRIPTS.values())) == len(SCRIPTS), "two recipes of one script"
    assert all(HEADS[recipe][2] for recipe in OTHERWISE), "a recipe does not say what differs"
