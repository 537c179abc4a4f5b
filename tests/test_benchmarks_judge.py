"""The judge benchmarks run, on small groups; their pages match the committed results.

No timing is asserted, only that all clients ask the same questions and get every answer, and how many bytes of
images they send.
"""

import json

import numpy as np
import pytest

from benchmarks import bench_judge, blocks, original_client


def test_every_client_gets_all_answers_and_is_timed():
    with bench_judge.echo_server() as url:
        found = bench_judge.measure(url, "echo", rounds=2, size=4, side=64)
    assert set(found["clients"]) == {"ours", *bench_judge.STYLES} and found["pairs"] == 6
    assert all(row["pairs_per_s"] > 0 for row in found["clients"].values())


def test_pictures_travel_once_instead_of_with_every_pair():
    sent = bench_judge.picture_bytes(9, 256)
    pair, group = sent["bytes"]["original, pairs encoded"] / 36, sent["bytes"]["ours"]
    assert sent["bytes"]["original, paths"] == sent["bytes"]["original, pairs encoded"]
    assert group / 9 == pytest.approx(pair / 2, rel=0.01)  # the same images in the same encoding
    assert max(v for name, v in sent["share"].items() if name != "ours") <= 0.125


def test_the_original_asks_our_question_about_its_own_pictures(tmp_path):
    skeleton = bench_judge.skeleton("some-judge")
    urls = [original_client.encode(file) for file in bench_judge.group(tmp_path, np.random.default_rng(0), 2, 64)[1]]
    body = original_client.filled(skeleton, urls)
    parts = [p for p in body["messages"][0]["content"] if p["type"] == "image_url"]
    assert [p["image_url"]["url"] for p in parts] == urls and len(set(urls)) == 2
    assert {k: v for k, v in body.items() if k != "messages"} == {k: v for k, v in skeleton.items() if k != "messages"}
    assert body["model"] == "some-judge"


def test_a_lost_answer_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_judge.original_client, "judge_group", lambda *_: [{"choices": []}])
    with bench_judge.echo_server() as url, pytest.raises(RuntimeError, match="0 of 3 pairs were answered"):
        bench_judge.measure(url, "echo", rounds=2, size=3, side=16)


@pytest.mark.parametrize(
    ("name", "module", "lines"),
    [
        ("client", bench_judge, bench_judge.table),
    ],
)
def test_the_document_is_rendered_from_the_results(root, name, module, lines):
    text = (root / "docs" / "judging.md").read_text()
    assert blocks.rendered(text, name, lines(json.loads(module.RESULTS.read_text()))) == text


def test_a_document_without_marks_is_refused():
    with pytest.raises(ValueError, match="expected the marks <!-- plans --> and <!-- /plans --> once each"):
        blocks.rendered("no marks", "plans", ["x"])
