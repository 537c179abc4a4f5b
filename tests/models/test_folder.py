"""Loading a model and injecting LoRA, mostly with wrong input.

Why these cases: the usual mistakes of new users (a mistyped folder that would be looked up on the hub), folders that
were copied in part, components that would train silently wrong (quantised weights, a guider that ends early), and a
trap of the file format: results that depend on the weights' memory alignment.
"""

import json
import os
import shutil

import diffusers
import pytest
import torch
from world import case_of
from world import load as load_case

from prefgrpo.config.loading import from_dict
from prefgrpo.config.recipe import ConfigError
from prefgrpo.models.flux import Flux
from prefgrpo.models.folder import ModelError, check_weights, locate
from prefgrpo.models.hunyuan_video import HunyuanVideo15
from prefgrpo.tiny import pipelines

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pipelines.make("flux", tmp_path_factory.mktemp("flux") / "tiny")


def load(folder, **options):
    return Flux.load(str(folder), torch.float32, CPU, **options)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "~/nowhere", "made/nowhere"])
def test_a_missing_folder_never_goes_to_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    monkeypatch.setattr("prefgrpo.models.folder._from_hub", lambda model, _: pytest.fail(f"asked the hub for {model}"))
    with pytest.raises(ModelError, match=r"model folder not found.*model_index\.json"):
        Flux.load(name, torch.float32, CPU)


def test_a_model_in_a_folder_whose_name_is_not_utf8_is_refused(folder, tmp_path, monkeypatch):
    """Its own relative name is plain; tokenizers and safetensors get the whole one."""
    inside = tmp_path / os.fsdecode(b"bad\xff")
    inside.mkdir()
    shutil.copytree(folder, inside / "flux")
    monkeypatch.chdir(inside)
    assert "flux" in os.listdir(".")
    for name in ("flux", "./flux", str(inside / "flux")):
        with pytest.raises(ModelError, match=r"bad\\xff/flux' is not UTF-8, .*: rename its folder"):
            Flux.load(name, torch.float32, CPU)
    assert Flux.find(str(folder)) == folder.resolve(), "a plain model can be used from inside"


def test_loaded_models_are_frozen_and_aligned(folder):
    """safetensors maps parameters at unaligned addresses; clones are aligned, so two loads give identical results."""
    a = load(folder)
    for module in (a.transformer, a.pipe.vae, a.pipe.text_encoder, a.pipe.text_encoder_2):
        assert not module.training
        for p in module.parameters():
            assert not p.requires_grad and p.data_ptr() % 16 == 0
    assert a.trainable() == []
    assert a.repeated_blocks == ("FluxTransformerBlock", "FluxSingleTransformerBlock")


def test_lora_start_is_seeded_and_leaves_the_random_state(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # whose states are neither saved nor warned of
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a, b, c, d = (load(folder, encoders=False) for _ in range(4))
    for adapter, seed in ((a, 1), (b, 1), (c, 2)):
        adapter.add_lora(4, 8.0, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    values = [torch.cat([p.flatten() for name, p in x.trainable() if "lora_A" in name]) for x in (a, b, c)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])
    assert all((p == 0).all() for name, p in a.trainable() if "lora_B" in name)
    d.add_lora(4, 8.0, seed=1, init="gaussian")
    normal = torch.cat([p.detach().flatten() for name, p in d.trainable() if "lora_A" in name])
    assert float(normal.std()) == pytest.approx(1 / 4, rel=0.05) and float(normal.abs().max()) > 2.5 / 4, "N(0, 1 / r²)"


@pytest.mark.parametrize("family", ["flux", "ltx2", "sd3", "wan"])
def test_a_model_folder_without_a_tokenizers_vocabulary_is_refused(family, tmp_path):
    """transformers makes an empty tokenizer then, whose tokens mean nothing to the model."""
    place = pipelines.make(family, tmp_path / family)
    files = [file for file in (place / "tokenizer").iterdir() if "config" not in file.name]
    for file in files:
        file.unlink()
    said = rf"a tokenizer without its vocabulary: expected .* in {place / 'tokenizer'}; download"
    with pytest.raises(ModelError, match=said):
        load_case(case_of(family), place)
    shutil.rmtree(place / "tokenizer")
    with pytest.raises(ModelError, match=said):
        load_case(case_of(family), place)


def test_a_denoiser_that_was_stored_quantised_is_refused(tmp_path):
    """A LoRA of a few percent of an int8 step vanishes when it is fused into the base."""
    place = pipelines.make("flux", tmp_path / "flux")
    file = place / "transformer" / "config.json"
    file.write_text(file.read_text().replace("{", '{"quantization_config": {"quant_method": "torchao"},', 1))
    with pytest.raises(ModelError, match=rf"{file}: the weights are quantised \(torchao\): .*fp8_base"):
        load_case(case_of("flux"), place)


@pytest.mark.parametrize("option", [{"stop": 0.8}, {"start": 0.1}, {"guidance_rescale": 0.7}, {}])
def test_a_guider_that_does_not_guide_every_step_is_refused(option, tmp_path):
    """HunyuanVideo-1.5's scale is in its guider, which may also end early; a run's guidance is on at every step."""
    place = tmp_path / "model"
    case = case_of("hunyuan_video_15")
    pipe = case.pipe(pipelines.make("hunyuan_video_15", place))
    other = diffusers.PerturbedAttentionGuidance(perturbed_guidance_layers=[0])
    guider = pipe.guider.new(**option) if option else other
    guider.save_pretrained(place / "guider")
    index = json.loads((place / "model_index.json").read_text()) | {"guider": ["diffusers", type(guider).__name__]}
    (place / "model_index.json").write_text(json.dumps(index))
    said = f"{next(iter(option))} {next(iter(option.values()))}" if option else "PerturbedAttentionGuidance"
    for read in (lambda: load_case(case, place), lambda: HunyuanVideo15.outline(place)):
        with pytest.raises(ModelError, match=rf"guider has {said}: expected ClassifierFreeGuidance at every step"):
            read()


def test_a_model_folder_that_cannot_be_read_names_the_file(tmp_path):
    place = pipelines.make("flux", tmp_path / "flux")
    weights = next((place / "transformer").glob("*.safetensors"))
    whole = weights.read_bytes()
    assert check_weights(place, ["transformer"]) is None
    weights.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=rf"{weights} is cut or damaged .*download the model again"):
        load_case(case_of("flux"), place)
    weights.unlink()
    shards = {"a": "diffusion_pytorch_model-00001-of-00001.safetensors"}
    (place / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        f'{{"weight_map": {{"a": "{shards["a"]}"}}}}'
    )
    with pytest.raises(ModelError, match=rf"{shards['a']} is missing, which .*index.json names"):
        load_case(case_of("flux"), place)
    (place / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    weights.with_name("diffusion_pytorch_model.fp16.safetensors").write_bytes(whole)
    assert check_weights(place, ["transformer"]) == "fp16"
    assert load_case(case_of("flux"), place).transformer is not None
    with pytest.raises(ConfigError, match=r"model: expected a name in UTF-8, got 'runs/m\\udce9': rename it"):
        from_dict({"model": os.fsdecode(b"runs/m\xe9")})
    with pytest.raises(ModelError, match=r"is a single file: expected a diffusers pipeline folder; .*from_single_file"):
        locate(str(place / "transformer" / "diffusion_pytorch_model.fp16.safetensors"))
