"""Every backend refuses bad input in the same way, before a kernel runs: one shared check, one kind of error.

Each case is a mistake a caller can make: wrong shape, dtype, device, index, ids or options. Hypothesis generates wrong
shapes for each tensor argument in turn.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import DEVICE, QUICK, each_backend, make, serve
from torch.utils._pytree import tree_map_only

from prefgrpo.ops import (
    Guidance,
    PhiloxNoise,
    sde_logp,
    sde_step,
    group_advantage,
    philox_normal,
    policy_loss,
    use_backend,
    winrate_advantage,
)

NAN = float("nan")


def base():
    c = make((4, 6), 3, torch.float32, torch.float32)
    return {"x": c.x, "v": c.v, "coef": c.coef, "index": c.index, "noise": c.eps}


def ids(n=3, dtype=torch.int64):
    return torch.zeros(n, dtype=dtype, device=DEVICE)


NO_INDEX = {"index": None, "coef": torch.zeros(3, 5)}
STEP = {
    "v has another shape": ({"v": torch.zeros(3, 4, 5)}, ValueError, r"v: expected the shape of x, \[3, 4, 6\]"),
    "v is an integer": ({"v": torch.zeros(3, 4, 6).int()}, TypeError, "expected fp32, bf16, fp16"),
    "noise has another shape": ({"noise": torch.zeros(3, 24)}, ValueError, "noise: expected the shape of x"),
    "coef has 4 columns": ({"coef": torch.zeros(4, 4)}, ValueError, r"coef: expected fp32 \[T, 5\]"),
    "coef is bf16": ({"coef": torch.zeros(4, 5).bfloat16()}, ValueError, "coef: expected fp32"),
    "no index for a table": ({"index": None}, ValueError, "pass an index"),
    "index of another length": ({"index": torch.zeros(2).long()}, ValueError, r"index: expected int64 or int32 \[3\]"),
    "index is a float": ({"index": torch.zeros(3)}, ValueError, r"index: expected int64 or int32 \[3\]"),
    "address without a step": ({**NO_INDEX, "noise": PhiloxNoise(1, ids())}, ValueError, "needs a step"),
    "address of another batch": ({"noise": PhiloxNoise(1, ids(4))}, ValueError, r"noise\.sample"),
    "negative offset": ({"noise": PhiloxNoise(1, ids(), offset=-1)}, ValueError, "offset: expected 0 or more"),
    "storage dtype": ({"out_dtype": torch.int8}, TypeError, "out_dtype"),
    "uncond has another shape": ({"guidance": Guidance(torch.zeros(3, 6), 2.0)}, ValueError, r"guidance\.uncond"),
    "no elements": ({k: torch.zeros(3, 0) for k in ("x", "v", "noise")}, ValueError, "at least one element per sample"),
    "a norm of numbers": (
        {**dict.fromkeys(("x", "v"), torch.zeros(3)), "guidance": Guidance(torch.zeros(3), 2.0, rescale=True)}
        | {"noise": None}, ValueError, r"guidance\.rescale: expected x \[B, …, D\]"),
    "0-d latents": ({"x": torch.zeros(()), "v": torch.zeros(())}, ValueError, "got a 0-d tensor"),
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("name", STEP)
def test_step(backend, name):
    change, error, message = STEP[name]
    change = tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), change)
    with serve(backend), pytest.raises(error, match=message):
        sde_step(**{**base(), **change})


@each_backend
def test_index_outside_the_table(backend):
    """The kernel detects it; on a GPU, where nothing is read back to the host, the sample becomes NaN."""
    for bad in (4, -1):
        given = {**base(), "index": torch.tensor([0, bad, 1], device=DEVICE)}
        with serve(backend):
            if DEVICE == "cpu" and backend != "triton":
                with pytest.raises(IndexError):
                    sde_step(**given)
            elif backend != "torch":
                out = sde_step(**given)
                assert torch.isnan(out.logp).tolist() == [False, True, False]
                assert torch.isnan(out.x_next[1]).all()


@QUICK
@given(st.sampled_from(["v", "x_next", "v_ref", "v_old"]), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_any_other_shape_is_refused_by_the_replay(name, shape):
    c = make((4, 6), 3, torch.float32, torch.float32)
    given = {"x": c.x, "v": c.v, "x_next": c.eps, "coef": c.coef, "index": c.index, "v_ref": c.v_ref, "v_old": c.v_old}
    given[name] = torch.zeros(shape, device=DEVICE)
    with pytest.raises(ValueError, match=f"{name}: expected the shape of x"):
        sde_logp(**given)


def loss(*args, **options):
    return policy_loss(*args, **{"clip_low": 0.1, **options})


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


SMALL = {
    "noise ids": (lambda: philox_normal(1, ids(), ids(2), 4), ValueError, "step: expected int64"),
    "noise size": (lambda: philox_normal(1, ids(), ids(), -4), ValueError, "0 or more"),
    "noise dtype": (lambda: philox_normal(1, ids(), ids(), 4, dtype=torch.int32), TypeError, "dtype: expected fp32"),
    "noise seed": (lambda: philox_normal(1.5, ids(), ids(), 4), TypeError, "integer"),
    "policy shape": (lambda: loss(*zeros(2, 3), zeros(4)), ValueError, "advantage"),
    "policy dtype": (lambda: loss(*zeros(3, 3), kl=zeros(3).half()), TypeError, r"kl: expected torch\.float32"),
    "policy clip": (lambda: loss(*zeros(3, 3), clip_low=-0.1), ValueError, "0 or more"),
    "policy clip NaN": (lambda: loss(*zeros(3, 3), clip_high=NAN), ValueError, "0 or more"),
    "advantage clip NaN": (lambda: loss(*zeros(3, 3), adv_clip=NAN), ValueError, "0 or more"),
    "KL coefficient NaN": (lambda: loss(*zeros(3, 3), kl_coef=NAN), ValueError, "finite"),
    "policy denominator": (lambda: loss(*zeros(3, 3), denominator=0.0), ValueError, "more than 0"),
    "complex rewards": (lambda: group_advantage(zeros(1, 3, dtype=torch.complex64), ids()), TypeError, "expected real"),
    "group shape": (lambda: group_advantage(zeros(1, 4), ids()), ValueError, r"rewards \[R, B\]"),
    "group id dtype": (lambda: group_advantage(zeros(1, 3), zeros(3)), ValueError, "integer group_ids"),
    "weights": (lambda: group_advantage(zeros(2, 3), ids(), zeros(3)), ValueError, "one per reward"),
    "combine": (lambda: group_advantage(zeros(2, 3), ids(), combine="mean"), ValueError, "combine: expected one of"),
    "std": (lambda: group_advantage(zeros(2, 3), ids(), std="batch"), ValueError, "std: expected one of"),
    "ddof": (lambda: group_advantage(zeros(2, 3), ids(), ddof=2), ValueError, "ddof: expected 0 or 1"),
    "wins": (lambda: winrate_advantage(zeros(2, 3, 4), zeros(2, 3, 4)), ValueError, r"\[P, G, G\]"),
    "backend": (lambda: use_backend("metal").__enter__(), ValueError, "expected one of cuda, triton, cpu, torch"),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_ops_and_options(name):
    call, error, message = SMALL[name]
    with torch.device(DEVICE), pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["x", "x_next", "coef", "v_ref", "v_old"])
def test_a_gradient_that_the_replay_does_not_give_is_refused(name):
    """logp depends on all of these arguments, so silently omitting one would give an incomplete gradient."""
    c = make((4, 6), 3, torch.float32, torch.float32)
    given = {"x": c.x, "v": c.v, "x_next": c.eps, "coef": c.coef, "index": c.index, "v_ref": c.v_ref, "v_old": c.v_old}
    given[name] = given[name].clone().requires_grad_()
    for v in (c.v, c.v.clone().requires_grad_()):
        with pytest.raises(ValueError, match=f"gradients flow only to v, uncond; detach {name}$"):
            sde_logp(**{**given, "v": v})
    with torch.no_grad():
        sde_logp(**given)


@pytest.mark.parametrize("name", ["logp_old", "advantage", "weight"])
def test_a_gradient_that_the_loss_does_not_give_is_refused(name):
    given = {k: torch.rand(3, device=DEVICE) for k in ("logp", "logp_old", "advantage", "weight")}
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"detach {name}$"):
        policy_loss(**given, clip_low=0.1)
