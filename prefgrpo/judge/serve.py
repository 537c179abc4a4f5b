"""`prefgrpo judge serve`: starts judge servers with the flags that judging needs.

vLLM or SGLang runs from a separate environment as a child process, one per model, each on its own port. "ready" means
that /health responds and a probe pair got a verdict. Only a child's own process group is ever signalled, and a child
exits with its parent, even if the parent is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import tyro

from prefgrpo.judge.engines import DRAIN_S, ServeConfig, command, environment, for_models
from prefgrpo.judge.verdict import JudgeError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_WORKERS_S = 5.0
"""Seconds that workers have to exit after their engine."""
_TAIL_BYTES = 1 << 16


class Server:
    """A running vLLM or SGLang server; a context manager, for the main thread only."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        line = command(config)
        _require_free(config.host, config.port)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, so nothing is ever left on disk
        self.supervisor = subprocess.Popen(  # leads the server's process group
            [sys.executable, str(Path(__file__).with_name("supervisor.py")), str(os.getpid()), str(2 * DRAIN_S), *line],
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env=environment(config),
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        """Path of the server's log while this process runs (Linux)."""
        return f"/proc/{os.getpid()}/fd/{self._log.fileno()}"

    def wait_ready(self) -> str:
        """Wait for /health and a verdict on a probe pair; the check's summary. JudgeError with the log tail if not."""
        deadline, engine = time.monotonic() + self.config.startup_s, self.config.runs_on
        while not _healthy(self.config.url):
            if (code := self.supervisor.poll()) is not None:
                raise JudgeError(f"{engine} ended with code {code} while starting:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise JudgeError(f"{engine} was not ready after {self.config.startup_s:g} s:\n{self.tail()}")
            time.sleep(0.25)
        from prefgrpo.config.schema import JudgeConfig
        from prefgrpo.judge.client import check  # imports aiohttp

        template = self.config.template or self.config.preset.template
        probe = JudgeConfig((self.config.url,), self.config.served_name, template, min_label_mass=0.0)
        return check(probe, timeout_s=120.0).summary()

    def tail(self, lines: int = 40) -> str:
        """The last lines of the server's log."""
        handle = self._log.fileno()  # pread: the file position belongs to the server
        end = os.pread(handle, _TAIL_BYTES, max(os.fstat(handle).st_size - _TAIL_BYTES, 0))
        return "\n".join(end.decode(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Let the server finish in-flight requests (up to 20 s), then kill what is left of its process group."""
        self.supervisor.terminate()
        self.supervisor.wait()
        deadline = time.monotonic() + _WORKERS_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.supervisor.pid, 0)
                time.sleep(0.1)
            os.killpg(self.supervisor.pid, signal.SIGKILL)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _require_free(host: str, port: int) -> None:
    """Raise JudgeError if the address cannot be bound."""
    if port == 0:
        raise JudgeError("--port: expected the port that clients will use, from 1 to 65535, got 0")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", "") or error
            raise JudgeError(f"cannot listen on {host}:{port} ({reason}); choose another --port or --host") from error


def serve(
    model: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL [MODEL ...]")],
    gpus: tuple[str, ...] = (),
    options: Annotated[ServeConfig, tyro.conf.arg(name="")] = ServeConfig(),  # noqa: B008 - it is frozen
) -> int:
    """Serve one or several judges with vLLM or SGLang until Ctrl-C or SIGTERM, each on its own port.

    Args:
        model: Preset (unifiedreward[-think|-flex|-edit][-SIZE], paco-reward, qwen3-vl, …), checkpoint folder or hub
            id; as NAME=MODEL to serve it under another name. Several are started one after another.
        gpus: One CUDA_VISIBLE_DEVICES per model, e.g. 0 1,2; empty: all models share this process's GPUs.
        options: How the servers are started.
    """
    configs = for_models(model, gpus, options)
    for config in configs:  # report everything missing before the first model loads
        command(config)
        _require_free(config.host, config.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    with ExitStack() as stack:
        try:
            servers = []
            for config in configs:  # sequentially: engines measure free memory at startup
                servers.append(server := stack.enter_context(Server(config)))
                where = f"{config.url}, pid {server.supervisor.pid}, log {server.log}"
                print(f"starting {config.preset.model} with {config.runs_on} on {where}", flush=True)
                print(server.wait_ready(), flush=True)
            print(_ready(configs), flush=True)
            for server in servers:
                stack.callback(server.supervisor.terminate)  # before the first `stop`, so that all exit in parallel
            return _watch(servers)
        except KeyboardInterrupt:
            print("stopped", flush=True)
            return 0


def _ready(configs: list[ServeConfig]) -> str:
    """Address of each server, and the lines to put into a recipe."""
    lines = [f"ready: judge '{c.served_name}' at {c.url}; stop it with Ctrl-C" for c in configs]
    judges = [f'{{endpoints: ["{c.url}"], model: "{c.served_name}"}}' for c in configs]
    if configs[0].host not in LOOPBACK:
        lines.insert(0, f"note: {configs[0].host} is reachable by others, and the server has no authentication")
    if len(judges) == 1:
        return "\n".join([*lines, "in the recipe:", f"judge: {judges[0]}"])
    rewards = [f"    REWARD_{k}: {{judge: {judge}}}" for k, judge in enumerate(judges, 1)]
    return "\n".join([*lines, "in the recipe, with the rewards' names:", "reward:", "  options:", *rewards])


def _watch(servers: list[Server]) -> int:
    """Wait until all servers have exited, reporting each exit; the exit code."""
    running = list(servers)
    while running:
        for server in [s for s in running if s.supervisor.poll() is not None]:
            running.remove(server)
            others = "; the other models keep running" if running else ""
            name = f"{server.config.runs_on} of '{server.config.served_name}'"
            print(
                f"{name} ended with code {server.supervisor.returncode}{others}:\n{server.tail()}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(0.5)
    return 1
