"""Every model family against the stock diffusers pipeline, on tiny random weights.

Why these cases: an adapter may err in conditioning, time, shift, guidance, packing or decoding, and each error shows as
a difference from the stock pipeline's image (noise 0). Training must then replay exactly what was sampled (importance
ratio 1), with the gradient of a plain Gaussian log-prob, and the result must load in stock diffusers, also in a process
without this package. A new family is one line in world.py.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import trained
from safetensors.torch import load_file, save_file
from world import (  # fmt: skip
    CASES,
    SIZES,
    TWO_PROMPTS,
    cache,
    case_of,
    conditions,
    differs,
    draw,
    embed,
    folder,
    in_files,
    initial_noise,
    load,
    perturb,
    policy,
    recipe,
    stock_image,
    stock_lora,
    tensors_of,
    tiered,
)

from prefgrpo.models import family
from prefgrpo.models.folder import ModelError
from prefgrpo.parallel.gradient_checkpointing import checkpoint_blocks
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.update.trajectory import replay

pytestmark = [pytest.mark.families, pytest.mark.usefixtures("few_source_tokens")]
every = pytest.mark.parametrize("case", tiered(CASES))


HALF = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "hunyuan_video_15")
"""Families whose last block has a text branch that does not affect the output."""
SHIFTS = [*tiered(CASES, "published keys"), *tiered([case for case in CASES if case.dynamic], "other shift")]


@pytest.mark.parametrize(("case", "shifting"), SHIFTS)
def test_noise_zero_is_the_stock_pipeline(case, shifting):
    path, size, steps = folder(case.family), SIZES[1], 7
    if shifting == "other shift":
        static = not case.pipe(path).scheduler.config.use_dynamic_shifting
        path, size, steps = folder(case.family, use_dynamic_shifting=static, shift=5.0), SIZES[0], 2
    assert differs(load(case, path), case.pipe(path), case, size, steps) <= 1e-5


@pytest.mark.parametrize("case", tiered([case for case in CASES if family(case.family).cfg]))
def test_without_guidance_it_is_the_stock_pipeline_too(case):
    adapter, unguided = load(case), case.unguided()
    assert conditions(adapter, unguided).negative is None
    assert differs(adapter, case.pipe(folder(case.family)), unguided, SIZES[1], 3) <= 1e-5
    assert (draw(adapter, unguided, SIZES[1], 3) - draw(adapter, case, SIZES[1], 3)).abs().max() > 1e-4


@every
def test_the_first_ratio_is_one_and_the_gradient_that_of_a_normal(case):
    """Oracle: torch.distributions.Normal with Flow-GRPO's published mean and std, in fp64 autograd."""
    adapter, sampling, eta = policy(case), case.sampling(SIZES[1]), 0.7
    for module in adapter.modules().values():
        checkpoint_blocks(adapter.blocks(module), 0.5)
    condition = conditions(adapter, case, size=SIZES[1])
    schedule = make_schedule(adapter.sigmas(sampling), "flow", eta, (0, 1, 2))
    done = rollout(adapter, schedule, condition, torch.tensor([5, 9]), sampling, seed=1)
    assert len(done.transitions) == 3
    for step in done.transitions:
        new = replay(adapter, schedule, condition, step, sampling)
        assert (torch.exp(new.logp - step.logp) - 1).abs().max() == 0.0
    step, advantage = done.transitions[1], torch.tensor([1.0, -0.5])
    new = replay(adapter, schedule, condition, step, sampling)
    (new.logp * advantage).sum().backward()
    got = {name: p.grad.clone() for name, p in adapter.trainable() if p.grad is not None}
    unused = [name for name, p in adapter.trainable() if "lora_B" in name and p.grad is None]
    of_the_other = any(name.startswith("transformer_2") for name in unused) or len(adapter.denoisers) > 1
    of_references = case.family == "flux3" and not case.edit and all("image_cond" in name for name in unused)
    assert not unused or of_the_other or of_references or case.family in HALF, "only a last block's text may be unused"
    for _, p in adapter.trainable():
        p.grad = None

    s, t = schedule.sigmas[1].double(), schedule.sigmas[2].double()
    v = adapter.velocity(step.x, schedule.sigmas[1].expand(2), condition, sampling).double()
    x, dt, std = step.x.double(), t - s, eta * torch.sqrt(s / (1 - s))
    mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
    logp = torch.distributions.Normal(mean, std * torch.sqrt(-dt)).log_prob(step.x_next.double()).flatten(1).mean(1)
    assert torch.allclose(logp.float(), new.logp, rtol=1e-5)
    (logp * advantage).sum().backward()
    for name, p in adapter.trainable():
        if p.grad is not None:
            assert torch.allclose(got[name], p.grad, rtol=1e-3, atol=1e-4 * float(p.grad.abs().max())), name


@every
def test_lora_loads_in_stock_diffusers_at_its_strength(case, tmp_path):
    adapter, size = load(case), SIZES[0]
    before = draw(adapter, case, size, 3)
    adapter.add_lora(4, 12.0, seed=3)
    assert torch.equal(draw(adapter, case, size, 3), before), "a fresh LoRA must change nothing"
    after = draw(perturb(adapter, 0.2), case, size, 3)
    assert (after - before).abs().max() > 1e-3
    with adapter.reference():
        assert torch.equal(draw(adapter, case, size, 3), before)
    assert torch.equal(draw(adapter, case, size, 3), after)

    adapter.save_lora(str(tmp_path))
    written = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*.safetensors"))
    names = ["pytorch_lora_weights.safetensors", "transformer_2/pytorch_lora_weights.safetensors"]
    assert written == names[: len(adapter.denoisers)]
    pipe = case.pipe(folder(case.family))
    stock_lora(pipe, str(tmp_path))
    if len(adapter.denoisers) > 1:
        pipe.load_lora_weights(f"{tmp_path}/transformer_2", load_into_transformer_2=True)
    assert (stock_image(pipe, case, initial_noise(adapter, case.sampling()), size, 3) - after).abs().max() <= 1e-5

    again = load(case)
    again.load_lora(str(tmp_path))
    assert torch.equal(draw(again, case, size, 3), after)


STRANGER = """
import json, sys, diffusers, torch
from safetensors.torch import load_file, save_file
name, model, lora, latents, out, call = sys.argv[1:]
pipe = getattr(diffusers, name).from_pretrained(model)
if isinstance(pipe, diffusers.ModularPipeline):
    blocks = pipe.blocks  # a copy
    blocks.sub_blocks.pop("prompt_upsampler")
    pipe = blocks.init_pipeline(model)
    pipe.load_components()
if lora:
    pipe.load_lora_weights(lora)
for part in pipe.components.values():
    for t in [*part.parameters(), *part.buffers()] if isinstance(part, torch.nn.Module) else ():
        t.data = t.data.clone()  # mapped files may begin anywhere, which changes the last bits of a product on a CPU
        t.requires_grad_(False)  # and so may a gradient that nobody asks for
images = pipe(latents=load_file(latents)["x"], **json.loads(call))
save_file({"image": (images if isinstance(images, torch.Tensor) else images[0]).contiguous()}, out)
assert not any(name.split(".")[0] == "prefgrpo" for name in sys.modules)
"""


@pytest.mark.full
@pytest.mark.parametrize(("name", "rank"), [("flux", 4), ("krea2", 4), ("flux3", 4), ("flux3", 0)])
def test_a_stranger_draws_the_images_of_a_run(name, rank, tmp_path):
    """What `prefgrpo train` wrote, in a process with stock diffusers alone; FLUX.3's to the last bit."""
    case = case_of(name)
    prompts = tmp_path / "train.txt"
    prompts.write_text("\n".join(TWO_PROMPTS) + "\n")
    own = {
        "model": str(folder(name)), "family": name, "dtype": "fp32", "eval": {"prompts": str(prompts)},
        "data": {"prompts": str(prompts), "max_length": case.max_length, "cache": str(tmp_path / "kept")},
        "rollout": {"height": 32, "width": 32, "guidance": case.guidance},
        "train": {"steps": 2, "lora_rank": rank, "lora_alpha": 4},
    }  # fmt: skip
    trained(recipe(tmp_path, "run", **own))
    product = tmp_path / "runs" / "run" / ("lora" if rank else "pipeline")
    model = folder(name) if rank else product
    adapter = load(case, model)
    if rank:
        adapter.load_lora(str(product))
    for _, p in adapter.trainable():
        p.requires_grad_(False)
    ours = draw(adapter, case, SIZES[0], 3, TWO_PROMPTS[:1])
    assert (ours - draw(load(case), case, SIZES[0], 3, TWO_PROMPTS[:1])).abs().max() > 1e-3
    save_file({"x": initial_noise(adapter, case.sampling(), 1)}, tmp_path / "x.safetensors")
    call = {"prompt": TWO_PROMPTS[0], "height": 32, "width": 32, "num_inference_steps": 3, "output_type": "pt"}
    call |= case.call
    if name == "flux3":  # its guidance comes from code
        del call["guidance_scale"]
        call["output"] = "images"
    files = [model, product if rank else "", tmp_path / "x.safetensors", tmp_path / "out.safetensors"]
    argv = [sys.executable, "-c", STRANGER, adapter.pipeline, *map(str, files), json.dumps(call)]
    subprocess.run(argv, check=True, cwd=tmp_path, timeout=600, env=os.environ | {"PYTHONPATH": ""})
    theirs = load_file(tmp_path / "out.safetensors")["image"]
    assert (theirs - ours).abs().max() <= (0.0 if name == "flux3" else 1e-5)


@every
def test_full_fine_tune_loads_in_stock_diffusers(case, tmp_path):
    adapter, size = load(case), SIZES[0]
    before = draw(adapter, case, size, 3)
    adapter.enable_full()
    assert len(adapter.trainable()) == sum(1 for module in adapter.modules().values() for _ in module.parameters())
    after = draw(perturb(adapter, 0.02), case, size, 3)
    assert (after - before).abs().max() > 1e-3
    adapter.save_full(str(tmp_path))
    reloaded = load(case, tmp_path)
    reloaded.enable_full()  # torch chooses the product of x [B, N, C] and a weight by whether this one is trained
    assert torch.equal(draw(reloaded, case, size, 3), after), "a reloaded policy is bitwise identical"
    pipe = case.pipe(tmp_path)
    assert (stock_image(pipe, case, initial_noise(adapter, case.sampling()), size, 3) - after).abs().max() <= 1e-5


@every
def test_a_batch_is_its_samples(case):
    """Results do not depend on how a batch is split (e.g. over ranks): single samples, and every second one."""
    adapter, sampling = load(case), case.sampling()
    condition = conditions(adapter, case, [*TWO_PROMPTS, *TWO_PROMPTS])
    schedule = make_schedule(adapter.sigmas(sampling), "flow", 0.7, (0, 1))
    ids = torch.tensor([3, 1 << 40, 17, 4])
    whole = rollout(adapter, schedule, condition, ids, sampling, seed=11)
    other = rollout(adapter, schedule, condition, ids, sampling, seed=12)
    assert (other.latents - whole.latents).abs().max() > 0.1, "the noise depends on the seed"
    for rows in map(torch.tensor, ([0], [1], [0, 2], [1, 3])):
        part = rollout(adapter, schedule, condition.select(rows), ids[rows], sampling, seed=11)
        assert torch.equal(part.transitions[0].x, whole.transitions[0].x[rows]), (
            "initial noise depends only on the sample id"
        )
        assert (part.latents - whole.latents[rows]).abs().max() <= 1e-5 * max(1.0, float(whole.latents.abs().max()))
        for a, b in zip(part.transitions, whole.transitions, strict=True):
            assert torch.allclose(a.logp, b.logp[rows], atol=1e-5)


@every
def test_cached_embeddings_are_the_encoded_ones(case, tmp_path):
    sampling = case.sampling()
    sources = [in_files(case.images(number, SIZES[0])) for number in range(2)]
    first = cache(case, tmp_path)
    fresh = embed(first, load(case), [*TWO_PROMPTS, TWO_PROMPTS[0]], sampling, [*sources, sources[0]])
    assert first.encoded >= len(TWO_PROMPTS) and fresh[0].prompt_embeds is fresh[2].prompt_embeds
    first.flush()

    again, bare = cache(case, tmp_path), load(case, encoders=False)
    cached = embed(again, bare, [*reversed(TWO_PROMPTS)], sampling, [*reversed(sources)])[::-1]
    assert again.encoded == 0
    for a, b in zip(fresh, cached, strict=False):
        assert a.tensors().keys() == b.tensors().keys() and (a.negative is None) == (b.negative is None)
        pairs = zip(tensors_of(a), tensors_of(b), strict=True)
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)
    with pytest.raises(ModelError, match="text encoders were not loaded"):
        embed(again, bare, ["a prompt that nobody encoded"], sampling)
    assert cache(case, tmp_path, dtype="bf16").model != first.model, "the cache key includes the dtype"


@every
def test_an_outline_knows_sizes_and_schedules_without_weights(case):
    """A size that does not fit, too."""
    adapter = load(case)
    outline = type(adapter).outline(Path(folder(case.family)))
    assert {t.device.type for net in outline.modules().values() for t in net.parameters()} == {"meta"}
    for known in (adapter, outline):
        with pytest.raises(ValueError, match="multiples of"):
            known.latent_shape(case.sampling((33, 32)))
    for steps in (2, 5):
        sampling = case.sampling((64, 128), steps)
        assert outline.latent_shape(sampling) == adapter.latent_shape(sampling)
        assert outline.tokens(sampling) == adapter.tokens(sampling)
        assert torch.equal(outline.sigmas(sampling), adapter.sigmas(sampling))
        assert torch.equal(outline.times(sampling), adapter.times(sampling))


@pytest.mark.parametrize("name, most", [("sd3", 128), ("wan", 64), ("z_image", 128)])
def test_sizes_beyond_the_positions_of_a_model(name, most):
    adapter = load(case_of(name))
    side = most * adapter.unit
    sampling = case_of(name).sampling((side, adapter.unit))
    assert adapter.grid(sampling) == (most, 1)
    with pytest.raises(ValueError, match=f"expected at most {side} pixels a side"):
        adapter.grid(replace(sampling, height=side + adapter.unit))


@pytest.mark.parametrize("name", ["wan", "wan_ti2v"])
def test_frames_beyond_the_positions_of_a_model(name):
    """64 latent frames; the denoiser itself is asked on both sides of the limit."""
    adapter = load(case_of(name))
    stride = adapter.pipe.vae_scale_factor_temporal
    most = 63 * stride + 1
    sampling = replace(case_of(name).sampling((adapter.unit, adapter.unit)), frames=most)
    assert adapter.latent_shape(sampling)[1] == 64
    rope = adapter.transformer.rope
    rope(torch.zeros(1, 1, 64, 2, 2))
    with pytest.raises(RuntimeError):
        rope(torch.zeros(1, 1, 65, 2, 2))
    with pytest.raises(ValueError, match=f"frames must be at most {most}, .* got {most + stride}"):
        adapter.latent_shape(replace(sampling, frames=most + stride))


@pytest.mark.parametrize("name", ["qwen_image", "ltx2", "flux"])
def test_one_step_for_which_a_scheduler_gives_nan(name):
    adapter = load(case_of(name))
    sampling = replace(case_of(name).sampling((32, 32)), steps=1)
    with pytest.raises(ValueError, match="expected 2 or more") if name != "flux" else nullcontext():
        assert adapter.sigmas(sampling).tolist() == [1, 0]
