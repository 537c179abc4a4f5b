"""Runs `prefgrpo` commands on an emulated GPU, in one process; started by tests/runs/test_emulated_gpu.py.

    python emulated_gpu.py OUT.json < COMMANDS.json

COMMANDS: {name: arguments}. OUT: per name the exit code, what the command printed, what a GPU would have refused
(`problems`), the host synchronisations per phase of a step, by the line of this package that waited, the bytes copied
to the device, by line, and which GPU each thread worked on or waited for.
"""

import contextlib
import io
import json
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path

import emulator  # its folder is on the path: PREFGRPO_GPU_EMULATOR
import torch

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


def refuse_what_flash_attention_does_not_take():
    """Where only FlashAttention is allowed, CUDA has no kernel for fp32 or masks; the emulator computes them."""
    import torch

    real = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, attn_mask=None, *args, **kwargs):
        others = torch._C._get_math_sdp_enabled() or torch._C._get_mem_efficient_sdp_enabled()
        half = query.dtype in (torch.bfloat16, torch.float16)
        if query.is_cuda and not others and (attn_mask is not None or not half):
            raise RuntimeError("No available kernel. Aborting execution.")
        return real(query, key, value, attn_mask, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = attend


GPUS = Counter()
"""Thread and the GPU that was its current one when it ran an operation on the device, or waited for an event."""


def note_gpus():
    """Record the current GPU of every thread that uses the device: a new thread starts with GPU 0."""

    def noting(real):
        def call(*given, **named):
            GPUS[f"{threading.current_thread().name} {torch.cuda.current_device()}"] += 1
            return real(*given, **named)

        return call

    emulator.run = noting(emulator.run)
    emulator.Event.synchronize = noting(emulator.Event.synchronize)


def run(argv):
    from prefgrpo.commands.cli import main

    REPORT.clear()
    GPUS.clear()
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
    copied = Counter()
    for (_, direction, place), count in REPORT.copies.items():
        copied[place] += count * (direction == "h2d")
    return {
        "code": code,
        "output": text.getvalue()[-4000:],
        "problems": dict(REPORT.problems),
        "device": sum(REPORT.ops.values()),
        "syncs": {phase: dict(counts) for phase, counts in syncs.items()},
        "copied": dict(copied),
        "gpus": dict(GPUS),
    }


if __name__ == "__main__":
    note_phases()
    refuse_what_flash_attention_does_not_take()
    note_gpus()
    results = {name: run(argv) for name, argv in json.load(sys.stdin).items()}
    Path(sys.argv[1]).write_text(json.dumps(results))
