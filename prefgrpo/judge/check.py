"""Whether a judge compares pairs: checked at the start of a run, and by `prefgrpo judge check` (`main`).

Questions with known answers show a plain colour beside another colour or noise: 8 pairs in both orders. A server that
is not up yet is waited for; one that is wrong is reported at once. Pairs that people judged are asked in both orders,
to choose a judge before a run pays for it. Invariant: every failure raises a single JudgeError that says what was
expected, what was found, and what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.data.pairs import PairGroup, read_pairs
from prefgrpo.data.tables import DataError
from prefgrpo.judge.answers import NO_THINKING
from prefgrpo.judge.client import Judge, open_judge
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.template import PairTemplates, Query, Template, load_pair_templates
from prefgrpo.judge.tokens import KNOWN

_ADVICE = {
    r"context length|model length|max_model_len": "serve it with a larger --max-model-len, or make smaller images",
    r"At most \d+ \w+": "serve it with a larger --limit-mm-per-prompt",
}
"""Server's message about a request of the run's shape → what to do."""

_TIE = 0.001
"""A verdict this close to ½ is a tie."""
_MIN_RIGHT_SHARE = 0.8
PAIRS_AT_ONCE = 32
"""Human pairs that are asked about at the same time."""
COLOURS = {"yellow": (240, 220, 40), "white": (255, 255, 255), "black": (0, 0, 0), "red": (220, 30, 30)}
COLOURS |= {"green": (40, 160, 60), "blue": (30, 60, 220), "grey": (128, 128, 128)}
_PROBES = {"yellow": ("blue", "red", "noise"), "white": ("black", "green"), "black": ("red", "green", "noise")}
"""Requested colour → alternatives. Neither the lighter nor the darker image is always right."""


@dataclass(frozen=True)
class Shape:
    """The largest question of a run."""

    height: int = 64
    width: int = 64
    frames: int = 1
    """Frames per clip; 1: images."""
    prompt: str = "a plain red picture"


@dataclass
class Health:
    """What a check found out about a judge, or one of its servers."""

    rows: list[str]
    problem: str = ""
    """Why it gives no verdicts."""
    alarm: str = ""
    """Why known answers were wrong; '' if they were right or not requested."""


def check(
    judge: Judge,
    templates: PairTemplates,
    *,
    wait_s: float | None = None,
    known_answers: bool = False,
    clips: bool = False,
    shape: Shape | None = None,
) -> Health:
    """Check that a judge, on each of its servers, gives a verdict on a pair as large as the run's (shape).

    wait_s: as `Judge.reach`, and longest wait for a busy server. known_answers: ask 16 questions with known answers;
    clips: about clips. Raises JudgeError if no server works.
    """
    problems = judge.reach(wait_s)
    asked = {where: one for where, one in judge.apart(wait_s).items() if not problems.get(where)}

    def probe(where: str) -> Health:
        return _probe(asked[where], templates, where, known_answers, clips, shape or Shape())

    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(probe, asked))
    if all(health.problem for health in found):
        raise JudgeError(
            f"the judge {' | '.join(health.problem for health in found)}\nCheck that it works, that the template suits "
            "the model (labels, prefill, answer), and that it accepts two images"
        )
    rows = [f"WARNING: {url}: {problem}" for url, problem in problems.items() if problem]
    rows += [row for health in found for row in health.rows]
    alarm = " | ".join(health.alarm for health in found if health.alarm)
    if alarm:
        alarm = (
            f"the judge's verdicts do not depend on the images as they should. {alarm}. Expected the plain colour that "
            f"the caption names to win; check that the template '{templates.images.name}' suits the model, and that a "
            "server shows it both images, in order"
        )
        rows.append(f"WARNING: {alarm}")
    return Health(rows, alarm=alarm)


def _probe(
    judge: Judge, templates: PairTemplates, where: str, known_answers: bool, clips: bool, shape: Shape
) -> Health:
    red, blue = (plain(colour, shape.height, shape.width, shape.frames) for colour in ("red", "blue"))
    prompt = KNOWN.sub(" ", shape.prompt)  # a prompt with a special token has no verdict
    query = templates.query(prompt, red, blue, [plain("grey", shape.height, shape.width)])
    (answer,) = judge.ask_all([query])
    if answer.value is None:
        size = f"{shape.width}×{shape.height}" + (f", {shape.frames} frames" if shape.frames > 1 else "")
        advice = [text for pattern, text in _ADVICE.items() if re.search(pattern, answer.reason)]
        hint = f" (a pair of {size} with the run's longest prompt: {advice[0]})" if advice else ""
        problem = f"'{judge.model}' gave no verdict on a probe pair: {answer.reason}{hint}"
        return Health([f"WARNING: {where}: {problem}"], problem)
    health = Health([f"{where}: ok, serves {judge.model}; a pair took {answer.seconds:.2f} s"])
    if query.template.answer != "think" and "</think" in answer.raw:
        health.rows.append(
            f"WARNING: {where}: '{judge.model}' thinks before it answers ({len(answer.raw)} characters), which "
            f"template '{query.template.name}' does not ask for: {NO_THINKING}"
        )
    if known_answers and is_pairwise(templates.images):
        result, wrong = ask_known_answers(judge, templates, clips)
        health.rows.append(f"{where}: known answers: {result}")
        health.alarm = f"{where}: '{judge.model}' {wrong}" if wrong else ""
    return health


def plain(colour: str, height: int = 64, width: int = 64, frames: int = 1) -> Media:
    """An image, or clip, of one of COLOURS."""
    image = np.full((height, width, 3), COLOURS[colour], np.uint8)
    return Media(np.stack([image] * frames) if frames > 1 else image)


def is_pairwise(template: Template) -> bool:
    """Whether the template asks which of two media is better; templates with Yes/No labels do not."""
    return [label.strip().casefold() for label in template.labels or ()] != ["yes", "no"]


def ask_known_answers(judge: Judge, templates: PairTemplates, clips: bool) -> tuple[str, str]:
    """(result in words, what is wrong with the judge or ''). clips: show clips of two frames.

    They find a judge that ignores the images or mixes them up. By guessing, 7 or 8 of 8 pairs are right in 1 of 28
    cases.
    """
    frames = 2 if clips or templates.images.name.endswith("_video") else 1
    noise = np.random.default_rng(0).integers(0, 256, (frames, 64, 64, 3), dtype=np.uint8)
    media = {name: plain(name, frames=frames) for name in COLOURS}
    media["noise"] = Media(noise if frames > 1 else noise[0])
    grey = [plain("grey")]
    queries: list[Query] = []  # alternately with the correct image first and second
    for colour, others in _PROBES.items():
        edits = templates.images.takes_source
        task = f"Make the whole picture plain {colour}" if edits else f"a plain {colour} picture"
        for other in others:
            queries.append(templates.query(task, media[colour], media[other], grey))
            queries.append(templates.query(task, media[other], media[colour], grey))
    answers = judge.ask_all(queries)
    p = np.array([answer.value for answer in answers], np.float64)  # None: NaN
    reasons = [answer.reason for answer in answers if answer.value is None]
    lead = p[::2] - p[1::2]  # so that a position bias cancels
    right = int((lead > _TIE).sum())
    result = f"{right} of {len(lead)} pairs right"
    if len(reasons) < len(p):
        result += f", mean P(first) over both orders {np.nanmean(p):.3f}"
    if right >= _MIN_RIGHT_SHARE * len(lead):
        return result, ""
    if len(reasons) > (1 - _MIN_RIGHT_SHARE) * len(p):
        return result, f"gave no verdict on {len(reasons)} plain images: {reasons[0]}"
    if np.nanmax(p) - np.nanmin(p) <= _TIE:
        return result, f"always answers the same ({result})"
    if (lead < -_TIE).sum() >= _MIN_RIGHT_SHARE * len(lead):
        return result, f"prefers the wrong image ({result}); are the template's labels, or its images, swapped?"
    return result, f"does not see the images, or mixes them up ({result})"


# ---- agreement with people -------------------------------------------------------------------------------------------


def human_pairs(file: Path) -> list[PairGroup]:
    """The pairs of a table that people judged. Raises DataError for one that is not of two images."""
    groups = read_pairs(file, decode=False)
    for group in groups:
        if len(group.samples) != 2:
            raise DataError(f"{group.where}: expected two images, got {len(group.samples)}")
    return groups


def _both_orders(judge: Judge, templates: PairTemplates, pair: PairGroup) -> list[Answer]:
    """Answers on (a, b) and (b, a)."""
    try:
        a, b = [image.read() for image in pair.samples]
    except DataError as error:
        return [Answer(None, str(error))] * 2
    prompt = pair.prompt.text
    return judge.ask_all([templates.query(prompt, a, b), templates.query(prompt, b, a)])


def agreement(judge: Judge, templates: PairTemplates, pairs: Sequence[PairGroup]) -> list[str]:
    """Lines: accuracy, order inconsistency and ties over the pairs with two verdicts, and what is left out.

    A pair is a group of two, of which people prefer the first (wins[0, 1] = 1), the second (0) or neither (½).
    Intervals are Wilson's at 95 %.
    """
    with ThreadPoolExecutor(PAIRS_AT_ONCE) as pool:
        asked = list(pool.map(lambda pair: _both_orders(judge, templates, pair), pairs))
    reasons = [answer.reason for answers in asked for answer in answers if answer.value is None]
    p_a = np.array([[one.value, other.value] for one, other in asked], np.float64)  # None: NaN
    p_a[:, 1] = 1 - p_a[:, 1]
    judged = ~np.isnan(p_a).any(1)
    winner = np.sign(p_a[judged] - 0.5)  # 1: a, -1: b, 0: a tie
    chosen = np.sign(np.array([pair.wins[0, 1] for pair in pairs]) - 0.5)[judged]
    right = np.where(winner == 0, 0.5, winner == chosen[:, None]).mean(1)[chosen != 0]
    lines = [
        f"pairs: {judged.sum()} of {len(pairs)} have verdicts in both orders; {len(right)} that people decided count",
        f"accuracy: {_share(right)} (a tie counts ½; guessing gives 0.500)",
        f"order inconsistency: {_share(winner[:, 0] != winner[:, 1])} of the pairs have another winner when the images "
        "are swapped",
        f"ties: {_share(winner == 0)} of the verdicts",
    ]
    if reasons:
        lines.append(f"WARNING: {len(reasons)} of {2 * len(pairs)} questions have no verdict, the first: {reasons[0]}")
    return lines


def _share(values: NDArray[Any]) -> str:
    """0.714 [0.648, 0.772]: the mean of values in 0 … 1 and its interval."""
    n = values.size
    if not n:
        return "–"
    z = 1.959964
    mean = float(values.mean())
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return f"{mean:.3f} [{centre - half:.3f}, {centre + half:.3f}]"


# ---- the command -----------------------------------------------------------------------------------------------------


def main(
    endpoint: tuple[str, ...] = ("http://127.0.0.1:8000",),
    model: str = "",
    template: str = "compare",
    api_key_env: str = "",
    wait_s: float = 20.0,
    timeout_s: float | None = None,
    pairs: Path | None = None,
) -> int:
    """Check that the judge is reachable, serves the model, answers a pair, and answers questions with known answers.

    The questions show two images and ask which one is the plain colour that the caption names. If the judge ignores
    the images, or mixes them up, the fault is named and the exit code is 1.

    Args:
        endpoint: OpenAI-compatible servers, with or without /v1.
        model: Served model name; empty: the only one served.
        template: Shipped template name or path to one.
        api_key_env: Environment variable that holds the API key.
        wait_s: Longest wait for a server that is still loading, in seconds.
        timeout_s: Longest wait for one answer, in seconds; default: the template's.
        pairs: Human preferences (columns prompt, image_a, image_b, choice: a, b or tie): prints how often the judge
            agrees, with intervals.
    """
    people = human_pairs(pairs) if pairs else []
    templates = load_pair_templates(template)
    judge = open_judge(JudgeConfig(endpoint, model, api_key_env=api_key_env, timeout_s=timeout_s))
    health = check(judge, templates, wait_s=wait_s, known_answers=True)
    print("\n".join(health.rows))
    if people:
        print("\n".join(agreement(judge, templates, people)))
    return 1 if health.alarm else 0
