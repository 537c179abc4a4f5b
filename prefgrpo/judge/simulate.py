"""`prefgrpo judge plan`: ranking quality of each pair plan against its number of calls, simulated or from a run's log.

    logit P(i better, i shown first) = q_i − q_j + bias + noise · ε_ij,   q ~ N(0, spread²),  ε ~ N(0, 1)

A judge at temperature 0 always gives the same answer to the same question, so ε is drawn once per ordered pair, and
both_orders averages two draws. All plans and rates use the same verdicts of the same groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray

from prefgrpo.judge.plans import Judged, get_plan
from prefgrpo.judge.rate import Bias, Rate, Rating, VerdictKind, position_bias, rate_groups
from prefgrpo.judge.verdict import JudgeError

Floats = NDArray[np.float64]
FULL = "both_orders"
RATES: tuple[Rate, ...] = ("win_rate", "bradley_terry")
GOAL = 0.95
"""Rank correlation from which the ranking counts as the same as the full plan's."""
SHARE = 0.4
"""Default budget, as a fraction of round_robin's calls."""


@dataclass(frozen=True)
class JudgeModel:
    """A simulated judge."""

    noise: Annotated[float, tyro.conf.arg(name="judge-noise")] = 1.0
    """Standard deviation of the noise per ordered pair, in logits."""
    spread: float = 2.0
    """Standard deviation of the members' qualities, in logits."""
    bias: Annotated[float, tyro.conf.arg(name="position-bias")] = 0.0
    """Advantage of being shown first, in logits."""
    ties: float = 0.0
    """Verdicts within this distance of even, in logits, are ties."""
    missing: float = 0.0
    """Fraction of comparisons that fail."""


@dataclass(frozen=True)
class Groups:
    """N groups of G members with the verdicts on all ordered pairs."""

    verdicts: Floats
    """[N, G, G] P(first), indexed by first and second shown; NaN for failures and on the diagonal."""
    truth: Floats | None = None
    """[N, G] true qualities, if known."""

    @property
    def size(self) -> int:
        """G."""
        return int(self.verdicts.shape[1])


@dataclass(frozen=True)
class Correlation:
    """Mean over the groups, and the half-width of its 95 % interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


@dataclass(frozen=True)
class Row:
    """One plan under one rate."""

    plan: str
    rate: Rate
    calls: int
    rounds: int
    """Number of rounds; each waits for the answers of the previous one."""
    spearman: Correlation
    """Rank correlation with the win rates of the full plan."""
    true_spearman: Correlation | None
    """Rank correlation with the true qualities."""


def simulate_groups(judge: JudgeModel, size: int, repeats: int, seed: int) -> Groups:
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


def load_judgements(path: Path) -> Groups:
    """The largest groups in a run's judgements.jsonl that were judged in both orders. JudgeError if fewer than two.

    An incomplete last line, left by a killed run, is ignored.
    """
    groups: dict[tuple[str, int, int], dict[tuple[int, int], float]] = {}
    try:
        for line in path.read_bytes().rpartition(b"\n")[0].splitlines():
            row = json.loads(line)
            value = np.nan if row["p_first"] is None else row["p_first"]
            groups.setdefault((row["reward"], row["step"], row["group"]), {})[row["first"], row["second"]] = value
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JudgeError(f"{path}: expected the judgements.jsonl of a run ({error})") from error
    sizes = {key: 1 + max(map(max, pairs)) for key, pairs in groups.items()}
    full = [key for key, n in sizes.items() if len(groups[key]) == n * (n - 1)]
    size = max((sizes[key] for key in full), default=0)
    full = [key for key in full if sizes[key] == size]
    if len(full) < 2:
        raise JudgeError(f"{path} has {len(full)} groups judged in both orders; expected at least 2")
    verdicts = np.full((len(full), size, size), np.nan)
    for k, key in enumerate(full):
        for pair, p in groups[key].items():
            verdicts[k][pair] = p
    if np.isnan(verdicts).all():
        raise JudgeError(f"{path}: all comparisons of its {len(full)} groups failed; expected verdicts")
    return Groups(verdicts)


def fit_judge(groups: Groups) -> JudgeModel:
    """Parameters of a simulated judge, fitted to these verdicts by least squares in logits."""
    p = np.clip(groups.verdicts, 1e-6, 1.0 - 1e-6)
    logit = np.log(p / (1.0 - p))
    odd = (logit - logit.transpose(0, 2, 1)) / 2
    quality = np.nansum(odd, 2) / groups.size
    bias = position_bias(run_plan(FULL, groups, 0)[0])
    fitted = quality[:, :, None] - quality[:, None, :] + bias
    exists = ~np.isnan(p)
    ties, failed = np.mean(p[exists] == 0.5), 1.0 - exists.mean() - 1.0 / groups.size
    band = float(np.quantile(np.abs(fitted[exists]), ties)) if ties else 0.0
    return JudgeModel(float(np.nanstd(logit - fitted)), float(quality.std()), bias, band, max(float(failed), 0.0))


def run_plan(plan: str, groups: Groups, seed: int) -> tuple[list[list[Judged]], int]:
    """(judged pairs of each group, maximum number of rounds). Raises ValueError if the plan does not fit G."""
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
    """Evaluate every plan under every rate. Raises ValueError for a plan that is unknown or does not fit."""
    full = rate_groups(groups.size, run_plan(FULL, groups, seed)[0], Rating("win_rate", verdict)).values
    rows = []
    for plan in plans:
        played, rounds = run_plan(plan, groups, seed)
        for rate in RATES:
            values = rate_groups(groups.size, played, Rating(rate, verdict, bias)).values
            true = None if groups.truth is None else spearman(values, groups.truth)
            rows.append(Row(plan, rate, len(played[0]), rounds, spearman(values, full), true))
    return rows


def spearman(a: Floats, b: Floats) -> Correlation:
    """Rank correlation of the rows of a and b [N, G], over members with values in both; constant rows are skipped."""
    both = ~np.isnan(a) & ~np.isnan(b)
    pairs = both[:, :, None] & both[:, None, :]
    values = [np.round(np.where(both, x, 0.0), 6) for x in (a, b)]  # equal members may differ by rounding errors
    x, y = ((np.sign(v[:, :, None] - v[:, None, :]) * pairs).sum(2) for v in values)  # 2 × centred ranks
    norm = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    correlations = (x * y).sum(1)[norm > 0] / norm[norm > 0]
    if not len(correlations):
        return Correlation(float("nan"), float("nan"))
    return Correlation(float(correlations.mean()), 1.96 * float(correlations.std(ddof=1)) / len(correlations) ** 0.5)


def best(rows: Sequence[Row], budget: int) -> Row | None:
    """The plan and rate closest to the full plan with at most `budget` calls; the cheaper one if equal."""
    affordable = [row for row in rows if row.calls <= budget and not np.isnan(row.spearman.mean)]
    return max(affordable, key=lambda row: (round(row.spearman.mean, 3), -row.calls), default=None)


def cheapest(rows: Sequence[Row], least: float) -> Row | None:
    """The plan and rate with the fewest calls whose confidence interval lies above `least`."""
    good = [row for row in rows if row.spearman.mean - row.spearman.half >= least]
    return min(good, key=lambda row: (row.calls, -row.spearman.mean), default=None)


def default_plans(size: int, budget: int) -> list[str]:
    """Plans that fit a group of `size`, including budget(`budget`)."""
    numbered = [f"{name}({n})" for name in ("k_regular", "swiss") for n in (2, 3, 4, 5, 6, 8, 9, 12) if n < size]
    fitting = []
    for name in ["tournament", *numbered, f"budget({budget})", "round_robin", FULL]:
        try:
            get_plan(name)(size, 0, ())
        except ValueError:
            continue
        fitting.append(name)
    return fitting


def report(rows: Sequence[Row], budget: int, size: int) -> str:
    """A table sorted by calls, starred where the whole interval reaches the goal, and the recommended plans."""
    every = size * (size - 1) // 2
    truth = "with the true qualities" if rows[0].true_spearman else ""
    lines = [f"{'plan':<14}{'rate':<15}{'calls':>5} {'of round_robin':>14} {'rounds':>6}     with {FULL}  {truth}"]
    for row in sorted(rows, key=lambda r: (r.calls, r.plan, r.rate)):
        star = "*" if cheapest([row], GOAL) else " "
        lines.append(
            f"{row.plan:<14}{row.rate:<15}{row.calls:>5} {row.calls / every:>13.0%} {row.rounds:>7}   {star} "
            f"{row.spearman!s:<16}  {row.true_spearman or ''}"
        )
    if all(np.isnan(row.spearman.mean) for row in rows):
        lines.append(f"{FULL} cannot rank any group (all verdicts are ties), so plans cannot be compared")
    else:
        for goal, none, good in (
            (f"best for {budget} calls", f"no plan fits {budget} calls", best(rows, budget)),
            (f"fewest calls for {GOAL} with {FULL}", f"no plan reaches {GOAL} with {FULL}", cheapest(rows, GOAL)),
        ):
            share = f"{good.calls} calls ({good.calls / every:.0%} of round_robin)" if good else ""
            lines.append(f"{goal}: {good.plan} with {good.rate}, {share}: {good.spearman}" if good else none)
    return "\n".join(line.rstrip() for line in lines)


def plan(
    group_size: int = 24,
    judge: Annotated[JudgeModel, tyro.conf.arg(name="")] = JudgeModel(bias=0.5),
    verdict: VerdictKind = "soft",
    bias: Bias = 0.0,
    budget: int = 0,
    plans: Sequence[str] = (),
    repeats: int = 200,
    seed: int = 0,
    judgements: Path | None = None,
    out: Path | None = None,
) -> int:
    """Compare pair plans by calls and rank correlation, and find the best one for a budget.

    Args:
        group_size: Members of a group (G).
        judge: The simulated judge (docs/judging.md).
        verdict: soft: probabilities; hard: rounded verdicts, as from a judge that answers in text.
        bias: Position bias in logits that the rates remove, or fit.
        budget: Maximum calls per group; 0: 40 % of round_robin's.
        plans: Plans to compare; none: all that fit the group.
        repeats: Number of simulated groups.
        seed: Seed of the groups and the plans.
        judgements: judgements.jsonl of a run with plan both_orders, whose verdicts are used instead of simulated ones.
        out: JSON file of the rows.
    """
    if budget < 0:
        raise JudgeError(f"--budget: expected 0 (40 % of round_robin's calls) or more calls, got {budget}")
    if judgements is None:
        groups, kind = simulate_groups(judge, group_size, repeats, seed), "simulated "
    else:
        groups, kind = load_judgements(judgements), ""
        judge = fit_judge(groups)
    budget = budget or max(round(SHARE * groups.size * (groups.size - 1) / 2), groups.size // 2)
    try:
        rows = measure(groups, plans or default_plans(groups.size, budget), verdict, bias, seed)
    except ValueError as error:
        raise JudgeError(str(error)) from error
    print(
        f"{kind}{len(groups.verdicts)} groups of {groups.size}, as with --judge-noise {judge.noise:.2f} --spread "
        f"{judge.spread:.2f} --position-bias {judge.bias:.2f} --ties {judge.ties:.2f} --missing {judge.missing:.3f}; "
        f"{verdict} verdicts; Spearman correlations ± half of their 95 % interval"
    )
    print(report(rows, budget, groups.size))
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0
