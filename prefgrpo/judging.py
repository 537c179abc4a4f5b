"""From the configuration to the scorers of a run: one judge, shared by training and evaluation.

Invariant: a judge is opened once per process, only if something asks it, and checked before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prefgrpo.config import Config, ConfigError, Judge
from prefgrpo.judge.plans import get_plan
from prefgrpo.judge.verdict import JudgeError, PairJudge
from prefgrpo.media import Media
from prefgrpo.models import family
from prefgrpo.parallel import World
from prefgrpo.rewards import Reward, RewardSpecError, build, parse_reward_spec
from prefgrpo.rewards.scorer import Scorer

if TYPE_CHECKING:
    from prefgrpo.judge.http import HttpJudgeConfig

PAIRWISE = "vlm_pairwise"
CALIBRATION_PAIRS = 8
"""Random pairs judged in both orders at the start, to see the judge's position bias."""


def specs(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """(training, measuring) reward weights. Raises ConfigError for a spec or a pair plan that does not parse."""
    mistakes, parsed = [], []
    for name, spec in (("reward.spec", config.reward.spec), ("eval.spec", config.eval.spec)):
        try:
            parsed.append(parse_reward_spec(spec) if spec or name == "reward.spec" else {})
        except RewardSpecError as error:
            mistakes.append(f"{name}: {error}")
    try:
        get_plan(config.judge.plan)
    except ValueError as error:
        mistakes.append(f"judge.plan: {error}")
    if mistakes:
        raise ConfigError(mistakes)
    if PAIRWISE in parsed[1]:
        raise ConfigError([f"eval.spec: {PAIRWISE} is what eval.judge does; name only measuring rewards here"])
    return parsed[0], parsed[1]


def open_judge(config: Config, world: World) -> tuple[PairJudge | None, list[str]]:
    """(judge or None, what its health check found), if training or evaluation asks one.

    Raises JudgeError in seconds if it cannot work: unreachable, wrong model, no verdict on a probe pair.
    """
    training, _ = specs(config)
    held_out = config.eval.every and (config.eval.prompts or config.eval.final_prompts)
    if PAIRWISE not in training and not (config.eval.judge and held_out):
        return None, []
    judge = config.judge
    if judge.backend == "local":
        from prefgrpo.judge.local import LocalJudge, LocalJudgeConfig

        local = LocalJudgeConfig(model=judge.model, template=judge.template, device=str(world.device))
        return _answers(LocalJudge(local), judge), [f"judge in this process: {judge.model}"]
    from prefgrpo.judge.client import HttpJudge, check

    http = http_config(judge)
    notes: list[str] = []
    world.on_main(lambda: notes.extend(check(http, bias_pairs=CALIBRATION_PAIRS).summary().splitlines()), JudgeError)
    return HttpJudge(http), [f"judge {note}" for note in notes]


def _answers(judge: PairJudge, config: Judge) -> PairJudge:
    """The judge, if it gives a verdict on a pair of plain pictures; raises JudgeError otherwise."""
    pictures = [Media(np.full((64, 64, 3), colour, np.uint8)) for colour in ((220, 30, 30), (30, 60, 220))]
    verdict = judge.judge_group("a plain red picture", pictures, [(0, 1)])[0]
    if verdict.first is None:
        raise JudgeError(
            f"the judge {config.model} gave no verdict on a probe pair: {verdict.reason}. Expected a model that "
            f"answers the template '{config.template}'; correct judge.model or judge.template"
        )
    return judge


def http_config(judge: Judge) -> HttpJudgeConfig:
    """The client's options from a run's configuration; a restarting server is waited for until the deadline."""
    from prefgrpo.judge.http import HttpJudgeConfig

    return HttpJudgeConfig(
        endpoints=judge.endpoints,
        model=judge.model,
        template=judge.template,
        tokenizer=judge.tokenizer,
        concurrency=judge.concurrency,
        timeout_s=judge.timeout_s,
        patience_s=judge.deadline_s,
        image_format=judge.image_format,
        api_key_env=judge.api_key_env,
    )


def makes_clips(config: Config) -> bool:
    """Whether samples are videos of more than one frame."""
    frames = config.rollout.frames or family(config.family).default_frames
    return frames is not None and frames > 1


def _take_clips(config: Config, field: str, rewards: Mapping[str, Reward]) -> None:
    """Raise ConfigError for a reward that takes images where the samples are clips."""
    images_only = [name for name, reward in rewards.items() if not reward.clips]
    if images_only and makes_clips(config):
        hint = "; a judge sees clips over http only" if PAIRWISE in images_only else ""
        raise ConfigError(
            [
                f"{field}: {', '.join(images_only)} takes images, but this run makes clips; expected rewards that "
                f"take clips (or rollout.frames = 1){hint}"
            ]
        )


def training_scorer(config: Config, judge: PairJudge | None, folder: Path | None) -> tuple[Scorer, dict[str, float]]:
    """(scorer of training groups, weights). `folder`: where judgements.jsonl goes, None to write none."""
    weights, _ = specs(config)
    options = {PAIRWISE: {"judge": judge, "plan": config.judge.plan, "verdict": config.judge.verdict}}
    rewards = build(config.reward.spec, {k: v for k, v in options.items() if k in weights})
    _take_clips(config, "reward.spec", rewards)
    log = folder / "judgements.jsonl" if folder and PAIRWISE in weights and config.judge.log else None
    return Scorer(rewards, config.rollout.group_size, config.judge.deadline_s, config.seed, log), weights


def evaluation_scorers(config: Config, judge: PairJudge | None) -> dict[str, Scorer]:
    """Scorers of (now, before) pairs: 'judge' asks in both orders, 'measure' holds the rewards of eval.spec."""
    _, measured = specs(config)
    scorers = {}
    if config.eval.judge and judge is not None:
        reward = build(PAIRWISE, {PAIRWISE: {"judge": judge, "plan": "both_orders", "verdict": "hard"}})
        _take_clips(config, "eval.judge", reward)
        scorers["judge"] = Scorer(reward, 2, config.judge.deadline_s, config.seed)
    if measured:
        rewards = build(config.eval.spec)
        _take_clips(config, "eval.spec", rewards)
        scorers["measure"] = Scorer(rewards, 2, config.judge.deadline_s, config.seed)
    return scorers
