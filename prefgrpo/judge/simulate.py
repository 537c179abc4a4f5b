"""How well a pair plan orders a group for its calls: on simulated verdicts, or on those of a run's log.

    logit P(i better, i shown first) = q_i − q_j + bias + noise · ε_ij,   q ~ N(0, spread²),  ε ~ N(0, 1)

A judge at temperature 0 answers one question always alike, so ε belongs to the ordered pair: it is drawn once, and
both_orders averages two of them. Invariant: all plans and rates see the same verdicts of the same groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefgrpo.judge.plans import Judged, get_plan
from prefgrpo.judge.rate import Bias, Rate, Rating, VerdictKind, position_bias, rate_groups
from prefgrpo.judge.verdict import JudgeError

Floats = NDArray[np.float64]
FULL = "both_orders"
RATES: tuple[Rate, ...] = ("win_rate", "bradley_terry")
_ROUND = 6
"""Decimals of a rate that count: equal members differ by rounding."""
_EXTREME = 1e-6
"""Probabilities closer to 0 or 1 than this have no useful logit."""


@dataclass(frozen=True)
class JudgeModel:
    """A simulated judge; everything in logits except `missing`."""

    noise: float = 1.0
    """Standard deviation of what one ordered pair adds to the difference of the qualities."""
    spread: float = 2.0
    """Standard deviation of the members' qualities."""
    bias: float = 0.0
    """Added for the medium that is shown first."""
    ties: float = 0.0
    """Verdicts nearer to 0 than this are ties."""
    missing: float = 0.0
    """Share of verdicts that fail."""


@dataclass(frozen=True)
class Groups:
    """N groups of G members with the verdict on every ordered pair."""

    verdicts: Floats
    """[N, G, G] P(first), by first and second shown; NaN: failed, and on the diagonal."""
    truth: Floats | None = None
    """[N, G] true qualities, where they are known."""

    @property
    def size(self) -> int:
        """G."""
        return int(self.verdicts.shape[1])


@dataclass(frozen=True)
class Correlation:
    """Mean over the groups, and the half-width of its 95 % interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


@dataclass(frozen=True)
class Row:
    """One plan under one rate."""

    plan: str
    rate: Rate
    calls: int
    rounds: int
    """How often it waits for answers before it asks on."""
    spearman: Correlation
    """Rank correlation with the win rates of the full both_orders plan."""
    kendall: Correlation
    true_spearman: Correlation | None
    """Rank correlation with the true qualities."""
    true_kendall: Correlation | None


def simulated(judge: JudgeModel, size: int, repeats: int, seed: int) -> Groups:
    """`repeats` groups of `size` members. Raises JudgeError for options out of range."""
    widths = (judge.noise, judge.spread, judge.ties)
    if size < 2 or repeats < 2 or not all(w >= 0 for w in widths) or not 0 <= judge.missing < 1:
        raise JudgeError(
            f"expected at least 2 members and 2 repeats, noise, spread and ties of 0 or more, missing in [0, 1); got "
            f"{size}, {repeats}, {widths}, {judge.missing}"
        )
    rng = np.random.default_rng(seed)
    quality = judge.spread * rng.standard_normal((repeats, size))
    logit = quality[:, :, None] - quality[:, None, :] + judge.bias
    logit += judge.noise * rng.standard_normal(logit.shape)
    p = np.where(np.abs(logit) < judge.ties, 0.5, 1.0 / (1.0 + np.exp(-logit)))
    p[rng.random(p.shape) < judge.missing] = np.nan
    p[:, np.arange(size), np.arange(size)] = np.nan
    return Groups(p, quality)


def replayed(path: Path) -> Groups:
    """Groups of a run's judgements.jsonl that were judged in both orders. Raises JudgeError if there is none.

    A last line without its end, as a killed run leaves it, is left out.
    """
    found: dict[tuple[str, int, int], dict[tuple[int, int], float]] = {}
    try:
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                row = json.loads(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise
                break
            value = np.nan if row["p_first"] is None else row["p_first"]
            found.setdefault((row["reward"], row["step"], row["group"]), {})[row["first"], row["second"]] = value
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JudgeError(f"{path}: expected the judgements.jsonl of a run ({error})") from error
    sizes = [1 + max(max(pair) for pair in pairs) for pairs in found.values()]
    full = [(n, pairs) for n, pairs in zip(sizes, found.values(), strict=True) if len(pairs) == n * (n - 1)]
    size = max((n for n, _ in full), default=0)
    full = [(n, pairs) for n, pairs in full if n == size]
    if len(full) < 2:
        raise JudgeError(f"{path} has {len(full)} groups that were judged in both orders; expected at least 2")
    if all(np.isnan(p) for _, pairs in full for p in pairs.values()):
        raise JudgeError(f"{path}: all comparisons of its {len(full)} groups failed; expected verdicts")
    verdicts = np.full((len(full), size, size), np.nan)
    for k, (_, pairs) in enumerate(full):
        for (i, j), p in pairs.items():
            verdicts[k, i, j] = p
    return Groups(verdicts)


def resembling(groups: Groups) -> JudgeModel:
    """The simulated judge that fits these verdicts by least squares in logits."""
    p = np.clip(groups.verdicts, _EXTREME, 1.0 - _EXTREME)
    logit = np.log(p / (1.0 - p))
    odd = (logit - logit.transpose(0, 2, 1)) / 2
    quality = np.nansum(odd, 2) / groups.size
    bias = position_bias([_all(v) for v in groups.verdicts])
    fitted = quality[:, :, None] - quality[:, None, :] + bias
    there = ~np.isnan(p)
    ties, failed = np.mean(p[there] == 0.5), 1.0 - there.mean() - 1.0 / groups.size
    band = float(np.quantile(np.abs(fitted[there]), ties)) if ties else 0.0
    return JudgeModel(float(np.nanstd(logit - fitted)), float(quality.std()), bias, band, max(float(failed), 0.0))


def _all(verdicts: Floats) -> list[Judged]:
    """Everything that is known of a group."""
    return [(int(i), int(j), float(verdicts[i, j])) for i, j in np.argwhere(~np.isnan(verdicts))]


def play(plan: str, groups: Groups, seed: int) -> tuple[list[list[Judged]], int]:
    """(what the plan asked of each group with the answers, most rounds). Raises ValueError if it does not fit G."""
    ask, played, most = get_plan(plan), [], 0
    for k, verdicts in enumerate(groups.verdicts):
        done: list[Judged] = []
        rounds = 0
        while pairs := ask(groups.size, seed + k, done):
            answers = [float(verdicts[pair]) for pair in pairs]
            done += [(i, j, None if np.isnan(p) else p) for (i, j), p in zip(pairs, answers, strict=True)]
            rounds += 1
        played.append(done)
        most = max(most, rounds)
    return played, most


def measure(
    groups: Groups, plans: Sequence[str], verdict: VerdictKind = "soft", bias: Bias = 0.0, seed: int = 0
) -> list[Row]:
    """Every plan under every rate. Raises ValueError for a plan that does not exist or fit."""
    full = rate_groups(groups.size, play(FULL, groups, seed)[0], Rating("win_rate", verdict)).values
    rows = []
    for plan in plans:
        played, rounds = play(plan, groups, seed)
        for rate in RATES:
            values = rate_groups(groups.size, played, Rating(rate, verdict, bias)).values
            true = None if groups.truth is None else correlations(values, groups.truth)
            rows.append(Row(plan, rate, len(played[0]), rounds, *correlations(values, full), *(true or (None, None))))
    return rows


def correlations(a: Floats, b: Floats) -> tuple[Correlation, Correlation]:
    """(Spearman, Kendall τ-b) of the rows of a and b [N, G], over the members that both have."""
    both = ~np.isnan(a) & ~np.isnan(b)
    kept = [np.round(np.where(both, x, 0.0), _ROUND) for x in (a, b)]
    pairs = both[:, :, None] & both[:, None, :]
    order = [np.sign(x[:, :, None] - x[:, None, :]) * pairs for x in kept]
    ranks = [o.sum(2) for o in order]  # twice the centred average rank
    return _mean(_cosine(*ranks)), _mean(_cosine(*(o.reshape(len(o), -1) for o in order)))


def _cosine(a: Floats, b: Floats) -> Floats:
    size = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return np.divide((a * b).sum(1), size, out=np.full(len(a), np.nan), where=size > 0)


def _mean(values: Floats) -> Correlation:
    values = values[~np.isnan(values)]
    if not len(values):
        return Correlation(float("nan"), float("nan"))
    return Correlation(float(values.mean()), 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5)


def best(rows: Sequence[Row], budget: int) -> Row | None:
    """The plan and rate that agree most with the full plan for at most `budget` calls; the cheaper of equals."""
    affordable = [row for row in rows if row.calls <= budget and not np.isnan(row.spearman.mean)]
    return max(affordable, key=lambda row: (round(row.spearman.mean, 3), -row.calls), default=None)


def cheapest(rows: Sequence[Row], least: float) -> Row | None:
    """The plan and rate with the fewest calls whose correlation with the full plan is surely at least `least`."""
    good = [row for row in rows if row.spearman.low >= least]
    return min(good, key=lambda row: (row.calls, -row.spearman.mean), default=None)
