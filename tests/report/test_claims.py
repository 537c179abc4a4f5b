"""Pages that must not claim more than the run shows, with missing verdicts; and where a page goes.

Each case is an input for which a page could mislead a reader; expected texts follow from the numbers in its files.
"""

import json
import re

import numpy as np
import pytest
from report_html import parse
from report_run import eval_row, shown, small_run, train_row

from prefgrpo.commands import cli
from prefgrpo.report import write_report
from prefgrpo.run.measures import JUDGE, Measure, Subject, compared


def result(page):
    return next(s for s in page.all("section") if s.attributes["id"] == "result")


def cells(page):
    """First cell → the other cells of the tables at the top."""
    rows = [[c.text for c in (*row.all("th"), *row.all("td"))] for row in result(page).all("tr")]
    return {row[0]: row[1:] for row in rows}


# ---- missing verdicts -----------------------------------------------------------------------------------------------

WIN = {"dev/win_judge": 0.0, "dev/win_judge_low": 0.0, "dev/win_judge_high": 0.0}
UNSURE = "inconclusive"
MISSING = {  # columns of the evaluation's row, prompts with a verdict of 40, word, alarms
    "all there": ({}, 40, "worse", []),
    "few missing": ({"dev/win_judge_missing": 0.1, "dev/win_judge_prompts": 36}, 36, "worse", []),
    "many missing": ({"dev/win_judge_missing": 0.25, "dev/win_judge_prompts": 30}, 30, "worse", ["verdicts by judge"]),
    "too many missing": (
        {"dev/win_judge_missing": 0.275, "dev/win_judge_prompts": 29},
        29,
        "inconclusive",
        ["verdicts by judge"],
    ),
    "nearly all missing": (
        {"dev/win_judge_missing": 0.975, "dev/win_judge_prompts": 1},
        1,
        "inconclusive",
        ["verdicts by judge"],
    ),
    "one order missing": ({"dev/win_judge_second_missing": 1.0}, 40, "worse", ["verdicts by judge"]),
    "a reward missing": ({"dev/scenes_before_missing": 0.5, "dev/win_scenes_missing": 0.5}, 40, "worse", ["by scenes"]),
    "a reward always missing": ({"dev/ocr_missing": 1.0, "dev/ocr": None}, 40, "worse", ["scores by ocr"]),
    "a part that does not apply": ({"dev/scenes.place_missing": 0.5}, 40, "worse", []),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_verdicts_weaken_the_result(tmp_path, case):
    row, judged, word, alarms = MISSING[case]
    folder = small_run(tmp_path / "r", [train_row(1), eval_row(10, 10, "dev") | WIN | row])
    shown(folder, "dev", 10)
    wins = [{"prompt": k, "wins": {"judge": 0.0 if k < judged else None}} for k in range(40)]
    (folder / "eval" / "dev_000010.json").write_text(json.dumps(wins))
    page = parse(write_report(folder).read_text())
    assert page.all("strong", "verdict")[0].text == word
    said = [line.text for part in page.all("ul", "alarms") for line in part.all("li")]
    assert all(a in s and "1 of 1 evaluations on dev more than 10 %" in s for a, s in zip(alarms, said, strict=True))
    share = row.get("dev/win_judge_missing", 0)
    said = page.all("p", "result")[0].text
    assert (f"no verdict on {percent(share)} of the samples" in said) is (share > 0)
    assert ("loses to the initial model" in said) is (word == "worse")
    table = cells(page)
    bounds = f": {percent(0)} if all lost, {percent(share)} if all won"
    tally = f"0 / 0 / {judged}"
    assert table["the judge"] == [
        "0 %", "0–0 %" if judged >= 30 else "", tally + f" no verdict on {percent(share)}{bounds}" * (share > 0)
    ]  # fmt: skip
    assert ("50 % missing" in table["scenes"][-1]) is ("dev/scenes_before_missing" in row)


def percent(share):
    return f"{100 * share:.0f} %" if share < 0.98 else f"{100 * share:.1f} %"


def test_missing_verdicts_that_could_turn_the_result_are_named(tmp_path):
    """60 % of what was judged was won: with 10 % missing at least 54 %, with 20 % missing 48 to 68 %."""
    rate = {"dev/win_judge": 0.6, "dev/win_judge_low": 0.55, "dev/win_judge_high": 0.65, "dev/win_judge_prompts": 200}
    for share, said in ((0.1, ""), (0.2, "but not if all missing verdicts had gone the other way")):
        row = eval_row(10, 10, "dev") | rate | {"dev/win_judge_missing": share}
        page = parse(write_report(small_run(tmp_path / str(share), [train_row(1), row])).read_text())
        assert page.all("p", "certainty")[0].text == f"better {said}".strip()
        low = 60 * (1 - share)
        high = 60 * (1 - share) + 100 * share
        assert f"{low:.0f} % if all lost, {high:.0f} % if all won" in cells(page)["the judge"][-1]


def test_a_last_evaluation_without_verdicts_is_no_win(tmp_path):
    lost = dict.fromkeys(WIN) | {"dev/win_judge_missing": 1.0}
    rows = [train_row(1), eval_row(5, 10, "dev"), eval_row(10, 10, "dev") | lost]
    page = parse(write_report(small_run(tmp_path / "r", rows)).read_text())
    said = page.all("p", "result")[0].text
    assert "by the judge" not in said and "% by scenes" in said and "nan" not in said
    assert page.all("strong", "verdict")[0].text == "inconclusive"
    assert cells(page)["the judge"][0] == "–" and cells(page)["the judge"][-1] == "no verdict on 100 %"


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
    return parse(write_report(folder).read_text()), prompt, wins, 0.75 * value


def resampled(prompt, values):
    """Mean and standard error over prompts of the mean over images, without the product's bootstrap."""
    there = ~np.isnan(values)
    means = np.array([values[(prompt == p) & there].mean() for p in np.unique(prompt[there])])
    return values[there].mean(), means.std(ddof=1) / len(means) ** 0.5


def ends(text):
    return [float(number.replace("−", "-")) for number in re.findall(r"[−\d.]+", text.replace("–", " "))]


def test_rates_have_their_role_tally_and_interval(tmp_path):
    page, prompt, wins, change = judged(tmp_path / "r", 40)
    assert page.all("strong", "verdict")[0].text == "better" and "beats the initial model" in result(page).text
    rows = cells(page)
    sentence = page.all("p", "result")[0].text
    for name, label in {"judge": "the judge trained on", "other": "other independent"}.items():
        rate, interval, tally = next(row for first, row in label_rows(page) if first == label)
        mean, error = resampled(prompt, wins[name])
        assert rate == f"{100 * mean:.0f} %"
        np.testing.assert_allclose(ends(interval), 100 * (mean + np.array([-1.96, 1.96]) * error), atol=1.5)
        counts = [int((np.sign(wins[name] - 0.5) == side).sum()) for side in (1, 0, -1)]
        assert tally == " / ".join(map(str, counts)) and "{} won, {} tied, {} lost".format(*counts) in sentence
    mean, error = resampled(prompt, change)
    low, high = ends(rows["watched"][-1].replace(" to ", " "))
    np.testing.assert_allclose([low, high], mean + np.array([-1.96, 1.96]) * error, atol=0.12 * error)
    order = [first for first, _ in label_rows(page)]
    assert order[:3] == ["the judge trained on", "other independent", "watched independent"]


def label_rows(page):
    """(first cell, other cells) of the table of win rates."""
    rows = [[c.text for c in row.all("td")] for row in page.all("table", "wins")[0].all("tr")]
    return [(row[0], row[1:]) for row in rows if row]


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
    assert all(row[1] == "" for _, row in label_rows(page)) and cells(page)["watched"][-1] == ""
    assert "samples where neither has a tie." in text
    assert not page.all("figure", "chart")[0].all("path", "band")
    assert f"{int((wins['judge'] > 0.5).sum())} won" in text


def test_a_run_that_only_a_judge_measures_has_no_empty_table(tmp_path):
    row = {"kind": "eval", "step": 10, "set": "dev"} | {f"dev/{key}": 0.5 for key in ("win_judge", "win_judge_low")}
    page = parse(write_report(small_run(tmp_path / "r", [train_row(1), row])).read_text())
    assert page.all("table", "wins") and not page.all("table", "rewards")


def test_the_page_names_no_folder_of_this_machine(tmp_path):
    """Absolute paths lose their folders; addresses and relative paths stay."""
    config = RECIPE + "model: /home/me/models/flux\njudge: {model: /data/judge, endpoints: ['http://h:1/v1/x']}\n"
    page, *_ = judged(tmp_path / "r", 30, config + "data: {prompts: prompts/train.txt, cache: '/var/cache/'}\n")
    for kept in ("…/flux", "…/judge", "http://h:1/v1/x", "prompts/train.txt"):
        assert kept in page.text
    assert not any(part in page.text for part in ("home", "models", "/data", "/var", str(tmp_path)))


# ---- where the page goes --------------------------------------------------------------------------------------------

PLACES = {  # run, --out, what is said (None: the page is written)
    "a file": ("a", "x.html", None),
    "in no folder": ("a", "nodir/x.html", "No such file or directory"),
    "no run": ("c", "", "c is not a run folder: expected config.yaml or metrics.jsonl in it"),
}


@pytest.mark.parametrize("case", PLACES)
def test_where_the_page_goes(tmp_path, monkeypatch, capsys, case):
    run, out, said = PLACES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    small_run(tmp_path / "a", [train_row(1)])
    code = cli.main(["report", run, *(["--out", out] if out else [])])
    wrote = capsys.readouterr()
    assert code == (2 if said else 0) and (said or "") in wrote.err and "configuration has mistakes" not in wrote.err
    assert (tmp_path / (out or "none")).is_file() is (said is None) and not list(tmp_path.rglob(".*"))
    assert not list(tmp_path.glob("[ab]/*.html"))
