"""`prefgrpo evaluate RUN|MODEL`: a published suite's table, or a checkpoint compared with its base or another model.

Without a suite, both sides render the run's held-out prompts from the noise of its own evaluation and are compared by
the rewards of eval.rewards, by the run's judge and by an optional second one, each in both orders. Existing files and
judge answers are reused, so the same command continues a killed evaluation. Invariant: a folder holds files of a single
evaluation (weights, prompts, noise and sizes); any other evaluation refuses it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from prefgrpo.commands.generate import Job, Weights, check_writing, generate_files, make_jobs
from prefgrpo.commands.score import score_files
from prefgrpo.config.loading import load
from prefgrpo.config.recipe import ConfigError, Loader, read_yaml
from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.file_names import Generated, read_media
from prefgrpo.data.prompts import Prompt, fingerprint, prompt_sets, read_prompts
from prefgrpo.models import family_of
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.report import write_report
from prefgrpo.rewards import build
from prefgrpo.rewards.pairwise import VlmPairwise
from prefgrpo.rewards.scorer import Scorer
from prefgrpo.rollout.render import sample
from prefgrpo.rollout.sampling import eval_sampling
from prefgrpo.run import checkpoint, judging
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.comparison import Comparison, Mean, Row, WinRate, over_ranks
from prefgrpo.run.evaluate import compare, make_eval_set, share_of
from prefgrpo.run.log import finite
from prefgrpo.run.run_folder import RunFolder, run_of
from prefgrpo.suites import Name, load_suite
from prefgrpo.suites.base import Results, Suite

Which = Literal["auto", "live", "ema"]
AT_ONCE = 32
"""Pairs of images that are read and compared together."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the configuration that opens the model, and the weights."""

    config: Config
    weights: Weights
    label: str
    """Used in folder names."""
    run: str = ""
    """Name of the run, if the weights come from one."""

    def __str__(self) -> str:
        return f"{self.run} {self.label}".strip()


# ---- what is evaluated ----------------------------------------------------------------------------------------------


def recipe_of(target: str, prompts: str) -> tuple[Path | None, dict[str, Any]]:
    """(recipe or None, values that override it) for a target: a run, a checkpoint of one, a recipe or a model. Raises
    ConfigError, ModelError."""
    if (run := run_of(Path(target))) is not None:
        return run.config, {"output": str(run.root.parent), "name": run.root.name}
    if Path(target).suffix in (".yaml", ".yml"):
        return Path(target), {}
    if not prompts:
        lacks = f"{target} has no config.yaml" if Path(target).is_dir() else f"there is no folder {target}"
        expected = f"expected a file of prompts for {target}, or a run ({lacks})"
        raise ConfigError([f"--prompts: a model has no prompts of its own; {expected}"])
    name = Path(target).resolve().name
    return None, {"model": target, "name": name, "family": family_of(target), "data": {"prompts": prompts}}


def _side(config: Config, target: str, which: Which, option: str = "--weights") -> Side:
    """The side of a target with the weights chosen by `option`. Raises CheckpointError, ConfigError."""
    path = Path(target)
    if (run := run_of(path)) is None:
        if which == "ema":
            raise ConfigError([f"{option}: {target} is not a run, so it has no EMA weights"])
        p = config.parallel  # a split model must be opened as for training
        return Side(config, Weights(trainable=p.shard * p.ring * p.ulysses > 1), "base")
    if which == "ema" and not config.train.ema_decay:
        raise ConfigError([f"{option}: {run.root} has no EMA weights (train.ema_decay is 0); expected live"])
    newest = run.checkpoint_of(path)
    if newest is None:
        raise CheckpointError(f"{run.root} has no checkpoint to evaluate; expected one in {run.checkpoints}")
    averaged = config.train.ema_decay > 0 and which != "live"
    weights = Weights(trainable=True, checkpoint=newest, averaged=averaged)
    return Side(config, weights, f"{newest.name}_{'ema' if averaged else 'live'}", run.root.name)


def _baseline_side(side: Side, against: str, which: Which) -> Side:
    """The side to compare with: the base, or another target, sampled with `side`'s settings. Raises ConfigError."""
    config, option = side.config, "--against-weights"
    if against == "base":
        return Side(config, Weights(trainable=side.weights.trainable), "base")
    if (run := run_of(Path(against))) is not None:
        own = load(run.config)
        same = {name: getattr(own, name) for name in ("model", "family", "dtype", "train")}
        return _side(replace(config, **same, data=replace(config.data, cache=own.data.cache)), against, which, option)
    model = replace(config, model=against, family=family_of(against))
    return replace(_side(model, against, which, option), label=against)


def _provenance(side: Side, prompts: Sequence[Prompt], samples: int, fps: int) -> dict[str, Any]:
    """Everything that determines the files of one side."""
    c, w = side.config, side.weights
    return {
        "model": c.model,
        "checkpoint": w.checkpoint and w.checkpoint.name,
        "state": w.checkpoint and _state(w.checkpoint),
        "weights": None if w.checkpoint is None else "ema" if w.averaged else "live",
        "dtype": c.dtype,
        "seed": c.seed,
        "prompts": fingerprint(prompts),
        "samples": samples,
        "fps": fps if judging.makes_clips(c) else None,
        "sampling": {k: v for k, v in asdict(eval_sampling(c)).items() if k != "batch_size"},
    }


def _state(path: Path) -> dict[str, Any]:
    """What identifies a checkpoint: its step, and when it was written. Raises CheckpointError."""
    try:
        meta = checkpoint.read_meta(path)
    except CheckpointError as error:
        there = ", ".join(p.name for p in RunFolder(path.parent.parent).all_checkpoints()) or "none"
        raise CheckpointError(f"{error}; the run has {there}") from error
    return {key: meta[key] for key in ("step", "written")}


@contextmanager
def _locked(out: Path, facts: Mapping[str, Any], world: World) -> Iterator[None]:
    """Context in which a folder is locked for this evaluation. Raises CheckpointError, on all ranks, if it holds
    another's files."""
    handle = world.on_main(partial(checkpoint.lock, out), CheckpointError)
    try:
        world.on_main(partial(_claim_folder, out, facts), CheckpointError)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _claim_folder(out: Path, facts: Mapping[str, Any]) -> None:
    """Write the `facts` of this evaluation into its folder. Raises CheckpointError if it holds files of another one."""
    about, wanted = out / "about.json", json.loads(json.dumps(facts))
    try:
        known = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else wanted
        changed = [key for key in wanted if known.get(key) != wanted[key]]
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"--out: {about} is damaged ({error}); choose another folder") from error
    if changed:
        message = f"--out: {out} contains files of another evaluation (different: {', '.join(changed)})"
        raise CheckpointError(f"{message}; choose another folder, or remove that one")
    for leftover in out.rglob(".*"):
        if re.fullmatch(r"\.\d+\.(png|mp4)", leftover.name):  # partial file of a killed process
            leftover.unlink()
    write_atomic(about, json.dumps(facts, indent=1))


# ---- the command ----------------------------------------------------------------------------------------------------


def evaluate(
    config: Config,
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")],
    suite: Name | None = None,
    prompts: str = "",
    out: Path | None = None,
    samples: int = 0,
    weights: Which = "auto",
    against: str = "base",
    against_weights: Which = "auto",
    judge2: str = "",
    question: str = "",
    results: Path | None = None,
    fps: int = 16,
) -> int:
    """Evaluate a run, one of its checkpoints or a model (also under torchrun): on a published suite with --suite, else
    against another model on held-out prompts, from the same noise.

    Args:
        config: The target's configuration with its overrides.
        target: Run folder (its newest checkpoint), RUN/checkpoints/step_000020, recipe, pipeline folder or hub id.
        suite: Published suite; none: compare with --against.
        prompts: The suite's own file or folder of prompts (docs/evaluation.md); without a suite: a file of prompts,
            empty: the run's held-out prompts.
        out: Output folder for files and tables; none: RUN/evaluations/…. Existing files are kept.
        samples: Images or clips per prompt of a suite; 0: the suite's own number.
        weights: Weights of a checkpoint: live, ema, or auto (ema if the run keeps one).
        against: base, or another run, checkpoint or model, sampled with the target's settings.
        against_weights: As weights, for the checkpoint of --against.
        judge2: A second judge: fields of the judge section, "{endpoints: [http://…], template: think}", or a YAML file.
        question: Question for a suite's judge: a template, or UniGenBench's own eval_common.py; empty: our own.
        results: Output of the suite's own tools, read into our table instead of generating and scoring.
        fps: Frames per second of clips.
    """
    given = {"--against": against != "base", "--judge2": bool(judge2)} if suite else {"--results": results is not None}
    given |= {} if suite else {"--question": bool(question), "--samples": samples > 0}
    if odd := [name for name, on in given.items() if on]:
        expected = f"expected {'no' if suite else 'a'} --suite with it"
        hint = {"--samples": ", or --eval.samples-per-prompt"}
        raise ConfigError([f"{name}: {expected}{hint.get(name, '')}" for name in odd])
    if suite and results is not None:
        known = load_suite(suite).read_results(results)
        place = out or (results if results.is_dir() else results.parent)
        place.mkdir(parents=True, exist_ok=True)
        code = _report(known, {}, place, suite)
        _update_report(target, place, f"{suite}.json")
        return code
    side = _side(config, target, weights)
    where = out or Path(config.output) / config.name / "evaluations" / side.label
    world = parallel.join(config.device, config)
    if suite:
        place = out or where / suite
        code = _suite(side, suite, prompts, place, samples, question, fps, world)
    else:
        other = _baseline_side(side, against, against_weights)
        place = out or where / f"against_{str(other).replace(' ', '_').rpartition('/')[2]}"
        code = _compare_sides(side, other, prompts, place, judge2, fps, world)
    if world.main:
        _update_report(target, place, f"{suite}.json" if suite else "comparison.json")
    return code


def _update_report(target: str, place: Path, results: str) -> None:
    """Rewrite the report of the run `target` if the file `results` was written to a folder of the run."""
    run = run_of(Path(target))
    if run and (place / results).is_file() and place.resolve().is_relative_to(run.root.resolve()):
        print(f"also in {write_report(run.root)}")


# ---- suites ---------------------------------------------------------------------------------------------------------


def _suite(side: Side, name: Name, file: str, out: Path, samples: int, question: str, fps: int, world: World) -> int:
    """Generate files in the suite's layout; if the suite has a reward here, score them and report."""
    suite, config, clips = load_suite(name), side.config, judging.makes_clips(side.config)
    if clips != (suite.takes == "video"):
        kinds = ["clips" if video else "images" for video in (suite.takes == "video", clips)]
        raise ConfigError([f"--suite: {suite.title} takes {kinds[0]}, but {config.family} makes {kinds[1]} here"])
    if not file:
        raise ConfigError([f"--prompts: expected {suite.source}"])
    prompts = suite.read(Path(file))[: config.eval.max_prompts or None]
    sample_files = suite.sample_files(prompts, samples, out, ".mp4" if clips else ".png")
    entry = next((e for e in config.measured if e.name == suite.reward), RewardEntry(suite.reward or "none"))
    options = suite.options(entry.options, question)
    check_writing(config, out, samples or 1, fps)
    jobs = make_jobs(sample_files, shared=suite.shares_files)
    rewards = _suite_reward(config, replace(entry, options=options), suite, world)  # fails before anything is generated
    names = "\n".join(str(job.file.relative_to(out)) for job in jobs)
    facts = {"suite": name, "files": hashlib.sha256(names.encode()).hexdigest()}
    facts |= _provenance(side, prompts, samples, fps)
    with _locked(out, facts, world):
        generate_files(config, side.weights, jobs, world, fps)
        suite.write_other_files(sample_files, out, world)
        world.barrier()
        if not suite.reward:
            if world.main:
                print(f"{len(jobs)} files are in {out}; score them with the suite's own tools, then give --results")
            return 0
        files = [Generated(job.prompt, job.file) for job in jobs]
        at_once = max(AT_ONCE, 2 * config.judge.concurrency)
        scores = [s[suite.reward] for s in score_files(rewards, files, at_once, 0, config.judge.deadline_s or 0, world)]
        for reward in rewards.values():
            reward.close()
        if not world.main:
            return 0
        suite.write_scores(files, scores, out)
        return _report(suite.results(files, scores, options), facts, out, name)


def _suite_reward(config: Config, entry: RewardEntry, suite: Suite, world: World) -> dict[str, Any]:
    """The suite's reward by name, {} if it has none."""
    if not suite.reward:
        return {}
    return build(suite.reward, {suite.reward: judging.reward_options(config, entry, world)})


def _report(results: Results, facts: Mapping[str, Any], out: Path, name: str) -> int:
    """Print and write the tables; returns 1 if nothing was scored."""
    content = {"about": dict(facts), **asdict(results)}
    write_atomic(out / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_atomic(out / f"{name}.md", results.markdown())
    print(f"{results.markdown(max_problems=10)}\n{out / name}.json, {out / name}.md")
    return int(not any(row.count for rows in results.tables.values() for row in rows))


# ---- two sides ------------------------------------------------------------------------------------------------------


def _compare_sides(side: Side, other: Side, prompts: str, out: Path, judge2: str, fps: int, world: World) -> int:
    """Render both sides from the same noise, compare them, report."""
    config, sizes = side.config, eval_sampling(side.config)
    if wrong := judging.config_errors(config):
        raise ConfigError(wrong)
    ending = ".mp4" if judging.makes_clips(config) else ".png"

    def file(part: str, name: str, number: int) -> Path:
        return out / part / f"{name}_{number:06d}{ending}"

    sets = {"prompts": read_prompts(prompts)} if prompts else prompt_sets(config)[1]
    if not sets:
        raise ConfigError(["--prompts: the run has no held-out prompts; expected a file of prompts to compare on"])
    samples, most = config.eval.samples_per_prompt, config.eval.max_prompts or None
    held = [make_eval_set(name, own[:most], samples, k) for k, (name, own) in enumerate(sets.items())]
    check_writing(config, out, 1, fps)
    every = [p for h in held for p in h.items]
    rewards = judging.Rewards(config, world)
    scorers = _scorers(config, rewards, every, judge2)
    notes = rewards.notes
    facts = {part: _provenance(s, every, samples, fps) for part, s in (("now", side), ("against", other))}
    if facts["now"] == facts["against"]:
        notes.append("both sides are the same weights")
    with _locked(out, facts, world), ExitStack() as opened:
        opened.callback(rewards.close)
        found: list[Comparison] = []
        for one, part in zip((side, other), facts, strict=True):
            made = [Job(p, h.first_id + i, file(part, h.name, i)) for h in held for i, p in enumerate(h.items)]
            generate_files(one.config, one.weights, made, world, fps)
        for h in held:
            mine = share_of(world, len(h.items))
            table: list[Row] = []
            for start in range(0, len(mine) * world.is_dp_leader, AT_ONCE):
                rows = mine[start : start + AT_ONCE]
                pairs = [
                    tuple(sample(h.items[i], read_media(file(part, h.name, i)).pixels, sizes) for part in facts)
                    for i in rows
                ]
                table += compare(scorers, pairs)[0]
            found.append(over_ranks(world, h.name, h.group[mine], table))
        if world.main:
            counts = {h.name: len(set(h.group.tolist())) for h in held}
            _write_comparison(found, counts, facts, (str(side), str(other)), notes, out)
    return 0


def _mapping(text: str) -> dict[str, Any]:
    """The fields given by --judge2, as a YAML file or an inline YAML mapping. Raises ConfigError."""
    value: Any = None
    if Path(text).is_file():
        value = read_yaml(text)
    else:
        with suppress(yaml.YAMLError):
            value = yaml.load(text, Loader)
    if not isinstance(value, dict):
        expected = "expected a YAML file, or fields of the judge section, {endpoints: […], …}"
        raise ConfigError([f"--judge2: {expected}, got {text!r}"])
    return value


def _scorers(config: Config, rewards: judging.Rewards, prompts: Sequence[Prompt], judge2: str) -> dict[str, Scorer]:
    """The scorers of an evaluation in training, and one of the second judge. Raises ConfigError, JudgeError."""
    scorers = judging.evaluation_scorers(config, rewards.build("eval.rewards", config.measured, prompts))
    if judge2:
        fields = _mapping(judge2)
        template = {"template": fields.pop("template")} if "template" in fields else {}
        entry = RewardEntry("vlm_pairwise", options=template, judge=fields)
        second = rewards.build("--judge2", [entry], prompts, "judge2")
        pairs = {name: judging.both_orders(r) for name, r in second.items() if isinstance(r, VlmPairwise)}
        scorers["judge2"] = Scorer(pairs, 2, config.judge.deadline_s, config.seed)
    return scorers


def _write_comparison(
    found: Sequence[Comparison],
    counts: Mapping[str, int],
    facts: Mapping[str, Any],
    labels: tuple[str, str],
    notes: Sequence[str],
    out: Path,
) -> None:
    """Write comparison.json and comparison.md: win rates with their verdicts, then means."""
    wins = {f"{one.name}/win_{name}": win for one in found for name, win in one.win_rates.items()}
    means = {f"{one.name}/{name}": mean for one in found for name, mean in one.means.items()}
    everything = {
        "about": facts,
        "prompts": counts,
        "win_rates": {key: _win_row(win) for key, win in wins.items()},
        "means": {key: _mean_row(mean) for key, mean in means.items()},
        "judges": list(notes),
    }
    text = json.dumps(finite(everything), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(out / "comparison.json", text + "\n")
    samples = facts["now"]["samples"]
    of = [f"{n} prompts × {samples} = {n * samples} samples ({name})  " for name, n in counts.items()]
    lines = [f"# {labels[0]} against {labels[1]}", "", *of, ""]
    lines += ["| win rate by | rate | 95 % interval over prompts | shown first, second | missing | result |"]
    lines += ["|---|---:|---:|---:|---:|---|"]
    for key, win in wins.items():
        row = {part: "–" if math.isnan(share) else f"{100 * share:.1f} %" for part, share in _shares(win).items()}
        cells = [row["rate"], f"{row['low']} – {row['high']}", f"{row['first']} / {row['second']}", row["missing"]]
        lines.append(f"| {' | '.join([key.replace('win_', ''), *cells, win.verdict])} |")
    if means:
        lines += ["", f"| mean | {labels[0]} | {labels[1]} | missing |", "|---|---:|---:|---:|"]
        for key, mean in means.items():
            now, against = ("–" if math.isnan(v.mean) else f"{v.mean:.5g}" for v in (mean.now, mean.before))
            lines.append(f"| {key} | {now} | {against} | {100 * _mean_row(mean)['missing']:.1f} % |")
    lines += ["", *(f"{note}  " for note in notes)]
    write_atomic(out / "comparison.md", "\n".join(lines).rstrip() + "\n")
    print("\n".join(lines), f"\n{out / 'comparison'}.json, .md", sep="\n")


def _shares(win: WinRate) -> dict[str, float]:
    first, second = (math.nan if order is None else order.mean for order in (win.first, win.second))
    rate = {"rate": win.rate.mean, "low": win.low, "high": win.high}
    return rate | {"first": first, "second": second, "missing": win.rate.missing}


def _win_row(win: WinRate) -> dict[str, Any]:
    return {**_shares(win), "verdict": win.verdict}


def _mean_row(mean: Mean) -> dict[str, float]:
    missing = max(mean.now.missing, mean.before.missing)
    return {"now": mean.now.mean, "against": mean.before.mean, "missing": missing}
