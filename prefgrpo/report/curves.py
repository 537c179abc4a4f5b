"""Which curves a run has, found from the names of its metrics; a metric that never existed gives no curve.

Colours mean the same everywhere: 0 the judge or the main value, 1 the second one, 2 ….
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefgrpo.report.charts import Chart, Series
from prefgrpo.report.run import Rows, Run

Floats = NDArray[np.float64]
PHASES = ("rollout", "judge_wait", "update")
HANDLED = ("advantage/zero_groups", "grad_norm", "policy/ratio_mean", "policy/ratio_min", "policy/ratio_max")
"""Training metrics that `curves` shows beside those it finds by prefix; the others go to `other_curves`."""


def readable(name: str) -> str:
    """A metric's name for people: 'scenes.all' → 'scenes · all', 'judge_wait' → 'judge wait'."""
    return name.replace(".", " · ").replace("_", " ").replace("/", " · ")


def win_names(rows: Rows) -> list[str]:
    """Win rates of an evaluation, the judge's first."""
    ends = ("_low", "_high", "_first", "_second", "_missing")
    found = [n for n in rows.columns if n.startswith("win_") and not n.endswith(ends)]
    return sorted(found, key=lambda n: n != "win_judge")


def measure_names(rows: Rows) -> list[str]:
    """Measures that exist before and now; 'x.all' after 'x', then the other parts."""
    found = [n for n in rows.columns if f"{n}_before" in rows]
    return sorted(found, key=lambda n: (n.split(".")[0], "." in n, not n.endswith(".all")))


def main_set(run: Run) -> str:
    """The evaluation set that is watched during training."""
    return "dev" if "dev" in run.evals else next(iter(run.evals), "")


def curves(run: Run) -> list[Chart]:
    """All charts of a run, most telling first."""
    return [*_wins(run), *_measures(run), *_rewards(run.train), *_policy(run), *_judge(run.train), *_time(run.train)]


def _wins(run: Run) -> list[Chart]:
    series = []
    for name, rows in run.evals.items():
        for k, win in enumerate(win_names(rows)):
            watched = name == main_set(run)
            kept = rows.steps >= 0 if watched else rows.steps > 0  # at 0 every set is at one half
            low, high = (rows[f"{win}_{end}"][kept] for end in ("low", "high"))
            told = f"by {readable(win[4:])}" + ("" if watched else f", {name}")
            series.append(Series(told, rows.steps[kept], rows[win][kept], k, low, high, marks=not watched))
    note = "Held-out prompts, against the images of the start from the same noise; bands and bars: 95 % intervals."
    if len(run.evals) > 1:
        note += f" Lines: the set {main_set(run)}."
    return [
        Chart(
            "Win rate against the start", series, note=note, percent=True, include=(0.5, 1.0), lines=((0.5, "equal"),)
        )
    ]


def _measures(run: Run) -> list[Chart]:
    """One chart per measuring reward of the watched set, its parts as lines."""
    if not run.evals:
        return []
    name, charts = main_set(run), []
    rows = run.evals[name]
    for family in dict.fromkeys(n.split(".")[0] for n in measure_names(rows)):
        parts = [n for n in measure_names(rows) if n.split(".")[0] == family]
        series = [Series(_part(n, family), rows.steps, rows[n], k) for k, n in enumerate(parts)]
        charts.append(
            Chart(f"Measured: {readable(family)}", series, note=f"Mean over the images of the held-out set {name}.")
        )
    return charts


def _part(name: str, family: str) -> str:
    return "overall" if name == family else readable(name.removeprefix(f"{family}."))


def _reward_names(train: Rows) -> list[str]:
    return [
        n[7:]
        for n in train.columns
        if n.startswith("reward/") and n.count("/") == 1 and n != "reward/missing" and not n.endswith("_std")
    ]


def _rewards(train: Rows) -> list[Chart]:
    names, charts = _reward_names(train), []
    for k, name in enumerate(names):
        mean, std = train[f"reward/{name}"], train[f"reward/{name}_std"]
        if np.nanmax(np.abs(mean - 0.5)) < 1e-6:
            continue  # a win rate inside the group: ½ by construction
        series = Series("mean", train.steps, mean, k, mean - std, mean + std)
        charts.append(
            Chart(f"Reward: {readable(name)}", [series], note="Training prompts; band: ± the std within a group.")
        )
    spread = [Series(readable(n), train.steps, train[f"reward/{n}_std"], k) for k, n in enumerate(names)]
    note = (
        "Spread of rewards within a group; 0: no learning signal. A win rate inside a group averages ½ by construction."
    )
    lost = Series("groups without signal", train.steps, train["advantage/zero_groups"], 1)
    charts.append(Chart("Reward: std within a group", spread, note=note, include=(0.0,)))
    charts.append(
        Chart(
            "Groups without signal", [lost], percent=True, include=(0.0,), note="All advantages zero: not trained on."
        )
    )
    return charts


def _policy(run: Run) -> list[Chart]:
    train = run.train
    mean, low, high = (train[f"policy/ratio_{end}"] - 1.0 for end in ("mean", "min", "max"))
    clip = run.clip_range
    lines = ((0.0, ""), (-clip[0], ""), (clip[1], "clip range")) if clip else ()
    ratio = Series("mean", train.steps, mean, 0, low, high)
    clips = [("all", "clip_fraction", 0), ("above", "clip_fraction_high", 1), ("below", "clip_fraction_low", 2)]
    kls = [("to the rollout's policy", "approx_kl", 0), ("to the start", "kl", 1)]
    return [
        Chart("Policy ratio − 1", [ratio], note="Band: smallest to largest of the step.", lines=lines),
        Chart(
            "Clipped",
            _of(train, "policy/", clips),
            percent=True,
            include=(0.0,),
            note="Share of samples outside the clip range.",
        ),
        Chart(
            "KL divergence", [s for s in _of(train, "policy/", kls) if np.nanmax(np.abs(s.y), initial=0) > 0], log=True
        ),
        Chart("Gradient norm", [Series("before clipping", train.steps, train["grad_norm"])], log=True, include=(0.0,)),
    ]


def _judge(train: Rows) -> list[Chart]:
    delays = [("median", "latency_p50", 0), ("95 % of requests", "latency_p95", 1)]
    doubts = [
        ("order swapped, other winner", "order_inconsistency", 0),
        ("first shown wins", "position_bias", 1),
        ("ties", "tie_rate", 2),
    ]
    lost = [Series("rewards missing", train.steps, train["reward/missing"], 1)]
    retries = train["time/judge/retries"] / np.maximum(train["judge/requests"], 1.0)
    lost = [
        *_of(train, "judge/", [("comparisons missing", "missing", 0)]),
        *lost,
        Series("retries", train.steps, retries, 2),
    ]
    return [
        Chart("Judge: latency", _of(train, "time/judge/", delays), unit="s", log=True, include=(0.0,)),
        Chart("Judge: failures", lost, percent=True, include=(0.0,), note="Per request; rewards missing per sample."),
        Chart(
            "Judge: consistency", _of(train, "judge/", doubts), percent=True, include=(0.0,), lines=((0.5, "no bias"),)
        ),
    ]


def _time(train: Rows) -> list[Chart]:
    phases = [n[5:] for n in train.columns if n.startswith("time/") and n.count("/") == 1]
    phases.sort(key=lambda n: PHASES.index(n) if n in PHASES else len(PHASES))
    stack = [Series(readable(n), train.steps, train[f"time/{n}"], k) for k, n in enumerate(phases)]
    busy = Series("judge at work", train.steps, train["time/judge/busy_s"], 0)
    overlap = (
        [busy, Series("trainer waits for rewards", train.steps, train["time/judge_wait"], 1)]
        if "time/judge/busy_s" in train
        else []
    )
    note = "First request to last answer; what the trainer did not wait for went on during the rollout."
    return [
        Chart("Time per step", stack, unit="s", stacked=True),
        Chart("Judge overlap", overlap, unit="s", include=(0.0,), note=note),
    ]


def _of(train: Rows, prefix: str, lines: list[tuple[str, str, int]]) -> list[Series]:
    return [Series(told, train.steps, train[prefix + name], colour) for told, name, colour in lines]


def other_curves(run: Run) -> list[Chart]:
    """A small chart for every training metric that `curves` does not show."""
    shown = ("time/judge/latency_", "time/reward/", "policy/", "reward/")
    named = {"time/judge/busy_s", "tie_rate", "position_bias", "order_inconsistency", "missing"}
    rest = [
        n
        for n in run.train.columns
        if not n.startswith(shown) and n not in HANDLED and n.removeprefix("judge/") not in named
        if not n.startswith("time/") or n.count("/") > 1  # phases
    ]
    return [Chart(readable(n), [Series("", run.train.steps, run.train[n])]) for n in rest]
