"""Ends this process when another one of the run stands still, which a collective would notice after hours.

Every process counts on in torchrun's store. Process 0 reads all counts, and the others that of process 0; one that does
not change any more belongs to a process that is stopped, or to a machine that is lost. A process that computes, judges
or writes a checkpoint counts on, however long that takes. What is left of the run, torchrun ends. Invariant: looks
are counted, not seconds, so a run that was suspended as a whole goes on.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

LOOK_S = 2.0
"""Seconds between two looks."""
LOOKS = 10
"""So many looks at the same count: its process stands still."""
ENDED = "ended"


def attempt() -> int:
    """How often torchrun has started the processes of this run before (`--max-restarts`), on this machine."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Watch(threading.Thread):
    """Begins with `start`, in every process of the group."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.rank, size = dist.get_rank(), dist.get_world_size()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=LOOK_S * LOOKS)
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        self._counts = PrefixStore(f"watch/{attempt()}", store)
        self._counts.set(str(self.rank), "0")
        self._others = [str(rank) for rank in (range(1, size) if self.rank == 0 else [0])]
        self._stopped = threading.Event()

    def stop(self) -> None:
        """This process leaves: the others do not expect it to count on."""
        self._stopped.set()
        self.join(LOOK_S * LOOKS)
        with suppress(dist.DistError):  # process 0 may have left with the store
            self._counts.set(str(self.rank), ENDED)

    def run(self) -> None:
        """Count and look until `stop`, or end this process."""
        number, unanswered = 0, 0
        before, looks = [""] * len(self._others), [0] * len(self._others)
        while not self._stopped.wait(LOOK_S):
            number += 1
            try:
                self._counts.set(str(self.rank), str(number))
                now = [count.decode() for count in self._counts.multi_get(self._others)]
            except dist.DistError:
                unanswered += 1
                if unanswered >= LOOKS:
                    self._end("the machine of process 0 does not answer")
                continue
            looks = [n + 1 if a == b != ENDED else 0 for a, b, n in zip(before, now, looks, strict=True)]
            before, unanswered = now, 0
            if silent := [other for other, n in zip(self._others, looks, strict=True) if n >= LOOKS]:
                self._end(f"process {' and '.join(silent)} has given no sign of life for {LOOK_S * LOOKS:.0f} s")

    def _end(self, why: str) -> None:
        if self._stopped.is_set():
            return
        if self.rank < 2:  # if process 0 stands still, all others see it
            print(f"error: {why}; the run ends", file=sys.stderr, flush=True)
        os._exit(1)
