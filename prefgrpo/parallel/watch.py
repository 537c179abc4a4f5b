"""Heartbeat: ends this process when another process of the run hangs, long before a collective times out (hours).

A thread of every process increments a counter in torchrun's store. Process 0 reads all counters, the others read that
of process 0. A counter that stays the same belongs to a stopped process or a lost machine; a process that computes,
judges or writes a checkpoint keeps counting, however long it takes. When one process exits, torchrun ends the rest.
Invariant: the limit is a number of polls, not of seconds, so a run that was suspended as a whole continues.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

POLL_S = 2.0
"""Seconds between two polls."""
MAX_MISSED = 10
"""Number of polls with an unchanged counter after which a process counts as hung."""
ENDED = "ended"


def restart_count() -> int:
    """How many times torchrun has restarted the processes of this run on this machine (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Heartbeat(threading.Thread):
    """The heartbeat thread; every process of the group calls `start`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.rank, size = dist.get_rank(), dist.get_world_size()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=POLL_S * MAX_MISSED)
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        self._counts = PrefixStore(f"watch/{restart_count()}", store)
        self._counts.set(str(self.rank), "0")
        self._others = [str(rank) for rank in (range(1, size) if self.rank == 0 else [0])]
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop the heartbeat; the others then no longer wait for this process's counter."""
        self._stopped.set()
        self.join(POLL_S * MAX_MISSED)
        with suppress(dist.DistError):  # the store is gone if process 0 has exited
            self._counts.set(str(self.rank), ENDED)

    def run(self) -> None:
        """Increment the counter and poll the others until `stop`; end this process if one of them hangs."""
        number, unanswered = 0, 0
        before, missed = [""] * len(self._others), [0] * len(self._others)
        while not self._stopped.wait(POLL_S):
            number += 1
            try:
                self._counts.set(str(self.rank), str(number))
                now = [count.decode() for count in self._counts.multi_get(self._others)]
            except dist.DistError:
                unanswered += 1
                if unanswered >= MAX_MISSED:
                    self._exit_process("the machine of process 0 does not respond")
                continue
            missed = [n + 1 if a == b != ENDED else 0 for a, b, n in zip(before, now, missed, strict=True)]
            before, unanswered = now, 0
            if silent := [other for other, n in zip(self._others, missed, strict=True) if n >= MAX_MISSED]:
                self._exit_process(f"process {' and '.join(silent)} has not responded for {POLL_S * MAX_MISSED:.0f} s")

    def _exit_process(self, why: str) -> None:
        if self._stopped.is_set():
            return
        if self.rank < 2:  # if process 0 hangs, all others notice; only rank 1 prints
            print(f"error: {why}; the run ends", file=sys.stderr, flush=True)
        os._exit(1)
