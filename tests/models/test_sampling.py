"""`rollout.shift` and the scheduler configs of the published models (data/schedulers.json), of every family.

Why these cases: models space their sigmas differently (static shift applied twice, dynamic shift, a terminal σ, a
multistep solver's integer timesteps), which an Euler scheduler with another shift cannot reproduce. The oracle for
`pipeline` is the stock pipeline, stopped once it has set its timesteps; for `published` it is the formula in fp64.
"""

import functools
import inspect
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import diffusers
import pytest
import torch
from world import CASES, CPU, QUICK, TWO_PROMPTS, case_of, configure_pipe, folder, load, one_or_list, small_sources

from prefgrpo import models
from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.run.opening import open_adapter
from prefgrpo.sde.rules import RULES, StepInfo
from prefgrpo.sde.schedule import make_schedule, shifted_sigmas, truncated_times
from prefgrpo.tiny import pipelines

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "schedulers.json").read_text())
OWN = {"sd3": "sd35m", "hunyuan_video": "hunyuan", "z_image": "zimage", "flux2_klein": "flux"}
CHANGES = {
    "flux": [{"use_dynamic_shifting": False, "shift": 1.0}],  # FLUX.1-schnell
    "sd3": [{"use_dynamic_shifting": True}],
    "qwen_image": [{"use_dynamic_shifting": False, "shift": 3.0}],  # keeps the terminal σ
    "wan": [{"flow_shift": 5.0}],  # 720p and TI2V-5B
    "z_image": [{"shift": 3.0}],  # Turbo
}
TRUE = [
    pytest.param(
        case,
        CONFIGS[OWN.get(case.family) or case.family.split("_")[0].rstrip("2")] | changes,
        id=f"{case}-{k}",
        marks=() if case.family in QUICK else pytest.mark.full,
    )
    for case in CASES
    for k, changes in enumerate([{}, *(() if case.edit else CHANGES.get(case.family, ()))])
]
SIZE = (128, 256)


class Stop(Exception):
    """Raised when the timesteps are set."""


def with_scheduler(config, pipe):
    pipe.scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
    return pipe


def stock(pipe, case, steps, monkeypatch):
    """(sigmas [T + 1], timesteps [T]) that the stock pipeline sets when called."""
    real = pipe.scheduler.set_timesteps

    def stop(num_inference_steps=None, device=None, sigmas=None, mu=None):
        given = {"sigmas": sigmas, "mu": mu}
        real(num_inference_steps, device=device, **{key: value for key, value in given.items() if value is not None})
        raise Stop

    modular = isinstance(pipe, diffusers.ModularPipeline)
    pipe.set_progress_bar_config(disable=True)
    call = case.call | {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": steps}
    if case.edit:
        call |= case.edit(*SIZE) | {"image": one_or_list(case.images(0, SIZE))}
    configure_pipe(pipe, call)
    call = {key: value[:1] if isinstance(value, list) and key != "image" else value for key, value in call.items()}
    with monkeypatch.context() as patch, small_sources():
        patch.setattr(pipe.scheduler, "set_timesteps", stop)
        with pytest.raises(Stop):
            pipe(prompt=TWO_PROMPTS[0] if modular else TWO_PROMPTS[:1], **call)
    return pipe.scheduler.sigmas, pipe.scheduler.timesteps


def run_of(case, steps, **rollout):
    size = {"height": SIZE[0], "width": SIZE[1], "frames": case.call.get("num_frames")}
    return from_dict({"model": "m", "data": {"prompts": "p"}, "rollout": {"steps": steps} | size | rollout})


@pytest.mark.parametrize(("case", "config"), TRUE)
def test_pipeline_is_the_stock_pipelines_own(case, config, monkeypatch):
    adapter = load(case)
    with_scheduler(config, adapter.pipe)
    pipe = with_scheduler(config, case.pipe(folder(case.family)))
    for steps in (4, 10, 20, 50):
        sigmas, timesteps = stock(pipe, case, steps, monkeypatch)
        schedule = Schedules(run := run_of(case, steps), adapter, CPU).ode(run.rollout)
        assert torch.equal(schedule.sigmas, sigmas.float()), (steps, schedule.sigmas - sigmas)
        assert torch.allclose(schedule.times * 1000, timesteps.float(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_published_is_the_formula_whatever_the_folders_scheduler(shift):
    """Earlier, Wan's last σ above 0 at S = 20 and shift 3 was 0.009 instead of 0.136, and Qwen-Image's was 0.02."""
    for family in ("wan", "qwen_image", "flux"):
        adapter = load(case_of(family))
        with_scheduler(CONFIGS[family.split("_")[0]], adapter.pipe)
        for steps in (4, 10, 20, 50):
            run = run_of(case_of(family), steps, shift=shift)
            even = torch.arange(steps, -1, -1, dtype=torch.float64) / steps
            want = shift * even / (1 + (shift - 1) * even)
            schedule = Schedules(run, adapter, CPU).ode(run.rollout)
            assert (schedule.sigmas - want).abs().max() <= 1.5e-7
            published = (schedule.sigmas[:-1] * 1000).long()
            assert torch.equal((schedule.times * 1000).round().long(), published), "timesteps are int(1000 σ)"


PUBLISHED = [1000, 976, 951, 923, 891, 857, 818, 774, 724, 666, 599, 521, 428, 315, 176]
"""Timesteps of the published trainers at 15 steps and shift 3."""


def test_truncated_times_are_the_published_ones():
    sigmas = shifted_sigmas(15, 3.0)  # in fp32 as in their code: 0.6 becomes 0.59999996, then 599
    times = truncated_times(sigmas)
    assert (times * 1000).round(decimals=3).tolist() == PUBLISHED
    schedule = make_schedule(sigmas, "flow", 0.7, times=times)
    assert torch.equal(schedule.times, times) and torch.equal(schedule.sigmas, sigmas)
    assert torch.equal(make_schedule(sigmas, "flow", 0.7).times, sigmas[:-1]), "truncated by default"


def test_a_shift_that_makes_sigmas_equal_is_refused_not_shortened(monkeypatch):
    """A dynamic shift far too large rounds the first sigmas to 1; earlier, the run then had fewer steps than asked."""
    case = case_of("flux")
    adapter = load(case)
    with_scheduler(CONFIGS["flux"], adapter.pipe)
    monkeypatch.setattr(adapter, "mu", lambda sampling: 20.0)
    run = run_of(case, 7)
    with pytest.raises(ValueError, match="sigma"):
        Schedules(run, adapter, CPU).ode(run.rollout)


def test_a_first_sigma_of_unipc_is_a_first_step():
    """UniPC starts at σ = 1 − 1e-6 to keep logarithms finite; η·sqrt(σ / (1 − σ)) would be 700, so σ = 1 is used."""
    schedules = Schedules(run_of(case_of("wan"), 10), load(case_of("wan")), CPU)
    schedule = schedules.step(0)
    assert 0 < 1 - schedule.sigmas[0] < 2e-6
    second = float(schedule.sigmas[1])
    whole = RULES["flow"](StepInfo(1.0, second, 0.7, second, 0.0))
    assert torch.allclose(schedule.coef[0].double(), torch.tensor(whole, dtype=torch.float64), rtol=1e-4, atol=0)


FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
EULER = "FlowMatchEulerDiscreteScheduler"
UNIPC = "UniPCMultistepScheduler"
UNUSABLE = [  # scheduler, configuration, the keys at fault (none: the class)
    (UNIPC, {"use_beta_sigmas": True}, ["use_beta_sigmas"]),
    (UNIPC, {"use_exponential_sigmas": True}, ["use_exponential_sigmas"]),
    (UNIPC, {"final_sigmas_type": "sigma_min"}, ["final_sigmas_type"]),
    (UNIPC, {"use_beta_sigmas": True, "final_sigmas_type": "sigma_min"}, ["use_beta_sigmas", "final_sigmas_type"]),
    (UNIPC, {"use_dynamic_shifting": True}, ["use_dynamic_shifting"]),  # Wan's pipeline passes no shift
    (EULER, {"invert_sigmas": True}, ["invert_sigmas"]),
    (EULER, {"use_dynamic_shifting": True}, ["use_dynamic_shifting"]),
    *(
        (name, {key: True}, [key])
        for name in ("DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler")
        for key in ("use_beta_sigmas", "use_exponential_sigmas", "use_karras_sigmas")
    ),
    ("DPMSolverMultistepScheduler", {"use_lu_lambdas": True}, ["use_lu_lambdas"]),
    ("FlowMatchLCMScheduler", {"invert_sigmas": True}, ["invert_sigmas"]),
    ("FlowMatchHeunDiscreteScheduler", {}, []),
    ("DEISMultistepScheduler", {}, []),
    ("DEISMultistepScheduler", {"use_karras_sigmas": True}, []),
    ("SASolverScheduler", {}, []),
    ("DPMSolverMultistepInverseScheduler", {}, []),
    ("HeliosScheduler", {}, []),
]


@functools.cache
def wan():
    return models.family("wan").outline(Path(folder("wan")))


def sigmas_of(name, changes, steps):
    """Wan's sigmas with this scheduler: its pipeline passes the number of steps alone."""
    kind = getattr(diffusers, name)
    flow = FLOW if "use_flow_sigmas" in inspect.signature(kind).parameters else {}
    wan().pipe.scheduler = kind.from_config(flow | changes)
    return wan().sigmas(case_of("wan").sampling(steps=steps))


@pytest.mark.parametrize(("name", "changes", "keys"), UNUSABLE)
def test_a_scheduler_without_usable_sigmas_is_refused_for_every_number_of_steps(name, changes, keys):
    for steps in (1, 2, 3, 10, 50) if name != "FlowMatchHeunDiscreteScheduler" else (2, 3, 10):
        with pytest.raises(ValueError, match=r"expected \d+ sigmas that fall within \[0, 1\]") as caught:
            sigmas_of(name, changes, steps)
        text = str(caught.value)
        assert name in text and "rollout.shift" in text
        removed = f"Remove {', '.join(f'{key}: {changes[key]!r}' for key in keys)} from its scheduler_config.json"
        assert (removed if keys else "Use another scheduler") in text


def test_a_shift_that_rounds_the_first_sigma_above_1_gives_1():
    """In fp32, 2.64 · 1 / (1 + 1.64 · 1) is 1.0000001."""
    shifts = [k / 100 for k in range(50, 2000)]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler
    above = [s for s in shifts if float(scheduler(shift=s).sigmas[0]) > 1]
    assert 2.64 in above
    for shift in above:
        sigmas = sigmas_of(EULER, {"shift": shift}, 8)
        assert float(sigmas[0]) == 1 and make_schedule(sigmas, "flow", 0.7).steps == 8


def flags(kind):
    """Every boolean of a scheduler's configuration, and every value of its Literals, one changed at a time."""
    for name, parameter in inspect.signature(kind).parameters.items():
        kinds = (parameter.annotation, *get_args(parameter.annotation))
        values = {value for one in kinds if get_origin(one) is Literal for value in get_args(one)}
        if isinstance(parameter.default, bool):
            values = {not parameter.default}
        yield from ({name: value} for value in sorted(values, key=str) if value != parameter.default)


def test_every_flag_of_every_flow_scheduler_gives_falling_sigmas_or_a_message():
    """The installed diffusers' own list: a new scheduler or a new key is covered when it is installed."""
    seen = Counter()
    for name in sorted(n for n in dir(diffusers) if n.endswith("Scheduler")):
        kind = getattr(diffusers, name)
        names = inspect.signature(kind).parameters
        if "shift" not in names and "use_flow_sigmas" not in names:
            continue
        for changes in [{}, *flags(kind)]:
            for steps in (1, 2, 7):
                try:
                    sigmas = sigmas_of(name, changes, steps)
                except NotImplementedError:
                    seen["not constructed"] += 1  # see the test below
                except ValueError as error:
                    assert "expected" in str(error) or "final_sigmas_type" in str(error), (name, changes)
                    seen["refused"] += 1
                else:
                    schedule = make_schedule(sigmas, "ode", 0.0)
                    assert schedule.steps == steps, (name, changes)
                    seen["usable"] += 1
    assert seen["refused"] > 100 and seen["usable"] > 100, seen


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (UNIPC, {"use_beta_sigmas": True}, "rollout.steps: .* Remove use_beta_sigmas: True"),
        (EULER, {"invert_sigmas": True}, "rollout.steps: .* Remove invert_sigmas: True"),
        (
            "DPMSolverMultistepScheduler",
            {"algorithm_type": "dpmsolver"},
            "refuses its configuration .*final_sigmas_type",
        ),
        ("SASolverScheduler", {"algorithm_type": "dpmsolver"}, "refuses its configuration .*NotImplementedError"),
        ("NoScheduler", {}, "diffusers .* has no NoScheduler"),
    ],
)
def test_a_run_refuses_it_before_weights_are_loaded(name, changes, said, tmp_path, monkeypatch):
    model = pipelines.make("wan", tmp_path)
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name} | FLOW | changes))
    index = json.loads((model / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", name]
    (model / "model_index.json").write_text(json.dumps(index))
    monkeypatch.setattr(Adapter, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    config = from_dict({"data": {"prompts": str(model / "prompts.txt")}, "model": str(model), "family": "wan"})
    config = replace(config, rollout=case_of("wan").sampling(), eval=replace(config.eval, height=32, width=32))
    with pytest.raises((ConfigError, ModelError), match=said):
        open_adapter(config, CPU)
    if not said.startswith("rollout.steps"):
        return
    shifted = replace(config, rollout=replace(config.rollout, shift=3.0))
    with pytest.raises(pytest.fail.Exception, match="the weights were loaded"):
        open_adapter(shifted, CPU)
