"""A page that compares runs: final numbers, curves with bands over seeds, and images for the same prompts side by side.

Runs with different seeds whose configurations differ only in the values in SAME are one variant. Invariant: a variant's
number is the mean of its runs' numbers, with their standard deviation; samples are never pooled.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prefgrpo.config.recipe import flatten
from prefgrpo.report.browser import pair_id
from prefgrpo.report.charts import COLOURS, Chart, Series, draw
from prefgrpo.report.curves import curves, measure_names, namer, win_names
from prefgrpo.report.headline import certainty, number, percent, subject
from prefgrpo.report.media import picture
from prefgrpo.report.page import PAIR_PX, render, span, write_page
from prefgrpo.report.run import EvalImages, Run, read_run

SAME = ("seed", "name", "output", "device", "tensorboard", "checkpoint.every", "checkpoint.keep")
"""Configuration values that may differ between seeds of one variant."""


@dataclass(frozen=True)
class Variant:
    """Runs of one configuration with different seeds."""

    label: str
    runs: list[Run]
    values: dict[str, Any]


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Write the page `out` comparing the runs in `folders`, each once. Raises FileNotFoundError if one contains no run,
    and OSError if the page cannot be written."""
    runs = [read_run(folder) for folder in {Path(f).resolve(): Path(f) for f in folders}.values()]
    found = variants(runs)
    key, results, health = (compared(found, part) for part in range(3))
    large = [chart for chart, first in key if first]
    charts = [large, [c for c, first in key if not first] + [c for c, _ in results], [c for c, _ in health]]
    figures = [[figure for chart in part if (figure := draw(chart, span(runs)))] for part in charts]
    images, items = _images(runs)
    page = render(
        "compare.html.j2",
        title=f"{len(runs)} runs compared",
        subjects=list(dict.fromkeys(subject(run) for run in runs)),
        variants=[(v.label, _links(v, out), _differences(v, found)) for v in found],
        statuses=[f"{_name(run)}: {run.status}" for run in runs if run.status],
        table=_table(found),
        seeds=any(len(v.runs) > 1 for v in found),
        images=images,
        items=items,
        key=figures[0],
        charts=figures[1],
        health=figures[2],
        problems=[f"{_name(run)}: {problem}" for run in runs for problem in run.problems],
    )
    write_page(out, page)
    return out


def variants(runs: Sequence[Run]) -> list[Variant]:
    """Group runs by configuration, in the given order; a run without a configuration, or with the configuration and
    the seed of an earlier one, is not a further seed of a variant."""
    groups: dict[tuple[str, int], list[Run]] = {}
    twins = Counter[tuple[str, str]]()
    for run in runs:
        values = {key: value for key, value in flatten(run.config).items() if key not in SAME}
        variant = json.dumps(values, default=str) if values else str(run.folder)
        same = variant, str(run.config.get("seed"))
        groups.setdefault((variant, twins[same]), []).append(run)
        twins[same] += 1
    out = []
    for own in groups.values():
        names = [_name(run) for run in own]
        label = names[0] if len(own) == 1 else f"{names[0]} … {names[-1]} ({len(own)} seeds)"
        out.append(Variant(label, own, flatten(own[0].config)))
    return out


def _name(run: Run) -> str:
    return str(run.folder.resolve().name)


def _differences(variant: Variant, every: list[Variant]) -> str:
    """The configuration values in which variants differ."""
    keys = dict.fromkeys(key for v in every for key in v.values if key not in SAME)
    odd = [key for key in keys if any(v.values.get(key) != every[0].values.get(key) for v in every)]
    return ", ".join(f"{key} {variant.values.get(key, 'default')}" for key in odd)


def _links(variant: Variant, out: Path) -> list[tuple[str, str]]:
    """(name, address of its report, or "") of each run."""
    pages = [(run, run.folder / "report.html") for run in variant.runs]
    return [(_name(r), os.path.relpath(page, out.parent) if page.is_file() else "") for r, page in pages]


# ---- numbers --------------------------------------------------------------------------------------------------------


def _table(found: list[Variant]) -> list[tuple[str, list[str]]]:
    """(measure, its value for every variant), from the last evaluation of each run's best set."""
    shown = namer(run for v in found for run in v.runs)
    own = [[_numbers(run, shown) for run in v.runs] for v in found]
    names = dict.fromkeys(name for runs in own for numbers in runs for name in numbers)
    rows = []
    for name, of in FACTS.items():
        cells = [", ".join(dict.fromkeys(of(run) for run in v.runs)) or "–" for v in found]
        rows += [(name, cells)] if name != "trained" or len(set(cells)) > 1 else []
    return rows + [(name, [_cell(name, [n[name] for n in runs if name in n]) for runs in own]) for name in names]


def _when(run: Run) -> str:
    return f"{run.best_set}, step {run.evals[run.best_set].steps[-1]:.0f}" if run.best_set else "not yet"


FACTS = {"trained": subject, "evaluated": _when, "against its initial model": lambda run: certainty(run)[0]}
"""Rows of the table about a run as a whole."""


def _numbers(run: Run, shown: Callable[[str], str]) -> dict[str, tuple[float, ...]]:
    """Measure → (value, low, high), or (value, before)."""
    if run.best_set is None:
        return {}
    rows, ends = run.evals[run.best_set], ("", "_low", "_high")
    wins = {f"win rate by {shown(n[4:])}": tuple(rows.last(n + end) for end in ends) for n in win_names(rows)}
    measures = {shown(n): (rows.last(n), rows.last(f"{n}_before")) for n in measure_names(rows)}
    return {name: values for name, values in (wins | measures).items() if not math.isnan(values[0])}


def _cell(name: str, values: list[tuple[float, ...]]) -> str:
    """Table cell. One run: value and interval, or before → value; several: mean ± standard deviation."""
    if not values:
        return "–"
    shown = percent if name.startswith("win rate") else number
    now = np.array([v[0] for v in values])
    text = shown(float(now.mean()))
    if len(values) > 1:
        text += f" ± {100 * now.std(ddof=1):.1f}" if shown is percent else f" ± {number(float(now.std(ddof=1)))}"
    if len(values[0]) == 2:
        return f"{number(float(np.mean([v[1] for v in values])))} → {text}"
    low, high = values[0][1:]
    return text if len(values) > 1 or math.isnan(low) else f"{text} [{100 * low:.0f}–{100 * high:.0f}]"


# ---- curves ---------------------------------------------------------------------------------------------------------


def compared(found: list[Variant], part: int) -> list[tuple[Chart, bool]]:
    """(chart, whether it is its original chart's first series) for every series of the runs' charts (part 0 key,
    1 results, 2 health), with one curve per variant. Sets that are only evaluated at the end are in the table."""
    charts: dict[tuple[str, str], Chart] = {}
    drawn: dict[tuple[str, str], dict[int, list[Series]]] = {}
    shown = namer(run for v in found for run in v.runs)
    for k, variant in enumerate(found):
        for run in variant.runs:
            for chart in curves(run, shown)[part]:
                for series in (s for s in chart.series if not s.marks):
                    key = (chart.title, series.name)
                    charts.setdefault(key, chart)
                    drawn.setdefault(key, {}).setdefault(k, []).append(series)
    out, titles = [], set[str]()
    for key, chart in charts.items():
        lines = [_over_seeds(own, found[k].label, k % COLOURS) for k, own in drawn[key].items()]
        whole = replace(chart, title=": ".join(filter(None, key)), series=lines, stacked=False, note="")
        out.append((whole, key[0] not in titles))
        titles.add(key[0])
    return out


def _over_seeds(series: list[Series], label: str, colour: int) -> Series:
    """Mean over seeds with a band from smallest to largest; for a single run, its curve without a band."""
    if len(series) == 1:
        return replace(series[0], name=label, colour=colour, low=None, high=None, marks=False)
    x = np.unique(np.concatenate([s.x[~np.isnan(s.y)] for s in series]))
    y = np.full((len(series), len(x)), np.nan)
    for k, s in enumerate(series):
        known = ~np.isnan(s.y)
        y[k, np.searchsorted(x, s.x[known])] = s.y[known]
    if not len(x):
        return Series(label, x, x, colour)
    return Series(label, x, np.nanmean(y, 0), colour, np.nanmin(y, 0), np.nanmax(y, 0))


# ---- images ---------------------------------------------------------------------------------------------------------


def _images(runs: list[Run]) -> tuple[list[tuple[str, str, list[tuple[str, Any]]]], list[dict[str, Any]]]:
    """(id, prompt, [(label, image)]) of the prompts shown by all runs with images, and the viewer's items for them."""
    names = [name for name in ("test", "dev") if all(name in run.images for run in runs)]
    names += sorted(set.intersection(*(set(run.images) for run in runs)) - set(names))
    if not names:
        return [], []
    name = names[0]
    last = [run.images[name][-1] for run in runs]
    rows, items, shown = [], list[dict[str, Any]](), namer(runs)
    for k, prompt in enumerate(last[0].prompts):
        places = [at for images in last if (at := _place(images, prompt, k)) is not None]
        if len(places) < len(runs):
            continue
        ident = f"both-{pair_id(name, last[0].step, k)}"
        media = [("source", last[0].sources[k])] if last[0].sources is not None else []
        media.append(("before", last[0].before[k]))
        media += [(_name(run), images.after[at]) for run, images, at in zip(runs, last, places, strict=True)]
        labels = [(label, f"{ident}-{n}", m) for n, (label, m) in enumerate(media)]
        rows.append((ident, prompt, [(a, picture(m, f"{prompt}: {a}", PAIR_PX, id=i)) for a, i, m in labels]))
        texts = [_summary(run, images.kept[at].wins, shown) for run, images, at in zip(runs, last, places, strict=True)]
        item = {"id": ident, "prompt": prompt, "where": name, "media": [[a, i] for a, i, _ in labels], "orders": []}
        items.append(item | {"mean": None, "wins": {}, "kinds": [], "text": " · ".join(filter(None, texts))})
    return rows, items


def _place(images: EvalImages, prompt: str, k: int) -> int | None:
    """Index of a prompt's image: k if it has that prompt, else the prompt's first image."""
    if k < len(images.prompts) and images.prompts[k] == prompt:
        return k
    return images.prompts.index(prompt) if prompt in images.prompts else None


def _summary(run: Run, wins: dict[str, float], shown: Callable[[str], str]) -> str:
    said = {1.0: "won", 0.0: "lost", 0.5: "tied"}
    words = [f"{shown(who)} {said.get((np.sign(win - 0.5) + 1) / 2, 'gave no verdict')}" for who, win in wins.items()]
    return f"{_name(run)} against its initial model: {', '.join(words)}" if words else ""
