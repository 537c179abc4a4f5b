"""What only some families do: source images, clips, distilled checkpoints, a multistep solver in the folder."""

import diffusers
import pytest
import torch
from families import CASES, CPU, SIZES, SOURCES, conditions, draw, folder, load, noise, stock_image
from safetensors.torch import load_file

from prefgrpo import models
from prefgrpo.embed import Embeddings, collate


def test_the_source_image_is_part_of_the_condition(tmp_path):
    case = next(c for c in CASES if c.family == "flux_kontext")
    adapter = load(case, folder("flux_kontext"))
    embed = Embeddings(adapter, case.max_length, tmp_path)
    a, b, again = embed(["red", "red", "red"], [SOURCES[0], SOURCES[1], SOURCES[0].copy()])
    assert a is again and embed.encoded == 2
    assert not torch.equal(a["source"], b["source"]) and torch.equal(a["prompt_embeds"], b["prompt_embeds"])
    x, sigma = noise(adapter, SIZES[0]), torch.full((2,), 0.7)
    v = adapter.velocity(x[:1].repeat(2, 1, 1), sigma, collate([a, b]), *SIZES[0])
    assert (v[0] - v[1]).abs().max() > 1e-3
    wide = embed(["red"], [SOURCES[0].resize((96, 64))])
    with pytest.raises(ValueError, match="equal shapes, but 'source'"):
        collate([a, *wide])
    with pytest.raises(ValueError, match="takes no source image"):
        Embeddings(load(CASES[0], folder("flux")), 32)(["red"], [SOURCES[0]])


def test_wan_folders_with_a_multistep_solver_give_its_shift():
    adapter = load(next(c for c in CASES if c.family == "wan"), folder("wan"))
    want = diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0)
    want.set_timesteps(6)
    adapter.pipe.scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    assert torch.equal(adapter.sigmas(6, *SIZES[0]), want.sigmas)
    adapter.shift = 3.0
    assert not torch.equal(adapter.sigmas(6, *SIZES[0]), want.sigmas)


def test_frames_are_for_video():
    with pytest.raises(ValueError, match="makes images"):
        models.load("flux", str(folder("flux")), torch.float32, CPU, frames=5)
    adapter = models.load("wan", str(folder("wan")), torch.float32, CPU, frames=6)
    with pytest.raises(ValueError, match="frames must be a multiple of 2, plus 1"):
        adapter.latent_shape(32, 32)


def test_a_distilled_klein_stays_distilled(tmp_path):
    """Settings that are no component (is_distilled) must survive a full export, in another dtype too."""
    case = next(c for c in CASES if c.family == "flux2_klein")
    pipe = diffusers.Flux2KleinPipeline.from_pretrained(folder("flux2_klein"))
    pipe.register_to_config(is_distilled=True)
    pipe.save_pretrained(tmp_path / "distilled")
    adapter = load(case, tmp_path / "distilled")
    assert not adapter.guided and not any(key.startswith("negative") for key in conditions(adapter, case))
    x0 = noise(adapter, SIZES[0])
    assert (draw(adapter, case, x0, SIZES[0], 2) - stock_image(pipe, case, x0, SIZES[0], 2)).abs().max() <= 1e-5
    adapter.enable_full()
    adapter.save_full(str(tmp_path / "full"), torch.bfloat16)
    assert adapter.pipe.transformer is adapter.transformer and adapter.transformer.dtype == torch.float32
    again = diffusers.Flux2KleinPipeline.from_pretrained(tmp_path / "full")
    assert again.config.is_distilled
    stored = load_file(tmp_path / "full" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
