"""`python -m benchmarks.layer_bytes`: bytes that FLUX.1-dev moves with peft's LoRA layers and with ours, and with
diffusers' rotary embedding and with ours.

Counted, not timed: the sizes of the inputs and outputs of every kernel of a forward and a backward pass, in bf16 under
autocast with fp32 LoRA weights of rank 64, on fake tensors: of single layers, and of the whole model with its published
recipe at 512². Views and allocations move nothing. Also printed: the time for these bytes at 3.35 TB/s (an H100's
memory), and for the multiplications at 989 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefgrpo.config.loading import parse
from prefgrpo.integrations.lora import LoraLinear, fuse_lora
from prefgrpo.integrations.rotary import apply_rotary_emb, stock, stock_rotary
from prefgrpo.run.memory import FLOP, build_meta_adapter, fake_tensors, norms_of

RECIPE = Path(__file__).resolve().parent.parent / "scripts" / "prefgrpo" / "lora_flux.yaml"
TOKENS, RANK = 8 * 1536, 64
"""Eight images of 512² with their text, as in one forward of FLUX."""
LAYERS = {
    "attention, bf16 input": (3072, 3072, torch.bfloat16),
    "attention, fp32 input (after a norm)": (3072, 3072, torch.float32),
    "feed-forward in, fp32 input": (3072, 12288, torch.float32),
    "feed-forward out, bf16 input": (12288, 3072, torch.bfloat16),
}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach"}
BANDWIDTH, PEAK = 3.35e12, 989e12


class Traffic(TorchDispatchMode):
    """Counts bytes read and written, FLOP and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.flop = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one operation."""
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in FREE:
            touched = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in touched)
            self.kernels += 1
        if func.overloadpacket in FLOP:
            self.flop += FLOP[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@contextmanager
def peft_layers(model: nn.Module) -> Iterator[None]:
    """Context in which `model` has peft's own LoRA layers, to compare with."""
    ours = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for module in ours:
        module.__class__ = Linear
    try:
        yield
    finally:
        for module in ours:
            module.__class__ = LoraLinear


@contextmanager
def stock_layers(model: nn.Module) -> Iterator[None]:
    """Context with peft's LoRA layers and diffusers' rotary embedding."""
    with peft_layers(model), stock_rotary():
        yield


def count(inputs: int, outputs: int, dtype: torch.dtype, fused: bool, tokens: int = TOKENS) -> Traffic:
    """One forward and backward pass of a LoRA layer [inputs → outputs] on `tokens` rows of `dtype`."""
    base = nn.Linear(inputs, outputs, dtype=torch.bfloat16, device="meta").requires_grad_(False)
    layer = Linear(base, "default", LoraConfig(r=RANK, lora_alpha=2 * RANK), r=RANK, lora_alpha=2 * RANK)
    if fused:
        fuse_lora(layer)
    with FakeTensorMode():
        for part in layer.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    kind = torch.float32 if p.requires_grad else p.dtype
                    part._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=kind), p.requires_grad)
        x = torch.empty(tokens, inputs, dtype=dtype, requires_grad=True)
        with Traffic() as traffic:
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            y.backward(y.detach())
    return traffic


def count_rotary(fused: bool) -> Traffic:
    """One forward and backward pass of the rotary embedding of a query, 24 heads of width 128."""
    with FakeTensorMode():
        x = torch.empty(1, TOKENS, 24, 128, dtype=torch.bfloat16, requires_grad=True)
        freqs = torch.empty(2, TOKENS, 128)
        with Traffic() as traffic:
            y = (apply_rotary_emb if fused else stock)(x, freqs, sequence_dim=1)
            y.backward(y.detach())
    return traffic


def count_model(fused: bool) -> Traffic:
    """One forward and backward pass of FLUX.1-dev with a batch of its recipe, without recomputation."""
    sizes = {"rollout": {"height": 512, "width": 512}, "train": {"gradient_checkpointing": False}}
    config, mistakes = parse(RECIPE, overrides=sizes)
    assert not mistakes, mistakes
    adapter = build_meta_adapter(config)[0]
    mode, _, (x, sigma, condition) = fake_tensors(config, adapter)
    with nullcontext() if fused else stock_layers(adapter.transformer), Traffic() as traffic, norms_of(config), mode:
        adapter.velocity(x, sigma, condition, config.rollout).square().mean().backward()
    return traffic


def main() -> None:
    """Print the table."""
    print("| | | GB | kernels | ms of memory | ms of multiplications |\n|---|---|---:|---:|---:|---:|")
    counts = {name: partial(count, *layer) for name, layer in LAYERS.items()}
    counts |= {"rotary embedding, bf16": count_rotary, "FLUX.1-dev": count_model}
    for name, counted in counts.items():
        for who, fused in (("stock", False), ("ours", True)):
            t = counted(fused=fused)
            cells = f"{t.bytes / 1e9:.2f} | {t.kernels} | {1e3 * t.bytes / BANDWIDTH:.2f} | {1e3 * t.flop / PEAK:.2f}"
            print(f"| {name} | {who} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
