"""`python -m benchmarks.bench_overlap`: what a judge costs a rollout that it overlaps with.

The demo's rollout (scripts/demo/demo.yaml) with its groups judged by a server in a process of its own, which holds back
every answer so that judging a step alone, with all samples there, takes as long as making them. Each round times the
rollout without a judge, with the judge, and the judge alone; ratios are medians over the rounds. Writes
results/judge_overlap.json and the block in docs/judging.md.
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin would measure each other where cores are shared

import torch

from benchmarks.bench_judge import echo_server, machine
from benchmarks.blocks import replace_block, rounded, write_json
from prefgrpo.config.schema import Config, load
from prefgrpo.data.media import Media
from prefgrpo.rewards import build
from prefgrpo.rewards.base import PointwiseReward, Sample, Score
from prefgrpo.rewards.scorer import Scorer, StepScores
from prefgrpo.run.session import Session, open_session

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCUMENT = ROOT / "benchmarks" / "results" / "judge_overlap.json", ROOT / "docs" / "judging.md"
PLAN, CONCURRENCY = "k_regular(4)", 2

ALONE = 2
"""Rounds that also time judging alone."""


class Nothing(PointwiseReward):
    """A reward that costs no time: the rollout without a judge."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """0 for everything."""
        return [Score(0.0)] * len(samples)


def demo(url: str, folder: str, prompts: int, batch: int, side: int) -> Config:
    """The demo's configuration, judged over HTTP."""
    config = load(ROOT / "scripts" / "demo" / "demo.yaml")
    replace = dataclasses.replace
    assets = ROOT / "prefgrpo" / "tiny" / "assets"
    templates = ROOT / "prefgrpo" / "judge" / "templates"
    judge = replace(
        config.judge,
        backend="http",
        endpoints=(url,),
        model="",
        template=str(templates / f"{config.judge.template}.yaml"),  # by path: wrong answers only warn
        plan=PLAN,
        verdict="soft",
        concurrency=CONCURRENCY,
        patience_steps=0,  # the echo server always answers the same
    )
    return replace(
        config,
        model=str(assets / "base"),
        output=folder,
        data=replace(config.data, prompts=str(assets / "prompts" / "train.txt")),
        rollout=replace(config.rollout, prompts_per_step=prompts, batch_size=batch, height=side, width=side),
        judge=judge,
        eval=replace(config.eval, every=0),
    )


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
    """Seconds to judge a step whose samples are all there, and new to the judge."""
    fresh = {place: Sample(s.prompt, Media(255 - s.media.pixels)) for place, s in samples.items()}
    start = time.perf_counter()
    scorer.begin(number, range(config.rollout.prompts_per_step))
    for (slot, member), sample in fresh.items():
        scorer.add(slot, member, sample)
    if scorer.finish().metrics["judge/failures"]:
        raise RuntimeError("a comparison failed")
    return time.perf_counter() - start


def measure(prompts: int, batch: int, side: int, rounds: int, share: float) -> dict[str, Any]:
    """Medians over the rounds; the server's delay is set for judging alone to take `share` of the rollout's time."""
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
                print(
                    f"round {k}: " + ", ".join(f"{n} {v[-1]:.2f} s" for n, v in times.items()),
                    file=sys.stderr,
                    flush=True,
                )
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


def table(found: dict[str, Any]) -> list[str]:
    """The block of docs/judging.md."""
    m, r, s = found["machine"], found["run"], found["run"]["seconds"]
    low, high = r["overhead_quartiles"]
    return [
        f"{r['prompts']} groups of {r['group_size']} at {r['side']}², made {r['batch_size']} at a time; "
        f"{r['requests']} requests (`{r['plan']}`), {r['concurrency']} in flight, each held back "
        f"{1e3 * r['delay_s']:.0f} ms; {m['cpu']}, {m['cores']} cores shared with other work (load {m['load']:.1f} "
        f"at the start), torch {found['torch']} on {found['threads']} thread, medians of {r['rounds']} "
        "interleaved rounds:",
        "",
        "| rollout alone | judging alone | both, overlapped | of it waiting at the end | overhead (quartiles) |",
        "|---|---|---|---|---|",
        f"| {s['rollout']:.2f} s | {s['judge']:.2f} s ({r['judge_alone']:.2f} ×) | {s['with_judge']:.2f} s "
        f"| {s['wait']:.2f} s | {r['overhead']:.1%} ({low:.1%} to {high:.1%}) |",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_overlap", description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="groups of a step")
    parser.add_argument("--side", type=int, default=192, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=1, help="samples that are made at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.95, help="time of judging alone over that of the rollout")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--render", action="store_true", help="only the block, from the JSON")
    args = parser.parse_args(argv)
    if args.render:
        found = json.loads(RESULTS.read_text())
    else:
        found = {"machine": machine(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        found["run"] = measure(args.prompts, args.batch, args.side, args.rounds, args.share)
    print(*table(found), sep="\n")
    if not args.dry:
        write_json(RESULTS, found)
        replace_block(DOCUMENT, "overlap", table(found))


if __name__ == "__main__":
    main()
