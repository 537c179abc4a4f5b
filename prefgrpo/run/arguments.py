"""The arguments of `prefgrpo.Trainer` as a configuration: each is a value of a recipe, and is checked like one.

Prompts given as a list are written to a file named by their content, so that the run can be resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError, merge
from prefgrpo.config.schema import Config, JudgeConfig
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.tables import SOURCE
from prefgrpo.models import family_of
from prefgrpo.models.folder import ModelError
from prefgrpo.rewards import PYTHON, REWARDS
from prefgrpo.rewards.base import Reward
from prefgrpo.rewards.pairwise import VlmPairwise

SECTIONS = ("data", "eval", "judge", "advantage", "train")
"""Sections that the arguments of `Trainer` set values in."""
Prompts = str | Path | Sequence[str | Mapping[str, Any]]
"""A prompt file, or the prompts themselves: texts, or mappings from column names to values."""


class PairwiseJudge:
    """A vision-language judge that compares the images of a prompt in pairs; the reward is the win rate.

    PairwiseJudge("http://127.0.0.1:8000")                             an OpenAI-compatible server, or a list of several
    PairwiseJudge("Qwen/Qwen3-VL-8B-Instruct", plan="k_regular(4)")    a folder or hub id, loaded in this process
    """

    def __init__(self, judge: str | Path | Sequence[str], **options: Any) -> None:
        """options: fields of the judge section, e.g. model (of a server), concurrency, and options of vlm_pairwise:
        template, plan, verdict, rate."""
        endpoints = [str(judge)] if isinstance(judge, str | Path) else list(judge)
        server = all("://" in endpoint for endpoint in endpoints)
        where = {"backend": "http", "endpoints": endpoints} if server else {"backend": "local", "model": str(judge)}
        named = {f.name for f in fields(JudgeConfig)}
        self.judge: dict[str, Any] = where | {key: value for key, value in options.items() if key in named}
        self.options = {key: value for key, value in options.items() if key not in named}


RewardLike = str | PairwiseJudge | Reward | Callable[..., Any]
"""A reward's name, a judge, a reward object, or a function: (images, prompts, **columns) -> one number or None per
image, or (prompt, image_a, image_b) -> the probability that image_a is better."""


def run_config(
    model: str | Path,
    train_prompts: Prompts | None,
    eval_prompts: float | Prompts | None,
    rewards: Any,
    train: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> tuple[Config, dict[str, Any]]:
    """(configuration, name → function or reward object) for the arguments of `Trainer`; train: those that are fields of
    the section `train`, None if not given. Raises ConfigError with every mistake.
    """
    values = _plain(overrides)
    objects, listed = _rewards(rewards)
    given: dict[str, Any] = {"train": {key: _plain(value) for key, value in train.items() if value is not None}}
    eval_prompts = _plain(eval_prompts)
    output = str(values.get("output", Config.output))
    files = dict[Path, str]()
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
    values = merge(values, given)
    if rewards is not None:
        values["rewards"] = listed
    if values.get("model") and "family" not in values:
        try:
            values["family"] = family_of(str(values["model"]))
        except ModelError as error:
            raise ConfigError([f"model: {error}"]) from error
    config = from_dict(values)
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    return config, objects


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


def _rewards(rewards: Any) -> tuple[dict[str, Any], Any]:
    """(name → function or reward object, the recipe's `rewards`). Raises ConfigError."""
    if rewards is None or isinstance(rewards, str):
        return {}, rewards
    objects: dict[str, Any] = {}
    listed: list[dict[str, Any] | str] = []
    several = rewards if isinstance(rewards, Sequence) else [rewards]
    weighed = rewards.items() if isinstance(rewards, Mapping) else [(reward, None) for reward in several]
    for reward, weight in weighed:
        if isinstance(reward, Mapping):
            entry = dict(reward)
        elif isinstance(reward, str) and weight is None:
            listed.append(reward)
            continue
        elif isinstance(reward, str):
            entry = {"name": reward}
        elif isinstance(reward, PairwiseJudge):
            entry = {"name": "vlm_pairwise", "options": reward.options, "judge": reward.judge}
        elif isinstance(reward, VlmPairwise) and reward.judged:
            raise ConfigError([f"rewards: expected PairwiseJudge(…) or a name, got {type(reward).__name__}"])
        elif not callable(reward) and not isinstance(reward, Reward):
            raise ConfigError([f"rewards: expected a name, a PairwiseJudge, a reward or a function, got {reward!r}"])
        else:
            name = _name(reward)
            if name in objects:
                raise ConfigError([f"rewards: {name} is given twice; give functions distinct names"])
            objects[name] = reward
            origin = reward if hasattr(reward, "__qualname__") else type(reward)
            entry = {"name": name, "options": {PYTHON: f"{origin.__module__}.{origin.__qualname__}"}}
        listed.append(entry if weight is None else entry | {"weight": _plain(weight)})
    return objects, listed


def _name(reward: Any) -> str:
    """The name of a function or reward object in specs and metrics."""
    if isinstance(reward, Reward):
        path = f"{type(reward).__module__.rpartition('.')[2]}:{type(reward).__qualname__}"
        return next((name for name, known in REWARDS.items() if known == path), type(reward).__name__)
    name = str(getattr(reward, "__name__", type(reward).__name__))
    return name if name.isidentifier() else "function"
