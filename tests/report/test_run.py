"""The report of a run, read back as HTML.

A reader relies on three things: the page is self-contained, every number and pixel on it was written by the run, and a
run in any state (no evaluation, one step, truncated or damaged files, hostile prompts) still gives a page.
Values are compared with the rows and arrays that the test wrote to the folder; pixels are decoded from the page.
"""

import base64
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from report_html import parse
from report_run import MEASURES, eval_row, groups, judgements, make_run, shown, small_run, train_row
from tiny_run import ALONE

from prefgrpo.config.schema import SamplingConfig
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import Prompt
from prefgrpo.report import write_report
from prefgrpo.report.judged import ROWS
from prefgrpo.report.read import read_run
from prefgrpo.rollout.render import preview, sample
from prefgrpo.run.evaluation import EvalSet, Evaluator
from prefgrpo.run.folder import RunFolder
from prefgrpo.run.trackers import save_groups
from prefgrpo.run.writer import Writer
from scripts.demo_world.strip import GAP, MARGIN, write_strip

STEPS = 80
NO_RESULT = "No evaluation has finished since training started"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "demo", steps=STEPS, every=20)


@pytest.fixture(scope="module")
def page(run):
    return report(run)


def report(folder):
    return parse(write_report(folder).read_text(encoding="utf-8"))


def charts(page):
    """Title → figure element."""
    return {f.all("h3")[0].text: f for f in page.all("figure", "chart")}


def last(figure, name):
    """The last value of a series by its legend name, as printed."""
    spans = figure.all("div", "legend")[0].all("span")
    return next(span.all("b")[0].text for span in spans if span.text.startswith(name))


def digits(value):
    """Three significant digits, zeros too."""
    return f"{value:#.3g}".removesuffix(".")


def rows_of(table):
    """The texts of a table's cells, by row, without its head."""
    return [[cell.text for cell in row.all("td")] for row in table.all("tr") if row.all("td")]


def image(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))


def pixels(element):
    return np.asarray(image(element.attributes["src" if element.tag == "img" else "href"]).convert("RGB"))


def arrays(file):
    with np.load(file) as stored:
        return dict(stored)


def test_page_refers_to_nothing_outside_itself(page, run):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 3e6 and not page.all("link") and not page.all("iframe") and not page.all("script")
    nodes = page.all()
    targets = [n.attributes[k] for n in nodes for k in ("src", "href", "xlink:href", "srcset") if k in n.attributes]
    assert targets and all(t.startswith(("data:image/", "#")) for t in targets)
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#hatch"} and "@import" not in text
    assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"base64,[^\"]*", "", text))
    ids = [n.attributes["id"] for n in nodes if "id" in n.attributes]
    assert len(ids) == len(set(ids)) and {n.attributes["href"][1:] for n in page.all("use")} | {"hatch"} <= set(ids)
    before = {p.name for p in run.iterdir()}
    assert write_report(run) == run / "report.html" and {p.name for p in run.iterdir()} == before


def test_the_headline_and_the_tables_hold_the_last_evaluations(page):
    """Rates, roles and tallies: tests/report/test_claims.py."""
    row = eval_row(STEPS, STEPS, "test")
    sentence = page.all("p", "result")[0].text
    assert f"After {STEPS} steps" in sentence and not page.all("p", "status")
    assert f"{100 * row['test/win_judge']:.0f} % by the judge (trained on; " in sentence
    assert "interval" not in sentence  # 12 prompts are too few
    wins, rewards = page.all("details", "numbers")[0].all("table")
    assert [row[0] for row in rows_of(wins)][2:] == ["the judge trained on", "scenes independent"]
    cells = [tuple(c.text for c in r.all("td")) for r in rewards.all("tr")[1:]]
    assert [h.text for h in rewards.all("tbody")[1].all("th")] == [f"test, step {STEPS}"]
    for name in ("dev", "test"):
        row = eval_row(STEPS, STEPS, name)
        for measure in MEASURES:
            both = [row[f"{name}/{measure}{end}"] for end in ("_before", "")]
            places = len(digits(max(both)).partition(".")[2])
            assert (measure, *(f"{value:.{places}f}" for value in both), "") in cells


def test_images_are_the_stored_pixels_and_prompts(page, run):
    last = arrays(run / "eval" / f"test_{STEPS:06d}.npz")
    pairs = page.all("figure", "pair")
    assert [p.all("figcaption")[0].text for p in pairs] == json.loads((run / "eval" / "test_prompts.json").read_text())
    for k, pair in enumerate(pairs):
        left, right = pair.all("img")
        assert "sharp" in left.attributes["class"]
        np.testing.assert_array_equal(pixels(left), last["before"][k])
        np.testing.assert_array_equal(pixels(right), last["now"][k])
    won = [p.all("small")[-1].text for p in pairs]
    swapped = ["swapped" in p.attributes["class"] for p in pairs]
    assert 0 < sum(swapped) < len(pairs) and page.all("input")[0].attributes["id"] == "blind"
    sides = [p.all("details", "key")[0].text.partition("? ")[2] for p in pairs]
    assert sides == [("left: before, right: after", "left: after, right: before")[s] for s in swapped]
    assert won[:2] == ["the judge: won · scenes: tied", "the judge: lost · scenes: lost"]


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
    np.savez(file, **arrays(file) | {"sources": sources[:2], "source_counts": [1, 1]})
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


@pytest.mark.parametrize("counts", [(1, 2, 1), (0, 2, 1), (2, 0, 0), (2, 2, 2), (0, 0, 0)])
def test_prompts_with_different_numbers_of_sources_are_stored_and_read(counts, tmp_path, monkeypatch):
    """A file may have such edits: what an evaluation and a training step store of them is what is shown."""
    monkeypatch.setattr(Evaluator, "render", lambda self, index: [np.zeros((8, 16, 3), np.uint8)] * len(index))
    prompts = []
    for k, count in enumerate(counts):
        files = [tmp_path / f"{k}_{n}.png" for n in range(count)]
        for n, file in enumerate(files):
            Image.new("RGB", (16, 8), (80 * k, 100 * n, 50)).save(file)
        prompts.append(Prompt(k, f"edit {k}", source=tuple(map(str, files))))
    folder = RunFolder(tmp_path / "run")
    for place in (folder.eval, folder.groups):
        place.mkdir(parents=True)
    sizes = SamplingConfig(height=8, width=16)
    writer = Writer()
    stills = SimpleNamespace(frame_rate=None)
    parts = (stills, None, None, None, ALONE, folder, writer)
    evaluator = Evaluator(EvalSet("dev", prompts, [0, 1, 2], 0), sizes, *parts)
    evaluator.start(resumed=False)
    evaluator._save_report_images(2, [0, 1, 2], evaluator.before)
    groups = {k: dict.fromkeys(range(2), sample(p, Media(evaluator.before[0]), sizes)) for k, p in enumerate(prompts)}
    tables = {"games": {"j": np.zeros((3, 2, 2, 2))}, "values": {"j": np.zeros((3, 2))}}
    save_groups(folder.group(2), SimpleNamespace(samples=groups, **tables), writer)
    writer.close()
    small_run(folder.root, [{"kind": "eval", "step": 2, "set": "dev", "dev/win_judge": 0.5}])
    run = read_run(folder.root)
    assert not run.problems
    for kept in (run.stored["dev"].pairs, run.groups):
        assert [one.prompt for one in kept] == ["edit 0", "edit 1", "edit 2"]
        for k, (one, count) in enumerate(zip(kept, counts, strict=True)):
            if not count:
                assert one.source is None
                continue
            columns = [[80 * k, 100 * n, 50] for n in range(count)]
            np.testing.assert_array_equal(one.source, np.repeat([np.repeat(columns, 16, axis=0)], 8, axis=0))


def test_curves_carry_the_logged_values(page):
    found = charts(page)
    assert list(found) == [
        "Win rate against the initial model", "vlm_pairwise: spread", "Judge", "Diversity within a group",
        "KL divergence", "Time per step",
    ]  # fmt: skip
    assert "to the initial policy" not in found["KL divergence"].text  # kl_coef 0: the KL was never computed
    wins = found["Win rate against the initial model"]
    row = train_row(STEPS)
    assert last(wins, "by the judge") == digits(100 * eval_row(STEPS, STEPS, "dev")["dev/win_judge"]) + " %"
    assert not wins.all("path", "band")  # nothing says that there are 30 prompts
    assert last(found["vlm_pairwise: spread"], "std within a group") == digits(row["reward/vlm_pairwise_std"])
    assert last(found["Judge"], "other winner when swapped") == digits(100 * row["judge/order_inconsistency"]) + " %"
    assert last(found["Judge"], "first image wins") == digits(100 * row["judge/position_bias"]) + " %"
    assert last(found["Judge"], "no verdict") == digits(100 * row["judge/failures"] / row["judge/requests"]) + " %"
    assert last(found["Diversity within a group"], "RMS") == digits(row["diversity/pixels"])
    assert last(found["Time per step"], "rollout") == f"{row['time/rollout']:.3g} s"
    assert "images_per_s" not in found["Time per step"].text


def test_every_reward_and_every_judge_has_a_chart_of_its_own(tmp_path):
    """A win rate within the group has the mean ½, so only its spread is drawn."""
    second = {"judge/other/tie_rate": 0.25, "judge/other/requests": 50.0, "judge/other/failures": 10.0}
    rewards = {"reward/clip": 20.0, "reward/clip_std": 1.5, "reward/my/rewards.py:red": 0.1}
    found = charts(report(small_run(tmp_path / "r", [train_row(s) | second | rewards for s in range(1, 5)])))
    assert last(found["clip"], "mean") == "20.0" and len(found["clip"].all("path", "band")) == 1
    assert last(found["rewards.py:red"], "mean") == "0.100" and "vlm_pairwise: spread" in found
    assert "Judge" not in found and last(found["Judge other"], "ties") == "25.0 %"
    assert last(found["Judge other"], "no verdict") == "20.0 %"


def test_verdict_matrix_is_sorted_and_complete(page, run):
    group, figure = next(g for g in read_run(run).groups if g.step == STEPS), page.all("figure", "group")[0]
    assert figure.all("figcaption")[0].text.startswith(group.prompt)
    images = {i.attributes["id"]: i for i in figure.all("image")}
    order = np.argsort(-group.rates, kind="stable")
    rows = sorted((u for u in figure.all("use") if u.attributes["x"] == "0"), key=lambda u: float(u.attributes["y"]))
    assert len(images) == len(rows) == len(order)
    for place, use in zip(order, rows):
        np.testing.assert_array_equal(pixels(images[use.attributes["href"][1:]]), group.images[place])
    assert len(figure.all("rect", "missing")) == 2 and not figure.all("rect", "unasked")
    p = (group.wins / np.where(group.counts > 0, group.counts, np.nan))[np.ix_(order, order)]
    np.testing.assert_allclose([float(t.text) for t in figure.all("text", "number")], p[~np.isnan(p)], atol=0.005)
    for kind, values in {"win": p[p > 0.5], "lose": p[p < 0.5]}.items():
        opacity = [float(r.attributes["fill-opacity"]) for r in figure.all("rect", kind)]
        np.testing.assert_allclose(opacity, np.abs(values - 0.5) * 2, atol=1e-4)


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
    found = []
    for body in worst.all("tbody"):
        cells = rows_of(body)
        p = [float(cell[-2].split("(")[1][:-1]) * (1 if cell[-2].startswith("after") else -1) for cell in cells]
        found.append(round(abs((p[0] if p[0] > 0 else 1 + p[0]) - (p[1] if p[1] > 0 else 1 + p[1])), 3))
    wanted = [gap for gap in wanted if gap > 1e-9][:ROWS]
    assert wanted and found[: len(wanted)] == pytest.approx(wanted, abs=2e-3)


def test_the_newest_verdicts_are_of_many_prompts(tmp_path):
    folder = small_run(tmp_path / "r", [train_row(1)])
    groups(folder, 1)
    judgements(folder, 1)
    prompts = [body.all("div", "clamp")[0].text for body in report(folder).all("table", "answers")[0].all("tbody")]
    assert len(prompts) == ROWS and len(set(prompts[:2])) == len(set(prompts)) == 2
    assert prompts[::2] == prompts[:1] * 8


def test_pairs_that_a_sparse_plan_does_not_ask_are_not_failures(tmp_path):
    """A ring over eight images: pair (0, 1) is without a verdict, all that are no neighbours were never compared."""
    folder = small_run(tmp_path / "r", [train_row(1)])
    groups(folder, 1, k=1, missing=False)
    judgements(folder, 1)
    ring = np.roll(np.eye(8), 1, 1) + np.roll(np.eye(8), -1, 1)
    failed = ring.copy()
    failed[0, 1] = failed[1, 0] = 0
    stored = arrays(folder / "groups" / "step_000001.npz")
    np.savez(folder / "groups" / "step_000001.npz", **stored | {"counts": failed[None], "wins": failed[None] / 2})
    lines = (folder / "judgements.jsonl").read_text().splitlines(keepends=True)
    asked = [line for line in lines if ring[(row := json.loads(line))["first"], row["second"]]]
    (folder / "judgements.jsonl").write_text("".join(asked))
    figure = report(folder).all("figure", "group")[0]
    assert len(figure.all("rect", "missing")) == 2 and len(figure.all("rect", "unasked")) == 56 - 16
    assert "image 1 and image 2: no verdict" in figure.text and "image 1 and image 3: not compared" in figure.text


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


def test_a_member_without_any_verdict_is_missing_and_last(tmp_path):
    folder = small_run(tmp_path / "r", [train_row(1)])
    groups(folder, 1, k=1, size=4, missing=False)
    data = arrays(folder / "groups" / "step_000001.npz")
    data["counts"][0, 2, :] = data["counts"][0, :, 2] = data["wins"][0, 2, :] = data["wins"][0, :, 2] = 0
    data["rates"][0, 2] = np.nan
    np.savez(folder / "groups" / "step_000001.npz", **data)
    figure = report(folder).all("figure", "group")[0]
    assert len(figure.all("rect", "missing")) == 6
    (text,) = [t for t in figure.all("text") if t.text == "missing"]
    assert float(text.attributes["y"]) > 4 * 40


def test_a_run_without_a_result_says_so(tmp_path):
    rows = [train_row(s) for s in range(1, 11)]
    whole = report(small_run(tmp_path / "whole", rows))
    assert "had no evaluation set" in whole.all("p", "result")[0].text and not whole.all("p", "status")
    first = small_run(tmp_path / "first", [eval_row(0, 10, "dev")])
    shown(first, "dev", 0)
    for steps, folder in ((3, small_run(tmp_path / "begun", rows[:3])), (0, first)):
        page = report(folder)
        assert f"{steps} of 10 steps so far" in page.all("p", "status")[0].text
        assert page.all("p", "result")[0].text.startswith(NO_RESULT)
        assert not page.all("figure", "pair") and not page.all("figure", "group")
        assert ("Time per step" in charts(page)) is (steps > 0)


def test_a_single_step_shows_as_points(tmp_path):
    found = charts(report(small_run(tmp_path / "r", [train_row(1)])))
    assert last(found["Time per step"], "update") == f"{train_row(1)['time/update']:.3g} s"
    assert len(found["Time per step"].all("circle")) == 3 and not found["Time per step"].all("path")


def test_missing_keys_nulls_and_text_in_numbers_are_gaps(tmp_path):
    rows = [train_row(s) | {"policy/approx_kl": None} for s in range(1, 6)]
    rows[2]["time/rollout"] = None
    del rows[3]["judge/tie_rate"]
    rows[1]["time/update"] = "slow"
    found = charts(report(small_run(tmp_path / "r", [*rows, {"kind": "train", "step": None}, {"kind": "train"}, [1]])))
    assert "KL divergence" not in found
    lines = found["Time per step"].all(
        "path", "line"
    )  # rollout in two parts, judge_wait whole, update in a dot and one
    assert len(lines) == 4 and len(found["Time per step"].all("circle")) == 1
    assert all("nan" not in p.attributes["d"] for f in found.values() for p in f.all("path"))


def test_a_torn_last_line_and_an_unfinished_run(tmp_path):
    folder = make_run(tmp_path / "r", steps=40, every=20, planned=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 41, "grad_no')
    page = report(folder)
    assert "40 of 100 steps so far" in page.all("p", "status")[0].text
    assert page.all("h1")[0].text == "demo" and "(dev)" in page.all("p", "result")[0].text
    assert last(charts(page)["Time per step"], "update") == f"{train_row(40, 100)['time/update']:.3g} s"


def wrong_arrays():
    file = io.BytesIO()
    np.savez(file, images=np.zeros((1, 2, 4, 4, 3), np.uint8))
    return file.getvalue()


DAMAGED = "could not be read"
DAMAGE = {
    "metrics.jsonl": (lambda data: data.replace(b'{"kind": "train", "step": 2', b'{"kind": "tr', 1), "[4]"),
    "config.yaml": (lambda data: b"train: {steps: [\n", "could not be read"),
    "eval/dev_000040.npz": (lambda data: b"", DAMAGED),
    "groups/step_000020.npz": (lambda data: data[:300] + bytes(300) + data[600:], DAMAGED),
    "groups/step_000040.npz": (lambda data: wrong_arrays(), DAMAGED),
    "eval/test_000040.json": (lambda data: b"[1]", DAMAGED),
    "eval/test_prompts.json": (lambda data: b"\xff", "could not be read"),
}


def test_damaged_files_are_left_out_and_named_in_plain_words(tmp_path):
    folder = make_run(tmp_path / "r", steps=40, every=20)
    for name, (damage, _) in DAMAGE.items():
        file = folder / name
        file.write_bytes(damage(file.read_bytes()))
    page = report(folder)
    (problem,) = page.all("p", "problems")
    for name, (_, said) in DAMAGE.items():
        assert name.rpartition("/")[2] in problem.text and said in problem.text
    assert len(page.all("figure", "pair")) == 12 and not page.all("figure", "group")
    assert "(test)" in page.all("p", "result")[0].text and "Time per step" in charts(page)


def test_hostile_text_is_shown_and_not_run(tmp_path):
    evil = "<script>alert(1)</script> & \"quotes' </svg> </figure> ü 猫"
    folder = make_run(tmp_path / "r", steps=20, every=20)
    (folder / "eval" / "test_prompts.json").write_text(json.dumps([evil] * 12))
    file = folder / "groups" / "step_000020.npz"
    np.savez(file, **arrays(file) | {"prompts": np.array([evil, "fine"])})
    row = {"reward/<b>x": 1.0, "reward/<b>x_std": 1.0}
    rows = [train_row(1) | row, eval_row(20, 20, "test")]
    small_run(folder, rows, f"name: {json.dumps(evil)}\nmodel: '</pre><img src=x onerror=y>'\n")
    page = report(folder)
    assert not page.all("script") and all("onerror" not in n.attributes for n in page.all())
    assert page.all("h1")[0].text == evil and page.all("figure", "pair")[0].all("figcaption")[0].text == evil
    assert page.all("figure", "group")[0].all("figcaption")[0].text.startswith(evil)
    assert "<img src=x onerror=y>" in page.all("pre")[-1].text
    assert "<b>x" in charts(page)


def test_large_images_and_long_runs_stay_small(tmp_path):
    rows = [*map(train_row, range(1, 3001)), eval_row(3000, 3000, "dev")]
    folder = small_run(tmp_path / "r", rows, "train: {steps: 3000}\n")
    rng = np.random.default_rng(0)
    noise = np.kron(rng.integers(0, 256, (8, 64, 64, 3)), np.ones((1, 8, 8, 1))).astype(np.uint8)  # 512 × 512
    (folder / "eval").mkdir()
    np.savez(folder / "eval" / "dev_003000.npz", before=noise, now=noise[::-1])
    (folder / "eval" / "dev_prompts.json").write_text(json.dumps([f"prompt {k}" for k in range(8)]))
    page = report(folder)
    assert (folder / "report.html").stat().st_size < 3e6
    large = page.all("figure", "pair")[0].all("img")[0]
    assert "smooth" in large.attributes["class"] and max(pixels(large).shape) == 384
    assert len(charts(page)["Time per step"].all("path")[0].attributes["d"].split("L")) == 375


def test_the_strip_of_the_readme_shows_the_last_evaluation(run, tmp_path):
    """The first image before training, enlarged four times, and the same after it below."""
    with Image.open(write_strip(run, tmp_path / "strip.png", columns=2)) as opened:
        strip = np.asarray(opened.convert("RGB"))
    with np.load(run / "eval" / f"test_{STEPS:06d}.npz") as stored:
        wanted = [stored[name][0].repeat(4, 0).repeat(4, 1) for name in ("before", "now")]
    for top, image in zip((MARGIN, MARGIN + 128 + GAP), wanted, strict=True):
        assert any(np.array_equal(strip[top : top + 128, x : x + 128], image) for x in range(strip.shape[1] - 128))
