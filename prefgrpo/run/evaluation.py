"""Evaluation: ODE samples of held-out prompts with fixed noise, compared with those of the initial policy.

Images before and after training share their initial latents, so comparisons are paired: by the judge in both orders,
and by rewards (win 1, tie ½). Held-out pairs from files are ranked besides. Invariant: evaluation never affects the
training loss.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.atomic import save_images, write_atomic
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.data.writer import Writer
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Reward, Sample
from prefgrpo.rewards.log import head_and_tail
from prefgrpo.rewards.pairs import both_orders
from prefgrpo.rewards.scorer import Scorer, StepScores
from prefgrpo.rollout.assignment import BatchPlan
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.render import Images, preview, render, sample
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.rollout.source_images import as_arrays, sources_of
from prefgrpo.rollout.stored_groups import StoredGroups
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.log import finite
from prefgrpo.run.measures import (
    JUDGE,
    Comparison,
    Estimate,
    Interval,
    Measure,
    PairMeasures,
    Subject,
    compared,
    interval,
    keys_of,
)
from prefgrpo.sde.noise import EVALUATION_IDS, HELD_OUT_GROUPS
from prefgrpo.update.endpoint import EndpointGradients

DRAWS = 4
"""Draws of (ε, t) per held-out pair."""
IN_REPORT = 12
"""Images of an evaluation that the report shows."""


class BothSamples(NamedTuple):
    """Two samples of a prompt from the same noise: the policy's, and that of the policy it is compared with."""

    now: Sample
    before: Sample


@dataclass(frozen=True)
class JudgedOrder:
    """A judge's answer to one of the two orders of a pair, as the run's folder has it."""

    judge: str
    first: str
    """The sample shown first: `after` (the policy's) or `before`."""
    p_first: float | None
    """P(the first is better); None: no verdict, for the `reason`."""
    reason: str
    raw: str


@dataclass(frozen=True)
class Compared:
    """What the rewards say about pairs of samples."""

    measures: list[PairMeasures]
    """Measures of each pair."""
    answers: list[list[JudgedOrder]]
    """The judges' answers to each pair."""
    reasons: Counter[str]
    """Why values and verdicts are missing."""


@dataclass(frozen=True)
class EvalSet:
    """One set of held-out prompts."""

    name: str
    items: list[Prompt]
    """One entry per image: each prompt `samples_per_prompt` times."""
    group: list[int]
    """Prompt index of each image."""
    first_id: int
    """Noise address of the first image; the next ones follow."""


def eval_sets(config: Config, sets: Mapping[str, Sequence[Prompt]]) -> list[EvalSet]:
    """The evaluation sets of a run: the first `eval.max_prompts` of each, with noise of their own."""
    out = []
    for number, (name, prompts) in enumerate(sets.items()):
        chosen = prompts[: config.eval.max_prompts or None]
        group = [k for k in range(len(chosen)) for _ in range(config.eval.samples_per_prompt)]
        out.append(EvalSet(name, [chosen[k] for k in group], group, EVALUATION_IDS + number * 2**40))
    return out


@dataclass
class HeldOutPairs:
    """Ranks held-out groups by the implicit rewards of the current policy; every rank computes its share.

        implicit reward r = −(d − d_initial)    d = mean_D ‖v − u‖²    correct: r_i > r_j for the pair's winner i

    A held-out pair has the same DRAWS of (ε, t) at every evaluation, so its accuracy is comparable over steps, and d of
    the initial policy is computed once. Ties are not counted; equal rewards count ½, as before the first step.
    """

    groups: StoredGroups
    """Whose `pairs` are the held-out ones."""
    gradients: EndpointGradients
    folder: RunFolder
    before: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    """[n, G] d under the initial policy, on all ranks."""

    def start(self, resumed: bool) -> None:
        """Get the initial policy's d: computed and stored by a new run, loaded by a resumed one."""
        world = self.groups.world
        file = self.folder.initial_errors
        if not resumed:
            self.before = self.errors()
            world.on_main(lambda: save_images(file, errors=self.before), OSError)
            return

        def read() -> NDArray[np.float64]:
            if not file.is_file():
                raise CheckpointError(f"{file}, of the starting policy, is missing; choose another name")
            stored: NDArray[np.float64] = np.load(file, allow_pickle=False)["errors"]
            return stored

        (found, *_) = world.all_gather_object(world.on_main(read, CheckpointError))
        assert found is not None
        self.before = found

    @torch.no_grad()
    def errors(self) -> NDArray[np.float64]:
        """[n, G] d of the current weights, the mean of DRAWS draws, gathered from all ranks."""
        world = self.groups.world
        count = len(self.groups.pairs)
        mine = list(world.slots(count))
        padding = -(-count // world.dp_size) - len(mine) if world.equal_forwards else 0
        drawn = replace(self.gradients, objective=replace(self.gradients.objective, draws=DRAWS))
        size = self.groups.config.rollout.group_size
        step = self.groups.config.rollout.batch_size
        self.groups.encode([self.groups.pairs[k] for k in mine])
        found: list[tuple[int, list[float]]] = []
        for k in mine + [0] * padding:
            row: list[float] = []
            for first in range(0, size, step):
                plan = BatchPlan(0, 0, tuple((0, member) for member in range(first, first + step)), world.dp_index)
                batch = self.groups.batch(self.groups.pairs[k], plan, HELD_OUT_GROUPS + k, 0)
                errors = torch.stack([drawn.error(batch, draw) for draw in range(DRAWS)])
                row += errors.double().mean(0).tolist()
            found.append((k, row))
        of_group = dict(world.gather_items(found))
        return np.array([of_group[k] for k in range(count)])

    def measure(self) -> tuple[Estimate, float]:
        """(share of the judged pairs that the current weights rank correctly, with its interval over prompts; mean of
        the winners' rewards minus the losers')."""
        rewards = self.before - self.errors()
        prompts: dict[tuple[object, ...], int] = {}
        rows: list[tuple[int, float]] = []
        for group, reward in zip(self.groups.pairs, rewards, strict=True):
            prompt = prompts.setdefault((group.prompt.text, group.prompt.source), len(prompts))
            verdicts = np.sign(np.triu(np.nan_to_num(group.wins, nan=0.5) - 0.5, 1))
            for i, j in zip(*np.nonzero(verdicts), strict=True):
                rows.append((prompt, float(verdicts[i, j] * (reward[i] - reward[j]))))
        margins = np.array([margin for _, margin in rows])
        if not rows:
            return Estimate(interval=Interval(prompts=0)), np.nan
        right = (np.sign(margins) + 1) / 2
        prompt_of = np.array([prompt for prompt, _ in rows])
        return Estimate(float(right.mean()), interval=interval(prompt_of, right)), float(margins.mean())


@dataclass
class Evaluator:
    """Renders and compares one held-out set; every rank processes its share of the images."""

    eval_set: EvalSet
    sizes: SamplingConfig
    adapter: Adapter
    schedules: Schedules
    embeddings: Embeddings
    scorer: Scorer
    world: World
    folder: RunFolder
    writer: Writer
    pairs: HeldOutPairs | None = None
    """Measured in this set's evaluations too."""
    before: list[Images] = field(default_factory=list)
    """This share's images of the initial policy, on its leader."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why values and verdicts of the last evaluation are missing, over all ranks, as in `StepScores.reasons`."""
    _storing: Future[None] | None = None
    """The writer's job that stores `before`."""

    @property
    def share(self) -> list[int]:
        """Indices of the images that this share renders."""
        return share_of(self.world, len(self.eval_set.items))

    @property
    def scored(self) -> list[int]:
        """Indices of the images that this process compares: those of its share, on the leader."""
        return self.share if self.world.is_dp_leader else []

    def start(self, resumed: bool) -> None:
        """Get the initial policy's images: rendered and stored by a new run, loaded by a resumed one."""
        if self.pairs is not None:
            self.pairs.start(resumed)
        name = self.eval_set.name
        files = [self.folder.initial_image(name, i) for i in self.scored]
        if resumed:
            if lacking := [file for file in files if not file.is_file()]:
                raise CheckpointError(f"{lacking[0]}, an image of the starting policy, is missing; choose another name")
            self.before = [np.load(file, allow_pickle=False)["image"] for file in files]
            return
        self.before = self.render(self.share)
        if self.world.is_dp_leader:
            self.folder.initial_image(name, 0).parent.mkdir(exist_ok=True)
            self._storing = self.writer.put(partial(_save_each, files, self.before))
        if self.world.main:
            in_report = [self.eval_set.items[i] for i in self.report_indices()]
            write_atomic(self.folder.prompts(name), json.dumps([item.text for item in in_report]))
            if arrays := as_arrays([sources_of(item, self.sizes).media() for item in in_report]):
                self.writer.put(partial(save_images, self.folder.sources(name), **arrays))

    def wait_stored(self) -> None:
        """Wait until the initial policy's images, without which no run is resumed, are stored."""
        if self._storing is not None:
            self._storing.result()

    def run(self, step: int) -> Comparison:
        """Evaluate the policy after `step` steps, over all ranks, and store the report's images. At step 0 it is the
        initial policy, whose images exist: they are scored, but compared with nothing."""
        index = self.scored
        now = self.render(self.share) if step else self.before
        pairs: list[BothSamples] = []
        for i, images in zip(index, zip(now, self.before, strict=True), strict=True):
            media = [Media(pixels, self.adapter.frame_rate) for pixels in images]
            pairs.append(BothSamples(*(sample(self.eval_set.items[i], one, self.sizes) for one in media)))
        found = compare(self.scorer, pairs) if step else tied(self.scorer, [pair.before for pair in pairs])
        self.reasons = sum(self.world.gather_items([found.reasons]), Counter[str]())
        self._save_report_images(step, index, now)
        self._save_outcomes(step, index, found)
        comparison = over_ranks(self.world, self.eval_set, index, found.measures)
        if self.pairs is None:
            return comparison
        accuracy, margin = self.pairs.measure()
        return replace(comparison, accuracy=accuracy, margin=margin)

    def render(self, index: list[int]) -> list[Images]:
        """Images [H, W, 3] or clips [F, H, W, 3] of the current policy under the ODE rule; called by all ranks, the
        leaders of shares get them."""
        items = [(prompt, self.eval_set.first_id + i) for i, prompt in enumerate(self.eval_set.items)]
        wanted = [items[i] for i in index]
        made = render(self.adapter, self.schedules, self.embeddings, wanted, self.sizes, self.world, items[0])
        of_position = dict(made)
        return [of_position[k] for k in sorted(of_position)]

    def report_indices(self) -> list[int]:
        """Indices of the IN_REPORT images for the report, evenly spaced over the set, on whichever rank they are."""
        count = len(self.eval_set.items)
        return np.linspace(0, count - 1, min(IN_REPORT, count)).round().astype(int).tolist()

    def _save_report_images(self, step: int, index: list[int], now: list[Images]) -> None:
        """Gather the report's images, before and now, and store them."""
        rows = [k for k, i in enumerate(index) if i in self.report_indices()]
        pairs = [(preview(self.before[k]), preview(now[k])) for k in rows]
        if (gathered := self.world.gather_items(pairs)) and self.world.main:
            before, after = (np.stack([pair[k] for pair in gathered]) for k in range(2))
            file = self.folder.report_images(self.eval_set.name, step)
            arrays = {"before": before, "now": after}
            if rate := self.adapter.frame_rate:
                arrays["seconds"] = np.array((self.adapter.frames(self.sizes) or 1) / rate)
            self.writer.put(partial(save_images, file, **arrays), pictures=True)

    def _save_outcomes(self, step: int, index: list[int], found: Compared) -> None:
        """Store the wins of every image, and the judge's answers for the images in the report."""
        in_report = self.report_indices()
        mine = list[dict[str, Any]]()
        for i, measures, answers in zip(index, found.measures, found.answers, strict=True):
            won = {key: measures[subject].wins for subject, key in keys_of(measures).items()}
            wins = {key: win for key, win in won.items() if win is not None}
            outcome = {"prompt": self.eval_set.group[i], "wins": finite(wins)}
            mine.append(outcome | ({"answers": [asdict(answer) for answer in answers]} if i in in_report else {}))
        if (every := self.world.gather_items(mine)) and self.world.main:
            write_atomic(self.folder.outcomes(self.eval_set.name, step), json.dumps(every))


def _save_each(files: Sequence[Path], images: Sequence[Images]) -> None:
    for file, image in zip(files, images, strict=True):
        save_images(file, image=image)


def share_of(world: World, count: int) -> list[int]:
    """Indices of this rank's share of `count` images, which are consecutive."""
    each = -(-count // world.dp_size)
    return list(range(world.dp_index * each, min((world.dp_index + 1) * each, count)))


def over_ranks(world: World, eval_set: EvalSet, index: Sequence[int], measures: Sequence[PairMeasures]) -> Comparison:
    """The comparison on a set from the measures of all ranks, each of the pairs of the images `index`."""
    mine = [(eval_set.group[i], of_pair) for i, of_pair in zip(index, measures, strict=True)]
    groups, every = zip(*world.gather_items(mine), strict=True)
    return compared(eval_set.name, groups, every)


def evaluation_scorer(config: Config, rewards: Mapping[str, Reward]) -> Scorer:
    """The scorer of (current, initial) pairs under the rewards of `config.measured`: pairs are compared in both orders,
    and a judge's answers are rounded to won, tied or lost."""
    trained = {entry.name for entry in config.rewards if entry.weight and entry in config.measured}
    rewards = dict(sorted(rewards.items(), key=lambda item: item[0] not in trained))
    return Scorer(rewards, 2, config.judge.deadline_s, config.seed, plan=both_orders)


def judges_of(rewards: Mapping[str, Reward]) -> dict[str, str]:
    """Name of each pairwise judge → its name in an evaluation: `judge` for the first, which is a trained one if there
    is one; the others keep their names."""
    names = [name for name, reward in rewards.items() if reward.compares and reward.judged]
    return {name: name if k else "judge" for k, name in enumerate(names)}


def compare(scorer: Scorer, pairs: Sequence[BothSamples]) -> Compared:
    """All rewards' measures of each pair, with the judges' answers."""
    scores = _scored(scorer, pairs)
    judges = _judges(scorer)
    measures: list[PairMeasures] = [{} for _ in pairs]
    answers: list[list[JudgedOrder]] = [[] for _ in pairs]
    for reward, groups in scores.scores.items():
        for k, (of_pair, both) in enumerate(zip(measures, groups, strict=True)):
            of_pair |= {judges[reward]: _judged(scores, reward, k)} if reward in judges else _valued(reward, *both)
    for reward, of_pairs in scores.answers.items():
        for orders, verdicts in zip(answers, of_pairs, strict=True):
            for (first, _), v in verdicts.items():
                orders.append(JudgedOrder(reward, ("after", "before")[first], v.value, v.reason, head_and_tail(v.raw)))
    return Compared(measures, answers, Counter(scores.reasons))


def tied(scorer: Scorer, samples: Sequence[Sample]) -> Compared:
    """The measures of each sample against itself: a tie, which no judge is asked about."""
    scores = _scored(scorer, [[one] for one in samples])  # no opponent: nothing is compared
    judges = _judges(scorer)
    measures: list[PairMeasures] = [{} for _ in samples]
    reasons = Counter[str]()
    for reward, groups in scores.scores.items():
        for of_pair, (score, _) in zip(measures, groups, strict=True):
            if reward in judges:
                of_pair[judges[reward]] = Measure(wins=0.5)
                continue
            if scorer.rewards[reward].compares:
                score = Answer(0.5)
            elif score.value is None:
                reasons[f"{reward}: {score.reason}"] += 1
            of_pair |= _valued(reward, score, score)
    return Compared(measures, [[] for _ in samples], reasons)


def _scored(scorer: Scorer, groups: Sequence[Sequence[Sample]]) -> StepScores:
    """The scores of groups of samples."""
    scorer.begin(0, range(len(groups)))
    for number, members in enumerate(groups):
        for member, one in enumerate(members):
            scorer.add(number, member, one)
    return scorer.finish()


def _judges(scorer: Scorer) -> dict[str, Subject]:
    """Name of each judge of pairs → what it measures."""
    return {name: Subject(name) if k else JUDGE for k, name in enumerate(judges_of(scorer.rewards))}


def _judged(scores: StepScores, judge: str, pair: int) -> Measure[float]:
    """A judge's measure of a pair."""
    wins, counts = scores.comparisons[judge][pair, :, 0, 1].tolist()
    verdicts = scores.answers[judge][pair]
    p = [verdicts[order].value if order in verdicts else None for order in ((0, 1), (1, 0))]
    first, second = (math.nan if value is None else value for value in p)
    rate = wins / counts if counts else math.nan
    return Measure(wins=rate, first=_win(first - 0.5), second=_win(0.5 - second))


def _valued(reward: str, now: Answer, before: Answer) -> PairMeasures:
    """The measures of another reward, and of its parts, of a pair."""
    value, old = (math.nan if score.value is None else score.value for score in (now, before))
    out: PairMeasures = {Subject(reward): Measure(value, old, wins=_win(value - old))}
    for part in now.parts.keys() | before.parts.keys():
        out[Subject(reward, part)] = Measure(now.parts.get(part, math.nan), before.parts.get(part, math.nan))
    return out


def _win(difference: float) -> float:
    """1, a tie ½ or 0 by the sign of a difference; NaN for NaN."""
    return float(np.sign(difference) + 1) / 2
