"""Classifier-free guidance for all families.

    v = u + g·(c − u), or c + g·(c − u) (Z-Image); optionally rescaled to the norm of c over the last dimension

c is the velocity for the prompt, u for the negative prompt; they are combined in torch, in fp32. Invariant: with
guidance off (g ≤ 1, or g ≤ 0 for Z-Image) the model runs once per step and the negative prompt is not encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from prefgrpo.models.condition import Condition, combine

Gradient = Literal["both", "conditional"]
"""Whether the gradient flows through both c and u, or only through c."""


@dataclass(frozen=True)
class Cfg:
    """A family's form of guidance."""

    from_cond: bool = False
    """Start from c instead of u."""
    rescale: bool = False
    """Rescale the result to the norm of c."""
    negative: str = ""
    """The family's negative prompt, unless `rollout.negative_prompt` or a prompt has another."""

    def active(self, scale: float) -> bool:
        """Whether this scale needs the second forward."""
        return scale > (0.0 if self.from_cond else 1.0)

    def combine(self, c: Tensor, u: Tensor, scale: float) -> Tensor:
        """The guided velocity, in fp32 (fp64 for fp64); a row of the last dimension with norm 0 stays 0 if rescaled."""
        dtype = torch.promote_types(torch.promote_types(c.dtype, u.dtype), torch.float32)
        c = c.to(dtype)
        u = u.to(dtype)
        q = (c if self.from_cond else u) + scale * (c - u)
        if not self.rescale:
            return q
        squares = c.square().sum(-1, keepdim=True), q.square().sum(-1, keepdim=True)
        nonzero = (squares[0] > 0) & (squares[1] > 0)
        of_c, of_q = (torch.where(nonzero, square, 1.0) for square in squares)
        return q * torch.where(nonzero, torch.sqrt(of_c / of_q), 0.0)


def predict_cond_uncond(
    predict: Callable[[Tensor, Tensor, Condition], Tensor],
    x: Tensor,
    sigma: Tensor,
    condition: Condition,
    gradient: Gradient = "both",
) -> tuple[Tensor, Tensor]:
    """(c, u): one forward with batch size 2B for families whose texts have one length, else two forwards, whatever the
    lengths: with sharded weights all processes must run equally many.

    gradient: 'conditional' computes u in a separate forward without a graph, in rollout and replay alike. Raises
    ValueError for a condition that was encoded with guidance off.
    """
    if condition.negative is None:
        raise ValueError("guidance is on, but the condition has no negative prompt: encode it with guidance on")
    positive, negative = replace(condition, negative=None), replace(condition.negative, sources=condition.sources)
    if gradient == "conditional":
        with torch.no_grad():
            u = predict(x, sigma, negative)
        return predict(x, sigma, positive), u
    if positive.text_length is not None:
        return predict(x, sigma, positive), predict(x, sigma, negative)
    pair = combine([positive, negative], lambda _, tensors: torch.cat(tensors))
    c, u = predict(torch.cat([x, x]), torch.cat([sigma, sigma]), pair).chunk(2)
    return c, u
