"""The training loop: exact on-policy ratios, the gradient of the whole objective, and cases that must have no effect.

Why these cases: if the first importance ratio is not exactly 1, rollout and replay compute different policies, and at
clip ranges of 1e-5 the run then trains on rounding errors. The gradient of an update is compared with autograd through
the plain formulas, written here without the project's ops. Groups without learning signal must cost and change nothing.
"""

import gc
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ops_cases import plain_formula
from world import BRIGHTER, BRIGHTNESS, collect, computed, embed, rows, targets_of, unfuse

from prefgrpo.data.answer import Answer
from prefgrpo.ending import TrainingStopped
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Reward
from prefgrpo.sde import noise


class Constant(Reward):
    def ask(self, asked):
        return [Answer(0.3) for _ in asked]


class HalfTied(Reward):
    """All members of the first group get the same reward."""

    tied = ""

    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        self.tied = self.tied or samples[0].prompt
        return [Answer(0.1 if s.prompt == self.tied else float(s.media.pixels.mean())) for s in samples]


class OneMissing(Reward):
    first = ""

    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        self.first = self.first or samples[0].prompt
        scores = [Answer(float(s.media.pixels.mean())) for s in samples]
        return [Answer(None, "lost") if n == 1 and self.first == samples[0].prompt else s for n, s in enumerate(scores)]


class TooFew(Reward):
    def ask(self, asked):
        return [Answer(1.0)]


class Mostly(Reward):
    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        return [Answer(1.0) if n % 3 else Answer(float("nan")) for n in range(len(samples))]


class Never(Reward):
    def ask(self, asked):
        return [Answer(None, "no idea") for _ in asked]


HERE = f"{__name__}."

EXACT = {
    "plain": {},
    "bright": {"rewards": BRIGHTNESS},
    "ema": {"train": {"ema_decay": 0.9}},
    "kl": {"train": {"kl_coef": 0.5}},
    "window": {"rollout": {"steps": 6, "window_low": 1, "window_high": 5, "window_size": 2}},
    "subset": {"rollout": {"steps": 6, "window_size": 2, "window_policy": "subset", "sde_everywhere": True}},
    "slices": {"rollout": {"batch_size": 2}, "train": {"updates_per_rollout": 2, "update_slices": "members"}},
    "same noise": {"rollout": {"same_noise": True}},
    "many batches": {"rollout": {"prompts_per_step": 4, "batch_size": 2}},
    "group over batches": {"rollout": {"group_size": 6, "batch_size": 2}},
    "two updates": {"train": {"updates_per_rollout": 2}, "rollout": {"batch_size": 2}},
    "dance": {"rollout": {"rule": "dance", "eta": 0.3}},
    "cps": {"rollout": {"rule": "cps", "eta": 0.8}},
    "wan": {"rollout": {"rule": "wan"}},
    "shift": {"rollout": {"shift": 3.0, "guidance": 1.0}},
    "checkpointing": {"train": {"gradient_checkpointing": 1.0}},
    "full": {"train": {"lora_rank": 0, "lr": 1e-4}},
    "bf16": {"dtype": "bf16"},
    "odd size": {"rollout": {"height": 24, "width": 8}},
}


ALWAYS = ("subset", "slices", "group over batches", "full", "bf16")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.full] * (c not in ALWAYS)) for c in EXACT])
def test_the_first_update_is_on_policy_to_the_last_bit(trainer, case):
    """Two steps, so that the second starts from updated weights, which are fp32 whatever the type of the forward."""
    over = {"train": {"steps": 2}, "eval": {"every": 0}} | EXACT[case]
    over["train"] = {"steps": 2} | EXACT[case].get("train", {})
    one = trainer(**over)
    weights = [p.detach().clone() for p in one.policy.params]
    one.train()
    found = rows(one.folder.root)
    assert [r["step"] for r in found] == [1, 2]
    for row in found:
        assert row["policy/on_policy_error"] == 0.0 and row["samples_trained"] > 0 and row["grad_norm"] > 0
    assert one.policy.updates == 2 * one.config.train.updates_per_rollout
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in one.policy.params)
    if one.config.train.updates_per_rollout == 1:
        assert found[1]["policy/ratio_min"] == found[1]["policy/ratio_max"] == 1.0
    else:
        assert found[1]["policy/ratio_min"] < 1.0 < found[1]["policy/ratio_max"], "the second update is off-policy"
    assert any(not torch.equal(a, b) for a, b in zip(weights, one.policy.params, strict=True))


def around_loss(one, function):
    """Replace the objective's loss by function(loss, *arguments of the loss)."""
    loss = function and partial(function, one.objective.loss)
    one.gradients = replace(one.gradients, objective=SimpleNamespace(loss=loss, metrics=one.objective.metrics))


def moved(one, scale=0.05):
    """Perturb the policy's weights, so that KL and ratios are not trivial."""
    generator = torch.Generator().manual_seed(1)
    for p in one.policy.params:
        p.data.add_(scale * torch.randn(p.shape, generator=generator))


PLAIN_FORMULA = {
    "on-policy": {},
    "kl": {"train": {"kl_coef": 0.7}},
    "off-policy and clipped": {"train": {"clip_range": 2e-4}},
    "kl, window, batches": {
        "train": {"kl_coef": 0.3, "adv_clip_max": 0.8},
        "rollout": {"steps": 5, "window_size": 2, "batch_size": 2, "guidance": 2.0},
    },
}


@pytest.mark.parametrize(
    "blocks, case", [*(("diffusers", case) for case in PLAIN_FORMULA), ("fused", "kl, window, batches")]
)
def test_the_gradient_of_an_update_is_that_of_the_plain_formula(trainer, case, blocks, request):
    """Autograd through the objective as written in the papers, on the stored latents, sample by sample, and through
    diffusers' own blocks, whichever the update runs."""
    if blocks == "fused":
        request.getfixturevalue("forced")
    one = trainer(rewards=BRIGHTNESS, eval={"every": 0}, **PLAIN_FORMULA[case])
    c = one.config
    moved(one)
    batches = collect(one, 0)
    advantage = computed(one, one.scorer.finish())[0].advantage
    if case.startswith("off"):
        moved(one, 0.02)
    taken = []
    one.policy.update = lambda *_: taken.append([p.grad.clone() for p in one.policy.params]) or 0.0
    values = one.update(one.groups.plan(0), batches, targets_of(advantage))
    if blocks == "fused":
        unfuse(one.adapter)
    loss, truth, ratios = plain_formula(one, batches, advantage)
    assert len(ratios) == c.rollout.prompts_per_step * c.rollout.group_size * len(batches[0].transitions)
    assert values["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6)
    if case.startswith("off"):
        low, high = 1 - c.train.clip_range, 1 + c.train.clip_range
        assert min(ratios) < low and max(ratios) > high, "no ratio clipped on one side"
        outside = np.mean([r < low or r > high for r in ratios])
        assert values["policy/clip_fraction"] == pytest.approx(outside, abs=1e-9)
    ours = torch.cat([g.flatten() for g in taken[0]])
    assert float(truth.norm()) > 0
    assert float((ours - truth).norm() / truth.norm()) < 1e-4


def test_every_image_goes_to_its_own_prompt_and_group(trainer):
    """Each sample has the initial noise of its own address, and is conditioned on the prompt given to the reward."""
    one = trainer(rollout={"prompts_per_step": 3, "group_size": 2, "batch_size": 2}, eval={"every": 0})
    batches = collect(one, 5)
    assert [p for b in batches for p in zip(b.slots, b.members, strict=True)] == [
        (p, g) for p in range(3) for g in (0, 1)
    ]
    first = batches[0].transitions[0]
    ids = [(5 * 3 + p) * 2 + g for p, g in zip(batches[0].slots, batches[0].members, strict=True)]
    shape = one.adapter.latent_shape(one.config.rollout)
    assert torch.equal(first.x, noise.initial_latents(0, torch.tensor(ids), shape))
    for batch in batches:
        for row, (p, g) in enumerate(zip(batch.slots, batch.members, strict=True)):
            sample = one.scorer.generated()[5 * 3 + p][g]
            (condition,) = embed(one.groups.embeddings, one.adapter, [sample.prompt], one.config.rollout)
            for key, value in condition.tensors().items():
                assert torch.equal(value, batch.condition.tensors()[key][row])
    one.scorer.finish()
    same = trainer(name="same", rollout={"same_noise": True}, eval={"every": 0})
    x, other = (batch.transitions[0].x for batch in collect(same, 0))
    assert torch.equal(x, x[:1].expand_as(x)) and torch.equal(other, other[:1].expand_as(other))
    assert not torch.equal(x[0], other[0]), "each group has its own initial latent"


def test_groups_without_any_signal_change_nothing(trainer):
    """If all rewards are equal there is no forward, no update (also no weight decay or EMA), and the run finishes."""
    one = trainer(rewards=f"{HERE}Constant", train={"steps": 3, "weight_decay": 0.5, "ema_decay": 0.5})
    before = [p.detach().clone() for p in one.policy.params]
    around_loss(one, None)  # any replayed sample would call it and fail
    one.train()
    assert all(torch.equal(a, b) for a, b in zip(before, one.policy.params, strict=True)) and one.policy.updates == 0
    for row in (r for r in rows(one.folder.root) if r["kind"] == "train"):
        assert row["samples_trained"] == 0 and row["advantage/zero_groups"] == 1.0 and row["loss"] == 0.0
        assert not any(isinstance(v, float) and math.isnan(v) for v in row.values())


@pytest.mark.parametrize("batch_size", [2, 4])
def test_a_tied_group_costs_no_forward_and_stays_in_the_mean(trainer, batch_size):
    """Its samples still count in the denominator, so ties reduce the size of the update.
    It leaves whole batches: the others keep their shape, and their ratio is exact."""
    over = {"train": {"steps": 1}, "eval": {"every": 0}, "rollout": {"batch_size": batch_size}}
    one = trainer(rewards=f"{HERE}HalfTied", **over)
    seen = []
    around_loss(one, lambda loss, train, new, adv, n: seen.append((len(adv), n)) or loss(train, new, adv, n))
    one.train()
    row = rows(one.folder.root)[0]
    assert row["advantage/zero_groups"] == 0.5 and row["samples_trained"] == 4
    assert sum(n for n, _ in seen) == 4 * 2 and {d for _, d in seen} == {8.0 * 2}, "not 8 samples × 2 steps"
    assert {n for n, _ in seen} == {batch_size} and row["policy/on_policy_error"] == 0.0


def test_a_missing_reward_is_left_out_of_its_group(trainer):
    one = trainer(rewards=f"{HERE}OneMissing", judge={"max_missing": 0.2}, eval={"every": 0})
    batches = collect(one, 0)
    assert len(batches) == 2
    scores = one.scorer.finish()
    (advantage, *_), values = computed(one, scores)
    assert values["reward/missing"] == 1 / 8 and advantage[0, 1] == 0
    rest = scores.values[f"{HERE}OneMissing"][0, [0, 2, 3]]
    expected = (rest - rest.mean()) / (rest.std() + 1e-4)
    assert np.allclose(advantage[0, [0, 2, 3]].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "share", "reason"),
    [("Mostly", 38, "the reward returned nan"), ("TooFew", 100, "expected one Answer for each of 8 questions, got 1")],
)
def test_too_many_missing_rewards_stop_with_a_checkpoint(trainer, name, share, reason):
    one = trainer(name=name, rewards=f"{HERE}{name}", eval={"every": 0})
    with pytest.raises(TrainingStopped) as caught:
        one.train()
    told = str(caught.value)
    for part in ("step 1:", f"{share}% of the rewards are missing", "judge.max_missing = 10%", reason):
        assert part in told
    assert (one.folder.checkpoint(0) / "state.json").is_file() and "--resume" in told


def test_monitors_are_logged_and_not_trained_on(trainer, capsys):
    """A reward of weight 0 affects only its own metrics; why it never has a value is said once."""
    alone = trainer(name="alone", train={"steps": 2}, rewards="jpeg_compressibility")
    alone.train()
    both = trainer(name="both", train={"steps": 2}, rewards=f"jpeg_compressibility:1,{HERE}Mostly:0,{HERE}Never:0")
    both.train()
    printed = capsys.readouterr().out
    assert printed.count(f"missing in step 1: 8 × {HERE}Never: no idea") == printed.count("no idea") == 1
    for a, b in zip(rows(alone.folder.root), rows(both.folder.root), strict=True):
        assert a == {k: v for k, v in b.items() if "Mostly" not in k and "Never" not in k}
    row = rows(both.folder.root)[1]
    assert row[f"reward/{HERE}Never/missing_rate"] == 1 and f"reward/{HERE}Never" not in row
    assert f"reward/{HERE}Mostly" in rows(both.folder.root)[1]


def poison(one, at):
    """Make the gradient NaN from optimiser update `at` on."""

    def loss(true_loss, *arguments):
        out = true_loss(*arguments)
        return out._replace(loss=out.loss * float("nan")) if one.policy.updates >= at else out

    around_loss(one, loss)


def test_a_gradient_that_is_not_finite_is_skipped_and_many_stop_the_run(trainer):
    one = trainer(name="nan", eval={"every": 0}, train={"steps": 6})
    poison(one, at=1)
    with pytest.raises(
        TrainingStopped, match=r"step 4: gradient norm is nan, in 3 updates in a row\nCheckpoint saved to .*step_000003"
    ):
        one.train()
    assert all(p.isfinite().all() for p in one.policy.params) and one.policy.updates == 1
    found = rows(one.folder.root)
    assert [(r["updates_skipped"], r["updates"], "grad_norm" in r) for r in found] == [
        (0, 1, True), (1, 1, False), (1, 1, False),
    ]  # fmt: skip
    assert "<li>2 of 3 updates were skipped: gradient not finite.</li>" in one.folder.report.read_text()
    assert trainer(name="nan", resume=True, eval={"every": 0}, train={"steps": 6}).policy.updates == 1


@pytest.mark.parametrize("kind", ["without signal", "not finite"])
def test_updates_that_are_not_made_do_not_delay_the_learning_rate(trainer, kind):
    """8 updates, of which some are not made: the others have the rates of their places on the line from lr to 0."""
    absent = {(0, 1), (1, 0), (1, 1), (3, 0)} if kind == "without signal" else {(0, 1), (1, 0), (2, 1)}
    train = {"steps": 4, "updates_per_rollout": 2, "lr": 0.008, "lr_scheduler": "linear"}
    one = trainer(train=train, eval={"every": 0})
    update = one.policy.update
    mask = one.objective.mask
    steps = iter(range(4))
    made = []

    def without(train, targets):
        kept = mask(train, targets).clone()
        step = next(steps)
        kept[[p for p in range(2) if (step, p) in absent]] = False
        return kept

    def poisoned(world, position):
        for p in one.policy.params if divmod(position, 2) in absent else ():
            p.grad.fill_(float("nan"))
        return update(world, position)

    if kind == "without signal":
        object.__setattr__(one.objective, "mask", without)
    else:
        one.policy.update = poisoned
    one.policy.optimizer.register_step_pre_hook(lambda adam, *_: made.append(adam.param_groups[0]["lr"]))
    one.train()
    places = [divmod(position, 2) for position in range(8)]
    assert made == pytest.approx([0.001 * (8 - 2 * s - u) for s, u in places if (s, u) not in absent])
    assert [row["lr"] for row in rows(one.folder.root)] == pytest.approx([0.007, 0.005, 0.003, 0.001])


@pytest.mark.full
def test_a_stop_between_two_updates_of_a_step_saves_no_half_step(trainer):
    over = {"train": {"updates_per_rollout": 4, "steps": 2}, "eval": {"every": 0}, "checkpoint": {"every": 1}}
    over |= {"rollout": {"batch_size": 2}}
    one = trainer(name="half", **over)
    poison(one, at=5)
    with pytest.raises(TrainingStopped, match=r"step 2: .*\nthe newest checkpoint is .*step_000001; continue"):
        one.train()
    again = trainer(name="half", resume=True, **over)
    again.train()
    straight = trainer(name="unhurt", **over)
    straight.train()
    assert rows(again.folder.root) == rows(straight.folder.root)


def test_a_step_gathers_objects_twice(trainer, monkeypatch):
    """Each is two collectives for which all processes wait: what was judged (rewards, comparisons, missing ones,
    distances, metrics), and the metrics of the update."""
    counts = [0]
    true_gather = World.all_gather_object

    def all_gather_object(self, mine):
        counts[-1] += 1
        return true_gather(self, mine)

    monkeypatch.setattr(World, "all_gather_object", all_gather_object)
    one = trainer(rewards=f"{BRIGHTER}:0.5,{HERE}OneMissing:0.5", judge={"max_missing": 0.3}, eval={"every": 0})
    true_step = one.step

    def step(*given):
        counts.append(0)
        out = true_step(*given)
        counts.append(0)
        return out

    one.step = step
    one.train()
    assert counts[1::2] == [2] * 4
    found = rows(one.folder.root)
    assert found[0]["reward/missing"] > 0 and all(row["judge/requests"] > 0 for row in found)


@pytest.mark.full
def test_garbage_collection_leaves_out_what_exists_before_the_first_step(trainer):
    """Half a million objects of the libraries alone; a closed trainer can be collected, with its model."""
    frozen = []
    one = trainer(callbacks={"on_step": lambda step, metrics: frozen.append(gc.get_freeze_count())}, eval={"every": 0})
    one.train()
    assert min(frozen) > 100_000 and gc.get_freeze_count() == 0
