"""Features of some families only: source images, clips, distilled checkpoints, a multistep solver in the folder."""

import json
import subprocess
import sys
from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from families import (
    CPU,
    SIZES,
    SOURCES,
    case_of,
    conditions,
    differs,
    folder,
    in_files,
    load,
    noise,
    perturb,
    policy,
    small_sources,
    stock_image,
)  # fmt: skip
from PIL import Image
from safetensors.torch import load_file

from prefgrpo import models
from prefgrpo.models.condition import collate
from prefgrpo.models.folder import ModelError
from prefgrpo.models.hunyuan_video import causal_attention_mask
from prefgrpo.rollout.embeddings import Embeddings
from prefgrpo.rollout.rollout import rollout
from prefgrpo.sde.schedule import make_schedule

pytestmark = pytest.mark.families
SMALL = SIZES[0]
full = pytest.mark.full


def test_the_source_image_is_part_of_the_condition(tmp_path):
    case = case_of("flux_kontext")
    adapter, sampling = load(case), case.sampling()
    embed = Embeddings(adapter, case.max_length, tmp_path)
    a, b, again = embed(["red"] * 3, sampling, [in_files((s,)) for s in (SOURCES[0], SOURCES[1], SOURCES[0].copy())])
    embed.flush()
    assert a.sources[0] is again.sources[0] and embed.encoded == 1, "the text encoder does not see the source"
    kept = {key.partition(".")[0] for file in tmp_path.glob("*.safetensors") for key in load_file(file)}
    assert len(kept) == 3, "the cache holds one text and two sources"
    assert not torch.equal(a.sources[0], b.sources[0]) and torch.equal(a.prompt_embeds, b.prompt_embeds)
    x, sigma = noise(adapter, sampling)[:1].repeat(2, 1, 1), torch.full((2,), 0.7)
    v = adapter.velocity(x, sigma, collate([a, b]), sampling)
    assert (v[0] - v[1]).abs().max() > 1e-3
    wide = embed(["red"], sampling, [in_files((SOURCES[0].resize((96, 64)),))])
    with pytest.raises(ValueError, match="equal shapes, but 'source'"):
        collate([a, *wide])
    with pytest.raises(ValueError, match="must have equal parts"):
        collate([a, *embed(["red"], sampling)])
    with pytest.raises(ValueError, match=r"takes 1 source image\(s\), got 2"):
        embed(["red"], sampling, [in_files((SOURCES[0], SOURCES[1]))])
    flux = case_of("flux")
    with pytest.raises(ValueError, match="takes no source image"):
        Embeddings(load(flux), 32)(["red"], flux.sampling(), [in_files((SOURCES[0],))])


@pytest.mark.parametrize("family", ["qwen_image_edit", "qwen_image_edit_plus"])
@full
def test_sources_of_real_size(family, monkeypatch):
    """Without `small_sources`: both pipelines resize a source to a million pixels, whatever the output's size."""
    case = replace(case_of(family).unguided(), sources=1)
    adapter = load(case)
    monkeypatch.setattr("families.SOURCES", [SOURCES[0].resize((60, 40))] * 2)
    condition = conditions(adapter, case, ["red"])
    assert condition.sources[0].shape == (1, 52, 78, 16), "832 × 1248 pixels, 16 × 16 per token"
    assert differs(adapter, case.pipe(folder(family)), case, prompts=["red"]) <= 1e-5


@pytest.mark.parametrize("family", ["flux2_klein", pytest.param("qwen_image_edit_plus", marks=full)])
def test_several_sources_and_their_order(family):
    case = replace(case_of(family, edit=True), sources=2)
    adapter = load(case)
    with small_sources():
        first, second = conditions(adapter, case).sources
        assert torch.equal(first[0], second[1]), "the same image at another position"
        assert differs(adapter, case.pipe(folder(family)), case) <= 1e-5


def test_a_source_is_encoded_once_for_all_prompts(monkeypatch):
    """Three prompts and the negative prompt share a source: one VAE pass, four passes of the text encoder."""
    case = case_of("qwen_image_edit")
    adapter, calls = load(case), []
    real = adapter.encode_source
    monkeypatch.setattr(adapter, "encode_source", lambda image: calls.append(image) or real(image))
    embed = Embeddings(adapter, case.max_length)
    with small_sources():
        embed(["a", "b", "c"], case.sampling(), [in_files(case.images(0, SMALL))] * 3)
        assert len(calls) == 1 and embed.encoded == 4
        embed(["a"], case.sampling(), [in_files(case.images(1, SMALL))])
    assert len(calls) == 2 and embed.encoded == 6, "the text encoder sees the source, so each (text, source) is encoded"
    with pytest.raises(ValueError, match="edits images: expected a source image for the prompt 'a'"):
        embed(["a"], case.sampling())


WITHOUT_TORCHVISION = """
import sys
sys.modules["torchvision"] = None
import torch
from PIL import Image
from prefgrpo import models
from prefgrpo.tiny import pipelines
pipelines.make("qwen_image_edit", sys.argv[1])
adapter = models.load("qwen_image_edit", sys.argv[2], torch.float32, torch.device("cpu"))
image = Image.linear_gradient("L").convert("RGB")
torch.save(adapter.encode("make it blue", 512, (image,)).prompt_embeds, sys.argv[3])
adapter.enable_full()
adapter.save_full(sys.argv[4])
"""


@full
def test_qwen_edit_without_torchvision(tmp_path):
    """Only transformers' video processor needs it: embeddings agree, and what is saved loads where it is installed."""
    made, saved, file = tmp_path / "made", tmp_path / "saved", tmp_path / "embeds"
    argv = [sys.executable, "-c", WITHOUT_TORCHVISION, made, folder("qwen_image_edit"), file, saved]
    subprocess.run([str(part) for part in argv], check=True, capture_output=True, timeout=600)
    gradient = Image.linear_gradient("L").convert("RGB")
    want = load(case_of("qwen_image_edit")).encode("make it blue", 512, (gradient,)).prompt_embeds
    got = torch.load(file)
    assert got.shape == want.shape and (got - want).abs().max() <= 0.02
    for path in (made, saved):
        assert json.loads((path / "model_index.json").read_text())["processor"] == ["transformers", "Qwen2VLProcessor"]
    pytest.importorskip("torchvision")
    for path in (made, saved):
        assert diffusers.QwenImageEditPipeline.from_pretrained(path).processor.video_processor is not None


def test_a_first_frame_is_encoded_per_number_of_frames(tmp_path):
    """Its latents span the clip, and clips in evaluation may be longer or shorter than in training."""
    case = case_of("wan_i2v")
    adapter, sampling, images = load(case), case.sampling(), case.images(0, SMALL)
    embed = Embeddings(adapter, case.max_length, tmp_path)
    (five,), (nine,) = (embed(["red"], replace(sampling, frames=n), [in_files(images)]) for n in (5, 9))
    assert (five.sources[0].shape[1], nine.sources[0].shape[1]) == (3, 5) and embed.encoded == 2
    embed.flush()
    again = Embeddings(load(case, encoders=False), case.max_length, tmp_path)
    (cached,) = again(["red"], sampling, [in_files(images)])
    assert torch.equal(cached.sources[1], five.sources[1]), "CLIP embedding of the frame"
    for given in ((), images * 2):
        with pytest.raises(ValueError, match=r"from an image: expected one|takes 1 source image\(s\), got 2"):
            condition = collate(embed(["red"], sampling, [in_files(given)]))
            adapter.velocity(noise(adapter, sampling)[:1], torch.ones(1), condition, sampling)


def test_no_weight_moves_a_given_first_frame():
    """TI2V: sampling reproduces the source frame exactly, and the velocity of the first frame has no gradient."""
    case = case_of("wan_ti2v", edit=True)
    adapter, sampling = policy(case), case.sampling()
    condition = conditions(adapter, case)
    v = adapter.velocity(noise(adapter, sampling), torch.full((2,), 0.7), condition, sampling)
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


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}
SOLVERS = [
    (diffusers.UniPCMultistepScheduler(**FLOW), ("flux", "sd3", "wan")),
    (diffusers.DPMSolverMultistepScheduler(**FLOW), ("sd3", "wan")),
    (diffusers.FlowMatchHeunDiscreteScheduler(shift=5.0), ("sd3", "wan")),
    (diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0, stochastic_sampling=True), ("flux", "sd3", "wan")),
    (diffusers.EulerDiscreteScheduler(), ()),
    (diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction"), ()),
]


@pytest.mark.parametrize("family", ["flux", pytest.param("sd3", marks=full), "wan"])
@pytest.mark.parametrize(("solver", "takes"), SOLVERS, ids=[f"{type(s).__name__}-{len(t)}" for s, t in SOLVERS])
def test_a_folder_with_another_solver_gives_its_sigmas(family, solver, takes):
    """Each step goes from one σ of the solver to the next; Heun repeats each. FluxPipeline rejects DPM and Heun."""
    case = case_of(family)
    adapter, pipe, sampling = load(case), case.pipe(folder(family)), case.sampling(steps=6)
    adapter.pipe.scheduler = solver
    if family not in takes:
        with pytest.raises(ValueError, match=r"not a flow-matching|does not take what FluxPipeline passes it"):
            adapter.sigmas(sampling)
        return
    pipe.scheduler = type(solver).from_config(solver.config)
    stock_image(pipe, case, noise(adapter, sampling), SMALL, 6)
    sigmas, times = pipe.scheduler.sigmas, pipe.scheduler.timesteps.float()
    if len(times) == 11:
        sigmas, times = sigmas[[0, *range(1, 12, 2)]], times[[0, *range(1, 11, 2)]]
    assert torch.equal(adapter.sigmas(sampling), sigmas)
    assert torch.allclose(adapter.times(sampling) * 1000, times, rtol=0, atol=2e-4)
    assert not adapter.stock_scheduler().config.get("stochastic_sampling"), "our copy of the scheduler adds no noise"


@pytest.mark.parametrize(
    ("family", "kind"),
    [("hunyuan_video", "use_beta_sigmas"), ("flux", "use_karras_sigmas"), ("sd3", "use_exponential_sigmas")],
)
def test_other_spacings_of_the_sigmas_are_the_stock_pipelines(family, kind):
    if kind == "use_beta_sigmas":
        pytest.importorskip("scipy")
    case, path = case_of(family), folder(family, **{kind: True}, shift_terminal=0.05)
    assert differs(load(case, path), case.pipe(path), case, SIZES[1], 4) <= 1e-5


OTHERS = [("wan", "wan22"), ("wan22", "wan_ti2v"), ("wan_ti2v", "wan"), ("wan_i2v", "wan22_i2v")]


@pytest.mark.parametrize(("family", "other"), [*OTHERS, *((b, a) for a, b in OTHERS)])
def test_the_folder_of_another_wan_is_refused(family, other):
    """They share a pipeline class; using one of two experts, or one timestep for all tokens, would fail silently."""
    with pytest.raises(ModelError, match=r"has (\['transformer|expand_timesteps).*set `family` to this model"):
        models.load(family, str(folder(other)), torch.float32, CPU)


def test_sd3_without_its_largest_text_encoder(tmp_path):
    """As used on small GPUs: zeros replace the T5 embeddings."""
    less = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(folder("sd3"), **less)
    pipe.save_pretrained(tmp_path)
    assert differs(load(case_of("sd3"), tmp_path), pipe, case_of("sd3")) <= 1e-5


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
    """HunyuanVideo-1.5: a prompt with two quotes and one with none, as a batch and each alone."""
    case, prompts = case_of("hunyuan_video_15"), ['a sign that says "Café" and “open”', "a red cube"]
    adapter, pipe = load(case), case.pipe(folder("hunyuan_video_15"))
    lengths = conditions(adapter, case, prompts).text_length_2
    assert lengths is not None and lengths.tolist() == [len('Text "Café". Text "open". '.encode()) + 1, 0]
    for some in (prompts, prompts[:1], prompts[1:]):
        assert differs(adapter, pipe, case, prompts=some) <= 1e-5


@pytest.mark.parametrize("frames, size, batch", [(1, 6, None), (5, 1, 2), (3, 4, 1)])
def test_the_attention_mask_of_a_vae_is_diffusers_own(frames, size, batch):
    stock = HunyuanVideo15AttnBlock.prepare_causal_attention_mask
    masks = [mask(frames, size, torch.bfloat16, "cpu", batch) for mask in (causal_attention_mask, stock)]
    assert torch.equal(*masks) and masks[0].dtype == torch.bfloat16


def test_a_few_step_model_has_sigmas_of_its_own():
    """Qwen-Image-2.1's pipeline uses them whatever the number of steps; we refuse a different number."""
    case = case_of("qwen_image_21").unguided()
    adapter, pipe = load(case), case.pipe(folder("qwen_image_21"))
    for one in (adapter.pipe, pipe):
        one.register_to_config(sample_sigmas=[1.0, 0.8, 0.3])
    assert differs(adapter, pipe, case, steps=3) <= 1e-5
    with pytest.raises(ValueError, match="has 3 sampling sigmas: expected as many steps, got 4"):
        adapter.sigmas(case.sampling(steps=4))


def test_the_sound_of_a_clip_is_in_its_state():
    """LTX-2: 5 frames of 1/24 s come with 5 audio tokens of 1/25 s, which affect the clip; `decode` drops them."""
    case = case_of("ltx2")
    adapter, sampling = load(case), case.sampling()
    x, clip = noise(adapter, sampling), adapter.tokens(sampling)
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
    condition, x = conditions(adapter, case), noise(adapter, sampling)
    sigmas = [torch.full((2,), s) for s in (0.875, 0.8749)]
    before = [adapter.velocity(x, s, condition, sampling) for s in sigmas]
    adapter.pipe.transformer_2.proj_out.weight.data.mul_(2)
    after = [adapter.velocity(x, s, condition, sampling) for s in sigmas]
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    with pytest.raises(ValueError, match="a batch of one expert's σ"):
        adapter.velocity(x, torch.tensor([0.5, 0.9]), condition, sampling)


def test_one_expert_may_train(tmp_path):
    adapter = policy(case_of("wan22"), target_components=("transformer_2",))
    assert all(name.startswith("transformer_2.") for name, _ in adapter.trainable())
    assert [adapter.trains(s) for s in (1.0, 0.875, 0.87, 0.1)] == [False, False, True, True]
    adapter.save_lora(str(tmp_path))
    (file,) = tmp_path.rglob("*.safetensors")
    assert file.parent.name == "transformer_2"
    with pytest.raises(ValueError, match=r"some of transformer, transformer_2, got \['transformer_3'\]"):
        load(case_of("wan22"), target_components=("transformer_3",))
