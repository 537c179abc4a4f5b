"""Keeps one engine: python keeper.py PARENT SECONDS COMMAND … runs the command, and ends it when PARENT has died.

It leads the engine's process group and imports nothing of this package, so it starts at once. SIGTERM is passed on to
the engine alone, which ends its workers itself; a group that is still there SECONDS later is killed. Invariant: no
process of the group outlives the parent by more than that, even one that hangs while it starts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_LAST_S = 5.0
"""What workers get to follow their engine, once the parent has died."""


def main(parent: int, seconds: float, command: list[str]) -> int:
    """The engine's exit code, as a shell gives it."""
    told: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
    engine = subprocess.Popen(command, preexec_fn=_follow)
    passed_on = False
    while (code := engine.poll()) is None:
        if os.getppid() != parent and not told:
            told.append(time.monotonic())
        if told and not passed_on:
            passed_on = True
            engine.terminate()
        if told and time.monotonic() > told[0] + seconds:
            os.killpg(0, signal.SIGKILL)  # this process too
        time.sleep(0.1)
    if os.getppid() != parent:
        time.sleep(_LAST_S)
        os.killpg(0, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _follow() -> None:
    """Ask Linux to end the engine should its keeper be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
