"""Each argument of each op replaced by each tensor without memory.

tests/ops/test_backend.py runs this in its own process.
"""

import faulthandler

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from prefgrpo.ops import PhiloxNoise, philox_normal, policy_loss, sde_logp, sde_step, winrate_advantage

faulthandler.enable()
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
MESH = init_device_mesh("cpu", (1,))
KINDS = {
    "DTensor": lambda t: DTensor.from_local(t, MESH, [Replicate()]),
    "fake": lambda t: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(t),
    "functional": torch._to_functional_tensor,
    "meta": lambda t: t.to("meta"),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}
x, v, y, ref, old, eps = torch.randn(6, 3, 40)
ids = torch.arange(3)
latents = {"x": x, "v": v, "coef": torch.rand(4, 5), "index": ids}
wins = torch.rand(2, 4, 4)
logp, logp_old, advantage, weight, kl, log_ratio = torch.rand(6, 3)
OPS = {
    "given": (sde_step, {**latents, "noise": eps}),
    "counted": (
        lambda sample, step, **rest: sde_step(**rest, noise=PhiloxNoise(1, sample, step)),
        {**latents, "sample": ids, "step": ids},
    ),
    "logp": (sde_logp, {**latents, "x_next": y, "v_ref": ref, "v_old": old}),
    "normal": (lambda sample, step: philox_normal(1, sample, step, 8), {"sample": ids, "step": ids}),
    "loss": (
        lambda **given: policy_loss(**given, epsilon_low=0.1, kl_coef=0.1),
        {"logp": logp, "logp_old": logp_old, "advantage": advantage, "weight": weight, "kl": kl},
    ),
    "guard": (
        lambda **given: policy_loss(**given, logp_old=None, epsilon_low=0.1, reduction="none"),
        {"logp": log_ratio, "advantage": advantage},
    ),
    "win rate": (winrate_advantage, {"wins": wins, "counts": torch.ones(2, 4, 4)}),
}


def values(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


tried = 0
for name, (op, given) in OPS.items():
    want = values(op(**given))
    for kind, made in KINDS.items():
        for argument, tensor in given.items():
            print(name, kind, argument, end=": ", flush=True)  # the last line names a crash
            tried += 1
            try:
                got = values(op(**{**given, argument: made(tensor)}))
            except (TypeError, ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
                assert kind != "parameter", error
                print(type(error).__name__, str(error)[:100].replace("\n", " "))
                continue
            print("runs", type(got[0]).__name__)
            if kind == "parameter":
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
print("tried", tried)
