"""Every objective against its published formula, evaluated here per sample in fp64, and in real runs.

Why these cases: all objectives share the code for draws, other policies, batches and denominators, so an error in one
of these changes every gradient. The oracle uses the model's velocities but none of the project's loss code and
differentiates the formula in fp64; both must agree for packed (FLUX), 4-d (SD3) and 5-d (Wan) latents, LoRA and full
fine-tuning, and groups within one batch or spread over several (the two-pass form). Real runs: a pairwise judge, two
processes against one, and a bit-identical resumed run.
"""

import functools
import re
from dataclasses import replace

import numpy as np
import peers
import pytest
import torch
from ops_cases import plain_formula
from ranks import fuse_on_cpu, ranks
from torch.nn import functional as F
from world import ALONE, batches_of, case_of, conditions, folder, load, perturb, recipe, rows, targets_of

from prefgrpo.config.schema import Config, TrainConfig
from prefgrpo.objectives import OBJECTIVES, make_objective
from prefgrpo.objectives.awm import AWM
from prefgrpo.objectives.base import GroupObjective, PointwiseObjective, Targets, TrajectoryObjective
from prefgrpo.objectives.nft import NFT
from prefgrpo.rewards.functions import FunctionPairs
from prefgrpo.rollout.batch import Batch
from prefgrpo.run.log import Clock
from prefgrpo.run.opening import open_gradients, open_policy
from prefgrpo.sde.noise import endpoint_noise, endpoint_normal
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.update.metrics import FACTS

P, G, SEED = 3, 4, 5
GENERATOR = torch.Generator().manual_seed(3)
ADVANTAGE = torch.randn(P, G, generator=GENERATOR)
ADVANTAGE[2] = 0.0
WINS = torch.rand(P, G, G, generator=GENERATOR).triu(1)
WINS = WINS + (1.0 - WINS).triu(1).mT
COUNTS = 1.0 - torch.eye(G).repeat(P, 1, 1)
COUNTS[0, 1, 2] = COUNTS[0, 2, 1] = WINS[0, 1, 2] = WINS[0, 2, 1] = 0.0  # a pair that was not compared
WINS[1, 0, 3] = WINS[1, 3, 0] = 0.5  # a tie
TARGETS = Targets(ADVANTAGE, WINS, COUNTS, torch.ones(P, G, dtype=torch.bool))


def mse(a, b):
    return (a - b).square().flatten(1).mean(1)


def preference(case, x, of):
    """Sum over groups of the loss `of` applied to h = ½β(d_ref − d) [G]."""
    h = 0.5 * case.beta * (mse(x["compared"], x["u"]) - mse(x["v"], x["u"])).view(-1, G)
    return sum(of(h[k], slot) for k, slot in enumerate(x["slots"]))


def pairs(h, slot, term):
    wins, counts = WINS[slot].double(), COUNTS[slot]
    there = [(i, j) for i in range(G) for j in range(i + 1, G) if counts[i, j]]
    return sum(term(h[i] - h[j], wins[i, j]) for i, j in there) / len(there)


def nft(o, x):
    a_max, t = 5.0, x["t"].view(-1, *[1] * (x["v"].dim() - 1))
    if o.optimality == "win_rate":
        r = (WINS.sum(2) / COUNTS.sum(2))[x["slots"]].double().flatten()
    else:
        r = (x["adv"] / a_max / 2 + 0.5).clamp(0, 1)
    scale = a_max if o.optimality == "advantage" else 1.0
    total = 0.0
    for sign, share in ((1, r), (-1, 1 - r)):
        v = x["compared"] + sign * o.beta * (x["v"] - x["compared"])
        if o.weighted:
            x0, x0_hat = x["x0"], x["xt"] - t * v
            w = (x0_hat - x0).detach().abs().flatten(1).mean(1)
            total = total + share * mse(x0_hat, x0) / w
        else:
            total = total + share * mse(v, x["u"])
    return (total * scale / o.beta).sum() / G


def awm(o, x):
    def likelihood(v):
        d = mse(v, x["u"])
        return {
            "uniform": -d, "t": -d * x["t"], "t2": -d * x["t"] ** 2, "huber": -((d + 1e-10).sqrt() - 1e-5) * x["t"],
            "ghuber": -((d + 1e-10) ** 0.25 - 1e-10**0.25) * x["t"] / 0.25,
        }[o.weight]  # fmt: skip

    if not o.ratio:
        return -(x["adv"] * likelihood(x["v"])).sum() / G
    ratio = torch.exp(likelihood(x["v"]) - likelihood(x["compared"]))
    return torch.maximum(-x["adv"] * ratio, -x["adv"] * ratio.clamp(1 - 1e-4, 1 + 1e-4)).sum() / G


def best_of_groups(x):
    return torch.cat([F.one_hot(ADVANTAGE[s].argmax(), G) for s in x["slots"]]).double()


def dpo(o, x):
    return preference(o, x, lambda h, s: -F.logsigmoid(h[ADVANTAGE[s].argmax()] - h[ADVANTAGE[s].argmin()]))


def soft(o, x):
    logit = lambda w: (w.clamp(0.02, 0.98) / (1 - w.clamp(0.02, 0.98))).log()  # noqa: E731
    term = {
        "logistic": lambda z, w: -w * F.logsigmoid(z) - (1 - w) * F.logsigmoid(-z),
        "ipo": lambda z, w: w * (z - o.margin) ** 2 + (1 - w) * (z + o.margin) ** 2,  # equal up to a constant
        "logit": lambda z, w: (z - logit(w)) ** 2,
    }[o.form]
    return preference(o, x, lambda h, s: pairs(h, s, term))


ENDPOINT = {
    "nft": ("nft", {}, nft),
    "nft win rate": ("nft", {"optimality": "win_rate", "beta": 0.3, "weighted": False, "decay": 0.9}, nft),
    "awm": ("awm", {}, awm),
    "awm t": ("awm", {"weight": "t"}, awm),
    "awm t2": ("awm", {"weight": "t2", "times": "uniform"}, awm),
    "awm huber": ("awm", {"weight": "huber", "times": "logit_normal"}, awm),
    "awm ghuber": ("awm", {"weight": "ghuber", "times": "schedule"}, awm),
    "awm ratio": ("awm", {"ratio": True}, awm),
    "sft": ("sft", {}, lambda o, x: (best_of_groups(x) * mse(x["v"], x["u"])).sum()),
    "dpo": ("dpo", {}, dpo),
    "dpo old": ("dpo", {"reference": "old", "beta": 20.0}, dpo),
    "soft dpo": ("soft_dpo", {}, soft),
    "soft dpo, 2 draws": ("soft_dpo", {"draws": 2}, soft),
    "ipo": ("soft_dpo", {"form": "ipo", "beta": 3.0}, soft),
    "logit": ("soft_dpo", {"form": "logit", "beta": 3.0}, soft),
}  # fmt: skip
"""Objective, its options, and the published loss as a sum over groups."""


def test_the_table_has_every_objective():
    trajectory = {
        n for n in OBJECTIVES if issubclass(type(make_objective(TrainConfig(objective=n))), TrajectoryObjective)
    }
    assert {name for name, _, _ in ENDPOINT.values()} | trajectory == set(OBJECTIVES)


class Setting:
    """A tiny model with different current, old and starting weights, and the final latents of a step."""

    def __init__(self, family, lora):
        case = case_of(family)
        self.adapter, self.lora = load(case), lora
        if lora:
            self.adapter.add_lora(4, 8.0)
        else:
            self.adapter.enable_full()
        self.sampling = replace(case.sampling(), prompts_per_step=P, group_size=G)
        self.weights = {}
        for which, scale in {"reference": 0.0, "old": 0.02, "live": 0.01}.items():
            perturb(self.adapter, scale)
            self.weights[which] = [p.detach().clone() for _, p in self.adapter.trainable()]
        self.condition = conditions(self.adapter, case, ["red", "a blue ball", "x"])
        self.x0 = torch.randn(
            P * G, *self.adapter.latent_shape(self.sampling), generator=torch.Generator().manual_seed(1)
        )
        self.schedule = make_schedule(self.adapter.sigmas(self.sampling), "ode", 0.0, trained=(0, 1))

    def batches(self, size, groups):
        places = [(p, g) for p in groups for g in range(G)]
        out = []
        for k in range(0, len(places), size):
            own = places[k : k + size]
            at = torch.tensor([p * G + g for p, g in own])
            condition = self.condition.select(torch.tensor([p for p, _ in own]))
            ids = at + 7 * P * G
            groups = tuple((ids // G).tolist())
            done = (groups, self.schedule, condition, ids, self.x0[at], self.sampling)
            out.append(Batch(len(out), 0, tuple(own), 0, *done))
        return out

    def set(self, which):
        """Load the weights "reference", "old" or "live"."""
        with torch.no_grad():
            torch._foreach_copy_([p for _, p in self.adapter.trainable()], self.weights[which])

    def velocity(self, x, sigma, condition, which):
        """The velocity under these weights."""
        if which == "reference" and self.lora:
            with self.adapter.reference():
                return self.adapter.velocity(x, sigma, condition, self.sampling).double()
        self.set(which)
        v = self.adapter.velocity(x, sigma, condition, self.sampling).double()
        self.set("live")
        return v


@pytest.fixture(scope="module")
def setting():
    return functools.cache(Setting)


def drawn(o, schedule, groups, draw):
    """(t, σ given to the model), computed from the draw's normal number by the definition of each distribution."""
    z = endpoint_normal(SEED, groups, draw)
    u = (draw + 0.5 * (1 + torch.erf(z / 2**0.5))) / o.draws
    if o.times == "uniform":
        return (u.float(), u.float())
    if o.times == "logit_normal":
        assert o.draws == 1
        return (torch.sigmoid(z).float(),) * 2
    steps = [0, 1] if o.times == "window" else range(schedule.steps)
    k = torch.tensor([steps[int(a * len(steps))] for a in u])
    return schedule.sigmas[k], schedule.times[k]


WAYS = [("flux", True, G), ("flux", True, 3)]
WAYS += [
    pytest.param(*way, marks=pytest.mark.full) for way in (("flux", False, 3), ("sd3", True, 3), ("wan", False, G))
]
"""Packed, 4-d and 5-d latents, LoRA and all weights, each once more."""


@pytest.mark.parametrize("name", ENDPOINT)
@pytest.mark.parametrize("family, lora, size", WAYS)
def test_the_gradient_is_that_of_the_published_formula(setting, family, lora, name, size):
    """At size 3, groups are spread over several batches. Every case also has the KL to the starting weights."""
    one, (kind, options, formula) = setting(family, lora), ENDPOINT[name]
    train = TrainConfig(objective=kind, objective_options=options, lora_rank=4 * lora, kl_coef=0.2)
    config = Config(seed=SEED, rollout=replace(one.sampling, batch_size=size), train=train)
    one.set("reference")
    o, policy = make_objective(train), open_policy(config, make_objective(train), one.adapter)
    one.set("old")
    policy.old and torch._foreach_copy_(list(policy.old.values()), one.weights["old"])
    one.set("live")
    groups = [p for p in range(P) if o.mask(train, TARGETS)[p].any()]
    assert groups == ([0, 1, 2] if kind == "soft_dpo" else [0, 1])
    kept = [batch.select(o.mask(train, TARGETS).numpy()) for batch in one.batches(size, groups)]
    params = [p for _, p in one.adapter.trainable()]
    for p in params:
        p.grad = None
    gradients = open_gradients(config, o, one.adapter, policy, ALONE)
    table = gradients.accumulate([b for b in kept if b.slots], TARGETS, P * o.samples_per_group(G))
    ours = torch.cat([p.grad.double().flatten() for p in params])
    loss = sum(float(row[FACTS.index("loss")]) for row in table)
    for p in params:
        p.grad = None
    truth = torch.zeros((), dtype=torch.float64)
    (batch,) = one.batches(P * G, groups)
    for draw in range(o.draws):
        number = batch.ids // G
        noise = endpoint_noise(SEED, number, draw, tuple(one.x0.shape[1:]))
        t, shown = drawn(o, one.schedule, number, draw)
        mix = t.view(-1, *[1] * (one.x0.dim() - 1))
        x0 = batch.latents
        xt = (1 - mix) * x0 + mix * noise
        with torch.no_grad():
            compared = one.velocity(xt, shown, batch.condition, o.compares_with) if o.compares_with else None
            start = one.velocity(xt, shown, batch.condition, "reference")
        v = one.adapter.velocity(xt, shown, batch.condition, one.sampling).double()
        x = {"v": v, "compared": compared, "u": (noise - x0).double(), "t": t.double(), "x0": x0.double(),
             "xt": xt.double(), "adv": ADVANTAGE[groups].double().flatten()}  # fmt: skip
        x["slots"] = groups
        kept_rows = best_of_groups(x) if kind == "sft" else torch.ones(len(v), dtype=torch.float64)
        loss_of_draw = formula(o, x) + 0.2 * (kept_rows * mse(v, start)).sum() / o.samples_per_group(G)
        (loss_of_draw / (P * o.draws)).backward()
        truth = truth + loss_of_draw.detach() / (P * o.draws)
    exact = torch.cat([p.grad.double().flatten() for p in params])
    assert float(exact.norm()) > 0
    assert float((ours - exact).norm() / exact.norm()) < 3e-5  # fp32 forwards of other batch sizes
    if "form" not in options or options["form"] != "ipo":
        assert loss == pytest.approx(float(truth), rel=1e-5, abs=2e-7 * max(1, getattr(o, "beta", 1)))


# ---- against a peer's own functions -------------------------------------------------------------------------------


SCOPE = {"F": F, "flow_match_sigma": lambda t: t / 1000}


@pytest.mark.parametrize("weight", ["uniform", "t", "t2", "huber", "ghuber"])
def test_awm_weights_are_those_of_flow_factory(weight):
    (theirs,) = peers.methods("flow_factory", "flow_factory/trainers/awm.py", "compute_weighted_log_prob", **SCOPE)
    v, u, t = torch.randn(5, 3, 4), torch.randn(5, 3, 4), torch.rand(5)
    name = {"uniform": "Uniform", "t2": "t**2"}.get(weight, weight)
    ours = AWM(weight=weight).log_likelihood(mse(v, u), t)
    assert torch.allclose(ours, theirs(v, u, t * 1000, name), rtol=1e-5)


# ---- real runs ------------------------------------------------------------------------------------------------------


def brighter(prompt, image_a, image_b):
    """A pairwise judge that is less certain the closer the two images are in brightness."""
    return float(1 / (1 + np.exp((image_b.mean() - image_a.mean()) / 2.0)))


class Judged(FunctionPairs):
    """`brighter` as a class, so that a reward spec can name it."""

    def __init__(self):
        super().__init__(brighter)


RUNS = {
    "grpo": {},
    "nft": {"optimality": "win_rate", "decay": 0.5, "sample_with_old": True},
    "sft": {},
    "soft_dpo": {"draws": 2},
}
"""One of each class: trajectory, pointwise with an old policy, pointwise on some members, groups."""


def options(name, **train):
    return {
        "rewards": f"{__name__}.Judged",
        "train": {"steps": 3, "lr": 1e-3, "objective": name, "objective_options": RUNS[name], **train},
        "rollout": {"prompts_per_step": 2, "batch_size": 2},
        "eval": {"every": 0},
        "checkpoint": {"every": 2},
    }


@pytest.mark.parametrize("flat, rate, hold", [(0, 0.0, 0.0), (0, 0.001, 0.5), (75, 0.0075, 0.999)], ids=[0, 1, 2])
def test_the_decay_of_an_old_policy_grows_as_published(flat, rate, hold):
    """DiffusionNFT's `return_decay` with its three kinds, after each training step."""
    nft = NFT(decay_rate=rate, decay_after=flat, decay_max=hold)
    for done in range(1, 700):
        assert nft.old_decay(done - 1) == pytest.approx(0.0 if done < flat else min((done - flat) * rate, hold))
    assert NFT(decay=0.7, decay_rate=rate, decay_max=hold).old_decay(0) == pytest.approx(
        max(0.7, min(0.7 + rate, hold))
    )


def test_a_step_gives_the_old_policy_its_own_decay(trainer):
    more = options("nft")
    loop = trainer(**more | {"train": more["train"] | {"objective_options": {"decay_rate": 0.25}}})
    given = []
    loop.policy.update_old = given.append
    loop.step(2, Clock())
    assert given == [0.75]


@pytest.mark.full
@pytest.mark.parametrize("name, blocks", [*((n, "diffusers") for n in RUNS), ("nft", "fused")])
def test_a_run_by_two_processes_and_resumed(place, trainer, name, blocks, request):
    """Three real steps with a pairwise judge: the weights change, two processes match one within a tolerance, and a
    resumed run ends with the same bytes."""
    if blocks == "fused":
        request.getfixturevalue("forced")
    own = {"ema_decay": 0.5, "ema_every": 2, "lora_init": "gaussian"}
    more = options(name, updates_per_rollout=2, kl_coef=0.01, **own)
    run = f"{name}-{blocks}"
    loop = trainer(f"{run}-one", **more)
    start = [p.detach().clone() for p in loop.policy.params]
    loop.train()
    one = rows(loop.folder.root)
    assert [r["step"] for r in one] == [1, 2, 3] and all(r["grad_norm"] > 0 for r in one)
    assert any(not torch.equal(a, b) for a, b in zip(start, loop.policy.params, strict=True))
    file = recipe(place, f"{run}-two", **more)
    runs = ranks(file, 2, hook=fuse_on_cpu if blocks == "fused" else None)
    assert [r.wait() for r in runs] == [0, 0], runs[0].output
    two = rows(place / "runs" / f"{run}-two")
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in ("loss", "grad_norm", "policy/error", "policy/drift", "policy/kl", "samples_trained"):
            assert a.get(key, 0.0) == pytest.approx(b.get(key, 0.0), rel=5e-3, abs=1e-6), (a["step"], key)
    trainer(f"{run}-again", **more | {"train": more["train"] | {"steps": 2}}).train()
    trainer(f"{run}-again", resume=True, **more).train()
    saved = [place / "runs" / f"{run}-{end}" / "checkpoints" / "step_000003/__0_0.distcp" for end in ("one", "again")]
    assert saved[0].read_bytes() == saved[1].read_bytes(), "also the old policy and AdamW's moments"
    assert rows(place / "runs" / f"{run}-again") == one


def relative(column):
    """Weight of a step: this value of its coefficients (a, b, s, …), divided by its mean over the trainable steps."""

    def weight(schedule, k):
        values = column(*schedule.coef[: schedule.steps - 1].double().unbind(1))
        return values[k] / values.mean()

    return weight


def inverse_step(schedule, k):
    return 1 / (schedule.sigmas[k] - schedule.sigmas[k + 1]).double()


TRAJECTORY = {
    "best of 2, Flash-GRPO's weight": (
        "grpo", {"best_of": 2, "step_weight": "velocity"}, relative(lambda a, b, s, w, c: s / b.abs()),
    ),
    "TempFlow-GRPO's weight": ("grpo", {"step_weight": "noise"}, relative(lambda a, b, s, w, c: s)),
    "guard": ("grpo_guard", {}, inverse_step),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAJECTORY)
@pytest.mark.parametrize("guided", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_gradient_of_replayed_steps_is_that_of_the_published_formula(trainer, case, guided):
    """On off-policy steps, so that ratios, masks and means are not trivial."""
    name, own, weight = TRAJECTORY[case]
    train = {"objective": name, "objective_options": own, "clip_range": 2e-3, "lora_rank": 4}
    more = {"eval": {"every": 0}, "train": train, "rollout": {"steps": 5, "group_size": 4, "batch_size": 4}}
    if guided:
        more |= {"model": str(folder("sd3")), "family": "sd3"}
        more["rollout"] |= {"height": 32, "width": 32, "guidance": 3.0}
    loop = trainer(**more)
    perturb(loop.adapter, 0.05)
    batches = batches_of(loop, 0)
    perturb(loop.adapter, 0.02)
    advantage = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    taken = []
    loop.policy.update = lambda *_: taken.append([p.grad.double().flatten() for p in loop.policy.params]) or 0.0
    values = loop.update(loop.groups.plan(0), batches, targets_of(advantage))
    trained = torch.ones(2, 4, dtype=torch.bool)
    if "best_of" in own:
        trained = (advantage == advantage.amax(1, keepdim=True)) | (advantage == advantage.amin(1, keepdim=True))
    loss, exact, _ = plain_formula(loop, batches, advantage, trained, weight, guard=name == "grpo_guard")
    ours = torch.cat(taken[0])
    assert float((ours - exact).norm() / exact.norm()) < 1e-4
    assert values["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6)
    assert values["samples_trained"] == int(trained.sum()) == (4 if "best_of" in own else 8)


def test_a_subset_of_the_steps_is_trained_and_all_are_stochastic(trainer):
    rollout = {"steps": 6, "window_policy": "subset", "window_size": 2, "sde_everywhere": True}
    loop = trainer(rollout=rollout, eval={"every": 0})
    seen = set()
    for step in range(8):
        batches = batches_of(loop, step)
        stored = {tuple(s.k for s in batch.transitions) for batch in batches}
        assert stored == {batches[0].schedule.trained} and batches[0].schedule.sde_steps == tuple(range(6))
        seen |= stored
    assert all(len(window) == 2 for window in seen) and any(high - low > 1 for low, high in seen)


def test_the_example_of_the_docs_is_an_objective(place, root, trainer):
    """The example in docs/extend.md has under 40 lines, and trains for a step when named by its file."""
    page = (root / "docs" / "extend.md").read_text()
    (text,) = re.findall(r"<!-- example: begin -->\n```python\n(.*?)```\n<!-- example: end -->", page, re.S)
    assert len(text.splitlines()) < 40
    (place / "hinge.py").write_text(text)
    named = {"objective": f"{place}/hinge.py:Hinge", "objective_options": {"margin": 0.5}, "steps": 1}
    loop = trainer(train=named, eval={"every": 0})
    loop.train()
    assert rows(loop.folder.root)[0]["loss"] == pytest.approx(0.5), "expected h = 0 at the start"
    assert rows(loop.folder.root)[0]["grad_norm"] > 0
    assert all(f"| `{name}` |" in (root / "docs" / "objectives.md").read_text() for name in OBJECTIVES)


class Closer(GroupObjective):
    """A group objective of one's own that names no policy to compare with: it is the reference policy."""

    def loss(self, train, error, reference_error, targets):
        return ((error - reference_error) * targets.advantage).mean(1)


class PerMember(GroupObjective):
    def loss(self, train, error, reference_error, targets):
        return error * targets.advantage


class OneNumber(PointwiseObjective):
    def loss(self, train, p, signal):
        return (p.error * signal).mean()


@pytest.mark.parametrize("batch_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_an_objective_of_ones_own_has_a_reference_and_returns_one_loss_each(trainer, batch_size):
    def own(name):
        train, rollout = {"objective": f"{__name__}.{name}", "steps": 1}, {"group_size": 4, "batch_size": batch_size}
        return trainer(f"own-{name}-{batch_size}", train=train, rollout=rollout, eval={"every": 0})

    loop = own("Closer")
    loop.train()
    row = rows(loop.folder.root)[0]
    assert row["loss"] == row["policy/drift"] == 0.0 and row["grad_norm"] > 0, "the policy starts as its reference"
    for name, got in (("PerMember", r"\[2, 4\]"), ("OneNumber", r"\[\]")):
        with pytest.raises(ValueError, match=rf"expected one loss for each of \d .* got shape {got}"):
            own(name).train()
