"""Ctrl-C and SIGTERM as a flag."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a flag, so that the step is finished and saved; a second kills the run.

    Only the main thread can handle signals: in another thread, `install` does nothing.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Handle signals from now on."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: object) -> None:
        self.seen = True
        self.restore()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
