"""report.html: one self-contained page about a run, at whatever stage the run is.

Invariant: the page refers to nothing outside itself, and all text from the run is escaped.
"""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import prefgrpo
from prefgrpo.report.charts import draw
from prefgrpo.report.curves import curves, other_curves
from prefgrpo.report.headline import figures, sentence, table
from prefgrpo.report.media import picture, still
from prefgrpo.report.run import Run, Shown, read_run
from prefgrpo.report.verdicts import draw_group
from prefgrpo.run.checkpoint import write_atomic
from prefgrpo.run.run_folder import RunFolder

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "pillow")
PAIR_PX, COURSE_PX = 384, 160
GROUPS, COURSE_ROWS, COURSE_COLUMNS = 6, 6, 7


def write_report(folder: Path) -> Path:
    """Write `folder/report.html` from what the run folder holds. Raises FileNotFoundError if it holds no run."""
    folder = Path(folder)
    run = read_run(folder)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        title=str(run.config.get("name") or folder.resolve().name),
        model=str(run.config.get("model") or ""),
        status=status(run),
        sentence=sentence(run),
        figures=figures(run),
        table=table(run),
        pairs=_pairs(run),
        course=_course(run),
        charts=_charts(run, False),
        others=_charts(run, True),
        groups=[draw_group(g, f"g{k}") for k, g in enumerate(_spread(run.groups, GROUPS))],
        config=run.config_text,
        machine=machine(),
        problems=run.problems,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = folder / "report.html"
    write_atomic(path, page)
    return path


def status(run: Run) -> str:
    """Empty for a finished run; else how far it came and when it last said something."""
    if run.finished:
        return ""
    of = f" of {run.planned}" if run.planned else ""
    file = RunFolder(run.folder).metrics
    last = (
        f"; last entry {datetime.fromtimestamp(file.stat().st_mtime, timezone.utc):%Y-%m-%d %H:%M UTC}"
        if file.is_file()
        else ""
    )
    return f"This run is not finished: {run.step}{of} steps so far (still going, or stopped{last})."


def machine() -> list[tuple[str, str]]:
    """(name, value) of the versions and the machine of this process."""
    rows = [("prefgrpo", prefgrpo.__version__), ("Python", platform.python_version())]
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    rows += [("system", f"{platform.system()} {platform.release()}, {platform.machine()}"), ("processor", _processor())]
    rows.append(("cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"))
    if hasattr(os, "sysconf"):
        rows.append(("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"))
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return [*rows, ("GPU", ", ".join(f"{gpus.count(g)} × {g}" for g in dict.fromkeys(gpus)) or "none")]


def _processor() -> str:
    """The processor's own name where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _charts(run: Run, others: bool) -> list[Markup]:
    rows = [run.train, *run.evals.values()]
    ends = [float(s) for r in rows if len(r.steps) for s in (r.steps[0], r.steps[-1])]
    steps = (min(ends), max(ends)) if ends else (0.0, 0.0)
    return [c for c in (draw(chart, steps) for chart in (other_curves(run) if others else curves(run))) if c]


def _pairs(run: Run) -> dict[str, object] | None:
    """The last evaluation of the best set as pairs of images; None without images."""
    name = next((n for n in (run.best_set, *run.shown) if n in run.shown and run.shown[n][-1].step > 0), None)
    if name is None:
        return None
    last = run.shown[name][-1]
    pairs = []
    for k, prompt in enumerate(last.prompts):
        source = None if last.sources is None else last.sources[k]
        media = [("source", source), ("before", last.before[k]), (f"after {last.step} steps", last.now[k])]
        shown = [(label, picture(m, f"{prompt}: {label}", PAIR_PX)) for label, m in media if m is not None]
        pairs.append((prompt, [(label.split()[0], image) for label, image in shown]))
    return {"step": last.step, "set": name, "pairs": pairs, "edits": last.sources is not None}


def _course(run: Run) -> dict[str, object] | None:
    """The same prompts at several evaluations of the set with most of them; None with less than two."""
    found = max(run.shown.values(), key=len, default=[])
    later = [s for s in found if s.step > 0]
    if len(later) < 2:
        return None
    columns = _spread(later, COURSE_COLUMNS - 1)
    rows = _spread(list(range(len(columns[0].prompts))), COURSE_ROWS)
    first = columns[0]
    return {
        "steps": [0, *(s.step for s in columns)],
        "rows": [(first.prompts[i], [_small(first, i, True), *(_small(s, i, False) for s in columns)]) for i in rows],
    }


def _small(shown: Shown, i: int, before: bool) -> Markup:
    caption = f"{shown.prompts[i]}: step {0 if before else shown.step}"
    return picture(still((shown.before if before else shown.now)[i]), caption, COURSE_PX)


def _spread(items: list, most: int) -> list:
    """At most `most` items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[k] for k in np.linspace(0, len(items) - 1, most).round().astype(int)]
