"""The event loop of a process, in a thread of its own, with its pool of HTTP connections."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
_KEEP_ALIVE_S = 2.0
"""Idle connections are closed sooner than by a server (5 s): a request that is written meanwhile would be lost."""


class LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None
        threading.Thread(target=self.loop.run_forever, name="judge-loop", daemon=True).start()
        atexit.register(self.close)

    def session(self) -> aiohttp.ClientSession:
        """The connection pool; call from the loop's thread. No request accepts a compressed reply, but some proxies
        compress every one; aiohttp then unpacks it, a bounded piece at a time."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel all tasks, close the pool and stop the loop (at exit)."""
        if self.loop.is_running():
            self.submit(self._shut_down()).result(5.0)
            self.loop.call_soon_threadsafe(self.loop.stop)

    async def _shut_down(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


_thread: LoopThread | None = None
_lock = threading.Lock()


def loop_thread() -> LoopThread:
    """This process's loop thread, started on first use."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = LoopThread()
        return _thread
