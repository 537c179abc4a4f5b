"""Classifier-free guidance: one place for all families.

    v = u + g·(c − u), or c + g·(c − u) (Z-Image); optionally rescaled to the norm of c over the last dimension

c is the velocity under the prompt, u under the negative prompt; `ops` combines them inside the step. Invariant:
with guidance off (g ≤ 1, or g ≤ 0 for Z-Image) the model runs once and the negative prompt is not encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefgrpo.ops.args import Guidance

NEGATIVE = "negative."
"""Prefix of the negative prompt's tensors inside a condition."""


@dataclass(frozen=True)
class Cfg:
    """A family's form of guidance."""

    from_cond: bool = False
    """Start from c instead of u."""
    rescale: bool = False
    """Give the result the norm of c."""
    negative: str = ""
    """The negative prompt."""

    def active(self, scale: float) -> bool:
        """Whether this scale needs the second forward."""
        return scale > (0.0 if self.from_cond else 1.0)

    def half(self, u: Tensor, scale: float) -> Guidance:
        """What the ops need beside c."""
        return Guidance(u, scale, self.from_cond, self.rescale)


def attach(condition: dict[str, Tensor], negative: dict[str, Tensor]) -> dict[str, Tensor]:
    """A condition that carries its negative prompt's tensors."""
    return condition | {NEGATIVE + key: value for key, value in negative.items()}


def both(
    predict: Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor],
    x: Tensor,
    sigma: Tensor,
    condition: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """(c, u): one forward of 2B where prompt and negative have equal shapes, else two.

    What the negative prompt does not have of its own (source images) is the prompt's.
    Raises ValueError for a condition that was encoded while guidance was off.
    """
    positive = {key: value for key, value in condition.items() if not key.startswith(NEGATIVE)}
    negative = {key.removeprefix(NEGATIVE): value for key, value in condition.items() if key.startswith(NEGATIVE)}
    if not negative:
        raise ValueError("guidance is on, but the condition has no negative prompt: encode it with guidance on")
    negative = positive | negative
    if any(positive[key].shape != negative[key].shape for key in positive):
        return predict(x, sigma, positive), predict(x, sigma, negative)
    pair = {key: torch.cat([positive[key], negative[key]]) for key in positive}
    c, u = predict(torch.cat([x, x]), torch.cat([sigma, sigma]), pair).chunk(2)
    return c, u
