"""Shared by the tests of ops and step rules: backends that can run here, random cases, and formulas in fp64."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prefgrpo.ops import backend_of, sde_step, use_backend
from prefgrpo.ops import sde_step as public
from prefgrpo.ops._backend import unavailable_reason
from prefgrpo.sde.rules import sde_row

sde = __import__("sys").modules[public.__module__]
"""The module prefgrpo.ops.sde_step; in the package, the name is the function's."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = (DEVICE, "triton", "torch")
"""The backends of the device."""
INTERPRETED = DEVICE == "cpu"
"""Whether Triton runs in its interpreter, which is slow."""
F32 = torch.float32
BF16 = torch.bfloat16
F64 = torch.float64
each_backend = pytest.mark.parametrize("backend", HERE)
compiled = pytest.mark.parametrize("backend", [b for b in HERE if b != "torch"])
each_in_graphs = pytest.mark.parametrize(
    "backend", [DEVICE, *["triton"] * (not INTERPRETED), pytest.param("torch", marks=pytest.mark.full)]
)
"""Without Triton's interpreter, which cannot be part of a graph. Graphs contain the same ops, whatever runs in them."""
MANY = [range(first, first + 500) for first in range(25, 3025, 500)]
seeds = pytest.mark.parametrize(
    "cases", [range(25), *(pytest.param(r, marks=pytest.mark.full) for r in MANY)], ids=lambda r: f"{r[0]}-{r[-1]}"
)
"""Numbers of random cases: a few, and three thousand more."""


def few(backend: str, cases: range) -> range:
    """A third of a short range, and a tenth of a long one, where a case is slow: in Triton's interpreter and on fibers
    instead of CUDA threads. These are there for the program; the CPU's code and the reference have all cases."""
    slow = (backend == "triton" and INTERPRETED) or "PREFGRPO_SHIM" in os.environ
    return cases[:: 3 if len(cases) < 100 else 10] if slow else cases


def serve(backend: str) -> Any:
    """`use_backend`, or skip with the reason; asserts that this backend really is the one used on the device."""
    if why := unavailable_reason(backend):
        pytest.skip(why)
    block = use_backend(backend)
    with use_backend(backend):
        assert backend_of(DEVICE) == backend
    return block


STEPS = ("flow", 0.9, 0.8, 0.7), ("dance", 0.5, 0.4, 0.3), ("cps", 0.9, 0.8, 0.8), ("ode", 0.4, 0.3, 0.0)
TABLE = torch.tensor([sde_row(*step) for step in STEPS], dtype=F64)
"""One step of four rules; the last has no log-prob."""
SHAPES = [(1,), (2,), (3, 5), (127,), (64, 16), (1025,), (3, 5, 7), (4, 2, 6, 5), (2, 3, 4, 5, 3), (8, 1024), (2049,)]
LAYOUTS = {
    "contiguous": lambda t: t,
    "turned": lambda t: t.mT.contiguous().mT if t.dim() > 2 else t.repeat_interleave(2, -1)[..., ::2],
    "slices": lambda t: torch.stack((t, t), 1)[:, 1],
    "odd start": lambda t: torch.cat([t[:1].flatten()[:1], t.flatten()])[1:].view(t.shape),
    "one for all": lambda t: t[:1].expand_as(t),
}


@dataclass
class Case:
    """Inputs of a step and of its replay."""

    x: Tensor
    v: Tensor
    v_ref: Tensor
    v_old: Tensor
    eps: Tensor
    coef: Tensor
    index: Tensor

    @property
    def rows(self) -> Tensor:
        return self.coef[self.index]


def make(
    shape: tuple[int, ...], batch: int, x_dtype: torch.dtype = F32, v_dtype: torch.dtype = F32, seed: int = 0
) -> Case:
    """A case of B samples; sample i follows row i % 4 of TABLE."""
    g = torch.Generator().manual_seed(seed)
    x, v, ref, old, eps = torch.randn(5, batch, *shape, generator=g).to(DEVICE)
    velocities = [(v + 0.05 * t).to(v_dtype) for t in (0 * v, ref, old)]
    return Case(x.to(x_dtype), *velocities, eps, TABLE.float().to(DEVICE), (torch.arange(batch) % 4).to(DEVICE))


def draw(seed: int, dtypes: tuple[torch.dtype, ...] = (F32, BF16)) -> tuple[Case, torch.dtype, random.Random]:
    """(a random case, storage dtype of x', generator for further choices)."""
    pick = random.Random(seed)
    shape = pick.choice(SHAPES)
    batch = pick.randint(1, 4)
    c = make(shape, batch, pick.choice(dtypes), pick.choice(dtypes), seed)
    for name in ("x", "v", "v_ref", "v_old", "eps"):
        setattr(c, name, LAYOUTS[pick.choice([*LAYOUTS])](getattr(c, name)))
    return c, pick.choice(dtypes), pick


def truth_logp(c: Case, x_next: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """fp64 (logp, kl, Guard log-ratio) in plain torch; with `grad` [3, B] also their gradient with respect to v."""
    x, y, ref, old, rows = (t.double() for t in (c.x, x_next, c.v_ref, c.v_old, c.rows))
    v = c.v.double().requires_grad_()
    a, b, s, w, _ = (column.view(-1, *[1] * (x.dim() - 1)) for column in rows.unbind(1))
    noisy = s > 0

    def mean(t: Tensor) -> Tensor:
        return t.flatten(1).mean(1)

    b_over_s = torch.where(noisy, b / torch.where(noisy, s, 1.0), 0.0)
    logp = mean(w * (y - a * x - b * v).square()) + rows[:, 4]
    kl = mean((b_over_s * (v - ref)).square() / 2)
    log_ratio = mean(b_over_s * (y - a * x - b * old) * (v - old))
    out = (logp, kl, log_ratio)
    if grad is None:
        return tuple(t.detach() for t in out)
    total = sum((g.double() * t).sum() for g, t in zip(grad, out, strict=True))
    return *(t.detach() for t in out), *torch.autograd.grad(total, v)


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance, in units in the last place, between two tensors of the same dtype."""
    if a.numel() == 0:
        return 0
    kind = torch.int32 if a.dtype == F32 else torch.int16
    ints = [t.contiguous().view(kind).long() for t in (a, b)]
    low = -(2 ** (8 * a.element_size() - 1))
    ordered = [torch.where(i < 0, low - i, i) for i in ints]
    return int((ordered[0] - ordered[1]).abs().max())


def assert_close(got: Tensor, want: Tensor, rtol: float, floor: float) -> None:
    """Assert |got − want| <= rtol·|want| + floor; the message gives the largest excess over rtol·|want|."""
    assert got.shape == want.shape
    assert not torch.isnan(got).any(), "NaN"
    got, want = got.detach().double(), want.detach().double()
    error = torch.where(got == want, 0.0, (got - want).abs() - rtol * want.abs())
    assert error.numel() == 0 or float(error.max()) <= floor, f"exceeds rtol {rtol} by {float(error.max()):.3g}"


def copy_of_noise(x: Tensor, noise: Any) -> Tensor:
    """The noise that a step adds, as a tensor like x: a step with a = b = 0 and s = 1."""
    coef = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]], device=x.device).repeat(x.shape[0], 1)
    return sde_step(torch.zeros_like(x, dtype=F32), torch.zeros_like(x, dtype=F32), coef, noise=noise).x_next


class Counted(TorchDispatchMode):
    """Counts the operations that a GPU runs: neither views nor allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if not is_view and "empty" not in function._schema.name:
            self.names.append(function._schema.name)
        return function(*args, **kwargs or {})


# ---- group advantages in NumPy, group by group, as the papers define them --------------------------------------------


def normalised(r, ids, std="group", eps=1e-4, ddof=0, rank=False):
    """(r − group mean) / (group std + eps) for r [B], NaN = missing; 0 for missing values and constant groups."""
    r = r.copy()
    out = np.zeros(len(r))
    ok = ~np.isnan(r)
    groups = [m for g in np.unique(ids) if (m := (ids == g) & ok).any()]
    for m in groups if rank else ():
        v = r[m]
        r[m] = [((v < x).sum() + 0.5 * ((v == x).sum() - 1)) / max(len(v) - 1, 1) for x in v]
    whole = r[ok].std() * np.sqrt(ok.sum() / max(ok.sum() - ddof, 1)) if ok.any() else 0.0
    for m in groups:
        if np.ptp(r[m]) > 0:
            own = np.sqrt(((r[m] - r[m].mean()) ** 2).sum() / max(m.sum() - ddof, 1))
            out[m] = (r[m] - r[m].mean()) / {"group": own + eps, "global": whole + eps, "none": 1.0}[std]
    return out


def advantage(r, ids, w, combine="weighted_sum", **options):
    """Advantages [B] from rewards [R, B] and weights [R]; a reward of weight 0 is ignored."""
    r = r[w != 0]
    w = w[w != 0]
    r = np.where(np.isnan(r).any(0), np.nan, r)
    if combine == "weighted_advantage_sum":
        return sum(wi * normalised(ri, ids, **options) for wi, ri in zip(w, r, strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = {
            "weighted_sum": lambda: w @ r,
            "geometric_mean": lambda: np.exp(w @ np.log(r) / w.sum()).astype(np.float32).astype(np.float64),
        }[combine]()
    return normalised(value, ids, **options)


# ---- GRPO's loss and gradient by autograd through the papers' formulas, without the ops ------------------------------


def plain_formula(one, batches, advantage, trained=None, weight=lambda schedule, k: 1.0, guard=False):
    """(loss, gradient, ratios) of a trainer's update at its current weights, sample by sample; the log-probs stored in
    the batches are the old ones.

    advantage: [P, G]. trained: bool [P, G], the samples that count (None: all). weight: of the loss of step k. guard:
    GRPO-Guard's ratio, from the stored velocities.
    """
    train = one.config.train
    rollout = one.config.rollout
    low = 1 - train.clip_range
    high = 1 + train.clip_range
    total = torch.zeros((), dtype=torch.float64)
    ratios = []
    for batch in batches:
        at = (batch.slots, batch.members)
        rows = slice(None) if trained is None else trained[at].nonzero().flatten()
        for step in batch.transitions:
            k = step.k
            a, b, s, w, const = batch.schedule.coef[k].double()
            sigma = batch.schedule.sigmas[k].expand(len(batch.slots))
            v = one.adapter.velocity(step.x, sigma, batch.condition, rollout).double()
            mean = a * step.x.double() + b * v
            logp = w * (step.x_next.double() - mean).square().flatten(1).mean(1) + const
            ratio = torch.exp(logp - step.logp.double())
            if guard:
                old = a * step.x.double() + b * step.v.double()
                ratio = torch.exp(((step.x_next.double() - old) / s * (mean - old)).flatten(1).mean(1))
            adv = advantage[at].double().clamp(-train.adv_clip_max, train.adv_clip_max)
            loss = weight(batch.schedule, k) * torch.maximum(-adv * ratio, -adv * ratio.clamp(low, high))
            if train.kl_coef:
                with torch.no_grad(), one.adapter.reference():
                    ref = one.adapter.velocity(step.x, sigma, batch.condition, rollout).double()
                loss = loss + train.kl_coef * (b * (v - ref)).square().flatten(1).mean(1) / (2 * s * s)
            total = total + loss[rows].sum()
            ratios += ratio.detach()[rows].tolist()
    gradient = torch.autograd.grad(total / len(ratios), one.policy.params)
    return float(total.detach()) / len(ratios), torch.cat([g.flatten() for g in gradient]), ratios


# ---- the published step rules, from the papers' equations, independently of prefgrpo.sde.rules -----------------------

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


# ---- flash attention on CPUs, as ring attention calls its kernels ----------------------------------------------------

#     S = q kᵀ · scale      lse = log Σ exp S      P = exp(S − lse)      out = P v
#     dv = Pᵀ g             dS = P (g vᵀ − Σ g · out)                    dq = dS k · scale      dk = dSᵀ q · scale
#
# The backward takes `out` and `lse` from its caller, as the kernels do: ring attention passes those of all keys
# together with the keys of one process. Layouts, dtypes and signatures are torch's and FlashAttention-3's.

FLASH = ("_native_flash", "_flash_3_hub", "_flash_3_varlen_hub")
"""diffusers' backends whose kernels `register_flash` puts in place."""
_registered: list[torch.library.Library] = []


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and log-sum-exps [B, H, N] in fp32; q [B, H, N, D], k and v [B, H, M, D]; the mask of keys
    broadcasts to [B, H, N, M]."""
    scores = _scores(q, k, scale, mask)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.double()
    return out.to(q.dtype), lse.float()


def gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of dq, dk and dv that belong to the keys k."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (_scores(q, k, scale, mask) - lse.double()[..., None]).exp()
    g = g.double()
    wide = [x.double() for x in (q, k, v)]
    inner = weights * (g @ wide[2].mT - (g * out.double()).sum(-1, keepdim=True)) * factor
    return (inner @ wide[1]).to(q.dtype), (inner.mT @ wide[0]).to(q.dtype), (weights.mT @ g).to(q.dtype)


def _scores(q: Tensor, k: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def register_flash() -> None:
    """Put these kernels in place in this process, torch's as those of CPUs."""
    from diffusers.models import attention_dispatch  # which the tests of ops do without

    if _registered:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _aten_forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _aten_backward, "CPU")
    _registered.append(library)  # its end would remove them
    for name in ("_flash_3_hub", "_flash_3_varlen_hub"):
        config = attention_dispatch._HUB_KERNELS_REGISTRY[attention_dispatch.AttentionBackendName(name)]
        config.wrapped_forward_fn = _flash_3_forward
        config.wrapped_backward_fn = _flash_3_backward


# Of torch: [B, H, N, D].


def _aten_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert (dropout_p, is_causal, return_debug_mask) == (0, False, False)
    out, lse = attend(query, key, value, scale)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as the kernel writes it
    state = torch.empty(2, dtype=torch.uint64)
    none = (torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    return out, lse, *none, query.shape[2], key.shape[2], state, state[0].clone(), query.new_empty(0)


def _aten_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    assert (dropout_p, is_causal, max_q, max_k) == (0, False, query.shape[2], key.shape[2])
    assert logsumexp.shape == query.shape[:3] and logsumexp.dtype == torch.float32
    return gradients(grad_out, query, key, value, out, logsumexp, scale)


# Of FlashAttention-3: [B, N, H, D], varlen [B · N, H, D] with lse [H, B · N].


def _split(x: Tensor, ends: Tensor | None) -> Tensor:
    """[B, H, N, D], from [B, N, H, D] or from samples of one length that are packed up to `ends` [B + 1]."""
    return (x if ends is None else x.unflatten(0, (len(ends) - 1, -1))).transpose(1, 2)


def _joined(x: Tensor, ends: Tensor | None) -> Tensor:
    x = x.transpose(1, 2)
    return (x if ends is None else x.flatten(0, 1)).contiguous()


def _forward(q, k, v, ends_q, ends_k, scale):
    out, lse = attend(_split(q, ends_q), _split(k, ends_k), _split(v, ends_k), scale)
    return _joined(out, ends_q), lse if ends_q is None else lse.transpose(0, 1).flatten(1).contiguous()


def _backward(g, q, k, v, out, lse, grads, ends_q, ends_k, scale):
    packed = ends_q is not None
    assert lse.shape == ((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]))
    assert lse.is_contiguous() and lse.dtype == torch.float32
    if packed:
        lse = lse.unflatten(1, (len(ends_q) - 1, -1)).transpose(0, 1)
    inputs = (_split(g, ends_q), _split(q, ends_q), _split(k, ends_k), _split(v, ends_k), _split(out, ends_q))
    for to, of, ends in zip(grads, gradients(*inputs, lse, scale), (ends_q, ends_k, ends_k), strict=True):
        to.copy_(_joined(of, ends))


def _flash_3_forward(q, k, v, *others, causal, window_size_left, window_size_right, softcap, **_):
    assert (causal, window_size_left, window_size_right, softcap) == (False, -1, -1, 0)
    ends_q = others[4]
    ends_k = others[5]
    return _forward(q, k, v, ends_q, ends_k, scale=others[20])


def _flash_3_backward(g, q, k, v, out, lse, ends_q, ends_k, used_q, used_k, most_q, most_k, dq, dk, dv, *others):
    scale, causal, left, right, softcap, _, _ = others
    assert (used_q, used_k, causal, left, right, softcap) == (None, None, False, -1, -1, 0)
    _backward(g, q, k, v, out, lse, (dq, dk, dv), ends_q, ends_k, scale)
