"""Share of signal in a step's gradient: GRPO on win rates compared with soft DPO on the win matrix, simulated judges.

A group's update is Σ_i c_i g_i with the members' score vectors g_i. For independent g_i of equal size, the share of
signal is the correlation, over all members of all groups, of c_i with the judge's true value: the mean of
σ(q_i − q_j) − ½ over the others. Its square is the share of the step's variance that is signal, so a ratio of squares
is a ratio of sample sizes. Run: `python -m benchmarks.preference_gradient` (numpy only, takes seconds).

    GRPO: c_i = (w_i − mean) / (std + 1e-4)    no std: c_i = w_i − mean
    soft DPO, first update (h = 0): c_i = Σ_j (W_ij − ½)
"""

from __future__ import annotations

import numpy as np

from prefgrpo.judge.rate import Rating, rate_groups
from prefgrpo.judge.simulate import Groups, JudgeModel, run_plan, simulate_groups

SIZE, REPEATS = 8, 400
PLANS = ("both_orders", "round_robin", "k_regular(4)", "k_regular(2)", "tournament")


def coefficients(plan: str, groups: Groups, seed: int = 0) -> dict[str, np.ndarray]:
    """Objective → its c [N, G], all from the same verdicts."""
    rated = rate_groups(groups.size, run_plan(plan, groups, seed)[0], Rating("win_rate", "soft"))
    wins, counts = rated.wins, rated.counts
    rate = np.where(np.isnan(rated.values), 0.5, rated.values)
    centred = rate - rate.mean(1, keepdims=True)
    residual = np.where(counts > 0, wins / np.maximum(counts, 1e-9) - 0.5, 0.0)
    return {
        "GRPO": centred / (rate.std(1, keepdims=True) + 1e-4),
        "GRPO, no std": centred,
        "soft DPO, h = 0": residual.sum(2),
    }


def signal(c: np.ndarray, groups: Groups) -> float:
    """Correlation of coefficients [N, G] with the true ones."""
    assert groups.truth is not None
    difference = groups.truth[:, :, None] - groups.truth[:, None, :]
    true = (1.0 / (1.0 + np.exp(-difference)) - 0.5).sum(2) / (groups.size - 1)
    return float((c * true).sum() / np.sqrt((c**2).sum() * (true**2).sum()))


def judged(spreads: tuple[float, ...], noise: float) -> Groups:
    """Simulated groups, the same number for each spread of qualities."""
    parts = [simulate_groups(JudgeModel(noise, spread), SIZE, REPEATS, k) for k, spread in enumerate(spreads)]
    truth = np.concatenate([part.truth for part in parts if part.truth is not None])
    return Groups(np.concatenate([part.verdicts for part in parts]), truth)


def main() -> None:
    """Print the table of docs/objectives.md."""
    cases = {"all groups alike (spread 2)": (2.0,), "half hard to tell apart (spreads 2, 0.2)": (2.0, 0.2)}
    print("| groups | judge noise | plan | GRPO | GRPO, no std | soft DPO |\n|---|---:|---|---:|---:|---:|")
    for name, spreads in cases.items():
        for noise in (1.0, 3.0):
            for plan in PLANS:
                groups = judged(spreads, noise)
                values = [signal(c, groups) ** 2 for c in coefficients(plan, groups).values()]
                print(f"| {name} | {noise:g} | {plan} | " + " | ".join(f"{v:.2f}" for v in values) + " |")


if __name__ == "__main__":
    main()
