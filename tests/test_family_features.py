"""What only some families do: source images, clips, distilled checkpoints, a multistep solver in the folder."""

import json
import subprocess
import sys
from dataclasses import replace

import diffusers
import pytest
import torch
from families import (
    CASES,
    CPU,
    SIZES,
    SOURCES,
    conditions,
    draw,
    folder,
    load,
    noise,
    perturb,
    small_sources,
    stock_image,
)
from PIL import Image
from safetensors.torch import load_file

from prefgrpo import models
from prefgrpo.config.schema import from_dict
from prefgrpo.models.folder import ModelError
from prefgrpo.rollout.embed import Embeddings, collate
from prefgrpo.rollout.replay import replay
from prefgrpo.rollout.rollout import rollout
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.sde.schedule import make_schedule, shifted_sigmas, truncated_times

pytestmark = pytest.mark.families


def test_the_source_image_is_part_of_the_condition(tmp_path):
    case = next(c for c in CASES if c.family == "flux_kontext")
    adapter = load(case, folder("flux_kontext"))
    embed = Embeddings(adapter, case.max_length, tmp_path)
    a, b, again = embed(["red", "red", "red"], [(SOURCES[0],), (SOURCES[1],), (SOURCES[0].copy(),)])
    assert a is again and embed.encoded == 1, "the text encoder sees no source"
    kept = {key.partition(".")[0] for file in tmp_path.glob("*.safetensors") for key in load_file(file)}
    assert len(kept) == 3, "one text, two sources"
    assert not torch.equal(a["source"], b["source"]) and torch.equal(a["prompt_embeds"], b["prompt_embeds"])
    x, sigma = noise(adapter, SIZES[0]), torch.full((2,), 0.7)
    v = adapter.velocity(x[:1].repeat(2, 1, 1), sigma, collate([a, b]), *SIZES[0])
    assert (v[0] - v[1]).abs().max() > 1e-3
    wide = embed(["red"], [(SOURCES[0].resize((96, 64)),)])
    with pytest.raises(ValueError, match="equal shapes, but 'source'"):
        collate([a, *wide])
    with pytest.raises(ValueError, match="takes no source image"):
        Embeddings(load(CASES[0], folder("flux")), 32)(["red"], [(SOURCES[0],)])
    with pytest.raises(ValueError, match=r"takes 1 source image\(s\), got 2"):
        embed(["red"], [(SOURCES[0], SOURCES[1])])
    with pytest.raises(ValueError, match="must have equal parts"):
        collate([a, *embed(["red"])])


@pytest.mark.parametrize("family", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_sources_of_real_size(family):
    """Unpatched: a source becomes a million pixels in both pipelines, whatever the output's size."""
    case = next(c for c in CASES if c.family == family).unguided()
    adapter = load(case, folder(family))
    pipe = case.pipe(folder(family))
    case = replace(case, sources=1)
    x0 = noise(adapter, SIZES[0])[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("families.SOURCES", [SOURCES[0].resize((60, 40))] * 2)
        condition = conditions(adapter, case, ["red"])
        assert condition["source"].shape == (1, 52, 78, 16), "832 × 1248 pixels, 16 to a token"
        got = draw(adapter, case, x0, SIZES[0], 2, ["red"])
        assert (got - stock_image(pipe, case, x0, SIZES[0], 2, ["red"])).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["flux2_klein", "qwen_image_edit_plus"])
def test_several_sources_and_their_order(family):
    case = replace(next(c for c in CASES if c.family == family and c.edit), sources=2)
    adapter = load(case, folder(family))
    pipe = case.pipe(folder(family))
    x0 = noise(adapter, SIZES[0])
    with small_sources():
        condition = conditions(adapter, case)
        assert {"source", "source_2"} < set(condition)
        assert torch.equal(condition["source"][0], condition["source_2"][1]), "the same image in another place"
        assert (draw(adapter, case, x0, SIZES[0], 2) - stock_image(pipe, case, x0, SIZES[0], 2)).abs().max() <= 1e-5


def test_a_source_is_encoded_once_for_all_prompts(monkeypatch):
    """Three prompts and the negative one share a source: the VAE sees it once, the language model four times."""
    case = next(c for c in CASES if c.family == "qwen_image_edit")
    adapter = load(case, folder("qwen_image_edit"))
    calls = []
    real = adapter.encode_source
    monkeypatch.setattr(adapter, "encode_source", lambda image: calls.append(image) or real(image))
    embed = Embeddings(adapter, case.max_length)
    with small_sources():
        embed(["a", "b", "c"], [case.images(0, SIZES[0])] * 3)
        assert len(calls) == 1 and embed.encoded == 4
        embed(["a"], [case.images(1, SIZES[0])])
    assert len(calls) == 2 and embed.encoded == 6, "a text is one per source that its encoder sees"
    with pytest.raises(ValueError, match="edits images: expected a source image for the prompt 'a'"):
        embed(["a"])


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
torch.save(adapter.encode("make it blue", 512, (image,))["prompt_embeds"], sys.argv[3])
adapter.enable_full()
adapter.save_full(sys.argv[4])
"""


def test_qwen_edit_without_torchvision(tmp_path):
    """Only transformers' video processor needs it: the embedding is the same, and what is saved loads with it."""
    made, saved, file = tmp_path / "made", tmp_path / "saved", tmp_path / "embeds"
    argv = [sys.executable, "-c", WITHOUT_TORCHVISION, made, folder("qwen_image_edit"), file, saved]
    subprocess.run([str(part) for part in argv], check=True, capture_output=True, timeout=120)
    case = next(c for c in CASES if c.family == "qwen_image_edit")
    want = load(case, folder("qwen_image_edit")).encode(
        "make it blue", 512, (Image.linear_gradient("L").convert("RGB"),)
    )
    got = torch.load(file)
    assert got.shape == want["prompt_embeds"].shape and (got - want["prompt_embeds"]).abs().max() <= 0.02
    for path in (made, saved):
        assert json.loads((path / "model_index.json").read_text())["processor"] == ["transformers", "Qwen2VLProcessor"]
    pytest.importorskip("torchvision")
    for path in (made, saved):
        processor = diffusers.QwenImageEditPipeline.from_pretrained(path).processor
        assert processor.video_processor is not None


def test_a_first_frame_is_encoded_per_number_of_frames(tmp_path):
    """Its latents span the clip; evaluation may make clips of another length than training."""
    case = next(c for c in CASES if c.family == "wan_i2v")
    adapter = load(case, folder("wan_i2v"))
    embed = Embeddings(adapter, case.max_length, tmp_path)
    (five,) = embed(["red"], [case.images(0, SIZES[0])])
    adapter.frames = 9
    (nine,) = embed(["red"], [case.images(0, SIZES[0])])
    assert (five["source"].shape[1], nine["source"].shape[1]) == (3, 5) and embed.encoded == 2
    for given in ((), (case.images(0, SIZES[0])[0],) * 2):
        with pytest.raises(ValueError, match=r"from an image: expected one|takes 1 source image\(s\), got 2"):
            condition = collate(embed(["red"], [given]))
            adapter.velocity(noise(adapter, SIZES[0])[:1], torch.ones(1), condition, *SIZES[0])


def test_no_weight_moves_a_given_first_frame():
    """TI2V: the source is reached exactly, and the first frame's velocity has no gradient."""
    case = next(c for c in CASES if c.family == "wan_ti2v" and c.edit)
    adapter = load(case, folder("wan_ti2v"))
    adapter.add_lora(4, 8.0)
    perturb(adapter)
    condition = conditions(adapter, case)
    x, sizes = noise(adapter, SIZES[0]), {"height": SIZES[0][0], "width": SIZES[0][1]}
    v = adapter.velocity(x, torch.full((2,), 0.7), condition, **sizes)
    v[:, :, 0].sum().backward()
    assert not any(p.grad is not None and p.grad.abs().max() > 0 for _, p in adapter.trainable())
    schedule = make_schedule(adapter.sigmas(4, *SIZES[0]), "flow", 0.7, (0, 1, 2))
    done = rollout(adapter, schedule, condition, torch.arange(2), seed=1, **sizes)
    assert torch.equal(done.latents[:, :, :1], condition["source"])


def test_a_given_first_frame_under_truncated_times(monkeypatch):
    """The oracle is the stock pipeline whose scheduler shows whole timesteps, and its steps are the exact ones."""
    case = next(c for c in CASES if c.family == "wan_ti2v" and c.edit)
    adapter, pipe, size = load(case, folder("wan_ti2v")), case.pipe(folder("wan_ti2v")), SIZES[0]
    sigmas = shifted_sigmas(4, 5.0)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    real = pipe.scheduler.set_timesteps

    def whole(*args, device, **kwargs):
        real(sigmas=sigmas[:-1].tolist(), timesteps=(sigmas[:-1] * 1000).floor().tolist(), device=device)

    monkeypatch.setattr(pipe.scheduler, "set_timesteps", whole)
    schedule = make_schedule(sigmas, "ode", 0.0, times=truncated_times(sigmas))
    assert (schedule.sigmas[:-1] - schedule.times).max() > 1e-4
    x0, where = noise(adapter, size), {"height": size[0], "width": size[1]}
    done = rollout(
        adapter, schedule, conditions(adapter, case, size=size), torch.arange(2), seed=0, initial=x0, **where
    )
    assert (adapter.decode(done.latents, *size) - stock_image(pipe, case, x0, size, 4)).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["flux", "wan_i2v", "qwen_image_edit"])
def test_an_export_is_whole_though_the_encoders_stayed_on_disk(family, tmp_path):
    """With data.cache a run never loads them; the folder that it exports must still take prompts."""
    case = next(c for c in CASES if c.family == family)
    adapter = load(case, folder(family), encoders=False)
    adapter.enable_full()
    perturb(adapter)
    adapter.save_full(str(tmp_path / "full"))
    adapter.save_full(str(tmp_path / "full"))
    x0 = noise(adapter, SIZES[0])
    with small_sources():
        image = stock_image(case.pipe(tmp_path / "full"), case, x0, SIZES[0], 2)
        whole = load(case, folder(family))
        whole.enable_full()
        perturb(whole)
        assert (image - draw(whole, case, x0, SIZES[0], 2)).abs().max() <= 1e-5


@pytest.mark.parametrize("steps", [3, 20])
def test_ddim_with_noise_is_the_schedulers(steps):
    """Rule `ddim` on the flow that SD1 is shown as, against diffusers' own DDIM step with η and the same noise."""
    adapter = load(next(c for c in CASES if c.family == "sd1"), folder("sd1"))
    scheduler, sigmas = adapter.stock_scheduler(), adapter.sigmas(steps, *SIZES[0])
    scheduler.set_timesteps(steps)
    schedule = make_schedule(sigmas, "ddim", 0.7)
    generator = torch.Generator().manual_seed(0)
    x, noise, z = (torch.randn(1, 4, 8, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    norm = torch.hypot(1 - sigmas, sigmas).double()
    for k, time in enumerate(scheduler.timesteps):
        want = scheduler.step(noise, time, x, eta=0.7, variance_noise=z).prev_sample
        flow, s = x * norm[k], float(sigmas[k])
        a, b, std, _, _ = schedule.coef[k].double()
        got = a * flow + b * (noise - flow) / (1 - s) + std * z
        assert torch.allclose(got / norm[k + 1], want, rtol=1e-5, atol=1e-5)
        assert std > 0 or k == steps - 1


def test_sd1_with_the_published_solver_of_its_folder():
    """PNDM's config does not say `clip_sample`, which DDIM then takes to be on: latents are no pixels."""
    case = next(c for c in CASES if c.family == "sd1")
    adapter, pipe = load(case, folder("sd1")), case.pipe(folder("sd1"))
    betas = {key: adapter.pipe.scheduler.config[key] for key in ("beta_start", "beta_end", "beta_schedule")}
    adapter.pipe.scheduler = diffusers.PNDMScheduler(**betas, skip_prk_steps=True, steps_offset=1)
    pipe.scheduler = adapter.stock_scheduler()
    x0 = noise(adapter, SIZES[0])
    want = stock_image(pipe, case, x0, SIZES[0], 4)
    assert (draw(adapter, case, x0, SIZES[0], 4) - want).abs().max() <= 1e-5
    config = from_dict({"model": "m", "data": {"prompts": "p"}, "rollout": {"truncate_timesteps": True, "steps": 4}})
    schedule = Schedules(config, adapter, CPU).ode(config.rollout)
    assert torch.equal(schedule.times, schedule.sigmas[:-1]), "its times are whole as they are"


def test_sd1_refuses_what_it_has_not():
    case = next(c for c in CASES if c.family == "sd1")
    adapter = load(case, folder("sd1"))
    adapter.pipe.scheduler.register_to_config(prediction_type="v_prediction")
    with pytest.raises(ValueError, match="predicts epsilon, got v_prediction"):
        adapter.sigmas(4, *SIZES[0])
    adapter.pipe.scheduler.register_to_config(prediction_type="epsilon", timestep_spacing="linspace")
    with pytest.raises(ValueError, match="timestep_spacing leading or trailing"):
        adapter.sigmas(4, *SIZES[0])


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}
SOLVERS = [
    (diffusers.UniPCMultistepScheduler(**FLOW), ("flux", "sd3", "wan")),
    (diffusers.DPMSolverMultistepScheduler(**FLOW), ("sd3", "wan")),
    (diffusers.FlowMatchHeunDiscreteScheduler(shift=5.0), ("sd3", "wan")),
    (diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0, stochastic_sampling=True), ("flux", "sd3", "wan")),
    (diffusers.EulerDiscreteScheduler(), ()),
    (diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction"), ()),
]


@pytest.mark.parametrize("family", ["flux", "sd3", "wan"])
@pytest.mark.parametrize(("solver", "takes"), SOLVERS, ids=[f"{type(s).__name__}-{len(t)}" for s, t in SOLVERS])
def test_a_folder_with_another_solver_gives_its_sigmas(family, solver, takes):
    """A step goes from one σ of the solver to its next; Heun's come in pairs. FluxPipeline refuses DPM and Heun."""
    case = next(c for c in CASES if c.family == family)
    adapter, pipe = load(case, folder(family)), case.pipe(folder(family))
    adapter.pipe.scheduler = solver
    if family not in takes:
        with pytest.raises(ValueError, match=r"is no scheduler of a flow|does not take what FluxPipeline passes it"):
            adapter.sigmas(6, *SIZES[0])
        return
    pipe.scheduler = type(solver).from_config(solver.config)
    stock_image(pipe, case, noise(adapter, SIZES[0]), SIZES[0], 6)
    sigmas, times = pipe.scheduler.sigmas, pipe.scheduler.timesteps.float()
    if len(times) == 11:
        sigmas, times = sigmas[[0, *range(1, 12, 2)]], times[[0, *range(1, 11, 2)]]
    assert torch.equal(adapter.sigmas(6, *SIZES[0]), sigmas)
    assert torch.allclose(adapter.times(6, *SIZES[0]) * 1000, times, rtol=0, atol=2e-4)
    assert not adapter.stock_scheduler().config.get("stochastic_sampling"), "a stock run of a proof adds no noise"


@pytest.mark.parametrize("steps", [5, 7, 20, 30, 48, 50])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_ddim_starts_each_step_where_the_last_one_ended(spacing, steps):
    """The oracle is the picture of stock DDIM; with trailing times its step of 1000 // steps may end elsewhere."""
    case = next(c for c in CASES if c.family == "sd1")
    adapter, pipe = load(case, folder("sd1")), case.pipe(folder("sd1"))
    adapter.pipe.scheduler.register_to_config(timestep_spacing=spacing)
    pipe.scheduler = adapter.stock_scheduler()
    if spacing == "trailing" and 1000 % steps:
        with pytest.raises(ValueError, match=f"expected steps that divide 1000, got {steps}"):
            adapter.sigmas(steps, *SIZES[0])
        return
    x0 = noise(adapter, SIZES[0])
    want = stock_image(pipe, case, x0, SIZES[0], steps)
    assert (draw(adapter, case, x0, SIZES[0], steps) - want).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("family", "kind"),
    [("hunyuan_video", "use_beta_sigmas"), ("flux", "use_karras_sigmas"), ("sd3", "use_exponential_sigmas")],
)
def test_other_spacings_of_the_sigmas_are_the_stock_pipelines(family, kind):
    if kind == "use_beta_sigmas":
        pytest.importorskip("scipy")
    case, path = next(c for c in CASES if c.family == family), folder(family, **{kind: True}, shift_terminal=0.05)
    adapter = load(case, path)
    x0 = noise(adapter, SIZES[1])
    assert (
        draw(adapter, case, x0, SIZES[1], 4) - stock_image(case.pipe(path), case, x0, SIZES[1], 4)
    ).abs().max() <= 1e-5


WANS = ["wan", "wan22", "wan_ti2v"]


@pytest.mark.parametrize(("family", "other"), [(a, b) for a in WANS for b in WANS if a != b] + [
    ("wan_i2v", "wan22_i2v"), ("wan22_i2v", "wan_i2v"),
])  # fmt: skip
def test_the_folder_of_another_wan_is_refused(family, other):
    """They share a pipeline: one expert of two, or one time for all tokens, would train and sample silently."""
    with pytest.raises(ModelError, match=r"has (\['transformer|expand_timesteps).*set `family` to the one"):
        models.load(family, str(folder(other)), torch.float32, CPU)


def test_sd3_without_its_largest_text_encoder(tmp_path):
    """As it is run on small GPUs: zeros stand for what T5 would say."""
    case, less = next(c for c in CASES if c.family == "sd3"), {"text_encoder_3": None, "tokenizer_3": None}
    diffusers.StableDiffusion3Pipeline.from_pretrained(folder("sd3"), **less).save_pretrained(tmp_path)
    adapter = load(case, tmp_path)
    x0 = noise(adapter, SIZES[0])
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path, **less)
    assert (draw(adapter, case, x0, SIZES[0], 2) - stock_image(pipe, case, x0, SIZES[0], 2)).abs().max() <= 1e-5


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


def wan22(**options):
    return load(next(c for c in CASES if c.family == "wan22"), folder("wan22"), **options)


def test_the_boundary_belongs_to_the_high_noise_expert():
    """σ = 0.875 exactly is t = 875 ≥ 875, as in the stock pipeline; either side changes with its own expert alone."""
    adapter, case = wan22(), next(c for c in CASES if c.family == "wan22")
    condition, x = conditions(adapter, case), noise(adapter, SIZES[0])
    sigmas = [torch.full((2,), s) for s in (0.875, 0.8749)]
    before = [adapter.velocity(x, s, condition, *SIZES[0]) for s in sigmas]
    adapter.pipe.transformer_2.proj_out.weight.data.mul_(2)
    after = [adapter.velocity(x, s, condition, *SIZES[0]) for s in sigmas]
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    mixed = adapter.velocity(x, torch.tensor([0.5, 0.9]), condition, *SIZES[0])
    for row, sigma in enumerate((0.5, 0.9)):
        alone = adapter.velocity(x, torch.full((2,), sigma), condition, *SIZES[0])
        assert (mixed[row] - alone[row]).abs().max() <= 1e-5


def test_one_expert_may_train(tmp_path):
    adapter = wan22(target_components=("transformer_2",))
    adapter.add_lora(4, 8.0)
    assert all(name.startswith("transformer_2.") for name, _ in adapter.trainable())
    assert [adapter.trains(s) for s in (1.0, 0.875, 0.87, 0.1)] == [False, False, True, True]
    adapter.save_lora(str(tmp_path))
    assert [str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*.safetensors")] == [
        "transformer_2/pytorch_lora_weights.safetensors"
    ]
    with pytest.raises(ValueError, match=r"some of transformer, transformer_2, got \['transformer_3'\]"):
        wan22(target_components=("transformer_3",))
    with pytest.raises(ValueError, match="has one denoiser"):
        load(CASES[0], folder("flux"), guidance_2=3.0)


def test_stacked_steps_of_both_experts_replay():
    """Steps of both experts in one forward: rows on both sides of the boundary."""
    adapter, case = wan22(), next(c for c in CASES if c.family == "wan22")
    condition = conditions(adapter, case)
    schedule = make_schedule(adapter.sigmas(4, *SIZES[0]), "flow", 0.7, (0, 1, 2))
    sizes = {"height": SIZES[0][0], "width": SIZES[0][1]}
    done = rollout(adapter, schedule, condition, torch.arange(2), seed=1, **sizes)
    sides = {bool(adapter.high(schedule.sigmas[k])) for step in done.steps for k in step.numbers}
    assert sides == {True, False}
    together = replay(adapter, schedule, condition, done.steps, **sizes)
    assert torch.allclose(together.logp, torch.cat([step.logp for step in done.steps]), atol=1e-5)
