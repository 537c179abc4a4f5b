"""A pytest plugin under which the backend named `cpu` runs the CUDA sources, compiled for the CPU by cuda_runtime.h.

`python -m pytest -p cuda_shim.plugin …` with tests/ on the path and PREFGRPO_SHIM naming a folder for the build. The
module takes the place of prefgrpo._C before anything imports it, without the kernels of cpu.cpp.
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pybind11
import torch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"


def built(folder: Path) -> Path:
    """The module, compiled from csrc with every launch turned into a call of the shim."""
    includes = (HERE, CSRC, sysconfig.get_paths()["include"], pybind11.get_include())
    flags = ["-std=c++20", "-O1", "-fPIC", "-mfma", "-ffp-contract=off", "-fvisibility=hidden", '-DPG_CUDA="shim"']
    flags += [f"-I{p}" for p in includes]
    jobs = [(CSRC / "bindings.cpp", ()), (CSRC / "cpu.cpp", ())]
    jobs += [(CSRC / f"{name}.cu", ("-x", "c++")) for name in ("sde_step", "small")]
    objects = [folder / f"{source.stem}{source.suffix}.o" for source, _ in jobs]
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
    assert loaded.cuda_archs == "shim"

    for name in ("sde_step", "sde_logp", "sde_grad", "normal", "policy_loss", "winrate"):
        setattr(loaded, f"cpu_{name}", getattr(loaded, f"cuda_{name}"))

    from prefgrpo.ops import backend_of

    def scratch(backend: str, x: torch.Tensor, dim: int, size: int, sums: int) -> torch.Tensor:
        return torch.from_numpy(np.full(sums * x.shape[0] * loaded.partials(dim, size), np.nan))

    sys.modules["prefgrpo.ops.sde_step"].cuda_scratch = scratch
    assert backend_of("cpu") == "cpu"
