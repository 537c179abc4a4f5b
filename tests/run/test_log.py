"""metrics.jsonl, whose lines must each appear exactly once and whole, also after crashes, full disks and edits by hand.

A line that is not a row costs only itself, wherever it stands; only a last line without its end is normal, because a
killed run leaves one. Expected rows are those that the test wrote.
"""

import json
from types import SimpleNamespace

import pytest
from tiny_run import ALONE

from prefgrpo.run.folder import RunFolder
from prefgrpo.run.log import Log, read_metrics, step_line
from prefgrpo.run.metrics import policy_metrics
from prefgrpo.run.trackers import TensorBoard

NAN = float("nan")
ROWS = [{"kind": "train", "step": step, "loss": 0.5} for step in (1, 2, 3)]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
FILES = {
    "whole": (LINES, [1, 2, 3], []),
    "torn end": ([*LINES, b'{"kind": "tr'], [1, 2, 3], []),
    "last line without its end, but whole": ([*LINES[:2], LINES[2][:-1]], [1, 2, 3], []),
    "bytes that are no text at the end": ([*LINES, b'\xff\xfe\x80{"ki'], [1, 2, 3], []),
    "zeros at the end": ([*LINES, bytes(100)], [1, 2, 3], []),
    "torn line in the middle": ([LINES[0], b'{"kind": "train", "st\n', LINES[2]], [1, 3], [2]),
    "bytes that are no text in the middle": ([LINES[0], b"\xff\xfe\x80\n", b"\n", LINES[2]], [1, 3], [2]),
    "JSON that is not a row": (
        [b'3\n[1]\nnull\n"x"\n{"step": 4}\n{"kind": "train", "step": true}\n{"kind": ["train"], "step": 1}\n', *LINES],
        [1, 2, 3],
        [1, 2, 3, 4, 5, 6, 7],
    ),
}


def log(folder, start=0):
    return Log(RunFolder(folder), 10, start, active=True)


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_line_costs_only_itself(tmp_path, case):
    lines, steps, wanted = FILES[case]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(lines))
    damaged = []
    assert [row["step"] for row in read_metrics(file, damaged)] == steps and damaged == wanted
    resumed = log(tmp_path, start=2)
    for row in ROWS:
        resumed.row("train", row["step"], {"loss": 0.5})
    resumed.close()
    assert file.read_bytes() == b"".join(LINES)


def test_rows_are_whole_lines_and_not_finite_is_null(tmp_path):
    one = log(tmp_path)
    one.row("train", 1, {"a": NAN, "b": float("inf"), "c": 0.5, "d": "text"})
    one.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"kind": "train", "step": 1, "a": null, "b": null, "c": 0.5, "d": "text"}\n'


def test_a_resumed_log_drops_what_is_done_again_and_repeats_nothing(tmp_path):
    one = log(tmp_path)
    for step in (1, 2, 3):
        one.row("train", step, {"loss": float(step)})
        one.row("eval", step, {"set": "dev", "x": float(step)})
    one.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "lo')  # killed in the middle of a write
    two = log(tmp_path, start=2)
    two.row("eval", 2, {"set": "dev", "x": 2.0})  # the resumed run repeats its evaluation
    two.row("eval", 2, {"set": "test", "x": 9.0})
    two.row("train", 3, {"loss": 33.0})
    two.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["step"], r.get("set")) for r in found] == [
        ("train", 1, None), ("eval", 1, "dev"), ("train", 2, None), ("eval", 2, "dev"), ("eval", 2, "test"),
        ("train", 3, None),
    ]  # fmt: skip
    assert found[-1]["loss"] == 33.0
    log(tmp_path, start=0).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [] == read_metrics(tmp_path / "nowhere")


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, monkeypatch):
    """TensorBoard's reader hides the steps that the resumed run repeats, and keeps the one it resumed from."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        now = 1.7e9 + start  # TensorBoard reads event files in the order of the timestamps in their names
        clock = SimpleNamespace(time=lambda now=now: now)
        monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
        one = Log(RunFolder(tmp_path), 10, start, trackers=[TensorBoard(RunFolder(tmp_path), start)], active=True)
        for step in steps:
            one.row("train", step, {"loss": float(step), "set": "text"})
        one.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4]


def test_a_kind_of_alarm_is_printed_once(tmp_path, capsys):
    one = log(tmp_path)
    for step in (1, 2):
        one.once(f"WARNING: step {step}", kind="many missing")
    one.close()
    assert capsys.readouterr().out == "WARNING: step 1\n"


def test_the_line_of_a_step_shows_what_was_measured():
    found = policy_metrics([], ALONE) | {"reward/missing": 0.0}
    one = {"grad_norm": 0.0, "reward/x": 0.5, "reward/x_std": 0.0, 'reward/"y_std"': 0.25, 'reward/"y_std"_std': 0.125}
    line = step_line(3, 100, found | one, {"rollout": 1.0}, 65.0)
    assert line.startswith("step   3/100 (3%, 01:05 left) · x 0.500 · y_std 0.250±0.125 · clipped 0% · ")
    assert "nan" not in line
    idle = step_line(3, 100, found | {"samples_trained": 0.0}, {})
    assert "nothing to train on: no group's rewards differ" in idle and "grad" not in idle
    speed = {"time/images_per_s": 12.34, "time/mfu": 0.413, "grad_norm": 0.0, "updates_skipped": 0.0, "updates": 2.0}
    whole = step_line(3, 100, found | speed, {"rollout": 1.0})
    assert whole.endswith("1.00 s (rollout 1.00) · 12.3 images/s · MFU 41%") and "skipped" not in whole
    bad = step_line(3, 100, found | {"updates_skipped": 1.0, "updates": 2.0}, {})
    assert " · 1 of 2 updates skipped: gradient not finite · " in bad and "grad 0" not in bad
