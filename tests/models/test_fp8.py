"""A frozen base in fp8: the layer, and whole training steps of every family.

Why these cases: the layer against the stored weights in fp64, in both gradients, with biases, and under the LoRA that
shares its input, on random shapes. Whole steps of every family, because each calls its layers in its own way: in one
process, recomputed or not, with fused blocks, sharded, as replicas, and with split tokens; and runs that are resumed.
Split tokens change the order of attention's sums, so that a few inputs are rounded to another number of fp8.
"""

import copy
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from ranks import all_end, fuse_on_cpu, ranks, train, trained
from torch import nn
from world import ALONE, QUICK, case_of, conditions, folder, linked, perturb, recipe, rows, tiered, tiny_world, weights

from benchmarks import fp8_memory
from prefgrpo.config.loading import from_dict
from prefgrpo.models import MODELS, fp8
from prefgrpo.models import family as model_family
from prefgrpo.models.fp8 import Fp8Linear, to_fp8
from prefgrpo.models.lora import fuse_lora, outputs
from prefgrpo.parallel.world import join
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.tiny import pipelines
from prefgrpo.update.trajectory import replay
from tests.models.test_attention import opened
from tests.parallel import test_parallelize
from tests.parallel.test_parallelize import alone, compare

BF16 = torch.bfloat16
CPU = torch.device("cpu")
FULL = pytest.mark.full
IN_FP8 = fp8.multiplies_in_fp8(CPU, BF16)
NO_PRODUCTS = "this torch has no row-wise products in fp8 on CPUs"

# ---- the layer ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Layers with one input."""

    def __init__(self, width, out, bias):
        super().__init__()
        self.q = nn.Linear(width, out, bias)
        self.k = nn.Linear(width, out, bias)

    def forward(self, x):
        return torch.cat(list(outputs((self.q, self.k), x)), -1)


def with_lora(net, rank):
    net = inject_adapter_in_model(LoraConfig(r=rank, target_modules=["q", "k"]), net)
    fuse_lora(net)
    return net


def error(got, want):
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("cases", [range(40), pytest.param(range(40, 340), marks=FULL)], ids=lambda r: str(len(r)))
@pytest.mark.parametrize("products", ["fp8", "dequantised"])
def test_the_layer_is_its_stored_weights(cases, products, monkeypatch):
    """Forward: x's rows and W as stored, multiplied in fp64, and the LoRA of x itself. The gradient of x is that of the
    stored weights, the rounding of x passed through; those of A and B have the bits of a LoRA on a bf16 base."""
    if products == "fp8" and not IN_FP8:
        pytest.skip(NO_PRODUCTS)
    monkeypatch.setattr(fp8, "multiplies_in_fp8", lambda *_: products == "fp8")
    for seed in cases:
        pick = random.Random(seed)
        torch.manual_seed(seed)
        dtype = pick.choice((torch.float32, BF16))
        width = pick.choice((5, 16, 24, 64))
        out = pick.choice((7, 16, 48))
        net = with_lora(Attention(width, out, pick.random() < 0.5), pick.choice((1, 4)))
        for layer in (net.q, net.k):
            nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
            layer.base_layer.to(dtype)
        twin = copy.deepcopy(net)
        given = {}
        for name in ("q", "k"):
            base = getattr(net, name).base_layer
            given[name] = base.weight.double().clone()
            to_fp8(base, CPU, dtype)
            assert type(base) is Fp8Linear and base.weight.dtype == torch.float8_e4m3fn
        shape = (*pick.choice(((3,), (2, 5), (1, 1), (2, 3, 4))), width)
        x = torch.randn(shape).to(dtype).requires_grad_()
        y = net(x)
        g = torch.randn(y.shape).to(dtype)
        y.backward(g)
        assert (y.shape, y.dtype) == ((*shape[:-1], 2 * out), dtype)
        wide = x.detach().double().requires_grad_()
        flat = wide.flatten(0, -2)
        scale = flat.detach().abs().amax(1, keepdim=True).clamp_min(1e-30) / 448
        in_fp8 = (flat.detach() / scale).float().to(torch.float8_e4m3fn).double() * scale if products == "fp8" else flat
        want = []
        for name in ("q", "k"):
            layer = getattr(net, name)
            base = layer.base_layer
            weight = base.weight.double() * base.weight_scale.double()[:, None]
            assert error(weight, given[name]) < 0.04, "three bits of mantissa"
            down = layer.lora_A["default"].weight.detach().double()
            up = layer.lora_B["default"].weight.detach().double()
            passed = flat + (in_fp8 - flat).detach()
            bias = 0 if base.bias is None else base.bias.double()
            want.append(passed @ weight.t() + bias + layer.scaling["default"] * (flat @ down.t()) @ up.t())
        truth = torch.cat(want, -1).view(y.shape)
        truth.backward(g.double())
        limit = 2e-6 if dtype == torch.float32 else 1.5e-2
        assert error(y.detach(), truth.detach()) < max(limit, 1e-5), (seed, "output")
        assert error(x.grad, wide.grad) < limit, (seed, "gradient of x")
        twin(x.detach().requires_grad_()).backward(g)
        theirs = dict(twin.named_parameters())
        of_lora = [(name, p.grad) for name, p in net.named_parameters() if "lora_" in name]
        assert all(torch.equal(grad, theirs[name].grad) for name, grad in of_lora) and len(of_lora) == 4, seed


@pytest.mark.skipif(not IN_FP8, reason=NO_PRODUCTS)
def test_layers_with_one_input_quantise_it_once(monkeypatch):
    """And nothing is held once the input is gone; a change in place is seen."""
    seen = []
    real = fp8.quantise_rows
    monkeypatch.setattr(fp8, "quantise_rows", lambda x: (seen.append(tuple(x.shape)), real(x))[1])
    layers = [nn.Linear(24, 8).to(BF16) for _ in range(2)]
    for layer in layers:
        to_fp8(layer, CPU, BF16)
    seen.clear()
    x = torch.randn(3, 7, 24).to(BF16)
    before = [layer(x) for layer in layers]
    assert seen == [(21, 24)]
    x.mul_(2)
    after = [layer(x) for layer in layers]
    assert seen == [(21, 24)] * 2 and not torch.equal(before[0], after[0])
    text = torch.randn(1, 5, 24).to(BF16)
    in_turn = [layer(of) for layer in layers for of in (text, x)]
    assert seen == [(21, 24)] * 2 + [(5, 24)], "as joint attention projects its streams"
    assert all(torch.equal(made, alone) for made, alone in zip(in_turn[1::2], after, strict=True))
    del x, text
    assert not fp8._recent


def test_the_backward_pass_keeps_what_a_frozen_layer_keeps():
    """Bytes packed for the backward, of tensors that are no parameters."""
    kept = {}
    for kind in ("bf16", "fp8"):
        torch.manual_seed(0)
        net = with_lora(Attention(64, 64, True).to(BF16), 4)
        for name in ("q", "k") if kind == "fp8" else ():
            to_fp8(getattr(net, name).base_layer, CPU, BF16)
        own = {p.untyped_storage().data_ptr() for p in net.parameters()}
        sizes = {}

        def pack(t, own=own, sizes=sizes):
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = net(torch.randn(2, 9, 64).to(BF16).requires_grad_())
        kept[kind] = sum(sizes.values())
        del out
    assert 0 < kept["fp8"] <= kept["bf16"]


# ---- every family ---------------------------------------------------------------------------------------------------


def settings(case, place, dtype="bf16", **more):
    values = {"model": f"{place}/{case.family}", "family": case.family, "dtype": dtype, "fp8_base": True}
    values |= {"data": {"prompts": "p.txt", "max_length": case.max_length}, "train": {"lora_rank": 4, "lora_alpha": 8}}
    frames = {} if model_family(case.family).default_frames is None else {"frames": 5}
    return from_dict(values | {"rollout": {"height": 32, "width": 32, "batch_size": 2, **frames}} | more)


@pytest.mark.parametrize(
    "case, recomputed",
    [*tiered([case_of(name) for name in MODELS], 0.0), *tiered([case_of(name) for name in QUICK], 1.0)],
)
@pytest.mark.usefixtures("few_source_tokens")
def test_the_first_ratio_is_exactly_1(case, recomputed, tmp_path):
    """In bf16; what is in fp8: every Linear of the repeated blocks, except what diffusers keeps in fp32, and no other.
    The reference policy is the same base."""
    (tmp_path / case.family).symlink_to(folder(case.family))
    train = {"lora_rank": 4, "lora_alpha": 8, "gradient_checkpointing": recomputed}
    config = settings(case, tmp_path, train=train)
    adapter = opened(config, ALONE)
    sampling = case.sampling()
    condition = conditions(adapter, case)
    schedule = make_schedule(adapter.sigmas(sampling), "flow", 0.7, (1,))
    ids = torch.tensor([5, 9])

    def one(step=None):
        (made,) = rollout(adapter, schedule, condition, ids, sampling, seed=1).transitions
        return made

    first = one()
    with adapter.reference():
        assert torch.equal(one().x_next, first.x_next), "a LoRA of zeros changes nothing"
    perturb(adapter)
    step = one()
    assert not torch.equal(step.x_next, first.x_next)
    new = replay(adapter, schedule, condition, step, sampling)
    new.logp.sum().backward()
    assert torch.equal(new.logp.detach(), step.logp), "the first ratio is not exactly 1"
    gradients = [p.grad for _, p in adapter.trainable() if p.grad is not None]
    assert gradients and all(g.isfinite().all() for g in gradients) and any(g.any() for g in gradients)
    for net in adapter.modules().values():
        kept = set(net._keep_in_fp32_modules or ())
        blocks = {id(m) for block in adapter.blocks(net) for m in block.modules()}
        for name, module in net.named_modules():
            in_fp8 = id(module) in blocks and not kept & set(name.split(".")) and "lora_" not in name
            assert not isinstance(module, nn.Linear) or (type(module) is Fp8Linear) == in_fp8, name
        for name, p in net.named_parameters():
            wide = bool(kept & set(name.split("."))) or "lora_" in name or name.endswith("weight_scale")
            assert p.dtype in ((torch.float32,) if wide else (BF16, torch.float8_e4m3fn)), name


@FULL
@pytest.mark.parametrize("name", ["flux", "wan22"])
def test_a_run_is_resumed_bit_by_bit(name, tmp_path):
    """Its weights, and those of a run that was not stopped; its LoRA is loaded by the stock pipeline; a resumed run
    keeps its base."""
    place = tiny_world(tmp_path)
    frames = {"frames": 5} if name == "wan22" else {}
    options = {"dtype": "bf16", "eval": {"every": 0}, "rollout": frames}
    if name == "wan22":
        pipelines.make(name, place / name)
        options |= {"model": str(place / name), "family": name}
    for base in (True, False):
        trained(recipe(place, f"whole {base}", **options, fp8_base=base))
    stopped = recipe(place, "stopped", **options, fp8_base=True)
    trained(stopped, "--train.steps", "2")
    assert "resumed from" in trained(stopped, "--resume")
    assert weights(place / "runs" / "stopped" / "lora") == weights(place / "runs" / "whole True" / "lora")
    assert weights(place / "runs" / "whole True" / "lora") != weights(place / "runs" / "whole False" / "lora")
    assert all(row["policy/on_policy_error"] == 0 for row in rows(place / "runs" / "stopped"))

    code, output = train(recipe(place, "stopped", **options, fp8_base=False), "--resume")
    assert code == 2 and "fp8_base" in output, output


# ---- meshes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = linked(tmp_path_factory.mktemp("mesh"), ("flux", "wan22"))
    (made / "prompts.txt").write_text("\n".join(test_parallelize.TEXTS) + "\n")
    return made


def layouts():
    """Runs in the new process: training steps of two processes against those of one."""
    torch.set_num_threads(1)
    if "FUSED" in os.environ:
        fuse_on_cpu()
    for family in os.environ["FAMILY"].split():
        dtype = os.environ["DTYPE"]
        configs = {name: in_fp8(family, dtype, layout) for name, layout in LAYOUTS.items()}
        worlds = {name: join(config) for name, config in configs.items()}
        one = in_fp8(family, dtype, {})
        want = test_parallelize.one_step(one, alone(one))
        for name, config in configs.items():
            split = name == "ulysses"
            got = test_parallelize.one_step(config, worlds[name])
            compare(f"{family} {name}", got, want, not split, dtype="bf16" if split else dtype)
    os._exit(0)


LAYOUTS = {"replicas": {}, "shard": {"shard": 2}, "ulysses": {"ulysses": 2}}


def in_fp8(family, dtype, layout):
    return replace(test_parallelize.settings(os.environ["PLACE"], family, True, dtype, layout), fp8_base=True)


@pytest.mark.dist
@pytest.mark.parametrize(
    "family, dtype, env",
    [
        pytest.param("flux", "bf16", {}, marks=FULL),
        pytest.param("flux wan22", "fp32", {}, marks=FULL),
        pytest.param("flux wan22", "bf16", {"FUSED": "1"}, marks=FULL),
    ],
)
def test_a_layout_changes_nothing(place, family, dtype, env):
    file = place / f"{dtype}{''.join(env)}.yaml"
    given = {"PLACE": str(place), "FAMILY": family, "DTYPE": dtype} | env
    all_end(ranks(file, 2, hook=layouts, **given), seconds=600)


# ---- what it saves --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_page_shows_the_counted_bytes():
    """Of every denoiser and of a step of FLUX.1, as the command prints them; the shares of both that were the goals."""
    page = Path(fp8_memory.__file__).parents[1].joinpath("docs", "costs.md").read_text()
    of_base = fp8_memory.base_table()
    of_step = fp8_memory.step_table()
    for name, lines in {"fp8 base": of_base, "fp8 step": of_step}.items():
        assert "\n".join(lines) in page, f"{name}: run python -m benchmarks.fp8_memory"
    base = {row.split("|")[1].strip(): float(row.split("|")[-2]) for row in of_base[2:]}
    assert {name for name, ratio in base.items() if ratio > 0.52} == {"FLUX.2-klein-4B", "FLUX.3"}
    step = [float(row.split("|")[-2]) for row in of_step[2:]]
    assert step[0] <= 0.74 and step[1] < step[0]
