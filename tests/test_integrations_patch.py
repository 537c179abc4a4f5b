"""patch, unpatch and the launcher on stand-in codebases created here, with the peers' module names and parameters.

Why these cases: every place that may hold a reference (the defining module, `from x import f`, an alias, a script that
runs as __main__, a class, a module imported later), patched twice and restored exactly; and codebases that are absent
or differ, where nothing may be replaced. The launcher: a script and a module; functions imported, imported late, and
defined by the script; under python and torchrun. The peers' real code is tested in test_integrations_peers.py.
"""

import subprocess
import sys

import pytest
import torch

from prefgrpo import integrations
from prefgrpo.integrations import __main__ as launcher
from prefgrpo.integrations import flow_grpo, patching

SD3 = (
    "def sde_step_with_logprob(self, model_output, timestep, sample, noise_level=0.7, prev_sample=None, generator=None"
)
WAN = (
    "def sde_step_with_logprob(self, model_output, timestep, sample, prev_sample=None, generator=None,\n"
    "    determistic=False, return_pixel_log_prob=False, return_dt_and_std_dev_t=False): return 2\n"
)
FLUX_STEP = "def flux_step(model_output, latents, eta, sigmas, index, prev_sample, grpo, sde_solver): return"
IMPORT, PATCHES = "import sde_step_with_logprob", "flow_grpo/diffusers_patch/"
FILES = {
    "flow_grpo": {
        "flow_grpo/__init__.py": "",
        PATCHES + "__init__.py": "",
        PATCHES + "sd3_sde_with_logprob.py": f"{SD3}, sde_type='sde', return_sqrt_dt=False): return 1\n",
        PATCHES + "wan_pipeline_with_logprob.py": WAN,
        PATCHES + "solver.py": (
            "def flow_grpo_step(model_output, latents, eta, sigmas, index, prev_sample, generator=None): return 6\n"
            "def run_sampling(*args): return flow_grpo_step(*args)\n"
        ),
        "flow_grpo/pipeline.py": f"from .diffusers_patch.sd3_sde_with_logprob {IMPORT}\n",
        "flow_grpo/trainer.py": f"from .diffusers_patch.sd3_sde_with_logprob {IMPORT} as step\n",
        "flow_grpo/late.py": (
            f"from .pipeline {IMPORT}\nfrom .diffusers_patch.wan_pipeline_with_logprob {IMPORT} as wan\n"
        ),
    },
    "dance_grpo": {
        "train_grpo_flux.py": (
            f"{FLUX_STEP} 3\n"
            "if __name__ == '__main__':\n"
            "    from prefgrpo import integrations\n"
            "    print(integrations.patch('dance_grpo'))\n"
            "    print(flux_step.__wrapped__.__module__)\n"
            "    print(integrations.unpatch('dance_grpo'), flux_step(*8 * [0]))\n"
        ),
        "train_grpo_wan_2_1.py": f"{FLUX_STEP} 4\n",
        "train_grpo_sd.py": "step = None\n",
    },
    "flow_factory": {
        "flow_factory/__init__.py": "",
        "flow_factory/scheduler/__init__.py": "from .flow_match_euler_discrete import *\n",
        "flow_factory/scheduler/flow_match_euler_discrete.py": (
            "class FlowMatchEulerDiscreteSDEScheduler:\n"
            "    def step(self, noise_pred, timestep, latents, next_latents=None, timestep_next=None, generator=None,\n"
            "        noise_level=None, compute_log_prob=True, return_dict=True, return_kwargs=(), dynamics_type=None,\n"
            "        sigma_max=None): return 5\n"
            "class Child(FlowMatchEulerDiscreteSDEScheduler): pass\n"
        ),
    },
}


@pytest.fixture
def codebase(tmp_path, monkeypatch):
    """install(name, **changed files) puts the stand-in on sys.path; everything is undone after the test."""
    before = set(sys.modules)

    def install(name, **changed):
        for file, text in {**FILES[name], **{k.replace("__", "/") + ".py": v for k, v in changed.items()}}.items():
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    yield install
    for name in list(patching._PATCHED):
        integrations.unpatch(name)
    for name in set(sys.modules) - before:
        if name.startswith(("flow_grpo", "flow_factory", "train_grpo")):
            del sys.modules[name]


def imported(*names):
    for name in names:
        __import__(name)
    return [sys.modules[name] for name in names]


SCRIPT = """
import sys
from flow_grpo.trainer import step
wraps = lambda f: getattr(getattr(f, "__wrapped__", f), "__module__")
if __name__ == "__main__":
    from flow_grpo.late import wan
    from flow_grpo.diffusers_patch import solver
    seen = [wraps(f) for f in (step, wan, solver.run_sampling.__globals__["flow_grpo_step"])]
    print(seen, sys.argv[1:], sys.path[0], __file__)
    sys.exit(int(sys.argv[1]))
"""
BASE = "flow_grpo.diffusers_patch.sd3_sde_with_logprob"
VIDEO = "flow_grpo.diffusers_patch.wan_pipeline_with_logprob"


def test_every_reference_is_replaced_once_and_put_back(codebase, capsys):
    codebase("flow_grpo")
    base, wan, pipeline, trainer = imported(BASE, VIDEO, "flow_grpo.pipeline", "flow_grpo.trainer")
    original, original_wan = base.sde_step_with_logprob, wan.sde_step_with_logprob
    snapshot = {m: dict(vars(m)) for m in (base, wan, pipeline, trainer)}
    places = integrations.patch("flow_grpo")
    names = (f"{BASE}.sde_step_with_logprob", f"{VIDEO}.sde_step_with_logprob")
    assert places == sorted([*names, "flow_grpo.pipeline.sde_step_with_logprob", "flow_grpo.trainer.step"])
    assert all(name in capsys.readouterr().err for name in places[:1])
    assert pipeline.sde_step_with_logprob is trainer.step is base.sde_step_with_logprob is not original
    assert base.sde_step_with_logprob.__wrapped__ is flow_grpo.sde_step_with_logprob
    assert wan.sde_step_with_logprob.__wrapped__ is flow_grpo.wan_sde_step_with_logprob
    held = base.sde_step_with_logprob
    assert integrations.patch("flow_grpo") == places and base.sde_step_with_logprob is held
    assert sorted(integrations.unpatch("flow_grpo")) == places
    for module, names in snapshot.items():
        assert set(vars(module)) == set(names) and all(vars(module)[k] is v for k, v in names.items())
    assert base.sde_step_with_logprob is original and wan.sde_step_with_logprob is original_wan
    assert integrations.unpatch("flow_grpo") == []
    assert flow_grpo.sde_step_with_logprob.__module__ == "prefgrpo.integrations.flow_grpo"


def test_modules_imported_afterwards(codebase):
    """Modules imported after `patch` get our function and are restored; what patch missed, a second call replaces."""
    codebase("flow_grpo")
    base, pipeline = imported(BASE, "flow_grpo.pipeline")
    original = base.sde_step_with_logprob
    integrations.patch("flow_grpo")
    (late, wan) = imported("flow_grpo.late", VIDEO)
    assert late.sde_step_with_logprob is base.sde_step_with_logprob is not original
    assert late.wan.__module__ == VIDEO, "not imported yet when patch ran"
    places = integrations.patch("flow_grpo")
    assert {"flow_grpo.late.wan", "flow_grpo.late.sde_step_with_logprob"} <= set(places)
    integrations.unpatch("flow_grpo")
    assert late.sde_step_with_logprob is pipeline.sde_step_with_logprob is original
    assert late.wan is wan.sde_step_with_logprob and late.wan(0, 0, 0, 0) == 2


def test_trainers_that_define_their_own(codebase):
    """DanceGRPO: each trainer defines its own function, which unpatch restores."""
    codebase("dance_grpo")
    flux, wan, sd = imported("train_grpo_flux", "train_grpo_wan_2_1", "train_grpo_sd")
    places = integrations.patch("dance_grpo")
    assert places == ["train_grpo_flux.flux_step", "train_grpo_wan_2_1.flux_step"]
    assert flux.flux_step is not wan.flux_step and flux.flux_step.__wrapped__ is wan.flux_step.__wrapped__
    assert integrations.unpatch("dance_grpo") == places
    assert flux.flux_step(*8 * [0]) == 3 and wan.flux_step(*8 * [0]) == 4 and sd.step is None


def python(root, folder, *arguments):
    """Run the interpreter in a folder; returns the finished process."""
    env = {"PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run


def test_a_script_that_is_main(codebase, root):
    """torchrun starts a trainer as __main__; it is recognised by its file name."""
    run = python(root, codebase("dance_grpo"), "train_grpo_flux.py")
    place = "['train_grpo_flux.flux_step']"
    assert run.stdout.split("\n")[:3] == [place, "prefgrpo.integrations.dance_grpo", f"{place} 3"]


def test_methods(codebase):
    codebase("flow_factory")
    (module,) = imported("flow_factory.scheduler.flow_match_euler_discrete")
    cls = module.FlowMatchEulerDiscreteSDEScheduler
    original = cls.__dict__["step"]
    assert integrations.patch("flow_factory") == [f"{module.__name__}.{cls.__name__}.step"]
    assert cls.__dict__["step"] is not original and module.Child().step.__func__ is cls.__dict__["step"]
    integrations.unpatch("flow_factory")
    assert cls.__dict__["step"] is original and cls().step(0, 0, 0) == 5 and "step" not in vars(module.Child)


def test_an_older_version_with_fewer_arguments(codebase):
    """Callers of an older signature also get our step."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    codebase("flow_grpo", flow_grpo__diffusers_patch__sd3_sde_with_logprob=f"{SD3}): return 1\n")
    (trainer,) = imported("flow_grpo.trainer")
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    args = scheduler, torch.ones(1, 3), scheduler.timesteps[:1], torch.ones(1, 3)
    assert trainer.step(*args) == 1
    assert "flow_grpo.trainer.step" in integrations.patch("flow_grpo")
    ours = trainer.step(*args, generator=torch.Generator().manual_seed(0))
    direct = flow_grpo.sde_step_with_logprob(*args, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(ours, direct, strict=True))


@pytest.mark.parametrize(
    "text, message",
    [
        (f"{SD3}, eta=1.0): return 1\n", r"expected the parameters \(self, .*, sde_type.*found .*eta\)"),
        (f"{SD3.replace('model_output, timestep', 'timestep, model_output')}): return 1\n", "expected the parameters"),
        ("def other(): pass\n", "expected a function sde_step_with_logprob in flow_grpo.* found none"),
        ("sde_step_with_logprob = print\n", "expected a function sde_step_with_logprob"),
    ],
)
def test_another_version_is_refused_whole(codebase, text, message):
    """Nothing is replaced, not even the functions that would fit."""
    codebase("flow_grpo", flow_grpo__diffusers_patch__sd3_sde_with_logprob=text)
    wan, _ = imported(VIDEO, BASE)
    original = wan.sde_step_with_logprob
    with pytest.raises(RuntimeError, match=message):
        integrations.patch("flow_grpo")
    assert wan.sde_step_with_logprob is original and integrations.unpatch("flow_grpo") == []


@pytest.mark.parametrize("name", sorted(integrations.CODEBASES))
def test_a_codebase_that_is_not_imported(name):
    with pytest.raises(RuntimeError, match=f"'{name}' is not imported, expected .*: import its training code"):
        integrations.patch(name)
    assert integrations.unpatch(name) == []


@pytest.mark.parametrize("call", [integrations.patch, integrations.unpatch])
def test_an_unknown_codebase(call):
    with pytest.raises(ValueError, match="unknown codebase 'trl': expected one of flow_grpo, dance_grpo"):
        call("trl")


@pytest.fixture
def launch(monkeypatch, capfd):
    """launch(arguments) runs the launcher in this process and returns what it printed; its changes are undone."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        launcher.main([str(a) for a in arguments])
        return capfd.readouterr().out

    return call


def test_the_launcher_replaces_before_the_script_imports(codebase, launch, capfd):
    """Imports inside the main block count too; arguments, sys.path and exit status are those of `python SCRIPT`."""
    folder = codebase("flow_grpo", train=SCRIPT)
    ours = ["prefgrpo.integrations.flow_grpo"] * 2 + ["prefgrpo.integrations.pref_grpo"]
    for way in ([folder / "train.py"], ["-m", "train"]):
        out = launch("flow_grpo", *way, "0", "-m", "--config=x.py:y")
        where = str(folder) if len(way) == 1 else ""
        assert out.strip() == f"{ours} {['0', '-m', '--config=x.py:y']} {where} {folder / 'train.py'}"
        integrations.unpatch("flow_grpo")
        for name in [m for m in sys.modules if m.startswith("flow_grpo")]:
            del sys.modules[name]
    with pytest.raises(SystemExit) as end:
        launch("flow_grpo", folder / "train.py", "3")
    assert end.value.code == 3


def test_the_launcher_replaces_the_functions_of_the_script_itself(codebase, root):
    """DanceGRPO's trainers define their own step; started with torchrun, as in practice."""
    folder = codebase("dance_grpo")
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=1", "--master_port=0"]
    (folder / "train_grpo_flux.py").write_text(
        f"from __future__ import annotations\n{FLUX_STEP} 3\nused = flux_step\n"
        "if __name__ == '__main__': print(used.__wrapped__.__module__, used is flux_step, __file__)\n"
    )
    run = python(root, folder, *torchrun, "-m", "prefgrpo.integrations", "dance_grpo", "train_grpo_flux.py")
    assert run.stdout.strip() == "prefgrpo.integrations.dance_grpo True train_grpo_flux.py"
    assert "prefgrpo: patched dance_grpo: train_grpo_flux.flux_step" in run.stderr


@pytest.mark.parametrize(
    "name, arguments, error, message",
    [
        ("flow_grpo", ["flow_factory", "train.py", "0"], SystemExit, "nothing was replaced: .*train.py imported none"),
        ("dance_grpo", ["dance_grpo", "train_grpo_sd.py"], RuntimeError, "expected a function flux_step in .*sd.py"),
        ("flow_grpo", ["flow_grpo", "-m", "flow_grpo.nothing"], ImportError, "expected the name of a module"),
        ("flow_grpo", ["trl", "train.py"], SystemExit, "2"),
    ],
)
def test_the_launcher_refuses(codebase, launch, monkeypatch, name, arguments, error, message):
    monkeypatch.chdir(codebase(name, train=SCRIPT))
    with pytest.raises(error, match=message):
        launch(*arguments)


def test_the_launcher_refuses_another_version(codebase, launch):
    """It refuses before the trainer imports the function, so nothing is trained with only part of it replaced."""
    folder = codebase("flow_grpo", train=SCRIPT, flow_grpo__diffusers_patch__solver="def flow_grpo_step(x): return 1\n")
    with pytest.raises(RuntimeError, match=r"solver\.flow_grpo_step: expected the parameters"):
        launch("flow_grpo", folder / "train.py", "0")
