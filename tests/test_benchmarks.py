"""The benchmarks run and check results before timing them; the pages match the committed results.

A short real run of the small ops and of the cases on tiny latents; no timing is asserted.
"""

import json

import pytest
import torch

from benchmarks import bench_judge, bench_objectives, blocks, cases, harness, overhead, report, science
from prefgrpo.judge.verdict import Verdict


def test_every_case_compares_and_times(monkeypatch):
    monkeypatch.setattr(cases, "SHAPES", dict.fromkeys(cases.SHAPES, (8, 16)))
    seen = [harness.measure(case, "cpu", 2, seconds=1e-4) for case in cases.cases("cpu", quick=True)]
    ops = {"policy_loss, forward + backward", "winrate_advantage", "sde_step, noise given"}
    assert {r["op"] for r in seen} >= ops
    for r in seen:
        assert {"ours", "eager"} <= set(r["us"]) and min(r["us"].values()) > 0
        assert (r["copy_us"] > 0) == (r["bytes"] > 0)


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(cases.peers, "flow_step", lambda x, *rest: (x * 2, x.flatten(1)[:, 0]))
    latents = cases.Latents("FLUX 512²", 1, torch.float32, torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="would time wrong results"):
        cases.step_given(latents, with_compile=False)


def test_eager_launches_many_ops_and_ours_none_but_itself():
    calls = overhead.calls("cpu")
    assert overhead.counted(calls["sde_step"]) == {"torch_ops": 0, "host_reads": 0}
    assert overhead.counted(calls["sde_step, peers"])["torch_ops"] > 10


def test_the_document_is_rendered_from_the_results(root, tmp_path):
    results = root / "benchmarks" / "results"
    assert json.loads((results / "cpu.json").read_text())["results"]
    report.render(results, tmp_path)
    assert (tmp_path / "benchmarks.md").read_text() == (root / "docs" / "benchmarks.md").read_text()


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
