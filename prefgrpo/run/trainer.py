"""The training loop, for every family, reward and objective.

    prompts → rollout → judge (streamed) → advantage → replay → clipped loss → AdamW

Noise, prompts and pair orders are functions of (seed, step), so a step depends on the weights and its number only.
Invariant: all ranks take every decision (skip, stop, checkpoint) from gathered numbers, hence together.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefgrpo.config.schema import Config
from prefgrpo.data.prompts import fingerprint
from prefgrpo.judge.information import Alarm, evidence
from prefgrpo.objectives import objective
from prefgrpo.rewards.pairwise import VlmPairwise, judged
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.batches import Batch
from prefgrpo.rollout.render import Images, preview, stills, to_uint8
from prefgrpo.rollout.replay import replay, stacked
from prefgrpo.run import checkpoint
from prefgrpo.run.advantage import advantages, part_table
from prefgrpo.run.evaluate import load_before, save_images
from prefgrpo.run.log import Log
from prefgrpo.run.metrics import (
    NoInformation,
    RewardsMissing,
    check_missing,
    eval_line,
    missing_shares,
    over_ranks,
    policy_metrics,
    reward_metrics,
)
from prefgrpo.run.policy import NonFiniteGradient
from prefgrpo.run.session import Clock, open_session, peak_memory

MISSING_TOLD = 3
"""Commonest reasons of a step that are told, ten times as many in a run."""


class TrainingStopped(RuntimeError):
    """The run cannot go on; it can be resumed, and the message says from where and what to do."""


class Diverged(RuntimeError):
    """The policy makes latents that are not finite."""


class Trainer:
    """One run: `Trainer(config, resume).run()`."""

    def __init__(self, config: Config, resume: bool = False) -> None:
        self.config = config
        self.session = open_session(config, resume)
        self.world, self.adapter, self.policy = self.session.world, self.session.adapter, self.session.policy
        self.folder, self.scorer, self.rollouts = self.session.folder, self.session.scorer, self.session.rollouts
        self.log = Log(
            self.folder, config.train.steps, self.session.start, tensorboard=config.tensorboard, active=self.world.main
        )
        self.loss = objective(config.train.objective)
        self.before: dict[str, Images] = {}
        self._told: set[str] = set()
        self._alarms = {name: Alarm() for name, weight in self.session.weights.items() if weight}
        self.verdict = ""
        """The last line of a finished run: what became better, by how much."""

    # ---- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> Path:
        """Train to the end (or the time limit). Returns the run folder.

        Raises TrainingStopped after saving when too many rewards are missing, the judge says nothing, or the gradient
        is not finite.
        """
        done = self.session.start
        try:
            for line in self.session.notes:
                self.log.say(line)
            self._evaluate_start(done)
            while done < self.config.train.steps and not self._out_of_time():
                clock = Clock()
                values = self._guarded_step(done, clock)
                done += 1
                self.session.trained_s += sum(clock.seconds.values())
                self._report(done, values, clock)
                if self.config.eval.every and done % self.config.eval.every == 0 and "dev" in self.session.evaluators:
                    self._evaluate(done, "dev")
                interrupted = self.world.any(self.session.interrupted())
                if done % self.config.checkpoint.every == 0 or interrupted:
                    self._save(done)
                if interrupted:
                    raise TrainingStopped(f"interrupted after step {done}; continue with the same command and --resume")
            self._finish(done)
        finally:
            self.log.close()
            self.session.close()
        return self.folder

    def _guarded_step(self, step: int, clock: Clock) -> dict[str, float]:
        """One step; what ends the run becomes TrainingStopped, after a checkpoint if no weight has changed since."""
        updates = self.policy.updates
        try:
            return self.step(step, clock)
        except (NonFiniteGradient, RewardsMissing, NoInformation, Diverged) as error:
            self.policy.optimizer.zero_grad()
            if self.policy.updates == updates and not isinstance(error, Diverged):
                where = f"saved {self._save(step)}; after mending it, continue with --resume"
            else:
                newest = checkpoint.latest(self.folder / "checkpoints")
                where = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
                where += "; continue from there with --resume and a lower --train.lr"
            raise TrainingStopped(f"step {step + 1}: {error}\n{where}") from error

    def step(self, step: int, clock: Clock) -> dict[str, float]:
        """Training step number `step` (from 0): metrics over all ranks."""
        with clock.phase("rollout"):
            batches = self.collect(step)
        streamed = sum(reward.streams for reward in self.scorer.rewards.values()) * len(self.rollouts.groups(step))
        with clock.phase("judge_wait"), self.log.bar("judging", "group", streamed) as bar:
            scores = self.scorer.finish(bar.update)
        self._report_scores(step + 1, scores, batches)
        advantage, values = self._advantage(step + 1, scores)
        self._check_information(step + 1, scores)
        with clock.phase("update"):
            values |= self._update(batches, advantage)
        return values | over_ranks(scores.metrics, self.world)

    def collect(self, step: int) -> list[Batch]:
        """Roll out this rank's samples. Raises Diverged, on all ranks, if one has latents that are not finite."""
        batches, groups = [], self.rollouts.groups(step)
        self.scorer.begin(step, groups)
        with self.log.bar("rollout", "sample", len(groups) * self.config.rollout.group_size) as bar:
            for batch in self.rollouts(step):  # scored while the next one is made
                for group, member, sample in zip(batch.groups, batch.members, batch.samples, strict=True):
                    self.scorer.add(group, member, sample)
                batches.append(batch)
                bar.update(len(batch.samples))
        if self.world.any(not all(bool(b.trajectory.latents.isfinite().all()) for b in batches)):
            raise Diverged("the policy makes latents that are not finite (NaN or infinite)")
        return batches

    def _report_scores(self, step: int, scores: StepScores, batches: list[Batch]) -> None:
        """Say why rewards are missing, and keep a few judged groups for the report."""
        self._tell_missing(step, scores)
        if self.world.main and self._pictured(step):
            self._save_groups(step, scores, batches)

    def _tell_missing(self, step: int, scores: StepScores) -> None:
        """Say why rewards are missing, the commonest reasons of a step, each once in a run."""
        for reason, count in list(scores.reasons.items())[:MISSING_TOLD]:
            if reason not in self._told and len(self._told) < 10 * MISSING_TOLD:
                self._told.add(reason)
                self.log.say(f"missing in step {step}: {count} × {reason}")

    def _check_information(self, step: int, scores: StepScores) -> None:
        """Warn of a judge whose verdicts say nothing. Raises NoInformation after `judge.patience_steps` such steps."""
        local = []
        for name in self._alarms:
            reward = self.scorer.rewards[name]
            rounded = isinstance(reward, VlmPairwise) and reward.rating.verdict == "hard"
            local.append(evidence([judged(g.comparisons) for g in scores.groups[name]], rounded))
        found = self.world.gather(np.stack(local)[None]).sum(0)
        patience = self.config.judge.patience_steps
        for (name, alarm), counts in zip(self._alarms.items(), found, strict=True):
            if not (wrong := alarm.add(counts)):
                continue
            message = f"{name}: the judge's verdicts carry no information: {wrong}"
            if patience and alarm.steps >= patience:
                raise NoInformation(f"{message}; {alarm.steps} steps in a row (judge.patience_steps)")
            self.log.say(f"WARNING: step {step}, {message}; {alarm.steps} of judge.patience_steps = {patience}")

    # ---- advantages ------------------------------------------------------------------------------------

    def _advantage(self, step: int, scores: StepScores) -> tuple[Tensor, dict[str, float]]:
        """(advantages [P, G] of all ranks' samples, on the device; metrics). Raises RewardsMissing."""
        c, r = self.config, self.config.rollout
        names = list(self.session.weights)
        weights = np.array([self.session.weights[n] for n in names])
        local = np.stack([scores.values[n] for n in names], axis=-1)  # [P / world, G, R]
        parts = {n: w for n in names if (w := self.scorer.rewards[n].part_weights)}
        if parts:
            local = np.concatenate([local, part_table(scores.groups, parts)], axis=-1)
        table = self.world.gather_slots(local).reshape(-1, local.shape[-1])
        rewards, sub_scores = table[:, : len(names)], table[:, len(names) :]
        values = reward_metrics(names, rewards, r.group_size)
        verdicts = [[k.verdict.first for g in scores.groups[n] for k in g.comparisons] for n in names]
        counts = self.world.gather(np.array([[(len(v), v.count(None)) for v in verdicts]], np.float64)).sum(0)
        shares = missing_shares(rewards, weights, counts)
        values |= shares
        if warning := check_missing(shares, c.judge.max_missing, list(scores.reasons)):
            self.log.say(f"WARNING: step {step}: {warning}")
        weights_of, device = self.session.weights, self.world.device
        advantage = advantages(rewards, weights_of, r.group_size, c.reward, parts, sub_scores, device)
        values["advantage/zero_groups"] = float((advantage == 0).all(1).float().mean())
        values["advantage/max"] = float(advantage.abs().max())
        return advantage, values

    # ---- update -------------------------------------------------------------------------------------------------

    def _update(self, batches: list[Batch], advantage: Tensor) -> dict[str, float]:
        """The step's optimiser updates, each on its slots; one without any signal is skipped, on all ranks.

        Raises NonFiniteGradient.
        """
        updates, table, norms = self.config.train.updates_per_rollout, [], []
        signal = (advantage != 0).any(1).cpu()  # [P]
        owner = torch.arange(len(signal)) * updates // len(signal)
        for update in range(updates):
            if not bool(signal[owner == update].any()):
                continue
            samples = int((owner == update).sum()) * self.config.rollout.group_size
            for batch in batches:
                if batch.update == update:
                    table += self._accumulate(batch, advantage, signal, samples)
            norms.append(self.policy.update(self.world))
        return policy_metrics(table, self.world) | {
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "samples_trained": float(signal.sum() * self.config.rollout.group_size),
        }

    def _accumulate(self, batch: Batch, advantage: Tensor, signal: Tensor, samples: int) -> list[Tensor]:
        """Gradient of one batch, step by step (or several at once: `train.replay_batch`); rows [update, samples, loss,
        *METRICS] for `policy_metrics`.

        Groups without signal are left out: they cost no forward. A batch that loses some of its samples is a forward
        of another shape than the rollout's, so its first ratio is 1 within rounding only. `samples`: of the whole
        update, over all ranks.
        """
        r, keep = batch.sizes, [k for k, p in enumerate(batch.slots) if signal[p]]
        condition, steps, device = batch.condition, batch.trajectory.steps, self.world.device
        if not keep:
            return []
        if len(keep) < len(batch.slots):
            rows = torch.tensor(keep, device=device)
            condition, steps = condition.select(rows), tuple(s.select(rows) for s in steps)
        adv = advantage[[batch.slots[k] for k in keep], [batch.members[k] for k in keep]]
        table = []
        train, kl = self.config.train, self.config.train.kl_form if self.config.train.kl_coef else ""
        for step in stacked(self.adapter, batch.schedule, steps, r, train.replay_batch):
            new = replay(self.adapter, batch.schedule, condition, step, r, kl)
            together = len(step.step_indices)
            out = self.loss(train, new, step.logp, adv.repeat(together), float(samples * len(steps)))
            out.loss.backward()
            facts = out.metrics.new_tensor([batch.update, together * len(keep)])
            table.append(torch.cat([facts, out.loss.detach()[None], out.metrics]))
        return table

    # ---- evaluation and output ----------------------------------------------------------------------------------

    def _out_of_time(self) -> bool:
        limit = self.config.train.max_minutes * 60
        return limit > 0 and self.world.any(self.session.trained_s >= limit)

    def _report(self, step: int, values: dict[str, float], clock: Clock) -> None:
        """The metrics row and the summary line of a finished step."""
        first, trained = step == self.session.start + 1, values["samples_trained"] > 0
        times = {f"time/{name}": seconds for name, seconds in clock.seconds.items()}
        self.log.row("train", step, values | times)
        self.log.step(step, values, clock.seconds)
        error, limit = values["policy/on_policy_error"], self.config.train.clip_range / 10
        if trained and (first or error > limit):
            verdict = "exact" if error == 0 else "fine" if error <= limit else f"above clip_range / 10 = {limit:.1e}"
            r, cut = self.config.rollout, values["advantage/zero_groups"] > 0
            if error and cut and r.group_size % r.batch_size:
                verdict += "; groups without signal were left out of batches with others: it is exact where "
                verdict += "rollout.batch_size divides rollout.group_size"
            self.log.say(f"on-policy check, step {step}: max |ratio - 1| = {error:.1e} ({verdict})")
        if first:
            self.log.say(f"peak memory after step {step}: {peak_memory(self.world.device) / 2**30:.2f} GiB")

    def _pictured(self, step: int) -> bool:
        """Whether the report shows this step's groups: the first, the last, and those with an evaluation."""
        every = self.config.eval.every or 50
        return step in (1, self.config.train.steps) or step % every == 0

    def _save_groups(self, step: int, scores: StepScores, batches: list[Batch], most: int = 3) -> None:
        """groups/step_NNNNNN.npz: images, wins, counts, win rates and prompts of a few judged groups."""
        slots, size = self.world.slots(self.config.rollout.prompts_per_step), self.config.rollout.group_size
        judged = [(k, g) for found in scores.groups.values() for k, g in enumerate(found) if g.wins is not None]
        if not judged:
            return
        made = {(p, g): s for b in batches for p, g, s in zip(b.slots, b.members, b.samples, strict=True)}
        shape = made[slots[judged[0][0]], 0].media.pixels.shape
        judged = [(k, g) for k, g in judged if made[slots[k], 0].media.pixels.shape == shape][:most]
        members = [[made[slots[k], g] for g in range(size)] for k, _ in judged]
        save_images(
            self.folder / "groups" / f"step_{step:06d}.npz",
            images=np.stack([stills(np.stack([m.media.pixels for m in group])) for group in members]),
            wins=np.stack([np.asarray(g.wins) for _, g in judged]),
            counts=np.stack([np.asarray(g.counts) for _, g in judged]),
            rates=np.array([[np.nan if s.value is None else s.value for s in g.scores] for _, g in judged]),
            prompts=np.array([group[0].prompt for group in members]),
        )

    def _evaluate_start(self, done: int) -> None:
        """Images of the starting policy: rendered once, kept in the run folder, reloaded by a resumed run."""
        for name, evaluator in self.session.evaluators.items():
            if done > 0:
                self.before[name] = load_before(self.folder / "eval", name, self.world.size)[evaluator.mine()]
            else:
                self.before[name] = to_uint8(evaluator.render(evaluator.mine()))
                file = self.folder / "eval" / f"{name}_before_{self.world.rank}of{self.world.size}.npz"
                save_images(file, images=self.before[name])
                if self.world.main:
                    prompts = [evaluator.held.prompts[i] for i in evaluator.shown()]
                    checkpoint.write_atomic(self.folder / "eval" / f"{name}_prompts.json", json.dumps(prompts))
                    if (source := evaluator.shown_sources()) is not None:
                        save_images(self.folder / "eval" / f"{name}_sources.npz", sources=source)
                self._evaluate(0, name)

    def _evaluate(self, step: int, name: str) -> None:
        """Compare the current (averaged) policy with the start on one held-out set."""
        clock = Clock()
        with clock.phase("eval"), self.policy.averaged():
            now, values = self.session.evaluators[name].run(self.before[name])
        self._save_shown(self.folder / "eval" / f"{name}_{step:06d}.npz", name, now)
        self.log.row("eval", step, {"set": name} | values | {"time/eval": clock.seconds["eval"]})
        self.verdict = eval_line(step, name, values)
        self.log.say(self.verdict)

    def _save_shown(self, file: Path, name: str, now: Images) -> None:
        """The report's images, before and now, from the ranks that have them; `now`: this rank's."""
        evaluator = self.session.evaluators[name]
        wanted = set(evaluator.shown())
        rows = [k for k, i in enumerate(evaluator.mine()) if i in wanted]
        pairs = zip(preview(self.before[name][rows]), preview(now[rows]), strict=True) if rows else ()
        shown = self.world.gather_items(pairs)
        if self.world.main and shown:
            before, after = (np.stack([pair[k] for pair in shown]) for k in range(2))
            save_images(file, before=before, now=after)

    def _save(self, done: int) -> Path:
        """Checkpoint after `done` steps; rank 0 writes, all wait."""
        path = self.folder / "checkpoints" / f"step_{done:06d}"
        if self.world.main:
            meta = {
                "updates": self.policy.updates,
                "trained_s": self.session.trained_s,
                "prompts": fingerprint(self.rollouts.prompts),
            }
            path = checkpoint.save(
                self.folder / "checkpoints",
                done,
                self.policy.tensors(),
                meta,
                lambda inside: self._export(inside / self._product),
                self.config.checkpoint.keep,
            )
        self.world.barrier()
        return path

    @property
    def _product(self) -> str:
        """The folder of the weights in diffusers format: a LoRA, or a whole pipeline for full fine-tuning."""
        return "lora" if self.config.train.lora_rank else "pipeline"

    def _export(self, folder: Path) -> None:
        """The (averaged) weights in diffusers format."""
        with self.policy.averaged():
            (self.adapter.save_lora if self._product == "lora" else self.adapter.save_full)(str(folder))

    def _finish(self, done: int) -> None:
        """Final evaluation and export: runs/NAME/lora (or pipeline) is the product."""
        if self.config.eval.every and "dev" in self.session.evaluators and done % self.config.eval.every:
            self._evaluate(done, "dev")
        if "test" in self.session.evaluators:
            self._evaluate(done, "test")
        latest = checkpoint.latest(self.folder / "checkpoints")
        if latest is None or latest.name != f"step_{done:06d}":
            self._save(done)
        if self.world.main:
            checkpoint.write_folder(self.folder / self._product, self._export)
            self._proof()
            self.log.say(f"finished after {done} steps; the result is in {self.folder}")
        self.world.barrier()

    def _proof(self) -> None:
        """proof.safetensors: prompts, initial latents and float images of the final policy, to check the export."""
        name = next(reversed(self.session.evaluators), None)
        if name is None:
            return
        evaluator = self.session.evaluators[name]
        index = (evaluator.shown() or [0])[: min(4, self.config.rollout.batch_size)]
        with self.policy.averaged():
            evaluator.save_proof(self.folder / "proof.safetensors", index)
