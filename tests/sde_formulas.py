"""The published step rules in fp64, written from the papers' equations, independently of prefgrpo.sde.rules.

Each returns (μ, standard deviation of x', the peers' std_dev_t) for scalars or columns σ, σ' that broadcast over x.
Also golden numbers, measured once in fp64 from those equations in their original (not affine) form.
"""

import math

import pytest
import torch

INPUTS = [0.5, -1.2], [-0.3, 0.8], [0.25, -0.6]
"""x, v and ε of the golden numbers."""
# rule, σ, σ', η, σ_1, σ_last, μ, s, x', mean log-prob
GOLDEN = [
    ("flow", 0.9, 0.8, 0.7, 0.95, 0.0, [0.41485, -1.0056], 0.6640783086, [0.58086958, -1.40404699], -0.6152083314),
    ("flow", 1.0, 0.9, 0.7, 0.9, 0.0, [0.4075, -0.986], 0.7, [0.5825, -1.406], -0.6678885893),
    ("dance", 0.9, 0.8, 0.3, 0.9, 0.0, [0.52765, -1.2744], 0.0948683298, [0.55136708, -1.331321], 1.3307018176),
    ("wan", 0.9, 0.8, 0.0, 0.95, 0.0, [0.51091213, -1.234514], 0.2703747399, [0.57850581, -1.39673884], 0.2833828233),
    ("cps", 0.9, 0.8, 0.8, 0.9, 0.0, [0.27019039, -0.66087923], 0.7608452130, [0.46040169, -1.11738635], -0.1222895488),
    ("cps", 0.1, 0.0, 0.8, 0.9, 0.0, [0.53, -1.28], 0.0, [0.53, -1.28], 0.0),
]
golden = pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c[0]}-{c[1]}")


def _double(*values):
    return [torch.as_tensor(v).double() for v in values]


def flow(x, v, sigma, sigma_next, eta, sigma_1):
    """Flow-GRPO eq. 9: dx = (v + g²/(2σ)·(x + (1 − σ)v)) dσ + g dw, g = η·sqrt(σ/(1 − σ)); σ_1 replaces σ = 1."""
    x, v, sigma, sigma_next, sigma_1 = _double(x, v, sigma, sigma_next, sigma_1)
    g = eta * torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigma_1, sigma)))
    return _euler_maruyama(x, v, sigma, sigma_next, g)


def wan(x, v, sigma, sigma_next, sigma_1, sigma_last):
    """Flow-GRPO's SDE, with g rising linearly in σ from the schedule's last σ to its second."""
    x, v, sigma, sigma_next, sigma_1, sigma_last = _double(x, v, sigma, sigma_next, sigma_1, sigma_last)
    return _euler_maruyama(x, v, sigma, sigma_next, sigma_last + (sigma_1 - sigma_last) * sigma)


def _euler_maruyama(x, v, sigma, sigma_next, g):
    d = sigma_next - sigma
    drift = v + g**2 / (2 * sigma) * (x + (1 - sigma) * v)
    return x + drift * d, g * torch.sqrt(-d), g


def dance(x, v, sigma, sigma_next, eta, score=True):
    """DanceGRPO eq. 8: dx = (v − ½η²·score) dσ + η dw, score of the interpolation path from x0 = x − σv."""
    x, v, sigma, sigma_next = _double(x, v, sigma, sigma_next)
    d = sigma_next - sigma
    drift = v
    if score:
        drift = v + 0.5 * eta**2 * (x - (1 - sigma) * (x - sigma * v)) / sigma**2
    s = eta * torch.sqrt(-d)
    return x + drift * d, s, s


def cps(x, v, sigma, sigma_next, eta):
    """arXiv 2509.05952: (1 − σ')·x0 + sqrt(σ'² − s²)·x1 with s = σ' sin(ηπ/2)."""
    x, v, sigma, sigma_next = _double(x, v, sigma, sigma_next)
    s = sigma_next * torch.sin(torch.as_tensor(eta).double() * math.pi / 2)
    return (1 - sigma_next) * (x - sigma * v) + torch.sqrt(sigma_next**2 - s**2) * (x + (1 - sigma) * v), s, s


def gaussian(x_next, mean, s):
    """Mean over all but the first dimension of log N(x'; μ, s²)."""
    s = torch.as_tensor(s)
    terms = -((x_next.double() - mean) ** 2) / (2 * s**2) - torch.log(s) - 0.5 * math.log(2 * math.pi)
    return terms.flatten(1).mean(1)


def square(x_next, mean):
    """CPS's published log-prob: −mean (x' − μ)²."""
    return -((x_next.double() - mean) ** 2).flatten(1).mean(1)
