"""What a run prints to may encode few characters, or go away: a run trains on all the same.

Why these cases: batch systems set ascii or latin-1, in which the summary of a step (Δ) cannot be written; `| head`
ends; an ssh connection breaks (writes then fail with EIO); and a daemon starts without streams.
"""

import os
import pty
import sys

import pytest
from tiny_run import recipe, rows, start


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
