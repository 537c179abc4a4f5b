"""Prompts: files as users and benchmarks provide them, edits with source images, and which prompts a step uses.

Why these cases: files come from Windows or a spreadsheet, with a byte-order mark or a Latin-1 line in the middle;
UniGenBench's csv has quotes, commas and JSON inside a cell, GenEval's jsonl has metadata that a reward needs, an edit
list may name missing images; all bad lines must be reported at once, with their numbers; and the prompts of a step must
not depend on earlier steps, the number of ranks, or chance.
"""

import csv
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from prefgrpo.data.prompts import DataError, read_prompts, step_prompts


def written(file, rows):
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows) + "\n")
    return file


def test_files_as_people_have_them(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes(b'\xef\xbb\xbfa cat\r\n\r\n  a dog \r\na cat\r\n\xe5\xae\xb6 \xf0\x9f\x90\x88 {x} "q"')
    found = read_prompts(file)
    assert [p.text for p in found] == ["a cat", "a dog", '家 🐈 {x} "q"'], "drops BOM, blanks and duplicates"
    assert [p.id for p in found] == [0, 1, 2]
    file.write_text("one\u2028still one\x0cstill one\n", encoding="utf-8")
    assert len(read_prompts(file)) == 1, "a prompt ends at a newline, not at a Unicode line separator"


DEEP = b"[" * 10**5 + b"]" * 10**5
REFUSED = [
    ("p.txt", b"", ["p.txt contains no prompt, only blank lines"]),
    ("p.txt", b"\n \n\t\r\n", ["contains no prompt"]),
    ("p.txt", b"\xef\xbb\xbf\n", ["contains no prompt"]),
    ("p.txt", b"fine\ncaf\xe9\nfine too\n\xff\n", ["2 line(s) are not valid UTF-8 (line 2, 4); re-save"]),
    ("p.txt", b"\xff\n" * 50, ["50 line(s)", "line 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 …"]),
    ("p.txt", "zwei\n".encode("utf-16"), ["not valid UTF-8"]),
    ("p.json", b"[]", ["expected a file that ends in .txt, .csv, .tsv, .jsonl, .parquet"]),
    ("p.xlsx", b"[]", ["expected a file that ends in .txt, .csv, .tsv, .jsonl, .parquet"]),
    ("p.csv", b"a,b\n1,2", ["no prompt column; expected one of instruction, prompt,", "got ['a', 'b']"]),
    ("p.csv", b"index,prompt\n1,fine\n2,", ["line 3: no prompt"]),
    ("p.csv", b"id;prompt\n1;a cat; asleep", ["line 2: 3 cells, but 2 columns; a cell with ';' needs quotes"]),
    ("p.csv", b"prompt,id,prompt\na,1,b", ["column prompt appears twice"]),
    ("p.csv", b'index,prompt\n0,a dog, a cat and a bird\n\n1,fine\n2,\n3,"two\nlines"\n4,"never closed\n5,x', [
        "3 line(s) cannot be used", "line 2: 3 cells, but 2 columns", "line 5: no prompt",
        "line 8: unexpected end of data (is a quote not closed?)",
    ]),
    ("p.jsonl", b'{"prompt": "fine"}\n{oops\n[1]\n{"prompt": "  "}\n{"caption": "fine too"}\n{"prompt": 3}', [
        "4 line(s) cannot be used", "line 2: not JSON", "line 3: expected an object, got list", "line 4: no prompt",
        "line 6: no prompt",
    ]),
    ("p.jsonl", b'{"prompt": "deep", "x": %s}\n{"prompt": "\\ud800"}\n{"n": %s}' % (DEEP, b"9" * 5000), ["3 line"]),
    ("p.parquet", b"nothing", ["is not a readable parquet file"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "messages"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_cannot_be_used_is_refused_with_all_its_lines(tmp_path, name, content, messages):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_prompts(tmp_path / name)
    assert all(message in str(caught.value) for message in messages), caught.value


def test_csv_with_a_prompt_column(tmp_path):
    rows = [{"index": "7", "prompt_en": 'two "pandas",\nin suits', "sub_dims_en": '{"a": 1}'}]
    rows += [{"index": "8", "prompt_en": "家 🐈", "sub_dims_en": ""}, {"index": "9", "prompt_en": "家 🐈"}]
    with (tmp_path / "p.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.warns(UserWarning, match="left out lines with an earlier prompt but other columns: 5"):
        found = read_prompts(tmp_path / "p.csv")
    assert [(p.id, p.text, p.meta["index"]) for p in found] == [(0, 'two "pandas",\nin suits', "7"), (1, "家 🐈", "8")]
    assert found[0].meta["sub_dims_en"] == '{"a": 1}'
    assert [p.meta["index"] for p in read_prompts(tmp_path / "p.csv", unique=False)] == ["7", "8", "9"]


def test_a_prompt_of_a_megabyte_in_any_format(tmp_path):
    long = "word, " * 170_000 + "end"
    assert read_prompts(written(tmp_path / "p.csv", ["prompt", f'"{long}"']))[0].text == long
    assert read_prompts(written(tmp_path / "p.txt", [long]))[0].text == long
    assert read_prompts(written(tmp_path / "p.jsonl", [json.dumps({"prompt": long})]))[0].text == long


def test_tables_as_spreadsheets_write_them(tmp_path):
    """Semicolons (locales with decimal commas) and tabs (copied cells) also separate; commas in a prompt are kept."""
    for name, mark in (("p.csv", ";"), ("p.tsv", "\t"), ("q.csv", "\t")):
        rows = [f"id{mark}prompt", f"1{mark}a cat, asleep", f'2{mark}"two{mark} ""dogs"""']
        found = read_prompts(written(tmp_path / name, rows))
        assert [(p.text, p.meta) for p in found] == [("a cat, asleep", {"id": "1"}), (f'two{mark} "dogs"', {"id": "2"})]


def test_jsonl_keeps_the_rest_as_metadata(tmp_path):
    geneval = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "two cups"}
    sets = {"idx": 3, "prompt": "a comic", "height": 512, "criteria": {"Identity": ["x"]}}
    found = read_prompts(written(tmp_path / "p.jsonl", [geneval, "", sets]))
    assert [p.text for p in found] == ["two cups", "a comic"]
    assert found[0].meta == {k: v for k, v in geneval.items() if k != "prompt"}
    assert found[1].meta["criteria"] == {"Identity": ["x"]} and not found[1].source and found[1].images() == ()


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
    """EXIF orientation is applied, and 16-bit channels are scaled (a plain conversion would turn them white)."""
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (20, 10), "red").save(tmp_path / "a.jpg", exif=turned)
    Image.fromarray(np.full((4, 6), 0x8000, np.uint16)).save(tmp_path / "b.png")
    rows = [{"instruction": "x", "source_image": name} for name in ("a.jpg", "b.png")]
    upright, grey = (p.images()[0] for p in read_prompts(written(tmp_path / "e.jsonl", rows)))
    assert upright.size == (10, 20) and grey.getpixel((0, 0)) == (128, 128, 128)


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
