"""Advantages of a step's samples, from the rewards of all ranks.

    A_i = Σ_r w_r A_ir    A_ir = (r_i − mean of its group) / (std + eps), or Σ_p u_p A_irp / Σ_p u_p over its parts p

The parts of a reward are sub-scores that are normalised each before they are weighed (`Reward.part_weights`), as
Pref-GRPO does with UnifiedReward-Flex and with its edit scores. Invariant: groups are centred one by one, so batch
normalisation only divides, and a constant group has exactly 0.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.schema import ConfigError, RewardConfig
from prefgrpo.ops import group_advantage, log_tame
from prefgrpo.rewards.base import GroupScores

Parts = Mapping[str, Mapping[str, float]]
"""Reward → part → weight, for the rewards whose parts are normalised on their own."""


def part_table(groups: Mapping[str, list[GroupScores]], parts: Parts) -> NDArray[np.float64]:
    """[n_groups, G, K] sub-scores of all `parts` in order, NaN where a sample has none or no value."""
    columns = [
        [[np.nan if s.value is None else s.parts.get(part, np.nan) for s in g.scores] for g in groups[name]]
        for name, weights in parts.items()
        for part in weights
    ]
    return np.stack([np.array(c, dtype=np.float64) for c in columns], axis=-1)


@lru_cache(None)
def load_function(path: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of `reward.function`: file.py:function or package.module.function. Raises ConfigError."""
    try:
        if ":" in path:
            file, _, name = path.rpartition(":")
            spec = importlib.util.spec_from_file_location(Path(file).stem, file)
            if spec is None or spec.loader is None:
                raise ImportError("expected a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            package, _, name = path.rpartition(".")
            module = importlib.import_module(package)
        function: Callable[[Tensor, Tensor], Tensor] = getattr(module, name)
    except (ImportError, OSError, SyntaxError, AttributeError, ValueError) as error:
        raise ConfigError([f"reward.function: cannot load {path!r}: {error}"]) from error
    return function


def advantages(
    rewards: NDArray[np.float64],
    weights: Mapping[str, float],
    group_size: int,
    options: RewardConfig,
    parts: Parts | None = None,
    sub_scores: NDArray[np.float64] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """fp32 [P, G] on `device` from rewards [P · G, R], ordered as `weights`, and sub-scores [P · G, K], as `parts`.

    NaN is missing: such a sample enters no statistic and gets 0. Raises ValueError for a result of `reward.function`
    that is not [P · G].
    """
    table = torch.from_numpy(rewards.T.copy()).to(device)
    kinds = torch.tensor(list(weights.values()), dtype=torch.float64, device=device)
    ids = torch.arange(len(rewards) // group_size, device=device).repeat_interleave(group_size)
    trained = kinds != 0
    if options.log_tame is not None:
        table[trained] = log_tame(table[trained], options.log_tame)
    missing = table[trained].isnan().any(0)
    normalise = partial(group_advantage, eps=options.eps, ddof=options.ddof)
    in_groups = partial(normalise, group_ids=ids, std=options.std, rank=options.rank)

    if parts and sub_scores is not None:
        columns = iter(torch.from_numpy(sub_scores.T.copy()).to(device))
        out = torch.zeros(len(rewards), dtype=torch.float64, device=device)
        for row, (name, weight) in zip(table, weights.items(), strict=True):
            own = [(u, next(columns)) for u in parts.get(name, {}).values()] or [(1.0, row)]
            total = sum(u * in_groups(torch.where(missing, torch.nan, values)[None]).double() for u, values in own)
            known = sum(u * ~values.isnan() for u, values in own)
            if weight:
                out += torch.where(missing | (known == 0), 0.0, weight * total / known)
    elif options.function:
        values = load_function(options.function)(table[trained], kinds[trained])
        if values.shape != ids.shape:
            raise ValueError(f"reward.function: expected {list(ids.shape)} values, got {list(values.shape)}")
        missing = values.isnan()
        out = in_groups(values[None])
    else:
        out = in_groups(table, weights=kinds, combine=options.combine)
    if options.batch_norm:
        whole = torch.where(missing, torch.nan, out.double())[None]
        out = torch.where(out == 0, 0.0, normalise(whole, group_ids=torch.zeros_like(ids)).double())
    return out.float().view(-1, group_size)
