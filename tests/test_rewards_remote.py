"""A reward behind HTTP, against real server processes; each fault is injected for real.

Why these cases: the trainer must see no difference between a reward in process and one behind a port, and a fault must
end in bounded time as a missing value with its reason, never as a number. The stub scores what it decodes, so a swapped
or stale picture would show.
"""

import threading
import time

import numpy as np
import pytest
from judge_server import JudgeServer, free_port
from reward_server import MOODY, Moody, Process, Stub, brightness, picture
from tiny_run import Hold, recipe, rows, start, train, weights, world

from prefgrpo.data.media import Media
from prefgrpo.rewards import RewardSpecError, build
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample
from prefgrpo.rewards.jpeg import jpeg_kilobytes
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.rewards.remote import RemoteReward
from prefgrpo.rewards.scorer import Scorer

FAST = {"timeout_s": 0.5, "retries": 2, "patience_s": 1.0}


@pytest.fixture(scope="module")
def jpeg():
    with Process("jpeg_incompressibility") as server:
        yield server


def remote(url, **changes):
    return RemoteReward(MOODY, Moody, url, **{**FAST, **changes})


def samples(*levels, prompt="p"):
    return [Sample(prompt, picture(level)) for level in levels]


def noise(count):
    rng = np.random.default_rng(0)
    images = [Media(rng.integers(0, 256, (40, 30 + k, 3), np.uint8)) for k in range(count)]
    return [Sample(f"p{k}", m) for k, m in enumerate([*images, Media(rng.integers(0, 256, (6, 16, 24, 3), np.uint8))])]


def test_values_are_those_of_the_reward_in_process(jpeg):
    name = "jpeg_incompressibility"
    found = build(name, {name: {"url": jpeg.url}})[name]
    assert isinstance(found, RemoteReward) and found.streams and found.takes == ("image", "video")
    given = noise(20)
    assert found.score(given) == build(name)[name].score(given)


def test_the_scorer_sees_no_difference(jpeg):
    """Values of a step with the reward in process and behind two addresses, samples arriving in another order."""
    name = "jpeg_incompressibility"
    given = noise(7)
    steps = []
    for options in ({}, {"url": [jpeg.url, jpeg.url + "/"]}):
        with Scorer(build(name, {name: options}), 4) as scorer:
            scorer.begin(3, [5, 9])
            for k in range(8) if options else reversed(range(8)):
                scorer.add((5, 9)[k // 4], k % 4, given[k])
            steps.append(scorer.finish().values[name])
    assert np.array_equal(steps[0], steps[1]) and np.isfinite(steps[0]).all()


def test_options_are_checked(jpeg):
    name = "jpeg_incompressibility"
    with pytest.raises(RewardSpecError, match=r"has no option 'retires'.*did you mean 'retries'"):
        build(name, {name: {"url": jpeg.url, "retires": 3}})
    with pytest.raises(RewardError, match="endpoints must be http"):
        build(name, {name: {"url": "localhost:1"}})
    with pytest.raises(RewardError, match="takes no url"):
        RemoteReward("vlm_pairwise", VlmPairwise, jpeg.url)


# at the start


def refused(url, **changes):
    start = time.monotonic()
    with pytest.raises(RewardError) as caught:
        remote(url, **changes)
    assert time.monotonic() - start < 30
    return str(caught.value)


def test_down_at_start():
    told = refused(f"http://127.0.0.1:{free_port()}")
    assert "not reachable" in told and f"start it with 'prefgrpo reward serve {MOODY}'" in told


def test_another_reward_at_start(jpeg):
    assert f"serves 'jpeg_incompressibility', not '{MOODY}'" in refused(jpeg.url)


def test_still_loading_at_start():
    with Process(MOODY, "--options", "load_until=/nowhere", ready=False) as server:
        while server.health() == 0:
            time.sleep(0.02)
        assert "is loading, not ready; try again when" in refused(server.url)


def test_a_name_that_no_server_has():
    assert "not reachable" in refused("http://no-such-host.invalid:1")


def test_another_kind_of_server():
    with JudgeServer() as server:
        assert "is no reward server" in refused(server.url)


def test_one_of_two_dead_at_start_is_told_and_left_out():
    with Stub() as server, pytest.warns(UserWarning, match="left out for now"):
        found = remote([f"http://127.0.0.1:{free_port()}", server.url])
        assert [s.value for s in found.score(samples(51, 102))] == [0.2, 0.4]


# in the run

MISSING = {
    "hang": "did not answer within 0.5 s",
    "500": "answered 500: engine trouble",
    "400": "refused with 400: At most 1 image",
    "drop": "gave up after 3 requests",
    "truncated": "gave up after 3 requests",
    "drip": "did not answer within 0.5 s",
    "not_json": "no readable scores: not JSON",
    "html": "no readable scores: not JSON",
    "few": "no readable scores: scores: expected a list of 1",
    "nan": "the reward returned nan",
    "sick": "was reachable for 1 s",
}


@pytest.mark.parametrize("fault", MISSING)
def test_a_fault_that_stays_is_missing_with_its_reason(fault):
    with Stub() as server:
        found = remote(server.url)
        server.fault = fault
        start = time.monotonic()
        scores = found.score(samples(51, 102))
        assert time.monotonic() - start < 30
    assert [s.value for s in scores] == [None, None]
    assert all(MISSING[fault] in s.reason for s in scores), scores[0].reason
    if fault in ("400", "not_json", "html", "few", "nan"):
        once_more = fault in ("not_json", "html", "few")  # a body may be broken on its way
        assert len(server.requests) == (4 if once_more else 2)


@pytest.mark.parametrize("fault", ["500", "drop", "truncated", "hang", "429"])
def test_a_fault_that_passes_is_asked_again(fault):
    with Stub() as server:
        found = remote(server.url, retries=5, patience_s=10.0)
        server.fault, server.count = fault, 1
        assert [s.value for s in found.score(samples(51, 102))] == [0.2, 0.4]


def test_killed_in_the_middle_and_restarted():
    """The group that was in flight loses nothing, and the values are those of the reward."""
    first = Process(MOODY)
    found = remote(first.url, retries=8, patience_s=30.0, timeout_s=10.0)
    given = [Sample("slow" if k < 2 else "p", picture(10 * k)) for k in range(8)]
    answers = [found.submit(s) for s in given]
    time.sleep(0.1)
    first.kill()
    with Process(MOODY, port=first.port):
        assert [a.result(30).value for a in answers] == [brightness(s) for s in given]


def test_killed_for_good_ends_with_a_reason():
    server = Process(MOODY)
    found = remote(server.url)
    server.kill()
    start = time.monotonic()
    scores = found.score(samples(51, 102))
    assert time.monotonic() - start < 30
    assert all(s.value is None and "was reachable for 1 s" in s.reason for s in scores)


def test_one_of_two_killed_loses_nothing():
    with Process(MOODY) as a, Process(MOODY) as b:
        found = remote([a.url, b.url], retries=5, timeout_s=20.0)
        stop = threading.Timer(0.4, a.kill)
        stop.start()
        given = [Sample("slow", picture(k)) for k in range(8)]
        assert [s.value for s in found.score(given)] == [brightness(s) for s in given]
        stop.join()
        assert a.health() == 0, "it was killed while both were at work"


def test_a_real_server_hangs_fails_and_returns_nan():
    """Real faults of a real reward: each sample ends as the reward makes it end, the others keep their values."""
    with Process(MOODY) as server:
        found = remote(server.url, timeout_s=5.0, retries=0)
        given = [Sample(p, picture(51)) for p in ("a", "nan", "missing", "raise", "b")]
        values = found.score(given)
        assert [s.value for s in values] == [0.2, None, None, None, 0.2]
        reasons = [s.reason for s in values]
        assert reasons[1:3] == ["the reward returned nan", "nothing to see"]
        assert "answered 500" in reasons[3] and "RuntimeError: out of memory" in reasons[3]
        hung = remote(server.url, timeout_s=0.5, retries=1).score([Sample("hang", picture(51))])
        assert hung[0].value is None and "did not answer within 0.5 s" in hung[0].reason


def test_a_sample_the_reward_does_not_take_is_missing():
    with Process("scenes") as server:
        found = build("scenes", {"scenes": {"url": server.url}})["scenes"]
        clip = Sample("p", Media(np.zeros((2, 16, 16, 3), np.uint8)))
        assert "takes image, got video" in found.score([clip])[0].reason


def test_failures_do_not_bias_the_others():
    """5 % of items fail at the server: those are NaN, everybody else's value is untouched."""
    given = [Sample("raise" if k % 20 == 7 else "p", picture(k)) for k in range(100)]
    with Process(MOODY) as server:
        scores = remote(server.url, retries=0, timeout_s=20.0).score(given)
    assert [s.value is None for s in scores] == ["raise" in s.prompt for s in given]
    assert all(s.value == brightness(g) for s, g in zip(scores, given, strict=True) if s.value is not None)


def test_cancelled_samples_free_the_server(tmp_path):
    """What the run gives up is not scored later, in front of the next step."""
    with Process(MOODY, "--max-batch", "2") as server:
        found = remote(server.url, timeout_s=20.0)
        answers = [found.submit(Sample(f"until {tmp_path / 'go'} {k}", picture(k))) for k in range(30)]
        server.wait_for("queued", 1)
        for answer in answers:
            answer.cancel()
        (tmp_path / "go").touch()
        assert found.score(samples(51))[0].value == 0.2
        assert server.counts()["samples"] < 30, "what was given up is not scored"


def test_encodings_of_one_medium_at_once_do_not_mix():
    """A judge, a served reward and a reward in process encode the same medium on threads of their own; PIL keeps the
    options of a save in the image, so a shared one gave JPEGs of another quality now and then."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        pixels = rng.integers(0, 256, (64, 64, 3), np.uint8)
        alone, shared, start = Media(pixels.copy()), Media(pixels), threading.Barrier(3)
        found = {}

        def encode(name, media=shared, start=start, found=found):
            start.wait()
            found[name] = (
                media.jpeg if name == "jpeg" else media.webp if name == "webp" else jpeg_kilobytes(Sample("", media))
            )

        threads = [threading.Thread(target=encode, args=(name,)) for name in ("jpeg", "webp", "size")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {"jpeg": alone.jpeg, "webp": alone.webp, "size": jpeg_kilobytes(Sample("", alone))}


def test_a_source_is_encoded_once():
    """A group's samples share their source image; its bytes are made once."""
    source, calls = picture(3, 64), []

    class Edits(PointwiseReward):
        needs_source = True

        def score(self, samples):
            return []

    import prefgrpo.rewards.remote as module

    with Stub(name="edits") as server, pytest.MonkeyPatch.context() as patch:
        real = module.media_json
        patch.setattr(module, "media_json", lambda media: calls.append(media) or real(media))
        found = RemoteReward("edits", Edits, server.url, **FAST)
        assert found.needs_source
        scores = found.score([Sample("p", picture(k), (source,)) for k in range(6)])
    assert [s.value for s in scores] == [k / 255 for k in range(6)] and calls.count(source) == 1 and len(calls) == 7


# a whole run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return world(tmp_path_factory.mktemp("remote"))


OVER = {"reward": {"spec": "jpeg_incompressibility"}, "judge": {"deadline_s": 3.0}, "train": {"steps": 3}}


def run(place, name, url=""):
    own = {"options": {"jpeg_incompressibility": {"url": url, "patience_s": 2.0}}} if url else {}
    file = recipe(place, name, **OVER | {"reward": OVER["reward"] | own})
    return file, place / "runs" / name


def test_a_run_is_the_same_with_its_reward_behind_http(place, jpeg):
    """Three steps and two evaluations: every metric but the clocks, and the trained weights, bit for bit."""
    found = []
    for name, url in (("here", ""), ("there", jpeg.url)):
        file, folder = run(place, name, url)
        code, output = train(file)
        assert code == 0, output
        found.append((rows(folder), weights(folder / "lora")))
    assert found[0] == found[1]


def test_a_run_whose_reward_dies_stops_and_goes_on(place):
    """The server is killed after the first step: the run stops within seconds with a checkpoint and says why; with the
    server back, --resume ends it as if nothing had happened."""
    whole, _ = run(place, "whole")
    assert train(whole)[0] == 0
    server = Process("jpeg_incompressibility")
    file, folder = run(place, "killed", server.url)
    held = Hold("prefgrpo.run.loop:TrainingLoop._evaluate")
    running = start(["train", str(file)], file.with_suffix(".log"), hold=held)
    running.until_held()
    server.kill()
    running.release()
    assert running.wait() == 3, running.output
    assert "was reachable for 2 s" in running.output and "missing" in running.output
    with Process("jpeg_incompressibility", port=server.port):
        code, output = train(file, "--resume")
    assert code == 0, output
    assert weights(folder / "lora") == weights(place / "runs/whole/lora")
