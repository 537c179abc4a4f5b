"""What is refused because it cannot fit on a GPU, before anything is loaded.

Why these cases: a run that could start must never be refused, so the bytes are compared with those of a loaded model;
and every field that a message names must help.
"""

from types import SimpleNamespace

import pytest
import torch
from families import case_of, conditions, load, noise
from tiny_run import ALONE, settings, world

from prefgrpo.config.loading import from_dict
from prefgrpo.objectives import make_objective
from prefgrpo.run import loading
from prefgrpo.run.fits import certain_bytes, model_bytes, refusal, shapes_of, static_bytes, stored_bytes, velocity_bytes
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
    adapter, policy = open_model(c, make_objective(c.train), ALONE, encoders)
    real = sum(static_bytes(adapter, policy).values())
    counted = sum(certain_bytes(c, {name: shapes_of(place / "flux" / name) for name in PARTS}, encoders).values())
    assert 0.99 * real <= counted <= real  # buffers are not in the headers


def test_a_base_in_fp8_is_never_counted_too_large(place):
    """Nor are the bytes that a start prints those of another dtype."""
    c = config(place, dtype="bf16", fp8_base=True)
    adapter, policy = open_model(c, make_objective(c.train), ALONE, False)
    real = static_bytes(adapter, policy)
    counted = certain_bytes(c, {name: shapes_of(place / "flux" / name) for name in PARTS}, False)
    before, _ = open_model(config(place, dtype="bf16"), make_objective(c.train), ALONE, False)
    assert sum(counted.values()) <= sum(real.values())
    in_bf16 = sum(p.nbytes for p in before.transformer.parameters() if not p.requires_grad)
    in_fp8 = sum(p.nbytes for p in adapter.transformer.parameters() if not p.requires_grad)
    assert in_bf16 - in_fp8 == static_bytes(before, policy)["weights"] - real["weights"] > 0.3 * in_bf16


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
    halved = certain_bytes(config(place, fp8_base=True), shapes, True)
    assert 2 * halved["transformer"] <= certain_bytes(config(place, dtype="bf16"), shapes, True)["transformer"]
    assert "vae" not in certain_bytes(config(place, offload=["vae"]), shapes, True)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("family", ["flux", "sd3", "qwen_image"])
def test_a_stored_velocity_has_the_counted_bytes(family, guided):
    """In bf16, and in fp32 where it is made of two predictions; FLUX has no second one."""
    case = case_of(family) if guided else case_of(family).unguided()
    adapter = load(case, dtype=torch.bfloat16)
    sampling = case.sampling()
    v = adapter.velocity(noise(adapter, sampling), torch.full((2,), 0.6), conditions(adapter, case), sampling)
    values = {"model": "m", "family": family, "data": {"prompts": "p"}, "rollout": {"guidance": case.guidance}}
    assert velocity_bytes(from_dict(values)) == v.element_size() == (4 if guided and family != "flux" else 2)


def test_gradients_are_kept_whole_where_half_of_the_memory_holds_them(place, monkeypatch):
    """And never with several denoisers, of which an update's last backward runs one. Kept attention gets a quarter of
    the rest, times the share of the blocks that are recomputed."""
    c = config(place, train={"lora_rank": 0, "gradient_checkpointing": 0.5})
    adapter, policy = open_model(c, make_objective(c.train), ALONE, True)
    stored = stored_bytes(c, adapter.latent_shape(c.rollout), ALONE.layout, 1)
    needed = sum(static_bytes(adapter, policy).values()) + stored + 1000
    world = SimpleNamespace(equal_forwards=True, device=torch.device("cuda"), layout=ALONE.layout, size=1, any=bool)
    monkeypatch.setattr(loading, "whole_gradients", lambda policy: 1000)
    for memory, once in ((2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, m=memory: SimpleNamespace(total_memory=m))
        assert loading.reduces_once(c, adapter, policy, world) == once
        assert loading.attention_limit(c, adapter, policy, world, once) == (memory - needed + 1000 * (not once)) / 8
    assert (
        loading.attention_limit(c, adapter, policy, SimpleNamespace(**vars(world) | {"device": ALONE.device}), True)
        > 1e99
    )
    monkeypatch.setattr(type(adapter), "denoisers", ("transformer", "transformer_2"))
    assert not loading.reduces_once(c, adapter, policy, SimpleNamespace(**vars(world) | {"device": ALONE.device}))
