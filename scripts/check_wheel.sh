#!/usr/bin/env bash
# Usage: scripts/check_wheel.sh WHEEL PYTHON...
# Installs WHEEL and its dependencies into a fresh environment for each PYTHON in turn, with no compiler or build tool on
# the path. Then checks that every available backend agrees with plain torch, that the command explains what an ops-only
# install lacks, and that `import kernels` is still the Hugging Face library. Prints versions, backends and sizes.
# PIP_ARGS: pip options, such as "-c constraints.txt", or a package index with CPU builds of torch.
set -euo pipefail
wheel=$(realpath "$1") tmp=$(mktemp -d)
shift
trap 'rm -rf "$tmp"' EXIT
printf '%s: %s bytes\n' "$(basename "$wheel")" "$(stat -c %s "$wheel")"

cat >"$tmp/check.py" <<'PYTHON'
import shutil
import subprocess
import sys
from pathlib import Path

tools = ("cc", "gcc", "c++", "g++", "clang", "clang++", "nvcc", "cmake", "ninja", "make")
assert not [name for name in tools if shutil.which(name)], "a compiler or build tool is on the path"

import torch

from prefgrpo import ops
from prefgrpo.ops.backend import BACKENDS, extension, unavailable_reason

x, v, noise = torch.randn(3, 4, 6, 16, generator=torch.Generator().manual_seed(0))
coef = torch.tensor([[0.9, -0.1, 0.5, -2.0, 0.3]])


def run(backend):
    leaf = v.clone().requires_grad_()
    with ops.use_backend(backend):
        step = ops.affine_step(x, v, coef, 0, noise=noise, out_dtype=torch.bfloat16)
        logp = ops.affine_logp(x, leaf, step.x_next, coef, 0).logp
        loss = ops.policy_loss(logp, step.logp - 0.1, torch.arange(4.0), clip_low=0.2).loss
        loss.backward()
    return step.x_next, step.logp, loss.detach(), leaf.grad


assert ops.backend_of("cpu") == "cpu", unavailable_reason("cpu")
tested, expected = [], run("torch")
for backend in BACKENDS:
    if why := unavailable_reason(backend):
        print(f"  {backend}: {why}")
        continue
    for got, reference in zip(run(backend), expected):
        torch.testing.assert_close(got, reference, rtol=2e-5, atol=1e-6)
    tested.append(backend)

command = [Path(sys.executable).with_name("prefgrpo"), "train"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 2 and "pip install 'prefgrpo[train]'" in done.stderr, done.stderr
assert "Traceback" not in done.stderr, done.stderr

package = Path(ops.__file__).parent.parent
size = {"package": 0, ".safetensors": 0, ".so": 0}
for path in package.rglob("*"):
    if path.is_file() and path.suffix != ".pyc":
        size["package"] += path.stat().st_size
        if path.suffix in size:
            size[path.suffix] += path.stat().st_size
print(f"  Python {sys.version.split()[0]}, torch {torch.__version__}: {', '.join(tested)} agree; {Path(extension().__file__).name}")
print(f"  {done.stderr.strip()}")
print("  installed: " + ", ".join(f"{name} {n / 1e6:.2f} MB" for name, n in size.items()))
PYTHON

for python in "$@"; do
    "$python" -m venv "$tmp/venv"
    bin=$tmp/venv/bin
    echo "$("$bin/python" --version):"
    # shellcheck disable=SC2086  # PIP_ARGS is a list of options
    PATH=$bin "$bin/python" -m pip install -q --no-input --no-compile ${PIP_ARGS:-} "$wheel"
    (cd "$tmp" && PATH=$bin TRITON_INTERPRET=1 "$bin/python" -B check.py)
    # shellcheck disable=SC2086
    PATH=$bin "$bin/python" -m pip install -q --no-input --no-compile ${PIP_ARGS:-} kernels
    (cd "$tmp" && PATH=$bin "$bin/python" -B -c 'import prefgrpo.ops, kernels; assert kernels.get_kernel
print("  kernels", kernels.__version__, kernels.__file__)')
    rm -rf "$tmp/venv"
done
