"""Transformer blocks whose pointwise part runs in fused ops, with less memory kept for the backward pass.

A quarter of a FLUX forward on an H100 is norms, modulation, rotary embedding, gates and residuals, each with its own
passes over memory. `forwards.py` has the same forwards with fewer, `kept.py` what need not be kept for the backward.
Unlike torch.compile, they have the same bits with and without gradient.
Invariant: a block equals diffusers' up to rounding, which the start of every run checks, forward and gradient.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prefgrpo.models.attention import LIMIT, relative_error
from prefgrpo.models.blocks.kept import keeps_inputs

FUSED_ON = ("cuda",)
"""Device types on which blocks are fused; elsewhere diffusers' own run."""


class Random(NamedTuple):
    """Random arguments for a block: B samples of N latent and M text tokens, C channels, heads of D channels."""

    device: torch.device
    B: int
    N: int
    M: int
    C: int
    D: int

    def __call__(self, *shape: int) -> Tensor:
        """N(0, 1) in fp32."""
        return torch.randn(*shape, device=self.device)

    def streams(self) -> dict[str, Any]:
        """Latents and text."""
        return {
            "hidden_states": self(self.B, self.N, self.C), "encoder_hidden_states": self(self.B, self.M, self.C),
        }  # fmt: skip

    def tables(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin [count, D] of a rotary embedding, each value twice in a row."""
        angle = 3 * self(count, self.D // 2).repeat_interleave(2, 1)
        return angle.cos(), angle.sin()

    def turns(self, *shape: int) -> Tensor:
        """The same as complex numbers […, D / 2]."""
        angle = 3 * self(*shape, self.D // 2)
        return torch.complex(angle.cos(), angle.sin())


FUSED: dict[str, tuple[str, Callable[[Random], dict[str, Any]]]] = {
    "FluxTransformerBlock": ("flux_double", lambda r: {
        **r.streams(), "temb": r(r.B, r.C), "image_rotary_emb": r.tables(r.N + r.M),
    }),
    "FluxSingleTransformerBlock": ("flux_single", lambda r: {
        **r.streams(), "temb": r(r.B, r.C), "image_rotary_emb": r.tables(r.N + r.M),
    }),
    "Flux2TransformerBlock": ("flux2_double", lambda r: {
        **r.streams(), "temb_mod_img": r(r.B, 6 * r.C), "temb_mod_txt": r(r.B, 6 * r.C),
        "image_rotary_emb": r.tables(r.N + r.M),
    }),
    "Flux2SingleTransformerBlock": ("flux2_single", lambda r: {
        "hidden_states": r(r.B, r.N + r.M, r.C), "encoder_hidden_states": None, "temb_mod": r(r.B, 3 * r.C),
        "image_rotary_emb": r.tables(r.N + r.M),
    }),
    "HunyuanVideoTransformerBlock": ("hunyuan_double", lambda r: {
        **r.streams(), "temb": r(r.B, r.C), "attention_mask": None, "freqs_cis": r.tables(r.N),
    }),
    "HunyuanVideoSingleTransformerBlock": ("hunyuan_single", lambda r: {
        **r.streams(), "temb": r(r.B, r.C), "attention_mask": None, "image_rotary_emb": r.tables(r.N),
    }),
    "HunyuanVideo15TransformerBlock": ("hunyuan15_double", lambda r: {
        **r.streams(), "temb": r(r.B, r.C), "freqs_cis": r.tables(r.N),
        "attention_mask": torch.ones(r.B, r.M, dtype=torch.bool, device=r.device),
    }),
    "JointTransformerBlock": ("sd3_double", lambda r: {**r.streams(), "temb": r(r.B, r.C)}),
    "QwenImageTransformerBlock": ("qwen_double", lambda r: {
        **r.streams(), "encoder_hidden_states_mask": None, "temb": r(r.B, r.C),
        "image_rotary_emb": (r.turns(r.N), r.turns(r.M)),
    }),
    "QwenImage21TransformerBlock": ("qwen21_block", lambda r: {
        "hidden_states": r(r.B, r.M + r.N, r.C), "modulation": r(r.B + 1, 4 * r.C), "rotary_emb": r.turns(r.M + r.N),
        "target_token_mask": torch.arange(r.M + r.N, device=r.device) >= r.M, "segments": [(0, r.M, True)],
    }),
    "WanTransformerBlock": ("wan_block", lambda r: {
        **r.streams(), "temb": r(r.B, 6, r.C), "rotary_emb": tuple(t[None, :, None] for t in r.tables(r.N)),
    }),
    "ZImageTransformerBlock": ("z_image_block", lambda r: {
        "x": r(r.B, r.N + r.M, r.C), "attn_mask": None, "freqs_cis": r.turns(r.B, r.N + r.M),
        "adaln_input": r(r.B, min(r.C, 256)),
    }),
}  # fmt: skip
"""Name of diffusers' block → its forward in `forwards`, and random arguments for both."""


def fused(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of one of diffusers' blocks that runs fused."""
    from prefgrpo.models.blocks import forwards  # needs diffusers

    forward = getattr(forwards, FUSED[kind.__name__][0])
    return type(f"Fused{kind.__name__}", (kind,), {"forward": keeps_inputs(forward), "stock_forward": kind.forward})


def fuse_blocks(net: nn.Module, blocks: list[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Fuse those of a denoiser's blocks in FUSED, in place, if one of each kind passes `check`.

    Others stay diffusers' own, with a warning if they failed. The run computes in `dtype` on `device`.
    """
    if device.type not in FUSED_ON:
        return
    for kind in dict.fromkeys(type(block) for block in blocks):
        if kind.__name__ not in FUSED:
            continue
        of_kind = [block for block in blocks if type(block) is kind]
        ours = fused(kind)
        try:
            check(net, of_kind[0], ours, dtype, device)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # of another diffusers
            reason = str(error).partition("\n")[0][:200]
            warnings.warn(f"{kind.__name__} runs as in diffusers, slower: fused, it fails: {reason}", stacklevel=2)
            continue
        for block in of_kind:
            block.__class__ = ours


def check(net: nn.Module, block: Any, ours: type[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Compare outputs and gradients of a copy of a block as `ours` with diffusers' own in fp32, on random inputs.

    Gradients are those of all inputs and of weights that are vectors. Raises RuntimeError if an error, relative to the
    largest element, is above LIMIT and above twice that of diffusers' own block in the same dtype.
    """
    kind = type(block)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        inputs = random_inputs(block, kind.__name__, device)
    exact = _results(_copy(net, block, kind, torch.float32, device), inputs)
    own = _errors(_results(_copy(net, block, kind, dtype, device), inputs), exact)
    for name, error in _errors(_results(_copy(net, block, ours, dtype, device), inputs), exact).items():
        if not error <= max(LIMIT[dtype], 2 * own[name]):
            raise RuntimeError(f"{name} differs by {error:.1%}, diffusers' own by {own[name]:.1%}")


def random_inputs(
    block: Any, kind: str, device: torch.device, samples: int = 2, tokens: tuple[int, int] = (160, 96)
) -> dict[str, Any]:
    """Keyword arguments of a block in FUSED, fp32; tokens: latents and text."""
    attn = next(getattr(block, name) for name in ("attn", "attn1", "attention") if hasattr(block, name))
    width = attn.to_q.in_features if hasattr(attn, "to_q") else attn.query_dim
    return FUSED[kind][1](Random(device, samples, *tokens, width, width // attn.heads))


def _copy(net: Any, block: nn.Module, kind: type[nn.Module], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of the block as a `kind`, with the dtypes that a run gives its weights."""
    hooks: Any = {id(block._forward_pre_hooks): type(block._forward_pre_hooks)()}  # a family's, which hold its pipeline
    alone = copy.deepcopy(block, hooks)
    alone.__class__ = kind
    in_fp32 = {"lora_A", "lora_B", *(net._keep_in_fp32_modules or ())}
    for name, p in alone.named_parameters():
        p.data = p.data.to(device, torch.float32 if in_fp32 & set(name.split(".")) else dtype)
        p.requires_grad_(p.dim() == 1)
    return alone


def _results(block: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs, and gradients for an upstream gradient of cosines."""
    dtype = next(p.dtype for name, p in block.named_parameters() if p.dim() == 2 and "lora_" not in name)
    real = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()}
    leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in real.items()}
    out = block(**(inputs | leaves))
    outputs = [t for t in ([out] if isinstance(out, Tensor) else out) if t is not None]
    leaves |= {name: p for name, p in block.named_parameters() if p.requires_grad}
    upstream = [torch.arange(t.numel(), device=t.device).cos().view_as(t).to(t.dtype) for t in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    found = {f"output {number}": t.detach() for number, t in enumerate(outputs)}
    return found | {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}


def _errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each result, relative to the largest element; infinite for one that is missing or not finite."""
    return {name: relative_error(got[name], t) if name in got else math.inf for name, t in exact.items()}
