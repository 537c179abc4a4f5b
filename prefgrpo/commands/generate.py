"""`prefgrpo generate RECIPE --lora DIR`: images or clips of every prompt of a file, as the evaluation makes them.

Sample j of prompt i has the noise address (seed, i, j), and belongs to rank (i·n + j) mod world size. Files that exist
are skipped, so a killed run is continued by the same command. Invariant: a file depends on (weights, prompt, seed, i,
j), not on the world size or on what was there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from prefgrpo.config.schema import Config, ConfigError, SamplingConfig
from prefgrpo.data.file_names import Naming, file_name
from prefgrpo.data.prompts import DataError, Prompt, read_prompts
from prefgrpo.models.folder import ModelError
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.rollout.embeddings import Embeddings, encoding_jobs, uncached
from prefgrpo.rollout.render import Images, render, to_uint8
from prefgrpo.rollout.sampling import Schedules, all_sizes, evaluation, of_prompt
from prefgrpo.run.judging import makes_clips
from prefgrpo.run.loading import config_errors_as, open_adapter

FIRST_ID = 2**61
"""Sample ids of generated noise start here, far from those of training and evaluation."""
PER_PROMPT = 2**20


@dataclass(frozen=True)
class Job:
    """One file to make."""

    prompt: Prompt
    sample: int
    """Number j of the prompt's samples."""
    file: Path


def generate(
    config: Config, lora: Path | None, prompts: str, out: Path, samples: int, naming: Naming, fps: int = 16
) -> int:
    """Make every missing file; returns the exit code. Raises ConfigError, DataError or ModelError."""
    if samples < 1 or fps < 1:
        raise ConfigError([f"samples and fps: expected at least 1, got {samples} and {fps}"])
    if makes_clips(config) and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(["generate: writing mp4 files needs imageio-ffmpeg: pip install 'prefgrpo[video]'"])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"--out: expected a folder that can be written: {error}"]) from error
    held = read_prompts(prompts or config.eval.prompts or config.data.prompts, unique=False)
    world = parallel.start(config.device)
    try:
        shown = evaluation(config)
        absent = uncached(config, encoding_jobs(replace(config, rollout=shown), held))
        adapter = open_adapter(config, world.device, encoders=bool(absent))
        with config_errors_as("eval, or a prompt's own size"):
            for sizes in all_sizes(held, shown, config.data.own_sizes):
                adapter.latent_shape(sizes)
        if lora is not None:
            try:
                adapter.load_lora(str(lora / "lora" if (lora / "lora").is_dir() else lora))
            except (FileNotFoundError, ValueError) as error:
                raise ModelError(f"--lora: {error}") from error
            except RuntimeError as error:
                lines = str(error).splitlines()
                message = f"{config.model} is not the model that it was trained on: {' '.join(lines[:2])}"
                raise ModelError(f"--lora {lora}: {message}, and {len(lines) - 2} more") from error
        jobs = _jobs(held, samples, out, naming, ".mp4" if makes_clips(config) else ".png")
        mine = jobs[world.dp_index :: world.dp_size]
        _make(config, adapter, [job for job in mine if not job.file.exists()], jobs[0], world, fps)
        world.barrier()
        if world.main:
            print(f"{len(jobs)} files are in {out}")
    finally:
        parallel.stop()
    return 0


def _jobs(held: list[Prompt], samples: int, out: Path, naming: Naming, ending: str) -> list[Job]:
    """All files, each once."""
    every = [Job(p, j, out / file_name(p, j, naming, ending)) for p in held for j in range(samples)]
    seen: dict[Path, Job] = {}
    for job in every:
        if job.file in seen and naming != "vbench":
            raise DataError(f"prompts {seen[job.file].prompt.id + 1} and {job.prompt.id + 1} share the file {job.file}")
        seen.setdefault(job.file, job)
    return list(seen.values())


def _make(config: Config, adapter: Any, jobs: list[Job], any_job: Job, world: World, fps: int) -> None:
    """Render and write this rank's files, a batch at a time.

    With `World.equal_forwards` a rank with fewer batches renders `any_job` for each that it lacks, and writes nothing.
    """
    r, own, m = evaluation(config), config.data.own_sizes, config.memory
    embeddings = Embeddings(adapter, config.data.max_length, config.data.cache or None)
    schedules = Schedules(config, adapter, world.device)
    by_size: dict[SamplingConfig, list[Job]] = {}
    for job in jobs:
        by_size.setdefault(of_prompt(job.prompt, r, own), []).append(job)
    batches = [(s, js[k : k + r.batch_size]) for s, js in by_size.items() for k in range(0, len(js), r.batch_size)]
    count = len(batches)
    if world.equal_forwards:
        most = int(world.gather(np.array([float(count)])).max())
        batches += [(of_prompt(any_job.prompt, r, own), [any_job])] * (most - count)
    with tqdm(total=len(jobs), unit="file", dynamic_ncols=True, disable=None if world.main else True) as bar:
        for number, (sizes, batch) in enumerate(batches):
            places = [FIRST_ID + job.prompt.id * PER_PROMPT + job.sample for job in batch]
            ids = torch.tensor(places, dtype=torch.int64, device=world.device)
            prompts, schedule = [job.prompt for job in batch], schedules.ode(sizes)
            media = render(adapter, schedule, embeddings, prompts, ids, sizes, config.seed, m.decode_batch)
            if number < count:
                for job, pixels in zip(batch, to_uint8(media), strict=True):
                    write(job.file, pixels, fps)
                bar.update(len(batch))


def write(file: Path, pixels: Images, fps: int) -> None:
    """An image [H, W, 3] as PNG or a clip [F, H, W, 3] as mp4; whole or not at all."""
    part = file.with_name(f".{os.getpid()}{file.suffix}")
    if pixels.ndim == 3:
        Image.fromarray(pixels).save(part)
    else:
        from diffusers.utils import export_to_video

        export_to_video([Image.fromarray(np.ascontiguousarray(frame)) for frame in pixels], str(part), fps=fps)
    os.replace(part, file)
