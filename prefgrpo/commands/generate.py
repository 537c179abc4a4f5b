"""`prefgrpo generate RECIPE --lora DIR`: images or clips for every prompt of a file, generated as in evaluation.

Sample j of prompt i has the noise address (seed, i, j), and belongs to rank (i·n + j) mod world size. Existing files
are skipped, so the same command continues a killed run. Invariant: a file depends on (weights, prompt, seed, noise
address), not on the world size or on which files already exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from prefgrpo.config.loading import load
from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, SamplingConfig
from prefgrpo.data.file_names import Naming, file_name
from prefgrpo.data.prompts import DataError, Prompt, read_prompts
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.parallelize import parallelize
from prefgrpo.parallel.world import World
from prefgrpo.rollout.embeddings import Embeddings, encoding_jobs, uncached
from prefgrpo.rollout.render import Images, render, to_uint8
from prefgrpo.rollout.sampling import Schedules, all_sizes, eval_sampling, prompt_sampling
from prefgrpo.run.judging import makes_clips
from prefgrpo.run.loading import config_errors_as, load_checkpoint, open_adapter
from prefgrpo.run.run_folder import run_of

FIRST_ID = 2**61
"""Sample ids of generated noise start here, far from those of training and evaluation."""
PER_PROMPT = 2**20


@dataclass(frozen=True)
class Job:
    """One file to make."""

    prompt: Prompt
    noise: int
    """Address of its initial noise: a sample id."""
    file: Path


@dataclass(frozen=True)
class Weights:
    """The weights to generate with: the model's own, by default; with a LoRA; or a checkpoint's."""

    lora: Path | None = None
    """Folder of a trained LoRA, or a run folder that has one."""
    trainable: bool = False
    """Open the model as for training: with its trainable weights and attention backend, split over processes."""
    checkpoint: Path | None = None
    """Folder of a checkpoint, RUN/checkpoints/step_NNNNNN, of the configured run; needs `trainable`."""
    averaged: bool = False
    """Use the checkpoint's EMA instead of its live weights."""


def generate(
    config: Config,
    lora: Path | None = None,
    prompts: str = "",
    out: Path = Path("generated"),
    samples: int = 4,
    naming: Naming = "plain",
    fps: int = 16,
) -> int:
    """Generate images or clips for every prompt of a file, as the evaluation does (also under torchrun).

    Args:
        config: The recipe with its overrides, e.g. runs/demo/config.yaml.
        lora: Folder of a trained LoRA, or its run folder; none: the base model (or the full weights given by --model).
        prompts: Prompts: txt, csv, tsv, jsonl or parquet; empty: the recipe's eval.prompts, or else its data.prompts.
        out: Output folder; existing files are skipped.
        samples: Images or clips per prompt.
        naming: plain: 000012_0.png by position; unigenbench: INDEX_0.png by the table's index column; vbench:
            PROMPT-0.mp4.
        fps: Frames per second of clips.
    """
    check_writing(config, out, samples, fps)
    held = read_prompts(prompts or config.eval.prompts or config.data.prompts, unique=False)
    ending = ".mp4" if makes_clips(config) else ".png"
    places = [(p, j, out / file_name(p, j, naming, ending)) for p in held for j in range(samples)]
    jobs = make_jobs(places, shared=naming == "vbench")
    there = sum(job.file.exists() for job in jobs)
    world = parallel.join(config.device)
    config, weights = _weights(config, lora)
    generate_files(config, weights, jobs, world, fps)
    if world.main:
        print(f"{len(jobs)} files are in {out}" + f"; {there} already existed and are unchanged" * (there > 0))
    return 0


def _weights(config: Config, lora: Path | None) -> tuple[Config, Weights]:
    """(configuration to open the model with, weights) for --lora: a LoRA's folder, a finished run or a checkpoint."""
    run = run_of(lora) if lora is not None else None
    if lora is None or run is None or (lora / "lora").is_dir():
        return config, Weights(lora=lora)
    path = run.checkpoint_of(lora)
    trained = load(run.config).train
    if path is None:
        raise ModelError(f"--lora: {lora} has neither a LoRA nor a checkpoint")
    return replace(config, train=trained), Weights(trainable=True, checkpoint=path, averaged=trained.ema_decay > 0)


def check_writing(config: Config, out: Path, samples: int, fps: int) -> None:
    """Create `out`. Raises ConfigError if files cannot be written into it."""
    if wrong := [f"--{k}: expected at least 1, got {n}" for k, n in (("samples", samples), ("fps", fps)) if n < 1]:
        raise ConfigError(wrong)
    if makes_clips(config) and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(["generate: writing mp4 files needs imageio-ffmpeg: pip install 'prefgrpo[video]'"])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"--out: expected a folder that can be written: {error}"]) from error


def make_jobs(places: Iterable[tuple[Prompt, int, Path]], shared: bool = False) -> list[Job]:
    """A job per (prompt, sample number, file), each file once. Raises DataError if two prompts have one file, unless
    `shared`."""
    jobs: dict[Path, Job] = {}
    for prompt, sample, file in places:
        if file in jobs and not shared:
            raise DataError(f"prompts {jobs[file].prompt.id + 1} and {prompt.id + 1} share the file {file}")
        jobs.setdefault(file, Job(prompt, FIRST_ID + prompt.id * PER_PROMPT + sample, file))
    return list(jobs.values())


def generate_files(config: Config, weights: Weights, jobs: Sequence[Job], world: World, fps: int) -> None:
    """Generate every missing file, each rank its share, then wait for all ranks; loads the model only if needed.

    Raises ConfigError, ModelError or CheckpointError.
    """
    missing = [job for job in jobs[world.dp_index :: world.dp_size] if not job.file.exists()]
    if world.any(bool(missing)):
        prompts, shown = list({id(job.prompt): job.prompt for job in jobs}.values()), eval_sampling(config)
        absent = uncached(config, encoding_jobs(replace(config, rollout=shown), prompts))
        adapter = _open(config, weights, world, encoders=bool(absent))
        with config_errors_as("eval, or a prompt's own size"):
            for sizes in all_sizes(prompts, shown, config.data.own_sizes):
                adapter.latent_shape(sizes)
        _render(config, adapter, missing, jobs[0], world, fps)
    world.barrier()


def _open(config: Config, weights: Weights, world: World, encoders: bool) -> Adapter:
    """The model with these weights. Raises ConfigError, ModelError or CheckpointError."""
    adapter = open_adapter(config, world.device, encoders, split=weights.trainable and world.layout.fsdp)
    if weights.trainable:
        parallelize(adapter, config, world)
    if weights.checkpoint is not None:
        load_checkpoint(adapter, weights.checkpoint, weights.averaged, world)
    if (lora := weights.lora) is not None:
        try:
            adapter.load_lora(str(lora / "lora" if (lora / "lora").is_dir() else lora))
        except (FileNotFoundError, ValueError) as error:
            raise ModelError(f"--lora: {error}") from error
        except RuntimeError as error:
            lines = str(error).splitlines()
            message = f"{config.model} is not the model that it was trained on: {' '.join(lines[:2])}"
            raise ModelError(f"--lora {lora}: {message}, and {len(lines) - 2} more") from error
    return adapter


def _render(config: Config, adapter: Adapter, jobs: Sequence[Job], any_job: Job, world: World, fps: int) -> None:
    """Render and write this rank's files, a batch at a time.

    With `World.equal_forwards`, a rank with fewer batches renders `any_job` as padding, without writing it.
    """
    r = eval_sampling(config)
    own = config.data.own_sizes
    embeddings = Embeddings(adapter, config.data.max_length, config.data.cache or None)
    schedules = Schedules(config, adapter, world.device)
    alike: dict[tuple[SamplingConfig, int], list[Job]] = {}
    for job in jobs:
        alike.setdefault((prompt_sampling(job.prompt, r, own), len(job.prompt.source)), []).append(job)
    batches = [(s, js[k : k + r.batch_size]) for (s, _), js in alike.items() for k in range(0, len(js), r.batch_size)]
    count = len(batches)
    if world.equal_forwards:
        most = int(world.gather(np.array([float(count)])).max())
        batches += [(prompt_sampling(any_job.prompt, r, own), [any_job])] * (most - count)
    with tqdm(total=len(jobs), unit="file", dynamic_ncols=True, disable=None if world.main else True) as bar:
        for number, (sizes, batch) in enumerate(batches):
            ids = torch.tensor([job.noise for job in batch], dtype=torch.int64, device=world.device)
            prompts, schedule = [job.prompt for job in batch], schedules.ode(sizes)
            media = render(adapter, schedule, embeddings, prompts, ids, sizes, config.seed, world)
            if number < count and world.is_dp_leader:
                for job, pixels in zip(batch, to_uint8(media), strict=True):
                    write(job.file, pixels, fps)
            bar.update(len(batch) * (number < count))
    embeddings.flush()


def write(file: Path, pixels: Images, fps: int) -> None:
    """An image [H, W, 3] as PNG or a clip [F, H, W, 3] as mp4, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{os.getpid()}{file.suffix}")
    if pixels.ndim == 3:
        Image.fromarray(pixels).save(part)
    else:
        from diffusers.utils import export_to_video

        export_to_video([Image.fromarray(np.ascontiguousarray(frame)) for frame in pixels], str(part), fps=fps)
    os.replace(part, file)
