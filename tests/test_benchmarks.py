"""The benchmarks run and check results before timing them; docs/benchmarks.md matches the committed results.

A short real run of the small ops and of the cases on tiny latents; no timing is asserted.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import cases, harness, overhead, report


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


@pytest.mark.full
def test_pytest_benchmark_times_the_same_cases(root, tmp_path):
    """JSON with one group per case; runs two cheap cases."""
    quick = ["--benchmark-min-rounds=2", "--benchmark-max-time=0.01", f"--benchmark-json={tmp_path / 'out.json'}"]
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "-q", "-p", "no:cacheprovider", *quick]
    command += ["-k", "winrate or (step_given and 512 and x1 and out)"]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = [one["group"] for one in json.loads((tmp_path / "out.json").read_text())["benchmarks"]]
    step, winrate = "sde_step, noise given · FLUX 512² ×1 · x fp32, v bf16", "winrate_advantage · 48 groups × 24"
    assert sorted(groups) == [step, *[f"{winrate} · fp32"] * 2]


def test_eager_launches_many_ops_and_ours_none_but_itself():
    calls = overhead.calls("cpu")
    assert overhead.counted(calls["sde_step"]) == {"torch_ops": 0, "host_reads": 0}
    assert overhead.counted(calls["sde_step, peers"])["torch_ops"] > 10


def test_the_document_is_rendered_from_the_results(root, tmp_path):
    results = root / "benchmarks" / "results"
    assert json.loads((results / "cpu.json").read_text())["results"]
    report.render(results, tmp_path)
    assert (tmp_path / "benchmarks.md").read_text() == (root / "docs" / "benchmarks.md").read_text()
