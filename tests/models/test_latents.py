"""Latents of images and clips from files: for every family those of a stock pipeline that starts from an image or a
clip (its noise switched off, its posterior at the mode). Decoding: tests/models/test_families.py.
"""

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from world import CASES, QUICK, case_of, load

from prefgrpo import models

pytestmark = pytest.mark.families
SIZE = (32, 64)
CLIP = ("hunyuan_video", "hunyuan_video_15", "wan", "wan22", "wan22_i2v", "wan_i2v", "wan_ti2v")
FAMILIES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
    for name in dict.fromkeys(case.family for case in CASES)
    if not models.family(name).with_sound
]


def media_of(family):
    """Random pixels, uint8: an image, or a clip of five frames."""
    shape = (5, *SIZE, 3) if family in CLIP else (*SIZE, 3)
    return np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)


class NoNoise:
    """A scheduler whose noised latents are the latents."""

    def scale_noise(self, latents, timestep, noise):
        return latents


def started(adapter, name):
    """A stock pipeline that starts from an image, with the parts of a family's own pipeline."""
    cls = getattr(diffusers, name)
    names = cls.__init__.__code__.co_varnames[1 : cls.__init__.__code__.co_argcount]
    made = cls(**{part: getattr(adapter.pipe, part, None) for part in names if hasattr(adapter.pipe, part)})
    made.scheduler = NoNoise()
    return made


def stock_latents(family, adapter, media):
    """What a stock pipeline makes of the pixels."""
    if family in CLIP:
        frames = [Image.fromarray(frame) for frame in media]
        pixels = adapter.pipe.video_processor.preprocess_video(frames, height=SIZE[0], width=SIZE[1])
    elif family == "flux3":
        pixels = torch.from_numpy(media).permute(2, 0, 1)[None].float() / 127.5 - 1
    else:
        pixels = adapter.pipe.image_processor.preprocess(Image.fromarray(media), *SIZE)
    size = {"batch_size": 1, "dtype": torch.float32, "device": torch.device("cpu"), "generator": None}
    grid = {"height": SIZE[0], "width": SIZE[1], "timestep": torch.tensor([0.0])}
    if family == "sd3":
        made = started(adapter, "StableDiffusion3Img2ImgPipeline")
        return made.prepare_latents(pixels, torch.tensor([0.0]), 1, 1, torch.float32, torch.device("cpu"))
    starts = {
        "flux": "FluxImg2ImgPipeline",
        "qwen_image": "QwenImageImg2ImgPipeline",
        "z_image": "ZImageImg2ImgPipeline",
    }
    if family in starts:
        made = started(adapter, starts[family])
        made = made.prepare_latents(pixels, num_channels_latents=4, **size, **grid)
        return made[0] if isinstance(made, tuple) else made
    if family.startswith("wan"):
        made = started(adapter, "WanVideoToVideoPipeline")
        return made.prepare_latents(pixels, num_channels_latents=4, **size, **grid)
    if family == "qwen_image_21":
        opaque = adapter.pipe.image_processor.preprocess(Image.fromarray(media).convert("RGBA"), *SIZE)
        return adapter.pipe._encode_vae_image(opaque.unsqueeze(2), None).flatten(2).transpose(1, 2)
    if family == "krea2":  # the formula of the pipelines of its VAE
        z = adapter.pipe.vae.encode(pixels.unsqueeze(2)).latent_dist.mode()
        config = adapter.pipe.vae.config
        mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1)
        std = torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)
        z = ((z - mean) / std)[:, :, 0]
        return z.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    if family == "flux3":
        bn = adapter.pipe.vae.bn
        z = torch.nn.functional.pixel_unshuffle(adapter.pipe.vae.encode(pixels).latent_dist.mode(), 2)
        std = (bn.running_var + adapter.pipe.vae.config.batch_norm_eps).sqrt()
        return (z - bn.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
    if family.startswith("hunyuan"):  # no stock pipeline starts from a clip; those that start from an image do this
        return adapter.pipe.vae.encode(pixels).latent_dist.mode() * adapter.pipe.vae.config.scaling_factor
    latents = adapter.pipe._encode_vae_image(pixels.unsqueeze(2) if "qwen" in family else pixels, None)
    if family.startswith("flux2"):
        return latents
    return adapter.pipe._pack_latents(latents, 1, latents.shape[1], *latents.shape[-2:])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_latents_are_those_of_a_stock_pipeline(family, monkeypatch):
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    case = case_of(family)
    adapter = load(case)
    media = media_of(family)
    got = adapter.encode_media(media)
    want = stock_latents(family, adapter, media)
    assert tuple(got.shape) == adapter.latent_shape(case.sampling(SIZE)), "as a rollout ends with"
    assert got.dtype == torch.float32 and want.std() > 1e-2
    torch.testing.assert_close(got[None], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["wan", pytest.param("hunyuan_video_15", marks=pytest.mark.full)])
@torch.no_grad()
def test_a_clip_family_encodes_an_image_as_a_clip_of_one_frame(family):
    adapter = load(case_of(family))
    image = np.random.default_rng(6).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    latents = adapter.encode_media(image)
    assert torch.equal(latents, adapter.encode_media(image[None])) and latents.shape[1] == 1
