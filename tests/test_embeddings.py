"""Prompt conditions: batching, what is kept in memory, and the embedding cache's folder of shards.

Why these cases: many processes write and read the folder at once, some are killed (truncated files), bytes may flip,
and the cache key must change with everything that affects the embedding.
"""

import pytest
import torch
from families import case_of, load, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.models.condition import Condition, collate
from prefgrpo.rollout.embeddings import Embeddings, Shards
from prefgrpo.tiny import pipelines

FLUX, NAMES = case_of("flux"), st.text("0123456789abcdef", min_size=4, max_size=8)
SAMPLING = FLUX.sampling()


def encode(embed, prompts):
    return embed(prompts, SAMPLING)


def test_a_batch_pads_shorter_prompts():
    short = Condition(torch.ones(2, 3), torch.tensor(2), torch.ones(5), (torch.ones(2, 2, 4),))
    long = Condition(torch.ones(4, 3), torch.tensor(4), torch.zeros(5), (torch.zeros(2, 2, 4),), negative=None)
    both = collate([short, long])
    assert both.prompt_embeds.shape == (2, 4, 3) and both.pooled.shape == (2, 5) and len(both.sources) == 1
    assert both.text_length.tolist() == [2, 4] and both.prompt_embeds[0, 2:].abs().max() == 0
    assert torch.equal(both.select(torch.tensor([1])).sources[0], long.sources[0][None])
    with pytest.raises(ValueError, match="at least one"):
        collate([])
    with pytest.raises(ValueError, match="equal shapes, but 'pooled' has"):
        collate([short, Condition(torch.ones(2, 3), torch.tensor(2), torch.ones(6), short.sources)])
    with pytest.raises(ValueError, match="must have equal parts"):
        collate([short, Condition(torch.ones(2, 3), torch.tensor(2), torch.ones(5))])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lengths_stay_on_the_cpu(device):
    one = Condition(torch.ones(2, 3), torch.tensor(2), torch.ones(5), (torch.ones(2),))
    moved = collate([Condition(*one.tensors().values(), one.sources, negative=one)], device)
    assert moved.text_length.device.type == moved.negative.text_length.device.type == "cpu"
    assert {t.device.type for t in tensors_of(moved) if t.is_floating_point()} == {device}
    assert moved.select(torch.tensor([0])).text_length.tolist() == [2]


def test_memory_is_bounded():
    embed = Embeddings(load(FLUX), 16, keep=2)
    encode(embed, ["a", "b", "c", "c"])
    encode(embed, ["c", "b"])
    assert embed.encoded == 3
    encode(embed, ["a"])
    assert embed.encoded == 4
    with pytest.raises(ValueError, match="keep must be"):
        Embeddings(load(FLUX), 16, keep=0)


def test_a_damaged_cache_file_is_encoded_again(tmp_path, caplog):
    (want,) = encode(Embeddings(load(FLUX), 16, tmp_path), ["a red cube"])
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    second = Embeddings(load(FLUX), 16, tmp_path)
    (got,) = encode(second, ["a red cube"])
    assert "damaged" in caplog.text and second.encoded == 1
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(got), tensors_of(want), strict=True))
    third = Embeddings(load(FLUX), 16, tmp_path)
    encode(third, ["a red cube"])
    assert third.encoded == 0
    assert not list(tmp_path.rglob(".*")), "no partial file remains"


def test_the_cache_key_follows_the_text_encoder(tmp_path):
    """The key depends on the encoder weights and the maximum length, but not on the transformer."""
    key = Embeddings(load(FLUX), 16, tmp_path).keys.text("x")
    other = pipelines.make("flux", tmp_path / "other", seed=1)
    assert Embeddings(load(FLUX, other), 16, tmp_path).keys.text("x") != key
    assert Embeddings(load(FLUX), 17, tmp_path).keys.text("x") != key
    tuned = load(FLUX)
    tuned.enable_full()
    tuned.transformer.x_embedder.weight.data.add_(1)
    tuned.save_full(str(tmp_path / "tuned"))
    assert Embeddings(load(FLUX, tmp_path / "tuned"), 16, tmp_path).keys.text("x") == key


@settings(max_examples=40)
@given(st.lists(st.dictionaries(NAMES, st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_was_written_is_read(tmp_path_factory, writes):
    place, want = tmp_path_factory.mktemp("shards"), {}
    for number, sizes in enumerate(writes):
        content = {k: {"a.b": torch.full((n,), float(number)), "c": torch.tensor(n)} for k, n in sizes.items()}
        Shards(place).write(content)
        want |= content
    found = Shards(place)
    for key, tensors in want.items():
        read = found.read(key)
        assert read.keys() == tensors.keys() and read["c"].dtype == torch.int64
        held = [torch.full((w[key],), float(k)) for k, w in enumerate(writes) if key in w]
        assert any(torch.equal(read["a.b"], one) for one in held)
    assert "none" not in found and found.read("none") is None


def test_the_same_keys_make_the_same_file_and_a_reader_learns_of_it(tmp_path):
    content = {"k1": {"x": torch.ones(2)}, "k0": {"x": torch.zeros(3)}}
    reader = Shards(tmp_path / "new")
    for order in (content, dict(reversed(content.items()))):
        Shards(tmp_path / "new").write(order)
    assert len(list((tmp_path / "new").iterdir())) == 1
    assert "k0" not in reader and torch.equal(reader.read("k0")["x"], torch.zeros(3))


@pytest.mark.parametrize("place", [0, 4, -1, -5])
def test_a_flipped_byte_is_noticed(tmp_path, place, caplog):
    """The file size is unchanged, so only the content reveals the damage."""
    Shards(tmp_path).write({"k": {"x": torch.arange(40.0)}, "other": {"x": torch.ones(2)}})
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[place] ^= 255
    file.write_bytes(content)
    shards = Shards(tmp_path)
    found = [shards.read(key) for key in ("k", "other")]
    assert found[1 if place < 0 else 0] is None and str(file) in caplog.text
    assert found[0] is None or torch.equal(found[0]["x"], torch.arange(40.0))
