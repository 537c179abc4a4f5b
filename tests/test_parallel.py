"""Every way in which one of two processes (gloo) can fail. Samples, metrics and gradients: test_assignment.py.

Why these cases: a rank that stops alone leaves the others waiting for ever, so any problem on one rank (a wrong option,
a folder only rank 0 may touch, a dead judge, lost rewards, a signal, nothing to evaluate, groups without learning
signal) must reach all ranks.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_run import PROMPTS, all_end, environment, ranks, recipe, rows, train

from prefgrpo.commands import cli
from prefgrpo.config.recipe import ConfigError
from prefgrpo.parallel import world as parallel
from prefgrpo.rewards.base import PointwiseReward, Score
from prefgrpo.run.run_folder import RunFolder

pytestmark = pytest.mark.dist
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "prefgrpo"]


class RankOneIsTied(PointwiseReward):
    def score(self, samples):
        return [Score(0.0 if os.environ["RANK"] == "1" else float(s.media.pixels.mean())) for s in samples]


class RankOneHasNone(PointwiseReward):
    def score(self, samples):
        return [Score(None, "no luck") if os.environ["RANK"] == "1" else Score(1.0) for _ in samples]


HERE = f"{__name__}."


SEVERAL_GROUPS = """
import os, time
from prefgrpo.parallel.world import join

rank = int(os.environ["RANK"])
for k in range(3):
    time.sleep(0.3 * k * (rank == 0))
    assert join().all_gather_object(10 * k + rank) == [10 * k, 10 * k + 1]
"""


def test_a_program_may_train_several_times_under_torchrun(tmp_path):
    """A group that was left cannot be joined again: torchrun's store keeps the addresses of the earlier one."""
    (tmp_path / "several.py").write_text(SEVERAL_GROUPS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "several.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.full
def test_torchrun_lets_a_stopped_run_write_its_report(place):
    """torchrun sends SIGTERM to rank 0, which is still writing, as soon as rank 1 has ended."""
    file = recipe(place, "stopped", rewards=f"{HERE}RankOneHasNone", eval={"every": 0})
    done = subprocess.run([*TORCHRUN, "train", str(file)], capture_output=True, text=True, env=environment())
    assert done.returncode == 1, done.stderr
    assert "Reasons: test_parallel.RankOneHasNone: no luck" in done.stdout + done.stderr
    assert (place / "runs" / "stopped" / "report.html").is_file()


@pytest.mark.full
def test_torchrun_prints_mistakes_once(place):
    file = recipe(place, "mistakes", data={"prompts": "nowhere.txt"})
    done = subprocess.run([*TORCHRUN, "train", str(file)], capture_output=True, text=True, env=environment())
    assert done.returncode == 1 and done.stderr.count("prompts file not found: nowhere.txt") == 1, done.stderr


NOBODY = {"rewards": "vlm_pairwise", "judge": {"endpoints": ["http://127.0.0.1:9"], "deadline_s": 1}}
TROUBLES = {
    "odd": (
        {"rollout": {"prompts_per_step": 3}, "train": {"updates_per_rollout": 13}}, 2,
        ("expected at most one update per sample, got 13 updates of 12 samples per step",),
        ("expected at most one update per sample",),
    ),
    "taken": ({}, 2, ("contains another run (thesis.tex)",), ("see the error message of rank 0",)),
    "down": (NOBODY, 2, ("not reachable", "(2 of 2 processes)"), ("not reachable", "(2 of 2 processes)")),
    "lost": ({"rewards": f"{HERE}RankOneHasNone"}, 3, ("step 1: 50% of the rewards are missing",), ()),
    "tied": ({"rewards": f"{HERE}RankOneIsTied"}, 0, (), ()),
}  # fmt: skip
"""Config values, exit code, and the messages of rank 0 and rank 1."""


@pytest.mark.parametrize("case", TROUBLES)
def test_the_trouble_of_one_rank_reaches_all(place, case):
    """Too many updates, a folder of another run, no judge, lost rewards, and no learning signal in a rank's groups."""
    over, code, *parts = TROUBLES[case]
    folder = place / "runs" / case
    if case == "taken":
        folder.mkdir(parents=True)
        (folder / "thesis.tex").touch()
    outputs = all_end(ranks(recipe(place, case, **over, eval={"every": 0}), 2), code)
    assert all(part in output for output, own in zip(outputs, parts, strict=True) for part in own), outputs
    if case == "odd":
        assert not folder.exists()
    if case == "lost":
        assert (folder / "checkpoints" / "step_000000" / "state.json").is_file()
    if case == "tied":
        assert [(r["samples_trained"], r["grad_norm"] > 0) for r in rows(folder)] == [(4, True)] * 4


def test_a_signal_to_one_rank_stops_all_after_the_step(place):
    file = recipe(place, "signal", train={"steps": 500}, eval={"every": 0})
    runs, folder = ranks(file, 2), place / "runs" / "signal"
    runs[0].until(lambda: (folder / "metrics.jsonl").is_file() and len(rows(folder)) >= 2)
    os.kill(runs[1].process.pid, signal.SIGTERM)
    all_end(runs, 3)
    done = rows(folder)[-1]["step"]
    assert (folder / "checkpoints" / f"step_{done:06d}").is_dir()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_torchrun_stops_all_after_the_step(place, number):
    """SIGUSR1 with the option of docs/scale.md, without which it kills torchrun."""
    file = recipe(place, f"signalled{int(number)}", train={"steps": 500}, eval={"every": 0})
    folder = place / "runs" / f"signalled{int(number)}"
    handled = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"] * (number == signal.SIGUSR1)
    with (place / "log").open("w+") as log:
        command = [*TORCHRUN[:3], *handled, *TORCHRUN[3:], "train", str(file)]
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        while not (folder / "metrics.jsonl").is_file() or len(rows(folder)) < 2:
            assert child.poll() is None, log.seek(0) or log.read()
            time.sleep(0.05)
        child.send_signal(number)
        assert child.wait(120) != 0
        log.seek(0)
        assert "continue with the same command and --resume" in log.read()
    done = rows(folder)[-1]["step"]
    assert done < 500 and (folder / "checkpoints" / f"step_{done:06d}").is_dir()


def rank_one_sees_no_checkpoint() -> None:
    """Runs in the new process: a listing on a shared disk may be old, and a checkpoint is renamed at any moment."""
    if os.environ["RANK"] == "1":
        RunFolder.latest = lambda _: None


def test_ranks_may_change_on_resume_and_a_rank_may_have_nothing_to_evaluate(place):
    """One held-out prompt on two ranks, then on one. The report shows the same images whichever rank made them. Which
    checkpoint is the newest is decided by rank 0 alone."""
    (place / "single.txt").write_text("a red circle\n")
    options = {"eval": {"prompts": str(place / "single.txt"), "every": 1, "rewards": "jpeg_compressibility,scenes"}}
    options["eval"]["final_prompts"] = str(place / "dev.txt")
    file = recipe(place, "change", **options)
    all_end(ranks(file, 2, "--train.steps", "1", hook=rank_one_sees_no_checkpoint), 0)
    files = [f.name for f in (place / "runs" / "change" / "checkpoints" / "step_000001").glob("*.distcp")]
    assert files == ["__0_0.distcp"], "every rank has the LoRA, so one writes it"
    code, output = train(file, "--resume", "--train.steps", "2")
    assert code == 0, output
    all_end(ranks(file, 2, "--resume", "--train.steps", "3", hook=rank_one_sees_no_checkpoint), 0)
    found = rows(place / "runs" / "change")
    assert [r["step"] for r in found if r["kind"] == "train"] == [1, 2, 3]
    assert [r["step"] for r in found if r.get("set") == "dev"] == [0, 1, 2, 3]
    shown = [dict(np.load(f)) for f in sorted((place / "runs" / "change" / "eval").glob("test_00000[0-9].npz"))]
    files = sorted((place / "runs" / "change" / "eval" / "test_before").iterdir())
    start = np.stack([np.load(file)["image"] for file in files])
    assert len(shown) == 4 and all(np.array_equal(s["before"], start) for s in shown)
    assert not any(np.array_equal(s["now"], start) for s in shown[1:])
    prompts = json.loads((place / "runs" / "change" / "eval" / "test_prompts.json").read_text())
    assert prompts == PROMPTS[7:]


def collectives() -> None:
    """Runs in the new process; a failure is a non-zero exit code."""
    check_collectives(parallel.join())
    os._exit(0)


def check_collectives(world) -> None:
    """Every collective, checked against a known answer."""
    rank, size = world.rank, world.size
    assert world.patience.total_seconds() == 1200, "the others wait for a judge's whole deadline, and as long again"
    assert world.main == (rank == 0) and list(world.slots(6)) == list(range(rank, 6, size))
    local = np.array([[float(p), 10.0 * p] for p in world.slots(6)])
    assert np.array_equal(world.gather_slots(local, 6), [[p, 10.0 * p] for p in range(6)])
    assert world.gather_slots(local.reshape(-1, 2, 1), 6).shape == (6, 2, 1)
    for total in (1, 7):
        mine = np.array([[float(p)] for p in world.slots(total)]).reshape(-1, 1)
        assert world.gather_slots(mine, total).tolist() == [[float(p)] for p in range(total)]
        assert [p for p in range(total) if world.owner(p) == rank] == list(world.slots(total))
    others = [k for k in range(size) if k != rank]
    coming = {(k, tag): world.receive((2, tag), k, tag) for k in others for tag in (1, 3)}
    sent = [
        world.send(torch.full((2, tag), 16 * rank + tag, dtype=torch.uint8), k, tag) for tag in (3, 1) for k in others
    ]
    for (k, tag), (tensor, work) in reversed(coming.items()):
        work.wait()
        assert tensor.tolist() == [[16 * k + tag] * tag] * 2
    for work in sent:
        work.wait()
    assert world.gather(np.array([float(rank), np.nan]))[::2].tolist() == list(range(size))
    assert world.any(rank == size - 1) and not world.any(False)
    half, full, none = (
        torch.zeros(3, dtype=t, requires_grad=True) for t in (torch.bfloat16, torch.float32, torch.float32)
    )
    for limit in (parallel.BUCKET_BYTES, 12):  # one bucket per dtype, then one per gradient
        parallel.BUCKET_BYTES, none.grad = limit, None
        half.grad, full.grad = torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((3,), rank + 1.0)
        world.sum_gradients([half, full, none])
        assert half.grad.tolist() == [2.0 * size] * 3 and full.grad.tolist() == [size * (size + 1) / 2] * 3
        assert none.grad.tolist() == [0.0] * 3
    said = []
    world.on_main(lambda: said.append(1), ConfigError)
    assert said == ([1] if rank == 0 else [])
    try:
        world.on_main(lambda: (_ for _ in ()).throw(ConfigError(["only here"])), ConfigError)
    except ConfigError as error:
        assert ("only here" in str(error)) == (rank == 0)
    else:
        raise AssertionError("every rank must raise")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_collectives(place, size):
    all_end(ranks(place / "none.yaml", size, hook=collectives), 0)


def test_communicators_are_made_on_the_own_gpu_at_the_start(monkeypatch):
    """Not in the first update, minutes later: a bound device, and a first all-reduce on it."""
    values = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    gpu = torch.device("cuda", 1)
    made = Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: device)
    monkeypatch.setattr(parallel, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 3, 4)]))
    monkeypatch.setattr(parallel, "_name_of_start", lambda *_: "start")
    monkeypatch.setattr(dist, "init_process_group", made.init)
    monkeypatch.setattr(dist, "all_reduce", made.all_reduce)
    world = parallel.join()
    assert (world.rank, world.device) == (3, gpu)
    assert [call[0] for call in made.mock_calls] == ["set_device", "init", "all_reduce"]
    assert made.init.call_args.kwargs["device_id"] == gpu and made.all_reduce.call_args.args == (gpu,)


ENDS = {"finished": ({"return_value": 0}, 1), "stopped": ({"return_value": 3}, 0),
        "failed": ({"side_effect": RuntimeError("out of memory")}, 0)}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_only_a_process_that_succeeds_leaves_the_group(monkeypatch, end):
    """Destroying a communicator waits for the other processes (NCCL), which may wait in a collective for this one."""
    result, left = ENDS[end]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cli, "_call", Mock(**result))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    destroy = Mock()
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    with suppress(RuntimeError):
        cli.main(["doctor"])
    assert destroy.call_count == left
