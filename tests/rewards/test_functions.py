"""User-written rewards: functions of images, functions of pairs, and the examples of docs/extend.md."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import serving

from prefgrpo.data.media import Media
from prefgrpo.rewards import RewardSpecError, build, load_class
from prefgrpo.rewards.base import RewardError, Sample
from prefgrpo.rewards.functions import FunctionPairs, FunctionReward, function_class


def grey(level, prompt="p", source=(), clip=False, **meta):
    return Sample(prompt, Media(np.full((2, 8, 8, 3) if clip else (8, 8, 3), level, np.uint8)), source, meta)


def level(image):
    return int(image[0, 0, 0])


def bright(images, prompts, **columns):
    return [None if prompt == "none" else level(image) for image, prompt in zip(images, prompts, strict=True)]


def first(prompt, image_a, image_b):
    if "raise" in prompt:
        raise ZeroDivisionError("on purpose")
    known = {"none": None, "two": 2.0, "word": "1", "pair": (0.3, 0.7)}
    return known.get(prompt, level(image_a) / (level(image_a) + level(image_b)))


def test_a_function_of_images_is_a_pointwise_reward():
    reward = function_class(bright)()
    assert isinstance(reward, FunctionReward) and not reward.compares
    scores = reward.score([grey(10), grey(20, "none"), grey(30), Sample("p", Media(np.zeros((0, 8, 3), np.uint8)))])
    assert [s.value for s in scores] == [10.0, None, 30.0, None]
    assert scores[1].reason == "bright returned None" and "no pixels" in scores[3].reason


def test_columns_sources_options_and_clips_reach_the_function():
    calls = []

    def reward(images, prompts, tag, sources, scale: float = 1.0, **columns):
        calls.append((prompts, tag, [[level(s) for s in row] for row in sources], columns, [len(i) for i in images]))
        return [scale] * len(images)

    made = function_class(reward)(scale=2.5)
    assert made.needs_source and made.meta_keys == ("tag",)
    given = [grey(k, f"p{k}", (grey(100 + k).media,), clip=True, tag=f"t{k}", n=k) for k in (1, 2)]
    assert [s.value for s in made.score(given)] == [2.5, 2.5]
    assert calls == [(["p1", "p2"], ["t1", "t2"], [[101], [102]], {"n": [1, 2]}, [2, 2])]


def test_a_function_of_pairs_is_a_win_rate():
    reward = function_class(first)(plan="round_robin")
    assert isinstance(reward, FunctionPairs) and reward.compares and not reward.judged
    levels = [10, 20, 40]
    found = reward.score([grey(v) for v in levels])
    hand = [np.mean([a / (a + b) for k, b in enumerate(levels) if k != i]) for i, a in enumerate(levels)]
    assert [s.value for s in found] == pytest.approx(hand)
    for prompt, reason in (("raise", "first raised ZeroDivisionError: on purpose"), ("none", "first returned None"),
                           ("two", "first raised ValueError: expected a probability in [0, 1], got 2.0"),
                           ("word", "first raised ValueError: "), ("pair", "first raised ValueError: ")):  # fmt: skip
        assert all(s.reason.startswith(reason) for s in reward.score([grey(v, prompt) for v in levels]))


def test_a_function_that_writes_into_its_images_changes_no_other_comparison():
    def overwrites(prompt, image_a, image_b):
        value = level(image_a) / (level(image_a) + level(image_b))
        image_a[:], image_b[:] = 0, 255
        return value

    group = [grey(v) for v in (10, 20, 40)]
    ways = [function_class(f)().score(group) for f in (overwrites, first)]
    assert ways[0] == ways[1]


NUMBERS = {
    "tuple": (1, None),
    "array": np.array([1, np.nan], np.float16),
    "tensor": torch.tensor([1.0, torch.nan], dtype=torch.bfloat16, requires_grad=True),
    "numbers of tensors": [torch.tensor(True), np.float32("nan")],
}
NO_NUMBERS = (
    [1.0, 2.0], ["x"], 3, None, "7", ["7"], b"7", {0: 1.0}, {"0": 1.0}, {}, {"avg": 1.0}, {"avg": [1.0, 2.0]},
    {"avg": "7"}, ({"avg": [1.0]}, {}), [{"avg": 1.0}], {1.0}, np.ones((1, 1)), np.array(1.0), np.array(["7"]),
    [np.str_("7")], [np.ones(1)], torch.ones(1, 1), (v for v in [1.0]),
)  # fmt: skip
"""None of them has one number for one sample; the keys of a mapping and the digits of a text are no numbers."""


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_and_named_numbers(kind):
    for named in (False, True):
        values = {"a": NUMBERS[kind], "b": [2.0, 5.0]} if named else NUMBERS[kind]
        reward = function_class(lambda images, prompts, values=values: values)()
        first, second = (score.finite() for score in reward.score([grey(1), grey(2)]))
        assert first.value == (3.0 if named else 1.0) and second.value is None
        assert first.parts == ({"a": 1.0, "b": 2.0} if named else {}) and second.parts.get("b") == (
            5.0 if named else None
        )


def test_what_is_no_reward_is_refused(tmp_path):
    for wrong in (3, lambda image: 1.0):
        with pytest.raises(RewardError, match=r"must have a signature|a reward function takes"):
            function_class(wrong)
    for values in NO_NUMBERS:
        with pytest.raises(RewardError, match="must return"):
            function_class(lambda images, prompts, values=values: values)().score([grey(1)])
    (tmp_path / "own.py").write_text("def f(image): return 1\nx = 3\n")
    reasons = {
        "f": "a reward function takes",
        "x": "is not a Reward",
        "fn": r"own.py has no .* 'fn' \(did you mean 'f'",
    }
    for name, reason in reasons.items():
        with pytest.raises(RewardSpecError, match=reason):
            load_class(f"{tmp_path / 'own.py'}:{name}")


def test_a_file_may_hold_dataclasses_and_what_it_raises_is_said(tmp_path):
    lines = ["from __future__ import annotations", "from dataclasses import dataclass", "@dataclass", "class Own:"]
    lines += ["    k: int = 1", "def f(images, prompts): return [Own().k] * len(images)"]
    (tmp_path / "own.py").write_text("\n".join(lines))
    assert [s.value for s in build([f"{tmp_path}/own.py:f"])[f"{tmp_path}/own.py:f"].score([grey(1)])] == [1.0]
    (tmp_path / "broken.py").write_text("undefined_name\n")
    for _ in range(2):
        with pytest.raises(RewardSpecError, match="NameError: name 'undefined_name'"):
            load_class(f"{tmp_path}/broken.py:f")


def test_the_examples_of_the_page(tmp_path, monkeypatch):
    """The examples in docs/extend.md work as given, from a file or a module, in process and served."""
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", page, re.S)[1]
    assert len(example.splitlines()) < 40
    (tmp_path / "ownreward.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    samples = [Sample("p", Media(rng.integers(0, 128 * k, (16, 16, 3), np.uint8))) for k in (1, 2)]
    pixels = [s.media.pixels / 255 for s in samples]
    expected = {
        "ownreward.py:redness": [(p[..., 0].sum() / p.sum()) ** 2 for p in pixels],
        "ownreward:Saturation": [np.mean(p.max(-1) - p.min(-1)) ** 2 for p in pixels],
    }
    for name, values in expected.items():
        with pytest.raises(RewardSpecError, match=r"no option 'powr'.*did you mean 'power'"):
            build([name], {name: {"powr": 2.0}})
        found = build(f"{name}:0.5", {name: {"power": 2.0}})[name].score(samples)
        assert [s.value for s in found] == pytest.approx(values)
        with serving(name, {"power": 2.0}) as url:
            assert build([name], {name: {"url": url}})[name].score(samples) == found
    wins = build("ownreward.py:brighter:1", {"ownreward.py:brighter": {"plan": "round_robin"}})
    assert [s.value for s in wins["ownreward.py:brighter"].score(samples)] == [0.0, 1.0]
