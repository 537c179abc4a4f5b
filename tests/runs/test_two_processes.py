"""Every way in which one of two processes (gloo) can fail.

Samples, metrics and gradients: tests/rollout/test_plan.py.

Why these cases: a rank that stops alone leaves the others waiting for ever, so any problem on one rank (a wrong option,
a folder only rank 0 may touch, a dead judge, lost rewards, a signal, nothing to evaluate, groups without learning
signal) must reach all ranks.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Hold, all_end, environment, ranks, trained
from safetensors.torch import load_file
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import FileSystemReader
from world import ALONE, BRIGHTNESS, PROMPTS, merged, recipe, rows, weights

from prefgrpo.commands import cli
from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.data.answer import Answer
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.shard import to_local
from prefgrpo.rewards.base import Reward
from prefgrpo.run import checkpoint
from prefgrpo.run.checkpoint import Checkpoints
from prefgrpo.run.folder import RunFolder

pytestmark = pytest.mark.dist
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "prefgrpo"]


class RankOneIsTied(Reward):
    def ask(self, asked):
        return [Answer(0.0 if os.environ["RANK"] == "1" else float(s.media.pixels.mean())) for (s,) in asked]


class RankOneHasNone(Reward):
    def ask(self, asked):
        return [Answer(None, "no luck") if os.environ["RANK"] == "1" else Answer(1.0) for _ in asked]


HERE = f"{__name__}."


SEVERAL_GROUPS = """
import os, time
from prefgrpo.parallel.world import join

rank = int(os.environ["RANK"])
for k in range(3):
    time.sleep(0.3 * k * (rank == 0))
    assert join().all_gather_object(10 * k + rank) == [10 * k, 10 * k + 1]
"""


@pytest.mark.full
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
    assert f"Reasons: {HERE}RankOneHasNone: no luck" in done.stdout + done.stderr
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


def test_a_signal_to_one_rank_stops_all(place):
    file = recipe(place, "signal", train={"steps": 500}, eval={"every": 0})
    runs, folder = ranks(file, 2), place / "runs" / "signal"
    runs[0].until(lambda: (folder / "metrics.jsonl").is_file() and len(rows(folder)) >= 2)
    os.kill(runs[1].process.pid, signal.SIGTERM)
    all_end(runs, 3)
    done = rows(folder)[-1]["step"]
    assert (folder / "checkpoints" / f"step_{done:06d}").is_dir()


GENERATE = Hold("prefgrpo.rollout.generated_groups:GeneratedGroups._generate", 3)
WITHIN = {
    "one": ({}, [1]),
    "both": ({}, [0, 1]),
    "sharded": ({"parallel": {"shard": 2}}, [1]),
    "ulysses": ({"parallel": {"ulysses": 2}, "rollout": {"batch_size": 2}}, [1]),
    "ahead": ({"rollout": {"staleness": 1}, "checkpoint": {"every": 3}}, [1]),
}
"""Options, and the ranks that get a signal. Three batches on two ranks: one has a batch less to make."""


@pytest.mark.full
@pytest.mark.parametrize("case", WITHIN)
def test_a_signal_in_a_rollout_stops_all_after_their_batch(place, case):
    """Rank 0 makes its second batch of the first step, or its first of the second, when the signal arrives."""
    over, signalled = WITHIN[case]
    options = merged({"rollout": {"prompts_per_step": 3}, "rewards": BRIGHTNESS, "eval": {"every": 0}}, over)
    options = merged({"checkpoint": {"every": 50}}, options)
    all_end(ranks(recipe(place, f"straight-{case}", **options), 2))
    file = recipe(place, f"within-{case}", **options)
    folder = RunFolder(place / "runs" / f"within-{case}")
    runs = ranks(file, 2, holds={0: GENERATE})
    runs[0].until_held()
    for rank in signalled:
        os.kill(runs[rank].process.pid, signal.SIGTERM)
    runs[0].release()
    outputs = all_end(runs, 3)
    done = len(rows(folder.root))
    assert done in (0, 1) and f"interrupted in step {done + 1}, which will be repeated" in outputs[0], outputs
    assert [p.name for p in folder.all_checkpoints()] == [f"step_{done:06d}"]
    all_end(ranks(file, 2, "--resume"))
    straight = place / "runs" / f"straight-{case}"
    if case != "ahead":  # its next step had samples of older weights
        assert rows(folder.root) == rows(straight)
        assert weights(folder.root / "lora") == weights(straight / "lora")
    assert [r["step"] for r in rows(folder.root)] == [1, 2, 3, 4]


def late_by_one_clock() -> None:
    """Runs in the new process: by the clock of rank $LATE, a checkpoint is due after every step."""
    Checkpoints.overdue = property(lambda self: self.world.rank == int(os.environ["LATE"]))


@pytest.mark.full
@pytest.mark.parametrize(("late", "steps"), [(0, [1, 2]), (1, [2])])
def test_rank_0_has_the_clock_by_which_checkpoints_are_saved(place, late, steps):
    file = recipe(place, f"late{late}", train={"steps": 2}, eval={"every": 0}, checkpoint={"every": 50})
    all_end(ranks(file, 2, hook=late_by_one_clock, LATE=str(late)))
    saved = RunFolder(place / "runs" / f"late{late}").all_checkpoints()
    assert [p.name for p in saved] == [f"step_{step:06d}" for step in steps]


def note_staged() -> None:
    """Runs in the new process: appends the bytes that it copies for each checkpoint to a file in STAGED."""
    true_save = checkpoint.async_save

    def async_save(state, **options):
        size = sum(tensor.nbytes for tensor in to_local(state.values()))
        with (Path(os.environ["STAGED"]) / os.environ["RANK"]).open("a") as file:
            file.write(f"{size}\n")
        return true_save(state, **options)

    checkpoint.async_save = async_save


@pytest.mark.full
def test_every_weight_is_saved_once_whatever_the_number_of_replicas(place):
    """Two replicas of weights sharded over two processes: each process copies a quarter, and what they wrote together
    is read on any mesh."""
    options = {"train": {"lora_rank": 0, "lr": 1e-4, "ema_decay": 0.5}, "parallel": {"shard": 2}, "eval": {"every": 0}}
    options |= {"rollout": {"batch_size": 2}, "checkpoint": {"every": 1}}
    staged = place / "staged"
    staged.mkdir()
    file = recipe(place, "once", **options)
    folder = RunFolder(place / "runs" / "once")
    all_end(ranks(file, 4, "--train.steps", "1", hook=note_staged, STAGED=str(staged)))
    sizes = [int((staged / str(rank)).read_text().split()[0]) for rank in range(4)]
    path = folder.latest()
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    whole = sum(math.prod(m.size) * m.properties.dtype.itemsize for m in stored.values())
    assert max(sizes) < 0.3 * whole and sum(sizes) == pytest.approx(whole, rel=0.05), (sizes, whole)
    files = sum(p.stat().st_size for p in path.glob("*.distcp"))
    headers = 2048 * sum(len(m.chunks) for m in stored.values())
    assert whole < files < whole + headers < 2 * whole + headers / 2, "each part of a tensor is in one file"

    tensors = {name: torch.zeros(stored[name].size) for name in stored if name.startswith("ema.")}
    checkpoint.read(path, tensors, ALONE)
    exported = {}
    for one in (folder.root / "pipeline" / "transformer").glob("*.safetensors"):
        exported |= load_file(one)
    assert len(exported) == len(tensors) > 10
    assert all(torch.equal(tensor, exported[name.removeprefix("ema.")]) for name, tensor in tensors.items())

    all_end(ranks(recipe(place, "at-once", **options), 4, "--train.steps", "2"))
    all_end(ranks(file, 4, "--resume", "--train.steps", "2"))
    straight = place / "runs" / "at-once"
    assert rows(folder.root) == rows(straight) and weights(folder.root) == weights(straight)
    all_end(ranks(file, 2, "--resume", "--train.steps", "3"))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_torchrun_stops_all(place, number):
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
    trained(file, "--resume", "--train.steps", "2")
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
    assert np.array_equal(world.in_slot_order(world.gather_items([local])), [[p, 10.0 * p] for p in range(6)])
    assert world.in_slot_order(world.gather_items([local.reshape(-1, 2, 1)])).shape == (6, 2, 1)
    for total in (1, 7):
        mine = np.array([[float(p)] for p in world.slots(total)]).reshape(-1, 1)
        assert world.in_slot_order(world.gather_items([mine])).tolist() == [[float(p)] for p in range(total)]
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
    assert world.any_of_each([rank == 0, rank == size - 1, False]) == [True, True, False]
    half = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    full, last, none = (torch.zeros(3, requires_grad=True) for _ in range(3))
    for limit in (parallel.BUCKET_BYTES, 12):  # one bucket per dtype, then one per gradient
        parallel.BUCKET_BYTES = limit
        half.grad, full.grad = torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((3,), rank + 1.0)
        last.grad = torch.full((3,), 5.0) if rank == size - 1 else None
        world.sum_gradients([half, none, full, last])
        assert half.grad.tolist() == [2.0 * size] * 3 and full.grad.tolist() == [size * (size + 1) / 2] * 3
        assert last.grad.tolist() == [5.0] * 3, "a gradient that some lack counts as 0 there"
        assert none.grad is None, "a gradient that all lack stays missing"
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


def mesh_groups() -> None:
    """Runs in the new process: two replicas of weights sharded over two, context-parallel processes; rank 1 hangs."""
    config = from_dict({
        "model": "m", "data": {"prompts": "p"}, "train": {"lora_rank": 0}, "judge": {"deadline_s": 3, "timeout_s": 3},
        "parallel": {"ulysses": 2},
    })  # fmt: skip
    world = parallel.join(config)
    groups = list(distributed_c10d._world.pg_map)
    world.weights_mesh()
    world.whole(torch.zeros(1, 2), (4,))
    assert groups == list(distributed_c10d._world.pg_map), "a group made later would have another time limit"
    assert len(groups) > 3, "expected groups of their own for the dimensions of the mesh"
    limits = {group.group_desc: group._get_backend(world.device).options._timeout for group in groups}
    assert set(limits.values()) == {world.patience}, limits
    world.barrier()
    began = time.monotonic()
    if world.rank == 1:
        time.sleep(12)
    elif world.rank == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 6000ms"):
            dist.all_reduce(torch.zeros(1), group=world.weights_mesh().get_group())
        assert time.monotonic() - began < 11
    os._exit(0)


@pytest.mark.full
def test_collectives_of_a_mesh_have_the_time_limit_of_the_run(place):
    """torch gives the groups of a mesh its own limit, 30 minutes: a process whose peer hangs would wait for so long."""
    all_end(ranks(place / "none.yaml", 4, hook=mesh_groups), 0)


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
