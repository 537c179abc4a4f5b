"""Pages that must not claim more than the run shows, with missing verdicts; and where a page goes.

Each case is an input for which a page could mislead a reader; expected texts follow from the numbers in its files.
"""

import json

import pytest
from report_html import parse
from report_run import eval_row, shown, small_run, train_row

from prefgrpo.commands import cli
from prefgrpo.report import write_report


def result(page):
    return next(s for s in page.all("section") if s.attributes["id"] == "result")


def cells(page):
    """First cell → the other cells of the table at the top."""
    rows = [[c.text for c in (*row.all("th"), *row.all("td"))] for row in result(page).all("tr")]
    return {row[0]: row[1:] for row in rows}


# ---- missing verdicts -----------------------------------------------------------------------------------------------

WIN = {"dev/win_judge": 0.0, "dev/win_judge_low": 0.0, "dev/win_judge_high": 0.0}
MISSING = {  # columns of the evaluation's row, prompts with a verdict of 40, word, alarms
    "all there": ({}, 40, "worse", []),
    "few missing": ({"dev/win_judge_missing": 0.1}, 36, "worse", []),
    "many missing": ({"dev/win_judge_missing": 0.25}, 30, "worse", ["verdicts by judge"]),
    "too many missing": ({"dev/win_judge_missing": 0.275}, 29, "inconclusive", ["verdicts by judge"]),
    "nearly all missing": ({"dev/win_judge_missing": 0.975}, 1, "inconclusive", ["verdicts by judge"]),
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
    said = [line.text for line in result(page).all("li")]
    assert all(a in s and "1 of 1 evaluations on dev more than 10 %" in s for a, s in zip(alarms, said, strict=True))
    share = row.get("dev/win_judge_missing", 0)
    said = page.all("p", "result")[0].text
    assert (f"no verdict on {100 * share:.0f} % of the samples" in said) is (share > 0)
    assert (f"; no verdict on {40 - judged}" in result(page).text) is (judged < 40)
    table = cells(page)
    assert table["win rate by judge"][-1] == (f"{100 * share:.0f} %" if share else "")
    assert table["scenes"][-1] == ("50 %" if "dev/scenes_before_missing" in row else "")


def test_a_last_evaluation_without_verdicts_is_no_win(tmp_path):
    lost = dict.fromkeys(WIN) | {"dev/win_judge_missing": 1.0}
    rows = [train_row(1), eval_row(5, 10, "dev"), eval_row(10, 10, "dev") | lost]
    page = parse(write_report(small_run(tmp_path / "r", rows)).read_text())
    said = page.all("p", "result")[0].text
    assert "by the judge" not in said and "% by scenes" in said and "nan" not in said
    assert page.all("strong", "verdict")[0].text == "inconclusive"
    assert cells(page)["win rate by judge"][-1] == "100 %"


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
