"""Evaluation: ODE samples of held-out prompts with fixed noise, compared with those of the initial policy.

Images before and after training share their initial latents, so comparisons are paired: by the judge in both orders,
and by rewards (win 1, tie ½). Invariant: evaluation never affects the training loss.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import save_images, write_atomic
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import GroupScores, Sample
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rollout.embeddings import Embeddings, sources_of
from prefgrpo.rollout.render import Images, preview, render, sample, to_uint8
from prefgrpo.rollout.sampling import eval_sampling
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.comparison import Comparison, Row, over_ranks
from prefgrpo.run.log import finite
from prefgrpo.run.metrics import PARTS_OF_WINS
from prefgrpo.run.run_folder import RunFolder
from prefgrpo.sde.schedule import Schedule

MAX_ANSWER_CHARS = 2000
"""Maximum number of stored characters of a judge's answer."""
IN_REPORT = 12
"""Images of an evaluation that the report shows."""
FIRST_ID = 2**62
"""First sample id of evaluation noise, far from those of training."""


@dataclass(frozen=True)
class EvalSet:
    """One set of held-out prompts."""

    name: str
    items: list[Prompt]
    """One entry per image: each prompt `samples_per_prompt` times."""
    group: NDArray[np.int64]
    """Prompt index of each image."""
    first_id: int


def make_eval_set(name: str, prompts: list[Prompt], samples: int, number: int) -> EvalSet:
    """The `number`-th evaluation set, each prompt repeated `samples` times."""
    items = [p for p in prompts for _ in range(samples)]
    return EvalSet(name, items, np.repeat(np.arange(len(prompts)), samples), FIRST_ID + number * 2**40)


class Evaluator:
    """Renders and compares one held-out set; every rank processes its share of the images."""

    def __init__(
        self,
        eval_set: EvalSet,
        config: Config,
        adapter: Adapter,
        schedule: Schedule,
        embeddings: Embeddings,
        scorers: dict[str, Scorer],
        world: World,
        folder: RunFolder,
    ) -> None:
        self.eval_set, self.config, self.adapter, self.schedule = eval_set, config, adapter, schedule
        self.embeddings, self.scorers, self.world, self.folder = embeddings, scorers, world, folder
        self.sizes = eval_sampling(config)
        self.before: Images = np.zeros((0, 1, 1, 3), np.uint8)
        """This rank's images of the initial policy."""
        self.reasons = Counter[str]()
        """Why values and verdicts of the last evaluation are missing, over all ranks, as in `StepScores.reasons`."""

    def start(self, resumed: bool) -> None:
        """Get the initial policy's images: rendered and stored by a new run, loaded by a resumed one."""
        name, mine = self.eval_set.name, self.local_indices()
        if resumed:
            self.before = load_initial_images(self.folder, name, self.world.dp_size)[mine]
            return
        self.before = self.render(mine)
        if self.world.is_dp_leader:
            save_images(self.folder.initial_images(name, self.world.dp_index, self.world.dp_size), images=self.before)
        if self.world.main:
            shown = [self.eval_set.items[i] for i in self.report_indices()]
            write_atomic(self.folder.prompts(name), json.dumps([item.text for item in shown]))
            if any(item.source for item in shown):  # several of a prompt side by side
                fitted = [sources_of(item, self.sizes).media() for item in shown]
                rows = [np.concatenate([media.pixels for media in of_prompt], axis=1) for of_prompt in fitted]
                save_images(self.folder.sources(name), sources=np.stack(rows))

    def run(self, step: int) -> Comparison:
        """Evaluate the policy after `step` steps, over all ranks, and store the report's images."""
        index, eval_set = self.local_indices(), self.eval_set
        now = self.render(index)
        images = zip(now, self.before, strict=True)
        items = [eval_set.items[i] for i in index]
        pairs = [tuple(sample(p, m, self.sizes) for m in both) for p, both in zip(items, images, strict=True)]
        reasons = Counter[str]()
        table, answers = compare(self.scorers, pairs if self.world.is_dp_leader else [], reasons)
        self.reasons = sum(map(Counter, self.world.gather_items([reasons])), Counter[str]())
        self._save_report_images(step, now)
        self._save_outcomes(step, table, answers)
        return over_ranks(self.world, eval_set.name, eval_set.group[index], table)

    @torch.no_grad()
    def render(self, index: list[int]) -> Images:
        """Images [n, H, W, 3], or clips [n, F, H, W, 3], of the current policy under the ODE rule.

        With `World.equal_forwards` all processes must call this together; those with fewer images repeat one.
        """
        r = self.sizes
        parts = list[Images]()
        count = len(index)
        mixed = len({len(item.source) for item in self.eval_set.items}) > 1  # a batch has one number of source images
        size = 1 if mixed else r.batch_size
        if self.world.equal_forwards:
            most = int(self.world.gather(np.array([float(count)])).max())
            index = index + [0] * (most - count)
        for start in range(0, len(index), size):
            chunk = index[start : start + size]
            items = [self.eval_set.items[i] for i in chunk]
            ids = self.ids(chunk)
            made = render(self.adapter, self.schedule, self.embeddings, items, ids, r, self.config.seed, self.world)
            parts.append(to_uint8(made))
        frames = self.adapter.frames(r) or 1
        shape = (*(frames,) * (frames > 1), r.height, r.width, 3)
        return np.concatenate(parts)[:count] if parts else np.zeros((0, *shape), np.uint8)

    def ids(self, index: list[int]) -> Tensor:
        """Noise addresses of the given images, int64."""
        return torch.tensor([self.eval_set.first_id + i for i in index], dtype=torch.int64, device=self.world.device)

    def local_indices(self) -> list[int]:
        """Indices of this rank's images."""
        return share_of(self.world, len(self.eval_set.items))

    def report_indices(self) -> list[int]:
        """Indices of the IN_REPORT images for the report, evenly spaced over the set, on whichever rank they are."""
        count = len(self.eval_set.items)
        return np.linspace(0, count - 1, min(IN_REPORT, count)).round().astype(int).tolist()

    def _save_report_images(self, step: int, now: Images) -> None:
        """Gather the report's images, before and now, and store them."""
        wanted = set(self.report_indices())
        rows = [k for k, i in enumerate(self.local_indices()) if i in wanted]
        pairs = zip(preview(self.before[rows]), preview(now[rows]), strict=True) if rows else ()
        if (shown := self.world.gather_items(pairs)) and self.world.main:
            before, after = (np.stack([pair[k] for pair in shown]) for k in range(2))
            save_images(self.folder.report_images(self.eval_set.name, step), before=before, now=after)

    def _save_outcomes(self, step: int, table: list[Row], answers: list[list[AnswerRow]]) -> None:
        """Store the wins of every image, and the judge's answers for the images in the report."""
        shown, mine = set(self.report_indices()), list[dict[str, Any]]()
        for i, row, own in zip(self.local_indices(), table, answers, strict=False):
            wins = {n[4:]: v for n, v in row.items() if n.startswith("win_") and not n.endswith(PARTS_OF_WINS)}
            outcome = {"prompt": int(self.eval_set.group[i]), "wins": finite(wins)}
            mine.append(outcome | ({"answers": own} if i in shown else {}))
        if (every := self.world.gather_items(mine)) and self.world.main:
            write_atomic(self.folder.outcomes(self.eval_set.name, step), json.dumps(every))


AnswerRow = dict[str, Any]
"""A judge's answer to a pair: judge, first ("after" or "before" the training), p_first, reason, raw."""


def compare(
    scorers: Mapping[str, Scorer], pairs: Sequence[tuple[Sample, ...]], reasons: Counter[str] | None = None
) -> tuple[list[Row], list[list[AnswerRow]]]:
    """(measures of all scorers, the judges' answers) for each pair (now, before); scorers of judges are named judge,
    judge2 … `reasons` is increased by those for missing values and verdicts."""
    table: list[Row] = [{} for _ in pairs]
    answers: list[list[AnswerRow]] = [[] for _ in pairs]
    for name, scorer in scorers.items() if pairs else ():
        scorer.begin(0, range(len(pairs)))
        for number, pair in enumerate(pairs):
            for member, one in enumerate(pair):
                scorer.add(number, member, one)
        scores = scorer.finish()
        if reasons is not None:
            reasons.update(scores.reasons)
        for reward, groups in scores.groups.items():
            for row, own, group in zip(table, answers, groups, strict=True):
                row.update(_measures(name, reward, group))
                for c in group.comparisons:
                    shown = {"judge": reward, "first": ("after", "before")[c.first], "p_first": c.verdict.first}
                    own.append(shown | {"reason": c.verdict.reason, "raw": c.verdict.raw[:MAX_ANSWER_CHARS]})
    return table, answers


def share_of(world: World, count: int) -> list[int]:
    """Indices of this rank's share of `count` images, which are consecutive."""
    each = -(-count // world.dp_size)
    return list(range(world.dp_index * each, min((world.dp_index + 1) * each, count)))


def _measures(kind: str, reward: str, group: GroupScores) -> Row:
    """Measures of one reward on a group (now, before): a judge's verdicts, or values and wins (1, tie ½, 0)."""
    if kind.startswith("judge"):
        first, second = group.mean_p_first(0, 1), group.mean_p_first(1, 0)
        in_either = {f"win_{kind}_first": _win(first - 0.5), f"win_{kind}_second": _win(0.5 - second)}
        return {f"win_{kind}": _win_rate(group)} | in_either
    both = {reward: [math.nan if s.value is None else s.value for s in group.scores]}
    for part in sorted({part for s in group.scores for part in s.parts}):
        both[f"{reward}.{part}"] = [s.parts.get(part, math.nan) for s in group.scores]
    row = {f"win_{reward}": _win(both[reward][0] - both[reward][1])}
    for name, (now, before) in both.items():
        row |= {name: now, f"{name}_before": before}
    return row


def _win(difference: float) -> float:
    """1, a tie ½ or 0 by the sign of a difference; NaN for NaN."""
    return float(np.sign(difference) + 1) / 2


def _win_rate(group: GroupScores) -> float:
    """Mean verdict that the first member beats the second; NaN without a verdict."""
    if group.wins is None or group.counts is None or group.counts[0, 1] == 0:
        return float("nan")
    return float(group.wins[0, 1] / group.counts[0, 1])


def load_initial_images(folder: RunFolder, name: str, size: int) -> Images:
    """The initial policy's images of the whole set, as written by `size` ranks or else by another number of ranks.

    Raises CheckpointError if any are missing.
    """
    by_size = folder.all_initial_images(name)
    for files in sorted(by_size.values(), key=lambda files: len(files) != size):
        if all(f.is_file() for f in files):
            return np.concatenate([np.load(f, allow_pickle=False)["images"] for f in files])
    lacking = f"lacks images of the starting policy ({name}_before_*.npz)"
    raise CheckpointError(f"{folder.eval} {lacking}; choose another name")
