"""The compiled module itself: what it links, which instruction sets it has, and what happens without it.

Properties: every instruction set and thread count gives bitwise equal results (the partition of a sample into partial
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

import pytest
import torch
from ops_cases import Case, make

from prefgrpo.ops import Guidance, PhiloxNoise, sde_logp, sde_step, use_backend
from prefgrpo.ops._backend import extension, unavailable_reason

pytestmark = pytest.mark.skipif(extension() is None, reason="prefgrpo._C is not built")
SETS = ("plain", "avx2", "avx512")


@pytest.fixture
def restore():
    module = extension()
    before, threads = module.isa(), torch.get_num_threads()
    yield module
    module.use_isa(before)
    torch.set_num_threads(threads)


def on_cpu(*case):
    return Case(**{name: t.cpu() for name, t in vars(make(*case)).items()})


def everything(shape, guidance):
    c = on_cpu(shape, 3, torch.float32, torch.bfloat16)
    pair = Guidance(c.u, 2.0, rescale=True) if guidance else None
    v = c.v.clone().requires_grad_()
    with use_backend("cpu"):
        drawn = sde_step(c.x, c.v, c.coef, c.index, noise=PhiloxNoise(9, torch.arange(3)), guidance=pair)
        given = sde_step(c.x, c.v, c.coef, c.index, noise=c.eps, guidance=pair, out_dtype=torch.bfloat16)
        out = sde_logp(c.x, v, given.x_next, c.coef, c.index, v_ref=c.v_ref, v_old=c.v_old, guidance=pair)
        (out.logp + out.kl + out.log_ratio).sum().backward()
    return *drawn[:2], *given[:2], *(t.detach() for t in out), v.grad, *without_extras(shape)


def without_extras(shape):
    """Results of the one-pass loops for every combination of fp32 and bf16."""
    results = []
    for x, v, y in itertools.product((torch.float32, torch.bfloat16), repeat=3):
        c = on_cpu(shape, 2, x, v)
        leaf = c.v.clone().requires_grad_()
        with use_backend("cpu"):
            step = sde_step(c.x, c.v, c.coef, c.index, noise=c.eps, out_dtype=y)
            logp = sde_logp(c.x, leaf, step.x_next, c.coef, c.index).logp
            logp.sum().backward()
            staged = sde_logp(c.x, c.v, step.x_next, c.coef, c.index, v_ref=c.v_ref).logp
        assert torch.equal(staged, logp), "one pass and staged tiles must sum alike"
        results += [*step[:2], logp.detach(), leaf.grad]
    return results


@pytest.mark.parametrize("guidance", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_instruction_sets_agree(restore, name, guidance):
    """Bitwise equal where the hardware has fused multiply-add; noise of the plain set very rarely rounds once more."""
    before = everything((1000, 33), guidance)
    if not restore.use_isa(name):
        assert restore.isa() != name
        pytest.skip(f"this machine lacks {name}")
    assert restore.isa() == name
    after = everything((1000, 33), guidance)
    for k, (a, b) in enumerate(zip(before, after, strict=True)):
        if k < 2 and name == "plain":  # outputs that contain addressed noise
            assert (a - b).abs().max() <= 1e-6
        else:
            assert torch.equal(a, b)


def test_unknown_instruction_set_is_refused(restore):
    before = restore.isa()
    assert not restore.use_isa("sse9") and restore.isa() == before


@pytest.mark.parametrize("guidance", [False, True])
def test_threads_change_no_bit(restore, guidance):
    torch.set_num_threads(1)
    one = everything((3000, 41), guidance)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for a, b in zip(one, everything((3000, 41), guidance), strict=True):
            assert torch.equal(a, b)


def run(code, **env):
    env = {**os.environ, **{k: v for k, v in env.items() if v is not None}}
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env=env, capture_output=True, text=True, timeout=600
    )


def test_it_links_no_torch_and_no_cuda_driver():
    done = subprocess.run(["ldd", extension().__file__], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    for library in ("torch", "c10", "libcuda", "cudart", "python"):
        assert not [name for name in names if library in name]
    done = run("import importlib.util as u, sys; p = sys.argv[0]\n"
               f"s = u.spec_from_file_location('prefgrpo._C', {extension().__file__!r}); m = u.module_from_spec(s)\n"
               "s.loader.exec_module(m); print(m.isa(), 'torch' in sys.modules)")  # fmt: skip
    assert done.stdout.split() == [extension().isa(), "False"], done.stderr


WITHOUT = """
import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *a: None if name == 'prefgrpo._C' else find(name, *a)
import torch
from prefgrpo.ops import sde_step, backend_of
g = torch.Generator().manual_seed(0)
x, v, e = torch.randn(3, 2, 50, generator=g)
coef = torch.tensor([[0.97, -0.12, 0.66, -1.13, -0.5]] * 2)
for _ in range(2):
    out = sde_step(x, v, coef, noise=e)
print(backend_of('cpu'), out.logp.tolist(), out.x_next.double().sum().item())
"""


def test_without_the_extension_torch_gives_the_same_answer_and_one_warning():
    have, lack = run(WITHOUT.replace("u.find_spec =", "unused =")), run(WITHOUT)
    assert have.stdout.startswith("cpu ["), have.stderr
    assert lack.stdout.startswith("torch ["), lack.stderr
    values = [
        [float(t) for t in d.stdout.split(" ", 1)[1].replace("[", "").replace("]", ",").split(",")]
        for d in (have, lack)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert lack.stderr.count("prefgrpo._C is not built") == 1 and "prefgrpo" not in have.stderr


def test_the_environment_names_a_backend():
    code = "from prefgrpo.ops import backend_of; print(backend_of('cpu'), backend_of('meta'))"
    assert run(code, PREFGRPO_BACKEND="torch").stdout.split() == ["torch", "torch"]
    done = run(code, PREFGRPO_BACKEND="metal")
    assert done.returncode and "unknown backend 'metal': expected one of cuda, triton, cpu, torch" in done.stderr
    if why := unavailable_reason("cuda"):
        done = run(code, PREFGRPO_BACKEND="cuda")
        assert done.returncode and "backend 'cuda' was selected but cannot run" in done.stderr and why in done.stderr


def compiled(source, arch):
    """{kernel: (bytes of stack, 128-bit loads, 128-bit stores)} of nvcc's code for one architecture."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        command = ["nvcc", "-std=c++17", "-fmad=false", f"-arch=sm_{arch}", "-cubin", "-o", file.name, source]
        subprocess.run(command, check=True, capture_output=True)
        tools = pytest.importorskip("triton").__path__[0] + "/backends/nvidia/bin"
        run = partial(subprocess.run, check=True, capture_output=True, text=True)
        usage = run([f"{tools}/cuobjdump", "-res-usage", file.name]).stdout
        code = run([f"{tools}/nvdisasm", "-c", file.name]).stdout
    stack = {name: int(size) for name, size in re.findall(r"Function (\w+):\n.*STACK:(\d+)", usage)}
    found = {}
    for part in re.split(r"(?m)^\s*\.section\s+\.text\.", code)[1:]:
        name = re.match(r"\w+", part)[0]
        found[name] = stack[name], *(len(re.findall(rf"{op}\.E\S*\.128", part)) for op in ("LDG", "STG"))
    return found


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: what it compiles cannot be looked at")
@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_specialised_cuda_kernels_do_not_spill_and_use_128_bit_accesses(root, arch):
    """The gradient kernels for any dtype spill, and on sm_100 and sm_120 that for fp32: so the check can fail."""
    kernels = compiled(root / "csrc" / "cuda_affine.cu", arch) | compiled(root / "csrc" / "cuda_small.cu", arch)
    spilling = {name for name, k in kernels.items() if k[0]}
    assert spilling and all("grad_kernelILin1" in name or "grad_kernelILi0ELi0" in name for name in spilling)
    for name, (_, loads, stores) in kernels.items():
        if re.search("(step|logp|grad)_kernel", name):
            assert loads >= 2 and (stores or "logp" in name), name


@pytest.mark.skipif(not unavailable_reason("cuda"), reason="this machine has a GPU")
def test_a_cuda_launch_without_a_gpu_is_an_error_not_a_crash():
    module = extension()
    x = torch.zeros(1, 4)
    address = (1, x.data_ptr(), x.data_ptr(), 0)
    with pytest.raises(RuntimeError, match="CUDA"):
        module.normal(1, 1, 4, address, (x.data_ptr(), 4, 0), 0)
