"""What a run prints to may encode few characters, or go away: a run trains on all the same.

Why these cases: batch systems set ascii or latin-1, in which the summary of a step (Δ) cannot be written; `| head`
ends; an ssh connection breaks (writes then fail with EIO); and a daemon starts without streams.
"""

import os
import pty
import subprocess
import sys

import pytest
from tiny_run import environment, recipe, rows

FULL = [pytest.param(kind, marks=pytest.mark.full) for kind in ("latin-1", "ascii", "closed pipe", "no streams")]


@pytest.mark.parametrize("kind", ["closed terminal", *FULL])
def test_nothing_that_is_printed_ends_a_run(place, kind):
    name = kind.replace(" ", "_")
    command = [sys.executable, "-m", "prefgrpo", "train", str(recipe(place, name, train={"steps": 2}))]
    if kind == "no streams":
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    reader, writer = pty.openpty() if kind == "closed terminal" else os.pipe()
    encoding = kind if kind in ("ascii", "latin-1") else "utf-8"
    child = subprocess.Popen(command, stdout=writer, stderr=writer, env=environment(PYTHONIOENCODING=encoding))
    os.close(writer)
    if "closed" in kind:
        os.close(reader)
        output = ""
    else:
        with open(reader, encoding=encoding) as file:
            output = file.read()
    assert child.wait(300) == 0, output
    assert [r["step"] for r in rows(place / "runs" / name)] == [1, 2]
    assert kind not in ("ascii", "latin-1") or "?" in output, output
