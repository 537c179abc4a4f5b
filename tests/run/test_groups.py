"""Pairs from a run's folder: what a run under a judge stores with the tracker `pairs`, and the groups of its report.

The judge prefers the brighter image with a probability that follows from the pixels, so that the stored verdicts can be
computed again from the stored images.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from servers import JudgeServer
from world import ALONE, noise

from prefgrpo.data.stored import Shape
from prefgrpo.data.tables import DataError
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.scorer import StepScores
from prefgrpo.run.errors import tracker_errors
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.groups import _store, open_pairs, read

NAN = float("nan")


@pytest.fixture
def run(tmp_path):
    """A run's folder with a configuration."""
    folder = RunFolder(tmp_path / "run")
    folder.groups.mkdir(parents=True)
    folder.config.write_text("model: m\nrollout: {height: 8, width: 12}\n")
    return folder


def step_scores(samples, games):
    return StepScores(samples, {}, {}, {name: [] for name in games}, games, {}, {})


def test_a_run_keeps_every_judged_group(trainer):
    """Two steps of two groups of four images; a judge who is asked in both orders answers by brightness."""
    with JudgeServer() as server:
        one = trainer(
            trackers=["pairs"], rewards="vlm_pairwise", judge={"endpoints": [server.url]}, eval={"every": 0},
            train={"steps": 2},
        )  # fmt: skip
        result = one.train()
    found = open_pairs(str(result.folder), ALONE)
    assert len(found) == 4 and [group.prompt.id for group in found] == [0, 1, 2, 3]
    rows = [json.loads(line) for line in (result.folder / "judgements.jsonl").read_text().splitlines()]
    for number, group in enumerate(found):
        assert group.shapes == (Shape(16, 16),) * 4
        p = np.zeros((4, 4))
        n = np.zeros((4, 4))
        for row in (row for row in rows if row["group"] == number):
            i = row["first"]
            j = row["second"]
            p[i, j] += row["p_first"]
            p[j, i] += 1 - row["p_first"]
            n[i, j] += 1
            n[j, i] += 1
            assert row["prompt"] == group.prompt.text
        np.testing.assert_array_equal(group.counts, n)
        np.testing.assert_allclose(group.wins, np.where(n > 0, p / np.maximum(n, 1), NAN), atol=1e-12)
        bright = [sample.read().pixels.mean() for sample in group.samples]
        assert group.wins[np.argmax(bright), np.argmin(bright)] > 0.5, "the images belong to the verdicts"


def test_stored_groups_have_their_sources_columns_and_verdicts_of_every_judge(tmp_path):
    source = (noise(9, 8, 12),)
    members = {m: Sample("p", noise(m, 8, 12), source, {"negative_prompt": "dark", "box": [1]}) for m in range(3)}
    sums = np.array([[0, 1.5, 0], [0.5, 0, 0], [0, 0, 0]])
    counts = np.array([[0, 2.0, 0], [2, 0, 0], [0, 0, 0]])
    games = {"a": np.stack([sums, counts])[None], "b": np.stack([sums.T, counts])[None], "c": np.zeros((1, 2, 3, 3))}
    folder = RunFolder(tmp_path)
    folder.config.write_text("model: m\n")
    for _ in range(2):  # a repeated step replaces its files
        _store(folder, 7, step_scores({12: members}, games))
    first, second = read(str(tmp_path))
    np.testing.assert_array_equal(first.wins, [[NAN, 0.75, NAN], [0.25, NAN, NAN], [NAN, NAN, NAN]])
    np.testing.assert_array_equal(second.wins, [[NAN, 0.25, NAN], [0.75, NAN, NAN], [NAN, NAN, NAN]])
    np.testing.assert_array_equal(first.counts, counts)
    assert first.prompt.negative == "dark" and first.prompt.meta["reward"] == "a" and first.prompt.meta["step"] == 7
    assert all(np.array_equal(first.samples[m].read().pixels, members[m].media.pixels) for m in members), "lossless"
    assert np.array_equal(np.asarray(first.prompt.images()[0]), source[0].pixels)


def test_the_groups_of_a_report(run):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 2, 8, 12, 3), dtype=np.uint8)
    sources = rng.integers(0, 256, (3, 8, 12, 3), dtype=np.uint8)
    counts = np.array([[[0, 2], [2, 0]], [[0, 0], [0, 0]], [[0, 1], [1, 0]]])
    sums = np.array([[[0, 1.4], [0.6, 0]], np.zeros((2, 2)), [[0, 0], [1, 0]]])
    arrays = {"wins": sums, "counts": counts, "rates": np.zeros((3, 2)), "prompts": np.array(["p", "q", "r"])}
    np.savez(run.group(1), images=images, sources=sources, source_counts=np.array([1, 0, 2]), **arrays)
    with pytest.warns(UserWarning, match="left out 1 groups without a verdict"):
        first, last = read(str(run.root))
    np.testing.assert_allclose(first.wins, [[NAN, 0.7], [0.3, NAN]])
    np.testing.assert_array_equal(last.wins, [[NAN, 0], [1, NAN]])
    assert (first.prompt.text, last.prompt.text, last.prompt.id) == ("p", "r", 1) and last.shapes[0] == Shape(8, 12)
    assert np.array_equal(last.samples[1].read().pixels, images[2, 1])
    assert [np.array_equal(np.asarray(s), sources[1 + k]) for k, s in enumerate(last.prompt.images())] == [True, True]
    assert first.samples[0].identity() != last.samples[0].identity() and "group 1" in first.where
    np.savez(run.group(2), images=np.concatenate([images] * 4, axis=3), **arrays)
    with pytest.raises(DataError, match=r"step_000002\.npz holds only a few frames of every clip"):
        read(str(run.root))


def test_a_run_without_judged_groups_and_a_folder_that_is_no_run(run, tmp_path):
    with pytest.raises(DataError, match=r"has no judged groups; runs with `trackers: \[pairs\]` keep theirs"):
        read(str(run.root))
    with pytest.raises(DataError, match="expected a table of pairs, or the folder of a run"):
        read(str(tmp_path))


def test_the_tracker_needs_images(trainer):
    config = trainer("images", trackers=[]).config
    assert tracker_errors(replace(config, trackers=("pairs",))) == []
    clips = replace(config, family="wan", trackers=("pairs",))
    assert "pairs stores images, but wan makes clips" in tracker_errors(clips)[0]
