"""Every step function and mode that we replace: one call that fits ours and the peer's, and the fp64 reference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peers
import sde_formulas
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.utils.torch_utils import randn_tensor

from prefgrpo.integrations import dance_grpo, flow_factory, flow_grpo, pref_grpo

T = 10


def euler(shift=3.0, steps=T):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    return scheduler


def unipc():
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    scheduler.set_timesteps(T)
    return scheduler


def batch(shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype) for _ in range(2)]


def seeded():
    return torch.Generator().manual_seed(7)


class FactoryScheduler(FlowMatchEulerDiscreteScheduler):
    """diffusers' scheduler plus the attributes and methods that Flow-Factory's step reads."""

    is_eval, noise_level, sde_steps = False, 0.6, (0, 2, 5, 8, 9)

    def __init__(self, dynamics_type):
        super().__init__(shift=3.0)
        self.dynamics_type = dynamics_type
        self.set_timesteps(T)

    def get_noise_levels(self):
        levels = torch.zeros(T)
        levels[list(self.sde_steps)] = self.noise_level
        return levels

    def get_noise_level_for_sigma(self, sigma):
        return torch.tensor([self.get_noise_levels()[(self.sigmas == s).nonzero()[0, 0]] for s in sigma.reshape(-1)])


@dataclass
class Case:
    """One function in one mode. call(f, x, v, steps, stored) → named outputs; law(x, v, σ, σ') → (μ, s, std_dev_t)."""

    name: str
    sigmas: torch.Tensor
    call: Callable[..., dict[str, Any]]
    law: Callable[..., tuple[Any, ...]]
    theirs: Callable[[Any], Callable[..., Any]]
    ours: Callable[..., Any]
    square: bool = False  # the log-prob drops the variance
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)  # latents, model output
    one_step: bool = False  # one step index for the whole batch
    rounded: torch.dtype | None = None  # dtype to which x' is rounded before it is scored
    expected: dict[str, Callable[..., Any]] = field(default_factory=dict)  # further outputs from (x, v, σ, σ', s, std)

    def truth(self, x, v, steps):
        """Named fp64 outputs other than logp, with the noise that `call` draws; always includes `s`."""
        view = () if self.one_step else (-1, *([1] * (x.dim() - 1)))
        sigma, after = (self.sigmas[torch.as_tensor(steps) + k].double().view(view) for k in (0, 1))
        mean, s, std = self.law(x, v, sigma, after)
        noise = randn_tensor(x.shape, seeded(), dtype=v.dtype if self.one_step else torch.float32)
        if "dance" in self.name:  # of the global generator, in fp32
            torch.manual_seed(7)
            noise = torch.randn(x.shape)
        expected = {name: f(x, v, sigma, after, s, std) for name, f in self.expected.items()}
        return {"mean": mean, "s": s, "x'": mean + s * noise.double()} | expected

    def score(self, x_next, truth):
        if self.square:
            return sde_formulas.square(x_next, truth["mean"])
        return sde_formulas.gaussian(x_next, truth["mean"], truth["s"])


def flow_grpo_case(sde_type, eta):
    scheduler, path = euler(), "flow_grpo.diffusers_patch.sd3_sde_with_logprob"

    def call(f, x, v, steps, stored=None):
        generator = seeded() if stored is None else None
        t = scheduler.timesteps[steps]
        out = f(
            scheduler, v, t, x, eta, prev_sample=stored, generator=generator, sde_type=sde_type, return_sqrt_dt=True
        )
        return dict(zip(("x'", "logp", "mean", "std", "sqrt_dt"), out, strict=True))

    def law(x, v, sigma, after):
        if sde_type == "cps":
            return sde_formulas.cps(x, v, sigma, after, eta)
        return sde_formulas.flow(x, v, sigma, after, eta, scheduler.sigmas[1])

    return Case(
        f"flow_grpo {sde_type} {eta}", scheduler.sigmas, call, law,
        lambda patch: peers.module("flow_grpo", path, patch).sde_step_with_logprob,
        flow_grpo.sde_step_with_logprob, square=sde_type == "cps",
        expected={"std": lambda *a: a[5], "sqrt_dt": lambda x, v, sigma, after, *_: (sigma - after).sqrt()},
    )  # fmt: skip


def wan_case(determistic):
    scheduler, path = unipc(), "flow_grpo.diffusers_patch.wan_pipeline_with_logprob"

    def call(f, x, v, steps, stored=None):
        options = {"determistic": determistic, "return_dt_and_std_dev_t": True}
        given = {"generator": seeded()} if stored is None else {"prev_sample": stored}
        out = f(scheduler, v, scheduler.timesteps[steps], x, **given, **options)
        return dict(zip(("x'", "logp", "mean", "std", "sqrt_dt"), out, strict=True))

    expected = {"std": lambda *a: a[5], "sqrt_dt": lambda x, v, sigma, after, *_: (sigma - after).sqrt()}
    if determistic:
        expected["x'"] = lambda x, v, sigma, after, *_: x + (after - sigma) * v
    return Case(
        f"flow_grpo Wan{' determistic' if determistic else ''}", scheduler.sigmas, call,
        lambda x, v, *s: sde_formulas.wan(x, v, *s, scheduler.sigmas[1], scheduler.sigmas[-1]),
        lambda patch: peers.module("flow_grpo", path, patch).sde_step_with_logprob,
        flow_grpo.wan_sde_step_with_logprob, expected=expected,
    )  # fmt: skip


X0 = {"x0": lambda x, v, sigma, *_: x.double() - sigma * v.double()}


def dance_case(sde_solver):
    sigmas = euler().sigmas

    def call(f, x, v, step, stored=None):
        torch.manual_seed(7)
        out = f(v, x, 0.3, sigmas, step, stored, True, sde_solver)
        drift = f(v, x, 0.3, sigmas, step, None, False, sde_solver)
        return dict(zip(("x'", "x0", "logp", "mean"), (*out, drift[0]), strict=True))

    return Case(
        f"dance_grpo flux_step{'' if sde_solver else ' without sde_solver'}", sigmas, call,
        lambda x, v, *s: sde_formulas.dance(x, v, *s, 0.3, sde_solver),
        lambda patch: peers.functions(
            "dance_grpo", "fastvideo/train_grpo_flux.py", "fastvideo.train_grpo_flux", patch).flux_step,
        dance_grpo.flux_step, one_step=True, expected=X0,
    )  # fmt: skip


def pref_case(kind, dtype):
    sigmas, name = euler().sigmas, f"{kind}_grpo_step"
    eta, extra = (0.7, ()) if kind == "flow" else (0.3, (True, True))

    def call(f, x, v, step, stored=None):
        torch.manual_seed(7)
        out = f(v, x, eta, sigmas, step, stored, *extra, return_stats=True)
        return dict(zip(("x'", "x0", "logp", "mean", "s", "dt"), out, strict=True))

    def law(x, v, *s):
        return sde_formulas.flow(x, v, *s, eta, sigmas[1]) if kind == "flow" else sde_formulas.dance(x, v, *s, eta)

    sign = 1 if kind == "flow" else -1
    return Case(
        f"pref_grpo {name} {str(dtype)[6:]}", sigmas, call, law,
        lambda patch: getattr(
            peers.file_module("pref_grpo", "fastvideo/grpo/steps.py", "fastvideo.grpo.steps", patch), name),
        getattr(pref_grpo, name), dtypes=(torch.float32, dtype), one_step=True,
        expected={**X0, "dt": lambda x, v, sigma, after, *_: sign * (after - sigma)},
    )  # fmt: skip


def factory_case(dynamics, dtype):
    scheduler = FactoryScheduler(dynamics)

    def call(f, x, v, steps, stored=None):
        t, stored = scheduler.timesteps[steps], None if stored is None else stored.to(dtype)
        out = f(scheduler, v, t, x, stored, generator=seeded(), noise_level=0.6, return_dict=False)
        x_next, mean, _, logp, std, dt = out
        return {"x'": x_next, "mean": mean, "logp": logp, "std": std, "dt": dt}

    def law(x, v, sigma, after):
        zero = 0 * sigma
        return {
            "Flow-SDE": lambda: sde_formulas.flow(x, v, sigma, after, 0.6, scheduler.sigmas[1]),
            "Dance-SDE": lambda: (*sde_formulas.dance(x, v, sigma, after, 0.6)[:2], zero + 0.6),
            "CPS": lambda: sde_formulas.cps(x, v, sigma, after, 0.6),
            "ODE": lambda: (x.double() + (after - sigma) * v.double(), zero, zero),
        }[dynamics]()

    path = "flow_factory.scheduler.flow_match_euler_discrete"
    return Case(
        f"flow_factory {dynamics} {str(dtype)[6:]}", scheduler.sigmas, call, law,
        lambda patch: peers.module("flow_factory", path, patch).FlowMatchEulerDiscreteSDEScheduler.step,
        flow_factory.step, square=dynamics == "CPS", dtypes=(dtype, dtype),
        rounded=dtype if dynamics != "ODE" else None,
        expected={"std": lambda *a: a[5], "dt": lambda x, v, sigma, after, *_: after - sigma},
    )  # fmt: skip


F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    *(flow_grpo_case(*mode) for mode in (("sde", 0.7), ("sde", 1.2), ("cps", 0.8))),
    *(wan_case(determistic) for determistic in (False, True)),
    *(dance_case(sde_solver) for sde_solver in (True, False)),
    *(pref_case(kind, dtype) for kind in ("flow", "dance") for dtype in (F32, BF16)),
    *(factory_case(dynamics, dtype) for dynamics in flow_factory.DYNAMICS for dtype in (F32, BF16)),
]
