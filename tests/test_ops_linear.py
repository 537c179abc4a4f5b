"""oneDNN's linear layers: as near to fp64 as torch's own, on any CPU that has oneDNN."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from prefgrpo.ops import linear as onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    monkeypatch.setattr(onednn, "FASTER", True)
    monkeypatch.setattr(onednn, "LARGE", 1)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)


@pytest.fixture
def products(monkeypatch):
    """Shapes of x in every product by oneDNN."""
    seen, product = [], onednn._product
    monkeypatch.setattr(onednn, "_product", lambda x, *rest: seen.append(tuple(x.shape)) or product(x, *rest))
    return seen


CPUS = {"AuthenticAMD 26": True, "AuthenticAMD 25": False, "GenuineIntel 26": False, "": False}


@pytest.mark.parametrize("cpu", CPUS)
def test_it_is_used_on_amd_cpus_with_512_bit_units(tmp_path, monkeypatch, cpu):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    if cpu:
        vendor, family = cpu.split()
        (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 2\n")
    assert onednn._is_faster(tmp_path / "cpuinfo") == CPUS[cpu]


def results(function, x, weight, bias, dtype, needs):
    """Output, and the gradients of those inputs that need one."""
    given = [None if t is None else t.detach().to(dtype).requires_grad_(n) for t, n in zip((x, weight, bias), needs)]
    out = function(*given)
    wanted = [t for t in given if t is not None and t.requires_grad]
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(dtype)
    return [out.detach(), *(torch.autograd.grad(out, wanted, upstream) if wanted else ())]


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    with_bias=st.booleans(),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    form=st.sampled_from(["contiguous", "transposed", "every second channel", "expanded"]),
    seed=st.integers(0, 99),
)
def test_as_near_to_fp64_as_torchs_own(shape, sizes, with_bias, needs, form, seed):
    torch.manual_seed(seed)
    width, out = sizes
    x, weight = torch.randn(*shape, width), torch.randn(out, width)
    if form == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif form == "every second channel":
        x = torch.randn(*shape, 2 * width)[..., ::2]
    elif form == "expanded":
        x = x[:1].expand(*x.shape)  # as a shared prompt's embedding is
    bias = torch.randn(out) if with_bias else None
    ours = results(onednn.linear, x, weight, bias, torch.float32, needs)
    exact = results(F.linear, x, weight, bias, torch.float64, needs)
    for got, true in zip(ours, exact, strict=True):
        assert got.shape == true.shape and got.dtype == torch.float32
        torch.testing.assert_close(got, true.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["small", "one row", "bf16", "fp64", "fake", "autocast", "mixed", "meta"])
def test_other_inputs_are_torchs_own(kind, products, monkeypatch):
    layer, x = nn.Linear(6, 5), torch.randn(3, 6)
    if kind == "small":
        monkeypatch.setattr(onednn, "LARGE", 3 * 6 * 5 + 1)
    if kind in ("bf16", "fp64", "meta"):
        to = {"bf16": torch.bfloat16, "fp64": torch.float64, "meta": "meta"}[kind]
        layer, x = layer.to(to), x.to(to)
    if kind == "one row":
        x = x[0]
    with (
        FakeTensorMode(allow_non_fake_inputs=True)
        if kind == "fake"
        else torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast") as mode
    ):
        x = mode.from_tensor(x) if kind == "fake" else x
        if kind == "mixed":
            with pytest.raises(RuntimeError, match="dtype"):
                onednn.linear(x.double(), layer.weight, layer.bias)
            return
        got, want = onednn.linear(x, layer.weight, layer.bias), layer(x)
    assert not products and got.dtype == want.dtype and got.shape == want.shape
    if kind not in ("fake", "meta"):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "shapes", [((3, 6), (5, 7), None), ((3, 6), (5, 6), (4,)), ((3, 6), (5, 6, 2), None)], ids=["in", "bias", "3-D"]
)
def test_wrong_shapes_are_torchs_own_errors(shapes):
    given = [None if shape is None else torch.randn(shape) for shape in shapes]
    with pytest.raises(RuntimeError) as theirs:
        F.linear(*given)
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        onednn.linear(*given)


def test_layers_are_turned_in_place_and_keep_their_names(products):
    """Only torch's own Linear layers; also under checkpointing, torch.compile and in-place changes of the output."""

    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), Special(5, 4), nn.Linear(4, 3, bias=False))
    before, x = {k: v.clone() for k, v in model.state_dict().items()}, torch.randn(2, 7, 6)
    want = model(x)
    assert onednn.use_onednn(model) == 2 and onednn.use_onednn(model) == 0
    assert [type(m) for m in model] == [onednn.Linear, nn.GELU, Special, onednn.Linear]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.testing.assert_close(model(x), want)
    assert products == [(2, 7, 6), (2, 7, 4)]
    whole = torch.autograd.grad(model(x).square().sum(), model.parameters())
    again = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    products.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert not products
    torch.testing.assert_close(compiled, want)


def test_nothing_changes_where_it_is_not_faster(monkeypatch, products):
    monkeypatch.setattr(onednn, "FASTER", False)
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(2, 6)
    assert onednn.use_onednn(model) == 0 and type(model[0]) is nn.Linear
    assert torch.equal(onednn.linear(x, model[0].weight, model[0].bias), model(x)) and not products
