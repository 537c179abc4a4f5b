"""fp32 linear layers by oneDNN instead of MKL, on AMD CPUs with 512-bit units (Zen 5 and later).

torch multiplies fp32 matrices with MKL, which runs AVX2 kernels on AMD CPUs. oneDNN, which is part of torch too, uses
AVX-512; on Zen 4, which splits AVX-512 instructions in two, it is no faster. `python -m benchmarks.bench_levers`
measures both.
Invariant: equal to torch's linear up to fp32 rounding; small products, and what is not a plain fp32 tensor on a CPU, go
to torch's own, which raises the errors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ZEN_5 = 26
"""CPU family of AMD's first generation with 512-bit units."""


def _is_faster(file: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this is an AMD CPU with 512-bit units, and this torch uses AVX-512 and has oneDNN."""
    cpu = file.read_text() if file.is_file() else ""
    family = re.search(r"cpu family\s*: (\d+)", cpu)
    new = "AuthenticAMD" in cpu and family is not None and int(family[1]) >= ZEN_5
    return new and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()


FASTER = _is_faster()
LARGE = 1 << 21
"""Multiplications from which oneDNN is used; below, a call costs more than it saves."""


class _Linear(torch.autograd.Function):
    """x Wᵀ + b and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        (grad,) = gradients
        rows = grad.flatten(0, -2) if to_weight or to_bias else grad
        return (
            _product(grad, weight.t()) if to_x else None,
            _product(rows.t(), x.flatten(0, -2).t()) if to_weight else None,
            rows.sum(0) if to_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by oneDNN: the op to which inductor compiles layers with constant weights, and none else."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., in], weight [out, in] and bias [out] to [..., out]; by oneDNN where that is faster."""
    if not FASTER or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if not (_is_plain(x) and _is_plain(weight) and (bias is None or _is_plain(bias)) and _fits(x, weight, bias)):
        return F.linear(x, weight, bias)
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if trained and torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return _product(x, weight, bias)


def _is_plain(tensor: Tensor) -> bool:
    """Whether this is an fp32 tensor on a CPU, neither fake nor sharded."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype is torch.float32 and tensor.is_cpu


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the product is large enough, and the shapes match."""
    if weight.dim() != 2 or x.dim() < 2:
        return False
    n, k = weight.shape
    return x.numel() * n >= LARGE and x.shape[-1] == k and (bias is None or bias.shape == (n,))


class Linear(nn.Linear):
    """A `torch.nn.Linear` that computes with `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Input [..., in] to [..., out]."""
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> int:
    """Turn the Linear layers of `model` into this module's, in place, where oneDNN is faster; returns how many.

    Parameters and their names stay; subclasses of torch's Linear stay as they are.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear] if FASTER else []
    for layer in layers:
        layer.__class__ = Linear
    return len(layers)
