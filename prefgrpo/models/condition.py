"""The condition of a denoiser: the prompt's embedding and, for editing, its source images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TEXT = ("prompt_embeds", "pooled", "prompt_embeds_2")
"""The fields that a text encoder fills."""


@dataclass(frozen=True, eq=False)
class Condition:
    """An encoded prompt or, with a leading dimension B, a batch of them."""

    prompt_embeds: Tensor
    """[(B,) n, C] text encoder states."""
    pooled: Tensor | None = None
    """[(B,) C'] pooled vector of a second text encoder."""
    sources: tuple[Tensor, ...] = ()
    """Results of `Adapter.encode_sources`: for each source image latents [(B,) rows, columns, C], or
    [(B,) C, F', h, w]."""
    negative: Condition | None = None
    """The negative prompt's embedding, if guidance is on; its sources are those of the prompt."""
    prompt_embeds_2: Tensor | None = None
    """[(B,) n', C'] states of a second text encoder, with their own length."""

    @classmethod
    def of_text(cls, tensors: Mapping[str, Tensor], **rest: Any) -> Condition:
        """The inverse of `tensors`, with values for the other fields."""
        fields: dict[str, Any] = dict(tensors)
        return cls(**fields, **rest)

    def tensors(self) -> dict[str, Tensor]:
        """The text encoders' outputs, by field."""
        named = {name: getattr(self, name) for name in TEXT}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Condition:
        """A condition with `function` applied to every tensor."""
        return combine([self], lambda _, tensors: function(tensors[0]))

    def to(self, device: torch.device | str) -> Condition:
        """The same on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def cast(self, dtype: torch.dtype) -> Condition:
        """The same in `dtype`."""
        return self.map(lambda tensor: tensor.to(dtype))

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all tensors; conditions with equal ones can be collated."""
        own = tuple(tuple(tensor.shape) for tensor in (*self.tensors().values(), *self.sources))
        return own if self.negative is None else own + self.negative.shapes()

    def select(self, rows: Tensor) -> Condition:
        """The batch rows `rows` (int64)."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))


def combine(conditions: Sequence[Condition], function: Callable[[str, list[Tensor]], Tensor]) -> Condition:
    """A condition of function(field, tensors of all conditions). Raises ValueError if their fields differ."""
    if len({(*one.tensors(), len(one.sources), one.negative is None) for one in conditions}) > 1:
        have = [f"{', '.join(one.tensors())}, {len(one.sources)} source(s)" for one in conditions]
        raise ValueError(f"conditions of one batch must have equal parts (as many source images), got {have}")
    named = {name: function(name, [one.tensors()[name] for one in conditions]) for name in conditions[0].tensors()}
    sources = [function("source", list(each)) for each in zip(*(one.sources for one in conditions), strict=True)]
    negatives = [one.negative for one in conditions if one.negative is not None]
    negative = combine(negatives, function) if negatives else None
    return Condition.of_text(named, sources=tuple(sources), negative=negative)


def collate(conditions: Sequence[Condition], device: torch.device | str = "cpu") -> Condition:
    """Batch [B, …] of unbatched conditions on `device`. Raises ValueError if their shapes differ: a batch has texts of
    one length, and source images of one number and size."""

    def stack(name: str, tensors: list[Tensor]) -> Tensor:
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise ValueError(f"conditions of one batch must have equal shapes, but '{name}' has {sorted(shapes)}")
        return torch.stack(tensors)

    if not conditions:
        raise ValueError("collate needs at least one condition")
    return combine(conditions, stack).to(device)
