"""Sizes of images and clips from files, and their latents in the cache.

Expected crops are Pillow's resize of a box computed by hand; expected frames are written out from the times at which a
file shows them.
"""

import json
from dataclasses import replace
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from world import cache, case_of, folder, load

from prefgrpo.data.pairs import PairGroup, read_pairs
from prefgrpo.data.prompts import Prompt
from prefgrpo.data.stored import Shape, StoredMedia
from prefgrpo.data.tables import DataError
from prefgrpo.rollout.buckets import bucket_of, buckets, check_samples, describe, fitted, pair_entries
from prefgrpo.rollout.embeddings import Entry
from prefgrpo.rollout.samples import Fitted, chosen_frames


def group(*shapes, line=1, file="x"):
    wins = np.full((len(shapes), len(shapes)), np.nan)
    samples = tuple(StoredMedia(f"{file}{k}") for k in range(len(shapes)))
    shaped = tuple(Shape(*shape) for shape in shapes)
    return PairGroup(Prompt(0, "p", line=line), samples, shaped, wins, wins, where=f"pairs.jsonl, line {line}")


def sized(family="flux", height=1024, width=1024):
    adapter = load(case_of(family))
    return adapter, replace(case_of(family).sampling(), height=height, width=width)


@pytest.mark.parametrize(("height", "width"), [(1024, 1024), (512, 512), (720, 1280)])
def test_buckets_have_the_runs_pixels_and_sides_that_the_family_takes(height, width):
    adapter, sampling = sized(height=height, width=width)
    found = [(size.height, size.width) for size in buckets(adapter, sampling)]
    assert found[0] == (height, width) and len(set(found)) == len(found)
    assert all(side % adapter.unit == 0 for size in found for side in size)
    assert all(abs(h * w / (height * width) - 1) <= 0.1 for h, w in found)
    ratios = sorted(w / h for h, w in found)
    for wanted in (9 / 16, 3 / 4, 1, 4 / 3, 16 / 9):
        assert min(abs(ratio / wanted - 1) for ratio in ratios) < 0.07
    if (height, width) == (1024, 1024) and adapter.unit == 16:
        assert (1184, 880) in found and (768, 1360) in found


def test_sizes_that_the_model_has_no_positions_for_or_that_do_not_fit_are_left_out():
    adapter, sampling = sized("sd3")
    longest = adapter.most_tokens * adapter.unit
    all_of_them = buckets(adapter, replace(sampling, height=longest, width=longest))
    assert [(size.height, size.width) for size in all_of_them] == [(longest, longest)]
    small = replace(sampling, height=longest // 2, width=longest // 2)
    square = buckets(adapter, small, fits=lambda sizes: sizes.height == sizes.width)
    assert len(square) == 1 < len(buckets(adapter, small))


def test_a_group_has_the_bucket_of_most_members_or_of_the_first():
    adapter, sampling = sized()
    sizes = buckets(adapter, sampling)

    def ratio(*shapes):
        size = bucket_of(group(*shapes), sizes)
        return size.width / size.height

    assert ratio((500, 500), (64, 64)) == 1
    assert ratio((300, 400), (500, 500)) == pytest.approx(4 / 3, abs=0.05), "the first, which is the chosen one"
    assert ratio((500, 500), (300, 400)) == 1
    assert ratio((500, 500), (300, 400), (600, 800)) == pytest.approx(4 / 3, abs=0.05)
    assert ratio((90, 3000), (90, 3000)) == pytest.approx(16 / 9, abs=0.05)


def test_what_is_printed_at_the_start():
    adapter, sampling = sized()
    groups = [
        group((1024, 1024), (1100, 1024)),
        group((90, 3000), (1024, 1024), line=2),
        group((1200, 900), (1200, 900)),
    ]
    lines = describe(groups, buckets(adapter, sampling))
    assert lines[0].startswith("height × width: 1024 × 1024: 1 groups, ") and lines[0].count("groups") == 3
    assert lines[1] == "1 samples lose more than half of their pixels by the crop; first: pairs.jsonl, line 2"
    assert lines[2] == "1 samples are enlarged more than twice; first: pairs.jsonl, line 2"


def test_images_are_cropped_in_the_middle(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    place = StoredMedia(str(tmp_path / "a.png"))
    want = image.resize((32, 32), Image.Resampling.LANCZOS, box=(16, 0, 64, 48))
    assert np.array_equal(Fitted(place, 32, 32).pixels(), np.asarray(want))
    want = image.resize((32, 16), Image.Resampling.LANCZOS, box=(0, 4, 80, 44))
    assert np.array_equal(Fitted(place, 16, 32).pixels(), np.asarray(want))
    assert np.array_equal(Fitted(place, 48, 80).pixels(), np.asarray(image)), "untouched at its own size"


@pytest.mark.parametrize(
    ("count", "own", "frames", "rate", "want"),
    [
        (9, 16.0, 5, 16.0, [0, 1, 2, 3, 4]),
        (5, 16.0, 5, 16.0, [0, 1, 2, 3, 4]),
        (4, 16.0, 5, 16.0, None),
        (9, None, 5, 16.0, [0, 1, 2, 3, 4]),
        (9, 30.0, 5, 15.0, [0, 2, 4, 6, 8]),
        (9, 24.0, 5, 16.0, [0, 1, 3, 4, 6]),
        (4, 8.0, 5, 16.0, [0, 0, 1, 1, 2]),
        (150, 30.0, 81, 16.0, [int(k * 30 / 16) for k in range(80)] + [149]),
        (149, 30.0, 81, 16.0, None),
        (1, 16.0, 5, 16.0, None),
    ],
)
def test_frames_of_a_clip_by_the_familys_rate(count, own, frames, rate, want):
    assert chosen_frames(Shape(8, 8, count, own), frames, rate) == want


def test_clips_are_cut_to_the_familys_frames(tmp_path):
    clip = np.repeat(np.arange(0, 240, 20, dtype=np.uint8), 16 * 16 * 3).reshape(12, 16, 16, 3)
    imageio.imwrite(tmp_path / "a.gif", clip, duration=1000 / 20, loop=0)  # 20 frames per second
    place = StoredMedia(str(tmp_path / "a.gif"))
    pixels = Fitted(place, 8, 8, frames=5, rate=10.0).pixels()
    assert pixels.shape == (5, 8, 8, 3) and pixels[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160]
    assert Fitted(place, 8, 8, frames=1).pixels().shape == (8, 8, 3)


def test_what_a_family_cannot_learn_from_is_named():
    adapter, sampling = sized("wan")
    good = group((32, 32, 5, 16.0), (32, 32, 9, None))
    check_samples([good], adapter, sampling)
    bad = [good, group((8, 8), (8, 8), line=2), group((8, 8, 1, 16.0), (8, 8, 5, 16.0), line=3)]
    with pytest.raises(DataError) as error:
        check_samples(bad, adapter, sampling)
    text = str(error.value)
    assert "pairs.jsonl: 2 line(s) cannot be used" in text and "line 2: x1 is an image, expected a clip of 5" in text
    assert "line 3: x0 is too short: expected 5 frames at 16 per second, got 1 at 16" in text
    check_samples([group((8, 8), (8, 8)), group((8, 8, 1), (8, 8, 1))], adapter, replace(sampling, frames=1))
    adapter, sampling = sized()
    with pytest.raises(DataError, match="line 1: x0 is a clip of 2 frames, expected an image"):
        check_samples([group((8, 8, 2), (8, 8))], adapter, sampling)
    adapter, sampling = sized("ltx2")
    with pytest.raises(DataError, match="LTX2 makes clips with sound"):
        check_samples([good], adapter, sampling)


@pytest.mark.parametrize("family", ["sd3", "wan22"])
def test_latents_are_encoded_once_and_read_again_bit_by_bit(family, tmp_path, monkeypatch):
    case = case_of(family)
    adapter = load(case)
    sampling = case.sampling()
    clip = family == "wan22"
    file = tmp_path / ("a.gif" if clip else "a.png")
    pixels = np.random.default_rng(1).integers(0, 256, (5, 40, 48, 3) if clip else (40, 48, 3), dtype=np.uint8)
    imageio.imwrite(file, pixels, **({"duration": 1000 / 16} if clip else {}))
    own = replace(group(Shape(40, 48)), samples=(StoredMedia(str(file)),))
    (entry,) = fitted(own, adapter, sampling)
    kept = cache(case, tmp_path / "cache")
    (first,) = kept.latents(adapter, [entry])
    assert tuple(first.shape) == adapter.latent_shape(sampling)
    assert torch.equal(first, adapter.encode_media(entry.sample.pixels()))
    kept.flush()
    assert cache(case, tmp_path / "cache").absent([entry]) == []
    wide = replace(sampling, width=2 * sampling.width)
    other = fitted(own, adapter, wide)
    model = kept.model
    keys = {entry.key(model), other[0].key(model), Entry(None).key(model), entry.key(model + "\0tiled")}
    assert len(keys) == 4, "a size, and a way to encode, of its own"
    monkeypatch.setattr(type(adapter), "encode_media", None)
    (again,) = cache(case, tmp_path / "cache").latents(adapter, [entry])
    assert torch.equal(again, first), "without the VAE"
    imageio.imwrite(file, pixels[:, ::-1], **({"duration": 1000 / 16} if clip else {}))
    assert cache(case, tmp_path / "cache").absent([entry]) == [entry], "the file has changed"


def test_edits_have_their_sources_in_the_groups_bucket(tmp_path):
    """An image inside parquet is encoded like a file of it; the model's outline says what there is to encode."""
    rng = np.random.default_rng(2)
    for name in ("a", "b", "s"):
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    row = {"prompt": "red", "chosen": "a.png", "rejected": "b.png"}
    inside = {"source_image": [{"bytes": (tmp_path / "s.png").read_bytes(), "path": None}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row | inside]), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text(json.dumps(row | {"source_image": "s.png"}))
    case = case_of("flux_kontext")
    outline = type(load(case)).outline(Path(folder("flux_kontext")))
    sampling = replace(case.sampling(), height=64, width=64)
    kept = cache(case)
    found = []
    for file in ("p.parquet", "p.jsonl"):
        (own,) = read_pairs(tmp_path / file)
        sizes = buckets(outline, sampling)
        size = bucket_of(own, sizes)
        assert (size.height, size.width) == (52, 80)
        entries = pair_entries([own, own], outline, sizes)
        assert len(entries) == 4, "two samples, a text and its source"
        encoded = kept.get(load(case), entries)
        (condition,) = kept(load(case), [own.prompt], size)
        assert torch.equal(condition.sources[0], encoded[entries[3]]["0"])
        found.append(condition.sources[0])
    assert torch.equal(*found) and tuple(found[0].shape[:2]) == outline.grid(size)
