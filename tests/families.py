"""What the family tests share: the table of families with their stock calls, and how images are drawn both ways."""

import functools
import importlib
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from prefgrpo import models
from prefgrpo.rollout.embed import Embeddings, collate
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.tiny import pipelines

CPU = torch.device("cpu")
PROMPTS = ["a red cube", "two blue balls on a table"]


@dataclass(frozen=True)
class Case:
    """One family and how its stock pipeline is called."""

    family: str
    call: dict
    """Arguments of the stock call beside prompt, latents, size, steps."""
    guidance: float
    """Our guidance scale."""
    dynamic: bool = False
    """Whether the stock pipeline supports the scheduler's dynamic shift."""
    max_length: int = 32
    frames: int | None = None
    edit: Callable[[int, int], dict] | None = None
    """For editing: arguments of the stock call that depend on the size."""
    sources: int = 1
    """For editing: source images of each prompt."""
    fit: bool = False
    """For editing: source images are given at the output's size."""
    stock: str = ""
    """The stock pipeline, where it is not the adapter's."""
    off: float = 1.0
    """A guidance scale that switches classifier-free guidance off."""

    def unguided(self):
        """The same with classifier-free guidance off."""
        scales = ("guidance_scale", "guidance_scale_2", "true_cfg_scale")
        call = {key: self.off if key in scales else value for key, value in self.call.items()}
        return replace(self, call=call, guidance=self.off)

    def images(self, number, size):
        """The source images of a prompt by its number; () unless it edits."""
        own = [SOURCES[(number + k) % 2] for k in range(self.sources if self.edit else 0)]
        return tuple(image.resize(size[::-1]) if self.fit else image for image in own)

    def pipe(self, path):
        """The stock pipeline in a folder."""
        return getattr(diffusers, self.stock or models.family(self.family).pipeline).from_pretrained(path)

    def __str__(self):
        edit = "-edit" if self.edit else ""
        return f"{self.family}{edit}" + ("" if self.guidance > 1 else "-unguided")


WAN = {"guidance_scale": 5.0, "max_sequence_length": 32, "num_frames": 5}
CASES = [
    Case("flux", {"guidance_scale": 3.5, "max_sequence_length": 32}, 3.5, dynamic=True),
    Case(
        "flux_kontext",
        {"guidance_scale": 2.5, "max_sequence_length": 32},
        2.5,
        dynamic=True,
        edit=lambda h, w: {"max_area": h * w, "_auto_resize": False},
    ),
    Case("sd1", {"guidance_scale": 7.5}, 7.5),
    Case("sd3", {"guidance_scale": 4.5, "max_sequence_length": 32}, 4.5, dynamic=True),
    Case(
        "qwen_image",
        {"true_cfg_scale": 4.0, "negative_prompt": [" "] * 2, "max_sequence_length": 320},
        4.0,
        dynamic=True,
        max_length=320,
    ),
    Case(
        "qwen_image_edit",
        {"true_cfg_scale": 4.0, "negative_prompt": [" "] * 2, "max_sequence_length": 512},
        4.0,
        dynamic=True,
        max_length=512,
        edit=lambda h, w: {},
    ),
    Case(
        "qwen_image_edit_plus",
        {"true_cfg_scale": 4.0, "negative_prompt": [" "] * 2, "max_sequence_length": 512},
        4.0,
        dynamic=True,
        max_length=512,
        edit=lambda h, w: {},
        sources=2,
    ),
    Case("z_image", {"guidance_scale": 3.0, "max_sequence_length": 128}, 3.0, dynamic=True, max_length=128, off=0.0),
    Case(
        "hunyuan_video",
        {"guidance_scale": 6.0, "max_sequence_length": 448, "num_frames": 5},
        6.0,
        max_length=448,
        frames=5,
    ),
    Case(
        "ltx_video",
        {"guidance_scale": 3.0, "max_sequence_length": 32, "num_frames": 5},
        3.0,
        dynamic=True,
        frames=5,
    ),
    Case("wan", WAN, 5.0, frames=5),
    Case(
        "wan22",
        {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "max_sequence_length": 32, "num_frames": 5},
        4.0,
        frames=5,
    ),
    Case(
        "wan22_i2v",
        {"guidance_scale": 3.5, "guidance_scale_2": 3.5, "max_sequence_length": 32, "num_frames": 5},
        3.5,
        frames=5,
        edit=lambda h, w: {},
        fit=True,
    ),
    Case("wan_i2v", WAN, 5.0, frames=5, edit=lambda h, w: {}, fit=True),
    Case("wan_ti2v", WAN, 5.0, frames=5),
    Case("wan_ti2v", WAN, 5.0, frames=5, edit=lambda h, w: {}, fit=True, stock="WanImageToVideoPipeline"),
    Case("flux2_klein", {"guidance_scale": 4.0, "max_sequence_length": 64}, 4.0, dynamic=True, max_length=64),
    Case(
        "flux2_klein",
        {"guidance_scale": 4.0, "max_sequence_length": 64},
        4.0,
        dynamic=True,
        max_length=64,
        edit=lambda h, w: {},
    ),
]
SOURCES = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (64, 64, 3), dtype=np.uint8)) for i in range(2)]
SIZES = [(32, 32), (32, 64)]


_ROOT = tempfile.TemporaryDirectory(prefix="tiny-pipelines-")


@functools.cache
def folder(family, **scheduler):
    """A tiny pipeline of the family, made once per test run."""
    return pipelines.make(family, tempfile.mkdtemp(dir=_ROOT.name), **scheduler)


def load(case, path, dtype=torch.float32, **options):
    adapter = models.load(case.family, str(path), dtype, CPU, guidance=case.guidance, frames=case.frames, **options)
    return adapter


def conditions(adapter, case, prompts=PROMPTS, size=(32, 32)):
    sources = [case.images(number, size) for number in range(len(prompts))]
    return collate(Embeddings(adapter, case.max_length)(prompts, sources))


def perturb(adapter, scale=0.05):
    """Random LoRA B (or weights), so that the policy differs from its reference."""
    generator = torch.Generator().manual_seed(7)
    for name, p in adapter.trainable():
        if "lora_A" not in name:
            p.data.add_(torch.randn(p.shape, generator=generator).to(p) * scale)


def draw(adapter, case, x0, size, steps, prompts=PROMPTS):
    """Our image with the ODE rule from given initial latents."""
    schedule = make_schedule(adapter.sigmas(steps, *size), "ode", 0.0, times=adapter.times(steps, *size))
    ids = torch.arange(len(prompts))
    done = rollout(
        adapter,
        schedule,
        conditions(adapter, case, prompts, size),
        ids,
        seed=0,
        height=size[0],
        width=size[1],
        initial=x0,
    )
    return adapter.decode(done.latents, *size)


def stock_image(pipe, case, x0, size, steps, prompts=PROMPTS):
    pipe.set_progress_bar_config(disable=True)
    if "solver_order" in pipe.scheduler.config:  # Wan's UniPC as a first-order solver
        first = {"solver_order": 1, "disable_corrector": list(range(steps))}
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **first)
    call = case.call | {"height": size[0], "width": size[1], "num_inference_steps": steps, "output_type": "pt"}
    if not case.edit:
        return pipe(prompt=list(prompts), latents=x0, **call)[0]  # a copy: Z-Image writes into the list
    call |= case.edit(*size)
    call = {key: value[:1] if isinstance(value, list) else value for key, value in call.items()}
    images = [case.images(number, size) for number in range(len(prompts))]
    each = zip(prompts, images, x0[:, None], strict=True)
    return torch.cat([pipe(prompt=[p], image=one_or_list(own), latents=x, **call)[0] for p, own, x in each])


def one_or_list(images):
    """As the stock pipelines take one image, or several."""
    return images[0] if len(images) == 1 else list(images)


EDIT_PLUS = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"
RESIZERS = (EDIT_PLUS, EDIT_PLUS.removesuffix("_plus"), "prefgrpo.models.qwen_image_edit")


@contextmanager
def small_sources(modules=RESIZERS):
    """Inside, Qwen-Image-Edit resizes sources to 1/256 of the pixels, the stock pipelines and ours alike."""
    with pytest.MonkeyPatch.context() as patch:
        for module in [importlib.import_module(name) for name in modules]:
            real = module.calculate_dimensions
            patch.setattr(module, "calculate_dimensions", lambda area, ratio, real=real: real(area / 256, ratio))
        yield


def noise(adapter, size):
    return torch.randn(len(PROMPTS), *adapter.latent_shape(*size), generator=torch.Generator().manual_seed(3))
