"""Pages that must not claim more than the runs show: missing verdicts, rewards with one name, runs that are not seeds.

Each case is an input for which a page could mislead a reader; expected texts follow from the numbers in its files.
"""

import json
import os

import pytest
from report_html import parse
from report_run import eval_row, shown, small_run, train_row

from prefgrpo.commands import cli
from prefgrpo.report import write_comparison, write_report
from prefgrpo.report.browser import pairs
from prefgrpo.report.run import read_run


def result(page):
    return next(s for s in page.all("section") if s.attributes["id"] == "result")


def cells(page):
    """First cell → the other cells of the table at the top."""
    rows = [[c.text for c in (*row.all("th"), *row.all("td"))] for row in result(page).all("tr")]
    return {row[0]: row[1:] for row in rows}


def compared(tmp_path, *folders):
    return parse(write_comparison(folders, tmp_path / "all.html").read_text())


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
    for place in (page.all("p", "result")[0].text, page.all("p", "detail")[0].text):
        assert (f"no verdict on {100 * share:.0f} % of the samples" in place) is (share > 0)
    assert (f"judge: no verdict on {40 - judged}" in result(page).text) is (judged < 40)
    table = cells(page)
    assert table["win rate by judge"][-1] == (f"{100 * share:.0f} %" if share else "")
    assert table["scenes"][-1] == ("50 %" if "dev/scenes_before_missing" in row else "")
    assert cells(compared(tmp_path, folder))["against its initial model"] == [word]


SAID = {1.0: "judge won", 0.0: "judge lost", 0.5: "judge tied", None: "judge gave no verdict", 0.75: "judge won"}


@pytest.mark.parametrize("win", SAID)
def test_the_comparison_says_who_won(tmp_path, win):
    folder = small_run(tmp_path / "r", [eval_row(10, 10, "dev")])
    shown(folder, "dev", 10)
    count = len(read_run(folder).images["dev"][0].prompts)
    rows = [{"prompt": k, "wins": {"judge": win}, "answers": []} for k in range(count)]
    (folder / "eval" / "dev_000010.json").write_text(json.dumps(rows))
    (script,) = [s for s in compared(tmp_path, folder).all("script") if s.attributes.get("id") == "items"]
    assert json.loads(script.text)[0]["text"] == f"r against its initial model: {SAID[win]}"


# ---- rewards whose short names are equal ----------------------------------------------------------------------------


def two_rewards(folder, names, lr):
    rows = []
    for step in (0, 10):
        row = {"kind": "eval", "step": step, "set": "dev"}
        for k, name in enumerate(names, 1):
            row |= {f"dev/{name}": k + step, f"dev/{name}_before": k, f"dev/win_{name}": k / 10}
        rows.append(row)
    trained = {f"reward/{name}{end}": 1.0 for name in names for end in ("", "_std")}
    return small_run(folder, [*rows, {"kind": "train", "step": 1, **trained}], f"train: {{steps: 10, lr: {lr}}}\n")


NAMES = {  # rewards of the first and of the second run, their display names
    "both in each run": (["a.py:x", "b.py:x"], ["a.py:x", "b.py:x"], ["a.py:x", "b.py:x"]),
    "one in each run": (["a.py:x"], ["b.py:x"], ["a.py:x", "b.py:x"]),
    "only one": (["a.py:x"], ["a.py:x"], ["x"]),
    "another beside them": (["a.py:x", "my_y"], ["b.py:x"], ["a.py:x", "b.py:x", "my y"]),
}


@pytest.mark.parametrize("case", NAMES)
def test_rewards_with_one_short_name_stay_apart(tmp_path, case):
    *own, names = NAMES[case]
    folders = [two_rewards(tmp_path / f"r{k}", rewards, k) for k, rewards in enumerate(own)]
    page = compared(tmp_path, *folders)
    table = cells(page)
    titles = [h.text for h in page.all("h3")]
    every = list(dict.fromkeys([*own[0], *own[1]]))
    for name, full in zip(names, sorted(every)):
        places = [rewards.index(full) + 1 if full in rewards else 0 for rewards in own]
        assert table[name] == [f"{k}.00 → {10 + k}" if k else "–" for k in places]
        assert table[f"win rate by {name}"] == [f"{10 * k} %" if k else "–" for k in places]
        drawn = f"Measured: {name}: overall", f"Reward: {name}: mean", f"Win rate against the initial model: by {name}"
        assert [titles.count(chart) for chart in drawn] == [1, 1, 1]
    page = parse(write_report(folders[0]).read_text())
    assert len({f.all("h2")[0].text for f in page.all("div", "figure")}) == 2 * len(own[0])
    assert len(result(page).all("tr")) == 1 + 2 * len(own[0])


def test_the_viewer_shows_every_judge(tmp_path):
    folder = two_rewards(tmp_path / "r", ["a.py:x", "b.py:x"], 0)
    shown(folder, "dev", 10)
    count = len(read_run(folder).images["dev"][0].prompts)
    rows = [{"prompt": k, "wins": {"a.py:x": 1.0, "b.py:x": 0.0, "c.py:y": 0.5}, "answers": []} for k in range(count)]
    (folder / "eval" / "dev_000010.json").write_text(json.dumps(rows))
    item = pairs(read_run(folder).images["dev"][0], "dev")[0]
    assert item["wins"] == {"a.py:x": 1.0, "b.py:x": 0.0, "y": 0.5}


# ---- seeds ----------------------------------------------------------------------------------------------------------

BASE = {"seed": 0, "name": "r", "output": "runs", "train": {"steps": 10, "lr": 1}}
SEEDS = {  # changes of each run's configuration, labels of the variants
    "other seeds": ([{}, {"seed": 1, "name": "s", "output": "x"}, {"seed": 2}], ["r0 … r2 (3 seeds)"]),
    "the same seed": ([{}, {"name": "s"}], ["r0", "r1"]),
    "another setting": ([{}, {"seed": 1, "train": {"steps": 10, "lr": 2}}], ["r0", "r1"]),
    "a seed again": ([{}, {"seed": 1}, {"name": "again"}], ["r0 … r1 (2 seeds)", "r2"]),
    "unknown seeds": ([{"seed": None}, {"seed": None}], ["r0", "r1"]),
}


@pytest.mark.parametrize("case", SEEDS)
def test_only_runs_that_differ_in_the_seed_are_seeds(tmp_path, case):
    changes, labels = SEEDS[case]
    configs = [json.dumps(BASE | own) for own in changes]
    folders = [small_run(tmp_path / f"r{k}", [eval_row(10, 10, "dev")], text) for k, text in enumerate(configs)]
    page = compared(tmp_path, *folders)
    assert cells(page)[""] == labels
    assert [" ± " in cell for cell in cells(page)["win rate by judge"]] == ["seeds" in label for label in labels]


def test_a_run_given_twice_counts_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = (small_run(tmp_path / n, [eval_row(10, 10, "dev")], json.dumps(BASE | {"seed": n})) for n in "ab")
    assert cells(compared(tmp_path, one, "a", two, tmp_path / "b" / ".." / "b"))[""] == ["a … b (2 seeds)"]
    assert cli.main(["report", "a", str(one), "--out", "both.html"]) == 0
    assert (tmp_path / "both.html").read_text().count("<h1>r</h1>") == 1  # the report of that run, by its name


# ---- where the page goes --------------------------------------------------------------------------------------------

PLACES = {  # runs, --out, what is said (None: the page is written)
    "one run": (["a"], "x.html", None),
    "a folder": (["a", "b"], "sub", "sub is a folder; expected the name of a file"),
    "a folder for one run": (["a"], "sub", "sub is a folder; expected the name of a file"),
    "in no folder": (["a", "b"], "nodir/x.html", "nodir/x.html cannot be written: the folder nodir does not exist"),
    "no run": (["c"], "", "c is not a run folder: expected config.yaml or metrics.jsonl in it"),
    "nothing": ([], "", "expected one or more run folders"),
}


@pytest.mark.parametrize("case", PLACES)
def test_where_the_page_goes(tmp_path, monkeypatch, capsys, case):
    runs, out, said = PLACES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for k, name in enumerate("ab"):
        small_run(tmp_path / name, [train_row(1)], json.dumps(BASE | {"seed": k}))
    code = cli.main(["report", *runs, *(["--out", out] if out else [])])
    wrote = capsys.readouterr()
    assert code == (2 if said else 0) and (said or "") in wrote.err and "configuration has mistakes" not in wrote.err
    assert (tmp_path / (out or "none")).is_file() is (said is None) and not list(tmp_path.rglob(".*"))
    assert not list(tmp_path.glob("[ab]/*.html"))


def test_a_run_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    folder = small_run(tmp_path / "a", [train_row(1)])

    def refuse(path, text):
        raise PermissionError(13, os.strerror(13), str(path.with_name(f".{path.name}.4521")))

    monkeypatch.setattr("prefgrpo.report.page.write_atomic", refuse)
    assert cli.main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "report.html cannot be written (Permission denied); choose another file with --out" in said
    assert "4521" not in said
    with pytest.raises(PermissionError, match=r"report\.html cannot be written"):
        write_report(folder)
