"""`prefgrpo generate TARGET`: images or clips for every prompt of a file, generated as in evaluation.

Sample j of prompt i has the noise address (seed, i, j), and belongs to rank (i·n + j) mod world size. Existing files
are skipped, so the same command continues a killed run. Invariant: a file depends on (weights, prompt, seed, noise
address), not on the world size or on which files already exist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.file_names import Naming, file_name
from prefgrpo.data.pairs import has_pairs
from prefgrpo.data.prompts import DataError, Prompt, read_prompts
from prefgrpo.models import makes_clips
from prefgrpo.models.attention import attention_of_a_run
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.rollout.embeddings import Embeddings, run_entries
from prefgrpo.rollout.render import Images, render
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.run.checkpoint import CheckpointError
from prefgrpo.run.errors import model_errors, refuse
from prefgrpo.run.folder import ABOUT
from prefgrpo.run.groups import open_pairs
from prefgrpo.run.notes import sampler_notes
from prefgrpo.run.opening import Weights, weights_of
from prefgrpo.run.source import distinct_prompts, open_prompts
from prefgrpo.sde.noise import GENERATED_IDS

PER_PROMPT = 2**20
"""Sample ids of a prompt."""
QUALITY = 8
"""imageio's quality of a clip's file, 0 to 10 (x264's crf 10): see docs/scoring.md."""
MOST_FPS = 240


@dataclass(frozen=True)
class Job:
    """One file to make."""

    prompt: Prompt
    noise: int
    """Address of its initial noise: a sample id."""
    file: Path


def claim_folder(out: Path, facts: Mapping[str, Any]) -> None:
    """Record in a folder what makes its files. Raises CheckpointError if it contains files of something else."""
    file = out / ABOUT
    wanted = json.loads(json.dumps(facts))
    try:
        before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else wanted
        changed = [key for key in wanted if before.get(key) != wanted[key]]
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"--out: {file} is damaged ({error}); choose another folder") from error
    if changed:
        message = f"--out: {out} contains files that were made differently (other: {', '.join(changed)})"
        raise CheckpointError(f"{message}; choose another folder, or remove that one")
    write_atomic(file, json.dumps(facts, indent=1))


@attention_of_a_run()
def generate(
    config: Config,
    target: str,
    lora: Path | None,
    prompts: str,
    out: Path,
    samples: int,
    naming: Naming,
    fps: float | None,
) -> int:
    """The command, with the arguments that `prefgrpo.commands.cli.generate` describes."""
    refuse(model_errors(config))
    world = parallel.join(config)
    weights = weights_of(config, target, world, lora)
    check_writing(config, out, samples, fps)
    file = prompts or config.eval.file or config.data.prompts
    if config.data.pairs and not prompts and (not file or has_pairs(file)):
        held = distinct_prompts(open_pairs(file or config.data.pairs, world))
    else:
        held = open_prompts(partial(read_prompts, file, unique=False), world)
    ending = ".mp4" if makes_clips(config) else ".png"
    places = [(p, j, out / file_name(p, j, naming, ending)) for p in held for j in range(samples)]
    jobs = make_jobs(places, shared=naming == "vbench")
    facts = weights.facts(held, fps)  # without the number of samples: more may follow
    world.on_main(partial(claim_folder, out, facts), CheckpointError)
    there = generate_files(weights, jobs, world, fps)
    if world.main:
        made = f"{len(jobs)} files are in {out}" + f"; {there} already existed and are unchanged" * (there > 0)
        print(*sampler_notes(config), made, sep="\n")
    return 0


def check_writing(config: Config, out: Path, samples: int, fps: float | None) -> None:
    """Create `out`. Raises ConfigError if files cannot be written into it."""
    wrong = [f"--samples: expected at least 1, got {samples}"] if samples < 1 else []
    if fps is not None and not 1 <= fps <= MOST_FPS:
        wrong.append(f"--fps: expected 1 to {MOST_FPS}, got {fps:g}")
    sizes = config.eval_sampling
    if makes_clips(config) and (sizes.height % 2 or sizes.width % 2):
        size = f"{sizes.height} × {sizes.width}"
        wrong.append(f"eval.height/width: expected even numbers, as mp4 files have (yuv420p), got {size}")
    if wrong:
        raise ConfigError(wrong)
    if makes_clips(config) and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(
            ["generate: writing mp4 files needs imageio-ffmpeg: pip install -e '.[video]' in the checkout"]
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"--out: expected a folder that can be written: {error}"]) from error


def make_jobs(places: Iterable[tuple[Prompt, int, Path]], shared: bool = False) -> list[Job]:
    """A job per (prompt, sample number, file), each file once. Raises DataError if two prompts have one file, unless
    `shared` and their texts and sources are equal."""
    jobs: dict[Path, Job] = {}
    for prompt, sample, file in places:
        job = jobs.setdefault(file, Job(prompt, GENERATED_IDS + prompt.id * PER_PROMPT + sample, file))
        first = job.prompt
        if first.id != prompt.id and not (shared and (first.text, first.source) == (prompt.text, prompt.source)):
            raise DataError(f"prompts {first.id + 1} and {prompt.id + 1} share the file {file}")
    return list(jobs.values())


def generate_files(weights: Weights, jobs: Sequence[Job], world: World, fps: float | None) -> int:
    """Generate every missing file, each rank its share, then wait for all ranks; loads the model only if needed.

    What is missing is decided by rank 0: the processes of a share run the same forwards, but a shared disk may show
    them different files. Returns the number of files that already existed. Raises ConfigError, ModelError or
    CheckpointError.
    """
    config = weights.config
    rate = weights.frame_rate(fps)
    there = world.all_gather_object({k for k, job in enumerate(jobs) if world.main and job.file.exists()})[0]
    missing = [jobs[k] for k in range(world.dp_index, len(jobs), world.dp_size) if k not in there]
    if len(there) < len(jobs):
        prompts = list({id(job.prompt): job.prompt for job in jobs}.values())
        sampling = config.eval_sampling
        embeddings = Embeddings(config)
        absent = embeddings.absent(run_entries(replace(config, rollout=sampling), prompts))
        adapter = weights.open(world, encoders=bool(absent))
        schedules = Schedules(config, adapter, world.device)
        wanted = [(job.prompt, job.noise) for job in missing]
        spare = (jobs[0].prompt, jobs[0].noise)
        with tqdm(total=len(missing), unit="file", dynamic_ncols=True, disable=None if world.main else True) as bar:
            for k, pixels in render(adapter, schedules, embeddings, wanted, sampling, world, spare):
                write(missing[k].file, pixels, rate)
                bar.update(1)
        embeddings.flush()
    world.barrier()
    return len(there)


def write(file: Path, pixels: Images, rate: float | None) -> None:
    """An image [H, W, 3] as PNG, or a clip [F, H, W, 3], even sides, `rate` frames per second, as mp4, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{os.environ.get('RANK', '0')}{file.suffix}")  # overwrites what a killed process left
    if pixels.ndim == 3:
        Image.fromarray(pixels).save(part)
    else:
        from diffusers.utils import export_to_video

        assert rate is not None
        frames = [Image.fromarray(np.ascontiguousarray(frame)) for frame in pixels]
        export_to_video(frames, str(part), fps=rate, quality=QUALITY, macro_block_size=1)  # 16 would stretch 1080 rows
    os.replace(part, file)
