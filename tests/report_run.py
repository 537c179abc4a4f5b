"""A synthetic run folder for the report's tests: the files a real run writes, with invented numbers."""

import json
from pathlib import Path

import numpy as np
import torch
import yaml

from prefgrpo.tiny.scenes import COMBOS, SPLITS, caption, render

MEASURES = ("scenes", "scenes.all", "scenes.colour", "scenes.shape", "scenes.place")


def scenes(combos, seed):
    """uint8 [n, 32, 32, 3] true scenes."""
    images = render(combos, torch.Generator().manual_seed(seed))
    return (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()


def train_row(step, total, rng):
    """One training row with every metric that a run against a judge logs."""
    done = step / total
    jump = float(np.exp(rng.normal(0, 0.3)))
    high, low = 0.12 + 0.1 * done + 0.02 * rng.random(), 0.14 + 0.08 * done + 0.02 * rng.random()
    busy = 0.30 + 0.05 * rng.random()
    return {
        "kind": "train", "step": step,
        "reward/vlm_pairwise": 0.5, "reward/vlm_pairwise_std": 0.3 - 0.1 * done + 0.02 * rng.normal(),
        "reward/vlm_pairwise/missing_rate": 0.0, "reward/missing": 0.0 if step % 40 else 0.02,
        "advantage/zero_groups": 0.03 * (rng.random() < done), "advantage/max": 2.4 * jump,
        "loss": 1e-6 * rng.normal(), "policy/approx_kl": 1e-10 * jump * (1 + 5 * done),
        "policy/clip_fraction": high + low, "policy/clip_fraction_high": high, "policy/clip_fraction_low": low,
        "policy/ratio_min": 1 - 9e-5 * jump, "policy/ratio_mean": 1 + 1e-6 * rng.normal(),
        "policy/ratio_max": 1 + 8e-5 * jump,
        "policy/kl": 0.0, "policy/on_policy_error": 0.0, "grad_norm": 4e-3 * jump, "samples_trained": 96.0,
        "judge/requests": 672.0, "time/judge/retries": float(rng.random() < 0.05), "judge/failures": 0.0,
        "judge/missing": 0.0,
        "time/judge/latency_p50": 0.11 + 0.01 * rng.random(), "time/judge/latency_p95": 0.2 + 0.05 * jump,
        "time/judge/queue_max": 672.0,
        "judge/tie_rate": 0.0, "judge/order_inconsistency": 0.04 + 0.18 * done + 0.02 * rng.random(),
        "judge/position_bias": 0.5 + 0.02 * rng.normal(), "time/judge/busy_s": busy, "time/judge/wait_s": busy * 0.4,
        "time/rollout": 0.43 + 0.03 * jump, "time/judge_wait": busy * 0.4, "time/update": 0.4 + 0.02 * jump,
    }  # fmt: skip


def eval_row(step, total, name):
    """One evaluation row: win rates with intervals, measures before and now."""
    gain, margin = 1 - np.exp(-4 * step / total), 0.06 * (step > 0)
    row = {"win_judge_first": 0.51 + 0.42 * gain, "win_judge_second": 0.49 + 0.42 * gain}
    for win, rate in (("win_judge", 0.5 + 0.42 * gain), ("win_scenes", 0.5 + 0.24 * gain)):
        row |= {win: rate, f"{win}_low": rate - margin, f"{win}_high": rate + margin}
    for k, measure in enumerate(MEASURES):
        row |= {f"{measure}_before": 0.4 + 0.08 * k, measure: 0.4 + 0.08 * k + (0.6 - 0.08 * k) * 0.8 * gain}
    return {"kind": "eval", "step": step, "set": name} | {f"{name}/{key}": value for key, value in row.items()}


def shown(folder, name, step, total, count=12):
    """Images and prompts of one evaluation; the start shows wrong scenes, the end mostly right ones."""
    chosen = (SPLITS["dev"] if name == "dev" else SPLITS["test"])[:: 24 // count][:count]
    wrong = [COMBOS[(COMBOS.index(c) + 47 * (k % 3)) % len(COMBOS)] for k, c in enumerate(chosen)]
    right = [c if (7 * k) % count < 1.2 * count * step / total else w for k, (c, w) in enumerate(zip(chosen, wrong))]
    (folder / "eval").mkdir(exist_ok=True)
    before, now = scenes(wrong, 1), scenes(right, 1)
    np.savez_compressed(folder / "eval" / f"{name}_{step:06d}.npz", before=before, now=now)
    prompts = [caption(c, k % 3) for k, c in enumerate(chosen)]
    (folder / "eval" / f"{name}_prompts.json").write_text(json.dumps(prompts))


def groups(folder, step, k=2, size=8, missing=True):
    """`k` judged groups of `size` scenes, with verdicts that follow a hidden quality, some of them missing."""
    rng = np.random.default_rng(step)
    (folder / "groups").mkdir(exist_ok=True)
    combos = [SPLITS["train"][int(i)] for i in rng.integers(0, 72, k)]
    images = np.stack([scenes([COMBOS[int(i)] for i in rng.integers(0, 120, size)], step + n) for n in range(k)])
    quality = rng.normal(0, 1.5, (k, size))
    p = 1 / (1 + np.exp(quality[:, None, :] - quality[:, :, None]))
    counts = 2.0 * (1 - np.eye(size))[None].repeat(k, 0)
    if missing:
        counts[0, 1, 2] = counts[0, 2, 1] = 0
    wins = p * counts
    rates = wins.sum(2) / counts.sum(2)
    prompts = np.array([caption(c) for c in combos])
    data = {"images": images, "wins": wins, "counts": counts, "rates": rates, "prompts": prompts}
    np.savez_compressed(folder / "groups" / f"step_{step:06d}.npz", **data)


def make_run(folder, steps=320, every=40, planned=None):
    """A whole run of `steps` steps with dev and test evaluations and groups."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    config = {
        "name": "demo", "model": "tiny/flux",
        "train": {"steps": planned or steps, "max_minutes": 0.0, "clip_range": 1e-5, "clip_range_high": None},
        "eval": {"every": every}, "reward": {"spec": "vlm_pairwise"},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = [eval_row(0, steps, "dev"), eval_row(0, steps, "test")]
    for step in range(1, steps + 1):
        rows.append(train_row(step, steps, rng))
        if step % every == 0:
            rows.append(eval_row(step, steps, "dev"))
            shown(folder, "dev", step, steps)
            groups(folder, step)
    if steps == (planned or steps):
        rows.append(eval_row(steps, steps, "test"))
        shown(folder, "test", steps, steps)
    write_rows(folder, rows)
    return folder


def write_rows(folder, rows):
    """metrics.jsonl of the given rows."""
    (Path(folder) / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
