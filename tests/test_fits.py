"""What is refused because it cannot fit on a GPU, before anything is loaded.

Why these cases: a run that could start must never be refused, so the bytes are compared with those of a loaded model;
and every field that a message names must help.
"""

from types import SimpleNamespace

import pytest
import torch
from tiny_run import ALONE, settings, world

from prefgrpo.config.loading import from_dict
from prefgrpo.objectives import objective
from prefgrpo.run import loading
from prefgrpo.run.fits import certain_bytes, model_bytes, refusal, shapes_of, static_bytes, stored_bytes
from prefgrpo.run.loading import open_model

PARTS = ("transformer", "text_encoder", "text_encoder_2", "vae")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return world(tmp_path_factory.mktemp("fits"))


def config(place, **over):
    return from_dict(settings(place, "fits", **over))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("encoders", [True, False])
def test_the_bytes_are_those_of_the_loaded_model(place, rank, encoders):
    c = config(place, train={"lora_rank": rank})
    adapter, policy = open_model(c, objective(c.train), ALONE, encoders)
    real = sum(static_bytes(adapter, policy).values())
    counted = sum(certain_bytes(c, {name: shapes_of(place / "flux" / name) for name in PARTS}, encoders).values())
    assert 0.99 * real <= counted <= real  # buffers are not in the headers


def test_what_does_not_fit_is_named_part_by_part(place):
    c = config(place, train={"lora_rank": 0})
    parts = certain_bytes(c, {name: shapes_of(place / "flux" / name) for name in PARTS}, True)
    whole = sum(parts.values())
    parts = model_bytes(c, place / "flux", True)
    assert sum(parts.values()) == whole and refusal(parts, whole + 1) == ""
    message = refusal(parts, whole)
    assert [name in message for name in PARTS] == [True] * 4 and "LoRA 0" not in message
    assert all(field in message for field in ("data.cache", "offload", "parallel.shard", "train.lora_rank"))
    cached = refusal(model_bytes(c, place / "flux", False), 1000)
    assert "transformer " in cached and "text_encoder_2 " not in cached


def test_every_field_that_is_named_makes_its_part_smaller(place):
    shapes = {name: shapes_of(place / "flux" / name) for name in PARTS}
    before = certain_bytes(config(place, train={"lora_rank": 0}), shapes, True)
    sharded = certain_bytes(config(place, train={"lora_rank": 0}, parallel={"shard": 4}), shapes, True)
    assert sharded["transformer"] == before["transformer"] // 4
    lora = certain_bytes(config(place), shapes, True)
    assert lora["transformer"] + lora["LoRA"] < before["transformer"]
    assert "vae" not in certain_bytes(config(place, offload=["vae"]), shapes, True)


def test_gradients_are_kept_whole_where_half_of_the_memory_holds_them(place, monkeypatch):
    """And never with several denoisers, of which an update's last backward runs one."""
    c = config(place, train={"lora_rank": 0})
    adapter, policy = open_model(c, objective(c.train), ALONE, True)
    stored = stored_bytes(c, adapter.latent_shape(c.rollout), ALONE.layout, 1)
    needed = sum(static_bytes(adapter, policy).values()) + stored + 1000
    world = SimpleNamespace(equal_forwards=True, device=torch.device("cuda"), layout=ALONE.layout, size=1, any=bool)
    monkeypatch.setattr(loading, "whole_gradients", lambda policy: 1000)
    for memory, once in ((2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, m=memory: SimpleNamespace(total_memory=m))
        assert loading.reduces_once(c, adapter, policy, world) == once
    monkeypatch.setattr(type(adapter), "denoisers", ("transformer", "transformer_2"))
    assert not loading.reduces_once(c, adapter, policy, SimpleNamespace(**vars(world) | {"device": ALONE.device}))
