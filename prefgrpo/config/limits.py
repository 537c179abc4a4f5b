"""Which values a configuration may hold, each mistake as 'field: what was expected, what came'.

The configuration's classes are config.py's; this knows their fields by name only. Invariant: `check` judges every
value and returns all mistakes, so that a recipe is mended in one go.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from prefgrpo.config.recipe import flatten
from prefgrpo.sde.rules import RULES


def check(c: Any) -> list[str]:
    """Every value that cannot work, as 'field: what was expected, what came'."""
    r, t, e = c.rollout, c.train, c.eval
    high = r.window_high or r.steps - 1
    rules: list[tuple[bool, str]] = [
        (bool(c.model), "model: expected the folder or hub id of a diffusers pipeline, got nothing"),
        (bool(c.data.prompts), "data.prompts: expected a text file with one prompt per line, got nothing"),
        (c.device in ("auto", "cpu", "cuda"), f"device: expected auto, cpu or cuda, got {c.device!r}"),
        (0 <= c.seed < 2**63, f"seed: expected 0 … 2^63 − 1, got {c.seed}"),
        (c.name not in ("", ".", "..") and "/" not in c.name, f"name: expected a folder name, got {c.name!r}"),
        (r.group_size >= 2, f"rollout.group_size: a group needs at least 2 images to compare, got {r.group_size}"),
        (r.rule in RULES, f"rollout.rule: expected one of {', '.join(RULES)}, got {r.rule!r}"),
        (r.rule != "ode", "rollout.rule: 'ode' has no log-prob to train on; expected a stochastic rule such as flow"),
        (r.eta > 0 or r.rule == "wan", f"rollout.eta: expected a noise level above 0 to train with, got {r.eta}"),
        (r.eta <= 1 or not r.rule.startswith("cps"), f"rollout.eta: rule {r.rule} takes 0 … 1, got {r.eta}"),
        (
            0 <= r.window_low < high <= r.steps,
            f"rollout.window_low/high: expected 0 <= low < high <= steps ({r.steps}), got {r.window_low} and {high}",
        ),
        (
            0 <= r.window_size <= max(high - r.window_low, 0),
            f"rollout.window_size: expected 0 … {high - r.window_low}, got {r.window_size}",
        ),
        (
            c.judge.backend == "http" or bool(c.judge.model),
            "judge.model: the local judge needs a checkpoint folder or hub id",
        ),
        (c.judge.backend == "local" or bool(c.judge.endpoints), "judge.endpoints: expected at least one URL, got none"),
        (
            (c.judge.timeout_s or 0) <= (c.judge.deadline_s or math.inf),
            f"judge.deadline_s: expected at least judge.timeout_s ({c.judge.timeout_s}), got {c.judge.deadline_s}",
        ),
        (0 <= c.judge.max_missing < 1, f"judge.max_missing: expected a share in [0, 1), got {c.judge.max_missing}"),
        (0 <= e.holdout < 1, f"eval.holdout: expected a share in [0, 1), got {e.holdout}"),
        (0 <= t.ema_decay < 1, f"train.ema_decay: expected [0, 1), got {t.ema_decay}"),
        (0 <= t.beta1 < 1, f"train.beta1: expected [0, 1), got {t.beta1}"),
        (0 <= t.beta2 < 1, f"train.beta2: expected [0, 1), got {t.beta2}"),
        (r.frames is None or r.frames > 0, f"rollout.frames: expected a number above 0 or none, got {r.frames}"),
        (
            r.source_area is None or r.source_area > 0,
            f"rollout.source_area: expected a number above 0 or none, got {r.source_area}",
        ),
        (
            r.shift is None or r.sigmas == "published",
            f"rollout.shift: with rollout.sigmas: pipeline the model folder's scheduler sets the shift; expected none, "
            f"got {r.shift}; set rollout.sigmas: published to train on sigmas of this shift",
        ),
        (
            r.sigmas == "pipeline" or (r.shift is not None and r.shift > 0),
            f"rollout.shift: expected a value above 0 for rollout.sigmas: published (Pref-GRPO's scripts: 3), "
            f"got {'none' if r.shift is None else r.shift}",
        ),
        (0 < t.checkpointing_share <= 1, f"train.checkpointing_share: expected (0, 1], got {t.checkpointing_share}"),
        *(
            (value is None or value > 0, f"eval.{key}: expected a number above 0 or none, got {value}")
            for key, value in (("height", e.height), ("width", e.width), ("frames", e.frames), ("steps", e.steps))
        ),
        (
            t.kl_coef == 0 or t.lora_rank > 0,
            "train.kl_coef: the reference is the LoRA switched off; expected lora_rank > 0",
        ),
        (
            t.kl_form == "gaussian" or not r.rule.startswith(("cps", "ddim")),
            f"train.kl_form: {t.kl_form} divides by a variance per unit of σ, which rule {r.rule} does not have; "
            "expected gaussian",
        ),
        (
            t.clip_range_high is None or t.clip_range_high > 0,
            f"train.clip_range_high: expected > 0, got {t.clip_range_high}",
        ),
    ]
    infinite = {k: v for k, v in flatten(asdict(c)).items() if isinstance(v, float) and not math.isfinite(v)}
    mistakes = [text for ok, text in rules if not ok]
    mistakes += [
        f"{name}: expected a value above 0, got {value}" for name, value in _positive(c).items() if not value > 0
    ]
    mistakes += [f"{name}: expected 0 or more, got {value}" for name, value in _natural(c).items() if not value >= 0]
    mistakes = [m for m in mistakes if m.split(":")[0] not in infinite]
    return mistakes + [f"{name}: expected a finite number, got {value}" for name, value in infinite.items()]


def _positive(c: Any) -> dict[str, float]:
    """Numbers that must be above 0."""
    r, t = c.rollout, c.train
    limits = {"judge.timeout_s": c.judge.timeout_s, "judge.deadline_s": c.judge.deadline_s}
    return {name: limit for name, limit in limits.items() if limit is not None} | {
        "gpus": c.gpus,
        "data.max_length": c.data.max_length,
        "rollout.steps": r.steps,
        "rollout.height": r.height,
        "rollout.width": r.width,
        "rollout.prompts_per_step": r.prompts_per_step,
        "rollout.batch_size": r.batch_size,
        "train.lr": t.lr,
        "train.clip_range": t.clip_range,
        "train.adv_clip_max": t.adv_clip_max,
        "train.max_grad_norm": t.max_grad_norm,
        "train.updates_per_rollout": t.updates_per_rollout,
        "train.lora_alpha": t.lora_alpha,
        "judge.concurrency": c.judge.concurrency,
        "eval.samples_per_prompt": c.eval.samples_per_prompt,
        "checkpoint.every": c.checkpoint.every,
        "checkpoint.keep": c.checkpoint.keep,
    }


def _natural(c: Any) -> dict[str, float]:
    """Numbers that must be 0 or more."""
    t = c.train
    return {
        "train.steps": t.steps,
        "train.max_minutes": t.max_minutes,
        "train.lora_rank": t.lora_rank,
        "train.replay_batch": t.replay_batch,
        "train.kl_coef": t.kl_coef,
        "train.warmup_steps": t.warmup_steps,
        "train.weight_decay": t.weight_decay,
        "judge.hedge_s": c.judge.hedge_s,
        "judge.max_pixels": c.judge.max_pixels,
        "judge.patience_steps": c.judge.patience_steps,
        "eval.every": c.eval.every,
        "eval.max_prompts": c.eval.max_prompts,
        "eval.show": c.eval.show,
        "memory.decode_batch": c.memory.decode_batch,
        "reward.eps": c.reward.eps,
    }
