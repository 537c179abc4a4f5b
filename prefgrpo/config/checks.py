"""Checks across the fields of a configuration; the types in schema.py check each field by itself."""

from __future__ import annotations

import math

from prefgrpo.config.schema import IN_FP32, SPLITTING, Config, splits


def check(c: Config) -> list[str]:
    """Invalid combinations of values, as 'field: what was expected, what was given'."""
    r, t, p = c.rollout, c.train, c.parallel
    high = r.window_high or r.steps - 1
    rules = [
        (c.model, "model: expected the folder or hub id of a diffusers pipeline, got nothing"),
        (c.data.prompts, "data.prompts: expected a file of prompts (txt, csv, tsv, jsonl or parquet), got nothing"),
        (c.name not in ("", ".", "..") and "/" not in c.name, f"name: expected a folder name, got {c.name!r}"),
        (r.eta or r.rule == "wan", f"rollout.eta: expected a noise level above 0 to train with, got {r.eta}"),
        (r.eta <= 1 or not r.rule.startswith("cps"), f"rollout.eta: rule {r.rule} takes 0 … 1, got {r.eta}"),
        (
            r.window_low < high <= r.steps,
            f"rollout.window_low/high: expected 0 <= low < high <= steps ({r.steps}), got {r.window_low} and {high}",
        ),
        (
            r.window_size <= max(high - r.window_low, 0),
            f"rollout.window_size: expected 0 … {max(high - r.window_low, 0)}, got {r.window_size}",
        ),
        (
            t.update_slices == "prompts" or t.updates_per_rollout <= r.group_size,
            f"train.updates_per_rollout: expected at most group_size = {r.group_size} with train.update_slices: "
            f"members, got {t.updates_per_rollout}",
        ),
        (
            not r.staleness or c.checkpoint.every > 1,
            "checkpoint.every: expected 2 or more, because rollout.staleness: 1 generates no samples ahead across a "
            f"checkpoint, got {c.checkpoint.every}",
        ),
        (
            r.shift is None or r.sigmas == "published",
            f"rollout.shift: with rollout.sigmas: pipeline the model folder's scheduler sets the shift; expected none, "
            f"got {r.shift}; set rollout.sigmas: published to train on sigmas of this shift",
        ),
        (
            r.shift is not None or r.sigmas == "pipeline",
            "rollout.shift: expected a value for rollout.sigmas: published (Pref-GRPO's scripts: 3), got none",
        ),
        (
            c.judge.backend == "http" or c.judge.model,
            "judge.model: the local judge needs a folder or hub id",
        ),
        (c.judge.backend == "local" or c.judge.endpoints, "judge.endpoints: expected at least one URL, got none"),
        (
            (c.judge.timeout_s or 0) <= (c.judge.deadline_s or math.inf),
            f"judge.deadline_s: expected at least judge.timeout_s ({c.judge.timeout_s}), got {c.judge.deadline_s}",
        ),
        (
            t.kl_form == "gaussian" or not r.rule.startswith("cps"),
            f"train.kl_form: {t.kl_form} divides by a variance per unit of σ, which rule {r.rule} does not have; "
            "expected gaussian",
        ),
        (splits(c) or not p.offload, "parallel.offload: expected parallel.shard above 1, got 1"),
        (
            c.dtype == "bf16" or c.attention in IN_FP32,
            f"attention: {c.attention} computes in bf16; expected dtype bf16, got {c.dtype}",
        ),
        (
            p.ring * p.ulysses == 1 or c.attention in SPLITTING,
            f"attention: expected one of {', '.join(SPLITTING)} under context parallelism, got {c.attention}",
        ),
        (
            p.ring == 1 or c.attention != "native",
            f"attention: ring attention needs log-sum-exps; expected one of {', '.join(SPLITTING[1:])} (on GPUs), got "
            "native",
        ),
        (not c.compile or p.ring * p.ulysses == 1, "compile: expected false under context parallelism, got true"),
    ]
    return [text for ok, text in rules if not ok]
