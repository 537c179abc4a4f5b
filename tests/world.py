"""Everything tiny that the tests run on: media, runs of a random FLUX pipeline, and every model family.

A tiny run has 0.1 M weights, 16×16 pixels and real commands; `ranks` starts it in processes of its own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from prefgrpo import models
from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import merge as merged
from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.condition import Condition, collate
from prefgrpo.models.wan import NEGATIVE
from prefgrpo.objectives.base import Targets
from prefgrpo.parallel.world import World
from prefgrpo.rewards.base import Question, Reward
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.rollout.batch import Batch
from prefgrpo.rollout.embeddings import Embeddings, entries_of
from prefgrpo.rollout.rollout import Trajectory, rollout
from prefgrpo.rollout.source_images import SourceImages
from prefgrpo.sde.noise import initial_latents
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.tiny import pipelines
from prefgrpo.trainer import Trainer

# ---- media: images and clips (`frames` > 0) of 16 frames per second, without files -----------------------------------


def grey(level: float, size: int = 32, frames: int = 0) -> Media:
    """A uniformly grey square."""
    return Media(
        np.full((frames, size, size, 3) if frames else (size, size, 3), level, np.uint8), 16.0 if frames else None
    )


def noise(seed: int, high: int = 40, wide: int = 56, frames: int = 0) -> Media:
    """Independent uniform values."""
    shape = (frames, high, wide, 3) if frames else (high, wide, 3)
    return Media(np.random.default_rng(seed).integers(0, 256, shape, np.uint8), 16.0 if frames else None)


# ---- runs ------------------------------------------------------------------------------------------------------------

ALONE = World(0, 1, torch.device("cpu"))
PROMPTS = [f"a red circle number {k}" for k in range(1, 11)]
BASE: dict[str, Any] = {
    "dtype": "fp32",
    "trackers": [],
    "data": {"max_length": 24},
    "rollout": {"height": 16, "width": 16, "steps": 3, "prompts_per_step": 2, "group_size": 4, "batch_size": 4},
    "rewards": "jpeg_compressibility",
    "train": {"steps": 4, "lora_rank": 4, "lora_alpha": 6, "lr": 1e-2, "clip_range": 1e-5},
    "eval": {"every": 2, "rewards": "jpeg_incompressibility"},
    "checkpoint": {"every": 2},
}
"""A run of 4 steps of 2 × 4 images; LoRA alpha differs from its rank."""


def tiny_world(folder: Path) -> Path:
    """Writes the tiny pipeline and prompts into `folder` and returns it."""
    pipelines.make("flux", folder / "flux")
    (folder / "train.txt").write_text("\n".join(PROMPTS[:7]) + "\n", encoding="utf-8")
    (folder / "dev.txt").write_text("\n".join(PROMPTS[7:]) + "\n", encoding="utf-8")
    return folder


def settings(place: Path, name: str, **over: Any) -> dict[str, Any]:
    """The configuration of a run over the tiny pipeline in `place`, with absolute paths."""
    paths = {
        "model": str(place / "flux"),
        "name": name,
        "output": str(place / "runs"),
        "data": {"prompts": str(place / "train.txt")},
        "eval": {"prompts": str(place / "dev.txt")},
    }
    return merged(merged(BASE, paths), over)


def recipe(place: Path, name: str, **over: Any) -> Path:
    """Writes `settings` to a YAML file and returns its path."""
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings(place, name, **over), allow_unicode=True), encoding="utf-8")
    return file


class Brightness(Reward):
    """Mean of all pixels."""

    def ask(self, asked: list[Question]) -> list[Answer]:
        """One score per sample."""
        return [Answer(float(s.media.pixels.mean())) for (s,) in asked]


BRIGHTNESS = f"{__name__}.Brightness"
"""The name of `Brightness` in `rewards`."""


def brighter(prompt: str, image_a: Any, image_b: Any) -> float:
    """Whether the first image is brighter; a reward of pairs, which needs all members of a group."""
    return float(np.sign(image_a.mean() - image_b.mean()) + 1) / 2


BRIGHTER = f"{__name__}.brighter"
"""The name of `brighter` in `rewards`."""


def collect(loop: Trainer, step: int) -> list[Batch]:
    """The rollouts of a training step, with every sample passed to the scorer as in the loop."""
    plan = loop.groups.plan(step)
    loop.scorer.begin(step, plan.scored)
    return list(loop.groups.batches(plan, loop.scorer.add))


def batches_of(loop: Trainer, step: int) -> list[Batch]:
    """The same, unscored."""
    return list(loop.groups.batches(loop.groups.plan(step), lambda group, member, sample: None))


def computed(loop: Trainer, scores: StepScores) -> tuple[Targets, dict[str, float]]:
    """Targets and metrics of the first step, of groups whose images' distances do not matter."""
    return loop.targets.compute(loop.groups.plan(0), scores, np.zeros(len(scores.samples)))


def targets_of(advantage: Tensor) -> Targets:
    """Targets from advantages alone, without comparisons."""
    none = advantage.new_zeros(*advantage.shape, advantage.shape[1])
    return Targets(advantage, none, none, torch.ones_like(advantage, dtype=torch.bool))


def stored(trajectory: Batch | Trajectory) -> list[Tensor]:
    """The final latents, then x, x_next and logp (and v, if stored) of every step."""
    of_steps = [(s.x, s.x_next, s.logp) + (() if s.v is None else (s.v,)) for s in trajectory.transitions]
    return [trajectory.latents, *(tensor for step in of_steps for tensor in step)]


def rows(folder: Path, timeless: bool = True) -> list[dict[str, Any]]:
    """Every row of metrics.jsonl, by default without its wall-clock times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if not (timeless and k.startswith("time/"))} for line in lines]


def tree(folder: Path) -> dict[str, bytes]:
    """{relative path: content} of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def hidden(folder: Path) -> list[str]:
    """Names of the hidden files and folders below a folder, except the .metadata of finished checkpoints."""
    return [p.name for p in folder.rglob(".*") if p.name != ".metadata"]


def weights(run: Path) -> dict[str, bytes]:
    """{relative path and name of the tensor: bytes} of every safetensors file of a run."""
    return {
        f"{file.relative_to(run)} {name}": tensor.float().numpy().tobytes()
        for file in sorted(run.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def opened(config, world=ALONE):
    """The adapter of a run, ready to train."""
    from prefgrpo.parallel.parallelize import parallelize
    from prefgrpo.run.opening import open_adapter

    adapter = open_adapter(config, world.device, True, world.layout.fsdp or config.fp8_base)
    parallelize(adapter, config, world)
    return adapter


# ---- families: the table, and sampling with our adapter and with the stock pipeline ----------------------------------

CPU = torch.device("cpu")
TWO_PROMPTS = ["a red cube", "two blue balls on a table"]
SIZES = [(32, 32), (32, 64)]
SOURCES = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (64, 64, 3), dtype=np.uint8)) for i in range(2)]
SEED = 3
QUICK = ("flux", "qwen_image_edit", "sd3", "wan22")
"""Families that every `make test` covers; the others run in the `full` tier only."""


@dataclass(frozen=True)
class Case:
    """One family and the call of its stock pipeline."""

    family: str
    call: dict
    """Arguments of the stock call other than prompt, latents, size and steps."""
    guidance: float
    """Our guidance scale."""
    max_length: int = 32
    dynamic: bool = False
    """Whether the stock pipeline supports the scheduler's dynamic shift."""
    edit: Callable[[int, int], dict] | None = None
    """For editing: arguments of the stock call that depend on the size."""
    sources: int = 1
    """For editing: number of source images per prompt."""
    fit: bool = False
    """For editing: whether source images are resized to the output's size beforehand."""
    stock: str = ""
    """Class name of the stock pipeline, if it is not the adapter's."""
    alone: bool = False
    """Whether to call the stock pipeline prompt by prompt, since its images depend on the rest of their batch."""
    off: float = 1.0
    """A guidance scale that switches classifier-free guidance off."""

    def unguided(self):
        """This case with classifier-free guidance switched off."""
        scales = ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "audio_guidance_scale")
        return replace(self, guidance=self.off, call=self.call | {k: self.off for k in scales if k in self.call})

    def sampling(self, size=SIZES[0], steps=4):
        height, width = size
        second, frames = self.call.get("guidance_scale_2"), self.call.get("num_frames")
        return SamplingConfig(height, width, steps, guidance=self.guidance, guidance_2=second, frames=frames)

    def images(self, number, size):
        """Source images of prompt `number`; () for a case that does not edit."""
        own = [SOURCES[(number + k) % 2] for k in range(self.sources if self.edit else 0)]
        return tuple(image.resize(size[::-1]) if self.fit else image for image in own)

    def pipe(self, path):
        """The stock pipeline loaded from a folder."""
        return stock_pipe(self.stock or models.family(self.family).pipeline, path)

    def __str__(self):
        edit = f"-edit{self.sources if self.sources > 1 and self.family == 'flux3' else ''}" if self.edit else ""
        return f"{self.family}{edit}{'' if self.guidance > 1 else '-unguided'}"


def stock_pipe(name, path, **options):
    """The stock pipeline of a class loaded from a folder; FLUX.3's without the block that rewrites prompts."""
    kind = getattr(diffusers, name)
    if not issubclass(kind, diffusers.ModularPipeline):
        return kind.from_pretrained(path, **options)
    blocks = getattr(diffusers, kind.default_blocks_name)()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipe = blocks.init_pipeline(str(path))
    pipe.load_components(**options)
    return pipe


def _case(family, scale, length=32, *, frames=0, second=0.0, name="guidance_scale", same_edit=False, also=(), **more):
    call = dict(also) | {name: scale} | ({"max_sequence_length": length} if length else {})
    call |= {"num_frames": frames} if frames else {}
    call |= {"guidance_scale_2": second} if second else {}
    call |= {"negative_prompt": [" "] * 2} if name == "true_cfg_scale" else {}
    more |= {"edit": lambda height, width: {}} if same_edit else {}
    return Case(family, call, scale, max_length=length or 32, **more)


PLAIN = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
LTX2 = PLAIN | {f"audio_{k}": v for k, v in PLAIN.items()} | {"audio_guidance_scale": 3.0, "use_cross_timestep": False}
QWEN = {"name": "true_cfg_scale", "dynamic": True}
WAN = {"num_frames": 5, "negative_prompt": [NEGATIVE] * 2}
CASES = [
    _case("flux", 3.5, dynamic=True),
    _case("flux_kontext", 2.5, dynamic=True, edit=lambda h, w: {"max_area": h * w, "_auto_resize": False}),
    _case("sd3", 4.5, dynamic=True),
    _case("qwen_image", 4.0, 320, alone=True, **QWEN),
    _case("qwen_image_edit", 4.0, 512, same_edit=True, **QWEN),
    _case("qwen_image_edit_plus", 4.0, 512, same_edit=True, sources=2, **QWEN),
    Case("qwen_image_21", {"true_cfg_scale": 4.0, "negative_prompt": [" "] * 2}, 4.0, 320, dynamic=True, alone=True),
    _case("krea2", 4.5, 256, dynamic=True, off=0.0),
    _case("z_image", 3.0, 128, dynamic=True, off=0.0, alone=True),
    _case("hunyuan_video", 6.0, 448, frames=5, alone=True),
    Case(
        "hunyuan_video_15",
        {"guidance_scale": 6.0, "tokenizer_max_length": 1000, "num_frames": 5},
        6.0,
        1000,
        alone=True,
    ),
    _case("ltx2", 3.0, dynamic=True, frames=5, also=LTX2),
    _case("wan", 5.0, also=WAN),
    _case("wan22", 4.0, second=3.0, also=WAN),
    _case("wan22_i2v", 3.5, second=3.5, same_edit=True, fit=True, also=WAN),
    _case("wan_i2v", 5.0, same_edit=True, fit=True, also=WAN),
    _case("wan_ti2v", 5.0, also=WAN),
    _case("wan_ti2v", 5.0, same_edit=True, fit=True, stock="WanImageToVideoPipeline", also=WAN),
    _case("flux2", 4.0, 512, dynamic=True),
    _case("flux2", 4.0, 512, dynamic=True, same_edit=True),
    _case("flux2_klein", 4.0, 64, dynamic=True),
    _case("flux2_klein", 4.0, 64, dynamic=True, same_edit=True),
    _case("flux3", 3.5, 160),
    _case("flux3", 3.5, 160, same_edit=True),
    _case("flux3", 3.5, 160, same_edit=True, sources=2),
]


def case_of(family, edit=None):
    """First case of a family; `edit` (True or False) selects by whether it edits."""
    return next(c for c in CASES if c.family == family and edit in (None, c.edit is not None))


def tiered(cases, *values):
    """One pytest parameter per case, with `values` appended; cases outside QUICK are marked `full`."""
    full = pytest.mark.full
    return [
        pytest.param(case, *values, id="-".join(map(str, (case, *values))), marks=() if case.family in QUICK else full)
        for case in cases
    ]


@functools.cache
def folder(family, **scheduler):
    """A tiny pipeline of the family, made by the first process of the test run that needs it. Nobody may change it."""
    place = _shared("-".join([family, *(f"{key}={value}" for key, value in scheduler.items())]))
    made = place.with_name(f"{place.name}.made")  # a pipeline's files name their folder, so it is not renamed
    with FileLock(f"{place}.lock"):
        if not made.exists():
            pipelines.make(family, place, **scheduler)
            made.touch()
    return place


def linked(place, families):
    """Links `place`/FAMILY to the tiny pipelines; returns `place`."""
    for family in families:
        (place / family).symlink_to(folder(family))
    return place


def _shared(name):
    """A path in the folder of the test run."""
    place = Path(os.environ["PREFGRPO_TEST_FOLDER"], "families")
    place.mkdir(exist_ok=True)
    return place / name


def load(case, path=None, dtype=torch.float32, device=CPU, **options):
    """The adapter loaded from a folder (default: the family's tiny pipeline)."""
    return models.family(case.family).load(str(path or folder(case.family)), dtype, device, **options)


def in_files(images):
    """`SourceImages` of pictures in memory, written to files that are named by their content."""
    files = [_shared(f"{hashlib.sha256(one.tobytes()).hexdigest()}-{one.width}.png") for one in images]
    for file, one in zip(files, images, strict=True):
        with FileLock(f"{file}.lock"):
            if not file.exists():
                one.save(file)
    return SourceImages(tuple(map(str, files)), images[0].height, images[0].width) if images else SourceImages()


def conditions(adapter, case, prompts=TWO_PROMPTS, size=SIZES[0]):
    """A batch; its texts have one length, so those of a family whose texts differ in length are all the first."""
    sources = [in_files(case.images(number, size)) for number in range(len(prompts))]
    if type(adapter).attention_masks != "none":
        prompts = [prompts[0]] * len(prompts)
        sources = [sources[0]] * len(prompts)
    return collate(embed(cache(case), adapter, prompts, case.sampling(size), sources))


def cache(case, cached_in="", path=None, dtype="fp32", **options):
    """The embeddings of a family's tiny pipeline, kept in the folder `cached_in`."""
    data = {"prompts": "p", "max_length": case.max_length, "cache": str(cached_in)}
    content = {"model": str(path or folder(case.family)), "family": case.family, "dtype": dtype, "data": data}
    return Embeddings(from_dict(content), **options)


def embed(embeddings, adapter, texts, sampling, sources=None):
    """Conditions of texts with sources of any size; training fits sources to the output."""
    prompts = [Prompt(k, text) for k, text in enumerate(texts)]
    pairs = zip(prompts, sources or [SourceImages()] * len(texts), strict=True)
    guided = adapter.guided(sampling)
    return embeddings.conditions(adapter, [entries_of(type(adapter), p, s, sampling, guided) for p, s in pairs])


def policy(case, scale=0.05, **options):
    """An adapter with a LoRA whose B matrices are random, so that it differs from the reference policy."""
    adapter = load(case, **options)
    adapter.add_lora(4, 8.0)
    return perturb(adapter, scale)


def perturb(adapter, scale=0.05):
    generator = torch.Generator().manual_seed(7)
    for name, p in adapter.trainable():
        if "lora_A" not in name:
            with torch.no_grad():
                p.add_(torch.randn(p.shape, generator=generator).to(p) * scale)
    return adapter


def initial_noise(adapter, sampling, count=2):
    """The initial latents that `draw` uses, for the stock pipeline."""
    return initial_latents(SEED, torch.arange(count), adapter.latent_shape(sampling))


def two_samples(adapter, case, sigma=0.6):
    """What a velocity takes: x, σ, condition and sampling, of two samples."""
    sampling = case.sampling()
    return initial_noise(adapter, sampling), torch.full((2,), sigma), conditions(adapter, case), sampling


def draw(adapter, case, size, steps, prompts=TWO_PROMPTS):
    """Our images, sampled with the ODE rule."""
    sampling = case.sampling(size, steps)
    schedule = make_schedule(adapter.sigmas(sampling), "ode", 0.0, times=adapter.times(sampling))
    sources = [in_files(case.images(number, size)) for number in range(len(prompts))]
    each = embed(cache(case), adapter, prompts, sampling, sources)
    batches = (
        [list(range(len(prompts)))] if len({one.shapes() for one in each}) == 1 else [[k] for k in range(len(each))]
    )
    images = []
    for rows in batches:
        condition = collate([each[k] for k in rows])
        done = rollout(adapter, schedule, condition, torch.tensor(rows), sampling, seed=SEED)
        images.append(adapter.decode(done.latents, sampling))
    return torch.cat(images)


def stock_image(pipe, case, x0, size, steps, prompts=TWO_PROMPTS):
    pipe.set_progress_bar_config(disable=True)
    if "solver_order" in pipe.scheduler.config:  # Wan's UniPC as a first-order solver
        first = {"solver_order": 1, "disable_corrector": list(range(steps))}
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **first)
    call = case.call | {"height": size[0], "width": size[1], "num_inference_steps": steps, "output_type": "pt"}
    configure_pipe(pipe, call)
    if hasattr(pipe, "audio_vae"):  # LTX-2: the audio tokens follow the video tokens
        frames = (call["num_frames"] - 1) // pipe.vae_temporal_compression_ratio + 1
        count = frames * size[0] * size[1] // pipe.vae_spatial_compression_ratio**2
        sound = x0[:, count:] * pipe.audio_vae.latents_std + pipe.audio_vae.latents_mean
        x0, call["audio_latents"] = x0[:, :count], sound
    call = {key: value[: len(prompts)] if isinstance(value, list) else value for key, value in call.items()}
    if isinstance(pipe, diffusers.ModularPipeline):  # a prompt per call
        images = [one_or_list(case.images(number, size)) for number in range(len(prompts))]
        options = [{"image": own} if case.edit else {} for own in images]
        each = zip(prompts, x0[:, None], options, strict=True)
        return torch.cat([pipe(prompt=p, latents=x, output="images", **own, **call) for p, x, own in each])
    if case.alone:
        one = {key: value[:1] if isinstance(value, list) else value for key, value in call.items()}
        each = [pipe(prompt=[p], latents=x, **one)[0] for p, x in zip(prompts, x0[:, None], strict=True)]
        images = torch.cat(each)
        return on_white(images) if case.family == "qwen_image_21" else images
    if not case.edit:
        return pipe(prompt=list(prompts), latents=x0, **call)[0]  # a copy: Z-Image writes into the list
    call |= case.edit(*size)
    call = {key: value[:1] if isinstance(value, list) else value for key, value in call.items()}
    images = [case.images(number, size) for number in range(len(prompts))]
    each = zip(prompts, images, x0[:, None], strict=True)
    return torch.cat([pipe(prompt=[p], image=one_or_list(own), latents=x, **call)[0] for p, own, x in each])


def on_white(images):
    """RGBA images composited on white, as Pillow's paste does."""
    return torch.lerp(torch.ones(3, 1, 1), images[:, :3].float(), images[:, 3:].float())


def configure_pipe(pipe, call):
    """Set what is no call argument on the pipeline: the guider, and of HunyuanVideo-1.5 the length of texts; its VAE
    decodes clips one by one."""
    if hasattr(pipe, "guider"):
        pipe.guider = pipe.guider.new(guidance_scale=call.pop("guidance_scale"))
    if "tokenizer_max_length" in call:
        pipe.vae.enable_slicing()
        pipe.tokenizer_max_length = call.pop("tokenizer_max_length")


def stock_lora(pipe, path):
    """Load the LoRA in a folder with stock diffusers."""
    if hasattr(pipe, "load_lora_weights"):
        pipe.load_lora_weights(path)
    else:
        pipe.transformer.load_lora_adapter(path, weight_name="pytorch_lora_weights.safetensors")


def differs(adapter, pipe, case, size=SIZES[0], steps=2, prompts=TWO_PROMPTS):
    """Largest absolute difference between our images and the stock pipeline's."""
    want = stock_image(pipe, case, initial_noise(adapter, case.sampling(size), len(prompts)), size, steps, prompts)
    got = draw(adapter, case, size, steps, prompts)
    assert got.shape == want.shape and want.std() > 0.01
    assert want.shape[-2:] == size, "the tiny VAE has the pipeline's scale"
    return float((got - want).abs().max())


def one_or_list(images):
    """A single image or a list, as stock pipelines expect."""
    return images[0] if len(images) == 1 else list(images)


EDIT_PLUS = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"
RESIZERS = (EDIT_PLUS, EDIT_PLUS.removesuffix("_plus"), "prefgrpo.models.qwen_image")


@contextmanager
def small_sources():
    """Context in which Qwen-Image-Edit resizes sources to 1/256 of the usual pixels, in stock pipelines and ours."""
    with pytest.MonkeyPatch.context() as patch:
        for module in [importlib.import_module(name) for name in RESIZERS]:
            real = module.calculate_dimensions
            patch.setattr(module, "calculate_dimensions", lambda area, ratio, real=real: real(area / 256, ratio))
        yield


def tensors_of(condition: Condition) -> list[torch.Tensor]:
    """All tensors of a condition."""
    negative = tensors_of(condition.negative) if condition.negative else []
    return [*condition.tensors().values(), *condition.sources, *negative]


def unfuse(adapter):
    """Let the blocks run as in diffusers again."""
    for net in adapter.modules().values():
        for block in adapter.blocks(net):
            block.__class__ = type(block).__base__
