"""What trackers receive: numbers, images or clips, and verdict tables, read back from the files or calls they produce.

Why these cases: the stored images must be sent unchanged, pixel by pixel, with the row they belong to; a resumed run
must continue the same run in the tracker; and a missing library must be reported before anything starts. TensorBoard is
the real library. Weights & Biases and Trackio are tested offline where installed, and always with stub modules with
their functions' signatures (wandb 0.31, trackio 0.43) that fail on any other argument.
"""

import importlib.machinery
import io
import json
import sys
import types

import numpy as np
import pytest
from PIL import Image
from report_run import eval_row, make_run, outcomes, train_row

from prefgrpo.config.loading import from_dict
from prefgrpo.run import trackers
from prefgrpo.run.log import Log
from prefgrpo.run.run_folder import RunFolder
from prefgrpo.run.trackers import open_trackers


@pytest.fixture
def folder(tmp_path):
    """A run folder with one evaluation's images and answers and one step's groups; tests rewrite its metrics."""
    folder = make_run(tmp_path / "run", steps=2, every=2)
    outcomes(folder, "test", 2)
    return RunFolder(folder)


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


def test_tensorboard_shows_images_clips_and_verdicts(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clips = np.random.default_rng(0).integers(0, 256, (2, 12, 3, 16, 16, 3), dtype=np.uint8)
    for clip in (False, True):
        if clip:
            np.savez(folder.report_images("test", 2), before=clips[0], now=clips[1])
        report(folder, config())
        events = EventAccumulator(str(folder.tensorboard), size_guidance={"images": 0, "tensors": 0})
        events.Reload()
        images, prompts = kept(folder)
        for k in (0, len(images) - 1):
            event = events.Images(f"eval/test/{k + 1}")[-1]
            picture = Image.open(io.BytesIO(event.encoded_image_string))
            assert event.step == 2 and getattr(picture, "n_frames", 1) == (3 if clip else 1)
            if not clip:
                np.testing.assert_array_equal(np.asarray(picture), images[k])
        text = events.Tensors("eval/test/verdicts/text_summary")[-1].tensor_proto.string_val[0].decode()
        assert "|prompt|win by judge|win by scenes|judge|shown first|P(first)|no verdict because|answer|" in text
        assert f"|{prompts[0]}|1.0|0.5|vlm_pairwise|after|0.9||answer 0 after|" in text
    assert "train/groups/2" in events.Tags()["images"] and "train/loss" in events.Tags()["scalars"]


class Recorder(types.ModuleType):
    """A stub module with the functions of wandb or trackio that we call, and their parameters."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=name)
        self.calls, self.logged = [], {}

    def init(self, project, name=None, config=None, resume="never", **own):
        assert resume in ("allow", "never", "must") and set(own) <= (
            {"id", "dir"} if self.__name__ == "wandb" else set()
        )
        self.calls.append({"project": project, "name": name, "config": config, "resume": resume, **own})
        return self

    def log(self, values, step=None):
        for key, value in values.items():
            assert self.__name__ == "wandb" or not isinstance(value, list), "Trackio drops lists of media"
            self.logged.setdefault(key, []).append((step, value))

    def finish(self):
        self.calls.append("finish")

    def Image(self, value, caption=None):
        assert value.dtype == np.uint8
        return ("image", value, caption)

    def Video(self, value, caption=None, fps=None, format=None):
        return ("video", Image.open(value).n_frames, caption, format)

    def Table(self, columns=None, data=None):
        return columns, data


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_what_the_run_kept_and_is_resumed(folder, name, monkeypatch):
    module = Recorder(name)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    given = config(tensorboard=False, trackers=[name])
    report(folder, given)
    images, prompts = kept(folder)

    def gallery(key):
        if name == "wandb":
            return module.logged[f"{key}/images"][-1]
        each = [module.logged[f"{key}/{k}"][-1] for k in range(1, 20) if f"{key}/{k}" in module.logged]
        return each[0][0], [one for _, one in each]

    step, shown = gallery("eval/test")
    assert step == 2 and [caption for *_, caption in shown] == prompts
    for (kind, pixels, _), wanted in zip(shown, images, strict=True):
        assert kind == "image" and np.array_equal(pixels, wanted)
    ((_, (columns, rows)),) = module.logged["eval/test/verdicts"]
    assert len(rows) == 2 * len(prompts) and all(len(row) == len(columns) for row in rows)
    assert rows[2][columns.index("P(first)")] == 0.5 and rows[2][0] == prompts[1], "the second prompt is a tie"
    groups = gallery("train/groups")[1]
    with np.load(folder.group(2)) as file:
        best = file["images"][0][np.argmax(file["rates"][0])]
    assert np.array_equal(groups[0][1][:, : best.shape[1]], best) and "win rates" in groups[0][2]
    assert module.logged["train/grad_norm"] == [(step, train_row(step)["grad_norm"]) for step in (1, 2)]
    report(folder, given, start=1)
    first, _, second, _ = module.calls
    assert (first["resume"], second["resume"]) == ("never", "allow") and first["project"] == "mine"
    assert first.get("id") == second.get("id") and first["config"]["name"] == "run"
    clips = np.random.default_rng(0).integers(0, 256, (12, 3, 16, 16, 3), dtype=np.uint8)
    np.savez(folder.report_images("test", 2), before=clips, now=clips)
    report(folder, given)
    assert gallery("eval/test")[1][0] == ("video", 3, prompts[0], "gif")
    assert name == "trackio" or module.calls[-2]["id"] != first["id"], "a fresh run reused the id"


def test_wandb_offline(folder, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    report(folder, config(tensorboard=False, trackers=["wandb"]))
    (place,) = (folder.root / "wandb").glob("offline-run-*")
    images, prompts = kept(folder)
    stored = {np.asarray(Image.open(file)).tobytes() for file in place.glob("files/media/images/eval/test/*.png")}
    assert {image.tobytes() for image in images} <= stored
    (table,) = place.glob("files/media/table/eval/test/*.json")
    assert json.loads(table.read_text())["data"][0][0] == prompts[0]


def test_trackio_on_this_machine(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    report(folder, config(tensorboard=False, trackers=["trackio"]))
    images, _ = kept(folder)
    stored = {np.asarray(Image.open(file).convert("RGB")).tobytes() for file in (tmp_path / "trackio").rglob("*.png")}
    assert {image.tobytes() for image in images} <= stored


def test_a_library_that_is_absent_is_named_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    (problem,) = trackers.config_errors(config(trackers=["wandb"]))
    assert problem == "trackers: wandb is not installed; run `pip install wandb`, or remove it from trackers"
    monkeypatch.undo()
    (tmp_path / "no_such_library").mkdir()  # like ./wandb, which offline runs create
    monkeypatch.syspath_prepend(tmp_path)
    lacking = types.SimpleNamespace(trackers=("no_such_library",))
    assert "no_such_library is not installed" in trackers.config_errors(lacking)[0]
