"""Triton's compiled code for GPUs that are not present: cubins for sm_80, sm_89, sm_90 and sm_100, compiled offline.

On sm_90 the specialisations that the ops launch: every option at the usual dtypes, and of other dtypes and sizes the
largest. Checks that nothing spills, that the kernels over latents use 128-bit accesses and few instructions, and those
of transformer blocks no other accesses, that no a·x + b·v was contracted (the only fused multiply-adds are the explicit
ones of the noise), and that a step and its replay add in the same order. Numbers are tested through the interpreter, by
the ops.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock  # a requirement of torch

pytest.importorskip("triton")
NO_NOISE = {"NOISE": 0}
"""What is fixed in a step that draws nothing, so that it needs no log-prob."""
BLOCKS = ("modulate", "modulate_grad", "residual", "residual_grad", "qk", "low_rank_gelu")
"""Kernels of transformer blocks."""
SCALARS = {"quantise": [0, 1], "dequantise": [1, 0]}
"""Of rows in fp8: loads and stores of a row's scale, beside 128 bits each."""
SIN = 48
"""Bytes of stack of libdevice's sine in fp64, for the reduction of huge angles."""
FLOATS = {
    "policy": dict.fromkeys(("low", "high", "log_low", "log_high", "adv_clip", "kl_coef", "norm"), "fp64"),
    "winrate": {"eps": "fp64"},
    "grad": {"share": "fp64"},
    "rows": dict.fromkeys(("eta", "sigma_max", "sigma_min"), "fp64"),
    **{kernel: {"eps": "fp32"} for kernel in ("modulate", "modulate_grad", "qk")},
}
"""Kernel → its float arguments, in the precision of csrc/ and of the reference: norms add eps to an fp32 variance."""
WIDE = {"number": "i64", "counter": "i64", "seed_low": "u32", "seed_high": "u32"}
"""Arguments that must not depend on the size of their value."""


def compiled(arch, which):
    """The lines of compile_triton.py."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_triton.py")), arch, which]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return [*map(json.loads, done.stdout.splitlines())]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Compiled once, whichever processes run the tests of this file."""
    place = tmp_path_factory.getbasetemp()
    file = (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "triton.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            hows = ("90", "all"), ("80", "few"), ("89", "few"), ("100", "few")
            file.write_text(json.dumps([k for how in hows for k in compiled(*how)]))
    return json.loads(file.read_text())


@pytest.mark.full
def test_nothing_spills(built):
    for arch in (80, 89, 90, 100):
        kernels = {k["kernel"] for k in built if k["arch"] == arch}
        in_fp8 = {*SCALARS} if arch >= 89 else {"dequantise"}  # older ones have no instruction for the way there
        assert kernels == {"step", "logp", "finish", "grad", "normal", "policy", "winrate", "rows", *BLOCKS} | in_fp8
    most = {"round": 0, "one": 0, "odd": 32}  # a thread has 16 elements of an unaligned latent
    no_model = ("low_rank_gelu", "odd", "torch.float32")  # its product, of rows off 16 bytes
    two_registers = {("residual_grad", 80), ("modulate_grad", 100)}  # with the gradients of norms, from Triton 3.8 on
    spilling = [
        k for k in built
        if k["stack"] > (SIN if k["kernel"] == "rows" else most[k["numbers"]])
        and (k["kernel"], k["numbers"], k["dtypes"][0]) != no_model
        and not ((k["kernel"], k["arch"]) in two_registers and k["what"] == "all weights" and k["stack"] <= 8)
    ]  # fmt: skip
    rare = ["torch.float32", "torch.float32", "torch.bfloat16"]  # an fp32 v beside a bf16 x': six numbers, with KL
    assert all((k["kernel"], k["dtypes"]) == ("grad", rare) and k["stack"] <= 24 for k in spilling), spilling


@pytest.mark.full
def test_bulk_kernels_read_and_write_128_bits(built):
    for k in built:
        if k["numbers"] == "round" and k["kernel"] in ("step", "logp", "grad"):
            assert k["wide"][0] > 0, k
        if k["numbers"] == "round" and k["kernel"] in ("step", "grad", "normal"):
            assert k["wide"][1] > 0, k
        if k["numbers"] == "round" and k["kernel"] in BLOCKS:
            assert k["wide"] == k["global"], k
        if k["numbers"] == "round" and k["kernel"] in SCALARS:
            assert [n - w for n, w in zip(k["global"], k["wide"], strict=True)] == SCALARS[k["kernel"]], k


@pytest.mark.full
def test_instructions_per_element_stay_few(built):
    """Of aligned tensors, counted by the size of the code."""
    most = {"step": 80, "logp": 40, "grad": 50, "normal": 56}
    for k in built:
        if k["kernel"] in most and k["numbers"] == "round":
            assert k["per_element"] <= most[k["kernel"]], k


@pytest.mark.full
def test_a_value_compiles_nothing(built):
    """Other seeds, offsets and clip ranges run the same code: no compilation in the middle of a run."""
    for arch in (80, 89, 90, 100):
        names = [k["kernel"] for k in built if k["arch"] == arch and k["numbers"] == "round"]
        assert names.count("normal") == 1 and names.count("policy") == (8 if arch == 90 else 1), names


def check_scalars(lines):
    """Compiled, a float without an annotation is fp32; the interpreter computes with Python's fp64."""
    for k in lines:
        expected = FLOATS.get(k["kernel"], {})
        assert {name: k["scalars"][name] for name in k["floats"]} == expected, k
        others = {name: kind for name, kind in k["scalars"].items() if name not in expected}
        assert all(kind in ("i32", "i64", "u32") for kind in others.values()), k
        assert all(k["scalars"].get(name, kind) == kind for name, kind in WIDE.items()), k


@pytest.mark.full
def test_every_scalar_has_the_type_that_the_reference_computes_with(built):
    check_scalars(built)
    assert {k["kernel"] for k in built if k["floats"]} == {*FLOATS}


@pytest.mark.full
def test_nothing_is_contracted_but_the_noise(built):
    for k in built:
        noisy = k["kernel"] == "normal" or k["fixed"].get("NOISE") == 2
        is_product = k["kernel"] == "low_rank_gelu" and k["dtypes"][0] == "torch.float32"
        if k["kernel"] != "policy" and not is_product:  # exp contains its own
            assert (k["fused"] > 0) == noisy, k


@pytest.mark.full
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


@pytest.mark.full
def test_where_a_latent_begins_changes_no_sum():
    """A view off 16 bytes is read by fewer elements per thread, which would be another order."""
    found = {}
    for k in compiled("90", "layouts"):
        if k["sum"]:
            found.setdefault((k["numbers"], *k["dtypes"]), set()).add((k["kernel"], k["sum"]))
    assert len(found) == 3
    for layouts in found.values():
        assert {kernel for kernel, _ in layouts} == {"step", "logp"} and len({layout for _, layout in layouts}) == 1
