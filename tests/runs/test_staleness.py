"""rollout.staleness: the next step's samples are made while a step is still being judged, before its update.

Why these cases: errors in off-policy sampling are easily missed. So the weights that made each step's samples are
listed by hand and loaded into a second trainer, which must reproduce the samples bit for bit; each update's gradient is
compared with autograd through the plain formula, with the stored log-probs as the old ones. If no weight changes,
staleness must change no number. A judge that answers a step only once the next step's samples exist shows the order of
events (in series it would never answer). A resumed run must equal an uninterrupted one, and two processes one.
"""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from ops_cases import plain_formula
from ranks import all_end, ranks
from world import BRIGHTNESS, batches_of, recipe, rows, stored, weights

from prefgrpo import trainer as trainer_module
from prefgrpo.data.answer import Answer
from prefgrpo.ending import TrainingStopped
from prefgrpo.rewards.base import Reward
from prefgrpo.run.log import Clock

STALE = {"staleness": 1}


HERE = f"{__name__}."


# ---- which weights make the samples ---------------------------------------------------------------------------------

MADE_BY = [0, 0, 1, 3, 3]
"""Updated steps in the weights that make the samples of step 1, 2, …; no samples are made ahead across the checkpoint
after step 3."""


def recorded(one):
    """For each update of a run: the weights before it, batches, advantages, gradient, and the trajectories' bytes."""
    seen, true_update, true_step = [], one.update, one.policy.update

    def update(plan, batches, targets):
        kept = {t.untyped_storage() for b in (*batches, *(one._ahead.batches if one._ahead else ()))
                for t in stored(b)}  # fmt: skip
        held = sum({s.data_ptr(): s.nbytes() for s in kept}.values())
        before = [p.detach().clone() for p in one.policy.params]
        seen.append(SimpleNamespace(weights=before, batches=batches, advantage=targets.advantage, held=held))
        return true_update(plan, batches, targets)

    def optimise(*given):
        seen[-1].gradient = torch.cat([p.grad.flatten() for p in one.policy.params])
        return true_step(*given)

    one.update, one.policy.update = update, optimise
    one.train()
    return seen


def put(one, values):
    with torch.no_grad():
        for p, value in zip(one.policy.params, values, strict=True):
            p.copy_(value)


def test_the_samples_are_those_of_older_weights_and_the_ratio_is_to_them(trainer):
    over = {"train": {"steps": 5, "lr": 1e-2, "clip_range": 2e-4}, "checkpoint": {"every": 3}, "eval": {"every": 0}}
    over["rewards"] = BRIGHTNESS
    one, plain = trainer("ahead", rollout=STALE, **over), trainer("plain", **over)
    seen = recorded(one)
    found = rows(one.folder.root)
    for k, (made_by, now, row) in enumerate(zip(MADE_BY, seen, found, strict=True)):
        put(plain, seen[made_by].weights)
        same = batches_of(plain, k)
        for ours, theirs in zip(now.batches, same, strict=True):
            pairs = zip(stored(ours), stored(theirs), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), k
        put(plain, now.weights)
        loss, gradient, _ = plain_formula(plain, same, now.advantage)
        assert row["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6), k
        assert float((now.gradient - gradient).norm() / gradient.norm()) < 1e-4, k
        assert row["policy/staleness"] == k - made_by
        assert row.get("policy/on_policy_error") == (0.0 if k == made_by else None)
        assert (row["policy/ratio_min"] < 1.0 < row["policy/ratio_max"]) == (k != made_by)
    assert 0 < found[1]["policy/clip_fraction"] < 1, "expected some ratios to be clipped"
    assert seen[0].held == seen[1].held == 2 * seen[2].held, "expected two steps' samples if made ahead"


SAME = {
    "grpo": {"updates_per_rollout": 2, "kl_coef": 0.1, "ema_decay": 0.5},
    "guard": {"objective": "grpo_guard"},
    "sft": {"objective": "sft"},
}


@pytest.mark.parametrize("case", ["grpo", *(pytest.param(c, marks=pytest.mark.full) for c in ("sft", "guard"))])
def test_where_no_weight_moves_nothing_changes(trainer, case):
    found = []
    for staleness in (0, 1):
        over = {"rollout": {"staleness": staleness}, "checkpoint": {"every": 3}, "rewards": BRIGHTNESS}
        one = trainer(f"{case}{staleness}", train={"steps": 4, "lr": 1e-30} | SAME[case], **over)
        one.train()
        found.append(rows(one.folder.root))
    assert len(found[0]) == len(found[1]) > 4
    for before, ahead in zip(*found, strict=True):
        only = {"policy/staleness"} if ahead["kind"] == "train" else set()
        assert only == ahead.keys() - before.keys() and before.keys() - ahead.keys() <= {"policy/on_policy_error"}
        both = before.keys() & ahead.keys()
        assert {key: before[key] for key in both} == {key: ahead[key] for key in both}
    updates = SAME[case].get("updates_per_rollout", 1)
    assert [r["policy/staleness"] for r in found[1] if r["kind"] == "train"] == [0, updates, updates, 0]


# ---- order and time -------------------------------------------------------------------------------------------------

STEPS, SAMPLES = 3, 8


class OneStepLate(Reward):
    """Answers a step's samples only when all samples of the next step have been submitted."""

    streams = True

    def __init__(self):
        self.asked = []

    def ask(self, asked):
        raise AssertionError("a streaming reward is not called in bulk")

    async def ask_one(self, *samples):
        own = Future()
        self.asked.append((own, Answer(float(samples[0].media.pixels.mean()))))
        whole, rest = divmod(len(self.asked), SAMPLES)
        for future, score in self.asked[: (whole - (whole < STEPS)) * SAMPLES] if not rest else ():
            if not future.done():
                future.set_result(score)
        return await asyncio.wrap_future(own)


def test_the_next_samples_are_made_before_the_scores_are_there(trainer, monkeypatch, capsys):
    """Also, all time is counted once, in the step that waited for it."""
    events, time = [], [0.0]
    monkeypatch.setattr(trainer_module, "Clock", lambda: Clock(now=lambda: time[0]))
    over = {"judge": {"deadline_s": 60, "timeout_s": 60}, "eval": {"every": 0}, "checkpoint": {"every": 20}}
    one = trainer("late", rollout=STALE, train={"steps": STEPS}, rewards=f"{HERE}OneStepLate", **over)

    def noted(owner, name, what, seconds):
        true = getattr(owner, name)

        def call(*arguments, **named):
            out = true(*arguments, **named)
            events.append(what)
            time[0] += seconds
            return out

        setattr(owner, name, call)

    noted(one, "generate", "made", 10.0)
    noted(one.scorer, "finish", "scored", 1.0)
    noted(one, "update", "updated", 3.0)
    one.train()
    done = ["scored", "updated"]
    assert events == ["made", "made", *done, "made", *done, *done]
    found = rows(one.folder.root, timeless=False)
    phases = [[r[f"time/{name}"] for name in ("rollout", "judge_wait", "update")] for r in found]
    assert phases == [[20.0, 1.0, 3.0], [10.0, 1.0, 3.0], [0.0, 1.0, 3.0]]
    assert all(r["reward/missing"] == 0 for r in found)
    printed = capsys.readouterr().out
    assert "on-policy check: max |ratio - 1| = 0.0e+00 (exact)" in printed
    assert printed.count("on-policy check") == 1


# ---- stopped and resumed --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_resumed_run_is_the_one_that_was_not_stopped(trainer, place):
    """One run fails after step 3, with step 4's samples already made; one is interrupted where no checkpoint is due."""

    def lost(step, metrics):
        if step == 3:
            raise OSError("lost")

    over = {"rollout": STALE, "train": {"steps": 5, "ema_decay": 0.5}, "rewards": BRIGHTNESS}
    trainer("straight", **over).train()
    with pytest.raises(OSError, match="lost"):
        trainer("stopped", callbacks={"on_step": lost}, **over).train()
    trainer("stopped", resume=True, **over).train()
    straight, stopped = place / "runs" / "straight", place / "runs" / "stopped"
    assert rows(stopped) == rows(straight) and weights(stopped) == weights(straight)
    assert [r["policy/staleness"] for r in rows(straight) if r["kind"] == "train"] == [0, 1, 0, 1, 0]

    one = trainer("interrupted", **over)
    one.on_step = lambda step, metrics: setattr(one.interrupt, "seen", True)
    with pytest.raises(TrainingStopped, match="interrupted after step 1"):
        one.train()
    trainer("interrupted", resume=True, **over).train()
    anew = [r for r in rows(place / "runs" / "interrupted") if r["kind"] == "train"]
    assert anew[0] == rows(straight)[1] and anew[1] != rows(straight)[2]
    assert [r["policy/staleness"] for r in anew] == [0] * 3 + [1, 0] and anew[1]["policy/on_policy_error"] == 0.0


# ---- several processes ----------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.full
def test_two_processes_are_one(trainer, place):
    """Groups span the processes: both make the next samples ahead, but neither does so across the checkpoint."""
    over = {"rollout": STALE | {"prompts_per_step": 3, "batch_size": 2}, "rewards": BRIGHTNESS}
    over["train"] = {"steps": 4, "lr": 1e-3, "updates_per_rollout": 2, "kl_coef": 0.1}
    over["checkpoint"] = {"every": 3}
    trainer("one", **over).train()
    all_end(ranks(recipe(place, "two", **over), 2), seconds=900)
    one, two = rows(place / "runs" / "one"), rows(place / "runs" / "two")
    assert [(r["kind"], r["step"]) for r in one] == [(r["kind"], r["step"]) for r in two]
    for a, b in zip(one, two, strict=True):
        assert a.get("policy/staleness") == b.get("policy/staleness") and a.keys() == b.keys()
        compared = {"grad_norm", "loss", "policy/kl", "policy/ratio_min", "policy/ratio_max"}
        for key in (key for key in a if key in compared or "Brightness" in key):
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=2e-6), (a["step"], key)
    assert [r["policy/staleness"] for r in two if r["kind"] == "train"] == [0, 2, 2, 0]
