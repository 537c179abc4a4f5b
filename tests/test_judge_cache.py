"""The answers that a resumed run does not ask for again, and hedged requests, against real servers.

Why these cases: a cache must never answer another question (each part of the key is changed alone: model, template,
prompt, media, source, order, sampling), must survive kill -9 and torn or foreign lines, must not grow without bound,
and must hold nothing that failed. A hedge must help with a slow server, never ask more than twice, and change no value.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from judge_server import MODEL, JudgeServer, free_port
from test_judge_faults import FAST, ask, judge, media, process
from tiny_run import Hold, recipe, rows, start, train, world

from prefgrpo.data.media import Media
from prefgrpo.judge.cache import AnswerCache, shared_cache
from prefgrpo.judge.client import HttpJudge, HttpJudgeConfig, check
from prefgrpo.judge.plans import both_orders
from prefgrpo.judge.traffic import TRAFFIC, metrics
from prefgrpo.judge.verdict import Answer, JudgeError
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import Scorer

TEXT = "user: '{prompt} {media_1} {media_2}'\nlabels: ['1', '2']\nprefill: 'Image '\n"


def asked(server, **changes):
    """(requests that reached the server for one pair, its verdict)."""
    before, first, second = len(server.requests), *changes.pop("pair", media([40, 200]))
    prompt, source = changes.pop("prompt", "p"), changes.pop("source", ())
    verdict = judge(server.url, **changes).submit(prompt, first, second, source).result(10)
    return len(server.requests) - before, verdict


def test_the_same_question_is_asked_once_also_by_another_process(tmp_path):
    cache = str(tmp_path / "verdicts")
    with JudgeServer() as server:
        count, fresh = asked(server, cache=cache)
        assert count == 1 and not fresh.cached
        count, kept = asked(server, cache=cache)
        assert count == 0 and kept.cached and (kept.first, kept.raw, kept.retries) == (fresh.first, fresh.raw, 0)
        line = [sys.executable, "-c", "from test_judge_cache import *; say(*sys.argv[1:])", server.url, cache]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        said = subprocess.run(line, capture_output=True, text=True, env=env, timeout=60)
        assert said.stdout == f"True {fresh.first!r}\n", said.stderr
        assert len(server.requests) == 2, "it asked for the other order only"


def say(url, cache):
    """Judge the usual pair and print what came (runs in a process of its own)."""
    verdict = ask(judge(url, cache=cache))[0]
    print(verdict.cached, repr(verdict.first))


def test_another_question_is_never_answered_from_the_cache(tmp_path):
    cache, template = str(tmp_path / "verdicts"), tmp_path / "t.yaml"
    template.write_text(TEXT)
    dark, bright = media([40, 200])
    sourced = tmp_path / "s.yaml"
    sourced.write_text(TEXT.replace("{media_1}", "{source} {media_1}"))
    with JudgeServer() as server:
        assert asked(server, cache=cache)[0] == 1
        for changes in (
            {"prompt": "p "},
            {"pair": (bright, dark)},
            {"pair": (dark, media([201])[0])},
            {"seed": 1},
            {"min_label_mass": 0.02},
            {"image_format": "webp"},
            {"template": str(template)},
            {"template": str(sourced), "source": (media([7])[0],)},
            {"template": str(sourced), "source": (media([8])[0],)},
        ):
            assert asked(server, cache=cache, **changes)[0] == 1, changes
            assert asked(server, cache=cache, **changes)[0] == 0, changes
        template.write_text(TEXT.replace("'Image '", "'Picture '"))
        assert asked(server, cache=cache, template=str(template))[0] == 1, "the same path with another content"
        elsewhere = tmp_path / "u.yaml"
        elsewhere.write_text(TEXT)
        assert asked(server, cache=cache, template=str(elsewhere))[0] == 0, "the same content at another path"
    with JudgeServer() as other:
        other.model = "another"
        assert asked(other, cache=cache)[0] == 1, "the model's name came from the server"
    assert len(shared_cache(cache)) == 12


def test_what_failed_is_asked_again(tmp_path):
    cache = str(tmp_path / "verdicts")
    with JudgeServer("garbage", count=1) as server:
        assert asked(server, cache=cache, model=MODEL)[1].first is None
        count, verdict = asked(server, cache=cache, model=MODEL)
        assert count == 1 and verdict.first < 0.1
        server.fault, server.count = "400", -1
        assert asked(server, cache=cache, model=MODEL, prompt="q")[1].first is None
        server.fault = ""
        assert asked(server, cache=cache, model=MODEL, prompt="q")[0] == 1
    assert asked(server, cache=cache, model=MODEL)[1].first == verdict.first, "an answer that is kept needs no server"


def test_the_check_at_the_start_asks_the_judge_and_not_the_cache(tmp_path):
    config = HttpJudgeConfig((f"http://127.0.0.1:{free_port()}",), MODEL, cache=str(tmp_path / "v"), **FAST)
    with JudgeServer(port=int(config.endpoints[0].rsplit(":", 1)[1])) as server:
        for _ in range(2):
            seen = len(server.requests)
            check(config, bias_pairs=2)
            assert len(server.requests) == seen + 5
    with pytest.raises(JudgeError, match="not reachable"):
        check(config)


def test_a_file_that_a_killed_process_left_torn_is_read_and_mended(tmp_path):
    kept = AnswerCache(tmp_path)
    for k in range(3):
        kept.put(f"key{k}", Answer(k / 4, raw="é😀", parts={"a": 1.0}))
    kept.close()
    file = tmp_path / "rank0.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for torn in range(1, len(lines[2])):
        file.write_bytes(b"".join(lines[:2]) + lines[2][:torn])
        again = AnswerCache(tmp_path)
        assert again.get("key2") is None and again.get("key1") == Answer(0.25, raw="é😀", parts={"a": 1.0}, cached=True)
        again.put("key9", Answer(0.9))
        again.close()
        assert AnswerCache(tmp_path).get("key9").value == 0.9
        assert all(json.loads(line) for line in file.read_bytes().splitlines())
    file.write_bytes(b"\xff\xfe\n[]\nnull\n{}\n" + lines[0] + b'{"key":1}\n')
    again = AnswerCache(tmp_path)
    assert len(again) == 1 and again.get("key0").value == 0.0


def test_a_failed_answer_and_a_soft_none_are_told_apart(tmp_path):
    kept = AnswerCache(tmp_path)
    kept.put("failed", Answer(None, "the judge is down"))
    kept.put("scores", Answer(None, "", parts={"style": 3.0}))  # a pointwise answer has parts only
    assert kept.get("failed") is None and kept.get("scores").parts == {"style": 3.0}


def test_it_does_not_grow_without_bound(tmp_path):
    kept = AnswerCache(tmp_path, most_bytes=10_000)
    for k in range(1000):
        kept.put(f"{k:032d}", Answer(0.5, raw="logp -0.6931 -0.6931"))
        assert kept.path.stat().st_size <= 10_000
    assert kept.get(f"{999:032d}") and kept.get(f"{960:032d}") and not kept.get(f"{0:032d}")
    assert not kept.get("") and 30 < len(AnswerCache(tmp_path)) == len(kept) < 100
    kept.put("long", Answer(0.5, raw="x" * 100_000))
    assert kept.path.stat().st_size <= 10_000, "texts are cut as in the judgement log"


def test_each_rank_writes_its_own_file_and_reads_all(tmp_path, monkeypatch):
    caches = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        caches.append(AnswerCache(tmp_path))
        caches[-1].put(f"of {rank}", Answer(rank / 4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.jsonl", "rank1.jsonl", "rank2.jsonl"]
    assert [AnswerCache(tmp_path).get(f"of {rank}").value for rank in range(3)] == [0.0, 0.25, 0.5]
    assert len(AnswerCache(tmp_path, most_bytes=1)) == 0, "a thousand ranks fit into memory"


def test_a_disk_that_fails_costs_the_cache_and_no_answer(tmp_path):
    (tmp_path / "file").write_text("")
    with JudgeServer() as server, pytest.warns(UserWarning, match="no longer kept"):
        count, verdict = asked(server, cache=str(tmp_path / "file" / "x"))
    assert count == 1 and verdict.first < 0.1
    (tmp_path / "rank0.jsonl").mkdir()
    with pytest.raises(JudgeError, match=r"cache.*cannot be used.*choose another folder"):
        HttpJudge(HttpJudgeConfig(cache=str(tmp_path)))


def test_an_empty_cache_leaves_no_folder(tmp_path):
    with JudgeServer("garbage") as server:
        asked(server, cache=str(tmp_path / "run" / "verdicts"))
    assert not (tmp_path / "run").exists(), "a run that did not start can be started again"


def half_a_step(url, cache):
    """A step of two groups of which one is answered; then wait to be killed (runs in a process of its own)."""
    s = scorer(url, cache)
    s.begin(0, [0, 1])
    for member, level in enumerate(range(20, 220, 40)):
        s.add(0, member, Sample("p", media([level])[0]))
    while s._flights["vlm_pairwise"].depth:
        time.sleep(0.01)
    print("judged", flush=True)
    time.sleep(600)


def scorer(url, cache):
    config = HttpJudgeConfig((url,), MODEL, cache=cache, **FAST)
    return Scorer(build("vlm_pairwise", {"vlm_pairwise": {"judge": config}}), 5, deadline_s=20)


def test_a_step_that_was_killed_between_judging_and_its_checkpoint_is_not_judged_twice(tmp_path):
    cache = str(tmp_path / "verdicts")
    with JudgeServer() as server:
        line = [sys.executable, "-c", "from test_judge_cache import *; half_a_step(*sys.argv[1:])", server.url, cache]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env)
        assert child.stdout is not None and child.stdout.readline() == "judged\n"
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        seen = len(server.requests)
        with scorer(server.url, cache) as s:
            s.begin(0, [0, 1])
            for group in (0, 1):
                for member, level in enumerate(range(20, 220, 40)):
                    s.add(group, member, Sample("p" if group == 0 else "q", media([level])[0]))
            result = s.finish()
        new = server.requests[seen:]
    texts = [p["text"] for b in new for p in b["messages"][0]["content"] if p["type"] == "text"]
    probe = sum("a plain red picture" in text for text in texts)
    assert len(new) - probe == 20 and result.metrics["judge/cache_hits"] == 20
    assert np.all(np.diff(result.values["vlm_pairwise"], axis=1) > 0)
    np.testing.assert_array_equal(result.values["vlm_pairwise"][0], result.values["vlm_pairwise"][1])


def test_a_run_that_was_killed_before_its_checkpoint_asks_for_nothing_twice(tmp_path):
    place = world(tmp_path)
    over = {"reward": {"spec": "vlm_pairwise"}, "eval": {"every": 0}, "checkpoint": {"every": 20}}
    with JudgeServer(delay_s=0.01) as server:
        judge = {"endpoints": [server.url], "timeout_s": 5.0, "deadline_s": 20.0, "concurrency": 1}
        code, output = train(recipe(place, "steady", **over, judge=judge))
        assert code == 0, output
        whole = len(server.requests)
        folder = place / "runs" / "killed"
        file = recipe(place, "killed", **over, judge=judge)
        run = start(["train", str(file)], place / "killed.log", hold=Hold("prefgrpo.run.loop:TrainingLoop._report", 2))
        run.until_held()
        run.kill()
        kept = sum(len(path.read_bytes().splitlines()) for path in (folder / "verdicts").glob("*.jsonl"))
        done, seen = len(rows(folder)), len(server.requests)
        assert not list((folder / "checkpoints").glob("step_*")) and kept >= done * 2 * 12
        code, output = train(file, "--resume")
        assert code == 0, output
        again = len(server.requests) - seen
    probes = whole - 4 * 2 * 12
    assert again == probes + 4 * 2 * 12 - kept, "of 4 steps with 2 groups of 12 pairs, only what was not answered yet"
    assert rows(folder) == rows(place / "runs" / "steady"), "whole rows, but for time/"
    assert [row["time/judge/cache_hits"] for row in rows(folder, timeless=False)][:2] == [24.0, 24.0]
    off = recipe(place, "off", **over, judge=judge | {"cache": False})
    with JudgeServer(port=server.port):
        assert train(off)[0] == 0 and not (place / "runs" / "off" / "verdicts").exists()


def test_traffic_is_counted(tmp_path):
    before = TRAFFIC.copy()
    assert metrics(before) == {}
    with JudgeServer("garbage", count=1) as server:
        for _ in range(2):
            ask(judge(server.url, cache=str(tmp_path / "v"), model=MODEL, concurrency=1))
    found = metrics(before)
    assert 0 < found.pop("judge/wasted_share") < 1, "of two requests nothing could be read from one"
    assert found == {"judge/cache_hits": 1.0, "judge/hedges": 0.0, "judge/parse_failure_rate": 0.25}


# ---- hedged requests ------------------------------------------------------------------------------------------------


def test_a_slow_request_is_sent_to_a_second_server_and_the_first_answer_counts():
    before = TRAFFIC.copy()
    with JudgeServer("hang chat") as slow, JudgeServer() as quick:
        start = time.monotonic()
        verdicts = ask(judge(slow.url, quick.url, hedge_s=0.2, timeout_s=30.0), 4)
        took = time.monotonic() - start
        assert [v.first > 0.5 for v in verdicts] == [False, True] * 4 and all(v.retries == 0 for v in verdicts)
        assert took < 15
        assert 1 <= metrics(before)["judge/hedges"] <= 8
        deadline = time.monotonic() + 30
        while slow.in_flight:
            assert time.monotonic() < deadline, "the loser was not given up"
            time.sleep(0.02)


def test_hedging_alone_never_asks_more_than_twice_and_is_off_by_default():
    with JudgeServer(delay_s=0.3) as server:
        assert all(v.first is not None for v in ask(judge(server.url, hedge_s=0.05, concurrency=8), 2))
        assert 4 < len(server.requests) <= 8
        seen = len(server.requests)
        ask(judge(server.url), 2)
        assert len(server.requests) == seen + 4
    with pytest.raises(JudgeError, match="hedge_s must be 0 or more"):
        judge("http://127.0.0.1:1", hedge_s=-1.0)


def test_a_hedge_does_not_hide_a_refusal_or_the_end_of_patience():
    with JudgeServer("400") as server:
        assert all("refused with 400" in v.reason for v in ask(judge(server.url, hedge_s=0.01)))
    start = time.monotonic()
    verdicts = ask(judge(f"http://127.0.0.1:{free_port()}", hedge_s=0.01))
    assert all("no server was reachable" in v.reason for v in verdicts) and time.monotonic() - start < 30


def test_hedged_answers_are_right_while_servers_die_and_pairs_are_cancelled():
    """Slots must come back: 60 pairs over two servers with 3 slots each, one killed on the way, a third cancelled."""
    levels = list(range(20, 230, 25))
    group, pairs = [Media(np.full((32, 32, 3), n, np.uint8)) for n in levels], both_orders(len(levels), 0)
    port = free_port()
    with JudgeServer(delay_s=0.03) as alive, process(port, "--delay", "0.1") as child:
        j = judge(alive.url, f"http://127.0.0.1:{port}", hedge_s=0.05, concurrency=3, retries=4, patience_s=20)
        answers = [j.submit("p", group[a], group[b]) for a, b in pairs]
        threading.Timer(0.3, child.kill).start()
        for answer in answers[::3]:
            answer.cancel()
        for (a, b), answer in zip(pairs, answers, strict=True):
            if not answer.cancelled():
                assert (answer.result(20).first > 0.5) == (levels[a] > levels[b])
        deadline = time.monotonic() + 30
        while any(e.load for e in j.client.sender.endpoints):
            assert time.monotonic() < deadline, [e.load for e in j.client.sender.endpoints]
            time.sleep(0.02)
