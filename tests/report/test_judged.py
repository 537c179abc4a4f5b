"""What the judge said about pairs, read back as HTML: matrices of groups, tables of answers, clips and sources.

Every verdict and pixel on the page was written by the run. A missing verdict must look neither like a tie nor like a
pair that was never compared.
"""

import json
from itertools import permutations

import numpy as np
import pytest

from prefgrpo.report.judged import ROWS
from prefgrpo.report.read import read_run
from prefgrpo.rollout.render import preview
from tests.report.synthetic import (
    STEPS,
    arrays,
    change,
    eval_row,
    groups,
    image,
    judgements,
    make_run,
    pixels,
    report,
    rows_of,
    shown,
    small_run,
    train_row,
)

ALL = set(permutations(range(8), 2))


@pytest.fixture
def one_group(tmp_path):
    """Page of a run of one step with one group of eight, whose arrays are changed, and of whose pairs only `asked` were
    logged."""

    def made(asked=ALL, k=1, **changed):
        folder = small_run(tmp_path / "r", [train_row(1)])
        groups(folder, 1, k=k, missing=False)
        judgements(folder, 1)
        change(folder / "groups" / "step_000001.npz", **changed)
        lines = (folder / "judgements.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if ((row := json.loads(line))["first"], row["second"]) in asked]
        (folder / "judgements.jsonl").write_text("".join(kept))
        return report(folder)

    return made


def check_matrix(figure, group, unasked=0):
    """The cells are the group's verdicts, sorted by win rate."""
    order = np.argsort(-np.nan_to_num(group.rates, nan=-1), kind="stable")
    images = {i.attributes["id"]: i for i in figure.all("image")}
    rows = sorted((u for u in figure.all("use") if u.attributes["x"] == "0"), key=lambda u: float(u.attributes["y"]))
    assert len(images) == len(rows) == len(order)
    for place, use in zip(order, rows):
        np.testing.assert_array_equal(pixels(images[use.attributes["href"][1:]]), group.images[place])
    p = (group.wins / np.where(group.counts > 0, group.counts, np.nan))[np.ix_(order, order)]
    missing = len(order) * (len(order) - 1) - (~np.isnan(p)).sum() - unasked
    assert len(figure.all("rect", "missing")) == missing and len(figure.all("rect", "unasked")) == unasked
    np.testing.assert_allclose([float(t.text) for t in figure.all("text", "number")], p[~np.isnan(p)], atol=0.005)
    for kind, values in {"win": p[p > 0.5], "lose": p[p <= 0.5]}.items():
        opacity = [float(r.attributes["fill-opacity"]) for r in figure.all("rect", kind)]
        np.testing.assert_allclose(opacity, np.abs(values - 0.5) * 2, atol=1e-4)
    return missing


def test_a_matrix_is_sorted_and_complete(page, run):
    group = next(g for g in read_run(run).groups if g.step == STEPS)
    figure = page.all("figure", "group")[0]
    assert figure.all("figcaption")[0].text.startswith(group.prompt)
    assert check_matrix(figure, group) == 2


def test_pairs_that_a_sparse_plan_does_not_ask_are_not_failures(one_group, tmp_path):
    """A ring over eight images: pair (0, 1) is without a verdict, all that are no neighbours were never compared."""
    ring = np.roll(np.eye(8), 1, 1) + np.roll(np.eye(8), -1, 1)
    known = ring.copy()
    known[0, 1] = known[1, 0] = 0
    page = one_group({(int(i), int(j)) for i, j in zip(*np.nonzero(ring))}, counts=known[None], wins=known[None] / 2)
    figure = page.all("figure", "group")[0]
    assert check_matrix(figure, read_run(tmp_path / "r").groups[0], unasked=56 - 16) == 2
    assert "image 1 and image 2: no verdict" in figure.text and "image 1 and image 3: not compared" in figure.text


def test_a_member_without_any_verdict_is_missing_and_last(one_group, tmp_path):
    others = np.ones((8, 8)) - np.eye(8)
    others[2] = others[:, 2] = 0
    rates = np.where(np.arange(8) == 2, np.nan, 0.5)
    figure = one_group(counts=others[None], wins=others[None] / 2, rates=rates[None]).all("figure", "group")[0]
    assert check_matrix(figure, read_run(tmp_path / "r").groups[0]) == 14
    (text,) = [t for t in figure.all("text") if t.text == "missing"]
    assert float(text.attributes["y"]) > 8 * 40


def test_the_newest_verdicts_are_of_many_prompts(one_group):
    prompts = [body.all("div", "clamp")[0].text for body in one_group(k=2).all("table", "answers")[0].all("tbody")]
    assert len(prompts) == ROWS and len(set(prompts[:2])) == len(set(prompts)) == 2
    assert prompts[::2] == prompts[:1] * 8


def test_the_newest_and_the_most_contradictory_verdicts_have_their_answers(page, run):
    """Single answers: the test evaluation's (step 80), of which every fourth pair contradicts itself in the two orders,
    and the log's of step 20, whose two orders agree exactly."""
    lost, won, newest, worst = page.all("table", "answers")
    kept = [k for k in json.loads((run / "eval" / "test_000080.json").read_text()) if "answers" in k]
    prompts = json.loads((run / "eval" / "test_prompts.json").read_text())
    assert [s.text for s in page.all("summary") if "Which" not in s.text][1:5] == [
        "Largest losses among the images above", "Largest wins among the images above", "Newest verdicts (step 80)",
        "Verdicts that contradict each other most",
    ]  # fmt: skip
    bodies = newest.all("tbody")
    assert len(bodies) == min(len(kept), ROWS)
    for body, outcome, prompt in zip(bodies, kept, prompts):
        rows = [[cell.text for cell in row.all("td")][-3:] for row in body.all("tr")]
        said = [f"{a['reason']} {a['raw']}".strip() for a in outcome["answers"]]
        assert [row[2] for row in rows] == said and prompt in body.text
        assert [row[0] for row in rows] == [a["first"] for a in outcome["answers"]]
    first = rows_of(bodies[0])
    assert [row[-2] for row in first] == ["after (0.900)", "after (0.800)"]
    last_step = arrays(run / "eval" / "test_000080.npz")
    np.testing.assert_array_equal(pixels(bodies[0].all("img")[1]), last_step["now"][0])

    def after(outcome):
        """P(after is better) in both orders."""
        return np.array([p if a["first"] == "after" else 1 - p
                         for a in outcome["answers"] if (p := a["p_first"]) is not None])  # fmt: skip

    means = np.array([after(outcome).mean() for outcome in kept])
    for table, order in ((lost, np.argsort(means)), (won, np.argsort(-means))):
        shown = [prompts.index(body.all("div", "clamp")[0].text) for body in table.all("tbody")]
        assert len(shown) == 3 and means[shown] == pytest.approx(means[order[:3]])

    wanted = sorted((abs(np.subtract(*p)) for o in kept if len(p := after(o)) == 2), reverse=True)
    printed = [[row[-2].strip(")").split(" (") for row in rows_of(body)] for body in worst.all("tbody")]
    found = [abs(np.subtract(*(float(p) if who == "after" else 1 - float(p) for who, p in pair))) for pair in printed]
    wanted = [gap for gap in wanted if gap > 1e-9][:ROWS]
    assert wanted and found[: len(wanted)] == pytest.approx(wanted, abs=2e-3)


def test_a_verdict_without_an_answer_says_why_and_text_is_not_markup(tmp_path):
    folder = small_run(tmp_path / "r", [eval_row(10, 10, "dev")])
    shown(folder, "dev", 10)
    count = len(read_run(folder).stored["dev"].pairs)
    said = [{"judge": "j", "first": "after", "p_first": None, "reason": "timed out", "raw": ""},
            {"judge": "j", "first": "before", "p_first": 0.5, "reason": "", "raw": "<b>tie</b>"}]  # fmt: skip
    kept = [{"prompt": k, "wins": {"judge": None}, "answers": said} for k in range(count)]
    (folder / "eval" / "dev_000010.json").write_text(json.dumps(kept))
    (table,) = report(folder).all("table", "answers")
    assert [row[-3:] for row in rows_of(table)[:2]] == [
        ["after", "no verdict", "timed out"], ["before", "neither (0.500)", "<b>tie</b>"],
    ]  # fmt: skip


@pytest.mark.full
def test_clips_play_and_edits_show_their_sources(tmp_path):
    """Clips of noise, the worst case for WebP: every frame is on the page, and the page stays small; sources are shown
    beside the pairs and in the corner of a judged group."""
    folder = make_run(tmp_path / "clips", steps=40, every=20)
    rng = np.random.default_rng(0)
    kept = np.stack([preview(clip) for clip in rng.integers(0, 256, (4, 33, 240, 416, 3), dtype=np.uint8)])
    assert kept.shape == (4, 16, 148, 256, 3)
    sources = rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    np.savez(folder / "eval" / "test_sources.npz", sources=sources, source_counts=[0, 2, 1, 1])
    for file in (folder / "eval").glob("*_0*.npz"):
        np.savez_compressed(file, before=kept, now=kept[::-1], seconds=33 / 24)
    file = sorted((folder / "groups").iterdir())[-1]
    change(file, sources=sources[:2], source_counts=[1, 1])
    page = report(folder)
    assert (folder / "report.html").stat().st_size < 3e6
    pairs = page.all("figure", "pair")
    named = [[s.text for s in pair.all("small")] for pair in pairs]
    assert named == [["before", "after"], *[["source", "before", "after"]] * 3]
    assert ", with the source images." in page.text
    both, *clips = pairs[1].all("img")
    np.testing.assert_array_equal(pixels(both), np.concatenate([sources[0], sources[1]], axis=1))
    for pair, source in zip(pairs[2:], sources[2:], strict=True):
        np.testing.assert_array_equal(pixels(pair.all("img")[0]), source)
    for clip in (image(c.attributes["src"]) for c in clips):
        assert clip.n_frames == 16 and clip.info["loop"] == 0
        times = [(clip.seek(k), clip.load(), clip.info["duration"])[2] for k in range(16)]
        assert sum(times) == pytest.approx(1000 * 33 / 24, abs=16), "the 16 frames play as long as the clip"
    corners = [i for i in page.all("image") if i.attributes["id"].endswith("-source")]
    assert len(corners) == 2 and "The source image is in the corner." in page.text
    for corner, source in zip(corners, sources, strict=False):
        np.testing.assert_array_equal(pixels(corner), source)
