"""The benchmark of levers measures and renders; both pages have the place of its tables."""

import pytest

from benchmarks import bench_levers, plan_check
from benchmarks.blocks import split


@pytest.mark.full
def test_a_lever_is_timed_weighed_and_compared():
    name = "`train.reuse_rollout_forward`"
    run = bench_levers.measure(name, "tiny", 1)
    assert run["gradient"]["bitwise"] and run["gradient"]["cosine"] == pytest.approx(1.0)
    off, on = run["memory_mib"]
    assert on > off > 0 and run["ratio"]["update"] < 1.0 and run["seconds"]["step"] > run["seconds"]["update"] > 0
    machine = {"device": "a CPU", "load": 1.0, "torch": "2"}
    lines = bench_levers.table({"machine": machine, "rounds": 1, "runs": [run]})
    assert lines[2].startswith(f"| {name} | tiny | ×0.") and "| bitwise | auto" in lines[2]


def test_the_pages_have_a_place_for_the_tables():
    for page, block in ((bench_levers.PAGE, "levers"), (plan_check.PAGE, "plan_check")):
        split(page.read_text(), block)
    rows = [["a run", "someone", "s", 10.0, 12.0], ["another", "someone", "s", 10.0, 14.0]]
    lines = plan_check.table({"rows": rows})
    assert lines[2].endswith("| 10 | 12 | +20% |  |") and lines[3].endswith("| +40% | misses |")
