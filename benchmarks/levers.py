"""`python -m benchmarks.levers PART`: what single changes gain in a step on one GPU, before and after in one process;
one JSON line per comparison, for scripts/gpu_check.sh.

    fused      blocks of FLUX.1, Qwen-Image and Wan 14B with their LoRA: diffusers' own and fused
    fp8        the same blocks: diffusers' own, fused, and fused with `fp8_base`; and its rows and products alone
    attention  torch's FlashAttention-2 beside FlashAttention-3 and 4, at the sizes of FLUX and of Wan under Ulysses 8
    recompute  a recomputed Wan block: everything computed again, and with attention's output kept
    traffic    GELU beside attention and with its LoRA, and the formulas that these replace
    ulysses    one attention of eight processes whose transfers move nothing: diffusers' layout and the fused blocks'

Published widths and random weights, bf16. Before two ways are timed, their results are compared: bit for bit where they
promise that (with and without gradient, and everything but `fused`, `attention` and the GELU with a LoRA), otherwise
within the limits of a run's start. The lines are also written to results/PART_DEVICE.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import ulysses_copies
from benchmarks.block_costs import MODELS, Kind, Model, block_of, inputs_of, published, to_fp8_base
from benchmarks.experiments.trials import report
from prefgrpo.config.recipe import ConfigError
from prefgrpo.models.attention import LIMIT, Case, activate, attention_of_a_run, kernel_errors, relative_error
from prefgrpo.models.blocks import check, components, fused
from prefgrpo.models.blocks.joined import beside_gelu
from prefgrpo.models.fp8 import multiplies_in_fp8
from prefgrpo.ops import qk_norm_rope
from prefgrpo.ops.low_rank_gelu import low_rank_gelu
from prefgrpo.ops.quantise_rows import dequantise_rows, quantise_rows, reference_quantise
from prefgrpo.parallel.gradient_checkpointing import checkpoint_blocks, keep_attention

ROUNDS = 10
"""Timed calls, after two that are not."""
TIMED = ("FLUX.1", "Qwen-Image", "Wan 14B")
SMALL: dict[str, dict[str, Any]] = {
    "FLUX.1": {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)},
    "Qwen-Image": {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)},
    "Wan 14B": {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64},
}
"""Widths of the rehearsal on a CPU."""
CASES = {"FLUX 1024² ×2": Case(2, 4608, 4608, 24, 128), "Wan 480p, Ulysses 8": Case(1, 32760, 32760, 5, 128)}
BF16 = torch.bfloat16
Call = Callable[[], list[Tensor]]


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call, on a GPU the device's own."""
    times = []
    for k in range(2 + ROUNDS):
        if device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            spent = begin.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            call()
            spent = time.perf_counter() - started
        if k >= 2:
            times.append(spent)
    return statistics.median(times)


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all bits are equal, of results that are finite."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs)


def compared(ways: dict[str, Call], device: torch.device, promised: bool = True) -> dict[str, Any]:
    """Seconds of each way; an error if one has other bits than the first although that is promised."""
    first, *others = (call() for call in ways.values())
    line: dict[str, Any] = {}
    if promised and not all(equal(first, other) for other in others):
        line["error"] = f"{' and '.join(ways)} have other bits"
    return line | {f"{way}, s": seconds(call, device) for way, call in ways.items()}


# ---- blocks ---------------------------------------------------------------------------------------------------------


def of_model(name: str, tiny: bool) -> Model:
    """A model of block_costs, with small widths and few tokens for a rehearsal."""
    model = next(m for m in MODELS if m.name == name)
    if not tiny:
        return model
    kinds = tuple(kind._replace(tokens=(16, 8)) for kind in model.kinds)
    return model._replace(config=model.config | SMALL[name], kinds=kinds)


def filled(module: nn.Module, device: torch.device) -> nn.Module:
    """A module without memory on the device, with random weights whose products keep the size of their input."""
    module.to_empty(device=device)
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return module


def results(block: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """A block's outputs."""
    out = block(**inputs)
    return [t for t in ([out] if isinstance(out, Tensor) else out) if t is not None]


def gradients(block: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Gradients of a block's streams and LoRA, for random upstream ones."""
    names = [name for name in ("hidden_states", "encoder_hidden_states") if inputs.get(name) is not None]
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    trained = [p for name, p in block.named_parameters() if "lora_" in name]
    outputs = results(block, inputs | leaves)
    upstream = [torch.arange(t.numel(), device=t.device).cos().view_as(t).to(t.dtype) for t in outputs]
    found = torch.autograd.grad(outputs, [*leaves.values(), *trained], upstream, allow_unused=True)
    return [g for g in found if g is not None]


@torch.no_grad()
def forward(block: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """A block's outputs without gradient."""
    return results(block, inputs)


class Timed(NamedTuple):
    """A block of a timed denoiser."""

    net: nn.Module
    kind: Kind
    block: nn.Module
    inputs: dict[str, Any]
    line: dict[str, Any]
    """Which block it is."""


def timed_blocks(device: torch.device, tiny: bool) -> Iterator[Timed]:
    """One block of each kind."""
    for name in TIMED:
        model = of_model(name, tiny)
        net = filled(published(model), device)
        for kind in model.kinds:
            block = net.get_submodule(kind.place)
            line = {"denoiser": name, "block": type(block).__name__, "tokens": list(kind.tokens)}
            yield Timed(net, kind, block, inputs_of(model, kind, block, device), line)


def blocks(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """A line for each kind of block."""
    for net, kind, block, inputs, line in timed_blocks(device, tiny):
        check(net, block, fused(type(block)), BF16, device)
        for is_fused, way in ((False, "diffusers"), (True, "fused")):
            with block_of(net, kind, is_fused) as chosen:
                line |= timed(chosen, inputs, way, device)
        yield line


def timed(block: nn.Module, inputs: dict[str, Any], way: str, device: torch.device) -> dict[str, Any]:
    """Seconds of a block's forward, and of that with its backward, after an error if a gradient changes its bits."""
    line: dict[str, Any] = {}
    if not equal(forward(block, inputs), [t.detach() for t in results(block, inputs)]):
        line["error"] = f"{way}: other bits with gradient than without"
    line[f"{way}, forward s"] = seconds(partial(forward, block, inputs), device)
    return line | {f"{way}, forward and backward s": seconds(partial(gradients, block, inputs), device)}


def fp8(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """A line for each kind of block, then one for each product alone."""
    for net, kind, block, inputs, line in timed_blocks(device, tiny):
        line["products in fp8"] = multiplies_in_fp8(device, BF16)
        for is_fused, way in ((False, "diffusers"), (True, "fused")):
            with block_of(net, kind, is_fused) as chosen:
                line |= timed(chosen, inputs, way, device)
                before = forward(chosen, inputs)
        to_fp8_base(block, device)
        with block_of(net, kind, True) as chosen:
            line |= timed(chosen, inputs, "fused, fp8", device)
            pairs = zip(forward(chosen, inputs), before, strict=True)
            line["relative difference"] = max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
            if not line["relative difference"] < 0.2:
                line["error"] = "the block in fp8 is another function"
        yield line
    for width, out in ((64, 32), (32, 64)) if tiny else LAYERS:
        yield {"product": [width, out]} | _product(width, out, 48 if tiny else 2 * 4608, device)


LAYERS = ((3072, 3072), (3072, 12288), (12288, 3072), (15360, 3072), (5120, 5120), (5120, 13824), (13824, 5120))
"""Inputs and outputs of the layers of FLUX.1 and Wan 14B."""


def _product(width: int, out: int, rows: int, device: torch.device) -> dict[str, Any]:
    """Times of one product in bf16 and fp8, and of casting its rows; rows must not depend on the others."""
    torch.manual_seed(0)
    x = torch.randn(rows, width, dtype=BF16, device=device)
    weight = torch.randn(out, width, dtype=BF16, device=device)
    stored, scale = quantise_rows(weight)
    line: dict[str, Any] = {}
    for ours, theirs in zip(quantise_rows(x), reference_quantise(x), strict=True):
        if not torch.equal(ours.float(), theirs.float()):
            line["error"] = "rows have other bits in Triton than in torch"

    def multiplied(y: Tensor, of_rows: Tensor) -> Tensor:
        return torch._scaled_mm(y, stored.t(), of_rows, scale.t(), out_dtype=BF16)

    line |= {"bf16, s": seconds(lambda: F.linear(x, weight), device)}
    line |= {"rows, s": seconds(lambda: quantise_rows(x), device)}
    line |= {"weight in bf16, s": seconds(lambda: dequantise_rows(stored, scale, BF16), device)}
    if not multiplies_in_fp8(device, BF16):
        return line
    y, of_rows = quantise_rows(x)
    whole = multiplied(y, of_rows)
    half = rows // 2
    line["half of the rows has the same bits"] = torch.equal(multiplied(y[:half], of_rows[:half]), whole[:half])
    if not torch.equal(multiplied(y, of_rows), whole):
        line["error"] = "a product does not repeat its bits"
    return line | {"fp8, s": seconds(lambda: multiplied(y, of_rows), device)}


@contextmanager
def recomputed(block: nn.Module, keeps: bool) -> Iterator[nn.Module]:
    """Context in which a block is recomputed, and keeps attention or not."""
    checkpoint_blocks([block], 1.0)
    if keeps:
        keep_attention([block])
    try:
        yield block
    finally:
        for name in ("forward", "checkpointed", "budget"):
            block.__dict__.pop(name, None)


def recomputation(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """A line for a block of Wan 14B."""
    model = of_model("Wan 14B", tiny)
    net = filled(published(model), device)
    (kind,) = model.kinds
    inputs = inputs_of(model, kind, net.get_submodule(kind.place), device)
    line: dict[str, Any] = {"denoiser": model.name, "tokens": list(kind.tokens)}
    before: list[Tensor] = []
    with block_of(net, kind, True) as block:
        for keeps, way in ((False, "everything again"), (True, "attention kept")):
            with recomputed(block, keeps) as chosen:
                found = gradients(chosen, inputs)
                if before and not equal(before, found):
                    line["error"] = "other bits with attention kept"
                before = found
                line[f"{way}, s"] = seconds(partial(gradients, chosen, inputs), device)
    yield line


# ---- attention ------------------------------------------------------------------------------------------------------


def attentions(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """A line for each size and implementation, with FLOP/s; one that is not installed says what it needs."""
    for size, case in CASES.items():
        case = Case(1, 64, 64, 2, 16) if tiny else case
        for name in ("_native_flash", "fa3", "fa4"):
            line: dict[str, Any] = {"size": size, "attention": name}
            try:
                with attention_of_a_run():
                    activate(name, device)
                    yield line | _of_implementation(case, device)
            except ConfigError as error:
                yield line | {"skipped": error.mistakes[0]}


def _of_implementation(case: Case, device: torch.device) -> dict[str, Any]:
    """Errors and times of torch's FlashAttention op as it is."""
    worst = max(kernel_errors("_native_flash", case, BF16, device))
    line: dict[str, Any] = {"error of output or gradient": worst}
    q, k, v, g = torch.randn(4, case.batch, case.heads, case.queries, case.width, dtype=BF16, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with torch.no_grad():
        plain = F.scaled_dot_product_attention(q, k, v)
    with_gradient = F.scaled_dot_product_attention(q, k, v)
    if worst > LIMIT[BF16]:
        line["error"] = "differs from exact attention"
    elif not torch.equal(plain, with_gradient):
        line["error"] = "other bits with gradient than without"

    def both() -> Any:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), leaves, g)

    with torch.no_grad():
        ahead = seconds(lambda: F.scaled_dot_product_attention(q, k, v), device)
    back = seconds(both, device) - ahead
    flop = 4.0 * case.batch * case.heads * case.queries * case.keys * case.width
    line |= {"forward s": ahead, "forward TFLOP/s": flop / ahead / 1e12}
    return line | {"backward s": back, "backward TFLOP/s": 2.5 * flop / back / 1e12, "repeats": equal(both(), both())}


# ---- copies ---------------------------------------------------------------------------------------------------------


def traffic(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """A line for each pass that a FLUX block no longer makes, at 1024² and batch 2."""
    rows = 24 if tiny else 2 * 4608
    width = 32 if tiny else 3072
    torch.manual_seed(1)
    attended = torch.randn(1, rows, width, dtype=BF16, device=device)
    x = torch.randn(1, rows, 4 * width, dtype=BF16, device=device)
    ways: dict[str, Call] = {
        "cat": lambda: [torch.cat([attended, F.gelu(x, approximate="tanh")], -1)],
        "beside": lambda: [beside_gelu(attended, x, "tanh")],
    }
    yield {"pass": "GELU beside attention", "rows": rows} | compared(ways, device)
    small = torch.randn(rows, 64, dtype=BF16, device=device)
    up = torch.randn(4 * width, 64, dtype=BF16, device=device) / 8
    ways = {
        "addmm, then GELU": lambda: [F.gelu(torch.addmm(x[0], small, up.t()), approximate="tanh")],
        "low_rank_gelu": lambda: [low_rank_gelu(x[0], small, up)],
    }
    exact = F.gelu(torch.addmm(x[0].float(), small.float(), up.float().t()), approximate="tanh")
    line: dict[str, Any] = {"pass": "GELU with its LoRA", "rows": rows}
    worst = relative_error(low_rank_gelu(x[0], small, up).float(), exact)
    if worst > LIMIT[BF16]:
        line["error"] = f"differs from fp32 by {worst:.1%}"
    yield line | {"largest error": worst} | compared(ways, device, promised=False)


@contextmanager
def eight_processes(device: torch.device) -> Iterator[Any]:
    """Context with a configuration of a process of eight, whose transfers move nothing."""
    dist.init_process_group("fake", rank=0, world_size=ulysses_copies.PROCESSES, store=FakeStore())
    try:
        config = ContextParallelConfig(ulysses_degree=ulysses_copies.PROCESSES)
        mesh = init_device_mesh(device.type, (1, ulysses_copies.PROCESSES), mesh_dim_names=("ring", "ulysses"))
        config.setup(0, ulysses_copies.PROCESSES, device, mesh)
        yield SimpleNamespace(context_parallel_config=config)
    finally:
        dist.destroy_process_group()


def ulysses(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """A line for each attention, forward and backward. What arrives is arbitrary, so
    tests/parallel/test_ulysses.py compares the results, on real processes; here only
    queries in the order in which they are sent are compared."""
    with eight_processes(device) as parallel, torch.device("meta"):
        for name, (attn, tokens) in ulysses_copies.attentions(8 if tiny else 128).items():
            with torch.device(device):
                yield {"attention": name} | _of_layouts(attn, [n // 64 for n in tokens] if tiny else tokens, parallel)


def _of_layouts(attn: Any, tokens: Sequence[int], parallel: Any) -> dict[str, Any]:
    """Times of one attention in diffusers' layout and in ours."""
    device = torch.empty(0).device
    filled(attn.bfloat16(), device).requires_grad_(False)
    attn.processor._attention_backend = "native" if device.type == "cpu" else "_native_flash"
    attn.processor._parallel_config = parallel
    width = attn.to_q.in_features
    inputs = [torch.randn(ulysses_copies.SAMPLES, n, width, dtype=BF16).requires_grad_() for n in tokens]
    cos = torch.randn(sum(tokens), width // attn.heads)
    sin = torch.randn(sum(tokens), width // attn.heads)
    heads = inputs[-1].detach().unflatten(2, (attn.heads, -1))
    line: dict[str, Any] = {"tokens": list(tokens)}
    rotated = partial(qk_norm_rope, heads, heads, None, None, cos[: heads.shape[1]], sin[: heads.shape[1]])
    rows = rotated()[0].unflatten(2, (ulysses_copies.PROCESSES, -1))
    sent = rotated(groups=ulysses_copies.PROCESSES)[0]
    if not torch.equal(rows.permute(2, 1, 0, 3, 4), sent):
        line["error"] = "queries have other bits in the order in which they are sent"

    def both() -> Any:
        outputs = ulysses_copies.run(attn, inputs, (cos, sin))
        return torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs])

    with mock.patch.object(components, "ulysses", lambda *_: None):
        line["diffusers' layout, s"] = seconds(both, device)
    line["own layout, s"] = seconds(both, device)
    return line


PARTS: dict[str, Callable[[torch.device, bool], Iterator[dict[str, Any]]]] = {
    "fused": blocks, "fp8": fp8, "attention": attentions, "recompute": recomputation, "traffic": traffic,
    "ulysses": ulysses,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU with small widths")
    parser.add_argument("--out", type=Path, help="the JSON; default results/PART_DEVICE.json")
    given = parser.parse_args(arguments)
    device = "cpu" if given.tiny or not torch.cuda.is_available() else "cuda"
    with attention_of_a_run():
        return report(given.part, device, PARTS[given.part](torch.device(device), given.tiny), given.out)


if __name__ == "__main__":
    sys.exit(main())
