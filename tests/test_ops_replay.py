"""replay_policy_grad and on_policy_grad: the functional form equals autograd bit for bit, and the gradient of the first
update, rebuilt from the noise counter, equals that of a replay of stored latents.
"""

import pytest
import torch
from ops_cases import DEVICE, assert_close, each_backend, make, serve

from prefgrpo.ops import (
    Guidance,
    NoiseAddress,
    affine_logp,
    affine_step,
    on_policy_grad,
    policy_loss,
    replay_policy_grad,
)

ADVANTAGE = [1.0, -2.0, 7.0, 3.0, 0.5]


@each_backend
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("guard", [False, True])
def test_equals_autograd(backend, guided, guard):
    c = make((7, 30), 5, torch.float32, torch.bfloat16)
    adv = torch.tensor(ADVANTAGE, device=DEVICE)
    options = {"clip_low": 0.3, "kl_coef": 0.1, "weight": adv.abs(), "denominator": 9.0}
    with serve(backend):
        y, old, *_ = affine_step(c.x, c.v, c.coef, c.index, noise=c.eps)
        v, u = (0.9 * c.v).requires_grad_(), c.u.clone().requires_grad_()
        parts = {"v_ref": c.v_ref, "v_old": c.v if guard else None, "guidance": Guidance(u, 1.1) if guided else None}
        new = affine_logp(c.x, v, y, c.coef, c.index, **parts)
        want = policy_loss(new.logp, old, adv, kl=new.kl, log_ratio=new.log_ratio, **options)
        want.loss.backward()
        got = replay_policy_grad(c.x, v, y, c.coef, c.index, old, adv, **options, **parts)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.metrics, want.metrics)
    assert torch.equal(got.dv, v.grad) and torch.equal(got.logp, new.logp)
    assert (got.du is None) == (not guided) and (not guided or torch.equal(got.du, u.grad))
    assert got.dv.abs().amax(dim=(1, 2)).gt(0).tolist() == [True, True, True, False, True]  # no logp


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_update_from_the_noise_counter(backend, dtype):
    c = make((11, 13), 5, torch.float32, dtype)
    adv = torch.tensor(ADVANTAGE, device=DEVICE)
    noise = NoiseAddress(3, torch.arange(5, device=DEVICE) + 100)
    with serve(backend):
        y, logp, *_ = affine_step(c.x, c.v, c.coef, c.index, noise=noise)
        want = replay_policy_grad(c.x, c.v, y, c.coef, c.index, logp, adv, clip_low=1e-4, weight=adv.abs())
        got = on_policy_grad(c.v, c.coef, c.index, noise, adv, weight=adv.abs())
    assert want.metrics[4] == 1.0 and want.metrics[6] == 1.0
    assert got.dtype == dtype
    scale = want.dv.float().abs().max()
    assert_close(got.float() / scale, want.dv.float() / scale, 1e-4 if dtype == torch.float32 else 1e-2, 1e-5)
