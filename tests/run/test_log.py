"""metrics.jsonl, whose lines must each appear exactly once and whole, also after crashes, full disks and edits by hand.

A line that is not a row costs only itself, wherever it stands; only a last line without its end is normal, because a
killed run leaves one. Expected rows are those that the test wrote.

Trackers get the stored images unchanged, pixel by pixel, with the row they belong to; a resumed run continues the same
run in the tracker; a missing library is reported before anything starts. TensorBoard is the real library. Weights &
Biases is tested offline where installed, and always with a stub module with its functions' signatures (wandb 0.31) that
fails on any other argument.
"""

import importlib.machinery
import io
import json
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from world import ALONE

from prefgrpo.config.loading import from_dict
from prefgrpo.run.errors import tracker_errors
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.log import Log, TensorBoard, open_trackers, read_metrics, step_line
from prefgrpo.update.metrics import policy_metrics
from tests.report.synthetic import eval_row, make_run, train_row

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


# ---- trackers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A run folder with one evaluation's images; tests rewrite its metrics."""
    return RunFolder(make_run(tmp_path / "run", steps=2, every=2))


def config(**over):
    return from_dict({"model": "m", "data": {"prompts": "p"}, "name": "run", **over})


def report(folder, config, start=0):
    """Logs the rows of two steps as the trainer does."""
    log = Log(folder, 2, start, trackers=open_trackers(config, folder, start), active=True)
    for step in range(start + 1, 3):
        values = train_row(step)
        log.row("train", step, {k: v for k, v in values.items() if k not in ("kind", "step")})
    log.row("eval", 2, {k: v for k, v in eval_row(2, 2, "test").items() if k not in ("kind", "step")})
    log.close()


def kept(folder):
    with np.load(folder.report_images("test", 2)) as file:
        beside = np.concatenate([file["before"], file["now"]], axis=-2)
    return beside, json.loads(folder.prompts("test").read_text())


def test_tensorboard_shows_numbers_and_images(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(folder, config())
    events = EventAccumulator(str(folder.tensorboard), size_guidance={"images": 0})
    events.Reload()
    images, _ = kept(folder)
    for k, image in enumerate(images):
        event = events.Images(f"images/test/{k + 1}")[-1]
        assert event.step == 2
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(event.encoded_image_string))), image)
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([train_row(step)["loss"] for step in (1, 2)])


class Recorder(types.ModuleType):
    """A stub module with the functions of wandb that we call, and their parameters."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=name)
        self.calls = []
        self.logged = {}

    def init(self, project, name=None, config=None, resume="never", **own):
        assert resume in ("allow", "never", "must") and set(own) == {"id", "dir"}
        self.calls.append({"project": project, "name": name, "config": config, "resume": resume, **own})
        return self

    def log(self, values, step=None):
        for key, value in values.items():
            self.logged.setdefault(key, []).append((step, value))

    def finish(self):
        self.calls.append("finish")

    def Image(self, value, caption=None):
        assert value.dtype == np.uint8 and value.ndim == 3
        return value, caption


def test_a_run_sends_its_samples_with_their_rewards_and_every_denoising_step(trainer, monkeypatch):
    """Steps 1 (the first), 2 and 4 (with an evaluation): the pixels that were scored, and their values in this order.
    Metrics of single denoising steps are the trackers' only, and average to those of the whole step."""
    module = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)
    rewards = "jpeg_compressibility:1,jpeg_incompressibility:0"
    one = trainer(trackers=["wandb"], rewards=rewards, train={"steps": 4, "updates_per_rollout": 2})
    seen = []
    finish = one.scorer.finish
    one.scorer.finish = lambda *given: seen.append(finish(*given)) or seen[-1]
    one.train()
    for k in range(2):
        shown = module.logged[f"samples/{k + 1}"]
        assert [step for step, _ in shown] == [1, 2, 4]
        for step, (pixels, caption) in shown:
            members = list(seen[step - 1].samples.values())[k]
            assert np.array_equal(pixels, np.concatenate([members[m].media.pixels for m in range(4)], axis=1))
            prompt, first, second = caption.split("\n")
            assert prompt == members[0].prompt and first.startswith("jpeg_compressibility -")
            values = seen[step - 1].values["jpeg_incompressibility"][k]
            assert [float(word) for word in second.split()[1:]] == pytest.approx(values, rel=0.01)
    for name in ("ratio_mean", "clip_fraction", "approx_kl"):
        by_step = [[value for _, value in module.logged[f"train/steps/{k:02d}/{name}"]] for k in range(2)]
        whole = [value for _, value in module.logged[f"train/policy/{name}"]]
        assert np.mean(by_step, axis=0) == pytest.approx(whole, rel=1e-6), name
        assert by_step[0] != by_step[1], name
    assert not any("steps/" in line for line in one.folder.metrics.read_text().splitlines())


def test_a_service_gets_what_the_run_kept_and_is_resumed(folder, monkeypatch):
    module = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    given = config(trackers=["wandb"])
    report(folder, given)
    images, prompts = kept(folder)
    for k, (image, prompt) in enumerate(zip(images, prompts, strict=True), 1):
        ((step, (pixels, caption)),) = module.logged[f"images/test/{k}"]
        assert step == 2 and caption == prompt and np.array_equal(pixels, image)
    assert module.logged["train/grad_norm"] == [(step, train_row(step)["grad_norm"]) for step in (1, 2)]
    report(folder, given, start=1)
    first, _, second, _ = module.calls
    assert (first["resume"], second["resume"]) == ("never", "allow") and first["project"] == "mine"
    assert first.get("id") == second.get("id") and first["config"]["name"] == "run"
    clips = np.random.default_rng(0).integers(0, 256, (12, 3, 16, 16, 3), dtype=np.uint8)
    np.savez(folder.report_images("test", 2), before=clips, now=clips)
    report(folder, given)
    (pixels, _) = module.logged["images/test/1"][-1][1]
    assert np.array_equal(pixels, np.concatenate([*clips[0], *clips[0]], axis=1)), "frames side by side"
    assert module.calls[-2]["id"] != first["id"], "a fresh run reused the id"


def test_wandb_offline(folder, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    report(folder, config(trackers=["wandb"]))
    (place,) = (folder.root / "wandb").glob("offline-run-*")
    stored = {np.asarray(Image.open(file)).tobytes() for file in place.glob("files/media/images/images/test/*.png")}
    assert {image.tobytes() for image in kept(folder)[0]} <= stored


def test_a_library_that_is_absent_is_named_at_the_start(monkeypatch):
    monkeypatch.setattr("prefgrpo.run.errors.find_spec", lambda name: None)
    (problem,) = tracker_errors(config(trackers=["wandb"]))
    assert problem == "trackers: wandb is not installed; run `pip install wandb`, or remove it from trackers"
