"""The CUDA sources themselves, run on the CPU through a shim by the tests of the ops.

This project is rarely tested on a GPU. Compiled against tests/cuda_shim, with one fiber per CUDA thread, the kernels
face the same golden numbers, fp64 references, NumPy noise and bitwise properties as every backend: indices, tails,
unaligned rows, dtype branches, two-stage reductions and group statistics. Races and speed need a GPU (test_gpu.py).
"""

import os
import shutil
import subprocess
import sys

import pytest

FILES = ("sde_step", "noise", "policy_loss", "ops_advantage")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_tests_of_the_ops_pass_on_the_cuda_sources(root, tmp_path):
    path = os.pathsep.join((str(root), str(root / "tests")))
    env = {**os.environ, "PREFGRPO_SHIM": str(tmp_path), "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    others = "not triton and not torch]"
    options = ["-q", "-m", "full or not full", "-p", "cuda_shim.plugin", "-p", "no:cacheprovider", "-k", others]
    command = [sys.executable, "-m", "pytest", *options]
    files = [str(root / "tests" / f"test_{name}.py") for name in FILES]
    done = subprocess.run([*command, *files], env=env, cwd=root, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    listed = subprocess.run([*command, "--collect-only", files[0]], env=env, cwd=root, capture_output=True, text=True)
    assert "[cpu" in listed.stdout
