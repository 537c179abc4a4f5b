"""report.html: one self-contained page about a run at any stage. The words are in page.html.j2.

Invariant: the page refers to nothing outside itself, and all text from the run is escaped.
"""

from __future__ import annotations

import math
import random
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, Template

import prefgrpo
from prefgrpo.data.atomic import write_atomic
from prefgrpo.report import headline, verdicts
from prefgrpo.report.charts import curves, numbers
from prefgrpo.report.read import read_run
from prefgrpo.run.measures import MIN_PROMPTS
from prefgrpo.run.run_folder import RunFolder


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page `out` (default: `folder/report.html`) from the run folder's files. Raises FileNotFoundError if it
    contains no run, and OSError if the page cannot be written."""
    run = read_run(folder)
    newest = max((group.step for group in run.groups), default=0)
    groups = [group for group in run.groups if group.step == newest]
    shown = next((n for n in (run.best_set, *run.stored) if n in run.stored and run.stored[n].step > 0), None)
    pairs = run.stored[shown].pairs if shown else []
    wins = {name: headline.wins(run, name) for name in run.evals}
    best = wins[run.best_set] if run.best_set else []
    title = str(run.config.get("name") or folder.resolve().name)
    order = random.Random(f"{title} {run.step}")
    page = _template().render(
        run=run,
        title=title,
        best=[win for win in best if not math.isnan(win.rate)],
        certainty=headline.certainty(best),
        alarms=headline.alarms(run),
        ranking=headline.ranking(run),
        bias=headline.position_bias(run),
        agreement=headline.agreement(run, run.best_set) if run.best_set else [],
        comparisons=float(np.nansum(run.train["judge/requests"])),
        wins=wins,
        changes={name: headline.changes(run, name) for name in run.evals},
        min_prompts=MIN_PROMPTS,
        shown=shown,
        edits=any(pair.source is not None for pair in pairs),
        pairs=[(pair, order.random() < 0.5) for pair in pairs],
        large=verdicts.PAIR_PX,
        charts=curves(run),
        groups=[verdicts.draw_group(group, f"group{k}") for k, group in enumerate(groups)],
        sources=any(group.source is not None for group in groups),
        answers=verdicts.answered(run, pairs),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        versions=f"prefgrpo {prefgrpo.__version__}, torch {torch.__version__}",
    )
    path = out or RunFolder(folder).report
    write_atomic(path, page)
    return path


def _template() -> Template:
    """page.html.j2 with the filters that write numbers."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": headline.percent}
    environment.globals["numbers"] = numbers
    environment.filters |= {"pictures": verdicts.pictures, "rows": verdicts.rows}
    return environment.get_template("page.html.j2")
