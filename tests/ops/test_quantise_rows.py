"""`quantise_rows` against fp64: random shapes, layouts and sizes of numbers, and what a row of fp8 can hold at most."""

import random

import pytest
import torch
from ops_cases import DEVICE, HERE, INTERPRETED

from prefgrpo.ops import use_backend
from prefgrpo.ops.quantise_rows import FP8, dequantise_rows, quantise_rows

FEW = range(40)
SEEDS = [
    pytest.param(backend, cases, marks=marks, id=f"{backend}-{cases[0]}-{cases[-1]}")
    for backend in HERE
    if backend in ("triton", "torch")
    for cases, marks in (
        (FEW, ()),
        (range(len(FEW), 300 if backend == "triton" and INTERPRETED else 1100), pytest.mark.full),
    )
]
NUMBERS = torch.tensor([k / 2**9 for k in range(8)] + [m / 8 * 2.0**e for e in range(-6, 9) for m in range(8, 16)])[:-1]
"""All numbers of e4m3 from 0 on: subnormal ones, then those with exponents of -6 to 8; the last would be NaN."""


def drawn(seed):
    """x [N, K] with rows of all sizes."""
    pick = random.Random(seed)
    rows = pick.choice((1, 2, 3, 7, 33))
    channels = pick.choice((1, 2, 5, 16, 63, 64, 100, 384, 1025))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, channels, generator=generator)
    x *= 10 ** torch.empty(rows, 1).uniform_(-12, 12, generator=generator)
    if pick.random() < 0.3:
        x *= torch.rand(x.shape, generator=generator).pow(8)  # mostly small, as activations are
    if pick.random() < 0.2:
        x[pick.randrange(rows)] = 0
    x = x.to(pick.choice((torch.float32, torch.bfloat16)))
    if pick.random() < 0.3:
        x = torch.cat([x, x], 1)[:, channels:]
    return x.to(DEVICE)


@pytest.mark.parametrize(("backend", "cases"), SEEDS)
def test_a_row_is_its_nearest_numbers_in_fp8(backend, cases):
    """scale = max |x| / 448 in fp64, to fp32's rounding; no number of e4m3 is nearer to x / scale."""
    with use_backend(backend):
        for seed in cases:
            x = drawn(seed)
            y, scale = quantise_rows(x)
            assert (y.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, (len(x), 1))
            largest = x.double().abs().amax(1, keepdim=True)
            assert torch.allclose(scale.double(), largest / 448, rtol=2e-7, atol=1e-30), seed
            wanted = (x.double() / scale.double()).abs()
            error = (y.double().abs() - wanted).abs()
            nearest = (NUMBERS.double().to(DEVICE) - wanted[..., None]).abs().amin(-1)
            assert bool((error <= nearest + 1e-7 * wanted).all()), seed
            assert bool((y.double() * x.double() >= 0).all()), seed


@pytest.mark.parametrize("backend", [name for name in HERE if name in ("triton", "torch")])
def test_a_row_depends_on_itself_alone(backend):
    """In any batch and layout, and of a tensor with a gradient."""
    x = torch.cat(
        [drawn(seed)[:1, :1].expand(1, 100) * torch.randn(1, 100).to(DEVICE) for seed in range(20)]
    ).bfloat16()
    with use_backend(backend):
        whole = quantise_rows(x)
        for part in (slice(0, 1), slice(3, 9), slice(19, 20)):
            for alone in (x[part], x[part].clone().requires_grad_(), torch.cat([x, x], 1)[part, 100:]):
                y, scale = quantise_rows(alone)
                assert torch.equal(y.view(torch.uint8), whole[0][part].view(torch.uint8))
                assert torch.equal(scale, whole[1][part])
                assert not y.requires_grad and not scale.requires_grad


@pytest.mark.parametrize("backend", [name for name in HERE if name in ("triton", "torch")])
def test_what_no_scale_can_hold(backend):
    """NaN in a row makes the whole row NaN; infinity NaN or 0; zeros stay zeros. Other rows do not change."""
    x = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.0, -0.0], [1e-38, 0.0]]).to(DEVICE)
    with use_backend(backend):
        y, scale = quantise_rows(x)
    value = y.float() * scale
    assert torch.equal(value[0], x[0]) and torch.isnan(value[1]).all()
    assert bool((torch.isnan(value[2]) | (value[2] == 0)).all()) and torch.isnan(value[2, 0])
    assert torch.equal(value[3].abs(), torch.zeros(2).to(DEVICE)) and torch.isfinite(value[4]).all()


@pytest.mark.parametrize("shape, dtype", [((4,), torch.float32), ((2, 0), torch.float32), ((2, 3), torch.int32)])
def test_what_does_not_fit_is_refused(shape, dtype):
    with pytest.raises(ValueError, match=r"x: expected bf16, fp32, fp16 or fp64 \[N, K\], K > 0, got"):
        quantise_rows(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("backend", [name for name in HERE if name in ("triton", "torch")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_back_exactly(backend, dtype):
    """Every number of e4m3 times scales of all sizes: the product in fp64, rounded to fp32 and to the dtype."""
    y = torch.arange(256, dtype=torch.uint8).repeat(40, 1).to(DEVICE)
    scale = (10 ** torch.linspace(-30, 30, 40))[:, None].to(DEVICE)
    numbers = torch.cat([NUMBERS, torch.tensor([torch.nan])])
    wanted = (torch.cat([numbers, -numbers]).double().to(DEVICE) * scale.double()).float().to(dtype)
    with use_backend(backend):
        got = dequantise_rows(y.view(FP8), scale, dtype)
        part = dequantise_rows(y.view(FP8)[3:5, :100], scale[3:5], dtype)
    assert got.dtype == dtype and torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(part.nan_to_num(7.0), got[3:5, :100].nan_to_num(7.0))


def test_what_does_not_come_back_is_refused():
    with pytest.raises(
        ValueError, match=r"expected y float8_e4m3fn \[N, K\] and scale fp32 \[N, 1\], got y torch.uint8"
    ):
        dequantise_rows(torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2, 1), torch.float32)
    with pytest.raises(ValueError, match=r"got y torch.float8_e4m3fn \[2, 3\], scale torch.float32 \[2\]"):
        dequantise_rows(torch.zeros(2, 3).to(FP8), torch.ones(2), torch.float32)
