"""`prefgrpo evaluate --suite`: file layouts that the suites' own tools read, and tables against independent counts.

Why these cases: a misnamed file is scored for another prompt or not at all; an evaluation killed after hours must
continue where it stopped and end with the same table; an unreadable reply or row must be reported by name, not counted
as a wrong answer; and where our scoring method differs from the suite's, the result must say so.
"""

import ast
import csv
import io
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from judge_server import JudgeServer
from PIL import Image
from reward_cases_own import geneval as geneval_options
from tiny_run import Hold, attempt, ranks, recipe, start, tree

from prefgrpo.data.file_names import Generated
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.rewards import build
from prefgrpo.rewards.base import RewardError, Sample, Score
from prefgrpo.rewards.unigenbench import Points, Wording
from prefgrpo.suites import load_suite

POINTS = (
    *(f"Relationship - {n}" for n in ("Comparison", "Composition", "Inclusion", "Similarity")),
    *(f"Compound - {n}" for n in ("Imagination", "Feature Matching")),
    *(f"Attribute - {n}" for n in ("Size", "Expression", "Quantity", "Material", "Color", "Shape")),
    *(f"Entity Layout - {n}-Dimensional Space" for n in ("Two", "Three")),
    *(f"Action - {n}" for n in ("Full-body (Character/Anthropomorphic)", "Hand (Character/Anthropomorphic)", "Animal")),
    *(f"Action - {n}" for n in ("Contact Interaction", "Non-contact Interaction", "State")),
    *(f"Grammar - {n}" for n in ("Negation", "Pronoun Reference", "Consistency")),
    *("World Knowledge", "Style", "Text Generation", "Logical Reasoning"),
)
"""The 27 test points of the suite, 10 primary dimensions."""
KEYS = {"en": ("Testpoints", "Testpoint Description"), "zh": ("考点", "考点对应描述")}


def bench(file, count, language="en", broken=()):
    """Writes a table like the suite's: `count` rows with 1 to 5 points; in rows `broken` the JSON lacks a comma."""
    with file.open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out)
        rows.writerow(["index", f"prompt_{language}", f"sub_dims_{language}"])
        for k in range(count):
            names = [POINTS[(7 * k + j * j) % 27] for j in range(1 + k % 5)]
            dims = json.dumps(dict(zip(KEYS[language], (names, [f"part {j}" for j in range(len(names))]))))
            rows.writerow([k, f"a red circle, number {k}", dims.replace('", "', '" "', 1) if k in broken else dims])
    return file


def digest(brightness, prompt):
    return zlib.crc32(f"{brightness:.9f} {prompt}".encode())


def says(brightness, prompt, count):
    """The fake judge's reply about an image: marks, or sometimes an unreadable reply."""
    number = digest(brightness, prompt)
    marks = [number >> j & 1 for j in range(count + (number % 11 == 0))]
    score = "I would rather not." if number % 7 == 0 else f"<score>{marks}</score>"
    return f"<description><analysis>['it's', 'fine']</analysis>\n{score}</description>"


def answer(bright, text):
    """The fake judge: finds the prompt and the number of test points in the request."""
    prompt = text.split("prompt: ")[1].split("\n")[0]
    count = sum(line.split(".")[0].isdecimal() for line in text.splitlines())
    return says(bright[0], prompt, count)


def counted(images, file, samples=4):
    """({test point or dimension: [ones, marks]}, unreadable images), counted independently from the files."""
    table, unread = {}, []
    for row in csv.DictReader(file.open(encoding="utf-8")):
        try:
            names = json.loads(row["sub_dims_en"])["Testpoints"]
        except ValueError:
            unread += [f"images/{row['index']}_{k}.png" for k in range(samples)]
            continue
        for k in range(samples):
            jpeg = Media(np.asarray(Image.open(images / f"{row['index']}_{k}.png"))).jpeg
            bright = float(np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), np.float64).mean() / 255)
            number = digest(bright, row["prompt_en"])
            if number % 7 == 0 or number % 11 == 0:
                unread.append(f"images/{row['index']}_{k}.png")
                continue
            for j, name in enumerate(names):
                for key in (name, "primary: " + name.split(" -")[0]):
                    ones = table.setdefault(key, [0, 0])
                    ones[0] += number >> j & 1
                    ones[1] += 1
    return table, unread


def reported(out):
    """The table that the command wrote, in the format of `counted`."""
    result = json.loads((out / "unigenbench.json").read_text())
    rows = {row["name"]: row for row in result["tables"]["test point"]}
    rows |= {f"primary: {row['name']}": row for row in result["tables"]["primary dimension"]}
    assert all((row["count"] == 0) is (row["mean"] is None) for row in rows.values())
    found = {n: [row["mean"] * row["count"], row["count"]] for n, row in rows.items() if row["count"]}
    return result, found, [problem.split(":")[0] for problem in result["problems"]]


def check(out, file):
    table, unread = counted(out / "images", file)
    result, found, named = reported(out)
    assert found.keys() == table.keys() and all(found[name] == pytest.approx(table[name]) for name in table)
    assert sorted(named) == sorted(unread)
    primary = [ones / count for name, (ones, count) in table.items() if name.startswith("primary")]
    assert result["summary"]["mean of the primary dimensions"] == pytest.approx(np.mean(primary))
    points = np.array([row for name, row in table.items() if not name.startswith("primary")]).sum(0)
    assert result["summary"]["share of all test points"] == pytest.approx(points[0] / points[1])
    assert "not comparable" in result["scored_by"] and result["about"]["seed"] == 0
    return result


def killed(argv, log, hold):
    run = start([str(a) for a in argv], log, None, hold)
    run.until_held()
    run.kill()


# ---- UniGenBench --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [pytest.param(10, id="reduced"), pytest.param(600, id="whole", marks=pytest.mark.full)]
)
def test_unigenbench_killed_twice_ends_with_the_table_of_its_files(place, count):
    """Killed while writing images and again while asking the judge; finished images are not repeated."""
    file, out = bench(place / f"test{count}.csv", count, broken=(7,)), place / f"bench{count}"
    with JudgeServer() as server:
        server.answer = answer
        target = recipe(place, f"unigen{count}", judge={"endpoints": [server.url], "concurrency": 2})
        argv = ["evaluate", target, "--suite", "unigenbench", "--prompts", file, "--out", out]
        killed(argv, place / "a.log", Hold("prefgrpo.commands.generate:write", call=2 * count))
        made = {f: f.stat().st_mtime_ns for f in (out / "images").glob("[0-9]*.png")}
        assert len(made) == 2 * count and not server.requests
        (out / "images" / ".1234.png").write_bytes(b"torn")
        killed(argv, place / "b.log", Hold("prefgrpo.judge.client:read", call=count))
        before, asked = json.dumps(tree(out), default=repr), len(server.requests)
        assert count <= asked < 4 * count and "unigenbench.json" not in before
        run = start([str(a) for a in argv], place / "c.log")
        assert run.wait(3600) == 0, run.output
        readable = 4 * (count - 1)
        assert len(server.requests) - asked == readable
        result = check(out, file)
        assert all(f.stat().st_mtime_ns == time for f, time in made.items())
        assert len(list((out / "images").iterdir())) == 4 * count
        broken = next(p for p in result["problems"] if p.startswith("images/7_0.png"))
        assert "is not JSON of the expected form" in broken
        assert f"| {POINTS[0]} |" in run.output and f"of {4 * count} images have marks" in run.output

        asked = len(server.requests)
        code, again = run.wait(), start([str(a) for a in argv], place / "d.log")
        assert code == again.wait(600) == 0 and len(server.requests) - asked == readable
        assert again.output.splitlines()[-20:] == run.output.splitlines()[-20:]
    (row, *_), images = list(csv.DictReader((out / "results.csv").open())), load_suite("unigenbench")
    assert list(row) == ["index", "prompt", "testpoint", "output", "result_json", "img_path"]
    assert ast.literal_eval(row["testpoint"]) == [POINTS[0]] and row["output"].startswith("<description>")
    read = images.read_results(out / "results.csv")
    assert {r.name: (r.mean, r.count) for rows in read.tables.values() for r in rows} == {
        r["name"]: (r["mean"], r["count"]) for rows in result["tables"].values() for r in rows
    }


@pytest.mark.dist
def test_unigenbench_does_not_depend_on_ranks(place):
    file = bench(place / "ranks.csv", 5)
    with JudgeServer() as server:
        server.answer = answer
        target, tables = recipe(place, "ranks", judge={"endpoints": [server.url]}), []
        options = ["--suite", "unigenbench", "--prompts", str(file), "--samples", "1", "--out"]
        alone = start(["evaluate", str(target), *options, str(place / "alone")], place / "alone.log")
        assert alone.wait(600) == 0, alone.output
        both = ranks(target, 2, *options, str(place / "both"), command="evaluate")
        assert [run.wait(600) for run in both] == [0, 0], both[0].output
        for out in (place / "alone", place / "both"):
            table, unread = counted(out / "images", file, samples=1)
            _, found, named = reported(out)
            assert sorted(named) == sorted(unread) and {n: v for n, v in found.items() if v != table[n]} == {}
            tables.append(sorted(tree(out / "images")))
    assert tables[0] == tables[1]


SOURCE = '''
import a_package_that_nobody_has
FACTS_EN = {"Style": "how it {looks}", "Attribute - Color": "which"}
FACTS_ZH = {"风格": "画风"}
ASKED_EN = """Look at 「{prompt}」 for {testpoint}.
{explanation}
{test_explanation} {{}}"""
ASKED_ZH = "看 {prompt} {testpoint} {explanation} {test_explanation}"
LANG_CONFIGS = {
    "en": {"explanation_dict": FACTS_EN, "system_prompt_template": ASKED_EN, "prompt_column": "prompt_en",
           "checkpoint_header": "Kinds", "checkpoint_desc_header": "Here"},
    "zh": {"explanation_dict": FACTS_ZH, "system_prompt_template": ASKED_ZH, "prompt_column": "prompt_zh",
           "checkpoint_header": "考点说明", "checkpoint_desc_header": "考点描述说明"},
}
'''


def test_the_suites_own_wording_is_read_from_its_file_and_put_word_for_word(tmp_path):
    """The suite's file is parsed, never executed; the image comes first, as in the suite's requests."""
    file = tmp_path / "eval_common.py"
    file.write_text(SOURCE)
    wording = Wording(file)
    en = Points("en", ("Style", "Attribute - Color", "Style"), ("ink", "red {x}", "dots"))
    assert wording.question("a {cat}", en) == (
        "Look at 「a {cat}」 for ['Style', 'Attribute - Color', 'Style'].\n"
        "Kinds:「\nStyle: how it {looks}\nAttribute - Color: which\nStyle: how it {looks}\n」\n"
        "Here:「\nStyle: ink\nAttribute - Color: red {x}\nStyle: dots\n」 {}"
    )
    zh = wording.question("猫", Points("zh", ("风格",), ("水墨",)))
    assert zh == "看 猫 ['风格'] 考点说明:「\n风格: 画风\n」 考点描述说明:「\n风格: 水墨\n」"
    dims = json.dumps(dict(zip(KEYS["en"], (en.names, en.descriptions), strict=True)))
    grey = Media(np.full((16, 16, 3), 90, np.uint8))
    with JudgeServer() as server:
        server.answer = lambda bright, text: "<analysis>[]</analysis><score>[1, 0, 1]</score>"
        options = {"judge": {"endpoints": [server.url]}, "template": str(file)}
        reward = build("unigenbench", {"unigenbench": options})["unigenbench"]
        unknown = dims.replace("Style", "Taste")
        good, bad = reward.score([Sample("a {cat}", grey, (), {"sub_dims_en": d}) for d in (dims, unknown)])
        reward.close()
        (request,) = server.requests
    assert good.value == pytest.approx(2 / 3) and "has no explanation of the test point 'Taste'" in bad.reason
    assert good.parts == {"1 Style": 1.0, "2 Attribute - Color": 0.0, "3 Style": 1.0}
    kinds = [part["type"] for part in request["messages"][0]["content"]]
    assert kinds == ["image_url", "text"] and request["max_tokens"] == 4096 and request["temperature"] == 0
    assert request["messages"][0]["content"][1]["text"] == wording.question("a {cat}", en)
    file.write_text("LANG_CONFIGS = 3")
    with pytest.raises(RewardError, match=r"is not the suite's eval/src/eval_common\.py"):
        Wording(file)


# ---- the other suites ---------------------------------------------------------------------------------------------


def test_geneval_in_its_layout_by_our_detector(place, capsys):
    tags = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
    lines = [{"tag": t, "include": [{"class": "person", "count": 1}], "prompt": f"a photo of {t}"} for t in tags]
    (place / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = geneval_options(place)
    measured = [{"name": "geneval", "options": options}]
    target = recipe(place, "geneval", eval={"rewards": measured})
    out = place / "geneval"
    argv = ["evaluate", target, "--suite", "geneval", "--prompts", place / "metadata.jsonl", "--samples", 2]
    argv += ["--out", out]
    code, output = attempt(capsys, *argv)
    assert code == 0, output
    names = ("metadata.jsonl", "samples/00000.png", "samples/00001.png")
    assert sorted(tree(out / "images")) == [f"{k:05d}/{name}" for k in range(6) for name in names]
    assert [json.loads((out / f"images/{k:05d}/metadata.jsonl").read_text()) for k in range(6)] == lines
    result = json.loads((out / "geneval.json").read_text())
    assert [row["name"] for row in result["tables"]["task"]] == list(tags)
    assert "not mmdet's" in result["scored_by"] and "not comparable" in result["scored_by"]
    verdicts = build("geneval", {"geneval": options | {"value": "correct"}})["geneval"]
    for k, (row, line) in enumerate(zip(result["tables"]["task"], lines, strict=True)):
        media = [Media(np.asarray(Image.open(out / f"images/{k:05d}/samples/{j:05d}.png"))) for j in (0, 1)]
        alone = verdicts.score([Sample(line["prompt"], m, (), line) for m in media])
        assert row["mean"] == np.mean([s.value for s in alone]) and row["count"] == 2
    code, output = attempt(capsys, *argv, "--seed", "1")
    assert code == 2 and "contains files of another evaluation (different: seed)" in output
    own = place / "own"
    own.mkdir()
    results = own / "results.jsonl"
    results.write_text("\n".join(geneval_line(tag=tag, correct=tag != "counting") for tag in tags))
    code, output = attempt(capsys, *argv[:-1], place / "new" / "folder", "--results", results)
    assert code == 0 and "| counting | 0.00 % | 1 | 0 |" in output, output
    assert tree(place / "new").keys() == {"folder/geneval.json", "folder/geneval.md"}
    code, output = attempt(capsys, *argv[:-2], "--results", results)
    assert code == 0 and f"{own / 'geneval'}.json" in output, "default --out: beside the results"


def test_geneval_counts_as_its_own_summary(tmp_path):
    """evaluation/summary_scores.py: the mean over tasks of each task's image mean; tasks may differ in size."""
    rows = [("counting", "a", 1), ("counting", "b", 0), ("counting", "b", 1), ("colors", "c", 0), ("position", "d", 1)]
    rows += [("single_object", "e", 1), ("two_object", "f", 0), ("color_attr", "g", 0)]
    content = [{"filename": "x", "tag": t, "prompt": p, "correct": bool(c), "reason": ""} for t, p, c in rows]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, content)))
    found = load_suite("geneval").read_results(tmp_path / "results.jsonl")
    assert found.summary["overall (mean of the six tasks)"] == pytest.approx((2 / 3 + 0 + 1 + 1 + 0 + 0) / 6)
    assert found.summary["correct images"] == 4 / 8 and found.summary["prompts with a correct image"] == 4 / 7
    (tmp_path / "some.jsonl").write_text(json.dumps(content[0]))
    some = load_suite("geneval").read_results(tmp_path / "some.jsonl")
    assert some.summary["overall (mean of the six tasks)"] is None and len(some.problems) == 5


def test_vbench_names_and_numbers(tmp_path):
    suite, out = load_suite("vbench"), Path("out")
    rows = {"a stop sign": "temporal_flickering", "a cat": "color"}
    content = [{"prompt_en": prompt, "dimension": [name]} for prompt, name in rows.items()]
    (tmp_path / "full.json").write_text(json.dumps(content))
    files = suite.sample_files(suite.read(tmp_path / "full.json"), 0, out, ".mp4")
    assert [p[2] for p in files[:25]] == [out / "videos" / f"a stop sign-{k}.mp4" for k in range(25)]
    assert [p[2].name for p in files[25:]] == [f"a cat-{k}.mp4" for k in range(5)]
    (tmp_path / "list.txt").write_text("a cat\na cat\n")
    assert len(suite.sample_files(suite.read(tmp_path / "list.txt"), 0, out, ".mp4")) == 10 and suite.shares_files
    # by hand: quality dimensions normalise to 0.5, except dynamic degree (weight ½) to 1: (6·0.5 + ½·1) / 6.5
    half = {"subject_consistency": 0.5731, "background_consistency": 0.63075, "temporal_flickering": 0.81465}
    half |= {"motion_smoothness": 0.85175, "aesthetic_quality": 0.5, "imaging_quality": 0.5, "dynamic_degree": 1.0}
    # semantic ones to 0.25, except scene, appearance style and the last two, which are at their upper limits: 1
    some = dict.fromkeys(["object_class", "multiple_objects", "human_action", "color", "spatial_relationship"], 0.25)
    some |= {"scene": 0.8222, "appearance_style": 0.2855, "temporal_style": 0.364, "overall_consistency": 0.364}
    for name, part in (("a", half), ("b", some)):
        (tmp_path / f"{name}_eval_results.json").write_text(json.dumps({k: [v, [{}]] for k, v in part.items()}))
    found = suite.read_results(tmp_path)
    quality, semantic = 3.5 / 6.5, (5 * 0.25 + 4) / 9
    expected = {"total": (4 * quality + semantic) / 5, "quality": quality, "semantic": semantic}
    assert found.summary == pytest.approx(expected) and not found.problems
    less = suite.read_results(tmp_path / "a_eval_results.json")
    assert less.summary == {"total": None, "quality": pytest.approx(quality), "semantic": None}
    assert "no score of color" in less.problems


# ---- damaged files ------------------------------------------------------------------------------------------------


def geneval_line(**over):
    return json.dumps({"filename": "x", "tag": "counting", "prompt": "p", "correct": True, "reason": ""} | over)


def marked(points='["Style"]', result='{"score": [1]}', image="a/0_0.png"):
    """A UniGenBench table of one row; None: the row ends before this cell."""
    cells = ["0", "p", points, "o", result, image]
    out = io.StringIO()
    csv.writer(out).writerow(cells[: cells.index(None)] if None in cells else cells)
    return "index,prompt,testpoint,output,result_json,img_path\n" + out.getvalue()


REFUSED_RESULTS = [
    ("vbench", "a_eval_results.json", '{"color": "0.5"}', "color: .*'0.5'"),
    ("vbench", "a_eval_results.json", '{"color": [NaN, []]}', "color: .*finite number, got nan"),
    ("geneval", "r.jsonl", geneval_line() + "\n" + geneval_line(correct=None), "line 2: .*correct: .*got None"),
    ("geneval", "r.jsonl", geneval_line(correct="False"), "correct: .*got 'False'"),
    ("unigenbench", "r.csv", marked("'Style'"), "line 2: .*testpoint: .*got 'Style'"),
    ("unigenbench", "r.csv", marked(image=None), "img_path: .*got None"),
    ("unigenbench", "r.csv", b"\xff\xfe\x00\x00", "UTF-8"),
]
PLAIN = {"prompt_en": "a", "dimension": ["color"]}
REFUSED_PROMPTS = [
    ("vbench", "p.json", json.dumps([PLAIN, PLAIN | {"prompt_en": 3}]), "1: prompt_en: .*got 3"),
    ("vbench", "p.json", json.dumps([PLAIN | {"dimension": None}]), "0: dimension: .*got None"),
    ("vbench", "p.json", "[]", "at least 1"),
]


@pytest.mark.parametrize(
    ("reads", "name", "file", "content", "told_of"),
    [("read_results", *row) for row in REFUSED_RESULTS] + [("read", *row) for row in REFUSED_PROMPTS],
)
def test_damaged_files_are_refused_with_file_and_value(reads, name, file, content, told_of, tmp_path):
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        getattr(load_suite(name), reads)(path)
    assert str(path) in str(error.value) and "expected" in str(error.value)
    assert re.search(told_of, str(error.value)), error.value


@pytest.mark.parametrize(
    ("points", "result"),
    [
        (["Style", "World Knowledge"], '{"score": [1]}'),
        (["Style"], '{"score": [1, 1]}'),
        (["Style"], '{"score": [2]}'),
        (["Style"], '{"score": "1"}'),
        (["Style"], '{"a": [1]}'),
        (["Style"], "null"),
        (["Style"], "{"),
        ([], "null"),
    ],
)
def test_marks_that_do_not_fit_the_test_points_are_missing(points, result, tmp_path):
    table = marked(str(points), result) + marked(image="a/1_0.png").splitlines(keepends=True)[1]
    (tmp_path / "r.csv").write_text(table)
    found = load_suite("unigenbench").read_results(tmp_path / "r.csv")
    rows = {row.name: (row.mean, row.count, row.missing) for row in found.tables["test point"]}
    lost = dict.fromkeys(points, (None, 0, 1))
    assert rows == lost | {"Style": (1.0, 1, int("Style" in points))}
    assert [problem.split(":")[0] for problem in found.problems] == ["0_0.png"]


def test_a_byte_order_mark_is_not_part_of_a_file(tmp_path):
    """All suites read their files with the same function."""
    (tmp_path / "p.json").write_text(json.dumps([PLAIN]), encoding="utf-8-sig")
    assert [p.text for p in load_suite("vbench").read(tmp_path / "p.json")] == ["a"]


@pytest.mark.parametrize(
    ("values", "images", "prompts"),
    [
        ([[None, None], [None, None]], None, None),
        ([[None, None], [0.0, 1.0]], 1 / 2, 1.0),
        ([[0.0, None], [0.0, 0.0], [1.0, 0.0]], 1 / 5, 1 / 2),
    ],
)
def test_geneval_leaves_prompts_with_a_missing_image_out(values, images, prompts):
    """Taken as wrong, a missing image would lower the share; problems name files below the folder."""
    suite = load_suite("geneval")
    held = [Prompt(k, f"p{k}", {"tag": "counting"}) for k in range(len(values))]
    files = suite.sample_files(held, len(values[0]), Path("out"), ".png")
    flat = [v for row in values for v in row]
    scores = [Score(None, "torn") if v is None else Score(v) for v in flat]
    found = suite.results([Generated(p, file) for p, _, file in files], scores, {})
    assert found.summary["correct images"] == images and found.summary["prompts with a correct image"] == prompts
    named = [str(file.relative_to("out")) for (_, _, file), v in zip(files, flat, strict=True) if v is None]
    assert [line.split(":")[0] for line in found.problems if line.endswith(": torn")] == named


@pytest.mark.parametrize("index", ["../../esc", "a/b", "", "a\0b", "x" * 300])
def test_an_index_cannot_leave_the_output_folder(index):
    prompts = [Prompt(k, "x", {"index": i}) for k, i in enumerate(("0", index))]
    with pytest.raises(DataError, match="prompt 2 has"):
        load_suite("unigenbench").sample_files(prompts, 1, Path("out"), ".png")
