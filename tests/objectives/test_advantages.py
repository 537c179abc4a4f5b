"""Advantages of several rewards, their parts and the batch, against Pref-GRPO's own function.

Why these cases: weights that act before instead of after the normalisation, a biased instead of an unbiased standard
deviation, or a missing batch normalisation change advantages by factors of .86 to 1.4 and flip one sign in twenty,
and nothing in a run would show it. `PUBLISHED` comes from Pref-GRPO's `compute_weighted_advantages` (commit 3e787f6),
in fp64 on the same 300 groups; if PREFGRPO_PEERS has a checkout, the function itself is compared with ours.
"""

import dataclasses
import re
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import numpy as np
import ops_cases
import peers
import pytest
import torch
from world import collect, computed

from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import AdvantageConfig
from prefgrpo.data.answer import Answer
from prefgrpo.objectives.advantages import CombineError, advantages, part_table
from prefgrpo.ops import winrate_advantage
from prefgrpo.rewards.base import Reward
from prefgrpo.run.errors import reward_errors

STEPS, GROUPS, SIZE = 6, 50, 9
FLEX, QUALITY = "unifiedreward_flex", "unifiedreward_edit_pointwise_image_quality"
CASES = {
    "flex and clip, gdpo": ({FLEX: 0.7, "clip": 0.3}, {FLEX: {"overall": 0.3, "categories": 0.7}}, True),
    "edit parts": ({QUALITY: 0.5, "clip": 0.5}, {QUALITY: {"naturalness": 0.8, "artifacts": 0.2}}, False),
    "two rewards, gdpo": ({"pickscore": 0.4, "clip": 0.6}, {}, True),
}
THEIRS = {"overall": "overall", "categories": "dim_mean", "naturalness": "dim0", "artifacts": "dim1"}
PUBLISHED = {
    "flex and clip, gdpo": [-17.687243, 0.951842, 34.045043, 2.223076, -39.575782, 47.999691],
    "edit parts": [-5.613957, -11.062056, 11.967234, 6.823426, -3.517241, 35.215283],
    "two rewards, gdpo": [-20.125819, 28.323208, 12.766871, -18.758547, -2.884795, 11.076886],
}
"""`projected` advantages of each of the six steps."""
JUDGE = Path(__file__).resolve().parents[2] / "prefgrpo" / "tiny" / "assets" / "judge"
LOCAL = {"endpoints": [], "model": str(JUDGE), "max_missing": 0.5}
MINIMAL = {"model": "m", "data": {"prompts": "p"}}
ORIGINAL = AdvantageConfig(combine="weighted_advantage_sum", eps=1e-8, ddof=1)


def drawn(case):
    """(values [N, R], scores by reward) of each step; parts are multiples of 1/16, other scores vary in scale."""
    weights, parts, _ = CASES[case]
    generator = np.random.default_rng(2508_20751)
    for _ in range(STEPS):
        groups = {}
        for name in weights:
            mean, spread = generator.normal(3, 1, (GROUPS, 1)), generator.lognormal(-2, 1, (GROUPS, 1))
            own = {p: generator.integers(0, 17, (GROUPS, SIZE)) / 16 for p in parts.get(name, {})}
            value = sum(own.values()) if own else generator.normal(mean, spread, (GROUPS, SIZE))
            parts_of = lambda at, own=own: {k: float(v[at]) for k, v in own.items()}  # noqa: E731
            places = [[(p, g) for g in range(SIZE)] for p in range(GROUPS)]
            groups[name] = [[Answer(float(value[at]), parts=parts_of(at)) for at in row] for row in places]
        values = np.array([[[s.value for s in group] for group in groups[n]] for n in weights])
        yield values.reshape(len(weights), -1).T, groups


def ours(case, values, groups, options):
    weights, parts, _ = CASES[case]
    table = part_table(groups, parts).reshape(len(values), -1) if parts else None
    return advantages(values, weights, SIZE, options, parts, table)[0].double().flatten().numpy()


def projected(rows):
    """One number per step that depends on every advantage."""
    return [float(np.random.default_rng(step).normal(size=row.shape) @ row) for step, row in enumerate(rows)]


def theirs(case, monkeypatch):
    """A function of (values, scores by reward) → advantages [N] by Pref-GRPO's own code."""
    weights, parts, gdpo = CASES[case]
    module = peers.functions("pref_grpo", "fastvideo/rewards/dispatcher.py", "theirs_dispatcher", monkeypatch)
    flex, edits = parts.get(FLEX, {}), parts.get(QUALITY, {})
    module._flex_get_env_float = lambda name, _: flex[{"OVERALL_WEIGHT": "overall", "DIM_WEIGHT": "categories"}[name]]
    module.get_quality_weights = lambda: tuple(edits.values())

    def call(values, groups):
        tensors = {name: torch.from_numpy(values[:, k].copy()) for k, name in enumerate(weights)}
        for name, own in parts.items():
            table = part_table(groups, {name: own}).reshape(len(values), -1)
            tensors |= {f"{name}_{THEIRS[part]}": torch.from_numpy(table[:, k].copy()) for k, part in enumerate(own)}
            tensors[f"{name}_dim_mask"] = torch.ones(len(values), dtype=torch.bool)
        same = {"gather_tensor": lambda t: t, "use_group": True, "num_generations": SIZE, "apply_gdpo": gdpo}
        return module.compute_weighted_advantages(tensors, weights, **same)[0].numpy()

    return call


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_published_ones(case, monkeypatch):
    options = dataclasses.replace(ORIGINAL, combine="gdpo") if CASES[case][2] else ORIGINAL
    found = [ours(case, *draw, options) for draw in drawn(case)]
    assert np.allclose(projected(found), PUBLISHED[case], atol=2e-5)
    biased = dataclasses.replace(options, ddof=0)
    assert not np.allclose(projected([ours(case, *d, biased) for d in drawn(case)]), PUBLISHED[case], atol=1e-2)
    original = theirs(case, monkeypatch)  # skips here without a checkout
    for mine, draw in zip(found, drawn(case), strict=True):
        assert np.abs(original(*draw) - mine).max() < 1e-6


NAN = float("nan")


def combined_here(rewards, weights):
    """A function for `advantage.combine`."""
    return (rewards.square() * weights[:, None]).sum(0)


@pytest.mark.parametrize("options", [
    {}, {"std": "global", "ddof": 1}, {"std": "rank", "ddof": 1}, {"combine": "gdpo"},
    {"combine": f"{__file__}:combined_here"}, {"combine": f"{__name__}.combined_here", "std": "rank"},
], ids=str)  # fmt: skip
def test_options_of_the_advantage_section(options):
    """Two rewards and a monitor, with missing values, against NumPy (more: test_ops_advantage)."""
    rng, w, ids = np.random.default_rng(3), np.array([0.3, 0.0, 0.7]), np.arange(5).repeat(6)
    r = rng.gamma([[0.5], [1.0], [8.0]], 1.0, (3, 30)) + 0.01
    r[0, 4] = r[1, 7] = r[2, 20] = NAN
    config = from_dict({**MINIMAL, "advantage": options}).advantage
    found, _ = advantages(r.T, dict(zip("abc", w, strict=True)), 6, config)
    given = {k: v for k, v in options.items() if k in ("std", "ddof")}
    if options.get("std") == "rank":
        given |= {"std": "group", "rank": True}
    if options.get("combine") == "gdpo":
        given["combine"] = "weighted_advantage_sum"
    elif "combine" in options:
        r, w = (r[w != 0] ** 2 * w[w != 0, None]).sum(0, keepdims=True), np.ones(1)
    want = ops_cases.advantage(r, ids, w, **given)
    if options.get("combine") == "gdpo":
        known = ~np.isnan(r[w != 0]).any(0)
        want = np.where(known, (want - want[known].mean()) / (want[known].std() + 1e-4), 0.0)
    assert found.dtype == torch.float32 and found.shape == (5, 6)
    np.testing.assert_allclose(found.double().cpu().numpy().reshape(-1), want, rtol=2e-5, atol=2e-6)


WRONG = {
    **{f"path {path}": ({}, {"combine": path}, "advantage.combine: cannot load")
       for path in ("nowhere.py:f", f"{__file__}:absent", "no_such_package.f")},
    "a bare name": ({}, {"combine": "wsum"}, "advantage.combine: expected one of weighted_sum, "),
    "weight": ({"jpeg_compressibility": 1, "jpeg_incompressibility": -1}, {"combine": "geometric_mean"},
               "geometric_mean expects weights of at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(name):
    rewards, advantage, message = WRONG[name]
    config = {**MINIMAL, "advantage": advantage, **({"rewards": rewards} if rewards else {})}
    (wrong,) = reward_errors(from_dict(config))
    assert message in wrong


def too_few(rewards, weights):
    return weights


def raising(rewards, weights):
    raise KeyError("on purpose")


def infinite(rewards, weights):
    return [1.0, 2.0, 4.0, float("inf")]


def root(rewards, weights):
    return rewards[0].sqrt()


def test_a_function_must_return_one_value_per_sample():
    for name, message in (
        ("too_few", r"expected \[4\] values, got \[1\]"),
        ("raising", "raised KeyError: 'on purpose'"),
    ):
        with pytest.raises(CombineError, match=message):
            advantages(np.ones((4, 1)), {"r": 1.0}, 4, AdvantageConfig(combine=f"{__name__}.{name}"))
    found = advantages(np.ones((4, 1)), {"r": 1.0}, 4, AdvantageConfig(combine=f"{__name__}.infinite"))[0][0]
    assert found[3] == 0 and found[:3].isfinite().all() and found[0] < found[1] < found[2], "non-finite is missing"


def test_the_tamed_sum_of_the_page_is_paco_grpos(tmp_path, root):
    """PaCo-GRPO (arXiv 2512.04784): log(1 + r) for rewards whose std/mean over the step exceeds the rewards' mean."""
    page = (root / "docs" / "extend.md").read_text()
    (tmp_path / "tamed.py").write_text(re.search(r'```python title="tamed.py"\n(.*?)```', page, re.S)[1])
    options = AdvantageConfig(combine=f"{tmp_path}/tamed.py:tamed_sum")
    weights = {"a": 0.2, "b": 1.0, "c": 0.5}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        r = rng.gamma(rng.random((3, 1)) * 4 + 0.2, 2.0, (3, 30))
        r[rng.random(r.shape) < 0.1] = NAN
        spread = np.nanstd(r, axis=1) / np.nanmean(r, axis=1)
        tamed = np.where((spread > spread.mean())[:, None], np.log1p(r), r)
        want = advantages(tamed.T, weights, 6, AdvantageConfig())
        for ours, theirs in zip(advantages(r.T, weights, 6, options), want, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
    found = advantages(np.array([[-1.0, 1.0], [1.0, 1.0], [3.0, 1.0], [-1.0, 1.0]]), {"r": 1.0, "s": 1.0}, 4, options)
    assert found[1].tolist() == [[False, True, True, False]], "log(1 + r) of −1 is no number: missing"


@pytest.mark.parametrize("advantage", [
    {"combine": "geometric_mean"}, {"combine": f"{__name__}.root"},
], ids=str)  # fmt: skip
def test_a_sample_without_a_combined_value_is_missing_for_the_objective_too(trainer, advantage):
    """As 0 would be an average advantage, on which `nft` trains."""
    one = trainer(advantage=advantage, eval={"every": 0})
    collect(one, 0)
    scores = one.scorer.finish()
    scores.values["jpeg_compressibility"][:] = [[1.0, -2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
    found, metrics = computed(one, scores)
    assert found.known.flatten().tolist() == [True, False, *[True] * 6] and found.advantage[0, 1] == 0
    assert metrics["reward/missing"] == 1 / 8


def test_constant_groups_stay_exactly_zero_under_batch_normalisation():
    values = np.array([[0.3]] * 4 + [[1.0], [2.0], [4.0], [8.0]] + [[5.0], [NAN], [6.0], [7.0]])
    found = advantages(values, {"r": 1.0}, 4, AdvantageConfig(combine="gdpo"))[0].numpy()
    assert (found[0] == 0).all() and found[2, 1] == 0 and (found[1] != 0).all()
    known = np.delete(found.flatten(), 9)
    assert known.std() == pytest.approx(1.0, rel=1e-3), "the batch std is taken over the samples that are not missing"


def test_a_missing_part_leaves_the_others_and_a_missing_value_leaves_nothing():
    """Pref-GRPO's rule: a member without category scores gets only its overall advantage."""
    scores = [Answer(0.2 * k, parts={"overall": 0.1 * k, "categories": 0.3 * k * k}) for k in range(5)]
    scores[1] = Answer(0.9, parts={"overall": 0.9})
    scores[2] = Answer(None, "timeout", parts={"overall": 0.5})
    parts = {"r": {"overall": 0.3, "categories": 0.7}}
    table = part_table({"r": [scores]}, parts).reshape(5, 2)
    values = np.array([[np.nan if s.value is None else s.value] for s in scores])
    found = advantages(values, {"r": 2.0}, 5, ORIGINAL, parts, table)[0].numpy()[0]

    def plain(column):
        known = table[~np.isnan(table[:, column]), column]
        return (table[:, column] - known.mean()) / known.std(ddof=1)

    expected = np.where(np.isnan(plain(1)), plain(0), 0.3 * plain(0) + 0.7 * plain(1))
    assert np.allclose(found, np.where(np.isnan(expected), 0.0, 2.0 * expected), atol=1e-6) and found[2] == 0


class InParts(Reward):
    part_weights = MappingProxyType({"a": 0.25, "b": 0.75})

    def ask(self, asked):
        samples = [sample for (sample,) in asked]
        bright = [s.media.pixels.mean(axis=(0, 1)) for s in samples]
        return [Answer(float(b.sum()), parts={"a": float(b[0]), "b": float(100 * b[1])}) for b in bright]


def test_a_run_takes_the_parts_of_its_rewards(trainer):
    """A real training step: the scales of the parts (1 vs. 100) must not matter."""
    spec = f"{__name__}.InParts"
    advantage = {"combine": "gdpo", "ddof": 1}
    one = trainer(rewards=spec, advantage=advantage, eval={"every": 0})
    collect(one, 0)
    scores = one.scorer.finish()
    found = computed(one, scores)[0].advantage
    table = np.array([[[s.parts[p] for s in group] for group in scores.scores[spec]] for p in "ab"])
    each = (table - table.mean(-1, keepdims=True)) / (table.std(-1, ddof=1, keepdims=True) + 1e-4)
    blend = 0.25 * each[0] + 0.75 * each[1]
    assert np.allclose(found.cpu().numpy(), blend / blend.std(ddof=1), rtol=1e-3)
    with pytest.raises(ConfigError, match="expected weighted_advantage_sum or gdpo, got weighted_sum"):
        trainer("sum", rewards=spec, eval={"every": 0})


PAIRWISE = {"name": "vlm_pairwise", "options": {"template": "caption_match"}}


@pytest.mark.parametrize(("entry", "advantage", "fused"), [
    ({}, {"ddof": 1, "eps": 0.0}, True), ({}, {"std": "none"}, True), ({"weight": 0.5}, {}, False),
    ({}, {"std": "rank"}, False), ({"options": PAIRWISE["options"] | {"rate": "bradley_terry"}}, {}, False),
], ids=str)  # fmt: skip
def test_advantages_of_win_rates_alone_come_from_the_comparisons(trainer, entry, advantage, fused):
    """With one launch of `winrate_advantage`; a member whose comparisons are all missing gets 0."""
    rewards = [PAIRWISE | entry, {"name": "jpeg_compressibility", "weight": 0.0}]
    one = trainer(rewards=rewards, advantage=advantage, judge=LOCAL, eval={"every": 0})
    collect(one, 0)
    scores = one.scorer.finish()
    wins, counts = scores.comparisons["vlm_pairwise"].swapaxes(0, 1)
    for table in (wins[0], counts[0]):
        table[1] = table[:, 1] = 0.0
    if "options" not in entry:
        scores.values["vlm_pairwise"][:] = wins.sum(2) / counts.sum(2).clip(1e-9)
    scores.values["vlm_pairwise"][0, 1] = NAN
    values = np.stack([scores.values[name].flatten() for name in one.targets.weights], axis=1)
    want, _ = advantages(values, one.targets.weights, 4, one.config.advantage)
    with mock.patch("prefgrpo.run.targets.winrate_advantage", wraps=winrate_advantage) as used:
        targets, _ = computed(one, scores)
    found = targets.advantage
    assert used.called == fused and targets.known.flatten().tolist() == [True, False, *[True] * 6]
    assert found[0, 1] == 0 and found.abs().max() > 0.01
    assert torch.allclose(found.cpu(), want.cpu(), rtol=1e-4, atol=1e-6)
