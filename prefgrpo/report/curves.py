"""Names of a run's metrics on the page, and its few curves; TensorBoard and wandb show all metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from markupsafe import Markup

from prefgrpo.report.run import Rows, Run, reward_weights
from prefgrpo.report.svg import Series, draw
from prefgrpo.run.metrics import PARTS_OF_WINS, REWARD


def readable(name: str) -> str:
    """Display name of a metric: 'scenes.all' → 'scenes · all', 'my/rewards.py:right_colour' → 'right colour'."""
    return name.rpartition(":")[2].replace(".", " · ").replace("_", " ").replace("/", " · ")


def namer(run: Run) -> Callable[[str], str]:
    """`readable`, except for names that it would make equal in this run: those are shown in full."""
    names = {*reward_weights(run.config), *run.train.columns}
    for rows in run.evals.values():
        names.update(rows.columns)
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


def curves(run: Run) -> list[Markup]:
    """At most six charts; one without values is left out."""
    train = run.train
    shown = namer(run)
    rows = [r for r in (train, *run.evals.values()) if len(r.steps)]
    steps = (min((r.steps[0] for r in rows), default=0.0), max((r.steps[-1] for r in rows), default=0.0))
    watched = "dev" if "dev" in run.evals else next(iter(run.evals), "")  # the set evaluated during training
    charts = []
    if watched:
        held = run.evals[watched]
        wins = []
        for name in win_names(held):
            y, low, high = (100 * held[name + end] for end in ("", "_low", "_high"))
            wins.append(Series(f"by {shown(name[4:])}", held.steps, y, low, high))
        note = f"Held-out prompts ({watched}), against the initial model from the same noise; bands: 95 % intervals."
        charts.append(draw("Win rate against the initial model", wins, steps, "\u00a0%", note))
    rewards = {n: shown(n.removeprefix("reward/")) for n in train.columns if REWARD.fullmatch(n)}
    means = []
    for name, label in rewards.items():
        mean, std = train[name], train[f"{name}_std"]
        if np.nanmax(np.abs(mean - 0.5)) >= 1e-6:  # else a win rate within the group, whose mean is ½ by construction
            means.append(Series(label, train.steps, mean, mean - std, mean + std))
    note = "Training prompts; bands: ± standard deviation within a group."
    charts.append(draw("Reward", means, steps, note=note, include=()))
    spread = _series(train, {f"{name}_std": label for name, label in rewards.items()})
    charts.append(draw("Reward: std within a group", spread, steps, note="0 means no learning signal."))
    kl = _series(train, {"policy/approx_kl": "to the rollout's policy", "policy/kl": "to the initial policy"})
    charts.append(draw("KL divergence", [s for s in kl if np.nan_to_num(s.y).any()], steps))
    doubts = {
        "judge/order_inconsistency": "other winner when swapped",
        "judge/missing": "no verdict",
        "judge/tie_rate": "ties",
    }
    charts.append(
        draw("Judge", _series(train, doubts, 100.0), steps, "\u00a0%", "Shares of the comparisons of a step.")
    )
    times = {n: readable(n.removeprefix("time/")) for n in train.columns if re.fullmatch(r"time/\w+", n)}
    charts.append(draw("Time per step", _series(train, times), steps, "\u00a0s"))
    return [chart for chart in charts if chart]


def _series(train: Rows, names: dict[str, str], factor: float = 1.0) -> list[Series]:
    return [Series(label, train.steps, factor * train[name]) for name, label in names.items()]
