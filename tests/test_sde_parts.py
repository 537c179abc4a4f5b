"""Samples split over processes, as in sequence parallelism: noise, x', log-probs and gradients are those of the whole.

Two and four real processes with gloo on every backend; cuts at multiples of 2048 elements, where the sums are exactly
those of the whole, and at other multiples of 4, where log-probs agree within rounding. The oracle is the unsplit op.
"""

import pytest
import torch
import torch.distributed as dist
from ops_cases import BF16, DEVICE, F32, HERE, INTERPRETED, assert_close, make, serve
from torch.multiprocessing.spawn import start_processes

from prefgrpo.ops import Part, PhiloxNoise, backend_of, philox_normal, sde_logp, sde_step

TOKENS = 128
CHANNELS = 64
CUTS = {2: [[0, 32, 128], [0, 3, 128]], 4: [[0, 32, 64, 96, 128], [0, 33, 34, 75, 128]]}
"""Token ranges of the processes: on the blocks of 2048 elements, and not."""


def replay(c, y, index, keep, part=None):
    """(logp, KL, log-ratio, dv) of the tokens `keep`."""
    v = c.v[:, keep].clone().requires_grad_()
    tokens = (c.x[:, keep], v, y, c.coef, index)
    out = sde_logp(*tokens, v_ref=c.v_ref[:, keep], v_old=c.v_old[:, keep], part=part)
    upstream = torch.linspace(0.5, 2.0, len(v), device=DEVICE)
    return [*(t.detach() for t in out), *torch.autograd.grad([*out], v, [upstream, upstream, -upstream])]


def add(sums):
    dist.all_reduce(sums)
    return sums


def check(rank, world, batch, x_dtype, index):
    """One process: its part of the step and of the replay against the whole."""
    c = make((TOKENS, CHANNELS), batch, x_dtype, BF16)
    index = c.index if index is None else index
    ids = torch.arange(batch, device=DEVICE) + 2**40
    size = TOKENS * CHANNELS
    for noise in (PhiloxNoise(7, ids), PhiloxNoise(7, ids, 5), c.eps, None):
        whole = sde_step(c.x, c.v, c.coef, index, noise=noise, out_dtype=BF16)
        want = replay(c, whole.x_next, index, slice(None))
        for cuts in CUTS[world]:
            first, last = cuts[rank : rank + 2]
            keep = slice(first, last)
            part = Part(first * CHANNELS, size, add)
            given = noise[:, keep] if isinstance(noise, torch.Tensor) else noise
            step = sde_step(c.x[:, keep], c.v[:, keep], c.coef, index, noise=given, out_dtype=BF16, part=part)
            logp, kl, log_ratio, dv = replay(c, step.x_next, index, keep, part)
            drawn = philox_normal(7, ids, 5, (last - first) * CHANNELS, offset=part.offset)
            assert torch.equal(drawn, philox_normal(7, ids, 5, size)[:, part.offset : last * CHANNELS])
            assert torch.equal(step.x_next, whole.x_next[:, keep]), "noise or x' differ"
            assert noise is None or torch.equal(step.logp, logp), "step and replay differ"
            assert torch.equal(dv, want[3][:, keep]), "gradients differ"
            is_exact = cuts is CUTS[world][0] and backend_of(DEVICE) != "torch"
            for mine, plain in zip((step.logp, logp, kl, log_ratio), (whole.logp, *want[:3]), strict=True):
                assert_close(mine, plain, 0.0 if is_exact and mine is not log_ratio else 2e-6, 1e-6 * (not is_exact))


def process(rank, world, place):
    dist.init_process_group("gloo", store=dist.FileStore(str(place), world), rank=rank, world_size=world)
    torch.set_num_threads(1)
    for backend in HERE:
        with serve(backend):
            is_slow = backend == "triton" and INTERPRETED
            check(rank, world, 1 if is_slow else 3, BF16, 1)
            if not is_slow:
                check(rank, world, 3, F32, None)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", CUTS)
def test_a_sample_split_over_processes_is_the_whole_sample(world, tmp_path):
    start_processes(process, (world, tmp_path / "store"), nprocs=world, start_method="spawn")


def wrong(offset, size):
    c = make((4, 6), 3)
    return sde_step(c.x, c.v, c.coef, c.index, noise=c.eps, part=Part(offset, size, add))


@pytest.mark.parametrize(("offset", "size", "message"), [
    (2, 100, "offset: expected a multiple of 4"), (-4, 100, "offset: expected a multiple of 4"),
    (80, 100, r"expected offset \+ 24 elements of x within size 100, got 80"),
])  # fmt: skip
def test_a_part_that_is_none_is_refused(offset, size, message):
    with pytest.raises(ValueError, match=message):
        wrong(offset, size)
