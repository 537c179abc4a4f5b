"""Reading a run folder for the report: metrics as columns, evaluation images, judged groups.

Invariant: a run at any stage can be read. Missing keys and nulls become NaN; a damaged file is skipped and named in
`Run.problems`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from prefgrpo.rollout.source_images import side_by_side
from prefgrpo.run.folder import RunFolder, step_of
from prefgrpo.run.log import read_metrics
from prefgrpo.run.measures import (
    JUDGE,
    Comparison,
    Estimate,
    Interval,
    Measure,
    Subject,
    number,
    read_comparison,
    subject_of,
)

Floats = NDArray[np.float64]
Images = NDArray[np.uint8]
T = TypeVar("T")
FOLDERS = re.compile(r"(?<![\w.:/~])/(?:[^\s/'\"]+/)+")
"""The folders of an absolute path, which mean nothing on another machine."""


@dataclass(frozen=True)
class Rows:
    """Rows of training as columns over steps in ascending order."""

    steps: Floats
    columns: dict[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        return self.columns.get(name, np.full(len(self.steps), np.nan))


@dataclass(frozen=True)
class Evaluations:
    """The evaluations on one set, at least one, in ascending order of their steps."""

    steps: Floats
    comparisons: list[Comparison]

    @property
    def last(self) -> Comparison:
        """The newest."""
        return self.comparisons[-1]

    def of(self, subject: Subject, field: str) -> list[Estimate]:
        """The estimates of a field of `Measure`, one per evaluation; without a value where it was not measured."""
        measures = [one.measures.get(subject, Measure[Estimate]()) for one in self.comparisons]
        return [getattr(measure, field) or Estimate() for measure in measures]

    def subjects(self, field: str) -> list[Subject]:
        """Subjects that have a value of this field in an evaluation, the judge first."""
        every = dict.fromkeys(subject for one in self.comparisons for subject in one.measures)
        known = [s for s in every if any(not np.isnan(found.value) for found in self.of(s, field))]
        return sorted(known, key=lambda subject: subject != JUDGE)


@dataclass(frozen=True)
class Answer:
    """A judge's answer on two images, by their number in the group; in an evaluation, 0 is before and 1 after."""

    judge: str
    first: int
    """The image that was shown first."""
    second: int
    p_first: float
    """Probability that the first is better; NaN: no verdict."""
    reason: str
    """Why there is no verdict."""
    raw: str
    """The judge's text."""


@dataclass(frozen=True)
class Outcome:
    """One image of an evaluation: its prompt, and per judge or check a win (1), tie (½) or loss (0) against before."""

    prompt: int
    wins: dict[Subject, float]
    answers: list[Answer] | None
    """The judge's answers, if the image was kept for the report."""


@dataclass(frozen=True)
class Pair:
    """Two images, or clips, that were compared; the answers count them as 0 and 1."""

    step: int
    where: str
    prompt: str
    names: tuple[str, str]
    images: tuple[Images, Images]
    answers: list[Answer]
    source: Images | None = None
    """For an edit, the source images side by side, uint8 [H, W, 3]."""
    wins: dict[Subject, float] = field(default_factory=dict)
    """As in `Outcome`."""
    seconds: float = 2.0
    """Length of a clip, of which `images` are some frames."""


@dataclass(frozen=True)
class Evaluation:
    """The last stored evaluation of a set: outcomes of all images (empty if the run wrote none), and the kept pairs."""

    step: int
    outcomes: list[Outcome]
    pairs: list[Pair]


@dataclass(frozen=True)
class Group:
    """One judged group: images uint8 [G, H, W, 3]; wins, counts [G, G] (row over column); rates [G], NaN missing."""

    step: int
    prompt: str
    images: Images
    wins: Floats
    counts: Floats
    rates: Floats
    source: Images | None = None
    """For an edit, the source images side by side, uint8 [H, W, 3]."""
    answers: list[Answer] = field(default_factory=list)
    """The individual comparisons of training."""


@dataclass(frozen=True)
class Run:
    """All data for the report."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    train: Rows
    evals: dict[str, Evaluations]
    """By set."""
    stored: dict[str, Evaluation]
    """The last stored evaluations of the sets that have images."""
    groups: list[Group]
    problems: list[str]

    @property
    def step(self) -> int:
        """The last logged step."""
        logged = [self.train.steps, *(evals.steps for evals in self.evals.values())]
        return int(np.concatenate(logged).max(initial=0))

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration, empty if absent."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    @property
    def judge(self) -> str:
        """Name of the reward whose verdicts count as those of the judge; empty if none is stored."""
        answers = (a for stored in self.stored.values() for pair in stored.pairs for a in pair.answers)
        return next((a.judge for a in answers), "")

    def label(self, subject: Subject) -> str:
        """Name of a reward, or of the judge, on the page."""
        return "the judge" if subject == JUDGE else short(str(subject))

    def outcomes(self, of_set: str) -> list[Outcome]:
        """Outcomes of all images of the last evaluation on a set."""
        return self.stored[of_set].outcomes if of_set in self.stored else []

    def interval(self, of_set: str, estimate: Estimate) -> Interval:
        """The interval of an estimate of the last evaluation, with its number of prompts: rows have it only where some
        are missing."""
        found = estimate.interval
        every = len({outcome.prompt for outcome in self.outcomes(of_set)})
        return found if found.prompts is not None else found._replace(prompts=every)

    def role(self, subject: Subject) -> str:
        """Whether a reward, or the judge, is "trained on" or "independent"; empty if unknown."""
        name = self.judge if subject == JUDGE else subject.reward
        entries = [entry for entry in self.config.get("rewards") or () if isinstance(entry, dict)]
        trained = [entry.get("name") for entry in entries if entry.get("weight", 1)]
        return ("trained on" if name in trained else "independent") if trained and name else ""

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        steps = self.section("train").get("steps")
        return isinstance(steps, int) and 0 < steps <= self.step

    @property
    def best_set(self) -> str | None:
        """The set by which to judge the run: 'test' if it was evaluated after step 0, else one that was."""
        late = [name for name, rows in self.evals.items() if rows.steps[-1] > 0]
        return "test" if "test" in late else next(iter(late), None)


def short(name: str) -> str:
    """A reward's name without folders, if it is the path of a file."""
    return name.rpartition("/")[2]


def read_run(folder: Path) -> Run:
    """The run in `folder`. Raises FileNotFoundError if it contains neither a configuration nor metrics."""
    files = RunFolder(folder)
    if not files.config.is_file() and not files.metrics.is_file():
        expected = f"{files.config.name} or {files.metrics.name}"
        raise FileNotFoundError(f"{folder} is not a run folder: expected {expected} in it; pass a folder runs/NAME")
    damaged: list[int] = []
    rows = read_metrics(files.metrics, damaged)
    problems = [f"damaged lines of {files.metrics.name}: {damaged[:5]}"] if damaged else []

    def read(path: Path, load: Callable[[Path], T]) -> T | None:
        """load(path); None for a missing file, and for a damaged one, which is added to `problems`."""
        try:
            return load(path) if path.is_file() else None
        except Exception as error:  # noqa: BLE001  (whatever a damaged file makes a library raise)
            problems.append(f"{path.name} could not be read: {type(error).__name__} {error}"[:200])
            return None

    text = files.config.read_text(encoding="utf-8", errors="replace") if files.config.is_file() else ""
    text = FOLDERS.sub("…/", text)
    config: dict[str, Any] = read(files.config, lambda _: dict(yaml.safe_load(text))) or {}
    evals: dict[str, Evaluations] = {}
    stored: dict[str, Evaluation] = {}
    for name in sorted({str(r["set"]) for r in rows if r.get("set")}):
        by_step = {row["step"]: row for row in rows if row.get("set") == name}
        steps = sorted(by_step)
        compared = [read_comparison(name, by_step[step]) for step in steps]
        evals[name] = Evaluations(np.array(steps, np.float64), compared)
        for path in files.all_report_images(name)[-1:]:
            prompts = read(files.prompts(name), lambda file: json.loads(file.read_text(encoding="utf-8"))) or []
            sources = read(files.sources(name), lambda file: side_by_side(_arrays(file)))
            outcomes = read(files.outcomes(name, step_of(path)), _outcomes) or []
            pairs = read(path, partial(_pairs, prompts, sources, outcomes))
            if pairs is not None:
                stored[name] = Evaluation(step_of(path), outcomes, pairs)
    groups = [group for path in files.all_groups() for group in read(path, _groups) or []]
    answers = read(files.judgements, partial(_answers, groups=groups)) or {}
    groups = [replace(group, answers=answers.get(k, [])) for k, group in enumerate(groups)]
    train = _columns([r for r in rows if r.get("kind") == "train"])
    return Run(folder, config, text, train, evals, stored, groups, problems)


def _columns(rows: list[dict[str, Any]]) -> Rows:
    """Rows as columns; the last row of each step is used; metrics without any number are dropped."""
    by_step = {row["step"]: row for row in rows}
    steps = sorted(by_step)
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    table = {name: np.array([number(by_step[s].get(name)) for s in steps], dtype=np.float64) for name in names}
    return Rows(np.array(steps, dtype=np.float64), {k: v for k, v in table.items() if not np.isnan(v).all()})


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def _answer(row: dict[str, Any], judge: str, first: int, second: int) -> Answer:
    return Answer(judge, first, second, number(row["p_first"]), str(row["reason"]), str(row["raw"]))


def _outcomes(path: Path) -> list[Outcome]:
    out = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        orders = [(own, int(own["first"] == "after")) for own in row.get("answers", ())]
        answers = [_answer(own, str(own["judge"]), first, 1 - first) for own, first in orders]
        wins = {subject_of(str(name)): number(win) for name, win in row["wins"].items()}
        out.append(Outcome(int(row["prompt"]), wins, answers if "answers" in row else None))
    return out


def _pairs(
    prompts: Sequence[str], sources: Sequence[Images | None] | None, outcomes: Sequence[Outcome], path: Path
) -> list[Pair]:
    images = _arrays(path)
    seconds = float(images.get("seconds", Pair.seconds))
    count = len(images["now"])
    kept = [o for o in outcomes if o.answers is not None]
    kept = kept if len(kept) == count else [Outcome(0, {}, None)] * count
    texts = [*map(str, prompts), *[""] * count]
    step = step_of(path)
    out = []
    for k, (both, o) in enumerate(zip(zip(images["before"], images["now"], strict=True), kept, strict=True)):
        where = f"{path.stem.rpartition('_')[0]}, after step {step}"
        source = None if sources is None else sources[k]
        out.append(Pair(step, where, texts[k], ("before", "after"), both, o.answers or [], source, o.wins, seconds))
    return out


def _groups(path: Path) -> list[Group]:
    file = _arrays(path)
    parts = [file[key] for key in ("prompts", "images", "wins", "counts", "rates")]
    sources = side_by_side(file) if "sources" in file else [None] * len(parts[0])
    return [Group(step_of(path), str(prompt), *rest) for prompt, *rest in zip(*parts, sources, strict=True)]


def _answers(path: Path, groups: Sequence[Group]) -> dict[int, list[Answer]]:
    """Index of a group → its comparisons in the log: a prompt's n-th group in the log is its n-th kept group."""
    keys = [(g.step, g.prompt[:2000]) for g in groups]
    starts = tuple({f'{{"step": {step},' for step, _ in keys})
    logged: dict[tuple[int, str], dict[tuple[str, int], list[Answer]]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(starts) and line.endswith("}\n"):
                row = json.loads(line)
                answer = _answer(row, row["reward"], row["first"], row["second"])
                logged[row["step"], row["prompt"]][row["reward"], row["group"]].append(answer)
    left = {key: list(found.values()) for key, found in logged.items()}
    return {k: left[key].pop(0) for k, key in enumerate(keys) if left.get(key)}
