"""LoRA layers against peft's own and fp64: results, gradients, and what stays peft's."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import nn

from prefgrpo.integrations.lora import LoraLinear, fuse_lora

LEAD = {"[in]s": (7,), "tokens": (2, 5), "images": (2, 3, 4)}


class Block(nn.Module):
    """Two Linears, the second without bias."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 16, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def with_lora(dtype=torch.float32, seed=0, **options):
    """A frozen Block with fp32 LoRA weights, none of them 0."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 12, "target_modules": ["up", "down"]} | options
    model = get_peft_model(Block(dtype).requires_grad_(False), LoraConfig(**options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) / 5
    return model


def results(model, x, autocast):
    """The output, and the gradients of x and of all trained weights."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().sum().backward() if y.dtype != torch.float64 else y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("lead", LEAD.values(), ids=LEAD)
@pytest.mark.parametrize(
    "base, given, autocast, factor",
    [
        (torch.float32, torch.float32, False, 1.25),
        (torch.float32, torch.float32, True, 1.25),
        (torch.bfloat16, torch.bfloat16, True, 1.25),
        (torch.bfloat16, torch.float32, True, 1.25),
        (torch.bfloat16, torch.bfloat16, False, 3.0),  # peft computes A and B in fp32 here
    ],
)
def test_as_near_to_fp64_as_pefts_layer(base, given, autocast, factor, lead):
    peft = with_lora(base)
    ours, exact = copy.deepcopy(peft), copy.deepcopy(peft).double()
    assert fuse_lora(ours) == 2 and fuse_lora(ours) == 0
    x = torch.randn(*lead, 24).to(given)
    if len(lead) == 2:
        x = x.transpose(0, 1)  # not contiguous
    truth = results(exact, x.double(), False)
    runs = [results(model, x, autocast) for model in (peft, ours)]
    for index, (a, b, want) in enumerate(zip(*runs, truth, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape == want.shape
        theirs, mine = (float((value.double() - want).norm() / want.norm()) for value in (a, b))
        assert mine <= factor * theirs + 1e-7, f"result {index}: error {mine:.2e}, peft's {theirs:.2e}"


def test_a_scaling_of_a_power_of_two_gives_pefts_bits():
    peft = with_lora(lora_alpha=8)
    ours = copy.deepcopy(peft)
    fuse_lora(ours)
    x = torch.randn(3, 24)
    assert all(torch.equal(a, b) for a, b in zip(results(peft, x, False), results(ours, x, False), strict=True))


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
    ours.merge_adapter()
    torch.testing.assert_close(ours(x), before)
    ours.unmerge_adapter()
    torch.testing.assert_close(ours(x), before)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}], ids=lambda given: next(iter(given))
)
def test_layers_with_more_than_a_and_b_stay_pefts(options):
    model = with_lora(**(options | ({"target_modules": ["up"]} if "lora_bias" in options else {})))
    assert fuse_lora(model) == 0
    assert all(type(m) is Linear for m in model.modules() if isinstance(m, Linear))


def test_compiled_without_a_graph_break():
    model = with_lora()
    assert fuse_lora(model) == 2 and sum(isinstance(m, LoraLinear) for m in model.modules()) == 2
    x = torch.randn(2, 5, 24)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, x, False), results(model, x, False))
