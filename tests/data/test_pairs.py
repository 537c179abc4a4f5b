"""Tables of preferences: every format by its published columns, and what real files contain: ties, missing and broken
files, unusual image modes, contradicting labels, repetitions.

Expected pixels are computed with numpy or come from Pillow's own conversions; expected matrices are written out.
"""

import csv
import io
import json

import imageio.v3 as imageio
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from prefgrpo.data import stored
from prefgrpo.data.pairs import read_pairs, summary
from prefgrpo.data.stored import Shape, StoredMedia
from prefgrpo.data.tables import DataError

NAN = float("nan")
FIRST = [[NAN, 1], [0, NAN]]
SECOND = [[NAN, 0], [1, NAN]]
TIE = [[NAN, 0.5], [0.5, NAN]]


def picture(seed, height=24, width=40):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(seed, **size):
    buffer = io.BytesIO()
    picture(seed, **size).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Images a.png … e.png, and clip.mp4 of 6 frames."""
    for seed, name in enumerate("abcde"):
        picture(seed).save(tmp_path / f"{name}.png")
    imageio.imwrite(tmp_path / "clip.mp4", np.zeros((6, 32, 48, 3), np.uint8), fps=8)
    return tmp_path


def table(folder, rows, ending="jsonl"):
    file = folder / f"pairs.{ending}"
    if ending == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == "json":
        file.write_text(json.dumps(rows))
    elif ending == "csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    return file


def refused(file):
    """Line → reason of the rows that a file is refused for."""
    with pytest.raises(DataError) as error:
        read_pairs(file)
    head, *lines = str(error.value).splitlines()
    assert f"{len(lines)} line(s) cannot be used" in head
    parts = [line.strip().removeprefix("line ").split(": ", 1) for line in lines]
    return {int(number): reason for number, reason in parts}


PAIR = {"prompt": "a cube", "chosen": "a.png", "rejected": "b.png"}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_chosen_and_rejected(folder, ending):
    rows = [PAIR | {"negative_prompt": "dark"}, PAIR | {"prompt": "two", "rejected": "c.png", "negative_prompt": "x"}]
    first, second = read_pairs(table(folder, rows, ending))
    assert (first.prompt.text, first.prompt.negative, first.prompt.id) == ("a cube", "dark", 0)
    assert [sample.file for sample in second.samples] == [str(folder / "a.png"), str(folder / "c.png")]
    np.testing.assert_array_equal(first.wins, FIRST)
    np.testing.assert_array_equal(first.counts, [[0, 1], [1, 0]])
    assert first.weight == 1 and first.shapes == (Shape(24, 40),) * 2
    assert second.where == f"{folder / f'pairs.{ending}'}, line {3 if ending == 'csv' else 2}"
    assert np.array_equal(first.samples[1].read().pixels, np.asarray(picture(1)))


def test_probability_and_weight(folder):
    rows = [PAIR | {"probability": 0.8, "weight": 3}, PAIR | {"probability": 0.5}, PAIR | {"probability": "0.25"}]
    groups = read_pairs(table(folder, rows))
    assert [group.wins[0, 1] for group in groups] == [0.8, 0.5, 0.25] and groups[0].weight == 3
    assert [group.wins[1, 0] for group in groups] == [1 - 0.8, 0.5, 0.75]
    bad = [{"probability": 1.5}, {"probability": "high"}, {"weight": 0}, {"weight": -1}, {"weight": "nan"}]
    reasons = refused(table(folder, [PAIR | one for one in bad]))
    assert reasons[1] == "probability: expected 0 … 1, got 1.5" and "expected a number, got 'high'" in reasons[2]
    assert all("weight: expected a number above 0" in reasons[line] for line in (3, 4, 5))


def test_sources_of_edits_and_clips(folder):
    rows = [PAIR | {"source_image": "c.png"}, PAIR | {"source_image": ["c.png", "d.png"]}]
    one, two = read_pairs(table(folder, rows))
    assert one.prompt.source == (str(folder / "c.png"),) and len(two.prompt.source) == 2
    imageio.imwrite(folder / "other.gif", np.random.default_rng(0).integers(0, 256, (3, 24, 40, 3), dtype=np.uint8))
    (clips,) = read_pairs(table(folder, [PAIR | {"chosen": "clip.mp4", "rejected": "other.gif"}]))
    assert clips.shapes[0] == Shape(32, 48, 6, 8.0) and clips.shapes[1][:3] == (24, 40, 3)
    reasons = refused(table(folder, [PAIR | {"chosen": "clip.mp4"}, PAIR | {"source_image": "no.png"}]))
    assert reasons == {1: "expected images or clips, got both", 2: "source image not found: no.png"}


def test_pick_a_pic(folder):
    """The columns of yuvalkirstain/pickapic_v2; each row's images are bytes, of which a row group holds two rows."""
    labels = [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (1.0, 0.0), (0.5, 0.5)]
    rows = [
        {"are_different": k != 4, "best_image_uid": "x", "caption": f"prompt {k}", "has_label": k != 3}
        | {"jpg_0": png(2 * k), "jpg_1": png(2 * k + 1), "label_0": one, "label_1": other, "ranking_id": k}
        for k, (one, other) in enumerate(labels)
    ]
    file = table(folder, rows, "parquet")
    with pytest.warns(UserWarning, match=r"left out 2 rows .*: 4, 5"):
        groups = read_pairs(file)
    for group, wins in zip(groups, (FIRST, SECOND, TIE), strict=True):
        np.testing.assert_array_equal(group.wins, wins)
    assert [group.prompt.text for group in groups] == ["prompt 0", "prompt 1", "prompt 2"]
    for k, group in enumerate(groups):
        for m, sample in enumerate(group.samples):
            assert np.array_equal(sample.read().pixels, np.asarray(picture(2 * k + m))), "of its own row group"
    assert summary(groups) == "3 groups of 3 prompts, 3 judged pairs, 1 ties"


def test_pick_a_pic_rows_that_contradict_themselves(folder):
    row = {"caption": "p", "jpg_0": png(0), "jpg_1": png(1), "label_0": 1.0, "label_1": 0.0}
    changes = [{"label_0": 0.0}, {"label_1": 1.0}, {"label_0": None}, {"caption": ""}, {"caption": " "}]
    changes += [{"jpg_1": b""}, {"jpg_1": png(1)[:-200]}, {"jpg_1": None}, {"jpg_1": png(0)}]
    reasons = refused(table(folder, [row | change for change in changes], "parquet"))
    assert reasons[1] == "label_0 and label_1: expected 1 and 0, 0 and 1, or .5 and .5, got 0 and 0"
    assert reasons[2].endswith("got 1 and 1") and "no pair: expected the columns" in reasons[3]
    assert all("no prompt" in reasons[line] for line in (4, 5))
    assert all("jpg_1" in reasons[line] for line in (6, 7)) and "no pair" in reasons[8]
    assert "is the same as another image" in reasons[9]


def test_hpd_v2(folder):
    train = {"prompt": "p", "file_path": ["a.png", "b.png"], "human_preference": [0, 1]}
    several = train | {"file_path": ["a.png", "b.png", "c.png"], "human_preference": [1, 0, 0]}
    test = {"prompt": "p", "image_path": ["a.png", "b.png", "c.png"], "rank": [2, 1, 2]}
    people = [{"rank": [1, 2, 3], "user_hash": "u"}, {"rank": [2, 1, 3], "user_hash": "v"}]
    one, two, ranked, raw = read_pairs(
        table(folder, [train, several, test, test | {"raw_annotations": people}], "json")
    )
    np.testing.assert_array_equal(one.wins, SECOND)
    np.testing.assert_array_equal(two.wins, [[NAN, 1, 1], [0, NAN, NAN], [0, NAN, NAN]])
    np.testing.assert_array_equal(two.counts, [[0, 1, 1], [1, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(ranked.wins, [[NAN, 0, 0.5], [1, NAN, 1], [0.5, 0, NAN]])
    np.testing.assert_array_equal(raw.wins, [[NAN, 0.5, 1], [0.5, NAN, 1], [0, 0, NAN]])
    np.testing.assert_array_equal(raw.counts, 2 * (1 - np.eye(3)))
    bad = [train | {"human_preference": [0, 0]}, train | {"human_preference": [1]}, train | {"file_path": ["a.png"]}]
    bad += [test | {"rank": [1, 2, None]}, test | {"image_path": ["a.png", "a.png", "c.png"]}]
    reasons = refused(table(folder, bad))
    assert "no image is preferred" in reasons[1] and "expected a list of 2 numbers" in reasons[2]
    assert "at least two images" in reasons[3] and "expected a number, got None" in reasons[4]
    assert reasons[5] == f"{folder / 'a.png'} is the same as another image or clip of the row"


def test_hpd_v3(folder):
    row = {"prompt": "p", "path1": "b.png", "path2": "a.png", "model1": "x", "model2": "y", "confidence": 0.9}
    (group,) = read_pairs(table(folder, [row], "json"))
    np.testing.assert_array_equal(group.wins, FIRST)
    assert [sample.file[-5:] for sample in group.samples] == ["b.png", "a.png"]
    assert group.prompt.meta == {"model1": "x", "model2": "y", "confidence": 0.9}


def test_choices_of_people(folder):
    """The file of `prefgrpo judge check --pairs`."""
    rows = [{"prompt": "p", "image_a": "a.png", "image_b": "b.png", "choice": c} for c in ("a", "B", "tie", "neither")]
    groups = read_pairs(table(folder, rows[:3], "csv"))
    for group, wins in zip(groups, (FIRST, SECOND, TIE), strict=True):
        np.testing.assert_array_equal(group.wins, wins)
    assert refused(table(folder, rows)) == {4: "choice: expected one of a, b, tie, got 'neither'"}


@pytest.mark.parametrize("column", ["samples", "images"])
def test_a_win_matrix(folder, column):
    wins = [[None, 0.75, None], [0.25, None, 0.5], [None, None, None]]
    row = {"prompt": "p", column: ["a.png", "b.png", "c.png"], "wins": wins}
    counted = row | {"counts": [[0, 4, 0], [4, 0, 2], [0, 2, 0]]}
    plain, with_counts = read_pairs(table(folder, [row, counted]))
    np.testing.assert_array_equal(plain.wins, [[NAN, 0.75, NAN], [0.25, NAN, 0.5], [NAN, 0.5, NAN]])
    np.testing.assert_array_equal(plain.counts, [[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    np.testing.assert_array_equal(with_counts.counts, [[0, 4, 0], [4, 0, 2], [0, 2, 0]])
    empty = [[None] * 3] * 3
    sums = [[None, 3, None], [1, None, None], [None, None, None]]
    unequal = [[None, 0.75, None], [0.75, None, None], [None, None, None]]
    bad = [{"wins": [[0, 1], [1, 0]]}, {"wins": empty}, {"wins": sums}, {"wins": unequal}, {"counts": empty}]
    reasons = refused(table(folder, [row | one for one in bad]))
    assert "3 lists of 3 numbers" in reasons[1] and "no image is preferred" in reasons[2]
    assert "probabilities from 0 to 1" in reasons[3] and "sum to 1" in reasons[4] and "counts" in reasons[5]


def test_images_as_hugging_face_writes_them(folder):
    """Structs {bytes, path} and lists of them, in sources as well; without bytes, the path counts."""
    struct = {"bytes": png(7), "path": None}
    rows = [
        {"prompt": "p", "chosen": struct, "rejected": {"bytes": None, "path": "a.png"}, "source_image": [struct]},
        {"prompt": "q", "chosen": {"bytes": png(8), "path": "8.png"}, "rejected": struct, "source_image": [struct]},
        {"prompt": "r", "chosen": {"bytes": None, "path": "no.png"}, "rejected": struct, "source_image": [struct]},
    ]
    assert refused(table(folder, rows, "parquet")) == {3: "file not found: no.png"}
    first, second = read_pairs(table(folder, rows[:2], "parquet"))
    assert first.samples[1] == StoredMedia(str(folder / "a.png"))
    assert np.array_equal(second.samples[0].read().pixels, np.asarray(picture(8)))
    assert np.array_equal(np.asarray(second.prompt.images()[0]), np.asarray(picture(7)))
    assert second.prompt.source[0] != first.prompt.source[0], "each is where it lies"


def test_a_list_of_images_in_parquet(folder):
    """Also in a column whose name is read as another one, by row groups of two rows."""
    rows = [
        {"Prompt": f"p{k}", "images": [{"bytes": png(10 * k + m), "path": None} for m in range(3)], "rank": [1, 2, 3]}
        for k in range(3)
    ]
    for k, group in enumerate(read_pairs(table(folder, rows, "parquet"))):
        assert group.prompt.text == f"p{k}"
        for m, sample in enumerate(group.samples):
            assert np.array_equal(sample.read().pixels, np.asarray(picture(10 * k + m)))


def test_pixels_are_upright_srgb_on_white(folder, monkeypatch):
    """What files hold besides 8-bit RGB; the shapes that buckets are chosen by are those of the pixels."""
    image = picture(3)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "turned.png", exif=exif)
    grey = np.arange(24 * 40, dtype=np.uint16).reshape(24, 40) * 60
    Image.fromarray(grey).save(folder / "deep.png")
    image.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    palette = image.quantize(16)
    palette.info["transparency"] = 0
    palette.save(folder / "palette.png", transparency=0)
    names = ["turned.png", "deep.png", "cmyk.jpg", "palette.png"]
    rows = [{"prompt": "p", "samples": names, "rank": [1, 2, 3, 4]}]
    for decode in (True, False):
        (group,) = read_pairs(table(folder, rows), decode=decode)
        assert group.shapes == (Shape(40, 24), Shape(24, 40), Shape(24, 40), Shape(24, 40))
    pixels = [sample.read().pixels for sample in group.samples]
    turned, deep, cmyk, transparent = pixels
    assert np.array_equal(turned, np.rot90(np.asarray(image), -1))
    assert np.array_equal(deep, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2))
    assert np.abs(cmyk.astype(int) - np.asarray(image)).mean() < 20, "a lossy JPEG"
    seen = np.asarray(palette) == 0
    assert seen.any() and (transparent[seen] == 255).all()
    assert all(pixels.dtype == np.uint8 and pixels.shape[2] == 3 for pixels in (turned, deep, cmyk, transparent))


def test_files_that_are_missing_or_broken(folder):
    (folder / "text.png").write_text("no image")
    (folder / "cut.png").write_bytes(png(0)[:-200])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "copy.png").write_bytes((folder / "a.png").read_bytes())
    rejected = ["no.png", "text.png", "cut.png", "empty.mp4", "", "a.png", "copy.png", 5, "https://x.y/z.png"]
    reasons = refused(table(folder, [PAIR | {"rejected": name} for name in rejected]))
    assert list(reasons) == list(range(1, 10))
    assert reasons[1] == "file not found: no.png" and "text.png" in reasons[2] and "cut.png" in reasons[3]
    assert "empty.mp4 cannot be read (it is empty: 0 bytes)" in reasons[4]
    assert reasons[5].startswith("expected the path of an image or clip") and reasons[8].endswith("got 5")
    assert reasons[6] == f"{folder / 'a.png'} is the same as another image or clip of the row"
    assert reasons[7] == f"{folder / 'copy.png'} is the same as another image or clip of the row"
    with pytest.raises(DataError, match=r"13 line\(s\).*\n.*\n(.*\n)*  and lines 11, 12, 13"):
        read_pairs(table(folder, [PAIR | {"chosen": "no.png"}] * 13))


def test_files_that_hold_no_pairs(folder):
    with pytest.raises(DataError, match="not found; expected a table of pairs"):
        read_pairs(folder / "no.jsonl")
    with pytest.raises(DataError, match="expected at least one judged pair"):
        read_pairs(table(folder, []))
    assert "no pair: expected the columns chosen, rejected; jpg_0" in refused(table(folder, [{"prompt": "p"}]))[1]


def test_the_same_pair_twice_is_two_judgements(folder):
    groups = read_pairs(table(folder, [PAIR, PAIR | {"chosen": "b.png", "rejected": "a.png"}, PAIR]))
    assert len(groups) == 3 and len({group.identity for group in groups}) == 1
    line = "3 groups of 1 prompts, 3 judged pairs, 0 ties; 2 groups are repetitions, which all count"
    assert summary(groups) == line


def test_clips_need_their_reader(folder, monkeypatch):
    monkeypatch.setattr(stored, "find_spec", lambda name: None)
    reasons = refused(table(folder, [PAIR | {"chosen": "clip.mp4", "rejected": "clip.mp4"}]))
    assert "pip install imageio-ffmpeg" in reasons[1]
