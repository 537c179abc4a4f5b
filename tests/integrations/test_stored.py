"""Our functions, and those that docs/ops.md writes on the ops, against the peers' stored results.

Why these cases: CI has none of the peers' code, so what their functions return at fixed inputs is kept (stored_peers.py
says how it is made). Every entry is compared; where PREFGRPO_PEERS has a checkout, the stored numbers are still its.
"""

import json
import subprocess

import peers
import pytest
import torch

from tests.integrations.stored_peers import DOC, ENTRIES, FILE, numbers

STORED = json.loads(FILE.read_text())


def near(got, want, rtol):
    """Equal within `rtol` of the largest value of each result."""
    assert got.keys() == want.keys()
    for name in want:
        ours, theirs = (torch.tensor(values, dtype=torch.float64) for values in (got[name], want[name]))
        largest = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=rtol * largest + 1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_every_function_is_stored():
    assert STORED.keys() == ENTRIES.keys()


@pytest.mark.parametrize("name", ENTRIES)
def test_ours_returns_the_stored_numbers(name):
    """In bf16, Pref-GRPO rounds its terms, and Flow-Factory its x'."""
    ours, _, call = ENTRIES[name]
    near(numbers(call(ours)), STORED[name], 1e-2 if "bfloat16" in name else 3e-5)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_stored_numbers_are_the_peers(name, monkeypatch):
    _, theirs, call = ENTRIES[name]
    near(numbers(call(theirs(monkeypatch))), STORED[name], 1e-6)


def test_the_docs_name_the_commits():
    text = DOC.read_text()
    assert [name for name, commit in peers.COMMITS.items() if commit not in text] == []


@pytest.mark.parametrize("is_named, outcome", [(True, pytest.fail.Exception), (False, pytest.skip.Exception)])
def test_a_comparison_that_cannot_be_made_fails(monkeypatch, tmp_path, is_named, outcome):
    """At the commit that we compared with; another version is skipped."""
    checkout = tmp_path / peers.FOLDERS["mix_grpo"]
    checkout.mkdir()
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setenv("PREFGRPO_PEERS", str(tmp_path))
    monkeypatch.setitem(peers.COMMITS, "mix_grpo", head[:7] if is_named else "0000000")

    def theirs(x): ...

    def ours(x, y, out_dtype): ...

    with pytest.raises(outcome, match="calls theirs without y"):
        peers.same_parameters("mix_grpo", theirs, ours)
    peers.same_parameters("mix_grpo", theirs, lambda x, out_dtype: None)
