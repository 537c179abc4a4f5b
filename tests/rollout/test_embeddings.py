"""Prompt conditions: batching, what is kept in memory, and the embedding cache's folder of shards.

Why these cases: many processes write and read the folder at once, some are killed (truncated files), and the cache key
must change with everything that affects the embedding.
"""

import os
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from world import ALONE, cache, case_of, embed, load, tensors_of

from prefgrpo.config.loading import from_dict
from prefgrpo.data.prompts import Prompt
from prefgrpo.models.condition import Condition, collate
from prefgrpo.models.folder import encoder_identity
from prefgrpo.rollout import render as render_module
from prefgrpo.rollout import source_images
from prefgrpo.rollout.embedding_cache import EmbeddingCache
from prefgrpo.rollout.embeddings import Entry, run_entries
from prefgrpo.rollout.render import batches_of, render
from prefgrpo.rollout.sampling import Schedules
from prefgrpo.sde.schedule import make_schedule
from prefgrpo.tiny import pipelines

FLUX, NAMES = case_of("flux"), st.text("0123456789abcdef", min_size=4, max_size=8)
SAMPLING = FLUX.sampling()


@pytest.fixture(scope="module")
def adapter():
    return load(FLUX)


def test_a_batch_has_conditions_of_equal_shapes():
    short = Condition(torch.ones(2, 3), torch.ones(5), (torch.ones(2, 2, 4),))
    other = Condition(torch.zeros(2, 3), torch.zeros(5), (torch.zeros(2, 2, 4),))
    both = collate([short, other])
    assert both.prompt_embeds.shape == (2, 2, 3) and both.pooled.shape == (2, 5) and len(both.sources) == 1
    assert short.shapes() == other.shapes() != both.shapes()
    assert torch.equal(both.select(torch.tensor([1])).sources[0], other.sources[0][None])
    for differing, message in (
        ([short, replace(short, prompt_embeds=torch.ones(4, 3))], "equal shapes, but 'prompt_embeds' has"),
        ([short, replace(short, pooled=torch.ones(6))], "equal shapes, but 'pooled' has"),
        ([short, replace(short, sources=())], "must have equal parts"),
        ([], "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            collate(differing)
    assert {t.device.type for t in tensors_of(collate([replace(short, negative=other)], "meta"))} == {"meta"}


def test_a_negative_prompt_is_the_prompts_own_the_runs_or_the_familys():
    """In the condition, and among what `preprocess` encodes."""
    case = case_of("sd3")
    adapter = load(case)
    sampling = case.sampling()
    kept = cache(case)
    prompts = [
        Prompt(0, "a cat", {"negative_prompt": " blurry "}),
        Prompt(1, "a cat"),
        Prompt(2, "a dog", {"negative_prompt": ""}),
    ]
    assert [p.negative for p in prompts] == ["blurry", None, None]
    named = {"family": "", "run": "ugly"}
    for source, text in named.items():
        run = replace(sampling, negative_prompt=text if source == "run" else None)
        got = [one.negative.prompt_embeds for one in kept(adapter, prompts, run)]
        want = kept.get(adapter, [Entry("blurry"), Entry(text)])
        for ours, own in zip(got, ("blurry", text, text), strict=True):
            assert torch.equal(ours, want[Entry(own)]["prompt_embeds"]), source
    values = {
        "model": "m",
        "family": "sd3",
        "data": {"prompts": "p"},
        "rollout": {"guidance": 4.5, "negative_prompt": "ugly"},
    }
    texts = {entry.text for entry in run_entries(from_dict(values), prompts)}
    assert texts == {"a cat", "a dog", "blurry", "ugly"}


def test_memory_is_bounded(adapter):
    """In bytes, for the latest entries; the one in use is always kept."""
    entry = sum(t.nbytes for t in tensors_of(embed(cache(FLUX), adapter, ["a"], SAMPLING)[0]))
    kept = cache(FLUX, most_bytes=2 * entry)
    for texts, encoded in (("abcc", 3), ("cb", 3), ("a", 4)):
        embed(kept, adapter, texts, SAMPLING)
        assert kept.encoded == encoded


def test_a_damaged_cache_file_is_encoded_again(adapter, tmp_path, caplog):
    first = cache(FLUX, tmp_path)
    (want,) = embed(first, adapter, ["a red cube"], SAMPLING)
    first.flush()
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    second = cache(FLUX, tmp_path)
    (got,) = embed(second, adapter, ["a red cube"], SAMPLING)
    second.flush()
    assert f"{file} is damaged" in caplog.text and second.encoded == 1
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(got), tensors_of(want), strict=True))
    assert cache(FLUX, tmp_path).absent([Entry("a red cube"), Entry("a blue one")]) == [Entry("a blue one")]
    assert not list(tmp_path.rglob(".*")), "no partial file remains"


def test_the_key_follows_the_encoders_and_what_they_are_given(tmp_path):
    """Encoders of a folder are known by their files, those of the hub by repository and commit."""
    model = pipelines.make("flux", tmp_path / "model")

    def key(text="x", length=16):
        return Entry(text).key(cache(replace(FLUX, max_length=length), tmp_path / "cache", model).model)

    first = key()
    assert key() == first != key("y") and first != key(length=17)
    for name, other in (("transformer", False), ("text_encoder", True)):
        (weights,) = (model / name).glob("*.safetensors")
        os.utime(weights, ns=(1, 1))
        assert (key() != first) == other
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc123"
    assert encoder_identity(snapshot) == "owner/name@abc123"


def test_sources_are_known_by_their_files_and_read_once(tmp_path, monkeypatch):
    """A key needs no pixels; the images are read in a worker thread, fitted to the output, once for all users."""
    file = tmp_path / "source.png"
    Image.new("RGB", (40, 20), "red").save(file)
    readers = []
    true_read = source_images._read
    monkeypatch.setattr(
        source_images, "_read", lambda one: readers.append(threading.current_thread()) or true_read(one)
    )
    one, wide = (source_images.SourceImages((str(file),), 16, width) for width in (16, 24))
    before = [Entry(None, s).key("model") for s in (one, wide)]
    assert len(set(before)) == 2 and not readers
    source_images.prefetch([one, one])
    assert one.images()[0].size == (16, 16) and one.media()[0].pixels.shape == (16, 16, 3)
    assert len(readers) == 1 and readers[0] is not threading.current_thread()
    Image.new("RGB", (40, 20), "blue").save(file)
    os.utime(file, ns=(1, 1))
    assert Entry(None, one).key("model") != before[0], "another picture under the same name"


@settings(max_examples=40)
@given(st.lists(st.dictionaries(NAMES, st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_was_written_is_read(tmp_path_factory, writes):
    """By processes that know nothing of each other; the same keys make the same file."""
    place, want = tmp_path_factory.mktemp("shards") / "new", {}
    for number, sizes in enumerate(writes):
        content = {k: {"a.b": torch.full((n,), float(number)), "c": torch.tensor(n)} for k, n in sizes.items()}
        for order in (content, dict(reversed(content.items()))):
            one = EmbeddingCache(place)
            for key, tensors in order.items():
                one.add(key, tensors)
                assert one.read(key).keys() == tensors.keys()
            one.flush()
        want |= content
    assert len(list(place.iterdir())) == len({frozenset(sizes) for sizes in writes})
    found = EmbeddingCache(place)
    for key, tensors in want.items():
        read = found.read(key)
        assert read.keys() == tensors.keys() and read["c"].dtype == torch.int64
        held = [torch.full((w[key],), float(k)) for k, w in enumerate(writes) if key in w]
        assert any(torch.equal(read["a.b"], one) for one in held)
    assert "none" not in found and found.read("none") is None


def test_a_file_has_a_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr("prefgrpo.rollout.embedding_cache.SHARD_BYTES", 8)
    some = EmbeddingCache(tmp_path)
    for key in "abc":
        some.add(key, {"x": torch.ones(1)})
    assert len(list(tmp_path.iterdir())) == 1 and "c" in some


def test_rendering_encodes_each_text_once_and_only_as_far_as_it_goes(monkeypatch):
    """Thousands of prompts would not fit in memory, and the first image must not wait for the last text."""
    monkeypatch.setattr(render_module, "ENCODED", 2)
    case = case_of("qwen_image").unguided()
    adapter = load(case)
    sampling = replace(case.sampling((32, 32), 2), batch_size=2)
    config = from_dict({"model": "m", "family": "qwen_image", "data": {"prompts": "p", "max_length": case.max_length}})
    monkeypatch.setattr(Schedules, "ode", lambda self, sizes: make_schedule(adapter.sigmas(sizes), "ode", 0.0))
    embeddings = cache(case, most_bytes=0)
    texts = ["a cat", "two dogs asleep on a red sofa", "a dog", "a fox", "an owl", "one"]
    wanted = [(Prompt(k, text), k) for k, text in enumerate(texts)]
    schedules = Schedules(config, adapter, torch.device("cpu"))
    made = render(adapter, schedules, embeddings, wanted, sampling, ALONE, wanted[0])
    first = next(made)
    assert embeddings.encoded <= 4, "the texts of two batches"
    found = dict([first, *made])
    assert sorted(found) == list(range(6)) and embeddings.encoded == len(texts)
    for k in (1, 3):  # alone, or in a batch of its length
        (alone,) = render(adapter, schedules, embeddings, wanted[k : k + 1], sampling, ALONE, wanted[0])
        assert abs(alone[1].astype(int) - found[k]).max() <= 1


def test_batches_are_full_or_the_last_of_their_shapes():
    conditions = [Condition(torch.zeros(n, 2)) for n in (3, 5, 3, 3, 5, 3, 3, 7)]
    batches = [[k for k, _ in batch] for batch in batches_of(conditions, 2)]
    assert batches == [[0, 2], [1, 4], [3, 5], [6], [7]]
