"""`low_rank_gelu` against its formula in fp64."""

import pytest
import torch
from ops_cases import DEVICE, HERE
from torch.nn import functional as F

from prefgrpo.ops import use_backend
from prefgrpo.ops.low_rank_gelu import low_rank_gelu

SHAPES = [(1, 1, 1), (5, 24, 4), (40, 70, 64), (130, 200, 100)]


@pytest.mark.parametrize("backend", [name for name in HERE if name in ("triton", "torch")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_near_to_fp64(shape, dtype, backend):
    """In bf16 nearer than torch's operators; equal bits with and without gradient, in any batch, and at a LoRA of 0."""
    rows, channels, rank = shape
    torch.manual_seed(rows)

    def random(*size):
        return torch.randn(*size).to(dtype).to(DEVICE)

    x = random(rows, channels)
    small = random(rows, 3 * rank)[:, rank : 2 * rank]  # the parts of a product for several layers have strides
    up = random(channels, rank)
    g = random(rows, channels)

    def run(op, tensors, upstream):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = op(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    def exact(x, small, up):  # z/2 (1 + tanh(√(2/π) (z + .044715 z³)))
        z = x + torch.einsum("nr,cr->nc", small, up)
        return z / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z.pow(3))))

    tensors = (x, small, up)
    truth = run(exact, [t.double() for t in tensors], g.double())
    eager = run(lambda x, s, u: F.gelu(torch.addmm(x, s, u.t()), approximate="tanh"), tensors, g)
    with use_backend(backend), torch.no_grad():
        alone = low_rank_gelu(*tensors)
        part = low_rank_gelu(x[:1], small[:1], up)
        zero = low_rank_gelu(x, small, torch.zeros_like(up))
        without = low_rank_gelu(x, None, None)
        with torch.enable_grad():
            got = run(low_rank_gelu, tensors, g)
    assert torch.equal(got[0], alone) and torch.equal(zero, without)
    assert backend == "torch" or torch.equal(alone[:1], part)
    for ours, theirs, want in zip(got, eager, truth, strict=True):
        limit = 2e-6 if dtype == torch.float32 else 1.05 * error(theirs, want) + 1e-3
        assert error(ours, want) <= limit


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def test_what_does_not_fit_is_refused():
    x = torch.zeros(3, 4)
    for small, up in ((torch.zeros(2, 1), torch.zeros(4, 1)), (torch.zeros(3, 1), torch.zeros(4, 2))):
        with pytest.raises(ValueError, match=r"expected \[N, C\], \[N, r\] and \[C, r\]"):
            low_rank_gelu(x, small, up)
