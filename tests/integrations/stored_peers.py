"""What the peers' functions return at fixed inputs, so that our results are compared with theirs without their code.

    PREFGRPO_PEERS=FOLDER PYTHONPATH=.:tests python -m tests.integrations.stored_peers

writes data/peers.json again; the checkouts are those of docs/ops.md.

Only numbers are stored. Inputs and noise are sines of a formula, the same on every machine.
"""

import ast
import contextlib
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import peers
import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor

from prefgrpo.integrations import flow_factory, verl_omni
from tests.integrations.cases import BF16, CASES, FACTORY_CALLS, FactoryScheduler, FactoryUniPC, T, euler

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "ops.md"
FILE = ROOT / "tests" / "data" / "peers.json"
SHAPE = (2, 2, 1, 1, 2)


def sines(shape, frequency, dtype=torch.float32):
    """1.4 · sin(frequency · (1, 2, …))."""
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return (1.4 * torch.sin(frequency * count)).view(shape).to(dtype)


@contextlib.contextmanager
def noise_by_formula():
    """torch.randn and randn_like are sines."""

    def drawn(*shape, dtype=None, **_):
        shape = shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape
        return sines(shape, 2.3, dtype or torch.float32)

    def drawn_like(t, dtype=None, **_):
        return sines(t.shape, 2.3, dtype or t.dtype)

    with mock.patch.object(torch, "randn", drawn), mock.patch.object(torch, "randn_like", drawn_like):
        yield


def inputs(dtypes=(torch.float32, torch.float32)):
    """x, v and a stored x'."""
    x, v = (sines(SHAPE, frequency, dtype) for frequency, dtype in zip((1.1, 1.7), dtypes, strict=True))
    return x, v, sines(SHAPE, 0.7, dtypes[0])


def of_case(case):
    """Sampling, scoring and its gradient in the first, a middle and the last step."""

    def results(f):
        x, v, y = inputs(case.dtypes)
        named = {}
        for at in (0, 5, T - 1) if case.one_step else ([0, 5], [T - 1, 2]):
            with noise_by_formula():
                out = case.call(f, x, v, at)
            named |= {f"{name} at {at}": t for name, t in out.items()}
            if "ODE" in case.name or "determ" in case.name:
                continue
            leaf = v.clone().requires_grad_()
            logp = case.call(f, x, leaf, at, y)["logp"]
            named[f"logp of a stored x' at {at}"] = logp
            if BF16 not in case.dtypes:
                named[f"its gradient at {at}"] = torch.autograd.grad(logp.sum(), leaf)[0]
        return named

    return results


def of_factory_call(call):
    def results(f):
        x, v, _ = (torch.cat([t, t[:1]]) for t in inputs())
        scheduler = FactoryScheduler("Flow-SDE")
        args, options = call(scheduler.timesteps, x)
        with noise_by_formula():
            out = f(scheduler, v, *args, **options)
        return {name: t for name, t in vars(out).items() if t is not None}

    return results


def of_unipc(f):
    """Wan's scheduler: sampled and scored, σ from integer timesteps."""
    x, v, y = inputs()
    scheduler = FactoryUniPC()
    t = scheduler.timesteps
    named = {}
    for dynamics in flow_factory.DYNAMICS:
        options = {"timestep_next": t[[4, 3]], "noise_level": 0.6, "dynamics_type": dynamics, "return_dict": False}
        with noise_by_formula():
            taken = f(scheduler, v, t[[3, 2]], x, **options)
        scored = f(scheduler, v, t[[3, 2]], x, next_latents=y, **options)
        named |= {f"{dynamics}, {k}": r for k, r in enumerate((*taken, *scored))}
    return named


def of_loss(f):
    """verl-omni's clipped loss, its gradient and metrics; some ratios beyond each clip."""
    old, move, advantages, weight = (sines((12,), frequency) for frequency in (0.3, 0.9, 1.9, 2.9))
    config = SimpleNamespace(diffusion_loss=SimpleNamespace(clip_ratio=1e-4, adv_clip_max=1.0))
    logp = (old + 2e-4 * move).requires_grad_()
    batch = {"old_log_prob": old, "log_prob": logp, "advantages": advantages}
    loss, metrics = f(**batch, config=config, rollout_is_weights=weight.abs())
    named = {"loss": loss, "gradient": torch.autograd.grad(loss, logp)[0]}
    return named | {name: torch.tensor(value) for name, value in metrics.items()}


def their_scheduler(monkeypatch):
    path = "flow_factory.scheduler.flow_match_euler_discrete"
    return peers.module("flow_factory", path, monkeypatch).FlowMatchEulerDiscreteSDEScheduler.step


def their_unipc(monkeypatch):
    made = peers.module("flow_factory", "flow_factory.scheduler.unipc_multistep", monkeypatch)
    return made.UniPCMultistepSDEScheduler.step


def their_loss(monkeypatch):
    path = peers.folder("verl_omni") / "verl_omni/trainer/diffusion/diffusion_algos.py"
    (clipped,) = [n for n in ast.parse(path.read_bytes()).body if getattr(n, "name", "") == "FlowGRPOLoss"]
    made = ModuleType("clipped")
    peers.define(made, path, [n for n in clipped.body if getattr(n, "name", "") == "compute_loss"])
    return lambda **batch: made.compute_loss(None, **batch)


def of_unirl(rule):
    """`denoise(strategy, …)` with one σ for all, then with one each; sampled, then scored with a gradient."""

    def results(f):
        x, v, y = inputs()
        named = {}
        for sigma, after in (
            (torch.tensor(0.8), torch.tensor(0.7)),
            (torch.tensor([1.0, 0.3]), torch.tensor([0.9, 0.1])),
        ):
            with noise_by_formula():
                taken = f(rule, v, x, sigma, after, eta=0.6)
            leaf = v.clone().requires_grad_()
            scored = f(rule, leaf, x, sigma, after, eta=0.6, prev_sample=y)
            gradient = torch.autograd.grad(scored[1].sum() + (x * scored[2]).sum(), leaf)[0]
            values = (*taken, *scored, gradient)
            named |= {f"{k} of σ {sigma.tolist()}": t for k, t in enumerate(values)}
        return named

    return results


def their_unirl(monkeypatch):
    made = peers.file_module("unirl", "unirl/sde/kernels.py", "unirl_sde_kernels", monkeypatch)
    strategies = {"flow": made.FlowSDEStrategy, "cps": made.CPSSDEStrategy, "dance": made.DanceSDEStrategy}
    return lambda rule, *args, **options: strategies[rule]().denoise(*args, **options)


def of_mix_grpo(module):
    """flow, dance and DPM-Solver++ SDE of order 1; sampled and, where there is a replay, scored with a gradient."""
    sigmas = euler().sigmas
    x, v, y = inputs()
    named = {}
    for at in (0, 4):
        with noise_by_formula():
            named[f"flow {at}"] = module.flow_grpo_step(v, x, 0.7, sigmas, at, None)
            named[f"dance {at}"] = module.dance_grpo_step(v, x, 0.3, sigmas, at, None, True, True)
            named[f"dpm {at}"] = module.dpm_step(
                SimpleNamespace(dpm_solver_order=1, dpm_algorithm_type="dpmsolver++"), v, x, at, list(range(T)), sigmas,
                sde_solver=True,
            )  # fmt: skip
        named[f"flow {at}, of the ODE"] = module.flow_grpo_step(v, x, 0.7, sigmas, at, None, determistic=True)
        leaf = v.clone().requires_grad_()
        scored = module.flow_grpo_step(leaf, x, 0.7, sigmas, at, y)[2]
        named[f"flow {at}, scored"] = (scored, *torch.autograd.grad(scored.sum(), leaf))
        scored = module.dance_grpo_step(leaf, x, 0.3, sigmas, at, y, True, True)[2]
        named[f"dance {at}, scored"] = (scored, *torch.autograd.grad(scored.sum(), leaf))
    return {f"{name}: {k}": t for name, results in named.items() for k, t in enumerate(results)}


def their_mix_grpo(monkeypatch):
    made = peers.functions("mix_grpo", "fastvideo/utils/sampling_utils.py", "theirs_sampling_utils", monkeypatch)
    made.randn_tensor = randn_tensor
    return made


# ---- what docs/ops.md writes on the public ops, with the peers' signatures -------------------------------------------


def block(title):
    """What the Python block that begins with the comment `title` defines."""
    (code,) = [b for b in re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.S | re.M) if b.startswith(title)]
    names = {}
    exec(compile(code, DOC, "exec"), names)
    return SimpleNamespace(**names)


def unirl(rule, *args, **options):
    """UniRL's `denoise` of the strategy of this name."""
    return block("# UniRL").denoise(SimpleNamespace(canonical_name=rule), *args, **options)


mix_grpo = block("# MixGRPO")
"""MixGRPO's steps."""


ENTRIES = {case.name: (case.ours, case.theirs, of_case(case)) for case in CASES}
ENTRIES |= {
    f"flow_factory, {name}": (flow_factory.step, their_scheduler, of_factory_call(call))
    for name, call in FACTORY_CALLS.items()
}
ENTRIES |= {f"UniRL {rule}": (unirl, their_unirl, of_unirl(rule)) for rule in ("flow", "cps", "dance")}
ENTRIES["flow_factory UniPC"] = (flow_factory.unipc_step, their_unipc, of_unipc)
ENTRIES["MixGRPO"] = (mix_grpo, their_mix_grpo, of_mix_grpo)
ENTRIES["verl_omni loss"] = (verl_omni.clipped_loss, their_loss, of_loss)
"""Name → (our function, (monkeypatch) → the peer's, (function) → named results)."""


def numbers(results):
    """Nine digits of every number; 0 for NaN, which the peers give as the log-prob of a step without noise."""
    return {
        name: [float(f"{n:.9g}") for n in torch.nan_to_num(t.detach().double()).flatten().tolist()]
        for name, t in results.items()
    }


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        found = {name: numbers(call(theirs(patch))) for name, (_, theirs, call) in ENTRIES.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(results)}" for name, results in sorted(found.items())]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
