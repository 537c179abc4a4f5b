"""Opens judges and checks at startup that they work; `main` is `prefgrpo judge check`.

A server that is not up yet is waited for; one that is wrong is reported at once. Invariant: every failure raises a
single JudgeError that says what was expected, what was found, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.answers import NO_THINKING
from prefgrpo.judge.client import HttpJudge, JudgeClient
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.human_pairs import agreement, read_pairs
from prefgrpo.judge.known_answers import ask_known_answers, is_pairwise, plain
from prefgrpo.judge.special_tokens import KNOWN
from prefgrpo.judge.template import SHOWN, Shown

if TYPE_CHECKING:
    from prefgrpo.judge.local import LocalJudge

_ADVICE = {
    r"context length|model length|max_model_len": "serve it with a larger --max-model-len, or make smaller images",
    r"At most \d+ \w+": "serve it with a larger --limit-mm-per-prompt",
}
"""Server's message about a request of the run's shape → what to do."""


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


def open_judge(
    config: JudgeConfig, template: str = "compare", device: str = "auto", shown: Shown = SHOWN
) -> HttpJudge | LocalJudge:
    """A pairwise judge, over HTTP or, without endpoints, in this process on a torch `device`; not checked yet."""
    if config.endpoints:
        return HttpJudge(config, template, shown)
    from prefgrpo.judge.local import LocalJudge  # imports transformers

    return LocalJudge(config.model, template, device, shown=shown)


def check(
    judge: HttpJudge | LocalJudge,
    *,
    wait_s: float | None = None,
    known_answers: bool = False,
    clips: bool = False,
    shape: Shape | None = None,
) -> Health:
    """Check that a judge, on each of its servers, gives a verdict on a pair as large as the run's (shape).

    wait_s: as `check_reachable`, and longest wait for a busy server. known_answers: ask 16 questions with known
    answers; clips: about clips. Raises JudgeError if no server works.
    """
    problems: dict[str, str] = {}
    asked: dict[str, HttpJudge | LocalJudge] = {}
    if isinstance(judge, HttpJudge):
        model, problems = check_reachable(judge.config, wait_s)
        config = replace(judge.config, model=model, deadline_s=wait_s or judge.config.deadline_s)
        for url in [url for url, problem in problems.items() if not problem]:
            asked[url] = HttpJudge(replace(config, endpoints=(url,)), judge.template.name, judge.shown)
    else:
        model = judge.model.name_or_path
        asked["in this process"] = judge

    def probe(where: str) -> Health:
        return _probe(asked[where], model, where, known_answers, clips, shape or Shape())

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
            f"the caption names to win; check that the template '{judge.template.name}' suits the model, and that a "
            "server shows it both images, in order"
        )
        rows.append(f"WARNING: {alarm}")
    return Health(rows, alarm=alarm)


def check_reachable(
    config: JudgeConfig, wait_s: float | None = None, say: Callable[[str], object] = print
) -> tuple[str, dict[str, str]]:
    """(model that will judge, why each server cannot be used or ''); JudgeError if none can.

    wait_s: longest wait for servers that are not up yet; None: as long as a run's requests wait for one. say: gets the
    lines that tell of it.
    """
    client = JudgeClient(config)
    wait_s = client.pool.patience_s if wait_s is None else wait_s
    problems = client.run(client.pool.until_usable(wait_s, say)).result()
    found = dict(zip(config.endpoints, problems, strict=True))
    if all(problems):
        raise JudgeError(
            f"the judge cannot be used. {' | '.join(f'{url}: {problem}' for url, problem in found.items())}\n"
            "Start a server with 'prefgrpo judge serve', or correct the judge's endpoints"
        )
    return client.model, found


def _probe(
    judge: HttpJudge | LocalJudge, model: str, where: str, known_answers: bool, clips: bool, shape: Shape
) -> Health:
    red, blue = (plain(colour, shape.height, shape.width, shape.frames) for colour in ("red", "blue"))
    prompt = KNOWN.sub(" ", shape.prompt)  # such a prompt alone has no verdict
    verdict = judge.judge_group(prompt, [red, blue], [(0, 1)], [plain("grey", shape.height, shape.width)])[0]
    if verdict.value is None:
        size = f"{shape.width}×{shape.height}" + (f", {shape.frames} frames" if shape.frames > 1 else "")
        advice = [text for pattern, text in _ADVICE.items() if re.search(pattern, verdict.reason)]
        hint = f" (a pair of {size} with the run's longest prompt: {advice[0]})" if advice else ""
        problem = f"'{model}' gave no verdict on a probe pair: {verdict.reason}{hint}"
        return Health([f"WARNING: {where}: {problem}"], problem)
    health = Health([f"{where}: ok, serves {model}; a pair took {verdict.seconds:.2f} s"])
    if judge.template.answer != "think" and "</think" in verdict.raw:
        health.rows.append(
            f"WARNING: {where}: '{model}' thinks before it answers ({len(verdict.raw)} characters), which template "
            f"'{judge.template.name}' does not ask for: {NO_THINKING}"
        )
    if known_answers and is_pairwise(judge.template):
        result, wrong = ask_known_answers(judge, judge.template, clips)
        health.rows.append(f"{where}: known answers: {result}")
        health.alarm = f"{where}: '{model}' {wrong}" if wrong else ""
    return health


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
    people = read_pairs(pairs) if pairs else []
    judge = HttpJudge(JudgeConfig(endpoint, model, api_key_env=api_key_env, timeout_s=timeout_s), template)
    health = check(judge, wait_s=wait_s, known_answers=True)
    print("\n".join(health.rows))
    if people:
        print("\n".join(agreement(judge, people)))
    return 1 if health.alarm else 0
