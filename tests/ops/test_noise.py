"""Counter-based noise: the same numbers from NumPy, torch, C++ and Triton, and for any batch or form of seed.

Oracles: Random123's known-answer vectors for Philox4x32-10, and an independent NumPy implementation of the whole
mapping. Distribution: moments and Kolmogorov-Smirnov distance of 2^18 numbers.
"""

import math
import random

import numpy as np
import pytest
import torch
from ops_cases import DEVICE, INTERPRETED, copy_of_noise, each_backend, few, seeds, serve

from prefgrpo.ops import PhiloxNoise, philox_normal
from prefgrpo.ops.noise import philox_uint32
from prefgrpo.sde.noise import initial_latents

try:
    import triton
    import triton.language as tl

    from prefgrpo.kernels.noise import BLOCK, chunk_of
except ImportError:
    triton = None

KNOWN = [  # counter, key, result (Random123's kat_vectors)
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def numpy_philox(counter, key):
    """Philox4x32-10 on uint64 arrays counter [4, n] and a key of two ints."""
    c, k = [np.asarray(w, np.uint64) for w in counter], list(key)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
        c = [(p1 >> shift) ^ c[1] ^ np.uint64(k[0]), p1 & low, (p0 >> shift) ^ c[3] ^ np.uint64(k[1]), p0 & low]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def numpy_normal(seed, sample, step, numel, first=0):
    """The normal numbers [numel] at an address from element `first` on, in fp64."""
    e = np.arange(first, first + numel, dtype=np.uint64)
    fill = [np.full(numel, w % 2**32, np.uint64) for w in (step, sample, sample >> 32)]
    words = numpy_philox([e // np.uint64(4), *fill], (seed % 2**32, seed >> 32))
    u = [((w >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23 for w in words]
    lane = (e % np.uint64(4)).astype(int)
    radius = np.sqrt(-2 * np.log(np.where(lane < 2, u[0], u[2])))
    angle = 2 * np.pi * np.where(lane < 2, u[1], u[3])
    return radius * np.where(lane % 2 == 0, np.cos(angle), np.sin(angle))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    assert [int(w[0]) for w in numpy_philox([np.array([c]) for c in counter], key)] == result
    block, step, low, high = counter
    sample = (high << 32 | low) - (2**64 if high >> 31 else 0)
    words = philox_uint32(key[1] << 32 | key[0], *(torch.tensor([t]) for t in (sample, step, block)))
    assert words.flatten().tolist() == result


@each_backend
@seeds
def test_same_noise_as_numpy(backend, cases):
    for case in few(backend, cases):
        pick = random.Random(case)
        seed = pick.choice([0, 2**64 - 1, pick.getrandbits(64)])
        sample = [pick.getrandbits(64) - 2**63 for _ in range(pick.randint(1, 3))]
        step, numel = pick.randint(-1, 1000), pick.choice([1, 3, 4, 130, 1025, 5000])
        ids = torch.tensor(sample, device=DEVICE)
        with serve(backend):
            got = philox_normal(seed, ids, torch.full_like(ids, step), numel)
        want = np.stack([numpy_normal(seed, i % 2**64, step % 2**32, numel) for i in sample])
        assert got.shape == want.shape
        assert np.abs(got.double().cpu().numpy() - want).max(initial=0.0) <= 1e-6, case


@pytest.mark.parametrize("integer", [np.int64, np.uint64, np.int32, np.uint8])
def test_numpy_integers_are_integers(integer):
    ids, x = torch.tensor([3, 99], device=DEVICE), torch.zeros(2, 9, device=DEVICE)
    for seed in (int(np.iinfo(integer).max), int(np.iinfo(integer).min)):
        want = philox_normal(seed, ids, ids, 9)
        assert torch.equal(philox_normal(integer(seed), ids, ids, integer(9)), want)
        assert torch.equal(copy_of_noise(x, PhiloxNoise(integer(seed), ids, ids)), want)


@each_backend
def test_it_is_standard_normal_and_independent_across_addresses(backend):
    numel = 2**14 if backend == "triton" and INTERPRETED else 2**18
    ids = torch.tensor([0, 1], device=DEVICE)
    with serve(backend):
        z = philox_normal(0, ids, torch.zeros_like(ids), numel).double().cpu()
    root = math.sqrt(numel)
    assert abs(z.mean(1)).max() < 5 / root and abs(z.var(1) - 1).max() < 5 * math.sqrt(2) / root
    assert abs((z[0] * z[1]).mean()) < 5 / root and abs((z[0, 1:] * z[0, :-1]).mean()) < 5 / root
    ordered = z[0].sort().values
    cdf = 0.5 * (1 + torch.erf(ordered / math.sqrt(2)))
    assert (cdf - (torch.arange(numel) + 0.5) / numel).abs().max() < 1.95 / root  # KS threshold at the 0.1 % level


def test_initial_latents_are_step_minus_one():
    ids = torch.tensor([4, 4, 9])
    x = initial_latents(2, ids, (3, 5))
    assert torch.equal(x[0], x[1]) and not torch.equal(x[0], x[2])
    assert np.abs(x[2].flatten().double().numpy() - numpy_normal(2, 9, 2**32 - 1, 15, 0)).max() <= 1e-6


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_samples_of_almost_two_to_the_31_elements():
    """The number of a sample's blocks, without an overflow on the way; Triton passes dim as int32 up to there."""
    out = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    kernel = triton.jit(place_of)
    for dim in (1, BLOCK, BLOCK + 1, 2**31 - BLOCK, 2**31 - BLOCK + 1, 2**31 - 1, 2**31, 2**31 + 5):
        chunks = -(-dim // BLOCK)
        for program in (0, chunks - 1, chunks, 3 * chunks + min(7, chunks - 1)):
            kernel[(1,)](out, program, dim)
            assert out.tolist() == [program // chunks, program % chunks * BLOCK], (dim, program)


def place_of(out_ptr, program, dim):
    i, start = chunk_of(program, dim, 2048)
    tl.store(out_ptr, i)
    tl.store(out_ptr + 1, start)
