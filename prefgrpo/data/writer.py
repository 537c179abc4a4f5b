"""Writes the report's images and logs to trackers in a background thread, so that training goes on meanwhile.

An exception in a job, such as OSError on a full disk, is raised in the main thread by the next call. Invariant: jobs
run one at a time, in the order of `put`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

MOST = 3
"""Unfinished jobs that may hold images in memory: as many as a step with an evaluation has."""


class Writer:
    """A process's background thread, which starts with the first job."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "writer")
        self._jobs = deque[tuple[Future[None], bool]]()

    def put(self, job: Callable[[], None], pictures: bool = False) -> Future[None]:
        """Queue a job. pictures: it holds images in memory, so this waits until fewer than MOST such jobs are
        unfinished. Raises an earlier job's exception."""
        self.check()
        while pictures and sum(kept for _, kept in self._jobs) >= MOST:
            self._next()
        future = self._thread.submit(job)
        self._jobs.append((future, pictures))
        return future

    def check(self) -> None:
        """Raise a finished job's exception; does not wait."""
        while self._jobs and self._jobs[0][0].done():
            self._next()

    def wait(self) -> None:
        """Wait for all jobs. Raises the exception of one that failed."""
        while self._jobs:
            self._next()

    def close(self) -> None:
        """Wait for all jobs, failed or not."""
        wait([job for job, _ in self._jobs])
        self._jobs.clear()

    def _next(self) -> None:
        job, _ = self._jobs.popleft()
        job.result()
