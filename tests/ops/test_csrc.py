"""The compiled module: what it links, its threads, what happens without it, nvcc's code; and the CUDA sources, run
on the CPU, because this project is rarely tested on a GPU.

Properties: every number of threads gives bitwise equal results (the partition of a sample into partial
sums depends on D only); the module does not link torch and loads without a GPU driver; without it results are the same.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from prefgrpo.ops import PhiloxNoise, sde_logp, sde_step, use_backend
from prefgrpo.ops._backend import _launch_error, extension, unavailable_reason

pytestmark = pytest.mark.skipif(extension() is None, reason="prefgrpo._C is not built")


def run(code, *argv, **env):
    command = [sys.executable, "-W", "always", "-c", code, *map(str, argv)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=600)


def everything():
    """A step, a replay and its gradient for every mixture of dtypes, on latents that are worth several threads."""
    coef = torch.tensor([[0.97, -0.12, 0.66, -1.13, -0.5], [0.5, -0.2, 0.76, -1.0, 0.0], [1.0, -0.1, 0.0, 0.0, 0.0]])
    index = torch.arange(3)
    for x_dtype, v_dtype, y_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=3):
        x, v, ref, old, eps = torch.randn(5, 3, 3000, 41, generator=torch.Generator().manual_seed(1))
        x = x.to(x_dtype)
        v = v.to(v_dtype)
        ref = ref.to(v_dtype)
        old = old.to(v_dtype)
        for noise in (eps, PhiloxNoise(9, index)):
            step = sde_step(x, v, coef, index, noise=noise, out_dtype=y_dtype, want_mean=True)
            leaf = v.clone().requires_grad_()
            out = sde_logp(x, leaf, step.x_next, coef, index, v_ref=ref, v_old=old)[:3]
            yield from (*step, *(t.detach() for t in out), *torch.autograd.grad(sum(t.sum() for t in out), leaf))


def test_threads_change_no_bit(monkeypatch):
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with use_backend("cpu"):
            results.append([*everything()])
    for other in results[1:]:
        assert all(torch.equal(got, want) for got, want in zip(other, results[0], strict=True))


def test_it_links_no_torch_and_no_cuda_driver():
    done = subprocess.run(["ldd", extension().__file__], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    for library in ("torch", "c10", "libcuda", "cudart", "python"):
        assert not [name for name in names if library in name]
    done = run("import importlib.util as u, sys\n"
               f"s = u.spec_from_file_location('prefgrpo._C', {extension().__file__!r}); m = u.module_from_spec(s)\n"
               "s.loader.exec_module(m); print('torch' in sys.modules)")  # fmt: skip
    assert done.stdout.split() == ["False"], done.stderr


WITHOUT = """
import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *a: None if name == 'prefgrpo._C' else find(name, *a)
import sys, torch
from prefgrpo.ops import sde_step, backend_of
given = torch.load(sys.argv[1])
for _ in range(2):
    out = sde_step(**given)
torch.save(out[:2], sys.argv[1])
print(backend_of('cpu'), backend_of('meta'))
"""


@pytest.mark.full
def test_without_the_extension_torch_gives_the_same_answer_and_one_warning(tmp_path):
    x, v, noise = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    given = {"x": x, "v": v, "coef": torch.tensor([[0.97, -0.12, 0.66, -1.13, -0.5]] * 2), "noise": noise}
    torch.save(given, tmp_path / "file.pt")
    done = run(WITHOUT, tmp_path / "file.pt")
    assert done.stdout.split() == ["torch", "torch"] and done.stderr.count("prefgrpo._C is not built") == 1, done.stderr
    for lack, have in zip(torch.load(tmp_path / "file.pt"), sde_step(**given), strict=False):
        torch.testing.assert_close(lack, have, rtol=1e-6, atol=1e-6)


def tools() -> str:
    """The folder of cuobjdump and nvdisasm, which Triton brings."""
    return pytest.importorskip("triton").__path__[0] + "/backends/nvidia/bin"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: what it compiles cannot be looked at")
@pytest.mark.parametrize("source", ["sde_step.cu", "small.cu"])
@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_cuda_kernels_do_not_spill_and_use_128_bit_accesses(root, arch, source):
    command = partial(subprocess.run, check=True, capture_output=True, text=True)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        flags = ["-std=c++17", "-fmad=false", f"-arch=sm_{arch}", "-cubin", "-o", file.name]
        command(["nvcc", *flags, root / "csrc" / source])
        usage = command([f"{tools()}/cuobjdump", "-res-usage", file.name]).stdout
        code = command([f"{tools()}/nvdisasm", "-c", file.name]).stdout
    stack = {name: int(size) for name, size in re.findall(r"Function (\w+):\n.*STACK:(\d+)", usage)}
    assert len(stack) == {"sde_step.cu": 56, "small.cu": 3}[source] and not any(stack.values()), stack
    for part in re.split(r"(?m)^\s*\.section\s+\.text\.", code)[1:]:
        name = re.match(r"\w+", part)[0]
        loads, stores = (len(re.findall(rf"{op}\.E\S*\.128", part)) for op in ("LDG", "STG"))
        if re.search("(step|logp|grad)_kernel", name):
            assert loads >= 2, name
        if re.search("(step|grad|normal)_kernel", name):
            assert stores >= 1, name


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_tests_of_the_ops_pass_on_the_cuda_sources(root, tmp_path):
    """Compiled against tests/cuda_shim, with one fiber per CUDA thread, the kernels face what every backend does:
    indices, tails, unaligned rows, dtypes, sums in two stages. Races and speed need a GPU (tests/ops/test_gpu.py)."""
    files = [root / "tests" / "ops" / f"test_{name}.py" for name in ("sde_step", "noise", "policy_loss", "advantage")]
    path = os.pathsep.join((str(root), str(root / "tests")))
    env = {**os.environ, "PREFGRPO_SHIM": str(tmp_path), "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    options = ["-v", "-m", "full or not full", "-p", "cuda_shim.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-k", "not triton and not torch]", *files]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0 and "[cpu" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(not unavailable_reason("cuda"), reason="this machine has a GPU")
def test_a_cuda_launch_without_a_gpu_is_an_error_not_a_crash(monkeypatch):
    """The launch that decides whether a GPU can be used, made on a machine without one."""
    if not extension().cuda_archs:
        pytest.skip("built without CUDA")
    for name in ("zeros", "empty"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *sizes, device, made=made, **options: made(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    assert re.search(r"do not launch on this GPU \(.*CUDA", _launch_error.__wrapped__())
