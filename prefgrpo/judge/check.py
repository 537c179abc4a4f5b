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
from prefgrpo.judge.human_pairs import agreement, read_pairs
from prefgrpo.judge.known_answers import ask_known_answers, is_pairwise, plain
from prefgrpo.judge.template import SHOWN, Shown
from prefgrpo.judge.verdict import JudgeError, PairJudge

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
    """What a check found out about the servers."""

    rows: list[str]
    alarm: str = ""
    """Why known answers were wrong; '' if they were right or not requested."""


def check(
    config: JudgeConfig,
    template: str = "compare",
    *,
    wait_s: float | None = None,
    known_answers: bool = False,
    clips: bool = False,
    shape: Shape | None = None,
    shown: Shown = SHOWN,
) -> Health:
    """Check that the servers serve the model and judge a pair as large as the run's (shape).

    wait_s: as `check_reachable`, and longest wait for a busy server. known_answers: ask each server 16 questions with
    known answers; clips: about clips. shown: instead of what the template says. Raises JudgeError if no server works.
    """
    HttpJudge(config, template, shown)  # a wrong template is told before servers are waited for
    model, problems = check_reachable(config, wait_s)
    config = replace(config, model=model, deadline_s=wait_s or config.deadline_s)

    def ask(url: str) -> tuple[str, Health]:
        judge = HttpJudge(replace(config, endpoints=(url,)), template, shown)
        return _probe(judge, model, url, known_answers, clips, shape or Shape())

    with ThreadPoolExecutor(len(problems)) as pool:
        found = list(pool.map(ask, [url for url, problem in problems.items() if not problem]))
    if all(problem for problem, _ in found):
        raise JudgeError(
            f"the judge {' | '.join(problem for problem, _ in found)}\nCheck that the server works, that the template "
            "suits the model (labels, prefill, answer), and that it accepts two images"
        )
    rows = [f"WARNING: {url}: {problem}" for url, problem in problems.items() if problem]
    rows += [row for _, health in found for row in health.rows]
    alarm = " | ".join(health.alarm for _, health in found if health.alarm)
    if alarm:
        alarm = (
            f"the judge's verdicts do not depend on the images as they should. {alarm}. Expected the plain colour that "
            f"the caption names to win; check that the template '{template}' suits the model, and that the server "
            "shows it both images, in order"
        )
        rows.append(f"WARNING: {alarm}")
    return Health(rows, alarm)


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


def open_judge(
    config: JudgeConfig,
    template: str,
    *,
    device: str = "auto",
    known_answers: bool = False,
    clips: bool = False,
    shape: Shape | None = None,
    once: Callable[[Callable[[], list[str]]], list[str] | None] = lambda work: work(),
    shown: Shown = SHOWN,
) -> tuple[PairJudge, list[str]]:
    """(a pairwise judge that answers, what was found out about it), over HTTP or, without endpoints, in this process.

    device: of a judge in this process. once: calls the check of a server, in one process of several. The rest as
    `check`. Raises JudgeError if it gives no verdict on a probe pair.
    """
    if config.endpoints:
        rows = once(
            lambda: check(config, template, known_answers=known_answers, clips=clips, shape=shape, shown=shown).rows
        )
        return HttpJudge(config, template, shown), rows or []
    from prefgrpo.judge.local import LocalJudge  # imports transformers

    judge = LocalJudge(config.model, template, device, shown=shown)
    problem, health = _probe(judge, config.model, "in this process", known_answers, False, Shape())
    if problem:
        advice = (
            f"Expected a model that answers the template '{template}'; correct judge.model or the reward's template"
        )
        raise JudgeError(f"the judge {problem}. {advice}")
    return judge, health.rows + [f"WARNING: {health.alarm}"] * bool(health.alarm)


def _probe(
    judge: HttpJudge | LocalJudge, model: str, url: str, known_answers: bool, clips: bool, shape: Shape
) -> tuple[str, Health]:
    """(why a judge gives no verdicts or '', what was found out about it). url: where it is."""
    red, blue = (plain(colour, shape.height, shape.width, shape.frames) for colour in ("red", "blue"))
    verdict = judge.judge_group(shape.prompt, [red, blue], [(0, 1)], [plain("grey", shape.height, shape.width)])[0]
    if verdict.first is None:
        size = f"{shape.width}×{shape.height}" + (f", {shape.frames} frames" if shape.frames > 1 else "")
        advice = [text for pattern, text in _ADVICE.items() if re.search(pattern, verdict.reason)]
        hint = f" (a pair of {size} with the run's longest prompt: {advice[0]})" if advice else ""
        problem = f"'{model}' gave no verdict on a probe pair: {verdict.reason}{hint}"
        return problem, Health([f"WARNING: {url}: {problem}"])
    health = Health([f"{url}: ok, serves {model}; a pair took {verdict.latency_s:.2f} s"])
    if judge.template.answer != "think" and "</think" in verdict.raw:
        health.rows.append(
            f"WARNING: {url}: '{model}' thinks before it answers ({len(verdict.raw)} characters), which template "
            f"'{judge.template.name}' does not ask for: {NO_THINKING}"
        )
    if known_answers and is_pairwise(judge.template):
        asked = judge.clip_template if clips and isinstance(judge, HttpJudge) else judge.template
        result, problem = ask_known_answers(judge, asked, clips)
        health.rows.append(f"{url}: known answers: {result}")
        health.alarm = f"{url}: '{model}' {problem}" if problem else ""
    return "", health


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
    config = JudgeConfig(endpoint, model, api_key_env=api_key_env, timeout_s=timeout_s)
    health = check(config, template, wait_s=wait_s, known_answers=True)
    print("\n".join(health.rows))
    if people:
        print("\n".join(agreement(HttpJudge(config, template), people)))
    return 1 if health.alarm else 0
