"""LoRA layers: as near to fp64 as peft's own, and what stays peft's."""

import copy
from collections import Counter

import pytest
import torch
from ops_cases import Counted
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from world import case_of, policy, small_sources, tiered, two_samples

from prefgrpo.models import MODELS
from prefgrpo.models.lora import LoraLinear, fuse_lora, outputs
from prefgrpo.parallel.gradient_checkpointing import checkpoint_blocks


class Block(nn.Module):
    """Two Linears, the second without bias."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 16, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Three(nn.Module):
    """Linears that read one x, the last without bias; their outputs, joined."""

    def __init__(self, dtype):
        super().__init__()
        self.q = nn.Linear(24, 40, dtype=dtype)
        self.k = nn.Linear(24, 16, dtype=dtype)
        self.v = nn.Linear(24, 40, bias=False, dtype=dtype)

    def forward(self, x):
        return torch.cat(list(outputs((self.q, self.k, self.v), x)), -1)


def with_lora(dtype=torch.float32, kind=Block, **options):
    """A frozen module with fp32 LoRA weights, none of them 0."""
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 12, "target_modules": ["up", "down", "q", "k", "v"]} | options
    model = get_peft_model(kind(dtype).requires_grad_(False), LoraConfig(**options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) / 5
    return model


def results(model, x):
    """The output, and the gradients of x and of all trained weights."""
    x = x.clone().requires_grad_()
    y = model(x)
    (y if y.dtype == torch.float64 else y.float()).square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("lead", [(7,), (2, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(
    "dtype, factor",
    [(torch.float32, 1.25), (torch.bfloat16, 4.0)],  # in bf16 peft computes A and B in fp32
)
def test_lora_is_as_near_to_fp64_as_pefts_layer(dtype, factor, lead):
    peft = with_lora(dtype)
    ours, exact = copy.deepcopy(peft), copy.deepcopy(peft).double()
    assert fuse_lora(ours) == 2 and fuse_lora(ours) == 0
    x = torch.randn(*lead, 24).to(dtype)
    if len(lead) == 2:
        x = x.transpose(0, 1)  # not contiguous
    truth = results(exact, x.double())
    for index, (a, b, want) in enumerate(zip(results(peft, x), results(ours, x), truth, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape == want.shape
        theirs, mine = (float((value.double() - want).norm() / want.norm()) for value in (a, b))
        assert mine <= factor * theirs + 1e-7, f"result {index}: error {mine:.2e}, peft's {theirs:.2e}"


def test_a_scaling_of_a_power_of_two_gives_pefts_bits_also_compiled():
    peft = with_lora(lora_alpha=8)
    ours, x = copy.deepcopy(peft), torch.randn(3, 5, 24)
    assert fuse_lora(ours) == 2 and sum(isinstance(m, LoraLinear) for m in ours.modules()) == 2
    want = results(peft, x)
    assert all(torch.equal(a, b) for a, b in zip(want, results(ours, x), strict=True))
    ours.zero_grad()
    torch.testing.assert_close(results(torch.compile(ours, fullgraph=True, backend="aot_eager"), x), want)


def test_disabled_merged_and_second_adapters_as_in_peft():
    peft = with_lora()
    peft.add_adapter("second", LoraConfig(r=2, lora_alpha=2, target_modules=["up"], init_lora_weights=False))
    ours, x = copy.deepcopy(peft), torch.randn(5, 24)
    fuse_lora(ours)
    assert ours.state_dict().keys() == peft.state_dict().keys()
    for active in ("default", "second", ["default", "second"]):
        for model in (peft, ours):
            model.base_model.set_adapter(active)
        torch.testing.assert_close(ours(x), peft(x))
    with ours.disable_adapter(), peft.disable_adapter():
        assert torch.equal(ours(x), peft(x))
    before = ours(x)
    for change in (ours.merge_adapter, ours.unmerge_adapter):
        change()
        torch.testing.assert_close(ours(x), before)


def without_casts(adapter):
    """The layers cast in every forward, as they did."""
    layers = [m for net in adapter.modules().values() for m in net.modules() if isinstance(m, LoraLinear)]
    for layer in layers:
        layer.casts = None
    return len(layers)


def forward_backward(adapter, case):
    """The velocity without and with gradient, and the gradients of the LoRA."""
    inputs = two_samples(adapter, case)
    with torch.no_grad():
        out = [adapter.velocity(*inputs)]
    with_gradient = adapter.velocity(*inputs)
    names, weights = zip(*adapter.trainable(), strict=True)
    grads = torch.autograd.grad(with_gradient.float().square().sum(), weights, allow_unused=True)
    assert sum(grad is not None and bool(grad.any()) for grad in grads) > 4, names
    return [*out, with_gradient.detach(), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("case", tiered([case_of(name) for name in MODELS]))
def test_casting_once_changes_no_bit(case):
    """Outputs and gradients in bf16; also with recomputed blocks, whose backward casts again."""
    with small_sources():
        adapter = policy(case, dtype=torch.bfloat16)
        got = forward_backward(adapter, case)
        for net in adapter.modules().values():
            checkpoint_blocks(adapter.blocks(net), 1.0)
        recomputed = forward_backward(adapter, case)
        assert without_casts(adapter) > 4
        want = forward_backward(adapter, case)
    assert torch.equal(got[0], got[1])
    for one, two, three in zip(got, recomputed, want, strict=True):
        assert one.dtype == three.dtype and torch.equal(one, three) and torch.equal(two, three)


def test_launches_of_the_casts():
    """A change of a weight casts all LoRA layers of FLUX.1 in two launches; alone each takes three in every forward."""
    case = case_of("flux")
    adapter = policy(case, dtype=torch.bfloat16)
    inputs = two_samples(adapter, case)

    def launches():
        with Counted() as mode, torch.no_grad():
            adapter.velocity(*inputs)
        return Counter(name.removeprefix("aten::") for name in mode.names)

    launches()
    unchanged = launches()
    with torch.no_grad():
        adapter.trainable()[0][1].zero_()
    changed = launches()
    assert changed - unchanged == {"_foreach_mul": 1, "_foreach_copy_": 1} and not unchanged - changed
    layers = without_casts(adapter)
    assert layers == 2 * 12 + 2 * 3
    assert (launches() - unchanged) == {"_to_copy": 2 * layers, "mul": layers}


CHANGES = {
    "an optimiser's step": lambda p, new: torch.optim.AdamW([p], lr=0.5).step(),
    "a fused optimiser's step": lambda p, new: torch.optim.AdamW([p], lr=0.5, fused=True).step(),
    "a swap with EMA weights": lambda p, new: torch._foreach_copy_([p.detach()], [new]),
    "a checkpoint read into live tensors": lambda p, new: p.detach().copy_(new),
    "a state dict": lambda p, new: nn.ParameterList([p]).load_state_dict({"0": new}),
    "weights at another place": lambda p, new: setattr(p, "data", new),
}
"""How a run changes a LoRA: `update/policy.py`, `run/checkpoint.py`, peft's loading, FSDP2's start."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_no_change_of_a_weight_is_missed(change, factor):
    """Of one layer's weight, seen by that layer and by the others; a graph from before keeps its own values."""
    model = with_lora(torch.bfloat16)
    fuse_lora(model)
    x = torch.randn(5, 24).bfloat16()
    weights = [p for p in model.parameters() if p.requires_grad]
    before = model(x)
    exact = copy.deepcopy(model)  # a copy casts in every forward
    want = torch.autograd.grad(exact(x).float().sum(), [p for p in exact.parameters() if p.requires_grad])
    weight = getattr(model.base_model.model.down, factor)["default"].weight
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        CHANGES[change](weight, torch.randn_like(weight))
    after = model(x)
    assert torch.equal(after, copy.deepcopy(model)(x)) and not torch.equal(after, before)
    got = torch.autograd.grad(before.float().sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- layers with one input
RANKS = {"alike": {}, "of several ranks": {"rank_pattern": {"k": 2}}, "of some": {"target_modules": ["q", "v"]}}


@pytest.mark.parametrize("options", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 1.5e-2)])
def test_layers_with_one_input_are_as_pefts(dtype, limit, options):
    model = with_lora(dtype, Three, **options)
    exact = copy.deepcopy(model).double()
    fuse_lora(model)
    x = torch.randn(2, 5, 24).to(dtype)
    of_each = [40, 16, 40]
    joined_truth, *truth = results(exact, x.double())
    joined, *found = results(model, x)
    found += joined.split(of_each, -1)
    truth += joined_truth.split(of_each, -1)
    for got, want in zip(found, truth, strict=True):
        assert got.shape == want.shape and (got.double() - want).norm() <= limit * want.norm()
    with torch.no_grad():
        assert torch.equal(model(x), joined)
    with model.disable_adapter():
        base = model(x)
    for name, p in model.named_parameters():
        p.data = p.data * 0 if "lora_B" in name else p.data
    assert torch.equal(model(x), base), "a LoRA of zeros changes nothing"


def test_layers_with_one_input_read_it_once(monkeypatch):
    """Of A's products, forward; each layer is called as a module, in order, when its output is asked for."""
    model = with_lora(torch.float32, Three)
    fuse_lora(model)
    inner = model.base_model.model
    called = []
    for name in ("q", "k", "v"):
        getattr(inner, name).register_forward_hook(lambda *_, name=name: called.append(name))
    reads = []
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, *bias: reads.append(tuple(w.shape)) or real(x, w, *bias))
    made = outputs((inner.q, inner.k, inner.v), torch.randn(3, 24))
    next(made)
    assert called == ["q"]
    assert len(list(made)) == 2 and called == ["q", "k", "v"]
    assert sorted(reads) == sorted([(12, 24), (40, 24), (16, 24), (40, 24)])
