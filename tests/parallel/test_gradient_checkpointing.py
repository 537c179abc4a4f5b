"""Recomputed blocks: their attention and their last product run once, and gradients keep their bits.

Why these cases: what a block keeps may change memory and time, never a gradient. Oracle: the same model without
recomputation. Operators are counted where they really run, in every family, dtype and kind of block, over two
processes (Ulysses, sharded weights), and where only some of it fits.
"""

import gc
import os
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from ops_cases import register_flash
from ranks import all_end, fuse_on_cpu, ranks
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from world import QUICK, case_of, folder, merged, small_sources, tiered, two_samples
from world import opened as ready

from prefgrpo.config.loading import from_dict
from prefgrpo.models import MODELS, blocks
from prefgrpo.ops import gated_residual, use_backend
from prefgrpo.parallel.gradient_checkpointing import budgets, checkpoint_blocks, keep_attention
from prefgrpo.parallel.world import join
from prefgrpo.update.throughput import _recomputed
from tests.models.test_blocks import fuse, opened

CPU = torch.device("cpu")
aten = torch.ops.aten
OTHERS = {"hunyuan_video": 1, "hunyuan_video_15": 2}
"""Attentions of text alone that do not go through diffusers' dispatcher."""
WITHOUT_LORA = {"krea2": 4}
"""Attentions of blocks over text, which no gradient reaches unless all weights train."""


class Counted(TorchDispatchMode):
    """Counts what runs: attention to at least as many keys as queries, all other attention, and recomputed products."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator and count it."""
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product") and not name.endswith("backward"):
            self.seen["attention" if args[0].shape[2] <= args[1].shape[2] else "attention to few keys"] += 1
        if func.overloadpacket in (aten.mm, aten.addmm) and _recomputed():
            self.seen["products"] += 1
        return func(*args, **(kwargs or {}))


def blocks_of(adapter):
    """Of all denoisers."""
    return [block for net in adapter.modules().values() for block in adapter.blocks(net)]


def counted(adapter, forward):
    """What a forward and its backward run, and the gradients."""
    with Counted() as ahead:
        v = forward()
    weights = [p for _, p in adapter.trainable()]
    with Counted() as back:
        grads = torch.autograd.grad(v.float().square().sum(), weights, allow_unused=True)
    return ahead.seen, back.seen, grads


def same_bits(one, other):
    """Whether two lists of gradients are equal."""
    pairs = list(zip(one, other, strict=True))
    assert sum(a is not None and bool(a.any()) for a, _ in pairs) > 4
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


def forward_of(adapter, case):
    """A forward of two samples with gradients."""
    inputs = two_samples(adapter, case)
    return lambda: adapter.velocity(*inputs)


BF16 = torch.bfloat16
F32 = torch.float32
WAYS = [("lora", BF16, "fused"), ("full", F32, "diffusers")]
"""In which every family is recomputed: each choice once; the rest in a few families."""
REST = [("lora", F32, "diffusers"), ("lora", BF16, "diffusers"), ("full", F32, "fused"), ("full", BF16, "fused")]


@pytest.mark.parametrize(
    "case, trained, dtype, kind",
    [
        *(param for way in WAYS for param in tiered([case_of(name) for name in MODELS], *way)),
        *(pytest.param(case_of(name), *way, marks=pytest.mark.full) for way in REST for name in QUICK),
    ],
)
def test_attention_runs_once_and_gradients_keep_their_bits(case, trained, dtype, kind, monkeypatch):
    monkeypatch.setattr(blocks, "FUSED_ON", ("cpu",) if kind == "fused" else ())
    with small_sources():
        adapter = opened(case, trained, dtype)
        fuse(adapter)
        forward = forward_of(adapter, case)
        _, _, want = counted(adapter, forward)
        for net in adapter.modules().values():
            checkpoint_blocks(adapter.blocks(net), 1.0)
        ahead, back, repeated = counted(adapter, forward)
        reached = ahead["attention"] - (WITHOUT_LORA.get(case.family, 0) if trained == "lora" else 0)
        assert back["attention"] == reached > 0, "without what is tested, every attention runs again"
        keep_attention(blocks_of(adapter))
        _, back, grads = counted(adapter, forward)
    assert back["attention"] == OTHERS.get(case.family, 0)
    assert back["attention to few keys"] == ahead["attention to few keys"]
    assert same_bits(want, repeated) and same_bits(want, grads)
    assert budgets(blocks_of(adapter))[0].held == 0 < budgets(blocks_of(adapter))[0].most


def test_what_does_not_fit_is_computed_again():
    """With room for one of FLUX's four attentions, for none, and in a second backward; a dropped graph gives its room
    back."""
    case = case_of("flux")
    adapter = opened(case, "lora")
    forward = forward_of(adapter, case)
    _, _, want = counted(adapter, forward)
    checkpoint_blocks(adapter.blocks(adapter.transformer), 1.0)
    keep_attention(blocks_of(adapter))
    counted(adapter, forward)
    (whole,) = {budget.most for budget in budgets(blocks_of(adapter))}
    for limit, again in ((whole, 0), (whole - 1, 1), (whole / 4, 3), (0, 4)):
        keep_attention(blocks_of(adapter), limit)
        budget = budgets(blocks_of(adapter))[0]
        _, back, grads = counted(adapter, forward)
        assert (back["attention"], budget.held) == (again, 0) and budget.most <= limit and same_bits(want, grads)
        v = forward()
        assert budget.held == (4 - again) * whole / 4
        del v
        gc.collect()
        assert budget.held == 0
    v = forward().float().square().sum()
    weights = [p for _, p in adapter.trainable()]
    for retained in (True, False):
        assert same_bits(want, torch.autograd.grad(v, weights, retain_graph=retained))


@pytest.mark.full
def test_compiled_blocks_are_recomputed():
    """In graphs of a process in which attention was kept before; a compiled run lets no block keep it."""
    case = case_of("flux")
    keep_attention([])
    graphs = []

    def traced(graph, inputs):
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    gradients = []
    for share in (0.0, 1.0):
        adapter = opened(case, "lora")
        checkpoint_blocks(adapter.blocks(adapter.transformer), share)
        torch.compiler.reset()
        for block in blocks_of(adapter) if share else ():
            block.compile(dynamic=False, backend=aot_autograd(fw_compiler=traced))
        weights = [p for _, p in adapter.trainable()]
        v = forward_of(adapter, case)()
        gradients.append(torch.autograd.grad(v.square().sum(), weights, allow_unused=True))
    pairs = [(a, b) for a, b in zip(*gradients, strict=True) if a is not None]
    assert len(pairs) > 4 and all(torch.allclose(a, b, rtol=1e-3, atol=1e-7) for a, b in pairs)
    assert graphs


# ---- the last product of a block
def block_gradients(is_recomputed, trained):
    """The gradients of a fused block of Wan with kernels, and how many products run in how many recomputations."""
    torch.manual_seed(0)
    adapter = opened(case_of("wan"), "lora")
    fuse(adapter)
    block = adapter.blocks(adapter.transformer)[0]
    inputs = blocks.random_inputs(block, "WanTransformerBlock", CPU, 1, (3, 2))
    block.scale_shift_table.requires_grad_("gate" in trained)
    block.ffn.net[2].weight.requires_grad_("product" in trained)
    leaves = [inputs["hidden_states"].requires_grad_(), *(p for p in block.parameters() if p.requires_grad)]
    if is_recomputed:
        checkpoint_blocks([block], 1.0)
    with use_backend("triton"):
        out = block(**inputs)
        with Counted() as back:
            grads = torch.autograd.grad(out.square().sum(), leaves)
    return grads, back.seen["products"]


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("trained, last", [("", 0), ("product", 0), ("gate", 1)])
def test_the_last_product_of_a_block_is_not_repeated(trained, last):
    """Nobody reads its result, unless the gate after it trains; what its own weights need is computed before it."""
    want, none = block_gradients(False, trained)
    grads, products = block_gradients(True, trained)
    layers = 4 + 4 + 2  # q, k, v and the output of two attentions, and the feed-forward
    with_lora = 2 + 4  # q, k and v of the first share one; adding to an output is no product of its own
    assert (none, products) == (0, layers + with_lora - 1 + last)
    assert all(torch.equal(a, b) for a, b in zip(want, grads, strict=True))


def test_the_gate_alone_needs_no_saved_tensor():
    """Also in a graph, whose gradients are equal."""
    x = torch.randn(2, 3, 8)
    y = torch.randn(2, 3, 8)
    gate = torch.randn(2, 8)
    kept = []

    def gradients(run):
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        with (
            use_backend("triton"),
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        ):
            out = run(*leaves, gate)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    eager = gradients(gated_residual)
    assert not kept
    torch.compiler.reset()
    compiled = gradients(torch.compile(gated_residual, backend="aot_eager"))
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))
    assert torch.equal(eager[0], torch.ones_like(x)) and torch.equal(eager[1], gate[:, None].expand(x.shape))


# ---- two processes
SPLITS = {
    "ulysses": ({"ulysses": 2}, "_native_flash", 4),
    "ulysses, native": ({"ulysses": 2}, "native", 4),
    "ring": ({"ring": 2}, "_native_flash", 4),
    "shard": ({"shard": 2}, "native", 4),
    "shard, all weights": ({"shard": 2}, "native", 0),
}
"""Layout, backend and LoRA rank."""


def split(family):
    """Runs in the new process: a family under every layout."""
    torch.set_num_threads(1)
    register_flash()
    if "FUSED" in os.environ:
        fuse_on_cpu()
    case = case_of(family)
    for name, (layout, attention, rank) in SPLITS.items():
        values = {
            "model": os.environ["PLACE"], "family": family, "dtype": "bf16", "parallel": layout, "attention": attention,
            "data": {"prompts": "p.txt", "max_length": case.max_length}, "rollout": {"height": 32, "width": 32},
            "train": {"lora_rank": rank, "gradient_checkpointing": 1},
        }  # fmt: skip
        config = from_dict(merged(values, {"rollout": {"frames": 5, "batch_size": 1}} if family == "wan22" else {}))
        world = join(config)
        adapter = ready(config, world)
        torch.manual_seed(1)
        for _, p in adapter.trainable() if rank else ():
            p.data.normal_(0, 0.05)
        forward = forward_of(adapter, case)
        seen = []
        for keeping in (False, True):
            if keeping:
                keep_attention(blocks_of(adapter))
            with Counted() as ahead:
                v = forward()
            with Counted() as back:
                v.float().square().sum().backward()
            full = [getattr(p.grad, "_local_tensor", p.grad) for _, p in adapter.trainable()]
            seen.append(
                (ahead.seen["attention"], back.seen["attention"], [None if g is None else g.clone() for g in full])
            )
            for _, p in adapter.trainable():
                p.grad = None
        (ran, repeated, want), (_, again, grads) = seen
        computes_again = name == "ulysses, native" and "FUSED" not in os.environ
        parted = ran // 2 if family == "wan22" else ran  # cross-attention is not
        own = parted if computes_again else 0  # in diffusers' backward of native under Ulysses
        assert ran > 0 and (repeated, again) == (ran + own, own), (name, ran, repeated, again)
        assert same_bits(want, grads), name
        assert {budget.held for budget in budgets(blocks_of(adapter))} == {0}
    os._exit(0)


def flux():
    """Runs in the new process."""
    split("flux")


def wan22():
    """Runs in the new process."""
    split("wan22")


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("family, env", [(flux, {"FUSED": "1"}), (wan22, {"FUSED": "1"}), (flux, {})])
def test_on_two_processes(tmp_path, family, env):
    """Under Ulysses and in a ring, whose attention is a Function of diffusers or ours, and with sharded weights."""
    file = tmp_path / "run.yaml"
    all_end(ranks(file, 2, hook=family, PLACE=str(folder(family.__name__)), **env), seconds=300)
