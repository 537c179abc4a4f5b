"""report.html: one self-contained page about a run at any stage.

Invariant: the page refers to nothing outside itself, and all text from the run is escaped.
"""

from __future__ import annotations

import json
import math
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import prefgrpo
from prefgrpo.data.atomic import write_atomic
from prefgrpo.report.charts import curves, number
from prefgrpo.report.headline import alarms, certainty, facts, sentence, table
from prefgrpo.report.media import picture
from prefgrpo.report.run import Run, read_run
from prefgrpo.report.verdicts import draw_group, tables
from prefgrpo.run.run_folder import RunFolder

PAIR_PX = 384
PROBLEMS = 20
"""Most lines about missing scores of a suite."""
Table = tuple[tuple[str, ...], list[tuple[Any, ...]]]
"""(head, rows of cells)"""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page `out` (default: `folder/report.html`) from the run folder's files. Raises FileNotFoundError if it
    contains no run, and OSError if the page cannot be written."""
    folder = Path(folder)
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
        evaluations=_evaluations(run),
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


def _evaluations(run: Run) -> list[dict[str, Any]]:
    """Title, notes, tables and problems of each result of `prefgrpo evaluate`; damaged ones are the run's problems."""
    found = []
    for file in RunFolder(run.folder).all_evaluations():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            weights, other = (_weights(folder.name) for folder in (file.parent.parent, file.parent))
            if "suite" in content:
                title = f"{content['suite']}, {weights}"
                notes = [content["scored_by"]]
                problems = content["problems"][:PROBLEMS]
                found.append({"title": title, "notes": notes, "tables": _suite(content), "problems": problems})
            elif "win_rates" in content:
                title = f"{weights} against {other.removeprefix('against_')}"
                notes = [*(f"{n} prompts ({name})" for name, n in content["prompts"].items()), *content["judges"]]
                found.append({"title": title, "notes": notes, "tables": _comparison(content), "problems": []})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            run.problems.append(f"{file.relative_to(run.folder)} could not be read: {error!r}")
    return found


def _suite(content: dict[str, Any]) -> list[Table]:
    def shown(value: float | None) -> str:
        return _share(value, 2) if content["percent"] or value is None else f"{value:.2f}"

    tables: list[Table] = [(("score", ""), [(name, shown(value)) for name, value in content["summary"].items()])]
    for name, rows in content["tables"].items():
        cells = [(row["name"], shown(row["mean"]), row["count"], row["missing"]) for row in rows]
        tables.append(((name, "mean", "of", "missing"), cells))
    return tables


def _comparison(content: dict[str, Any]) -> list[Table]:
    shares = {"rate": "rate", "from": "low", "to": "high", "shown first": "first", "shown second": "second"}
    shares["missing"] = "missing"
    rates = [
        (name, row["verdict"], *(_share(row[key]) for key in shares.values()))
        for name, row in content["win_rates"].items()
    ]
    means = []
    for name, row in content["means"].items():
        before, now = (number(math.nan if row[key] is None else row[key]) for key in ("before", "now"))
        means.append((name, before, now, _share(row["missing"])))
    return [(("win rate", "result", *shares), rates), (("mean", "other", "this", "missing"), means)]


def _weights(folder: str) -> str:
    """'run_step_000020_live' → 'run step 20 (live)'."""
    return re.sub(r"_?step_0*(\d+)_(live|ema)$", r" step \1 (\2)", folder).strip()


def _share(value: float | None, digits: int = 1) -> str:
    """A share of 1 in percent; a dash for None."""
    return "–" if value is None else f"{100 * value:.{digits}f}\u00a0%"


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
