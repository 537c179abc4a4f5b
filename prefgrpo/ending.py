"""How a run ends: its result, the errors that stop it before its last step, and signals as a flag."""

from __future__ import annotations

import errno
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefgrpo.objectives.advantages import CombineError
from prefgrpo.parallel.world import World
from prefgrpo.run.targets import NoInformation, RewardsMissing
from prefgrpo.update.policy import NonFiniteGradient


@dataclass(frozen=True)
class Result:
    """What `Trainer.train` returns."""

    folder: Path
    """The run folder."""
    metrics: dict[str, float]
    """Metrics of the last evaluation (all are in the folder's `metrics.jsonl`); empty without one."""
    win_rate: float | None
    """Win rate of held-out images against the initial policy's, by the judge or else by the first evaluation reward;
    None without an evaluation, NaN if all its verdicts are missing."""
    lora: Path | None
    """The LoRA in diffusers format, for `pipe.load_lora_weights`; None after full fine-tuning."""
    pipeline: Path | None
    """The whole pipeline after full fine-tuning."""
    report: Path
    """report.html."""
    summary: str
    """The last evaluation in one line."""


class TrainingStopped(RuntimeError):
    """The run stopped but can be resumed; the message says from where, and what to fix."""


def stopped_by_signal(when: str) -> TrainingStopped:
    """Why a run that got a signal stops."""
    return TrainingStopped(f"interrupted {when}; continue with the same command and --resume")


def cannot_write(error: Exception, done: int, newest: Path | None) -> Exception:
    """The exception to raise when a run fails to write its files after `done` steps: how to continue; OSErrors other
    than a full disk are returned unchanged. newest: the newest checkpoint.
    """
    if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    cause = f"disk full after step {done}" if isinstance(error, OSError) else f"step {done}"
    where = f"from {newest}" if newest else "from the start, as there is no checkpoint yet"
    return TrainingStopped(f"{cause}: {error}\nFree disk space, then continue {where} with --resume")


class Diverged(RuntimeError):
    """The policy generates non-finite latents."""


class Interrupted(RuntimeError):
    """A signal asks the run to end, in the middle of a step."""


ENDS_A_RUN = (NonFiniteGradient, RewardsMissing, NoInformation, Diverged, CombineError)
"""Errors of a step after which training on would be of no use."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, torchrun and Slurm, a terminal that is gone, and `sbatch --signal`."""


class Interrupt:
    """Turns signals into a flag, so that the run ends with a checkpoint at a point that all processes have reached.
    Further ones change nothing: torchrun sends a Ctrl-C once more, which its processes have already got.

    Only the main thread can handle signals: in another thread, `install` does nothing.
    """

    def __init__(self, world: World) -> None:
        self.seen = False
        self._world = world
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Handle signals from now on, also after a first one."""
        self.restore()
        if threading.current_thread() is threading.main_thread():
            nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            handled = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._note) for number in handled}

    def check(self) -> None:
        """Raise Interrupted on all ranks if any has received a signal; collective."""
        if self._world.any(self.seen):
            raise Interrupted

    def _note(self, number: int, frame: object) -> None:
        self.seen = True

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
