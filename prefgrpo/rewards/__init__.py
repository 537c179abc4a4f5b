"""Rewards: the registry, the `reward_spec` grammar, and building rewards from both.

    "a,b"   "a:0.5,b:1"   '{"a": 0.5, "b": 1}'   '["a", "b"]'        -> {name: weight}

The registry is a dict from name to import path; a user's own class is named by its path, "pkg.mod.Class" or
"pkg.mod:Class". Invariant: a spec that parses names existing rewards once each, with finite
weights; every refusal names the entry.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from prefgrpo.rewards.base import GroupwiseReward, PointwiseReward, Reward
from prefgrpo.rewards.prepared import Prepared

REWARDS: dict[str, str] = {
    "vlm_pairwise": "prefgrpo.rewards.pairwise:VlmPairwise",
    "jpeg_compressibility": "prefgrpo.rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "prefgrpo.rewards.jpeg:JpegIncompressibility",
    "scenes": "prefgrpo.rewards.scenes:Scenes",
    "ocr": "prefgrpo.rewards.ocr:Ocr",
    "video_ocr": "prefgrpo.rewards.ocr:VideoOcr",
    "aesthetic": "prefgrpo.rewards.aesthetic:Aesthetic",
    "clip": "prefgrpo.rewards.clip:Clip",
    "clipscore": "prefgrpo.rewards.clip:Clipscore",
    "hpsv2": "prefgrpo.rewards.clip:Hpsv2",
    "pickscore": "prefgrpo.rewards.clip:Pickscore",
    "image_similarity": "prefgrpo.rewards.similarity:ImageSimilarity",
    "subfig_clipI": "prefgrpo.rewards.similarity:SubfigClipI",
    "subfig_clipT": "prefgrpo.rewards.similarity:SubfigClipT",
    "subfig_dreamsim": "prefgrpo.rewards.dreamsim:SubfigDreamsim",
    "unifiedreward_alignment": "prefgrpo.rewards.unifiedreward:UnifiedRewardAlignment",
    "unifiedreward_style": "prefgrpo.rewards.unifiedreward:UnifiedRewardStyle",
    "unifiedreward_coherence": "prefgrpo.rewards.unifiedreward:UnifiedRewardCoherence",
    "unifiedreward_sglang": "prefgrpo.rewards.unifiedreward:UnifiedRewardSglang",
    "qwenvl": "prefgrpo.rewards.unifiedreward:QwenVl",
    "unifiedreward_think": "prefgrpo.rewards.unifiedreward_pairs:UnifiedRewardThink",
    "unifiedreward_flex": "prefgrpo.rewards.unifiedreward_pairs:UnifiedRewardFlex",
    "unifiedreward_edit_pairwise": "prefgrpo.rewards.unifiedreward_pairs:UnifiedRewardEditPairwise",
    "unifiedreward_edit_pointwise_image_quality": "prefgrpo.rewards.edits:EditImageQuality",
    "unifiedreward_edit_pointwise_instruction_following": "prefgrpo.rewards.edits:EditInstructionFollowing",
    "edit_score": "prefgrpo.rewards.edits:EditScore",
    "consistency_score": "prefgrpo.rewards.consistency:ConsistencyScore",
    "consistency_for_editing": "prefgrpo.rewards.consistency:ConsistencyForEditing",
    "grid_layout": "prefgrpo.rewards.consistency:GridLayout",
    "genrm_ocr": "prefgrpo.rewards.genrm_ocr:GenrmOcr",
    "imagereward": "prefgrpo.rewards.imagereward:ImageReward",
    "hpsv3": "prefgrpo.rewards.hpsv3:HPSv3",
    "videoalign": "prefgrpo.rewards.videoalign:VideoAlign",
    "deqa": "prefgrpo.rewards.deqa:DeQA",
    "geneval": "prefgrpo.rewards.geneval:GenEval",
}


PLAIN: dict[Any, tuple[type, ...]] = {
    "str": (str, os.PathLike), "int": (int,), "float": (int, float), "bool": (bool,), "Path": (str, os.PathLike),
}  # fmt: skip
"""Annotations of options that are checked before the reward is made, and what they take."""


PREPARED = ("size", "jpeg")
"""Options of every pointwise reward that change its pictures (`prepared.Prepared`)."""


_PATH = re.compile(r"([^\W\d]\w*\.)*[^\W\d]\w*[.:][^\W\d]\w*")
"""package.module.Class or package.module:Class."""


class RewardSpecError(ValueError):
    """A reward spec that cannot be used; the message names the entry."""


def parse_reward_spec(spec: str | Mapping[str, Any] | list[Any]) -> dict[str, float]:
    """{reward name: weight} in the order given; raises RewardSpecError naming the first bad entry."""
    if isinstance(spec, str):
        spec = spec.strip()
        entries = _json_entries(spec) if spec[:1] in ("{", "[") else _text_entries(spec)
    elif isinstance(spec, Mapping | list | tuple):
        entries = _structured(spec)
    else:
        raise RewardSpecError(f"a reward spec is a text, a list or a mapping, got {spec!r}")
    weights: dict[str, float] = {}
    for name, weight in entries:
        _check_name(name)
        if name in weights:
            raise RewardSpecError(f"reward '{name}' is named twice; give each reward once")
        weights[name] = _weight(name, weight)
    if not weights:
        raise RewardSpecError(f"the reward spec is empty ({spec!r}); expected for example 'vlm_pairwise:1.0'")
    return weights


def _text_entries(spec: str) -> list[tuple[str, Any]]:
    entries: list[tuple[str, Any]] = []
    for entry in (e.strip() for e in spec.split(",")):
        if not entry:
            continue
        name, *rest = [p.strip() for p in entry.split(":")]
        own = rest and name not in REWARDS and ("." in name or rest[0][:1].isupper()) and not _number(rest[0])
        if own and _PATH.fullmatch(f"{name}:{rest[0]}"):  # pkg.mod:Class or mod:Class, with or without :weight
            name, rest = f"{name}:{rest[0]}", rest[1:]
        if not name or len(rest) > 1 or rest == [""]:
            raise RewardSpecError(f"bad entry {entry!r} in reward spec {spec!r}: expected 'name' or 'name:weight'")
        entries.append((name, rest[0] if rest else 1.0))
    return entries


def _json_entries(spec: str) -> list[tuple[str, Any]]:
    def pairs(items: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return items if items else [("\0", items)]  # keep duplicates: a dict would drop them silently

    try:
        value = json.loads(spec, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise RewardSpecError(f"reward spec {spec!r} is not valid JSON: {error}") from error
    if spec[0] == "{":
        return [] if value == [("\0", [])] else list(value)
    return _structured(value)


def _structured(value: Mapping[str, Any] | list[Any]) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    for entry in value:
        if not isinstance(entry, str):
            raise RewardSpecError(f"bad entry {entry!r} in the list of rewards: expected a name in quotes")
    return [(entry, 1.0) for entry in value]


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _weight(name: str, weight: Any) -> float:
    numeric = isinstance(weight, int | float | str) and not isinstance(weight, bool)
    if not numeric or not _number(str(weight)):
        raise RewardSpecError(f"weight of reward '{name}' must be a number, got {weight!r}")
    if not math.isfinite(float(weight)):
        raise RewardSpecError(f"weight of reward '{name}' must be finite, got {weight!r}")
    return float(weight)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise RewardSpecError(f"bad reward name {name!r}: expected one of {', '.join(REWARDS)}")
    if name in REWARDS or _PATH.fullmatch(name):
        return
    raise RewardSpecError(
        f"unknown reward '{name}'{_near(name, REWARDS)}: expected one of {', '.join(REWARDS)} or 'package.module:Class'"
    )


def _near(name: str, known: Iterable[str]) -> str:
    """A question for the known name that is meant, if one is near; capitals do not matter."""
    small = {k.casefold(): k for k in known}
    near = difflib.get_close_matches(name.casefold(), small, n=1)
    return f" (did you mean '{small[near[0]]}'?)" if near else ""


def load_class(name: str) -> type[Reward]:
    """The class behind a registry name or dotted path."""
    path = REWARDS.get(name, name)
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        hint = "" if name in REWARDS else "; a module of your own must be in a folder of PYTHONPATH"
        raise RewardSpecError(f"cannot load reward '{name}' from {path}: {error}{hint}") from error
    if not (isinstance(found, type) and issubclass(found, PointwiseReward | GroupwiseReward)):
        raise RewardSpecError(f"reward '{name}' at {path} is no PointwiseReward or GroupwiseReward")
    return found


def build(
    spec: str | Mapping[str, Any] | list[Any], options: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Reward]:
    """{name: reward} for every reward of `spec`; `options[name]` are the keyword arguments of its class.

    Options with a `url` make a `remote.RemoteReward`: the reward runs behind `prefgrpo reward serve`. Pointwise rewards
    take `size` and `jpeg` besides (`prepared.Prepared`).
    """
    weights, options = parse_reward_spec(spec), options or {}
    for name in set(options) - set(weights):
        _check_name(name)  # options of a reward that the spec leaves out may stay; a misspelt name may not
    ready = [_ready(name, dict(options.get(name, {}))) for name in weights]  # every mistake is told before one loads
    return {name: make() for name, make in zip(weights, ready, strict=True)}


def _ready(name: str, options: dict[str, Any]) -> Callable[[], Reward]:
    """What makes the reward, its options checked."""
    found = load_class(name)
    own = inspect.signature(found).parameters
    also = [key for key in PREPARED if key not in own and issubclass(found, PointwiseReward)]
    before = {key: options.pop(key) for key in also if key in options}
    if "url" in options:
        from prefgrpo.rewards.remote import RemoteReward  # imports aiohttp

        make = _checked(name, RemoteReward, {"name": name, "cls": found} | options, also)
    else:
        make = _checked(name, found, options, also)
    return _checked(name, Prepared, {"make": make} | before) if before else make


def _checked(name: str, make: type[Reward], options: dict[str, Any], also: Iterable[str] = ()) -> Callable[[], Reward]:
    """make(**options), not yet called. RewardSpecError names an option that is unknown, missing or odd.

    also: options that are taken elsewhere, for the message.
    """
    accepted = inspect.signature(make).parameters
    for key, value in options.items():
        if key not in accepted:
            known = [*accepted, *also]
            message = f"reward '{name}' has no option '{key}'{_near(key, known)}"
            raise RewardSpecError(f"{message}: expected {', '.join(known) or 'none'}")
        wanted = getattr(accepted[key].annotation, "__name__", accepted[key].annotation)
        kinds = PLAIN.get(wanted, (object,))
        if not isinstance(value, kinds) or (isinstance(value, bool) and wanted in ("int", "float")):
            raise RewardSpecError(f"option '{key}' of reward '{name}': expected {wanted}, got {value!r}")
        if key == "batch_size" and options[key] < 1:
            raise RewardSpecError(f"option '{key}' of reward '{name}': expected at least 1, got {value}")
    needed = [k for k, p in accepted.items() if p.default is p.empty and k not in options]
    if needed:
        raise RewardSpecError(f"reward '{name}' needs the option(s) {', '.join(needed)}")
    return partial(make, **options)
