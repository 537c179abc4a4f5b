"""The cases: each op at the shapes of FLUX and Wan, and the peers' torch code, eager and with torch.compile.

Invariant: the variants' results are compared before timing, so that wrong results are never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Case, randn
from prefgrpo.ops import (
    PhiloxNoise,
    sde_logp,
    sde_step,
    philox_normal,
    policy_loss,
    winrate_advantage,
)
from prefgrpo.sde.rules import sde_row

SHAPES = {
    "FLUX 512²": (1024, 64),
    "FLUX 1024²": (4096, 64),
    "Wan 480p 81f": (16, 21, 60, 104),
    "Wan 720p 81f": (16, 21, 90, 160),
}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
F32, BF16 = torch.float32, torch.bfloat16
HEADLINE = ("FLUX 1024²", 4)
LARGE = (("FLUX 1024²", 32), ("Wan 480p 81f", 4))
"""Cases with at least 8M elements, which the targets for GPUs use."""
SIGMA, SIGMA_NEXT, ETA = 0.9, 0.8, 0.7


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for this shape only; compiled code for other shapes is dropped."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


class Latents:
    """Inputs of one shape."""

    def __init__(self, name: str, batch: int, x_dtype: torch.dtype, v_dtype: torch.dtype, device: str) -> None:
        shape = (batch, *SHAPES[name])
        self.x, self.eps = randn(*shape, device=device, dtype=x_dtype), randn(*shape, device=device)
        self.v = randn(*shape, device=device).mul(0.7).to(v_dtype)
        self.coef = torch.tensor([sde_row("flow", SIGMA, SIGMA_NEXT, ETA)], device=device)
        self.index = torch.zeros(batch, dtype=torch.int64, device=device)
        self.sample = torch.arange(batch, device=device)
        sigma, following = (torch.full((batch,), s, device=device) for s in (SIGMA, SIGMA_NEXT))
        self.columns = peers.columns(sigma, following, ETA, len(shape))
        self.label, self.dtypes = f"{name} ×{batch}", f"x {NAMES[x_dtype]}, v {NAMES[v_dtype]}"
        self.size = self.x.numel()
        self.xb, self.vb = self.x.element_size(), self.v.element_size()


def _same(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    worst = float((ours.detach().float() - theirs.detach().float()).abs().max() / theirs.detach().float().abs().max())
    if not worst <= tolerance:
        raise RuntimeError(f"a benchmark's variants differ by {worst:.3g}: it would time wrong results")


def _grad(t: Tensor) -> Tensor:
    assert t.grad is not None
    return t.grad


def step_given(d: Latents, with_compile: bool) -> Case:
    """sde_step, ε given."""
    noise = d.eps

    def ours() -> Any:
        return sde_step(d.x, d.v, d.coef, d.index, noise=noise)

    def eager() -> Any:
        return peers.flow_step(d.x, d.v, noise, *d.columns)

    _same(ours()[0], eager()[0], 1e-6 if d.xb == 4 else 1e-2)
    _same(ours()[1], eager()[1], 1e-4)
    out = torch.empty_like(d.x)
    calls = {
        "ours": ours,
        "eager": eager,
        "ours, out=": lambda: sde_step(d.x, d.v, d.coef, d.index, noise=noise, out=out),
    }
    if with_compile:
        fast = compiled(peers.flow_step)
        calls["compile"] = lambda: fast(d.x, d.v, noise, *d.columns)
    per, text = 2 * d.xb + d.vb + 4, f"{d.xb} x + {d.vb} v + 4 ε + {d.xb} x'"
    return Case("sde_step, noise given", d.label, d.dtypes, d.size * per, text, calls)


def step_addressed(d: Latents, with_compile: bool) -> Case:
    """sde_step, ε addressed; the peers draw theirs."""
    address = PhiloxNoise(1, d.sample)
    calls = {
        "ours": lambda: sde_step(d.x, d.v, d.coef, d.index, noise=address),
        "eager": lambda: peers.flow_step(d.x, d.v, None, *d.columns),
        "randn alone": lambda: torch.randn(d.x.shape, device=d.x.device),
        "noise alone": lambda: philox_normal(1, d.sample, d.index, d.x[0].numel()),
    }
    if with_compile:
        fast = compiled(peers.flow_step)
        calls["compile"] = lambda: fast(d.x, d.v, None, *d.columns)
    per, text = 2 * d.xb + d.vb, f"{d.xb} x + {d.vb} v + {d.xb} x'"
    return Case("sde_step, noise addressed", d.label, d.dtypes, d.size * per, text, calls)


def replay(d: Latents, with_compile: bool) -> Case:
    """sde_logp, forward and backward with respect to v."""
    y = sde_step(d.x, d.v, d.coef, d.index, noise=d.eps).x_next
    v = d.v.clone().requires_grad_()

    def run(function: Callable[..., Tensor], *rest: Tensor) -> Tensor:
        v.grad = None
        function(d.x, v, y, *rest).sum().backward()
        return _grad(v)

    def ours() -> Tensor:
        return run(lambda *a: sde_logp(*a).logp, d.coef, d.index)

    def eager() -> Tensor:
        return run(peers.flow_logp, *d.columns)

    _same(ours(), eager(), 1e-3 if d.vb == 4 else 1e-2)
    calls = {"ours": ours, "eager": eager}
    if with_compile:
        fast = compiled(peers.flow_logp)
        calls["compile"] = lambda: run(fast, *d.columns)
    per = 2 * (2 * d.xb + d.vb) + d.vb
    text = f"2·({d.xb} x + {d.vb} v + {d.xb} x') + {d.vb} dv"
    return Case("sde_logp, forward + backward", d.label, d.dtypes, d.size * per, text, calls)


def small_policy(groups: int, group: int, device: str) -> Case:
    """policy_loss with metrics and gradient, against one eager call."""
    logp = randn(groups * group, device=device).mul(1e-3).requires_grad_()
    old, adv = torch.zeros(groups * group, device=device), randn(groups * group, device=device)

    def ours() -> Tensor:
        logp.grad = None
        policy_loss(logp, old, adv, clip_low=1e-4).loss.backward()
        return _grad(logp)

    def eager() -> Tensor:
        logp.grad = None
        peers.policy(logp, old, adv, 1e-4)[0].backward()
        return _grad(logp)

    _same(ours(), eager(), 1e-4)
    calls = {"ours": ours, "eager": eager}
    return Case("policy_loss, forward + backward", f"{groups} groups × {group}", "fp32", 0, "", calls, by_host=True)


def small_winrate(groups: int, group: int, device: str) -> Case:
    """winrate_advantage against the peers' loop over groups."""
    counts = torch.ones(groups, group, group, device=device)
    wins = randn(groups, group, group, device=device).abs().clamp(max=1)

    def eager() -> Tensor:
        return torch.stack(peers.winrate_advantages(wins, counts)[1])

    _same(winrate_advantage(wins, counts)[1], eager(), 1e-4)
    calls = {"ours": lambda: winrate_advantage(wins, counts), "eager": eager}
    return Case("winrate_advantage", f"{groups} groups × {group}", "fp32", 0, "", calls, by_host=True)


def plan(device: str, quick: bool) -> list[tuple[str, int, torch.dtype, torch.dtype, bool]]:
    """(shape, batch, dtypes of x and v, whether with torch.compile) of the cases with latents."""
    headline = [(*HEADLINE, x, v, not quick) for x, v in ((F32, F32), (F32, BF16), (BF16, BF16))]
    if quick:
        return headline
    batches = {"FLUX 512²": (1,), "FLUX 1024²": (32,), "Wan 480p 81f": (4,), "Wan 720p 81f": (1,)}
    shapes = [(name, b) for name, many in batches.items() for b in many]
    return headline + [(*shape, F32, BF16, device == "cuda" and shape in LARGE) for shape in shapes]


def cases(device: str, quick: bool) -> Iterator[Case]:
    """All cases; `quick`: the headline shape without torch.compile."""
    for build in (small_policy, small_winrate):
        yield build(48, 24, device)
    for name, batch, x, v, with_compile in plan(device, quick):
        latents = Latents(name, batch, x, v, device)
        for build_latent in (step_given, step_addressed, replay):
            yield build_latent(latents, with_compile)
