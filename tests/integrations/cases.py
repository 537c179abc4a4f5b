"""Every step function and mode that we replace: one call that fits ours and the peer's, and its formulas in fp64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ops_cases
import peers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.utils.torch_utils import randn_tensor

from prefgrpo.integrations import flow_factory, flow_grpo, pref_grpo, verl_omni

T = 10
F32, BF16 = torch.float32, torch.bfloat16


def euler(shift=3.0, steps=T):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    return scheduler


def unipc():
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    scheduler.set_timesteps(T)
    return scheduler


def batch(shape, seed=0, dtype=F32):
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


class FactoryUniPC(UniPCMultistepScheduler):
    """Likewise for Wan, with int64 timesteps."""

    is_eval = False
    dynamics_type = "Flow-SDE"

    def __init__(self):
        super().__init__(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
        self.set_timesteps(T)


@dataclass
class Case:
    """One function in one mode."""

    name: str
    sigmas: torch.Tensor
    call: Callable[..., dict[str, Any]]
    """(f, x, v, step numbers, stored x' or None, **options of f) → named outputs."""
    law: Callable[..., tuple[Any, ...]]
    """(x, v, σ, σ') → (μ, s, further outputs by name), all fp64."""
    theirs: Callable[[Any], Callable[..., Any]]
    ours: Callable[..., Any]
    score_of: Callable[..., Any] = ops_cases.gaussian
    """(x', μ, s) → log-prob."""
    dtypes: tuple[torch.dtype, torch.dtype] = (F32, F32)
    """Of latents and model output."""
    one_step: bool = False
    """Whether the whole batch has one step number."""
    rounded: torch.dtype | None = None
    """Dtype to which x' is rounded before it is scored."""

    def truth(self, x, v, steps):
        """Named fp64 outputs other than logp, with the noise that `call` draws; always includes `s`."""
        view = () if self.one_step else (-1, *([1] * (x.dim() - 1)))
        sigma, after = (self.sigmas[torch.as_tensor(steps) + k].double().view(view) for k in (0, 1))
        mean, s, others = self.law(x, v, sigma, after)
        noise = randn_tensor(x.shape, seeded(), dtype=v.dtype if self.one_step else F32)
        if "dance" in self.name:  # of the global generator, in fp32
            torch.manual_seed(7)
            noise = torch.randn(x.shape)
        return {"mean": mean, "s": s, "x'": mean + s * noise.double()} | others

    def score(self, x_next, truth):
        return self.score_of(x_next, truth["mean"], truth["s"])


def square(x_next, mean, s):
    """A log-prob that drops the variance."""
    return ops_cases.square(x_next, mean)


def without_normalizer(x_next, mean, s):
    return (-(((x_next.double() - mean) / s) ** 2) / 2).flatten(1).mean(1)


def flow_grpo_case(sde_type, eta):
    scheduler = euler()

    def call(f, x, v, steps, stored=None, **more):
        options = {"prev_sample": stored, "sde_type": sde_type, "return_sqrt_dt": True}
        options["generator"] = seeded() if stored is None else None
        out = f(scheduler, v, scheduler.timesteps[steps], x, eta, **options | more)
        return dict(zip(("x'", "logp", "mean", "std", "sqrt_dt"), out, strict=True))

    def law(x, v, *sigmas):
        rest = (eta,) if sde_type == "cps" else (eta, scheduler.sigmas[1])
        mean, s, std = (ops_cases.cps if sde_type == "cps" else ops_cases.flow)(x, v, *sigmas, *rest)
        return mean, s, {"std": std, "sqrt_dt": (sigmas[0] - sigmas[1]).sqrt()}

    path = "flow_grpo.diffusers_patch.sd3_sde_with_logprob"
    return Case(
        f"flow_grpo {sde_type} {eta}", scheduler.sigmas, call, law,
        lambda patch: peers.module("flow_grpo", path, patch).sde_step_with_logprob,
        flow_grpo.sde_step_with_logprob, square if sde_type == "cps" else ops_cases.gaussian,
    )  # fmt: skip


def verl_case(sde_type, eta, normalizer=True):
    scheduler = euler()

    def call(f, x, v, steps, stored=None, **more):
        options = {"noise_level": eta, "sde_type": sde_type, "prev_sample": stored, "return_sqrt_dt": True}
        options |= {"generator": seeded(), "include_logprob_normalizer": normalizer}
        out = f(scheduler, x, v, scheduler.timesteps[steps], **options | more)
        return dict(zip(("x'", "logp", "mean", "std", "sqrt_dt"), out, strict=True))

    def law(x, v, *sigmas):
        rest = (eta, scheduler.sigmas[1]) if sde_type == "sde" else (eta,)
        formula = {"sde": ops_cases.flow, "cps": ops_cases.cps, "dance_sde": ops_cases.dance}[sde_type]
        mean, s, std = formula(x, v, *sigmas, *rest)
        return mean, s, {"std": std, "sqrt_dt": (sigmas[0] - sigmas[1]).sqrt().flatten()}

    file = "verl_omni/pipelines/schedulers/flow_match_sde.py"
    name = "FlowMatchSDEDiscreteScheduler"
    score = square if sde_type == "cps" else ops_cases.gaussian if normalizer else without_normalizer
    return Case(
        f"verl_omni {sde_type} {eta}{'' if normalizer else ' without c'}", scheduler.sigmas, call, law,
        lambda patch: getattr(peers.file_module("verl_omni", file, "verl_sde", patch), name).sample_previous_step,
        verl_omni.sample_previous_step, score,
    )  # fmt: skip


def wan_case(determistic):
    scheduler = unipc()

    def call(f, x, v, steps, stored=None, **more):
        options = {"determistic": determistic, "return_dt_and_std_dev_t": True}
        options |= {"generator": seeded()} if stored is None else {"prev_sample": stored}
        out = f(scheduler, v, scheduler.timesteps[steps], x, **options | more)
        return dict(zip(("x'", "logp", "mean", "std", "sqrt_dt"), out, strict=True))

    def law(x, v, sigma, after):
        mean, s, std = ops_cases.wan(x, v, sigma, after, scheduler.sigmas[1], scheduler.sigmas[-1])
        ode = {"x'": x + (after - sigma) * v} if determistic else {}
        return mean, s, {"std": std, "sqrt_dt": (sigma - after).sqrt()} | ode

    path = "flow_grpo.diffusers_patch.wan_pipeline_with_logprob"
    return Case(
        f"flow_grpo Wan{' determistic' if determistic else ''}", scheduler.sigmas, call, law,
        lambda patch: peers.module("flow_grpo", path, patch).sde_step_with_logprob, flow_grpo.wan_sde_step_with_logprob,
    )  # fmt: skip


def x0(x, v, sigma):
    return x.double() - sigma * v.double()


def dance_case():
    sigmas = euler().sigmas

    def call(f, x, v, step, stored=None, **more):
        torch.manual_seed(7)
        return dict(zip(("x'", "x0", "logp"), f(v, x, 0.3, sigmas, step, stored, True, True, **more), strict=True))

    def law(x, v, sigma, after):
        mean, s, _ = ops_cases.dance(x, v, sigma, after, 0.3)
        return mean, s, {"x0": x0(x, v, sigma)}

    file, module = "fastvideo/train_grpo_flux.py", "fastvideo.train_grpo_flux"
    return Case(
        "dance_grpo flux_step", sigmas, call, law,
        lambda patch: peers.functions("dance_grpo", file, module, patch).flux_step, pref_grpo.dance_grpo_step,
        one_step=True,
    )  # fmt: skip


def pref_case(kind, dtype):
    sigmas, name = euler().sigmas, f"{kind}_grpo_step"
    eta, extra = (0.7, ()) if kind == "flow" else (0.3, (True, True))

    def call(f, x, v, step, stored=None, **more):
        torch.manual_seed(7)
        out = f(v, x, eta, sigmas, step, stored, *extra, return_stats=True, **more)
        return dict(zip(("x'", "x0", "logp", "mean", "s", "dt"), out, strict=True))

    def law(x, v, sigma, after):
        rest = (eta, sigmas[1]) if kind == "flow" else (eta,)
        mean, s, _ = getattr(ops_cases, kind)(x, v, sigma, after, *rest)
        sign = 1 if kind == "flow" else -1
        return mean, s, {"x0": x0(x, v, sigma), "dt": sign * (after - sigma)}

    file = ("pref_grpo", "fastvideo/grpo/steps.py", "fastvideo.grpo.steps")
    return Case(
        f"pref_grpo {name} {str(dtype)[6:]}", sigmas, call, law,
        lambda patch: getattr(peers.file_module(*file, patch), name),
        getattr(pref_grpo, name), dtypes=(F32, dtype), one_step=True,
    )  # fmt: skip


def factory_case(dynamics, dtype):
    scheduler = FactoryScheduler(dynamics)

    def call(f, x, v, steps, stored=None, out_dtype=None, **more):
        """It rounds x' by itself, to the dtype of the latents."""
        stored = None if stored is None else stored.to(dtype)
        options = {"generator": seeded(), "noise_level": 0.6, "return_dict": False}
        x_next, mean, _, logp, std, dt = f(scheduler, v, scheduler.timesteps[steps], x, stored, **options | more)
        return {"x'": x_next.to(out_dtype or F32), "mean": mean, "logp": logp, "std": std, "dt": dt}

    def law(x, v, sigma, after):
        if dynamics == "ODE":
            mean, s, std = x.double() + (after - sigma) * v.double(), 0 * sigma, 0 * sigma
        elif dynamics == "Flow-SDE":
            mean, s, std = ops_cases.flow(x, v, sigma, after, 0.6, scheduler.sigmas[1])
        else:
            mean, s, std = (ops_cases.cps if dynamics == "CPS" else ops_cases.dance)(x, v, sigma, after, 0.6)
        return mean, s, {"std": 0 * sigma + 0.6 if dynamics == "Dance-SDE" else std, "dt": after - sigma}

    path = "flow_factory.scheduler.flow_match_euler_discrete"
    return Case(
        f"flow_factory {dynamics} {str(dtype)[6:]}", scheduler.sigmas, call, law,
        lambda patch: peers.module("flow_factory", path, patch).FlowMatchEulerDiscreteSDEScheduler.step,
        flow_factory.step, square if dynamics == "CPS" else ops_cases.gaussian, dtypes=(dtype, dtype),
        rounded=None if dynamics == "ODE" else dtype,
    )  # fmt: skip


CASES = [
    *(flow_grpo_case(*mode) for mode in (("sde", 0.7), ("sde", 1.2), ("cps", 0.8))),
    *(wan_case(determistic) for determistic in (False, True)),
    *(verl_case(*mode) for mode in (("sde", 0.7), ("sde", 0.7, False), ("cps", 0.8), ("dance_sde", 0.3))),
    dance_case(),
    *(pref_case(kind, dtype) for kind in ("flow", "dance") for dtype in (F32, BF16)),
    *(factory_case(dynamics, dtype) for dynamics in flow_factory.DYNAMICS for dtype in (F32, BF16)),
]

FACTORY_CALLS = {
    "a timestep": lambda t, x: ((t[2], x), {}),
    "timesteps, two without noise": lambda t, x: ((t[[2, 3, 9]], x), {}),
    "a number": lambda t, x: ((float(t[2]), x), {}),
    "a step number": lambda t, x: ((2, x), {}),
    "σ and σ'": lambda t, x: ((t[2], x), {"timestep_next": t[3], "noise_level": 0.4}),
    "σ and σ' each": lambda t, x: (
        (t[:3], x),
        {"timestep_next": t[1:4], "noise_level": torch.tensor([0.4, 0.0, 0.9])},
    ),
    "some fields": lambda t, x: (
        (t[0], x),
        {"dynamics_type": "CPS", "compute_log_prob": False, "return_kwargs": ["next_latents", "log_prob"]},
    ),
    "σ_max": lambda t, x: ((t[0], x), {"sigma_max": 0.97}),
    "any t to 0": lambda t, x: (
        (torch.tensor([613.0, 250.5, 77.0]), x),
        {"timestep_next": torch.zeros(3), "noise_level": 0.6},
    ),
    "any t, the velocity alone": lambda t, x: (
        (torch.tensor([613.0, 250.5, 77.0]), x),
        {
            "timestep_next": torch.zeros(3),
            "noise_level": 0.0,
            "compute_log_prob": False,
            "return_kwargs": ["noise_pred"],
        },
    ),
    "the last step of a replay": lambda t, x: (
        (t[-1], x),
        {"timestep_next": torch.tensor(0), "noise_level": 0.6, "next_latents": x, "return_kwargs": ["log_prob", "dt"]},
    ),
    "its reference": lambda t, x: (
        (t[4], x),
        {
            "timestep_next": t[5],
            "noise_level": 0.6,
            "next_latents": x,
            "compute_log_prob": False,
            "return_kwargs": ["next_latents_mean"],
        },
    ),
    "scored": lambda t, x: ((t[2], x), {"next_latents": x, "return_kwargs": ["log_prob", "std_dev_t"]}),
}
"""Ways to call Flow-Factory's step: (timesteps, x) → (arguments after noise_pred, options)."""
