"""The reward_spec grammar and the registry.

Cases: every form in spec/judge.md's list, accepted or refused; an error must name the entry. The registry test
imports every entry, so that no name without a class can be shipped.
"""

import inspect
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import drawn
from world import grey

from prefgrpo.data.answer import Answer
from prefgrpo.rewards import RewardSpecError, build, parse_reward_spec
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.tiny import scenes

A, B = "jpeg_compressibility", "jpeg_incompressibility"


class Brightness(Reward):
    """A user-defined reward, named by its dotted path."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def ask(self, asked):
        return [Answer(self.scale * float(s.media.pixels.mean())) for (s,) in asked]


@pytest.mark.parametrize(
    ("spec", "weights"),
    [
        (f"{A},{B}", {A: 1.0, B: 1.0}),
        (f"{A},,{B},", {A: 1.0, B: 1.0}),
        (f" {A} : 0.5 , {B}:1.0", {A: 0.5, B: 1.0}),
        (f'{{"{A}":0.5,"{B}":1}}', {A: 0.5, B: 1.0}),
        (f'["{A}","{B}"]', {A: 1.0, B: 1.0}),
        ('[{name: "mine.py:redness", weight: 0.5}, ' + A + "]", {"mine.py:redness": 0.5, A: 1.0}),
        (f"{A}:0,{B}:-1e-1", {A: 0.0, B: -0.1}),
        ({A: 2}, {A: 2.0}),
        ([{"reward": A}], {A: 1.0}),
        ([A], {A: 1.0}),
        ("my.mod.Class:0.5", {"my.mod.Class": 0.5}),
        ("my.mod:Class:0.5", {"my.mod:Class": 0.5}),
        ("my.mod:Class", {"my.mod:Class": 1.0}),
        (f"mine:redness:0.5,{A}", {"mine:redness": 0.5, A: 1.0}),
        ("mine:redness", {"mine:redness": 1.0}),
        (f"mine:Class,{A}:0,mine:Other:0.5", {"mine:Class": 1.0, A: 0.0, "mine:Other": 0.5}),
    ],
)
def test_accepted(spec, weights):
    parsed = parse_reward_spec(spec)
    assert {name: entry.weight for name, entry in parsed.items()} == weights and list(parsed) == list(weights)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("jpeg_compresibility", f"unknown reward 'jpeg_compresibility'.*did you mean '{A}'"),
        (None, "bad entry None: expected a name"),
        (f"{A},{A}", f"'{A}' is named twice; give each a name of its own"),
        (f"{A}:", f"bad entry '{A}:'"),
        (f"{A}:x", f"weight of reward '{A}' must be a number, got 'x'"),
        ("a:b:c:1", "bad entry 'a:b:c:1'"),
        (f"{A}:nan", f"weight of reward '{A}': expected a finite number, got nan"),
        (f'{{"{A}":true}}', f"weight of reward '{A}': expected a finite number, got True"),
        (f'["{A}", 1]', "bad entry 1"),
        ("", "no reward is named"),
        (f"{A}=0.5", "expected 'name' or 'name:weight'"),
        ([{"name": A, "wieght": 1}], "wieght of reward .*: expected none of this name, but name, reward, weight"),
        ([{"name": A, "options": 3}], f"options of reward '{A}': expected a mapping, got 3"),
        ('{"a":', "not valid YAML"),
        ([{"name": "second"}], "unknown reward 'second': .* says what it is, {name: …, reward: …}"),
        ([{"name": "second", "reward": "jpg"}], "unknown reward 'jpg'"),
        ([{"name": "clip", "reward": A}], f"name 'clip' of a reward {A}: expected letters"),
        ([{"name": "a/b", "reward": A}], "name 'a/b' of a reward"),
    ],
)
def test_refused_with_the_entry_named(spec, named):
    with pytest.raises(RewardSpecError, match=named):
        parse_reward_spec(spec)


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused(spec):
    try:
        named = parse_reward_spec(spec)
    except RewardSpecError:
        return
    assert named and all(math.isfinite(entry.weight) for entry in named.values())


def test_options_are_checked_before_any_reward_is_made(monkeypatch):
    """Options that are unknown, of the wrong type, missing, or for a later reward; and objects that are not rewards."""
    name, other, made = f"{__name__}:Brightness", f"{__name__}.Brightness", []
    sample = Sample("", grey(10, 4))
    for own in (name, other):
        assert build({own: 0.5}, {own: {"scale": 2}})[own].score([sample])[0].value == 20.0
    monkeypatch.setattr(Brightness, "__signature__", inspect.signature(Brightness), raising=False)

    def init(self, scale: float) -> None:
        made.append(scale)

    monkeypatch.setattr(Brightness, "__init__", init)
    for spec, options, message in (
        ([name], {name: {"scal": 2.0}}, r"no option 'scal'.*did you mean 'scale'"),
        ([name, A], {name: {"scale": 2.0}, A: {"quality": 95}}, "has no option 'quality'"),
        ([name, "vlm_pairwise"], {name: {"scale": 2.0}}, r"needs the option.*judge"),
        (
            ["vlm_pairwise"],
            {"vlm_pairwise": {"url": "http://a", "judge": {}}},
            "no option 'judge'.*plan, round_verdicts, rate",
        ),
        *(
            ([name], {name: {"scale": x}}, f"'scale' of reward '.*': Input should be a valid number, got {x!r}")
            for x in ("1", True, None)
        ),
        (["no.such.Thing"], {}, "cannot load"),
        (["os.path"], {}, "not a Reward"),
        (["math.pi"], {}, "not a Reward"),
    ):
        with pytest.raises(RewardSpecError, match=message):
            build(spec, options)
    assert not made


def test_one_reward_under_two_names():
    """Each with its own options."""
    spec = [{"name": A, "options": {"divisor": 2}}, {"name": "halved", "reward": A, "options": {"divisor": 4}}]
    rewards = build(spec)
    assert list(rewards) == [A, "halved"]
    whole, half = (reward.score([Sample("", grey(10, 16))])[0].value for reward in rewards.values())
    assert whole == 2 * half != 0


def test_scenes_is_the_mean_of_the_hits_and_refuses_foreign_captions():
    """The hits themselves are tested in tests/tiny/test_scenes.py."""
    right, _ = drawn()
    wrong, foreign = replace(right, prompt=scenes.caption(scenes.COMBOS[-1])), replace(right, prompt="a dog")
    right, wrong, foreign = build("scenes")["scenes"].score([right, wrong, foreign])
    assert right.value == 1.0 and right.parts == {"colour": 1.0, "shape": 1.0, "place": 1.0, "all": 1.0}
    agree = [float(a == b) for a, b in zip(scenes.COMBOS[0], scenes.COMBOS[-1], strict=True)]
    assert wrong.value == pytest.approx(sum(agree) / 3) and wrong.parts["all"] == 0.0
    assert foreign.value is None and "caption" in foreign.reason
