"""The folder of shards under the embedding cache.

Why these cases: many processes write and read it at once, some are killed, and an index that disagrees with the shards
must not be believed.
"""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from prefgrpo.rollout.shards import Shards

NAMES = st.text("0123456789abcdef", min_size=4, max_size=8)


@settings(max_examples=40)
@given(
    st.lists(st.dictionaries(NAMES, st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4), st.booleans()
)
def test_what_was_written_is_read(tmp_path_factory, writes, indexed):
    folder, want = tmp_path_factory.mktemp("shards"), {}
    for number, sizes in enumerate(writes):
        content = {
            key: {"a.b": torch.full((n,), float(number)), "c_length": torch.tensor(n)} for key, n in sizes.items()
        }
        Shards(folder).write(content)
        want |= content
    if indexed:
        Shards(folder).save_index()
    found = Shards(folder)
    for key, tensors in want.items():
        read = found.read(key)
        assert read.keys() == tensors.keys() and read["c_length"].dtype == torch.int64
        assert any(
            torch.equal(read["a.b"], torch.full((n,), float(k)))
            for k, w in enumerate(writes)
            for n in [w.get(key)]
            if n
        )
    assert "none" not in found and found.read("none") is None


def test_the_same_keys_make_the_same_file(tmp_path):
    content = {"k1": {"x": torch.ones(2)}, "k0": {"x": torch.zeros(3)}}
    for order in (content, dict(reversed(content.items()))):
        Shards(tmp_path).write(order)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_reader_learns_of_what_others_write(tmp_path):
    reader = Shards(tmp_path / "new")
    Shards(tmp_path / "new").write({"k": {"x": torch.ones(2)}})
    assert "k" not in reader
    reader.scan()
    assert "k" in reader


def test_an_index_is_not_believed_against_the_shards(tmp_path, caplog):
    shards = Shards(tmp_path)
    shards.write({"k": {"x": torch.ones(2)}})
    shards.save_index()
    index = json.loads((tmp_path / "index.json").read_text())
    (name,) = index
    assert index[name] == {"bytes": (tmp_path / name).stat().st_size, "keys": ["k"]}
    save_file({"other.x": torch.ones(9)}, tmp_path / name)
    assert "k" not in Shards(tmp_path) and "other" in Shards(tmp_path)
    (tmp_path / "index.json").write_text("{oops")
    assert "other" in Shards(tmp_path)
    (tmp_path / name).write_bytes(b"\0" * 20)
    assert "other" not in Shards(tmp_path) and "is damaged" in caplog.text


@pytest.mark.parametrize("index", ["[]", "3", '{"NAME": {}}', '{"NAME": 3}', '{"NAME": {"bytes": "x", "keys": 1}}'])
def test_an_index_of_another_shape_is_not_used(tmp_path, index):
    Shards(tmp_path).write({"k": {"x": torch.ones(2)}})
    (name,) = [f.name for f in tmp_path.iterdir()]
    (tmp_path / "index.json").write_text(index.replace("NAME", name))
    assert torch.equal(Shards(tmp_path).read("k")["x"], torch.ones(2))


@pytest.mark.parametrize("place", [0, 4, -1, -5])
def test_a_flipped_byte_is_noticed(tmp_path, place, caplog):
    """The size stays, so that only the content can tell."""
    Shards(tmp_path).write({"k": {"x": torch.arange(40.0)}, "other": {"x": torch.ones(2)}})
    Shards(tmp_path).save_index()
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[place] ^= 255
    file.write_bytes(content)
    shards = Shards(tmp_path)
    found = [shards.read(key) for key in ("k", "other")]
    assert found[1 if place < 0 else 0] is None and str(file) in caplog.text
    assert found[0] is None or torch.equal(found[0]["x"], torch.arange(40.0))
