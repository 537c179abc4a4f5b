"""The condition of a denoiser: the prompt's embedding and, for editing, its source images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TEXT = ("prompt_embeds", "text_length", "pooled", "prompt_embeds_2", "text_length_2")
"""The fields that a text encoder fills."""


@dataclass(frozen=True, eq=False)
class Condition:
    """An encoded prompt or, with a leading dimension B, a batch of them."""

    prompt_embeds: Tensor
    """[(B,) n, C] text encoder states; a batch is zero-padded at the end to its longest prompt."""
    text_length: Tensor | None = None
    """int64 [(B)] number of tokens, for families whose embeddings are as long as the prompt. It stays on the CPU, so
    that shapes can depend on it without a device sync."""
    pooled: Tensor | None = None
    """[(B,) C'] pooled vector of a second text encoder."""
    sources: tuple[Tensor, ...] = ()
    """Results of `Adapter.encode_sources`: for each source image latents [(B,) rows, columns, C], or
    [(B,) C, F', h, w]."""
    negative: Condition | None = None
    """The negative prompt's embedding, if guidance is on; its sources are those of the prompt."""
    prompt_embeds_2: Tensor | None = None
    """[(B,) n', C'] states of a second text encoder, with their own length."""
    text_length_2: Tensor | None = None
    """Their `text_length`."""

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
        """Move everything but the lengths to `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True) if tensor.is_floating_point() else tensor)

    def cast(self, dtype: torch.dtype) -> Condition:
        """The same in a floating-point dtype; lengths stay integers."""
        return self.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

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
    """Batch [B, …] of unbatched conditions on `device`; prompts are zero-padded at the end to the longest.

    Raises ValueError if conditions differ otherwise (sizes or number of their source images).
    """

    def stack(name: str, tensors: list[Tensor]) -> Tensor:
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1 and name.startswith("prompt_embeds"):
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        if len(shapes) > 1:
            raise ValueError(f"conditions of one batch must have equal shapes, but '{name}' has {sorted(shapes)}")
        return torch.stack(tensors)

    if not conditions:
        raise ValueError("collate needs at least one condition")
    return combine(conditions, stack).to(device)


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
        index = rows.to(x.device, non_blocking=True)
        v.append(predict(x[index], sigma[index], condition.select(rows)))
    order = torch.cat(parts).argsort().to(x.device, non_blocking=True)
    return torch.cat(v)[order]
