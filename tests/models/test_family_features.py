"""Features of some families only: source images, clips, distilled checkpoints, a multistep solver in the folder."""

from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from safetensors.torch import load_file
from world import (  # fmt: skip
    CPU,
    SIZES,
    SOURCES,
    TWO_PROMPTS,
    cache,
    case_of,
    conditions,
    differs,
    embed,
    folder,
    in_files,
    initial_noise,
    load,
    perturb,
    policy,
    small_sources,
)

from prefgrpo import models
from prefgrpo.models.condition import collate
from prefgrpo.models.folder import ModelError
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule

pytestmark = pytest.mark.families
SMALL = SIZES[0]
full = pytest.mark.full


def test_the_source_image_is_part_of_the_condition(tmp_path):
    case = case_of("flux_kontext")
    adapter, sampling = load(case), case.sampling()
    kept = cache(case, tmp_path)
    a, b, again = embed(
        kept, adapter, ["red"] * 3, sampling, [in_files((s,)) for s in (SOURCES[0], SOURCES[1], SOURCES[0].copy())]
    )
    kept.flush()
    assert a.sources[0] is again.sources[0] and kept.encoded == 1, "the text encoder does not see the source"
    stored = {key.partition(".")[0] for file in tmp_path.glob("*.safetensors") for key in load_file(file)}
    assert len(stored) == 3, "the cache holds one text and two sources"
    assert not torch.equal(a.sources[0], b.sources[0]) and torch.equal(a.prompt_embeds, b.prompt_embeds)
    x = initial_noise(adapter, sampling)[:1].repeat(2, 1, 1)
    sigma = torch.full((2,), 0.7)
    v = adapter.velocity(x, sigma, collate([a, b]), sampling)
    assert (v[0] - v[1]).abs().max() > 1e-3
    wide = embed(kept, adapter, ["red"], sampling, [in_files((SOURCES[0].resize((96, 64)),))])
    with pytest.raises(ValueError, match="equal shapes, but 'source'"):
        collate([a, *wide])


@pytest.mark.parametrize("family", ["qwen_image_edit", "qwen_image_edit_plus"])
@full
def test_sources_of_real_size(family, monkeypatch):
    """Without `small_sources`: both pipelines resize a source to a million pixels, whatever the output's size."""
    case = replace(case_of(family).unguided(), sources=1)
    adapter = load(case)
    monkeypatch.setattr("world.SOURCES", [SOURCES[0].resize((60, 40))] * 2)
    condition = conditions(adapter, case, ["red"])
    assert condition.sources[0].shape == (1, 52, 78, 16), "832 × 1248 pixels, 16 × 16 per token"
    assert differs(adapter, case.pipe(folder(family)), case, prompts=["red"]) <= 1e-5


@pytest.mark.parametrize("family", ["flux2_klein", pytest.param("qwen_image_edit_plus", marks=full)])
def test_several_sources_and_their_order(family):
    case = replace(case_of(family, edit=True), sources=2)
    adapter = load(case)
    with small_sources():
        sources = [in_files(case.images(number, SIZES[0])) for number in range(2)]
        one, other = embed(cache(case), adapter, TWO_PROMPTS, case.sampling(), sources)
        assert torch.equal(one.sources[0], other.sources[1]), "the same image at another position"
        assert differs(adapter, case.pipe(folder(family)), case) <= 1e-5


def test_a_source_is_encoded_once_for_all_prompts(monkeypatch):
    """Three prompts and the negative prompt share a source: one VAE pass, four passes of the text encoder."""
    case = case_of("qwen_image_edit")
    adapter, calls = load(case), []
    real = adapter.encode_source
    monkeypatch.setattr(adapter, "encode_source", lambda image: calls.append(image) or real(image))
    kept = cache(case)
    with small_sources():
        embed(kept, adapter, ["a", "b", "c"], case.sampling(), [in_files(case.images(0, SMALL))] * 3)
        assert len(calls) == 1 and kept.encoded == 4
        embed(kept, adapter, ["a"], case.sampling(), [in_files(case.images(1, SMALL))])
    assert len(calls) == 2 and kept.encoded == 6, "the text encoder sees the source, so each (text, source) is encoded"
    with pytest.raises(ValueError, match="edits images: expected a source image for the prompt 'a'"):
        embed(kept, adapter, ["a"], case.sampling())


def test_a_first_frame_is_encoded_per_number_of_frames(tmp_path):
    """Its latents span the clip, and clips in evaluation may be longer or shorter than in training."""
    case = case_of("wan_i2v")
    adapter, sampling, images = load(case), case.sampling(), case.images(0, SMALL)
    kept, own = cache(case, tmp_path), [in_files(images)]
    (five,), (nine,) = (embed(kept, adapter, ["red"], replace(sampling, frames=n), own) for n in (5, 9))
    assert (five.sources[0].shape[1], nine.sources[0].shape[1]) == (3, 5) and kept.encoded == 2
    kept.flush()
    (cached,) = embed(cache(case, tmp_path), load(case, encoders=False), ["red"], sampling, own)
    assert torch.equal(cached.sources[1], five.sources[1]), "CLIP embedding of the frame"
    with pytest.raises(ValueError, match="from an image: expected one"):
        condition = collate(embed(kept, adapter, ["red"], sampling))
        adapter.velocity(initial_noise(adapter, sampling)[:1], torch.ones(1), condition, sampling)


def test_no_weight_moves_a_given_first_frame():
    """TI2V: sampling reproduces the source frame exactly, and the velocity of the first frame has no gradient."""
    case = case_of("wan_ti2v", edit=True)
    adapter, sampling = policy(case), case.sampling()
    condition = conditions(adapter, case)
    v = adapter.velocity(initial_noise(adapter, sampling), torch.full((2,), 0.7), condition, sampling)
    v[:, :, 0].sum().backward()
    assert not any(p.grad is not None and p.grad.abs().max() > 0 for _, p in adapter.trainable())
    schedule = make_schedule(adapter.sigmas(sampling), "flow", 0.7, (0, 1, 2))
    done = rollout(adapter, schedule, condition, torch.arange(2), sampling, seed=1)
    assert torch.equal(done.latents[:, :, :1], condition.sources[0])


@pytest.mark.parametrize("family", ["flux", pytest.param("wan_i2v", marks=full), "qwen_image_edit"])
def test_an_export_is_whole_though_the_encoders_stayed_on_disk(family, tmp_path):
    """With data.cache a run never loads the text encoders; the exported folder must still contain them."""
    case, trained = case_of(family), []
    for encoders in (False, True):
        trained.append(load(case, encoders=encoders))
        trained[-1].enable_full()
        perturb(trained[-1])
    for _ in range(2):
        trained[0].save_full(str(tmp_path))
    with small_sources():
        assert differs(trained[1], case.pipe(tmp_path), case) <= 1e-5


OTHERS = [("wan", "wan22"), ("wan22", "wan_ti2v"), ("wan_ti2v", "wan"), ("wan_i2v", "wan22_i2v")]


@pytest.mark.parametrize(("family", "other"), [*OTHERS, *((b, a) for a, b in OTHERS)])
def test_the_folder_of_another_wan_is_refused(family, other):
    """They share a pipeline class; using one of two experts, or one timestep for all tokens, would fail silently."""
    with pytest.raises(ModelError, match=rf"has (\['transformer|expand_timesteps).*: expected family: {other}$"):
        models.family(family).load(str(folder(other)), torch.float32, CPU)


def test_a_scheduler_of_another_kind_is_refused():
    adapter = load(case_of("sd3"))
    adapter.pipe.scheduler = diffusers.EulerDiscreteScheduler()
    with pytest.raises(ValueError, match="EulerDiscreteScheduler is not a flow-matching scheduler"):
        adapter.sigmas(case_of("sd3").sampling())


def test_a_distilled_klein_stays_distilled(tmp_path):
    """Pipeline settings that are not components (is_distilled) must survive a full export."""
    case = case_of("flux2_klein")
    pipe = diffusers.Flux2KleinPipeline.from_pretrained(folder("flux2_klein"))
    pipe.register_to_config(is_distilled=True)
    pipe.save_pretrained(tmp_path / "distilled")
    adapter = load(case, tmp_path / "distilled")
    assert not adapter.guided(case.sampling()) and conditions(adapter, case).negative is None
    assert differs(adapter, pipe, case) <= 1e-5
    adapter.enable_full()
    adapter.save_full(str(tmp_path / "full"))
    assert diffusers.Flux2KleinPipeline.from_pretrained(tmp_path / "full").config.is_distilled


def test_text_in_quotes_has_an_encoder_of_its_own():
    """HunyuanVideo-1.5: a prompt with two quotes and one with none."""
    case, prompts = case_of("hunyuan_video_15"), ['a sign that says "Café" and “open”', "a red cube"]
    adapter, pipe = load(case), case.pipe(folder("hunyuan_video_15"))
    lengths = [conditions(adapter, case, [prompt]).prompt_embeds_2.shape[1] for prompt in prompts]
    assert lengths == [len('Text "Café". Text "open". '.encode()) + 1, 0]
    assert differs(adapter, pipe, case, prompts=prompts) <= 1e-5


def test_a_few_step_model_has_sigmas_of_its_own():
    """Qwen-Image-2.1's pipeline uses them whatever the number of steps; we refuse a different number."""
    case = case_of("qwen_image_21").unguided()
    adapter, pipe = load(case), case.pipe(folder("qwen_image_21"))
    for one in (adapter.pipe, pipe):
        one.register_to_config(sample_sigmas=[1.0, 0.8, 0.3])
    assert differs(adapter, pipe, case, steps=3) <= 1e-5
    with pytest.raises(ValueError, match="has 3 sampling sigmas: expected as many steps, got 4"):
        adapter.sigmas(case.sampling(steps=4))


def test_the_prefix_of_qwen_image_21_depends_on_neither_time_nor_image():
    """What docs/design.md says of kept keys and values: diffusers' own are equal at other times and images, and a
    replay that makes them as the rollout did has its bits, and the gradient of a whole forward."""
    case = case_of("qwen_image_21").unguided()
    adapter = policy(case)
    sampling = case.sampling()
    embeds = conditions(adapter, case).prompt_embeds
    x = initial_noise(adapter, sampling)
    slots = (torch.arange(embeds.shape[1] + x.shape[1] // 4) >= embeds.shape[1]).expand(2, -1)
    fixed = {"encoder_hidden_states": embeds, "img_shapes": [[(1, *adapter.grid(sampling))]] * 2, "img_mask": slots}

    def v(x, time, **cache):
        out = adapter.transformer(x, timestep=torch.full((2,), time), return_dict=False, **fixed, **cache)[0]
        return out[:, -x.shape[1] :]

    def kept(x, time):
        cache = QwenImage21KVCache(len(adapter.transformer.transformer_blocks))
        v(x, time, kv_cache=cache, kv_cache_mode="extract")
        return cache

    with torch.no_grad():
        cache = kept(x, 0.9)
        sampled = v(x, 0.4, kv_cache=cache, kv_cache_mode="cached")
    other = kept(-x, 0.4)
    for a, b in zip(cache.layer_caches, other.layer_caches, strict=True):
        assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v)
    replayed = v(x, 0.4, kv_cache=other, kv_cache_mode="cached")
    assert torch.equal(replayed, sampled)
    weights = [p for _, p in adapter.trainable()]
    got = torch.autograd.grad(replayed.square().sum(), weights, allow_unused=True)
    want = torch.autograd.grad(v(x, 0.4).square().sum(), weights, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-3, atol=1e-5))


def test_the_sound_of_a_clip_is_in_its_state():
    """LTX-2: 5 frames of 1/24 s come with 5 audio tokens of 1/25 s, which affect the clip; `decode` drops them."""
    case = case_of("ltx2")
    adapter, sampling = load(case), case.sampling()
    x = initial_noise(adapter, sampling)
    clip = adapter.tokens(sampling)
    assert x.shape[1] == clip + 5
    condition, sigma = conditions(adapter, case), torch.full((2,), 0.7)
    inverted = torch.cat([x[:, :clip], -x[:, clip:]], 1)
    v, other = (adapter.velocity(one, sigma, condition, sampling) for one in (x, inverted))
    assert v.shape == x.shape and (v - other)[:, :clip].abs().max() > 1e-4
    assert torch.equal(adapter.decode(x, sampling), adapter.decode(inverted, sampling))


def test_the_boundary_belongs_to_the_high_noise_expert():
    """σ = 0.875 is t = 875 ≥ 875, as in the stock pipeline; changing one expert affects only its own side."""
    case = case_of("wan22")
    adapter, sampling = load(case), case.sampling()
    condition = conditions(adapter, case)
    x = initial_noise(adapter, sampling)
    sigmas = [torch.full((2,), s) for s in (0.875, 0.8749)]
    before = [adapter.velocity(x, s, condition, sampling) for s in sigmas]
    adapter.pipe.transformer_2.proj_out.weight.data.mul_(2)
    after = [adapter.velocity(x, s, condition, sampling) for s in sigmas]
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    with pytest.raises(ValueError, match="a batch of one expert's σ"):
        adapter.velocity(x, torch.tensor([0.5, 0.9]), condition, sampling)
