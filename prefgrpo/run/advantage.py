"""Advantages of a step's samples, from the rewards of all ranks.

    A_i = Σ_r w_r A_ir    A_ir = (r_i − mean of its group) / (std + eps), or Σ_p u_p A_irp / Σ_p u_p over its parts p

The parts of a reward are sub-scores that are normalised each before they are weighed (`Reward.part_weights`), as
Pref-GRPO does with UnifiedReward-Flex and with its edit scores. Invariant: groups are centred one by one, so batch
normalisation only divides, and a constant group has exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.schema import RewardConfig
from prefgrpo.ops import group_advantage
from prefgrpo.ops.args import Std
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


def advantages(
    rewards: NDArray[np.float64],
    weights: Mapping[str, float],
    group_size: int,
    options: RewardConfig,
    parts: Parts | None = None,
    sub_scores: NDArray[np.float64] | None = None,
) -> Tensor:
    """fp32 [P, G] from rewards [P · G, R] in the order of `weights`, and sub-scores [P · G, K] in that of `parts`.

    NaN is missing: such a sample enters no statistic and gets 0.
    """
    table, kinds = torch.from_numpy(rewards.T.copy()), torch.tensor(list(weights.values()), dtype=torch.float64)
    ids = torch.arange(len(rewards) // group_size).repeat_interleave(group_size)
    missing = table[kinds != 0].isnan().any(0)

    def normalised(values: Tensor, groups: Tensor, std: Std) -> Tensor:
        rows = torch.where(missing, torch.nan, values)[None]
        return group_advantage(rows, groups, std=std, eps=options.eps, ddof=options.ddof).double()

    if parts and sub_scores is not None:
        columns = iter(torch.from_numpy(sub_scores.T.copy()))
        out = torch.zeros(len(rewards), dtype=torch.float64)
        for row, (name, weight) in zip(table, weights.items(), strict=True):
            own = [(u, next(columns)) for u in parts.get(name, {}).values()] or [(1.0, row)]
            total = sum(u * normalised(values, ids, options.std) for u, values in own)
            known = sum(u * ~values.isnan() for u, values in own)
            if weight:
                out += torch.where(missing | (known == 0), 0.0, weight * total / known)
    else:
        out = group_advantage(
            table, ids, kinds, combine=options.combine, std=options.std, eps=options.eps, ddof=options.ddof
        )
    if options.batch_norm:
        out = torch.where(out == 0, 0.0, normalised(out.double(), torch.zeros_like(ids), "group"))
    return out.float().view(-1, group_size)
