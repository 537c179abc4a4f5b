"""The package works from a checkout, an editable install and a wheel, and needs only its declared dependencies.

The three installs differ in how `prefgrpo.kernels` (a link to kernels/) and the compiled module are found, and in each
`import kernels` must still give the Hugging Face library. The wheel is built from the sdist, which tests the sdist too.
Installs use the build tools and dependencies of this environment: nothing is downloaded.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "runs", "dist", "*.so", "__pycache__", "*.egg-info", ".*_cache"
)
NAMED_WHERE_USED = ("torchvision", "open_clip", "flash_attn", "xformers", "vllm", "sageattention", "wandb", "deepspeed")
BEYOND_OPS = (
    *NAMED_WHERE_USED, "accelerate", "aiohttp", "diffusers", "jinja2", "kernels", "matplotlib", "peft", "PIL",
    "pydantic", "rich", "safetensors", "tensorboard", "tqdm", "transformers", "triton", "tyro", "yaml",
)  # fmt: skip
HIDE = """
import sys
class Hide:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name in {names!r} or name.split(".")[0] in {names!r}:
            return None
        return self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
"""
"""Hides packages as if they were not installed."""
PROBE = """
import importlib.util, json, kernels, pathlib, prefgrpo, prefgrpo.kernels
names = sorted(p.stem for p in pathlib.Path(list(prefgrpo.kernels.__path__)[0]).glob("*.py"))
native = importlib.util.find_spec("prefgrpo._C")
print(json.dumps({
    "version": prefgrpo.__version__,
    "package": str(pathlib.Path(prefgrpo.__file__).parent),
    "native": native and native.origin,
    "hf": kernels.__file__,
    "get_kernel": hasattr(kernels, "get_kernel"),
    "kernels": [n for n in names if importlib.util.find_spec(f"prefgrpo.kernels.{n}")],
}))
"""
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")
CODE = sorted(p.stem for p in (ROOT / "kernels").glob("*.py"))
BUILT = ("__pycache__", ".so", ".pyc")


def files(package: Path) -> set[str]:
    """Every file of a package folder, including the linked kernels, without files that Python or a compiler made."""
    found = (Path(top) / name for top, _, names in os.walk(package, followlinks=True) for name in names)
    return {str(p.relative_to(package)) for p in found if p.parent.name != BUILT[0] and p.suffix not in BUILT}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Standard output of a command that must succeed; it runs without PYTHONPATH and VIRTUAL_ENV."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean | env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python(code: str, *argv: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Output of a Python program run in this environment."""
    return run(sys.executable, "-c", code, *argv, cwd=cwd, **env)


def check(probe: str) -> dict:
    seen = json.loads(probe)
    assert seen["get_kernel"] and Path(seen["hf"]).parent != ROOT / "kernels", "`import kernels` is not the library"
    assert seen["kernels"] == CODE
    return seen


def copy_of_checkout(tmp_path: Path) -> Path:
    """Without what a build or a run made."""
    return Path(shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=LEFT_OUT))


def wheel_of(source: Path, tmp_path: Path, **env: str) -> tuple[Path, set[str], str]:
    """(wheel built from a folder or an sdist, its files, the build's log)."""
    log = tmp_path / "build.log"
    run(sys.executable, "-m", "pip", "wheel", *OFFLINE, "--log", log, "-w", tmp_path, source, cwd=tmp_path, **env)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"prefgrpo/kernels/{name}.py" for name in CODE} <= names
    assert not {name.split("/")[0] for name in names} & {"kernels", "tests", "csrc", "scripts", "benchmarks"}
    return wheel, names, log.read_text()


def test_editable_install(tmp_path):
    """The one of this environment. `python -c` and `python -m` put the working directory first on sys.path."""
    for cwd in (ROOT, tmp_path):
        seen = check(python(PROBE, cwd=cwd))
        assert Path(seen["package"]) == ROOT / "prefgrpo" and Path(seen["native"]).is_relative_to(ROOT)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_sdist_and_wheel(tmp_path):
    """The wheel, built from the sdist, is installed beside its dependencies alone."""
    source, empty = copy_of_checkout(tmp_path), tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, source, cwd=tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "CMakeLists.txt", "LICENSE", "csrc/bindings.cpp", "csrc/math.h", "prefgrpo/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    wheel, names, _ = wheel_of(sdist, tmp_path, PREFGRPO_CUDA="0", PATH=path)
    assert f"prefgrpo/_C{sysconfig.get_config_var('EXT_SUFFIX')}" in names

    venv.create(tmp_path / "venv", symlinks=True)
    own = tmp_path / "venv" / "bin" / "python"
    site = Path(run(own, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip())
    dependencies = Path(sysconfig.get_paths()["purelib"])  # searched after the environment's own packages
    lines = [str(dependencies), *["import torchvision_cpu"] * (dependencies / "torchvision_cpu.py").is_file()]
    (site / "dependencies.pth").write_text("\n".join(lines) + "\n")
    run(sys.executable, "-m", "pip", "--python", own, "install", *OFFLINE, wheel, cwd=tmp_path)
    for cwd in (empty, ROOT):  # -I keeps the working directory off sys.path, so the wheel is imported
        seen = check(run(own, *(["-I"] if cwd == ROOT else []), "-c", PROBE, cwd=cwd))
        assert Path(seen["package"]).is_relative_to(tmp_path) and Path(seen["native"]).is_relative_to(tmp_path)
        assert files(Path(seen["package"])) == files(source / "prefgrpo"), "package files differ"
    command = own.parent / "prefgrpo"
    assert run(command, "--version", cwd=ROOT).split() == ["prefgrpo", seen["version"]]
    assert "nothing was written" in run(command, "demo", "--dry-run", cwd=empty) and not list(empty.iterdir())


@pytest.mark.full
def test_an_install_without_compiler(tmp_path):
    """The build names what is missing; what the ops then do is tested in tests/ops/test_csrc.py."""
    tools = tmp_path / "tools"
    tools.mkdir()  # this empty folder is the whole PATH, so there is no compiler
    _, names, log = wheel_of(copy_of_checkout(tmp_path), tmp_path, PATH=str(tools), CXX="c++")
    assert "building without the compiled kernels: no C++20 compiler" in log
    assert not [name for name in names if name.startswith("prefgrpo/_C")]


@pytest.mark.full
def test_every_module_imports_without_the_optional_packages():
    """torchvision, open_clip, flash-attn, xformers, vllm etc. may be imported only where they are used."""
    walk = HIDE.format(names=NAMED_WHERE_USED) + (
        "import importlib, pkgutil, prefgrpo\n"
        "names = [m.name for m in pkgutil.walk_packages(prefgrpo.__path__, 'prefgrpo.')] + "
        f"[f'prefgrpo.kernels.{{n}}' for n in {CODE!r}]\n"
        "for name in names:\n"
        "    if name not in ('prefgrpo.__main__', 'prefgrpo._C'):\n"
        "        importlib.import_module(name)\n"
        "print(len(names))"
    )
    assert int(python(walk)) > 40


def test_ops_need_torch_and_numpy_only():
    step = HIDE.format(names=BEYOND_OPS) + (
        "import torch, prefgrpo.ops, prefgrpo.sde.rules, prefgrpo.sde.schedule, prefgrpo.sde.noise\n"
        "x = torch.ones(2, 8)\n"
        "coef = torch.tensor([[0.5, 2.0, 0.0, 0.0, 0.0]])\n"
        "out = prefgrpo.ops.sde_step(x, x, coef, torch.zeros(2, dtype=torch.int64), noise=None)\n"
        "print(float(out.x_next.sum()))"
    )
    assert float(python(step)) == 2 * 8 * 2.5


HUB = """
import json, sys
import kernels, torch
hub = kernels.get_local_kernel(__import__("pathlib").Path(sys.argv[1]))
assert "prefgrpo" not in sys.modules and hub.__name__ != "prefgrpo"
generator = torch.Generator().manual_seed(0)
x, v = torch.randn(2, 3, 40, generator=generator)
row = hub.rules.sde_row("flow", 0.9, 0.8, 0.7)
coef, ids = torch.tensor([row]), torch.arange(3)
results = []
for backend in ("torch", "triton"):
    with hub.use_backend(backend):
        leaf = v.clone().requires_grad_()
        step = hub.sde_step(x, v, coef, 0, noise=hub.PhiloxNoise(1, ids, ids))
        logp = hub.sde_logp(x, leaf, step.x_next, coef, 0).logp
        logp.sum().backward()
        assert torch.equal(step.logp, logp.detach())
    results.append((step.x_next, logp.detach(), leaf.grad))
for a, b in zip(*results):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
traced = torch.compile(lambda *t: hub.sde_logp(*t).logp, fullgraph=True, backend="aot_eager")
assert torch.equal(traced(x, v, step.x_next, coef, torch.zeros(3).long()), logp.detach())
import prefgrpo.ops  # both in one process
ours, theirs = (ops.sde_step(x, v, coef, 0, noise=None).x_next for ops in (prefgrpo.ops, hub))
assert torch.equal(ours, theirs)
print(len(hub.__all__))
"""


@pytest.mark.full
def test_the_hub_library_loads_the_ops_from_a_folder(tmp_path):
    """Loaded by the library itself, without prefgrpo: Triton (interpreted here) and torch agree, also in a graph."""
    run(sys.executable, ROOT / "scripts" / "build_hub.py", tmp_path, cwd=tmp_path)
    built = tmp_path / "build" / "torch-universal"
    assert (built / "kernels" / "sde_step.py").is_file() and not list(built.rglob("*.safetensors"))
    assert int(python(HUB, tmp_path, cwd=tmp_path, TRITON_INTERPRET="1")) > 10


def needed(*extras: str) -> set[str]:
    """Distributions that `pip install prefgrpo[extras]` brings, from the metadata of the installed packages."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    todo, done = [Requirement(line) for line in asked], set()
    while todo:
        one = todo.pop()
        for extra in {"", *one.extras}:
            if (name := (canonicalize_name(one.name), extra)) in done:
                continue
            done.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                lines = map(Requirement, metadata.requires(one.name) or [])
                todo += [r for r in lines if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in done}


ENCODE = """
import sys, tempfile
import torch
from PIL import Image
from prefgrpo import models
from prefgrpo.config.loading import from_dict
from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.prompts import Prompt
from prefgrpo.rollout.embeddings import Embeddings, entries_of
from prefgrpo.rollout.source_images import SourceImages
from prefgrpo.tiny import pipelines
Image.new("RGB", (64, 64), "red").save(f"{sys.argv[1]}/red.png")
source = SourceImages((f"{sys.argv[1]}/red.png",), 64, 64)
prompt = Prompt(0, "a caf\\u00c3\\u00a9 &amp; a <b>cat</b>")
for name in pipelines.FAMILIES:
    folder, family = tempfile.mkdtemp(dir=sys.argv[1]), models.family(name)
    pipelines.make(name, folder)
    small = {} if family.default_source_area is None else {"source_area": 32 * 32}
    sampling = SamplingConfig(64, 64, frames=None if family.default_frames is None else 5)
    adapter = models.family(name).load(folder, torch.float32, torch.device("cpu"), **small)
    for sources in [SourceImages()] * (not family.needs_source) + [source] * (family.most_sources > 0):
        data = {"prompts": "p", "max_length": 512 if "qwen" in name else 32}
        wanted = entries_of(family, prompt, sources, sampling, adapter.guided(sampling))
        Embeddings(from_dict({"model": folder, "family": name, "data": data})).conditions(adapter, [wanted])
    print(name)
"""


@pytest.mark.full
def test_every_family_encodes_with_the_train_extra_alone(tmp_path):
    """All other packages of this environment are hidden; stock Wan image-to-video, for one, calls ftfy unchecked."""
    there, wanted = metadata.packages_distributions(), needed("train")
    others = {name for name, dists in there.items() if not {canonicalize_name(d) for d in dists} & wanted}
    assert {"open_clip", "pytest"} <= others and not {"torch", "diffusers"} & others
    families = python(HIDE.format(names=sorted(others - {"prefgrpo"})) + ENCODE, tmp_path).split()
    assert {"wan_i2v", "wan22_i2v", "flux", "qwen_image_edit"} <= set(families)


@pytest.mark.full
def test_doctor_without_the_optional_packages():
    lacking = ("triton", "torchvision", "peft", "diffusers", "transformers", "prefgrpo._C")
    code = HIDE.format(names=lacking) + "from prefgrpo.commands.doctor import doctor\nraise SystemExit(doctor())"
    rows = {line[:24].strip(): line[25:] for line in python(code).splitlines()}
    assert rows["torch version"] == torch.__version__ and rows["ops: torch"].startswith("ok on cpu")
    assert rows["ops: cpu"].startswith("not available") and rows["ops: triton"].startswith("not available")


@pytest.mark.full
def test_doctor_finds_a_wrong_backend():
    code = (
        "from prefgrpo.ops import _backend\n"
        "right = _backend._kernel('cpu', 'sde_step')\n"
        "_backend._kernel = lambda *name: lambda n, fields: right(n, fields | {'x': 2 * fields['x']})\n"
        "from prefgrpo.commands.doctor import doctor\nprint('code', doctor())"
    )
    assert python(code).splitlines()[-1] == "code 1"
