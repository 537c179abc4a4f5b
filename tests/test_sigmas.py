"""`rollout.sigmas` with the scheduler configs of the published models (data/schedulers.json), of every family.

Why these cases: models space their sigmas differently (static shift applied twice, dynamic shift, a terminal σ, a
multistep solver's integer timesteps), which an Euler scheduler with another shift cannot reproduce. The oracle for
`pipeline` is the stock pipeline, stopped once it has set its timesteps; for `published` it is the formula in fp64.
"""

import json
from pathlib import Path

import diffusers
import pytest
import torch
from families import CASES, CPU, PROMPTS, QUICK, case_of, configure_pipe, folder, load, one_or_list, small_sources

from prefgrpo.config.loading import from_dict
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.sde.rules import RULES, StepInfo
from prefgrpo.sde.schedule import make_schedule, shifted_sigmas, truncated_times

CONFIGS = json.loads((Path(__file__).parent / "data" / "schedulers.json").read_text())
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

    pipe.set_progress_bar_config(disable=True)
    call = case.call | {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": steps}
    if case.edit:
        call |= case.edit(*SIZE) | {"image": one_or_list(case.images(0, SIZE))}
    configure_pipe(pipe, call)
    call = {key: value[:1] if isinstance(value, list) and key != "image" else value for key, value in call.items()}
    with monkeypatch.context() as patch, small_sources():
        patch.setattr(pipe.scheduler, "set_timesteps", stop)
        with pytest.raises(Stop):
            pipe(prompt=PROMPTS[:1], **call)
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
