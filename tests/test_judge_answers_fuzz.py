"""100 000 answers of every kind, valid ones broken at random: no parser crashes, and no garbage becomes a verdict.

Oracle, written here without the parsers' expressions: what a value must be justified by in the text (`allowed`, by
words; `numbers`, by scanning). Answers that are valid or garbage by construction must be read, or refused, exactly.
The seed is fixed; PREFGRPO_FUZZ_SEED and PREFGRPO_FUZZ (a factor on the number) draw others.
"""

import contextlib
import json
import math
import os
import random
import string
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_server import completion

from prefgrpo.judge import answers
from prefgrpo.judge.http import first_choice, read
from prefgrpo.judge.template import PAIR_ANSWERS, load_template
from prefgrpo.judge.verdict import Answer, two_label_softmax

SEED = int(os.environ.get("PREFGRPO_FUZZ_SEED", "0"))
COUNT = int(12_500 * float(os.environ.get("PREFGRPO_FUZZ", "1")))
"""Answers per kind; there are eight kinds."""
KINDS = (*PAIR_ANSWERS, "scores", "json", "text")
AXES = load_template("unifiedreward", ("prompt", "media_1"), (), KINDS)
EDIT = load_template("edit_quality", ("media_1",), (), KINDS)
YES_NO = load_template("consistency", ("media_1", "media_2"), ("prompt",), KINDS)
LETTERS, DIGITS = set(string.ascii_lowercase), set(string.digits)
JUNK = [
    "1", "2", "3", "0", " ", "\n", ".", ",", ":", "{", "}", "[", "]", '"', "\\", "/", "-", "–", "not ", "n't ", " or ",
    "?", "é", "🙂", "\u0661", "\u212a", "ſ", "\ud800", "\x00", "<answer>", "</answer>", "</think>", "Image 2 is better",
    "1e999", "NaN", "null", "true", "9" * 5000, "[" * 3000, "{", "winner", '"winner": "Image 2"', '"score": [1, 2]',
    "Style Score (1-5): 2", "tie", "Score", "image ", "better",
]  # fmt: skip


def words(text):
    """Runs of ASCII letters or of digits, in lower case; anything else parts them."""
    found, run = [], ""
    for c in text.translate(str.maketrans(string.ascii_uppercase, string.ascii_lowercase)) + " ":
        kind = LETTERS if c in LETTERS else DIGITS if c in DIGITS else None
        if run and (kind is None or run[-1] not in kind):
            found.append(run)
            run = ""
        if kind is not None:
            run += c
    return found


BARE = {"the", "edited", "image", "video", "answer", "option", "picture", "is", "was", "better", "best", "winner",
        "clearly", "slightly", "much", "far", "definitely", "significantly", "overall", "a"}  # fmt: skip
TIES = {"it", "s", "is", "a", "tie", "draw", "equal", "equally", "neither", "both", "are", "good", "image", "images",
        "video", "videos", "tied", "1", "2", "and"}  # fmt: skip


DENIALS = {"not", "never", "neither", "nor", "if", "unless", "whether", "cannot", "no", "or", "either", "hardly"}


def claims(text):
    """Labels of which some sentence says, without a denial before it, that they are better."""
    found = set()
    for mark in ".!?;":
        text = text.replace(mark, "\n")
    for sentence in text.split("\n"):
        w = words(sentence)
        for k in range(len(w) - 3):
            verb = w[k].endswith(("image", "video")) and w[k + 1] in ("1", "2") and w[k + 2] in ("is", "was", "looks")
            last = next((n for n in (k + 3, k + 4) if n < len(w) and w[n].startswith("better")), 0)
            if verb and last and not DENIALS & set(w[:last]):
                found.add(w[k + 1])
    return found


def allowed(text):
    """Values that the words of a text can justify."""
    w, said = words(text), claims(text)
    for mark, then in {".": "\n", "!": "\n", ";": "\n", "?": "?\n"}.items():
        text = text.replace(mark, then)
    sentences = {" ".join(s.lower().split()) for s in text.split("\n")}
    bare = len(w) <= 8 and set(w) <= BARE | {"1", "2"}
    found = set()
    for label, other, value in (("1", "2", 1.0), ("2", "1", 0.0)):
        contradicted = bool({f"image {other} is better", f"video {other} is better"} & sentences)
        if (label in said and not contradicted) or (bare and w.count(label) == 1 and other not in w):
            found.add(value)
    if w and set(w) <= TIES and len(w) <= 8:
        found.add(0.5)
    return found


def quoted(text, key):
    """What follows `"key":` wherever it stands: a quoted text, or a number."""
    for start in range(len(text)):
        if text.startswith(f'"{key}"', start):
            rest = text[start + len(key) + 2 :].lstrip(" \t\r\n")
            if rest.startswith(":"):
                rest = rest[1:].lstrip(" \t\r\n")
                yield rest[1 : rest.find('"', 1)] if rest.startswith('"') else rest.split(",")[0].split("}")[0].strip()


def numbers(text):
    """Numbers that stand alone: no letter, digit, point or per cent sign on either side."""
    found, run = set(), ""
    for c in text + " ":
        if c in DIGITS or (run and c in ".+-eE"):
            run += c
            continue
        for piece in (run, run.rstrip(".-+eE")):
            with contextlib.suppress(ValueError):
                found.add(float(piece))
        run = ""
    return found


def break_up(rng, text, others):
    """`text` with a few random changes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        a = rng.randrange(len(text) + 1)
        b = min(len(text), a + rng.choice((1, 1, 2, 5, 20)))
        match rng.randrange(7):
            case 0:
                text = text[:a] + text[b:]
            case 1:
                text = text[:a] + rng.choice(JUNK) + text[a:]
            case 2:
                text = text[:a] + rng.choice(JUNK) + text[b:]
            case 3:
                text = text[:a]
            case 4:
                text = text[:a] + text[a:b] * 2 + text[b:]
            case 5:
                text = text[:a] + rng.choice(others)[rng.randrange(9) :]
            case 6:
                text = (
                    text[:a]
                    + "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x11000)))) for _ in range(3))
                    + text[b:]
                )
    return text


SAID = [
    ("Image 1", 1.0), ("image 2.", 0.0), ("**Image 1 is better**", 1.0), ("Video 2 is better", 0.0), ("2", 0.0),
    ("Edited image 1 is better", 1.0), ("tie", 0.5), ("Both are equally good.", 0.5),
    ("Image 2 is better than image 1", 0.0), ("Image 1 is worse", None), ("Image 1 is far from better", None),
    ("Image 1 shows the cat. Image 2 lacks it. Image 1 is clearly better.", 1.0), ("Answer: both? No.", None),
    ("Image 1 is not better", None), ("I do not think that Image 1 is better", None), ("Is image 1 better?", None),
    ("If the light mattered, image 2 is better", None), ("Image 1 is better. Image 2 is better.", None), ("", None),
    ("Image 1 or image 2 is better", None), ("It can't be said that image 2 is better", None), ("Image 12", None),
    ("Image 1 is better?", None), ("Image 3 is better", None), ("Neither image 1 is better nor image 2", None),
]  # fmt: skip


def flex_of(said, more=""):
    cats = [{"name": "Alignment", "cat_winner": said}, {"name": "Quality", "cat_winner": "tie"}]
    return json.dumps({"categories": cats, "reason": "a } b", "winner": said})[:-1] + more + "}"


def valid(kind):
    """(text, what it must be read as; None: nothing)."""
    if kind == "plain":
        return SAID
    if kind == "think":
        return [(f"<think>Image 2 is better lit.</think>\n<answer>\n{t}</answer>", v) for t, v in SAID] + [
            ("Image 1 is better", None), ("<answer>1</answer><answer>1</answer>", None), ("<answer>1", None)
        ]  # fmt: skip
    if kind == "edit":
        tags = [(f"Image 2 is better, or is it? <answer>{t}</answer>", v) for t, v in SAID]
        return tags + [(f"<think>Image 2 is better.</think>{t}", v) for t, v in SAID]
    if kind == "flex":
        good = [(f"```json\n{flex_of(t)}\n```", v) for t, v in SAID if v is not None]
        bad = [(flex_of(t), None) for t, v in SAID if v is None]
        twice = [(flex_of("Image 1", ', "winner": "Image 2"'), None), ('{"winner": true}', None)]
        return good + bad + twice + [('{"winner": {"a": "Image 1 is better"}}', None), ("[1]", None)]
    if kind == "scores":
        line = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"
        odd = ["1-5", "6", "0.5", "-1", "x", "", "4%", "4.5.6", "1 to 5", "NaN", "٣", "4/10", "45", "1e3", "3x"]
        return [
            (line.format(4, "**2.5**", "5/5"), {"Alignment": 4.0, "Coherence": 2.5, "Style": 5.0}),
            (line.format(3, 4, 2).lower(), {"Alignment": 3.0, "Coherence": 4.0, "Style": 2.0}),
            (line.format(3, 4, 2) + "\nStyle Score (1-5): 4", {"Alignment": 3.0, "Coherence": 4.0}),
            *((line.format(2, 3, o), {"Alignment": 2.0, "Coherence": 3.0}) for o in odd),
            *((line.format(o, o, o), None) for o in odd),
        ]
    form = '{{"reasoning": "a, ] b", "score": [{}, {}]}}'
    odd = ["26", "-1", "true", '"4"', "NaN", "Infinity", "1e999", "null", "[4]", "9" * 5000]
    return [
        (form.format(20, 7.5), {"naturalness": 20.0, "artifacts": 7.5}),
        ("<think>{}</think>```json\n" + form.format(1, "2,").replace("]}", "],}") + "\n```",
         {"naturalness": 1.0, "artifacts": 2.0}),
        ('{"reasoning": "two\nlines", "score": [3, 4]}', {"naturalness": 3.0, "artifacts": 4.0}),
        *((form.format(o, 3), None) for o in odd),
        (form.format(1, "2, 3"), None), ('{"score": [1, 2], "score": [3, 4]}', None), ("[1, 2]", None), ("1, 2", None),
    ]  # fmt: skip


def parse(kind, text):
    """(value, parts) or None where the answer states nothing; any other exception is a crash."""
    template = {"scores": AXES, "json": EDIT}.get(kind) or replace(EDIT, answer=kind)
    try:
        return answers.read(template, text)
    except answers.Unreadable:
        return None


@pytest.mark.parametrize("kind", ["plain", "think", "edit", "flex", "scores", "json"])
def test_what_is_valid_is_read_and_what_is_not_is_refused(kind):
    for text, want in valid(kind):
        found = parse(kind, text)
        if kind in ("scores", "json"):
            assert (found and found[1]) == want, text
        else:
            assert (found and found[0]) == want, text


def justified(kind, text, value, parts):
    """Whether the text gives ground for what was read."""
    text = text.rpartition("</think>")[2]
    bare = text.replace("*", "").replace("`", "")
    if kind == "scores":
        return all(1 <= v <= 5 and v in numbers(bare) for v in parts.values())
    if kind == "json":
        lists = text.split('"score"')[1:]
        return any(set(parts.values()) <= numbers(t.partition("]")[0]) for t in lists) and all(
            0 <= v <= 25 for v in parts.values()
        )
    if kind == "flex":
        cats = [v for t in quoted(text, "cat_winner") for v in allowed(t)]
        return any(value in allowed(t) for t in quoted(text, "winner")) and all(v in cats for v in parts.values())
    if kind == "think" or (
        kind == "edit" and "<answer>" in text.lower() and "</answer>" in text.lower().partition("<answer>")[2]
    ):
        lower = text.translate(str.maketrans(string.ascii_uppercase, string.ascii_lowercase))
        _, opened, rest = lower.partition("<answer>")
        inner, closed, after = rest.partition("</answer>")
        again = "</answer>" in after.partition("<answer>")[2]
        return bool(opened and closed) and not again and value in allowed(inner)
    return value in allowed(text)


@pytest.mark.parametrize("kind", ["plain", "think", "edit", "flex", "scores", "json"])
def test_a_broken_answer_is_read_only_where_its_words_justify_it(kind):
    rng = random.Random(f"{SEED} {kind}")
    texts = [t for t, value in valid(kind) for _ in range(1 if value is None else 10)]
    everything = [t for k in ("plain", "think", "flex", "scores", "json") for t, _ in valid(k)]
    readable = 0
    for _ in range(COUNT):
        text = break_up(rng, rng.choice(texts), everything)
        found = parse(kind, text)
        if found is None:
            continue
        readable += 1
        value, parts = found
        assert value in (None, 0.0, 0.5, 1.0) and (value is not None or parts)
        assert justified(kind, text, value, parts), (text[:300], found)
    assert COUNT * 0.05 < readable < COUNT * 0.95, "both happen, so the oracle says something"


def leaf(rng):
    return rng.choice(
        [None, True, -1, 0.5, math.nan, math.inf, -math.inf, 10**400, "", "Yes", "yes", " No", "9", [], {}, [[]]]
    )


def break_value(rng, value):
    """A copy of a JSON value with one place replaced, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        new = {k: break_value(rng, v) if k == key else v for k, v in value.items()}
        return {k: v for k, v in new.items() if k != key or rng.random() < 0.9}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return value[:at] + [break_value(rng, value[at])] * rng.choice((0, 1, 1, 1, 2)) + value[at + 1 :]
    return leaf(rng)


def token_mass(top, label):
    """Probability of the tokens that are `label` but for case and one leading space; None if there is none."""
    seen = {}
    for row in top:
        seen[str(row["token"])] = float(row["logprob"])
    mine = [
        v for t, v in seen.items() if t.removeprefix(" ").lower() == label.lower() and t.count(" ") == t.startswith(" ")
    ]
    return sum(math.exp(min(v, 700)) for v in mine) if mine else None


def test_a_broken_choice_gives_the_two_label_softmax_or_nothing():
    rng, read_any = random.Random(SEED), 0
    for _ in range(COUNT):
        tokens = rng.sample(["Yes", "yes", " yes", "YES", "No", " no", "NO", "Maybe", "Yesterday", "nO"], 6)
        top = [{"token": t, "logprob": -rng.expovariate(0.3)} for t in tokens]
        good = {"logprobs": {"content": [{"token": "x", "top_logprobs": top}]}, "message": {"content": "x"}}
        choice = break_value(rng, good) if rng.random() < 0.7 else good
        try:
            first, second = answers.label_logprobs(choice if isinstance(choice, dict) else {}, ("Yes", "No"), True)
        except answers.Unreadable:
            continue
        value, reason = two_label_softmax(first, second, 0.01)
        assert (value is None) == bool(reason)
        if value is None:
            continue
        read_any += 1
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        seen = {str(row["token"]): math.exp(min(float(row["logprob"]), 0)) for row in top}
        least = min(*seen.values(), max(1 - sum(seen.values()), 2**-23))
        yes, no = (least if m is None else m for m in (token_mass(top, "Yes"), token_mass(top, "No")))
        assert 0 <= value <= 1 and value == pytest.approx(yes / (yes + no), abs=1e-9)
    assert read_any > COUNT * 0.3


def test_a_broken_reply_ends_in_an_answer_or_a_reason():
    rng = random.Random(SEED)
    asked = [YES_NO, AXES, EDIT, load_template("flex"), load_template("think"), load_template("compare")]
    lines = [t for k in ("think", "flex", "scores", "json") for t, _ in valid(k) if len(t) < 2000]
    for _ in range(COUNT):
        body = completion(rng.gauss(0, 3), rng.choice([("1", "2"), ("Yes", "No")]))
        body["choices"][0]["message"]["content"] = rng.choice(lines)
        payload = json.dumps(break_value(rng, body) if rng.random() < 0.5 else body).encode()
        if rng.random() < 0.5:
            at = rng.randrange(len(payload))
            payload = payload[:at] + rng.randbytes(rng.choice((0, 1, 2))) + payload[at + rng.choice((0, 1, 9)) :]
        template = rng.choice(asked)
        try:
            answer = read(template, first_choice("url", payload)[0], Answer(None), 0.01)
        except answers.Unreadable as error:
            assert str(error)
            continue
        assert answer.reason or answer.value is not None or answer.parts
        assert answer.value is None or 0 <= answer.value <= 1
        json.dumps(answer.raw, ensure_ascii=False).encode()  # it can be written to the log


LEAVES = st.none() | st.booleans() | st.floats() | st.integers() | st.text()
NAMES = st.sampled_from(["winner", "categories", "cat_winner", "name", "score", "x"])


@given(st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(NAMES, x, max_size=4)))
@settings(max_examples=500)
def test_no_json_crashes_a_parser(value):
    text = json.dumps(value)
    for kind in ("flex", "json", "plain", "think", "edit", "scores"):
        found = parse(kind, text)
        assert found is None or justified(kind, text, *found) or kind == "flex", (text, found)
