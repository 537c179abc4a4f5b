"""Training from Python, with the same code as `prefgrpo train`.

    trainer = Trainer("black-forest-labs/FLUX.1-dev", train_prompts="prompts.txt", rewards={"clip": 0.3, redness: 0.7})
    result = trainer.train()

Keyword arguments correspond one to one to a recipe: every value of a recipe can be passed here, and arguments are
checked like a recipe and written to the run folder as one. Invariant: the constructor starts nothing: no process group,
no model, no run folder.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefgrpo.config.loading import from_dict, recipe_values, to_dict
from prefgrpo.config.recipe import ConfigError, merge
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.prompts import SOURCE
from prefgrpo.models import family_of
from prefgrpo.models.folder import ModelError
from prefgrpo.parallel.world import leave
from prefgrpo.report import write_report
from prefgrpo.rewards import PYTHON, REWARDS, RewardSpecError, load_class, parse_reward_spec, python_rewards
from prefgrpo.rewards.base import Reward
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.run.loading import unsupported
from prefgrpo.run.run_folder import RunFolder
from prefgrpo.run.session import Interrupt, config_errors
from prefgrpo.run.trainer import Callbacks, TrainingLoop, TrainingStopped

SECTIONS = ("data", "eval", "judge", "reward", "train")
"""Sections that the arguments of `Trainer` set values in."""
WHICH_JUDGE = ("backend", "model", "endpoints", "template", "api_key_env")
"""Fields of the judge section that identify the judge."""
Prompts = str | Path | Sequence[str | Mapping[str, Any]]
"""A prompt file, or the prompts themselves: texts, or mappings from column names to values."""


class PairwiseJudge:
    """A vision-language judge that compares the images of a prompt in pairs; the reward is the win rate.

    PairwiseJudge("http://127.0.0.1:8000")                             an OpenAI-compatible server, or a list of several
    PairwiseJudge("Qwen/Qwen3-VL-8B-Instruct", plan="k_regular(4)")    a folder or hub id, loaded in this process
    """

    def __init__(self, judge: str | Path | Sequence[str], **options: Any) -> None:
        """options: fields of `JudgeConfig`, e.g. model (of a server), template, plan, verdict, concurrency."""
        endpoints = [str(judge)] if isinstance(judge, str | Path) else list(judge)
        server = all("://" in endpoint for endpoint in endpoints)
        where = {"backend": "http", "endpoints": endpoints} if server else {"backend": "local", "model": str(judge)}
        self.options: dict[str, Any] = where | options


RewardLike = str | PairwiseJudge | Reward | Callable[..., Any]
"""A reward's name, a judge, a reward object, or a function: (images, prompts, **columns) -> one number or None per
image, or (prompt, image_a, image_b) -> the probability that image_a is better."""


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    """The run folder."""
    metrics: dict[str, float]
    """Metrics of the last evaluation (all are in the folder's `metrics.jsonl`); empty without one."""
    win_rate: float | None
    """Win rate of held-out images against the initial policy's, by the judge or else by the first evaluation reward;
    None without an evaluation, NaN if all its verdicts are missing."""
    lora: Path | None
    """The LoRA in diffusers format, for `pipe.load_lora_weights`; None after full fine-tuning."""
    pipeline: Path | None
    """The whole pipeline after full fine-tuning."""
    report: Path
    """report.html."""
    summary: str
    """The last evaluation in one line."""


class Trainer:
    """One run: `Trainer(...).train()`."""

    def __init__(
        self,
        model: str | Path = "",
        *,
        train_prompts: Prompts | None = None,
        eval_prompts: float | Prompts | None = None,
        rewards: RewardLike | Sequence[RewardLike] | Mapping[RewardLike, float] | None = None,
        steps: int | None = None,
        lora_rank: int | None = None,
        resume: bool = False,
        on_step: Callable[[int, dict[str, float]], object] | None = None,
        on_evaluation: Callable[[int, str, dict[str, float]], object] | None = None,
        on_save: Callable[[Path], object] | None = None,
        **overrides: Any,
    ) -> None:
        """Check a run; `train` starts it. Raises ConfigError with every mistake, named as in a recipe.

        model: a diffusers pipeline: a folder, or a hub id, 'owner/name' or 'owner/name@revision'; its family follows
        from its model_index.json. train_prompts: a file or a list. eval_prompts: a file or a list, or the share of
        train_prompts that is held out. rewards: one, several, or {reward: weight}. steps: training steps. lora_rank:
        0 trains all weights. resume: continue the run of this name.

        on_step(step, metrics), on_evaluation(step, set name, metrics) and on_save(checkpoint folder) are called on
        rank 0. overrides: any other value of a recipe, by section or by dotted name: name="run", seed=1,
        rollout={"height": 512, "width": 512}, **{"train.lr": 1e-4}.
        """
        values = _nested(overrides)
        objects, reward_values, judged = _rewards(rewards)
        training = {"steps": _plain(steps), "lora_rank": _plain(lora_rank)}
        given: dict[str, Any] = {"train": {key: value for key, value in training.items() if value is not None}}
        eval_prompts = _plain(eval_prompts)
        output, files = str(values.get("output", Config.output)), dict[Path, str]()
        if model:
            given["model"] = str(model)
        if train_prompts is not None:
            given["data"] = {"prompts": _prompts_file("train_prompts", train_prompts, output, files)}
        if isinstance(eval_prompts, float | int):
            given["eval"] = {"prompts": "", "final_prompts": "", "holdout": eval_prompts}
        elif eval_prompts is not None:
            given["eval"] = {"prompts": _prompts_file("eval_prompts", eval_prompts, output, files)}
        if wrong := [key for key in SECTIONS if not isinstance(values.get(key, {}), Mapping)]:
            raise ConfigError([f"{key}: expected a mapping of its fields, got {values[key]!r}" for key in wrong])
        if "judge" in reward_values:  # replaces the recipe's judge, but not its other settings
            values["judge"] = {key: own for key, own in values.get("judge", {}).items() if key not in WHICH_JUDGE}
        elif rewards is not None and "judge" not in values and not judged:
            given["eval"] = {"judge": False} | values.get("eval", {}) | given.get("eval", {})
        values = merge(merge(values, given), reward_values)
        if rewards is not None:  # drop the recipe's Python rewards that are not given here
            options = values["reward"]["options"]
            values["reward"]["options"] = {n: own for n, own in options.items() if n in objects or PYTHON not in own}
        if values.get("model") and "family" not in values:
            try:
                values["family"] = family_of(str(values["model"]))
            except ModelError as error:
                raise ConfigError([f"model: {error}"]) from error
        self.config = from_dict(values)
        self.folder = RunFolder(Path(self.config.output) / self.config.name)
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text)
        self._objects, self._resume = objects, resume
        self._callbacks = Callbacks(on_step, on_evaluation, on_save)
        with python_rewards(objects):
            if problems := unsupported(self.config) + config_errors(self.config):
                raise ConfigError(problems)

    @classmethod
    def from_recipe(cls, recipe: str | Path, model: str | Path = "", **arguments: Any) -> Trainer:
        """A trainer for a recipe; the arguments are those of `Trainer` and override the recipe's values."""
        values = recipe_values(recipe, str(model))
        keywords = {name for name in inspect.signature(cls).parameters if name in arguments}
        overrides = {key: value for key, value in arguments.items() if key not in keywords}
        values = merge(values, _nested(overrides)) | ({"model": str(model)} if model else {})
        return cls(**values, **{key: arguments[key] for key in keywords})

    @classmethod
    def from_config(cls, config: Config, resume: bool = False) -> Trainer:
        """A trainer for a configuration."""
        return cls(**to_dict(config), resume=resume)

    def train(self) -> Result:
        """Train to the end, and write the report.

        Raises TrainingStopped, after saving a checkpoint and the report so far, if the run cannot continue or is
        interrupted; before the first step, ConfigError, DataError, CheckpointError, ModelError or JudgeError.
        """
        with python_rewards(self._objects):
            loop = TrainingLoop(self.config, self._resume, self._callbacks)
            try:
                loop.run()
            except TrainingStopped:
                if loop.world.main:
                    interrupt = Interrupt()  # torchrun sends SIGTERM as soon as another process has ended
                    with suppress(OSError):  # a full disk
                        write_report(self.folder.root)
                    interrupt.restore()
                raise
        if loop.world.main:
            write_report(self.folder.root)
        atexit.register(leave)  # after a success; the program may train again first
        lora = self.config.train.lora_rank > 0
        return Result(
            folder=self.folder.root,
            metrics=loop.evaluation,
            win_rate=loop.log.win_rate,
            lora=self.folder.product(True) if lora else None,
            pipeline=None if lora else self.folder.product(False),
            report=self.folder.report,
            summary=loop.verdict,
        )


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections from dotted names: {"train.lr": 1} → {"train": {"lr": 1}}."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        value = _plain(value)
        for part in reversed(key.split(".")):
            value = {part: value}
        out = merge(out, value)
    return out


def _plain(value: Any) -> Any:
    """The value with NumPy's and torch's scalars converted to Python numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.item() if getattr(value, "shape", None) == () else value


def _prompts_file(argument: str, prompts: Prompts, output: str, files: dict[Path, str]) -> str:
    """The prompt file; a list is added to `files`, under a name derived from its content so that runs can resume."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__"):
        raise ConfigError([f"{argument}: expected a file or a list of prompts, got {prompts!r}"])
    if not len(prompts):
        raise ConfigError([f"{argument}: expected at least one prompt, got none"])
    rows = []
    for prompt in prompts:
        if not isinstance(prompt, str | Mapping):
            raise ConfigError([f"{argument}: expected texts, or mappings with a 'prompt', got {prompt!r}"])
        row = {"prompt": prompt} if isinstance(prompt, str) else _plain(prompt)
        for key in SOURCE:
            if isinstance(value := row.get(key), str | Path):
                row[key] = str(Path(value).absolute())
            elif isinstance(value, Sequence):
                row[key] = [str(Path(path).absolute()) for path in value]
        try:
            rows.append(json.dumps(row))
        except TypeError as error:
            raise ConfigError([f"{argument}: a column cannot be written as JSON ({error}): {row!r:.200}"]) from error
    text = "".join(row + "\n" for row in rows)
    file = Path(output) / f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    files[file] = text
    return str(file)


def _rewards(rewards: Any) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """(name → function or reward object, the recipe values, whether a reward uses a judge). Raises ConfigError."""
    if rewards is None:
        return {}, {}, False
    if isinstance(rewards, str):
        try:
            rewards = parse_reward_spec(rewards)
        except RewardSpecError as error:
            raise ConfigError([f"rewards: {error}"]) from error
    objects: dict[str, Any] = {}
    values: dict[str, Any] = {"reward": {"options": {}}}
    spec: dict[str, float] = {}
    several = rewards if isinstance(rewards, Sequence) else [rewards]
    weighed = rewards.items() if isinstance(rewards, Mapping) else [(reward, 1.0) for reward in several]
    for reward, weight in weighed:
        if isinstance(reward, str):
            name = reward
        elif isinstance(reward, PairwiseJudge):
            name, values["judge"] = "vlm_pairwise", reward.options
        elif isinstance(reward, VlmPairwise) and reward.judged:
            raise ConfigError([f"rewards: expected PairwiseJudge(…) or a name, got {type(reward).__name__}"])
        elif not callable(reward) and not isinstance(reward, Reward):
            raise ConfigError([f"rewards: expected a name, a PairwiseJudge, a reward or a function, got {reward!r}"])
        else:
            name = _name(reward)
            objects[name] = reward
            origin = reward if hasattr(reward, "__qualname__") else type(reward)
            values["reward"]["options"][name] = {PYTHON: f"{origin.__module__}.{origin.__qualname__}"}
        if name in spec:
            raise ConfigError([f"rewards: {name} is given twice; give each reward once, and functions distinct names"])
        spec[name] = _plain(weight)
    with python_rewards(objects):
        try:
            values["reward"]["spec"] = json.dumps(parse_reward_spec(spec))
            classes = [load_class(name) for name in spec]
        except RewardSpecError as error:
            raise ConfigError([f"rewards: {error}"]) from error
    return objects, values, any(cls.judged for cls in classes)


def _name(reward: Any) -> str:
    """The name of a function or reward object in specs and metrics."""
    if isinstance(reward, Reward):
        path = f"{type(reward).__module__.rpartition('.')[2]}:{type(reward).__qualname__}"
        return next((name for name, known in REWARDS.items() if known == path), type(reward).__name__)
    name = str(getattr(reward, "__name__", type(reward).__name__))
    return name if name.isidentifier() else "function"
