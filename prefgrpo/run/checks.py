"""What a run refuses before its first step, beyond what the sections of the configuration check themselves.

`config_errors` needs no model; `check_context` needs the loaded one, `check_same_run` the folder of a resumed run.
"""

from __future__ import annotations

from pathlib import Path

from prefgrpo.config.loading import differences, load
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.objectives import objective
from prefgrpo.objectives.base import Objective
from prefgrpo.parallel.context import context_errors
from prefgrpo.parallel.world import World
from prefgrpo.rewards import PYTHON, get_python_rewards
from prefgrpo.rollout.sampling import all_sizes, eval_sampling
from prefgrpo.run import judging, trackers
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.run_folder import RunFolder

MAY_CHANGE = (
    "output", "name", "device", "trackers", "data.cache", "memory.offload",
    "train.steps", "train.lr", "train.max_grad_norm",
    "train.gradient_checkpointing", "checkpoint.every", "checkpoint.keep",
    "judge.endpoints", "judge.api_key_env", "judge.concurrency", "judge.timeout_s", "judge.deadline_s",
    "judge.max_missing", "judge.strict", "judge.log", "parallel.shard", "parallel.ulysses", "parallel.ring",
)  # fmt: skip
"""Fields that may differ in a resumed run: where and how it runs, and options that help after a stop."""
MAY_CHANGE_IN_OPTIONS = (
    ".url", ".device", ".batch_size", ".judge.endpoints", ".judge.concurrency", ".judge.timeout_s", f".{PYTHON}",
)  # fmt: skip
"""The same for a reward's options, as suffixes."""


def config_errors(config: Config) -> list[str]:
    """Errors that can be found without loading the model: files, rewards, judge, objective, number of updates."""
    r = config.rollout
    e = config.eval
    of_python = [entry for entry in config.rewards if PYTHON in entry.options]
    if absent := [entry for entry in of_python if entry.name not in get_python_rewards()]:
        origin = ", ".join(f"{entry.name} is {entry.options[PYTHON]}" for entry in absent)
        advice = "resume it there, with prefgrpo.Trainer(…, resume=True)"
        return [f"rewards: {origin}, which exists only in the Python program that started the run; {advice}"]
    problems = judging.config_errors(config)
    problems += [] if problems else _objective_errors(config)
    problems += trackers.config_errors(config)
    files = {"data.prompts": config.data.prompts, "eval.prompts": e.prompts, "eval.final_prompts": e.final_prompts}
    problems += [f"{field}: prompts file not found: {f}" for field, f in files.items() if f and not Path(f).is_file()]
    if config.train.updates_per_rollout > (samples := r.prompts_per_step * r.group_size):
        problem = f"expected at most one update per sample, got {config.train.updates_per_rollout} updates"
        problems.append(f"train.updates_per_rollout: {problem} of {samples} samples per step")
    return problems


def _objective_errors(config: Config) -> list[str]:
    """Errors in the objective and its options."""
    try:
        goal = objective(config.train)
    except ConfigError as error:
        return error.mistakes
    except ValueError as error:
        return [f"train.objective: {error}"]
    r = config.rollout
    wrong = [f"train.objective_options.{e}" for e in goal.option_errors(config.rollout.group_size)]
    slices = config.train.update_slices == "members" and config.train.updates_per_rollout > 1
    if goal.whole_groups and (slices or config.train.updates_per_rollout > r.prompts_per_step):
        problem = f"{config.train.objective} compares the members of a group: expected update_slices: prompts"
        wrong.append(
            f"train.updates_per_rollout: {problem} and at most rollout.prompts_per_step = {r.prompts_per_step}, got "
            f"{config.train.updates_per_rollout} with {config.train.update_slices}"
        )
    if goal.needs_comparisons and not judging.trains_on_pairs(config):
        wanted = f"{config.train.objective} trains on comparisons: expected a pairwise reward, such as vlm_pairwise"
        names = ", ".join(entry.name for entry in config.rewards)
        wrong.append(f"rewards: {wanted}, with a weight above 0, got {names}")
    if r.same_noise and goal.collector == "endpoint":
        why = f"{config.train.objective} samples without step noise, so the images of a prompt would be identical"
        wrong.append(f"rollout.same_noise: {why}: expected false, got true")
    if r.staleness and (goal.anchor == "old" or goal.sampled_by_old):
        why = f"{config.train.objective} has an old policy, which has to be the one that generated the samples"
        wrong.append(f"rollout.staleness: {why}: expected 0, got {r.staleness}")
    if config.train.reuse_rollout_forward and (why_not := _reuse_obstacles(config, goal)):
        wrong.append(f"train.reuse_rollout_forward: expected false, got true: {'; '.join(why_not)}")
    return wrong


def _reuse_obstacles(config: Config, goal: Objective) -> list[str]:
    """Why the first update cannot reuse the rollout's forwards."""
    t = config.train
    p = config.parallel
    obstacles = {
        f"{t.objective} replays no steps": goal.collector != "trajectory",
        "an old policy generates the rollouts": goal.sampled_by_old,
        "fp32 master weights have no bf16 copy between forwards": config.has_masters,
        "parallel splits weights or tokens": p.shard * p.ring * p.ulysses > 1,
        "rollout.staleness is 1, so the weights change in between": bool(config.rollout.staleness),
        "the KL's reference weights are swapped in": bool(t.kl_coef and t.swaps_reference),
    }
    return [reason for reason, there in obstacles.items() if there]


def check_context(config: Config, world: World, adapter: Adapter, prompts: list[Prompt]) -> None:
    """Raise ConfigError for sizes whose tokens cannot be divided over the context-parallel processes."""
    if world.layout.context == 1:
        return
    sizes = {"rollout.height/width/frames": config.rollout}
    if config.data.own_sizes:
        found = all_sizes(prompts, config.rollout, True)
        sizes = {f"data.own_sizes: a prompt of {s.height}×{s.width}": s for s in found}
    if eval_sampling(config) not in sizes.values():
        sizes["eval.height/width/frames"] = eval_sampling(config)
    length = config.data.max_length
    layout = world.layout
    problems = [text for name, s in sizes.items() for text in context_errors(adapter, s, length, layout, name)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def check_same_run(config: Config, folder: RunFolder) -> None:
    """Raise CheckpointError if the folder's run differs in a field that a resumed run may not change."""
    changed = differences(load(folder.config), config) if folder.config.is_file() else {}
    fixed = [
        f"{field}: was {before!r}, is {now!r}"
        for field, (before, now) in changed.items()
        if field not in MAY_CHANGE and not ("rewards." in field and field.endswith(MAY_CHANGE_IN_OPTIONS))
    ]
    if fixed:
        raise CheckpointError(
            f"{folder.root} was started with another configuration ({'; '.join(fixed)}); resume with the old values, "
            f"or choose another name"
        )
