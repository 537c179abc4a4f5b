"""The judge benchmark runs, on small groups; its page matches the committed results. No timing is asserted."""

import json

import pytest

from benchmarks import bench_judge, blocks
from prefgrpo.judge.verdict import Verdict


def test_every_pair_is_answered_and_timed():
    with bench_judge.echo_server() as url:
        found = bench_judge.measure(url, "echo", rounds=2, size=4, side=64)
    assert found["pairs_per_s"] > 0 and found["client_ms_per_pair"] > 0


def test_pictures_travel_once_instead_of_with_every_pair():
    assert bench_judge.picture_bytes(9, 256) == pytest.approx(9 / 2 * bench_judge.picture_bytes(2, 256), rel=0.01)


def test_a_lost_answer_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_judge.HttpJudge, "judge_group", lambda *_: [Verdict(None, "lost")])
    with bench_judge.echo_server() as url, pytest.raises(RuntimeError, match="0 of 3 pairs were answered"):
        bench_judge.measure(url, "echo", rounds=2, size=3, side=16)


def test_the_document_is_rendered_from_the_results(root):
    text = (root / "docs" / "science.md").read_text()
    found = json.loads(bench_judge.RESULTS.read_text())
    assert blocks.rendered(text, "client", bench_judge.table(found)) == text


def test_a_document_without_marks_is_refused():
    with pytest.raises(ValueError, match="expected the marks <!-- plans --> and <!-- /plans --> once each"):
        blocks.rendered("no marks", "plans", ["x"])
