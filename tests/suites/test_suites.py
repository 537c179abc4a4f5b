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
import peers
import pytest
from PIL import Image
from ranks import Hold, attempt, ranks, start
from reward_cases import geneval as geneval_options
from servers import JudgeServer
from world import recipe, tree

from prefgrpo.data.answer import Answer
from prefgrpo.data.file_names import Generated
from prefgrpo.data.media import Media
from prefgrpo.data.prompts import DataError, Prompt
from prefgrpo.rewards import build
from prefgrpo.rewards.base import RewardError, Sample
from prefgrpo.rewards.unigenbench import Points, Wording
from prefgrpo.suites import load_suite
from prefgrpo.tiny import pipelines

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
    "count", [pytest.param(10, id="reduced"), pytest.param(150, id="larger", marks=pytest.mark.full)]
)
def test_unigenbench_killed_twice_ends_with_the_table_of_its_files(place, capsys, count):
    """Killed while writing images and again while asking the judge; finished images are not repeated."""
    file, out = bench(place / f"test{count}.csv", count, broken=(7,)), place / f"bench{count}"
    with JudgeServer() as server:
        server.answer = answer
        target = recipe(place, f"unigen{count}", judge={"endpoints": [server.url], "concurrency": 2})
        argv = ["evaluate", target, "--suite", "unigenbench", "--prompts", file, "--out", out]
        killed(argv, place / "a.log", Hold("prefgrpo.commands.generate:write", call=2 * count))
        made = {f: f.stat().st_mtime_ns for f in (out / "images").glob("[0-9]*.png")}
        assert len(made) == 2 * count and not server.requests
        (out / "images" / ".0.png").write_bytes(b"torn")
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
        assert "expected JSON" in broken
        assert f"| {POINTS[0]} |" in run.output and f"of {4 * count} images have marks" in run.output

        asked = len(server.requests)
        table = (out / "unigenbench.json").read_bytes()
        code, again = attempt(capsys, *argv)
        assert code == 0 and len(server.requests) - asked == readable, again
        assert (out / "unigenbench.json").read_bytes() == table
    (row, *others) = csv.DictReader((out / "results.csv").open())
    assert list(row) == ["index", "prompt", "testpoint", "output", "result_json", "img_path"]
    assert ast.literal_eval(row["testpoint"]) == [POINTS[0]] and row["output"].startswith("<description>")
    marks = [m for r in (row, *others) for m in (json.loads(r["result_json"]) or {"score": []})["score"]]
    (share,) = [v for name, v in result["summary"].items() if "all test points" in name]
    assert np.mean(marks) == pytest.approx(share)


@pytest.mark.dist
def test_unigenbench_does_not_depend_on_ranks(place, capsys):
    file = bench(place / "ranks.csv", 5)
    with JudgeServer() as server:
        server.answer = answer
        target, tables = recipe(place, "ranks", judge={"endpoints": [server.url]}), []
        options = ["--suite", "unigenbench", "--prompts", str(file), "--samples", "1", "--out"]
        both = ranks(target, 2, *options, str(place / "both"), command="evaluate")
        code, output = attempt(capsys, "evaluate", target, *options, place / "alone")
        assert code == 0, output
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
    assert code == 2 and "contains files that were made differently (other: seed)" in output
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
    assert len(suite.sample_files(suite.read(tmp_path / "full.json")[1:], 2, out, ".mp4")) == 2 and suite.shares_files
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


def questions(count):
    """Rows like GenEval 2's: a number word or Yes is right; every atomicity from 3 to 10 occurs."""
    skills = ("object", "attribute", "count", "position", "verb")
    rows = []
    for k in range(count):
        asked = [
            [f"How many {j}?", ("two", "seven")[j % 2]] if j % 3 else [f"Is it {j}?", "Yes"] for j in range(3 + k % 8)
        ]
        kinds = [skills[(k + j) % 5] for j in range(len(asked))]
        rows.append({"prompt": f"scene {k}", "atom_count": 3 + k % 8, "vqa_list": asked, "skills": kinds})
    return rows


def test_geneval2_from_the_probabilities_of_a_server(place, capsys):
    """The probability of every spelling of the right answer counts, a wrong answer's does not make it missing; against
    the formula in fp64; questions in the suite's wording, read from its file."""
    rows = questions(8)
    (place / "geneval2.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "evaluation.py").write_text(
        "import nothing_here\ndef soft_tifa(a, b):\n    return f('{} One word.'.format(a))\n"
    )
    given = {}

    def answer(bright, text):
        question = text.removesuffix(" One word.")
        assert question != text
        number = int(re.findall(r"\d+", question)[0])
        first, second = ("Yes", " yes") if question.startswith("Is") else [(" two", "2"), ("7", "Seven")][number % 2]
        a, b, wrong = np.random.default_rng(digest(bright[0], question)).dirichlet([1, 1, 1])
        listed = {"maybe": wrong, first: a, second: b} if wrong < 0.6 else {"dog": 0.75, "cow": 0.1875}
        given[f"{bright[0]:.9f} {question}"] = a + b if wrong < 0.6 else 0.0625  # not listed: at most the rest
        return listed

    with JudgeServer() as server:
        server.answer = answer
        measured = [{"name": "soft_tifa", "options": {"template": str(place / "evaluation.py")}}]
        target = recipe(
            place, "geneval2", judge={"endpoints": [server.url], "image_format": "png"}, eval={"rewards": measured}
        )
        argv = ["evaluate", target, "--suite", "geneval2", "--prompts", place / "geneval2.jsonl", "--out", place / "g2"]
        code, output = attempt(capsys, *argv)
    assert code == 0, output
    named = json.loads((place / "g2/images.json").read_text())
    assert named == {row["prompt"]: str(place / f"g2/images/{k:06d}_0.png") for k, row in enumerate(rows)}
    p = []
    for row in rows:
        bright = float(np.asarray(Image.open(named[row["prompt"]]).convert("RGB"), np.float64).mean() / 255)
        p.append([given[f"{bright:.9f} {question}"] for question, _ in row["vqa_list"]])
    result = json.loads((place / "g2/geneval2.json").read_text())
    expected = {
        "Soft-TIFA GM": np.mean([np.prod(x) ** (1 / len(x)) for x in p]),
        "Soft-TIFA AM": np.mean([np.mean(x) for x in p]),
    }
    assert result["summary"] == pytest.approx(expected, rel=1e-6) and not result["problems"]
    for row in result["tables"]["skill, AM"]:
        all_of = [
            v for r, x in zip(rows, p, strict=True) for s, v in zip(r["skills"], x, strict=True) if s == row["name"]
        ]
        assert (row["mean"], row["count"]) == (pytest.approx(np.mean(all_of), rel=1e-6), len(all_of))
    assert [row["name"] for row in result["tables"]["atomicity, GM"]] == [f"{k:2d}" for k in range(3, 11)]
    assert "comparable with published numbers if the judge is Qwen3-VL-8B-Instruct" in result["scored_by"]


def scored(suite, rows, p):
    """A suite's results for these probabilities; None: the image's score is missing."""
    files = [Generated(Prompt(k, row["prompt"], row), Path(f"images/{k}.png")) for k, row in enumerate(rows)]
    gm = [None if x is None else float(np.exp(np.mean(np.log(x)))) for x in p]
    parts = [{str(j): v for j, v in enumerate(x or (), start=1)} for x in p]
    return suite.results(
        files, [Answer(v, "" if v else "no answer", parts=q) for v, q in zip(gm, parts, strict=True)], {}
    )


def test_geneval2_leaves_out_an_image_without_all_answers():
    rows = questions(3)
    found = scored(load_suite("geneval2"), rows, [[0.5, 0.5, 0.5], None, [0.25] * 5])
    assert found.summary == pytest.approx({"Soft-TIFA GM": 0.375, "Soft-TIFA AM": 0.375})
    assert found.problems == ["images/1.png: no answer"] and "not comparable" in found.scored_by
    assert sum(row.missing for row in found.tables["skill, AM"]) == 4
    assert [(row.name, row.count, row.missing) for row in found.tables["atomicity, GM"]] == [
        (" 3", 1, 0),
        (" 4", 0, 1),
        (" 5", 1, 0),
    ]


def test_geneval2_counts_as_its_own_analysis(monkeypatch):
    """The publisher's functions on random answers (PREFGRPO_PEERS)."""
    theirs = peers.file_module("geneval2", "soft_tifa_analysis.py", "soft_tifa_analysis", monkeypatch)
    rows, rng = questions(64), np.random.default_rng(1)
    p = [rng.uniform(1e-6, 1, len(row["vqa_list"])).tolist() for row in rows]
    found = scored(load_suite("geneval2"), rows, p)
    skills = theirs.per_skill_analysis(p, [row["skills"] for row in rows])
    by_name = {row.name: 100 * row.mean for row in found.tables["skill, AM"]}
    assert by_name == pytest.approx(dict(zip(("object", "attribute", "count", "position", "verb"), skills)), rel=1e-12)
    atoms = theirs.per_atomicity_analysis(p, [row["atom_count"] for row in rows])
    assert {int(row.name): 100 * row.mean for row in found.tables["atomicity, GM"]} == pytest.approx(
        {k: v["accuracy"] for k, v in atoms.items()}, rel=1e-12
    )
    assert 100 * found.summary["Soft-TIFA GM"] == pytest.approx(100 * np.mean([theirs.gmean(x) for x in p]), rel=1e-12)


REPLIES = {
    "7": "Brief reasoning: fine.\nPrompt Compliance: 5\nVisual Naturalness: 4\nPhysical & Detail Coherence: 4",
    "12": "Prompt Compliance: 2\nVisual Naturalness: 1\nDetail: **1**",
    "31": "Prompt Compliance: 3\nVisual Naturalness: 3\nDetail: 3",
    "40": "I cannot rate this image.",
    "41": {"error": "timeout"},
}


def edits(folder):
    """A file like ImgEdit's basic_edit.json beside its source images."""
    (folder / "animal").mkdir(parents=True)
    Image.new("RGB", (32, 32), (9, 99, 199)).save(folder / "animal" / "a.jpg")
    kinds = ("add", "style", "add", "style", "remove")
    rows = {
        k: {"id": "animal/a.jpg", "prompt": f"edit {k}", "edit_type": t} for k, t in zip(REPLIES, kinds, strict=True)
    }
    (folder / "basic_edit.json").write_text(json.dumps(rows))
    return folder / "basic_edit.json"


def test_imgedit_layout_and_grades(place, capsys):
    """Files with the names that its tool reads; unreadable replies are listed, not counted."""
    pipelines.make("flux_kontext", place / "kontext")
    file, out = edits(place / "Benchmark"), place / "imgedit"
    over = {"family": "flux_kontext", "model": str(place / "kontext")}
    target = recipe(place, "edits", data={"prompts": str(file.parent / "train.jsonl")}, **over)
    argv = ["evaluate", target, "--suite", "imgedit", "--prompts", file, "--out", out]
    code, output = attempt(capsys, *argv)
    assert code == 0 and "5 files are in" in output, output
    assert sorted(tree(out / "images")) == sorted(f"{key}.png" for key in REPLIES)
    assert json.loads((out / "basic_edit.json").read_text()) == json.loads(file.read_text())
    (out / "images/result.json").write_text(json.dumps(REPLIES))
    code, output = attempt(capsys, *argv, "--results", out / "images/result.json")
    assert code == 0 and "| add | 3.67 | 2 | 0 |" in output and "| mean of all edits | 2.94 |" in output, output
    found = json.loads((out / "imgedit.json").read_text())
    assert found["summary"] == pytest.approx(
        {"mean of all edits": (13 / 3 + 1.5 + 3) / 3, "mean of the edit types": None}
    )
    assert [line.split(":")[0] for line in found["problems"]] == ["40", "41"] and not found["percent"]


def test_imgedit_grades_as_its_own_steps(tmp_path, monkeypatch):
    """The publisher's two scripts round to two digits at each step (PREFGRPO_PEERS)."""
    first, second = (
        peers.file_module("imgedit", f"Benchmark/Basic/{name}.py", name, monkeypatch)
        for name in ("step1_get_avgscore", "step2_typescore")
    )
    rng, kinds = np.random.default_rng(2), ("add", "style", "action")
    rows = {str(k): {"id": "a.jpg", "prompt": "p", "edit_type": kinds[k % 3]} for k in range(40)}
    replies = {k: "\n".join(f"Name {j}: {g}" for j, g in enumerate(rng.integers(1, 6, 3))) for k in rows}
    (tmp_path / "images").mkdir()
    (tmp_path / "basic_edit.json").write_text(json.dumps(rows))
    (tmp_path / "images/result.json").write_text(json.dumps(replies))
    found = load_suite("imgedit").read_results(tmp_path / "images/result.json")
    theirs = second.compute_edit_type_averages(first.compute_averages(replies), rows)
    assert {row.name: row.mean for row in found.tables["edit type"]} == pytest.approx(theirs, abs=0.01)


# ---- damaged files ------------------------------------------------------------------------------------------------


def geneval_line(**over):
    return json.dumps({"filename": "x", "tag": "counting", "prompt": "p", "correct": True, "reason": ""} | over)


REFUSED_RESULTS = [
    ("vbench", "a_eval_results.json", '{"color": "0.5"}', "color: .*'0.5'"),
    ("vbench", "a_eval_results.json", '{"color": [NaN, []]}', "color: .*finite number, got nan"),
    ("geneval", "r.jsonl", geneval_line() + "\n" + geneval_line(correct=None), "line 2: .*correct: .*got None"),
    ("geneval", "r.jsonl", geneval_line(correct="False"), "correct: .*got 'False'"),
    ("geneval", "r.jsonl", b"\xff\xfe\x00\x00", "UTF-8"),
    ("unigenbench", "r.csv", "", "is scored here"),
]
PLAIN = {"prompt_en": "a", "dimension": ["color"]}
QUESTIONS = {"prompt": "two cats", "atom_count": 3, "vqa_list": [["How many?", "two"], ["Any?", "Yes"]]}
REFUSED_PROMPTS = [
    ("vbench", "p.json", json.dumps([PLAIN | {"dimension": None}]), "dimension, a list, got none"),
    ("vbench", "p.json", "[]", "contains no prompt"),
    ("geneval2", "p.jsonl", json.dumps(QUESTIONS | {"skills": ["count"]}), "one skill per question"),
    ("imgedit", "p.json", '{"../1": {"id": "a.jpg", "prompt": "p", "edit_type": "add"}}', r"should match pattern"),
    ("imgedit", "p.json", '{"1": {"id": "a.jpg", "prompt": "p", "edit_type": "add"}}', r"1 source images not found"),
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
    scores = [Answer(None, "torn") if v is None else Answer(v) for v in flat]
    found = suite.results([Generated(p, file) for p, _, file in files], scores, {})
    assert found.summary["correct images"] == images and found.summary["prompts with a correct image"] == prompts
    named = [str(file.relative_to("out")) for (_, _, file), v in zip(files, flat, strict=True) if v is None]
    assert [line.split(":")[0] for line in found.problems if line.endswith(": torn")] == named


@pytest.mark.parametrize("index", ["../../esc", "a/b", "", "a\0b", "x" * 300])
def test_an_index_cannot_leave_the_output_folder(index):
    prompts = [Prompt(k, "x", {"index": i}) for k, i in enumerate(("0", index))]
    with pytest.raises(DataError, match="prompt 2 has"):
        load_suite("unigenbench").sample_files(prompts, 1, Path("out"), ".png")
