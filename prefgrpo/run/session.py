"""Opens and checks everything that a run needs before its first step: folder, model, policy, prompts, judge, memory.

Invariant: every problem that can be detected without training is reported here, with an error that says what to do,
before anything in an existing run folder is changed.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from prefgrpo.config.loading import differences, load, to_dict
from prefgrpo.config.recipe import ConfigError, to_yaml
from prefgrpo.config.schema import Config, has_masters
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.prompts import FEWEST_TO_SPLIT, Prompt, fingerprint, prompt_sets
from prefgrpo.judge.verdict import PairJudge
from prefgrpo.models.base import Adapter
from prefgrpo.objectives import objective
from prefgrpo.objectives.base import EndpointObjective, Objective, TrajectoryObjective
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.context import context_errors
from prefgrpo.parallel.world import World
from prefgrpo.rewards import PYTHON, get_python_rewards
from prefgrpo.rewards.log import truncate_log
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rollout.assignment import assign_batches
from prefgrpo.rollout.batches import Rollouts
from prefgrpo.rollout.embeddings import Embeddings, encoding_jobs, uncached
from prefgrpo.rollout.endpoint import EndpointCollector
from prefgrpo.rollout.replay import TrajectoryCollector
from prefgrpo.rollout.sampling import Schedules, all_sizes, eval_sampling
from prefgrpo.run import checkpoint, judging, trackers
from prefgrpo.run.evaluate import Evaluator, make_eval_set
from prefgrpo.run.judging import evaluation_scorers, open_judge, training_scorer
from prefgrpo.run.loading import config_errors_as, open_adapter, trainable
from prefgrpo.run.memory import memory_line
from prefgrpo.run.policy import Policy
from prefgrpo.run.run_folder import RunFolder

FREE = (
    "output", "name", "device", "tensorboard", "trackers", "data.cache", "memory.offload",
    "train.steps", "train.max_minutes", "train.lr", "train.max_grad_norm",
    "train.gradient_checkpointing", "checkpoint.every", "checkpoint.keep",
    "judge.endpoints", "judge.api_key_env", "judge.concurrency", "judge.timeout_s", "judge.deadline_s",
    "judge.max_missing", "judge.strict", "judge.patience_steps", "judge.log", "judge.retries",
    "judge.patience_s", "parallel.replicate", "parallel.shard", "parallel.ulysses", "parallel.ring",
    "parallel.offload",
)  # fmt: skip
"""Fields that may differ in a resumed run: where and how it runs, and options that help after a stop."""
FREE_OPTIONS = (
    ".url", ".device", ".batch_size", ".judge.endpoints", ".judge.concurrency", ".judge.timeout_s", f".{PYTHON}",
)  # fmt: skip
"""The same for a reward's options, as suffixes."""
Collector = TrajectoryCollector | EndpointCollector


@dataclass
class Clock:
    """Measures the seconds per phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)
    now: Callable[[], float] = time.perf_counter

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        begin = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - begin


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a flag, so that the step is finished and saved; a second kills the run.

    Only the main thread can handle signals: created in another thread, this does nothing.
    """

    def __init__(self) -> None:
        self.seen = False
        main = threading.current_thread() is threading.main_thread()
        caught = (signal.SIGINT, signal.SIGTERM) if main else ()
        self._before = {number: signal.signal(number, self._note) for number in caught}

    def _note(self, number: int, frame: object) -> None:
        self.seen = True
        self.restore()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass
class Session:
    """The parts of a run."""

    config: Config
    world: World
    folder: RunFolder
    adapter: Adapter
    policy: Policy
    objective: Objective
    collector: Collector
    rollouts: Rollouts
    scorer: Scorer
    weights: dict[str, float]
    evaluators: dict[str, Evaluator]
    judge: PairJudge | None
    interrupt: Interrupt
    opened: ExitStack = field(default_factory=ExitStack)
    """On rank 0, closes the run folder's lock."""
    start: int = 0
    """Number of steps already done."""
    trained_s: float = 0.0
    """Seconds of training already spent."""
    notes: list[str] = field(default_factory=list)
    """Start-up messages to print."""

    def close(self) -> None:
        """Stop the judge and unlock the run folder."""
        self.interrupt.restore()
        self.scorer.close()
        if self.judge is not None:
            self.judge.close()
        self.opened.close()


def open_session(config: Config, resume: bool) -> Session:
    """Build and check everything. After a restart by torchrun, the run is resumed even without `resume`.

    Raises ConfigError, DataError, CheckpointError, ModelError or JudgeError.
    """
    world = parallel.join(config.device, config)
    resume = resume or parallel.restart_count() > 0
    folder = RunFolder(Path(config.output) / config.name)
    if problems := config_errors(config):
        raise ConfigError(problems)
    with ExitStack() as opened:
        lock = world.on_main(partial(checkpoint.claim, folder, resume), checkpoint.CheckpointError)
        if lock is not None:
            opened.callback(os.close, lock)
        if resume:
            _check_same_run(config, folder)
        session = _open(config, resume, world, folder)
        session.opened = opened.pop_all()
    return session


def _open(config: Config, resume: bool, world: World, folder: RunFolder) -> Session:
    prompts, sets = prompt_sets(config)
    measured = sets if config.eval.every else {}
    judge, judge_notes = open_judge(config, world)  # a bad reward fails before the model loads
    scorer, weights = training_scorer(config, judge, folder.root if world.main else None, prompts, world)
    scorers = {name: evaluation_scorers(config, judge, held, scorer, world) for name, held in measured.items()}
    absent = len(uncached(config, encoding_jobs(config, prompts, [p for held in sets.values() for p in held])))
    goal = objective(config.train)
    every_prompt = [*prompts, *(p for held in sets.values() for p in held)]
    adapter, policy = open_model(config, goal, world, every_prompt, encoders=bool(absent))
    schedules = open_schedules(config, adapter, world, prompts)
    embeddings = Embeddings(adapter, config.data.max_length, config.data.cache or None)
    ode = schedules.ode(eval_sampling(config))
    evaluators = {}
    for number, (name, held) in enumerate(measured.items()):
        chosen = make_eval_set(name, held[: config.eval.max_prompts or None], config.eval.samples_per_prompt, number)
        evaluators[name] = Evaluator(chosen, config, adapter, ode, embeddings, scorers[name], world, folder)
    graph = config.train.reuse_rollout_forward
    rollouts = Rollouts(config, adapter, embeddings, schedules, prompts, world, goal.whole_groups, graph)
    collector = open_collector(config, goal, adapter, policy, world)
    session = Session(
        config,
        world,
        folder,
        adapter,
        policy,
        goal,
        collector,
        rollouts,
        scorer,
        weights,
        evaluators,
        judge,
        Interrupt(),
    )
    session.notes = [*_notes(config, session), *judge_notes]
    if config.data.cache:
        state = f"{absent} entries missing" if absent else "complete, no text encoder was loaded"
        session.notes.append(f"embeddings in {config.data.cache}: {state}")
    _start_folder(config, session, resume)
    return session


def open_model(
    config: Config, goal: Objective, world: World, prompts: list[Prompt], encoders: bool
) -> tuple[Adapter, Policy]:
    """(the model ready to train, its policy), after checking that sizes can be split. Raises ConfigError."""
    adapter = open_adapter(config, world.device, encoders, world.layout.fsdp)
    _check_context(config, world, adapter, prompts)
    trainable(config, adapter, world)
    return adapter, open_policy(config, goal, adapter)


def open_policy(config: Config, goal: Objective, adapter: Adapter) -> Policy:
    """The trained weights, with the copies that the objective needs: of an old policy, and without a LoRA of the
    initial weights."""
    t = config.train
    old = goal.anchor == "old" or goal.sampled_by_old
    base = not t.lora_rank and (goal.anchor == "base" or t.kl_coef > 0)
    return Policy(dict(adapter.trainable()), t, old, base)


def open_collector(config: Config, goal: Objective, adapter: Adapter, policy: Policy, world: World) -> Collector:
    """The collector of the objective. Raises ConfigError for a `times` that a family with several denoisers rejects."""

    def reference() -> AbstractContextManager[None]:
        return adapter.reference() if config.train.lora_rank else policy.use_weights(policy.base)

    if isinstance(goal, TrajectoryObjective):
        return TrajectoryCollector(adapter, goal, config.train, reference)
    assert isinstance(goal, EndpointObjective)
    if len(adapter.denoisers) > 1 and goal.times not in ("window", "schedule"):
        which = f"{config.family} has a denoiser for each part of the schedule: expected window or schedule"
        raise ConfigError([f"train.objective_options.times: {which}, got {goal.times}"])
    anchor = reference if goal.anchor == "base" else lambda: policy.use_weights(policy.old)
    return EndpointCollector(adapter, goal, config, anchor, reference)


def _reuse_obstacles(config: Config, goal: Objective) -> list[str]:
    """Why the first update cannot reuse the rollout's forwards."""
    t, p = config.train, config.parallel
    obstacles = {
        f"{t.objective} replays no steps": goal.collector != "trajectory",
        "an old policy generates the rollouts": goal.sampled_by_old,
        "fp32 master weights have no bf16 copy between forwards": has_masters(config),
        "parallel splits weights or tokens": p.shard * p.ring * p.ulysses > 1,
        "rollout.staleness is 1, so the weights change in between": bool(config.rollout.staleness),
        "with train.lora_rank 0, the KL's reference weights are swapped in": bool(t.kl_coef and not t.lora_rank),
    }
    return [reason for reason, there in obstacles.items() if there]


def _objective_errors(config: Config) -> list[str]:
    """Errors in the objective and its options."""
    try:
        goal = objective(config.train)
    except ConfigError as error:
        return error.mistakes
    except ValueError as error:
        return [f"train.objective: {error}"]
    r, wrong = config.rollout, [f"train.objective_options.{e}" for e in goal.option_errors(config.rollout.group_size)]
    slices = config.train.update_slices == "members" and config.train.updates_per_rollout > 1
    if goal.whole_groups and (slices or config.train.updates_per_rollout > r.prompts_per_step):
        problem = f"{config.train.objective} compares the members of a group: expected update_slices: prompts"
        wrong.append(
            f"train.updates_per_rollout: {problem} and at most rollout.prompts_per_step = {r.prompts_per_step}, got "
            f"{config.train.updates_per_rollout} with {config.train.update_slices}"
        )
    if goal.needs_comparisons and not judging.trains_on_pairs(config):
        wanted = f"{config.train.objective} trains on comparisons: expected a pairwise reward, such as vlm_pairwise"
        wrong.append(f"reward.spec: {wanted}, with a weight above 0, got {config.reward.spec!r}")
    if r.same_noise and goal.collector == "endpoint":
        why = f"{config.train.objective} samples without step noise, so the images of a prompt would be identical"
        wrong.append(f"rollout.same_noise: {why}: expected false, got true")
    if r.staleness and (goal.anchor == "old" or goal.sampled_by_old):
        why = f"{config.train.objective} has an old policy, which has to be the one that generated the samples"
        wrong.append(f"rollout.staleness: {why}: expected 0, got {r.staleness}")
    if config.train.reuse_rollout_forward and (why_not := _reuse_obstacles(config, goal)):
        wrong.append(f"train.reuse_rollout_forward: expected false, got true: {'; '.join(why_not)}")
    return wrong


def config_errors(config: Config) -> list[str]:
    """Errors that can be found without loading the model: files, rewards, judge, objective, number of updates."""
    r, e, options = config.rollout, config.eval, config.reward.options
    if absent := [name for name, own in options.items() if PYTHON in own and name not in get_python_rewards()]:
        origin = ", ".join(f"{name} is {options[name][PYTHON]}" for name in absent)
        advice = "resume it there, with prefgrpo.Trainer(…, resume=True)"
        return [f"reward.spec: {origin}, which exists only in the Python program that started the run; {advice}"]
    problems = judging.config_errors(config)
    problems += [] if problems else _objective_errors(config)
    if not problems and not any(judging.specs(config)[0].values()):
        problems.append(
            "reward.spec: expected a weight other than 0, got only 0; use eval.spec for rewards that are only measured"
        )
    problems += trackers.config_errors(config)
    files = {"data.prompts": config.data.prompts, "eval.prompts": e.prompts, "eval.final_prompts": e.final_prompts}
    problems += [f"{field}: prompts file not found: {f}" for field, f in files.items() if f and not Path(f).is_file()]
    if config.train.updates_per_rollout > (samples := r.prompts_per_step * r.group_size):
        problem = f"expected at most one update per sample, got {config.train.updates_per_rollout} updates"
        problems.append(f"train.updates_per_rollout: {problem} of {samples} samples per step")
    return problems


def _check_context(config: Config, world: World, adapter: Adapter, prompts: list[Prompt]) -> None:
    """Raise ConfigError for sizes whose tokens cannot be divided over the context-parallel processes."""
    if world.layout.context == 1:
        return
    sizes = {"rollout.height/width/frames": config.rollout}
    if config.data.own_sizes:
        found = all_sizes(prompts, config.rollout, True)
        sizes = {f"data.own_sizes: a prompt of {s.height}×{s.width}": s for s in found}
    if eval_sampling(config) not in sizes.values():
        sizes["eval.height/width/frames"] = eval_sampling(config)
    length, layout = config.data.max_length, world.layout
    problems = [text for name, s in sizes.items() for text in context_errors(adapter, s, length, layout, name)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _check_same_run(config: Config, folder: RunFolder) -> None:
    """Raise CheckpointError if the folder's run differs in a field that a resumed run may not change."""
    changed = differences(load(folder.config), config) if folder.config.is_file() else {}
    fixed = {k: v for k, v in changed.items() if k not in FREE and not (".options." in k and k.endswith(FREE_OPTIONS))}
    if fixed:
        shown = "; ".join(f"{k}: was {a!r}, is {b!r}" for k, (a, b) in fixed.items())
        raise checkpoint.CheckpointError(
            f"{folder.root} was started with another configuration ({shown}); resume with the old values, "
            f"or choose another name"
        )


def open_schedules(config: Config, adapter: Adapter, world: World, prompts: list[Prompt]) -> Schedules:
    """The schedules of a run, after checking every size of its prompts. Raises ConfigError."""
    schedules = Schedules(config, adapter, world.device)
    with config_errors_as("rollout, or a prompt's own size"):
        for sizes in all_sizes(prompts, config.rollout, config.data.own_sizes):
            adapter.latent_shape(sizes)
            schedules.check(sizes)
    shown = eval_sampling(config)
    with config_errors_as("eval.height/width/frames"):
        adapter.latent_shape(shown)
    return schedules


def _start_folder(config: Config, session: Session, resume: bool) -> None:
    """Write the configuration of a new run, or load the newest checkpoint of an old one."""
    folder, world = session.folder, session.world
    newest = folder.latest() if resume else None
    if newest is not None:
        tensors, meta = checkpoint.read(newest, world, session.policy.templates)
        if meta["prompts"] != fingerprint(session.rollouts.prompts):
            raise checkpoint.CheckpointError(
                f"{config.data.prompts} has different prompts than when {folder.root} was started; "
                "resume with the old file, or choose another name"
            )
        session.policy.load_state_dict(tensors, meta["updates"])
        session.start = meta["step"]
        session.trained_s = meta["trained_s"]
        session.notes.append(f"resumed from {newest}")
    elif resume:
        session.notes.append(f"no checkpoint in {folder.root} yet; starting from step 0")
    if world.main:
        write_atomic(folder.config, to_yaml(to_dict(config)))  # first: a resumed run needs it
        folder.eval.mkdir(exist_ok=True)
        folder.groups.mkdir(exist_ok=True)
        truncate_log(folder.judgements, session.start)
    world.barrier()


def _notes(config: Config, session: Session) -> Iterator[str]:
    """Start-up messages: what is trained, on which prompts, how it is evaluated, and memory before the first step."""
    c, r, t, e, adapter = config, config.rollout, config.train, config.eval, session.adapter
    count, what = len(session.rollouts.prompts), f"LoRA rank {t.lora_rank}" if t.lora_rank else "full"
    media = f"clips of {frames} frames" if (frames := adapter.frames(r)) else "images"
    yield (
        f"{c.family} from {c.model}: training {adapter.parameter_counts()['trainable'] / 1e6:.2f} M parameters "
        f"({what}, {c.dtype}) on {session.world.size} × {session.world.device}; {r.prompts_per_step} prompts × "
        f"{r.group_size} {media} {r.width}×{r.height} per step from {count} prompts"
    )
    held = {name: len(set(evaluator.eval_set.group.tolist())) for name, evaluator in session.evaluators.items()}
    if not held:
        few = f"{count} prompts are too few for a held-out split (fewer than {FEWEST_TO_SPLIT})"
        why = "eval.every is 0" if not e.every else few if e.holdout else "eval.holdout is 0"
        yield f"no evaluation, so no before/after comparison: {why}, and eval.prompts is empty"
    elif e.prompts or e.final_prompts:
        yield "evaluated on " + ", ".join(f"{number} prompts ({name})" for name, number in held.items())
    else:
        share = f"{held['dev']} of {count + held['dev']} prompts are held out (eval.holdout {e.holdout:g})"
        yield f"{share}: evaluated on every {e.every} steps, never trained on"
    if session.rollouts.keep_graph:
        yield "the first update of each step reuses the rollout's forwards (train.reuse_rollout_forward)"
    if r.staleness:
        yield (
            "the next step's samples are generated while the current step is judged, before its update "
            "(rollout.staleness), except for the first step and after a checkpoint (every "
            f"{c.checkpoint.every} steps)"
        )
    if waits := idle_warning(config, session.world.dp_size):
        yield waits
    yield memory_line(adapter, session.policy)


def idle_warning(config: Config, indices: int) -> str:
    """A message about idle processes if the batches of an update cannot be assigned evenly; '' if they can."""
    r = config.rollout
    batches = Counter(b.update for b in assign_batches(config, [r] * r.prompts_per_step))
    rounds = sum(-(-count // indices) for count in batches.values())
    share = 1 - batches.total() / (rounds * indices)
    if not share:
        return ""
    counts = " or ".join(str(count) for count in sorted(set(batches.values())))
    return (
        f"an update has {counts} batches of up to {r.batch_size} samples for {indices} processes, which are idle "
        f"{share:.0%} of it; choose a rollout.batch_size that makes the number a multiple of {indices}"
    )


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
