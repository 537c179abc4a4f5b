"""The training loop, for every family, reward and objective.

    prompts → rollout → judge (streamed) → advantage → gradients of the objective → AdamW

Noise, prompts and pair orders are functions of (seed, step), so a step depends only on the weights and its number.
With rollout.staleness, a step also generates the rollout of the next one, before its own update.
Invariant: every decision (skip, stop, checkpoint) follows from gathered numbers, so all ranks take the same one.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import save_images, write_folder
from prefgrpo.data.prompts import fingerprint
from prefgrpo.judge.information import Alarm, extent
from prefgrpo.objectives.base import Targets
from prefgrpo.ops import winrate_advantage
from prefgrpo.parallel.shard import full_copies
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.assignment import update_of
from prefgrpo.rollout.batches import Batch
from prefgrpo.rollout.render import stills
from prefgrpo.run.advantage import CombineError, Parts, advantages, by_comparisons, part_table
from prefgrpo.run.checkpoint import CheckpointError, Checkpoints
from prefgrpo.run.log import Log
from prefgrpo.run.metrics import (
    NoInformation,
    RewardsMissing,
    check_missing,
    eval_line,
    missing_shares,
    over_ranks,
    pixel_distance,
    policy_metrics,
    reward_metrics,
    thumbnail,
)
from prefgrpo.run.policy import NonFiniteGradient
from prefgrpo.run.session import Clock, open_session, peak_memory
from prefgrpo.run.trackers import open_trackers

REASONS_SHOWN = 3
"""Reasons for missing rewards that a step prints, most frequent first; a run prints ten times as many."""


SKIPS = 3
"""Consecutive updates with a non-finite gradient after which a run ends."""


class TrainingStopped(RuntimeError):
    """The run stopped but can be resumed; the message says from where, and what to fix."""


class Diverged(RuntimeError):
    """The policy generates non-finite latents."""


@dataclass(frozen=True)
class StepRollout:
    """A step's samples on this process; the scorer holds their images or clips."""

    batches: list[Batch]
    updates: int
    """Optimiser updates that the policy which generated them had received."""


@dataclass(frozen=True)
class Callbacks:
    """Functions called on rank 0 during a run; an exception in one of them ends the run."""

    on_step: Callable[[int, dict[str, float]], object] | None = None
    """After training step 1, 2, …, with the step's metrics."""
    on_evaluation: Callable[[int, str, dict[str, float]], object] | None = None
    """After an evaluation of the set `name` (dev or test) following so many steps."""
    on_save: Callable[[Path], object] | None = None
    """After a checkpoint folder was written."""


class TrainingLoop:
    """One run: `TrainingLoop(config, resume).run()`."""

    def __init__(self, config: Config, resume: bool = False, callbacks: Callbacks | None = None) -> None:
        self.session, self.callbacks = open_session(config, resume), callbacks or Callbacks()
        self.config = config = self.session.config
        self.world, self.adapter, self.policy = self.session.world, self.session.adapter, self.session.policy
        self.folder, self.scorer, self.rollouts = self.session.folder, self.session.scorer, self.session.rollouts
        self.evaluators = self.session.evaluators
        self.product = self.folder.product(lora=config.train.lora_rank > 0)
        self.log = Log(
            self.folder,
            config.train.steps,
            self.session.start,
            trackers=open_trackers(config, self.folder, self.session.start) if self.world.main else (),
            active=self.world.main,
        )
        self.objective, self.collector = self.session.objective, self.session.collector
        self.checkpoints = Checkpoints(self.folder, self.world)
        self.evaluation: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.verdict = ""
        """Its summary line."""
        self._skips = 0
        """Consecutive skipped updates."""
        self._ahead: StepRollout | None = None
        """Samples of the next step (rollout.staleness)."""
        self._staleness_logged = False
        self._reasons_shown: set[str] = set()
        self._by_comparisons = by_comparisons(self.scorer.rewards, self.session.weights, config.reward)
        self._alarms = {name: Alarm() for name, weight in self.session.weights.items() if weight}

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train to the end. Returns the run folder.

        Raises TrainingStopped, after saving, if too many rewards are missing, verdicts carry no information, or
        gradients stay non-finite.
        """
        c, done = self.config, self.session.start
        try:
            for note in self.session.notes:
                self.log.say(note)
            for name, evaluator in self.evaluators.items():
                evaluator.start(resumed=done > 0)
                if not done:
                    self._evaluate(0, name)
            while done < c.train.steps:
                clock = Clock()
                metrics = self._guarded_step(done, clock)
                done += 1
                self.session.trained_s += sum(clock.seconds.values())
                self._report(done, metrics, clock)
                if c.eval.every and done % c.eval.every == 0 and "dev" in self.evaluators:
                    self._evaluate(done, "dev")
                self._saved(wait=self.world.any(self.checkpoints.failed))
                interrupted = self.world.any(self.session.interrupt.seen)
                if done % c.checkpoint.every == 0 or interrupted:
                    self._save(done)
                if interrupted:
                    self._saved(wait=True)
                    raise TrainingStopped(f"interrupted after step {done}; continue with the same command and --resume")
            self._finish(done)
        except CheckpointError as error:
            raise TrainingStopped(f"step {done}: {error}\n{self._make_room()}") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise TrainingStopped(f"disk full after step {done}: {error}\n{self._make_room()}") from error
        finally:
            self.close()
        return self.folder.root

    def step(self, step: int, clock: Clock) -> dict[str, float]:
        """Training step number `step` (from 0): metrics over all ranks."""
        with clock.phase("rollout"):  # samples are judged as soon as they are decoded
            rollout = self._ahead or self.generate(step)
            self._ahead = self.generate(step + 1, ahead=True) if self._generates_ahead(step + 1) else None
        groups, stale = self.rollouts.groups(step), self.policy.updates - rollout.updates
        streamed = sum(reward.streams for reward in self.scorer.rewards.values()) * len(groups)
        with clock.phase("judge_wait"), self.log.bar("judging", "group", streamed) as bar:
            distances = self._distances()  # while the judge answers
            scores = self.scorer.finish(bar.update)
        self._save_groups(step + 1, scores)
        targets, metrics = self.targets(step + 1, scores)
        with clock.phase("update"):
            metrics |= self.update(step, rollout.batches, targets)
            self.policy.update_old(self.objective.old_decay(step))
        if self.config.rollout.staleness:
            metrics["policy/staleness"] = float(stale)
        if stale:
            metrics.pop("policy/on_policy_error", None)
        distances = self.world.gather_slots(distances, self.config.rollout.prompts_per_step)
        metrics["diversity/pixels"] = float(distances.mean())
        return metrics | over_ranks(scores.metrics, self.world)

    def generate(self, step: int, ahead: bool = False) -> StepRollout:
        """Generate a step's samples with the current policy, passing each to the scorer as soon as it is decoded.

        ahead: the scores of the previous step are still outstanding. Raises Diverged.
        """
        batches = list[Batch]()
        weights = self.policy.use_weights(self.policy.old if self.objective.sampled_by_old else {})
        with weights, self.log.bar("rollout", "sample", self.rollouts.count(step)) as bar:
            self.scorer.begin(step, self.rollouts.groups(step), ahead)
            for batch in self.rollouts(step, self.scorer.add):
                batches.append(batch)
                bar.update(len(batch.slots))
            finite = [batch.trajectory.latents.isfinite().all() for batch in batches]
            if self.world.any(bool(finite) and not torch.stack(finite).all()):
                raise Diverged("the policy produces latents that are not finite (NaN or infinite)")
        return StepRollout(batches, self.policy.updates)

    def _generates_ahead(self, step: int) -> bool:
        """Whether a step's samples are generated before the previous step's update; the same on all ranks."""
        every, steps = self.config.checkpoint.every, self.config.train.steps
        return self.config.rollout.staleness > 0 and step % every != 0 and step < steps

    def _distances(self) -> NDArray[np.float64]:
        """Mean distance between the images of each group scored here, from small versions of them; NaN if unknown."""
        made = self.scorer.generated().values()
        small = [[thumbnail(samples[g].media.pixels) for g in sorted(samples)] for samples in made]
        return np.array([pixel_distance(np.stack(images)) if images else np.nan for images in small])

    def close(self) -> None:
        """Close the log and the session, when the last checkpoint is written."""
        self.checkpoints.close()
        self.log.close()
        self.session.close()

    def _guarded_step(self, step: int, clock: Clock) -> dict[str, float]:
        """One step; errors that end the run become TrainingStopped, after a checkpoint if no weight has changed yet."""
        updates = self.policy.updates
        try:
            return self.step(step, clock)
        except (NonFiniteGradient, RewardsMissing, NoInformation, Diverged, CombineError) as error:
            self.policy.optimizer.zero_grad()
            if self.policy.updates == updates and not isinstance(error, Diverged):
                advice = f"Checkpoint saved to {self._save(step)}. Fix the cause, then rerun with --resume."
                self._saved(wait=True)
            else:
                newest = self.folder.latest()
                advice = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
                advice += "; continue from there with --resume and a lower --train.lr"
            raise TrainingStopped(f"step {step + 1}: {error}\n{advice}") from error

    # ---- advantages -------------------------------------------------------------------------------------------------

    def targets(self, step: int, scores: StepScores) -> tuple[Targets, dict[str, float]]:
        """(advantages and comparisons of all ranks' samples; metrics). Raises RewardsMissing or NoInformation."""
        c, weights, group_size = self.config.reward, self.session.weights, self.config.rollout.group_size
        rewards, sub_scores, parts = self._gather_rewards(scores)
        shares = self._missing_shares(step, scores, rewards)
        wins, pair_counts = self._comparisons(scores)
        trained = np.array(list(weights.values())) != 0
        scored = known = torch.from_numpy(~np.isnan(rewards[:, trained]).any(1)).view(-1, group_size)
        if self._by_comparisons:
            _, advantage = winrate_advantage(wins, pair_counts, std=c.std, eps=c.eps, ddof=c.ddof)
        else:
            advantage, known = advantages(rewards, weights, group_size, c, parts, sub_scores, self.world.device)
        if lost := int(scored.sum()) - int(known.sum()):
            self._say_missing(f"step {step}", Counter({"reward.combine has no finite value for these rewards": lost}))
            shares["reward/missing"] = 1.0 - float(known.float().mean())
        self._check_information(step, scores)
        targets = Targets(advantage, wins.float(), pair_counts.float(), known.to(advantage.device))
        return targets, reward_metrics(list(weights), rewards, group_size) | shares | {
            "advantage/zero_groups": float((advantage == 0).all(1).float().mean()),
            "advantage/max": float(advantage.abs().max()),
        }

    def _gather_rewards(self, scores: StepScores) -> tuple[NDArray[np.float64], NDArray[np.float64], Parts]:
        """(rewards [P · G, R] and sub-scores [P · G, K] of all ranks' samples, parts of the sub-scores)."""
        names = list(self.session.weights)
        local = np.stack([scores.values[n] for n in names], axis=-1)  # [groups scored here, G, R]
        parts = {n: w for n in names if (w := self.scorer.rewards[n].part_weights)}
        if parts:
            own = part_table(scores.groups, parts).reshape(*local.shape[:2], sum(map(len, parts.values())))
            local = np.concatenate([local, own], axis=-1)
        table = self.world.gather_slots(local, self.config.rollout.prompts_per_step).reshape(-1, local.shape[-1])
        return table[:, : len(names)], table[:, len(names) :], parts

    def _missing_shares(self, step: int, scores: StepScores, rewards: NDArray[np.float64]) -> dict[str, float]:
        """Shares of missing rewards and comparisons, whose reasons are logged. Raises RewardsMissing."""
        weights = np.array(list(self.session.weights.values()))
        verdicts = [[k.verdict.first for g in scores.groups[n] for k in g.comparisons] for n in self.session.weights]
        counts = self.world.gather(np.array([[(len(v), v.count(None)) for v in verdicts]], np.float64)).sum(0)
        shares, reasons = missing_shares(rewards, weights, counts), Counter[str]()
        if np.isnan(rewards).any() or counts[:, 1].any():
            reasons = sum(map(Counter, self.world.gather_items([scores.reasons])), reasons)
        self._say_missing(f"step {step}", reasons)
        if warning := check_missing(shares, self.config.judge.max_missing, list(reasons)):
            self.log.say(f"WARNING: step {step}: {warning}")
        return shares

    def _say_missing(self, where: str, reasons: Counter[str]) -> None:
        """Print the most frequent reasons for missing rewards that the run has not printed yet."""
        for reason, count in reasons.most_common(REASONS_SHOWN):
            if reason not in self._reasons_shown and len(self._reasons_shown) < 10 * REASONS_SHOWN:
                self._reasons_shown.add(reason)
                self.log.say(f"missing in {where}: {count} × {reason}")

    def _comparisons(self, scores: StepScores) -> tuple[Tensor, Tensor]:
        """Wins and counts, fp64 [P, G, G] each on the device, of all ranks' groups; rewards count by their weights."""
        size, total = self.config.rollout.group_size, self.config.rollout.prompts_per_step
        local = np.zeros((len(self.world.slots(total)), 2, size, size))
        for name, weight in self.session.weights.items():
            for k, group in enumerate(scores.groups[name]):
                if weight > 0 and group.wins is not None and group.counts is not None:
                    local[k] += weight * np.stack([group.wins, group.counts])
        wins, counts = torch.from_numpy(self.world.gather_slots(local, total)).to(self.world.device).unbind(1)
        return wins, counts

    def _check_information(self, step: int, scores: StepScores) -> None:
        """Warn of verdicts without information; raise NoInformation after `judge.patience_steps` such steps."""
        local = []
        for name in self._alarms:
            reward = self.scorer.rewards[name]
            rounded = isinstance(reward, VlmPairwise) and reward.rating.verdict == "hard"
            local.append(extent((c.verdict.first for g in scores.groups[name] for c in g.comparisons), rounded))
        ranks = self.world.gather(np.stack(local)[None])
        patience = self.config.judge.patience_steps
        for k, (name, alarm) in enumerate(self._alarms.items()):
            if not (problem := alarm.add(ranks[:, k])):
                continue
            message = f"{name}: the judge's verdicts carry no information: {problem}"
            if patience and alarm.steps >= patience:
                raise NoInformation(f"{message}; {alarm.steps} steps in a row (judge.patience_steps)")
            self.log.say(f"WARNING: step {step}, {message}; {alarm.steps} of judge.patience_steps = {patience}")

    # ---- update -----------------------------------------------------------------------------------------------------

    def update(self, step: int, batches: list[Batch], targets: Targets) -> dict[str, float]:
        """The step's optimiser updates, each on its own samples; updates without any signal are skipped on all ranks.

        Groups without signal are dropped and cost no forward. A batch that loses samples has another shape than in the
        rollout, so its first ratio is 1 only up to rounding. Updates with a non-finite gradient are skipped as well;
        SKIPS in a row raise NonFiniteGradient.
        """
        r, table, norms, skipped = self.config.rollout, list[Tensor](), list[float](), 0
        keep = ~self.objective.signal(self.config.train, targets).isnan().cpu().numpy()  # [P, G]
        places = [(p, g) for p in range(r.prompts_per_step) for g in range(r.group_size)]
        samples = Counter(update_of(self.config, place) for place in places)
        trained = {update_of(self.config, place) for place in places if keep[place]}
        counted = self.objective.samples_per_group(r.group_size) / r.group_size
        left = self.rollouts.training_batches(step, batches, keep)
        for update in sorted(trained):
            own = [batch for batch in left if batch.update == update]
            table += self.collector.accumulate(own, targets, samples[update] * counted)
            try:
                norms.append(self.policy.update(self.world))
                self._skips = 0
            except NonFiniteGradient as error:
                skipped, self._skips = skipped + 1, self._skips + 1
                if self._skips >= SKIPS:
                    raise NonFiniteGradient(f"{error}, in {SKIPS} updates in a row") from error
        return policy_metrics(table, self.world, self.collector.metrics) | {
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "samples_trained": float(keep.sum()),
            "updates_skipped": float(skipped),
        }

    # ---- what is written --------------------------------------------------------------------------------------------

    def _report(self, step: int, metrics: dict[str, float], clock: Clock) -> None:
        """Write the metrics row and the summary line of a finished step."""
        first, trained = step == self.session.start + 1, metrics["samples_trained"] > 0
        row = metrics | {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
        self.log.row("train", step, row)
        self.log.step(step, metrics, clock.seconds)
        error, limit = metrics.get("policy/on_policy_error"), self.config.train.clip_range / 10
        if trained and error is not None and (first or error > limit):
            verdict = "exact" if error == 0 else "fine" if error <= limit else f"above clip_range / 10 = {limit:.1e}"
            r, cut = self.config.rollout, metrics["advantage/zero_groups"] > 0
            if error and cut and r.group_size % r.batch_size:
                verdict += "; zero-advantage groups were dropped from batches of several groups: it is exact if "
                verdict += "rollout.batch_size divides rollout.group_size"
            self.log.say(f"on-policy check, step {step}: max |ratio - 1| = {error:.1e} ({verdict})")
        if metrics.get("policy/staleness") and not self._staleness_logged:
            self._staleness_logged = True
            ratio = max(abs(metrics.get(f"policy/ratio_{end}", 1.0) - 1.0) for end in ("min", "max"))
            self.log.say(
                f"step {step} trains on samples of a policy {metrics['policy/staleness']:.0f} update(s) old "
                f"(rollout.staleness), so the on-policy check is skipped: max |ratio - 1| = {ratio:.1e}"
            )
        if first:
            self.log.say(f"peak memory after step {step}: {peak_memory(self.world.device) / 2**30:.2f} GiB")
        if self.callbacks.on_step and self.world.main:
            self.callbacks.on_step(step, row)

    def _save_groups(self, step: int, scores: StepScores, most: int = 3) -> None:
        """Images, wins, counts, win rates, prompts and sources (side by side, as the model saw them) of a few judged
        groups of one size for the report: of the first and the last step, and of those with an evaluation."""
        every = self.config.eval.every or 50
        if not self.world.main or not (step in (1, self.config.train.steps) or step % every == 0):
            return

        def shapes(sample: Sample) -> list[tuple[int, ...]]:
            return [media.pixels.shape for media in (sample.media, *sample.source)]

        judged = [
            ([made[g] for g in sorted(made)], group)
            for groups in scores.groups.values()
            for made, group in zip(self.scorer.samples.values(), groups, strict=True)
            if group.wins is not None
        ]
        judged = [(m, g) for m, g in judged if shapes(m[0]) == shapes(judged[0][0][0])][:most]
        sources = [np.concatenate([s.pixels for s in m[0].source], axis=1) for m, _ in judged if m[0].source]
        if judged:
            save_images(
                self.folder.group(step),
                images=np.stack([stills(np.stack([s.media.pixels for s in members])) for members, _ in judged]),
                wins=np.stack([np.asarray(g.wins) for _, g in judged]),
                counts=np.stack([np.asarray(g.counts) for _, g in judged]),
                rates=np.array([[np.nan if s.value is None else s.value for s in g.scores] for _, g in judged]),
                prompts=np.array([members[0].prompt for members, _ in judged]),
                **({"sources": np.stack(sources)} if sources else {}),
            )

    def _evaluate(self, step: int, name: str) -> None:
        """Compare the current (averaged) policy with the initial one on a held-out set."""
        clock = Clock()
        with clock.phase("eval"), self.policy.use_ema():
            self.evaluation = self.evaluators[name].run(step)
        self.log.row("eval", step, {"set": name} | self.evaluation | {"time/eval": clock.seconds["eval"]})
        self.verdict = eval_line(step, name, self.evaluation)
        self.log.say(self.verdict)
        self._say_missing(f"the evaluation after step {step}", self.evaluators[name].reasons)
        if self.callbacks.on_evaluation and self.world.main:
            self.callbacks.on_evaluation(step, name, self.evaluation)

    def _save(self, done: int) -> Path:
        """Start to write the checkpoint after `done` steps; training goes on meanwhile."""
        meta = {
            "updates": self.policy.updates,
            "trained_s": self.session.trained_s,
            "prompts": fingerprint(self.rollouts.prompts),
        }
        self._saved(wait=True)
        self.checkpoints.save(done, self.policy.state_dict(), meta)
        return self.folder.checkpoint(done)

    def _saved(self, wait: bool = False) -> None:
        """Report a checkpoint that has been written since the last call; wait: for the one that is being written."""
        if wait:
            self.checkpoints.wait()
        path = self.checkpoints.completed()
        if path is not None and self.callbacks.on_save and self.world.main:
            self.callbacks.on_save(path)

    def _make_room(self) -> str:
        newest = self.folder.latest()
        return "Free disk space, then " + (
            f"continue from {newest} with --resume" if newest else "start again: there is no checkpoint yet"
        )

    def _copies(self) -> dict[str, nn.Module]:
        """Full (averaged) copies of sharded trained weights on rank 0; every rank must call this."""
        if self.config.train.lora_rank or not self.world.layout.fsdp:
            return {}
        with self.policy.use_ema():
            return full_copies(self.adapter, self.world)

    def _export(self, folder: Path, copies: dict[str, nn.Module]) -> None:
        """The (averaged) weights in diffusers format."""
        with self.policy.use_ema():
            if self.config.train.lora_rank:
                self.adapter.save_lora(str(folder))
            else:
                self.adapter.save_full(str(folder), copies)

    def _finish(self, done: int) -> None:
        """Final evaluation and export."""
        c, self._ahead = self.config, None
        self.scorer.cancel()
        for name in self.evaluators:
            if name == "test" or (c.eval.every and done % c.eval.every):
                self._evaluate(done, name)
        if self.folder.latest() != self.folder.checkpoint(done):
            self._save(done)
        copies = self._copies()
        if self.world.main:
            write_folder(self.product, lambda folder: self._export(folder, copies))
        self._saved(wait=True)
        if self.world.main:
            self.log.say(f"finished after {done} steps; the result is in {self.folder.root}")
        self.world.barrier()
