"""The benchmarks run and check results before timing them; docs/benchmarks.md matches the committed results.

A short real run of the small ops and of the cases on tiny latents; no timing is asserted.
"""

import json

import pytest
import torch

from benchmarks import cases, harness, overhead, report


def test_every_case_compares_and_times(monkeypatch):
    monkeypatch.setattr(cases, "SHAPES", dict.fromkeys(cases.SHAPES, (8, 16)))
    seen = [harness.measure(case, "cpu", 2, seconds=1e-4) for case in cases.cases("cpu", quick=True)]
    ops = {"policy_loss, forward + backward", "winrate_advantage", "affine_step, noise given"}
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
    assert overhead.counted(calls["affine_step"]) == {"torch_ops": 0, "host_reads": 0}
    assert overhead.counted(calls["affine_step, peers"])["torch_ops"] > 10


def test_the_document_is_rendered_from_the_results(root, tmp_path):
    results = root / "benchmarks" / "results"
    assert json.loads((results / "cpu.json").read_text())["results"]
    report.render(results, tmp_path)
    assert (tmp_path / "benchmarks.md").read_text() == (root / "docs" / "benchmarks.md").read_text()
