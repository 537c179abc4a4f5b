"""Builds a run's scorers from its configuration: its rewards, and the judge that training and evaluation share.

The shared judge belongs to the spec's first pairwise VLM reward; other judge-based rewards use the judge section with
overrides from their own options. Invariant: a judge is opened once per process, and checked before the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prefgrpo.config.loading import section
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import COMBINE, Config, JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.judge.information import ask_known_answers, is_pairwise
from prefgrpo.judge.plans import get_plan
from prefgrpo.judge.template import load_template
from prefgrpo.judge.verdict import JudgeError, PairJudge
from prefgrpo.models import family
from prefgrpo.parallel.world import World
from prefgrpo.rewards import build, factory, load_class, parse_reward_spec
from prefgrpo.rewards.base import GroupwiseReward, PointwiseReward, Reward
from prefgrpo.rewards.functions import FunctionPairwise
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.run.advantage import load_function
from prefgrpo.run.metrics import taken_name

PAIRWISE = "vlm_pairwise"
CALIBRATION_PAIRS = 8
"""Random pairs judged in both orders at the start, to measure the judge's position bias."""


def specs(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """(training, evaluation) reward weights of a configuration without `config_errors`."""
    return parse_reward_spec(config.reward.spec), parse_reward_spec(config.eval.spec) if config.eval.spec else {}


def config_errors(config: Config) -> list[str]:
    """Mistakes in the reward specs, how rewards are combined, the pair plan and the pairwise judge's template."""
    wrong: list[str] = []

    def parsed(field: str, parse: Callable[[Any], Any], value: Any) -> Any:
        try:
            return parse(value)
        except (ValueError, JudgeError) as error:
            wrong.append(f"{field}: {error}")
            return {}

    trained = parsed("reward.spec", parse_reward_spec, config.reward.spec)
    measured = parsed("eval.spec", parse_reward_spec, config.eval.spec) if config.eval.spec else {}
    parsed("judge.plan", get_plan, config.judge.plan)
    if config.reward.combine not in COMBINE:
        parsed("reward.combine", load_function, config.reward.combine)
    if config.reward.combine == "geometric_mean" and any(w < 0 for w in trained.values()):
        wrong.append(f"reward.combine: {config.reward.combine} expects weights of at least 0, got {config.reward.spec}")
    for kind, weights, options in (
        ("reward", trained, config.reward.options),
        ("eval", measured, config.eval.options),
    ):
        wrong += [f"{kind}.spec: rename the reward {name!r}: {why}" for name in weights if (why := taken_name(name))]
        for name in weights:
            if cls := parsed(f"{kind}.spec", load_class, name):
                own = options.get(name, {})
                judge = {"judge": None} if cls.judged and "url" not in own else {}
                parsed(f"{kind}.options", partial(factory, name), own | judge)
        for name in sorted(set(options) - set(weights)):  # unused options are allowed, misspelt reward names are not
            parsed(f"{kind}.options", parse_reward_spec, [name])
    if PAIRWISE in trained:
        parsed("judge.template", load_template, config.judge.template or "compare")
    if PAIRWISE in measured:
        wrong.append(f"eval.spec: {PAIRWISE} is not allowed here; use eval.judge: true for the judge's win rate")
    return wrong


def trains_on_pairs(config: Config) -> bool:
    """Whether a trained reward compares members of a group; a reward with a `url` is assumed to."""
    trained = [name for name, weight in specs(config)[0].items() if weight > 0]
    remote = {name for name in trained if "url" in config.reward.options.get(name, {})}
    return any(name in remote or issubclass(load_class(name), GroupwiseReward) for name in trained)


def shared(config: Config) -> str:
    """Reward whose judge evaluation uses too: the spec's first pairwise VLM one without a `url`, else vlm_pairwise."""
    remote = {name for name, own in config.reward.options.items() if "url" in own}
    trained = [n for n in specs(config)[0] if n not in remote]
    names = [n for n in trained if issubclass(load_class(n), VlmPairwise) and load_class(n).judged]
    return names[0] if names else PAIRWISE


def judge_config(config: Config, name: str, options: Mapping[str, Any], world: World) -> JudgeConfig:
    """The judge section for reward `name`: with its own template, then with the overrides in its options' `judge`.

    `concurrency` becomes this rank's share: a rank judges whole groups, so with fewer prompts per step than ranks, only
    that many ranks share it and the others get 1.
    """
    template = config.judge.template or "compare" if name == PAIRWISE else load_class(name).template
    try:
        own = asdict(config.judge) | {"template": template} | options.get("judge", {})
        judge = section(JudgeConfig, own, "judge")
    except ConfigError as error:
        raise ConfigError([f"reward.options.{name}.{mistake}" for mistake in error.mistakes]) from error
    return replace(judge, concurrency=world.share(judge.concurrency, config.rollout.prompts_per_step))


def open_judge(config: Config, world: World) -> tuple[PairJudge | None, list[str]]:
    """(shared judge, results of its health check), or (None, []) if neither training nor evaluation uses a judge.

    Raises JudgeError within seconds if the judge is unreachable, serves another model or fails a probe pair.
    """
    training, name = specs(config)[0], shared(config)
    held_out = config.eval.every and (config.eval.prompts or config.eval.final_prompts)
    if name not in training and not (config.eval.judge and held_out):
        return None, []
    judge = judge_config(config, name, config.reward.options.get(name, {}), world)
    try:
        return connect(judge, makes_clips(config), world)
    except JudgeError as error:
        if name in training:
            raise
        raise JudgeError(f"{error}. No trained reward uses it: eval.judge: false evaluates without it") from error


def connect(judge: JudgeConfig, clips: bool, world: World) -> tuple[PairJudge, list[str]]:
    """(judge of pairs, results of its health check). Raises JudgeError like `open_judge`."""
    if judge.backend == "local":
        opened, warning = _local_judge(judge, str(world.device))
        return opened, [f"judge in this process: {judge.model}", *warning]
    from prefgrpo.judge.client import HttpJudge, check

    notes: list[str] = []

    def run_check() -> None:
        health = check(judge, bias_pairs=CALIBRATION_PAIRS, known_answers=True, clips=clips)
        notes.extend(f"judge {line}" for line in health.summary().splitlines())

    world.on_main(run_check, JudgeError)
    return HttpJudge(judge), notes


def _local_judge(config: JudgeConfig, device: str) -> tuple[PairJudge, list[str]]:
    """(judge, warnings). Raises JudgeError if it gives no verdict on a probe pair, or if judge.strict and the known
    answers are wrong."""
    from prefgrpo.judge.local import LocalJudge

    judge = LocalJudge(config.model, config.template, device, min_label_mass=config.min_label_mass)
    pictures = [Media(np.full((64, 64, 3), colour, np.uint8)) for colour in ((220, 30, 30), (30, 60, 220))]
    verdict = judge.judge_group("a plain red picture", pictures, [(0, 1)])[0]
    advice = f"Expected a model that answers the template '{config.template}'; correct judge.model or judge.template"
    if verdict.first is None:
        raise JudgeError(f"the judge {config.model} gave no verdict on a probe pair: {verdict.reason}. {advice}")
    problem = ask_known_answers(judge, judge.template).problem if is_pairwise(judge.template) else ""
    if problem and config.strict:
        raise JudgeError(f"the judge {config.model} {problem}. {advice}")
    return judge, [f"WARNING: the judge {problem}. {advice}"] if problem else []


def reward_options(
    config: Config,
    spec: Mapping[str, float],
    given: Mapping[str, Any],
    judge: PairJudge | None,
    world: World,
) -> dict[str, dict[str, Any]]:
    """Options of every reward in a spec; judge-based ones get `judge`, if the shared one is theirs, or a JudgeConfig.

    world: the ranks that share `concurrency`.
    """
    options: dict[str, dict[str, Any]] = {name: dict(own) for name, own in given.items()}
    for name in spec:
        cls, own = load_class(name), options.get(name, {})
        if not cls.judged or "url" in own:
            continue
        if issubclass(cls, VlmPairwise):
            own = {key: getattr(config.judge, key) for key in ("plan", "verdict", "rate")} | own
        asked: Any = judge
        if judge is None or name != shared(config):
            asked = judge_config(config, name, own, world)
            if asked.backend == "local":
                message = "expected backend http, got local; a process can hold only one local judge"
                raise ConfigError([f"reward.options.{name}.judge: {message} (that of {shared(config)})"])
        options[name] = own | {"judge": asked}
    return options


def makes_clips(config: Config) -> bool:
    """Whether samples are videos of more than one frame."""
    frames = config.rollout.frames or family(config.family).default_frames
    return frames is not None and frames > 1


def check_inputs(config: Config, field: str, rewards: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if rewards, or reward classes, cannot score the images or clips of this run's prompts."""
    kind = "video" if makes_clips(config) else "image"
    if errors := unsupported(kind, f"{field}:", "this run makes", rewards, prompts):
        raise ConfigError(errors)


def unsupported(kind: str, field: str, made: str, rewards: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[str]:
    """Why rewards, or reward classes, cannot score images or clips of these prompts. made: e.g. "this run makes"."""
    errors = []
    for name, reward in rewards.items():
        if kind not in reward.takes:
            media = "clips" if kind == "video" else "images"
            hint = "; a judge accepts clips only over http" if reward.judged and kind == "video" else ""
            errors.append(f"{field} {name} takes {' or '.join(reward.takes)}, but {made} {media}{hint}")
        lacking = [p for p in prompts if reward.needs_source and not p.source]
        if lacking:
            errors.append(
                f"{field} {name} scores edits, but {len(lacking)} prompt(s) have no source image, the first: "
                f"{lacking[0].text[:60]!r}; expected a file with a source_image column"
            )
        for key in reward.meta_keys:
            if lacking := [p for p in prompts if key not in p.meta]:
                errors.append(
                    f"{field} {name} needs the column '{key}', which {len(lacking)} prompt(s) lack, the first: "
                    f"{lacking[0].text[:60]!r} (its columns: {', '.join(lacking[0].meta) or 'none'})"
                )
    return errors


def _built(
    config: Config,
    field: str,
    weights: Mapping[str, float],
    given: Mapping[str, Any],
    judge: PairJudge | None,
    prompts: Sequence[Prompt],
    world: World,
) -> dict[str, Reward]:
    """The rewards of a spec; their classes are checked against the run before they load, the loaded rewards again."""
    check_inputs(config, field, {name: load_class(name) for name in weights}, prompts)
    options = reward_options(config, weights, given, judge, world)
    for name in weights:
        own = options.get(name, {}).get("judge")
        if issubclass(load_class(name), VlmPairwise) and isinstance(own, JudgeConfig):
            world.on_main(partial(_check_own, name, own, makes_clips(config)), JudgeError)
    rewards = build(weights, options)
    check_inputs(config, field, rewards, prompts)
    return rewards


def _check_own(name: str, judge: JudgeConfig, clips: bool) -> None:
    """Check the judge of a reward that does not use the shared one; JudgeError if it cannot be used."""
    from prefgrpo.judge.client import check

    if alarm := check(judge, known_answers=True, clips=clips).alarm:
        warnings.warn(f"reward '{name}': {alarm}", stacklevel=2)


def training_scorer(
    config: Config, judge: PairJudge | None, folder: Path | None, prompts: Sequence[Prompt], world: World
) -> tuple[Scorer, dict[str, float]]:
    """(scorer of training groups, weights). folder: where judgements.jsonl is written (None: it is not)."""
    weights, _ = specs(config)
    rewards = _built(config, "reward.spec", weights, config.reward.options, judge, prompts, world)
    split = [name for name, reward in rewards.items() if reward.part_weights]
    combine = config.reward.combine
    if split and combine != "weighted_advantage_sum":
        message = f"reward.combine: expected weighted_advantage_sum, got {combine}, but {', '.join(split)}"
        raise ConfigError([f"{message} normalises its parts separately; change one of the two"])
    judged = any(isinstance(r, VlmPairwise) for r in rewards.values())
    log = folder / "judgements.jsonl" if folder and judged and config.judge.log else None
    size, deadline_s = config.rollout.group_size, config.judge.deadline_s
    return Scorer(rewards, size, deadline_s, config.seed, log, world.is_dp_leader), weights


def evaluation_scorers(
    config: Config, judge: PairJudge | None, prompts: Sequence[Prompt], training: Scorer, world: World
) -> dict[str, Scorer]:
    """Scorers of (current, initial) pairs: 'judge' compares in both orders, 'measure' uses the rewards of eval.spec.

    Without eval.spec, 'measure' uses the training rewards that need no judge comparisons; it is left out if 'judge'
    evaluates on eval.prompts or eval.final_prompts.
    """
    _, measured = specs(config)
    scorers = {}
    if config.eval.judge and judge is not None:
        scorers["judge"] = both_orders(config, shared(config), judge, prompts)
    if measured:
        scorers["measure"] = measuring(config, prompts, world)
    elif not (scorers and (config.eval.prompts or config.eval.final_prompts)):
        unjudged = {n: r for n, r in training.rewards.items() if isinstance(r, PointwiseReward | FunctionPairwise)}
        if unjudged:
            scorers["measure"] = Scorer(unjudged, 2, config.judge.deadline_s, config.seed)
    return scorers


def both_orders(config: Config, name: str, judge: PairJudge, prompts: Sequence[Prompt]) -> Scorer:
    """Scorer of pairs by the judge of the pairwise reward `name`, in both orders."""
    own = {**config.reward.options.get(name, {}), "judge": judge, "plan": "both_orders", "verdict": "hard"}
    reward = build(name, {name: own})
    check_inputs(config, "eval.judge", reward, prompts)
    return Scorer(reward, 2, config.judge.deadline_s, config.seed)


def measuring(config: Config, prompts: Sequence[Prompt], world: World) -> Scorer:
    """Scorer of pairs by the rewards of eval.spec."""
    rewards = _built(config, "eval.spec", specs(config)[1], config.eval.options, None, prompts, world)
    return Scorer(rewards, 2, config.judge.deadline_s, config.seed)
