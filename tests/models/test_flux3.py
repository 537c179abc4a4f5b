"""FLUX.3 and modular pipelines: what one would guess wrong about them, and what a run writes.

Why these cases: a guess that fails here fails silently in a run: another prompt than the given one, another schedule,
text without its padding, a component that did not load, a LoRA that changes nothing. Each test has the guess in its
docstring. The oracle is the stock pipeline.
"""

import json
import logging
import shutil
from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_flux3 import Flux3AttnProcessor
from safetensors.torch import load_file, save_file
from world import (  # fmt: skip
    SIZES,
    SOURCES,
    TWO_PROMPTS,
    cache,
    case_of,
    differs,
    draw,
    embed,
    folder,
    initial_noise,
    load,
    perturb,
)

from prefgrpo.models import family_of
from prefgrpo.models import folder as folders
from prefgrpo.models.condition import collate
from prefgrpo.models.flux3 import Flux3
from prefgrpo.models.folder import ModelError
from prefgrpo.ops import qk_norm_rope, use_backend

pytestmark = pytest.mark.families
CASE = case_of("flux3")
LONG = "a very long prompt " * 5
"""With the chat template more than one window of 80 tokens, a letter each."""
FULL = pytest.mark.full


@pytest.fixture
def copy(tmp_path):
    """A copy of the tiny pipeline, to be changed."""
    return shutil.copytree(folder("flux3"), tmp_path / "model")


# ---- the pipeline


def test_the_first_block_of_the_stock_pipeline_rewrites_prompts():
    """Guess: the pipeline encodes the prompt that it is given."""
    stock = diffusers.ModularPipeline.from_pretrained(folder("flux3"))
    assert next(iter(stock.blocks.sub_blocks)) == "prompt_upsampler"
    stock.load_components()
    with pytest.raises(AttributeError):  # the language model that rewrites them is not in this folder
        stock(prompt=TWO_PROMPTS[0], height=32, width=32, num_inference_steps=1)
    adapter = load(CASE)
    assert "prompt_upsampler" not in adapter.pipe.blocks.sub_blocks
    assert not any(name.startswith("prompt_upsampler") for name in adapter.pipe.components)


def test_shift_and_guidance_come_from_code_and_are_not_saved(tmp_path):
    """Guess: a saved pipeline has the scheduler and the guider that it was saved with."""
    pipe = CASE.pipe(folder("flux3"))
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift=3.0)
    pipe.update_components(scheduler=scheduler, guider=pipe.guider.new(guidance_scale=2.0))
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    again = CASE.pipe(tmp_path)
    assert (again.scheduler.config.shift, again.guider.guidance_scale) == (6.93, 3.5)
    s = torch.linspace(1, 0.25, 4, dtype=torch.float64)
    expected = 6.93 * s / (1 + 5.93 * s)
    for size in SIZES:  # the shift does not depend on it
        got = load(CASE, tmp_path).sigmas(CASE.sampling(size, 4))
        assert torch.allclose(got[:-1].double(), expected, atol=1e-6) and got[-1] == 0


def test_a_component_that_does_not_load_ends_the_start(copy, caplog):
    """Guess: `load_components` raises. It logs a warning, and the component is None."""
    vae = next((copy / "vae").glob("*.safetensors"))
    tensors = load_file(vae)
    save_file({name: t[..., :1].contiguous() if t.dim() == 4 else t for name, t in tensors.items()}, vae)
    with caplog.at_level(logging.WARNING):
        assert CASE.pipe(copy).vae is None and "Failed to create component vae" in caplog.text
    with pytest.raises(ModelError, match=r"model/vae' cannot be loaded: .*size"):
        load(CASE, copy)
    shutil.rmtree(copy / "vae")
    with pytest.raises(ModelError, match=r"no folder vae .*download or copy it to .*model/vae"):
        load(CASE, copy)


def test_components_that_the_index_has_elsewhere(copy):
    """Guess: the components are where the index says. A folder that was moved, or downloaded, has another index: what
    is in the folder counts, and what is not is refused with the index's own words instead of being fetched."""
    file = copy / "modular_model_index.json"
    index = json.loads(file.read_text())
    for part in (value for value in index.values() if isinstance(value, list)):
        part[2]["pretrained_model_name_or_path"] = "owner/model"
    file.write_text(json.dumps(index))
    assert torch.equal(draw(load(CASE, copy), CASE, SIZES[0], 2), draw(load(CASE), CASE, SIZES[0], 2))
    shutil.rmtree(copy / "text_encoder")
    with pytest.raises(ModelError, match=r"no folder text_encoder \(its index says 'owner/model'\)"):
        load(CASE, copy)


@pytest.mark.parametrize("known", ["pipeline", "configuration"])
def test_the_step_distilled_model_is_refused_by_name(copy, known):
    """Guess: fewer steps are a matter of the schedule. The distilled model must be told where a step jumps to."""
    config = json.loads((copy / "transformer" / "config.json").read_text()) | {"flow_map": True}
    (copy / "transformer" / "config.json").write_text(json.dumps(config))
    file = copy / "modular_model_index.json"
    if known == "pipeline":
        names = {"_class_name": "Flux3DistilledModularPipeline", "_blocks_class_name": "Flux3DistilledAutoBlocks"}
        file.write_text(json.dumps(json.loads(file.read_text()) | names))
    assert family_of(str(copy)) == "flux3"
    with pytest.raises(ModelError, match=r"step-distilled .*train the base model"):
        Flux3.outline(Flux3.find(str(copy)))


def test_a_repository_is_downloaded_without_what_is_not_read(copy, monkeypatch):
    """The models of the index, without the 9B language model that rewrites prompts, nor other files."""
    asked = []
    hub = {"owner/three": copy}

    def snapshot_download(name, revision=None, allow_patterns=()):
        asked.append(list(allow_patterns))
        return str(hub[name])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert Flux3.find("owner/three") == copy.resolve()
    parts = {"text_encoder/*", "tokenizer/*", "transformer/*", "vae/*"}
    assert {pattern for pattern in asked[-1] if pattern not in folders.INDEX} == parts


# ---- text


def test_the_padded_window_is_part_of_the_condition(tmp_path):
    """Guess: padding can be cut off, or added so that prompts share a batch. It is attended to, without a mask."""
    adapter = load(CASE)
    sampling = CASE.sampling()
    kept = cache(CASE, tmp_path)
    short, long = embed(kept, adapter, [TWO_PROMPTS[0], LONG], sampling)
    assert short.prompt_embeds.shape == (80, 8 * 16) and long.prompt_embeds.shape == (160, 8 * 16)
    assert short.negative.prompt_embeds.shape == long.negative.prompt_embeds.shape == (80, 8 * 16)
    kept.flush()
    again = embed(cache(CASE, tmp_path), load(CASE, encoders=False), [LONG, TWO_PROMPTS[0]], sampling)
    assert torch.equal(again[0].prompt_embeds, long.prompt_embeds)
    assert torch.equal(again[1].prompt_embeds, short.prompt_embeds)
    with pytest.raises(ValueError, match="equal shapes, but 'prompt_embeds'"):
        collate([short, long])

    x = initial_noise(adapter, sampling, 1)
    sigma = torch.full((1,), 0.6)

    def velocity(embeds):
        return adapter.velocity(x, sigma, collate([replace(short, prompt_embeds=embeds)]), sampling)

    letters = len(adapter.pipe.tokenizer.tokenizer(f"<|im_start|>user\n{TWO_PROMPTS[0]}<|im_end|>\n").input_ids)
    v = velocity(short.prompt_embeds)
    padded = torch.cat([short.prompt_embeds, torch.zeros(80, 8 * 16)])
    for other in (padded, short.prompt_embeds[: letters + 20]):
        assert (velocity(other) - v).abs().max() > 1e-4


@pytest.mark.parametrize("prompts", [(LONG,), pytest.param((LONG, TWO_PROMPTS[0]), marks=FULL)])
def test_windows_of_different_sizes_are_the_stock_pipelines(prompts):
    """The negative prompt has a window of its own, so guidance is two forwards of different lengths."""
    assert differs(load(CASE), CASE.pipe(folder("flux3")), CASE, SIZES[0], 2, prompts) <= 1e-5


# ---- references


def test_one_reference_is_kept_whole_and_several_are_cropped():
    """Guess: every reference is encoded by itself. A single one is padded to whole tokens, several are cropped."""
    adapter = load(CASE)
    image = SOURCES[0].resize((72, 84))
    (whole,) = adapter.encode_sources((image,))
    assert whole.shape == (6, 5, 16)
    cropped = adapter.encode_sources((image, image))
    assert [one.shape for one in cropped] == [(5, 4, 16)] * 2 and torch.equal(*cropped)


# ---- dtypes


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=FULL)])
def test_fp32_norms_of_bf16_queries(backend, monkeypatch):
    """Weights in fp32 against diffusers' processor: one rounding, after the rotation. In torch bit by bit."""
    torch.manual_seed(0)
    attn = load(CASE, dtype=torch.bfloat16).transformer.single_transformer_blocks[0].attn
    seen = []

    def dispatch(q, k, v, **_):
        seen.extend((q, k))
        return v

    monkeypatch.setattr("diffusers.models.transformers.transformer_flux3.dispatch_attention_fn", dispatch)
    for norm in (attn.norm_q, attn.norm_k):
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    x = torch.randn(2, 5, 32).bfloat16()
    angle = torch.randn(5, 8).repeat_interleave(2, 1)
    tables = (angle.cos(), angle.sin())
    with torch.no_grad():
        Flux3AttnProcessor()(attn, x, image_rotary_emb=tables)
        heads = [layer(x).unflatten(-1, (2, 16)) for layer in (attn.to_q, attn.to_k)]
    leaves = [attn.norm_q.weight.detach().requires_grad_(), attn.norm_k.weight.detach().requires_grad_()]
    with use_backend(backend):
        got = qk_norm_rope(*heads, *leaves, *tables, attn.norm_q.eps)
        gradients = torch.autograd.grad([t.float().square().sum() for t in got], leaves)
    assert all(g.dtype == torch.float32 and g.abs().max() > 0 for g in gradients)
    for a, b in zip(got, seen, strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b) if backend == "torch" else torch.allclose(a.float(), b.float(), rtol=2**-7)


# ---- what is written


def test_an_export_is_whole_and_can_be_moved(copy, tmp_path):
    """With data.cache a run never loads the text encoder, and never the language model that rewrites prompts."""
    (copy / "prompt_upsampler").mkdir()
    (copy / "prompt_upsampler" / "config.json").write_text("{}")
    adapter = load(CASE, copy, encoders=False)
    adapter.enable_full()
    perturb(adapter, 0.02)
    for _ in range(2):
        adapter.save_full(str(tmp_path / "written"))
    moved = (tmp_path / "written").rename(tmp_path / "moved")
    shutil.rmtree(copy)
    assert (moved / "prompt_upsampler" / "config.json").is_file()
    index = json.loads((moved / "modular_model_index.json").read_text())
    assert index["prompt_upsampler"][2]["type_hint"] == ["transformers", "Qwen3_5ForConditionalGeneration"]
    whole = load(CASE)
    whole.enable_full()
    assert differs(perturb(whole, 0.02), CASE.pipe(moved), CASE) <= 1e-5
    whole.transformer.requires_grad_(False)  # torch chooses the product of x [B, N, C] and a weight by this flag
    assert torch.equal(draw(whole, CASE, SIZES[0], 2), draw(load(CASE, moved), CASE, SIZES[0], 2))
