"""Judge calls and policy forwards to a given accuracy, by objective and plan: `python -m benchmarks.experiments.calls`.

Two worlds. `scenes`: the demo's images and its tiny vision-language judge. `words`: the OCR demo's images, and a
simulated judge (simulated_judge.py) that reads letters with noise and favours the image shown first. In both, accuracy
is the share of held-out images that are right in everything; neither objective nor judge uses it.

All arms of a world start from the same weights, with the same seeds of prompts, noise and LoRA. An uninformative judge
does not end a run, so that a later decline is visible. Forwards are counted, not measured: denoising steps plus those
that training evaluates, its reference included, times images. Seconds are the process's CPU seconds without
evaluations. A run's JSON in results/calls grows with its evaluations; complete runs are not repeated, so the work can
be split by --seeds and --only.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.blocks import replace_block
from benchmarks.experiments.demo_runs import (
    COLOURS,
    ROOT,
    Columns,
    Run,
    Watch,
    band,
    column,
    drawing,
    ended,
    measure,
    recipe,
    spread,
)
from benchmarks.experiments.simulated_judge import WinRates, WordsJudge
from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import merge, read_yaml
from prefgrpo.config.schema import Config
from prefgrpo.objectives import make_objective
from prefgrpo.objectives.base import EndpointObjective
from prefgrpo.rewards.pairs import get_plan

RESULTS = ROOT / "benchmarks" / "experiments" / "results" / "calls"
PAGE = ROOT / "docs" / "science.md"
SEEDS = (0, 1, 2, 3, 4)
GOALS = {"scenes": (0.70, 0.80, 0.85), "words": (0.45, 0.50, 0.55)}
"""World → accuracies whose price is shown; the words start at .33."""
WORDS = "scripts/demo_world/text.py:Letters"
OBJECTIVE = ("objective", "objective_options", "clip_range")
"""Fields of a recipe's section `train` that make its objective."""
DIVERSITY = {"diversity": "diversity/pixels"}
PLANS = {"both_orders": 80, "round_robin": 80, "k_regular(4)": 80, "k_regular(2)": 120, "k_regular(1)": 120}
"""Plan of pairs → training steps: more where a step has few calls."""


@dataclass(frozen=True)
class Arm:
    """A training setup."""

    recipe: str
    """A recipe of scripts/demo."""
    plan: str = "both_orders"
    steps: int = 80
    world: str = "scenes"
    values: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the recipe."""
    label: str = ""
    """What is changed."""
    round_verdicts: bool = True
    """As in `vlm_pairwise`."""
    after: Arm | None = None
    """The setup whose LoRA this one continues; its steps, calls and evaluations come first."""

    @property
    def total(self) -> int:
        """Training steps, those before included."""
        return self.steps + (self.after.steps if self.after else 0)


def short(plan: str) -> str:
    """k2 for k_regular(2)."""
    return plan.replace("_regular(", "").rstrip(")")


ARMS: dict[str, Arm] = {
    f"{objective}_{short(plan)}": Arm(objective, plan, steps)
    for plan, steps in PLANS.items()
    for objective in ("grpo", "soft_dpo", "nft")
}
ARMS |= {f"{objective}_both_orders": Arm(objective) for objective in ("grpo_guard", "awm", "dpo", "sft")}
ARMS["window_both_orders"] = Arm("grpo", values={"rollout": {"window_size": 1}}, label="one step of the window")
ARMS["grpo_slow"] = Arm("grpo", steps=110, values={"train": {"lr": 5e-4}}, label="half the learning rate")
FEW = Arm("few_calls", "k_regular(1)", 60, round_verdicts=False)
THEN = Arm("few_calls_grpo", "k_regular(1)", 140, label="after `few_calls`", round_verdicts=False, after=FEW)
CONSTANT = {"ema_decay": 0.0, "lr_scheduler": "constant"}
ARMS["few_calls_grpo"] = THEN
ARMS["few_calls_constant"] = replace(THEN, values={"train": CONSTANT}, label=f"{THEN.label}, constant rate, no EMA")
ARMS["few_calls_only_grpo"] = replace(
    THEN, steps=200, values={"train": CONSTANT | {"lora_from": ""}}, label="alone, constant rate, no EMA", after=None
)
ARMS |= {f"words_{name}": Arm(arm.recipe, arm.plan, 100, "words") for name, arm in list(ARMS.items())[:15]}


def config(arm: Arm) -> Config:
    """The arm's configuration: its recipe's objective in its world's recipe, with its changes."""
    content = read_yaml(recipe(arm.recipe))
    if arm.world == "words":
        train = {key: content["train"][key] for key in OBJECTIVE if key in content["train"]}
        content = merge(read_yaml(recipe("ocr")), {"train": train})
    return from_dict(merge(content, dict(arm.values)))


def calls_per_group(arm: Arm) -> int:
    """Judge calls for the images of a prompt."""
    return len(get_plan(arm.plan)(config(arm).rollout.group_size, 0))


def forwards_per_image(arm: Arm) -> int:
    """Denoising steps, plus the forwards of training: one per trained step, or per draw, two with another policy."""
    c = config(arm)
    trained = make_objective(c.train)
    if isinstance(trained, EndpointObjective):
        return c.rollout.steps + trained.draws * (2 if trained.compares_with else 1)
    return c.rollout.steps + (c.rollout.window_size or c.rollout.window_high - c.rollout.window_low)


def forwards(arm: Arm, steps: float) -> float:
    """Forwards of the policy in the first steps of a run, those before included."""
    before = arm.after.steps if arm.after else 0
    earlier = forwards(arm.after, min(steps, before)) if arm.after else 0.0
    rollout = config(arm).rollout
    images = rollout.prompts_per_step * rollout.group_size
    return earlier + max(steps - before, 0) * images * forwards_per_image(arm)


# ---- running --------------------------------------------------------------------------------------------------------


def train(name: str, seed: int, file: Path, steps: int = 0, every: int = 10) -> None:
    """Run an arm, after the one that it continues; steps: 0 for its own number."""
    arm = ARMS[name]
    facts = {"arm": name, "seed": seed}
    if arm.world == "words":
        return train_words(arm, facts, file, steps or arm.steps, every)
    watch = Watch(Columns({"accuracy": "dev/scenes.all"}, DIVERSITY), lambda metrics: metrics["judge/requests"])
    with tempfile.TemporaryDirectory() as folder:
        lora = ""
        for part in (arm.after, arm):
            if part is None:
                continue
            options = {"plan": part.plan, "round_verdicts": part.round_verdicts, "template": "caption_match"}
            values = merge(dict(part.values), {"train": {"lora_from": lora}} if lora else {})
            values |= {"rewards": [{"name": "vlm_pairwise", "options": options}], "eval": {"rewards": ["scenes"]}}
            start = recipe(part.recipe)
            measure(start, file, facts, watch, steps or part.steps, every, folder, seed=seed, **values)
            watch.before += steps or part.steps
            lora = f"{folder}/{config(part).name}/lora"
    return None


def train_words(arm: Arm, facts: Run, file: Path, steps: int, every: int) -> None:
    """Run an arm of the world `words`."""
    judge = WordsJudge(noise=0.2, bias=0.3)
    watch = Watch(Columns({"accuracy": f"dev/{WORDS}.all"}, DIVERSITY), judge.calls_of_a_step)
    made = config(arm).train
    measure(
        recipe("ocr"), file, facts, watch, steps, every, seed=facts["seed"],
        rewards=WinRates(judge, plan=arm.plan, round_verdicts=arm.round_verdicts), eval={"rewards": [WORDS]},
        train={key: getattr(made, key) for key in OBJECTIVE},
    )  # fmt: skip


def done(name: str, seed: int, folder: Path = RESULTS) -> Run | None:
    """The run, if it is complete."""
    return ended(folder / f"{name}_{seed}.json", ARMS[name].total)


def run(job: tuple[str, int]) -> str:
    """Run a job with its output suppressed; returns a line on how it ended."""
    name, seed = job
    with tempfile.TemporaryFile("w+") as log, redirect_stdout(log), redirect_stderr(log):
        train(name, seed, RESULTS / f"{name}_{seed}.json")
    result = done(name, seed)
    assert result
    return f"{name}, seed {seed}: accuracy {column(result, 'accuracy')[-1]:.3f}"


# ---- results --------------------------------------------------------------------------------------------------------


def reached(run: Run, name: str, goal: float) -> float | None:
    """Value of a column where the accuracy first reaches the goal, interpolated; None if it never does."""
    x, y = column(run, name), column(run, "accuracy")
    for k in range(1, len(y)):
        if y[k] >= goal:
            return x[k - 1] + (x[k] - x[k - 1]) * (goal - y[k - 1]) / (y[k] - y[k - 1])
    return None


def largest_fall(run: Run) -> float:
    """The largest drop below the best accuracy so far."""
    y = column(run, "accuracy")
    return max(max(y[: k + 1]) - y[k] for k in range(len(y)))


def over_seeds(values: Sequence[float | None], digits: int = 1, factor: float = 1.0) -> str:
    """Mean and half of its 95 % interval over the seeds that reached the goal, and the number of those that did not."""
    there = [value * factor for value in values if value is not None]
    if not there:
        return "never"
    never = len(values) - len(there)
    return spread(there, digits) + (f", {never} never" if never else "")


def table(world: str, folder: Path = RESULTS) -> list[str]:
    """A row per arm of a world that has runs."""
    goals = GOALS[world]
    head = ["objective", "plan", "calls per group", "seeds", "steps"]
    head += [f"calls to {goal:.2f} (thousands)" for goal in goals]
    head += [f"forwards to {goal:.2f} (thousands)" for goal in goals[:2]] + ["best", "last", "largest fall"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, arm in ARMS.items():
        runs = [result for seed in SEEDS if (result := done(name, seed, folder))]
        if arm.world != world or not runs:
            continue
        soft = "" if arm.round_verdicts else ", soft"
        cells = [f"`{arm.recipe}`{', ' + arm.label if arm.label else ''}", f"`{arm.plan}`{soft}"]
        cells += [str(calls_per_group(arm)), str(len(runs)), str(arm.total)]
        cells += [over_seeds([reached(r, "calls", goal) for r in runs], 1, 1e-3) for goal in goals]
        for goal in goals[:2]:
            steps = [reached(r, "step", goal) for r in runs]
            cells.append(over_seeds([None if step is None else forwards(arm, step) for step in steps], 0, 1e-3))
        cells += [spread([max(column(r, "accuracy")) for r in runs]), spread([column(r, "accuracy")[-1] for r in runs])]
        cells += [spread([largest_fall(r) for r in runs])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def progress(world: str, folder: Path = RESULTS) -> str:
    """How many of a world's runs are done."""
    names = [name for name, arm in ARMS.items() if arm.world == world]
    count = sum(done(name, seed, folder) is not None for name in names for seed in SEEDS)
    return f"{count} of {len(names) * len(SEEDS)} runs of the world `{world}` are done."


def draw(world: str, path: Path, folder: Path = RESULTS) -> None:
    """Held-out accuracy over judge calls, a panel per objective and a line per plan; bands: all seeds."""
    with drawing(path, 1, 3, figsize=(10.2, 3.2), sharey=True) as panels:
        for axes, objective in zip(panels[0], ("grpo", "soft_dpo", "nft"), strict=True):
            for plan, colour in zip(PLANS, COLOURS, strict=False):
                name = f"{'words_' * (world == 'words')}{objective}_{short(plan)}"
                runs = [result for seed in SEEDS if (result := done(name, seed, folder))]
                if runs:
                    x = [[value * 1e-3 for value in column(r, "calls")] for r in runs]
                    band(axes, x, [column(r, "accuracy") for r in runs], colour, label=plan)
            axes.set(title=objective, xlabel="judge calls (thousands)", xscale="symlog")
        panels[0][0].set_ylabel("held-out accuracy")
        panels[0][2].legend(frameon=False, fontsize=7)


def block(world: str, folder: Path = RESULTS) -> list[str]:
    """A world's generated part of docs/science.md."""
    rows = table(world, folder)
    picture = f"![held-out accuracy over judge calls](calls_{world}.svg)"
    return [progress(world, folder)] + (["", picture, "", *rows] if len(rows) > 2 else [])


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments.calls", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(ARMS), choices=list(ARMS), help="arms to run; all by default")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each on one thread")
    parser.add_argument("--render", action="store_true", help="run nothing: figures and tables of docs/science.md")
    args = parser.parse_args(argv)
    os.chdir(ROOT)  # the paths of the demo's recipes are relative to it
    if not args.render:
        os.environ["OMP_NUM_THREADS"] = "1"
        RESULTS.mkdir(parents=True, exist_ok=True)
        jobs = [(name, seed) for seed in args.seeds for name in args.only if not done(name, seed)]
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            for line in pool.map(run, jobs):
                print(line, flush=True)
    if len(table("scenes")) > 2:
        draw("scenes", PAGE.parent / "calls_scenes.svg")
    replace_block(PAGE, "calls-scenes", block("scenes"))
    print("\n".join([progress("words"), *table("words")]))


if __name__ == "__main__":
    main()
