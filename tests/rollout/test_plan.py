"""A training step on several processes against one: samples, scores, gradients, and the balance of the work.

Why these cases: groups split over two processes (one prompt, prompt counts that the world size does not divide, batches
that do not divide a group), several updates, groups without signal, and ranks that must run equally many forwards. A
sample sent to another rank must reach its group.
"""

import itertools
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ranks import free_port, ranks
from world import BRIGHTER, recipe, settings, stored, tiny_world

from prefgrpo.config.loading import from_dict
from prefgrpo.data.answer import Answer
from prefgrpo.data.prompts import Prompt
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Reward
from prefgrpo.rollout import render
from prefgrpo.rollout.assignment import BatchPlan
from prefgrpo.rollout.batch import Batch
from prefgrpo.rollout.exchange import media_exchange
from prefgrpo.rollout.plan import StepPlan, make_plan
from prefgrpo.run.log import Clock
from prefgrpo.trainer import Trainer
from prefgrpo.update.trajectory import TrajectoryGradients


class Streamed(Reward):
    """Brightness, scored as soon as a sample is ready; 0 for the prompts in TIED."""

    streams = True

    async def ask_one(self, *samples):
        (sample,) = samples
        tied = sample.prompt in os.environ.get("TIED", "").split("\n")
        return Answer(0.0 if tied else float(sample.media.pixels.mean()))


HERE = f"{__name__}."
BOTH = f"{HERE}Streamed:1,{BRIGHTER}:0.5"
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
    true_sum, true_accumulate = World.sum_gradients, TrajectoryGradients.accumulate
    true_trained = StepPlan.trained
    for cell, port in zip(CELLS, os.environ["PORTS"].split(","), strict=True):
        os.environ["MASTER_PORT"] = port
        seen = {"samples": {}, "gradients": [], "batches": [], "forwards": 0}
        on = CELLS[cell].get("equal", False)
        World.equal_forwards = property(lambda self, on=on: on)
        loop = Trainer(from_dict(cell_settings(place, cell, f"{cell}-{os.environ['WORLD_SIZE']}")))
        slots = loop.groups.plan(0).prompts
        os.environ["TIED"] = "\n".join(slots[p].text for p in CELLS[cell].get("tied", ()))

        def sum_gradients(world, parameters, seen=seen):
            true_sum(world, parameters)
            seen["gradients"].append(torch.cat([p.grad.flatten() for p in parameters]))

        def accumulate(self, batches, *rest, seen=seen):
            seen["batches"] += [(batch.number, batch.update, not batch.padding) for batch in batches]
            return true_accumulate(self, batches, *rest)

        def count(*_, seen=seen):
            seen["forwards"] += 1

        def compute(plan, scores, distances, seen=seen, compute=loop.targets.compute):
            seen["groups"] = scores.samples
            return compute(plan, scores, distances)

        loop.targets.compute = compute
        World.sum_gradients, TrajectoryGradients.accumulate = sum_gradients, accumulate
        loop.adapter.transformer.register_forward_pre_hook(count)

        def trained(plan, batches, mask, seen=seen):
            for batch in batches:
                for row, place in enumerate(zip(batch.slots, batch.members, strict=True)):
                    if not batch.padding:
                        assert place not in seen["samples"], "each sample is generated once"
                        seen["samples"][place] = [t[row].clone() for t in stored(batch)]
            return true_trained(plan, batches, mask)

        StepPlan.trained = trained
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
    return tiny_world(tmp_path_factory.mktemp("assignment"))


def run(place: Path, size: int) -> dict[str, list[dict]]:
    """Run all cells on `size` processes; returns what each process saw, by cell."""
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


class Share(NamedTuple):
    """A data-parallel share of several."""

    dp_index: int
    dp_size: int
    equal_forwards: bool

    def slots(self, count):
        return range(self.dp_index, count, self.dp_size)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("prompts", "updates", "shares"), [(3, 1, 2), (5, 2, 4), (4, 4, 3), (2, 4, 1)])
def test_all_processes_have_the_same_updates(prompts, updates, shares, equal):
    """Whichever groups carry a signal: the same numbers of updates and samples, every batch with a signal in one
    process, and with sharded weights equally many batches per update, which make as many forwards."""
    rollout = {"prompts_per_step": prompts, "group_size": 4, "batch_size": 2}
    settings = {"model": "m", "data": {"prompts": "p"}, "rollout": rollout, "train": {"updates_per_rollout": updates}}
    config = from_dict(settings)
    texts = [Prompt(k, str(k), {}, (), k + 1) for k in range(7)]
    for signals in itertools.product([False, True], repeat=prompts):
        mask = np.repeat(np.array(signals)[:, None], 4, 1)
        found = []
        for share in range(shares):
            plan = make_plan(config, 3, texts, Share(share, shares, equal), scores=True)
            made = [fake_batch(planned) for planned in (*plan.own, *plan.padding)]
            made = [replace(batch, padding=k >= len(plan.own)) for k, batch in enumerate(made)]
            assert len(made) == plan.rounds if equal else len(made) == len(plan.own)
            found.append(list(plan.updates(plan.trained(made, mask), mask)))
        numbers = [[(update.position, update.samples) for update in own] for own in found]
        assert all(own == numbers[0] for own in numbers)
        assert all(position // updates == 3 for position, _ in numbers[0])
        if all(signals):
            assert sum(samples for _, samples in numbers[0]) == 4 * prompts
        trained = [b.number for own in found for update in own for b in update.batches if not b.padding]
        assert sorted(trained) == [b.number for b in plan.batches if mask[b.places[0]]]
        if equal:
            assert all(len({len(own[k].batches) for own in found}) == 1 for k in range(len(numbers[0])))


def fake_batch(planned):
    nothing = torch.zeros(len(planned.places))
    return Batch(**vars(planned), groups=(), schedule=None, condition=None, ids=nothing, latents=nothing, sampling=None)
