"""LoRA layers of peft with fewer passes over memory.

peft computes `base(x) + B(A(x.float())) * scaling`. In bf16 with fp32 LoRA weights, x is cast to fp32 and back, and the
product with `scaling` and the sum are two more passes over the output, in the backward pass too. Here A reads x as the
base layer does, and B's matrix multiplication adds to the base layer's output. Both are cast once per change. Layers
with the same input (`outputs`) share one product for their A.
Invariant: equal to peft's layer up to rounding; in fp32 with a `scaling` that is a power of two, usually bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from prefgrpo.models.blocks.recompute import recomputed
from prefgrpo.models.fp8 import product_dtype


class LoraLinear(Linear):
    """W x + b + scaling·B A x. A bf16 output is rounded twice; peft's is rounded four times."""

    casts: Casts | None = None

    def forward(self, x: Tensor, low: list[tuple[Tensor, Tensor]] | None = None, apart: bool = False) -> Any:
        """`x` [..., in] to [..., out], with all products in the base layer's dtype.

        low: (A x [N, r], scaling·B) of each active adapter, if `outputs` has computed them. apart: return the output
        [N, out] without the last adapter, and that adapter's A x and scaling·B (None and None without adapters).
        """
        if self.disable_adapters or self.merged:
            out = super().forward(x)
            return (out.flatten(0, -2), None, None) if apart else out
        flat = x.flatten(0, -2).to(product_dtype(self.base_layer))
        if x.is_contiguous():
            out = self.base_layer(flat)
        else:  # torch rounds products of strided inputs differently, and a LoRA of zeros must change nothing
            out = self.base_layer(x.to(flat.dtype)).flatten(0, -2)
        found = _low_ranks([self], flat)[0] if low is None else low
        last = found.pop() if apart and found else (None, None)
        for small, up in found:
            out.addmm_(small, up.t())
        if apart:
            return out, *last
        return out.unflatten(0, x.shape[:-1])

    def factors(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and scaling · B in `dtype`, whose gradients reach the fp32 weights."""
        down = self.lora_A[name].weight
        up = self.lora_B[name].weight
        scaling = self.scaling[name]
        if self.casts is None or down.dtype == dtype or torch.compiler.is_compiling():
            return down.to(dtype), (up * scaling).to(dtype)  # as addmm's alpha, it would round the gradient
        copies = self.casts.of(self, name, dtype)
        if not torch.is_grad_enabled():
            return copies
        return _Cast.apply(down, up, *copies, scaling)


def outputs(layers: Sequence[nn.Module], x: Tensor) -> Iterator[Tensor]:
    """layer(x) of each layer, one at a time; if all have the same adapters, their A are one matrix product."""
    first: Any = layers[0]
    are_alike = all(
        isinstance(layer, LoraLinear)
        and not (layer.disable_adapters or layer.merged)
        and layer.active_adapters == first.active_adapters
        and product_dtype(layer.base_layer) == product_dtype(first.base_layer)
        for layer in layers
    )
    if not are_alike:
        yield from (layer(x) for layer in layers)
        return
    alike: Any = layers
    flat = x.flatten(0, -2).to(product_dtype(first.base_layer))
    for layer, low in zip(alike, _low_ranks(alike, flat), strict=True):
        yield layer(x, low)


def _low_ranks(layers: Sequence[LoraLinear], flat: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
    """For each layer, (A x [N, r], scaling·B) of its active adapters; all layers have the same ones active."""
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    for name in layers[0].active_adapters:
        places = [place for layer, place in zip(layers, found, strict=True) if name in layer.lora_A]
        factors = [layer.factors(name, flat.dtype) for layer in layers if name in layer.lora_A]
        if not factors:
            continue
        downs = [down for down, _ in factors]
        joined = downs[0] if len(downs) == 1 else recomputed(torch.cat, downs)
        parts = F.linear(flat, joined).split([len(down) for down in downs], 1)
        for place, part, (_, up) in zip(places, parts, factors, strict=True):
            place.append((part, up))
    return found


class Casts:
    """Copies of A and scaling · B of a model's layers in the dtype of their products.

    A change of any weight shows in its version or address; all copies are then made again in a few launches. Without
    them, each layer needs three in every forward: 1,026 in a FLUX forward, whose LoRA changes once in 25 or 50
    forwards. (Values written through `.data` go unnoticed; nothing here does that after the first forward.)
    """

    def __init__(self, layers: Iterable[LoraLinear]) -> None:
        self._made: WeakKeyDictionary[LoraLinear, dict[str, tuple[Any, Tensor, Tensor]]] = WeakKeyDictionary()
        for layer in layers:
            self._made[layer] = {}

    def __deepcopy__(self, memo: Any) -> None:
        """A copied layer has no copies: it casts in every forward."""

    def of(self, layer: LoraLinear, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The copies of one layer's adapter `name`."""
        state = _state(layer, name, dtype)
        if self._made[layer].get(name, (None,))[0] != state:
            self._make(name)
        _, down, up = self._made[layer][name]
        return down, up

    @torch.no_grad()
    def _make(self, name: str) -> None:
        layers = [layer for layer in self._made if name in layer.lora_A]
        for layer in layers:  # freed before the new ones are allocated, unless a graph holds them
            self._made[layer].pop(name, None)
        dtypes = [product_dtype(layer.base_layer) for layer in layers]
        downs = [layer.lora_A[name].weight for layer in layers]
        ups = [layer.lora_B[name].weight for layer in layers]
        scaled = torch._foreach_mul(ups, [layer.scaling[name] for layer in layers])
        copies = [torch.empty_like(w, dtype=d) for w, d in zip(downs + ups, dtypes + dtypes, strict=True)]
        torch._foreach_copy_(copies, downs + list(scaled))
        for k, layer in enumerate(layers):
            self._made[layer][name] = _state(layer, name, dtypes[k]), copies[k], copies[len(layers) + k]


def _state(layer: LoraLinear, name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """What the copies depend on."""
    down = layer.lora_A[name].weight
    up = layer.lora_B[name].weight
    return down._version, down.data_ptr(), up._version, up.data_ptr(), layer.scaling[name], dtype


def _count_changes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count a step in the versions of its weights, because torch's fused optimisers do not."""
    increment_version([p for group in optimizer.param_groups for p in group["params"]])


register_optimizer_step_post_hook(_count_changes)


class _Cast(torch.autograd.Function):
    """The copies in place of their weights; the gradients are those of the casts and of the product with `scaling`."""

    @staticmethod
    def forward(ctx: Any, down: Tensor, up: Tensor, down_copy: Tensor, up_copy: Tensor, scaling: float) -> Any:
        ctx.scaling = scaling
        ctx.dtype = down.dtype
        return down_copy, up_copy

    @staticmethod
    def backward(ctx: Any, down: Tensor, up: Tensor) -> Any:
        return down.to(ctx.dtype), up.to(ctx.dtype) * ctx.scaling, None, None, None


def fuse_lora(model: nn.Module) -> int:
    """Turn the LoRA layers of `model` into `LoraLinear`s, in place; returns how many.

    They have no dropout, bias or variant such as DoRA: no run makes these, and no file that is read has them.
    Parameters, their names, saved files and merging stay peft's.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is Linear]
    casts = Casts(layers)
    for layer in layers:
        layer.__class__ = LoraLinear
        layer.casts = casts
    return len(layers)
