"""Loading a model and injecting LoRA, mostly with wrong input.

Why these cases: the usual mistakes of new users (a mistyped folder that would be looked up on the hub, a misspelt LoRA
target), and a trap of the file format: results that depend on the weights' memory alignment.
"""

import os
import shutil

import pytest
import torch

from prefgrpo.models.flux import Flux
from prefgrpo.models.folder import ModelError
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


def test_lora_mistakes(folder):
    adapter = load(folder, encoders=False)
    with pytest.raises(ValueError, match=r"\['attn.to_qq'\] match no Linear .* attn.to_q,"):
        adapter.add_lora(4, 8.0, ("attn.to_q", "attn.to_qq"))
