"""sde_step and sde_logp against the published formula in torch, at the shapes of FLUX and Wan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Case, benchmarked, each_variant, randn
from prefgrpo.ops import PhiloxNoise, sde_logp, sde_step
from prefgrpo.sde.rules import sde_row

SHAPES = {"FLUX 512²": (1024, 64), "FLUX 1024²": (4096, 64), "Wan 480p 81f": (16, 21, 60, 104)}
F32, BF16 = torch.float32, torch.bfloat16
NAMES = {F32: "fp32", BF16: "bf16"}
SIGMA, SIGMA_NEXT, ETA = 0.9, 0.8, 0.7


def inputs(
    shape: tuple[int, ...], x_dtype: torch.dtype, v_dtype: torch.dtype, device: str, seed: int
) -> dict[str, Any]:
    """A step's tensors; v, v_ref and v_old differ slightly, and `columns` are the peers' coefficients."""
    x, v, eps, ref, old = (randn(*shape, device=device, seed=5 * seed + k) for k in range(5))
    velocities = {"v": v, "ref": v + 0.05 * ref, "old": v + 0.05 * old}
    coef = torch.tensor([sde_row("flow", SIGMA, SIGMA_NEXT, ETA)], device=device)
    index = torch.zeros(shape[0], dtype=torch.int64, device=device)
    ids = torch.arange(shape[0], device=device)
    sigma, following = (torch.full(shape[:1], s, device=device) for s in (SIGMA, SIGMA_NEXT))
    i = {"x": x.to(x_dtype), "eps": eps, "coef": coef, "index": index, "noise": PhiloxNoise(1, ids)}
    i |= {name: t.to(v_dtype) for name, t in velocities.items()}
    i["columns"] = peers.columns(sigma, following, ETA, len(shape))
    i["y"] = sde_step(i["x"], i["v"], coef, index, noise=eps).x_next
    return i


def step(i: dict[str, Any], noise: str = "eps") -> Tensor:
    """x'."""
    return sde_step(i["x"], i["v"], i["coef"], i["index"], noise=i[noise]).x_next


def replay(i: dict[str, Any], **more: Tensor) -> Tensor:
    """The gradient of the sum of all results."""
    v = i["v"].detach().requires_grad_()
    results = [t for t in sde_logp(i["x"], v, i["y"], i["coef"], i["index"], **more) if t is not None]
    return torch.autograd.grad(results, v, [torch.ones_like(t) for t in results])[0]


def peers_step(i: dict[str, Any], function: Any = peers.flow_step) -> Tensor:
    """x' by the published formula."""
    return function(i["x"], i["v"], i["eps"], *i["columns"])[0]


def peers_replay(i: dict[str, Any], function: Any = peers.flow_logp) -> Tensor:
    """The gradient of the published log-prob."""
    v = i["v"].detach().requires_grad_()
    return torch.autograd.grad(function(i["x"], v, i["y"], *i["columns"]).sum(), v)[0]


def kl_and_guard(i: dict[str, Any]) -> Tensor:
    """The replay of the default recipe."""
    return replay(i, v_ref=i["ref"], v_old=i["old"])


def cases(device: str) -> Iterator[Case]:
    """Given and counter-based noise; replay, and replay with KL and Guard, which no peer computes in one call."""
    plan = [("FLUX 512²", 1, F32, BF16), *(("FLUX 1024²", 4, x, v) for x, v in ((F32, F32), (F32, BF16), (BF16, BF16)))]
    everywhere = ("ours", "triton") if device == "cuda" else ("ours",)
    for name, batch, x, v in (*plan, ("Wan 480p 81f", 4, F32, BF16)):
        shape = (batch, *SHAPES[name])
        xb = x.itemsize
        vb = v.itemsize
        size = torch.Size(shape).numel()
        label = f"{name} ×{batch}"
        dtypes = f"x {NAMES[x]}, v {NAMES[v]}"
        make = partial(inputs, shape, x, v, device)
        fast, fast_logp = (torch.compile(f, dynamic=False) for f in (peers.flow_step, peers.flow_logp))
        taken = dict.fromkeys(everywhere, step)
        taken |= {"eager": peers_step, "compile": partial(peers_step, function=fast)}
        back = dict.fromkeys(everywhere, replay)
        back |= {"eager": peers_replay, "compile": partial(peers_replay, function=fast_logp)}
        drawn = dict.fromkeys(everywhere, partial(step, noise="noise"))
        both = dict.fromkeys(everywhere, kl_and_guard)
        for op, per_element, functions in (
            ("sde_step, noise given", 2 * xb + vb + 4, taken),
            ("sde_step, counter-based noise", 2 * xb + vb, drawn),
            ("sde_logp with gradient", 4 * xb + 3 * vb, back),
            ("sde_logp, KL and Guard with gradient", 4 * xb + 7 * vb, both),
        ):
            yield Case(op, label, dtypes, size * per_element, make, functions, tolerance=2e-2)


@each_variant(cases)
def test_sde_step(benchmark: Any, case: Case, variant: str) -> None:
    benchmarked(benchmark, case, variant)
