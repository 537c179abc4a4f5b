"""Prompts: files as users and benchmarks provide them, edits with source images, and which prompts a step uses.

Why these cases: files come from Windows or a spreadsheet, with a byte-order mark or a Latin-1 line in the middle;
UniGenBench's csv has quotes, commas and JSON inside a cell, GenEval's jsonl has metadata that a reward needs, an edit
list may name missing images; a bad line must be reported with its number; and the prompts of a step must not depend on
earlier steps, the number of ranks, or chance.
"""

import json
import struct
import zlib
from collections import Counter
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from prefgrpo.data.prompts import DataError, read_prompts, read_source, step_prompts
from prefgrpo.data.stored import read_media
from prefgrpo.parallel.world import World
from prefgrpo.run.source import open_prompts


def written(file, rows):
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows) + "\n")
    return file


META = {"sub_dims_en": '{"a": 1}', "index": "7"}
GENEVAL = {"tag": "counting", "include": [{"class": "cup", "count": 2}]}
READ = {
    "byte-order mark, Windows' line ends, blanks, duplicates": (
        "p.txt", '\ufeffa cat\r\n\r\n  a dog \r\na cat\r\n家 🐈 {x} "q"', ["a cat", "a dog", '家 🐈 {x} "q"'],
    ),
    "a prompt ends at a newline, not at a Unicode line separator": (
        "p.txt", "one\u2028still one\x0cstill one\n", ["one\u2028still one\x0cstill one"],
    ),
    "any spelling of a header": (
        "p.csv", "\ufeff Prompts ,n\none,1\ntwo,2\n,\none,1\n", [("one", {"n": "1"}), ("two", {"n": "2"})],
    ),
    "quoted headers": ("p.csv", '"PROMPT";"n"\n"one";1\n"two";2\n', [("one", {"n": "1"}), ("two", {"n": "2"})]),
    "any spelling of a key": (
        "p.jsonl", '{"Prompt": "one"}\n\n{" prompt ": "two", "n": 2}\n{"prompts": "one"}', ["one", ("two", {"n": 2})],
    ),
    "a list": ("p.json", '["one", {"Prompts": "two"}, "two"]', ["one", "two"]),
    "UniGenBench: quotes, commas, line ends and JSON in a cell": (
        "p.csv", 'index,prompt_en,sub_dims_en\r\n7,"two ""pandas"",\nin suits","{""a"": 1}"\r\n',
        [('two "pandas",\nin suits', META)],
    ),
    "semicolons, in locales with decimal commas": (
        "p.csv", 'id;prompt\n1;a cat, asleep\n1;"two; ""dogs"""\n',
        [("a cat, asleep", {"id": "1"}), ('two; "dogs"', {"id": "1"})],
    ),
    "tabs, from copied cells": ("p.tsv", "id\tprompt\n1\ta cat, asleep\n", [("a cat, asleep", {"id": "1"})]),
    "tabs, though the only header has none": ("p.tsv", "prompt\na cat, asleep\n", ["a cat, asleep"]),
    "tabs under another ending": ("p.csv", "id\tprompt\n1\ta cat, asleep\n", [("a cat, asleep", {"id": "1"})]),
    "byte-order marks and characters without width at the edges, but not inside": (
        "p.txt", "\u200b\ufeff one\u200b \n\ufefftwo\n \u200b\n\u2060\r\nو\u200cا\n", ["one", "two", "و\u200cا"],
    ),
    "joined csv files, each with a header": (
        "p.csv", '\ufeff"prompt",\u200bn\none,\ufeff1\u200b\n\ufeff"prompt",\u200bn\n\u200b,\ntwo,2\n',
        [("one", {"n": "1"}), ("two", {"n": "2"})],
    ),
    "joined csv files whose headers differ in case and in a plural": (
        "p.csv", "Index,prompt\n1,one\nindex,Prompts\n2,two\nINDEX, PROMPT\n3,three\n",
        [("one", {"Index": "1"}), ("two", {"Index": "2"}), ("three", {"Index": "3"})],
    ),
    "lines that show nothing: soft hyphens and marks of direction": (
        "p.txt", "\u00ad\none\u00ad\n\u00ad \u00ad\n\u202a\u202c\u2066\ntwo\u00ad parts\n", ["one", "two\u00ad parts"],
    ),
    "joined jsonl files": (
        "p.jsonl", '{"prompt": "one\u200b"}\n\ufeff{"\ufeffprompt": "two"}\u200b\n\ufeff\n', ["one", "two"],
    ),
    "a table whose first column has no name": (
        "p.tsv", "\tprompt\n0\tone\n", ["one"],
    ),
    "GenEval's metadata": ("p.jsonl", json.dumps(GENEVAL | {"prompt": "two cups"}), [("two cups", GENEVAL)]),
}  # fmt: skip
"""What a file is like → name, content, and the prompts read, with their other columns if there are any."""


@pytest.mark.parametrize("case", READ)
def test_files_as_people_have_them(tmp_path, case, recwarn):
    name, content, expected = READ[case]
    (tmp_path / name).write_bytes(content.encode())
    wanted = [(one, {}) if isinstance(one, str) else one for one in expected]
    found = read_prompts(tmp_path / name)
    assert [(p.text, p.meta) for p in found] == wanted and [p.id for p in found] == [*range(len(wanted))]
    assert not found[0].source and found[0].images() == () and not recwarn


def test_a_repeated_prompt_with_other_columns_is_told_of(tmp_path):
    file = written(tmp_path / "p.csv", ["index,prompt_en", "7,a dog", "8,家 🐈", "9,家 🐈"])
    with pytest.warns(UserWarning, match="left out lines with an earlier prompt but other columns: 4"):
        assert [p.meta["index"] for p in read_prompts(file)] == ["7", "8"]
    assert [p.meta["index"] for p in read_prompts(file, unique=False)] == ["7", "8", "9"]


REFUSED = [
    ("p.txt", b"\n \n\t\r\n", ["p.txt contains no prompt, only blank lines"]),
    ("p.txt", b"fine\ncaf\xe9\nfine too\n\xff\n", ["line 2: not valid UTF-8; re-save the file as UTF-8"]),
    ("p.txt", b"fine\na\0b\n", ["line 2: the prompt contains a NUL character"]),
    ("p.json", b'["a", {"prompt": "b"}, 3]', ["line 3: expected an object, got int"]),
    ("p.json", b'{"prompt": "a"}', ["expected a list of prompts or of objects, got dict"]),
    ("p.json", b"[", ["is not JSON"]),
    ("p.xlsx", b"[]", ["expected a file that ends in .txt, .csv, .tsv, .jsonl, .json, .parquet"]),
    ("p.csv", b"a,b\n1,2", ["line 2: no prompt (expected one of the columns instruction, prompt,", "got a, b)"]),
    ("p.csv", b"id,prompt\n1,one\nPrompt,ID\ntwo,2\n", [
        "line 3: a header again, in another order: id, prompt, then prompt, id",
    ]),
    ("p.txt", "\u00ad\n \u00ad\u200b\n".encode(), ["p.txt contains no prompt, only blank lines"]),
    ("p.jsonl", '{"prompt": "a"}\n{"prompt": "\u00ad"}'.encode(), ["1 line(s) cannot be used", "line 2: no prompt"]),
    ("p.csv", b"id;prompt\n1;a cat; asleep", ["line 2: more cells than columns; quote cells that contain ';'"]),
    ("p.csv", b'index,prompt\n0,a dog\n\n4,"never closed\n5,x', ["line 5: unexpected end of data (is a quote"]),
    ("p.jsonl", b'{"prompt": "fine"}\n{oops', ["line 2: not JSON"]),
    ("p.jsonl", b'{"prompt": "fine"}\n{"prompt": "  "}\n{"caption": "fine too"}\n{"prompt": 3}', [
        "2 line(s) cannot be used", "line 2: no prompt", "line 4: no prompt",
    ]),
    ("p.jsonl", b'{"prompt": "fine"}\n' + b'{"n": ' * 100_000, ["line 2: not JSON"]),
    ("p.json", b"[" * 100_000, ["is not JSON"]),
    ("p.jsonl", b'{"prompt": "a", "negative_prompt": ["blurry"]}\n{"prompt": "b", "negative_prompt": null}', [
        "1 line(s) cannot be used", "line 1: negative_prompt: expected text, got ['blurry']",
    ]),
    ("p.parquet", b"nothing", ["is not a readable parquet file"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "messages"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_cannot_be_used_is_refused_with_all_its_lines(tmp_path, name, content, messages):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_prompts(tmp_path / name)
    assert all(message in str(caught.value) for message in messages), caught.value


def test_one_process_decodes_the_source_images(tmp_path):
    """The others read the same prompts without them: 512 processes would read every file 512 times."""
    (tmp_path / "a.png").write_bytes(b"no image")
    file = written(tmp_path / "e.jsonl", [{"prompt": "make it blue", "source_image": "a.png"}])
    with pytest.raises(DataError, match=r"line 1: source image .*a.png"):
        open_prompts(partial(read_prompts, file), World(0, 1, torch.device("cpu")))
    other = mock.Mock(on_main=lambda work, failure: None)
    assert [p.text for p in open_prompts(partial(read_prompts, file), other)] == ["make it blue"]


def test_edits_have_their_sources(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("a.png", "images/b.png"):
        Image.new("RGBA", (8, 6), (255, 0, 0, 255)).save(tmp_path / name)
    edits = [
        {"instruction": "make it blue", "source_image": "a.png", "target_image": "t.png", "prompt": "red"},
        {"instruction": "make it blue", "image": "b.png"},
        {"instruction": "make it blue", "source_image": str(tmp_path / "a.png")},
    ]
    found = read_prompts(written(tmp_path / "e.jsonl", edits))
    assert [p.text for p in found] == ["make it blue"] * 2, "groups are (prompt, source); row 3 repeats row 1"
    assert [p.source[0].split("/")[-1] for p in found] == ["a.png", "b.png"] and [p.line for p in found] == [1, 2]
    assert found[0].meta == {"target_image": "t.png", "prompt": "red"}
    assert found[1].images()[0].mode == "RGB" and found[1].images()[0].size == (8, 6)
    both = {"instruction": "join them", "source_image": ["a.png", "b.png"]}
    (several,) = read_prompts(written(tmp_path / "g.jsonl", [both, both]))
    assert [p.split("/")[-1] for p in several.source] == ["a.png", "b.png"] and len(several.images()) == 2
    with pytest.raises(DataError, match=r"line 1: source image not found: c\.png"):
        read_prompts(written(tmp_path / "g.jsonl", [both | {"source_image": ["a.png", "c.png"]}]))
    gone = [edits[0], {"instruction": "x", "image": "gone.png"}, {"instruction": "y", "source_image": "also/gone.png"}]
    with pytest.raises(DataError) as caught:
        read_prompts(written(tmp_path / "f.jsonl", gone))
    assert "line 2: source image not found: gone.png" in str(caught.value)
    assert "line 3: source image not found: also/gone.png" in str(caught.value)


def test_sources_that_are_no_whole_images_are_told_before_anything_runs(tmp_path):
    Image.radial_gradient("L").save(tmp_path / "a.png")
    Image.radial_gradient("L").save(tmp_path / "a.jpg")
    for name in ("a.png", "a.jpg"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / f"cut_{name}").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "no.png").write_bytes(b"no image")
    (tmp_path / "empty.png").write_bytes(b"")
    sources = ["a.png", "no.png", "a.jpg", "cut_a.png", "cut_a.jpg", "empty.png", 5, ["a.png", ""], [], None]
    rows = [{"instruction": "x", "source_image": source} for source in sources]
    with pytest.raises(DataError) as caught:
        read_prompts(written(tmp_path / "e.jsonl", ["", *rows]))
    message = str(caught.value)
    assert "6 line(s) cannot be used" in message
    for number, name in ((3, "no.png"), (5, "cut_a.png"), (6, "cut_a.jpg"), (7, "empty.png")):
        assert f"line {number}: source image {tmp_path / name}: " in message
    for number in (8, 9):
        assert f"line {number}: source_image: expected a path or a list of paths, got " in message


def test_a_source_is_what_a_viewer_shows(tmp_path):
    """EXIF orientation, 16-bit channels (a plain conversion turns them white), and transparency on white."""
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (20, 10), "red").save(tmp_path / "a.jpg", exif=turned)
    Image.fromarray(np.full((4, 6), 0x8000, np.uint16)).save(tmp_path / "b.png")
    hidden = np.array([[[255, 0, 0, 0], [255, 0, 0, 127]]], np.uint8)
    Image.fromarray(hidden).save(tmp_path / "c.png")
    rows = [{"instruction": "x", "source_image": name} for name in ("a.jpg", "b.png", "c.png")]
    upright, grey, clear = (p.images()[0] for p in read_prompts(written(tmp_path / "e.jsonl", rows)))
    assert upright.size == (10, 20) and grey.getpixel((0, 0)) == (128, 128, 128)
    assert clear.getpixel((0, 0)) == (255, 255, 255) and clear.getpixel((1, 0)) == (255, 128, 128)


D50 = {
    "sRGB": [[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]],
    "Display P3": [[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]],
    "Adobe RGB": [[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]],
}
"""Colourants (columns R, G, B) of profiles, from their specifications, adapted to D50."""


def icc(space, colourants, gamma):
    """A profile of version 2: `space` RGB with these colourants, or GRAY; the response is one power."""
    tags = {b"wtpt": b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061)}
    curve = b"curv\0\0\0\0" + struct.pack(">IH2x", 1, round(gamma * 256))
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC") if space == b"RGB " else (b"kTRC",), curve)
    for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), np.transpose(colourants) if colourants else (), strict=False):
        tags[name] = b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(v * 65536) for v in column))
    start = 132 + 12 * len(tags)
    table = b"".join(struct.pack(">4sII", tag, start + 20 * k, len(tags[tag])) for k, tag in enumerate(tags))
    data = b"".join(content.ljust(20, b"\0") for content in tags.values())
    head = struct.pack(">I4xI4s4s4s12x4s28x3i", start + len(data), 0x02400000, b"mntr", space, b"XYZ ", b"acsp",
                       63190, 65536, 54061)  # fmt: skip
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + data


def in_srgb(pixels, colourants, gamma):
    """The formula of the specifications, fp64."""
    linear = (np.asarray(pixels) / 255) ** gamma
    if colourants:
        linear = linear @ np.transpose(colourants) @ np.linalg.inv(np.transpose(D50["sRGB"]))
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("name", ["Display P3", "Adobe RGB", "grey"])
def test_an_icc_profile_is_applied(tmp_path, name):
    """For prompts' sources and scored files alike, also beneath transparency."""
    grey = name == "grey"
    gamma = 1.5 if grey else 2.2
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8) if grey else (8, 8, 3), np.uint8)
    profile = icc(b"GRAY" if grey else b"RGB ", D50.get(name), gamma)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a.png", icc_profile=profile)
    image.putalpha(255)
    image.save(tmp_path / "b.png", icc_profile=profile)
    wanted = in_srgb(pixels, D50.get(name), gamma)
    wanted = wanted[..., None] if grey else wanted
    for file in ("a.png", "b.png"):
        for found in (np.asarray(read_source(str(tmp_path / file))), read_media(tmp_path / file).pixels):
            assert np.abs(found - wanted).max() < 2.5
    assert np.abs(wanted - pixels.reshape(8, 8, -1)).max() > 20, "the profile matters"


def test_profiles_of_srgb_and_broken_ones_change_nothing(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8))
    image.save(tmp_path / "a.png", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    assert read_source(str(tmp_path / "a.png")).tobytes() == image.tobytes()
    for broken in (b"nothing", icc(b"GRAY", None, 1.0)):
        image.save(tmp_path / "b.png", icc_profile=broken)
        with pytest.warns(UserWarning, match="ICC profile cannot be used and is ignored"):
            assert read_source(str(tmp_path / "b.png")).tobytes() == image.tobytes()


def png(depth, kind, row, key):
    """A PNG of one row; kind: 0 grey, 2 RGB. key: the colour that tRNS makes transparent."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    width = len(row) // (3 if kind == 2 else 1)
    head = struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0)
    line = b"\0" + struct.pack(f">{len(row)}{'H' if depth == 16 else 'B'}", *row)
    parts = (
        (b"IHDR", head),
        (b"tRNS", struct.pack(f">{len(key)}H", *key)),
        (b"IDAT", zlib.compress(line)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("depth", [8, 16])
def test_a_transparent_colour_is_white_at_any_depth(tmp_path, depth):
    scale = 257 if depth == 16 else 1
    for kind, row, key in ((0, (10, 200), (10,)), (2, (10, 20, 30, 200, 200, 200), (10, 20, 30))):
        (tmp_path / "a.png").write_bytes(png(depth, kind, [v * scale for v in row], [v * scale for v in key]))
        pixels = np.asarray(read_source(str(tmp_path / "a.png")))
        assert pixels.tolist() == [[[255, 255, 255], [200, 200, 200]]]


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"prompt": ["a cat", "a dog"], "n": [1, 2]}), tmp_path / "p.parquet")
    found = [(p.text, p.meta) for p in read_prompts(tmp_path / "p.parquet")]
    assert found == [("a cat", {"n": 1}), ("a dog", {"n": 2})]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(1, 50), st.integers(0, 2**63 - 1), st.integers(0, 40))
def test_every_epoch_shows_every_prompt_once(total, per_step, seed, step):
    shown = [i for k in range(step + 1) for i in step_prompts(total, per_step, seed, k)]
    assert len(shown) == per_step * (step + 1)
    assert step_prompts(total, per_step, seed, step) == shown[-per_step:], "depends only on (seed, step)"
    for start in range(0, len(shown) - total + 1, total):
        assert Counter(shown[start : start + total]) == Counter(range(total))


def test_epochs_and_seeds_differ():
    first, second = step_prompts(50, 50, 0, 0), step_prompts(50, 50, 0, 1)
    assert first != second and first != step_prompts(50, 50, 1, 0) and sorted(first) == sorted(second)
    assert step_prompts(1, 3, 0, 5) == [0, 0, 0]
