"""What is written beside the training: pictures of the report, initial images, trackers.

Why these cases: a slow disk or tracker must not hold up the next step; what could not be written must end the run with
its reason, as it did when the loop itself wrote; and what a later process needs, the initial images, must be there
before a checkpoint is. The files must be those of a run whose disk is fast.
"""

import errno
import sys
import threading
import zipfile
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from world import BRIGHTER, rows

from prefgrpo.data import atomic
from prefgrpo.data.writer import MOST, Writer
from prefgrpo.ending import TrainingStopped
from prefgrpo.run import evaluation, groups
from tests.run.test_log import Recorder

SECONDS = 20.0
"""How long a held-up job waits before the test counts as failed."""


def saved_by(monkeypatch, save):
    """Let the run write its pictures with save(path, **arrays)."""
    for module in (groups, evaluation):
        monkeypatch.setattr(module, "save_images", save)


def arrays(folder):
    """{relative path: {name: array}} of all stored pictures."""
    return {str(file.relative_to(folder)): dict(np.load(file)) for file in sorted(folder.rglob("*.npz"))}


@pytest.mark.full
def test_the_next_step_is_trained_while_a_disk_and_a_tracker_stand_still(trainer, monkeypatch):
    """They go on only when step 2 is done; the pictures are those of steps 1 and 3, before and after."""
    over = {"rewards": BRIGHTER, "train": {"steps": 3}, "eval": {"every": 3, "rewards": "jpeg_incompressibility"}}
    over["checkpoint"] = {"every": 3}
    plain = trainer("plain", **over)
    plain.train()
    done = threading.Event()
    late = []
    module = Recorder("wandb")

    def held(function, *given, **named):
        if not done.wait(SECONDS):
            late.append(function)
        return function(*given, **named)

    def on_step(step, metrics):
        if step == 2:
            done.set()

    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(module, "log", partial(held, module.log))
    saved_by(monkeypatch, partial(held, atomic.save_images))
    one = trainer("held", trackers=["wandb"], callbacks={"on_step": on_step}, **over)
    one.train()
    assert not late, "the loop waited for a picture or a tracker"
    stored = arrays(one.folder.root)
    expected = arrays(plain.folder.root)
    assert {"groups/step_000001.npz", "groups/step_000003.npz", "eval/dev_000003.npz"} < stored.keys()
    assert stored.keys() == expected.keys()
    for file, content in expected.items():
        assert all(np.array_equal(stored[file][name], array) for name, array in content.items()), file
        with zipfile.ZipFile(one.folder.root / file) as archive:
            assert {part.compress_type for part in archive.infolist()} == {zipfile.ZIP_STORED}, "deflating takes longer"
    assert [step for step, _ in module.logged["train/loss"]] == [1, 2, 3], "in their order"
    assert {"images/dev/1", "samples/1"} < module.logged.keys() and module.calls[-1] == "finish"
    assert rows(one.folder.root) == rows(plain.folder.root)


@pytest.mark.parametrize("what", ["step_000001", "dev_000000", "000000"])
def test_a_picture_that_cannot_be_written_ends_the_run_with_its_reason(trainer, monkeypatch, what):
    """Of a group, of an evaluation, of the starting policy: on a full disk, noticed before the run ends."""

    def save(path: Path, **given):
        if path.stem == what:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        atomic.save_images(path, **given)

    saved_by(monkeypatch, save)
    one = trainer(rewards=BRIGHTER, train={"steps": 3}, eval={"every": 3, "rewards": "jpeg_incompressibility"})
    with pytest.raises(TrainingStopped, match=r"disk full after step \d: .*No space left.*\nFree disk space") as caught:
        one.train()
    assert "with --resume" in str(caught.value) and one.folder.report.is_file()


@pytest.mark.full
def test_a_checkpoint_comes_after_the_initial_images(trainer, monkeypatch):
    """A run that is killed after its first checkpoint could not go on without them."""
    started = threading.Event()
    events = []

    def save(path: Path, **given):
        if path.parent.name.endswith("_before"):
            started.wait(1.0)
        atomic.save_images(path, **given)
        events.append(path.parent.name)

    saved_by(monkeypatch, save)
    one = trainer(rewards=BRIGHTER, train={"steps": 2}, eval={"every": 2}, checkpoint={"every": 1})
    true_save = one.checkpoints.save

    def saving(step, *given):
        events.append(step)
        return true_save(step, *given)

    one.checkpoints.save = saving
    one.train()
    assert events.index(1) > max(k for k, event in enumerate(events) if event == "dev_before")
    assert events.count("dev_before") == 3


def test_jobs_are_done_in_order_and_few_with_pictures_are_kept():
    writer = Writer()
    go = threading.Event()
    done = []
    taken = threading.Event()
    writer.put(go.wait)
    for k in range(MOST):
        writer.put(partial(done.append, k), pictures=True)
    writer.put(partial(done.append, "number"))

    def one_more():
        writer.put(partial(done.append, "last"), pictures=True)
        taken.set()

    thread = threading.Thread(target=one_more)
    thread.start()
    assert not taken.wait(0.1) and not done, "one picture more than memory is planned for"
    go.set()
    thread.join()
    writer.wait()
    assert done == [*range(MOST), "number", "last"]


def test_what_a_job_raises_is_raised_once_where_the_writer_is_called():
    writer = Writer()
    done = []

    def fails():
        raise ValueError("broken")

    failed = writer.put(fails)
    wait([failed])
    with pytest.raises(ValueError, match="broken"):
        writer.put(partial(done.append, 0))
    writer.check()
    writer.put(partial(done.append, 1))
    writer.put(fails)
    writer.close()
    assert done == [1], "closing lets jobs end and raises nothing"
