"""The judge at the start of a run: a server that comes up later is waited for, one that is wrong is reported at once,
and every process makes sure that it reaches one."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web
from ranks import all_end, free_port, start
from servers import MODEL, JudgeServer, asker
from world import recipe, rows

from prefgrpo.config.schema import JudgeConfig
from prefgrpo.judge import http
from prefgrpo.judge.check import check
from prefgrpo.judge.client import HttpJudge
from prefgrpo.judge.http import JudgeError


def reached(config, **how):
    """(model, problem of each server) of a judge that was waited for."""
    judge = HttpJudge(config)
    problems = judge.reach(**how)
    return judge.model, problems


def test_a_server_that_starts_after_the_check_is_waited_for_and_the_wait_is_reported(monkeypatch):
    monkeypatch.setattr(http, "SAY_S", 0.5)
    port = free_port()
    said = []
    servers = []
    command = [sys.executable, str(Path(__file__).parents[1].joinpath("servers.py")), "--port", str(port)]
    timer = threading.Timer(1.2, lambda: servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL)))
    timer.start()
    url = f"http://127.0.0.1:{port}"
    try:
        assert reached(JudgeConfig((url,)), say=said.append) == (MODEL, {url: ""})
    finally:
        timer.join()
        for server in servers:
            server.kill()
            server.wait()
    assert len(said) >= 2 and all("s of at most 600 s): " in line for line in said)
    assert said[0].startswith("waiting for a server (0 s") and f"{url}: not reachable (" in said[0]


@pytest.mark.parametrize("fault", ["loading", "sick"])
def test_a_server_that_loads_its_model_is_waited_for(fault):
    said = []
    with JudgeServer(fault) as server:
        threading.Timer(0.4, setattr, (server, "fault", "")).start()
        reached(JudgeConfig((server.url,)), say=said.append)
    assert len(said) == 1 and "answered 503" in said[0]


@pytest.mark.parametrize(("options", "message"), [({"model": "other"}, "not 'other'"), ({}, "answered 401")])
def test_a_server_that_is_wrong_is_not_waited_for(options, message):
    with JudgeServer() as server, pytest.raises(JudgeError, match=message):
        server.key = "secret" * (not options)
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


def test_an_https_address_goes_through_the_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    proxies = [
        http.Endpoint(url).proxy for url in ("https://api.example/v1", "https://inside.example", "http://node1:8000")
    ]
    assert proxies == ["http://proxy:3128", None, None]


@pytest.mark.parametrize("late_s", [1, pytest.param(60, marks=pytest.mark.full)])
def test_a_run_whose_server_starts_later_ends_with_every_verdict(place, late_s):
    """It waits from its start on, and goes on as soon as the server is there."""
    port = free_port()
    name = f"late-{late_s}"
    settings = {"rewards": "vlm_pairwise", "judge": {"endpoints": [f"http://127.0.0.1:{port}"]}, "eval": {"every": 0}}
    file = recipe(place, name, **settings, train={"steps": 2})
    run = start(["train", str(file)], file.with_suffix(".log"))
    run.until(lambda: "waiting for a server" in run.output)
    begin = time.monotonic()
    time.sleep(late_s)
    assert run.process.is_alive()
    with JudgeServer(port=port) as server:
        assert run.wait() == 0, run.output
        asked = len(server.requests)
    steps = rows(place / "runs" / name)
    assert len(steps) == 2 and all(step["judge/failures"] == 0 < step["judge/requests"] for step in steps)
    assert asked >= sum(step["judge/requests"] for step in steps) and time.monotonic() - begin > late_s


def test_a_probe_has_the_time_of_an_answer():
    with JudgeServer(delay_s=0.6) as server:
        check(*asker(JudgeConfig((server.url,))), wait_s=0.2)
        with pytest.raises(JudgeError, match=r"did not answer within 0\.4 s"):
            check(*asker(JudgeConfig((server.url,), timeout_s=0.4)))


def test_every_rank_must_reach_the_judge(place):
    """On the second machine nothing listens at the address that works on the first: no rollout begins."""
    with JudgeServer() as server:
        judge = {"endpoints": [server.url], "deadline_s": 2.0}
        file = recipe(place, "far", rewards="vlm_pairwise", judge=judge, eval={"every": 0})
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
        dead = f"http://127.0.0.1:{free_port()}"
        runs = [
            start(["train", str(file), *more], file.with_suffix(f".rank{k}.log"), RANK=str(k), **shared)
            for k, more in enumerate([[], ["--judge.endpoints", dead]])
        ]
        outputs = all_end(runs, code=2)
        assert not server.requests
    assert "rank 1 on " in outputs[0] and f"{dead}: not reachable" in outputs[0] and "(1 of 2 processes)" in outputs[0]
    assert "waiting for a server" in outputs[1]
