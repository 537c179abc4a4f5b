"""`rollout.batch_size` and `train.checkpointing_share: auto`: what the plan estimates, which sizes are tried, and what
happens if a size does not fit.

Why these cases: the plan makes only a few estimates, yet must choose the value that estimating every value would; if
one of two processes runs out of memory, both must fall back to the smaller size, with no collective left hanging; a
trial or a share must not affect the numbers of the run; and a resumed run must not search again.
"""

import json
import os
import shutil

import pytest
import torch
import yaml
from tiny_run import all_end, attempt, ranks, recipe, settings

from prefgrpo.config.loading import from_dict, to_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import AUTO, recomputed_share
from prefgrpo.models.flux import Flux
from prefgrpo.run import batch_size
from prefgrpo.run.memory import estimate
from prefgrpo.run.session import Clock


def auto(place, name, **over):
    over["rollout"] = {"batch_size": "auto"} | over.get("rollout", {})
    return from_dict(settings(place, name, **({"eval": {"every": 0}} | over)))


def out_of_memory():
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


FOUND = {"rollout": {"batch_size": "auto"}, "eval": {"every": 0}}
SHARE = {"gradient_checkpointing": True, "checkpointing_share": "auto"}
CANDIDATES = {
    "all divisors": (({"prompts_per_step": 2, "group_size": 12}, {}, 1), [12, 6, 4, 3, 2, 1]),
    "one group on eight": (({"prompts_per_step": 1, "group_size": 64}, {}, 8), [8, 4, 2, 1]),
    "42 groups of 24 on eight": (({"prompts_per_step": 42, "group_size": 24}, {}, 8), [6, 3, 2, 1]),
    "two updates of a group": (({"prompts_per_step": 1, "group_size": 8}, {"updates_per_rollout": 2}, 2), [2, 1]),
    "whole groups": (
        ({"prompts_per_step": 4, "group_size": 8}, {"objective": "soft_dpo"}, 4), [8, 4, 2, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CANDIDATES)
def test_candidates_divide_the_group_and_leave_nobody_idle(place, case):
    (rollout, train, indices), want = CANDIDATES[case]
    assert batch_size.candidates(auto(place, "c", rollout=rollout, train=train), indices) == want


def test_auto_is_written_as_auto_and_read_again(place, capsys):
    config = auto(place, "w")
    assert config.rollout.batch_size == AUTO and to_dict(config)["rollout"]["batch_size"] == "auto"
    assert from_dict(to_dict(config)) == config
    with pytest.raises(ConfigError, match=r"reuse_rollout_forward: true.*got auto"):
        auto(place, "w", train={"reuse_rollout_forward": True})
    with pytest.raises(ConfigError, match=r"rollout\.batch_size: expected a whole number, got 'many'"):
        auto(place, "w", rollout={"batch_size": "many"})
    file = recipe(place, "planned", rollout={"batch_size": "auto"})
    code, out = attempt(capsys, "plan", file)
    assert code == 0 and "rollout.batch_size: auto is 4, 4 decoded at once" in out
    config = auto(place, "w", train=SHARE)
    assert config.train.checkpointing_share == to_dict(config)["train"]["checkpointing_share"] == "auto"
    assert from_dict(to_dict(config)) == config
    assert recomputed_share(config.train) == 1 and recomputed_share(from_dict(settings(place, "w")).train) == 0
    with pytest.raises(ConfigError, match=r"checkpointing_share: expected a number, because .*, got auto"):
        auto(place, "w", rollout={"batch_size": 4}, train=SHARE | {"reuse_rollout_forward": True})
    code, out = attempt(capsys, "plan", file, "--train.gradient-checkpointing", "--train.checkpointing-share", "auto")
    assert code == 0 and "rollout.batch_size: auto is 4" in out and "train.checkpointing_share: auto is 0, by" in out


@pytest.mark.full
def test_the_plan_chooses_as_an_estimate_of_every_size_would(place):
    config = auto(place, "fit", rollout={"group_size": 4, "height": 64, "width": 64}, device="cuda")
    four, two = (estimate(batch_size._with_batch_sizes(config, size, 1)).total for size in (4, 2))
    found = batch_size.estimate_batch_sizes(config, 1.02 * two)
    assert four > 1.1 * two and found.rollout.batch_size == 2 and estimate(found).total <= 1.03 * two
    assert batch_size.estimate_batch_sizes(config, 1.02 * four).rollout.batch_size == 4
    assert batch_size.estimate_batch_sizes(config, 0).rollout.batch_size == 1


@pytest.mark.full
def test_the_plan_chooses_the_share_that_an_estimate_of_every_share_would(place, tmp_path):
    """Twenty blocks, so that every multiple of 0.05 recomputes one block more."""
    model = shutil.copytree(place / "flux", tmp_path / "deep", ignore=shutil.ignore_patterns("*.safetensors"))
    file = model / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 8, "num_single_layers": 12}))
    size = {"batch_size": 4, "height": 64, "width": 64}
    config = auto(place, "deep", model=str(model), rollout=size, train=SHARE, device="cuda")
    found = {share: estimate(batch_size._with_share(config, share)) for share in batch_size.SHARES}
    totals, asked = {share: whole.total for share, whole in found.items()}, []

    def chosen(free):
        return batch_size.estimate_share(config, free, known)[0].train.checkpointing_share

    def known(c):
        asked.append(c)
        return found[c.train.checkpointing_share]

    assert len(totals) == 21 and estimate(config).total == totals[1.0] == min(totals.values()) < 0.8 * totals[0.0]
    assert len({whole.phases["rollout"] for whole in found.values()}) == 1
    for part in range(1, 40):
        free = totals[1.0] + (totals[0.0] - totals[1.0]) * part / 40
        want = next(share for share, total in totals.items() if total <= free)
        assert want > 0 and chosen(free) == want
    assert 2 * 39 < len(asked) <= 4 * 39
    for free, want in ((totals[0.0], 0.0), (totals[1.0] - 1, 1.0), (0, 1.0)):
        assert chosen(free) == want


def first_step(loop):
    """The metrics of a run's first step, without its times."""
    return {name: value for name, value in loop.step(0, Clock()).items() if not name.startswith("time/")}


def test_the_share_changes_no_number_and_is_stored(trainer, place, monkeypatch):
    def loop(name, share, resume=False):
        return trainer(name, resume, train=SHARE | {"checkpointing_share": share}, eval={"every": 0})

    def recomputed(made):
        return sum("forward" in vars(block) for block in made.adapter.blocks(made.adapter.transformer))

    loops = loop("free", "auto"), loop("all", 1.0)
    assert [made.config.train.checkpointing_share for made in loops] == [0.0, 1.0]
    assert [recomputed(made) for made in loops] == [0, 4]
    first, second = map(first_step, loops)
    assert first == second and first["grad_norm"] > 0
    for made in loops:
        made.close()
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: 0)
    stored = place / "runs" / "free" / "config.yaml"
    for before, share, want in ((0.0, "auto", 0.0), (0.0, 0.5, 0.5), (0.5, "auto", 0.5)):
        assert yaml.safe_load(stored.read_text())["train"]["checkpointing_share"] == before
        again = loop("free", share, resume=True)
        assert again.config.train.checkpointing_share == want and recomputed(again) == 4 * want
        again.close()
    short = trainer("short", train=SHARE, **FOUND)
    assert (short.config.rollout.batch_size, short.config.train.checkpointing_share, recomputed(short)) == (4, 1.0, 4)
    assert "train.checkpointing_share: auto is 1, by the memory estimate" in short.session.notes


def test_a_trial_leaves_no_trace_and_decodes_what_fits(trainer, place, monkeypatch):
    loops = trainer("found", **FOUND), trainer("given", rollout={"batch_size": 4}, eval={"every": 0})
    assert [loop.config.rollout.batch_size for loop in loops] == [4, 4] and loops[0].config.memory.decode_batch == 0
    assert all(p.grad is None for p in loops[0].policy.params) and not loops[0].policy.optimizer.state
    found, given = map(first_step, loops)
    assert found == given and found["samples_trained"] == 8
    decode = Flux.decode
    monkeypatch.setattr(Flux, "decode", lambda self, x, r: out_of_memory() if len(x) > 1 else decode(self, x, r))
    loop = trainer("decoded", **FOUND)
    assert (loop.config.rollout.batch_size, loop.config.memory.decode_batch) == (4, 1)
    stored = yaml.safe_load((place / "runs" / "decoded" / "config.yaml").read_text())
    assert stored["rollout"]["batch_size"] == 4 and stored["memory"]["decode_batch"] == 1


def test_what_never_fits_is_refused_and_other_errors_are_not_caught(trainer, monkeypatch):
    monkeypatch.setattr(Flux, "predict", lambda *a, **k: out_of_memory())
    with pytest.raises(ConfigError, match=r"rollout\.batch_size: one sample does not fit"):
        trainer("never", **FOUND)

    def wrong(*_, **__):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Flux, "predict", wrong)
    with pytest.raises(RuntimeError, match="shapes differ"):
        trainer("wrong", **FOUND)


def short_of_memory():
    """Runs in the new process: rank 1 has memory for only two samples."""
    predict = Flux.predict

    def limited(self, net, x, *rest, **named):
        if os.environ["RANK"] == "1" and len(x) > 2:
            out_of_memory()
        return predict(self, net, x, *rest, **named)

    Flux.predict = limited


@pytest.mark.full
def test_all_processes_take_the_smallest_and_a_resumed_run_keeps_it(place):
    file = recipe(place, "two", rollout={"batch_size": "auto"}, train={"steps": 2})
    output, _ = all_end(ranks(file, 2, hook=short_of_memory))
    assert "rollout.batch_size: auto is 2, 2 decoded at once" in output
    folder = place / "runs" / "two"
    assert yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["batch_size"] == 2
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["policy/on_policy_error"] for row in steps if row["kind"] == "train"} == {0.0}
    all_end(ranks(file, 2, "--resume", "--train.steps", "3"))  # now with memory for four
    assert yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["batch_size"] == 2
