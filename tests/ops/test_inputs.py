"""What the ops refuse: arguments that do not fit together, and derivatives that they do not give; one check for every
backend, before a kernel runs.
"""

import math

import pytest
import torch
from ops_cases import DEVICE, make, serve

from prefgrpo.ops import (
    Part,
    PhiloxNoise,
    gated_residual,
    layernorm_modulate,
    philox_normal,
    policy_loss,
    qk_norm_rope,
    sde_logp,
    sde_step,
    winrate_advantage,
)

zeros = torch.zeros


def ids(n=3):
    return zeros(n, dtype=torch.int64)


def step(**changed):
    c = make((4, 6), 3)
    given = {"x": c.x, "v": c.v, "coef": c.coef, "index": c.index, "noise": c.eps}
    return sde_step(**given | changed)


def logp(*leaves):
    """A replay of which these arguments want a gradient."""
    c = make((4, 6), 3)
    given = {"x": c.x, "v": c.v, "x_next": c.eps, "coef": c.coef, "index": c.index, "v_ref": c.v_ref, "v_old": c.v_old}
    return sde_logp(**given | {name: given[name].clone().requires_grad_() for name in leaves})


def loss(*args, **options):
    return policy_loss(*args, **{"epsilon_low": 0.1, **options})


def rope(**changed):
    x = zeros(2, 3, 4, 8)
    weight = torch.ones(8)
    table = torch.ones(3, 8)
    given = {"q": x, "k": x, "q_weight": weight, "k_weight": weight, "cos": table, "sin": table}
    return qk_norm_rope(**given | changed)


WRONG = {
    "step: v has another shape": (lambda: step(v=zeros(3, 4, 5)), r"v: expected \[3, 4, 6\]"),
    "step: v is an integer": (lambda: step(v=zeros(3, 4, 6).int()), "expected fp32, bf16, fp16"),
    "step: noise has another shape": (lambda: step(noise=zeros(3, 24)), "noise: expected .* as x"),
    "step: coef has 4 columns": (lambda: step(coef=zeros(4, 4)), r"coef: expected fp32 \[T, 5\]"),
    "step: no index for a table": (lambda: step(index=None), "or an index"),
    "step: index of another length": (lambda: step(index=ids(2)), r"index: expected int64 or int32 \[3\]"),
    "step: index is a float": (lambda: step(index=zeros(3)), r"index: expected int64 or int32 \[3\]"),
    "step: counters without a step": (
        lambda: step(index=None, coef=zeros(3, 5), noise=PhiloxNoise(1, ids())), "need a step",
    ),
    "step: counters of another batch": (lambda: step(noise=PhiloxNoise(1, ids(4))), r"noise\.sample"),
    "step: storage dtype": (lambda: step(out_dtype=torch.int8), "out_dtype"),
    "step: no elements": (
        lambda: step(x=zeros(3, 0), v=zeros(3, 0), noise=None), "at least one element per sample",
    ),
    "step: 0-d latents": (lambda: step(x=zeros(()), v=zeros(())), r"x: expected \[B, …\]"),
    "step: a part inside a counter block": (lambda: step(part=Part(2, 100, sum)), "expected a multiple of 4"),
    "step: a part before the sample": (lambda: step(part=Part(-4, 100, sum)), "expected a multiple of 4"),
    "step: a part beyond the sample": (lambda: step(part=Part(80, 100, sum)), r"offset \+ 24 .* size 100, got 80"),
    # a replay's logp depends on all of these, so silently omitting one would give an incomplete gradient
    **{
        f"logp: gradient of {name}": (lambda name=name: logp(name), f"gradients flow only to v; detach {name}$")
        for name in ("x", "x_next", "coef", "v_ref", "v_old")
    },
    "noise: step": (lambda: philox_normal(1, ids(), ids(2), 4), "step: expected int64"),
    "noise: size": (lambda: philox_normal(1, ids(), ids(), -4), "0 or more"),
    "noise: seed": (lambda: philox_normal(1.5, ids(), ids(), 4), "integer"),
    "loss: shape": (lambda: loss(*zeros(2, 3), zeros(4)), "advantage"),
    "loss: dtype": (lambda: loss(*zeros(3, 3), kl=zeros(3).half()), "kl: expected fp32"),
    "loss: clip": (lambda: loss(*zeros(3, 3), epsilon_low=-0.1), "0 or more"),
    "loss: advantage clip NaN": (lambda: loss(*zeros(3, 3), adv_clip=math.nan), "0 or more"),
    "loss: reduction": (lambda: loss(*zeros(3, 3), reduction="sum"), "expected mean or none, got 'sum'"),
    "loss: denominator": (lambda: loss(*zeros(3, 3), denominator=0.0), "more than 0"),
    "loss: old gradient": (lambda: loss(zeros(3), zeros(3).requires_grad_(), zeros(3)), "detach them"),
    "loss: gradient": (lambda: loss(*zeros(2, 3), zeros(3).requires_grad_()), "detach them"),
    "win rate: wins": (lambda: winrate_advantage(zeros(2, 3, 4), zeros(2, 3, 4)), r"\[P, G, G\]"),
    "win rate: std": (lambda: winrate_advantage(*zeros(2, 2, 3, 3), std="batch"), "std: expected one of"),
    "win rate: ddof": (lambda: winrate_advantage(*zeros(2, 2, 3, 3), ddof=2), "ddof: expected 0 or 1"),
    "rope: keys": (lambda: rope(k=zeros(2, 2, 4, 8)), r"k: expected .*\[2, 3, 4, 8\]"),
    "rope: norm": (lambda: rope(k_weight=torch.ones(4)), r"k_weight: expected torch.float32 \[8\]"),
    "rope: one norm": (lambda: rope(k_weight=None), "k_weight: expected a weight for every q and k, or none"),
    "rope: table": (lambda: rope(sin=torch.ones(2, 8)), r"sin: expected torch.float32 \[3, 8\] or \[3, 4\]"),
    "rope: one table": (lambda: rope(sin=None), "both or none"),
    "rope: table's dtype": (lambda: rope(cos=torch.ones(3, 8).bfloat16()), "cos: expected torch.float32"),
    "rope: pairs": (lambda: rope(use_real_unbind_dim=1), "expected -1 or -2, got 1"),
    "rope: groups": (lambda: rope(groups=3), "groups: expected a divisor of the 4 heads, got 3"),
    "modulate: shape": (lambda: layernorm_modulate(zeros(3, 8), *zeros(2, 2, 8)), r"x: expected .*\[B, S, C\]"),
    "modulate: dtype": (lambda: layernorm_modulate(zeros(2, 3, 8).long(), *zeros(2, 2, 8)), "x: expected fp32"),
    "modulate: vector": (
        lambda: layernorm_modulate(zeros(2, 3, 8), zeros(1, 8), zeros(2, 8)), r"shift: expected \[2, 8\]",
    ),
    "modulate: vector's dtype": (
        lambda: layernorm_modulate(zeros(2, 3, 8), zeros(2, 8), zeros(2, 8).half()), "scale: expected",
    ),
    "residual: y": (lambda: gated_residual(zeros(2, 3, 8), zeros(2, 2, 8), zeros(2, 8)), r"y: expected .*\[2, 3, 8\]"),
}  # fmt: skip


TYPES = ("step: v is an integer", "step: storage dtype", "noise: seed", "modulate: vector's dtype")
"""Mistakes that are a TypeError; the others are a ValueError."""


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_refused(name):
    call, message = WRONG[name]
    with torch.device(DEVICE), pytest.raises(TypeError if name in TYPES else ValueError, match=message):
        call()


def replay(v):
    c = make((4, 6), 3)
    return sde_logp(c.x, v, c.eps, c.coef, c.index).logp


TWICE = {
    "logp": ((3, 4, 6), replay),
    "loss": ((3,), lambda logp: loss(logp, *zeros(2, 3)).loss),
    "rope": ((2, 3, 4, 8), lambda q: rope(q=q)[0]),
    "modulate": ((2, 3, 8), lambda x: layernorm_modulate(x, *zeros(2, 2, 8))),
    "residual": ((2, 3, 8), lambda x: gated_residual(x, x, zeros(2, 8))),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_second_derivative_is_refused(name):
    shape, call = TWICE[name]
    leaf = zeros(shape, device=DEVICE, requires_grad=True)
    with torch.device(DEVICE), serve("triton"), pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
