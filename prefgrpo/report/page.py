"""report.html: one self-contained page about a run at any stage. The words are in page.html.j2.

At its top stand the result, what it is worth, and what to doubt about it. Invariant: the page refers to nothing outside
itself, and all text from the run is escaped.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, Template

import prefgrpo
from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.atomic import write_atomic
from prefgrpo.report import judged
from prefgrpo.report.charts import curves, numbers
from prefgrpo.report.read import Run, read_run, short
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.measures import JUDGE, MIN_PROMPTS, Estimate, Interval, Measure, interval
from prefgrpo.run.targets import WARN_MISSING


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page `out` (default: `folder/report.html`) from the run folder's files. Raises FileNotFoundError if it
    contains no run, and OSError if the page cannot be written."""
    run = read_run(folder)
    newest = max((group.step for group in run.groups), default=0)
    groups = [group for group in run.groups if group.step == newest]
    shown_set = next((n for n in (run.best_set, *run.stored) if n in run.stored and run.stored[n].step > 0), None)
    pairs = run.stored[shown_set].pairs if shown_set else []
    won = {name: wins(run, name) for name in run.evals}
    best = won[run.best_set] if run.best_set else []
    title = str(run.config.get("name") or folder.resolve().name)
    order = random.Random(f"{title} {run.step}")
    page = _template().render(
        run=run,
        title=title,
        best=[win for win in best if not math.isnan(win.rate)],
        certainty=certainty(best),
        alarms=alarms(run),
        ranking=ranking(run),
        bias=position_bias(run),
        agreement=agreement(run, run.best_set) if run.best_set else [],
        comparisons=float(np.nansum(run.train["judge/requests"])),
        wins=won,
        changes={name: changes(run, name) for name in run.evals},
        min_prompts=MIN_PROMPTS,
        shown=shown_set,
        edits=any(pair.source is not None for pair in pairs),
        pairs=[(pair, order.random() < 0.5) for pair in pairs],
        large=judged.PAIR_PX,
        charts=curves(run),
        groups=[judged.draw_group(group, f"group{k}") for k, group in enumerate(groups)],
        sources=any(group.source is not None for group in groups),
        answers=judged.answered(run, pairs),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        versions=f"prefgrpo {prefgrpo.__version__}, torch {torch.__version__}",
    )
    path = out or RunFolder(folder).report
    write_atomic(path, page)
    return path


@cache
def _template() -> Template:
    """page.html.j2 with the filters that write numbers."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent}
    environment.globals["numbers"] = numbers
    environment.filters |= {"pictures": judged.pictures, "rows": judged.rows}
    return environment.get_template("page.html.j2")


# ---- the numbers at the top ------------------------------------------------------------------------------------------


def percent(value: float, *others: float) -> str:
    """A fraction as '91 %' (without a line break), with one decimal if it, or one of those beside it, is near 0 or
    100 %."""
    near = any(0 < min(v, 1 - v) < 0.015 for v in (value, *others))
    return f"{100 * value:.{int(near)}f}\u00a0%"


def span(low: float, high: float) -> str:
    """Two fractions as '87–94 %'; empty if they are unknown."""
    return "" if math.isnan(low + high) else f"{percent(low, high)[:-2]}–{percent(high, low)}"


def shown(found: Interval) -> str:
    """An interval of fractions; empty for fewer than MIN_PROMPTS prompts."""
    return "" if found.few else span(found.low, found.high)


@dataclass(frozen=True)
class Win:
    """A win rate of a set's last evaluation, by the judge or a reward."""

    label: str
    role: str
    rate: float
    """NaN without any verdict."""
    missing: float
    """Share of images without a verdict."""
    conclusion: str
    """As `Interval.conclusion`."""
    interval: str
    """95 % interval; empty for fewer than MIN_PROMPTS prompts."""
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
    evals = run.evals[name]
    out = []
    for subject in evals.subjects("wins"):
        rate, first, second = (evals.of(subject, field)[-1] for field in ("wins", "first", "second"))
        known = run.interval(name, rate)
        found = np.array([o.wins.get(subject, math.nan) for o in run.outcomes(name)])
        counts = int((found > 0.5).sum()), int((found == 0.5).sum()), int((found < 0.5).sum())
        out.append(
            Win(
                label=run.label(subject),
                role=run.role(subject),
                rate=rate.value,
                missing=rate.missing,
                conclusion=known.conclusion,
                interval=shown(known),
                counts=counts if sum(counts) else None,
                orders=(first.value, second.value),
            )
        )
    return sorted(out, key=lambda w: w.role == "independent")


class Change(NamedTuple):
    """The mean of a reward or of its part before and after training, on a set."""

    label: str
    before: float
    after: float
    interval: str
    """95 % interval of the change of an image; empty for fewer than MIN_PROMPTS prompts."""
    missing: float
    """The larger missing share."""


def changes(run: Run, name: str) -> list[Change]:
    """The changes of the last evaluation on a set."""
    evals = run.evals[name]
    after_too = evals.subjects("now")
    out = []
    for subject in (s for s in evals.subjects("before") if s in after_too):
        after, before = (evals.of(subject, field)[-1] for field in ("now", "before"))
        known = run.interval(name, after)
        text = "" if known.few or math.isnan(known.low) else " to ".join(numbers(known.low, known.high))
        missing = max(after.missing, before.missing)
        out.append(Change(short(str(subject)), before.value, after.value, text, missing))
    return out


def alarms(run: Run) -> list[str]:
    """Warnings that a reader should see before trusting the result."""
    out = list[str]()
    for name, text in (("judge/missing", "comparisons"), ("reward/missing", "rewards")):
        if (many := run.train[name] > WARN_MISSING).any():
            out.append(f"In {many.sum()} steps more than {percent(WARN_MISSING)} of the {text} were missing.")
    if (skipped := np.nansum(run.train["updates_skipped"])) > 0:
        out.append(f"{skipped:.0f} of {np.nansum(run.train['updates']):.0f} updates were skipped: gradient not finite.")
    for name, evals in run.evals.items():
        every = dict.fromkeys(subject for one in evals.comparisons for subject in one.measures)
        for subject in (s for s in every if not s.part):  # a part need not apply to a prompt
            measures = [one.measures[subject] for one in evals.comparisons if subject in one.measures]
            count = sum(_missing(measure) > JudgeConfig.max_missing for measure in measures)
            if count:
                judged = all(measure.now is None for measure in measures)
                what = f"{'verdicts' if judged else 'scores'} by {short(str(subject))}"
                text = f"{count} of {len(evals.comparisons)} evaluations on {name}"
                out.append(f"In {text} more than {percent(JudgeConfig.max_missing)} of the {what} were missing.")
    return out


def _missing(measure: Measure[Estimate]) -> float:
    """The largest missing share: of either order, before or after training."""
    return max(estimate.missing for estimate in vars(measure).values() if estimate is not None)


def certainty(found: list[Win]) -> tuple[str, str]:
    """("better", "worse" or "inconclusive", reason) by the first win rate; empty strings without one."""
    if not found:
        return "", ""
    word, _, why = found[0].conclusion.partition(": ")
    low, high = found[0].bounds
    if word != "inconclusive" and low <= 0.5 <= high:
        why = "but not if all missing verdicts had gone the other way"
    return word, why


def ranking(run: Run) -> tuple[float, str]:
    """(share of held-out pairs from files that the policy ranks correctly, 95 % interval, '' for fewer than MIN_PROMPTS
    prompts) in the last evaluation; NaN without any."""
    right = run.evals["dev"].last.accuracy if "dev" in run.evals else None
    return (right.value, shown(right.interval)) if right else (math.nan, "")


def position_bias(run: Run) -> tuple[float, str]:
    """(share of training comparisons that the image shown first won, 95 % interval over steps); NaN for few steps."""
    share = run.train["judge/position_bias"]
    over_steps = interval(np.arange(len(share)), share)
    low, high, _ = over_steps
    return (math.nan, "") if over_steps.few else (float(np.nanmean(share)), f"{100 * low:.1f}–{100 * high:.1f}")


class Agreement(NamedTuple):
    """How often a reward and the judge prefer the same image."""

    label: str
    share: float
    samples: int
    """Images where neither has a tie."""
    interval: str
    """95 % interval; empty for fewer than MIN_PROMPTS prompts."""


def agreement(run: Run, name: str) -> list[Agreement]:
    """How far the judge's win rate and every other one agree in a set's last evaluation."""
    outcomes = run.outcomes(name)
    out = []
    for other in dict.fromkeys(by for o in outcomes for by in o.wins if by != JUDGE):
        sides = np.array([(o.wins.get(JUDGE, math.nan), o.wins[other]) for o in outcomes]) - 0.5
        product = sides.prod(1)
        same = np.where(product == 0, math.nan, (np.sign(product) + 1) / 2)
        found = interval(np.array([o.prompt for o in outcomes]), same)
        if found.prompts:
            count = int((~np.isnan(same)).sum())
            out.append(Agreement(run.label(other), float(np.nanmean(same)), count, shown(found)))
    return out
