"""Counts the copies and transfers of one Ulysses attention, in a fused block and in diffusers' own.

    python -m benchmarks.ulysses_copies

Of one process of eight, on tensors without memory (torch's meta device) and with a group that sends nothing; nothing is
measured. Copies are counted in passes over a tensor as large as the queries; torch's meta kernels say which layout its
flash attention gives its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models.transformers.transformer_flux import FluxAttention
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from prefgrpo.models.blocks import components

PROCESSES = 8
SAMPLES = 2
COPIES = {"clone", "copy_", "cat", "_to_copy"}
KINDS = {"all_to_all_single": "start", "wait_tensor": "wait", "addmm": "product", "mm": "product"}
"""Ops of `Counter.events`."""


class Counter(TorchDispatchMode):
    """Counts the elements that are copied, and notes what is started and waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one op."""
        out = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if name in COPIES:
            self.copied += out.numel()
        if name in KINDS:
            self.events.append(KINDS[name])
        return out


class Count(NamedTuple):
    """Counts of one direction of an attention."""

    copies: float
    transfers: int
    events: list[str]


@contextmanager
def as_on_eight_gpus() -> Iterator[Any]:
    """Context in which ops and attention are a GPU's kernels; gives the configuration of a process of eight."""
    dist.init_process_group("fake", rank=0, world_size=PROCESSES, store=FakeStore())
    config = ContextParallelConfig(ulysses_degree=PROCESSES)
    mesh = init_device_mesh("cpu", (1, PROCESSES), mesh_dim_names=("ring", "ulysses"))
    config.setup(0, PROCESSES, torch.device("meta"), mesh)

    def flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return out

    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for name in ("layernorm_modulate", "qk_norm_rope"):
            module = import_module(f"prefgrpo.ops.{name}")
            stack.enter_context(mock.patch.object(module, "triton_or_torch", lambda *_: "triton"))
            stack.enter_context(mock.patch.object(module, "launch", lambda *_: None))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", flash))
        yield SimpleNamespace(context_parallel_config=config)


def attentions(channels: int = 128) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Wan 14B's self-attention at 480×832×81 and FLUX.1's joint attention at 1024², with the tokens of one process;
    channels: of a head."""
    wan = WanAttention(40 * channels, heads=40, dim_head=channels, processor=WanAttnProcessor())
    width = 24 * channels
    flux = FluxAttention(width, heads=24, dim_head=channels, added_kv_proj_dim=width, context_pre_only=False)
    return {"Wan 14B": (wan, (32760 // PROCESSES,)), "FLUX.1": (flux, (512 // PROCESSES, 4096 // PROCESSES))}


def run(attn: Any, inputs: list[Tensor], tables: Any) -> list[Tensor]:
    """The outputs of the fused block's attention."""
    if len(inputs) == 1:
        return [attn.to_out[0](components.self_attention(attn, inputs[0], tables))]
    modulation = [inputs[0].new_zeros(SAMPLES, inputs[0].shape[2])] * 3
    text, latents = (components.Stream(x, modulation, nn.Identity()) for x in inputs)
    return list(components.joint_attention(attn, latents, text, tables, None))


def count(name: str, ours: bool) -> tuple[Count, Count]:
    """Of forward and backward, of a frozen attention whose input has a gradient."""
    with as_on_eight_gpus() as parallel, torch.device("meta"), ExitStack() as stack:
        attn, tokens = attentions()[name]
        attn.bfloat16().requires_grad_(False)
        attn.processor._attention_backend = "_native_flash"
        attn.processor._parallel_config = parallel
        if not ours:
            stack.enter_context(mock.patch.object(components, "ulysses", lambda *_: None))
        width = attn.to_q.in_features
        inputs = [torch.empty(SAMPLES, n, width, dtype=torch.bfloat16).requires_grad_() for n in tokens]
        tables = tuple(torch.empty(sum(tokens), 128) for _ in range(2))
        with Counter() as forward:
            outputs = run(attn, inputs, tables)
        upstream = [torch.empty_like(out) for out in outputs]
        with Counter() as backward:
            torch.autograd.grad(outputs, inputs, upstream)
    full = SAMPLES * sum(tokens) * width
    found = [Count(c.copied / full, c.events.count("start"), c.events) for c in (forward, backward)]
    return found[0], found[1]


def main() -> None:
    """Print the table of docs/scale.md."""
    head = "attention", "code", "copies forward", "all-to-alls", "copies backward", "all-to-alls"
    print("| " + " | ".join(head) + " |")
    print("|---|---|---:|---:|---:|---:|")
    for name in ("Wan 14B", "FLUX.1"):
        for ours in (False, True):
            cells = [f"{c.copies:.0f} | {c.transfers}" for c in count(name, ours)]
            print(f"| {name} | {'fused' if ours else 'diffusers'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
