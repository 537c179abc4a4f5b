"""A training step on several processes against one: samples, scores, gradients, and the balance of the work.

Why these cases: groups split over two processes (one prompt, prompt counts that the world size does not divide, batches
that do not divide a group), several updates, groups without signal, and ranks that must run equally many forwards. A
sample sent to another rank must reach its group.
"""

import os
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import ranks, recipe, settings, stored, world

from prefgrpo.config.loading import from_dict
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import PointwiseReward, Score
from prefgrpo.rollout import render
from prefgrpo.rollout.batch import BatchPlan, assign_batches, update_of
from prefgrpo.rollout.exchange import media_exchange
from prefgrpo.rollout.replay import TrajectoryCollector
from prefgrpo.run.errors import batch_errors
from prefgrpo.run.log import Clock
from prefgrpo.trainer import Trainer


class Streamed(PointwiseReward):
    """Brightness, scored as soon as a sample is ready; 0 for the prompts in TIED."""

    streams = True

    def submit(self, sample):
        answer = Future()
        tied = sample.prompt in os.environ.get("TIED", "").split("\n")
        answer.set_result(Score(0.0 if tied else float(sample.media.pixels.mean())))
        return answer

    def score(self, samples):
        return [self.submit(sample).result() for sample in samples]


def brighter(prompt, image_a, image_b):
    """Whether the first image is brighter; the win rate needs all members of a group."""
    return float(image_a.mean() > image_b.mean())


HERE = f"{__name__}."
BOTH = f"{HERE}Streamed:1,{HERE}brighter:0.5"
ONLY = f"{HERE}Streamed:1"
CELLS = {
    "one prompt, two updates": {
        "rollout": {"prompts_per_step": 1, "group_size": 8, "batch_size": 2}, "rewards": BOTH,
        "train": {"updates_per_rollout": 2},
    },
    "three prompts": {
        "rollout": {"prompts_per_step": 3, "batch_size": 2}, "rewards": BOTH,
        "train": {"updates_per_rollout": 2, "kl_coef": 0.3},
    },
    "groups over processes": {
        "rollout": {"prompts_per_step": 5, "batch_size": 2}, "rewards": ONLY, "tied": (0, 4),
        "train": {"updates_per_rollout": 2},
    },
    "equal forwards": {
        "rollout": {"prompts_per_step": 3, "batch_size": 4}, "rewards": ONLY, "equal": True,
        "train": {"updates_per_rollout": 2, "kl_coef": 0.3}, "eval": {"every": 1},
    },
}  # fmt: skip


def cell_settings(place: Path, cell: str, name: str) -> dict:
    """Settings of a cell: a run of one step, at a learning rate too small to affect its second update noticeably."""
    options = {key: value for key, value in CELLS[cell].items() if key not in ("tied", "equal")}
    options.setdefault("eval", {"every": 0})
    options["train"] = {"steps": 1, "lr": 1e-6} | options.get("train", {})
    return settings(place, name, **options)


def run_cells() -> None:
    """Runs in the new process: all cells in turn; saves what each process saw of a cell to a file in PLACE."""
    place = Path(os.environ["PLACE"])
    torch.set_num_threads(1)
    true_sum, true_accumulate = World.sum_gradients, TrajectoryCollector.accumulate
    for cell, port in zip(CELLS, os.environ["PORTS"].split(","), strict=True):
        os.environ["MASTER_PORT"] = port
        seen = {"samples": {}, "gradients": [], "batches": [], "forwards": 0}
        on = CELLS[cell].get("equal", False)
        World.equal_forwards = property(lambda self, on=on: on)
        loop = Trainer(from_dict(cell_settings(place, cell, f"{cell}-{os.environ['WORLD_SIZE']}")))
        slots = loop.rollouts.prompts_of(0)
        os.environ["TIED"] = "\n".join(slots[p].text for p in CELLS[cell].get("tied", ()))

        def sum_gradients(world, parameters, seen=seen):
            true_sum(world, parameters)
            seen["gradients"].append(torch.cat([p.grad.flatten() for p in parameters]))

        def accumulate(self, batches, *rest, seen=seen):
            seen["batches"] += [(batch.number, batch.update, not batch.padding) for batch in batches]
            return true_accumulate(self, batches, *rest)

        def count(*_, seen=seen):
            seen["forwards"] += 1

        def compute(step, scores, distances, seen=seen, compute=loop.targets.compute):
            seen["groups"] = scores.samples
            return compute(step, scores, distances)

        loop.targets.compute = compute
        World.sum_gradients, TrajectoryCollector.accumulate = sum_gradients, accumulate
        loop.adapter.transformer.register_forward_pre_hook(count)
        keep = loop.rollouts.training_batches

        def training_batches(batches, signal, seen=seen, keep=keep):
            for batch in batches:
                for row, place in enumerate(zip(batch.slots, batch.members, strict=True)):
                    if not batch.padding:
                        assert place not in seen["samples"], "each sample is generated once"
                        seen["samples"][place] = [t[row].clone() for t in stored(batch)]
            return keep(batches, signal)

        object.__setattr__(loop.rollouts, "training_batches", training_batches)
        measured = {}
        for evaluator in loop.evaluators.values():
            evaluator.start(resumed=False)
            measured |= evaluator.run(0).metrics()
        seen["metrics"] = loop.step(0, Clock()) | measured
        media = {(group, g): s.media.pixels for group, made in seen.pop("groups").items() for g, s in made.items()}
        seen["media"] = {place: torch.from_numpy(pixels) for place, pixels in media.items()}
        torch.save(seen, place / f"{cell}_{loop.world.rank}of{loop.world.size}.pt")
        loop.close()
    os._exit(0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return world(tmp_path_factory.mktemp("assignment"))


def run(place: Path, size: int) -> dict[str, list[dict]]:
    """Run all cells on `size` processes; returns what each process saw, by cell."""
    from judge_server import free_port  # not above: started processes need no aiohttp

    ports = ",".join(str(free_port()) for _ in CELLS)
    runs = ranks(place / "none.yaml", size, hook=run_cells, PLACE=str(place), PORTS=ports)
    assert [r.wait(600) for r in runs] == [0] * size, "\n".join(r.output for r in runs)
    return {cell: [torch.load(place / f"{cell}_{k}of{size}.pt") for k in range(size)] for cell in CELLS}


@pytest.fixture(scope="module")
def alone(place):
    return run(place, 1)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))])
def test_several_processes_make_and_train_what_one_does(place, alone, size):
    for cell, seen in run(place, size).items():
        (one,) = alone[cell]
        samples, media = {}, {}
        for process in seen:
            assert not samples.keys() & process["samples"].keys() and not media.keys() & process["media"].keys(), cell
            samples |= process["samples"]
            media |= process["media"]
        assert samples.keys() == one["samples"].keys() and media.keys() == one["media"].keys(), cell
        for what, theirs in (
            *((samples[k], one["samples"][k]) for k in samples),
            *(([media[k]], [one["media"][k]]) for k in media),
        ):
            assert all(torch.equal(a, b) for a, b in zip(what, theirs, strict=True)), cell
        for key, value in one["metrics"].items():
            if not key.startswith("time/"):
                assert all(p["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-7) for p in seen), (cell, key)
        for process in seen:
            assert len(process["gradients"]) == len(one["gradients"]) > 0
            for ours, truth in zip(process["gradients"], one["gradients"], strict=True):
                assert float((ours - truth).norm() / truth.norm()) < 1e-5, cell
        work = [[(n, u) for n, u, weight in p["batches"] if weight] for p in seen]
        assert sorted(b for own in work for b in own) == sorted((n, u) for n, u, _ in one["batches"]), cell
        for update in {u for _, u, _ in one["batches"]}:
            counts = [sum(u == update for _, u in own) for own in work]
            if "tied" not in CELLS[cell]:
                assert max(counts) - min(counts) <= 1, (cell, update, counts)
        if cell == "equal forwards":
            assert len({p["forwards"] for p in seen}) == 1 and any(not w for p in seen for *_, w in p["batches"])


def test_samples_are_taken_on_the_gpu_of_the_process(monkeypatch):
    """The thread that waits for pixels: a new one starts with GPU 0, and waiting there makes a context on it."""
    own = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(own, "gpu", device))
    gpu = torch.device("cuda", 3)
    waited = []

    def pixels():
        waited.append(getattr(own, "gpu", None))
        return np.zeros((2, 2, 3), np.uint8)

    plan = [BatchPlan(0, 0, ((0, 0), (0, 1)), 0)]
    with media_exchange(World(0, 1, gpu), plan, (2, 2, 3), lambda place, image: None) as put:
        for place in plan[0].places:
            put(place, pixels)
    assert waited == [gpu, gpu]


def fail_on_rank_0() -> None:
    """Runs in the new process: rank 0 runs out of memory in its second batch, while rank 1 waits for its images."""
    true_decode = render.decode
    calls = []

    def decode(*given):
        calls.append(1)
        if os.environ["RANK"] == "0" and len(calls) == 2:
            raise MemoryError("no more of it")
        return true_decode(*given)

    render.decode = decode


@pytest.mark.dist
def test_an_error_in_one_process_ends_all(place):
    options = {"rollout": {"prompts_per_step": 1, "batch_size": 1}, "eval": {"every": 0}}
    runs = ranks(recipe(place, "fails", **options), 2, hook=fail_on_rank_0)
    assert all(r.wait() == 1 for r in runs), [r.output for r in runs]
    assert "MemoryError: no more of it" in runs[0].output


def test_an_equal_number_of_forwards_changes_nothing_for_one_process(alone):
    assert all(weight for _, _, weight in alone["equal forwards"][0]["batches"])


def config(**over):
    return from_dict({"model": "m", "data": {"prompts": "p"}} | over)


@pytest.mark.parametrize(("prompts", "group", "updates", "slices", "sizes"), [
    (8, 8, 1, "prompts", [1, 2, 4, 8]), (8, 8, 2, "prompts", [1, 2, 4, 8]), (8, 8, 2, "members", [1, 2, 4]),
    (32, 9, 3, "members", [1, 3]), (8, 21, 2, "members", [1]), (1, 8, 2, "prompts", [1, 2, 4]),
    (2, 6, 3, "prompts", [1, 2]),
])  # fmt: skip
def test_a_batch_of_several_prompts_or_updates_is_a_mistake(prompts, group, updates, slices, sizes):
    for size in range(1, prompts * group + 1):
        rollout = {"prompts_per_step": prompts, "group_size": group, "batch_size": size}
        c = config(rollout=rollout, train={"updates_per_rollout": updates, "update_slices": slices})
        whole = all(len(b.places) == size for b in assign_batches(c))
        assert (batch_errors(c) == []) == whole == (size in sizes), size
    assert f"expected one of {sizes}, got {prompts * group}" in batch_errors(c)[0]


@pytest.mark.parametrize("slices", ["prompts", "members"])
@pytest.mark.parametrize(
    ("prompts", "group", "batch", "updates"), [(42, 24, 9, 2), (48, 12, 4, 3), (3, 4, 8, 1), (5, 6, 4, 5)]
)
def test_assignment(prompts, group, batch, updates, slices):
    """Published group counts and small ones: the batches are the same for any number of processes, and every process
    has its share of every update."""
    rollout = {"prompts_per_step": prompts, "group_size": group, "batch_size": batch}
    c = config(rollout=rollout, train={"updates_per_rollout": updates, "update_slices": slices})
    one = assign_batches(c)
    assert sorted(p for b in one for p in b.places) == [(p, g) for p in range(prompts) for g in range(group)]
    assert max(len(b.places) for b in one) <= batch and all(len(set(b.slots)) == 1 for b in one)
    assert [b.number for b in one] == list(range(len(one)))
    assert all(update_of(c, place) == b.update for b in one for place in b.places)
    for ranks_ in (2, 3, 8, 32):
        assigned = assign_batches(c, ranks_)
        assert [replace(b, dp_rank=0) for b in assigned] == one
        for own in (assigned, *([b for b in assigned if b.update == u] for u in range(updates))):
            held = Counter(dict.fromkeys(range(ranks_), 0) | Counter(b.dp_rank for b in own))
            assert max(held.values()) - min(held.values()) <= 1
