"""Triton's compiled code for GPUs that are not present: cubins for sm_80, sm_90 and sm_100, compiled offline.

Checks that every kernel compiles without register spills, that the kernels over latents use 128-bit accesses and few
instructions, and that no a·x + b·v was contracted: the only fused multiply-adds are the explicit ones of the noise.
Numerical results are tested through the interpreter in test_ops_*.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
BULK = ("step", "logp", "grad")


@pytest.fixture(scope="module")
def built():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    few = ",".join((*BULK, "normal"))
    command = [sys.executable, str(Path(__file__).with_name("compile_triton.py")), "90", f"80:{few}", f"100:{few}"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parent.parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.full
def test_every_kernel_compiles_for_every_architecture_without_spills(built):
    assert {k["kernel"] for k in built if k["arch"] == 90} >= {"finish", "guide", "policy", "winrate"}
    for arch in (80, 90, 100):
        assert {k["kernel"] for k in built if k["arch"] == arch} >= {*BULK, "normal"}
    assert [k for k in built if k["stack"]] == []


@pytest.mark.full
def test_bulk_kernels_read_and_write_128_bits(built):
    for k in built:
        if k["kernel"] in BULK:
            assert k["wide"][0] > 0, k
        if k["kernel"] in ("step", "grad", "normal"):
            assert k["wide"][1] > 0, k


def test_instructions_per_element_stay_few(built):
    """With all options enabled at once (guidance pair, mean, KL, Guard); counted in the disassembly."""
    most = {"step": 84, "logp": 43, "grad": 53, "normal": 56}
    for k in built:
        assert k["kernel"] not in most or k["instructions"] <= most[k["kernel"]], k


def test_nothing_is_contracted_but_the_noise(built):
    noise = {k["arch"]: k["fused"] for k in built if k["kernel"] == "normal"}
    for k in built:
        expected = noise[k["arch"]] if k["kernel"] in ("step", "normal") else 0
        if k["kernel"] != "policy":  # exp contains its own
            assert k["fused"] == expected, k
