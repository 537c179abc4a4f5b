"""Media that a server holds: later requests name them by id instead of sending them again.

The first request with a medium carries its data. Others with it wait for that answer, at most _GRACE_S: a server has a
medium once it has read the request, long before it answers. Invariant: a request whose images the server may not have,
or may have confused, is sent with data.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary, WeakSet

from prefgrpo.judge.http import Failure
from prefgrpo.judge.request import Encoded

IDS_FROM = (0, 32)
"""First vLLM to which images are sent by id: it recovers if its API process and engine disagree on which they hold
(vLLM pull request 46747); before, such an image could stop the engine. Tested with 0.32. Can go when servers
before 0.32 are refused."""
_MISS = ("Cache miss for", "Failed to apply")
"""vLLM's refusals of a request that names a medium that it does not hold."""
_GRACE_S = 0.25
_MISSES = 3
_MISS_SHARE = 0.05
"""Number and share of misses; beyond both, a server gets no more ids: servers behind a load balancer do not share
images."""


class NotHeld(Exception):
    """The server does not hold a medium that a request named."""


class MediaIds:
    """Which media one server holds; used on the event loop only."""

    def __init__(self) -> None:
        self.supported = False
        self.requests = 0
        """Requests by id."""
        self.misses = 0
        """Those for an image that the server did not hold."""
        self.sent: WeakKeyDictionary[Encoded, asyncio.Event] = WeakKeyDictionary()
        """Medium → set when it may be named."""
        self.unnamed: WeakSet[Encoded] = WeakSet()
        """Media of failed or cancelled requests, which are sent with data and without id from then on: vLLM's API
        process may believe that the engine has an image that it does not have, and would drop data sent with the same
        id."""

    @asynccontextmanager
    async def sending(self, media: set[Encoded]) -> AsyncIterator[set[Encoded] | None]:
        """Inside it, a request with these media is sent and answered: with the data of those that it yields, and the
        ids of all; None: with data only. Raises NotHeld for the server's refusal of an id: send it again with data."""
        carried = await self._claim(media)
        if carried is None:
            yield None
            return
        answered = False
        try:
            yield carried
            answered = True
        except Failure as failure:
            if any(text in str(failure) for text in _MISS):
                self.misses += 1
                raise NotHeld(str(failure)) from failure
            raise
        finally:
            if not answered:  # failed, or cancelled at the step's deadline
                self.unnamed.update(media)
            self._release(carried, answered)

    async def _claim(self, media: set[Encoded]) -> set[Encoded] | None:
        """The media whose data a request must carry; None: all, without ids."""
        while waiting := [self.sent[m] for m in media if m in self.sent and not self.sent[m].is_set()]:
            await waiting[0].wait()
        off = self.misses > max(_MISSES, _MISS_SHARE * self.requests)
        if off or not self.supported or not self.unnamed.isdisjoint(media):
            return None
        self.requests += 1
        carried = {m for m in media if m not in self.sent}
        for medium in carried:
            self.sent[medium] = asyncio.Event()
            asyncio.get_running_loop().call_later(_GRACE_S, self.sent[medium].set)
        return carried

    def _release(self, carried: set[Encoded], answered: bool) -> None:
        """The request that carried these media has ended."""
        for medium in carried:
            event = self.sent.get(medium)
            if event:
                event.set()
            if not answered:
                self.sent.pop(medium, None)


def takes_ids(version: bytes) -> bool:
    """Whether a reply of /version is from a vLLM that may get images by id (IDS_FROM)."""
    try:
        major, minor, *_ = json.loads(version)["version"].split(".")
        return (int(major), int(minor)) >= IDS_FROM
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
