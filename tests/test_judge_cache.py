"""The answer cache, which spares a resumed run repeated requests, and hedged requests, against real servers.

Why these cases: the cache must never answer a different question (each part of the key is changed alone: model,
template, prompt, media, source, order), must survive kill -9 and truncated or foreign lines, must be bounded, and must
not store failures. A hedge must help with a slow server, send at most two requests, and change no value.
"""

from collections import Counter

import pytest
from judge_server import MODEL, JudgeServer
from test_judge_faults import FAST, ask, judge, media
from tiny_run import Hold, recipe, rows, start, train, world

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import cache
from prefgrpo.judge.cache import AnswerCache, shared_cache
from prefgrpo.judge.client import HttpJudge, check
from prefgrpo.judge.traffic import collect_counts, metrics
from prefgrpo.judge.verdict import Answer, JudgeError

TEXT = "user: '{prompt} {media_1} {media_2}'\nlabels: ['1', '2']\nprefill: 'Image '\n"


def asked(server, **changes):
    """(number of requests that reached the server for one pair, its verdict)."""
    before, first, second = len(server.requests), *changes.pop("pair", media([40, 200]))
    prompt, source = changes.pop("prompt", "p"), changes.pop("source", ())
    verdict = judge(server.url, **changes).submit(prompt, first, second, source).result(10)
    return len(server.requests) - before, verdict


def test_only_the_same_question_is_answered_from_the_cache(tmp_path):
    cache, template, sourced = str(tmp_path / "verdicts"), tmp_path / "t.yaml", tmp_path / "s.yaml"
    template.write_text(TEXT)
    sourced.write_text(TEXT.replace("{media_1}", "{source} {media_1}"))
    dark, bright = media([40, 200])
    with JudgeServer() as server:
        count, fresh = asked(server, cache=cache)
        assert count == 1 and not fresh.cached
        count, kept = asked(server, cache=cache)
        assert count == 0 and kept.cached and (kept.first, kept.raw, kept.retries) == (fresh.first, fresh.raw, 0)
        for changes in (
            {"prompt": "p "},
            {"pair": (bright, dark)},
            {"pair": (dark, media([201])[0])},
            {"min_label_mass": 0.02},
            {"image_format": "webp"},
            {"template": str(template)},
            {"template": str(sourced), "source": media([7])},
            {"template": str(sourced), "source": media([8])},
        ):
            assert [asked(server, cache=cache, **changes)[0] for _ in range(2)] == [1, 0], changes
        template.write_text(TEXT.replace("'Image '", "'Picture '"))
        assert asked(server, cache=cache, template=str(template))[0] == 1, "the same path with different content"
        template.rename(tmp_path / "u.yaml").write_text(TEXT)
        assert asked(server, cache=cache, template=str(tmp_path / "u.yaml"))[0] == 0, "the same content at another path"
    with JudgeServer() as other:
        other.model = "another"
        assert asked(other, cache=cache)[0] == 1, "the served model's name is part of the key"
    assert len(shared_cache(cache)) == len(AnswerCache(cache)) == 11


def test_what_failed_is_asked_again_and_what_is_kept_needs_no_server(tmp_path):
    options = {"cache": str(tmp_path / "run" / "verdicts"), "model": MODEL}
    with JudgeServer("garbage", count=1) as server:
        assert asked(server, **options)[1].first is None
        assert not (tmp_path / "run").exists(), "a failed start leaves the run's name free"
        count, verdict = asked(server, **options)
        assert count == 1 and verdict.first < 0.1
        config = JudgeConfig((server.url,), **options, **FAST)
        seen = len(server.requests)
        check(config, bias_pairs=2)
        check(config, bias_pairs=2)
        assert len(server.requests) == seen + 10, "the start-up check bypasses the cache"
    assert asked(server, **options)[1].first == verdict.first


def test_a_file_that_a_killed_process_left_torn_is_read_and_mended(tmp_path):
    kept = AnswerCache(tmp_path)
    for k in range(3):
        kept.put(f"key{k}", Answer(k / 4, raw="é😀", parts={"a": 1.0}))
    kept.put("failed", Answer(None, "the judge is down"))
    file = tmp_path / "rank0.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    for torn in range(1, len(lines[2]) - 1):
        file.write_bytes(b"".join(lines[:2]) + lines[2][:torn])
        again = AnswerCache(tmp_path)
        assert again.get("key2") is None and again.get("key1") == Answer(0.25, raw="é😀", parts={"a": 1.0}, cached=True)
        again.put("key9", Answer(0.9))
        assert AnswerCache(tmp_path).get("key9").value == 0.9 and len(AnswerCache(tmp_path)) == 3
    file.write_bytes(b"\xff\xfe\n[]\nnull\n{}\n" + lines[0] + b'{"key":1}\n')
    assert len(AnswerCache(tmp_path)) == 1


def test_it_does_not_grow_without_bound(tmp_path, monkeypatch):
    kept = AnswerCache(tmp_path, most_bytes=10_000)
    for k in range(1000):
        kept.put(f"{k:032d}", Answer(0.5, raw="logp -0.6931 -0.6931"))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_100
    again = AnswerCache(tmp_path)
    assert again.get(f"{999:032d}") and again.get(f"{960:032d}") and not again.get(f"{0:032d}")
    assert 30 < len(again) < 120
    monkeypatch.setattr(cache, "NEWEST", 50)
    few = AnswerCache(tmp_path / "few")
    for k in range(1000):
        few.put(f"{k:032d}", Answer(0.5))
    assert len(few) == 50 and few.get(f"{950:032d}") and not few.get(f"{949:032d}"), "memory is bounded too"
    assert len(AnswerCache(tmp_path / "few")) == 1000
    kept.put("long", Answer(0.5, raw="x" * 100_000))
    assert len(AnswerCache(tmp_path).get("long").raw) == 500, "texts are cut as in the judgement log"
    kept.put("whole", Answer(None, raw="y" * 4_000), whole=True)
    assert AnswerCache(tmp_path).get("whole").raw == "y" * 4_000


def test_each_rank_writes_its_own_file_and_reads_all(tmp_path, monkeypatch):
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        AnswerCache(tmp_path).put(f"of {rank}", Answer(rank / 4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.jsonl", "rank1.jsonl", "rank2.jsonl"]
    assert [AnswerCache(tmp_path).get(f"of {rank}").value for rank in range(3)] == [0.0, 0.25, 0.5]
    assert len(AnswerCache(tmp_path, most_bytes=1)) == 1, "what is read is bounded too"


def test_a_disk_that_fails_costs_the_cache_and_no_answer(tmp_path):
    (tmp_path / "file").write_text("")
    with JudgeServer() as server, pytest.warns(UserWarning, match="no longer cached"):
        count, verdict = asked(server, cache=str(tmp_path / "file" / "x"))
    assert count == 1 and verdict.first < 0.1
    (tmp_path / "rank0.jsonl").mkdir()
    with pytest.raises(JudgeError, match=r"cache.*cannot be used.*choose another folder"):
        HttpJudge(JudgeConfig(cache=str(tmp_path)))


@pytest.mark.full
def test_a_run_that_was_killed_before_its_checkpoint_asks_for_nothing_twice(tmp_path):
    place = world(tmp_path)
    over = {"reward": {"spec": "vlm_pairwise"}, "eval": {"every": 0}, "checkpoint": {"every": 20}}
    with JudgeServer(delay_s=0.01) as server:
        options = {"endpoints": [server.url], "timeout_s": 5.0, "deadline_s": 20.0, "concurrency": 1}
        code, output = train(recipe(place, "steady", **over, judge=options))
        assert code == 0, output
        whole = len(server.requests)
        folder = place / "runs" / "killed"
        file = recipe(place, "killed", **over, judge=options)
        run = start(
            ["train", str(file)], place / "killed.log", hold=Hold("prefgrpo.run.trainer:TrainingLoop._report", 2)
        )
        run.until_held()
        run.kill()
        kept = sum(len(path.read_bytes().splitlines()) for path in (folder / "verdicts").glob("*.jsonl"))
        done, seen = len(rows(folder)), len(server.requests)
        assert not list((folder / "checkpoints").glob("step_*")) and kept >= done * 2 * 12
        code, output = train(file, "--resume")
        assert code == 0, output
        again = len(server.requests) - seen
        off = recipe(place, "off", **over, judge=options | {"cache": False})
        assert train(off)[0] == 0 and not (place / "runs" / "off" / "verdicts").exists()
    probes = whole - 4 * 2 * 12
    assert again == probes + 4 * 2 * 12 - kept, "of 4 steps × 2 groups × 12 pairs, only the unanswered"
    assert rows(folder) == rows(place / "runs" / "steady"), "all metrics except time/"
    assert [row["time/judge/cache_hits"] for row in rows(folder, timeless=False)][:2] == [24.0, 24.0]


def test_traffic_is_counted(tmp_path):
    done = Counter()
    assert metrics(done) == {}
    with JudgeServer("garbage", count=1) as server, collect_counts(done):
        for _ in range(2):
            ask(judge(server.url, cache=str(tmp_path / "v"), model=MODEL, concurrency=1))
    found = metrics(done)
    assert 0 < found.pop("judge/wasted_share") < 1, "one of two answers was unreadable"
    assert found == {"judge/cache_hits": 1.0, "judge/parse_failure_rate": 0.25}
