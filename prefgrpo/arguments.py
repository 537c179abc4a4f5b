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

from prefgrpo.config.loading import from_dict, recipe_values
from prefgrpo.config.recipe import ConfigError, merge
from prefgrpo.config.schema import Config, JudgeConfig
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.tables import SOURCE
from prefgrpo.models import family_of
from prefgrpo.models.folder import ModelError
from prefgrpo.rewards import PYTHON, REWARDS
from prefgrpo.rewards.base import Reward

Prompts = str | Path | Sequence[str | Mapping[str, Any]]
"""A prompt file, or the prompts themselves: texts, or mappings from column names to values."""


class PairwiseJudge:
    """A vision-language judge that compares the images of a prompt in pairs; the reward is the win rate.

    PairwiseJudge("http://127.0.0.1:8000")                             an OpenAI-compatible server, or a list of several
    PairwiseJudge("Qwen/Qwen3-VL-8B-Instruct", plan="k_regular(4)")    a folder or hub id, loaded in this process
    """

    def __init__(self, judge: str | Path | Sequence[str], name: str = "vlm_pairwise", **options: Any) -> None:
        """name: in metrics and logs, to tell several judges apart. options: fields of the judge section, e.g. model (of
        a server), concurrency, and options of vlm_pairwise: template, plan, round_verdicts, rate."""
        endpoints = [str(judge)] if isinstance(judge, str | Path) else list(judge)
        server = all("://" in endpoint for endpoint in endpoints)
        where = {"endpoints": endpoints} if server else {"endpoints": [], "model": str(judge)}
        self.name = name
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
    the section `train`, None if not set. A model folder's own values (prefgrpo.yaml) are the defaults.
    Raises ConfigError with every mistake.
    """
    objects, listed = _rewards(rewards)
    arguments: dict[str, Any] = {"train": {key: value for key, value in train.items() if value is not None}}
    output = Path(overrides.get("output", Config.output))
    if model:
        arguments["model"] = str(model)
    if train_prompts is not None:
        arguments["data"] = {"prompts": _prompts_file("train_prompts", train_prompts, output)}
    if isinstance(eval_prompts, float | int):
        arguments["eval"] = {"prompts": eval_prompts, "final_prompts": ""}
    elif eval_prompts is not None:
        arguments["eval"] = {"prompts": _prompts_file("eval_prompts", eval_prompts, output)}
    values = merge(recipe_values(None, str(model)), merge(dict(overrides), arguments))
    if rewards is not None:
        values["rewards"] = listed
    if values.get("model") and "family" not in values:
        try:
            values["family"] = family_of(str(values["model"]))
        except ModelError as error:
            raise ConfigError([f"model: {error}"]) from error
    return from_dict(values), objects


def _prompts_file(argument: str, prompts: Prompts, output: Path) -> str:
    """The prompt file; a list is written to one, whose name follows from its content so that runs can resume."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    if not prompts:
        raise ConfigError([f"{argument}: expected at least one prompt, got none"])
    rows = []
    for prompt in prompts:
        row: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        for key in SOURCE:
            if isinstance(paths := row.get(key), str | Path):
                row[key] = str(Path(paths).absolute())
            elif isinstance(paths, Sequence):
                row[key] = [str(Path(path).absolute()) for path in paths]
        rows.append(json.dumps(row))
    text = "".join(row + "\n" for row in rows)
    file = output / f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text)
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
        entry: dict[str, Any] | str
        if isinstance(reward, Mapping):
            entry = dict(reward)
        elif isinstance(reward, str):
            entry = {"name": reward} if weight is not None else reward
        elif isinstance(reward, PairwiseJudge):
            entry = {"name": reward.name, "reward": "vlm_pairwise", "options": reward.options, "judge": reward.judge}
        elif callable(reward) or isinstance(reward, Reward):
            name = _name(reward)
            if name in objects:
                raise ConfigError([f"rewards: {name} is given twice; give functions distinct names"])
            objects[name] = reward
            origin = reward if hasattr(reward, "__qualname__") else type(reward)
            entry = {"name": name, "options": {PYTHON: f"{origin.__module__}.{origin.__qualname__}"}}
        else:
            raise ConfigError([f"rewards: expected a name, a PairwiseJudge, a reward or a function, got {reward!r}"])
        listed.append(entry if weight is None or isinstance(entry, str) else entry | {"weight": weight})
    return objects, listed


def _name(reward: Any) -> str:
    """The name of a function or reward object in specs and metrics."""
    if isinstance(reward, Reward):
        path = f"{type(reward).__module__.rpartition('.')[2]}:{type(reward).__qualname__}"
        return next((name for name, registered in REWARDS.items() if registered == path), type(reward).__name__)
    name = str(getattr(reward, "__name__", type(reward).__name__))
    return name if name.isidentifier() else "function"
