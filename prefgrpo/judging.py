"""From the configuration to the scorers of a run: one judge, shared by training and evaluation.

Invariant: a judge is opened once per process, only if something asks it, and checked before the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefgrpo.config import Config, ConfigError, Judge
from prefgrpo.judge.verdict import PairJudge
from prefgrpo.parallel import World
from prefgrpo.rewards import RewardSpecError, build, parse_reward_spec
from prefgrpo.rewards.pairwise import open_judge as open_backend
from prefgrpo.rewards.scorer import Scorer

PAIRWISE = "vlm_pairwise"


def specs(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """(training, measuring) reward weights. Raises ConfigError for a spec that does not parse."""
    mistakes, parsed = [], []
    for name, spec in (("reward.spec", config.reward.spec), ("eval.spec", config.eval.spec)):
        try:
            parsed.append(parse_reward_spec(spec) if spec or name == "reward.spec" else {})
        except RewardSpecError as error:
            mistakes.append(f"{name}: {error}")
    if mistakes:
        raise ConfigError(mistakes)
    if PAIRWISE in parsed[1]:
        raise ConfigError([f"eval.spec: {PAIRWISE} is what eval.judge does; name only measuring rewards here"])
    return parsed[0], parsed[1]


def open_judge(config: Config, world: World) -> PairJudge | None:
    """The judge, if training or evaluation asks one. Raises JudgeError if it cannot work."""
    training, _ = specs(config)
    if PAIRWISE not in training and not (config.eval.judge and config.eval.every and config.eval.prompts):
        return None
    return open_backend(_options(config.judge, world))


def _options(judge: Judge, world: World) -> dict[str, Any]:
    """The chosen backend's own options."""
    if judge.backend == "local":
        return {"backend": "local", "model": judge.model, "template": judge.template, "device": str(world.device)}
    return {
        "backend": "http",
        "endpoints": judge.endpoints,
        "model": judge.model,
        "tokenizer": judge.tokenizer,
        "template": judge.template,
        "concurrency": judge.concurrency,
        "timeout_s": judge.timeout_s,
        "image_format": judge.image_format,
    }


def training_scorer(config: Config, judge: PairJudge | None, folder: Path | None) -> tuple[Scorer, dict[str, float]]:
    """(scorer of training groups, weights). `folder`: where judgements.jsonl goes, None to write none."""
    weights, _ = specs(config)
    options = {PAIRWISE: {"judge": judge, "plan": config.judge.plan, "verdict": config.judge.verdict}}
    rewards = build(config.reward.spec, {k: v for k, v in options.items() if k in weights})
    log = folder / "judgements.jsonl" if folder and PAIRWISE in weights else None
    return Scorer(rewards, config.rollout.group_size, config.judge.deadline_s, config.seed, log), weights


def evaluation_scorers(config: Config, judge: PairJudge | None) -> dict[str, Scorer]:
    """Scorers of (now, before) pairs: 'judge' asks in both orders, 'measure' holds the rewards of eval.spec."""
    _, measured = specs(config)
    scorers = {}
    if config.eval.judge and judge is not None:
        reward = build(PAIRWISE, {PAIRWISE: {"judge": judge, "plan": "both_orders", "verdict": "hard"}})
        scorers["judge"] = Scorer(reward, 2, config.judge.deadline_s, config.seed)
    if measured:
        scorers["measure"] = Scorer(build(config.eval.spec), 2, config.judge.deadline_s, config.seed)
    return scorers
