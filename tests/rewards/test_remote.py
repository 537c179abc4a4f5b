"""Rewards over HTTP, against real server processes with injected faults.

Why these cases: the trainer must see no difference between a reward in process and one behind a port, and a fault must
end in bounded time as a missing value with a reason, never as a number. The stub scores the image that it decodes, so
swapped or stale images show.
"""

import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ranks import Hold, free_port, start, train
from servers import MOODY, JudgeServer, Moody, Process, Stub, brightness, judge, serving, speak
from world import grey, recipe, rows, weights

from prefgrpo.config.schema import Config
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.judge.event_loop import loop_thread
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Reward, RewardError, Sample
from prefgrpo.rewards.remote import CONTENT_TYPE, RemoteReward, encode_frames, request_body
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rewards.simple import jpeg_kilobytes

FAST = {"timeout_s": 0.5, "patience_s": 1.0}
JPEG = "jpeg_incompressibility"
CORNERS = f"{__name__}:Corners"


@pytest.fixture(scope="module")
def jpeg():
    with Process(JPEG) as server:
        yield server


def remote(url, **changes):
    reward = RemoteReward(MOODY, Moody, url, **{**FAST, **changes})
    reward._pool.retries = 2
    return reward


def samples(*levels, prompt="p"):
    return [Sample(prompt, grey(level)) for level in levels]


def test_what_is_no_ready_server_of_the_reward_is_refused_at_the_start(jpeg):
    with JudgeServer() as judge:
        for url, message in (
            (f"http://127.0.0.1:{free_port()}", f"not reachable.*start it with 'prefgrpo reward serve {MOODY}'"),
            ("http://no-such-host.invalid:1", "not reachable"),
            (jpeg.url, f"serves '{JPEG}', not '{MOODY}'"),
            (judge.url, "is not a reward server"),
        ):
            with pytest.raises(RewardError, match=message):
                remote(url, patience_s=0.1)


def test_a_step_waits_as_long_as_a_slow_server_may_take():
    with Stub() as server:
        assert Scorer({"moody": remote(server.url, timeout_s=900.0)}, 2).deadline_s == 900
        assert Scorer({"moody": remote(server.url)}, 2).deadline_s == Config().judge.deadline_s


def test_one_of_two_dead_at_start_is_named_and_left_out():
    with Stub() as server, pytest.warns(UserWarning, match="servers not used for now"):
        reward = remote([f"http://127.0.0.1:{free_port()}", server.url])
        assert [s.value for s in reward.score(samples(51, 102))] == [0.2, 0.4]


class Corners(Reward):
    """The brightness of `frames` frames of a clip, each with a weight of its own."""

    takes = ("image", "video")

    def __init__(self, frames: int = 3) -> None:
        self.frames = frames

    def ask(self, asked):
        return [self._one(s) for (s,) in asked]

    def _one(self, sample):
        means = [float(frame.pixels.mean()) * 10**k for k, frame in enumerate(sample.media.frames(self.frames))]
        rate = sample.media.frame_rate or 0.0
        return Answer(sum(means), parts={"got": float(len(sample.media.frames())), "rate": rate})


@pytest.mark.parametrize(("options", "got"), [({}, 3), ({"frames": 1}, 1), ({"frames": 99}, 20)])
def test_only_the_frames_that_the_reward_looks_at_are_sent(options, got):
    """As many as its server says; the value is that of the whole clip."""
    rng = np.random.default_rng(0)
    given = [Sample("p", Media(rng.integers(0, 256, (20, 8, 8, 3), np.uint8), 24.0)), Sample("p", grey(7))]
    with serving(CORNERS, options) as url:
        scores = RemoteReward(CORNERS, Corners, url).score(given)
    assert [s.value for s in scores] == [s.value for s in Corners(**options).score(given)]
    assert [s.parts["got"] for s in scores] == [got, 1]
    assert scores[0].parts["rate"] == (24.0 if got == 20 else 0.0), "that of the whole clip, not of some of its frames"
    small = build([CORNERS], {CORNERS: options | {"size": 4}})[CORNERS].score(given)
    with serving(CORNERS, options | {"size": 4}) as url:
        served = RemoteReward(CORNERS, Corners, url)
        assert served.score(given) == small and served.frames == options.get("frames", 3)
        assert [len(encode_frames(given[0].media, served.frames)), 1] == [got, small[1].parts["got"]]
    with serving(CORNERS, options) as url:
        assert build([CORNERS], {CORNERS: {"url": url, "size": 4}})[CORNERS].score(given) == small


@pytest.mark.parametrize(
    ("fault", "reason", "requests"),
    [("500", "answered 500: engine trouble", 6), ("not_json", "no readable score (JSONDecodeError", 4)],
)
def test_a_fault_is_missing_with_its_reason(fault, reason, requests):
    """Both are asked again; the client is the judge's, whose other faults are in tests/judge/test_http.py."""
    with Stub() as server:
        reward = remote(server.url)
        server.fault = fault
        scores = reward.score(samples(51, 102))
        assert len(server.requests) == requests
    assert all(s.value is None and reason in s.reason for s in scores), scores[0].reason


def test_each_sample_ends_as_the_reward_makes_it_end():
    """One sample in twenty raises, one is nan, one is missing, one hangs: all other scores are unaffected."""
    prompts = ["raise" if k % 20 == 7 else "p" for k in range(60)]
    prompts[3], prompts[5] = "nan", "missing"
    given = [Sample(p, grey(k)) for k, p in enumerate(prompts)]
    with Process(MOODY) as server:
        scores = remote(server.url, timeout_s=20.0).score(given)
        hung = remote(server.url).score([Sample("hang", grey(51))])[0]
    assert hung.value is None and "did not answer within 0.5 s" in hung.reason
    assert [s.value for s in scores] == [brightness(g) if g.prompt == "p" else None for g in given]
    reasons = {g.prompt: s.reason for g, s in zip(given, scores, strict=True)}
    assert (reasons["nan"], reasons["missing"]) == ("the reward returned nan", "nothing to see")
    assert reasons["raise"] == "the reward raised RuntimeError: out of memory"


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [
        ("unifiedreward_flex", {}, {"round_verdicts": True, "category_weights": [0.5, 2.0], "overall_weight": 0.5}),
        ("vlm_pairwise", {"template": "compare"}, {"plan": "k_regular(2)", "rate": "bradley_terry"}),
        (f"{__name__}:darker", {}, {"plan": "round_robin"}),
    ],
)
def test_a_reward_that_compares_is_the_same_behind_http(name, there, here):
    """The server answers about pairs; the client plans and tallies them, with the options of that. A pair without an
    answer counts for nobody there as here, and keeps its reason."""
    given = [Sample("a cat", grey(level)) for level in (40, 130, 200, 90, 10)]

    def lost(bright, text):
        return speak(bright, text) if min(bright) > 20 / 255 else "I cannot say."

    with JudgeServer() as server:
        server.answer = lost if name.startswith("unified") else None
        asks = {"judge": judge(server)} if "darker" not in name else {}
        (own,) = build([name], {name: asks | there | here}).values()
        with serving(name, asks | there) as url:
            (served,) = build([name], {name: {"url": url} | here}).values()
            assert (served.compares, served.streams, served.judged) == (True, True, False)
            assert served.is_win_rate == own.is_win_rate and served.keys(5, 3) == own.keys(5, 3)
            found = []
            for reward in (own, served):
                scorer = Scorer({"r": reward}, len(given), deadline_s=60)
                scorer.begin(0, [0])
                for member, one in enumerate(given):
                    scorer.add(0, member, one)
                found.append(scorer.finish())
            with pytest.raises(urllib.error.HTTPError, match="400"):
                body = request_body(name, (given[0],), [encode_frames(given[0].media)])
                urllib.request.urlopen(urllib.request.Request(f"{url}/score", body, {"Content-Type": CONTENT_TYPE}))
    here, there = found
    np.testing.assert_allclose(there.values["r"], here.values["r"], rtol=1e-6)
    np.testing.assert_allclose(there.comparisons["r"], here.comparisons["r"], rtol=1e-6)
    assert there.reasons == here.reasons and [s.parts for s in there.scores["r"][0]] == [
        pytest.approx(s.parts) for s in here.scores["r"][0]
    ]
    assert there.metrics["judge/failures"] == here.metrics["judge/failures"] == (8 if "flex" in name else 0)
    assert ("judge/parse_failure_rate" in there.metrics) and [a.raw for a in there.answers["r"][0].values()] == [
        a.raw for a in here.answers["r"][0].values()
    ]


def darker(prompt, image_a, image_b):
    """P(image_a is better)."""
    return float(image_b.mean() / (image_a.mean() + image_b.mean()))


def test_cancelled_samples_free_the_server(tmp_path):
    """Cancelled samples are not scored later, which would delay the next step."""
    with Process(MOODY, "--max-batch", "2") as server:
        reward = remote(server.url, timeout_s=20.0)
        answers = [
            loop_thread().submit(reward.ask_one(Sample(f"until {tmp_path / 'go'} {k}", grey(k)))) for k in range(30)
        ]
        server.wait_for("queued", 1)
        for answer in answers:
            answer.cancel()
        while reward._pool.endpoints[0].load:
            time.sleep(0.01)
        assert server.health() == server.health() == 200  # by now the server has seen the connections close
        (tmp_path / "go").touch()
        assert reward.score(samples(51))[0].value == 0.2
        assert server.counts()["samples"] < 30, "cancelled samples were scored"


def test_encodings_of_one_medium_at_once_do_not_mix():
    """A judge, a served reward and a reward in process encode the same medium in separate threads; PIL stores the
    options of a save in the image, so a shared image sometimes gave JPEGs of the wrong quality."""
    rng = np.random.default_rng(0)
    encode = [lambda m: m.jpeg, lambda m: m.webp, lambda m: jpeg_kilobytes(Sample("", m))]
    for _ in range(30):
        pixels = rng.integers(0, 256, (64, 64, 3), np.uint8)
        alone, shared, start = Media(pixels.copy()), Media(pixels), threading.Barrier(3)
        with ThreadPoolExecutor(3) as pool:
            done = [pool.submit(lambda f=f, m=shared, b=start: (b.wait(), f(m))[1]) for f in encode]
        assert [d.result() for d in done] == [function(alone) for function in encode]


def run(place, name, url=""):
    rewards = [{"name": JPEG, "options": {"url": url, "patience_s": 2.0} if url else {}}]
    return recipe(place, name, rewards=rewards, judge={"deadline_s": 3.0}, train={"steps": 3}), place / "runs" / name


@pytest.mark.full
def test_a_run_with_its_reward_behind_http_is_the_same_also_if_the_server_dies(place, jpeg):
    """All metrics except times, and the trained weights, bit for bit. If the server is killed after the first step, the
    run stops with exit code 3 and the reason; with the server back, --resume gives the weights of an unbroken run."""
    done = []
    for name, url in (("here", ""), ("there", jpeg.url)):
        file, folder = run(place, name, url)
        code, output = train(file)
        assert code == 0, output
        done.append((rows(folder), weights(folder / "lora")))
    assert done[0] == done[1]
    server = Process(JPEG)
    file, folder = run(place, "killed", server.url)
    held = Hold("prefgrpo.trainer:Trainer._evaluate")
    running = start(["train", str(file)], file.with_suffix(".log"), hold=held)
    running.until_held()
    server.kill()
    running.release()
    assert running.wait() == 3, running.output
    assert "no server was usable for 2 s" in running.output and "missing" in running.output
    with Process(JPEG, port=server.port):
        code, output = train(file, "--resume")
    assert code == 0, output
    assert weights(folder / "lora") == weights(place / "runs/here/lora")
