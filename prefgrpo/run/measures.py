"""Measurements as records, and their flat names in metrics.jsonl, trackers and results.

A reward measures a pair of samples of a prompt: the policy's (now) and another policy's (before). Over a set of prompts
its `Measure` has these keys, each after the set's name, `dev/`; a part of a reward is written REWARD.PART:

    now NAME    before NAME_before    wins win_NAME    first win_NAME_first    second win_NAME_second
    of each: _missing (share, if any), _low, _high (95 % interval), _prompts (number of prompts with a value)

A training step has `reward/NAME` and `reward/NAME_std`. Invariant: `read_measures` is the inverse of `flat`, whatever
rewards are called: a name that would read as another key is written in quotes, dev/win_"ocr_first".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

MIN_PROMPTS = 30
"""Below this number of prompts, a result is called inconclusive."""
T = TypeVar("T")


class Subject(NamedTuple):
    """What is measured: a reward, or one of its parts."""

    reward: str
    part: str = ""

    def __str__(self) -> str:
        return "judge" if self == JUDGE else self.reward + f".{self.part}" * bool(self.part)


JUDGE = Subject("")
"""The first judge of pairs, a trained one if there is one. It has the same keys in every run, whatever its name is."""


class Interval(NamedTuple):
    """A 95 % interval over prompts; NaN if it is unknown."""

    low: float = math.nan
    high: float = math.nan
    prompts: int | None = None
    """Number of prompts with a value; None: not stored."""

    @property
    def conclusion(self) -> str:
        """What the interval of a win rate says: better, worse, or inconclusive if it contains ½ or prompts are few."""
        if math.isnan(self.low):
            return "inconclusive: no verdicts"
        if self.few:
            return f"inconclusive: fewer than {MIN_PROMPTS} prompts"
        if self.low <= 0.5 <= self.high:
            return "inconclusive: the interval contains 50 %"
        return "better" if self.low > 0.5 else "worse"

    @property
    def few(self) -> bool:
        """Whether it is of too few prompts to be shown."""
        return not self.prompts or self.prompts < MIN_PROMPTS


UNKNOWN = Interval()


@dataclass(frozen=True)
class Estimate:
    """The mean of the values that there are over the pairs of a set; NaN if there is none."""

    value: float = math.nan
    missing: float = 0.0
    """Share of the pairs without a value."""
    interval: Interval = UNKNOWN


@dataclass(frozen=True)
class Measure(Generic[T]):
    """A reward's values of samples and its comparisons of them: T is float for a pair (NaN: missing), Estimate for a
    set. None: not measured; a judge compares without values, a part of a reward has only values."""

    now: T | None = None
    """The policy's value. Its interval over a set is that of the mean change of a pair, now − before."""
    before: T | None = None
    wins: T | None = None
    """1 for a win, ½ for a tie, 0; over a set, the win rate."""
    first: T | None = None
    """A judge's wins where the policy's sample was shown first."""
    second: T | None = None


PairMeasures = dict[Subject, Measure[float]]
"""All measures of one pair."""


@dataclass(frozen=True)
class Comparison:
    """All measures on one set of prompts."""

    name: str
    """The set: dev or test."""
    measures: dict[Subject, Measure[Estimate]]
    accuracy: Estimate | None = None
    """Share of held-out pairs from files that the policy's implicit reward ranks correctly (`offline`)."""
    margin: float = math.nan
    """Mean of these rewards of the winners minus those of the losers."""

    @property
    def wins(self) -> dict[Subject, Estimate]:
        """The win rates."""
        return {subject: m.wins for subject, m in self.measures.items() if m.wins is not None}

    @property
    def values(self) -> dict[Subject, tuple[Estimate, Estimate]]:
        """Values of rewards and parts: now, and before."""
        both = {subject: (m.now, m.before) for subject, m in self.measures.items()}
        return {subject: (now, old) for subject, (now, old) in both.items() if now is not None and old is not None}

    @property
    def win_rate(self) -> float | None:
        """The win rate by the judge, or else by the first reward."""
        by = self.wins.get(JUDGE) or next(iter(self.wins.values()), None)
        return by.value if by else None

    def metrics(self) -> dict[str, float]:
        """The row of metrics.jsonl."""
        row = flat(self.measures)
        if self.accuracy is not None:
            low, high, prompts = self.accuracy.interval
            row |= {"pairs_accuracy": self.accuracy.value, "pairs_margin": self.margin}
            row |= {"pairs_low": low, "pairs_high": high, "pairs_prompts": float(prompts or 0)}
        return {f"{self.name}/{key}": value for key, value in row.items()}

    def line(self, step: int) -> str:
        """The summary line: means now (and before), win rates with their intervals."""
        parts = [f"{name} {before.value:.3f} → {now.value:.3f}" for name, (now, before) in self.values.items()]
        parts += [f"win rate by {subject} {summary(self.measures[subject])}" for subject in self.wins]
        parts += [f"held-out pairs ranked rightly {summary(Measure(wins=self.accuracy))}"] if self.accuracy else []
        return f"eval at step {step}, {self.name}: " + (", ".join(parts) or "images, without a reward")


def summary(measure: Measure[Estimate]) -> str:
    """A win rate as a line shows it: rate, interval, the rates of the two orders, missing share."""
    wins = measure.wins or Estimate()
    text = f"{wins.value:.3f}"
    if not math.isnan(wins.interval.low):
        text += f" [{wins.interval.low:.3f}, {wins.interval.high:.3f}]"
    if measure.first is not None and measure.second is not None:
        text += f" (orders {measure.first.value:.3f} / {measure.second.value:.3f})"
    return text + (f" ({wins.missing:.1%} missing)" if wins.missing else "")


# ---- from pairs to a set --------------------------------------------------------------------------------------------


def compared(name: str, group: Sequence[int], pairs: Sequence[PairMeasures]) -> Comparison:
    """The comparison on the set `name` from the measures of each pair; group: prompt index per pair."""
    subjects = sorted({subject for pair in pairs for subject in pair}, key=str)
    prompts = np.array(group)
    nothing = Measure[float]()
    return Comparison(name, {s: over_pairs(prompts, [pair.get(s, nothing) for pair in pairs]) for s in subjects})


def over_pairs(group: NDArray[np.int64], pairs: Sequence[Measure[float]]) -> Measure[Estimate]:
    """A reward's measure of a set from those of its pairs."""
    columns: dict[str, NDArray[np.float64]] = {}
    for field in fields(Measure):
        values = [getattr(pair, field.name) for pair in pairs]
        if any(value is not None for value in values):
            columns[field.name] = np.array([np.nan if value is None else value for value in values])
    out = {name: mean_of(values) for name, values in columns.items()}
    if "wins" in out:
        out["wins"] = replace(out["wins"], interval=interval(group, columns["wins"]))
    if "now" in out:
        out["now"] = replace(out["now"], interval=interval(group, columns["now"] - columns["before"]))
    return Measure(**out)


def mean_of(values: NDArray[np.float64]) -> Estimate:
    """The mean of the values that are not NaN, without an interval."""
    lost = np.isnan(values)
    return Estimate(float(values[~lost].mean()) if not lost.all() else math.nan, float(lost.mean()))


def interval(group: NDArray[np.int64], values: NDArray[np.float64]) -> Interval:
    """The 95 % bootstrap interval over prompts (2000 draws, fixed seed) of the mean over images; NaN is missing.

    Prompts are drawn, because images of one prompt are not independent.
    """
    there = ~np.isnan(values)
    if not there.any():
        return Interval(prompts=0)
    ids, inverse = np.unique(group[there], return_inverse=True)
    total = np.bincount(inverse, values[there])
    count = np.bincount(inverse)
    draws = np.random.default_rng(0).integers(len(ids), size=(2000, len(ids)))
    means = total[draws].sum(1) / count[draws].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(low), float(high), len(ids))


# ---- flat names -----------------------------------------------------------------------------------------------------

_KEYS = {
    "now": "{}", "before": "{}_before", "wins": "win_{}", "first": "win_{}_first", "second": "win_{}_second",
}  # fmt: skip
_DETAILS = ("", "_missing", "_low", "_high", "_prompts")
_DETAIL = "(?P<detail>_missing|_low|_high|_prompts)?"
_WINS = re.compile(f"win_(?P<name>.+?)(?P<field>_first|_second)?{_DETAIL}", re.DOTALL)
_VALUES = re.compile(f"(?P<name>.+?)(?P<field>_before)?{_DETAIL}", re.DOTALL)
_TRAINED = re.compile("reward/(?P<name>.+?)(?P<detail>_std|/missing_rate)?", re.DOTALL)
_QUOTES = re.compile(r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-f]{4})*"')
"""A string in JSON."""
_USED = {"judge", "missing", "pairs", "pairs_accuracy", "pairs_margin"}
"""Keys, without set or reward/, that do not belong to a reward."""


@cache
def quoted(name: str) -> str:
    """A reward's name in a key: as it is, or in quotes if one of its keys would read as another's."""
    trained = _TRAINED.fullmatch(f"reward/{name}")
    reads = [_parsed(form.format(name) + end)[0] for form in _KEYS.values() for end in _DETAILS]
    plain = trained and trained["name"] == name and all(read == name for read in reads)
    return name if plain and '"' not in name and name not in _USED else json.dumps(name, ensure_ascii=False)


def keys_of(subjects: Collection[Subject]) -> dict[Subject, str]:
    """What each of these subjects is called in keys. A part is in quotes if it would read as another subject."""
    rewards = {subject.reward for subject in subjects} - {JUDGE.reward}
    out: dict[Subject, str] = {}
    for subject in subjects:
        name = "judge" if subject == JUDGE else quoted(subject.reward)
        if subject.part:
            plain = f"{name}.{subject.part}"
            reads = _parsed(plain)[0] == plain and subject_of(plain, rewards) == subject
            name = plain if reads else f"{name}.{json.dumps(subject.part, ensure_ascii=False)}"
        out[subject] = name
    return out


def flat(measures: Mapping[Subject, Measure[Estimate]]) -> dict[str, float]:
    """The measures of a set under the keys above, without the set's name. Missing shares and numbers of prompts are
    written where there are missing values; the number of prompts of a change always."""
    out: dict[str, float] = {}
    for subject, name in keys_of(measures).items():
        measure = measures[subject]
        for field, form in _KEYS.items():
            estimate: Estimate | None = getattr(measure, field)
            if estimate is None:
                continue
            key = form.format(name)
            low, high, prompts = estimate.interval
            out[key] = estimate.value
            if estimate.missing:
                out[f"{key}_missing"] = estimate.missing
            if not math.isnan(low):
                out |= {f"{key}_low": low, f"{key}_high": high}
                if prompts is not None and (field == "now" or estimate.missing):
                    out[f"{key}_prompts"] = float(prompts)
    return out


def read_measures(row: Mapping[str, Any]) -> dict[Subject, Measure[Estimate]]:
    """The measures in a row whose keys have lost their set's name: the inverse of `flat`. Anything else than a number
    is NaN."""
    found: dict[str, dict[str, dict[str, float]]] = {}  # name → field of Measure → field of Estimate → number
    for key, value in row.items():
        name, field, detail = _parsed(key)
        found.setdefault(name, {}).setdefault(field, {})[detail] = number(value)
    rewards = {_unquoted(name) for name, measured in found.items() if "wins" in measured and name != "judge"}
    out: dict[Subject, Measure[Estimate]] = {}
    for name, measured in found.items():
        out[subject_of(name, rewards)] = Measure(**{field: _estimate(of) for field, of in measured.items()})
    return out


def read_comparison(name: str, row: Mapping[str, Any]) -> Comparison:
    """The comparison on the set `name` in a row of metrics.jsonl: the inverse of `Comparison.metrics`."""
    own = {key.removeprefix(f"{name}/"): value for key, value in row.items() if key.startswith(f"{name}/")}
    pairs = {part: number(own.pop(f"pairs_{part}", None)) for part in ("accuracy", "margin", *Interval._fields)}
    accuracy = None if math.isnan(pairs["accuracy"]) else _estimate(pairs | {"value": pairs["accuracy"]})
    return Comparison(name, read_measures(own), accuracy, pairs["margin"])


def subject_of(name: str, rewards: Collection[str] = ()) -> Subject:
    """The subject that a key's name means, beside these rewards."""
    if name == "judge":
        return JUDGE
    if quotes := _QUOTES.match(name):
        return Subject(_unquoted(quotes[0]), _unquoted(name[quotes.end() + 1 :]))
    wholes = [reward for reward in rewards if name.startswith(f"{reward}.")]
    if name in rewards or not wholes:
        return Subject(name)
    reward = max(wholes, key=len)
    return Subject(reward, _unquoted(name[len(reward) + 1 :]))


def rewards_of_step(row: Iterable[str]) -> dict[str, str]:
    """Reward → key of its mean, in the row of a training step; the within-group std has this key with `_std`."""
    found = [match for key in row if (match := _TRAINED.fullmatch(key)) and match["name"] not in _USED]
    return {_unquoted(match["name"]): match[0] for match in found if match["detail"] is None}


def judges_of_step(row: Iterable[str]) -> dict[str, str]:
    """Judge → what its keys begin with, in the row of a training step; '' is the only judge."""
    found = [match for key in row if (match := re.fullmatch("(judge/(?:(.+)/)?)tie_rate", key))]
    every = {match[2] or "": match[1] for match in found}
    return {name: begin for name, begin in every.items() if name or len(every) == 1}


def number(value: Any) -> float:
    """A finite number, NaN for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.nan


def _parsed(key: str) -> tuple[str, str, str]:
    """(name, field of Measure, field of Estimate or its interval) that a key means."""
    match = _WINS.fullmatch(key)
    field = "wins"
    if match is None:
        match = _VALUES.fullmatch(key)
        field = "now"
    if match is None:  # an empty key
        return key, field, "value"
    return match["name"], (match["field"] or field).removeprefix("_"), (match["detail"] or "value").removeprefix("_")


def _unquoted(text: str) -> str:
    return str(json.loads(text)) if _QUOTES.fullmatch(text) else text


def _estimate(details: Mapping[str, float]) -> Estimate:
    prompts = details.get("prompts", math.nan)
    bounds = Interval(details.get("low", math.nan), details.get("high", math.nan))
    counted = bounds._replace(prompts=None if math.isnan(prompts) else int(prompts))
    missing = float(np.nan_to_num(details.get("missing", 0.0)))
    return Estimate(details.get("value", math.nan), missing, counted)
