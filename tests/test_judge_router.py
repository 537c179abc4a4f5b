"""Several judges behind one port: `judge route` in front of real servers, `judge serve A B` with stand-ins for vLLM.

Why these cases: what PaCo's gateway got wrong (a name that nobody serves ends as a reward of 0, streams held back, a
backend that dies unseen, processes of others killed) and what a client must still be able to rely on through a
router: verdicts, media ids, errors, timeouts, cancelled requests.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from aiohttp import web
from judge_server import MODEL, JudgeServer, free_port, images
from test_judge_faults import ask, judge, media
from test_judge_serve import gone, pids, vllm

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge.client import check
from prefgrpo.judge.engines import ServeConfig, address
from prefgrpo.judge.plans import both_orders
from prefgrpo.judge.route import route
from prefgrpo.judge.verdict import JudgeError

__all__ = ["vllm"]


class Slow(JudgeServer):
    """Says 'a', waits for `go`, says 'b'; counts requests whose client went away."""

    model = "slow"

    def __init__(self):
        super().__init__()
        self.go, self.left = threading.Event(), 0

    async def _chat(self, request):
        import asyncio

        await request.read()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b"a")
        try:
            while not self.go.is_set():
                await asyncio.sleep(0.01)
                await reply.write(b"")
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise
        await reply.write(b"b")
        return reply


@contextlib.contextmanager
def routed(*urls, timeout_s=60.0, **env):
    """`prefgrpo judge route` as a process of its own; its URL."""
    port = free_port()
    line = [sys.executable, "-m", "prefgrpo", "judge", "route", *urls]
    line += ["--port", str(port), "--timeout-s", str(timeout_s)]
    line += ["--api-key-env", next(iter(env))] if env else []
    child = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}
    )
    assert child.stdout is not None
    said = child.stdout.readline()
    assert said.startswith("ready: judges"), said + child.stdout.read()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        assert "stopped by SIGTERM" in child.stdout.read()


def get(url):
    """(status, body) of a GET."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def post(url, body, timeout=30):
    """(status, parsed body) of a chat request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class Dark(JudgeServer):
    """Another model: always prefers the first."""

    model = "dark-judge"

    def __init__(self, **options):
        super().__init__("contradict", **options)


@pytest.fixture(scope="module")
def front():
    """(router's URL, bright judge, one that always says 'first')."""
    with JudgeServer() as bright, Dark() as first, routed(bright.url, first.url + "/v1/") as url:
        yield url, bright, first


def test_each_model_answers_through_the_same_port(front):
    url, bright, first = front
    assert [v.first > 0.5 for v in ask(judge(url, model=MODEL))] == [False, True]
    assert [v.first > 0.5 for v in ask(judge(url, model="dark-judge"))] == [True, True]
    assert {b["model"] for b in bright.requests} == {MODEL} and {b["model"] for b in first.requests} == {"dark-judge"}
    listed = json.loads(get(f"{url}/v1/models")[1])["data"]
    assert [row["id"] for row in listed] == [MODEL, "dark-judge"]
    assert "ok, serves bright-judge, dark-judge" in check(JudgeConfig((url,), MODEL)).summary()
    with pytest.raises(JudgeError, match="serves several models"):
        check(JudgeConfig((url,)))


def test_media_travel_once_through_the_router_too(front):
    url, bright, _ = front
    seen = len(bright.requests)
    verdicts = judge(url, model=MODEL).judge_group("p", media(range(11, 100, 10)), both_orders(9, 0))
    sent = [p for r in bright.requests[seen:] for p in images(r)]
    assert all(v.first is not None and v.retries == 0 for v in verdicts)
    assert sum(p["image_url"] is not None for p in sent) == 9 and len(sent) == 144


def test_what_names_no_model_is_refused_with_the_list(front):
    url, _, _ = front
    status, body = post(url, {"model": "bright-juge", "messages": []})
    assert status == 404 and body["error"]["message"].endswith(f"served here: {MODEL}, dark-judge")
    for wrong in (b"", b"{", b"[]", b'"x"', b"{}", b"[" * 100_000, b"\xff"):
        status, body = post(url, wrong)
        assert status == 400 and "expected a JSON object with 'model'" in body["error"]["message"]
    for wrong in ({"model": None}, {"model": [MODEL]}, {"model": {}}):
        assert post(url, wrong)[0] == 404
    reasons = [v.reason for v in ask(judge(url, model="nobody"))]
    assert all(f"serves {MODEL}, dark-judge, not 'nobody'" in r for r in reasons)


def test_a_backends_own_errors_arrive_unchanged(front):
    url, bright, _ = front
    bright.fault, bright.count = "400", 1
    status, body = post(url, {"model": MODEL, "messages": []})
    assert (status, body["error"]["message"]) == (400, "At most 1 image(s) may be provided in one prompt.")
    bright.fault, bright.count = "429", 1
    start = time.monotonic()
    assert all(v.first is not None for v in ask(judge(url, model=MODEL, patience_s=10)))
    assert time.monotonic() - start >= 1.0, "the Retry-After header came through"
    bright.fault, bright.count = "truncated", 1
    assert sum(v.retries for v in ask(judge(url, model=MODEL, concurrency=1))) == 1, "broken off, not cut short"
    bright.fault = ""


def test_health_and_metrics_name_the_model(front):
    url, bright, _ = front
    assert get(f"{url}/health") == (200, '{"status": "ok", "degraded": {}}')
    bright.fault = "sick"
    status, body = get(f"{url}/health")
    assert status == 503 and json.loads(body)["degraded"] == {MODEL: f"{bright.url}: /health says 503"}
    assert get(f"{url}/health?model=dark-judge")[0] == 200, "the other model's clients go on"
    assert get(f"{url}/health?model={MODEL}")[0] == 503 and get(f"{url}/health?model=x")[0] == 404
    bright.fault = ""
    text = get(f"{url}/metrics")[1]
    assert f'prefgrpo_router_requests_total{{model="{MODEL}",status="200"}}' in text
    assert f'prefgrpo_router_in_flight{{model="{MODEL}"}} 0' in text


def test_a_dead_backend_is_a_502_and_its_neighbour_goes_on():
    port = free_port()
    with JudgeServer() as bright, Dark(port=port) as first, routed(bright.url, first.url) as url:
        first.__exit__()
        status, body = post(url, {"model": "dark-judge", "messages": []})
        assert status == 502 and "dark-judge" in body["error"]["message"] and first.url in body["error"]["message"]
        degraded = judge(url, model="dark-judge")
        verdicts = ask(degraded)
        assert [v.first for v in verdicts] == [None, None]
        assert all("no server was reachable for 2 s" in v.reason for v in verdicts), verdicts
        assert all(v.first is not None and not v.retries for v in ask(judge(url, model=MODEL)))
        bright.fault, bright.count = "500", 1
        going_on = judge(url, model=MODEL, patience_s=5.0)
        assert sum(v.retries for v in ask(going_on)) == 1
        time.sleep(0.3)  # the probe that a 500 calls for asks after its own model only
        assert all(e.alive for e in going_on.client.sender.endpoints)
        with Dark(port=port):  # its clients come back by themselves
            deadline = time.monotonic() + 30
            while any(v.first is None for v in ask(degraded)):
                assert time.monotonic() < deadline


def test_a_backend_that_hangs_is_a_504():
    with JudgeServer("hang") as server, routed(server.url, timeout_s=0.5) as url:
        status, body = post(url, {"model": MODEL, "messages": []})
    assert status == 504 and "did not answer within 0.5 s" in body["error"]["message"]


def test_servers_with_a_key(monkeypatch):
    monkeypatch.setenv("KEY", "secret")
    server = JudgeServer()
    server.key = "secret"
    with server, routed(server.url, KEY="secret") as url:
        assert all(v.first is not None for v in ask(judge(url, api_key_env="KEY")))
        assert all("401: Unauthorized" in v.reason for v in ask(judge(url))), "the router lends its key to nobody"


def test_streams_are_passed_on_as_they_come_and_end_with_their_client():
    with Slow() as server, routed(server.url) as url:
        body = json.dumps({"model": "slow", "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body)
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.read(1) == b"a", "before the answer is complete"
            server.go.set()
            assert reply.read() == b"b"
        server.go.clear()
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.read(1) == b"a"
        deadline = time.monotonic() + 30
        while not server.left:
            assert time.monotonic() < deadline, "the backend still works for a client that left"
            time.sleep(0.02)


def test_a_route_that_cannot_work_is_refused():
    with JudgeServer() as one, JudgeServer() as two:
        with pytest.raises(JudgeError, match=f"'{MODEL}' is served by {one.url} and by {two.url}"):
            route((one.url, two.url), port=free_port())
        with pytest.raises(JudgeError, match="choose another --port"):
            route((one.url,), port=two.port)
        for port, told in ((0, "from 1 to 65535"), (70000, "cannot listen on .*70000"), (-1, "cannot listen on")):
            with pytest.raises(JudgeError, match=told):
                route((one.url,), port=port)
        with pytest.raises(JudgeError, match=r"cannot listen on nosuch\.invalid"):
            route((one.url,), "nosuch.invalid", free_port())
        one.listing = "<html>"
        with pytest.raises(JudgeError, match="gave no list of models"):
            route((one.url,), port=free_port())
        one.listing, one.key = "", "secret"
        with pytest.raises(JudgeError, match="401"):
            route((one.url,), port=free_port())
    with pytest.raises(JudgeError, match="NO_SUCH_KEY"):
        route((one.url,), api_key_env="NO_SUCH_KEY")
    with pytest.raises(JudgeError, match="Connect"):
        route((f"http://127.0.0.1:{free_port()}",), port=free_port())
    with pytest.raises(JudgeError, match="expected http:// or https://"):
        route(("localhost:8000",))


ADDRESSES = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "localhost": "localhost", "::": "[::1]", "::1": "[::1]"}


@pytest.mark.parametrize("host", ADDRESSES)
def test_the_address_that_is_shown_can_be_asked(host):
    assert address(host, 8000) == f"http://{ADDRESSES[host]}:8000" == ServeConfig("m", host=host).url


def test_serve_starts_several_models_behind_one_port_and_ends_them(vllm):
    port = free_port()
    line = [sys.executable, "-m", "prefgrpo", "judge", "serve", "unifiedreward-2b", "mine=qwen3-vl"]
    child = subprocess.Popen(
        [*line, "--vllm", str(vllm), "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdout is not None
    said = [child.stdout.readline()]
    while not said[-1].startswith("ready"):
        said.append(child.stdout.readline())
        assert said[-1], said
    assert f"ready: judges unifiedreward-2b, mine at http://127.0.0.1:{port}" in said[-1]
    servers = [int(line.split("pid ")[1].split(",")[0]) for line in said if line.startswith("starting")]
    url = f"http://127.0.0.1:{port}"
    for name in ("unifiedreward-2b", "mine"):
        assert [v.first > 0.5 for v in ask(judge(url, model=name))] == [False, True]
    os.kill(servers[0], signal.SIGKILL)
    assert "'unifiedreward-2b' ended with code -9; the other models go on" in child.stdout.readline()
    status, body = get(f"{url}/health")
    assert status == 503 and list(json.loads(body)["degraded"]) == ["unifiedreward-2b"]
    assert all(v.first is not None for v in ask(judge(url, model="mine")))
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    assert all(gone(pid) for pid in [*servers, *pids(vllm)])
    assert Path(f"/proc/{os.getpid()}").exists()
