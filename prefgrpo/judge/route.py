"""`prefgrpo judge route`: judge servers that run already, behind one port; also the front of `judge serve A B`.

Invariant: it listens only after every backend has said what it serves, and on SIGTERM or Ctrl-C it takes nothing new,
lets what is in flight end, and returns; it starts and ends no server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable

from aiohttp import web

from prefgrpo.judge.engines import DRAIN_S, address
from prefgrpo.judge.router import Backend, Router, application
from prefgrpo.judge.verdict import JudgeError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def route(
    url: tuple[str, ...],
    host: str = "127.0.0.1",
    port: int = 8000,
    timeout_s: float = 600.0,
    api_key_env: str = "",
) -> int:
    """Put running judge servers of different models behind one port, until Ctrl-C or SIGTERM.

    Args:
        url: Servers, with or without /v1; what they serve is asked from their /v1/models.
        host: Address to listen on; anything but loopback lets others use the servers.
        port: Port to listen on.
        timeout_s: Longest that one request may take, in seconds.
        api_key_env: Environment variable with the servers' key, to ask what they serve; clients send their own.
    """
    if api_key_env and api_key_env not in os.environ:
        raise JudgeError(f"the environment variable {api_key_env} (api_key_env) is not set")
    if not url or any(not u.startswith(("http://", "https://")) for u in url):
        raise JudgeError(f"expected http:// or https:// addresses of running servers, got {list(url)}")
    require_free(host, port)
    return asyncio.run(run(list(url), host, port, timeout_s, os.environ.get(api_key_env, "")))


async def run(
    urls: list[str],
    host: str,
    port: int,
    timeout_s: float = 600.0,
    key: str = "",
    over: Callable[[], bool] = lambda: False,
) -> int:
    """Route until a signal comes (0) or `over`, asked every second, is true (1)."""
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _note, stop, number)
    router = Router([Backend(u.rstrip("/").removesuffix("/v1")) for u in urls], timeout_s, key)
    runner = web.AppRunner(
        application(router), access_log=None, handler_cancellation=True, shutdown_timeout=float(DRAIN_S)
    )
    try:
        await router.open()
        await runner.setup()
        await web.TCPSite(runner, host, port, reuse_address=True).start()
        if host not in LOOPBACK:
            print(f"note: {host} is reachable by others, and the router asks for no password", flush=True)
        print(f"ready: judges {', '.join(router.models)} at {address(host, port)}; stop it with Ctrl-C", flush=True)
        while not stop.done() and not over():
            await asyncio.wait([stop], timeout=1.0)
        if not stop.done():
            print("every judge server has ended", file=sys.stderr, flush=True)
            return 1
        print(f"stopped by {signal.Signals(stop.result()).name}", flush=True)
        return 0
    finally:
        await runner.cleanup()
        await router.close()


def _note(stop: asyncio.Future[int], number: int) -> None:
    if not stop.done():
        stop.set_result(number)


def require_free(host: str, port: int) -> None:
    """Raise JudgeError if nobody can listen there."""
    if port == 0:
        raise JudgeError("--port: expected the port that clients will ask, from 1 to 65535, got 0")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", "") or error
            raise JudgeError(f"cannot listen on {host}:{port} ({why}); choose another --port or --host") from error


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()
