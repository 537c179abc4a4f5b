"""The comparison of objectives: the statistics computed from a run's rows, and docs/science.md matches the committed
results. The full tier runs one step of a demo recipe through it.
"""

import math

import pytest

from benchmarks import bench_objectives as bench
from prefgrpo.config.loading import load


def run(*accuracies):
    """A run with one evaluation per accuracy, spaced by 10 steps, 1000 calls and 20 seconds."""
    rows = [[10 * k, 1000.0 * k, 20.0 * k, y, 0.5, 0.1, 0.1] for k, y in enumerate(accuracies)]
    facts = {"objective": "nft", "seed": 0, "machine": {"cpu": "one"}}
    return facts | {"columns": bench.MEASURED.names, "evaluations": rows}


def test_what_is_read_from_a_run(monkeypatch):
    monkeypatch.setattr(bench, "STEPS", 40)
    up = run(0.4, 0.6, 0.8, 0.7, 0.9)
    assert bench.reached(up, "calls") == pytest.approx(1500)
    assert bench.reached(up, "seconds") == pytest.approx(30)
    assert bench.reached(run(0.4, 0.6, 0.5, 0.5, 0.5), "calls") is None
    assert math.isnan(bench.reached(run(0.4, 0.6), "calls")), "unknown while the run is unfinished"
    assert bench.fall(up) == pytest.approx(0.1), "target reached at step 15, window ends at step 30"
    assert bench.fall(run(0.4, 0.6, 0.8)) is None, "the run is too short"
    table = bench.table({"nft": [up, run(0.4, 0.5, 0.5, 0.5, 0.6) | {"seed": 1}]})
    assert table[2].startswith("| `nft` | 0, 1 | 40, 40 | 1.5, 1 never | 30, 1 never | 0.750 (0.600–0.900) |"), table[2]
    assert "seed 1, 2 of `nft`" in bench.missing({"nft": [up]})
    assert "seed 0, 1, 2 of `grpo`" in bench.missing({"nft": [up]})


def test_every_objective_is_compared():
    from prefgrpo.objectives import OBJECTIVES

    assert set(bench.NAMES) == set(OBJECTIVES) and all(load(bench.recipe(n)) for n in bench.NAMES)
    assert all(load(bench.recipe(n)).train.objective == n for n in bench.NAMES)
