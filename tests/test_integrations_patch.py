"""`patch` on stand-ins with the peers' module names and parameters; on their real code: test_integrations.py.

Every place that may hold a reference (the defining module, an alias, a class, a module imported later), patched twice;
and codebases that are absent or differ, where nothing may be replaced.
"""

import sys
from types import ModuleType

import pytest

from prefgrpo.integrations import flow_factory, flow_grpo, patch

SD3 = (
    "def sde_step_with_logprob(self, model_output, timestep, sample, noise_level=0.7, prev_sample=None, generator=None"
)
STAND_INS = {
    "flow_grpo.diffusers_patch.sd3_sde_with_logprob": f"{SD3}, sde_type='sde', return_sqrt_dt=False): return 1",
    "flow_grpo.diffusers_patch.wan_pipeline_with_logprob": (
        "def sde_step_with_logprob(self, model_output, timestep, sample, prev_sample=None, generator=None,\n"
        "    determistic=False, return_pixel_log_prob=False, return_dt_and_std_dev_t=False): return 2"
    ),
    "flow_factory.scheduler.flow_match_euler_discrete": (
        "class FlowMatchEulerDiscreteSDEScheduler:\n"
        "    def step(self, noise_pred, timestep, latents, next_latents=None, timestep_next=None, generator=None,\n"
        "        noise_level=None, compute_log_prob=True, return_dict=True, return_kwargs=(), dynamics_type=None,\n"
        "        sigma_max=None): return 5\n"
        "class Child(FlowMatchEulerDiscreteSDEScheduler): pass"
    ),
}
BASE, VIDEO, FACTORY = STAND_INS


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in(name, code) is an imported module of this name with this code."""

    def make(name, code=None):
        module = ModuleType(name)
        exec(code or STAND_INS[name], vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for name in STAND_INS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return make


def test_every_reference_is_replaced(stand_in):
    """Of functions, aliases and methods; also those of a module that is imported after a first call."""
    base, wan, factory = map(stand_in, STAND_INS)
    original = base.sde_step_with_logprob
    trainer = stand_in("flow_grpo.trainer", f"from {BASE} import sde_step_with_logprob as step")
    places = patch("flow_grpo")
    assert places == [f"{BASE}.sde_step_with_logprob", f"{VIDEO}.sde_step_with_logprob", "flow_grpo.trainer.step"]
    assert trainer.step is base.sde_step_with_logprob is flow_grpo.sde_step_with_logprob is not original
    assert wan.sde_step_with_logprob is flow_grpo.wan_sde_step_with_logprob
    assert patch("flow_grpo") == []
    late = stand_in("flow_grpo.late", "from flow_grpo.trainer import step")
    assert late.step is flow_grpo.sde_step_with_logprob
    patch("flow_factory")
    assert factory.FlowMatchEulerDiscreteSDEScheduler.step is flow_factory.step is factory.Child.step
    assert "step" not in vars(factory.Child)


@pytest.mark.parametrize(
    "text, message",
    [
        (f"{SD3}, eta=1.0): return 1", r"expected the parameters self, .*, sde_type.*found .*eta"),
        ("def other(): pass", "sde_step_with_logprob.*another version of flow_grpo"),
    ],
)
def test_another_version_is_refused_whole(stand_in, text, message):
    """Nothing is replaced, not even the functions that would fit."""
    wan = stand_in(VIDEO)
    stand_in(BASE, text)
    original = wan.sde_step_with_logprob
    with pytest.raises(RuntimeError, match=message):
        patch("flow_grpo")
    assert wan.sde_step_with_logprob is original


def test_an_older_version_with_fewer_arguments_fits_and_one_must_be_imported(stand_in):
    base = stand_in(BASE, f"{SD3}): return 1")
    assert patch("flow_grpo") and base.sde_step_with_logprob is flow_grpo.sde_step_with_logprob
    with pytest.raises(RuntimeError, match="import flow_factory's training code first"):
        patch("flow_factory")
