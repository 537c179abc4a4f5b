"""What fused blocks cost at the published sizes of every family, beside diffusers' own, on meta tensors.

    python -m benchmarks.block_costs            # writes the tables of docs/costs.md

Counted: FLOP of products and attention, bytes that everything else reads and writes, launches, bytes that a block keeps
for its backward pass with a LoRA, and what `fp8_base` changes in a forward with one. One block of each kind runs in
bf16, as published, without weights, and is multiplied by their number. A kernel moves its inputs and outputs once.
Products of a LoRA are bound by memory: they count as bytes. What is not counted is a constant with its source;
"measured" is one H100 80GB on 2026-11-27 (docs/benchmarks.md).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.blocks import replace_block
from prefgrpo.models import family
from prefgrpo.models.blocks import fused, random_inputs, recompute
from prefgrpo.models.fp8 import to_fp8
from prefgrpo.models.lora import fuse_lora
from prefgrpo.models.sd3 import JointAttention

PRODUCTS = 774e12
"""FLOP/s of a bf16 product of 8192³: measured."""
FP8 = 1.6
"""Speed of products in fp8 with row-wise scales, relative to bf16: measured."""
ATTENTION = 0.35 * 989e12
"""FLOP/s of FlashAttention-2 on an H100: 35 % (arXiv:2407.08608, abstract) of its peak of 989 TFLOP/s (data sheet)."""
ATTENTION_3 = 740e12
"""FLOP/s of FlashAttention-3 at best (arXiv:2407.08608, abstract)."""
RANK = 64
"""Rank of the LoRA; a product of so few channels, or of q's, k's and v's together, is one of its own."""
FEW = 64
"""Products of so few rows, of modulation and no tokens, take as long as it takes to read their weights."""
OWN = 2.0e12
"""Bytes/s of torch's pointwise kernels: x + gate · y on [2, 4608, 3072], five tensors of 57 MB, measured .139 ms."""
OURS = 2.5e12
"""Bytes/s of fused kernels: LayerNorm and modulation on the same, two tensors, measured .045 ms (the prototype)."""
FORWARDS = {"diffusers": 393e-3, "fused, the prototype": 297e-3, "torch.compile": 283e-3}
"""Seconds of a forward of FLUX.1's 57 blocks at 1024², batch 2: measured."""


class Kind(NamedTuple):
    """Blocks of one kind in a forward."""

    number: int | str
    """How many, or their name in the denoiser's configuration."""
    place: str
    """Name of the first one in the denoiser."""
    tokens: tuple[int, int]
    """Tokens of latents and of text."""


class Model(NamedTuple):
    """A published denoiser at a published size, batch 1: diffusers' defaults, except for `config`."""

    name: str
    size: str
    family: str
    net: str
    config: dict[str, Any]
    kinds: tuple[Kind, ...]

    def count(self, kind: Kind) -> int:
        """How many blocks of a kind a forward has."""
        if isinstance(kind.number, int):
            return kind.number
        default = inspect.signature(getattr(diffusers, self.net).__init__).parameters[kind.number].default
        return self.config.get(kind.number, default)


FIRST = "transformer_blocks.0"


def both(latents: int, text: int) -> tuple[Kind, ...]:
    """Double-stream blocks, then single-stream ones."""
    return Kind("num_layers", FIRST, (latents, text)), Kind("num_single_layers", f"single_{FIRST}", (latents, text))


FLUX = "FluxTransformer2DModel"
FLUX2 = "Flux2Transformer2DModel"
QWEN = "QwenImageTransformer2DModel"
WAN = "WanTransformer3DModel"
SD3 = "SD3Transformer2DModel"
SD35 = {"attention_head_dim": 64, "qk_norm": "rms_norm"}
IMAGE = 64 * 64
"""Tokens of 1024² pixels, 16 × 16 each."""
CLIP = 21 * 30 * 52
"""Tokens of 480×832×81, 16 × 16 pixels and 4 frames each, with the first frame alone."""
PROMPT = 256
"""Tokens of a text that is as long as its prompt; other families pad, to the number in their pipeline."""
MODELS = (
    Model("FLUX.1", "1024²", "flux", FLUX, {}, both(IMAGE, 512)),
    Model("FLUX.1-Kontext", "1024² from 1024²", "flux_kontext", FLUX, {}, both(2 * IMAGE, 512)),
    Model("FLUX.2-dev", "1024²", "flux2", FLUX2, {}, both(IMAGE, 512)),
    # diffusers' scripts/convert_flux2_to_diffusers.py
    Model("FLUX.2-klein-4B", "1024²", "flux2_klein", FLUX2,
          {"num_attention_heads": 24, "num_layers": 5, "num_single_layers": 20}, both(IMAGE, 512)),
    Model("FLUX.3", "1024²", "flux3", "Flux3Transformer2DModel", {}, (
        Kind("num_single_layers", f"single_{FIRST}", (IMAGE, 160)),
        Kind("num_layers", "mode_blocks.image.0", (IMAGE, 0)), Kind("num_layers", "txt_mode_blocks.0", (160, 0)),
    )),
    Model("Qwen-Image", "1024²", "qwen_image", QWEN, {}, (Kind("num_layers", FIRST, (IMAGE, PROMPT)),)),
    # the language model sees the source in 37 × 37 tokens of 28² pixels
    Model("Qwen-Image-Edit", "1024² from 1024²", "qwen_image_edit", QWEN, {},
          (Kind("num_layers", FIRST, (2 * IMAGE, 37 * 37 + PROMPT)),)),
    Model("Qwen-Image-2.1", "1024²", "qwen_image_21", "QwenImage21Transformer2DModel", {},
          (Kind("num_layers", FIRST, (IMAGE, PROMPT)),)),
    # transformer/config.json: 24 layers, the first 13 with a second attention; CLIP's 77 tokens and T5's 256
    Model("SD3.5-medium", "1024²", "sd3", SD3, SD35 | {"num_attention_heads": 24, "dual_attention_layers": (0,)},
          (Kind(13, FIRST, (IMAGE, 77 + 256)), Kind(11, "transformer_blocks.1", (IMAGE, 77 + 256)))),
    Model("SD3.5-large", "1024²", "sd3", SD3, SD35 | {"num_attention_heads": 38, "num_layers": 38},
          (Kind("num_layers", FIRST, (IMAGE, 77 + 256)),)),
    Model("Krea-2", "1024²", "krea2", "Krea2Transformer2DModel", {}, (Kind("num_layers", FIRST, (IMAGE, PROMPT)),)),
    Model("Z-Image", "1024²", "z_image", "ZImageTransformer2DModel", {},
          (Kind("n_layers", "layers.0", (IMAGE, PROMPT)), Kind("n_refiner_layers", "layers.0", (IMAGE, 0)))),
    Model("HunyuanVideo", "480×832×81", "hunyuan_video", "HunyuanVideoTransformer3DModel", {}, both(CLIP, PROMPT)),
    Model("HunyuanVideo-1.5", "480×832×81", "hunyuan_video_15", "HunyuanVideo15Transformer3DModel", {},
          (Kind("num_layers", FIRST, (CLIP, PROMPT)),)),
    # diffusers' scripts/convert_wan_to_diffusers.py
    Model("Wan2.1 1.3B", "480×832×81", "wan", WAN, {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
          (Kind("num_layers", "blocks.0", (CLIP, 512)),)),
    Model("Wan 14B", "480×832×81", "wan", WAN, {}, (Kind("num_layers", "blocks.0", (CLIP, 512)),)),
    # Wan-Video/Wan2.2, wan_ti2v_5B.py; a token is 32 × 32 pixels and 4 frames
    Model("Wan2.2 5B", "704×1280×121", "wan_ti2v", WAN,
          {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30},
          (Kind("num_layers", "blocks.0", (31 * 22 * 40, 512)),)),
)  # fmt: skip
"""Sizes that are not in `config` are the defaults of diffusers' class, which are those of the published model."""


META = torch.device("meta")


def inputs_of(model: Model, kind: Kind, block: nn.Module, device: torch.device = META) -> dict[str, Any]:
    """Arguments in bf16 except for rotary tables, by default without memory."""
    given = random_inputs(block, type(block).__name__, device, 1, kind.tokens)
    if model.family == "wan_ti2v":  # a time for each token
        given["temb"] = given["temb"][:, None].repeat(1, kind.tokens[0], 1, 1)
    floats = {k: t.bfloat16() for k, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}
    return given | floats


FREE = tuple(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "new_empty", "detach", "promote_types", "_unsafe_view")
)
"""Operators without a kernel, besides views."""


class Counter(TorchDispatchMode):
    """Adds up the FLOP of products and attention, and the bytes and number of all other kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0.0
        self.attention = 0.0
        self.bytes = 0
        self.kernels = 0
        self.few = 0
        """Bytes that products of FEW rows read."""
        self.quantised = 0
        """Bytes, among all, of casting rows to fp8."""
        self.read_twice = 0
        """Bytes of these that `layernorm_modulate` had in registers."""
        self._modulated: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        out = func(*args, **(kwargs or {}))
        is_sum = func.overloadpacket is torch.ops.aten.addmm_
        if (is_sum or func.overloadpacket is torch.ops.aten.mm) and min(args[-1].shape) <= 3 * RANK:
            self.launched([args, kwargs, out])
            self.bytes += out.numel() * out.element_size() * is_sum  # reads what it writes, too
        elif formula := flop_registry.get(func.overloadpacket):
            self.products += formula(*args, **(kwargs or {}), out_val=out)
            if len(out) <= FEW:
                self.few += sum(t.nbytes for t in args if isinstance(t, Tensor))
        elif not func.is_view and func.overloadpacket not in FREE:
            self.launched([args, kwargs, out])
        return out

    def launched(self, tensors: Any) -> None:
        """Count a kernel that reads or writes these tensors once; an expanded one is smaller in memory."""
        self.kernels += 1
        for t in {id(t): t for t in tree_leaves(tensors) if isinstance(t, Tensor)}.values():
            sizes = [size for size, stride in zip(t.shape, t.stride(), strict=True) if stride]
            self.bytes += torch.Size(sizes).numel() * t.element_size()

    def add(self, other: Counter, times: int) -> None:
        """Count what another has counted, so many times."""
        self.products += times * other.products
        self.attention += times * other.attention
        self.bytes += times * other.bytes
        self.kernels += times * other.kernels
        self.few += times * other.few
        self.quantised += times * other.quantised
        self.read_twice += times * other.read_twice

    def launch(self, backend: str, name: str, like: Tensor, *args: Any) -> None:
        """A kernel of prefgrpo.ops."""
        before = self.bytes
        self.launched(args)
        if name == "layernorm_modulate":
            self._modulated.append(StorageWeakRef(args[-1].untyped_storage()))  # not kept alive
        if name == "quantise_rows":
            self.quantised += self.bytes - before
            is_modulated = any(like.untyped_storage()._cdata == storage.cdata for storage in self._modulated)
            self.read_twice += like.nbytes * is_modulated


class Attention(torch.autograd.Function):
    """Flash attention, which keeps q, k, v, its output and the log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """4 FLOP per query, key and channel."""
        counter.attention += 4.0 * q.numel() * k.shape[-2]
        out = torch.empty_like(q)
        ctx.counter = counter
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Five products instead of two."""
        q, k, v, *_ = ctx.saved_tensors
        ctx.counter.attention += 10.0 * q.numel() * k.shape[-2]
        return None, *map(torch.empty_like, (q, k, v))


class Norm(torch.autograd.Function):
    """torch's RMS norm, which is one kernel on a GPU and keeps its input and 1/rms."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, x: Tensor, weight: Tensor) -> Tensor:
        """One kernel."""
        out = torch.empty_like(x)
        counter.launched([x, out])
        ctx.counter = counter
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """One kernel."""
        x, _ = ctx.saved_tensors
        out = torch.empty_like(x)
        ctx.counter.launched([x, grad, out])
        return None, out, None


@contextmanager
def as_on_a_gpu() -> Iterator[Counter]:
    """Context in which torch and prefgrpo.ops use the kernels of a GPU, which only count."""
    counter = Counter()

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return Attention.apply(counter, query, key, value)

    def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
        return Norm.apply(counter, x, weight)

    with ExitStack() as stack:
        for name in ("layernorm_modulate", "gated_residual", "qk_norm_rope", "low_rank_gelu", "quantise_rows"):
            module = importlib.import_module(f"prefgrpo.ops.{name}")
            stack.enter_context(mock.patch.object(module, "triton_or_torch", lambda *_: "triton"))
            stack.enter_context(mock.patch.object(module, "launch", counter.launch))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(F, "rms_norm", rms_norm))
        stack.enter_context(counter)
        yield counter


def published(model: Model) -> Any:
    """The denoiser with one block of each kind and the family's LoRA."""
    make = getattr(diffusers, model.net)
    few = {"num_layers": 3, "num_single_layers": 1, "n_layers": 1, "n_refiner_layers": 1}
    few = {name: count for name, count in few.items() if name in inspect.signature(make.__init__).parameters}
    with torch.device("meta"):
        net = make(**(model.config | few)).bfloat16().requires_grad_(False)
        targets = list(family(model.family).lora_targets)
        net.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets), adapter_name="default")
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
    block = net.get_submodule(kind.place)
    own = type(block)
    if is_fused:
        block.__class__ = fused(own)
    try:
        yield block
    finally:
        block.__class__ = own


def to_fp8_base(block: nn.Module, device: torch.device = META) -> None:
    """The layers of a block as `fp8_base` has them, in place."""
    for name, layer in block.named_modules():
        if type(layer) is nn.Linear and "lora_" not in name:
            to_fp8(layer, device, torch.bfloat16)


STREAMS = {"x", "hidden_states", "encoder_hidden_states"}
"""Arguments that each block gets from the block before."""


def forward_costs(model: Model, net: Any, kind: Kind, is_fused: bool, with_lora: bool = False) -> Counter:
    """Costs of all blocks of a kind in a forward: the first, and others whose streams come from a block like them.

    Casts of the LoRA do not count: they are made once per change.
    """
    warm = inputs_of(model, kind, net.get_submodule(kind.place))
    inputs = inputs_of(model, kind, net.get_submodule(kind.place))
    if not with_lora:
        net.disable_adapters()
    cost = Counter()
    with block_of(net, kind, is_fused) as block, torch.no_grad():
        with as_on_a_gpu():
            block(**warm)
        for times in (1, model.count(kind) - 1):
            with as_on_a_gpu() as counter:
                out = block(**inputs)
            cost.add(counter, times)
            inputs = streams_of(out, inputs)
    net.enable_adapters()
    return cost


def streams_of(out: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The next block's arguments: streams have different lengths."""
    if isinstance(out, Tensor):
        return inputs
    by_length = {t.shape[1]: t for t in out}
    return inputs | {name: by_length[inputs[name].shape[1]] for name in ("hidden_states", "encoder_hidden_states")}


def kept_bytes(model: Model, net: Any, kind: Kind, is_fused: bool) -> int:
    """Memory that autograd keeps of a block after another, without weights and what all blocks share."""
    inputs = inputs_of(model, kind, net.get_submodule(kind.place))
    streams = {name: t for name, t in inputs.items() if name in STREAMS and t is not None}
    memory = {p.untyped_storage()._cdata: 0 for p in net.parameters()}
    alive: list[Any] = []

    def packed(t: Tensor) -> Any:
        found = recompute._pack(t)
        alive.append(found)
        for part in [found] if isinstance(found, Tensor) else tree_leaves(found.result.args):
            if isinstance(part, Tensor):
                storage = part.untyped_storage()
                memory.setdefault(storage._cdata, storage.nbytes())
        return found

    graph = torch.autograd.graph
    hooks = partial(graph.saved_tensors_hooks, packed, recompute._unpack)
    of_block = mock.patch.object(graph, "saved_tensors_hooks", lambda *_: hooks())
    with block_of(net, kind, is_fused) as block, as_on_a_gpu(), hooks(), of_block:
        for _ in range(2):
            memory = dict.fromkeys(memory, 0)
            fresh = {k: torch.empty_like(t, requires_grad=True) for k, t in streams.items()}
            alive.append(block(**(inputs | fresh)))
    return sum(memory.values())


class Tables(NamedTuple):
    """Rows of docs/costs.md."""

    time: list[str]
    """Where the time of a FLUX forward goes, and what would take less."""
    costs: list[str]
    fp8: list[str]
    """What `fp8_base` changes."""
    memory: list[str]


def times(cost: Counter) -> list[str]:
    """Rows for FLUX.1, per image; cost: that of its blocks in diffusers."""
    products = 1e3 * cost.products / PRODUCTS
    attention = 1e3 * cost.attention / ATTENTION
    rows = ["| way | products | attention | the rest | forward, ms |", "|---|---:|---:|---:|---:|"]
    for way, seconds in FORWARDS.items():
        whole = 1e3 * seconds / 2
        rest = whole - products - attention
        rows.append(f"| {way}, measured | {products:.0f} | {attention:.0f} | {rest:.0f} | {whole:.1f} |")
    rest = 1e3 * FORWARDS["fused, the prototype"] / 2 - products - attention
    faster = 1e3 * cost.attention / ATTENTION_3
    whole = products + faster + rest
    rows.append(f"| fused, with FlashAttention-3, counted | {products:.0f} | {faster:.0f} | {rest:.0f} | {whole:.1f} |")
    return rows


def in_fp8(model: Model, net: Any, bf16: Counter) -> list[str]:
    """A row of what `fp8_base` changes; bf16: cost of a forward with a LoRA without it. Changes `net`."""
    with as_on_a_gpu():
        for kind in model.kinds:
            to_fp8_base(net.get_submodule(kind.place))
    fp8 = Counter()
    for kind in model.kinds:
        fp8.add(forward_costs(model, net, kind, True, with_lora=True), 1)
    rates = (bf16, PRODUCTS), (fp8, FP8 * PRODUCTS)
    cells = [model.name, f"{bf16.few / 1e9:.1f}", f"{fp8.quantised / 1e9:.1f}", f"{fp8.read_twice / 1e9:.1f}"]
    cells += [f"{bf16.kernels:,}", f"{fp8.kernels:,}"]
    for attention in (ATTENTION, ATTENTION_3):
        times_of = [1e3 * (c.products / rate + c.attention / attention + (c.bytes + c.few) / OURS) for c, rate in rates]
        before, after = times_of
        cells += [f"{before:,.1f}", f"{after:,.1f}", f"{before / after:.2f}"]
    return cells


def tables() -> Tables:
    """The tables of all models."""
    columns = ("denoiser", "size", "tokens", "products, TFLOP", "attention, TFLOP", "others, GB", "fused", "LoRA")
    costs = [f"| {' | '.join(columns)} | launches | fused | share | won |", "|---|---|" + "---:|" * 10]
    columns = ("denoiser", "modulation, GB", "rows, GB", "of these twice", "launches", "fp8", "forward, ms", "fp8")
    fp8 = [f"| {' | '.join(columns)} | ratio | with FA3, ms | fp8 | ratio |", "|---|" + "---:|" * 11]
    memory = ["| denoiser | block | MiB | fused | ratio |", "|---|---|---:|---:|---:|"]
    flux = Counter()
    for model in MODELS:
        net = published(model)
        own = Counter()
        ours = Counter()
        with_lora = Counter()
        for kind in model.kinds:
            own.add(forward_costs(model, net, kind, False), 1)
            ours.add(forward_costs(model, net, kind, True), 1)
            with_lora.add(forward_costs(model, net, kind, True, with_lora=True), 1)
            block = type(net.get_submodule(kind.place)).__name__
            before, after = (kept_bytes(model, net, kind, is_fused) / 2**20 for is_fused in (False, True))
            sizes = f"{before:,.0f} | {after:,.0f} | {after / before:.2f}"
            memory.append(f"| {model.name} | {model.count(kind)} × `{block}` | {sizes} |")
        if model is MODELS[0]:
            flux.add(own, 1)
        slow = own.bytes / OWN
        whole = own.products / PRODUCTS + own.attention / ATTENTION + slow
        won = (slow - ours.bytes / OURS) / whole
        tokens = " + ".join(f"{count:,}" for count in model.kinds[0].tokens)
        flop = f"{own.products / 1e12:.1f} | {own.attention / 1e12:.1f}"
        moved = [own.bytes, ours.bytes, with_lora.bytes - ours.bytes]
        cells = [model.name, model.size, tokens, flop, *(f"{count / 1e9:,.0f}" for count in moved)]
        cells += [f"{own.kernels:,}", f"{ours.kernels:,}", f"{slow / whole:.0%}", f"{won:.0%}"]
        costs.append(f"| {' | '.join(cells)} |")
        fp8.append(f"| {' | '.join(in_fp8(model, net, with_lora))} |")
    return Tables(times(flux), costs, fp8, memory)


if __name__ == "__main__":
    for name, rows in tables()._asdict().items():
        replace_block(Path("docs/costs.md"), f"block {name}", rows)
