"""Wrong, broken or malicious CLIP checkpoints: each gives an error that names the file, before any score.

The faults are real files: weights for another image size (which open_clip silently resizes), truncated files, missing
tensors, a different head, pickled code; and also an unreachable hub.
"""

import json
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from reward_cases import pictures
from safetensors.torch import load_file, save_file
from tiny_rewards import aesthetic_head, architecture, clip_folder, hps_folder, open_clip_folder

from prefgrpo.rewards import build
from prefgrpo.rewards.base import RewardError


@pytest.fixture(scope="module")
def aesthetic(tmp_path_factory):
    """Options of a complete aesthetic reward."""
    folder = tmp_path_factory.mktemp("aesthetic")
    return {"model": str(clip_folder(folder / "clip", width=768)), "head": str(aesthetic_head(folder / "head.pth"))}


def refused(name, *words, **options):
    with pytest.raises(RewardError) as error:
        build(name, {name: options})
    assert all(word in str(error.value) for word in words), error.value
    assert len(str(error.value)) < 1200


def test_weights_of_another_image_size_are_refused_where_open_clip_resizes_them(tmp_path):
    """The original code loads DFN5B-378 weights into ViT-H-14 (224): nothing fails, but every score is wrong."""
    large, small = (open_clip_folder(tmp_path / str(size), size=size) for size in (42, 28))
    shutil.copy(large / "open_clip_pytorch_model.bin", small)
    open_clip.create_model_from_pretrained(f"local-dir:{small}")  # no error
    refused("clip", "positional_embedding", "(10, 32)", "(5, 32)", "architecture", model=str(small))


def test_an_architecture_that_does_not_fit_is_refused(tmp_path):
    file, folder = tmp_path / "dfn5b.bin", open_clip_folder(tmp_path / "x")
    torch.save({"visual.conv1.weight": torch.zeros(1)}, file)
    refused("clip", "activation", "ViT-H-14-378-quickgelu", model=str(file), architecture="ViT-H-14-378")
    refused("clip", "ViT-H-15", "ViT-H-14", model=str(file), architecture="ViT-H-15")
    refused("clip", "another model", "ViT-B-32", model=str(folder), architecture="ViT-B-32")


def test_a_bare_file_takes_the_named_architecture_and_its_published_preprocessing(tmp_path, monkeypatch):
    """The same weights give the same scores with their config file and alone with a registered architecture name."""
    folder = open_clip_folder(tmp_path / "whole")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny-quickgelu.json").write_text(json.dumps(architecture()))
    open_clip.add_model_config(tmp_path / "configs")
    alone = tmp_path / "weights.bin"
    shutil.copy(folder / "open_clip_pytorch_model.bin", alone)
    published = open_clip.get_pretrained_cfg("ViT-H-14-378-quickgelu", "dfn5b")
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda name: ["dfn5b"])
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda name, tag: published)
    whole = build("clip", {"clip": {"model": str(folder)}})["clip"]
    single = build("clip", {"clip": {"model": str(alone), "architecture": "tiny-quickgelu"}})["clip"]
    assert single.score(pictures()) == whole.score(pictures())
    assert None not in [score.value for score in single.score(pictures())]


def test_broken_files_are_errors_that_say_what_to_do(tmp_path):
    folder = open_clip_folder(tmp_path / "cut")
    file = folder / "open_clip_pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:2000])
    refused("clip", "cannot load", str(folder), "download it again", model=str(folder))
    file.unlink()
    refused("clip", "open_clip_pytorch_model.bin", "download", model=str(folder))
    clip = clip_folder(tmp_path / "clip")
    (clip / "model.safetensors").write_bytes((clip / "model.safetensors").read_bytes()[:5000])
    refused("clipscore", "cannot load", str(clip), model=str(clip))
    refused("clipscore", "no/such", "hub id", model="no/such")
    refused("clip", "no/such", "hub id", model="no/such")
    refused("clip", "neither a folder", model=str(tmp_path / "nowhere"))


def test_a_checkpoint_of_something_else_is_refused(tmp_path, aesthetic):
    clip = clip_folder(tmp_path / "clip")
    weights = load_file(clip / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, clip / "model.safetensors", {"format": "pt"})
    refused("clipscore", "visual_projection.weight", model=str(clip))
    folder = hps_folder(tmp_path / "hps")
    content = torch.load(folder / "HPS_v2.1_compressed.pt", weights_only=True)
    del content["state_dict"]["ln_final.weight"]
    torch.save(content, folder / "HPS_v2.1_compressed.pt")
    refused("hpsv2", "ln_final.weight", model=str(folder))
    head = aesthetic_head(tmp_path / "head.pth")
    weights = torch.load(head, weights_only=True)
    torch.save(weights | {"layers.0.weight": weights["layers.0.weight"][:, :512]}, head)
    refused("aesthetic", "(1024, 512)", "(1024, 768)", model=aesthetic["model"], head=str(head))
    refused("aesthetic", "768", "24", model=str(clip_folder(tmp_path / "narrow")), head=aesthetic["head"])


class Trap:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_pickled_code_in_a_checkpoint_does_not_run(tmp_path, aesthetic):
    folder, touched = hps_folder(tmp_path / "hps"), tmp_path / "touched"
    torch.save({"state_dict": Trap(touched)}, folder / "HPS_v2.1_compressed.pt")
    refused("hpsv2", "cannot load", model=str(folder))
    torch.save(Trap(touched), tmp_path / "head.pth")
    refused("aesthetic", "cannot load", model=aesthetic["model"], head=str(tmp_path / "head.pth"))
    assert not touched.exists()
