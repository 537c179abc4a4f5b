"""report.html: one self-contained page about a run at any stage.

Invariant: the page refers to nothing outside itself, and all text from the run is escaped.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import prefgrpo
from prefgrpo.data.atomic import write_atomic
from prefgrpo.report.browser import KINDS, group_pairs, pairs
from prefgrpo.report.charts import draw
from prefgrpo.report.curves import curves, other_curves
from prefgrpo.report.evaluations import Evaluation, read_evaluation
from prefgrpo.report.headline import alarms, certainty, facts, figures, sentence, subject, table
from prefgrpo.report.media import picture, still
from prefgrpo.report.run import Run, read_run
from prefgrpo.report.verdicts import draw_group
from prefgrpo.run.run_folder import RunFolder

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "pillow")
PAIR_PX, COURSE_PX = 384, 160
GROUPS, COURSE_ROWS, COURSE_COLUMNS = 6, 6, 7


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page `out` (default: `folder/report.html`) from the run folder's files. Raises FileNotFoundError if it
    contains no run, and OSError if the page cannot be written."""
    folder = Path(folder)
    run = read_run(folder)
    key, results, health = ([(c, draw(c, span([run]))) for c in charts] for charts in curves(run))
    groups = [(g, f"step{g.step}-{k}") for k, g in enumerate(_evenly_spaced(run.groups, GROUPS))]
    shown, items = _pairs(run), [item for g, ident in groups for item in group_pairs(g, ident)]
    items = [*(shown["items"] if shown else []), *items]
    path = out or RunFolder(folder).report
    page = render(
        "page.html.j2",
        title=str(run.config.get("name") or folder.resolve().name),
        subject=subject(run),
        status=run.status,
        sentence=sentence(run),
        certainty=certainty(run),
        figures=figures(run),
        facts=facts(run),
        alarms=alarms(run),
        watched=len(run.train.steps) > 0,
        table=table(run),
        evaluations=_evaluations(run),
        pairs=shown,
        course=_progress_table(run),
        key=[figure for _, figure in key],
        charts=[figure for _, figure in results],
        health=[figure for chart, figure in health if not chart.is_flat],
        flat=[figure for chart, figure in health if chart.is_flat],
        others=[figure for chart in other_curves(run) if (figure := draw(chart, span([run])))],
        groups=[draw_group(g, ident) for g, ident in groups],
        sources=any(g.source is not None for g, _ in groups),
        items=items,
        judged=sum(bool(item["orders"] or item["mean"] is not None) for item in items),
        kinds=[(kind, KINDS[kind], count) for kind in KINDS if (count := sum(kind in item["kinds"] for item in items))],
        config=run.config_text,
        machine=machine(),
        problems=run.problems,
    )
    write_page(path, page)
    return path


def write_page(path: Path, page: str) -> None:
    """Write a page. Raises OSError with the name of the page, not of a temporary file."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: the folder {path.parent} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the name of a file, e.g. {path / 'report.html'}")
    try:
        write_atomic(path, page)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written ({error.strerror})") from error


def render(template: str, **values: object) -> str:
    """Render a template from this folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(written=written, **values)


def span(runs: Sequence[Run]) -> tuple[float, float]:
    """First and last training step in the runs' rows."""
    rows = [r for run in runs for r in (run.train, *run.evals.values()) if len(r.steps)]
    ends = [float(step) for r in rows for step in (r.steps[0], r.steps[-1])]
    return min(ends, default=0.0), max(ends, default=0.0)


def machine() -> list[tuple[str, str]]:
    """(name, value) pairs: versions and machine of this process."""
    rows = [("prefgrpo", prefgrpo.__version__), ("Python", platform.python_version())]
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    rows.append(("system", f"{platform.system()} {platform.release()}, {platform.machine()}"))
    rows.append(("processor", names[0] if names else platform.processor() or "unknown"))
    rows.append(("cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"))
    if hasattr(os, "sysconf"):
        rows.append(("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"))
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return [*rows, ("GPU", ", ".join(f"{gpus.count(g)} × {g}" for g in dict.fromkeys(gpus)) or "none")]


def _evaluations(run: Run) -> list[Evaluation]:
    """Results of `prefgrpo evaluate`; a damaged file is added to the run's problems."""
    found: list[Evaluation] = []
    for file in RunFolder(run.folder).all_evaluations():
        try:
            found += read_evaluation(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            run.problems.append(f"{file.relative_to(run.folder)} could not be read: {error!r}")
    return found


def _pairs(run: Run) -> dict[str, Any] | None:
    """The last evaluation of the best set as pairs of images; None without images."""
    name = next((n for n in (run.best_set, *run.images) if n in run.images and run.images[n][-1].step > 0), None)
    if name is None:
        return None
    last = run.images[name][-1]
    columns = [m for m in (last.sources, last.before, last.after) if m is not None]
    items, shown = pairs(last, name), []
    for k, item in enumerate(items):
        labels = [(label.split()[0], f"{item['prompt']}: {label}", ident) for label, ident in item["media"]]
        images = [
            (label, picture(media[k], caption, PAIR_PX, id=ident))
            for media, (label, caption, ident) in zip(columns, labels, strict=True)
        ]
        change = float(np.abs(last.after[k].astype(np.float32) - last.before[k]).mean() / 255)
        shown.append((item, images, f"{change:.4f}"))
    judges = list(dict.fromkeys(who for item in items for who in item["wins"]))
    return {"step": last.step, "set": name, "pairs": shown, "items": items, "judges": judges}


def _progress_table(run: Run) -> dict[str, object] | None:
    """The same prompts at several evaluations of the set evaluated most often; None with fewer than two."""
    later = [images for images in max(run.images.values(), key=len, default=[]) if images.step > 0]
    if len(later) < 2:
        return None
    columns = _evenly_spaced(later, COURSE_COLUMNS - 1)
    shown = [(0, columns[0].before), *((images.step, images.after) for images in columns)]
    rows = []
    for k in _evenly_spaced(list(range(len(columns[0].prompts))), COURSE_ROWS):
        prompt = columns[0].prompts[k]
        rows.append((prompt, [picture(still(m[k]), f"{prompt}: step {step}", COURSE_PX) for step, m in shown]))
    return {"steps": [step for step, _ in shown], "rows": rows}


def _evenly_spaced(items: list, most: int) -> list:
    """At most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[k] for k in np.linspace(0, len(items) - 1, most).round().astype(int)]
