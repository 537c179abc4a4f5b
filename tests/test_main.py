"""What the command prepares before a run: streams that do not end it, and how torch allocates GPU memory.

Why these cases: batch systems set ascii or latin-1, in which the summary of a step (Δ) cannot be written; `| head`
ends; an ssh connection breaks (writes then fail with EIO); and a daemon starts without streams. Texts of many lengths
fragment GPU memory; a user may have chosen a cure of his own, under either name of the variable.
"""

import os
import pty
import subprocess
import sys

import pytest
from ranks import environment, start
from world import recipe, rows

from prefgrpo import __main__
from prefgrpo.commands import cli


def streams() -> None:
    """Runs in the new process, which prints to STREAMS instead of its log."""
    kind = os.environ["STREAMS"]
    if kind in ("ascii", "latin-1"):
        for number, name in ((1, "stdout"), (2, "stderr")):
            setattr(sys, name, open(number, "w", encoding=kind, closefd=False))  # noqa: SIM115
        return
    reader, writer = pty.openpty() if kind == "closed terminal" else os.pipe()
    for number in (1, 2):
        os.dup2(writer, number)
    os.close(reader)
    os.close(writer)
    if kind == "none":
        sys.stdout = sys.stderr = None
        os.closerange(1, 3)


FULL = [pytest.param(kind, marks=pytest.mark.full) for kind in ("latin-1", "ascii", "closed pipe", "none")]


@pytest.mark.parametrize("kind", ["closed terminal", *FULL])
def test_nothing_that_is_printed_ends_a_run(place, kind):
    name = kind.replace(" ", "_")
    file = recipe(place, name, train={"steps": 2}, eval={"every": 0})
    run = start(["train", str(file)], place / f"{name}.log", streams, STREAMS=kind)
    assert run.wait() == 0, run.output
    assert [r["step"] for r in rows(place / "runs" / name)] == [1, 2]
    assert ("step 1/2" in run.output) == ("?" in run.output) == (kind in ("latin-1", "ascii")), run.output


GROW = "expandable_segments:True"
SEGMENTS = [
    ("train", {}, {"PYTORCH_ALLOC_CONF": GROW}),
    ("demo", {}, {"PYTORCH_ALLOC_CONF": GROW}),
    ("train", {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
    ("train", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ("judge", {}, {}),
]


@pytest.mark.parametrize(("command", "given", "expected"), SEGMENTS)
def test_gpu_memory_is_allocated_in_segments_that_grow(monkeypatch, command, given, expected):
    """Unless the user has said otherwise; vLLM, which `judge serve` starts, shares memory that cannot grow."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["prefgrpo", command])
    monkeypatch.setattr(__main__, "_keep_streams", lambda: None)
    monkeypatch.setattr(cli, "main", lambda: 0)
    assert __main__.main() == 0
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


@pytest.mark.full
def test_torch_reads_the_variable_although_it_is_imported_before():
    code = "import torch; from prefgrpo.__main__ import _let_segments_grow as grow; grow()"
    code += "; print(torch._C._accelerator_getAllocatorSettings())"
    env = {name: value for name, value in environment().items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == GROW
