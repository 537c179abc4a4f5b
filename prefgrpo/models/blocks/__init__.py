"""Transformer blocks whose pointwise parts run in fused ops, and keep less memory for the backward pass.

A quarter of a FLUX forward on an H100 is norms, modulation, rotary embedding, gates and residuals, each with its own
passes over memory. `forwards.py` has the same forwards with fewer, made of `components.py`, and `recompute.py`
what need not be stored for the backward. Unlike compiled blocks, they have the same bits with and without gradient.
Invariant: a block equals diffusers' up to rounding, which the start of every run checks, forward and gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prefgrpo.config.recipe import ConfigError
from prefgrpo.models.attention import LIMIT, relative_error
from prefgrpo.models.blocks.recompute import recomputes

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
    "Flux3ModeTransformerBlock": ("flux3_mode", lambda r: {
        "hidden_states": r(r.B, r.N, r.C), "temb_mod": r(r.B, r.N, 3 * r.C), "image_rotary_emb": r.tables(r.N),
    }),
    "Flux3SingleTransformerBlock": ("flux3_single", lambda r: {
        **r.streams(), "temb_mod": r(r.B, r.N, 3 * r.C), "temb_mod_context": r(r.B, r.M, 3 * r.C),
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
    "Krea2TransformerBlock": ("krea2_block", lambda r: {
        "hidden_states": r(r.B, r.M + r.N, r.C), "temb": r(r.B, 1, 6 * r.C), "image_rotary_emb": r.tables(r.M + r.N),
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
    return type(f"Fused{kind.__name__}", (kind,), {"forward": recomputes(forward), "stock_forward": kind.forward})


class Differs(Exception):
    """A fused block's results are not those of diffusers' own."""


class Outcome(NamedTuple):
    """Result of checking one kind of block in one process."""

    stock: str = ""
    """Why diffusers' own block runs instead; '': the fused one runs."""
    error: str = ""
    """The error that ends the run; '': none."""


def fuse_blocks(
    net: nn.Module,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    gather: Callable[[list[Outcome]], list[list[Outcome]]],
) -> list[str]:
    """Fuse those of a denoiser's blocks in FUSED, in place, if one of each kind passes `check` in every process.

    The run computes in `dtype` on `device`. gather: this process's object → those of all processes, by rank. A kind
    that another version of diffusers has changed is not fused in any of them; returns why, a line per kind. Raises
    ConfigError in all processes if a check failed for another reason in one of them: memory, Triton, a compiler.
    """
    if device.type not in FUSED_ON:
        return []
    examples = {kind: next(b for b in blocks if type(b) is kind) for kind in dict.fromkeys(type(b) for b in blocks)}
    ours = {kind: fused(kind) for kind in examples if kind.__name__ in FUSED}
    everyone = gather([_outcome(net, examples[kind], ours[kind], dtype, device) for kind in ours])
    errors: list[str] = []
    changed: list[str] = []
    for number, kind in enumerate(ours):
        of_kind = [block for block in blocks if type(block) is kind]
        outcomes = [outcomes[number] for outcomes in everyone]
        errors += [f"blocks: {kind.__name__}, process {rank}: {o.error}" for rank, o in enumerate(outcomes) if o.error]
        stock = [f"{o.stock} (process {rank})" for rank, o in enumerate(outcomes) if o.stock]
        if stock:
            changed.append(f"{kind.__name__} runs as in diffusers, slower: fused, {stock[0]}")
        for block in of_kind:
            if stock:
                block.why_stock = stock[0]  # type: ignore[assignment]
            else:
                block.__class__ = ours[kind]
    if errors:
        raise ConfigError(errors)
    return changed


def fusion_note(blocks: Sequence[nn.Module]) -> str:
    """How many of a run's blocks are fused, and why the others are not."""
    own = [block for block in blocks if not hasattr(block, "stock_forward")]
    reasons = {type(block).__name__.removeprefix("FSDP"): getattr(block, "why_stock", "no fused form") for block in own}
    parts = [f"fused blocks: {len(blocks) - len(own)} of {len(blocks)}"]
    return "; ".join(parts + [f"{kind} runs as in diffusers: {reason}" for kind, reason in reasons.items()])


def _outcome(
    net: nn.Module, block: nn.Module, ours: type[nn.Module], dtype: torch.dtype, device: torch.device
) -> Outcome:
    try:
        check(net, block, ours, dtype, device)
    except (AttributeError, TypeError, Differs) as error:  # names, arguments or formulas of another diffusers
        return Outcome(stock=_line(error))
    except Exception as error:  # noqa: BLE001 (every process hears of it, so none waits for one that has ended)
        memory = isinstance(error, torch.OutOfMemoryError)
        return Outcome(error=f"{type(error).__name__}: {_line(error)}; expected {MEMORY if memory else COMPILER}")
    return Outcome()


def _line(error: BaseException) -> str:
    return " ".join(str(error).strip().partition("\n")[0].split())[:200] or type(error).__name__


MEMORY = "more free memory on this GPU: does another program hold some? parallel.shard splits the weights"
COMPILER = (
    "a C compiler for Triton and TRITON_CACHE_DIR on a local disk; PREFGRPO_BACKEND=torch runs without Triton, slower"
)
"""What a start needs that failed."""


def check(net: nn.Module, block: Any, ours: type[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Compare outputs and gradients of a copy of a block as `ours` with diffusers' own in fp32, on random inputs.

    Gradients are those of all inputs and of weights that are vectors. Raises Differs if an error, relative to the
    largest element, is above LIMIT and above twice that of diffusers' own block in the same dtype.
    """
    kind = type(block)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        inputs = random_inputs(block, kind.__name__, device)
    precise = _copy(net, block, kind, torch.float32, device)
    for module in precise.modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = "native"  # flash kernels do not take fp32
    exact = _results(precise, inputs)
    own = _errors(_results(_copy(net, block, kind, dtype, device), inputs), exact)
    for name, error in _errors(_results(_copy(net, block, ours, dtype, device), inputs), exact).items():
        if not error <= max(LIMIT[dtype], 2 * own[name]):
            raise Differs(f"{name} differs by {error:.1%}, diffusers' own by {own[name]:.1%}")


def random_inputs(
    block: Any, kind: str, device: torch.device, samples: int = 2, tokens: tuple[int, int] = (160, 96)
) -> dict[str, Any]:
    """Keyword arguments of a block in FUSED, fp32; tokens: latents and text."""
    attn = next(getattr(block, name) for name in ("attn", "attn1", "attention") if hasattr(block, name))
    width = attn.to_q.in_features if hasattr(attn, "to_q") else attn.query_dim
    heads = attn.heads if hasattr(attn, "heads") else attn.num_heads
    return FUSED[kind][1](Random(device, samples, *tokens, width, width // heads))


def _copy(net: Any, block: nn.Module, kind: type[nn.Module], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of the block as a `kind`, with the dtypes that a run gives its weights."""
    hooks: Any = {id(block._forward_pre_hooks): type(block._forward_pre_hooks)()}  # of families: they hold the pipeline
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
