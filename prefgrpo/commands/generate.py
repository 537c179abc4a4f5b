"""`prefgrpo generate TARGET`: images or clips for every prompt of a file, generated as in evaluation.

Sample j of prompt i has the noise address (seed, i, j), and belongs to rank (i·n + j) mod world size. Existing files
are skipped, so the same command continues a killed run. Invariant: a file depends on (weights, prompt, seed, noise
address), not on the world size or on which files already exist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from prefgrpo.config.recipe import ConfigError, UserError
from prefgrpo.config.schema import Config
from prefgrpo.data.atomic import write_atomic
from prefgrpo.data.file_names import Naming, file_name
from prefgrpo.data.pairs import has_pairs
from prefgrpo.data.prompts import DataError, Prompt, fingerprint, read_prompts
from prefgrpo.models import family
from prefgrpo.models.attention import attention_of_a_run
from prefgrpo.models.base import Adapter
from prefgrpo.models.folder import ModelError
from prefgrpo.models.weights import locate_lora
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.attention import set_backend
from prefgrpo.parallel.parallelize import parallelize
from prefgrpo.parallel.world import World
from prefgrpo.rollout.embeddings import Embeddings, run_entries
from prefgrpo.rollout.render import Images, render
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.run.checkpoint import CheckpointError, read_meta
from prefgrpo.run.folder import ABOUT, run_of
from prefgrpo.run.judging import makes_clips
from prefgrpo.run.loading import load_checkpoint, open_adapter, open_prompts, unsupported
from prefgrpo.run.notes import sampler_notes
from prefgrpo.run.pairs import open_pairs
from prefgrpo.run.source import distinct_prompts

FIRST_ID = 2**61
"""Sample ids of generated noise start here, far from those of training and evaluation."""
PER_PROMPT = 2**20
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


@dataclass(frozen=True)
class Source:
    """What samples: a configured model as it is, with a LoRA, or with the trained weights of a checkpoint."""

    config: Config
    label: str = "base"
    """Used in folder names."""
    lora: Path | None = None
    """File or folder of a trained LoRA."""
    checkpoint: Path | None = None
    """Folder of a checkpoint, RUN/checkpoints/step_NNNNNN, of the configured run; its EMA is used if it has one."""
    as_trained: bool = False
    """Open the model as for training: with its trainable weights and attention backend, split over processes."""

    def frame_rate(self, fps: float | None) -> float | None:
        """Frames per second of its clips: `fps`, or else those of its family; None for images. Raises ConfigError."""
        if not makes_clips(self.config):
            return None
        if rate := fps or family(self.config.family).frame_rate:
            return rate
        raise ConfigError([f"--fps: expected frames per second, as {self.config.family} has no frame_rate"])

    def facts(self, prompts: Sequence[Prompt], fps: float | None, **more: Any) -> dict[str, Any]:
        """Everything that determines the files that it makes for these prompts."""
        c = self.config
        facts = {
            "model": c.model,
            "weights": self.label,
            "lora_from": c.train.lora_from or None,
            "dtype": c.dtype,
            "fp8_base": c.fp8_base and self.as_trained,
            "seed": c.seed,
            "max_length": c.data.max_length,
            "prompts": fingerprint(prompts),
            "fps": self.frame_rate(fps),
            "sampling": {k: v for k, v in asdict(c.eval_sampling).items() if k != "batch_size"},
        }
        if self.checkpoint is not None:
            facts["written"] = read_meta(self.checkpoint)["written"]
        if self.lora is not None:
            files = [self.lora] if self.lora.is_file() else self.lora.rglob("*.safetensors")
            facts["written"] = max((file.stat().st_mtime_ns for file in files), default=0)
        return facts | more

    def open(self, world: World, encoders: bool) -> Adapter:
        """The model with these weights. Raises ConfigError, ModelError or CheckpointError."""
        mapped = self.as_trained and (world.layout.fsdp or self.config.fp8_base)
        adapter = open_adapter(self.config, world.device, encoders, mapped)
        if self.as_trained:
            parallelize(adapter, self.config, world)
        else:
            set_backend(adapter, self.config, world.layout, world.device)
        if self.checkpoint is not None:
            load_checkpoint(adapter, self.checkpoint, self.config.train.ema_decay > 0, world)
        if (lora := self.lora) is not None:
            try:
                adapter.load_lora(str(lora))
            except (FileNotFoundError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).splitlines()[:2])
                raise ModelError(f"--lora {lora}: it does not fit {self.config.model}: {reason}") from error
        return adapter


def source_of(config: Config, target: str, world: World) -> Source:
    """The source of a target: the checkpoint that it names, or the newest of a run; otherwise the base model.

    Which one is the newest is decided by rank 0, as the run may be writing checkpoints. Raises UserError.
    """
    run = run_of(Path(target))
    if run is None:
        p = config.parallel
        split = p.shard * p.ring * p.ulysses > 1
        return Source(config, as_trained=split or bool(config.train.lora_from))
    found = world.on_main(lambda: run.checkpoint_of(Path(target)), UserError)
    checkpoint = world.all_gather_object(found)[0]
    assert checkpoint is not None
    label = f"{checkpoint.name}_{'ema' if config.train.ema_decay else 'live'}"
    return Source(config, label, checkpoint=checkpoint, as_trained=True)


def claim_folder(out: Path, facts: Mapping[str, Any]) -> None:
    """Write what makes the files of a folder into it. Raises CheckpointError if it holds files of something else."""
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
    if problems := unsupported(config):
        raise ConfigError(problems)
    world = parallel.join(config)
    source = source_of(config, target, world)
    if lora is not None:
        if source.checkpoint is not None:
            raise ConfigError([f"--lora: {target} has weights of its own; expected a recipe or a model with it"])
        try:
            source = Source(config, str(lora), locate_lora(str(lora), family(config.family).denoisers[1:]))
        except (OSError, ValueError) as error:  # ValueError: a name that the hub does not allow
            raise ModelError(f"--lora {lora}: {error}") from error
    check_writing(config, out, samples, fps)
    file = prompts or config.eval.file or config.data.prompts
    if config.data.pairs and not prompts and (not file or has_pairs(file)):
        held = distinct_prompts(open_pairs(file or config.data.pairs, world))
    else:
        held = open_prompts(partial(read_prompts, file, unique=False), world)
    ending = ".mp4" if makes_clips(config) else ".png"
    places = [(p, j, out / file_name(p, j, naming, ending)) for p in held for j in range(samples)]
    jobs = make_jobs(places, shared=naming == "vbench")
    facts = source.facts(held, fps)  # not the number of samples: more may follow
    world.on_main(partial(claim_folder, out, facts), CheckpointError)
    there = generate_files(source, jobs, world, fps)
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
        job = jobs.setdefault(file, Job(prompt, FIRST_ID + prompt.id * PER_PROMPT + sample, file))
        first = job.prompt
        if first.id != prompt.id and not (shared and (first.text, first.source) == (prompt.text, prompt.source)):
            raise DataError(f"prompts {first.id + 1} and {prompt.id + 1} share the file {file}")
    return list(jobs.values())


def generate_files(source: Source, jobs: Sequence[Job], world: World, fps: float | None) -> int:
    """Generate every missing file, each rank its share, then wait for all ranks; loads the model only if needed.

    What is missing is decided by rank 0: the processes of a share run the same forwards, but a shared disk may show
    them different files. Returns the number of files that were there. Raises ConfigError, ModelError or
    CheckpointError.
    """
    config = source.config
    rate = source.frame_rate(fps)
    there = world.all_gather_object({k for k, job in enumerate(jobs) if world.main and job.file.exists()})[0]
    missing = [jobs[k] for k in range(world.dp_index, len(jobs), world.dp_size) if k not in there]
    if len(there) < len(jobs):
        prompts = list({id(job.prompt): job.prompt for job in jobs}.values())
        sampling = config.eval_sampling
        embeddings = Embeddings(config)
        absent = embeddings.absent(run_entries(replace(config, rollout=sampling), prompts))
        adapter = source.open(world, encoders=bool(absent))
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
