"""`python -m benchmarks.bench_overlap`: how much a judge slows down a rollout that it overlaps with.

The demo's rollout (scripts/demo/demo.yaml), judged by a server in a separate process that delays every answer so that
judging a finished step's samples takes as long as generating them. Each round times the rollout without a judge, the
rollout with it, and judging alone; ratios are medians over the rounds. A second part runs whole steps with a judge
slower than the rollout, alternating rollout.staleness 0 and 1 in blocks of BLOCK steps. Writes
results/judge_overlap.json and the blocks in docs/judging.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads would disturb each other's timings on shared cores

import torch

from benchmarks.bench_judge import echo_server, machine
from benchmarks.blocks import replace_block, rounded, write_json
from prefgrpo.config.loading import from_dict, recipe_values
from prefgrpo.config.recipe import merge
from prefgrpo.config.schema import Config
from prefgrpo.data.media import Media
from prefgrpo.rewards import build
from prefgrpo.rewards.base import PointwiseReward, Sample, Score
from prefgrpo.rewards.scorer import Scorer, StepScores
from prefgrpo.run.session import Clock, Session, open_session
from prefgrpo.run.trainer import TrainingLoop

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCUMENT = ROOT / "benchmarks" / "results" / "judge_overlap.json", ROOT / "docs" / "judging.md"
PLAN, CONCURRENCY = "k_regular(4)", 2

ALONE = 2
"""Rounds that also time judging alone."""
BLOCK = 4
"""Steps between two checkpoints; samples are not generated ahead across a checkpoint."""
PHASES = ("rollout", "judge_wait", "update")


class Nothing(PointwiseReward):
    """A reward that takes no time, for the rollout without a judge."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """0 for everything."""
        return [Score(0.0)] * len(samples)


def demo(url: str, folder: str, prompts: int, batch: int, side: int, **over: Any) -> Config:
    """The demo's configuration, judged over HTTP; over: sections whose values override it."""
    values = recipe_values(ROOT / "scripts" / "demo" / "demo.yaml")
    assets, templates = ROOT / "prefgrpo" / "tiny" / "assets", ROOT / "prefgrpo" / "judge" / "templates"
    judge = {
        "backend": "http", "endpoints": [url], "model": "", "plan": PLAN, "verdict": "soft", "concurrency": CONCURRENCY,
        "template": str(templates / f"{values['judge']['template']}.yaml"),  # by path: wrong answers only warn
        "patience_steps": 0,  # the echo server always answers the same
    }  # fmt: skip
    changes = {
        "model": str(assets / "base"), "output": folder, "data": {"prompts": str(assets / "prompts" / "train.txt")},
        "rollout": {"prompts_per_step": prompts, "batch_size": batch, "height": side, "width": side},
        "judge": judge, "eval": {"every": 0},
    }  # fmt: skip
    return from_dict(merge(merge(values, changes), over))


def step(config: Config, parts: Session, number: int) -> tuple[float, StepScores, Any]:
    """(seconds of one step's rollout with its rewards, the scores, the samples)."""
    start = time.perf_counter()
    parts.scorer.begin(number, parts.rollouts.groups(number))
    for _ in parts.rollouts(number, parts.scorer.add):
        pass
    scores = parts.scorer.finish()
    seconds, prompts = time.perf_counter() - start, config.rollout.prompts_per_step
    samples = {(group % prompts, g): s for group, made in parts.scorer.samples.items() for g, s in made.items()}
    return seconds, scores, samples


def judge_alone(config: Config, scorer: Scorer, number: int, samples: Any) -> float:
    """Seconds to judge a step whose samples are all finished and not in the judge's cache."""
    fresh = {place: Sample(s.prompt, Media(255 - s.media.pixels)) for place, s in samples.items()}
    start = time.perf_counter()
    scorer.begin(number, range(config.rollout.prompts_per_step))
    for (slot, member), sample in fresh.items():
        scorer.add(slot, member, sample)
    if scorer.finish().metrics["judge/failures"]:
        raise RuntimeError("a comparison failed")
    return time.perf_counter() - start


def measure(prompts: int, batch: int, side: int, rounds: int, share: float) -> dict[str, Any]:
    """Medians over the rounds; the server's delay makes judging alone take `share` × the rollout's time."""
    plain: list[float] = []
    with echo_server() as url, tempfile.TemporaryDirectory() as folder:
        config = demo(url, folder, prompts, batch, side)
        parts = open_session(config, resume=False)
        none = Scorer(build("benchmarks.bench_overlap:Nothing"), config.rollout.group_size)
        without = dataclasses.replace(parts, scorer=none)
        for k in range(3):
            plain.append(step(config, without, k)[0])
        _, scores, samples = step(config, parts, 0)
        calls, target = int(scores.metrics["judge/requests"]), share * statistics.median(plain[1:])
        delay = target * CONCURRENCY / calls - judge_alone(config, parts.scorer, 0, samples) * CONCURRENCY / calls
        times: dict[str, list[float]] = {"rollout": [], "with_judge": [], "judge": [], "wait": []}
        with echo_server("--delay", f"{delay:.4f}") as slow:
            judged = demo(slow, f"{folder}/slow", prompts, batch, side)
            session = open_session(judged, resume=False)
            step(judged, session, 0)
            for k in range(1, rounds + 1):
                order = [(without, "rollout"), (session, "with_judge")]
                for chosen, name in order if k % 2 else order[::-1]:
                    seconds, scores, samples = step(judged, chosen, k)
                    times[name].append(seconds)
                    if name == "with_judge":
                        times["wait"].append(scores.metrics["judge/wait_s"])
                        last = samples
                if k <= ALONE:
                    times["judge"].append(judge_alone(judged, session.scorer, k, last))
                taken = ", ".join(f"{n} {v[-1]:.2f} s" for n, v in times.items())
                print(f"round {k}: {taken}", file=sys.stderr, flush=True)
            session.close()
        parts.close()
    with_judge = [a / b - 1.0 for a, b in zip(times["with_judge"], times["rollout"], strict=True)]
    alone = [a / b for a, b in zip(times["judge"], times["rollout"], strict=False)]
    result = {
        "prompts": prompts, "group_size": config.rollout.group_size, "batch_size": batch, "side": side, "plan": PLAN,
        "requests": calls, "concurrency": CONCURRENCY, "delay_s": delay, "rounds": rounds,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "judge_alone": statistics.median(alone), "overhead": statistics.median(with_judge),
        "overhead_quartiles": statistics.quantiles(with_judge, n=4)[::2],
    }  # fmt: skip
    return rounded(result)


def trained(url: str, folder: str, prompts: int, batch: int, side: int, staleness: Literal[0, 1]) -> Config:
    """`demo` with a second reward, because the echo server's constant answers give no learning signal."""
    reward = {"spec": "vlm_pairwise:0.5,jpeg_compressibility:0.5"}
    over = {"rollout": {"staleness": staleness}, "reward": reward, "checkpoint": {"every": BLOCK}}
    return demo(url, folder, prompts, batch, side, **over)


def block(loop: TrainingLoop, number: int) -> dict[str, float]:
    """Seconds of a block of steps per phase, its requests, and the mean share of ratios that were clipped."""
    clock, metrics = Clock(), list[dict[str, float]]()
    for step in range(number * BLOCK, (number + 1) * BLOCK):
        metrics.append(loop.step(step, clock))
    requests = sum(m["judge/requests"] for m in metrics)
    clipped = statistics.mean(m["policy/clip_fraction"] for m in metrics)
    taken = ", ".join(f"{n} {s:.2f} s" for n, s in clock.seconds.items())
    print(f"block {number}: {taken}", file=sys.stderr, flush=True)
    return clock.seconds | {"requests": requests, "clipped": clipped, "step": sum(clock.seconds.values())}


def measure_staleness(prompts: int, batch: int, side: int, rounds: int, slow: float) -> dict[str, Any]:
    """Medians over the rounds, per step; the server's delay makes judging take `slow` × the rollout's time."""
    found: dict[str, list[dict[str, float]]] = {"0": [], "1": []}
    with tempfile.TemporaryDirectory() as folder:
        with echo_server() as url:
            loop = TrainingLoop(trained(url, f"{folder}/quick", prompts, batch, side, 0))
            quick = [block(loop, k) for k in range(2)][-1]
            loop.close()
        delay = slow * quick["rollout"] * CONCURRENCY / quick["requests"]
        with echo_server("--delay", f"{delay:.4f}") as url:
            loops = {str(s): TrainingLoop(trained(url, f"{folder}/{s}", prompts, batch, side, s)) for s in (0, 1)}
            for k in range(rounds + 1):  # the first warms up
                for name in ("0", "1") if k % 2 else ("1", "0"):
                    found[name].append(block(loops[name], k))
            for loop in loops.values():
                loop.close()
    ratios = [after["step"] / before["step"] for before, after in zip(found["0"][1:], found["1"][1:], strict=True)]
    seconds = {
        name: {key: statistics.median(b[key] for b in blocks[1:]) / BLOCK for key in (*PHASES, "step")}
        for name, blocks in found.items()
    }
    result = {
        "prompts": prompts, "group_size": loop.config.rollout.group_size, "batch_size": batch, "side": side,
        "plan": PLAN, "requests": round(quick["requests"] / BLOCK), "concurrency": CONCURRENCY, "delay_s": delay,
        "judge": slow, "block": BLOCK, "rounds": rounds, "seconds": seconds,
        "clipped": {name: statistics.mean(b["clipped"] for b in blocks[1:]) for name, blocks in found.items()},
        "ratio": statistics.median(ratios), "ratio_extremes": [min(ratios), max(ratios)],
    }  # fmt: skip
    return rounded(result)


def table(found: dict[str, Any]) -> list[str]:
    """The block of docs/judging.md about a rollout."""
    m, r, s = found["machine"], found["run"], found["run"]["seconds"]
    low, high = r["overhead_quartiles"]
    return [
        f"{r['prompts']} groups of {r['group_size']} at {r['side']}², generated {r['batch_size']} at a time; "
        f"{r['requests']} requests (`{r['plan']}`), {r['concurrency']} in flight, each delayed by "
        f"{1e3 * r['delay_s']:.0f} ms; {m['cpu']}, {m['cores']} cores shared with other work (load {m['load']:.1f} "
        f"at the start), torch {found['torch']} on {found['threads']} thread, medians of {r['rounds']} "
        "interleaved rounds:",
        "",
        "| rollout alone | judging alone | both, overlapped | final wait for the judge | overhead (quartiles) |",
        "|---|---|---|---|---|",
        f"| {s['rollout']:.2f} s | {s['judge']:.2f} s ({r['judge_alone']:.2f} ×) | {s['with_judge']:.2f} s "
        f"| {s['wait']:.2f} s | {r['overhead']:.1%} ({low:.1%} to {high:.1%}) |",
    ]


def steps_table(found: dict[str, Any]) -> list[str]:
    """The block of docs/judging.md about whole steps."""
    m, r = found["steps_machine"], found["steps"]
    low, high = r["ratio_extremes"]
    rows = [
        f"| `rollout.staleness: {name}` | {s['rollout']:.2f} s | {s['judge_wait']:.2f} s | {s['update']:.2f} s "
        f"| {s['step']:.2f} s | {s['judge_wait'] / s['step']:.0%} | {r['clipped'][name]:.0%} |"
        for name, s in r["seconds"].items()
    ]
    return [
        f"{r['prompts']} groups of {r['group_size']} at {r['side']}², generated {r['batch_size']} at a time; "
        f"{r['requests']} requests (`{r['plan']}`), {r['concurrency']} in flight, each delayed by "
        f"{1e3 * r['delay_s']:.0f} ms, so that judging takes {r['judge']:g} × the rollout; a checkpoint every "
        f"{r['block']} steps; {m['cpu']}, {m['cores']} cores shared with other work (load {m['load']:.1f} at the "
        f"start), torch {found['torch']} on {found['threads']} thread, medians of {r['rounds']} interleaved rounds of "
        f"{r['block']} steps, per step:",
        "",
        "| | rollout | waiting for the judge | update | step | share waiting | ratios clipped |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"A step takes {r['ratio']:.2f} × as long with staleness 1 (rounds: {low:.2f} to {high:.2f}).",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_overlap", description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="groups per step")
    parser.add_argument("--side", type=int, default=192, help="image height and width in pixels")
    parser.add_argument("--batch", type=int, default=1, help="samples generated at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.95, help="time of judging alone / time of the rollout")
    parser.add_argument("--slow", type=float, default=1.5, help="the same for the part that times whole steps")
    parser.add_argument(
        "--part", choices=("all", "rollout", "steps"), default="all", help="earlier results of the other parts are kept"
    )
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--render", action="store_true", help="only write the blocks from the JSON")
    args = parser.parse_args(argv)
    found = json.loads(RESULTS.read_text())
    if not args.render:
        found |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
        if args.part != "steps":
            found["machine"] = machine()
            found["run"] = measure(args.prompts, args.batch, args.side, args.rounds, args.share)
        if args.part != "rollout":
            found["steps_machine"] = machine()
            found["steps"] = measure_staleness(args.prompts, args.batch, args.side, args.rounds, args.slow)
    print(*table(found), "", *steps_table(found), sep="\n")
    if not args.dry:
        write_json(RESULTS, found)
        replace_block(DOCUMENT, "overlap", table(found))
        replace_block(DOCUMENT, "staleness", steps_table(found))


if __name__ == "__main__":
    main()
