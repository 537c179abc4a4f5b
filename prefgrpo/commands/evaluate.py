"""`prefgrpo evaluate RUN|MODEL`: a published suite's table, or a checkpoint compared with its base or another model.

Without a suite, both sides render the run's held-out prompts from the noise of its own evaluation and are compared by
the rewards of eval.rewards, as during training. Existing files are reused, so the same command continues a killed
evaluation, and another judge is asked without generating again. Invariant: a folder holds files of a single evaluation
(weights, prompts, noise and sizes); any other evaluation rejects it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from prefgrpo.commands.generate import Job, check_writing, claim_folder, generate_files, make_jobs
from prefgrpo.commands.score import score_files
from prefgrpo.config.loading import load
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.rewards import RewardEntry
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.file_names import Generated
from prefgrpo.data.prompts import read_prompts
from prefgrpo.data.stored import read_media
from prefgrpo.models import family_of, makes_clips
from prefgrpo.models.attention import attention_of_a_run
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.rollout.render import sample
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.errors import model_errors, refuse, reward_errors
from prefgrpo.run.evaluation import BothSamples, compare, eval_sets, evaluation_scorer, over_ranks, share_of
from prefgrpo.run.folder import COMPARISON, RunFolder, run_of
from prefgrpo.run.log import finite
from prefgrpo.run.measures import Comparison, PairMeasures, keys_of, summary
from prefgrpo.run.notes import sampler_notes
from prefgrpo.run.opening import Weights, weights_of
from prefgrpo.run.rewards import Rewards
from prefgrpo.run.source import open_prompts, open_source
from prefgrpo.suites import load_suite
from prefgrpo.suites.base import Results

AT_ONCE = 32
"""Pairs of images that are read and compared together."""


def _folder(source: Weights, out: Path | None, name: str) -> Path:
    """Folder to which an evaluation of these weights is written."""
    c = source.config
    return out or RunFolder(Path(c.output) / c.name).evaluation(source.label, name)


# ---- suites ---------------------------------------------------------------------------------------------------------


@attention_of_a_run()
def on_suite(
    config: Config, target: str, name: str, file: str, out: Path | None, samples: int, fps: float | None
) -> int:
    """Generate files in the suite's layout; if the suite has a reward here, score them and report."""
    refuse(model_errors(config))
    suite = load_suite(name)
    clips = makes_clips(config)
    if clips != (suite.takes == "video"):
        kinds = ["clips" if video else "images" for video in (suite.takes == "video", clips)]
        raise ConfigError([f"--suite: {suite.title} takes {kinds[0]}, but {config.family} makes {kinds[1]} here"])
    if not file:
        raise ConfigError([f"--prompts: expected {suite.source}"])
    world = parallel.join(config)
    source = weights_of(config, target, world)
    place = _folder(source, out, name)
    prompts = suite.read(Path(file))[: config.eval.max_prompts or None]
    sample_files = suite.sample_files(prompts, samples, place, ".mp4" if clips else ".png")
    check_writing(config, place, samples or 1, fps)
    jobs = make_jobs(sample_files, shared=suite.shares_files)
    rewards = Rewards(config, world)
    entry = next((e for e in config.measured if e.reward == suite.reward), RewardEntry(suite.reward))
    entry = replace(entry, options={**entry.options, **suite.reward_options})
    built = rewards.build("eval.rewards", [entry], prompts) if suite.reward else {}
    names = "\n".join(str(job.file.relative_to(place)) for job in jobs)
    files_hash = hashlib.sha256(names.encode()).hexdigest()
    facts = {"suite": name, "files": files_hash} | source.facts(prompts, fps, samples=samples)
    world.on_main(partial(claim_folder, place, facts), CheckpointError)
    generate_files(source, jobs, world, fps)
    if world.main:
        suite.write_other_files(sample_files, place)
    world.barrier()
    if not suite.reward:
        if world.main:
            print(f"{len(jobs)} files are in {place}; score them with the suite's own tools, then give --results")
        return 0
    files = [Generated(job.prompt, job.file) for job in jobs]
    scores = score_files(built, files, max(AT_ONCE, 2 * config.judge.concurrency), config, world)
    rewards.close()
    if not world.main:
        return 0
    of_suite = [by_reward[entry.name] for by_reward in scores]
    suite.write_scores(files, of_suite, place)
    return _report(suite.results(files, of_suite, entry.options), facts, place, name)


def read_results(name: str, results: Path, out: Path | None) -> int:
    """Read the output of a suite's own tools into our table."""
    place = out or (results if results.is_dir() else results.parent)
    place.mkdir(parents=True, exist_ok=True)
    return _report(load_suite(name).read_results(results), {}, place, name)


def _report(results: Results, facts: Mapping[str, Any], out: Path, name: str) -> int:
    """Print and write the tables; returns 1 if nothing was scored."""
    content = {"about": dict(facts), **asdict(results)}
    write_atomic(out / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_atomic(out / f"{name}.md", results.markdown())
    print(f"{results.markdown(max_problems=10)}\n{out / name}.json, {out / name}.md")
    return int(not any(row.count for rows in results.tables.values() for row in rows))


# ---- comparisons ----------------------------------------------------------------------------------------------------


def _other(source: Weights, against: str, world: World) -> Weights:
    """What to compare with: the base, or another target, sampled with `source`'s settings. Raises ConfigError."""
    config = source.config
    if against == "base":
        return Weights(config, as_trained=source.as_trained)
    run = run_of(Path(against))
    if run is None:
        train = replace(config.train, lora_from="")
        config = replace(config, model=against, family=family_of(against), train=train)
        return replace(weights_of(config, against, world), label=against)
    other = load(run.config)
    same = {name: getattr(other, name) for name in ("model", "family", "dtype", "train")}
    made = weights_of(replace(config, **same, data=replace(config.data, cache=other.data.cache)), against, world)
    return replace(made, label=f"{run.root.name}_{made.label}")


@attention_of_a_run()
def against_other(
    config: Config, target: str, against: str, prompts: str, out: Path | None, samples: int, fps: float | None
) -> int:
    """Render held-out prompts with the target's weights and with others from the same noise, and compare them."""
    if samples:
        config = replace(config, eval=replace(config.eval, samples_per_prompt=samples))
    refuse(reward_errors(config) + model_errors(config))
    world = parallel.join(config)
    if prompts:
        sets = {"prompts": open_prompts(partial(read_prompts, prompts), world)}
    else:
        sets = {name: list(some) for name, some in open_source(config, world, every_set=True).sets.items()}
    if not sets:
        raise ConfigError(["--prompts: the run has no held-out prompts; expected a file of prompts to compare on"])
    now = weights_of(config, target, world)
    other = _other(now, against, world)
    held = eval_sets(config, sets)
    every = [prompt for eval_set in held for prompt in eval_set.items]
    place = _folder(now, out, f"against_{Path(other.label).name}")
    check_writing(config, place, 1, fps)
    rewards = Rewards(config, world)
    scorer = evaluation_scorer(config, rewards.build("eval.rewards", config.measured, every))
    sources = {"now": now, "against": other}
    count = config.eval.samples_per_prompt
    facts = {part: source.facts(every, fps, samples=count) for part, source in sources.items()}
    world.on_main(partial(claim_folder, place, facts), CheckpointError)
    ending = ".mp4" if makes_clips(config) else ".png"

    def file(part: str, name: str, number: int) -> Path:
        return place / part / f"{name}_{number:06d}{ending}"

    for part, source in sources.items():
        jobs = [Job(p, h.first_id + i, file(part, h.name, i)) for h in held for i, p in enumerate(h.items)]
        generate_files(source, jobs, world, fps)
    sizes = config.eval_sampling
    comparisons: list[Comparison] = []
    for h in held:
        mine = share_of(world, len(h.items)) if world.is_dp_leader else []
        measures: list[PairMeasures] = []
        for start in range(0, len(mine), AT_ONCE):
            pairs: list[BothSamples] = []
            for i in mine[start : start + AT_ONCE]:
                media = [read_media(file(part, h.name, i)) for part in sources]
                pairs.append(BothSamples(*(sample(h.items[i], one, sizes) for one in media)))
            measures += compare(scorer, pairs).measures
        comparisons.append(over_ranks(world, h, mine, measures))
    rewards.close()
    if world.main:
        counts = {h.name: len(set(h.group)) for h in held}
        print(f"{config.name} {now.label} against {other.label}", *sampler_notes(config), sep="\n")
        _write_comparison(comparisons, counts, facts, rewards.notes, place)
    return 0


def _write_comparison(
    comparisons: Sequence[Comparison], counts: Mapping[str, int], facts: Mapping[str, Any], notes: list[str], out: Path
) -> None:
    """Print the result, and write comparison.json: win rates with their conclusions, then means."""
    rates: dict[str, dict[str, Any]] = {}
    means: dict[str, dict[str, float]] = {}
    lines: list[str] = []
    for one in comparisons:
        keys = keys_of(one.measures)
        for subject, wins in one.wins.items():
            measure = one.measures[subject]
            conclusion = wins.interval.conclusion
            rates[f"{one.name}/win_{keys[subject]}"] = {
                "rate": wins.value,
                "missing": wins.missing,
                **wins.interval._asdict(),
                "first": measure.first.value if measure.first else None,
                "second": measure.second.value if measure.second else None,
                "conclusion": conclusion,
            }
            lines.append(f"win rate by {one.name}/{subject}: {summary(measure)}: {conclusion}")
        for subject, (now, before) in one.values.items():
            found = {"now": now.value, "before": before.value, "missing": now.missing}
            means[f"{one.name}/{keys[subject]}"] = found
            lines.append(f"mean of {one.name}/{subject}: {now.value:.5g} against {before.value:.5g}")
    content = {"about": facts, "prompts": counts, "win_rates": rates, "means": means, "judges": notes}
    text = json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(out / COMPARISON, text + "\n")
    print(", ".join(f"{count} prompts ({name})" for name, count in counts.items()))
    print(*lines, *notes, out / COMPARISON, sep="\n")
