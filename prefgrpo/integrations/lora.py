"""LoRA layers of peft with fewer passes over memory, and merged copies of them for forwards without gradient.

peft computes `base(x) + B(A(x.float())) * scaling`. In bf16 with fp32 LoRA weights, x is cast to fp32 and back, and the
product with `scaling` and the sum are two more passes over the output, in the backward pass too. Here A reads x as the
base layer does, and B's matrix multiplication adds to the base layer's output.
Invariant: equal to peft's layer up to rounding; in fp32 with a `scaling` that is a power of two, usually to the bit,
except where `ops.linear` uses oneDNN.
"""

from __future__ import annotations

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from prefgrpo.ops.linear import linear


class LoraLinear(Linear):
    """W x + b + scaling·B A x. A bf16 output is rounded twice; peft's is rounded four times."""

    merged_weight: Tensor | None = None
    """W + scaling·B A, used instead of the three products; set by `MergedLora`."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in] to [..., out], with all products in the base layer's dtype, or in autocast's."""
        if self.disable_adapters or self.merged:
            return super().forward(x)
        if self.merged_weight is not None:
            return linear(x, self.merged_weight, self.base_layer.bias)
        flat = x.flatten(0, -2).to(self.base_layer.weight.dtype)  # autocast would cast x for each of the two layers
        out = self.base_layer(flat)
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            up = self.lora_B[name].weight * self.scaling[name]  # in fp32: as addmm's alpha it would round the gradient
            down = linear(flat, self.lora_A[name].weight.to(flat.dtype))
            out.addmm_(down, up.to(out.dtype).t())
        return out.unflatten(0, x.shape[:-1])


def fuse_lora(model: nn.Module) -> int:
    """Turn the LoRA layers of `model` into `LoraLinear`s, in place; returns how many.

    Only plain ones on a Linear: layers with dropout, a LoRA bias or a variant such as DoRA keep peft's forward.
    Parameters, their names, saved files and merging stay peft's.
    """
    plain = [module for module in model.modules() if type(module) is Linear and _is_plain(module)]
    for module in plain:
        module.__class__ = LoraLinear
    return len(plain)


def _is_plain(layer: Linear) -> bool:
    extras = any(not isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())
    return not (extras or layer.lora_variant or layer.fan_in_fan_out or any(layer.lora_bias.values()))


class MergedLora:
    """Copies W + scaling·B A of the weights of all `LoraLinear` layers; inside `with merged:` the layers use them.

    For forwards without gradient, such as rollouts: one product per layer instead of three. The copies are made at the
    first use, from the weights of that moment; make a new object after an update. Each is computed in fp32 and rounded
    once to W's dtype: in fp32 outputs stay the same up to rounding; bf16 also rounds the LoRA's part of the weight.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._layers = [module for model in models for module in model.modules() if isinstance(module, LoraLinear)]
        self._weights: list[Tensor] = []

    def __enter__(self) -> None:
        if not self._weights:
            self._weights = [_merge(layer) for layer in self._layers]
        for layer, weight in zip(self._layers, self._weights, strict=True):
            layer.merged_weight = weight

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            layer.merged_weight = None


@torch.no_grad()
def _merge(layer: LoraLinear) -> Tensor:
    weight = layer.base_layer.weight
    deltas = [layer.get_delta_weight(name).float() for name in layer.active_adapters if name in layer.lora_A]
    return sum(deltas, weight.float()).to(weight.dtype)
