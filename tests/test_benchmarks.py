"""The benchmarks run and check results before timing them; the pages match the committed results.

A short real run of the small ops and of the cases on tiny latents; no timing is asserted.
"""

import dataclasses
import json

import pytest

import benchmarks.__main__ as ops
from benchmarks import bench_judge, bench_objectives, blocks, harness, science, test_advantage, test_sde_step
from prefgrpo.judge.verdict import Verdict


def test_every_kind_of_case_compares_and_times(monkeypatch):
    monkeypatch.setattr(test_sde_step, "SHAPES", dict.fromkeys(test_sde_step.SHAPES, (8, 16)))
    monkeypatch.setitem(harness.CACHE, "cpu", 2 << 20)
    cases = [*list(test_sde_step.cases("cpu"))[4:8], *test_advantage.cases("cpu")]
    for case in cases:
        quick = {name: f for name, f in case.variants.items() if name != "compile"}
        seen = harness.measure(dataclasses.replace(case, variants=quick), "cpu", 2)
        assert set(seen["us"]) == {*quick, *(("copy",) if case.bytes else ())}
        assert min(min(quartiles) for quartiles in seen["us"].values()) > 0
        assert ops.line(seen).startswith(f"| {case.op} | {case.shape}")


def test_a_wrong_result_is_not_timed():
    (case,) = test_advantage.cases("cpu")
    wrong = dataclasses.replace(case, variants={**case.variants, "compile": lambda i: 2 * test_advantage.eager(i)})
    with pytest.raises(RuntimeError, match="compile: differs from ours"):
        harness.measure(wrong, "cpu", 2)


def test_the_page_is_rendered_from_the_results():
    assert json.loads((ops.RESULTS / "cpu.json").read_text())["results"]
    assert ops.PAGE.read_text() == ops.page()


def test_a_lost_answer_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_judge.HttpJudge, "judge_group", lambda *_: [Verdict(None, "lost")])
    with bench_judge.echo_server() as url, pytest.raises(RuntimeError, match="0 of 3 pairs were answered"):
        bench_judge.measure(url, "echo", rounds=2, size=3, side=16)


def test_blocks_of_other_pages_are_rendered_from_the_results(root):
    client = bench_judge.table(json.loads(bench_judge.RESULTS.read_text()))
    found = [("science", "client", client)]
    found += [("science", "objectives", bench_objectives.block(bench_objectives.read(bench_objectives.RESULTS)))]
    found += [("science", f"science-{key}", science.block(key)) for key in science.EXPERIMENTS]
    for page, name, block in found:
        text = (root / "docs" / f"{page}.md").read_text()
        assert blocks.rendered(text, name, block) == text, f"docs/{page}.md differs from benchmarks/results"
