"""The numbers at the top of the page: the result, what it is worth, and what to doubt about it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.report.charts import numbers, win_names
from prefgrpo.report.run import Floats, Run, short
from prefgrpo.run.comparison import MIN_PROMPTS, ORDERS, interval, verdict
from prefgrpo.run.metrics import WARN_MISSING


def percent(value: float, *others: float) -> str:
    """A fraction as '91 %' (without a line break), with one decimal if it, or one of those beside it, is near 0 or
    100 %."""
    near = any(0 < min(v, 1 - v) < 0.015 for v in (value, *others))
    return f"{100 * value:.{int(near)}f}\u00a0%"


def span(low: float, high: float) -> str:
    """Two fractions as '87–94 %'; empty if they are unknown."""
    return "" if math.isnan(low + high) else f"{percent(low, high)[:-2]}–{percent(high, low)}"


@dataclass(frozen=True)
class Win:
    """A win rate of a set's last evaluation, by the judge or a reward."""

    label: str
    role: str
    rate: float
    """NaN without any verdict."""
    missing: float
    """Share of images without a verdict."""
    verdict: str
    """As `comparison.verdict`."""
    interval: str
    """Of 95 %; empty for fewer than MIN_PROMPTS prompts."""
    counts: tuple[int, int, int] | None
    """How many images won, tied and lost; None if the run did not store them."""
    orders: tuple[float, float]
    """The rates where the policy's image was shown first, and second; NaN if they are not distinguished."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The rates if all missing verdicts were losses, and if they were wins."""
        there = (1 - self.missing) * self.rate
        return there, there + self.missing


def wins(run: Run, name: str) -> list[Win]:
    """The win rates of the last evaluation on a set, those of what was trained on first."""
    rows = run.evals[name]
    out = []
    for win in win_names(rows):
        by = win.removeprefix("win_")
        rate, missing, low, high, *orders = (rows.last(win + e) for e in ("", "_missing", "_low", "_high", *ORDERS))
        prompts = run.prompts(name, win)
        found = np.array([o.wins.get(by, math.nan) for o in run.outcomes(name)])
        counts = int((found > 0.5).sum()), int((found == 0.5).sum()), int((found < 0.5).sum())
        known = span(low, high) if prompts >= MIN_PROMPTS else ""
        what = verdict(low, high, prompts), known, counts if sum(counts) else None, (orders[0], orders[1])
        out.append(Win(run.label(by), run.role(by), rate, float(np.nan_to_num(missing)), *what))
    return sorted(out, key=lambda w: w.role == "independent")


def changes(run: Run, name: str) -> list[tuple[str, float, float, str, float]]:
    """(reward or part, mean before, mean after, 95 % interval of the change of an image or '', missing share) of the
    last evaluation on a set. No interval for fewer than MIN_PROMPTS prompts."""
    rows = run.evals[name]
    out = []
    for measure in (m for m in rows.columns if f"{m}_before" in rows):
        low = rows.last(f"{measure}_low")
        high = rows.last(f"{measure}_high")
        few = math.isnan(low + high) or run.prompts(name, measure) < MIN_PROMPTS
        known = "" if few else " to ".join(numbers(low, high))
        missing = np.nan_to_num([rows.last(f"{measure}{end}_missing") for end in ("", "_before")]).max()
        out.append((short(measure), rows.last(f"{measure}_before"), rows.last(measure), known, float(missing)))
    return out


def alarms(run: Run) -> list[str]:
    """Warnings that a reader should see before trusting the result."""
    out = list[str]()
    for name, text in (("judge/missing", "comparisons"), ("reward/missing", "rewards")):
        if (many := run.train[name] > WARN_MISSING).any():
            out.append(f"In {many.sum()} steps more than {percent(WARN_MISSING)} of the {text} were missing.")
    if (skipped := np.nansum(run.train["updates_skipped"])) > 0:
        out.append(f"{skipped:.0f} of {np.nansum(run.train['updates']):.0f} updates were skipped: gradient not finite.")
    for name, rows in run.evals.items():
        worst: dict[str, Floats] = {}  # judge or reward → its largest missing share, of any order, before and after
        for column in (c for c in rows.columns if c.endswith("_missing")):
            subject = re.sub(r"^win_|(_before|_first|_second)?_missing$", "", column)
            if subject.partition(".")[0] == subject or f"win_{subject}" in rows:  # a part need not apply to a prompt
                worst[subject] = np.fmax(worst.get(subject, np.zeros(len(rows.steps))), rows[column])
        for subject, share in worst.items():
            if (many := share > JudgeConfig.max_missing).any():
                what = f"{'verdicts' if subject.startswith('judge') else 'scores'} by {short(subject)}"
                text = f"{many.sum()} of {len(many)} evaluations on {name}"
                out.append(f"In {text} more than {percent(JudgeConfig.max_missing)} of the {what} were missing.")
    return out


def certainty(found: list[Win]) -> tuple[str, str]:
    """("better", "worse" or "inconclusive", reason) by the first win rate; empty strings without one."""
    if not found:
        return "", ""
    word, _, why = found[0].verdict.partition(": ")
    low, high = found[0].bounds
    if word != "inconclusive" and low <= 0.5 <= high:
        why = "but not if all missing verdicts had gone the other way"
    return word, why


def ranking(run: Run) -> tuple[float, str]:
    """(share of held-out pairs from files that the policy ranks rightly, 95 % interval, '' of fewer than MIN_PROMPTS
    prompts) in the last evaluation; NaN without any."""
    if "dev" not in run.evals:
        return math.nan, ""
    rate, low, high, prompts = (run.evals["dev"].last(f"pairs_{n}") for n in ("accuracy", "low", "high", "prompts"))
    return rate, span(low, high) if prompts >= MIN_PROMPTS else ""


def position_bias(run: Run) -> tuple[float, str]:
    """(share of training comparisons that the image shown first won, 95 % interval over steps); NaN for few steps."""
    share = run.train["judge/position_bias"]
    low, high, steps = interval(np.arange(len(share)), share)
    return (float(np.nanmean(share)), f"{100 * low:.1f}–{100 * high:.1f}") if steps >= MIN_PROMPTS else (math.nan, "")


def agreement(run: Run, name: str) -> list[tuple[str, float, int, str]]:
    """(reward, how often it and the judge prefer the same image, number of images where neither has a tie, 95 %
    interval or '')."""
    outcomes = run.outcomes(name)
    out = []
    for other in dict.fromkeys(by for o in outcomes for by in o.wins if by != "judge"):
        sides = np.array([(o.wins.get("judge", math.nan), o.wins[other]) for o in outcomes]) - 0.5
        product = sides.prod(1)
        same = np.where(product == 0, math.nan, (np.sign(product) + 1) / 2)
        low, high, prompts = interval(np.array([o.prompt for o in outcomes]), same)
        if prompts:
            known = span(low, high) if prompts >= MIN_PROMPTS else ""
            out.append((run.label(other), float(np.nanmean(same)), int((~np.isnan(same)).sum()), known))
    return out
