"""From the rewards of a step to advantages: missing values left out, several rewards combined, groups normalised.

    A_i = Σ_r w_r A_ir    A_ir = (r_i − group mean) / (std + eps), or Σ_p u_p A_irp / Σ_p u_p over the reward's parts p

The parts of a reward are sub-scores that are normalised separately and then weighted (`Reward.part_weights`), as
Pref-GRPO does with UnifiedReward-Flex and with its edit scores. Invariant: each group is centred separately, so batch
normalisation only rescales, and a group with equal rewards gets exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.by_path import load_function
from prefgrpo.config.schema import COMBINE, SEPARATE, AdvantageConfig
from prefgrpo.data.answer import Answer
from prefgrpo.ops.advantage import normalised
from prefgrpo.rewards.base import Reward

Parts = Mapping[str, Mapping[str, float]]
"""Reward → part → weight, for rewards whose parts are normalised separately."""


def part_table(scores: Mapping[str, list[list[Answer]]], parts: Parts) -> NDArray[np.float64]:
    """[n_groups, G, K] sub-scores of all `parts` in order; NaN if a sample lacks the sub-score or the whole reward."""
    columns = [
        [[np.nan if s.value is None else s.parts.get(part, np.nan) for s in group] for group in scores[name]]
        for name, weights in parts.items()
        for part in weights
    ]
    return np.stack([np.array(c, dtype=np.float64) for c in columns], axis=-1)


class CombineError(RuntimeError):
    """`advantage.combine` raised, or did not return one number per sample."""


def _combined(path: str, table: Tensor, weights: Tensor) -> Tensor:
    """The user's function of rewards [R, B] and weights [R]: [B], with NaN for non-finite results."""
    try:
        values = torch.as_tensor(load_function(path, COMBINE)(table, weights)).to(table)
    except Exception as error:
        raise CombineError(f"advantage.combine {path} raised {type(error).__name__}: {error}") from error
    if values.shape != table.shape[1:]:
        raise CombineError(
            f"advantage.combine {path}: expected {list(table.shape[1:])} values, got {list(values.shape)}"
        )
    return torch.where(values.isfinite(), values, torch.nan)


def by_comparisons(rewards: Mapping[str, Reward], weights: Mapping[str, float], options: AdvantageConfig) -> bool:
    """Whether advantages are those of one reward's win rates. The scorer computes these rates, which are reported; the
    update takes the same wins and counts, from which `winrate_advantage` computes the advantages."""
    trained = {name: weight for name, weight in weights.items() if weight}
    changed = options.combine not in COMBINE or options.combine == "gdpo" or options.std == "rank"
    reward = rewards[next(iter(trained))]
    return list(trained.values()) == [1] and not changed and reward.is_win_rate


def advantages(
    rewards: NDArray[np.float64],
    weights: Mapping[str, float],
    group_size: int,
    options: AdvantageConfig,
    parts: Parts | None = None,
    sub_scores: NDArray[np.float64] | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages fp32 [P, G], bool [P, G] whether the sample counts), on the CPU: on a GPU, sums over groups have no
    fixed order, and ranks that round a zero differently would train on different samples.

    rewards: [P · G, R], in the order of `weights`. sub_scores: [P · G, K] of `parts`. NaN is missing, as is a sample
    whose rewards have no finite combination: it is excluded from all statistics and gets 0. Raises CombineError if the
    function fails.
    """
    table = torch.from_numpy(rewards.T.reshape(len(weights), -1, group_size))
    kinds = torch.tensor(list(weights.values()), dtype=torch.float64)
    trained = kinds != 0
    missing = table[trained].isnan().any(0)
    normalise = partial(group_advantage, eps=options.eps, ddof=options.ddof)
    rank = options.std == "rank"
    in_groups = partial(normalise, std="group" if rank else options.std, rank=rank)

    if parts and sub_scores is not None:
        columns = iter(torch.from_numpy(sub_scores.T.reshape(-1, *missing.shape)))
        out = torch.zeros_like(table[0])
        for row, (name, weight) in zip(table, weights.items(), strict=True):
            own = [(u, next(columns)) for u in parts.get(name, {}).values()] or [(1.0, row)]
            total = sum(u * in_groups(torch.where(missing, torch.nan, values)[None]).double() for u, values in own)
            known = sum(u * ~values.isnan() for u, values in own)
            if weight:
                out += torch.where(missing | (known == 0), 0.0, weight * total / known)
    elif options.combine not in COMBINE:
        values = _combined(options.combine, table[trained].flatten(1), kinds[trained]).view(missing.shape)
        missing = values.isnan()
        out = in_groups(values[None])
    else:
        if options.combine == "geometric_mean":
            missing |= (table[trained] < 0).any(0)
        out = in_groups(table, weights=kinds, combine=options.combine)
    if options.combine == "gdpo":
        whole = torch.where(missing, torch.nan, out.double()).view(1, 1, -1)  # one group
        out = torch.where(out == 0, 0.0, normalise(whole).double().view(out.shape))
    return out.float(), ~missing


def _ranks(r: Tensor) -> Tensor:
    """Rank of each value in its group, [P, G], scaled to [0, 1]; tied values get their mean rank, and NaN stays NaN."""
    below = (r[:, None, :] < r[:, :, None]).sum(-1).double()
    equal = (r[:, None, :] == r[:, :, None]).sum(-1).double()
    others = (~r.isnan()).sum(-1, keepdim=True) - 1
    return torch.where(r.isnan(), r, (below + 0.5 * (equal - 1)) / others.clamp_min(1))


def group_advantage(
    rewards: Tensor,
    weights: Tensor | None = None,
    *,
    combine: str = "weighted_sum",
    std: str = "group",
    eps: float = 1e-4,
    ddof: int = 0,
    rank: bool = False,
) -> Tensor:
    """Advantage fp32 [P, G] of R rewards of P groups, [R, P, G] (NaN = missing), with weights [R].

    combine: normalise the weighted sum, or the weighted geometric mean (missing if a reward is negative), of the
    rewards; or take the weighted sum of the rewards' separate advantages. A sample that lacks any reward of
    non-zero weight is missing and gets 0. rank: first replace values by their rank within the group.
    """
    r = rewards.double()
    w = r.new_ones(len(r)) if weights is None else weights.to(r)
    w = w[:, None, None]
    missing = (r.isnan() & (w != 0)).any(0)

    def advantage(values: Tensor) -> Tensor:
        values = torch.where(missing, torch.nan, values)
        return normalised(_ranks(values) if rank else values, std, eps, ddof)

    if combine in SEPARATE:
        each = torch.stack([advantage(row) for row in r])
        return torch.where(w != 0, w * each, 0.0).sum(0).float()
    if combine == "weighted_sum":
        return advantage(torch.where(w != 0, w * r, 0.0).sum(0)).float()
    missing = missing | ((r < 0) & (w != 0)).any(0)
    logarithm = torch.where(w != 0, w * torch.log(r), 0.0).sum(0) / w.sum()
    return advantage(torch.exp(logarithm).float().double()).float()  # equal rewards may differ in exp's last bit
