"""A pytest plugin under which the backend named `cpu` runs the CUDA sources, compiled for the CPU by cuda_runtime.h.

`python -m pytest -p cuda_shim.plugin …` with tests/ on the path and PREFGRPO_SHIM naming a folder for the build. The
module takes the place of prefgrpo._C before anything imports it; launches of the CPU library go to the CUDA one.
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"


def built(folder: Path) -> Path:
    """The module, compiled from csrc with every launch turned into a call of the shim."""
    flags = ["-std=c++17", "-O1", "-fPIC", "-mfma", "-ffp-contract=off", "-fvisibility=hidden", '-DPG_CUDA="shim"']
    flags += [f"-I{p}" for p in (HERE, CSRC, sysconfig.get_paths()["include"])]
    jobs = [(CSRC / "bindings.cpp", ()), (CSRC / "cpu.cpp", ()), (CSRC / "cpu_kernels.cpp", ("-DPG_ISA=plain",))]
    jobs += [(CSRC / f"{name}.cu", ("-x", "c++")) for name in ("cuda_affine", "cuda_small")]
    objects = [folder / f"{source.stem}.o" for source, _ in jobs]
    running = [
        subprocess.Popen(["g++", *flags, *more, "-c", str(source), "-o", str(out)])
        for (source, more), out in zip(jobs, objects, strict=True)
    ]
    codes = [job.wait() for job in running]
    assert not any(codes)
    module = folder / "_C.so"
    subprocess.run(["g++", "-shared", *map(str, objects), "-o", str(module)], check=True)
    return module


def pytest_configure() -> None:
    """Build, and put the module and the patched launches in place."""
    module = built(Path(os.environ["PREFGRPO_SHIM"]))
    spec = importlib.util.spec_from_file_location("prefgrpo._C", module)
    sys.modules["prefgrpo._C"] = loaded = importlib.util.module_from_spec(spec)
    loaded.__spec__ = spec
    spec.loader.exec_module(loaded)

    from prefgrpo.ops import native

    def scratch(x: torch.Tensor, planes: int) -> torch.Tensor:
        size = planes * x.shape[0] * loaded.partials(x.numel() // max(x.shape[0], 1))
        return torch.full((size,), torch.nan, dtype=torch.float64)

    native._on_cpu = lambda t: False
    native._stream = lambda t: 0
    native._scratch = scratch
    coef = torch.ones(1, 5)
    pair, noise = (None, 0.0, False, False), (None, 0, None, None, 0)
    outside = native.sde_step(
        native.args.Step(coef, coef, coef, torch.tensor([7]), *pair, *noise, torch.float32, False, None)
    )
    assert outside[0].isnan().all(), "the CPU kernels raise here: these are not the CUDA sources"
