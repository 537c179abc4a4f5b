"""The client and `judge serve` with a real vLLM serving the demo world's judge, and every kind of question to it.

Needs a vLLM environment (scripts/setup_vllm_cpu.sh VENV creates one; set PREFGRPO_VLLM=VENV) and is skipped otherwise,
because vLLM needs 2.5 GB and 40 s to start. Oracles: the in-process judge, and transformers' forward pass on the whole
question, which uses none of our client code. Served in fp32 to allow tight tolerances.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from ranks import free_port, until
from reward_cases import stock_answer
from servers import asker

import prefgrpo
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.judge import client
from prefgrpo.judge.check import check
from prefgrpo.judge.client import HttpJudge
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.local import LocalJudge
from prefgrpo.judge.template import load_template
from prefgrpo.rewards.pairs import both_orders
from prefgrpo.tiny import scenes
from tests.judge.test_client import ask
from tests.judge.test_tokens import TRIMS

MODEL = str(Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge")
VLLM = os.environ.get("PREFGRPO_VLLM", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not VLLM, reason="PREFGRPO_VLLM names no vLLM environment (scripts/setup_vllm_cpu.sh)"),
    pytest.mark.skipif(not Path(MODEL).is_dir(), reason="the demo world's judge is not in this checkout"),
]
PAIRS = both_orders(8, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A copy of the judge, so that retraining it meanwhile does not affect the server."""
    return shutil.copytree(MODEL, tmp_path_factory.mktemp("judge") / "tiny").as_posix()


@contextlib.contextmanager
def serving(model, port):
    """Runs `judge serve` in its own process group; yields the process once it answers."""
    line = ["judge", "serve", model, "--vllm", VLLM, "--port", str(port), "--name", "tiny", "--cpu"]
    line += ["--max-model-len", "2048", "--extra=--dtype float32"]
    server = subprocess.Popen([sys.executable, "-m", "prefgrpo", *line], start_new_session=True)
    config = JudgeConfig((f"http://127.0.0.1:{port}",))
    try:
        end = time.monotonic() + 240
        while True:
            assert server.poll() is None, f"vLLM ended with code {server.returncode}"
            try:
                assert "ok, serves tiny" in check(*asker(config, "caption_match"), wait_s=120.0).rows[0]
                break
            except JudgeError:
                assert time.monotonic() < end
                time.sleep(1.0)
        yield server
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def port(model):
    port = free_port()
    with serving(model, port):
        yield port


def judge(port, **changes):
    base = {"endpoints": (f"http://127.0.0.1:{port}",), "image_format": "webp"}
    return asker(JudgeConfig(**{**base, **changes}), "caption_match")


def group(size=8):
    """A caption and `size` scenes that match it to varying degrees."""
    generator = torch.Generator().manual_seed(0)
    combos = [scenes.COMBOS[k] for k in torch.randint(len(scenes.COMBOS), (size,), generator=generator).tolist()]
    pictures = (scenes.render(combos, generator) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return scenes.caption(combos[0]), [Media(p) for p in pictures]


def test_soft_verdicts_equal_the_in_process_judge(model, port, monkeypatch):
    caption, media = group()
    local = asker(LocalJudge(model), "caption_match").judge_group(caption, media, PAIRS)
    p = np.array([v.value for v in local])
    assert np.ptp(p) > 0.5, "the images differ in how well they match"
    for ids in (True, False):
        monkeypatch.setattr("prefgrpo.judge.uploads.IDS_FROM", (0, 32) if ids else (99, 0))
        client._judges.clear()
        j = judge(port)
        for _ in range(2):  # uploaded, then by id only
            served = j.judge_group(caption, media, PAIRS)
            assert all(v.retries == 0 for v in served)
            assert np.abs(p - [v.value for v in served]).max() < 2e-3
        (held,) = (server.ids for server in j.judge.servers.values())
        assert held.supported == ids and len(held.sent) == len(media) * ids and not held.unnamed


def test_a_chat_template_that_trims_changes_no_verdict(model, tmp_path):
    """As Qwen3.5's does: the in-process judge is the original."""
    caption, media = group()
    local = asker(LocalJudge(model), "caption_match").judge_group(caption, media, PAIRS)
    cut = shutil.copytree(model, tmp_path / "tiny")
    (cut / "chat_template.jinja").write_text(TRIMS)
    port = free_port()
    with serving(str(cut), port):
        served = judge(port).judge_group(caption, media, PAIRS)
    assert np.abs(np.subtract([v.value for v in local], [v.value for v in served])).max() < 2e-3
    np.testing.assert_allclose([said(v) for v in served], [said(v) for v in local], atol=0.02)


def said(verdict):
    """The labels' log-probabilities."""
    return [float(value) for value in verdict.raw.split()[1:]]


def test_a_server_killed_in_the_middle_of_a_group_and_restarted_loses_nothing(model):
    port, (caption, media) = free_port(), group()
    with serving(model, port) as server:
        j = judge(port, concurrency=4, deadline_s=300.0)
        expected = [v.value for v in j.judge_group(caption, media, PAIRS)]
        answers = [j.submit(caption, media[a], media[b]) for a, b in PAIRS * 4]
        until(lambda: sum(a.done() for a in answers) >= 8)
        os.killpg(server.pid, signal.SIGKILL)  # kills its whole process group: API server, engine and worker
        server.wait()
        assert not all(a.done() for a in answers)
    with serving(model, port):
        found = [a.result(120).value for a in answers]
    np.testing.assert_allclose(found, expected * 4, atol=1e-5)


# ---- every kind of question ------------------------------------------------------------------------------------------


def masses(template, prompt, shown):
    """Function label -> its next-token probability from plain transformers, up to white space; `shown`: images by place
    in the turn."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    processor = transformers.AutoImageProcessor.from_pretrained(MODEL)
    model = transformers.AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()
    places, content = iter(shown), []
    for part in template.parts({"prompt": prompt}):
        text = [{"type": "text", "text": part}] if isinstance(part, str) else []
        content += text or [{"type": "image"} for _ in next(places)]
    turns = [{"role": "user", "content": content}]
    if template.prefill:
        turns.append({"role": "assistant", "content": [{"type": "text", "text": template.prefill}]})
    p = stock_answer(model, tokenizer, processor, turns, [m for place in shown for m in place])

    vocabulary = tokenizer.batch_decode([[k] for k in range(len(tokenizer))])
    return lambda label: sum(float(p[k]) for k, text in enumerate(vocabulary) if text.strip() == label)


def pictures(count, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return [Media(n.repeat(16, 0).repeat(16, 1)) for n in noise]


def clips():
    return [Media(np.stack([p.pixels for p in pictures(33, seed)])) for seed in (1, 2)]


def frames(clip):
    return [Media(clip.pixels[k]) for k in np.linspace(0, 32, 8, dtype=int)]


PAIR = "prefill: 'Image '\nlabels: ['1', '2']\n"
QUESTIONS = {  # template, media, sources, images by place in the prompt
    "one image after its source": (
        "user: '{prompt} {source} then {media_1}?'\nlabels: ['1', '2']\n",
        lambda: (pictures(1), pictures(1, 3), [pictures(1, 3), pictures(1)]),
    ),
    "a pair with two source images": (
        "user: 'Instruction: {prompt} {source} 1: {media_1} 2: {media_2}'\n" + PAIR,
        lambda: (pictures(2), pictures(2, 3), [pictures(2, 3), pictures(2)[:1], pictures(2)[1:]]),
    ),
    "two clips as sixteen frames in order": (
        "user: '{prompt} 1: {media_1} 2: {media_2}'\n" + PAIR,
        lambda: (clips(), [], [frames(c) for c in clips()]),
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_equals_stock_code(tmp_path, port, name):
    text, make = QUESTIONS[name]
    media, source, shown = make()
    (tmp_path / "question.yaml").write_text(text)
    needs = [key for key in ("prompt", "source", "media_1", "media_2") if f"{{{key}}}" in text]
    asked = load_template(str(tmp_path / "question.yaml"), tuple(needs))
    mass = masses(asked, "less red", shown)
    first, second = map(mass, asked.labels)
    url = f"http://127.0.0.1:{port}"
    asking = HttpJudge(JudgeConfig((url,), image_format="webp"))
    for _ in range(2):  # uploaded, then by id only
        answer = ask(asking, asked, {"prompt": "less red"}, media, source).result(60)
        assert answer.value == pytest.approx(first / (first + second), abs=2e-3), answer
    (held,) = (server.ids for server in asking.servers.values())
    assert held.sent and not held.unnamed
