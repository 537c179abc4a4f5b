"""sde_step and sde_logp against the published formula in torch, at the shapes of FLUX and Wan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Case, Results, randn
from prefgrpo.ops import PhiloxNoise, sde_logp, sde_step
from prefgrpo.sde.rules import sde_row

SHAPES = {"FLUX 512²": (1024, 64), "FLUX 1024²": (4096, 64), "Wan 480p 81f": (16, 21, 60, 104)}
F32, BF16 = torch.float32, torch.bfloat16
NAMES = {F32: "fp32", BF16: "bf16"}
SIGMA, SIGMA_NEXT, ETA = 0.9, 0.8, 0.7
FIELDS = ("logp", "kl", "log_ratio")


def inputs(
    shape: tuple[int, ...], x_dtype: torch.dtype, v_dtype: torch.dtype, device: str, seed: int
) -> dict[str, Any]:
    """A step's tensors: v, v_ref and v_old differ slightly, `columns` are the peers' coefficients, and `upstream` the
    gradients of logp, KL and log-ratio.
    """
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
    i["upstream"] = randn(3, shape[0], device=device, seed=seed).unbind()
    return i


def step(i: dict[str, Any], noise: str = "eps") -> Results:
    """x' and logp."""
    x_next, logp, _ = sde_step(i["x"], i["v"], i["coef"], i["index"], noise=i[noise])
    return {"x_next": x_next, "logp": logp}


def replay(i: dict[str, Any], **more: str) -> Results:
    """logp, KL and log-ratio, as far as asked for, and the gradient."""
    v = i["v"].detach().requires_grad_()
    others = {argument: i[name] for argument, name in more.items()}
    return _with_gradient(i, v, sde_logp(i["x"], v, i["y"], i["coef"], i["index"], **others))


def peers_step(i: dict[str, Any], function: Any, noise: str = "eps") -> Results:
    """x' and logp by the published formula; without given noise, with torch's."""
    return dict(zip(("x_next", "logp"), function(i["x"], i["v"], i.get(noise), *i["columns"]), strict=True))


def forward(i: dict[str, Any]) -> Results:
    """logp without gradient."""
    return {"logp": sde_logp(i["x"], i["v"], i["y"], i["coef"], i["index"]).logp}


def peers_forward(i: dict[str, Any], function: Any) -> Results:
    """The published log-prob without gradient."""
    with torch.no_grad():
        (logp,) = function(i["x"], i["v"], i["y"], *i["columns"])
    return {"logp": logp}


def peers_replay(i: dict[str, Any], function: Any, others: tuple[str, ...] = ()) -> Results:
    """The published log-prob, with KL and log-ratio to the others, and the gradient."""
    v = i["v"].detach().requires_grad_()
    return _with_gradient(i, v, function(i["x"], v, i["y"], *i["columns"], *(i[name] for name in others)))


def _with_gradient(i: dict[str, Any], v: Tensor, results: tuple[Tensor | None, ...]) -> Results:
    named = {name: t for name, t in zip(FIELDS, results, strict=False) if t is not None}
    gradient = torch.autograd.grad(list(named.values()), v, i["upstream"][: len(named)])[0]
    return named | {"dv": gradient}


def truth(i: dict[str, Any], results: Results) -> Results:
    """The results in fp64, for a variant's own x' if it made one; drawn noise is not compared, its logp is."""
    names = [name for name in ("x", "v", "ref", "old", "eps") if name in i]
    x, v, ref, old, eps = (i[name].double() for name in names)
    st = ETA * math.sqrt(SIGMA / (1 - SIGMA))
    delta = SIGMA_NEXT - SIGMA
    a = 1 + st**2 / (2 * SIGMA) * delta
    b = (1 + st**2 * (1 - SIGMA) / (2 * SIGMA)) * delta
    s = st * math.sqrt(-delta)
    dims = tuple(range(1, x.dim()))
    count = x[0].numel()
    mean = a * x + b * v
    y = results.get("x_next", i["y"]).double()
    out = {"logp": -(y - mean).square().mean(dims) / (2 * s**2) - math.log(s * math.sqrt(2 * math.pi))}
    if "x_next" in results:
        return {"x_next": mean + s * eps} | out
    g = [column.double().view(-1, *[1] * len(dims)) for column in i["upstream"]]
    out["dv"] = g[0] * b * (y - mean) / (s**2 * count)
    if "kl" in results:
        out["kl"] = (b * (v - ref)).square().mean(dims) / (2 * s**2)
        out["log_ratio"] = ((y - a * x - b * old) * b * (v - old)).mean(dims) / s
        out["dv"] += g[1] * b**2 * (v - ref) / (s**2 * count) + g[2] * b * (y - a * x - b * old) / (s * count)
    return out


def drawn_truth(i: dict[str, Any], results: Results) -> Results:
    """logp of the x' that a variant drew: every variant has its own noise."""
    return {"logp": truth(i, results)["logp"]}


def cases(device: str) -> Iterator[Case]:
    """A step with given noise and with its own; a replay without and with its backward, and the default recipe's, with
    KL and Guard. On a CPU the drawn noise has no compiled rival: inductor's is several times slower than eager's.
    """
    plan = [("FLUX 512²", 1, F32, BF16), *(("FLUX 1024²", 4, x, v) for x, v in ((F32, F32), (F32, BF16), (BF16, BF16)))]
    for name, batch, x, v in (*plan, ("Wan 480p 81f", 4, F32, BF16)):
        shape = (batch, *SHAPES[name])
        xb = x.itemsize
        vb = v.itemsize
        make = partial(inputs, shape, x, v, device)
        drawn = partial(step, noise="noise")
        theirs_drawn = partial(peers_step, noise="")
        both = partial(replay, v_ref="ref", v_old="old")
        theirs_both = partial(peers_replay, others=("ref", "old"))
        # max-autotune compiles for long: at the usual shape only
        is_tuned = device == "cuda" and (name, x, v) == ("FLUX 1024²", F32, BF16)
        for op, size, ours, theirs, formula, want in (
            ("sde_step, noise given", 2 * xb + vb + 4, step, peers_step, peers.flow_step, truth),
            ("sde_step, noise drawn", 2 * xb + vb, drawn, theirs_drawn, peers.flow_step, drawn_truth),
            ("sde_logp, forward", 2 * xb + vb, forward, peers_forward, peers.flow_replay, drawn_truth),
            ("sde_logp with gradient", 4 * xb + 3 * vb, replay, peers_replay, peers.flow_replay, truth),
            ("sde_logp, KL and Guard with gradient", 4 * xb + 7 * vb, both, theirs_both, peers.flow_replay, truth),
        ):
            variants: dict[str, Any] = {"ours": ours, "eager": partial(theirs, function=formula)}
            if device == "cuda" or ours is not drawn:
                variants["compile"] = partial(theirs, function=torch.compile(formula, dynamic=False))
            if is_tuned:  # whose own graphs would reuse the memory of results
                tuned = torch.compile(formula, dynamic=False, mode="max-autotune-no-cudagraphs")
                variants["max-autotune"] = partial(theirs, function=tuned)
            if device == "cuda":
                variants["triton"] = ours
            labels = (op, f"{name} ×{batch}", f"x {NAMES[x]}, v {NAMES[v]}")
            yield Case(*labels, torch.Size(shape).numel() * size, make, variants, want)
