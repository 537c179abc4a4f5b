"""What a run refuses before its first step, beyond what the sections of the configuration check themselves.

`config_errors` needs no model, `check_same_run` the folder of a resumed run, `inputs.check_goes_on` its checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from prefgrpo.config.loading import differences, load
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, TrainConfig
from prefgrpo.models import family
from prefgrpo.models.folder import ModelError, is_hub_id
from prefgrpo.objectives import OBJECTIVES, objective
from prefgrpo.objectives.base import GroupObjective
from prefgrpo.parallel.world import World
from prefgrpo.rewards import PYTHON, get_python_rewards, load_class
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.rollout.batch import batch_sizes, busy_prompts, busy_share
from prefgrpo.run import judging, trackers
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.folder import RunFolder, run_of
from prefgrpo.run.loading import unsupported

MAY_CHANGE = (
    "output", "name", "trackers", "data.cache", "offload",
    # compared by content:
    "model", "data.prompts", "data.pairs", "eval.prompts", "eval.final_prompts", "train.lora_from",
    "train.steps", "train.lr", "train.lr_scheduler", "train.max_grad_norm",
    "train.gradient_checkpointing", "checkpoint.every", "checkpoint.keep",
    "judge.endpoints", "judge.api_key_env", "judge.concurrency", "judge.timeout_s", "judge.deadline_s",
    "judge.max_missing", "parallel.shard", "parallel.ulysses", "parallel.ring",
)  # fmt: skip
"""Fields that may differ in a resumed run: where and how it runs, and options that help after a stop."""
MAY_CHANGE_IN_OPTIONS = (
    ".url", ".device", ".batch_size", ".judge.endpoints", ".judge.concurrency", ".judge.timeout_s", f".{PYTHON}",
)  # fmt: skip
"""The same for a reward's options, as suffixes."""


def config_errors(config: Config) -> list[str]:
    """Errors that can be found without loading the model: family, files, rewards, judge, objective, updates."""
    e = config.eval
    of_python = [entry for entry in config.rewards if PYTHON in entry.options]
    if absent := [entry for entry in of_python if entry.name not in get_python_rewards()]:
        origin = ", ".join(f"{entry.name} is {entry.options[PYTHON]}" for entry in absent)
        advice = "resume it there, with prefgrpo.Trainer(…, resume=True)"
        return [f"rewards: {origin}, which exists only in the Python program that started the run; {advice}"]
    problems = _model_errors(config) + judging.config_errors(config)
    problems += [] if problems else _objective_errors(config)
    problems += unsupported(config)
    problems += trackers.config_errors(config)
    if config.data.pairs:
        problems += _pair_errors(config)
    files = {"data.prompts": config.data.prompts, "eval.prompts": e.file, "eval.final_prompts": e.final_prompts}
    problems += [f"{field}: prompts file not found: {f}" for field, f in files.items() if f and not Path(f).is_file()]
    return problems + batch_errors(config)


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


def check_busy(config: Config, world: World, allow_idle: bool) -> None:
    """Raise ConfigError if more than half of the GPUs would idle: nobody reads a warning in a queued job's log in time.
    On CPUs, where runs are tests and demos, idle processes cost nothing."""
    share = busy_share(config, world.dp_size)
    if share >= 0.5 or allow_idle or world.device.type != "cuda":
        return
    r = config.rollout
    problem = (
        f"{r.prompts_per_step} prompts in batches of {r.batch_size} keep {share:.0%} of {world.dp_size} processes busy"
    )
    advice = f"set {busy_prompts(config, world.dp_size)}, or a smaller rollout.batch_size, or start fewer processes"
    allowed = "--allow-idle (allow_idle=True in Python) trains all the same"
    raise ConfigError([f"rollout.prompts_per_step: {problem}; {advice}; {allowed}"])


def _model_errors(config: Config) -> list[str]:
    """Whether a local folder is a model of the family; the hub is not asked."""
    try:
        if not is_hub_id(config.model):
            family(config.family).find(config.model)
    except ModelError as error:
        return [f"model: {error}"]
    except ValueError:
        pass  # an unknown family is reported by its name
    return []


def _objective_errors(config: Config) -> list[str]:
    """Errors in the objective and its options."""
    t = config.train
    r = config.rollout
    try:
        goal = objective(t)
    except ConfigError as error:
        return error.mistakes
    except ValueError as error:
        return [f"train.objective: {error}"]
    wrong = [f"train.objective_options.{e}" for e in goal.option_errors(r.group_size)]
    slices = t.update_slices == "members" and t.updates_per_rollout > 1
    if isinstance(goal, GroupObjective) and (slices or t.updates_per_rollout > r.prompts_per_step):
        problem = f"{t.objective} compares the members of a group: expected update_slices: prompts"
        limit = f"at most rollout.prompts_per_step = {r.prompts_per_step}"
        got = f"got {t.updates_per_rollout} with {t.update_slices}"
        wrong.append(f"train.updates_per_rollout: {problem} and {limit}, {got}")
    trained = [entry for entry in config.rewards if entry.weight > 0]
    pairwise = ["url" in entry.options or issubclass(load_class(entry.reward), VlmPairwise) for entry in trained]
    if goal.needs_comparisons and not any(pairwise) and not config.data.pairs:
        wanted = f"{t.objective} trains on comparisons: expected a pairwise reward, such as vlm_pairwise"
        names = ", ".join(entry.name for entry in config.rewards)
        wrong.append(f"rewards: {wanted}, with a weight above 0, got {names}")
    if r.same_noise and goal.collector == "endpoint":
        why = f"{t.objective} samples without step noise, so the images of a prompt would be identical"
        wrong.append(f"rollout.same_noise: {why}: expected false, got true")
    if r.staleness and (goal.anchor == "old" or goal.sampled_by_old):
        why = f"{t.objective} has an old policy, which has to be the one that generated the samples"
        wrong.append(f"rollout.staleness: {why}: expected 0, got {r.staleness}")
    return wrong


def _pair_errors(config: Config) -> list[str]:
    """What cannot be trained from files."""
    path = Path(config.data.pairs)
    wrong: list[str] = []
    if not path.is_file() and (not path.is_dir() or run_of(path) is None):
        wrong.append(f"data.pairs: expected a table of pairs, or the folder of a run, got {path}")
    try:
        goal = objective(config.train)
        sound = family(config.family).with_sound
    except ValueError:
        return wrong  # said elsewhere
    if goal.on_policy:
        offline = [name for name in OBJECTIVES if not objective(TrainConfig(objective=name)).on_policy]
        options = f" with objective_options {config.train.objective_options}" * bool(config.train.objective_options)
        needs = f"{config.train.objective}{options} needs samples of the policy, which data.pairs does not have"
        wrong.append(f"train.objective: {needs}; expected {', '.join(offline)}")
    if sound:
        wrong.append(f"data.pairs: {config.family} makes clips with sound, which pairs from files lack")
    return wrong


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
