"""Every mistake that a configuration and its model's folder can have, found before a model is loaded or a judge asked.

`errors` is for training, `model_errors` for what only samples or encodes. Contradictions within
the configuration are found when it is read (`config.schema`), what prompts lack when rewards are built.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from prefgrpo.config.by_path import load_function
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import COMBINE, Config, TrainConfig
from prefgrpo.judge.http import JudgeError
from prefgrpo.models import family, makes_clips
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError, is_hub_id
from prefgrpo.objectives import OBJECTIVES, make_objective
from prefgrpo.objectives.base import EndpointObjective, GroupObjective
from prefgrpo.parallel import attention_backend
from prefgrpo.parallel.parallelize import context_errors
from prefgrpo.parallel.world import Layout, World
from prefgrpo.rewards import PYTHON, check_entry, factory, get_python_rewards, load_class
from prefgrpo.rewards.pairs import get_plan
from prefgrpo.rollout.assignment import batch_sizes, busy_prompts, busy_share
from prefgrpo.rollout.sampling import Schedules, load_rule
from prefgrpo.run.folder import run_of
from prefgrpo.run.log import PAIRS
from prefgrpo.run.rewards import asks_judge, judge_config, pairwise_templates


def refuse(mistakes: list[str]) -> None:
    """Raise ConfigError with these mistakes, if there are any."""
    if mistakes:
        raise ConfigError(mistakes)


def errors(config: Config) -> list[str]:
    """Why a configuration cannot be trained: model, files, rewards, judges, objective, batches."""
    if lost := _lost_rewards(config):
        return lost
    of_rewards = reward_errors(config)
    found = model_errors(config, trains=True) + of_rewards + tracker_errors(config)
    if not (of_rewards or _named_errors(config)):
        found += _combination_errors(config)
    if config.data.pairs:
        found += _pair_errors(config)
    e = config.eval
    files = {"data.prompts": config.data.prompts, "eval.prompts": e.file, "eval.final_prompts": e.final_prompts}
    found += [f"{field}: prompts file not found: {f}" for field, f in files.items() if f and not Path(f).is_file()]
    return found + batch_errors(config)


def _lost_rewards(config: Config) -> list[str]:
    """Whether rewards were objects of the Python program that started the run, which this one is not."""
    lost = [e for e in config.rewards if PYTHON in e.options and e.name not in get_python_rewards()]
    if not lost:
        return []
    origin = ", ".join(f"{entry.name} is {entry.options[PYTHON]}" for entry in lost)
    advice = "resume it there, with prefgrpo.Trainer(…, resume=True)"
    return [f"rewards: {origin}, which exists only in the Python program that started the run; {advice}"]


# ---- the model ------------------------------------------------------------------------------------------------------


def model_errors(config: Config, trains: bool = False, download: bool = False) -> list[str]:
    """Why a configuration's model cannot sample or, with `trains`, be trained: its folder, options that its family does
    not support, the objective, and sizes and steps that the model does not have. Without `download`, only what is known
    without the folder of a model on the hub."""
    found = option_errors(config) + _named_errors(config)
    if is_hub_id(config.model) and not download:
        return found
    try:
        cls = family(config.family)
    except ValueError:
        return found  # `option_errors` says so
    try:
        outline = cls.outline(cls.find(config.model))
    except ModelError as error:
        return [f"model: {error}", *found]
    found = found or size_errors(config, outline)
    return found or (window_errors(config, outline) if trains else [])


def option_errors(config: Config) -> list[str]:
    """Options that the family does not support, found from its class alone."""
    try:
        cls = family(config.family)
    except ValueError as error:
        return [f"family: {error}"]
    layout = Layout(ring=config.parallel.ring, ulysses=config.parallel.ulysses)
    found = attention_backend.backend_errors(cls, config.family, config.attention, layout)
    r = config.rollout
    if r.frames is not None and cls.default_frames is None:
        found.append(f"rollout.frames: {config.family} makes images, expected none, got {r.frames}")
    if r.guidance_2 is not None and cls.default_guidance_2 is None:
        found.append(f"rollout.guidance_2: {config.family} has one denoiser, expected none, got {r.guidance_2}")
    if r.negative_prompt is not None and (cls.cfg is None or not cls.cfg.active(r.guidance)):
        why = f"guidance {r.guidance:g} is off" if cls.cfg else f"{config.family} has no classifier-free guidance"
        found.append(f"rollout.negative_prompt: {why}, expected none, got {r.negative_prompt!r}")
    if r.source_area is not None and cls.default_source_area is None:
        found.append(f"rollout.source_area: {config.family} resizes no sources, expected none")
    return found


def size_errors(config: Config, outline: Adapter) -> list[str]:
    """Sizes and numbers of frames and steps that a model does not have, or that the processes of a sample cannot share.
    outline: the model without weights."""
    layout = Layout(ring=config.parallel.ring, ulysses=config.parallel.ulysses)
    found: list[str] = []
    for section, sizes in {"rollout": config.rollout, "eval": config.eval_sampling}.items():
        field = f"{section}.height/width/frames"
        try:
            outline.latent_shape(sizes)
            field = f"{section}.steps"
            Schedules(replace(config, rollout=sizes), outline, torch.device("cpu")).ode(sizes)
        except ModelError:
            raise
        except ValueError as error:
            found.append(f"{field}: {error}")
        else:
            found += context_errors(outline, section, sizes, config.data.max_length, layout)
    return list(dict.fromkeys(found))


# ---- rewards ---------------------------------------------------------------------------------------------------------


def reward_errors(config: Config) -> list[str]:
    """Mistakes in the rewards, their options and judges, and in how they are combined."""
    found: list[str] = []
    combine = config.advantage.combine
    if combine not in COMBINE:
        try:
            load_function(combine, COMBINE)
        except ValueError as error:
            found.append(f"advantage.combine: {error}")
    negative = [entry.name for entry in config.rewards if entry.weight < 0]
    if combine == "geometric_mean" and negative:
        found.append(f"advantage.combine: {combine} expects weights of at least 0, but not those of {negative}")
    if not any(entry.weight for entry in config.rewards) and not config.data.pairs:
        found.append("rewards: expected a weight other than 0; use eval.rewards for what is only measured")
    only_measured = [entry for entry in config.measured if entry not in config.rewards]
    judges = {entry.name: entry.judge for entry in config.rewards}
    for entry in only_measured:
        if entry.judge != judges.get(entry.name, entry.judge):
            own = f"give another judge's entry its own, {{name: …, reward: {entry.reward}}}"
            found.append(f"eval.rewards: {entry.name} is the name of a trained reward: {own}")
    return found + entry_errors(config, "rewards", config.rewards) + entry_errors(config, "eval.rewards", only_measured)


def entry_errors(config: Config, field: str, entries: Iterable[RewardEntry]) -> list[str]:
    """Why rewards cannot be built, found without building them."""
    found: list[str] = []
    for entry in entries:
        try:
            _check_entry(config, entry)
        except ConfigError as error:
            found += error.mistakes
        except (ValueError, JudgeError) as error:
            found.append(f"{field}: {error}")
    return found


def _check_entry(config: Config, entry: RewardEntry) -> None:
    """Raise ValueError, ConfigError or JudgeError for a reward that cannot be built, without building it."""
    check_entry(entry)
    asks = asks_judge(entry)
    factory(entry.reward, entry.options | ({"judge": None} if asks else {}))
    if asks:
        judge_config(config, entry)
    elif entry.judge:
        raise ValueError(f"{entry.name} asks no judge: remove `judge` from its entry")
    pairwise_templates([entry])
    if load_class(entry.reward).compares:
        plan = get_plan(entry.options.get("plan", "both_orders"))
        if entry in config.rewards:
            plan(config.rollout.group_size, 0)


# ---- training -------------------------------------------------------------------------------------------------------


def batch_errors(config: Config) -> list[str]:
    """Whether the samples of a step can be divided into its updates, and these into batches."""
    r = config.rollout
    samples = r.prompts_per_step * r.group_size
    if config.train.updates_per_rollout > samples:
        problem = f"expected at most one update per sample, got {config.train.updates_per_rollout} updates"
        return [f"train.updates_per_rollout: {problem} of {samples} samples per step"]
    sizes = batch_sizes(config)
    if r.batch_size in sizes:
        return []
    problem = "a batch has images of one prompt that train in one update"
    return [f"rollout.batch_size: {problem}: expected one of {sizes}, got {r.batch_size}"]


def idle_errors(config: Config, world: World) -> list[str]:
    """Whether more than half of the GPUs would idle: nobody reads a warning in a queued job's log in time. On CPUs,
    where runs are tests and demos, idle processes cost nothing."""
    share = busy_share(config, world.dp_size)
    if share >= 0.5 or world.device.type != "cuda":
        return []
    r = config.rollout
    problem = (
        f"{r.prompts_per_step} prompts in batches of {r.batch_size} keep {share:.0%} of {world.dp_size} processes busy"
    )
    advice = f"set {busy_prompts(config, world.dp_size)}, or a smaller rollout.batch_size, or start fewer processes"
    allowed = "--allow-idle (allow_idle=True in Python) trains all the same"
    return [f"rollout.prompts_per_step: {problem}; {advice}; {allowed}"]


def _named_errors(config: Config) -> list[str]:
    """Mistakes in the objective, its options and the step rule, each of which may be the user's own."""
    found: list[str] = []
    try:
        load_rule(config.rollout.rule)
    except ValueError as error:
        found.append(f"rollout.rule: {error}")
    try:
        objective = make_objective(config.train)
    except ConfigError as error:
        return found + error.mistakes
    except ValueError as error:
        return [*found, f"train.objective: {error}"]
    return found + [f"train.objective_options.{e}" for e in objective.option_errors(config.rollout.group_size)]


def _combination_errors(config: Config) -> list[str]:
    """Where an objective does not fit the rewards, the updates and the rollout."""
    t = config.train
    r = config.rollout
    objective = make_objective(t)
    found: list[str] = []
    slices = t.update_slices == "members" and t.updates_per_rollout > 1
    if isinstance(objective, GroupObjective) and (slices or t.updates_per_rollout > r.prompts_per_step):
        problem = f"{t.objective} compares the members of a group: expected update_slices: prompts"
        limit = f"at most rollout.prompts_per_step = {r.prompts_per_step}"
        got = f"got {t.updates_per_rollout} with {t.update_slices}"
        found.append(f"train.updates_per_rollout: {problem} and {limit}, {got}")
    trained = [entry for entry in config.rewards if entry.weight > 0]
    comparing = [entry for entry in trained if load_class(entry.reward).compares]
    if objective.needs_comparisons and not comparing and not config.data.pairs:
        wanted = f"{t.objective} trains on comparisons: expected a pairwise reward, such as vlm_pairwise"
        names = ", ".join(entry.name for entry in config.rewards)
        found.append(f"rewards: {wanted}, with a weight above 0, got {names}")
    if r.same_noise and objective.inputs == "endpoint":
        why = f"{t.objective} samples without step noise, so the images of a prompt would be identical"
        found.append(f"rollout.same_noise: {why}: expected false, got true")
    if r.staleness and (objective.compares_with == "old" or objective.sampled_by_old):
        why = f"{t.objective} needs samples of its old policy, so it cannot be combined with staleness"
        found.append(f"rollout.staleness: {why}: expected 0, got {r.staleness}")
    return found


def window_errors(config: Config, outline: Adapter) -> list[str]:
    """Steps and times that may be trained, but not under the model's schedule."""
    found: list[str] = []
    try:
        Schedules(config, outline, torch.device("cpu")).check()
    except ConfigError as error:
        found += error.mistakes
    objective = make_objective(config.train)
    times = objective.times if isinstance(objective, EndpointObjective) else "window"
    if len(outline.denoisers) > 1 and times not in ("window", "schedule"):
        which = f"{config.family} has a denoiser for each part of the schedule: expected window or schedule"
        found.append(f"train.objective_options.times: {which}, got {times}")
    return found


def tracker_errors(config: Config) -> list[str]:
    """Errors for configured trackers whose libraries are not installed, or which do not take what the run makes."""
    # a ./wandb folder left by a run is a spec without origin
    named = [name for name in config.trackers if name != PAIRS]
    lacking = [name for name in named if getattr(find_spec(name), "origin", None) is None]
    hint = "run `pip install {0}`, or remove it from trackers"
    found = [f"trackers: {name} is not installed; {hint.format(name)}" for name in lacking]
    if PAIRS in config.trackers and makes_clips(config):
        found.append(f"trackers: {PAIRS} stores images, but {config.family} makes clips here; remove it from trackers")
    return found


def _pair_errors(config: Config) -> list[str]:
    """What cannot be trained from files."""
    path = Path(config.data.pairs)
    found: list[str] = []
    if not path.is_file() and (not path.is_dir() or run_of(path) is None):
        found.append(f"data.pairs: expected a table of pairs, or the folder of a run, got {path}")
    try:
        objective = make_objective(config.train)
        sound = family(config.family).with_sound
    except ValueError:
        return found  # reported elsewhere
    if objective.on_policy:
        offline = [name for name in OBJECTIVES if not make_objective(TrainConfig(objective=name)).on_policy]
        options = f" with objective_options {config.train.objective_options}" * bool(config.train.objective_options)
        needs = f"{config.train.objective}{options} needs samples of the policy, which data.pairs does not have"
        found.append(f"train.objective: {needs}; expected {', '.join(offline)}")
    if sound:
        found.append(f"data.pairs: {config.family} makes clips with sound, which pairs from files lack")
    return found
