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

import prefgrpo
from prefgrpo.report.charts import draw
from prefgrpo.report.curves import curves, other_curves
from prefgrpo.report.headline import figures, sentence, table
from prefgrpo.report.media import picture, still
from prefgrpo.report.run import Run, read_run
from prefgrpo.report.verdicts import draw_group
from prefgrpo.run.checkpoint import write_atomic

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "pillow")
PAIR_PX, COURSE_PX = 384, 160
GROUPS, COURSE_ROWS, COURSE_COLUMNS = 6, 6, 7


def write_report(folder: Path) -> Path:
    """Write `folder/report.html` from what the run folder holds. Raises FileNotFoundError if it holds no run."""
    folder = Path(folder)
    run = read_run(folder)
    ends = [float(s) for r in (run.train, *run.evals.values()) if len(r.steps) for s in (r.steps[0], r.steps[-1])]
    steps = (min(ends, default=0.0), max(ends, default=0.0))
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
        status=run.status,
        sentence=sentence(run),
        figures=figures(run),
        table=table(run),
        pairs=_pairs(run),
        course=_course(run),
        charts=[figure for chart in curves(run) if (figure := draw(chart, steps))],
        others=[figure for chart in other_curves(run) if (figure := draw(chart, steps))],
        groups=[draw_group(g, f"g{k}") for k, g in enumerate(_spread(run.groups, GROUPS))],
        config=run.config_text,
        machine=machine(),
        problems=run.problems,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = folder / "report.html"
    write_atomic(path, page)
    return path


def machine() -> list[tuple[str, str]]:
    """(name, value) of the versions and the machine of this process."""
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


def _pairs(run: Run) -> dict[str, object] | None:
    """The last evaluation of the best set as pairs of images; None without images."""
    name = next((n for n in (run.best_set, *run.images) if n in run.images and run.images[n][-1].step > 0), None)
    if name is None:
        return None
    last = run.images[name][-1]
    columns = [("source", "source", last.sources), ("before", "before", last.before)]
    columns.append(("after", f"after {last.step} steps", last.after))
    pairs = []
    for k, prompt in enumerate(last.prompts):
        shown = [(label, media[k], text) for label, text, media in columns if media is not None]
        pairs.append((prompt, [(label, picture(media, f"{prompt}: {text}", PAIR_PX)) for label, media, text in shown]))
    return {"step": last.step, "set": name, "pairs": pairs, "edits": last.sources is not None}


def _course(run: Run) -> dict[str, object] | None:
    """The same prompts at several evaluations of the set with most of them; None with less than two."""
    later = [images for images in max(run.images.values(), key=len, default=[]) if images.step > 0]
    if len(later) < 2:
        return None
    columns = _spread(later, COURSE_COLUMNS - 1)
    shown = [(0, columns[0].before), *((images.step, images.after) for images in columns)]
    rows = []
    for k in _spread(list(range(len(columns[0].prompts))), COURSE_ROWS):
        prompt = columns[0].prompts[k]
        rows.append((prompt, [picture(still(m[k]), f"{prompt}: step {step}", COURSE_PX) for step, m in shown]))
    return {"steps": [step for step, _ in shown], "rows": rows}


def _spread(items: list, most: int) -> list:
    """At most `most` items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[k] for k in np.linspace(0, len(items) - 1, most).round().astype(int)]
