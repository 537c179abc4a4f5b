"""The charts of a run, chosen by the names of its metrics; a metric without values gives no curve.

Colours are consistent across charts: 0 is the judge or main value, 1 the second, 2 ….
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from prefgrpo.report.charts import Chart, Series
from prefgrpo.report.run import Rows, Run, reward_weights
from prefgrpo.run.metrics import PARTS_OF_WINS, REWARD

PHASES = ("rollout", "judge_wait", "update")
SHOWN = ("time/judge/latency_", "time/reward/", "policy/", "reward/")
NOT_LISTED = ("advantage/zero_groups", "grad_norm", "time/judge/busy_s", "judge/tie_rate", "judge/position_bias",
              "judge/order_inconsistency", "judge/missing")  # fmt: skip
"""Prefixes and names of the metrics that `curves` shows; the others go to `other_curves`."""


def readable(name: str) -> str:
    """Display name of a metric: 'scenes.all' → 'scenes · all', 'my/rewards.py:right_colour' → 'right colour'."""
    return name.rpartition(":")[2].replace(".", " · ").replace("_", " ").replace("/", " · ")


def namer(runs: Iterable[Run]) -> Callable[[str], str]:
    """`readable`, except for names that it would make equal in these runs: those are shown in full."""
    names = set[str]()
    for run in runs:
        names.update(reward_weights(run.config), run.train.columns, *(rows.columns for rows in run.evals.values()))
    count = Counter(map(readable, {re.sub(r"^(reward/|win_)", "", n) for n in names}))
    return lambda name: name if count[readable(name)] > 1 else readable(name)


def win_names(rows: Rows) -> list[str]:
    """Names of an evaluation's win rates, the judge's first."""
    names = [n for n in rows.columns if n.startswith("win_") and not n.endswith(PARTS_OF_WINS)]
    return sorted(names, key=lambda n: n != "win_judge")


def measure_names(rows: Rows) -> list[str]:
    """Measures with values before and after training; 'x.all' comes after 'x', then the other parts."""
    names = [n for n in rows.columns if f"{n}_before" in rows]
    parts = {n: part_of(n, names) for n in names}
    return sorted(names, key=lambda n: (parts[n][0], bool(parts[n][1]), parts[n][1] != "all"))


def part_of(name: str, names: Iterable[str]) -> tuple[str, str]:
    """(reward, part or "") of a measure. The reward must also be in `names`: a user's own may contain dots."""
    reward = min((n for n in names if name.startswith(f"{n}.")), key=len, default=name)
    return reward, name[len(reward) + 1 :]


def curves(run: Run, shown: Callable[[str], str] | None = None) -> tuple[list[Chart], list[Chart], list[Chart]]:
    """All charts of a run: (four that show whether it works, further results, health). shown: `namer` of the page."""
    shown = shown or namer([run])
    watched = "dev" if "dev" in run.evals else next(iter(run.evals), "")  # the set evaluated during training
    wins, measured = [_wins(run, watched, shown)], _measures(run.evals[watched], watched, shown) if run.evals else []
    rewards, doubts = _rewards(run.train, shown), _judge_consistency(run.train)
    policy, judge, time = _policy(run), _judge(run.train), _time(run.train)
    key = [next((c for c in some if c.has_data), None) for some in (wins, measured, rewards, doubts)]
    key += [c for c in [*measured, *rewards, *policy[2:3]] if c.has_data and not any(c is k for k in key)]
    first = [c for c in key if c is not None][:4]

    def rest(charts: list[Chart]) -> list[Chart]:
        return [c for c in charts if c.has_data and not any(c is k for k in first)]

    return first, rest(measured + rewards), rest(policy + doubts + judge + time)


def other_curves(run: Run) -> list[Chart]:
    """A small chart for every training metric that `curves` does not show."""
    names = [n for n in run.train.columns if not n.startswith(SHOWN) and n not in NOT_LISTED and not _is_phase(n)]
    return [Chart(readable(n), _series(run.train, [("", n)])) for n in names]


def _series(rows: Rows, lines: list[tuple[str, str]], prefix: str = "", colour: int = 0) -> list[Series]:
    """Lines for (label, metric) pairs, in the colours `colour`, `colour` + 1, …."""
    return [Series(label, rows.steps, rows[prefix + name], k) for k, (label, name) in enumerate(lines, colour)]


def _is_phase(name: str) -> bool:
    return name.startswith("time/") and name.count("/") == 1


def _wins(run: Run, watched: str, shown: Callable[[str], str]) -> Chart:
    series = []
    for name, rows in run.evals.items():
        for k, win in enumerate(win_names(rows)):
            kept = rows.steps >= 0 if name == watched else rows.steps > 0  # at step 0 every win rate is ½
            label = f"by {shown(win[4:])}" + ("" if name == watched else f", {name}")
            y, low, high = (rows[win + end][kept] for end in ("", "_low", "_high"))
            series.append(Series(label, rows.steps[kept], y, k, low, high, marks=name != watched))
    note = "Held-out prompts, against the initial model's images from the same noise; bands and bars: 95 % intervals."
    note += f" Lines: the set {watched}." if len(run.evals) > 1 else ""
    lines = ((0.5, "equal"),)
    return Chart("Win rate against the initial model", series, note=note, percent=True, include=(0.5, 1.0), lines=lines)


def _measures(rows: Rows, watched: str, shown: Callable[[str], str]) -> list[Chart]:
    """One chart per evaluation reward, with its parts as lines."""
    charts: dict[str, list[tuple[str, str]]] = {}
    for name in (names := measure_names(rows)):
        reward, part = part_of(name, names)
        charts.setdefault(reward, []).append((readable(part) or "overall", name))
    note = f"Mean over the images of the held-out set {watched}."
    return [Chart(f"Measured: {shown(reward)}", _series(rows, lines), note=note) for reward, lines in charts.items()]


def _rewards(train: Rows, shown: Callable[[str], str]) -> list[Chart]:
    names = [n for n in train.columns if REWARD.fullmatch(n)]
    charts = []
    for k, name in enumerate(names):
        mean, std = train[name], train[f"{name}_std"]
        if np.nanmax(np.abs(mean - 0.5)) >= 1e-6:  # else a win rate within the group, whose mean is ½ by construction
            series = Series("mean", train.steps, mean, k, mean - std, mean + std)
            note = "Training prompts; band: ± standard deviation within a group."
            charts.append(Chart(f"Reward: {shown(name[7:])}", [series], note=note))
    spread = _series(train, [(shown(name[7:]), f"{name}_std") for name in names])
    note = "Spread of rewards within a group; 0 means no learning signal. The mean win rate of a group is always ½."
    return [*charts, Chart("Reward: std within a group", spread, note=note, include=(0.0,))]


def _judge_consistency(train: Rows) -> list[Chart]:
    doubts = [("other winner when swapped", "order_inconsistency"), ("first shown wins", "position_bias")]
    doubt, lines = _series(train, [*doubts, ("ties", "tie_rate")], "judge/"), ((0.5, "no bias"),)
    return [Chart("Judge: consistency", doubt, percent=True, include=(0.0,), lines=lines)]


def _policy(run: Run) -> list[Chart]:
    train, clip = run.train, run.clip_range
    mean, low, high = (train[f"policy/ratio_{end}"] - 1.0 for end in ("mean", "min", "max"))
    ratio = [Series("mean", train.steps, mean, 0, low, high)]
    lines = ((0.0, ""), (-clip[0], ""), (clip[1], "clip range")) if clip else ()
    clipped = [("all", "clip_fraction"), ("above", "clip_fraction_high"), ("below", "clip_fraction_low")]
    kl = _series(train, [("to the rollout's policy", "approx_kl"), ("to the initial policy", "kl")], "policy/")
    kl = [s for s in kl if np.nanmax(np.abs(s.y), initial=0) > 0]
    note = "Share of samples outside the clip range."
    unused = "All advantages of the group are zero; it is not trained on."
    lost = _series(train, [("groups without signal", "advantage/zero_groups")], colour=1)
    return [
        Chart("Policy ratio − 1", ratio, note="Band: from the smallest to the largest value of the step.", lines=lines),
        Chart("Clipped", _series(train, clipped, "policy/"), percent=True, include=(0.0,), note=note),
        Chart("KL divergence", kl, log=True),
        Chart("Groups without signal", lost, percent=True, include=(0.0,), note=unused),
        Chart("Gradient norm", _series(train, [("before clipping", "grad_norm")]), log=True, include=(0.0,)),
    ]


def _judge(train: Rows) -> list[Chart]:
    delays = _series(train, [("median", "latency_p50"), ("95 % of requests", "latency_p95")], "time/judge/")
    retries = train["time/judge/retries"] / np.maximum(train["judge/requests"], 1.0)
    lost = _series(train, [("comparisons missing", "judge/missing"), ("rewards missing", "reward/missing")])
    lost.append(Series("retries", train.steps, retries, 2))
    note = "Shares of comparisons and samples; retries per request."
    return [
        Chart("Judge: latency", delays, unit="s", log=True, include=(0.0,)),
        Chart("Judge: failures", lost, percent=True, include=(0.0,), note=note),
    ]


def _time(train: Rows) -> list[Chart]:
    phases = [n[5:] for n in train.columns if _is_phase(n)]
    phases.sort(key=lambda n: PHASES.index(n) if n in PHASES else len(PHASES))
    overlap = [("judging", "judge/busy_s"), ("trainer waits for rewards", "judge_wait")]
    overlap = overlap if "time/judge/busy_s" in train else []
    note = "Judging lasts from the first request to the last answer; time without waiting overlaps with training."
    return [
        Chart("Time per step", _series(train, [(readable(n), n) for n in phases], "time/"), unit="s", stacked=True),
        Chart("Judge overlap", _series(train, overlap, "time/"), unit="s", include=(0.0,), note=note),
    ]
