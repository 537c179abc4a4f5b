"""Processes of the tests: `prefgrpo` commands in forked processes, alone or as ranks, held, killed and resumed.

`start` runs `prefgrpo …` in a process forked from a server that has everything imported, so that a run that is killed,
resumed or split over ranks starts in a fraction of a second. A test that kills or interrupts a run passes a `Hold`: the
process stops at a named call and waits there, so the signal arrives at the same point on any machine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pkgutil
import secrets
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock


def until(done: Callable[[], object], seconds: float = 30) -> None:
    """Poll until `done()` is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port that is free now, below the range from which the system gives other tests' servers theirs."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := 20000 + secrets.randbelow(12000)))
            return port


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tiny_warm"])


@dataclass(frozen=True)
class Hold:
    """Where a process stops and waits for the test: after (or before) the n-th call of a function."""

    function: str
    """`module:name` or `module:Class.name`."""
    call: int = 1
    before: bool = False
    about: str = ""
    """Only calls with this text in their arguments are counted."""

    def __post_init__(self) -> None:
        pkgutil.resolve_name(self.function)  # a renamed function fails here, not only in a child process

    def install(self, reached: Any, go: Any) -> None:
        """Patch the function in this process."""
        module, _, path = self.function.partition(":")
        owner_path, _, name = path.rpartition(".")
        owner: Any = pkgutil.resolve_name(f"{module}:{owner_path}")
        original, calls = getattr(owner, name), 0

        def held(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            counted = not self.about or self.about in str(args)
            calls += counted
            here = counted and calls == self.call
            out = None if here and self.before else original(*args, **kwargs)
            if here:
                reached.set()
                while not go.wait(0.1):  # a signal that another thread received is handled between two waits
                    pass
            return original(*args, **kwargs) if here and self.before else out

        setattr(owner, name, held)


class Run:
    """One `prefgrpo` command in its own process."""

    def __init__(
        self, argv: list[str], log: Path, env: dict[str, str], hook: Callable[[], None] | None, hold: Hold | None
    ) -> None:
        self.log, self._hold = log, (hold, _CONTEXT.Event(), _CONTEXT.Event())
        with mock.patch.dict(os.environ, environment()):
            forkserver.ensure_running()
        self.process = _CONTEXT.Process(target=_child, args=(argv, str(log), env, hook, self._hold), daemon=True)
        self.process.start()

    @property
    def output(self) -> str:
        """Everything that it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""

    def wait(self, seconds: float = 180.0) -> int:
        """The exit code; fails if the process does not end in time."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.abort()
            raise AssertionError(f"still running after {seconds} s:\n{self.output}")
        return self.process.exitcode

    def abort(self) -> None:
        """End a process that hangs; its output then tells where every thread stood."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGABRT)  # faulthandler prints the stacks
            self.process.join(10.0)
            self.process.kill()

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def until(self, done: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until `done()` is true; fails if the process ends first or `seconds` have passed."""
        limit = time.monotonic() + seconds
        while not done():
            assert self.process.is_alive() and time.monotonic() < limit, f"condition never met:\n{self.output}"
            time.sleep(0.002)

    def until_held(self) -> None:
        """Wait until the process has stopped at its `Hold`."""
        self.until(self._hold[1].is_set)

    def release(self) -> None:
        """Let the held process continue."""
        self._hold[2].set()


def start(
    argv: list[str], log: Path, hook: Callable[[], None] | None = None, hold: Hold | None = None, **env: str
) -> Run:
    """Start `prefgrpo argv`; `hook` (a module-level function) runs first in the new process."""
    return Run(argv, log, env, hook, hold)


def train(recipe_file: Path, *options: str, hook: Callable[[], None] | None = None, **env: str) -> tuple[int, str]:
    """(exit code, output) of `prefgrpo train RECIPE options`."""
    run = start(["train", str(recipe_file), *options], recipe_file.with_suffix(".log"), hook, **env)
    return run.wait(), run.output


def trained(recipe_file: Path, *options: str, **env: Any) -> str:
    """The output of a `train` that succeeds."""
    code, output = train(recipe_file, *options, **env)
    assert code == 0, output
    return output


def attempt(capsys: Any, *argv: Any) -> tuple[int, str]:
    """(exit code, output) of `prefgrpo argv` in this process, for commands that end before a run starts."""
    from prefgrpo.commands.cli import main

    code = main([str(word) for word in argv])
    return code, "".join(capsys.readouterr())


def _child(argv: list[str], log: str, env: dict[str, str], hook: Callable[[], None] | None, hold: Any) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    if hook is not None:
        hook()
    where, reached, go = hold
    if where is not None:
        where.install(reached, go)
    from prefgrpo.__main__ import main

    sys.argv = ["prefgrpo", *argv]
    sys.exit(main())


def environment(**env: str) -> dict[str, str]:
    """This process's environment for another process, with the same import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **env}


def ranks(
    recipe_file: Path,
    size: int,
    *options: str,
    hook: Callable[[], None] | None = None,
    command: str = "train",
    holds: dict[int, Hold] | None = None,
    **env: str,
) -> list[Run]:
    """Start `prefgrpo COMMAND RECIPE options` on `size` ranks as torchrun would; `holds` maps ranks to their `Hold`."""
    return start_ranks([command, str(recipe_file), *options], recipe_file, size, hook, holds, **env)


def start_ranks(
    argv: list[str],
    log: Path,
    size: int,
    hook: Callable[[], None] | None = None,
    holds: dict[int, Hold] | None = None,
    **env: str,
) -> list[Run]:
    """Start `prefgrpo argv` on `size` ranks as torchrun would; rank k prints to `log` with the suffix .rank{k}.log."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | env
    own = [shared | {"RANK": str(k), "LOCAL_RANK": str(k)} for k in range(size)]
    logs = [log.with_suffix(f".rank{k}.log") for k in range(size)]
    return [start(argv, file, hook, (holds or {}).get(k), **own[k]) for k, file in enumerate(logs)]


def all_end(runs: list[Run], code: int = 0, seconds: float = 180.0) -> list[str]:
    """The outputs of all ranks, each of which must end with this exit code."""
    for run in runs:
        run.process.join(seconds)
    if any(run.process.exitcode is None for run in runs):
        for run in runs:
            run.abort()
    assert [r.wait() for r in runs] == [code] * len(runs), "\n".join(r.output for r in runs)
    return [r.output for r in runs]


def fuse_on_cpu():
    """Runs in a new process before the command: blocks are fused without a GPU, where the ops run their references."""
    from prefgrpo.models import blocks

    blocks.FUSED_ON = ("cpu",)
    warnings.filterwarnings("error", message=".*runs as in diffusers")
