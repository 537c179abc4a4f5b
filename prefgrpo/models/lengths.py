"""Batches of prompts of different lengths: a mask of their padding, or one forward per length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prefgrpo.models.condition import Condition


def text_mask(condition: Condition, multiple: int = 1, second: bool = False) -> Tensor:
    """Padding mask bool [B, longest], on the CPU: True where a batch's `prompt_embeds` hold a token of the prompt.

    multiple: round the length up to a multiple of this. second: the mask for `prompt_embeds_2`.
    """
    lengths = condition.text_length_2 if second else condition.text_length
    assert lengths is not None
    longest = -(-int(lengths.max()) // multiple) * multiple
    return torch.arange(longest)[None, :] < lengths[:, None]


def predict_by_length(
    predict: Callable[[Tensor, Tensor, Condition], Tensor],
    x: Tensor,
    sigma: Tensor,
    condition: Condition,
    one_by_one: bool = False,
) -> Tensor:
    """`predict(x, sigma, condition)` [B, …] in one forward per length of prompt, so that none is padded.

    one_by_one: one forward per sample instead, so that every process runs equally many.
    """
    lengths = condition.text_length
    if lengths is None:
        return predict(x, sigma, condition)
    if one_by_one:
        parts = list(torch.arange(len(lengths)).split(1))
    else:
        parts = [(lengths == length).nonzero().flatten() for length in lengths.unique()]
    if len(parts) == 1:
        return predict(x, sigma, condition)
    v = []
    for rows in parts:
        there = rows.to(x.device, non_blocking=True)
        v.append(predict(x[there], sigma[there], condition.select(rows)))
    order = torch.cat(parts).argsort().to(x.device, non_blocking=True)
    return torch.cat(v)[order]
