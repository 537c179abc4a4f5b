"""`judge serve`: the command line of every preset, mistakes, and that vLLM replaces the process.

A stand-in for the executable prints what it was started with. tests/judge/test_vllm.py runs the real vLLM.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from prefgrpo.config.loading import load
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.serve import PRESETS, find_vllm, serve
from prefgrpo.models import makes_clips

STAND_IN = "import json, os, sys; print(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ)])); sys.exit(7)"


@pytest.fixture
def vllm(tmp_path):
    """An environment folder with bin/vllm."""
    path = tmp_path / "venv" / "bin" / "vllm"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable}\n{STAND_IN}\n")
    path.chmod(0o755)
    return tmp_path / "venv"


def printed(capsys, *args, **options):
    """(environment variables, words) of the command line that `judge serve --print` prints."""
    assert serve(*args, show=True, **options) == 0
    words = shlex.split(capsys.readouterr().out)
    start = next(k for k, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:start]), words[start:]


def flags(words):
    """{option: the word after it} of a command line."""
    return {a: b for a, b in itertools.pairwise(words) if a.startswith("--")}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_measured_flags(name, vllm, capsys):
    variables, words = printed(capsys, name, str(vllm), batched_tokens=131072, media_cache_gb=18, gpus="2,3")
    assert words[:3] == [str(vllm / "bin" / "vllm"), "serve", PRESETS[name]]
    assert variables == {
        "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
        "CUDA_VISIBLE_DEVICES": "2,3",
    }  # fmt: skip
    assert {"--disable-uvicorn-access-log", "--enable-tokenizer-info-endpoint"} <= {*words}
    assert "--enforce-eager" not in words
    assert flags(words).items() >= {
        "--served-model-name": name, "--host": "127.0.0.1", "--port": "8000", "--tensor-parallel-size": "2",
        "--max-model-len": "24576", "--mm-processor-cache-gb": "18",
        "--limit-mm-per-prompt": '{"image": 16, "video": 0}',
        "--max-num-batched-tokens": str(128 * 1024), "--shutdown-timeout": "20", "--gpu-memory-utilization": "0.9",
    }.items()  # fmt: skip
    thinks = '{"enable_thinking": false}' if "qwen35" in name else None
    assert flags(words).get("--default-chat-template-kwargs") == thinks
    assert "--api-server-count" not in words  # one process, since media ids live in its cache


def test_a_folder_on_the_cpu(vllm, capsys, tmp_path):
    options = {"cpu": True, "extra": "--dtype float32", "port": 9, "name": "tiny"}
    variables, words = printed(capsys, str(tmp_path), str(vllm), max_model_len=512, **options)
    assert variables["TORCHDYNAMO_DISABLE"] == variables["HF_HUB_OFFLINE"] == "1"
    assert "--enforce-eager" in words and "--gpu-memory-utilization" not in words
    assert words[-2:] == ["--dtype", "float32"], "last, so that it overrides"
    expected = {"--served-model-name": "tiny", "--port": "9", "--max-model-len": "512"}
    assert flags(words).items() >= (expected | {"--max-num-batched-tokens": "16384"}).items()
    assert flags(printed(capsys, "OWNER/NAME", str(vllm))[1])["--served-model-name"] == "NAME"


def test_a_folder_is_known_by_its_config_whatever_its_name(vllm, capsys, tmp_path):
    for kind, thinks in (("qwen3_5", '{"enable_thinking": false}'), ("qwen3_vl", None)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert flags(printed(capsys, str(tmp_path), str(vllm))[1]).get("--default-chat-template-kwargs") == thinks


def test_the_shipped_recipes_fit_the_defaults(vllm, capsys):
    """Two clips of 8 frames, or two results with their source, at the recipe's size, with 2,000 tokens of text and the
    longest answer; a group's encodings (4 · 4096 bf16 numbers per token) fit a card of 24 GB beside an 8B judge."""
    words = flags(printed(capsys, "unifiedreward-think", str(vllm))[1])
    for file in (Path(__file__).parents[2] / "scripts").glob("*/[!_]*.yaml"):
        config = load(file)
        if not config.judge.endpoints:
            continue
        images = 16 if makes_clips(config) else 3
        tokens = images * -(-config.rollout.height // 32) * -(-config.rollout.width // 32)
        assert tokens + 2000 + 4096 <= int(words["--max-model-len"]), file.stem
        assert images <= json.loads(words["--limit-mm-per-prompt"])["image"]
    assert int(words["--max-num-batched-tokens"]) * 4 * 4096 * 2 < 2**30


def test_vllm_replaces_the_process(vllm):
    line = [sys.executable, "-m", "prefgrpo", "judge", "serve", "qwen3-vl", "--vllm", str(vllm), "--gpus", "1"]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    pid, words, variables = json.loads(child.communicate(timeout=120)[0])
    assert pid == child.pid and child.returncode == 7
    assert words[0] == "serve" and variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert variables["PATH"] == os.environ["PATH"]


def test_what_cannot_be_served_is_refused(vllm, monkeypatch, tmp_path):
    for model, message in (
        ("./nothing-here", "an existing folder"),
        ("unifiedreward-flx", "mean 'unifiedreward-flex'"),
    ):
        with pytest.raises(JudgeError, match=message):
            serve(model, str(vllm))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PREFGRPO_VLLM", raising=False)
    with pytest.raises(JudgeError, match=r"setup_vllm_cpu\.sh"):
        serve("qwen3-vl")
    monkeypatch.setenv("PREFGRPO_VLLM", str(vllm))
    assert find_vllm() == str(vllm / "bin" / "vllm")
