"""`prefgrpo judge serve`: judge servers with the flags that judging needs, up when it says so, gone when it is told.

vLLM or SGLang lives in an environment of its own and is started as a child; several models are put behind one port.
Ready means: /health answers and a probe pair got a verdict, of every model. Invariant: only a child's own process
group is ever signalled, and it ends with its parent, even if the parent is killed.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType

from prefgrpo.judge.engines import DRAIN_S, ServeConfig, command, environment, named, several
from prefgrpo.judge.presets import PRESETS, Engine
from prefgrpo.judge.route import LOOPBACK, free_ports, require_free, run
from prefgrpo.judge.verdict import JudgeError

_KEEPER = Path(__file__).with_name("keeper.py")
_STOP_S = 2 * DRAIN_S
_TAIL_BYTES = 1 << 16


class Server:
    """A running vLLM or SGLang server, to be used with `with`, from the main thread: it ends with its starter."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        line = command(config)
        require_free(config.host, config.port)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, so nothing is left however this ends
        self._child = subprocess.Popen(
            [sys.executable, str(_KEEPER), str(os.getpid()), str(_STOP_S), *line],
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env=environment(config),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the server's keeper, which leads its process group."""
        return self._child.pid

    @property
    def log(self) -> str:
        """Where the server's log can be read while this process lives (Linux)."""
        return f"/proc/{os.getpid()}/fd/{self._log.fileno()}"

    def wait_ready(self) -> str:
        """Wait for /health and a verdict on a probe pair; the check's summary. Raises JudgeError with the log's end."""
        end, engine = time.monotonic() + self.config.startup_s, self.config.runs_on
        while not _healthy(self.config.url):
            if self._child.poll() is not None:
                raise JudgeError(f"{engine} ended with code {self._child.returncode} while starting:\n{self.tail()}")
            if time.monotonic() > end:
                raise JudgeError(f"{engine} was not ready after {self.config.startup_s:g} s:\n{self.tail()}")
            time.sleep(0.25)
        from prefgrpo.config.schema import JudgeConfig
        from prefgrpo.judge.client import check  # imports aiohttp

        template = self.config.template or self.config.preset.template
        probe = JudgeConfig((self.config.url,), self.config.served_name, template, min_label_mass=0.0)
        return check(probe, timeout_s=120.0).summary()

    def tail(self, lines: int = 40) -> str:
        """The last lines of the server's log."""
        handle = self._log.fileno()  # its position is the server's own
        end = os.pread(handle, _TAIL_BYTES, max(os.fstat(handle).st_size - _TAIL_BYTES, 0))
        return "\n".join(end.decode(errors="replace").splitlines()[-lines:])

    def wait(self) -> int:
        """Wait until the server ends; its exit code."""
        return self._child.wait()

    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._child.poll()

    def terminate(self) -> None:
        """Tell it to end, without waiting."""
        if self._child.poll() is None:
            self._child.terminate()

    def stop(self) -> None:
        """Let it finish what is in flight (up to 20 s), then end its process group."""
        if self._child.poll() is None:
            self.terminate()
            try:
                self._child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._child.wait()
        _end_group(self.pid)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()


def _end_group(group: int) -> None:
    """Give the server's own workers 5 s to follow it, then end them."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


class _Stopped(Exception):
    """SIGTERM or SIGINT came."""


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise _Stopped(signal.Signals(number).name)


def serve(
    model: tuple[str, ...],
    engine: Engine | None = None,
    vllm: str = "",
    sglang: str = "",
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "",
    template: str = "",
    media_in_flight: int = 64,
    vision_tokens: int = 1024,
    max_model_len: int = 0,
    gpus: tuple[str, ...] = (),
    tensor_parallel: int = 0,
    gpu_memory: float = 0.9,
    cpu: bool = False,
    dtype: str = "auto",
    startup_s: float = 1200.0,
    extra: str = "",
) -> int:
    """Serve one or several judges with vLLM or SGLang until Ctrl-C or SIGTERM.

    Several models share one port: a request goes to the model that it names.

    Args:
        model: Preset (unifiedreward[-think|-flex|-edit][-SIZE], paco-reward, qwen3-vl, …), checkpoint folder or hub
            id; as NAME=MODEL to serve it under another name. Several are started one after another.
        engine: vllm or sglang; none: the preset's, else vllm.
        vllm: vllm executable or its environment's folder; empty: $PREFGRPO_VLLM, then the PATH.
        sglang: sglang executable or its environment's folder; empty: $PREFGRPO_SGLANG, then the PATH.
        host: Address to listen on; anything but loopback lets others use the server.
        port: Port to listen on.
        name: Served model name (of a single model); empty: the preset's or folder's name.
        template: Template of the probe; empty: the preset's.
        media_in_flight: Different images judged at the same time (groups in flight × group size).
        vision_tokens: Tokens of one image for the judge (height × width / 1024 for Qwen3-VL).
        max_model_len: Longest prompt with answer, in tokens; 0: the preset's, else 8192.
        gpus: One CUDA_VISIBLE_DEVICES per model, e.g. 0 1,2; empty: all models share this process's GPUs.
        tensor_parallel: GPUs per model; 0: as many as its entry of gpus names, else 1.
        gpu_memory: Share of each GPU's memory that may be taken; models that share GPUs share it evenly.
        cpu: Serve on the CPU, eagerly (scripts/setup_vllm_cpu.sh).
        dtype: Weights' dtype: auto, bfloat16, float16 or float32.
        startup_s: Longest time until a model is ready, in seconds.
        extra: More arguments for the engine, as one text: --extra="--seed 1".
    """
    if not model:
        raise JudgeError(f"name a model to serve: {', '.join(PRESETS)}, a checkpoint folder or a hub id")
    base = ServeConfig(
        "", vllm, sglang, engine, host, port, name, template, media_in_flight, vision_tokens, max_model_len, "",
        tensor_parallel, gpu_memory, cpu, dtype, startup_s, tuple(shlex.split(extra)),
    )  # fmt: skip
    if len(model) == 1 and len(gpus) > 1:
        raise JudgeError(f"--gpus: expected the GPUs of one model joined by commas, {','.join(gpus)}; got {len(gpus)}")
    if len(model) == 1:
        configs = [replace(named(base, model[0]), gpus=gpus[0] if gpus else "")]
    elif name:
        raise JudgeError("--name is for a single model; write NAME=MODEL for each of several")
    else:
        require_free(host, port)
        configs = several(model, free_ports(len(model)), gpus, base)
    before = {number: signal.signal(number, _on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _run(configs, host, port)
    except _Stopped as stop:
        print(f"stopped by {stop}", flush=True)
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(configs: list[ServeConfig], host: str, port: int) -> int:
    """Start the models one after another (engines measure free memory while they start), then wait or route."""
    for config in configs:
        command(config)  # what is missing is said before the first model loads
    with ExitStack() as stack:
        servers = []
        for config in configs:
            servers.append(server := stack.enter_context(Server(config)))
            print(
                f"starting {config.preset.model} with {config.runs_on} on {config.url}, pid {server.pid}, log "
                f"{server.log}",
                flush=True,
            )
            print(server.wait_ready(), flush=True)
        if len(servers) > 1:
            for server in servers:
                stack.callback(server.terminate)  # called before the first `stop`, so that all end at once
            return asyncio.run(run([s.config.url for s in servers], host, port, over=_Watch(servers)))
        if host not in LOOPBACK:
            print(f"note: {host} is reachable by others, and the server asks for no password", flush=True)
        print(f"ready: judge '{configs[0].served_name}' at {configs[0].url}; stop it with Ctrl-C", flush=True)
        code = servers[0].wait()
        print(f"{configs[0].runs_on} ended with code {code}:\n{servers[0].tail()}", file=sys.stderr)
        return code or 1


class _Watch:
    """Whether all servers have ended; says once of each that it did, with the end of its log."""

    def __init__(self, servers: list[Server]) -> None:
        self.running = servers

    def __call__(self) -> bool:
        ended = [s for s in self.running if s.code() is not None]
        self.running = [s for s in self.running if s.code() is None]
        for server in ended:
            what = f"{server.config.runs_on} of '{server.config.served_name}' ended with code {server.code()}"
            print(f"{what}; the other models go on:\n{server.tail()}", file=sys.stderr, flush=True)
        return not self.running
