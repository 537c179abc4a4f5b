"""Media of a judge server, over real HTTP: each image is encoded once, uploaded once, and then named.

Cases: images named before their upload is answered, too early or not; a server that evicts or loses images, or
restarts; a request that is cancelled.
"""

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from ranks import free_port, until
from servers import JudgeServer, asker, images
from world import grey

from prefgrpo.config.schema import JudgeConfig, SamplingConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.judge.uploads import encode
from prefgrpo.rewards.pairs import both_orders
from prefgrpo.rollout.render import sample
from tests.judge.test_http import LEVELS, PAIRS, PATIENT, ask, judge, media, right

NINE = both_orders(9, 0)


@pytest.mark.parametrize("image_format", ["jpeg", "webp", "png"])
def test_every_format_names_the_same_winner(image_format):
    """Also without a prompt."""
    with JudgeServer() as server:
        assert (
            judge(server.url, image_format=image_format, **PATIENT).submit("", *media([40, 200])).result(30).value < 0.1
        )


def test_max_pixels_keeps_the_ratio_and_touches_no_smaller_image():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)

    def sizes(medium, most):
        parts = json.loads(b"[" + encode(medium, "png", max_pixels=most).part(None) + b"]")
        data = [base64.b64decode(p["image_url"]["url"].split(",", 1)[1]) for p in parts]
        return [Image.open(io.BytesIO(d)).size for d in data]

    assert encode(Media(pixels), "png", max_pixels=3600).uuid == encode(Media(pixels), "png").uuid
    assert [sizes(Media(pixels), most) for most in (3599, 900, 1)] == [[(89, 39)], [(45, 20)], [(1, 1)]]
    assert sizes(Media(np.stack([pixels] * 3)), 900) == [(45, 20)] * 3


def test_each_medium_travels_once_then_its_id():
    with JudgeServer() as server:
        verdicts = judge(server.url, **PATIENT).judge_group("p", media(range(10, 100, 10)), NINE)
        sent = [p for r in server.requests for p in images(r)]
    assert all(v.value is not None and v.retries == 0 for v in verdicts)
    assert len(sent) == 144 and sum(p["image_url"] is not None for p in sent) == 9
    assert all(p["uuid"].startswith("sha256-") for p in sent)


def test_the_source_of_a_group_of_edits_travels_once(tmp_path):
    grey(100).pil.save(tmp_path / "source.png")
    prompt = Prompt(0, "p", source=(str(tmp_path / "source.png"),))
    edits = [sample(prompt, one, SamplingConfig(height=32, width=32)) for one in media([20, 40, 60])]
    with JudgeServer() as server:
        made = asker(JudgeConfig(endpoints=(server.url,)), "compare_edit")
        pairs = [made.submit("p", edits[i].media, edits[j].media, edits[i].source) for i, j in both_orders(3, 0)]
        assert all(pair.result(60).value is not None for pair in pairs)
        sent = [p for r in server.requests for p in images(r)]
    assert len(sent) == 18 and sum(p["image_url"] is not None for p in sent) == 4


def test_a_server_that_evicts_media_gets_them_again():
    with JudgeServer() as server:
        server.capacity = 3
        verdicts = judge(server.url, concurrency=1, **PATIENT).judge_group("p", media(range(10, 100, 10)), NINE)
    assert all((v.value > 0.5) == (a > b) for v, (a, b) in zip(verdicts, NINE, strict=True))
    assert len(NINE) < len(server.requests) <= len(NINE) + 9, "an image that is gone is not named again"


def test_a_restarted_server_gets_the_media_and_then_their_ids_again():
    port = free_port()
    group = media(LEVELS)
    j = judge(f"http://127.0.0.1:{port}", **PATIENT)
    with JudgeServer(port=port):
        assert all(right(j))
    answer = j.submit("p", group[0], group[1])
    until(lambda: j.judge.pool.endpoints[0].problem)
    with JudgeServer(port=port) as server:
        assert answer.result(60).value < 0.5
        assert all(v.value is not None for v in j.judge_group("p", group, PAIRS))
        sent = [p for r in server.requests for p in images(r)]
        assert sum(p["image_url"] is not None for p in sent) <= len(LEVELS) + 4, "not every image with every request"


def test_an_image_of_a_cancelled_request_travels_without_its_id():
    """The server's two processes may disagree on whether they hold it."""
    first, *others = media([200, 40, 60])
    with JudgeServer() as server:
        j = judge(server.url, timeout_s=60)
        ask(j)  # identifies the server
        server.fault, server.requests = "hang", []
        question = j.submit("p", first, others[0])
        until(lambda: server.requests, 60)
        question.cancel()
        until(lambda: not server.in_flight, 60)
        server.fault = ""
        assert j.submit("p", first, others[1]).result(60).value > 0.9
    assert all("uuid" not in p for p in images(server.requests[-1]))


class Drifting(JudgeServer):
    """Its API process has seen an image whose request failed, and drops the data that comes with that id."""

    async def _chat(self, request):
        body = json.loads(await request.read())
        self.requests.append(body)
        if len(self.requests) > 1 and all("uuid" not in p for p in images(body)):
            return self._answer(body)
        return web.json_response({"error": {"message": "Expected a cached item for mm_hash"}}, status=500)


def test_an_image_that_a_server_lost_travels_again_without_its_id():
    with Drifting() as server:
        j = judge(server.url, retries=2, timeout_s=20.0)
        assert j.judge_group("p", media([200, 40]), [(0, 1)])[0].value > 0.9
        assert j.judge_group("p", media([200, 60]), [(0, 1)])[0].value > 0.9, "its id is not used again"
    assert all("uuid" not in p for p in images(server.requests[-1]))


@pytest.mark.parametrize(
    ("version", "ids"), [("0.32.0", True), ("0.31.2", False), ("1.0.0+cu130", True), ("dev", False), ("", False)]
)
def test_ids_are_used_only_with_a_vllm_that_recovers_lost_images(version, ids):
    with JudgeServer(vllm=bool(version)) as server:
        server.version = version
        assert ask(judge(server.url, **PATIENT))[0].value < 0.1
    assert {"uuid" in p for r in server.requests for p in images(r)} == {ids}
    assert ids or all(p["image_url"] for r in server.requests for p in images(r)), "plain parts of OpenAI"


class Reader(JudgeServer):
    """Caches an image as soon as it has read the request, as vLLM does; answers only after `needed` requests."""

    needed, too_soon, refused = 0, False, 0

    async def _chat(self, request):
        body = json.loads(await request.read())
        self.requests.append(body)
        if self.too_soon and any(p["image_url"] is None and p["uuid"] not in self.media for p in images(body)):
            self.refused += 1
            return self._answer(body)
        answer = None if self.too_soon else self._answer(body)
        while len(self.requests) < self.needed:
            await asyncio.sleep(0.01)
        return answer or self._answer(body)


@pytest.mark.parametrize("too_soon", [False, True])
def test_a_picture_is_named_while_its_carrier_is_being_answered(too_soon):
    """Pairs of neighbouring images would deadlock if each waited for the answer to the previous pair."""
    with Reader() as server:
        j = judge(server.url, retries=0, timeout_s=30)
        j.judge_group("p", media([200, 220]), [(0, 1)])  # warm-up: identifies the server
        server.needed, server.requests, server.too_soon = 3, [], too_soon
        verdicts = j.judge_group("p", media([20, 40, 60, 80]), [(0, 1), (1, 2), (2, 3)])
    assert all(v.value is not None and v.value < 0.5 for v in verdicts), verdicts
    if too_soon:
        assert server.refused
    else:
        carried = [p["uuid"] for r in server.requests for p in images(r) if p["image_url"] is not None]
        assert len(carried) == len(set(carried)) == 4
