"""Builds a run's rewards, each with its own judge, and the scorers of training and evaluation.

Invariant: a reward is built once, by name, and evaluation uses the trained object; its judge is checked on rank 0
before the model loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prefgrpo.config.loading import section
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import COMBINE, Config, JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.judge.information import ask_known_answers, is_pairwise
from prefgrpo.judge.plans import get_plan
from prefgrpo.judge.template import load_template
from prefgrpo.judge.verdict import JudgeError, PairJudge
from prefgrpo.models import family
from prefgrpo.parallel.world import World
from prefgrpo.rewards import build, check_name, factory, load_class
from prefgrpo.rewards.base import GroupwiseReward, PointwiseReward, Reward
from prefgrpo.rewards.functions import FunctionPairwise
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.run.advantage import load_function
from prefgrpo.run.metrics import taken_name

FRAMES = 8
"""Frames of a clip that a judge sees (judge.body.FRAMES, whose module needs aiohttp)."""
CALIBRATION_PAIRS = 8
"""Random pairs judged in both orders at the start, to measure the judge's position bias."""


def config_errors(config: Config) -> list[str]:
    """Mistakes in the rewards, their options and judges, and in how they are combined."""
    wrong: list[str] = []

    def tried(field: str, check: Callable[[], object]) -> None:
        try:
            check()
        except ConfigError as error:
            wrong.extend(error.mistakes)
        except (ValueError, JudgeError) as error:
            wrong.append(f"{field}: {error}")

    combine = config.advantage.combine
    if combine not in COMBINE:
        tried("advantage.combine", partial(load_function, combine))
    negative = [entry.name for entry in config.rewards if entry.weight < 0]
    if combine == "geometric_mean" and negative:
        wrong.append(f"advantage.combine: {combine} expects weights of at least 0, but not those of {negative}")
    for field, entries in (("rewards", config.rewards), ("eval.rewards", config.measured)):
        for entry in entries:
            if field == "rewards" or entry not in config.rewards:
                tried(field, partial(_check_entry, config, entry))
    if not wrong and not any(entry.weight for entry in config.rewards):
        wrong.append(
            "rewards: expected a weight other than 0, got only 0; use eval.rewards for rewards that are only measured"
        )
    return wrong


def _check_entry(config: Config, entry: RewardEntry) -> None:
    """Raise ValueError, ConfigError or JudgeError for a reward that cannot be built, without building it."""
    check_name(entry.name)
    if why := taken_name(entry.name):
        raise ValueError(f"rename the reward {entry.name!r}: {why}")
    kind = load_class(entry.name)
    asks = _asks_judge(entry)
    factory(entry.name, entry.options | ({"judge": None} if asks else {}))
    if not asks and entry.judge:
        raise ValueError(f"{entry.name} asks no judge: remove `judge` from its entry")
    if asks:
        judge_config(config, entry)
    if asks and issubclass(kind, VlmPairwise):
        load_template(_question(entry))
        get_plan(entry.options.get("plan", "both_orders"))


def _asks_judge(entry: RewardEntry) -> bool:
    """Whether a reward asks a judge from this process."""
    return load_class(entry.name).judged and "url" not in entry.options


def _question(entry: RewardEntry) -> str:
    """Name of the template of a pairwise reward."""
    return str(entry.options.get("template") or load_class(entry.name).template or "compare")


def trains_on_pairs(config: Config) -> bool:
    """Whether a trained reward compares members of a group; a reward with a `url` is assumed to."""
    trained = [entry for entry in config.rewards if entry.weight > 0]
    return any("url" in entry.options or issubclass(load_class(entry.name), GroupwiseReward) for entry in trained)


def judge_config(config: Config, entry: RewardEntry, world: World | None = None) -> JudgeConfig:
    """The judge of a reward: the judge section, with the values of the entry's own `judge`.

    With `world`, `concurrency` becomes this rank's share: a rank judges whole groups, so with fewer prompts per step
    than ranks, only that many ranks share it and the others get 1. Raises ConfigError.
    """
    try:
        judge = section(JudgeConfig, asdict(config.judge) | entry.judge, "judge")
    except ConfigError as error:
        raise ConfigError([f"rewards.{entry.name}.{mistake}" for mistake in error.mistakes]) from error
    if world is None:
        return judge
    return replace(judge, concurrency=world.share(judge.concurrency, config.rollout.prompts_per_step))


def reward_options(config: Config, entry: RewardEntry, world: World) -> dict[str, Any]:
    """The keyword arguments of a reward's class, with the configuration of its judge if it asks one."""
    return entry.options | ({"judge": judge_config(config, entry, world)} if _asks_judge(entry) else {})


class Rewards:
    """Builds rewards by name; each, and its judge, is built once."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.notes: list[str] = []
        """What the checks of the judges found."""
        self._built: list[tuple[RewardEntry, Reward]] = []
        self._local: dict[tuple[str, str], PairJudge] = {}

    def build(
        self, field: str, entries: Iterable[RewardEntry], prompts: Sequence[Prompt], label: str = "judge"
    ) -> dict[str, Reward]:
        """The rewards of these entries by name. label: how notes call their judges.

        Raises ConfigError if a new one cannot score these prompts, JudgeError if a judge cannot be used.
        """
        wanted = {entry.name: entry for entry in entries}
        found = {entry.name: reward for entry, reward in self._built if wanted.get(entry.name) == entry}
        absent = {name: entry for name, entry in wanted.items() if name not in found}
        check_inputs(self.config, field, {name: load_class(name) for name in absent}, prompts)
        options = {name: reward_options(self.config, entry, self.world) for name, entry in absent.items()}
        for name, entry in absent.items():
            if _asks_judge(entry) and issubclass(load_class(name), VlmPairwise):
                options[name]["judge"] = self._open(label, entry, options[name]["judge"], prompts)
        made = build({name: entry.weight for name, entry in absent.items()}, options) if absent else {}
        check_inputs(self.config, field, made, prompts)
        self._built += [(absent[name], reward) for name, reward in made.items()]
        return {name: found[name] if name in found else made[name] for name in wanted}

    def _open(self, label: str, entry: RewardEntry, judge: JudgeConfig, prompts: Sequence[Prompt]) -> PairJudge:
        """A judge that answers, also a pair as large as those of this run. Raises JudgeError within seconds if not."""
        template = _question(entry)
        if judge.backend == "local":
            key = (judge.model, template)
            if self._local and key not in self._local:
                other = "expected backend http; a process can hold only one local judge"
                raise ConfigError([f"rewards.{entry.name}.judge: {other}, that of {next(iter(self._local))[0]}"])
            if key not in self._local:
                self._local[key], warning = _local_judge(judge, template, str(self.world.device))
                self.notes += [f"{label} in this process: {judge.model}", *warning]
            return self._local[key]
        from prefgrpo.judge.check import Shape, check
        from prefgrpo.judge.client import HttpJudge

        clips = makes_clips(self.config)
        shape = Shape()
        if prompts:
            r = self.config.rollout
            longest = max((prompt.text for prompt in prompts), key=len)
            shape = Shape(r.height, r.width, FRAMES if clips else 1, longest)

        def run_check() -> None:
            health = check(judge, template, bias_pairs=CALIBRATION_PAIRS, known_answers=True, clips=clips, shape=shape)
            self.notes.extend(f"{label} {line}" for line in health.summary().splitlines())

        self.world.on_main(run_check, JudgeError)
        return HttpJudge(judge, template)

    def close(self) -> None:
        """Close all rewards and their judges."""
        for _, reward in self._built:
            reward.close()
            if isinstance(reward, VlmPairwise):  # it does not close a judge that it did not open
                reward.judge.close()


def _local_judge(config: JudgeConfig, template: str, device: str) -> tuple[PairJudge, list[str]]:
    """(judge, warnings). Raises JudgeError if it gives no verdict on a probe pair, or if judge.strict and the known
    answers are wrong."""
    from prefgrpo.judge.local import LocalJudge

    judge = LocalJudge(config.model, template, device)
    pictures = [Media(np.full((64, 64, 3), colour, np.uint8)) for colour in ((220, 30, 30), (30, 60, 220))]
    verdict = judge.judge_group("a plain red picture", pictures, [(0, 1)])[0]
    advice = f"Expected a model that answers the template '{template}'; correct judge.model or the reward's template"
    if verdict.first is None:
        raise JudgeError(f"the judge {config.model} gave no verdict on a probe pair: {verdict.reason}. {advice}")
    problem = ask_known_answers(judge, judge.template).problem if is_pairwise(judge.template) else ""
    if problem and config.strict:
        raise JudgeError(f"the judge {config.model} {problem}. {advice}")
    return judge, [f"WARNING: the judge {problem}. {advice}"] if problem else []


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


def unread_columns(config: Config, prompts: Sequence[Prompt]) -> list[str]:
    """Columns of the prompts that nothing in this run reads; none if a reward of one's own may read any."""
    kinds = [load_class(entry.name) for entry in (*config.rewards, *config.measured)]
    if not all(kind.__module__.startswith("prefgrpo.rewards.") for kind in kinds):
        return []
    read = {column for kind in kinds for column in (*kind.meta_keys, *kind.reads)}
    if config.data.own_sizes:
        read |= {"height", "width"}
    guidance = family(config.family).cfg
    if guidance is not None and guidance.active(config.rollout.guidance):
        read.add("negative_prompt")
    return list(dict.fromkeys(column for p in prompts for column in p.meta if column not in read))


def training_scorer(config: Config, rewards: Mapping[str, Reward], folder: Path | None, world: World) -> Scorer:
    """The scorer of training groups. folder: where judgements.jsonl is written (None: it is not)."""
    split = [name for name, reward in rewards.items() if reward.part_weights]
    combine = config.advantage.combine
    if split and combine != "weighted_advantage_sum":
        message = f"advantage.combine: expected weighted_advantage_sum, got {combine}, but {', '.join(split)}"
        raise ConfigError([f"{message} normalises its parts separately; change one of the two"])
    judged = any(isinstance(r, VlmPairwise) for r in rewards.values())
    log = folder / "judgements.jsonl" if folder and judged and config.judge.log else None
    size, deadline_s = config.rollout.group_size, config.judge.deadline_s
    return Scorer(rewards, size, deadline_s, config.seed, log, world.is_dp_leader)


def evaluation_scorers(config: Config, rewards: Mapping[str, Reward]) -> dict[str, Scorer]:
    """Scorers of (current, initial) pairs: 'judge' compares in both orders, by the first pairwise judge; 'measure' uses
    the other rewards of `config.measured`."""
    if not config.eval.rewards:  # of what is trained, those that can score two samples
        scores_two = (PointwiseReward, FunctionPairwise, VlmPairwise)
        rewards = {name: reward for name, reward in rewards.items() if isinstance(reward, scores_two)}
    rewards = {n: both_orders(r) if isinstance(r, VlmPairwise) and r.judged else r for n, r in rewards.items()}
    judge = next((n for n, r in rewards.items() if isinstance(r, VlmPairwise) and r.judged), None)
    parts = {
        "judge": {name: reward for name, reward in rewards.items() if name == judge},
        "measure": {name: reward for name, reward in rewards.items() if name != judge},
    }
    return {part: Scorer(r, 2, config.judge.deadline_s, config.seed) for part, r in parts.items() if r}


def both_orders(reward: VlmPairwise) -> VlmPairwise:
    """A pairwise reward as evaluation uses it: with the same judge, in both orders, won, tied or lost."""
    return replace(reward, plan="both_orders", verdict="hard")
