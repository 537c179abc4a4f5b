"""`Trainer`: one run, from Python and from `prefgrpo train`, for every family, reward and objective.

    prompts → rollout → judge (streamed) → advantage → gradients of the objective → AdamW

Noise, prompts and pair orders are functions of (seed, step), so a step depends only on the weights and its number.
With rollout.staleness, a step also generates the rollout of the next one, before its own update.
Invariant: every decision (skip, stop, checkpoint) follows from gathered numbers, so all ranks make the same one.
"""

from __future__ import annotations

import atexit
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prefgrpo import ending
from prefgrpo.arguments import Prompts, RewardLike, run_config
from prefgrpo.config.loading import load, recipe_values, to_dict
from prefgrpo.config.recipe import UserError, merge, to_yaml
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic, write_folder
from prefgrpo.data.writer import Writer
from prefgrpo.ending import ENDS_A_RUN, Diverged, Interrupt, Interrupted, Result, TrainingStopped
from prefgrpo.models.attention import attention_of_a_run
from prefgrpo.objectives.base import Targets
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.shard import full_copies
from prefgrpo.report import write_report
from prefgrpo.rewards import python_rewards
from prefgrpo.rewards.log import truncate_log
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.batch import Batch
from prefgrpo.rollout.plan import StepPlan
from prefgrpo.run import checkpoint
from prefgrpo.run.checkpoint import CheckpointError, Checkpoints
from prefgrpo.run.errors import errors, idle_errors, refuse
from prefgrpo.run.evaluation import evaluation_scorer
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.groups import show_groups
from prefgrpo.run.log import Clock, Log, open_trackers
from prefgrpo.run.notes import change_notes, on_policy_note, prompt_notes, skipped_note, start_notes
from prefgrpo.run.opening import garbage_frozen, open_evaluators, open_run
from prefgrpo.run.resume import Input, Kind, check_goes_on, check_same_run, keep_inputs, own_inputs, stored
from prefgrpo.run.rewards import Rewards
from prefgrpo.run.source import open_source
from prefgrpo.run.targets import pixel_distances, training_scorer
from prefgrpo.update.memory import peak_memory
from prefgrpo.update.metrics import policy_metrics
from prefgrpo.update.policy import learning_rate
from prefgrpo.update.reference import Reference
from prefgrpo.update.throughput import Throughput


@dataclass(frozen=True)
class Rollout:
    """A step's samples on this process; the scorer holds their images or clips."""

    plan: StepPlan
    batches: list[Batch]
    updates: int
    """Optimiser updates that the policy which generated them had received."""


class Trainer:
    """One run: `Trainer(...).train()`."""

    def __init__(
        self,
        model: str | Path | Config = "",
        *,
        train_prompts: Prompts | None = None,
        eval_prompts: float | Prompts | None = None,
        rewards: RewardLike | Sequence[RewardLike] | Mapping[RewardLike, float] | None = None,
        steps: int | None = None,
        lora_rank: int | None = None,
        resume: bool = False,
        allow_idle: bool = False,
        on_step: Callable[[int, dict[str, float]], object] | None = None,
        on_evaluation: Callable[[int, str, dict[str, float]], object] | None = None,
        on_save: Callable[[Path], object] | None = None,
        **sections: Any,
    ) -> None:
        """Check and open a run: rewards and judge, then the model. `train` starts it; `close` abandons it.

        model: a diffusers pipeline: a folder, or a hub id, 'owner/name' or 'owner/name@revision'; its family follows
        from its model_index.json; or a whole configuration. train_prompts: a file or a list. eval_prompts: a file or a
        list, or the share of train_prompts that is held out. rewards: one, several, or {reward: weight}. steps:
        training steps. lora_rank: 0 trains all weights. resume: continue the run of this name, as is always done after
        a restart by torchrun. allow_idle: train even if more than half of the GPUs would idle. sections: any other
        value of a recipe: name="run", rollout={"height": 512, "width": 512}.

        on_step(step, metrics), on_evaluation(step, set name, metrics) and on_save(checkpoint folder, when it is
        written) are called on rank 0; an exception in one of them ends the run.

        Raises ConfigError with every mistake, named as in a recipe, before anything starts; DataError, CheckpointError,
        ModelError or JudgeError before anything in an existing run folder is changed.
        """
        self._objects: dict[str, Any] = {}
        """Functions and objects among the rewards, by name."""
        given = model
        if not isinstance(given, Config):
            training = {"steps": steps, "lora_rank": lora_rank}
            given, self._objects = run_config(given, train_prompts, eval_prompts, rewards, training, sections)
        self.given = given
        """The configuration as it is written to the run folder."""
        self.on_step = on_step
        self.on_evaluation = on_evaluation
        self.on_save = on_save
        self.folder = folder = RunFolder(Path(given.output) / given.name)
        with python_rewards(self._objects), ExitStack() as opened:
            opened.enter_context(attention_of_a_run())
            self.config = config = own_inputs(given, folder)
            refuse(errors(config))
            self.world = world = parallel.join(config)
            refuse([] if allow_idle else idle_errors(config, world))
            resume = resume or world.any(parallel.restart_count() > 0)
            lock = world.on_main(partial(checkpoint.claim, folder, resume), CheckpointError)
            if lock is not None:
                opened.callback(os.close, lock)
            if resume:
                check_same_run(given, folder)
            newest = world.all_gather_object(folder.latest() if resume else None)[0]  # a shared disk may show less
            # what fails fastest first, the model last
            self.source = source = open_source(config, world)
            builder = Rewards(config, world)
            opened.callback(builder.close)
            trained = builder.build("rewards", config.rewards, source.prompts)
            self.scorer = training_scorer(config, trained, folder.judgements_of(world.rank), world)
            opened.callback(self.scorer.cancel)
            measured = builder.build("eval.rewards", config.measured, source.evaluated) if source.sets else {}
            made_from = partial(source.fingerprints, given.train.lora_from)
            served = {Input(Kind.JUDGE, name): model_name for name, model_name in builder.served.items()}
            self.inputs = (world.on_main(made_from, UserError) or {}) | served
            """On rank 0, what the run is made from."""
            changed: list[str] = []
            if newest is not None:
                goes_on = partial(check_goes_on, given, folder, newest, self.inputs)
                changed = world.on_main(goes_on, CheckpointError) or []
            run = open_run(config, world, source)
            opened.callback(run.embeddings.flush)
            self.adapter = run.adapter
            self.objective = run.objective
            self.policy = run.policy
            self.groups = run.groups
            self.gradients = run.gradients
            self.throughput = Throughput(config, run.adapter, world)
            self.reference = Reference(config, run.gradients, self.scorer, self.throughput, world)
            self.writer = Writer()
            self.evaluators = open_evaluators(run, evaluation_scorer(config, measured), folder, self.writer)
            self.evaluation: dict[str, float] = {}
            """Metrics of the last evaluation."""
            self.summary = ""
            """Its summary line."""
            self.checkpoints = Checkpoints(folder, world, config.checkpoint.keep, not config.rollout.staleness)
            self.interrupt = Interrupt(world)
            opened.callback(self.interrupt.restore)
            self.start = self._read_checkpoint(newest)
            """Number of steps already done."""
            of_folder = self._start_folder(resume, newest)
            counts = {name: len(set(evaluator.eval_set.group)) for name, evaluator in self.evaluators.items()}
            self.notes = [
                *changed,
                *start_notes(config, world, run.gradients, run.policy, len(source.prompts), counts),
                *builder.notes,
                *source.notes(),
                *prompt_notes(config, source.prompts, source.evaluated, run.absent),
                *of_folder,
            ]
            """Lines that `train` prints first."""
            trackers = open_trackers(config, folder, self.start) if world.main else ()
            self.log = Log(
                folder, config.train.steps, self.start, trackers=trackers, writer=self.writer, active=world.main
            )
            self.targets = source.targets(self.groups, self.scorer.rewards, world, self.log)
            self._ahead: Rollout | None = None
            """Samples of the next step (rollout.staleness)."""
            opened.enter_context(garbage_frozen())
            self._opened = opened.pop_all()

    @classmethod
    def from_recipe(cls, recipe: str | Path, model: str | Path = "", **arguments: Any) -> Trainer:
        """A trainer for a recipe; the arguments are those of `Trainer` and override the recipe's values."""
        named = {name: arguments.pop(name) for name in inspect.signature(cls).parameters if name in arguments}
        values = merge(recipe_values(recipe, str(model)), arguments) | ({"model": str(model)} if model else {})
        whole = to_dict(Config())  # explicit: the values of its own model's folder do not replace a recipe's defaults
        del whole["family"]
        if values.get("data", {}).get("pairs"):
            del whole["rewards"]
        return cls(**(merge(whole, values) | named))

    def _read_checkpoint(self, newest: Path | None) -> int:
        """Continue from a checkpoint, or start; returns the number of steps done."""
        if newest is None:
            return 0
        meta = checkpoint.read(newest, self.policy.state_dict(), self.world)
        self.policy.updates = meta["updates"]
        done = int(meta["step"])
        self.checkpoints.last = done
        for evaluator in self.evaluators.values() if done else ():
            evaluator.start(resumed=True)
        return done

    def _start_folder(self, resume: bool, newest: Path | None) -> list[str]:
        """Write the configuration and copies of the inputs, and remove what follows the checkpoint; lines about it."""
        folder = self.folder
        notes: list[str] = []
        if newest is not None:
            notes.append(f"resumed from {newest}")
            before = load(folder.config) if self.world.main and folder.config.is_file() else self.given
            if changed := change_notes(before, self.given, self.start):
                notes += changed
                shutil.copyfile(folder.config, folder.old_config(self.start))
        elif resume:
            notes.append(f"no checkpoint in {folder.root} yet; starting from step 0")
        if self.world.main:
            write_atomic(folder.config, to_yaml(to_dict(self.given)))  # first, because a resumed run needs it
            keep_inputs(self.given, folder, first=newest is None)
            folder.eval.mkdir(exist_ok=True)
            folder.groups.mkdir(exist_ok=True)
            for log in folder.all_judgements():
                truncate_log(log, self.start)
        self.world.barrier()
        return notes

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def train(self) -> Result:
        """Train to the end, export the weights, and write the report; closes the run.

        Raises TrainingStopped, after saving a checkpoint and the report so far, if too many rewards are missing,
        verdicts carry no information, gradients stay non-finite, a disk is full, or the run is interrupted.
        """
        self.interrupt.install()
        with python_rewards(self._objects):
            try:
                self._run()
            except TrainingStopped:
                self.writer.close()  # the report shows its pictures
                if self.world.main:
                    self.interrupt.install()  # torchrun sends SIGTERM as soon as another process has ended
                    with suppress(OSError):  # a full disk
                        write_report(self.folder.root)
                raise
            finally:
                self.close()
        if self.world.main:
            write_report(self.folder.root)
        atexit.register(parallel.leave)  # after a success; the program may train again first
        lora = self.config.train.lora_rank > 0
        return Result(
            folder=self.folder.root,
            metrics=self.evaluation,
            win_rate=self.log.win_rate,
            lora=self.folder.product(True) if lora else None,
            pipeline=None if lora else self.folder.product(False),
            report=self.folder.report,
            summary=self.summary,
        )

    def _run(self) -> None:
        c = self.config
        done = self.start
        for note in self.notes:
            self.log.say(note)
        try:
            for name, evaluator in self.evaluators.items():
                if not done:
                    evaluator.start(resumed=False)
                    self._evaluate(0, name)
            while done < c.train.steps:
                clock = Clock()
                with self._stopping(done):
                    metrics = self.step(done, clock)
                done += 1
                self._report(done, metrics, clock)
                if c.eval.every and done % c.eval.every == 0 and "dev" in self.evaluators:
                    self._evaluate(done, "dev")
                self._saved()
                flags = self.world.all_gather_object((self.interrupt.seen, self.checkpoints.overdue))
                interrupted = any(seen for seen, _ in flags)
                if done % c.checkpoint.every == 0 or flags[0][1] or interrupted:  # overdue by the clock of rank 0
                    self._save(done, wait=interrupted)
                if interrupted:
                    raise ending.stopped_by_signal(f"after step {done}")
            self._finish(done)
        except (CheckpointError, OSError) as error:
            raise ending.cannot_write(error, done, self.folder.latest()) from error

    def step(self, step: int, clock: Clock) -> dict[str, float]:
        """Training step number `step` (from 0): metrics over all ranks."""
        with clock.phase("rollout"):  # samples are judged as soon as they are decoded
            rollout = self._ahead or self.generate(step)
            c = self.config
            ahead = c.rollout.staleness and (step + 1) % c.checkpoint.every and step + 1 < c.train.steps
            self._ahead = self.generate(step + 1, ahead=True) if ahead else None
        plan = rollout.plan
        stale = self.policy.updates - rollout.updates
        with clock.phase("update"):
            batches = self.reference.add_while_judged(rollout.batches)
        with clock.phase("judge_wait"):
            scores, distances = self.score(plan)
        targets, metrics = self.targets.compute(plan, scores, distances)
        with clock.phase("update"):
            metrics |= self.update(plan, batches, targets)
            self.policy.update_old(self.objective.old_decay(step))
        if c.rollout.staleness:
            metrics["policy/staleness"] = float(stale)
        if stale:
            metrics.pop("policy/on_policy_error", None)
        return metrics

    def generate(self, step: int, ahead: bool = False) -> Rollout:
        """Generate a step's samples with the current policy, passing each to the scorer as soon as it is decoded.

        ahead: the scores of the previous step are still outstanding. Raises Diverged.
        """
        plan = self.groups.plan(step)
        batches = list[Batch]()
        weights = self.policy.use_weights(self.policy.old if self.objective.sampled_by_old else {})
        with weights, self.log.bar("rollout", "sample", plan.samples) as bar:
            self.scorer.begin(step, plan.scored, ahead)
            with self.throughput.counting("rollout", plan.samples):
                for batch in self.groups.batches(plan, self.scorer.add, self.interrupt.check):
                    batches.append(batch)
                    bar.update(len(batch.places))
            finite = [batch.latents.isfinite().all() for batch in batches]
            if self.world.any(bool(finite) and not torch.stack(finite).all()):
                raise Diverged("the policy produces latents that are not finite (NaN or infinite)")
        return Rollout(plan, batches, self.policy.updates)

    def score(self, plan: StepPlan) -> tuple[StepScores, NDArray[np.float64]]:
        """(scores of this rank's groups, mean distance between the images of each); shows a few groups."""
        streamed = sum(reward.streams for reward in self.scorer.rewards.values()) * len(plan.scored)
        with self.log.bar("judging", "group", streamed) as bar:
            distances = pixel_distances(self.scorer.generated().values())  # while the judge answers
            scores = self.scorer.finish(bar.update)
        show_groups(self.config, plan.step + 1, scores, self.log)
        return scores, distances

    def update(self, plan: StepPlan, batches: list[Batch], targets: Targets) -> dict[str, float]:
        """The step's optimiser updates, each on its own samples; updates without any signal are skipped on all ranks.

        Groups without signal are dropped and cost no forward. They leave whole batches, so the shapes of the others are
        those of the rollout and the first ratio stays exactly 1.
        """
        size = self.config.rollout.group_size
        mask = self.objective.mask(self.config.train, targets).numpy()  # [P, G]
        counted = self.objective.samples_per_group(size) / size
        on_device = targets.to(self.world.device)
        rows = list[torch.Tensor]()
        norms = list[float | None]()
        trained = self.reference.add(plan.trained(batches, mask))
        with self.throughput.counting("update", sum(len(batch.places) for batch in trained if not batch.padding)):
            for position, share, samples in plan.updates(trained, mask):
                if all(norm is None for norm in norms) or self.checkpoints.last == plan.step:
                    self.interrupt.check()  # later, this step's updates would be lost
                rows += self.gradients.accumulate(share, on_device, samples * counted)
                norms.append(self.policy.update(self.world, position))
        finite = [norm for norm in norms if norm is not None]
        metrics = policy_metrics(rows, self.world, self.gradients.metrics)
        metrics |= {"grad_norm": float(np.mean(finite))} if finite else {}
        return metrics | {
            "lr": learning_rate(self.config.train, (plan.step + 1) * self.config.train.updates_per_rollout - 1),
            "samples_trained": float(mask.sum()),
            "updates": float(len(norms)),
            "updates_skipped": float(len(norms) - len(finite)),
        }

    @contextmanager
    def _stopping(self, step: int) -> Iterator[None]:
        """Turns errors that end the run into TrainingStopped, after a checkpoint if no weight has changed yet."""
        updates = self.policy.updates
        try:
            yield
        except Interrupted as error:
            self._saved(wait=True)
            if self.policy.updates == updates:  # otherwise it began with a checkpoint, which `on_save` may have moved
                self._save(step, wait=True)
            raise ending.stopped_by_signal(f"in step {step + 1}, which will be repeated") from error
        except ENDS_A_RUN as error:
            self.policy.optimizer.zero_grad()
            self._saved(wait=True)
            if self.policy.updates == updates and not isinstance(error, Diverged):
                advice = f"Checkpoint saved to {self._save(step, wait=True)}. Fix the cause, then rerun with --resume."
            else:
                newest = self.folder.latest()
                advice = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
                advice += "; continue from there with --resume and a lower --train.lr"
            raise TrainingStopped(f"step {step + 1}: {error}\n{advice}") from error

    # ---- what is written --------------------------------------------------------------------------------------------

    def _report(self, step: int, metrics: dict[str, float], clock: Clock) -> None:
        """Write the metrics row and the summary line of a finished step."""
        self.writer.check()
        r = self.config.rollout
        trained = int(metrics["samples_trained"])
        speed = self.throughput.metrics(r.prompts_per_step * r.group_size, trained, sum(clock.seconds.values()))
        row = metrics | {f"time/{name}": seconds for name, seconds in clock.seconds.items()} | speed
        self.log.row("train", step, row)
        self.log.step(step, metrics | speed, clock.seconds)
        if metrics["updates_skipped"]:
            self.log.once(skipped_note(self.config), kind="update skipped")
        first = step == self.start + 1
        if note := on_policy_note(self.config, metrics, first):
            self.log.once(note, kind=f"on-policy check, first step: {first}")
        if first:
            self.log.say(f"peak memory after step {step}: {peak_memory(self.world.device) / 2**30:.2f} GiB")
        if self.on_step and self.world.main:
            self.on_step(step, row)

    def _evaluate(self, step: int, name: str) -> None:
        """Compare the current (averaged) policy with the initial one on a held-out set."""
        clock = Clock()
        with clock.phase("eval"), self.policy.use_ema():
            comparison = self.evaluators[name].run(step)
        self.evaluation = comparison.metrics()
        self.summary = comparison.line(step)
        self.log.win_rate = comparison.win_rate
        self.log.row("eval", step, {"set": name} | self.evaluation | {"time/eval": clock.seconds["eval"]})
        self.log.say(self.summary)
        self.log.missing(f"the evaluation after step {step}", self.evaluators[name].reasons)
        if self.on_evaluation and self.world.main:
            self.on_evaluation(step, name, self.evaluation)

    def _save(self, done: int, wait: bool = False) -> Path:
        """Start writing the checkpoint after `done` steps; wait: until it is complete."""
        self._saved(wait=True)
        for evaluator in self.evaluators.values():
            evaluator.wait_stored()
        meta = {"updates": self.policy.updates, "inputs": stored(self.inputs)}
        lora = self._write_lora if self.config.train.lora_rank else None
        self.checkpoints.save(done, self.policy.state_dict(), meta, lora)
        if wait:
            self._saved(wait=True)
        return self.folder.checkpoint(done)

    def _saved(self, wait: bool = False) -> None:
        """Report a checkpoint that has been written since the last call; wait: for the one that is being written."""
        path = self.checkpoints.finished(wait)
        if path is not None and self.on_save and self.world.main:
            self.on_save(path)

    def _finish(self, done: int) -> None:
        """Final evaluation, checkpoint and export."""
        self._ahead = None
        self.scorer.cancel()
        for name in self.evaluators:
            if name == "test" or (self.config.eval.every and done % self.config.eval.every):
                self._evaluate(done, name)
        self._save(done)
        self._export()
        self._saved(wait=True)
        self.writer.wait()
        if self.world.main:
            self.log.say(f"finished after {done} steps; the result is in {self.folder.root}")
        self.world.barrier()

    def _export(self) -> None:
        """Write the weights, or their EMA, in diffusers format: a LoRA, or the whole pipeline."""
        if self.config.train.lora_rank:
            if self.world.main:
                write_folder(self.folder.product(lora=True), self._write_lora)
            return
        with self.policy.use_ema():
            copies = full_copies(self.adapter, self.world) if self.world.layout.fsdp else {}
            if self.world.main:
                product = self.folder.product(lora=False)
                write_folder(product, lambda inside: self.adapter.save_full(str(inside), copies))

    def _write_lora(self, folder: Path) -> None:
        """Write the LoRA, or its EMA, in diffusers format."""
        with self.policy.use_ema():
            self.adapter.save_lora(str(folder))

    def close(self) -> None:
        """Let the checkpoint in flight end; stop the judge, restore signal handlers and unlock the run folder."""
        with self._opened:
            self.checkpoints.close()
            self.log.close()
