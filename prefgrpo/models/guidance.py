"""Classifier-free guidance for all families.

    v = u + g·(c − u), or c + g·(c − u) (Z-Image, Krea-2); optionally rescaled to the norm of c over the last dimension

c is the velocity for the prompt, u for the negative prompt; they are combined in torch, in fp32. Invariant: with
guidance off (g ≤ 1, or g ≤ 0 for Z-Image and Krea-2) the model runs once per step and the negative prompt is not
encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

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

    def departures(self, guider: Any) -> list[str]:
        """What a pipeline's own guider does differently from guidance here, which is on at every step or at none."""
        if type(guider).__name__ != "ClassifierFreeGuidance":
            return [type(guider).__name__]
        here = {"start": 0.0, "stop": 1.0, "guidance_rescale": 0.0, "use_original_formulation": self.from_cond}
        return [f"{name} {guider.config[name]}" for name, value in here.items() if guider.config[name] != value]

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
