"""LoRA layers and the rotary embedding: as near to fp64 as peft's and diffusers' own, and what stays theirs."""

import copy
from unittest import mock

import pytest
import torch
from diffusers.models import embeddings
from families import SIZES, case_of, conditions, noise, policy
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import nn

from prefgrpo.models import rotary
from prefgrpo.models.lora import LoraLinear, fuse_lora
from prefgrpo.models.rotary import fuse_rotary, stock, stock_rotary


class Block(nn.Module):
    """Two Linears, the second without bias."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 16, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def with_lora(dtype=torch.float32, **options):
    """A frozen Block with fp32 LoRA weights, none of them 0."""
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 12, "target_modules": ["up", "down"]} | options
    model = get_peft_model(Block(dtype).requires_grad_(False), LoraConfig(**options))
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
    [(torch.float32, 1.25), (torch.bfloat16, 3.0)],  # in bf16 peft computes A and B in fp32
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


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}], ids=str)
def test_layers_with_more_than_a_and_b_stay_pefts(options):
    model = with_lora(**(options | ({"target_modules": ["up"]} if "lora_bias" in options else {})))
    assert fuse_lora(model) == 0
    assert all(type(m) is Linear for m in model.modules() if isinstance(m, Linear))


# ---- rotary embedding
def frequencies(length, width, dtype=torch.float32):
    """cos and sin [length, width], as diffusers' models make them."""
    options = {"use_real": True, "repeat_interleave_real": True, "freqs_dtype": torch.float64}
    parts = embeddings.get_1d_rotary_pos_embed(width, torch.arange(length).double(), **options)
    return tuple(part.to(dtype) for part in parts)


def rotated(rotate, x, freqs, **options):
    """The result, and the gradient of x for a random gradient of the result."""
    x = x.detach().requires_grad_()
    y = rotate(x, freqs, **options)
    return y.detach(), torch.autograd.grad(y, x, torch.randn(y.shape, generator=torch.Generator()).to(y.dtype))[0]


FORMS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "slice": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("length, pairs", [(1, 1), (9, 8)])
def test_rotary_is_as_near_to_fp64_as_diffusers_own(length, pairs, sequence_dim, dtype, form):
    shape = (2, length, 3, 2 * pairs) if sequence_dim == 1 else (2, 3, length, 2 * pairs)
    x = FORMS[form](torch.randn(shape, generator=torch.Generator(), dtype=torch.float64).to(dtype))
    freqs = frequencies(length, 2 * pairs)
    exact = rotated(stock, x.double(), frequencies(length, 2 * pairs, torch.float64), sequence_dim=sequence_dim)
    ours, theirs = (rotated(f, x, freqs, sequence_dim=sequence_dim) for f in (rotary.apply_rotary_emb, stock))
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for got, want, true in zip(ours, theirs, exact, strict=True):
        assert got.dtype == want.dtype
        assert (got.double() - true).abs().max() <= (want.double() - true).abs().max() + eps * true.abs().max()


def test_other_forms_and_compiled_code_are_diffusers_own():
    x, freqs = torch.randn(2, 5, 5, 8), frequencies(5, 8)
    turns = torch.randn(1, 5, 4, dtype=torch.complex64)
    for given, options in (
        (freqs, {"use_real_unbind_dim": -2}),
        (frequencies(5, 8, torch.float64), {}),
        (turns, {"use_real": False}),
    ):
        assert torch.equal(rotary.apply_rotary_emb(x, given, **options), stock(x, given, **options))
    with pytest.raises(ValueError, match="should be 1 or 2"):
        rotary.apply_rotary_emb(x, freqs, sequence_dim=3)
    torch._dynamo.reset()
    ours, theirs = (
        torch.compile(lambda x, f=f: f(x, freqs, sequence_dim=1), fullgraph=True, backend="aot_eager")(x)
        for f in (rotary.apply_rotary_emb, stock)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["flux", "flux2_klein", "hunyuan_video", "hunyuan_video_15"])
def test_a_model_gives_the_same_with_either_rotary_embedding(name):
    """Forward and gradients; FLUX's module imported the function before it was replaced."""
    case = case_of(name)
    adapter, sampling = policy(case), case.sampling(SIZES[0])
    condition, x = conditions(adapter, case), noise(adapter, sampling)
    weights = [p for _, p in adapter.trainable()]

    def outputs():
        v = adapter.velocity(x, torch.full((2,), 0.6), condition, sampling)
        return [v.detach(), *torch.autograd.grad(v.square().sum(), weights, allow_unused=True)]

    with mock.patch.object(torch, "view_as_complex", wraps=torch.view_as_complex) as used:
        ours = outputs()
        assert used.call_count >= 4
        with stock_rotary():
            theirs, before = outputs(), used.call_count
        assert used.call_count == before
    assert sum(a is not None for a in ours) > 10
    for a, b in zip(ours, theirs, strict=True):
        assert a is b or (a - b).abs().max() <= 1e-4 * b.abs().max()
    assert fuse_rotary() == [] and embeddings.apply_rotary_emb is rotary.apply_rotary_emb
