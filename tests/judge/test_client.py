"""General questions to an HTTP judge: named texts, several media, source images, every kind of answer, odd media; and
which servers are asked at all.

Why these cases: a source image at the wrong position, a question asked twice, an answer shared by different questions,
or another model's answer gives a silently wrong reward. The server decodes the images and answers from their
brightness.
"""

import base64
import io
import resource
import threading
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from ranks import free_port, until
from servers import MODEL, JudgeServer, asker, images, text_of
from world import grey

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.judge import http
from prefgrpo.judge.check import Shape, check
from prefgrpo.judge.client import HttpJudge, open_judge
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.template import Query, Shown, load_template
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import Scorer
from tests.judge.test_http import FAST, PATIENT, judge, media, missing, right
from tests.judge.test_http import ask as ask_pairs

TEXT = "user: '{prompt}{media_1}'\nanswer: marks"
READABLE = "<score>[1]</score>"


@pytest.fixture
def template(tmp_path):
    """Function that loads a template from YAML text."""

    def load(text, needs=("prompt", "media_1")):
        (tmp_path / "question.yaml").write_text(text)
        return load_template(str(tmp_path / "question.yaml"), needs, ("source", "criterion"), ("marks",))

    return load


@pytest.fixture
def server():
    with JudgeServer() as running:
        yield running


def ask(client, template, values, media, source=(), once=False):
    """Future of the client's answer to one question."""
    return loop_thread().submit(client.ask(Query(template, values, media, source), once))


def client(server, **changes):
    made = HttpJudge(JudgeConfig(endpoints=(server.url,), timeout_s=5, **changes))
    made.pool.retries = 1
    return made


def test_texts_by_name_and_pictures_in_their_places(template, server):
    asked = template(
        "user: 'By {criterion}: {source} then {media_1}, {media_2} for {prompt}, {criterion}'\nanswer: marks",
        needs=("prompt", "media_1", "media_2"),
    )
    server.answer = lambda bright, text: " ".join(f"{255 * b:.0f}" for b in bright) + READABLE
    values = {"prompt": "{criterion} {media_1}", "criterion": "{prompt}"}
    answer = ask(client(server, image_format="png"), asked, values, media([10, 20]), media([30, 40, 50])).result(10)
    assert answer.raw == f"30 40 50 10 20{READABLE}" and answer.reason == "" and answer.value is None
    body = server.requests[0]
    assert text_of(body) == "By {prompt}:  then ,  for {criterion} {media_1}, {prompt}"
    kinds = [p["type"] for p in body["messages"][0]["content"]]
    assert kinds == ["text", *["image_url"] * 3, "text", "image_url", "text", "image_url", "text"]


def test_the_same_question_is_asked_once(template, server):
    asked = template(TEXT)
    server.answer = lambda bright, text: f"{text} {255 * bright[0]:.0f}{READABLE}"
    server.delay_s, j = 0.1, client(server)
    one, same, other = media([10, 10, 200])
    first = [ask(j, asked, {"prompt": "a"}, [one], once=True) for _ in range(3)]
    late = first[0].result(30) and ask(j, asked, {"prompt": "a"}, [one], once=True)
    rest = [ask(j, asked, {"prompt": "b"}, [one], once=True), ask(j, asked, {"prompt": "a"}, [other], once=True)]
    assert {f.result(30).raw for f in (*first, late)} == {f"a 10{READABLE}"}
    assert [f.result(30).raw for f in rest] == [f"b 10{READABLE}", f"a 200{READABLE}"]
    assert len(server.requests) == 3
    assert ask(j, asked, {"prompt": "a"}, [same]).result(30).raw.startswith("a 10") and len(server.requests) == 4
    server.fault, server.count = "400", 1
    assert "refused with 400" in ask(j, asked, {"prompt": "c"}, [one], once=True).result(30).reason
    assert ask(j, asked, {"prompt": "c"}, [one], once=True).result(30).reason == "", "failures are asked again"
    del one, same, other, first, late, rest
    until(lambda: not len(j._asked) and not len(j.encodings.futures))  # nothing is kept for garbage-collected media


def test_a_shared_question_survives_those_who_leave(template, server):
    server.answer = lambda bright, text: READABLE
    server.delay_s = 0.3
    j, (one,), asked = client(server), media([10]), template(TEXT)
    leaves, stays = (ask(j, asked, {"prompt": "a"}, [one], once=True) for _ in range(2))
    until(lambda: server.requests)
    leaves.cancel()
    assert stays.result(30).raw == READABLE and len(server.requests) == 1


def test_judges_with_the_same_servers_share_a_client(server):
    config = JudgeConfig((server.url,), timeout_s=5.0)
    one = open_judge(config)
    assert one is open_judge(replace(config)) is open_judge({"endpoints": [server.url], "timeout_s": 5.0})
    assert one is not open_judge(replace(config, timeout_s=6.0)) and one is open_judge(one)


# ---- odd media -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 0, 3), (32, 0, 3), (0, 32, 32, 3), (5, 0, 0, 3)])
def test_media_without_pixels_or_frames_are_missing(server, shape):
    empty = Media(np.zeros(shape, np.uint8))
    good = [grey(level, frames=3 * empty.clip) for level in (40, 200)]
    options = {"judge": JudgeConfig((server.url,), **FAST), "plan": "both_orders"}
    with Scorer(build("vlm_pairwise", {"vlm_pairwise": options}), 3, deadline_s=20) as scorer:
        seen = len(server.requests)
        scorer.begin(0, [0])
        for member, picture in enumerate([good[0], empty, good[1]]):
            scorer.add(0, member, Sample("p", picture))
        result = scorer.finish()
    values = result.values["vlm_pairwise"][0]
    assert len(server.requests) - seen == 2 and np.isnan(values[1]) and values[0] < 0.1 and values[2] > 0.9
    assert result.reasons == {f"vlm_pairwise: the image or clip has no pixels: {list(shape)}": 4}
    assert result.metrics["judge/failures"] == 4


def test_an_image_of_50_million_pixels_is_made_smaller_in_bounded_memory(server):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pair = [Media(np.broadcast_to(np.full((1, 1, 3), level, np.uint8), (7071, 7071, 3))) for level in (40, 200)]
    verdicts = judge(server.url, timeout_s=20.0).judge_group("p", pair, [(0, 1), (1, 0)])
    assert [v.value > 0.5 for v in verdicts] == [False, True] and server.bytes_in < 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "in KiB; two 150 MB images in memory"


def test_frames_and_pixels_are_options_of_the_reward(server):
    """Of two rewards on the same clips, each shows what its own options say, also in the check before a run."""
    rng = np.random.default_rng(0)
    group = [Sample("p", Media(rng.integers(0, 256, (20, 40, 40, 3), dtype=np.uint8))) for _ in range(2)]
    spec = [
        {"name": name, "reward": "vlm_pairwise", "options": {"judge": {"endpoints": [server.url]}, **options}}
        for name, options in (("whole", {}), ("some", {"frames": 3, "max_pixels": 400}))
    ]
    for reward, count, side in zip(build(spec).values(), (16, 6), (40, 20), strict=True):
        server.requests.clear()
        assert reward.score(group)[0].value is not None
        sent = [images(request) for request in server.requests]
        assert {len(shown) for shown in sent} == {count}
        data = [p["image_url"]["url"].split(",", 1)[1] for shown in sent for p in shown if p["image_url"]]
        assert {Image.open(io.BytesIO(base64.b64decode(d))).size for d in data} == {(side, side)}
    server.requests.clear()
    check(*asker(JudgeConfig((server.url,)), shown=Shown(3, 400)), clips=True, shape=Shape(40, 40, 3))
    assert len(images(server.requests[0])) == 6


def test_a_host_name_is_looked_up_while_images_are_encoded():
    """Look-ups that wait behind a group's images would exceed the limits of requests and of health checks."""
    encoded = threading.Event()
    with JudgeServer() as server:
        client = judge(server.url.replace("127.0.0.1", "localhost")).judge
        for _ in range(8):
            client.encodings._threads.submit(encoded.wait)
        try:
            assert loop_thread().submit(client.pool.problems()).result(60) == [""]
        finally:
            encoded.set()


# ---- which servers are asked -----------------------------------------------------------------------------------------


def reached(config, **how):
    """(model, problem of each server) of a judge that was waited for."""
    judge = HttpJudge(config)
    problems = judge.reach(**how)
    return judge.model, problems


@pytest.mark.parametrize("begins", ["down", "loading", "sick"])
def test_a_server_that_starts_later_is_waited_for_and_the_wait_is_reported(begins, monkeypatch):
    monkeypatch.setattr(http, "SAY_S", 0.5)
    said = []
    server = JudgeServer("" if begins == "down" else begins, port=free_port())
    url = server.url
    if begins == "down":
        timer = threading.Timer(2.0, server.__enter__)
    else:
        server.__enter__()
        timer = threading.Timer(2.0, setattr, (server, "fault", ""))
    timer.start()
    try:
        assert reached(JudgeConfig((url,)), say=said.append) == (MODEL, {url: ""})
    finally:
        timer.join()
        server.__exit__()
    reason = "not reachable (" if begins == "down" else "answered 503"
    assert len(said) >= 2 and all("s of at most 600 s): " in line for line in said)
    assert said[0].startswith("waiting for a server (0 s") and reason in said[0]


@pytest.mark.parametrize(("options", "message"), [({"model": "other"}, "not 'other'"), ({}, "answered 401")])
def test_a_server_that_is_wrong_is_not_waited_for(options, message, server):
    server.key = "secret" * (not options)
    with pytest.raises(JudgeError, match=message):
        reached(JudgeConfig((server.url,), **options), say=lambda line: pytest.fail(line))


class Gateway(JudgeServer):
    """A server of another maker: a path of its own, no /health, and the models as a bare list, or not at all."""

    lists = True

    def add_routes(self, app):
        app.router.add_get("/api/v3/models", self._list)
        app.router.add_post("/api/v3/chat/completions", self._chat)

    async def _list(self, _):
        return web.json_response([{"id": MODEL}, {"id": "tiny"}]) if self.lists else web.Response(status=404)

    async def _health(self, _):
        return web.Response(status=404)


def test_servers_that_are_not_vllm():
    """The address is used as it is if it has a path, and nothing must be listed if the model is named."""
    with Gateway(vllm=False) as server:
        url = f"{server.url}/api/v3"
        with pytest.raises(JudgeError, match="serves several models"):
            reached(JudgeConfig((url,)))
        with pytest.raises(JudgeError, match="serves bright-judge, tiny, not 'big'"):
            reached(JudgeConfig((url,), "big"))
        for lists in (True, False):
            server.lists = lists
            assert check(*asker(JudgeConfig((f"{url}/",), MODEL)), known_answers=True).alarm == ""
        with pytest.raises(JudgeError, match=r"lists no model: /models answered 404; .* or judge\.model"):
            reached(JudgeConfig((url,)))
        assert reached(JudgeConfig((f"{server.url}/v1",)))[0] == MODEL


class Other(JudgeServer):
    """Ignores the requested model name, as some servers do; always prefers the first image."""

    model = "another"

    def __init__(self, **more):
        super().__init__("contradict", **more)


def test_two_servers_of_different_models_are_never_mixed(server):
    with Other() as other:
        rows = check(*asker(JudgeConfig((server.url, other.url), MODEL))).rows
        assert rows[0].startswith(f"WARNING: {other.url}: serves another, not '{MODEL}'; set the judge's model")
        seen = len(other.requests)
        assert all(right(judge(server.url, other.url, model=MODEL, **PATIENT))) and len(other.requests) == seen
        missing(ask_pairs(judge(server.url, model="third")), f"serves {MODEL}, not 'third'; set the judge's model")


def test_a_server_that_comes_back_with_another_model_gives_no_verdict():
    """The client asks for the served model again after a failed request."""
    port = free_port()
    with JudgeServer(port=port) as server:
        j = judge(server.url, retries=6, deadline_s=3.0)
        assert ask_pairs(j)[1].value > 0.9
    answer = j.submit("p", *media([200, 40]))
    until(lambda: j.judge.pool.endpoints[0].problem)
    with Other(port=port) as server:
        missing([answer.result(30)], f"serves another, not '{MODEL}'")
    assert not server.requests
