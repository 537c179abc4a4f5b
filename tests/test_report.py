"""The report of a run, read back as HTML.

A reader relies on three things: the page is self-contained, every number and pixel on it was written by the run, and a
run in any state (no evaluation, one step, truncated or damaged files, hostile prompts) still gives a page.
Values are compared with the rows and arrays that the test wrote to the folder; pixels are decoded from the page.
"""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from report_html import parse
from report_run import MEASURES, eval_row, evaluated, groups, make_run, shown, small_run, train_row

from prefgrpo.report import page as report_page
from prefgrpo.report import write_report
from prefgrpo.report.charts import LEFT, RIGHT, WIDTH
from prefgrpo.report.run import read_run
from prefgrpo.rollout.render import preview

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


def curve(figure, name):
    """(x, y) of a series by its legend name, as given to the page's script."""
    names = [span.text for span in figure.all("div", "legend")[0].all("span")]
    return json.loads(figure.attributes["data-chart"])["s"][next(k for k, n in enumerate(names) if n.startswith(name))]


def image(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))


def pixels(element):
    return np.asarray(image(element.attributes["src" if element.tag == "img" else "href"]).convert("RGB"))


def arrays(file):
    with np.load(file) as stored:
        return dict(stored)


def test_page_refers_to_nothing_outside_itself(page, run):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 3e6 and not page.all("link") and not page.all("iframe")
    assert all("src" not in script.attributes for script in page.all("script"))
    nodes = page.all()
    targets = [n.attributes[k] for n in nodes for k in ("src", "href", "xlink:href", "srcset") if k in n.attributes]
    assert targets and all(t.startswith(("data:image/", "#")) for t in targets)
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#hatch"} and "@import" not in text
    assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"base64,[^\"]*", "", text))
    ids = [n.attributes["id"] for n in nodes if "id" in n.attributes]
    assert len(ids) == len(set(ids)) and {n.attributes["href"][1:] for n in page.all("use")} | {"hatch"} <= set(ids)
    before = {p.name for p in run.iterdir()}
    assert write_report(run) == run / "report.html" and {p.name for p in run.iterdir()} == before


def test_light_and_dark_define_every_colour_that_is_used():
    css = (report_page.Path(report_page.__file__).parent / "page.css").read_text()
    used = set(re.findall(r"var\((--\w+)\)", css)) - {"--at", "--column"}  # the page's script sets these
    light, dark, printed = (set(re.findall(r"(--\w+):", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S))
    assert light == dark == used and printed < used


def test_the_headline_and_the_table_hold_the_last_evaluations(page):
    row = eval_row(STEPS, STEPS, "test")
    shown = {f.all("h2")[0].text: f.all("p", "value")[0].text for f in page.all("div", "figure")}
    assert shown.pop("Win rate by the judge") == f"{100 * row['test/win_judge']:.0f} %"
    assert shown.pop("Win rate by scenes") == f"{100 * row['test/win_scenes']:.0f} %"
    moved = {m.replace(".", " · "): f"{row[f'test/{m}_before']:.2f} → {row[f'test/{m}']:.2f}" for m in MEASURES}
    assert shown == moved
    sentence = page.all("p", "result")[0].text
    low, high = row["test/win_judge_low"], row["test/win_judge_high"]
    assert f"95 % interval {100 * low:.0f}–{100 * high:.0f} %" in sentence and f"After {STEPS} steps" in sentence
    detail = page.all("p", "detail")[0].text
    assert f"shown first {100 * row['test/win_judge_first']:.0f} %" in detail and not page.all("p", "status")
    cells = [tuple(c.text for c in r.all("td")) for r in page.all("details", "numbers")[0].all("tr")[1:]]
    for name in ("dev", "test"):
        row = eval_row(STEPS, STEPS, name)
        values = {(c[0], c[3], c[4]) for c in cells if c[1] == name}
        assert ("win rate by judge", "", f"{row[f'{name}/win_judge']:.3f}") in values
        assert ("scenes · all", f"{row[f'{name}/scenes.all_before']:.3f}", f"{row[f'{name}/scenes.all']:.3f}") in values


def test_images_are_the_stored_pixels_and_prompts(page, run):
    last = arrays(run / "eval" / f"test_{STEPS:06d}.npz")
    pairs = page.all("figure", "pair")
    assert [p.all("figcaption")[0].text for p in pairs] == json.loads((run / "eval" / "test_prompts.json").read_text())
    for k, pair in enumerate(pairs):
        left, right = pair.all("img")
        assert "sharp" in left.attributes["class"]
        np.testing.assert_array_equal(pixels(left), last["before"][k])
        np.testing.assert_array_equal(pixels(right), last["now"][k])
    table = page.all("table", "course")[0]
    assert [th.text for th in table.all("thead")[0].all("th")] == ["", "start", "20", "40", "60", "80"]
    first = table.all("tbody")[0].all("tr")[0].all("img")
    np.testing.assert_array_equal(pixels(first[2]), arrays(run / "eval" / "dev_000040.npz")["now"][0])


def test_clips_play_and_edits_show_their_sources(tmp_path):
    """Clips of noise, the worst case for WebP: every frame is on the page, and the page stays small; sources are shown
    beside the pairs, in the corner of a judged group, and in the viewer."""
    folder = make_run(tmp_path / "clips", steps=40, every=20)
    rng = np.random.default_rng(0)
    kept = preview(rng.integers(0, 256, (4, 33, 240, 416, 3), dtype=np.uint8))
    assert kept.shape == (4, 16, 147, 256, 3)
    sources = rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    np.savez(folder / "eval" / "test_sources.npz", sources=sources)
    for file in (folder / "eval").glob("*_0*.npz"):
        np.savez_compressed(file, before=kept, now=kept[::-1])
    (file, *_) = sorted((folder / "groups").iterdir())
    np.savez(file, **arrays(file) | {"sources": sources[:2]})
    page = report(folder)
    assert (folder / "report.html").stat().st_size < 3e6
    pairs = page.all("figure", "pair")
    assert len(pairs) == 4 and [s.text for s in pairs[0].all("small")] == ["source", "before", "after"]
    source, *clips = pairs[0].all("img")
    np.testing.assert_array_equal(pixels(source), sources[0])
    for clip in (image(c.attributes["src"]) for c in clips):
        assert clip.n_frames == 16 and clip.info["loop"] == 0
    course = page.all("table", "course")[0].all("img")[0].attributes["src"]
    assert getattr(image(course), "n_frames", 1) == 1
    corners = [i for i in page.all("image") if i.attributes["id"].endswith("-source")]
    assert len(corners) == 2 and "The source image is in the corner." in page.text
    for corner, source in zip(corners, sources, strict=False):
        np.testing.assert_array_equal(pixels(corner), source)
    (script,) = [s for s in page.all("script") if s.attributes.get("id") == "items"]
    items = {item["id"]: item for item in json.loads(script.text)}
    ident = corners[1].attributes["id"]
    assert items[ident.replace("source", "0-3")]["media"][0] == ["source", ident]


def test_curves_carry_the_logged_values(page):
    found = charts(page)
    assert list(found)[:14] == [
        "Win rate against the initial model", "Measured: scenes", "Reward: std within a group", "Judge: consistency",
        "Clipped", "KL divergence", "Policy ratio − 1", "Groups without signal", "Gradient norm", "Judge: latency",
        "Judge: failures", "Time per step", "Judge overlap", "loss",
    ]  # fmt: skip
    assert "to the initial policy" not in found["KL divergence"].text  # kl_coef 0: the KL was never computed
    x, y = curve(found["Win rate against the initial model"], "by judge")
    assert x == [0, 20, 40, 60, 80] and found["Win rate against the initial model"].all("path", "band")
    np.testing.assert_allclose(y, [100 * eval_row(s, STEPS, "dev")["dev/win_judge"] for s in x], rtol=1e-3)
    rows = [train_row(s) for s in range(1, STEPS + 1)]
    x, y = curve(found["Gradient norm"], "before clipping")
    assert x == list(range(1, STEPS + 1))
    np.testing.assert_allclose(y, [r["grad_norm"] for r in rows], rtol=1e-3)
    y = curve(found["Clipped"], "above")[1]
    np.testing.assert_allclose(y, [100 * r["policy/clip_fraction_high"] for r in rows], rtol=1e-3)


def test_win_rates_inside_a_group_give_no_mean_curve_but_other_rewards_do(tmp_path):
    rows = [train_row(s) | {"reward/clip": 20.0 + s, "reward/clip_std": 1.5} for s in range(1, 5)]
    found = charts(report(small_run(tmp_path / "r", rows)))
    assert "Reward: vlm pairwise" not in found
    assert curve(found["Reward: clip"], "mean")[1] == [21, 22, 23, 24]
    assert curve(found["Reward: std within a group"], "clip")[1] == [1.5] * 4


def test_rewards_of_ones_own_go_by_their_function(tmp_path):
    """Named by file or module, with dots, slashes and colons in the name; each part is a line in its reward's chart."""
    file, module = "my/rewards.py:right_colour", "pkg.rewards.Shade"
    own, ends = {f"reward/{file}_std": 1.5, f"reward/{file}/missing_rate": 0.1}, ("_before", "", ".all", ".all_before")
    rows = [train_row(s) | own | {f"reward/{file}": 20.0 + s} for s in range(1, 5)]
    measured = {f"dev/{name}{end}": k for name in (file, module) for k, end in enumerate(ends)}
    page = report(small_run(tmp_path / "r", [*rows, eval_row(4, 4, "dev") | measured | {f"dev/win_{file}": 0.6}]))
    found = charts(page)
    assert curve(found["Reward: right colour"], "mean")[1] == [21, 22, 23, 24]
    assert "right colour" in found["Reward: std within a group"].text
    for name in ("right colour", "pkg · rewards · Shade"):
        assert [curve(found[f"Measured: {name}"], line)[1] for line in ("overall", "all")] == [[1], [2]]
    shown = {f.all("h2")[0].text: f.all("p", "value")[0].text for f in page.all("div", "figure")}
    assert shown["right colour"] == "0.00 → 1.00" and shown["Win rate by right colour"] == "60 %"
    assert "missing rate" not in " ".join(found) and ".py" not in page.all("section")[0].text


SUBJECTS = {
    "{model: org/FLUX, family: flux, train: {lora_rank: 8, objective: grpo}, reward: {spec: vlm_pairwise}}": (
        "LoRA of rank 8 on org/FLUX (flux), trained by grpo on vlm pairwise"
    ),
    "{model: /a/b/c, train: {lora_rank: 0, objective: 'mine.py:Loss'}, reward: {spec: 'clip:0.7,x.py:f:0.3,ocr:0'}}": (
        "All weights of b/c, trained by Loss on 0.7 clip + 0.3 f"
    ),
    "{model: tiny/flux, reward: {spec: 'a:b:c:d'}}": "tiny/flux",
    "{model: m, train: {objective: nft}, reward: {spec: 'clip:0.7,own:0.3', options: {own: {python: __main__.own}}}}": (
        "m, trained by nft on 0.7 clip + 0.3 own"
    ),
}


@pytest.mark.parametrize("config", SUBJECTS)
def test_what_was_trained_stands_under_the_name(tmp_path, config):
    page = report(small_run(tmp_path / "r", [train_row(1)], config))
    assert page.all("p", "subject")[0].text == SUBJECTS[config]


def test_evaluations_after_the_training_have_a_section(tmp_path):
    """A suite's table and a comparison as `prefgrpo evaluate` writes them; damaged files are reported by name."""
    folder = small_run(tmp_path / "r", [train_row(1)])
    evaluated(folder)
    for name, text in {"torn/comparison": "{", "list/x": "[1]", "other/x": "{}", "unigenbench/about": "torn"}.items():
        file = folder / "evaluations" / "step_000001_ema" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    page = report(folder)
    assert "Evaluations" in page.all("nav")[0].text
    (section,) = (s for s in page.all("section") if s.attributes["id"] == "evaluations")
    assert [s.text for s in section.all("summary")] == [
        "step 1 (ema) against base: 75.0 % by judge2 on dev, better",
        "UniGenBench, step 1 (ema): 12.50 %",
        "What is missing",
    ]  # fmt: skip
    cells = [[c.text for c in row.all("td")] for row in section.all("tr")]
    for wanted in (
        ["dev · judge2", "75.0 %", "60.0 % to 90.0 %", "70.0 %, –", "0.0 %", "better"],
        ["dev · scenes · all", "–", "0.50", "25.0 %"],
        ["overall", "12.50 %"], ["Style", "25.00 %", "8", "1"], ["Attribute", "–", "0", "3"],
    ):  # fmt: skip
        assert wanted in cells
    lines = [line.text for line in section.all("li")]
    assert lines[:2] == ["0.png: no", "1.png: no"] and lines[-1].startswith("… and 5 more")
    assert "40 prompts (dev)" in section.text and "judge2 is x" in section.text and "by <a judge>" in section.text
    assert "step_000001_ema/torn/comparison.json could not be read" in page.all("p", "problems")[0].text


def test_verdict_matrix_is_sorted_and_complete(page, run):
    group, figure = read_run(run).groups[0], page.all("figure", "group")[0]
    assert figure.all("figcaption")[0].text.startswith(group.prompt)
    images = {i.attributes["id"]: i for i in figure.all("image")}
    order = np.argsort(-group.rates, kind="stable")
    rows = sorted((u for u in figure.all("use") if u.attributes["x"] == "0"), key=lambda u: float(u.attributes["y"]))
    assert len(images) == len(rows) == len(order)
    for place, use in zip(order, rows):
        np.testing.assert_array_equal(pixels(images[use.attributes["href"][1:]]), group.images[place])
    assert len(figure.all("rect", "missing")) == 2
    p = (group.wins / np.where(group.counts > 0, group.counts, np.nan))[np.ix_(order, order)]
    np.testing.assert_allclose([float(t.text) for t in figure.all("text", "number")], p[~np.isnan(p)], atol=0.005)
    for kind, values in {"win": p[p > 0.5], "lose": p[p < 0.5]}.items():
        opacity = [float(r.attributes["fill-opacity"]) for r in figure.all("rect", kind)]
        np.testing.assert_allclose(opacity, np.abs(values - 0.5) * 2, atol=1e-4)


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
        assert not page.all("div", "figure") and not page.all("figure", "pair") and not page.all("figure", "group")
        assert ("Gradient norm" in charts(page)) is (steps > 0)


def test_a_single_step_shows_as_points(tmp_path):
    found = charts(report(small_run(tmp_path / "r", [train_row(1)])))
    (delay,) = curve(found["Judge: latency"], "median")[1]
    assert delay == pytest.approx(1000 * train_row(1)["time/judge/latency_p50"], rel=1e-3)
    for title in ("Gradient norm", "Policy ratio − 1", "Judge: latency"):
        circles = found[title].all("circle")
        assert circles and all(LEFT <= float(c.attributes["cx"]) <= WIDTH - RIGHT for c in circles), title
    areas = found["Time per step"].all("path", "area")
    assert len(areas) == 3
    for area in areas:
        xs = [float(v) for v in re.findall(r"[ML](-?[\d.]+),", area.attributes["d"])]
        assert max(xs) - min(xs) > 10


def test_missing_keys_nulls_and_text_in_numbers_are_gaps(tmp_path):
    rows = [train_row(s) | {"policy/approx_kl": None} for s in range(1, 6)]
    rows[2]["grad_norm"] = None
    del rows[3]["policy/ratio_min"]
    rows[1]["time/judge/latency_p95"] = "slow"
    for row in rows:
        del row["advantage/zero_groups"]
    found = charts(report(small_run(tmp_path / "r", [*rows, {"kind": "train", "step": None}, {"kind": "train"}, [1]])))
    assert curve(found["Gradient norm"], "before")[1][2] is None
    assert curve(found["Judge: latency"], "95")[1][1] is None
    assert "KL divergence" not in found and "Groups without signal" not in found
    assert "nan" not in found["Gradient norm"].all("svg")[0].text
    assert all("nan" not in p.attributes["d"] for f in found.values() for p in f.all("path"))


def test_a_torn_last_line_and_an_unfinished_run(tmp_path):
    folder = make_run(tmp_path / "r", steps=40, every=20, planned=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 41, "grad_no')
    page = report(folder)
    assert "40 of 100 steps so far" in page.all("p", "status")[0].text
    assert page.all("h1")[0].text == "demo" and "(dev)" in page.all("p", "result")[0].text
    assert curve(charts(page)["Gradient norm"], "before")[0][-1] == 40


def test_the_time_limit_is_an_end_once_the_product_is_there(tmp_path):
    folder = small_run(tmp_path / "r", [train_row(4)], "train: {steps: 10, max_minutes: 2.0}\n")
    assert report(folder).all("p", "status")
    (folder / "lora").mkdir()
    assert not report(folder).all("p", "status")


def wrong_arrays():
    file = io.BytesIO()
    np.savez(file, images=np.zeros((1, 2, 4, 4, 3), np.uint8))
    return file.getvalue()


DAMAGED = "could not be read: the file is damaged"
DAMAGE = {
    "metrics.jsonl": (lambda data: data.replace(b'{"kind": "train", "step": 2', b'{"kind": "tr', 1), "(4)"),
    "config.yaml": (lambda data: b"train: {steps: [\n", "could not be read"),
    "eval/dev_000020.npz": (lambda data: b"PK\x03\x04 torn", DAMAGED),
    "eval/dev_000040.npz": (lambda data: b"", DAMAGED),
    "groups/step_000020.npz": (lambda data: data[:300] + bytes(300) + data[600:], DAMAGED),
    "groups/step_000040.npz": (lambda data: wrong_arrays(), "does not have the expected content"),
    "eval/test_000040.json": (lambda data: b"[1]", "does not have the expected content"),
    "eval/test_prompts.json": (lambda data: b"\xff", "could not be read"),
}


def test_damaged_files_are_left_out_and_named_in_plain_words(tmp_path):
    folder = make_run(tmp_path / "r", steps=40, every=20)
    for name, (damage, _) in DAMAGE.items():
        file = folder / name
        file.write_bytes(damage(file.read_bytes()))
    (folder / "eval" / "dev_prompts.json").unlink()
    page = report(folder)
    (problem,) = page.all("p", "problems")
    assert "dev_prompts.json is missing" in problem.text and "pickle" not in problem.text
    for name, (_, said) in DAMAGE.items():
        assert f"{name.rpartition('/')[2]} {said}" in problem.text
    assert len(page.all("figure", "pair")) == 12 and not page.all("figure", "group")
    assert "(test)" in page.all("p", "result")[0].text and curve(charts(page)["Gradient norm"], "before")[0][-1] == 40


def test_hostile_text_is_shown_and_not_run(tmp_path):
    evil = "<script>alert(1)</script> & \"quotes' </svg></figure> ü 猫"
    folder = make_run(tmp_path / "r", steps=20, every=20)
    (folder / "eval" / "test_prompts.json").write_text(json.dumps([evil] * 12))
    file = folder / "groups" / "step_000020.npz"
    np.savez(file, **arrays(file) | {"prompts": np.array([evil, "fine"])})
    row = {"reward/<b>x": 1.0, "reward/<b>x_std": 1.0, "odd/<i>": 2.0}
    rows = [train_row(1) | row, eval_row(20, 20, "test")]
    small_run(folder, rows, f"name: {json.dumps(evil)}\nmodel: '</pre><img src=x onerror=y>'\n")
    page = report(folder)
    assert len(page.all("script")) == 2 and all("onerror" not in n.attributes for n in page.all())
    assert page.all("h1")[0].text == evil and page.all("figure", "pair")[0].all("figcaption")[0].text == evil
    assert page.all("figure", "group")[0].all("figcaption")[0].text.startswith(evil)
    assert "<img src=x onerror=y>" in page.all("pre")[0].text
    assert "Reward: <b>x" in charts(page) and "odd · <i>" in charts(page)


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
    assert "Each point stands for 8 steps" in charts(page)["Gradient norm"].text
