"""Whole runs with a judge over HTTP: one whose answers say nothing, or go missing, stops the run; one that comes up
late, or is overloaded, does not, and no verdict is lost; every process makes sure that it reaches one.
"""

import random

from aiohttp import web
from ranks import all_end, free_port, ranks, start, train
from servers import JudgeServer, text_of
from world import merged, recipe, rows


def judged(url, **over):
    base = {
        "rewards": "vlm_pairwise", "judge": {"endpoints": [url]}, "eval": {"every": 0}, "train": {"steps": 6},
        "rollout": {"prompts_per_step": 4},
    }  # fmt: skip
    return merged(base, over)


def test_a_run_stops_for_a_judge_that_says_nothing_and_goes_on_when_it_does(place):
    """48 verdicts per step; the judge passes the start-up check but answers every pair of the run with a tie."""

    def answer(bright, text):
        first, second = bright[-2:]
        knows = "plain" in text
        bright_wins = (first > second) == ("plain black" not in text)
        p_first = 0.99 if bright_wins else 0.01
        return {"1": p_first, "2": 1 - p_first} if knows else {"1": 0.5, "2": 0.5}

    with JudgeServer() as server:
        server.answer = answer
        file = recipe(place, "ties", **judged(server.url))
        code, output = train(file)
        assert code == 3, output
        for step in (1, 2):
            assert f"WARNING: step {step}, vlm_pairwise: the judge's verdicts carry no information" in output
        assert "step 3: vlm_pairwise" in output and "P(first) is 0.500 in all 48" in output
        assert "3 steps in a row" in output and "rerun with --resume" in output
        assert [r["step"] for r in rows(place / "runs" / "ties") if r["kind"] == "train"] == [1, 2]
        server.answer = None
        code, output = train(file, "--resume")
        assert code == 0 and "carry no information" not in output.split("step 4", 1)[1], output


class Forgetful(JudgeServer):
    """Refuses every fourth comparison of the run."""

    asked = 0

    def _answer(self, body):
        self.asked += "plain" not in text_of(body) and "a picture" not in text_of(body)
        if self.asked % 4 == 3:
            self.asked += 1
            return web.json_response({"error": {"message": "no"}}, status=400)
        return super()._answer(body)


def test_lost_comparisons_stop_a_run_whose_members_all_have_some(place):
    """Missing comparisons are counted over both ranks."""
    with Forgetful() as server:
        file = recipe(place, "lost", **judged(server.url))
        runs = ranks(file, 2)
        assert [run.wait() for run in runs] == [3, 3], runs[0].output
        output = runs[0].output
        assert "of the comparisons are missing, more than judge.max_missing = 10%" in output
        code, output = train(file, "--resume", "--judge.max-missing", "0.5", "--train.steps", "2")
    assert code == 0 and "of the comparisons are missing (judge/missing); above judge.max_missing = 50%" in output
    found = [r for r in rows(place / "runs" / "lost") if "judge/missing" in r]
    assert found and all(r["reward/missing"] == 0 and r["judge/missing"] > 0.1 for r in found)


class Half(JudgeServer):
    """Refuses every other request for now."""

    dice = random.Random(1)

    def next_fault(self):
        return "429 0.1" if self.dice.random() < 0.5 else ""


def test_a_run_whose_server_starts_later_and_is_overloaded_ends_with_every_verdict(place):
    """It waits from its start on, and goes on as soon as the server is there."""
    port = free_port()
    file = recipe(place, "late", **judged(f"http://127.0.0.1:{port}", train={"steps": 2}))
    run = start(["train", str(file)], file.with_suffix(".log"))
    run.until(lambda: "waiting for a server" in run.output)
    assert run.process.is_alive()
    with Half(port=port) as server:
        assert run.wait() == 0, run.output
        asked = len(server.requests)
    steps = rows(place / "runs" / "late")
    assert len(steps) == 2 and all(step["judge/failures"] == 0 < step["judge/requests"] for step in steps)
    assert asked >= sum(step["judge/requests"] for step in steps)


def test_every_rank_must_reach_the_judge(place):
    """On the second machine nothing listens at the address that works on the first: no rollout begins."""
    with JudgeServer() as server:
        file = recipe(place, "far", **judged(server.url, judge={"deadline_s": 2.0}))
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
