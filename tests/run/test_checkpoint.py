"""Checkpoints appear whole or not at all, though they are written while training goes on; a run that is killed resumes
as if nothing had happened.

Why these cases: a preempted job normally ends with kill -9, at any instruction: before the first checkpoint, between
two, while one is being written, while old ones are being removed, at the very end. After each, `--resume` must
reproduce the metrics of an uninterrupted run bit for bit. Copies and disks also fail: every checkpoint file is lost or
cut off once.
Kills at named points, of two processes, are in tests/runs/test_kill.py.
"""

import errno
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from ranks import Hold, start, train, trained
from world import ALONE, hidden, merged, recipe, rows, tree, weights

import prefgrpo
from prefgrpo.data.atomic import write_folder
from prefgrpo.ending import TrainingStopped
from prefgrpo.run import checkpoint
from prefgrpo.run.checkpoint import CheckpointError, Checkpoints, claim, read
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.log import Log

JUDGE = Path(prefgrpo.__file__).parent / "tiny" / "assets" / "judge"
STATE = {"param.a": torch.arange(6.0).view(2, 3), "adamw.step.a": torch.tensor(3.0)}


def export(folder: Path) -> None:
    (folder / "lora").mkdir()
    (folder / "lora" / "w.safetensors").write_bytes(b"weights" * 99)


def save_one(folder: Path, step: int, keep: int = 2, state: dict[str, torch.Tensor] = STATE) -> Path:
    checkpoints = Checkpoints(RunFolder(folder), ALONE, keep)
    checkpoints.save(step, state, {"updates": step})
    checkpoints.finished(wait=True)
    return RunFolder(folder).checkpoint(step)


def read_one(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    tensors = {name: torch.full_like(tensor, -1.0) for name, tensor in STATE.items()}
    return tensors, read(path, tensors, ALONE)


# ---- the files ----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_read(tmp_path):
    tensors, meta = read_one(save_one(tmp_path, 7))
    (tmp_path / "file").touch()
    modes = {p.stat().st_mode for p in tmp_path.rglob("*") if p.is_file()}
    assert modes == {(tmp_path / "file").stat().st_mode}, "weights have the permissions of any other new file"
    assert meta["step"] == meta["updates"] == 7
    assert tensors.keys() == STATE.keys() and all(torch.equal(tensors[k], STATE[k]) for k in STATE)


def test_old_ones_go_in_order_of_steps_and_foreign_folders_stay(tmp_path):
    (tmp_path / "checkpoints" / "step_old").mkdir(parents=True)
    for step in (1, 999_999, 1_000_000):
        save_one(tmp_path, step)
    assert [p.name for p in RunFolder(tmp_path).all_checkpoints()] == ["step_999999", "step_1000000"]
    assert RunFolder(tmp_path).latest().name == "step_1000000" and (tmp_path / "checkpoints" / "step_old").is_dir()
    assert RunFolder(tmp_path / "nothing").latest() is None


def test_an_old_one_that_another_process_reads_does_not_stop_the_run(tmp_path, monkeypatch):
    """On NFS, a folder with an open file cannot be removed; the next resume removes it."""
    save_one(tmp_path, 1, keep=1)

    def busy(path, **options):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", busy)
        assert save_one(tmp_path, 2, keep=1).is_dir()
    assert [p.name for p in RunFolder(tmp_path).all_checkpoints()] == ["step_000002"] and hidden(tmp_path)
    (tmp_path / "config.yaml").touch()
    os.close(claim(RunFolder(tmp_path), resume=True))
    assert hidden(tmp_path) == [".lock"]


def test_one_that_exists_is_never_replaced(tmp_path):
    path = save_one(tmp_path, 3)
    before = tree(path)
    save_one(tmp_path, 3, state={"param.a": torch.zeros(1)})
    assert tree(path) == before


DAMAGE = {
    "truncate": lambda f: f.write_bytes(f.read_bytes()[:-1]),
    "empty": lambda f: f.write_bytes(b""),
    "remove": lambda f: f.unlink(),
    "grow": lambda f: f.write_bytes(f.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_a_file_that_is_not_whole_is_seen(tmp_path, name, damage):
    save_one(tmp_path, 2)
    path = save_one(tmp_path, 4)
    DAMAGE[damage](path / name)
    with pytest.raises(CheckpointError) as caught:
        read_one(path)
    assert str(path) in str(caught.value) and name in str(caught.value)


# ---- kill -9 ------------------------------------------------------------------------------------------------------


def judged(place: Path, name: str) -> Path:
    """Recipe with everything that resuming must restore: EMA, KL, warm-up, windows, several updates, a judge."""
    options = {
        "rewards": [
            {"name": "vlm_pairwise", "options": {"template": "caption_match"}},
            {"name": "jpeg_compressibility", "weight": 0.5},
        ],
        "judge": {"endpoints": [], "model": str(JUDGE)},
        "rollout": {"steps": 4, "window_size": 2, "prompts_per_step": 2},
        "train": {"steps": 5, "ema_decay": 0.7, "kl_coef": 0.1, "warmup_steps": 3, "updates_per_rollout": 2},
        "eval": {"rewards": "vlm_pairwise,jpeg_incompressibility", "final_prompts": str(place / "dev.txt")},
    }
    return recipe(place, name, **options)


def full(place: Path, name: str) -> Path:
    """Recipe of full fine-tuning."""
    return recipe(place, name, train={"lora_rank": 0, "lr": 1e-4})


KINDS = {"lora": judged, "full": full}


@pytest.fixture(scope="module")
def truths(place):
    """kind → folder of the uninterrupted run of that kind, created on first use."""

    def truth(kind):
        if not (place / "runs" / kind).is_dir():
            trained(KINDS[kind](place, kind))
        return place / "runs" / kind

    return truth


def same_as(truth: Path, run: Path) -> None:
    """Assert the metrics, judgements and final weights of the uninterrupted run."""
    assert rows(run) == rows(truth), "no step is lost or repeated"
    key = ("step", "group", "first", "second", "p_first")
    files = [r / "judgements.jsonl" for r in (run, truth) if (truth / "judgements.jsonl").is_file()]
    lines = [[[json.loads(x)[k] for k in key] for x in file.read_text().splitlines()] for file in files]
    assert lines[:1] == lines[1:]
    ours, theirs = weights(run), weights(truth)
    assert list(ours) == list(theirs) and [name for name in ours if ours[name] != theirs[name]] == []
    assert hidden(run) == [".lock"], "no partial file remains"


def count(run: Path, kind: str = "train") -> int:
    file = run / "metrics.jsonl"
    return sum(f'"kind": "{kind}"' in line for line in file.read_text().splitlines()) if file.is_file() else 0


WRITER = "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data"
REPORT = "prefgrpo.trainer:Trainer._report"


PLAIN = {"train": {"steps": 3}, "checkpoint": {"every": 1, "keep": 1}, "eval": {"every": 0}}


WRITES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree")


def die_at(left: int) -> None:
    """Kill this process just before its `left`-th file operation, counted by audit hooks and fsync."""

    def count(*_):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(function):
        return lambda *args, **kwargs: (count(), function(*args, **kwargs))[1]

    os.fsync = before(os.fsync)
    sys.addaudithook(lambda event, _: count() if event in WRITES else None)


@pytest.mark.full
def test_killed_at_every_write_of_a_checkpoint(tmp_path):
    """Kills at each file operation of two saves with keep=1 and of an export that replaces an older one: there is
    always a usable checkpoint, and the export is complete or absent."""
    for n in range(1, 300):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "config.yaml").touch()
        save_one(folder, 1, keep=1)
        write_folder(folder / "product", export)
        child = os.fork()
        if child == 0:
            die_at(n)
            for step in (2, 3):
                save_one(folder, step, keep=1)
                (folder / "done").write_text(str(step))
            write_folder(folder / "product", export)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        done = int((folder / "done").read_text()) if (folder / "done").is_file() else 1
        os.close(claim(RunFolder(folder), resume=True))
        newest = RunFolder(folder).latest()
        assert read_one(newest)[1]["step"] in (done, done + 1), "the last saved checkpoint is intact"
        assert hidden(folder) == [".lock"], "no partial file remains"
        product = folder / "product"
        assert not product.exists() or tree(product).keys() == {"lora/w.safetensors"}
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert done == 3 and product.exists() and n > 36, "the audit hook no longer sees the writes"


def no_room_for_metrics() -> None:
    """Runs in the new process: the disk is full when the metrics of step 3 are written."""
    true_row = Log.row

    def failing(self, kind, step, values):
        if step == 3:
            raise OSError(28, "No space left on device")
        true_row(self, kind, step, values)

    Log.row = failing


@pytest.mark.full
def test_a_full_disk_costs_the_steps_since_the_last_checkpoint(place):
    """No room for a checkpoint: tests/runs/test_failures.py."""
    file = recipe(place, "no_space", **PLAIN)
    run = place / "runs" / "no_space"
    code, output = train(file, hook=no_room_for_metrics)
    assert code == 3 and "disk full after step 3: [Errno 28]" in output and "Traceback" not in output, output
    assert "Free disk space, then continue from" in output and "step_000002 with --resume" in output, output
    assert f"resumed from {run / 'checkpoints' / 'step_000002'}" in trained(file, "--resume")
    assert [r["step"] for r in rows(run)] == [1, 2, 3]


STOPS = [
    (signal.SIGTERM, "lora"),
    pytest.param(signal.SIGKILL, "full", marks=pytest.mark.full),
    *(
        pytest.param(number, "lora", marks=pytest.mark.full)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL)
    ),
]


@pytest.mark.parametrize(("number", "kind"), STOPS)
def test_a_run_that_is_stopped_or_killed_goes_on_as_if_nothing_had_happened(place, truths, number, kind):
    """A signal ends the step, saves and exits with 3, also if it comes twice, as a Ctrl-C under torchrun."""
    name = f"{kind}{int(number)}"
    file = KINDS[kind](place, name)
    run = place / "runs" / name
    process = start(["train", str(file)], place / "log", hold=Hold(REPORT, 3))
    process.until_held()
    process.until(lambda: RunFolder(run).latest() is not None)
    if number == signal.SIGKILL:
        process.kill()
        assert count(run) == 3
    else:
        for _ in range(2):
            os.kill(process.process.pid, number)
            time.sleep(0.05)
        process.release()
        assert process.wait() == 3 and "continue with the same command and --resume" in process.output, process.output
        assert RunFolder(run).latest().name == "step_000003" and count(run) == 3
    assert f"resumed from {run / 'checkpoints'}" in trained(file, "--resume")
    same_as(truths(kind), run)


GENERATE = "prefgrpo.rollout.generated_groups:GeneratedGroups._generate"
UPDATE = "prefgrpo.update.policy:Policy.update"
WITHIN = {
    "first_rollout": (Hold(GENERATE, 1), 0, "in step 1, which will be repeated"),
    "rollout": (Hold(GENERATE, 3), 1, "in step 2, which will be repeated"),
    "saved": (Hold(UPDATE, 5), 2, "in step 3, which will be repeated"),
    "changed": (Hold(UPDATE, 3), 2, "after step 2"),
}
"""Where a signal arrives in steps of two batches and two updates, the steps done in the checkpoint that the run goes on
from, and what it says. In `changed`, weights have changed since the last checkpoint, so the step is finished."""


@pytest.mark.full
@pytest.mark.parametrize("case", WITHIN)
def test_a_signal_within_a_step_ends_the_run_where_nothing_is_lost(place, truths, case):
    hold, done, said = WITHIN[case]
    name = f"within_{case}"
    file = judged(place, name)
    run = place / "runs" / name
    process = start(["train", str(file)], place / "log", hold=hold)
    process.until_held()
    os.kill(process.process.pid, signal.SIGTERM)
    process.release()
    assert process.wait() == 3 and f"interrupted {said}; continue with the same command" in process.output
    assert RunFolder(run).latest().name == f"step_{done:06d}" and count(run) == done, process.output
    trained(file, "--resume")
    same_as(truths("lora"), run)


def test_weights_that_a_step_has_changed_are_not_saved_as_its_start(trainer, place):
    """The signal comes between two updates; `on_save` has moved the checkpoint of the step's start elsewhere."""
    callbacks = {"on_save": lambda path: path.rename(place / f"moved_{path.name}")}
    over = {"train": {"updates_per_rollout": 2}, "checkpoint": {"every": 1}, "eval": {"every": 0}}
    one = trainer(callbacks=callbacks, **over)
    true_update = one.policy.update

    def update(*given):
        one.interrupt.seen = one.policy.updates == 2  # the first update of step 2
        return true_update(*given)

    one.policy.update = update
    with pytest.raises(TrainingStopped, match="interrupted in step 2, which will be repeated"):
        one.train()
    assert one.policy.updates == 3 and (place / "moved_step_000001").is_dir()
    assert one.folder.all_checkpoints() == []


class Clock:
    """A clock that a test sets, in seconds, in the place of a module's `time`."""

    def __init__(self):
        self.now = 0.0
        self.time = time.time

    def monotonic(self):
        return self.now


@pytest.mark.full
def test_a_checkpoint_is_saved_by_time_too_and_is_like_any_other(trainer, place, monkeypatch):
    """Steps of 1000 seconds: after two, half an hour has passed, and again after two. A run that goes on from there is
    the one that was not stopped."""
    clock = Clock()
    monkeypatch.setattr(checkpoint, "time", clock)

    def later(step, metrics):
        clock.now += 1000.0

    def lost(step, metrics):
        later(step, metrics)
        if step == 4:
            raise MemoryError("lost")

    def saved(name):
        return [p.name for p in RunFolder(place / "runs" / name).all_checkpoints()]

    over = {"train": {"steps": 5, "ema_decay": 0.5}, "checkpoint": {"every": 50, "keep": 9}, "eval": {"every": 0}}
    trainer("untimed", **over).train()
    assert saved("untimed") == ["step_000005"]
    trainer("timed", callbacks={"on_step": later}, **over).train()
    assert saved("timed") == ["step_000002", "step_000004", "step_000005"]
    with pytest.raises(MemoryError, match="lost"):
        trainer("goes-on", callbacks={"on_step": lost}, **over).train()
    assert saved("goes-on") == ["step_000002"]
    trainer("goes-on", resume=True, **over).train()
    truth = place / "runs" / "untimed"
    for run in (place / "runs" / "timed", place / "runs" / "goes-on"):
        assert rows(run) == rows(truth) and weights(run / "lora") == weights(truth / "lora")
    ahead = over | {"rollout": {"staleness": 1}}
    trainer("timed-ahead", callbacks={"on_step": later}, **ahead).train()
    assert saved("timed-ahead") == ["step_000005"], "samples are not made ahead across a checkpoint"


def test_the_same_command_twice_at_once(place):
    """The second process is refused, whether it starts or resumes, and the first is not disturbed."""
    file = recipe(place, "twice", train={"steps": 9999}, eval={"every": 0})
    first, run = start(["train", str(file)], place / "log", hold=Hold(REPORT)), place / "runs" / "twice"
    first.until_held()
    half = run / "checkpoints" / ".step_000099.1"
    half.mkdir(parents=True)
    code, output = train(file, "--resume")
    assert code == 2 and "is in use by another process" in output, output
    assert half.exists(), "it may belong to the other process"
    code, output = train(file)
    assert code == 2 and "contains another run" in output
    os.kill(first.process.pid, signal.SIGTERM)
    first.release()
    assert first.wait() == 3 and [r["step"] for r in rows(run)] == list(range(1, count(run) + 1)), first.output


@pytest.mark.full
def test_training_goes_on_while_a_checkpoint_is_written(place):
    """One save at a time: while that of step 3 is stuck, steps 4 to 6 are trained, and the save of step 6 waits."""
    file = recipe(place, "meanwhile", train={"steps": 9}, checkpoint={"every": 3}, eval={"every": 0})
    run = place / "runs" / "meanwhile"
    process = start(["train", str(file)], place / "log", hold=Hold(WRITER, before=True))
    process.until_held()
    process.until(lambda: count(run) == 6)
    assert not RunFolder(run).all_checkpoints() and (run / "checkpoints" / ".step_000003.partial").is_dir()
    time.sleep(0.5)
    assert count(run) == 6, "the second save did not wait"
    process.release()
    assert process.wait() == 0, process.output
    assert [p.name for p in RunFolder(run).all_checkpoints()] == ["step_000006", "step_000009"]


# ---- runs that must not, or need not, be resumed ---------------------------------------------------------------------


@pytest.fixture
def finished(place, tmp_path):
    """A copy of a finished run, with the name in its recipe changed."""
    if not (place / "runs" / "short").is_dir():
        trained(recipe(place, "short", train={"steps": 2}))
    shutil.copytree(place / "runs" / "short", tmp_path / "runs" / "short")
    return tmp_path


def short(place, finished, **over):
    return recipe(place, "short", **merged({"train": {"steps": 2}, "output": str(finished / "runs")}, over))


@pytest.mark.full
def test_a_finished_run_may_be_resumed_and_prolonged(place, finished):
    run = finished / "runs" / "short"
    before = rows(run)
    output = trained(short(place, finished), "--resume")
    assert rows(run) == before and "changed since: train" not in output, output
    output = trained(short(place, finished), "--resume", "--train.steps", "4", "--checkpoint.every", "1")
    assert "changed since: train.steps 2 → 4" in output, output
    trained(recipe(place, "straight"))
    assert rows(run) == rows(place / "runs" / "straight")
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["steps"] == 4


REFUSED = {
    "changed": (
        ["--resume", "--seed", "5"], {"rollout": {"group_size": 2, "batch_size": 2}},
        ("rollout.group_size: was 4, is 2", "rollout.batch_size: was 4, is 2", "seed: was 0, is 5", "the old values"),
    ),
    "prompts": (["--resume"], {}, ("has different prompts",)),
    "image": (["--resume"], {}, ("an image of the starting policy, is missing; choose another name\n",)),
    "model": (["--resume"], {"train": {"lora_rank": 2}}, ("do not fit this configuration", "LoRA rank")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_run_is_refused_and_nothing_is_touched(place, finished, case):
    run, prompts = finished / "runs" / "short", place / "train.txt"
    options, over, parts = REFUSED[case]
    if case == "model":
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("lora_rank: 4", "lora_rank: 2"))
    if case == "image":
        next(run.glob("eval/*_before/*.npz")).unlink()
    before, original = tree(run), prompts.read_bytes()
    if case == "prompts":
        prompts.write_text("another prompt\n", encoding="utf-8")
    try:
        code, output = train(short(place, finished, **over), *options)
    finally:
        prompts.write_bytes(original)
    assert code == 2 and tree(run) == before and all(part in output for part in parts), output


def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_is_used(place, finished):
    run, options = finished / "runs" / "short", ("--resume", "--checkpoint.every", "1")
    shutil.rmtree(run / "checkpoints")
    trained(short(place, finished), *options)
    truth, newest = rows(run), run / "checkpoints" / "step_000002"
    whole = (newest / "__0_0.distcp").read_bytes()
    DAMAGE["truncate"](newest / "__0_0.distcp")
    before = tree(run)
    code, output = train(short(place, finished), *options)
    assert code == 2 and tree(run) == before and f"{newest} is damaged: __0_0.distcp should have" in output, output
    assert f"remove {newest} to use the one before" in output
    shutil.rmtree(newest)
    output = trained(short(place, finished), *options)
    assert f"resumed from {newest.parent / 'step_000001'}" in output and rows(run) == truth, output
    assert (newest / "__0_0.distcp").read_bytes() == whole
