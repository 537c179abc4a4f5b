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

from prefgrpo.judge.plans import get_plan
from prefgrpo.judge.rate import Rating, rate_groups

SIZE, REPEATS = 8, 400
PLANS = ("both_orders", "round_robin", "k_regular(4)", "k_regular(2)")


def simulate(spread: float, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(qualities q ~ N(0, spread²) [N, G]; P(i better, i shown first) = σ(q_i − q_j + noise · ε_ij) [N, G, G])."""
    rng = np.random.default_rng(seed)
    quality = spread * rng.standard_normal((REPEATS, SIZE))
    logit = quality[:, :, None] - quality[:, None, :]
    logit += noise * rng.standard_normal(logit.shape)
    return quality, 1.0 / (1.0 + np.exp(-logit))


def coefficients(plan: str, verdicts: np.ndarray) -> dict[str, np.ndarray]:
    """Objective → its c [N, G], all from the same verdicts."""
    pairs = get_plan(plan)
    judged = []
    for k, group in enumerate(verdicts):
        judged.append([(i, j, float(group[i, j])) for i, j in pairs(SIZE, k)])
    rated = rate_groups(SIZE, judged, Rating("win_rate", "soft"))
    wins, counts = rated.wins, rated.counts
    rate = np.where(np.isnan(rated.values), 0.5, rated.values)
    centred = rate - rate.mean(1, keepdims=True)
    residual = np.where(counts > 0, wins / np.maximum(counts, 1e-9) - 0.5, 0.0)
    return {
        "GRPO": centred / (rate.std(1, keepdims=True) + 1e-4),
        "GRPO, no std": centred,
        "soft DPO, h = 0": residual.sum(2),
    }


def signal(c: np.ndarray, quality: np.ndarray) -> float:
    """Correlation of coefficients [N, G] with the true ones."""
    difference = quality[:, :, None] - quality[:, None, :]
    true = (1.0 / (1.0 + np.exp(-difference)) - 0.5).sum(2) / (SIZE - 1)
    return float((c * true).sum() / np.sqrt((c**2).sum() * (true**2).sum()))


def main() -> None:
    """Print the table of docs/objectives.md."""
    cases = {"all groups alike (spread 2)": (2.0,), "half hard to tell apart (spreads 2, 0.2)": (2.0, 0.2)}
    print("| groups | judge noise | plan | GRPO | GRPO, no std | soft DPO |\n|---|---:|---|---:|---:|---:|")
    for name, spreads in cases.items():
        for noise in (1.0, 3.0):
            parts = [simulate(spread, noise, k) for k, spread in enumerate(spreads)]
            quality, verdicts = (np.concatenate(part) for part in zip(*parts, strict=True))
            for plan in PLANS:
                values = [signal(c, quality) ** 2 for c in coefficients(plan, verdicts).values()]
                print(f"| {name} | {noise:g} | {plan} | " + " | ".join(f"{v:.2f}" for v in values) + " |")


if __name__ == "__main__":
    main()
