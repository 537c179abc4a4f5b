"""Triton's compiled code for GPUs that are not present: cubins for sm_80, sm_90 and sm_100, compiled offline.

On sm_90 every specialisation that the ops launch (odd sizes for two triples of dtypes). Checks that nothing spills,
that the kernels over latents use 128-bit accesses and few instructions, and those of transformer blocks no other
accesses, that no a·x + b·v was contracted (the only fused multiply-adds are the explicit ones of the noise), and that
a step and its replay add in the same order. Numbers are tested through the interpreter, by the ops.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.full
NO_NOISE = {"NOISE": 0}
"""What is fixed in a step that draws nothing, so that it needs no log-prob."""
BLOCKS = ("modulate", "modulate_grad", "residual", "residual_grad", "qk")
"""Kernels of transformer blocks."""


@pytest.fixture(scope="module")
def built():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    lines = []
    for arch, which in (("90", "all"), ("80", "few"), ("100", "few")):
        command = [sys.executable, str(Path(__file__).with_name("compile_triton.py")), arch, which]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500, cwd=Path(__file__).parent)
        assert done.returncode == 0, done.stderr[-2000:]
        lines += map(json.loads, done.stdout.splitlines())
    return lines


def test_nothing_spills(built):
    for arch in (80, 90, 100):
        kernels = {k["kernel"] for k in built if k["arch"] == arch}
        assert kernels == {"step", "logp", "finish", "grad", "normal", "policy", "winrate", *BLOCKS}
    most = {"round": 0, "one": 0, "odd": 32}  # a thread has 16 elements of an unaligned latent
    spilling = [k for k in built if k["stack"] > most[k["numbers"]]]
    rare = ["torch.float32", "torch.float32", "torch.bfloat16"]  # an fp32 v beside a bf16 x': six numbers, with KL
    assert all((k["kernel"], k["dtypes"]) == ("grad", rare) and k["stack"] <= 24 for k in spilling), spilling


def test_bulk_kernels_read_and_write_128_bits(built):
    for k in built:
        if k["numbers"] == "round" and k["kernel"] in ("step", "logp", "grad"):
            assert k["wide"][0] > 0, k
        if k["numbers"] == "round" and k["kernel"] in ("step", "grad", "normal"):
            assert k["wide"][1] > 0, k
        if k["numbers"] == "round" and k["kernel"] in BLOCKS:
            assert k["wide"] == k["global"], k


def test_instructions_per_element_stay_few(built):
    """Of aligned tensors, in the disassembly."""
    most = {"step": 80, "logp": 40, "grad": 50, "normal": 56}
    for k in built:
        if k["kernel"] in most and k["numbers"] == "round":
            assert k["per_element"] <= most[k["kernel"]], k


def test_a_value_compiles_nothing(built):
    """Other seeds, offsets and clip ranges run the same code: no compilation in the middle of a run."""
    for arch in (80, 90, 100):
        names = [k["kernel"] for k in built if k["arch"] == arch and k["numbers"] == "round"]
        assert names.count("normal") == 1 and names.count("policy") == 8, names


def test_nothing_is_contracted_but_the_noise(built):
    for k in built:
        noisy = k["kernel"] == "normal" or k["fixed"].get("NOISE") == 2
        if k["kernel"] != "policy":  # exp contains its own
            assert (k["fused"] > 0) == noisy, k


@pytest.mark.parametrize("numbers", ["round", "odd", "one"])
def test_a_step_and_its_replay_add_in_the_same_order(built, numbers):
    """Whatever noise the step draws, and whatever else the replay computes."""
    layouts = {}
    for k in built:
        adds = k["kernel"] in ("step", "logp") and k["fixed"] != NO_NOISE
        if k["arch"] == 90 and k["numbers"] == numbers and adds:
            layouts.setdefault(tuple(k["dtypes"]), set()).add(k["sum"])
    assert len(layouts) == {"round": 5, "odd": 2, "one": 2}[numbers]
    assert all(len(found) == 1 and found != {""} for found in layouts.values()), layouts
