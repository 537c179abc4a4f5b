"""patch and unpatch on stand-in codebases created here, with the peers' module names and parameters.

Why these cases: every place that may hold a reference (the defining module, `from x import f`, an alias, a class, a
module imported later), patched twice and restored exactly; and codebases that are absent or differ, where nothing may
be replaced. The peers' real code is tested in test_integrations_peers.py.
"""

import importlib
import sys

import pytest

from prefgrpo import integrations
from prefgrpo.integrations import flow_grpo, patching

SD3 = (
    "def sde_step_with_logprob(self, model_output, timestep, sample, noise_level=0.7, prev_sample=None, generator=None"
)
WAN = (
    "def sde_step_with_logprob(self, model_output, timestep, sample, prev_sample=None, generator=None,\n"
    "    determistic=False, return_pixel_log_prob=False, return_dt_and_std_dev_t=False): return 2\n"
)
PATCHES, IMPORT = "flow_grpo/diffusers_patch/", "import sde_step_with_logprob"
FILES = {
    "flow_grpo/__init__.py": "",
    PATCHES + "__init__.py": "",
    PATCHES + "sd3_sde_with_logprob.py": f"{SD3}, sde_type='sde', return_sqrt_dt=False): return 1\n",
    PATCHES + "wan_pipeline_with_logprob.py": WAN,
    "flow_grpo/trainer.py": f"from .diffusers_patch.sd3_sde_with_logprob {IMPORT} as step\n",
    "flow_grpo/late.py": (
        f"from .trainer import step\nfrom .diffusers_patch.wan_pipeline_with_logprob {IMPORT} as wan\n"
    ),
    "flow_factory/__init__.py": "",
    "flow_factory/scheduler/__init__.py": "from .flow_match_euler_discrete import *\n",
    "flow_factory/scheduler/flow_match_euler_discrete.py": (
        "class FlowMatchEulerDiscreteSDEScheduler:\n"
        "    def step(self, noise_pred, timestep, latents, next_latents=None, timestep_next=None, generator=None,\n"
        "        noise_level=None, compute_log_prob=True, return_dict=True, return_kwargs=(), dynamics_type=None,\n"
        "        sigma_max=None): return 5\n"
        "class Child(FlowMatchEulerDiscreteSDEScheduler): pass\n"
    ),
}
BASE = "flow_grpo.diffusers_patch.sd3_sde_with_logprob"
VIDEO = "flow_grpo.diffusers_patch.wan_pipeline_with_logprob"


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """imported(*names, changed={file: text}) writes the stand-ins and imports these modules; undone after the test."""
    before = set(sys.modules)

    def load(*names, changed=None):
        for file, text in {**FILES, **(changed or {})}.items():
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        return [importlib.import_module(name) for name in names]

    yield load
    for name in list(patching._PATCHED):
        integrations.unpatch(name)
    for name in set(sys.modules) - before:
        if name.startswith(("flow_grpo", "flow_factory")):
            del sys.modules[name]


def test_every_reference_is_replaced_once_and_put_back(imported):
    base, wan, trainer = imported(BASE, VIDEO, "flow_grpo.trainer")
    snapshot = {m: dict(vars(m)) for m in (base, wan, trainer)}
    original, original_wan = base.sde_step_with_logprob, wan.sde_step_with_logprob
    places = integrations.patch("flow_grpo")
    assert places == [f"{BASE}.sde_step_with_logprob", f"{VIDEO}.sde_step_with_logprob", "flow_grpo.trainer.step"]
    assert trainer.step is base.sde_step_with_logprob is not original
    assert base.sde_step_with_logprob.__wrapped__ is flow_grpo.sde_step_with_logprob
    assert wan.sde_step_with_logprob.__wrapped__ is flow_grpo.wan_sde_step_with_logprob
    assert integrations.patch("flow_grpo") == []
    (late,) = imported("flow_grpo.late")
    assert late.step is trainer.step and late.wan is wan.sde_step_with_logprob
    assert set(integrations.unpatch("flow_grpo")) == {*places, "flow_grpo.late.step", "flow_grpo.late.wan"}
    for module, names in snapshot.items():
        assert all(vars(module)[k] is v for k, v in names.items())
    assert late.step is original and late.wan is original_wan and integrations.unpatch("flow_grpo") == []
    assert flow_grpo.sde_step_with_logprob.__module__ == "prefgrpo.integrations.flow_grpo"


def test_what_is_imported_after_patch_is_replaced_by_a_second_call(imported):
    imported(BASE)
    integrations.patch("flow_grpo")
    (late,) = imported("flow_grpo.late")
    assert late.wan(0, 0, 0, 0) == 2
    assert integrations.patch("flow_grpo") == [f"{VIDEO}.sde_step_with_logprob", "flow_grpo.late.wan"]


def test_methods(imported):
    (module,) = imported("flow_factory.scheduler.flow_match_euler_discrete")
    cls = module.FlowMatchEulerDiscreteSDEScheduler
    original = cls.__dict__["step"]
    integrations.patch("flow_factory")
    assert cls.__dict__["step"] is not original and module.Child().step.__func__ is cls.__dict__["step"]
    integrations.unpatch("flow_factory")
    assert cls.__dict__["step"] is original and cls().step(0, 0, 0) == 5 and "step" not in vars(module.Child)


@pytest.mark.parametrize(
    "text, message",
    [
        (f"{SD3}, eta=1.0): return 1\n", r"expected the parameters \(self, .*, sde_type.*found .*eta\)"),
        (f"{SD3.replace('model_output, timestep', 'timestep, model_output')}): return 1\n", "expected the parameters"),
        ("def other(): pass\n", "sde_step_with_logprob.*another version of flow_grpo"),
    ],
)
def test_another_version_is_refused_whole(imported, text, message):
    """Nothing is replaced, not even the functions that would fit."""
    wan, _ = imported(VIDEO, BASE, changed={PATCHES + "sd3_sde_with_logprob.py": text})
    original = wan.sde_step_with_logprob
    with pytest.raises(RuntimeError, match=message):
        integrations.patch("flow_grpo")
    assert wan.sde_step_with_logprob is original and integrations.unpatch("flow_grpo") == []


def test_an_older_version_with_fewer_arguments_fits(imported):
    (base,) = imported(BASE, changed={PATCHES + "sd3_sde_with_logprob.py": f"{SD3}): return 1\n"})
    assert integrations.patch("flow_grpo") and base.sde_step_with_logprob.__wrapped__


@pytest.mark.parametrize("name", sorted(integrations.CODEBASES))
def test_a_codebase_that_is_not_imported(name):
    with pytest.raises(RuntimeError, match=f"to be imported: import {name}'s training code"):
        integrations.patch(name)
    assert integrations.unpatch(name) == []


@pytest.mark.parametrize("call", [integrations.patch, integrations.unpatch])
def test_an_unknown_codebase(call):
    with pytest.raises(ValueError, match="unknown codebase 'trl': expected one of flow_grpo, pref_grpo"):
        call("trl")
