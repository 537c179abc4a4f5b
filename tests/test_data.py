"""Prompts: reading files as people have them, and which prompts a step uses.

Why these cases: a prompts file comes from Windows, from a spreadsheet, with a byte-order mark or a Latin-1 line in
the middle; and the prompts of a step must not depend on what ran before it, on the number of ranks, or on luck.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.data.prompts import DataError, read_prompts, step_prompts


def test_files_as_people_have_them(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes(b'\xef\xbb\xbfa cat\r\n\r\n  a dog \r\na cat\r\n\xe5\xae\xb6 \xf0\x9f\x90\x88 {x} "q"')
    found = read_prompts(file)
    assert [p.text for p in found] == ["a cat", "a dog", '家 🐈 {x} "q"'], "mark, blanks and repetitions go"
    assert [p.id for p in found] == [0, 1, 2]
    file.write_text("one\u2028still one\x0cstill one\n", encoding="utf-8")
    assert len(read_prompts(file)) == 1, "a prompt ends at a line break of the file, not at a Unicode separator"
    file.write_text("x" * 100_000, encoding="utf-8")
    assert len(read_prompts(str(file))[0].text) == 100_000


def test_what_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match=r"prompts file not found: .*none\.txt; expected a txt"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(DataError, match="prompts file not found"):
        read_prompts(tmp_path)
    file = tmp_path / "p.txt"
    for empty in (b"", b"\n \n\t\r\n", b"\xef\xbb\xbf\n"):
        file.write_bytes(empty)
        with pytest.raises(DataError, match="holds no prompt"):
            read_prompts(file)
    file.write_bytes(b"fine\ncaf\xe9\nfine too\n\xff\n")
    with pytest.raises(DataError, match=r"2 line\(s\) are not valid UTF-8 \(line 2, 4\); re-save"):
        read_prompts(file)
    file.write_bytes(b"\xff\n" * 50)
    with pytest.raises(DataError, match=r"50 line\(s\).*line 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 …"):
        read_prompts(file)
    file.write_text("zwei\n", encoding="utf-16")
    with pytest.raises(DataError, match="not valid UTF-8"):
        read_prompts(file)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(1, 50), st.integers(0, 2**63 - 1), st.integers(0, 40))
def test_every_epoch_shows_every_prompt_once(total, per_step, seed, step):
    shown = [i for k in range(step + 1) for i in step_prompts(total, per_step, seed, k)]
    assert len(shown) == per_step * (step + 1)
    assert step_prompts(total, per_step, seed, step) == shown[-per_step:], "a function of (seed, step)"
    for start in range(0, len(shown) - total + 1, total):
        assert Counter(shown[start : start + total]) == Counter(range(total))


def test_epochs_and_seeds_differ():
    first, second = step_prompts(50, 50, 0, 0), step_prompts(50, 50, 0, 1)
    assert first != second and first != step_prompts(50, 50, 1, 0) and sorted(first) == sorted(second)
    assert step_prompts(1, 3, 0, 5) == [0, 0, 0]
