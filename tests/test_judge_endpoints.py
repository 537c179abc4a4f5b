"""Servers that are up and say so, but answer nothing of use, or as somebody else.

Why these cases: /health says 200 while the engine behind it fails every request, and a server that fails at once is
always the least loaded one, so it draws all requests to itself; a model name that nobody looks at; a body without end;
a redirect that turns a POST into a GET; a Retry-After of a year. In each: no wrong verdict, and the others go on.
"""

import contextlib
import time

import pytest
from aiohttp import web
from judge_server import MODEL, JudgeServer, free_port
from reward_server import MOODY, Stub, picture
from test_judge_faults import ask, judge, media
from test_judge_router import get, post, routed

from prefgrpo.judge.client import HttpJudgeConfig, check
from prefgrpo.judge.plans import both_orders
from prefgrpo.judge.verdict import JudgeError
from prefgrpo.rewards import build
from prefgrpo.rewards.base import RewardError, Sample

LEVELS = (20, 60, 100, 140, 180, 220)
PAIRS = both_orders(len(LEVELS), 0)


class Odd(JudgeServer):
    """Faults that only these tests need."""

    def __init__(self, fault="", **more):
        super().__init__(fault, **more)
        self.sent = 0

    async def _misbehave(self, fault, request, body):
        kind, _, detail = fault.partition(" ")
        if kind == "redirect":
            return web.Response(status=int(detail), headers={"Location": "/elsewhere"})
        if kind == "404":
            return web.json_response({"error": {"message": "no such path"}}, status=404)
        if kind == "later":
            return web.json_response({}, status=429, headers={"Retry-After": detail})
        if kind == "named":
            return web.json_response(self._says(0.0) | {"model": detail})
        if kind == "endless":
            return await self._endless(request, int(detail))
        return await super()._misbehave(fault, request, body)

    async def _endless(self, request, status):
        reply = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
        await reply.prepare(request)
        with contextlib.suppress(ConnectionError):
            while self.sent < 1 << 30:
                await reply.write(b" " * (1 << 16))
                self.sent += 1 << 16
        return reply


def verdicts(*urls, **changes):
    with contextlib.closing(judge(*urls, **changes)) as j:
        return j.judge_group("p", media(LEVELS), PAIRS)


def right(found):
    return [v.first is not None and (v.first > 0.5) == (i > k) for v, (i, k) in zip(found, PAIRS, strict=True)]


# ---- one of two is of no use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "429", "drop", "truncated", "html", "no_choices", "404", "redirect 307"])
def test_a_server_that_only_fails_does_not_draw_the_requests_to_itself(fault):
    with Odd(fault) as bad, JudgeServer(delay_s=0.02) as good:
        found = verdicts(bad.url, good.url, concurrency=4, retries=5)
    assert all(right(found)), next(v.reason for v in found if v.first is None)
    assert len(bad.requests) < len(PAIRS), "it is tried now and then, not with everything"


def test_a_server_that_recovers_is_asked_again():
    with Odd("500") as bad, JudgeServer(delay_s=0.02) as good, contextlib.closing(judge(bad.url, good.url)) as j:
        assert all(right(j.judge_group("p", media(LEVELS), PAIRS)))
        bad.fault, seen, end = "", len(bad.requests), time.monotonic() + 60
        while len(bad.requests) < seen + 20:
            assert all(right(j.judge_group("p", media(LEVELS), PAIRS))) and time.monotonic() < end


def test_what_any_server_would_refuse_is_asked_once():
    with Odd("400") as one, Odd("400") as two:
        found = verdicts(one.url, two.url)
    assert all("refused with 400" in v.reason and not v.retries for v in found)
    assert len(one.requests) + len(two.requests) == len(PAIRS)


def test_the_check_asks_every_server_for_a_verdict():
    with Odd("404") as bad, JudgeServer() as good:
        told = check(HttpJudgeConfig((bad.url, good.url)), bias_pairs=2).summary()
        assert f"{bad.url}: '{MODEL}' gave no verdict on a probe pair: " in told and "no such path" in told
        assert f"{good.url}: ok, serves {MODEL}" in told and "position bias" in told
        good.fault = "garbage"
        with pytest.raises(JudgeError, match=r"no such path .*neither label .*(?s:.*)the template suits the model"):
            check(HttpJudgeConfig((bad.url, good.url)))


# ---- another model --------------------------------------------------------------------------------------------------


class Other(Odd):
    """Looks at no name, like some servers; always prefers the first."""

    model = "another"

    def __init__(self, **more):
        super().__init__("contradict", **more)


@pytest.mark.parametrize("model", ["", MODEL])
def test_two_servers_of_different_models_are_never_mixed(model):
    with JudgeServer() as mine, Other() as other:
        told = check(HttpJudgeConfig((mine.url, other.url), model)).summary()
        assert f"{other.url}: serves another, not '{MODEL}'; set the model of the judge" in told
        seen = len(other.requests)
        assert all(right(verdicts(mine.url, other.url, model=MODEL, retries=5)))
        assert len(other.requests) == seen, "nothing is asked there"


@pytest.mark.parametrize("noticed", [True, False])
def test_a_server_that_comes_back_with_another_model_gives_no_verdict(noticed):
    port = free_port()
    with JudgeServer(port=port) as server:
        j = judge(server.url, retries=6, patience_s=20.0)
        assert ask(j)[1].first > 0.9
    asked, endpoint = [], j.client.sender.endpoints[0]
    if noticed:
        asked, end = [j.submit("p", *media([40, 200]))], time.monotonic() + 10
        while endpoint.alive:
            assert time.monotonic() < end
            time.sleep(0.01)
    with Other(port=port) as other:
        found = [a.result(30) for a in asked] or ask(j)
        assert all(v.first is None and "'another' answered" in v.reason for v in found) or noticed
        assert not other.requests or not noticed
    if noticed:
        assert f"serves another, not '{MODEL}'; correct the model or the endpoint" in found[0].reason


@pytest.mark.parametrize("back", ["/runs/step-100/judge", "/runs/step-200/judge"])
@pytest.mark.parametrize("noticed", ["restart", "pause"])
def test_a_checkpoint_swapped_under_one_name_gives_no_verdict(noticed, back, monkeypatch):
    """Every served name is the same; only the `root` of /v1/models tells. In a pause no request fails."""
    port = free_port()
    with JudgeServer(port=port) as server:
        server.root = "/runs/step-100/judge"
        j = judge(server.url, retries=6, patience_s=20.0)
        assert ask(j)[1].first > 0.9
    asked, endpoint = [], j.client.sender.endpoints[0]
    if noticed == "restart":
        asked, end = [j.submit("p", *media([200, 40]))], time.monotonic() + 10
        while endpoint.alive:
            assert time.monotonic() < end
            time.sleep(0.01)
    else:
        monkeypatch.setattr("prefgrpo.judge.endpoint._IDLE_S", 0.0)
    other = JudgeServer(port=port)
    other.root = back
    with other:
        found = [a.result(30) for a in asked] or j.judge_group("p", media([40, 200]), [(1, 0)] * 8)
        if back == "/runs/step-100/judge":
            assert all(v.first > 0.9 for v in found)
            return
        assert all(v.first is None and f"from {back}, where it was /runs/step-100/judge" in v.reason for v in found)
        assert not other.requests


def test_a_checkpoint_swapped_behind_a_router_gives_no_verdict(monkeypatch):
    monkeypatch.setattr("prefgrpo.judge.endpoint._IDLE_S", 0.0)
    with JudgeServer() as server:
        server.root = "/runs/step-100/judge"
        with routed(server.url) as url:
            j = judge(url)
            assert ask(j)[1].first > 0.9
            server.root = "/runs/step-200/judge"
            assert all("from /runs/step-200/judge, where it was" in v.reason for v in ask(j))


@pytest.mark.parametrize(
    ("roots", "same"),
    [
        (("/a/judge-8b", "/b/judge-8b/"), True),
        (("org/judge-8b", "/hub/models--org--judge-8b/snapshots/0123abc"), True),
        (("org/judge-8b", ""), True),
        (("org/judge-8b", "org/judge-2b"), False),
    ],
)
def test_two_servers_of_different_checkpoints_are_never_mixed(roots, same):
    with JudgeServer() as mine, JudgeServer(delay_s=0.05) as other:
        mine.root, other.root = roots
        told = rf"'{MODEL}' is served by {mine.url} from {roots[0]}, by {other.url} from {roots[1]}; expected one"
        with contextlib.nullcontext() if same else pytest.raises(JudgeError, match=told):
            check(HttpJudgeConfig((mine.url, other.url)))
        seen = [len(s.requests) for s in (mine, other)]
        assert all(right(verdicts(mine.url, other.url, retries=5, concurrency=2)))
        asked = [len(s.requests) > n for s, n in zip((mine, other), seen, strict=True)]
        assert asked == [True, True] if same else sum(asked) == 1


ALIASES = {MODEL: True, f"org/{MODEL}": True, f"{MODEL}-2024-08-06": True, f"{MODEL}:latest": True, "": True,
           "another": False, f"{MODEL}-think": False, f"old-{MODEL}": False}  # fmt: skip


@pytest.mark.parametrize("name", ALIASES)
def test_who_answered_first_answers_to_the_end(name):
    """A proxy may have its own name for the judge; but not two."""
    with Odd(f"named {name}") as server:
        j = judge(server.url)
        own = [ask(j), ask(j)]
        server.fault = ""
        asked = ask(j)
        server.fault = f"named {name}"
        again = ask(j)
        server.fault = "named changed"
        changed = ask(j)
    assert all(v.first is not None for v in (*own[0], *own[1], *asked, *again))
    assert [v.first for v in changed] == [None, None]
    assert (
        f"asked for the model '{MODEL}', and 'changed' answered, not '{name or MODEL}' as before" in changed[0].reason
    )
    with Odd() as server:
        j = judge(server.url)
        assert ask(j)[0].first is not None
        server.fault = f"named {name}"
        assert [v.first is not None for v in ask(j)] == [ALIASES[name]] * 2


# ---- answers of odd shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 500])
def test_a_body_without_end_is_not_read_to_its_end(status):
    with Odd(f"endless {status}") as server:
        found = ask(judge(server.url, timeout_s=30.0, retries=0))
    assert all("sent more than 16 MiB" in v.reason for v in found)
    assert server.sent < 256 << 20


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_named_and_not_followed(status):
    with Odd(f"redirect {status}") as server:
        found = ask(judge(server.url))
        assert all(f"refused with {status}, a redirect to /elsewhere; correct the address" in v.reason for v in found)
        assert len(server.requests) == 2
        with routed(server.url) as url, contextlib.suppress(ValueError):  # the router's answer is the backend's own
            post(url, {"model": MODEL, "messages": []})
        assert len(server.requests) == 3 and get(f"{server.url}/elsewhere")[0] == 404


@pytest.mark.parametrize("told", ["1e9", "inf", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_retry_after_of_a_year_costs_no_more_than_a_timeout(told):
    with Odd(f"later {told}") as server, contextlib.closing(judge(server.url, timeout_s=0.2, retries=2)) as j:
        verdict = j.submit("p", *media([40, 200])).result(50)  # two pauses of a minute are 120 s
    assert "answered 429" in verdict.reason and len(server.requests) == 3


@pytest.mark.parametrize("told", ["-5", "nan", "soon", "", "Mon, 01 Jan 0001 00:00:00 -0000", "é", "9" * 400])
def test_a_retry_after_that_says_nothing_is_none(told):
    with Odd(f"later {told}", count=1) as server:
        assert ask(judge(server.url))[1].first > 0.9


# ---- reward servers -------------------------------------------------------------------------------------------------


class OddReward(Stub):
    reply = ""

    async def _misbehave(self, fault, request, body):
        return web.Response(text=self.reply, content_type="application/json")


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (f'{{"scores": [{{"value": {HUGE}}}]}}', "the reward returned inf"),
        (f'{{"scores": [{{"value": -{HUGE}}}]}}', "the reward returned -inf"),
        ('{"scores": [{"value": 1e999}]}', "the reward returned inf"),
        ('{"scores": [{"value": "0.5"}]}', "sent no readable scores: scores[0]"),
        ('{"scores": [null]}', "sent no readable scores: scores[0]"),
        ("<html>", "sent no readable scores: not JSON"),
    ],
)
def test_a_score_that_is_no_number_is_missing(reply, told):
    with OddReward("odd") as server, contextlib.closing(remote(server.url)) as reward:
        server.reply = reply
        score = reward.score([Sample("p", picture(40))])[0]
    assert score.value is None and told in score.reason


def test_a_part_that_is_no_number_takes_nothing_from_the_score():
    with OddReward("odd") as server, contextlib.closing(remote(server.url)) as reward:
        server.reply = f'{{"scores": [{{"value": 0.5, "parts": {{"a": {HUGE}, "b": 2}}}}]}}'
        score = reward.score([Sample("p", picture(40))])[0]
    assert score.value == 0.5 and score.parts["b"] == 2.0


def test_one_of_two_reward_servers_that_answers_garbage_costs_nothing():
    with OddReward("odd") as bad, Stub(delay_s=0.01) as good, contextlib.closing(remote([bad.url, good.url])) as reward:
        bad.reply = "<html>"
        scores = reward.score([Sample("p", picture(level)) for level in range(0, 250, 10)])
    assert [s.value for s in scores] == pytest.approx([level / 255 for level in range(0, 250, 10)])


class Moved(OddReward):
    def add_routes(self, app):
        app.router.add_get("/v1/info", self._elsewhere)

    async def _elsewhere(self, _):
        return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})


def test_a_reward_servers_address_that_redirects_is_named():
    with Moved() as server, pytest.raises(RewardError, match=r"no reward server, a redirect to http://127\.0\.0\.1:1/"):
        remote(server.url)


def remote(url):
    return build([MOODY], {MOODY: {"url": url, "timeout_s": 5.0, "retries": 3, "patience_s": 5.0}})[MOODY]
