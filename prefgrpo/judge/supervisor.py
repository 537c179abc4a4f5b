"""python supervisor.py PARENT SECONDS COMMAND …: runs an engine, and stops it when process PARENT dies.

It leads the engine's process group and imports nothing from this package, so it starts instantly. SIGTERM is forwarded
to the engine only, which stops its own workers; if the engine still runs SECONDS later, the whole group is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_WORKERS_S = 5.0
"""Seconds that workers have to exit after their engine, once the parent has died."""


def main(parent: int, seconds: float, command: list[str]) -> int:
    """Run the engine; its exit code, as a shell reports it."""
    engine = subprocess.Popen(command, preexec_fn=_terminate_with_supervisor)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
        while engine.poll() is None and os.getppid() == parent:
            time.sleep(0.1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine.terminate()
    try:
        code = engine.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)  # includes this process
    if os.getppid() != parent:
        time.sleep(_WORKERS_S)
        os.killpg(0, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _terminate_with_supervisor() -> None:
    """Linux: the engine gets SIGTERM if its supervisor is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
