"""Where the samples of a run's steps, and what is known about them, come from: rollouts that rewards score, or pairs
from files (`data.pairs`). Everything else of a run is the same for both.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.pairs import PairGroup, has_pairs, summary
from prefgrpo.data.prompts import Prompt, held_out, prompt_files, prompt_sets
from prefgrpo.data.stored import file_digest
from prefgrpo.data.tables import DataError, refusal
from prefgrpo.models import family
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.parallelize import context_errors
from prefgrpo.parallel.world import Layout, World
from prefgrpo.rewards.base import Reward
from prefgrpo.rollout.buckets import buckets, check_samples, describe, pair_entries
from prefgrpo.rollout.embeddings import Embeddings, Entry, check_sources, run_entries
from prefgrpo.rollout.generated_groups import GeneratedGroups
from prefgrpo.rollout.plan import Groups
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.rollout.stored_groups import StoredGroups, unguided
from prefgrpo.run.evaluation import HeldOutPairs
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.groups import open_pairs
from prefgrpo.run.log import Log
from prefgrpo.run.resume import Fingerprints, Input, Kind, fingerprints
from prefgrpo.run.targets import PairTargets, StepTargets
from prefgrpo.update.endpoint import EndpointGradients
from prefgrpo.update.gradients import Gradients

T = TypeVar("T")


@dataclass(frozen=True)
class Source(ABC):
    """What a run trains on."""

    config: Config
    prompts: Sequence[Prompt]
    """Of training."""
    sets: Mapping[str, Sequence[Prompt]]
    """Evaluation set → its prompts; none without evaluation."""

    @property
    def evaluated(self) -> list[Prompt]:
        """The prompts of all evaluation sets."""
        return [prompt for prompts in self.sets.values() for prompt in prompts]

    @abstractmethod
    def entries(self) -> list[Entry]:
        """Everything that the run encodes. Raises DataError for prompts with too few or too many source images."""

    @abstractmethod
    def open_groups(self, adapter: Adapter, embeddings: Embeddings, schedules: Schedules, world: World) -> Groups:
        """What the run's steps train on."""

    @abstractmethod
    def targets(
        self, groups: Groups, rewards: Mapping[str, Reward], world: World, log: Log
    ) -> StepTargets | PairTargets:
        """What turns the scores of a step into what the update trains on."""

    def held_out_pairs(self, groups: Groups, gradients: Gradients, folder: RunFolder) -> HeldOutPairs | None:
        """Pairs that are not trained on; None if there are none."""
        return None

    def fingerprints(self, lora_from: str) -> Fingerprints:
        """As `resume.fingerprints`."""
        return fingerprints(self.config, self.prompts, self.sets, lora_from)

    def notes(self) -> Iterator[str]:
        """Lines for the start of a run."""
        return iter(())


@dataclass(frozen=True)
class Generated(Source):
    """Samples that the policy generates."""

    def entries(self) -> list[Entry]:
        """As in `Source`."""
        return run_entries(self.config, self.prompts, self.evaluated)

    def open_groups(self, adapter: Adapter, embeddings: Embeddings, schedules: Schedules, world: World) -> Groups:
        """As in `Source`."""
        return GeneratedGroups(self.config, adapter, embeddings, schedules, self.prompts, world)

    def targets(
        self, groups: Groups, rewards: Mapping[str, Reward], world: World, log: Log
    ) -> StepTargets | PairTargets:
        """As in `Source`."""
        return StepTargets(self.config, rewards, world, log)


@dataclass(frozen=True)
class Stored(Source):
    """Groups from files."""

    groups: Sequence[PairGroup]
    held: Sequence[PairGroup]
    """Groups that are not trained on."""
    sizes: Sequence[SamplingConfig]
    """The buckets."""
    outline: Adapter

    def entries(self) -> list[Entry]:
        """As in `Source`."""
        check_sources(self.config, self.prompts)
        of_pairs = pair_entries([*self.groups, *self.held], self.outline, self.sizes)
        return list(dict.fromkeys([*of_pairs, *run_entries(self.config, [], self.evaluated)]))

    def open_groups(self, adapter: Adapter, embeddings: Embeddings, schedules: Schedules, world: World) -> Groups:
        """As in `Source`."""
        of_size = {size: Schedules(replace(self.config, rollout=size), adapter, world.device) for size in self.sizes}
        return StoredGroups(self.config, adapter, embeddings, of_size, self.groups, world)

    def targets(
        self, groups: Groups, rewards: Mapping[str, Reward], world: World, log: Log
    ) -> StepTargets | PairTargets:
        """As in `Source`."""
        assert isinstance(groups, StoredGroups)
        return PairTargets(groups, log)

    def held_out_pairs(self, groups: Groups, gradients: Gradients, folder: RunFolder) -> HeldOutPairs | None:
        """As in `Source`."""
        if not self.held:
            return None
        assert isinstance(groups, StoredGroups)
        assert isinstance(gradients, EndpointGradients)
        return HeldOutPairs(replace(groups, pairs=self.held), gradients, folder)

    def fingerprints(self, lora_from: str) -> Fingerprints:
        """As in `Source`, with the pairs."""
        found = super().fingerprints(lora_from) | {Input(Kind.PAIRS, "train"): _fingerprint(self.groups)}
        if self.held:
            found[Input(Kind.PAIRS, "dev")] = _fingerprint(self.held)
        return found

    def notes(self) -> Iterator[str]:
        """As in `Source`."""
        yield f"pairs of {self.config.data.pairs}: {summary(self.groups)}"
        yield from describe(self.groups, self.sizes)
        yield f"held out: {summary(self.held)}" if self.held else "no pairs are held out, so no accuracy is measured"


def open_prompts(read: Callable[..., T], world: World) -> T:
    """`read(decode=…)`: only rank 0 decodes all source images, and what it refuses ends all ranks. Raises DataError."""
    found = world.on_main(partial(read, decode=True), DataError)
    return read(decode=False) if found is None else found


def open_source(config: Config, world: World, every_set: bool = False) -> Source:
    """What a run trains on, and its evaluation sets, read from files; every_set: also if eval.every is 0. Raises
    DataError or ModelError."""
    watched = every_set or config.eval.every > 0
    if config.data.pairs:
        stored = _stored(config, world)
        return stored if watched else replace(stored, sets={}, held=[])
    prompts, sets = open_prompts(partial(prompt_sets, config), world)
    return Generated(config, prompts, sets if watched else {})


def _stored(config: Config, world: World) -> Stored:
    """Held-out groups are those of held-out prompts, or those of `eval.prompts`, if that is a file of pairs."""
    groups = open_pairs(config.data.pairs, world)
    held: list[PairGroup] = []
    prompts = distinct_prompts(groups)
    sets = open_prompts(partial(prompt_files, config), world)
    if config.eval.file and has_pairs(config.eval.file):
        held = open_pairs(config.eval.file, world)
        sets["dev"] = distinct_prompts(held)
    elif kept := held_out(config, len(prompts)):
        chosen = [prompt for k, prompt in enumerate(prompts) if k in kept]
        names = {(prompt.text, prompt.source) for prompt in chosen}
        held = [group for group in groups if (group.prompt.text, group.prompt.source) in names]
        groups = [group for group in groups if (group.prompt.text, group.prompt.source) not in names]
        prompts = distinct_prompts(groups)
        sets["dev"] = chosen
    cls = family(config.family)
    model = cls.outline(cls.find(config.model))
    sampling = unguided(config)
    layout = Layout.of(config, world.size)
    sizes = buckets(model, sampling, lambda size: not context_errors(model, "", size, config.data.max_length, layout))
    for some in filter(None, (groups, held)):
        check_samples(some, model, sampling)
        _check_members(some, config.rollout.group_size)
    return Stored(config, prompts, sets, groups, held, sizes, model)


def distinct_prompts(groups: Sequence[PairGroup]) -> list[Prompt]:
    """The distinct prompts of groups, in order, numbered."""
    first = {(group.prompt.text, group.prompt.source): group.prompt for group in reversed(groups)}
    return [replace(prompt, id=k) for k, prompt in enumerate(reversed(first.values()))]


def _check_members(groups: Sequence[PairGroup], size: int) -> None:
    """Raise DataError unless all groups have `size` members."""
    wrong = {group.prompt.line: len(group.samples) for group in groups if len(group.samples) != size}
    if not wrong:
        return
    counts = sorted({len(group.samples) for group in groups})
    if len(counts) == 1:
        file = groups[0].where.rpartition(", ")[0]
        raise DataError(f"rollout.group_size: expected {counts[0]}, as every group of {file} has, got {size}")
    bad = {line: f"{count} images or clips, expected rollout.group_size = {size}" for line, count in wrong.items()}
    raise DataError(refusal(Path(groups[0].where.rpartition(", ")[0]), bad))


def _fingerprint(groups: Sequence[PairGroup]) -> str:
    """Hex digest of prompts, contents and verdicts, in order; with the seed, it determines the groups of every step."""
    places = [place for group in groups for place in group.samples]
    files = {file: file_digest(file) for file in dict.fromkeys(place.file for place in places)}
    found = hashlib.sha256()
    for group in groups:
        samples = [(files[place.file], *place.part) for place in group.samples]
        facts = (group.prompt.text, samples, group.wins.tolist(), group.counts.tolist(), group.weight)
        found.update(json.dumps(facts).encode("utf-8", "surrogatepass"))
    return found.hexdigest()
