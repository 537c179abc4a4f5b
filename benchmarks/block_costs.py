"""What the repeated blocks of every family cost at its published size, diffusers' own and fused, on meta tensors.

    python -m benchmarks.block_costs            # writes the tables of docs/scale.md

Counted: FLOP of products and attention, bytes that everything else reads and writes, launches, and bytes that a block
keeps for its backward pass with a LoRA. One block of each kind runs in bf16, as published, without weights; a forward
has `count` of them. A kernel moves its inputs and outputs once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.blocks import replace_block
from prefgrpo.models import family
from prefgrpo.models.blocks import FUSED, fused, kept
from prefgrpo.models.lora import fuse_lora
from prefgrpo.models.rotary import fuse_rotary
from prefgrpo.models.sd3 import JointAttention

PRODUCTS = 774e12
"""FLOP/s of a bf16 product of 8192³ on an H100, measured 2026-11-27."""
ATTENTION = 346e12
"""FLOP/s of FlashAttention-2 on an H100: 35 % of its peak (FlashAttention-3, arXiv:2407.08608)."""
OWN = 2.0e12
"""Bytes/s of torch's pointwise kernels on an H100 (gated residual of a FLUX block: measured .139 ms, 2026-11-27)."""
OURS = 2.5e12
"""Bytes/s of the fused kernels (LayerNorm and modulation: measured .045 ms)."""


class Kind(NamedTuple):
    """Blocks of one kind in a forward: how many, where the first is, and its arguments."""

    count: int
    find: Callable[[Any], nn.Module]
    inputs: Callable[[Any], dict[str, Any]]


class Model(NamedTuple):
    """A published denoiser at a published size, batch 1."""

    name: str
    size: str
    family: str
    net: str
    config: dict[str, Any]
    kinds: tuple[Kind, ...]


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def tables(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, width]."""
    return some(tokens, width, dtype=torch.float32), some(tokens, width, dtype=torch.float32)


def turns(*shape: int) -> Tensor:
    """Complex rotations [tokens, width / 2]."""
    return some(*shape, dtype=torch.complex64)


def joint(count: int, tokens: int, text: int, width: int, head: int, rope: str = "image_rotary_emb") -> Kind:
    """Double-stream blocks of FLUX.1 and HunyuanVideo."""
    length = tokens + text * (rope == "image_rotary_emb")
    masks = {} if rope == "image_rotary_emb" else {"attention_mask": None}
    return Kind(count, lambda net: net.transformer_blocks[0], lambda net: {
        "hidden_states": some(1, tokens, width), "encoder_hidden_states": some(1, text, width),
        "temb": some(1, width), rope: tables(length, head),
    } | masks)  # fmt: skip


def single(count: int, tokens: int, text: int, width: int, head: int, rotated: int) -> Kind:
    """Single-stream blocks of FLUX.1 and HunyuanVideo; rotated: tokens with a rotary embedding."""
    return Kind(count, lambda net: net.single_transformer_blocks[0], lambda net: {
        "hidden_states": some(1, tokens, width), "encoder_hidden_states": some(1, text, width),
        "temb": some(1, width), "image_rotary_emb": tables(rotated, head),
    } | ({"attention_mask": None} if rotated == tokens else {}))  # fmt: skip


def flux(tokens: int) -> tuple[Kind, ...]:
    """FLUX.1: 512 tokens of text."""
    return joint(19, tokens, 512, 3072, 128), single(38, tokens, 512, 3072, 128, tokens + 512)


def flux2(doubles: int, singles: int, width: int, tokens: int) -> tuple[Kind, ...]:
    """FLUX.2: 512 tokens of text, shared modulation."""
    double = Kind(doubles, lambda net: net.transformer_blocks[0], lambda net: {
        "hidden_states": some(1, tokens, width), "encoder_hidden_states": some(1, 512, width),
        "temb_mod_img": some(1, 6 * width), "temb_mod_txt": some(1, 6 * width),
        "image_rotary_emb": tables(tokens + 512, 128),
    })  # fmt: skip
    one = Kind(singles, lambda net: net.single_transformer_blocks[0], lambda net: {
        "hidden_states": some(1, tokens + 512, width), "encoder_hidden_states": None, "temb_mod": some(1, 3 * width),
        "image_rotary_emb": tables(tokens + 512, 128),
    })  # fmt: skip
    return double, one


def qwen(tokens: int, text: int) -> tuple[Kind, ...]:
    """Qwen-Image."""
    return (Kind(60, lambda net: net.transformer_blocks[0], lambda net: {
        "hidden_states": some(1, tokens, 3072), "encoder_hidden_states": some(1, text, 3072),
        "encoder_hidden_states_mask": None, "temb": some(1, 3072),
        "image_rotary_emb": (turns(tokens, 64), turns(text, 64)),
    }),)  # fmt: skip


def qwen21(tokens: int, text: int) -> tuple[Kind, ...]:
    """Qwen-Image-2.1: text modulated from t = 0."""
    return (Kind(32, lambda net: net.transformer_blocks[0], lambda net: {
        "hidden_states": some(1, tokens + text, 4096), "modulation": some(2, 4 * 4096),
        "rotary_emb": turns(tokens + text, 64), "segments": [(0, text, True)],
        "target_token_mask": some(tokens + text, dtype=torch.bool),
    }),)  # fmt: skip


def sd3(counts: tuple[int, int], width: int, tokens: int, text: int) -> tuple[Kind, ...]:
    """SD3.5: blocks with a second attention (medium) first."""
    def inputs(net: Any) -> dict[str, Any]:
        return {"hidden_states": some(1, tokens, width), "encoder_hidden_states": some(1, text, width),
                "temb": some(1, width)}  # fmt: skip
    dual = Kind(counts[0], lambda net: net.transformer_blocks[0], inputs)
    plain = Kind(counts[1], lambda net: net.transformer_blocks[-2], inputs)
    return (dual, plain) if counts[0] else (plain,)


def wan(count: int, width: int, tokens: int, per_token: bool = False) -> tuple[Kind, ...]:
    """Wan: 512 tokens of text; per_token: one timestep per token (TI2V-5B)."""
    return (Kind(count, lambda net: net.blocks[0], lambda net: {
        "hidden_states": some(1, tokens, width), "encoder_hidden_states": some(1, 512, width),
        "temb": some(1, tokens, 6, width) if per_token else some(1, 6, width),
        "rotary_emb": tuple(t.view(1, tokens, 1, 128) for t in tables(tokens, 128)),
    }),)  # fmt: skip


def hunyuan15(tokens: int, text: int) -> tuple[Kind, ...]:
    """HunyuanVideo-1.5: text masked."""
    return (Kind(54, lambda net: net.transformer_blocks[0], lambda net: {
        "hidden_states": some(1, tokens, 2048), "encoder_hidden_states": some(1, text, 2048), "temb": some(1, 2048),
        "attention_mask": some(1, text, dtype=torch.bool), "freqs_cis": tables(tokens, 128),
    }),)  # fmt: skip


def z_image(tokens: int, text: int) -> tuple[Kind, ...]:
    """Z-Image: 30 blocks, and 2 that refine the image alone."""
    def kind(count: int, length: int) -> Kind:
        return Kind(count, lambda net: net.layers[0], lambda net: {
            "x": some(1, length, 3840), "attn_mask": None, "freqs_cis": turns(1, length, 64),
            "adaln_input": some(1, 256),
        })  # fmt: skip
    return kind(30, tokens + text), kind(2, tokens)


def ltx2(tokens: int, sound: int, text: int) -> tuple[Kind, ...]:
    """LTX-2: video and sound."""
    def half(length: int, width: int) -> tuple[Tensor, Tensor]:
        return some(1, 32, length, width), some(1, 32, length, width)
    return (Kind(48, lambda net: net.transformer_blocks[0], lambda net: {
        "hidden_states": some(1, tokens, 4096), "audio_hidden_states": some(1, sound, 2048),
        "encoder_hidden_states": some(1, text, 4096), "audio_encoder_hidden_states": some(1, text, 2048),
        "temb": some(1, 1, 6 * 4096), "temb_audio": some(1, 1, 6 * 2048),
        "temb_ca_scale_shift": some(1, 1, 4 * 4096), "temb_ca_audio_scale_shift": some(1, 1, 4 * 2048),
        "temb_ca_gate": some(1, 1, 4096), "temb_ca_audio_gate": some(1, 1, 2048),
        "video_rotary_emb": half(tokens, 64), "audio_rotary_emb": half(sound, 32),
        "ca_video_rotary_emb": half(tokens, 32), "ca_audio_rotary_emb": half(sound, 32),
    }),)  # fmt: skip


ONE = {"num_layers": 1}
FLUX = {"num_layers": 1, "num_single_layers": 1}
WAN_1 = {"num_attention_heads": 12, "ffn_dim": 8960, **ONE}
WAN_5 = {"num_attention_heads": 24, "ffn_dim": 14336, **ONE}
MEDIUM = {"num_layers": 3, "attention_head_dim": 64, "num_attention_heads": 24, "qk_norm": "rms_norm",
          "dual_attention_layers": (0,)}  # fmt: skip
LARGE = {"num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 38, "qk_norm": "rms_norm"}
KLEIN = {"num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False, **FLUX}
LTX = {"rope_type": "split", **ONE}
MODELS = (
    Model("FLUX.1", "1024²", "flux", "FluxTransformer2DModel", FLUX, flux(4096)),
    Model("FLUX.1-Kontext", "1024² from 1024²", "flux_kontext", "FluxTransformer2DModel", FLUX, flux(8192)),
    Model("FLUX.2-dev", "1024²", "flux2", "Flux2Transformer2DModel", FLUX, flux2(8, 48, 6144, 4096)),
    Model("FLUX.2-klein-4B", "1024²", "flux2_klein", "Flux2Transformer2DModel", KLEIN, flux2(5, 20, 3072, 4096)),
    Model("Qwen-Image", "1024²", "qwen_image", "QwenImageTransformer2DModel", ONE, qwen(4096, 256)),
    Model("Qwen-Image-Edit", "1024² from 1024²", "qwen_image_edit", "QwenImageTransformer2DModel", ONE,
          qwen(8192, 512)),
    Model("Qwen-Image-2.1", "1024²", "qwen_image_21", "QwenImage21Transformer2DModel", ONE, qwen21(4096, 256)),
    Model("SD3.5-medium", "1024²", "sd3", "SD3Transformer2DModel", MEDIUM, sd3((13, 11), 1536, 4096, 333)),
    Model("SD3.5-large", "1024²", "sd3", "SD3Transformer2DModel", LARGE, sd3((0, 38), 2432, 4096, 333)),
    Model("Z-Image", "1024²", "z_image", "ZImageTransformer2DModel", {"n_layers": 1, "n_refiner_layers": 1},
          z_image(4096, 256)),
    Model("HunyuanVideo", "480×832×81", "hunyuan_video", "HunyuanVideoTransformer3DModel", FLUX,
          (joint(20, 32760, 256, 3072, 128, "freqs_cis"), single(40, 32760, 256, 3072, 128, 32760))),
    Model("HunyuanVideo-1.5", "480×832×81", "hunyuan_video_15", "HunyuanVideo15Transformer3DModel", ONE,
          hunyuan15(32760, 1256)),
    Model("LTX-2", "512×768×121", "ltx2", "LTX2VideoTransformer3DModel", LTX, ltx2(6144, 126, 1024)),
    Model("Wan2.1 1.3B", "480×832×81", "wan", "WanTransformer3DModel", WAN_1, wan(30, 1536, 32760)),
    Model("Wan 14B", "480×832×81", "wan", "WanTransformer3DModel", ONE, wan(40, 5120, 32760)),
    Model("Wan2.2 5B", "704×1280×121", "wan_ti2v", "WanTransformer3DModel", WAN_5, wan(30, 3072, 27280, True)),
)  # fmt: skip


class Counter(TorchDispatchMode):
    """Adds up the FLOP of products and attention, and the bytes and number of everything else that launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0.0
        self.attention = 0.0
        self.bytes = 0
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.products += formula(*args, **(kwargs or {}), out_val=out)
        elif not func.is_view and func.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.empty_like):
            self.launched([args, kwargs, out])
        return out

    def launched(self, tensors: Any) -> None:
        """Count a kernel that reads or writes these tensors once; an expanded one is smaller in memory."""
        self.launches += 1
        for t in {id(t): t for t in tree_leaves(tensors) if isinstance(t, Tensor)}.values():
            sizes = [size for size, stride in zip(t.shape, t.stride(), strict=True) if stride]
            self.bytes += torch.Size(sizes).numel() * t.element_size()

    def launch(self, backend: str, name: str, like: Tensor, *args: Any) -> None:
        """A kernel of prefgrpo.ops."""
        self.launched(args)


class Attention(torch.autograd.Function):
    """Flash attention, which keeps q, k, v, its output and the log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counter.attention += 4.0 * q.numel() * k.shape[-2]
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out


class Norm(torch.autograd.Function):
    """torch's RMS norm, which is one kernel on a GPU and keeps its input and 1/rms."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        counter.launched([x, out])
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return out


@contextmanager
def as_on_a_gpu() -> Iterator[Counter]:
    """Context in which torch and prefgrpo.ops use the kernels of a GPU, which only count."""
    counter = Counter()

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return Attention.apply(counter, query, key, value)

    def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
        return Norm.apply(counter, x, weight)

    with ExitStack() as stack:
        for name in ("layernorm_modulate", "gated_residual", "qk_norm_rope"):
            module = importlib.import_module(f"prefgrpo.ops.{name}")
            stack.enter_context(mock.patch.object(module, "triton_or_torch", lambda *_: "triton"))
            stack.enter_context(mock.patch.object(module, "launch", counter.launch))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(F, "rms_norm", rms_norm))
        stack.enter_context(counter)
        yield counter


def published(model: Model) -> Any:
    """The denoiser with one block of each kind and the family's LoRA of rank 64."""
    with torch.device("meta"):
        net = getattr(diffusers, model.net)(**model.config).bfloat16().requires_grad_(False)
        targets = list(family(model.family).lora_targets)
        net.add_adapter(LoraConfig(r=64, lora_alpha=64, target_modules=targets), adapter_name="default")
    fuse_lora(net)
    for name, p in net.named_parameters():
        if "lora_" in name:
            p.data = p.data.float()
    for module in net.modules():
        if type(getattr(module, "processor", None)).__name__ == "JointAttnProcessor2_0":
            module.set_processor(JointAttention())
    return net


@contextmanager
def block_of(net: Any, kind: Kind, is_fused: bool) -> Iterator[nn.Module]:
    """The block, diffusers' own or fused."""
    block = kind.find(net)
    own = type(block)
    if is_fused and own.__name__ in FUSED:
        block.__class__ = fused(own)
    try:
        yield block
    finally:
        block.__class__ = own


def forward_costs(net: Any, kind: Kind, is_fused: bool) -> Counter:
    """Of one forward of a block without the LoRA."""
    net.disable_adapters()
    with block_of(net, kind, is_fused) as block, torch.no_grad(), as_on_a_gpu() as counter:
        block(**kind.inputs(net))
    net.enable_adapters()
    return counter


def kept_bytes(net: Any, kind: Kind, is_fused: bool) -> int:
    """Memory that autograd keeps of one forward, without weights and arguments that all blocks share."""
    inputs = kind.inputs(net)
    streams = ("x", "hidden_states", "encoder_hidden_states", "audio_hidden_states")
    shared = [*net.parameters(), *tree_leaves([v for name, v in inputs.items() if name not in streams])]
    memory = {t.untyped_storage()._cdata: 0 for t in shared if isinstance(t, Tensor)}
    alive: list[Any] = []
    pack = kept._pack

    def packed(t: Tensor) -> Any:
        found = pack(t)
        alive.append(found)
        for part in [found] if isinstance(found, Tensor) else tree_leaves(found.result.args):
            if isinstance(part, Tensor):
                storage = part.untyped_storage()
                memory.setdefault(storage._cdata, storage.nbytes())
        return found

    for name in streams:
        if isinstance(inputs.get(name), Tensor):
            inputs[name].requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(packed, kept._unpack)
    with block_of(net, kind, is_fused) as block, as_on_a_gpu(), hooks, mock.patch.object(kept, "_pack", packed):
        block(**inputs)
    return sum(memory.values())


def tables() -> tuple[list[str], list[str]]:
    """Rows of a forward's costs, and of what blocks keep."""
    fuse_rotary()
    costs = [
        "| denoiser | size | products, TFLOP | attention, TFLOP | others, GB | fused | launches | fused | share | won |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    memory = ["| denoiser | block | MiB | fused | ratio |", "|---|---|---:|---:|---:|"]
    for model in MODELS:
        net = published(model)
        own, ours = Counter(), Counter()
        for kind in model.kinds:
            for total, is_fused in ((own, False), (ours, True)):
                one = forward_costs(net, kind, is_fused)
                for field in ("products", "attention", "bytes", "launches"):
                    setattr(total, field, getattr(total, field) + kind.count * getattr(one, field))
            block = type(kind.find(net)).__name__
            before, after = (kept_bytes(net, kind, is_fused) / 2**20 for is_fused in (False, True))
            if block in FUSED:
                memory.append(f"| {model.name} | {kind.count} × {block} | {before:,.0f} | {after:,.0f} | {after / before:.2f} |")
        assert (own.products, own.attention) == (ours.products, ours.attention)
        slow = own.bytes / OWN
        whole = own.products / PRODUCTS + own.attention / ATTENTION + slow
        won = (slow - ours.bytes / OURS) / whole if ours.bytes < own.bytes else 0.0
        flop = f"{own.products / 1e12:.1f} | {own.attention / 1e12:.1f}"
        moved = f"{own.bytes / 1e9:,.0f} | {ours.bytes / 1e9:,.0f} | {own.launches:,} | {ours.launches:,}"
        costs.append(f"| {model.name} | {model.size} | {flop} | {moved} | {slow / whole:.0%} | {won:.0%} |")
    return costs, memory


if __name__ == "__main__":
    page = Path("docs/scale.md")
    costs, memory = tables()
    replace_block(page, "block costs", costs)
    replace_block(page, "block memory", memory)
