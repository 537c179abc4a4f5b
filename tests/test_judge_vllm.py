"""The client and `judge serve` against a real vLLM with the demo world's judge.

Needs a vLLM environment, named by PREFGRPO_VLLM (scripts/setup_vllm_cpu.sh VENV makes one; PREFGRPO_VLLM=VENV); it
is skipped elsewhere, because vLLM needs 2.5 GB and 40 s to start. Oracle: the in-process judge, which is another
implementation of the same model. Served in fp32, so that equality is tight.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from judge_server import free_port

import prefgrpo
from prefgrpo.data.media import Media
from prefgrpo.judge.client import HttpJudge, HttpJudgeConfig
from prefgrpo.judge.engines import ServeConfig
from prefgrpo.judge.local import LocalJudge, LocalJudgeConfig
from prefgrpo.judge.plans import both_orders
from prefgrpo.judge.serve import Server
from prefgrpo.tiny import scenes

MODEL = str(Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge")
VLLM = os.environ.get("PREFGRPO_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="PREFGRPO_VLLM names no vLLM environment (scripts/setup_vllm_cpu.sh)"),
    pytest.mark.skipif(not Path(MODEL).is_dir(), reason="the demo world's judge is not in this checkout"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A copy, so that a judge that is trained meanwhile does not change under the server."""
    return shutil.copytree(MODEL, tmp_path_factory.mktemp("judge") / "tiny").as_posix()


def config(model, port):
    return ServeConfig(
        model, VLLM, port=port, name="tiny", template="caption_match", cpu=True, dtype="float32",
        vision_tokens=4, max_model_len=2048, startup_s=240,
    )  # fmt: skip


def judge(folder, port, **changes):
    base = {"endpoints": (f"http://127.0.0.1:{port}",), "template": "caption_match", "tokenizer": folder}
    return HttpJudge(HttpJudgeConfig(**{**base, "image_format": "webp", **changes}))


def group(size):
    """A caption and `size` scenes that fit it more or less."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    combos = [scenes.COMBOS[k] for k in torch.randint(len(scenes.COMBOS), (size,), generator=generator).tolist()]
    pictures = (scenes.render(combos, generator) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return scenes.caption(combos[0]), [Media(p) for p in pictures]


@pytest.fixture(scope="module")
def port(model):
    port = free_port()
    with Server(config(model, port)) as server:
        assert "ok, serves tiny" in server.wait_ready()
        yield port


def test_soft_verdicts_equal_the_in_process_judge(model, port):
    caption, media = group(8)
    pairs = both_orders(8, 0)
    local = LocalJudge(LocalJudgeConfig(model, template="caption_match")).judge_group(caption, media, pairs)
    p = np.array([v.first for v in local])
    assert np.ptp(p) > 0.5  # the pictures differ in how well they fit
    for changes in ({}, {"tokenizer": ""}, {"media_ids": "off"}):
        served = judge(model, port, **changes).judge_group(caption, media, pairs)
        assert all(v.retries == 0 for v in served)
        assert np.abs(p - [v.first for v in served]).max() < 2e-3
    assert np.abs(p - [v.first for v in judge(model, port).judge_group(caption, media, pairs)]).mean() < 2e-4


def test_ids_alone_are_enough_the_second_time(model, port):
    caption, media = group(6)
    j, pairs = judge(model, port), both_orders(6, 0)
    first = [v.first for v in j.judge_group(caption, media, pairs)]
    again = [v.first for v in j.judge_group(caption, media, pairs)]
    endpoint = j.client.sender.endpoints[0]
    assert endpoint.uses_ids and endpoint._misses == 0 and len(endpoint._known) == 6
    np.testing.assert_allclose(first, again, atol=1e-5)


def test_a_server_killed_in_the_middle_of_a_group_and_restarted_loses_nothing(model):
    port = free_port()
    caption, media = group(8)
    pairs = both_orders(8, 0)
    with Server(config(model, port)) as server:
        server.wait_ready()
        j = judge(model, port, concurrency=4, patience_s=300.0)
        expected = [v.first for v in j.judge_group(caption, media, pairs)]
        answers = [j.submit(caption, media[a], media[b]) for a, b in pairs * 4]
        while sum(a.done() for a in answers) < 8:
            time.sleep(0.005)
        os.killpg(server.pid, signal.SIGKILL)  # its own group: API server, engine and worker at once
        server.wait()
        assert not all(a.done() for a in answers)
    with Server(config(model, port)) as server:
        server.wait_ready()
        found = [a.result(120).first for a in answers]
    np.testing.assert_allclose(found, expected * 4, atol=1e-5)


def serving(*models, port, **options):
    """`judge serve MODELS` as a process that is ready, and the pids of the servers that it started."""
    options = {"template": "caption_match", "cpu": True, "vision_tokens": 4, "max_model_len": 2048, **options}
    code = (
        "import sys; from prefgrpo.judge.engines import ServeConfig; from prefgrpo.judge.serve import serve; "
        f"sys.exit(serve({models!r}, options=ServeConfig(port={port}, **{options!r})))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = [child.stdout.readline()]
    while not lines[-1].startswith("ready: judge"):
        lines.append(child.stdout.readline())
        assert lines[-1], lines
    return child, [int(line.split("pid ")[1].split(",")[0]) for line in lines if line.startswith("starting")]


def test_the_command_serves_until_it_is_told_to_stop(model):
    child, (pid,) = serving(model, port=free_port(), name="tiny")
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_two_models_on_two_ports(model):
    """Needs about 7 GB: two servers at once."""
    caption, media = group(6)
    pairs = both_orders(6, 0)
    port = free_port()
    local = LocalJudge(LocalJudgeConfig(model, template="caption_match")).judge_group(caption, media, pairs)
    child, servers = serving(f"one={model}", f"two={model}", port=port, dtype="float32")
    try:
        for k, name in enumerate(("one", "two")):
            served = judge(model, port + k, model=name).judge_group(caption, media, pairs)
            assert all(v.retries == 0 for v in served)
            assert np.abs(np.array([v.first for v in local]) - [v.first for v in served]).max() < 2e-3
        stuck = judge(model, port, model="one", patience_s=2.0, retries=2)
        os.killpg(servers[0], signal.SIGKILL)
        verdicts = stuck.judge_group(caption, media, pairs[:4])
        assert all("no server was reachable" in v.reason for v in verdicts), verdicts
        going_on = judge(model, port + 1, model="two").judge_group(caption, media, pairs)
        assert [v.first for v in going_on] == [v.first for v in served]
    finally:
        child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    for pid in servers:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
