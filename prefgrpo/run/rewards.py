"""Builds a run's rewards, each with its own judge.

Invariant: a reward is built once, by name, and evaluation uses the trained object; before the model loads, every
process has reached its judge and rank 0 has checked its answers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from prefgrpo.config.loading import section
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import Config, JudgeConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.judge.check import Shape, check
from prefgrpo.judge.client import Judge, open_judge
from prefgrpo.judge.http import JudgeError
from prefgrpo.judge.template import (
    FRAMES,
    PairTemplates,
    Shown,
    Template,
    load_pair_templates,
    load_template,
)
from prefgrpo.models import makes_clips
from prefgrpo.parallel.world import World
from prefgrpo.rewards import build, factory, load_class
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.rewards.functions import failure


def asks_judge(entry: RewardEntry) -> bool:
    """Whether a reward asks a judge from this process."""
    return load_class(entry.reward).judged and "url" not in entry.options


def _compares(entry: RewardEntry) -> bool:
    """Whether a reward asks a judge from this process which of two media is better."""
    return asks_judge(entry) and load_class(entry.reward).compares


def _question(entry: RewardEntry) -> str:
    """Name of the template of a pairwise reward."""
    return str(entry.options.get("template") or load_class(entry.reward).template or "compare")


def pairwise_templates(entries: Iterable[RewardEntry]) -> dict[str, Template]:
    """Reward → template, of the pairwise rewards that ask a judge."""
    return {entry.name: load_template(_question(entry)) for entry in entries if _compares(entry)}


def judge_config(config: Config, entry: RewardEntry, world: World | None = None) -> JudgeConfig:
    """The judge of a reward: the judge section, with the values of the entry's own `judge`. Raises ConfigError.

    With `world`, `concurrency` becomes the share of one of the ranks that judge, each of which has whole groups.
    """
    try:
        judge = section(JudgeConfig, asdict(config.judge) | entry.judge, "judge")
    except ConfigError as error:
        raise ConfigError([f"rewards.{entry.name}.{mistake}" for mistake in error.mistakes]) from error
    if world is None:
        return judge
    judging = min(world.dp_size, config.rollout.prompts_per_step)
    return replace(judge, concurrency=max(judge.concurrency // judging, 1))


class Rewards:
    """Builds rewards by name; each, and its judge, is built once."""

    def __init__(self, config: Config, world: World, media: Sequence[str] = ()) -> None:
        """media: what is scored, image or video; default: what the run makes."""
        self.config = config
        self.world = world
        self.media = media or ["video" if makes_clips(config) else "image"]
        self.notes: list[str] = []
        """What the checks of the judges found."""
        self._built: list[tuple[RewardEntry, Reward]] = []
        self.served: dict[str, str] = {}
        """The model that the servers of each pairwise reward's judge serve."""
        self._checked: list[tuple[Judge, PairTemplates]] = []

    def build(self, field: str, entries: Iterable[RewardEntry], prompts: Sequence[Prompt]) -> dict[str, Reward]:
        """The rewards of these entries by name. field: where they are configured.

        Raises ConfigError if a new one cannot score these prompts, JudgeError if a judge cannot be used.
        """
        wanted = {entry.name: entry for entry in entries}
        rewards = {entry.name: reward for entry, reward in self._built if wanted.get(entry.name) == entry}
        new = [entry for name, entry in wanted.items() if name not in rewards]
        self.check(field, new, prompts)
        ready = [replace(e, options=e.options | self._judge_option(e, prompts)) for e in new]
        built = build(ready) if ready else {}
        if errors := unsupported(self.media, field, built, prompts):  # an open judge may accept less than its class
            raise ConfigError(errors)
        self._built += [(entry, built[entry.name]) for entry in new]
        rewards |= built
        return {name: rewards[name] for name in wanted}

    def check(self, field: str, entries: Iterable[RewardEntry], prompts: Sequence[Prompt]) -> None:
        """Checks what is known before a judge is asked or a reward is loaded. Raises ConfigError if a reward, or its
        template, cannot score these prompts, or a Python function fails on grey images."""
        entries = list(entries)
        classes = {entry.name: load_class(entry.reward) for entry in entries}
        errors = unsupported(self.media, field, classes, prompts, pairwise_templates(entries))
        if errors := errors or list(self._function_errors(field, entries, prompts)):
            raise ConfigError(errors)

    def _function_errors(self, field: str, entries: Sequence[RewardEntry], prompts: Sequence[Prompt]) -> Iterator[str]:
        r = self.config.rollout
        shape = (FRAMES, r.height, r.width, 3) if "video" in self.media else (r.height, r.width, 3)
        for entry in entries if prompts else ():
            cls = load_class(entry.reward)
            if cls.of_function and "url" not in entry.options:
                source = tuple(Media(np.asarray(image)) for image in prompts[0].images())
                sample = Sample(prompts[0].text, Media(np.full(shape, 128, np.uint8)), source, prompts[0].meta)
                if why := failure(factory(entry.reward, entry.options)(), sample):
                    yield f"{field}: {entry.name}, tried on grey images {list(shape)}: {why}"

    def _judge_option(self, entry: RewardEntry, prompts: Sequence[Prompt]) -> dict[str, Judge]:
        """A reward's option `judge`, open, once every process reaches it. Raises JudgeError.

        For a reward that compares, it has judged a pair as large as those of this run."""
        if not asks_judge(entry):
            return {}
        config = judge_config(self.config, entry, self.world)
        judge = open_judge(config, load_class(entry.reward).kinds, str(self.world.device))
        self._reach(judge)
        if not _compares(entry):
            return {"judge": judge}
        if judge.streams:
            self.served[entry.name] = judge.model
        templates = load_pair_templates(
            _question(entry), Shown(entry.options.get("frames"), entry.options.get("max_pixels"))
        )
        if (judge, templates) not in self._checked:
            self._checked.append((judge, templates))
            r = self.config.rollout
            clips = judge.clips and "video" in self.media
            longest = max((prompt.text for prompt in prompts), key=len, default="")
            shape = Shape(r.height, r.width, templates.images.frames if clips else 1, longest) if prompts else None
            health = self.world.on_main(
                lambda: check(judge, templates, known_answers=True, clips=clips, shape=shape), JudgeError
            )
            self.notes += [f"judge {row}" for row in health.rows] if health else []
        return {"judge": judge}

    def _reach(self, judge: Judge) -> None:
        """Wait in every process until it reaches a server. JudgeError in all of them if one cannot."""
        first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        where = f"rank {self.world.rank} on {socket.gethostname()}: " if self.world.size > 1 else ""
        problem = ""
        try:
            judge.reach(say=lambda line: first_here and print(f"{where}{line}", flush=True))
        except JudgeError as error:
            problem = f"{where}{error}"
        if problems := [text for text in self.world.all_gather_object(problem) if text]:
            more = f" ({len(problems)} of {self.world.size} processes)" if self.world.size > 1 else ""
            raise JudgeError(f"{problems[0]}{more}")

    def close(self) -> None:
        """Close all rewards and their judges."""
        for _, reward in self._built:
            reward.close()


def unsupported(
    kinds: Sequence[str],
    field: str,
    rewards: Mapping[str, Any],
    prompts: Sequence[Prompt],
    asked: Mapping[str, Template] = {},
) -> list[str]:
    """Why rewards, or reward classes, cannot score these kinds of media (image, video) of these prompts.

    asked: templates of pairwise rewards.
    """
    errors = []
    bare = [prompt for prompt in prompts if not prompt.source]
    for name, reward in rewards.items():
        for kind in sorted(set(kinds) - set(reward.takes)):
            media = "clips" if kind == "video" else "images"
            hint = "; a judge accepts clips only over http" if reward.judged and kind == "video" else ""
            errors.append(f"{field}: {name} takes {' or '.join(reward.takes)}, but these are {media}{hint}")
        lacking: list[tuple[str, str, list[Prompt]]] = []
        if reward.needs_source:
            lacking.append((f"{name} scores edits of a source image", "expected a source_image column", bare))
        elif name in asked and asked[name].takes_source:
            other = "expected a source_image column, or a template without {source}, such as compare"
            lacking.append((f"the template {asked[name].name} of {name} shows a source image", other, bare))
        for key in reward.meta_keys:
            some = [prompt for prompt in prompts if key not in prompt.meta]
            columns = ", ".join(some[0].meta) if some else ""
            lacking.append((f"{name} needs the column '{key}'", f"its columns: {columns or 'none'}", some))
        for needs, advice, some in lacking:
            if some:
                first = f"the first: {some[0].text[:60]!r} ({advice})"
                errors.append(f"{field}: {needs}, which {len(some)} prompt(s) lack, {first}")
    return errors
