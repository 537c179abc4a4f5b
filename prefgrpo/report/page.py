"""report.html: one self-contained page about a run at any stage.

Invariant: the page refers to nothing outside itself, and all text from the run is escaped.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import prefgrpo
from prefgrpo.data.atomic import write_atomic
from prefgrpo.report.charts import curves
from prefgrpo.report.headline import alarms, certainty, facts, sentence, table
from prefgrpo.report.media import picture
from prefgrpo.report.run import Run, read_run
from prefgrpo.report.verdicts import draw_group, tables
from prefgrpo.run.run_folder import RunFolder

PAIR_PX = 384


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page `out` (default: `folder/report.html`) from the run folder's files. Raises FileNotFoundError if it
    contains no run, and OSError if the page cannot be written."""
    run = read_run(folder)
    newest = max((group.step for group in run.groups), default=0)
    groups = [group for group in run.groups if group.step == newest]
    path = out or RunFolder(folder).report
    page = _render(
        title=str(run.config.get("name") or folder.resolve().name),
        status=run.status,
        sentence=sentence(run),
        certainty=certainty(run),
        facts=facts(run),
        alarms=alarms(run),
        table=table(run),
        pairs=_pairs(run),
        charts=curves(run),
        groups=[draw_group(group, f"group{k}") for k, group in enumerate(groups)],
        sources=any(group.source is not None for group in groups),
        answers=tables(run),
        config=run.config_text,
        problems=run.problems,
    )
    write_atomic(path, page)
    return path


def _render(**values: object) -> str:
    """The page from page.html.j2."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    versions = f"prefgrpo {prefgrpo.__version__}, torch {torch.__version__}"
    return environment.get_template("page.html.j2").render(written=written, versions=versions, **values)


def _pairs(run: Run) -> dict[str, Any] | None:
    """The last evaluation of the best set as (prompt, images, who won); None without images."""
    name = next((n for n in (run.best_set, *run.images) if n in run.images and run.images[n].step > 0), None)
    if name is None:
        return None
    last = run.images[name]
    columns = {"source": last.sources, "before": last.before, "after": last.after}
    pairs = []
    for k, (prompt, outcome) in enumerate(zip(last.prompts, last.kept, strict=True)):
        images = [
            (label, picture(media[k], f"{prompt}: {label}", PAIR_PX))
            for label, media in columns.items()
            if media is not None
        ]
        results = [f"{who}: {_result(win)}" for who, win in outcome.wins.items()]
        pairs.append((prompt, images, " · ".join(results)))
    return {"step": last.step, "set": name, "pairs": pairs, "edits": last.sources is not None}


def _result(win: float) -> str:
    if math.isnan(win):
        return "no verdict"
    return "won" if win > 0.5 else "lost" if win < 0.5 else "tied"
