"""Runs `prefgrpo` commands on an emulated GPU, in one process; started by tests/test_emulated_gpu.py.

    python emulated_gpu.py OUT.json < COMMANDS.json

COMMANDS: {name: arguments}. OUT: per name the exit code, what the command printed, what a GPU would have refused
(`problems`), and the host synchronisations per phase of a step, by the line of this package that waited.
"""

import contextlib
import io
import json
import sys
import traceback
from collections import Counter
from pathlib import Path

import emulator  # its folder is on the path: PREFGRPO_GPU_EMULATOR

REPORT = emulator.REPORT


def note_phases():
    """Label what the report counts with the phase of the training step."""
    from prefgrpo.run.log import Clock

    real = Clock.phase

    @contextlib.contextmanager
    def phase(clock, name):
        before = REPORT.phase
        REPORT.phase = name
        try:
            with real(clock, name):
                yield
        finally:
            REPORT.phase = before

    Clock.phase = phase


def run(argv):
    from prefgrpo.commands.cli import main

    REPORT.clear()
    REPORT.phase = ""
    text = io.StringIO()
    code = 1
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = main(argv)
        except SystemExit as error:
            code = error.code
        except BaseException:  # noqa: BLE001 (the test shows it)
            traceback.print_exc()
    syncs = {}
    for (phase, _, op, own, other), count in REPORT.syncs.items():
        syncs.setdefault(phase, Counter())[f"{own or other} ({op})"] += count
    return {
        "code": code,
        "output": text.getvalue()[-4000:],
        "problems": dict(REPORT.problems),
        "device": sum(REPORT.ops.values()),
        "syncs": {phase: dict(counts) for phase, counts in syncs.items()},
    }


if __name__ == "__main__":
    note_phases()
    results = {name: run(argv) for name, argv in json.load(sys.stdin).items()}
    Path(sys.argv[1]).write_text(json.dumps(results))
