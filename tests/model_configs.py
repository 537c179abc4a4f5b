"""Memory plans of recipes, using the configs of published models that ship with the package."""

import json
import shutil
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path

import diffusers

from prefgrpo.config.schema import Config
from prefgrpo.models.folder import CONFIGS
from prefgrpo.run import memory as plan
from prefgrpo.run.memory import DenoiserSizes, Estimate


def folder(model: str, into: Path, depth: dict[str, int] | None = None) -> Path:
    """Copy the configs of a hub id to `into`; `depth` overrides the transformers' numbers of blocks."""
    shutil.copytree(CONFIGS / model, into)
    for file in into.glob("transformer*/config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | (depth or {})))
    return into


def estimate(config: Config, into: Path) -> Estimate:
    """`plan.estimate` with the true config of the model, extrapolated from models of 2 and 4 blocks of each kind.

    Every block of a kind adds the same (except in SD3.5), so two sizes suffice; a whole trace takes a minute.
    """
    blocks = depths(config.model)

    def at(**depth: int) -> Estimate:
        place = into / ("-".join(map(str, depth.values())) or "whole")
        return plan.estimate(replace(config, model=str(folder(config.model, place, depth))))

    low = at(**dict.fromkeys(blocks, 2))
    parts, phases, flop, facts = dict(low.parts), dict(low.phases), dict(low.flop), asdict(low.model)
    for key, count in blocks.items():
        more = at(**(dict.fromkeys(blocks, 2) | {key: 4}))
        for name in parts:
            parts[name] += (more.parts[name] - low.parts[name]) * (count - 2) // 2
        for name in phases:
            phases[name] += (more.phases[name] - low.phases[name]) * (count - 2) // 2
        for name in flop:
            flop[name] += (more.flop[name] - low.flop[name]) * (count - 2) / 2
        for name in facts:
            facts[name] += (asdict(more.model)[name] - asdict(low.model)[name]) * (count - 2) // 2
    parts["activations"] = max(phases.values())
    return replace(low, parts=parts, phases=phases, flop=flop, model=DenoiserSizes(**facts))


def depths(model: str) -> dict[str, int]:
    """{config key: number of blocks} of the transformer; empty if its blocks differ."""
    file = CONFIGS / model / "transformer" / "config.json"
    if not file.is_file() or "3.5" in model:
        return {}
    config = json.loads(file.read_text())
    defaults = signature(getattr(diffusers, config["_class_name"]).__init__).parameters
    keys = [key for key in ("num_layers", "num_single_layers", "n_layers") if key in defaults]
    return {key: config.get(key, defaults[key].default) for key in keys}
