"""The KL's forwards of the reference policy: run while answers are awaited, with the numbers of a run that awaits none.

Why these cases: whether these forwards fit into the wait must change no bit, for a LoRA (switched off) and for all
weights (exchanged), with samples made ahead, and over processes, where all must run equally many forwards. The order of
events is shown by a judge that answers only when it has seen them.
"""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from ranks import all_end, ranks, until
from world import BRIGHTNESS, recipe, rows, weights

from prefgrpo.data.answer import Answer
from prefgrpo.models.base import Adapter
from prefgrpo.objectives.grpo import GRPO
from prefgrpo.rewards.base import Reward
from prefgrpo.update import reference


class AtOnce(Reward):
    """Mean of all pixels; every answer is there as soon as it is asked for."""

    streams = True

    def ask(self, asked):
        raise AssertionError("a streaming reward is not called in bulk")

    async def ask_one(self, *samples):
        return Answer(float(samples[0].media.pixels.mean()))


class Awaited(AtOnce):
    """The same, answered, a step at a time, when `answer_step` is called."""

    asked: ClassVar[list] = []

    async def ask_one(self, *samples):
        answer = Future()
        Awaited.asked.append((answer, await super().ask_one(*samples)))
        return await asyncio.wrap_future(answer)

    @staticmethod
    def answer_step():
        until(lambda: len(Awaited.asked) >= SAMPLES)  # the event loop may not have come to all of them
        of_step = Awaited.asked[:SAMPLES]
        Awaited.asked = Awaited.asked[SAMPLES:]
        for future, score in of_step:
            future.set_result(score)


HERE = f"{__name__}."
SAMPLES = 8
"""In a step."""
KL = {"kl_coef": 0.5, "steps": 3, "updates_per_rollout": 2}
CASES = {
    "LoRA": {"train": KL},
    "all weights": {"train": KL | {"lora_rank": 0, "lr": 1e-4}},
    "staleness": {"train": KL, "rollout": {"staleness": 1}},
    "images of every prompt": {"train": KL | {"update_slices": "members"}, "dtype": "bf16"},
}


@pytest.fixture(autouse=True)
def nothing_asked():
    Awaited.asked = []


@pytest.fixture
def forwards(monkeypatch):
    """Forwards without gradient, from each call of `Reference.add_while_judged` or `add` until the next."""
    counts = []
    true_velocity = Adapter.velocity
    inside = reference.Reference._add

    def velocity(self, *given):
        if counts and torch.is_grad_enabled() is False:
            counts[-1] += 1
        return true_velocity(self, *given)

    def add(self, batches, goes_on):
        counts.append(0)
        return inside(self, batches, goes_on)

    monkeypatch.setattr(Adapter, "velocity", velocity)
    monkeypatch.setattr(reference.Reference, "_add", add)
    return counts


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.full] * (c != "LoRA")) for c in CASES])
def test_they_run_before_the_last_answer_and_change_no_bit(trainer, monkeypatch, forwards, case):
    """Two forwards per batch of four samples: in the wait if there is one, else in the update."""
    over = {"rollout": {"batch_size": 2}, "eval": {"every": 0}, "checkpoint": {"every": 3}} | CASES[case]
    over["rollout"] = {"batch_size": 2} | over["rollout"]
    true = reference.Reference.add_while_judged

    def answered(self, batches):
        until(lambda: not self.scorer.waits())
        return true(self, batches)

    monkeypatch.setattr(reference.Reference, "add_while_judged", answered)
    at_once = trainer(f"at once, {case}", rewards=f"{HERE}AtOnce", **over)
    at_once.train()
    assert [forwards[0], forwards[2]] == [0, 0], "nothing was awaited"
    forwards.clear()

    def add_while_judged(self, batches):
        out = true(self, batches)
        assert all(step.v_ref is not None for batch in out for step in batch.transitions)
        Awaited.answer_step()
        return out

    monkeypatch.setattr(reference.Reference, "add_while_judged", add_while_judged)
    awaited = trainer(f"awaited, {case}", rewards=f"{HERE}Awaited", judge={"deadline_s": 30, "timeout_s": 30}, **over)
    awaited.train()

    def renamed(row):
        return {key.replace("AtOnce", "Awaited"): value for key, value in row.items()}

    assert [renamed(row) for row in rows(at_once.folder.root)] == rows(awaited.folder.root)
    assert weights(at_once.folder.root) == weights(awaited.folder.root)
    assert all(row["policy/kl"] > 0 for row in rows(awaited.folder.root)[1:])


def test_a_wait_that_ends_leaves_the_rest_to_the_update(trainer, monkeypatch):
    """The answers come during the first batch, so the second is not begun: its group may carry no signal."""
    one = trainer(rewards=f"{HERE}Awaited", train=KL, eval={"every": 0})
    batches = one.generate(0).batches
    true_with_reference = one.gradients.with_reference

    def with_reference(batch):
        if one.scorer.waits():
            Awaited.answer_step()
            until(lambda: not one.scorer.waits())
        return true_with_reference(batch)

    object.__setattr__(one.gradients, "with_reference", with_reference)
    some = one.reference.add_while_judged(batches)
    assert [[step.v_ref is not None for step in batch.transitions] for batch in some] == [[True, True], [False, False]]
    every = one.reference.add(some)
    assert every[0] is some[0] and all(step.v_ref is not None for step in every[1].transitions)
    one.scorer.finish()


def test_they_leave_a_judge_that_hangs_its_deadline(trainer, monkeypatch):
    """The other processes wait for these forwards and then for the deadline, of which collectives have two."""
    judge = {"deadline_s": 30, "timeout_s": 30}
    one = trainer(rewards=f"{HERE}Awaited", train=KL, eval={"every": 0}, judge=judge)
    batches = one.generate(0).batches
    true_with_reference = one.gradients.with_reference
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def with_reference(batch):
        clock.now += 20.0
        return true_with_reference(batch)

    monkeypatch.setattr(reference, "time", clock)
    object.__setattr__(one.gradients, "with_reference", with_reference)
    some = one.reference.add_while_judged(batches)
    assert [[step.v_ref is not None for step in batch.transitions] for batch in some] == [[True, True], [False, False]]
    Awaited.answer_step()
    one.scorer.finish()


class Chosen(GRPO):
    """Trains on the samples with an advantage above 0."""

    def mask(self, train, targets):
        return targets.advantage > 0


@pytest.mark.parametrize("own", [{"objective_options": {"best_of": 2}}, {"objective": f"{HERE}Chosen"}])
def test_an_objective_that_trains_on_a_part_of_a_group_waits_for_the_rewards(trainer, own):
    """A batch without some of its samples has another shape, whose forwards may round otherwise."""
    one = trainer(rewards=f"{HERE}Awaited", train=KL | own, eval={"every": 0})
    batches = one.generate(0).batches
    early = one.reference.add_while_judged(batches)
    assert [step.v_ref for batch in early for step in batch.transitions] == [None] * 4
    Awaited.answer_step()
    one.scorer.finish()


@pytest.mark.full
@pytest.mark.dist
def test_processes_that_share_weights_run_equally_many(place):
    """Three prompts on two processes with one copy of the weights: one has a batch of padding. Only a judge is
    awaited, so a reward in the process shows the other order."""
    over = {"train": KL | {"lora_rank": 0, "lr": 1e-4, "steps": 2}, "parallel": {"shard": 2}}
    over |= {"rollout": {"prompts_per_step": 3}, "eval": {"every": 0}}
    found = []
    for name, reward in (("split", f"{HERE}AtOnce"), ("inside", BRIGHTNESS)):
        all_end(ranks(recipe(place, name, rewards=reward, **over), 2))
        run = place / "runs" / name
        found.append(([{k: v for k, v in row.items() if "reward/" not in k} for row in rows(run)], weights(run)))
    assert found[0] == found[1]
