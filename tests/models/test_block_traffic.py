"""Blocks' traffic: what is joined without a copy, what all blocks share, and a LoRA that is added by GELU.

Oracles: torch.cat, to the bit; for counted bytes, the number that the same counter printed before (376d3a9f).
"""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from world import case_of, two_samples

from benchmarks.block_costs import MODELS as PUBLISHED
from benchmarks.block_costs import Counter, forward_costs, published
from prefgrpo.models.blocks import components, forwards, joined
from prefgrpo.models.blocks.joined import beside_gelu, beside_swiglu, join, split
from prefgrpo.models.blocks.recompute import recomputed, recomputes
from prefgrpo.models.lora import LoraLinear
from prefgrpo.ops import use_backend
from tests.models.test_blocks import close, fuse, opened

BEFORE = 69.22e9
"""Bytes of a FLUX forward outside products and attention, with its LoRA, in 376d3a9f."""


def test_a_flux_forward_moves_three_quarters_of_its_bytes():
    (model,) = [model for model in PUBLISHED if model.name == "FLUX.1"]
    net = published(model)
    cost = Counter()
    for kind in model.kinds:
        cost.add(forward_costs(model, net, kind, True, with_lora=True), 1)
    assert cost.bytes <= 0.75 * BEFORE
    assert cost.kernels <= 1100  # of 1,235


# ---- joined without a copy
def copies(monkeypatch):
    """A list with an item for each join that copies."""
    seen = []
    real = joined._joined

    def counted(a, b):
        out = real(a, b)
        if out.data_ptr() != a.data_ptr():
            seen.append(out.shape)
        return out

    monkeypatch.setattr(joined, "_joined", counted)
    return seen


@pytest.mark.parametrize("batch", [1, 3])
def test_streams_are_joined_where_they_lie(batch, monkeypatch):
    """Forward and gradient, through a chain of blocks; also where each stream goes on to something else."""
    torch.manual_seed(0)
    text = torch.randn(batch, 3, 8, requires_grad=True)
    x = torch.randn(batch, 5, 8, requires_grad=True)

    def chain(put, take):
        a = text
        b = x
        for _ in range(3):
            a, b = take(put(a, b).sin())
        return torch.autograd.grad((a * b[:, :3]).sum() + (b**2).sum(), [text, x]), a.detach(), b.detach()

    grads, *values = chain(lambda a, b: torch.cat([a, b], 1), lambda y: y.split([3, 5], 1))
    seen = copies(monkeypatch)
    ours, *same = chain(join, partial(split, count=3))
    assert all(torch.equal(p, q) for p, q in zip([*ours, *same], [*grads, *values], strict=True))
    assert len(seen) == 2, "at the first join, and in the backward of the last split"


def test_streams_that_are_elsewhere_are_copied():
    torch.manual_seed(0)
    whole = torch.randn(2, 8, 4)
    a, b = split(whole, 3)
    cases = [(b, a), (a, b.clone()), (a.bfloat16(), b.bfloat16()), (a, b[:, 1:]), (a[:, :2], b), (a[:1], b[:1])]
    for first, second in cases:
        got = join(first, second)
        assert torch.equal(got, torch.cat([first, second], 1))
        assert (got.data_ptr() == whole.data_ptr()) == (second.shape[0] == 1)
    with torch.no_grad():
        assert join(*split(whole, 3)).data_ptr() == whole.data_ptr()


ACTIVATIONS = {
    "gelu": (1, partial(beside_gelu, approximate="tanh"), partial(F.gelu, approximate="tanh")),
    "swiglu": (2, beside_swiglu, lambda gate, x: F.silu(gate) * x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_beside_attention_has_the_bits_of_a_copy(name, dtype):
    """With and without gradient, and where its inputs are kept instead of it."""
    count, ours, plain = ACTIVATIONS[name]
    torch.manual_seed(0)
    attended = torch.randn(2, 5, 16).to(dtype)
    wide = torch.randn(2, 5, 64 * count).to(dtype)
    weight = torch.randn(80, 16).to(dtype)

    def run(op):
        leaves = [t.clone().requires_grad_() for t in (attended, wide, weight)]
        out = op(leaves[0], leaves[1].chunk(count, -1))
        return [out.detach(), *torch.autograd.grad((out @ leaves[2]).float().square().sum(), leaves)]

    want = run(lambda a, parts: torch.cat([a, plain(*parts)], -1))
    kept_inputs = recomputes(lambda self, a, parts: recomputed(ours, a, *parts))
    for op in (lambda a, parts: ours(a, *parts), partial(kept_inputs, None)):
        assert all(torch.equal(p, q) for p, q in zip(run(op), want, strict=True))
    with torch.no_grad():
        assert torch.equal(ours(attended, *wide.chunk(count, -1)), want[0])


@pytest.mark.usefixtures("forced")
def test_a_flux_forward_joins_its_streams_once(monkeypatch):
    """Before the first single-stream block; in the backward after the last, whose text has no gradient."""
    case = case_of("flux")
    adapter = opened(case, "lora")
    fuse(adapter)
    seen = copies(monkeypatch)
    v = adapter.velocity(*two_samples(adapter, case))
    assert len(adapter.transformer.single_transformer_blocks) == 2 and len(seen) == 1
    torch.autograd.grad(v.sum(), [p for _, p in adapter.trainable()], allow_unused=True)
    assert len(seen) == 2


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15"])
def test_what_all_blocks_share_is_made_once_per_forward(name, monkeypatch):
    """Rotary tables of text and video, and the mask of tokens that see each other: not again in every block."""
    made = []
    for module, function in ((components, "_padded"), (forwards, "joint_mask")):
        real = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args, real=real: made.append(1) or real(*args))
    case = case_of(name)
    adapter = opened(case, "lora")
    fuse(adapter)
    inputs = two_samples(adapter, case)
    made.clear()
    with torch.no_grad():
        adapter.velocity(*inputs)
    assert len(adapter.blocks(adapter.transformer)) > 1 and len(made) == (2 if name == "hunyuan_video" else 2 * 3), (
        "the latter is guided, by a second forward"
    )


def test_a_changed_table_is_made_again():
    table = torch.zeros(3, 2)
    text = torch.zeros(1, 2, 4)
    first, _ = components.after_text(text, (table, table))
    again_first, _ = components.after_text(text, (table, table))
    table.add_(1)
    changed, _ = components.after_text(text, (table, table))
    assert again_first is first and torch.equal(changed, torch.ones(5, 2)) and len(components._made[table]) == 4


# ---- LoRA
def test_a_feed_forward_adds_its_lora_in_the_pass_of_gelu(monkeypatch):
    """Through kernels: outputs with and without gradient are equal, and a policy of a LoRA of 0 is the reference."""
    net = opened(case_of("flux"), "lora").transformer
    ff = net.transformer_blocks[0].ff
    assert isinstance(ff.net[0].proj, LoraLinear)
    calls = []
    real = components.low_rank_gelu
    monkeypatch.setattr(components, "low_rank_gelu", lambda *args: calls.append(args[1]) or real(*args))
    x = torch.randn(2, 5, ff.net[0].proj.in_features)
    with use_backend("triton"):
        with_gradient = components.feed_forward(ff, x).detach()
        with torch.no_grad():
            assert torch.equal(components.feed_forward(ff, x), with_gradient)
            close([ff(x)] * 3, [with_gradient] * 3, 1e-5)
            for layer in (ff.net[0].proj, ff.net[2]):
                layer.lora_B["default"].weight.zero_()
            at_zero = components.feed_forward(ff, x)
            net.disable_adapters()
            assert torch.equal(components.feed_forward(ff, x), at_zero)
    assert len(calls) == 4 and calls[-1] is None and calls[0] is not None
