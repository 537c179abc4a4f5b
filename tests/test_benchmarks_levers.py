"""The benchmark of cost-saving options runs; the plan's page matches its results and explains every large error."""

import json

import pytest

from benchmarks import bench_demo, bench_levers, plan_check
from benchmarks.blocks import rendered


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


def test_the_page_is_the_rendering_of_the_levers():
    found, page = json.loads(bench_levers.JSON.read_text()), bench_levers.PAGE.read_text()
    assert {run["lever"] for run in found["runs"]} == set(bench_levers.LEVERS)
    assert rendered(page, "levers", bench_levers.table(found)) == page


def test_the_plans_table_marks_what_misses():
    rows = [["a run", "someone", "s", 10.0, 12.0], ["another", "someone", "s", 10.0, 14.0]]
    lines = plan_check.table({"flux": rows})
    assert lines[2].endswith("| 10 | 12 | +20% |  |") and lines[3].endswith("| +40% | > 30 % |")
    assert lines[5:] == ["- another: not explained yet."]


def test_the_page_is_the_rendering_of_the_plans_check():
    found, page = json.loads(plan_check.JSON.read_text()), plan_check.PAGE.read_text()
    assert rendered(page, "plan_check", plan_check.table(found)) == page
    assert {"flux", "qwen", "branch", "automodel"} <= found.keys()
    missed = {what for rows in found.values() for what, _, _, real, planned in rows if abs(planned / real - 1) > 0.3}
    assert {what for rows in found.values() for what, *_ in rows if what in plan_check.WHY} == missed, (
        "every estimate that is off by more than 30 % has an explanation, and no other has"
    )


def test_the_page_is_the_rendering_of_the_demo():
    found, page = json.loads(bench_demo.JSON.read_text()), bench_demo.PAGE.read_text()
    assert rendered(page, "demo", bench_demo.table(found)) == page
