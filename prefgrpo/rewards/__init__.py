"""Rewards: the registry from names to classes, and building rewards from their names and options.

Invariant: all options are checked before the first reward is made.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass, make_dataclass
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from prefgrpo.config.by_path import IMPORT_PATH, load_object
from prefgrpo.config.recipe import UserError, did_you_mean
from prefgrpo.config.rewards import RewardEntry, entries
from prefgrpo.rewards.base import Reward, RewardError
from prefgrpo.rewards.prepared import PreprocessedReward

REWARDS: dict[str, str] = {
    "vlm_pairwise": "pairs:VlmPairwise",
    "jpeg_compressibility": "simple:JpegCompressibility",
    "jpeg_incompressibility": "simple:JpegIncompressibility",
    "scenes": "simple:Scenes",
    "ocr": "ocr:Ocr",
    "video_ocr": "ocr:VideoOcr",
    "aesthetic": "clip:Aesthetic",
    "clip": "clip:Clip",
    "clipscore": "clip:Clipscore",
    "hpsv2": "clip:Hpsv2",
    "pickscore": "clip:Pickscore",
    "image_similarity": "clip:ImageSimilarity",
    "subfig_clipT": "clip:SubfigClipT",
    "unifiedreward_alignment": "vlm:UnifiedRewardAlignment",
    "unifiedreward_style": "vlm:UnifiedRewardStyle",
    "unifiedreward_coherence": "vlm:UnifiedRewardCoherence",
    "unifiedreward_sglang": "vlm:UnifiedRewardSglang",
    "qwenvl": "vlm:QwenVl",
    "unifiedreward_think": "pairs:UnifiedRewardThink",
    "unifiedreward_flex": "pairs:UnifiedRewardFlex",
    "unifiedreward_edit_pairwise": "pairs:UnifiedRewardEditPairwise",
    "unifiedreward_edit_pointwise_image_quality": "vlm:EditImageQuality",
    "unifiedreward_edit_pointwise_instruction_following": "vlm:EditInstructionFollowing",
    "unigenbench": "unigenbench:UniGenBench",
    "soft_tifa": "soft_tifa:SoftTifa",
    "consistency_score": "consistency:ConsistencyScore",
    "consistency_for_editing": "consistency:ConsistencyForEditing",
    "imagereward": "imagereward:ImageReward",
    "hpsv3": "qwen2vl:HPSv3",
    "videoalign": "qwen2vl:VideoAlign",
    "deqa": "deqa:DeQA",
    "geneval": "geneval:GenEval",
}
"""Name -> "module:class" in this package."""

PREPROCESSING = ("size", "jpeg")
"""Options of every reward that preprocess its images (`prepared.PreprocessedReward`)."""
PYTHON = "python"
"""Option that records where an object of `python_rewards` was defined; its Python program must resume such a run."""
_OWN_NAME = re.compile(r"[\w-]+")
_OBJECTS: ContextVar[Mapping[str, Any] | None] = ContextVar("prefgrpo_reward_objects", default=None)


class RewardSpecError(UserError, ValueError):
    """An invalid reward spec; the message names the offending entry."""


@contextmanager
def python_rewards(objects: Mapping[str, Reward | Callable[..., Any]]) -> Iterator[None]:
    """Inside this context, specs may name these rewards and functions of a Python program."""
    token = _OBJECTS.set(objects)
    try:
        yield
    finally:
        _OBJECTS.reset(token)


def get_python_rewards() -> Mapping[str, Any]:
    """The objects of the current `python_rewards` context."""
    return _OBJECTS.get() or {}


def parse_reward_spec(spec: Any) -> dict[str, RewardEntry]:
    """{name: entry} of a spec in any form (config/rewards.py), in its order.

    Raises RewardSpecError that names the first bad entry.
    """
    try:
        named = {entry.name: entry for entry in entries(spec)}
    except ValueError as error:
        raise RewardSpecError(str(error)) from error
    for entry in named.values():
        check_entry(entry)
    if not named:
        raise RewardSpecError(f"no reward is named ({spec!r}); expected for example 'vlm_pairwise:1.0'")
    return named


def check_entry(entry: RewardEntry) -> None:
    """Raise RewardSpecError for an entry whose name or reward cannot be."""
    check_name(entry.reward)
    if entry.name != entry.reward and (entry.name in REWARDS or not _OWN_NAME.fullmatch(entry.name)):
        expected = "expected letters, digits, _ and -, and not the name of another reward"
        raise RewardSpecError(f"name '{entry.name}' of a reward {entry.reward}: {expected}")


def check_name(name: str) -> None:
    """Raise RewardSpecError for a reward that is neither registered nor an import path."""
    head, _, tail = name.partition(":")
    if tail and head in REWARDS:
        raise RewardSpecError(f"weight of reward '{head}' must be a number, got {tail!r}")
    if name.endswith(".py"):
        raise RewardSpecError(f"'{name}' is a file: expected its function or class as well, '{name}:NAME'")
    if name not in REWARDS and name not in get_python_rewards() and not IMPORT_PATH.fullmatch(name):
        near = did_you_mean(name, REWARDS)
        known = "a name in `prefgrpo reward list`" if near else f"one of {', '.join(REWARDS)}"
        own = "an entry with a name of its own says what it is, {name: …, reward: …}"
        raise RewardSpecError(
            f"unknown reward '{name}'{near}: expected {known}, 'package.module:Class' or 'file.py:function'; {own}"
        )


def load_class(name: str) -> type[Reward]:
    """The class for a registry name, an import path, a function in a file or an object of `python_rewards`."""
    if name in (objects := get_python_rewards()):
        return _class_of(name, objects[name])
    path = f"prefgrpo.rewards.{REWARDS[name]}" if name in REWARDS else name
    try:
        value = load_object(path)
    except Exception as error:
        hint = "" if name in REWARDS or ".py:" in path else "; its folder must be on PYTHONPATH"
        message = f"{error}" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        where = f" from {path}" if name in REWARDS else ""
        raise RewardSpecError(f"cannot load reward '{name}'{where}: {message}{hint}") from error
    if isinstance(value, type) and issubclass(value, Reward):
        return value
    if not inspect.isfunction(value):
        raise RewardSpecError(f"reward '{name}' at {path} is not a Reward or function")
    return _class_of(name, value)


def _class_of(name: str, value: Any) -> type[Reward]:
    """The class of a reward, or a reward class made from a function."""
    if isinstance(value, Reward):
        return type(value)
    from prefgrpo.rewards.functions import function_class

    try:
        return function_class(value)
    except RewardError as error:
        raise RewardSpecError(f"reward '{name}': {error}") from error


def build(
    spec: str | Mapping[str, Any] | list[Any], options: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Reward]:
    """{name: reward} for every entry of `spec`; `options[name]`, or its own, are the keyword arguments of its class.

    With `url` it is a `remote.RemoteReward`; all also accept `size` and `jpeg` (prepared.py).
    """
    named = parse_reward_spec(spec)
    options = options or {}
    ready = {n: factory(e.reward, options.get(n, e.options)) for n, e in named.items()}  # before one is loaded
    return {name: make() for name, make in ready.items()}


def factory(name: str, options: Mapping[str, Any]) -> Callable[[], Reward]:
    """A function that constructs the reward. RewardSpecError if it cannot be imported or an option is wrong."""
    options = {key: value for key, value in options.items() if key != PYTHON}
    if isinstance(made := get_python_rewards().get(name), Reward):
        return lambda: made
    cls = load_class(name)
    own = inspect.signature(cls).parameters
    also = [key for key in PREPROCESSING if key not in own]
    before = {key: options.pop(key) for key in also if key in options}
    if "url" in options:
        make = _checked(name, _remote(cls), {"name": name, "cls": cls} | options, also)
    else:
        make = _checked(name, cls, options, also)
    return _checked(name, PreprocessedReward, {"make": make} | before) if before else make


def _remote(cls: type[Reward]) -> type[Reward]:
    """A client of such a reward's server. What is asked about a group, and what the answers are worth, stay with the
    client, and so do the dataclass fields of the class that defines them, such as `plan`."""
    from prefgrpo.rewards.remote import RemoteReward  # imports aiohttp

    tallies = next(base for base in cls.__mro__ if "tally" in vars(base))
    return RemoteReward if tallies is Reward else make_dataclass("Remote", [], bases=(tallies, RemoteReward), eq=False)


def _checked(name: str, make: type[Reward], options: dict[str, Any], also: Iterable[str] = ()) -> Callable[[], Reward]:
    """make(**options) as a partial. RewardSpecError for an unknown option, a missing one, or one of the wrong type.

    also: options that the caller handles, listed in the message.
    """
    accepted = inspect.signature(make).parameters
    types = get_type_hints(make if is_dataclass(make) else make.__init__, include_extras=True)
    options = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in options.items()}
    for key, value in options.items():
        if key not in accepted:
            names = [*accepted, *also]
            message = f"reward '{name}' has no option '{key}'{did_you_mean(key, names)}"
            raise RewardSpecError(f"{message}: expected {', '.join(names) or 'none'}")
        try:
            TypeAdapter(types.get(key, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            expected = error.errors()[0]["msg"]
            raise RewardSpecError(f"option '{key}' of reward '{name}': {expected}, got {value!r}") from error
    if needed := [k for k, p in accepted.items() if p.default is p.empty and k not in options]:
        raise RewardSpecError(f"reward '{name}' needs the option(s) {', '.join(needed)}")
    return partial(make, **options)


def show_rewards() -> int:
    """`prefgrpo reward list`: each reward's name, inputs, whether it uses a judge, and description."""
    rows = [("reward", "takes", "asks", "what it is")]
    for name in sorted(REWARDS):
        cls = load_class(name)
        takes = " + ".join([" or ".join(cls.takes), *["source"] * cls.needs_source, *cls.meta_keys])
        takes += " (group)" * cls.compares
        rows.append((name, takes, "a judge" if cls.judged else "-", (inspect.getdoc(cls) or "").split("\n")[0]))
    wide = [max(len(row[k]) for row in rows) for k in range(3)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, [*wide, 0], strict=True)).rstrip())
    return 0
