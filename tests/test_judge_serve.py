"""`judge serve` with an executable that stands in for vLLM: start, readiness, errors, and above all its end.

The stand-in is a real server process with a worker of its own in the same group. Cases: every way to end (stop,
Ctrl-C, SIGTERM, kill -9 of the parent), a start that fails, a port that is taken, no vLLM. test_judge_vllm.py runs
the real one.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from judge_server import JudgeServer, free_port

from prefgrpo.judge.serve import PRESETS, ServeConfig, Server, command, find_vllm
from prefgrpo.judge.template import load_template
from prefgrpo.judge.verdict import JudgeError

STAND_IN = """#!{python}
import os, subprocess, sys
sys.path.insert(0, {tests!r})
import judge_server
if "--fail" in sys.argv:
    sys.exit("ValueError: this checkpoint is broken")
worker = subprocess.Popen(["sleep", "600"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{worker.pid}}")
judge_server.main()
"""


@pytest.fixture
def vllm(tmp_path):
    """An environment folder with bin/vllm; `pids` beside it holds the pids of the server and its worker."""
    path = tmp_path / "venv" / "bin" / "vllm"
    path.parent.mkdir(parents=True)
    tests = str(Path(__file__).parent)
    path.write_text(STAND_IN.format(python=sys.executable, tests=tests, pids=str(tmp_path / "pids")))
    path.chmod(0o755)
    return tmp_path / "venv"


def config(vllm, **changes):
    return ServeConfig(**{"model": "unifiedreward", "vllm": str(vllm), "port": free_port(), "startup_s": 30, **changes})


def pids(vllm):
    return [int(word) for word in (vllm.parent / "pids").read_text().split()]


def gone(pid, seconds=10.0):
    """Wait until a process has ended (a zombie has)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_ready_means_a_probe_got_a_verdict_and_stop_ends_the_whole_group(vllm):
    bystander = subprocess.Popen(["sleep", "600"])
    with Server(config(vllm)) as server:
        assert "ok, serves unifiedreward" in server.wait_ready()
        assert "probe pair" in server.wait_ready()
    assert all(gone(pid) for pid in pids(vllm))
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_start_that_fails_shows_the_end_of_the_log(vllm):
    with (
        Server(config(vllm, extra=("--fail",))) as server,
        pytest.raises(JudgeError, match="this checkpoint is broken"),
    ):
        server.wait_ready()


def test_a_port_that_is_taken_and_a_missing_vllm_are_refused(vllm, monkeypatch, tmp_path):
    with JudgeServer() as other, pytest.raises(JudgeError, match=f"{other.port}.*choose another --port"):
        Server(config(vllm, port=other.port))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PREFGRPO_VLLM", raising=False)
    with pytest.raises(JudgeError, match=r"setup_vllm_cpu\.sh"):
        find_vllm("")
    monkeypatch.setenv("PREFGRPO_VLLM", str(vllm))
    assert find_vllm("") == str(vllm / "bin" / "vllm")
    with pytest.raises(JudgeError, match="checkpoint folder not found"):
        command(config(vllm, model="./nothing-here"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_command_ends_its_server_however_it_ends(vllm, number):
    program = f"from prefgrpo.judge.serve import serve; serve('qwen3-vl', {str(vllm)!r}, port={free_port()})"
    line = [sys.executable, "-c", program]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while "ready: judge 'qwen3-vl'" not in (said := child.stdout.readline()):
        assert said
    os.kill(child.pid, number)
    child.wait(30)
    server, worker = pids(vllm)
    assert gone(server)
    if number == signal.SIGKILL:  # nobody is left to end the stand-in's worker; vLLM ends its own
        os.kill(worker, signal.SIGKILL)
    else:
        assert child.returncode == 0 and gone(worker)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_template_and_the_measured_flags(name, vllm):
    words = command(config(vllm, model=name, media_in_flight=24, vision_tokens=1024))
    assert words[:2] == ["serve", PRESETS[name].model]
    flags = dict(zip(words[2::2], words[3::2], strict=False))
    assert flags["--shutdown-timeout"] == "20" and flags["--host"] == "127.0.0.1"
    assert int(flags["--max-num-batched-tokens"]) >= 24 * 1024
    assert "--api-server-count" not in flags  # one process: media ids live in its cache
    load_template(PRESETS[name].template)
