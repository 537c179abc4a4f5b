"""Transformer blocks whose pointwise part runs in fused ops (`prefgrpo.ops`): one subclass per block of diffusers.

About a third of a FLUX forward on an H100 is norms, modulation, rotary embedding, gates and residuals, each with its own
passes over memory. A subclass here computes the same in fewer; its linear layers and its attention are called as before,
so LoRA, FSDP2, recomputation, attention backends and split tokens keep working. (Unlike torch.compile, the ops have the
same bits with and without gradient.)
Invariant: a block equals diffusers' up to rounding, which the start of every run checks, forward and gradient.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from prefgrpo.config.by_path import load_class
from prefgrpo.models.attention import LIMIT

FUSED_ON = ("cuda",)
"""Device types on which blocks are fused; elsewhere diffusers' own run."""
FUSED = {
    "FluxTransformerBlock": "prefgrpo.models.blocks.flux:FluxDouble",
    "FluxSingleTransformerBlock": "prefgrpo.models.blocks.flux:FluxSingle",
    "Flux2TransformerBlock": "prefgrpo.models.blocks.flux2:Flux2Double",
    "Flux2SingleTransformerBlock": "prefgrpo.models.blocks.flux2:Flux2Single",
    "HunyuanVideo15TransformerBlock": "prefgrpo.models.blocks.hunyuan_video:HunyuanVideo15Double",
    "HunyuanVideoTransformerBlock": "prefgrpo.models.blocks.hunyuan_video:HunyuanVideoDouble",
    "HunyuanVideoSingleTransformerBlock": "prefgrpo.models.blocks.hunyuan_video:HunyuanVideoSingle",
    "JointTransformerBlock": "prefgrpo.models.blocks.sd3:SD3Double",
    "QwenImage21TransformerBlock": "prefgrpo.models.blocks.qwen_image_21:QwenImage21Block",
    "QwenImageTransformerBlock": "prefgrpo.models.blocks.qwen_image:QwenImageDouble",
    "WanTransformerBlock": "prefgrpo.models.blocks.wan:WanBlock",
    "ZImageTransformerBlock": "prefgrpo.models.blocks.z_image:ZImageBlock",
}
"""Name of diffusers' block → import path of the subclass that replaces it."""


def fuse_blocks(net: nn.Module, blocks: list[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Turn `blocks` of a denoiser that have a fused form into it, in place, if one of each kind passes `check`.

    Others stay diffusers' own, with a warning if they failed. dtype: of the run, on `device`.
    """
    if device.type not in FUSED_ON:
        return
    for kind in dict.fromkeys(type(block) for block in blocks):
        if kind.__name__ not in FUSED:
            continue
        of_kind = [block for block in blocks if type(block) is kind]
        fused = load_class("block", kind.__name__, FUSED, kind)
        try:
            check(net, of_kind[0], fused, dtype, device)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:  # of another diffusers
            reason = str(error).partition("\n")[0][:200]
            warnings.warn(f"diffusers' own {kind.__name__} runs, slower: the fused one differs: {reason}", stacklevel=2)
            continue
        for block in of_kind:
            block.__class__ = fused


def check(net: nn.Module, block: nn.Module, fused: type[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Compare outputs and gradients of copies of a block with diffusers' own in fp32, on random inputs.

    Gradients are those of all inputs, and of weights that are vectors. Raises RuntimeError if an error relative to the
    largest element is above LIMIT and twice that of diffusers' block in the same dtype.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        inputs = fused.inputs(block, torch.float32, device)  # type: ignore[operator]
    own = type(block)
    exact = _results(_copy(net, block, own, torch.float32, device), inputs)
    stock = _errors(_results(_copy(net, block, own, dtype, device), inputs), exact)
    got = _errors(_results(_copy(net, block, fused, dtype, device), inputs), exact)
    for name, error in got.items():
        if not error <= max(LIMIT[dtype], 2 * stock[name]):
            raise RuntimeError(f"{name} by {error:.1%}, diffusers' own by {stock[name]:.1%}")


def _copy(net: Any, block: nn.Module, kind: type[nn.Module], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of the block as a `kind`, with the dtypes that a run gives its weights."""
    hooks: Any = {id(block._forward_pre_hooks): type(block._forward_pre_hooks)()}  # a family's: they hold the pipeline
    alone = copy.deepcopy(block, hooks)
    alone.__class__ = kind
    in_fp32 = {"lora_A", "lora_B", *(net._keep_in_fp32_modules or ())}
    for name, p in alone.named_parameters():
        p.data = p.data.to(device, torch.float32 if in_fp32 & set(name.split(".")) else dtype)
        p.requires_grad_(p.dim() == 1)
    return alone


def _results(block: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs, and gradients for an upstream gradient of cosines."""
    dtype = next(p.dtype for p in block.parameters() if p.dim() == 2)
    given = {
        k: v.to(dtype).requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    out = block(**given)
    outputs = {f"output {k}": t for k, t in enumerate([out] if isinstance(out, Tensor) else out)}
    leaves = {f"gradient of {k}": v for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad}
    leaves |= {f"gradient of {name}": p for name, p in block.named_parameters() if p.requires_grad}
    upstream = [torch.arange(t.numel(), device=t.device).cos().view_as(t).to(t.dtype) for t in outputs.values()]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream)
    return {k: t.detach() for k, t in outputs.items()} | dict(zip(leaves, gradients, strict=True))


def _errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each result, relative to the largest element; infinite where one is not finite."""
    errors = {k: float((t - exact[k]).abs().max() / exact[k].abs().max()) for k, t in got.items()}
    return {k: error if math.isfinite(error) else math.inf for k, error in errors.items()}
