"""What `fp8_base` takes off GPU memory, at the published sizes of every family, counted on meta tensors.

    python -m benchmarks.fp8_memory            # writes the tables of docs/costs.md and docs/recipes.md

Base: the bytes of all of a denoiser's weights. Step: the largest sum of tensors that are alive in forward and backward
of its blocks, fused, with a LoRA of rank 64, as allocated one after the other; weights, and 16 bytes per parameter of
the LoRA, are added. Not counted: the VAE, stored samples, embedders and what the allocator loses between tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.block_costs import META, MODELS, RANK, Model, as_on_a_gpu, block_of, published, streams_of
from benchmarks.blocks import replace_block
from prefgrpo.models import family
from prefgrpo.models.blocks import random_inputs
from prefgrpo.models.fp8 import to_fp8
from prefgrpo.models.weights import Weights
from prefgrpo.ops import quantise_rows as quantise
from prefgrpo.parallel.gradient_checkpointing import checkpoint_blocks

GIB = 2**30
CARDS = {"4090, 24 GB": 24e9, "5090, 32 GB": 32e9, "L40S, 48 GB": 48e9, "80 GB": 80e9}
"""Bytes as the makers count them."""
RESERVED = 1.5e9
"""Bytes of a card that a process cannot use for these: CUDA's context, the allocator's gaps, what is not counted."""


class Live(TorchDispatchMode):
    """The bytes of tensors that are alive, and the most that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note what it allocates."""
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                if storage not in self._known:
                    self._known.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


class Sizes(NamedTuple):
    """Bytes of a denoiser."""

    bf16: int
    fp8: int
    lora: int
    """Parameters of a LoRA of rank 64."""


class _Outline(Weights):
    """What `Weights.blocks` needs of an adapter."""

    def __init__(self, net: Any) -> None:
        self.transformer = net


def sizes(model: Model) -> Sizes:
    """Sizes of the whole denoiser: what diffusers keeps in fp32 has 4 bytes, a weight of the blocks' Linear layers
    1."""
    with META:
        net: Any = getattr(diffusers, model.net)(**model.config)
    in_fp32 = set(net._keep_in_fp32_modules or ())
    linear = {}
    for block in _Outline(net).blocks(net):
        linear |= {id(m.weight): m for m in block.modules() if type(m) is nn.Linear}
    bf16 = 0
    fp8 = 0
    for name, p in net.named_parameters():
        width = 4 if in_fp32 & set(name.split(".")) else 2
        bf16 += width * p.numel()
        fp8 += p.numel() + 4 * len(p) if id(p) in linear and width == 2 else width * p.numel()
    targets = tuple(f".{target}" for target in family(model.family).lora_targets)
    wrapped = [m for name, m in net.named_modules() if isinstance(m, nn.Linear) and f".{name}".endswith(targets)]
    return Sizes(bf16, fp8, RANK * sum(m.in_features + m.out_features for m in wrapped))


@contextmanager
def in_fp8(net: nn.Module) -> Iterator[None]:
    """The net's frozen Linear layers in fp8 inside."""
    for module in [m for m in net.modules() if type(m) is nn.Linear and not m.weight.requires_grad]:
        to_fp8(module, META, torch.bfloat16)
    yield


def activations(model: Model, fp8: bool, recomputed: bool, batch: int, tokens: tuple[int, int] | None = None) -> int:
    """Most bytes of tensors, without weights, in forward and backward of a batch through all blocks.

    tokens: latents and text, instead of the model's.
    """
    net = published(model)
    outs: list[Tensor] = []
    with ExitStack() as stack:
        if fp8:
            stack.enter_context(in_fp8(net))
        first = {kind.place: kind for kind in model.kinds}
        blocks = {place: stack.enter_context(block_of(net, kind, True)) for place, kind in first.items()}
        if recomputed:
            checkpoint_blocks(blocks.values(), 1.0)
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(mock.patch.object(quantise, "triton_or_torch", lambda *_: "triton"))
        stack.enter_context(mock.patch.object(quantise, "launch", lambda *_: None))
        live = stack.enter_context(Live())
        for kind in model.kinds:
            block: Any = blocks[kind.place]
            inputs = random_inputs(block, type(block).__mro__[1].__name__, META, batch, tokens or kind.tokens)
            floats = {k: t for k, t in inputs.items() if isinstance(t, Tensor) and t.is_floating_point()}
            inputs |= {k: t.bfloat16() for k, t in floats.items()}
            del floats
            for _ in range(model.count(kind)):
                out: Any = block(**inputs)
                inputs = streams_of(out, inputs)
            last = [out] if isinstance(out, Tensor) else [t for t in out if t is not None]
            outs += last
            del out, inputs, last
        torch.autograd.backward(outs, [torch.empty_like(t) for t in outs])
    return live.most


FLUX_720 = (45 * 45, 512)
"""Tokens of `lora_flux`: 720² pixels and the text."""
WAN22 = "Wan2.2 A14B"
LTX2 = Model("LTX-2", "", "ltx2", "LTX2VideoTransformer3DModel", {}, ())


def base_table() -> list[str]:
    """Bytes of every denoiser."""
    rows = ["| denoiser | bf16, GiB | fp8, GiB | ratio |", "|---|---:|---:|---:|"]
    for model in (*MODELS, LTX2):
        found = sizes(model)
        rows.append(f"| {model.name} | {found.bf16 / GIB:.1f} | {found.fp8 / GIB:.1f} | {found.fp8 / found.bf16:.3f} |")
    return rows


def step_table() -> list[str]:
    """A training step of FLUX.1 as in `lora_flux`: 720², a batch of 2."""
    flux = MODELS[0]
    found = sizes(flux)
    rows = ["| recomputed | base in bf16, GiB | in fp8, GiB | ratio |", "|---|---:|---:|---:|"]
    for name, recomputed in {"no block": False, "all blocks": True}.items():
        held = {fp8: activations(flux, fp8, recomputed, 2, FLUX_720) + 16 * found.lora for fp8 in (False, True)}
        before = held[False] + found.bf16
        after = held[True] + found.fp8
        rows.append(f"| {name} | {before / GIB:.1f} | {after / GIB:.1f} | {after / before:.2f} |")
    return rows


def card_table() -> list[str]:
    """The smallest GPU for a LoRA of every model: one sample per batch, with guidance two, all blocks recomputed."""
    rows = [
        "| denoiser | a sample | base, GiB | step, GiB | smallest GPU | with a base in bf16 |",
        "|---|---|---:|---:|---|---|",
    ]
    wan = next(model for model in MODELS if model.name == "Wan 14B")
    for model in (*MODELS, wan._replace(name=WAN22)):
        found = sizes(model)
        experts = 2 if model.name == WAN22 else 1
        batch = 1 if family(model.family).cfg is None else 2
        base = {fp8: experts * (found.fp8 if fp8 else found.bf16) for fp8 in (False, True)}
        step = {fp8: activations(model, fp8, True, batch) + 16 * experts * found.lora + base[fp8] for fp8 in base}
        cards = {}
        for fp8, needed in step.items():
            fitting = [name for name, memory in CARDS.items() if needed + RESERVED <= memory]
            cards[fp8] = fitting[0] if fitting else "shards"
        cells = [
            model.name,
            model.size,
            f"{base[True] / GIB:.1f}",
            f"{step[True] / GIB:.1f}",
            cards[True],
            cards[False],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    replace_block(Path("docs/costs.md"), "fp8 base", base_table())
    replace_block(Path("docs/costs.md"), "fp8 step", step_table())
    replace_block(Path("docs/recipes.md"), "smallest gpu", card_table())
