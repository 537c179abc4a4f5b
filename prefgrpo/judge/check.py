"""Checks at startup, within seconds, that a judge behind HTTP works.

`check` tests that the servers are reachable, serve the model, return a verdict on a pair of images, and get known
answers right; `check_reachable` sends no images; `main` is `prefgrpo judge check`. Invariant: every failure raises a
single JudgeError that says what was expected, what was found, and what to do.
"""

from __future__ import annotations

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Literal

import aiohttp
import numpy as np

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.judge.answers import NO_THINKING
from prefgrpo.judge.client import HttpJudge
from prefgrpo.judge.endpoint import Endpoint, checkpoint_name, describe_error
from prefgrpo.judge.information import ask_known_answers, is_pairwise
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.pool import validate
from prefgrpo.judge.prompts import wording_note
from prefgrpo.judge.template import Template, load_template
from prefgrpo.judge.verdict import JudgeError

__all__ = ["Health", "HttpJudge", "check", "check_reachable", "main"]

_BUSY_S = 30.0
_PAUSE_S = 0.5
_ADVICE = (
    (
        r"context length|model length|max_model_len",
        "serve it with a larger --max-model-len, or make smaller images",
    ),
    (r"At most \d+ \w+", "serve it with a larger --limit-mm-per-prompt"),
)
"""Server's message about a request of the run's shape → what to do."""


@dataclass(frozen=True)
class Shape:
    """The largest question of a run."""

    height: int = 64
    width: int = 64
    frames: int = 1
    """Frames per clip; 1: images."""
    prompt: str = "a plain red picture"

    def plain(self, colour: tuple[int, int, int]) -> Media:
        """An image or clip of one colour."""
        image = np.full((self.height, self.width, 3), colour, np.uint8)
        return Media(np.stack([image] * self.frames) if self.frames > 1 else image)


@dataclass
class Health:
    """Result of a successful check: at least one endpoint works."""

    endpoints: list[Endpoint]
    """All configured endpoints; one may have a `problem` while another works."""
    model: str
    """Model that will judge."""
    probe_p_first: float | None = None
    """P(first) of the probe pair; None without a probe."""
    probe_latency_s: float | None = None
    """Seconds the probe pair took."""
    position_bias: float | None = None
    """Mean P(first) over random pairs in both orders; 0.5 is no bias."""
    unjudged: str = ""
    """How many of these pairs got no verdict, and why; '' if all did."""
    known_answers: str = ""
    """How many known answers were right; '' if none were requested."""
    notes: list[str] = field(default_factory=list)
    """What else to know: in whose words the judge is asked, and whether it thinks although it should not."""
    alarm: str = ""
    """Why the known answers were wrong; '' if they were right or not requested."""

    @property
    def good(self) -> list[Endpoint]:
        """Endpoints that work."""
        return [e for e in self.endpoints if not e.problem]

    def summary(self) -> str:
        """One line per endpoint and one for the probe."""
        rows = [f"{e.url}: {e.problem or 'ok, serves ' + ', '.join(e.models or [])}" for e in self.endpoints]
        if self.probe_latency_s is not None:
            rows.append(f"probe pair: P(first) {self.probe_p_first:.3f} in {self.probe_latency_s:.2f} s")
        if self.position_bias is not None:
            rows.append(f"position bias: mean P(first) {self.position_bias:.3f} over pairs in both orders")
        rows += [f"WARNING: {self.unjudged}"] if self.unjudged else []
        rows += [f"WARNING: {note}" for note in self.notes]
        rows += [row for row in (self.known_answers, self.alarm and f"WARNING: {self.alarm}") if row]
        return "\n".join(rows)


def check(
    config: JudgeConfig,
    template: str = "compare",
    *,
    timeout_s: float = 10.0,
    bias_pairs: int = 0,
    known_answers: bool = False,
    clips: bool = False,
    shape: Shape | None = None,
) -> Health:
    """Check a judge. Takes at most about 3 · `timeout_s` per endpoint, longer for judges that write text.

    bias_pairs: judge this many random pairs in both orders. known_answers: ask each endpoint 16 questions with known
    answers. clips: use clips for these. shape: the first pair is as large as the run's.
    Raises JudgeError if no endpoint works, the probe gets no verdict, or `config.strict` and known answers are wrong.
    """
    HttpJudge(config, template).close()  # validates the config and the template
    health = check_reachable(config, timeout_s)
    question = load_template(template, prompt=config.prompt)
    if config.prompt == "ours" and (note := wording_note(template)):
        health.notes.append(note)
    longest = timeout_s if question.answer == "soft" else max(timeout_s, config.timeout_s or question.timeout_s)
    config = replace(config, model=health.model, timeout_s=longest, deadline_s=5.0)
    _probe(config, health, shape or Shape(), question, template)
    if bias_pairs:
        _measure_bias(config, template, health, bias_pairs)
    if known_answers and is_pairwise(question):
        _ask_known_answers(replace(config, timeout_s=max(longest, question.timeout_s)), template, health, clips)
    return health


def main(
    endpoint: tuple[str, ...] = ("http://127.0.0.1:8000",),
    model: str = "",
    template: str = "compare",
    prompt: Literal["ours", "published"] = "ours",
    api_key_env: str = "",
    bias_pairs: int = 8,
    timeout_s: float = 20.0,
) -> int:
    """Check that the judge is reachable, serves the model, answers a pair, and answers questions with known answers.

    The questions show two images and ask which one is the plain colour that the caption names. If the judge ignores
    the images, or mixes them up, the fault is named and the exit code is 1.

    Args:
        endpoint: OpenAI-compatible servers, with or without /v1.
        model: Served model name; empty: the only one served.
        template: Shipped template name or path to one.
        prompt: Whose words ask: ours, or the published ones that `prefgrpo judge prompts` has fetched.
        api_key_env: Environment variable that holds the API key.
        bias_pairs: Random pairs to judge in both orders for the position bias; 0 for none.
        timeout_s: Longest wait for one answer, in seconds.
    """
    config = JudgeConfig(endpoint, model, prompt, api_key_env=api_key_env)
    health = check(config, template, timeout_s=timeout_s, bias_pairs=bias_pairs, known_answers=True)
    print(health.summary())
    return 1 if health.alarm else 0


def check_reachable(config: JudgeConfig, timeout_s: float = 10.0) -> Health:
    """Check that servers are reachable and serve the model, without querying it. JudgeError if no endpoint does.

    A server that is still loading (5xx) gets 30 s, or `config.deadline_s` if that is less.
    """
    validate(config)
    busy_s = min(_BUSY_S, config.deadline_s or _BUSY_S)
    endpoints = [Endpoint(url, config) for url in config.endpoints]
    queries = [loop_thread().submit(_query_models(e, config, timeout_s, busy_s)) for e in endpoints]
    for query in queries:
        query.result(busy_s + timeout_s + 5.0)
    health = Health(endpoints, config.model)
    if not health.good:
        raise JudgeError("the judge cannot be used. " + " | ".join(f"{e.url}: {e.problem}" for e in endpoints))
    health.model = config.model or (health.good[0].models or [""])[0]
    for endpoint in health.good:
        endpoint.problem = endpoint.model_problem(health.model)
    roots = {
        checkpoint_name(root): f"{e.url} from {root}" for e in health.good if (root := e.roots.get(health.model, ""))
    }
    if len(roots) > 1:
        raise JudgeError(
            f"'{health.model}' is served by {', by '.join(roots.values())}; expected one checkpoint on all of them: "
            "correct the endpoints, or give the folders one name if they hold the same checkpoint"
        )
    return health


async def _query_models(endpoint: Endpoint, config: JudgeConfig, timeout_s: float, busy_s: float) -> None:
    """Ask an endpoint which models it serves; set its `problem` if something is wrong."""
    end = time.monotonic() + busy_s
    try:
        await endpoint.describe(timeout_s)
        while endpoint.models is None and time.monotonic() < end:
            await asyncio.sleep(_PAUSE_S)
            await endpoint.describe(timeout_s)
    except asyncio.TimeoutError:
        endpoint.problem = f"no answer from /v1/models within {timeout_s:g} s; is the server still loading, or stuck?"
    except (aiohttp.ClientError, OSError) as error:
        endpoint.problem = (
            f"not reachable ({describe_error(error)}); expected an OpenAI-compatible server: start one with "
            "'prefgrpo judge serve', or correct the judge's endpoints"
        )
    else:
        endpoint.problem = endpoint.model_problem(config.model)


def _probe(config: JudgeConfig, health: Health, shape: Shape, question: Template, template: str) -> None:
    """Each server judges one pair of plain images of the run's shape."""
    red, blue, grey = (shape.plain(colour) for colour in ((220, 30, 30), (30, 60, 220), (128, 128, 128)))
    asked = health.good
    for endpoint in asked:
        with closing(HttpJudge(replace(config, endpoints=(endpoint.url,)), template)) as judge:
            verdict = judge.judge_group(shape.prompt, [red, blue], [(0, 1)], [grey])[0]
        if verdict.first is None:
            size = f"{shape.width}×{shape.height}" + (f", {shape.frames} frames" if shape.frames > 1 else "")
            advice = [text for pattern, text in _ADVICE if re.search(pattern, verdict.reason)]
            hint = f" (a pair of {size} with the run's longest prompt: {advice[0]})" if advice else ""
            endpoint.problem = f"'{health.model}' gave no verdict on a probe pair: {verdict.reason}{hint}"
        elif health.probe_p_first is None:
            health.probe_p_first = verdict.first
            health.probe_latency_s = verdict.latency_s
        if question.answer != "think" and "</think" in verdict.raw:
            health.notes.append(
                f"{endpoint.url}: '{health.model}' thinks before it answers, which template '{question.name}' does not "
                f"ask for: {NO_THINKING}"
            )
    if health.probe_p_first is None:
        raise JudgeError(
            f"the judge {' | '.join(e.problem for e in asked)}\n"
            "Check that the server works, that the template suits the model (labels, prefill, answer), and that it "
            "accepts two images"
        )


def _measure_bias(config: JudgeConfig, template: str, health: Health, count: int) -> None:
    """The working servers judge random pairs in both orders."""
    rng = np.random.default_rng(0)
    media = [Media(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(2 * count)]
    pairs = [p for k in range(count) for p in ((2 * k, 2 * k + 1), (2 * k + 1, 2 * k))]
    with closing(HttpJudge(replace(config, endpoints=tuple(e.url for e in health.good)), template)) as judge:
        verdicts = judge.judge_group("a picture", media, pairs, [Shape().plain((128, 128, 128))])
    values = [v.first for v in verdicts if v.first is not None]
    reasons = [v.reason for v in verdicts if v.reason]
    health.position_bias = float(np.mean(values)) if values else None
    if reasons:
        health.unjudged = f"no verdict on {len(reasons)} of {len(pairs)} pairs of random images: {reasons[0]}"


def _ask_known_answers(config: JudgeConfig, template: str, health: Health, clips: bool) -> None:
    """Ask every working server the questions with known answers; set the alarm, or raise JudgeError if strict."""

    def ask(url: str) -> tuple[str, str]:
        with closing(HttpJudge(replace(config, endpoints=(url,)), template)) as judge:
            known = ask_known_answers(judge, judge.clip_template if clips else judge.template, clips)
        return (
            f"{known.right} of {known.asked} pairs",
            f"{url}: '{health.model}' {known.problem}" if known.problem else "",
        )

    urls = [e.url for e in health.good]
    with ThreadPoolExecutor(len(urls)) as pool:
        rights, problems = zip(*pool.map(ask, urls), strict=True)
    health.known_answers = f"known answers: {', '.join(rights)} right"
    if wrong := " | ".join(p for p in problems if p):
        health.alarm = (
            f"the judge's verdicts do not depend on the images as they should. {wrong}. Expected the plain colour that "
            f"the caption names to win; check that the template '{template}' suits the model, and "
            "that the server shows it both images, in order"
        )
        if config.strict:
            raise JudgeError(f"{health.alarm} (judge.strict: false only warns)")
