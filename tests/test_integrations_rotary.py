"""The rotary embedding as a complex product: as near to fp64 as diffusers' own function."""

from unittest import mock

import pytest
import torch
from diffusers.models import embeddings
from families import SIZES, case_of, conditions, noise, policy
from hypothesis import given
from hypothesis import strategies as st

from prefgrpo.integrations import rotary
from prefgrpo.integrations.rotary import fuse_rotary, stock, stock_rotary


def frequencies(length, width, dtype=torch.float32):
    """cos and sin [length, width], as diffusers' models make them."""
    options = {"use_real": True, "repeat_interleave_real": True, "freqs_dtype": torch.float64}
    parts = embeddings.get_1d_rotary_pos_embed(width, torch.arange(length).double(), **options)
    return tuple(part.to(dtype) for part in parts)


def rotated(rotate, x, freqs, seed=0, **options):
    """The result, and the gradient of x for a random gradient of the result."""
    x = x.clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_()
    y = rotate(x, freqs, **options)
    generator = torch.Generator().manual_seed(seed)
    return y.detach(), torch.autograd.grad(y, x, torch.randn(y.shape, generator=generator).to(y.dtype))[0]


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    length=st.integers(1, 9),
    pairs=st.integers(1, 8),
    sequence_dim=st.sampled_from([1, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    form=st.sampled_from(["contiguous", "transposed", "part of a sequence", "part of a projection"]),
    seed=st.integers(0, 99),
)
def test_as_near_to_fp64_as_diffusers_own(batch, heads, length, pairs, sequence_dim, dtype, form, seed):
    generator, width = torch.Generator().manual_seed(seed), 2 * pairs
    shape = (batch, length, heads, width) if sequence_dim == 1 else (batch, heads, length, width)
    more = {"part of a sequence": (sequence_dim, 3), "part of a projection": (3, 4)}.get(form)
    full = [n + more[1] * (k == more[0]) if more else n for k, n in enumerate(shape)]
    x = torch.randn(full, generator=generator, dtype=torch.float64).to(dtype)
    x = x.narrow(more[0], more[1], shape[more[0]]) if more else x
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if form == "transposed" else x
    freqs, exact_freqs = frequencies(length, width), frequencies(length, width, torch.float64)
    ours, theirs, exact = (
        rotated(f, given, with_freqs, seed, sequence_dim=sequence_dim)
        for f, given, with_freqs in (
            (rotary.apply_rotary_emb, x, freqs), (stock, x, freqs), (stock, x.double(), exact_freqs)
        )
    )  # fmt: skip
    assert [part.dtype for part in ours] == [part.dtype for part in theirs]
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for got, want, true in zip(ours, theirs, exact, strict=True):
        assert (got.double() - true).abs().max() <= (want.double() - true).abs().max() + eps * true.abs().max()


@pytest.mark.parametrize(
    "options", [{"use_real_unbind_dim": -2}, {"use_real": False}, {}], ids=["halves", "complex", "fp64"]
)
def test_other_forms_are_diffusers_own(options):
    x, freqs = torch.randn(2, 3, 5, 8), frequencies(5, 8, torch.float32 if options else torch.float64)
    if options.get("use_real") is False:
        x, freqs = x.transpose(1, 2), torch.randn(1, 5, 4, dtype=torch.complex64)
    assert torch.equal(rotary.apply_rotary_emb(x, freqs, **options), stock(x, freqs, **options))
    with pytest.raises(ValueError, match="should be 1 or 2"):
        rotary.apply_rotary_emb(x, frequencies(5, 8), sequence_dim=3)


@pytest.mark.parametrize("name", ["flux", "flux2_klein", "hunyuan_video", "hunyuan_video_15"])
def test_a_model_gives_the_same_with_either(name):
    """Forward and gradients; FLUX's module imported the function before it was replaced."""
    case = case_of(name)
    adapter, sampling = policy(case), case.sampling(SIZES[0])
    condition, x = conditions(adapter, case), noise(adapter, sampling)

    def results():
        v = adapter.velocity(x, torch.full((2,), 0.6), condition, sampling)
        weights = [p for _, p in adapter.trainable()]
        return [v.detach(), *torch.autograd.grad(v.square().sum(), weights, allow_unused=True)]

    with mock.patch.object(torch, "view_as_complex", wraps=torch.view_as_complex) as used:
        ours = results()
        assert used.call_count >= 4
        with stock_rotary():
            theirs, before = results(), used.call_count
        assert used.call_count == before
    assert sum(a is not None for a in ours) > 10
    for a, b in zip(ours, theirs, strict=True):
        assert a is b or (a - b).abs().max() <= 1e-4 * b.abs().max()
    assert fuse_rotary() == [] and embeddings.apply_rotary_emb is rotary.apply_rotary_emb


def test_compiled_code_uses_diffusers_own():
    x, freqs = torch.randn(2, 5, 3, 8), frequencies(5, 8)
    torch._dynamo.reset()
    ours, theirs = (
        torch.compile(lambda x, f=f: f(x, freqs, sequence_dim=1), fullgraph=True, backend="aot_eager")(x)
        for f in (rotary.apply_rotary_emb, stock)
    )
    assert torch.equal(ours, theirs)
