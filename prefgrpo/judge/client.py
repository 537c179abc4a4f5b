"""The public face of the HTTP judge: its config, the judge, and the health check at start.

`check` says in seconds whether judging will work: is the server there, does it serve the model, does a pair of
pictures get a verdict, are known answers right; `reach` asks no pictures. Invariant: both raise one JudgeError that
says what was expected, what came, what to do.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace

import aiohttp
import numpy as np

from prefgrpo.data.media import Media
from prefgrpo.judge.endpoint import Endpoint, checkpoint_name, describe_error
from prefgrpo.judge.http import HttpJudge, HttpJudgeConfig
from prefgrpo.judge.information import compares, known_answers
from prefgrpo.judge.loop import loop_thread
from prefgrpo.judge.template import load_template, shipped
from prefgrpo.judge.verdict import JudgeError

__all__ = ["EndpointHealth", "Health", "HttpJudge", "HttpJudgeConfig", "check", "reach"]

_BUSY = re.compile(r"(?:answered|says) (?:429|503)\b")
_BUSY_S, _PAUSE_S = 30.0, 0.5


@dataclass
class EndpointHealth:
    """What one server said."""

    url: str
    """Its address."""
    models: list[str] = field(default_factory=list)
    """Models that it serves."""
    roots: dict[str, str] = field(default_factory=dict)
    """Checkpoint of each model, as far as the server says."""
    vllm: bool = False
    """It is vLLM: media ids and label ids are used."""
    problem: str = ""
    """Why it cannot be used; '' if it can."""


@dataclass
class Health:
    """Result of a check that passed: at least one endpoint works."""

    endpoints: list[EndpointHealth]
    """All configured endpoints; one may have a `problem` while another works."""
    model: str
    """Model that will judge."""
    probe_p_first: float | None = None
    """P(first) of the probe pair; None without a probe."""
    probe_latency_s: float | None = None
    """Seconds the probe pair took."""
    position_bias: float | None = None
    """Mean P(first) over random pairs in both orders; 0.5 is no bias."""
    known: str = ""
    """How many known answers were right; '' if none was asked for."""
    alarm: str = ""
    """Why the verdicts say nothing, with a template of the user's own (a shipped one makes it a JudgeError)."""

    def summary(self) -> str:
        """One line per endpoint and one for the probe."""
        rows = [f"{e.url}: {e.problem or 'ok, serves ' + ', '.join(e.models)}" for e in self.endpoints]
        if self.probe_latency_s is not None:
            rows.append(f"probe pair: P(first) {self.probe_p_first:.3f} in {self.probe_latency_s:.2f} s")
        if self.position_bias is not None:
            rows.append(f"position bias: mean P(first) {self.position_bias:.3f} over pairs in both orders")
        rows += [row for row in (self.known, self.alarm and f"WARNING: {self.alarm}") if row]
        return "\n".join(rows)


def check(
    config: HttpJudgeConfig,
    *,
    timeout_s: float = 10.0,
    probe: bool = True,
    bias_pairs: int = 0,
    known: bool = False,
    clips: bool = False,
) -> Health:
    """Check the configured judge; at most about three `timeout_s` per endpoint, longer for judges that write text.

    A server that answers 429 or 503 is given 30 s, or `config.patience_s` if that is less, to become ready.

    probe: judge one pair of plain pictures. bias_pairs: judge this many random pairs in both orders. known: ask each
    endpoint 16 questions with known answers. clips: show clips there.
    Raises JudgeError if no endpoint works, the probe gets no verdict, or a shipped template gets wrong answers.
    """
    HttpJudge(config).close()  # validates the config and the template
    health = reach(config, timeout_s)
    if probe:
        template, end = load_template(config.template or "compare"), time.monotonic() + _busy_s(config)
        longest = timeout_s if template.answer == "soft" else max(timeout_s, config.timeout_s or template.timeout_s)
        config = replace(config, model=health.model, timeout_s=longest, cache="", retries=1, patience_s=5.0)
        _probe(config, health, bias_pairs, end)
        if known and compares(template):
            _know(replace(config, timeout_s=max(longest, template.timeout_s)), health, clips)
    return health


def reach(config: HttpJudgeConfig, timeout_s: float = 10.0) -> Health:
    """Whether the servers are there and serve the model, without asking it. Raises JudgeError if no endpoint does."""
    if bad := config.mistakes():
        raise JudgeError("judge: " + "; ".join(bad))
    thread = loop_thread()
    looks = [thread.submit(_look(url, config, timeout_s)) for url in config.endpoints]
    found = [look.result(_busy_s(config) + timeout_s + 5.0) for look in looks]
    good = [e for e in found if not e.problem]
    if not good:
        raise JudgeError("the judge cannot be used. " + " | ".join(f"{e.url}: {e.problem}" for e in found))
    model = config.model or good[0].models[0]
    for other in good:  # all answer for one judge
        other.problem = _model_problem(model, other.models)
    _check_roots(model, [e for e in good if not e.problem])
    return Health(found, model)


async def _look(url: str, config: HttpJudgeConfig, timeout_s: float) -> EndpointHealth:
    endpoint = Endpoint(url, config.media_ids, config.authorization())
    result = EndpointHealth(endpoint.url)
    end = time.monotonic() + _busy_s(config)
    try:
        await endpoint.describe(loop_thread().session(), timeout_s)
        while endpoint.models is None and time.monotonic() < end:  # 5xx: still loading, or overloaded for a moment
            await asyncio.sleep(_PAUSE_S)
            await endpoint.describe(loop_thread().session(), timeout_s)
    except asyncio.TimeoutError:
        result.problem = f"no answer from /v1/models within {timeout_s:g} s; is the server still loading, or stuck?"
        return result
    except (aiohttp.ClientError, OSError) as error:
        result.problem = (
            f"not reachable ({describe_error(error)}); expected an OpenAI-compatible server: start one with "
            "'prefgrpo judge serve', or correct the judge's endpoints"
        )
        return result
    result.models, result.vllm, result.roots = endpoint.models or [], endpoint.vllm, endpoint.roots
    result.problem = endpoint.refused or _model_problem(config.model, result.models)
    if endpoint.refused.endswith(("401", "403")):
        result.problem += "; give the name of the environment variable with its key as api_key_env"
        result.problem += f" (now {config.api_key_env})" if config.api_key_env else ""
    return result


def _model_problem(model: str, served: list[str]) -> str:
    if not served:
        return "/v1/models lists no model; expected an OpenAI-compatible chat server"
    if model in served or (not model and len(served) == 1):
        return ""
    if not model:
        return f"serves several models ({', '.join(served)}); set the judge's model to one of them"
    near = difflib.get_close_matches(model, served, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"serves {', '.join(served)}, not '{model}'{hint or '; set the model of the judge to a served name'}"


def _check_roots(model: str, servers: list[EndpointHealth]) -> None:
    """JudgeError if servers of one judge say that they have different checkpoints."""
    roots = {checkpoint_name(root): f"{e.url} from {root}" for e in servers if (root := e.roots.get(model, ""))}
    if len(roots) > 1:
        raise JudgeError(
            f"'{model}' is served by {', by '.join(roots.values())}; expected one checkpoint on all of them: "
            "correct the endpoints, or give the folders one name if they hold the same checkpoint"
        )


def _busy_s(config: HttpJudgeConfig) -> float:
    """How long a server that is there, but too busy or still loading (429, 503), is waited for at the start."""
    return min(config.patience_s, _BUSY_S)


def _probe(config: HttpJudgeConfig, health: Health, bias_pairs: int, end: float) -> None:
    """Let each server judge plain pictures once, then the good ones random pictures in both orders.

    end: time (monotonic) until which a server that is too busy is asked again.
    """
    red, blue, grey = (Media(np.full((64, 64, 3), c, np.uint8)) for c in ((220, 30, 30), (30, 60, 220), (128,) * 3))
    good = [e for e in health.endpoints if not e.problem]
    for endpoint in good:
        with closing(HttpJudge(replace(config, endpoints=(endpoint.url,)))) as judge:
            verdict = judge.judge_group("a plain red picture", [red, blue], [(0, 1)], [grey])[0]
            while verdict.first is None and _BUSY.search(verdict.reason) and time.monotonic() < end:
                time.sleep(_PAUSE_S)
                verdict = judge.judge_group("a plain red picture", [red, blue], [(0, 1)], [grey])[0]
        if verdict.first is None:
            endpoint.problem = f"'{health.model}' gave no verdict on a probe pair: {verdict.reason}"
        elif health.probe_p_first is None:
            health.probe_p_first, health.probe_latency_s = verdict.first, verdict.latency_s
    if health.probe_p_first is None:
        raise JudgeError(
            f"the judge {' | '.join(e.problem for e in good)}\n"
            "Check that the server is well, that the template suits the model (labels, prefill, answer), and that it "
            "accepts two images"
        )
    if bias_pairs:
        rng = np.random.default_rng(0)
        media = [Media(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(2 * bias_pairs)]
        pairs = [p for k in range(bias_pairs) for p in ((2 * k, 2 * k + 1), (2 * k + 1, 2 * k))]
        urls = tuple(e.url for e in good if not e.problem)
        with closing(HttpJudge(replace(config, endpoints=urls))) as judge:
            values = [v.first for v in judge.judge_group("a picture", media, pairs, [grey]) if v.first is not None]
        health.position_bias = float(np.mean(values)) if values else None


def _know(config: HttpJudgeConfig, health: Health, clips: bool) -> None:
    """Ask every good server the questions with known answers; JudgeError, or the alarm, names what is wrong."""

    def ask(url: str) -> tuple[str, str]:
        with closing(HttpJudge(replace(config, endpoints=(url,)))) as judge:
            found = known_answers(judge, judge.clip_template if clips else judge.template, clips)
        return f"{found.right} of {found.asked}", f"{url}: '{health.model}' {found.problem}" if found.problem else ""

    urls = [e.url for e in health.endpoints if not e.problem]
    with ThreadPoolExecutor(len(urls)) as pool:
        rights, problems = zip(*pool.map(ask, urls), strict=True)
    health.known = f"known answers: {', '.join(rights)} right"
    if wrong := " | ".join(p for p in problems if p):
        if config.template in ("", *shipped()):
            raise JudgeError(
                f"the judge's verdicts say nothing about the pictures. {wrong}\n"
                f"Expected the plain colour that the caption names to win; check that the template '{config.template}' "
                "suits the model, and that the server shows it both pictures, in order"
            )
        health.alarm = wrong
