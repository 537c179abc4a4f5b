"""The page of a run, read back as HTML: self-contained, readable in a browser, and no claim beyond what the run shows.

A page could mislead a reader with missing verdicts, few prompts, hostile text: expected texts follow from the numbers
in the run's files; pixels are decoded from the page.
"""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from prefgrpo.commands import cli
from prefgrpo.report import write_report
from prefgrpo.run.measures import JUDGE, Measure, Subject, compared
from tests.report.synthetic import (
    MEASURES,
    STEPS,
    arrays,
    cells,
    change,
    charts,
    eval_row,
    make_run,
    pixels,
    report,
    rows_of,
    shown,
    small_run,
    train_row,
)

NO_RESULT = "No evaluation has finished since training started"


def result(page):
    return next(s for s in page.all("section") if s.attributes["id"] == "result")


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
    row = eval_row(STEPS, STEPS, "test")
    sentence = page.all("p", "result")[0].text
    assert f"After {STEPS} steps" in sentence and not page.all("p", "status")
    assert f"{100 * row['test/win_judge']:.0f} % by the judge (trained on; " in sentence
    assert "interval" not in sentence  # 12 prompts are too few
    wins, rewards = page.all("details", "numbers")[0].all("table")
    assert [row[0] for row in rows_of(wins)][2:] == ["the judge trained on", "scenes independent"]
    assert [h.text for h in rewards.all("tbody")[1].all("th")] == [f"test, step {STEPS}"]
    for name in ("dev", "test"):
        row = eval_row(STEPS, STEPS, name)
        for measure in MEASURES:
            both = [row[f"{name}/{measure}{end}"] for end in ("_before", "")]
            places = len(f"{max(both):#.3g}".partition(".")[2])
            assert [measure, *(f"{value:.{places}f}" for value in both), ""] in rows_of(rewards)


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


def test_hostile_text_is_shown_and_not_run(tmp_path):
    evil = "<script>alert(1)</script> & \"quotes' </svg> </figure> ü 猫"
    folder = make_run(tmp_path / "r", steps=20, every=20)
    (folder / "eval" / "test_prompts.json").write_text(json.dumps([evil] * 12))
    file = folder / "groups" / "step_000020.npz"
    change(file, prompts=np.array([evil, "fine"]))
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


# ---- missing verdicts -----------------------------------------------------------------------------------------------

WIN = {"dev/win_judge": 0.0, "dev/win_judge_low": 0.0, "dev/win_judge_high": 0.0}


def lost(share, prompts):
    """Columns of an evaluation in which a share of the verdicts is missing."""
    return {"dev/win_judge_missing": share, "dev/win_judge_prompts": prompts}


MISSING = {  # columns of the evaluation's row, prompts with a verdict of 40, word, alarm
    "all there": ({}, 40, "worse", ""),
    "few missing": (lost(0.1, 36), 36, "worse", ""),
    "many missing": (lost(0.25, 30), 30, "worse", "verdicts by judge"),
    "too many missing": (lost(0.275, 29), 29, "inconclusive", "verdicts by judge"),
    "nearly all missing": (lost(0.975, 1), 1, "inconclusive", "verdicts by judge"),
    "one order missing": ({"dev/win_judge_second_missing": 1.0}, 40, "worse", "verdicts by judge"),
    "a reward missing": ({"dev/scenes_before_missing": 0.5, "dev/win_scenes_missing": 0.5}, 40, "worse", "by scenes"),
    "a reward always missing": ({"dev/ocr_missing": 1.0, "dev/ocr": None}, 40, "worse", "scores by ocr"),
    "a part that does not apply": ({"dev/scenes.place_missing": 0.5}, 40, "worse", ""),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_verdicts_weaken_the_result(tmp_path, case):
    row, judged, word, alarm = MISSING[case]
    folder = small_run(tmp_path / "r", [train_row(1), eval_row(10, 10, "dev") | WIN | row])
    shown(folder, "dev", 10)
    wins = [{"prompt": k, "wins": {"judge": 0.0 if k < judged else None}} for k in range(40)]
    (folder / "eval" / "dev_000010.json").write_text(json.dumps(wins))
    page = report(folder)
    assert page.all("strong", "conclusion")[0].text == word
    said = [line.text for part in page.all("ul", "alarms") for line in part.all("li")]
    assert len(said) == bool(alarm)
    assert all(alarm in line and "1 of 1 evaluations on dev more than 10 %" in line for line in said)
    share = row.get("dev/win_judge_missing", 0)
    said = page.all("p", "result")[0].text
    assert (f"no verdict on {percent(share)} of the samples" in said) is (share > 0)
    assert ("loses to the initial model" in said) is (word == "worse")
    bounds = f": {percent(0)} if all lost, {percent(share)} if all won"
    tally = f"0 / 0 / {judged}"
    assert cells(page, "wins")["the judge"] == [
        "0 %", "0–0 %" if judged >= 30 else "", tally + f" no verdict on {percent(share)}{bounds}" * (share > 0)
    ]  # fmt: skip
    assert ("50 % missing" in cells(page, "rewards")["scenes"][-1]) is ("dev/scenes_before_missing" in row)


def percent(share):
    return f"{100 * share:.0f} %" if share < 0.98 else f"{100 * share:.1f} %"


def test_missing_verdicts_that_could_turn_the_result_are_named(tmp_path):
    """60 % of what was judged was won: with 10 % missing at least 54 %, with 20 % missing 48 to 68 %."""
    rate = {"dev/win_judge": 0.6, "dev/win_judge_low": 0.55, "dev/win_judge_high": 0.65, "dev/win_judge_prompts": 200}
    for share, said in ((0.1, ""), (0.2, "but not if all missing verdicts had gone the other way")):
        row = eval_row(10, 10, "dev") | rate | {"dev/win_judge_missing": share}
        page = report(small_run(tmp_path / str(share), [train_row(1), row]))
        assert page.all("p", "certainty")[0].text == f"better {said}".strip()
        low = 60 * (1 - share)
        high = 60 * (1 - share) + 100 * share
        assert f"{low:.0f} % if all lost, {high:.0f} % if all won" in cells(page, "wins")["the judge"][-1]


def test_a_last_evaluation_without_verdicts_is_no_win(tmp_path):
    lost = dict.fromkeys(WIN) | {"dev/win_judge_missing": 1.0}
    rows = [train_row(1), eval_row(5, 10, "dev"), eval_row(10, 10, "dev") | lost]
    page = report(small_run(tmp_path / "r", rows))
    said = page.all("p", "result")[0].text
    assert "by the judge" not in said and "% by scenes" in said and "nan" not in said
    assert page.all("strong", "conclusion")[0].text == "inconclusive"
    assert cells(page, "wins")["the judge"] == ["–", "", "no verdict on 100 %"]


# ---- what the numbers are worth -------------------------------------------------------------------------------------

RECIPE = "train: {steps: 10}\nrewards: [{name: mine, weight: 1}, {name: watched, weight: 0}]\n"


def judged(folder, prompts, config=RECIPE):
    """A run whose last evaluation has four images of each prompt, with wins of random skill per prompt: by the judge
    `mine`, by a second judge and by a reward. (folder, prompt of each image [n], wins by name [n])"""
    rng = np.random.default_rng(prompts)
    prompt = np.repeat(np.arange(prompts), 4)
    skill = rng.beta(6, 2, prompts)[prompt]
    draw = {name: rng.random(len(prompt)) < skill for name in ("judge", "other", "watched")}
    wins = {name: np.where(rng.random(len(prompt)) < 0.2, 0.5, won.astype(float)) for name, won in draw.items()}
    value = rng.normal(0, 1, len(prompt)) + skill[:] + rng.normal(0, 1, prompts)[prompt]
    pairs = [
        {
            JUDGE: Measure(wins=float(wins["judge"][k])),
            Subject("other"): Measure(wins=float(wins["other"][k])),
            Subject("watched"): Measure(v, 0.25 * v, wins=float(wins["watched"][k])),
        }
        for k, v in enumerate(value.tolist())
    ]
    found = compared("dev", prompt, pairs).metrics()
    first = {"dev/win_judge_first": 0.875, "dev/win_judge_second": 0.625}
    trained = [train_row(step) | {"judge/position_bias": 0.5 + 0.01 * (step % 5)} for step in range(1, 41)]
    small_run(folder, [*trained, {"kind": "eval", "step": 40, "set": "dev"} | found | first], config)
    shown(folder, "dev", 40)
    pairs = len(np.load(folder / "eval" / "dev_000040.npz")["now"])
    answers = [{"judge": "mine", "first": "after", "p_first": 0.75, "reason": "", "raw": "x"}]
    stored = [{"prompt": int(p), "wins": {n: float(w[k]) for n, w in wins.items()}} for k, p in enumerate(prompt)]
    stored = [o | ({"answers": answers} if k < pairs else {}) for k, o in enumerate(stored)]
    (folder / "eval" / "dev_000040.json").write_text(json.dumps(stored))
    return report(folder), prompt, wins, 0.75 * value


def resampled(prompt, values):
    """Mean and standard error over prompts of the mean over images, without the product's bootstrap."""
    there = ~np.isnan(values)
    means = np.array([values[(prompt == p) & there].mean() for p in np.unique(prompt[there])])
    return values[there].mean(), means.std(ddof=1) / len(means) ** 0.5


def ends(text):
    return [float(number.replace("−", "-")) for number in re.findall(r"[−\d.]+", text.replace("–", " "))]


def test_rates_have_their_role_tally_and_interval(tmp_path):
    page, prompt, wins, change = judged(tmp_path / "r", 40)
    assert page.all("strong", "conclusion")[0].text == "better" and "beats the initial model" in result(page).text
    rows = cells(page, "wins")
    sentence = page.all("p", "result")[0].text
    for name, label in {"judge": "the judge trained on", "other": "other independent"}.items():
        rate, interval, tally = rows[label]
        mean, error = resampled(prompt, wins[name])
        assert rate == f"{100 * mean:.0f} %"
        np.testing.assert_allclose(ends(interval), 100 * (mean + np.array([-1.96, 1.96]) * error), atol=1.5)
        counts = [int((np.sign(wins[name] - 0.5) == side).sum()) for side in (1, 0, -1)]
        assert tally == " / ".join(map(str, counts)) and "{} won, {} tied, {} lost".format(*counts) in sentence
    mean, error = resampled(prompt, change)
    low, high = ends(cells(page, "rewards")["watched"][-1].replace(" to ", " "))
    np.testing.assert_allclose([low, high], mean + np.array([-1.96, 1.96]) * error, atol=0.12 * error)
    assert list(rows) == ["the judge trained on", "other independent", "watched independent"]


def test_notes_give_bias_agreement_and_that_several_rates_are_shown(tmp_path):
    page, _, wins, _ = judged(tmp_path / "r", 40)
    notes = page.all("ul", "notes")[0].text
    assert "3 win rates are shown" in notes
    assert "wins 88 % when its image is shown first, and 62 % when it is shown second" in notes
    assert "the image shown first won 52.0 % (95 % interval over steps 51." in notes
    for name in ("other", "watched"):
        both = (wins["judge"] != 0.5) & (wins[name] != 0.5)
        same = wins["judge"][both] == wins[name][both]
        text = f"{name} prefer the same image on {100 * same.mean():.0f} % of the {both.sum()} samples"
        assert text in notes and f"{text} where neither has a tie (95 % interval" in notes
    assert "here the policy is better by other, better by watched." in notes


def test_few_prompts_have_no_interval_and_beat_nobody(tmp_path):
    page, _, wins, _ = judged(tmp_path / "r", 29)
    text = result(page).text
    assert page.all("p", "certainty")[0].text == "inconclusive fewer than 30 prompts"
    assert "beats" not in text and "is not shown to differ from the initial model" in text
    assert all(row[1] == "" for row in cells(page, "wins").values()) and cells(page, "rewards")["watched"][-1] == ""
    assert "samples where neither has a tie." in text
    assert not page.all("figure", "chart")[0].all("path", "band")
    assert f"{int((wins['judge'] > 0.5).sum())} won" in text


def test_a_run_that_only_a_judge_measures_has_no_empty_table(tmp_path):
    row = {"kind": "eval", "step": 10, "set": "dev"} | {f"dev/{key}": 0.5 for key in ("win_judge", "win_judge_low")}
    page = report(small_run(tmp_path / "r", [train_row(1), row]))
    assert page.all("table", "wins") and not page.all("table", "rewards")


def test_rewards_are_told_apart_whatever_they_are_called(tmp_path):
    """The win rate of x is beside the values of win_x, and the judge's first order beside a reward judge_first."""
    names = ("x", "win_x", "judge_first", "judge")
    pair = {Subject(name): Measure(k / 4, 0.0, wins=k / 4) for k, name in enumerate(names)}
    row = compared("dev", range(40), [pair | {JUDGE: Measure(wins=1.0, first=0.5, second=0.25)}] * 40).metrics()
    page = report(small_run(tmp_path / "r", [train_row(1), {"kind": "eval", "step": 10, "set": "dev"} | row]))
    rates = {first: rest[0] for first, rest in cells(page, "wins").items()}
    assert rates == {"the judge": "100 %", "x": "0 %", "win_x": "25 %", "judge_first": "50 %", "judge": "75 %"}
    means = {first: rest[1] for first, rest in cells(page, "rewards").items()}
    assert means == {"x": "0.00", "win_x": "0.250", "judge_first": "0.500", "judge": "0.750"}
    assert "wins 50 % when its image is shown first, and 25 % when" in page.all("ul", "notes")[0].text


def test_the_page_names_no_folder_of_this_machine(tmp_path):
    """Absolute paths lose their folders; addresses and relative paths stay."""
    config = RECIPE + "model: /home/me/models/flux\njudge: {model: /data/judge, endpoints: ['http://h:1/v1/x']}\n"
    page, *_ = judged(tmp_path / "r", 30, config + "data: {prompts: prompts/train.txt, cache: '/var/cache/'}\n")
    for kept in ("…/flux", "…/judge", "http://h:1/v1/x", "prompts/train.txt"):
        assert kept in page.text
    assert not any(part in page.text for part in ("home", "models", "/data", "/var", str(tmp_path)))


# ---- where the page goes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "out", "said"),
    [
        ("a", "x.html", ""), ("a", "nodir/x.html", "No such file or directory"),
        ("c", "", "c is not a run folder: expected config.yaml or metrics.jsonl in it"),
    ],
    ids=["a file", "in no folder", "no run"],
)  # fmt: skip
def test_where_the_page_goes(tmp_path, monkeypatch, capsys, run, out, said):
    monkeypatch.chdir(tmp_path)
    small_run(tmp_path / "a", [train_row(1)])
    code = cli.main(["report", run, *(["--out", out] if out else [])])
    wrote = capsys.readouterr()
    assert code == (2 if said else 0) and said in wrote.err and "configuration has mistakes" not in wrote.err
    assert (tmp_path / (out or "none")).is_file() is (not said) and not list(tmp_path.rglob(".*"))
    assert not list(tmp_path.glob("[ab]/*.html"))


# ---- in a browser ----------------------------------------------------------------------------------------------------

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

MEASURE = """
const colour = text => text.match(/[0-9.]+/g).map(Number);
const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const weights = [0.2126, 0.7152, 0.0722];
const light = text => colour(text).slice(0, 3).map(linear).reduce((sum, v, k) => sum + v * weights[k], 0);
const ground = element => {
  for (let e = element; e; e = e.parentElement) {
    const found = getComputedStyle(e).backgroundColor;
    if (colour(found)[3] !== 0) return found;
  }
};
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const contrasts = [...page.querySelectorAll("h1, h2, h3, p, dt, dd, td, th, summary, small, a, li")]
    .filter(e => e.textContent.trim())
    .map(e => [light(getComputedStyle(e).color), light(ground(e))])
    .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  const images = [...page.images];
  document.body.textContent = JSON.stringify({
    overflow: root.scrollWidth - root.clientWidth,
    images: images.length,
    broken: images.filter(i => !i.complete || !i.naturalWidth || !i.alt).length,
    contrast: Math.min(...contrasts),
    ground: light(getComputedStyle(page.body).backgroundColor),
    requests: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name)
      .filter(name => !name.startsWith("data:")),
  });
};
frame.srcdoc = source.value;
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium; install it with: apt install chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)], ids=["desktop", "phone"])
def test_the_page_is_readable_in_a_browser(run, tmp_path, width, height, dark):
    wrapper = tmp_path / "wrapper.html"
    source = html.escape((run / "report.html").read_text(encoding="utf-8"))
    wrapper.write_text(
        f'<meta charset="utf-8"><iframe id="frame" width="{width}" height="{height}"></iframe>'
        f'<textarea id="source">{source}</textarea><script>{MEASURE}</script>',
        encoding="utf-8",
    )
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width + 40},{height + 40}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", wrapper.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    body = re.search(r"<body>(\{.*\})", shown.stdout, re.DOTALL)
    assert body, f"the browser measured nothing: {shown.stderr[-2000:]}"
    measured = json.loads(html.unescape(body[1].partition("</body>")[0]))
    assert measured["overflow"] <= 0, "the page scrolls sideways"
    assert measured["images"] > 10 and measured["broken"] == 0
    assert measured["contrast"] >= 4.5, "WCAG AA asks for 4.5"
    assert (measured["ground"] < 0.1) == dark
    assert measured["requests"] == []
