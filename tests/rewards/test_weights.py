"""Wrong, broken or malicious CLIP checkpoints: each gives an error that names the file, before any score.

The faults are real files: truncated ones, missing tensors, a different head, pickled code; and an unreachable hub.
"""

from pathlib import Path

import pytest
import torch
from reward_cases import aesthetic_head, clip_folder, hps_folder, open_clip_folder
from safetensors.torch import load_file, save_file

from prefgrpo.rewards import build
from prefgrpo.rewards.base import RewardError
from prefgrpo.rewards.weights import folder_of, source_of


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


def test_a_commit_of_a_hub_repository_is_passed_on(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    folder_of("owner/name@0123abc", ["*.json"])
    folder_of("owner/name", ["*.json"])
    assert [(a[0], k["revision"]) for a, k in asked] == [("owner/name", "0123abc"), ("owner/name", None)]
    assert source_of("owner/name@v1/x") == {"pretrained_model_name_or_path": "owner/name", "revision": "v1/x"}
    (tmp_path / "a@b").mkdir()
    assert source_of(str(tmp_path / "a@b")) == {"pretrained_model_name_or_path": str(tmp_path / "a@b")}


def test_broken_files_are_errors_that_say_what_to_do(tmp_path):
    folder = open_clip_folder(tmp_path / "cut")
    file = folder / "open_clip_pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:2000])
    tiny = {"model": str(folder), "architecture": "checkpoint"}
    refused("clip", "cannot load", str(folder), "download it again", **tiny)
    file.unlink()
    refused("clip", "open_clip*.bin", "download", model=str(folder))
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
    refused("clipscore", "visual_projection.weight", str(clip), model=str(clip))
    folder = hps_folder(tmp_path / "hps")
    content = torch.load(folder / "HPS_v2.1_compressed.pt", weights_only=True)
    del content["state_dict"]["ln_final.weight"]
    torch.save(content, folder / "HPS_v2.1_compressed.pt")
    refused("hpsv2", "ln_final.weight", model=str(folder), architecture="checkpoint")
    head = aesthetic_head(tmp_path / "head.pth")
    weights = torch.load(head, weights_only=True)
    torch.save(weights | {"layers.0.weight": weights["layers.0.weight"][:, :512]}, head)
    refused("aesthetic", "width 512", "768", model=aesthetic["model"], head=str(head))
    refused("aesthetic", "768", "24", model=str(clip_folder(tmp_path / "narrow")), head=aesthetic["head"])


class Trap:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_pickled_code_in_a_checkpoint_does_not_run(tmp_path, aesthetic):
    folder, touched = hps_folder(tmp_path / "hps"), tmp_path / "touched"
    torch.save({"state_dict": Trap(touched)}, folder / "HPS_v2.1_compressed.pt")
    refused("hpsv2", "cannot load", model=str(folder), architecture="checkpoint")
    torch.save(Trap(touched), tmp_path / "head.pth")
    refused("aesthetic", "cannot load", model=aesthetic["model"], head=str(tmp_path / "head.pth"))
    assert not touched.exists()
