"""One of two processes dies, raises, hangs or cannot write: the other exits too, and the cause is printed.

Why these cases: otherwise a cluster would wait for ever. Faults are real: SIGKILL, SIGSTOP, a limit on file sizes, NaN
gradients.
Tested under torchrun, and on bare processes with a short timeout of collectives.
"""

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import all_end, environment, ranks
from world import Brightness, recipe, rows

from prefgrpo.parallel.world import World
from prefgrpo.run import checkpoint
from prefgrpo.run.folder import RunFolder
from prefgrpo.trainer import Trainer

pytestmark = pytest.mark.dist
SHORT = {"eval": {"every": 0}, "checkpoint": {"every": 1}}
REWARD = f"{__name__}.{Brightness.__name__}"
"""Named by this file, so that torchrun's workers import it and get the fault."""


def fail(kind: str) -> None:
    """Cause the fault; the file FAULT_AT records its time (and, by existing, that it has happened)."""
    Path(os.environ["FAULT_AT"]).write_text(str(time.time()))
    if kind == "raises":
        raise MemoryError("no more of it")
    os.kill(os.getpid(), {"dies": signal.SIGKILL, "hangs": signal.SIGSTOP}[kind])


def fault_in_a_step() -> None:
    """Process 1 fails once, just before it sums the gradients of step FAULT_STEP (2)."""
    true_sum, calls = World.sum_gradients, []

    def sum_gradients(self, parameters):
        calls.append(1)
        now = len(calls) == int(os.environ.get("FAULT_STEP", "2"))
        if self.rank == 1 and now and not Path(os.environ["FAULT_AT"]).exists():
            fail(os.environ["FAULT"])
        true_sum(self, parameters)

    World.sum_gradients = sum_gradients


if "FAULT" in os.environ:
    fault_in_a_step()


# ---- under torchrun --------------------------------------------------------------------------------------------------


def launched(file: Path, *torchrun: str, **env: str) -> subprocess.Popen:
    """Start torchrun with two processes."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *torchrun]
    command = [*start, "-m", "prefgrpo", "train"]
    with file.with_suffix(".log").open("w") as log:
        return subprocess.Popen([*command, str(file)], stdout=log, stderr=log, env=environment(**env))


@pytest.mark.full
def test_torchrun_ends_all_within_a_minute_and_says_why(place):
    at = place / "raises.at"
    file = recipe(place, "raises", rewards=REWARD, **SHORT)
    run = launched(file, FAULT="raises", FAULT_AT=str(at))
    ended = run.wait(600)
    seconds = time.time() - float(at.read_text())
    output = file.with_suffix(".log").read_text()
    assert ended == 1 and seconds < 60 and "MemoryError: no more of it" in output, (ended, seconds, output)
    assert [r["step"] for r in rows(place / "runs" / "raises")] == [1]


@pytest.mark.full
def test_what_torchrun_restarts_is_resumed(place):
    """After a kill, the run has the rows of an undisturbed one."""
    options = {"rewards": REWARD, **SHORT}
    all_end(ranks(recipe(place, "straight", **options), 2))
    at = place / "restarted.at"
    file = recipe(place, "restarted", **options)
    run = launched(file, "--max_restarts", "1", FAULT="dies", FAULT_AT=str(at), FAULT_STEP="3")
    code = run.wait(600)
    output = file.with_suffix(".log").read_text()
    assert code == 0 and "resumed from" in output, output
    assert rows(place / "runs" / "restarted") == rows(place / "runs" / "straight")


# ---- bare processes --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_process_that_stands_still_ends_the_other(place):
    """After twice the judge's deadline: by default 20 minutes."""
    at = place / "still.at"
    file = recipe(place, "still", judge={"deadline_s": 7.5}, **SHORT)
    runs = ranks(file, 2, hook=fault_in_a_step, FAULT="hangs", FAULT_AT=str(at))
    assert runs[0].wait() == 1 and runs[1].process.exitcode is None
    runs[1].kill()
    assert "Timed out waiting 15000ms" in runs[0].output, runs[0].output


def no_room() -> None:
    """Process RANK_LIMITED cannot write large files during the second save."""
    true_write = checkpoint._Writer.write_data
    calls = []

    def write_data(*given):
        calls.append(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if len(calls) == 2 and os.environ["RANK"] == os.environ["RANK_LIMITED"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            return true_write(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    checkpoint._Writer.write_data = write_data


def no_folder() -> None:
    """Process 0 cannot make the folder of the second save."""
    true_prepare = checkpoint._Writer.prepare_local_plan
    calls = []

    def prepare_local_plan(*given):
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == "0":
            raise PermissionError(13, "Permission denied")
        return true_prepare(*given)

    checkpoint._Writer.prepare_local_plan = prepare_local_plan


ALL = {"train": {"lora_rank": 0, "lr": 1e-4}, "parallel": {"shard": 2}}


@pytest.mark.full
def test_a_folder_that_cannot_be_made_stops_all_with_one_message(place):
    file = recipe(place, "denied", **SHORT, **ALL)
    folder = RunFolder(place / "runs" / "denied")
    output, other = all_end(ranks(file, 2, hook=no_folder), 3)
    assert "the checkpoint step_000002 cannot be written: process 0: [Errno 13] Permission denied" in output, output
    assert "Traceback" not in output + other, "the other process ends with the same exit code"
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step_000001"]


@pytest.mark.full
@pytest.mark.parametrize(("name", "rank", "options"), [("lora", "0", {}), ("split", "1", ALL)])
def test_no_room_for_a_checkpoint_stops_all_after_the_one_before(place, name, rank, options):
    file, folder = recipe(place, f"room-{name}", **SHORT, **options), RunFolder(place / "runs" / f"room-{name}")
    output, _ = all_end(ranks(file, 2, hook=no_room, RANK_LIMITED=rank), 3)
    assert f"the checkpoint step_000002 cannot be written: process {rank}: " in output and "Traceback" not in output
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step_000001"], "the partial checkpoint is removed"
    all_end(ranks(file, 2, "--resume"))
    assert [r["step"] for r in rows(folder.root)] == [1, 2, 3, 4]


def not_finite() -> None:
    """Process 1 gets a NaN gradient in the second update; a hash of the final weights is written to DUMP."""
    true_sum = World.sum_gradients
    true_finish = Trainer._finish
    calls = []

    def sum_gradients(self, parameters):
        calls.append(1)
        if self.rank == 1 and len(calls) == 2:
            parameters[0].grad.view(-1)[0] = float("nan")
        true_sum(self, parameters)

    def finish(self, done):
        content = torch.cat([p.detach().flatten() for p in self.policy.params]).numpy().tobytes()
        text = f"{self.policy.updates} {hashlib.sha256(content).hexdigest()}"
        (Path(os.environ["DUMP"]) / f"weights{self.world.rank}").write_text(text)
        true_finish(self, done)

    World.sum_gradients = sum_gradients
    Trainer._finish = finish


def test_a_gradient_that_is_not_finite_in_one_process_is_skipped_in_both(place):
    output, _ = all_end(ranks(recipe(place, "nan", **SHORT), 2, hook=not_finite, DUMP=str(place)))
    assert [r["updates_skipped"] for r in rows(place / "runs" / "nan")] == [0, 1, 0, 0]
    weights = [(place / f"weights{k}").read_text() for k in range(2)]
    assert weights[0] == weights[1] and weights[0].startswith("3 ")
    assert "1 of 1 updates skipped: gradient not finite" in output
    assert output.count("look at attention (native; ") == output.count("dtype (fp32; ") == 1


def drawn(rewards, weights):
    """A function for `advantage.combine` that finds no difference in process 1, as if it had drawn other numbers."""
    return rewards[0] * (os.environ["RANK"] == "0")


@pytest.mark.full
def test_a_combination_that_differs_between_processes_is_that_of_process_0(place):
    file = recipe(place, "drawn", **SHORT, advantage={"combine": f"{__file__}:drawn"})
    all_end(ranks(file, 2, hook=not_finite, DUMP=str(place)), seconds=60)
    assert all(r["samples_trained"] for r in rows(place / "runs" / "drawn"))
    assert (place / "weights0").read_text() == (place / "weights1").read_text()
