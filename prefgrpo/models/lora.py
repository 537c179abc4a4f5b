"""LoRA layers of peft with fewer passes over memory.

peft computes `base(x) + B(A(x.float())) * scaling`. In bf16 with fp32 LoRA weights, x is cast to fp32 and back, and the
product with `scaling` and the sum are two more passes over the output, in the backward pass too. Here A reads x as the
base layer does, and B's matrix multiplication adds to the base layer's output.
Invariant: equal to peft's layer up to rounding; in fp32 with a `scaling` that is a power of two, usually to the bit.
"""

from __future__ import annotations

import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn


class LoraLinear(Linear):
    """W x + b + scaling·B A x. A bf16 output is rounded twice; peft's is rounded four times."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in] to [..., out], with all products in the base layer's dtype."""
        if self.disable_adapters or self.merged:
            return super().forward(x)
        flat = x.flatten(0, -2).to(self.base_layer.weight.dtype)
        if x.is_contiguous():
            out = self.base_layer(flat)
        else:  # torch rounds products of strided inputs otherwise, and a LoRA of zeros changes nothing
            out = self.base_layer(x.to(flat.dtype)).flatten(0, -2)
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            up = self.lora_B[name].weight * self.scaling[name]  # in fp32: as addmm's alpha it would round the gradient
            down = F.linear(flat, self.lora_A[name].weight.to(flat.dtype))
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
