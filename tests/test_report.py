"""The report of a run, read back as HTML.

A reader trusts three things: the page needs nothing but itself, every number and pixel on it is one that the run
wrote, and a run at any stage (no evaluation, one step, torn or damaged files, hostile prompts) still gives a page.
Values are compared with the rows and arrays that the test put into the folder; pixels are decoded from the page.
"""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from report_html import parse
from report_run import MEASURES, eval_row, groups, make_run, shown, train_row, write_rows

from prefgrpo.report import write_report
from prefgrpo.report.charts import LEFT, RIGHT, WIDTH
from prefgrpo.report.run import read_run

STEPS = 80


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "demo", steps=STEPS, every=20)


@pytest.fixture(scope="module")
def page(run):
    return parse(write_report(run).read_text(encoding="utf-8"))


def report(folder):
    return parse(write_report(folder).read_text(encoding="utf-8"))


def charts(page):
    """Title → figure element."""
    return {f.all("h3")[0].text: f for f in page.all("figure", "chart")}


def curve(figure, name):
    """(x, y) of a series by its legend name, as the page's script gets them."""
    names = [s.text.rsplit(" ", 1)[0] for s in figure.all("div", "legend")[0].all("span")]
    at = next(k for k, n in enumerate(names) if n.startswith(name))
    return json.loads(figure.attributes["data-chart"])["s"][at]


def decoded(uri):
    """Pixels of a data: address."""
    head, body = uri.split(",", 1)
    assert re.fullmatch(r"data:image/(png|webp);base64", head)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body))).convert("RGB"))


def mean_row(step, **changes):
    row = train_row(step, STEPS, np.random.default_rng(step)) | changes
    return {k: v for k, v in row.items() if v != "absent"}


def small_run(folder, rows, config="train: {steps: 10}\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    write_rows(folder, rows)
    return folder


# ---- one page, whole in itself -------------------------------------------------------------------------------------


def test_page_refers_to_nothing_outside_itself(page, run):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 3e6
    assert not page.all("link") and not page.all("iframe")
    assert len(page.all("script")) == 1 and "src" not in page.all("script")[0].attributes
    nodes = page.all()
    targets = [n.attributes[k] for n in nodes for k in ("src", "href", "xlink:href", "srcset") if k in n.attributes]
    assert targets and all(t.startswith(("data:image/", "#")) for t in targets)
    inside = re.findall(r"url\(([^)]*)\)", text)
    assert set(inside) == {"#hatch"} and "@import" not in text
    assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"base64,[^\"]*", "", text))


def test_identifiers_are_unique_and_every_reference_resolves(page):
    ids = [n.attributes["id"] for n in page.all() if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    used = {n.attributes["href"][1:] for n in page.all("use")} | {"hatch"}
    assert used <= set(ids)


def test_both_colour_schemes_and_print_define_every_colour_that_is_used():
    from prefgrpo.report import page as module

    css = (module.Path(module.__file__).parent / "page.css").read_text()
    used = set(re.findall(r"var\((--\w+)\)", css))
    blocks = [set(re.findall(r"(--\w+):", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)]
    assert len(blocks) == 3 and all(b == used for b in blocks)


def test_page_can_be_written_again_and_leaves_no_other_file(run):
    before = {p.name for p in run.iterdir()}
    assert write_report(run) == run / "report.html"
    assert {p.name for p in run.iterdir()} == before | {"report.html"}


# ---- what it says is what was measured -----------------------------------------------------------------------------


def test_a_run_without_an_evaluation_set_says_so(tmp_path):
    rows = [mean_row(s) for s in range(1, 11)]
    assert "had no evaluation set" in report(small_run(tmp_path / "r", rows)).all("p", "result")[0].text
    assert "no result to tell" in report(small_run(tmp_path / "s", rows[:3])).all("p", "result")[0].text


def test_headline_is_the_last_test_evaluation(page):
    row = eval_row(STEPS, STEPS, "test")
    told = {f.all("h2")[0].text: f.all("p", "value")[0].text for f in page.all("div", "figure")}
    assert told["Win rate by the judge"] == f"{100 * row['test/win_judge']:.0f} %"
    assert told["Win rate by scenes"] == f"{100 * row['test/win_scenes']:.0f} %"
    for measure in MEASURES:
        before, after = row[f"test/{measure}_before"], row[f"test/{measure}"]
        assert told[measure.replace(".", " · ")] == f"{before:.2f} → {after:.2f}"
    sentence = page.all("p", "result")[0].text
    low, high = row["test/win_judge_low"], row["test/win_judge_high"]
    assert f"95 % interval {100 * low:.0f}–{100 * high:.0f} %" in sentence and f"After {STEPS} steps" in sentence
    assert f"shown first {100 * row['test/win_judge_first']:.0f} %" in sentence
    assert not page.all("p", "status")


def test_table_holds_every_number_of_both_sets(page):
    cells = [tuple(c.text for c in r.all("td")) for r in page.all("details", "numbers")[0].all("tr")[1:]]
    for name in ("dev", "test"):
        row = eval_row(STEPS, STEPS, name)
        values = {(c[0], c[3], c[4]) for c in cells if c[1] == name}
        assert ("win rate by judge", "", f"{row[f'{name}/win_judge']:.3f}") in values
        assert ("scenes · all", f"{row[f'{name}/scenes.all_before']:.3f}", f"{row[f'{name}/scenes.all']:.3f}") in values


def test_before_and_after_show_the_stored_pixels_and_prompts(page, run):
    with np.load(run / "eval" / f"test_{STEPS:06d}.npz") as stored:
        before, now = stored["before"], stored["now"]
    prompts = json.loads((run / "eval" / "test_prompts.json").read_text())
    pairs = page.all("figure", "pair")
    assert [p.all("figcaption")[0].text for p in pairs] == prompts
    for k, pair in enumerate(pairs):
        left, right = pair.all("img")
        assert "sharp" in left.attributes["class"]
        np.testing.assert_array_equal(decoded(left.attributes["src"]), before[k])
        np.testing.assert_array_equal(decoded(right.attributes["src"]), now[k])


def test_clips_play_and_edits_show_their_sources(tmp_path):
    """Noise clips, the largest that WebP makes of them: every frame is on the page, and the page stays small."""
    from prefgrpo.rollout.render import preview

    folder = make_run(tmp_path / "clips", steps=40, every=20)
    rng = np.random.default_rng(0)
    clips = rng.integers(0, 256, (12, 33, 240, 416, 3), dtype=np.uint8)
    kept = preview(clips)
    assert kept.shape == (12, 16, 147, 256, 3)
    sources = rng.integers(0, 256, (12, 64, 64, 3), dtype=np.uint8)
    np.savez(folder / "eval" / "test_sources.npz", sources=sources)
    for file in (folder / "eval").glob("*_0*.npz"):
        np.savez_compressed(file, before=kept, now=kept[::-1])
    text = write_report(folder).read_text(encoding="utf-8")
    assert len(text.encode()) < 8e6
    pairs = parse(text).all("figure", "pair")
    assert len(pairs) == 12 and [s.text for s in pairs[0].all("small")] == ["source", "before", "after"]
    source, before, now = (img.attributes["src"] for img in pairs[0].all("img"))
    np.testing.assert_array_equal(decoded(source), sources[0])
    for uri in (before, now):
        clip = Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))
        assert clip.n_frames == 16 and clip.info["loop"] == 0
    course = parse(text).all("table", "course")[0].all("img")[0].attributes["src"]
    assert getattr(Image.open(io.BytesIO(base64.b64decode(course.split(",", 1)[1]))), "n_frames", 1) == 1


def test_course_shows_the_same_prompts_at_every_evaluation(page, run):
    table = page.all("table", "course")[0]
    assert [th.text for th in table.all("thead")[0].all("th")] == ["", "start", "20", "40", "60", "80"]
    with np.load(run / "eval" / "dev_000040.npz") as stored:
        now = stored["now"]
    first = table.all("tbody")[0].all("tr")[0].all("img")
    np.testing.assert_array_equal(decoded(first[2].attributes["src"]), now[0])


def test_curves_carry_the_logged_values(page):
    found = charts(page)
    x, y = curve(found["Win rate against the start"], "by judge")
    assert x == [0, 20, 40, 60, 80]
    expected = [100 * eval_row(s, STEPS, "dev")["dev/win_judge"] for s in x]
    np.testing.assert_allclose(y, expected, rtol=1e-3)
    assert found["Win rate against the start"].all("path", "band")
    rng = np.random.default_rng(0)
    rows = [train_row(s, STEPS, rng) for s in range(1, STEPS + 1)]
    x, y = curve(found["Gradient norm"], "before clipping")
    assert x == list(range(1, STEPS + 1))
    np.testing.assert_allclose(y, [r["grad_norm"] for r in rows], rtol=1e-3)
    _, y = curve(found["Clipped"], "above")
    np.testing.assert_allclose(y, [100 * r["policy/clip_fraction_high"] for r in rows], rtol=1e-3)


def test_every_asked_for_curve_is_there_and_unmeasured_ones_are_not(page):
    assert list(charts(page))[:14] == [
        "Win rate against the start", "Measured: scenes", "Reward: std within a group", "Groups without signal",
        "Policy ratio − 1", "Clipped", "KL divergence", "Gradient norm", "Judge: latency", "Judge: failures",
        "Judge: consistency", "Time per step", "Judge overlap", "advantage · max",
    ]  # fmt: skip
    assert "to the start" not in charts(page)["KL divergence"].text  # kl_coef 0: the KL was never computed


def test_win_rates_inside_a_group_give_no_mean_curve_but_other_rewards_do(tmp_path):
    rows = [mean_row(s, **{"reward/clip": 20.0 + s, "reward/clip_std": 1.5}) for s in range(1, 5)]
    found = charts(report(small_run(tmp_path / "r", rows)))
    assert "Reward: vlm pairwise" not in found
    assert curve(found["Reward: clip"], "mean")[1] == [21, 22, 23, 24]
    assert curve(found["Reward: std within a group"], "clip")[1] == [1.5] * 4


def test_verdict_matrix_is_sorted_and_complete(page, run):
    group = read_run(run).groups[0]
    figure = page.all("figure", "group")[0]
    size = len(group.rates)
    assert figure.all("figcaption")[0].text.startswith(group.prompt)
    images = {i.attributes["id"]: i.attributes["href"] for i in figure.all("image")}
    assert len(images) == size
    order = np.argsort(-group.rates, kind="stable")
    rows = sorted((u for u in figure.all("use") if u.attributes["x"] == "0"), key=lambda u: float(u.attributes["y"]))
    for place, use in enumerate(rows):
        np.testing.assert_array_equal(decoded(images[use.attributes["href"][1:]]), group.images[order[place]])
    assert len(figure.all("rect", "missing")) == 2
    written = [float(t.text) for t in figure.all("text", "number")]
    p = (group.wins / np.where(group.counts > 0, group.counts, np.nan))[np.ix_(order, order)]
    np.testing.assert_allclose(written, p[~np.isnan(p)], atol=0.005)
    strong = {"win": p[p > 0.5], "lose": p[p < 0.5]}
    for kind, values in strong.items():
        opacity = [float(r.attributes["fill-opacity"]) for r in figure.all("rect", kind)]
        np.testing.assert_allclose(opacity, np.abs(values - 0.5) * 2, atol=1e-4)


def test_a_member_without_any_verdict_is_missing_and_last(tmp_path):
    folder = small_run(tmp_path / "r", [mean_row(1)])
    groups(folder, 1, k=1, size=4, missing=False)
    with np.load(folder / "groups" / "step_000001.npz") as stored:
        data = dict(stored)
    data["counts"][0, 2, :] = data["counts"][0, :, 2] = data["wins"][0, 2, :] = data["wins"][0, :, 2] = 0
    data["rates"][0, 2] = np.nan
    np.savez(folder / "groups" / "step_000001.npz", **data)
    figure = report(folder).all("figure", "group")[0]
    assert len(figure.all("rect", "missing")) == 6
    texts = [t for t in figure.all("text") if t.text == "missing"]
    assert len(texts) == 1 and float(texts[0].attributes["y"]) > 4 * 40


# ---- any stage, any damage -----------------------------------------------------------------------------------------


def test_a_run_without_evaluations_and_groups_says_so(tmp_path):
    page = report(small_run(tmp_path / "r", [mean_row(s) for s in range(1, 4)]))
    assert "3 of 10 steps so far" in page.all("p", "status")[0].text
    assert "no result to tell" in page.all("p", "result")[0].text
    assert not page.all("div", "figure") and not page.all("figure", "pair") and not page.all("figure", "group")
    assert "Win rate against the start" not in charts(page) and "Gradient norm" in charts(page)


def test_the_evaluation_of_the_start_alone_is_no_result(tmp_path):
    folder = small_run(tmp_path / "r", [eval_row(0, 10, "dev")])
    shown(folder, "dev", 0, 10)
    page = report(folder)
    assert "no result to tell" in page.text and not page.all("div", "figure") and not page.all("figure", "pair")
    assert "0 of 10 steps so far" in page.all("p", "status")[0].text


def test_a_single_step_shows_as_points(tmp_path):
    found = charts(report(small_run(tmp_path / "r", [mean_row(1)])))
    assert curve(found["Judge: latency"], "median")[1][0] == pytest.approx(
        1000 * mean_row(1)["time/judge/latency_p50"], rel=1e-3
    )
    for title in ("Gradient norm", "Policy ratio − 1", "Judge: latency"):
        circles = found[title].all("circle")
        assert circles and all(LEFT <= float(c.attributes["cx"]) <= WIDTH - RIGHT for c in circles), title
    areas = found["Time per step"].all("path", "area")
    assert len(areas) == 3
    for area in areas:
        xs = [float(v) for v in re.findall(r"[ML](-?[\d.]+),", area.attributes["d"])]
        assert max(xs) - min(xs) > 10


def test_missing_keys_nulls_and_text_in_numbers_are_gaps(tmp_path):
    rows = [mean_row(s) for s in range(1, 6)]
    rows[2]["grad_norm"] = None
    del rows[3]["policy/ratio_min"]
    rows[1]["time/judge/latency_p95"] = "slow"
    for row in rows:
        del row["advantage/zero_groups"]
        row["policy/approx_kl"] = None
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
    folder = small_run(tmp_path / "r", [mean_row(4)], "train: {steps: 10, max_minutes: 2.0}\n")
    assert report(folder).all("p", "status")
    (folder / "lora").mkdir()
    assert not report(folder).all("p", "status")


def test_damaged_files_are_left_out_and_named(tmp_path):
    folder = make_run(tmp_path / "r", steps=40, every=20)
    (folder / "eval" / "dev_000020.npz").write_bytes(b"PK\x03\x04 torn")
    (folder / "groups" / "step_000020.npz").write_bytes(b"")
    np.savez(folder / "groups" / "step_000040.npz", images=np.zeros((1, 2, 4, 4, 3), np.uint8))
    (folder / "eval" / "test_prompts.json").unlink()
    (folder / "config.yaml").write_text("train: {steps: [\n")
    page = report(folder)
    told = page.all("p", "problems")[0].text
    for name in ("dev_000020.npz", "step_000020.npz", "step_000040.npz", "test_prompts.json", "config.yaml"):
        assert name in told
    assert len(page.all("figure", "pair")) == 12 and not page.all("figure", "group")


def test_hostile_text_is_shown_and_not_run(tmp_path):
    evil = "<script>alert(1)</script> & \"quotes' </svg></figure> ü 猫"
    folder = make_run(tmp_path / "r", steps=20, every=20)
    count = len(json.loads((folder / "eval" / "test_prompts.json").read_text()))
    (folder / "eval" / "test_prompts.json").write_text(json.dumps([evil] * count))
    with np.load(folder / "groups" / "step_000020.npz") as stored:
        data = dict(stored) | {"prompts": np.array([evil, "fine"])}
    np.savez(folder / "groups" / "step_000020.npz", **data)
    (folder / "config.yaml").write_text(f"name: {json.dumps(evil)}\nmodel: '</pre><img src=x onerror=y>'\n")
    row = {"reward/<b>x": 1.0, "reward/<b>x_std": 1.0, "odd/<i>": 2.0}
    write_rows(folder, [mean_row(1, **row), eval_row(20, 20, "test")])
    page = report(folder)
    assert len(page.all("script")) == 1 and all("onerror" not in n.attributes for n in page.all())
    assert page.all("h1")[0].text == evil and page.all("figure", "pair")[0].all("figcaption")[0].text == evil
    assert page.all("figure", "group")[0].all("figcaption")[0].text.startswith(evil)
    assert "<img src=x onerror=y>" in page.all("pre")[0].text
    assert "Reward: <b>x" in charts(page) and "odd · <i>" in charts(page)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no run: expected config.yaml or metrics.jsonl"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_large_images_and_long_runs_stay_small(tmp_path):
    folder = small_run(tmp_path / "r", [mean_row(s) for s in range(1, 3001)], "train: {steps: 3000}\n")
    rng = np.random.default_rng(0)
    noise = np.kron(rng.integers(0, 256, (8, 64, 64, 3)), np.ones((1, 8, 8, 1))).astype(np.uint8)  # 512 × 512
    (folder / "eval").mkdir()
    np.savez(folder / "eval" / "dev_003000.npz", before=noise, now=noise[::-1])
    (folder / "eval" / "dev_prompts.json").write_text(json.dumps([f"prompt {k}" for k in range(8)]))
    write_rows(folder, [*(mean_row(s) for s in range(1, 3001)), eval_row(3000, 3000, "dev")])
    path = write_report(folder)
    page = parse(path.read_text())
    assert path.stat().st_size < 3e6
    image = page.all("figure", "pair")[0].all("img")[0]
    assert "smooth" in image.attributes["class"] and max(decoded(image.attributes["src"]).shape) == 384
    assert "Each point stands for 8 steps" in charts(page)["Gradient norm"].text
