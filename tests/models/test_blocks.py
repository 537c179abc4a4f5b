"""Fused blocks, forced on where there is no GPU: each family's are diffusers' own, in fewer passes and with less kept.

Oracle: diffusers' blocks. On a CPU the ops run their references, so what differs here is how the blocks put them
together; the kernels run in Triton's interpreter. Faults are put into a block, and the start of a run must see them.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn
from torch.nn import functional as F
from world import SIZES, case_of, conditions, initial_noise, load, perturb, small_sources, tiered

from benchmarks.block_costs import MODELS as PUBLISHED
from benchmarks.block_costs import kept_bytes, published, tables
from prefgrpo.config.recipe import ConfigError
from prefgrpo.models import MODELS, blocks
from prefgrpo.models.blocks import FUSED, Outcome, components, fuse_blocks, fused, fusion_note, recompute
from prefgrpo.models.blocks.recompute import recomputed, recomputes
from prefgrpo.ops import use_backend
from prefgrpo.parallel.gradient_checkpointing import checkpoint_blocks

CPU = torch.device("cpu")
STOCK = ("ltx2",)
"""Families whose blocks have no fused form."""


def fuse(adapter, gather=lambda mine: [mine]):
    """Fuse all blocks, as the start of a run does; the names of the kinds, and why some stay diffusers' own."""
    adapter.dispatch_attention()
    kinds = set()
    changed = []
    for net in adapter.modules().values():
        changed += fuse_blocks(net, adapter.blocks(net), adapter.dtype, CPU, gather)
        kinds |= {type(block).__name__ for block in adapter.blocks(net)}
    return kinds, changed


def opened(case, trained, dtype=torch.float32):
    """An adapter with a LoRA that changes what it computes, or with all weights trained."""
    adapter = load(case, dtype=dtype)
    adapter.add_lora(4, 8.0) if trained == "lora" else adapter.enable_full()
    return perturb(adapter, 0.05 if trained == "lora" else 0.0)


def results(adapter, case, order=(0, 1)):
    """Velocities without and with gradient, and the gradients of all trained weights, for two samples in an order."""
    sampling = case.sampling(SIZES[0])
    rows = list(order)
    condition = conditions(adapter, case).map(lambda t: t[rows] if t.dim() and len(t) == 2 else t)
    x = initial_noise(adapter, sampling)[rows]
    sigma = torch.full((2,), 0.6)
    with torch.no_grad():
        without = adapter.velocity(x, sigma, condition, sampling)
    v = adapter.velocity(x, sigma, condition, sampling)
    weights = [p for _, p in adapter.trainable()]
    grads = torch.autograd.grad(v.float().square().sum(), weights, allow_unused=True)
    return [
        without,
        v.detach(),
        *(torch.zeros_like(w) if g is None else g for w, g in zip(weights, grads, strict=True)),
    ]


def close(got, want, limit):
    """Every tensor within `limit` of its largest element."""
    scale = max(float(t.abs().max()) for t in want[2:]) * 1e-3  # gradients that are rounding errors themselves
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= limit * max(float(b.abs().max()), scale)


OWN_KINDS = (
    "flux", "flux2", "flux3", "hunyuan_video", "hunyuan_video_15", "krea2", "qwen_image", "qwen_image_21", "sd3", "wan",
    "z_image",
)  # fmt: skip
"""Families that together have every kind of block."""
EVERY = [
    *tiered([case_of(name) for name in MODELS if name not in STOCK], "lora"),
    *tiered([case_of(name) for name in OWN_KINDS], "full"),
]


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("case, trained", EVERY)
def test_they_are_diffusers_own_in_every_family(case, trained):
    """In fp32, forward and gradients, also with recomputed blocks; a sample does not depend on its place."""
    with small_sources():
        adapter = opened(case, trained)
        want = results(adapter, case)
        own_swapped = results(adapter, case, (1, 0))
        kinds, changed = fuse(adapter)
        assert not changed and any(kind.startswith("Fused") for kind in kinds) and not kinds & FUSED.keys()
        got = results(adapter, case)
        swapped = results(adapter, case, (1, 0))
        for net in adapter.modules().values():
            checkpoint_blocks(adapter.blocks(net), 1.0)
        recomputed = results(adapter, case)
    close(got, want, 2e-5)
    assert torch.equal(got[0], got[1])
    if torch.equal(want[1], own_swapped[1].flip(0)):  # a CPU's products of HunyuanVideo's shapes depend on the row
        assert torch.equal(got[1], swapped[1].flip(0))
    assert all(torch.equal(a, b) for a, b in zip(got, recomputed, strict=True))


def block_results(net, block, kind, dtype, inputs):
    """Outputs, and gradients of inputs, vectors and LoRA, of a copy of a block; its output without gradient."""
    alone = blocks._copy(net, block, kind, dtype, CPU)
    for name, p in alone.named_parameters():
        p.requires_grad_(p.dim() == 1 or "lora_" in name)
    low = {k: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for k, t in inputs.items()}
    with torch.no_grad():
        without = alone(**low)
    without = without if isinstance(without, torch.Tensor) else next(t for t in without if t is not None)
    return blocks._results(alone, inputs), without


def error(got, want):
    """Root of the mean square, relative to that of `want`."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def in_bf16(t):
    """A real tensor rounded to bf16, in fp32."""
    return t.bfloat16().float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


@pytest.mark.full
@pytest.mark.parametrize("name", OWN_KINDS)
def test_with_the_kernels_in_tritons_interpreter(name):
    """One block of each kind, with equal bits with and without gradient.

    In fp32 it is diffusers' own. In bf16 each rounds in its own places, so both are compared with fp32 at equal weights
    and inputs: a result may be twice as far from it as diffusers' own, and all together a quarter farther.
    """
    adapter = opened(case_of(name), "lora")
    adapter.dispatch_attention()
    net = adapter.transformer
    for p in net.parameters():
        p.data = in_bf16(p.data)
    for kind in dict.fromkeys(type(block) for block in adapter.blocks(net) if type(block).__name__ in FUSED):
        block = next(block for block in adapter.blocks(net) if type(block) is kind)
        torch.manual_seed(0)
        given = blocks.random_inputs(block, kind.__name__, CPU, tokens=(3, 2))
        inputs = {key: in_bf16(value) for key, value in given.items()}
        exact, _ = block_results(net, block, kind, torch.float32, inputs)
        eager, _ = block_results(net, block, kind, torch.bfloat16, inputs)
        for dtype in (torch.float32, torch.bfloat16):
            with use_backend("triton"):
                got, without = block_results(net, block, fused(kind), dtype, inputs)
            assert torch.equal(without, next(iter(got.values()))) and got.keys() == exact.keys()
            errors = {key: error(got[key], exact[key]) for key in exact}
            own = {key: error(eager[key], exact[key]) for key in exact}
            if dtype == torch.float32:
                assert max(errors.values()) <= 2e-5, errors
            else:
                assert all(errors[key] <= 2 * own[key] for key in exact), (errors, own)
                assert sum(errors.values()) <= 1.25 * sum(own.values())


FLUX_KINDS = {"FluxTransformerBlock", "FluxSingleTransformerBlock"}
FAULTS = {
    "no gate": ("gated_residual", lambda x, y, gate: x + y),
    "gate detached": ("gated_residual", lambda x, y, gate: x + gate.detach()[:, None] * y),
    "text unnormalised": ("layernorm_modulate", lambda x, shift, scale, eps: x * (1 + scale[:, None])),
    "not finite": ("gated_residual", lambda x, y, gate: x / 0),
    "another signature": ("gated_residual", lambda x: x),
}
"""Another op in place of one of FLUX's."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_block_that_differs_stays_diffusers_own_and_says_why(fault, monkeypatch):
    monkeypatch.setattr(blocks, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(components, *FAULTS[fault])
    adapter = load(case_of("flux"))
    kinds, changed = fuse(adapter)
    assert kinds == FLUX_KINDS and len(changed) == 2, "one line per kind of block"
    assert all("runs as in diffusers, slower: fused, " in line for line in changed)
    note = fusion_note(adapter.blocks(adapter.transformer))
    assert (
        note.startswith("fused blocks: 0 of 4; FluxTransformerBlock runs as in diffusers: ") and "(process 0)" in note
    )


def failing(error):
    def op(*args, **kwargs):
        raise error

    return op


BROKEN = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "parallel.shard"),
    "no compiler": (RuntimeError("Failed to find C compiler"), "C compiler for Triton"),
    "dtype": (RuntimeError("expected scalar type Float but found BFloat16"), "PREFGRPO_BACKEND=torch"),
    "cache": (OSError("Stale file handle: ~/.triton"), "TRITON_CACHE_DIR"),
    "Triton": (type("CompilationError", (Exception,), {})("at 3:4: tl.load"), "C compiler for Triton"),
}
"""What no change of diffusers raises, and what the message must name."""


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_no_fault_of_diffusers_ends_the_run_with_its_cure(fault, monkeypatch):
    error, cure = BROKEN[fault]
    monkeypatch.setattr(blocks, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(components, "gated_residual", failing(error))
    with pytest.raises(ConfigError) as caught:
        fuse(load(case_of("flux")))
    first = caught.value.mistakes[0]
    assert first.startswith(f"blocks: FluxTransformerBlock, process 0: {type(error).__name__}: {error}; expected")
    assert cure in first


def test_all_processes_agree(monkeypatch):
    """What fails in one of them is stock, or an error, in all."""
    monkeypatch.setattr(blocks, "FUSED_ON", ("cpu",))
    adapter = load(case_of("flux"))
    kinds, changed = fuse(adapter, lambda mine: [mine, [Outcome(), Outcome(stock="it differs")]])
    assert kinds == {"FusedFluxTransformerBlock", "FluxSingleTransformerBlock"}
    assert changed == ["FluxSingleTransformerBlock runs as in diffusers, slower: fused, it differs (process 1)"]
    own = "FluxSingleTransformerBlock runs as in diffusers: it differs (process 1)"
    assert fusion_note(adapter.blocks(adapter.transformer)) == f"fused blocks: 2 of 4; {own}"
    with pytest.raises(ConfigError) as caught:
        fuse(load(case_of("flux")), lambda mine: [mine, [Outcome(error="OutOfMemoryError"), Outcome()]])
    assert caught.value.mistakes == ["blocks: FluxTransformerBlock, process 1: OutOfMemoryError"]


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_they_run_with_kernels_that_refuse_fp32(family, monkeypatch):
    """As CUDA's flash kernels do: the check's exact copy, in fp32, must not use the run's backend."""
    monkeypatch.setattr(blocks, "FUSED_ON", ("cpu",))
    real = F.scaled_dot_product_attention

    def on_cuda(query, key, value, **rest):
        others = torch._C._get_math_sdp_enabled() or torch._C._get_mem_efficient_sdp_enabled()
        if query.dtype == torch.float32 and not others:
            raise RuntimeError("No available kernel. Aborting execution.")
        return real(query, key, value, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", on_cuda)
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", "native")  # which diffusers sets too
    adapter = load(case_of(family), dtype=torch.bfloat16)
    adapter.transformer.set_attention_backend("_native_flash")
    kinds, changed = fuse(adapter)
    assert not changed and all(kind.startswith("Fused") for kind in kinds)
    processors = [m.processor for m in adapter.transformer.modules() if hasattr(m, "processor")]
    assert {p._attention_backend.value for p in processors} == {"_native_flash"}, "the run's own keep theirs"


def test_without_a_gpu_or_compiled_nothing_changes(trainer, monkeypatch):
    over = {"train": {"steps": 1}, "eval": {"every": 0}}
    kinds = {type(b).__name__ for b in blocks_of(trainer(name="cpu", **over))}
    monkeypatch.setattr(blocks, "FUSED_ON", ("cpu",))
    kinds |= {type(b).__name__ for b in blocks_of(trainer(name="compiled", compile=True, **over))}
    assert kinds == FLUX_KINDS


def blocks_of(made):
    return made.adapter.blocks(made.adapter.transformer)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype, trained", [("bf16", 4), ("bf16", 0)])
def test_a_run_with_them_is_on_policy(trainer, dtype, trained):
    """The first ratio is exactly 1, with half of the blocks recomputed; all weights in bf16 are FSDP2's."""
    over = {"dtype": dtype, "train": {"lora_rank": trained, "gradient_checkpointing": 0.5, "steps": 2}}
    made = trainer(name=f"{dtype}-{trained}", eval={"every": 0}, **over)
    assert {"Fused" in type(b).__name__ for b in blocks_of(made)} == {True}
    assert "fused blocks: 4 of 4" in made.notes
    seen = []
    made.on_step = lambda step, row: seen.append(row["policy/on_policy_error"])
    made.train()
    assert seen == [0.0, 0.0]


# ---- what is kept for the backward pass
class Small(nn.Module):
    """Two linear layers, an activation between, and a norm that both of two layers read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.calls = Counter()

    def op(self, name, function):
        def run(*args):
            self.calls[name] += 1
            return function(*args)

        return run

    def forward(self, x):
        y = recomputed(self.op("norm", lambda t: F.layer_norm(t, (8,))), x)
        first, second = recomputed(self.op("two", lambda p, q: (p.sin(), p * q)), self.a(y), self.b(y[:, 1:])[:, :1])
        nested = recomputed(self.op("outer", torch.exp), recomputed(self.op("inner", torch.tanh), first))
        return self.c(nested) * second + self.c(nested.flatten(0, 1)).view_as(second)


class Keeping(Small):
    forward = recomputes(Small.forward)


def test_results_are_computed_again_once_per_backward():
    """Of nested ops, ops of two results, views; equal gradients, twice through one graph."""
    torch.manual_seed(0)
    small = Small()
    keeping = Keeping()
    keeping.load_state_dict(small.state_dict())
    x = torch.randn(3, 4, 8)
    out = []
    for module in (small, keeping):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        for retain in (True, False):
            out.append(torch.autograd.grad(y.sum(), [leaf, *module.parameters()], retain_graph=retain))
    for one in out[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, out[0], strict=True))
    assert small.calls == {"norm": 1, "two": 1, "outer": 1, "inner": 1}
    assert set(keeping.calls.values()) == {3}, "once per backward"
    assert not recompute._running
    with torch.no_grad():
        assert torch.equal(keeping(x), small(x))
    keeping.checkpointed = True
    seen = SimpleNamespace(count=0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: setattr(seen, "count", seen.count + 1), lambda t: t):
        keeping(x)
    assert seen.count > 4, "a block that is recomputed as a whole leaves its tensors to that"


@pytest.mark.parametrize("name", ["FLUX.1", "Wan2.1 1.3B", "Wan 14B"])
def test_at_most_three_quarters_are_kept(name):
    """At true widths and sizes, with a LoRA; of FLUX's single-stream block .751."""
    (model,) = [model for model in PUBLISHED if model.name == name]
    net = published(model)
    both = [
        sum(model.count(k) * kept_bytes(model, net, k, is_fused) for k in model.kinds) for is_fused in (False, True)
    ]
    assert both[1] <= 0.75 * both[0]
    for kind in model.kinds:
        assert kept_bytes(model, net, kind, True) <= 0.755 * kept_bytes(model, net, kind, False)


@pytest.mark.full
def test_the_tables_of_the_documentation_are_counted(root):
    text = (root / "docs" / "costs.md").read_text(encoding="utf-8")
    for name, rows in tables()._asdict().items():
        block = text.partition(f"<!-- block {name} -->")[2].partition(f"<!-- /block {name} -->")[0]
        assert block.strip().split("\n") == rows, "run python -m benchmarks.block_costs"
