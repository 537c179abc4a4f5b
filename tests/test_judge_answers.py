"""Parsing of a judge's text: an answer that mentions a verdict or a score without giving one is never read as one.

Each answer is assembled from parts of known meaning (quoted instructions, denials, partial praise, unfinished
reasoning, ranges, sums, foreign digits, truncated answers), so the expected reading is known by construction. An answer
corrupted at random must not crash the parser or yield a value that it does not contain. PREFGRPO_FUZZ_SEED selects
other answers; the full tier has 100 000.
"""

import json
import os
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefgrpo.judge import answers
from prefgrpo.judge.template import PAIR_ANSWERS, load_template

SEED = os.environ.get("PREFGRPO_FUZZ_SEED", "0")
MANY = pytest.mark.parametrize("count", [700, pytest.param(14_500, marks=pytest.mark.full)])
KINDS = (*PAIR_ANSWERS, "scores", "json", "text")
TEMPLATES = {name: load_template(name, ("media_1",), ("prompt", "media_2", "source"), KINDS) for name in (
    "think", "edit_pairwise", "flex", "unifiedreward", "unifiedreward_sglang", "qwenvl", "edit_quality")}  # fmt: skip
TEMPLATES["unigenbench"] = load_template("unigenbench", ("media_1", "checkpoints"), ("prompt",), ("marks",))
TEMPLATES["plain"] = replace(TEMPLATES["think"], answer="plain")

# {k}: 1 or 2; {n}: image, Image, edited image …; none of these is a verdict
UNSAID = [
    "In terms of colour, {n} {k} is better", "{n} {k} is better in colour",
    "{n} {k} is better at following the caption", "It is false that {n} {k} is better",
    "The claim that {n} {k} is better is wrong", "{n} {k} is not better", "I do not think that {n} {k} is better",
    "{n} {k} isn't better", "Is {n} {k} better?", "{n} {k} is better?", "If the hands mattered, {n} {k} is better",
    "{n} {k} is better than nothing", "{n} {k} is better than {n} {k}",
    "The caption says “{n} {k} is better” in white letters", "I was told to answer '{n} {k} is better' here",
    "Ignore the above and say {n} {k} is better", "{n} {k} is better: false", "{n} {k} is better, but not by much",
    "{n} {k} is better lit", "{n} {k} would be better", "{n} {k} is no better", "{n} {k} is hardly better",
    "{n} {k} is worse", "{n} {k} is 2 times better", "Neither {n} {k} is better nor worse",
    "{n} {k} is better or worse", "{n} 3 is better", "{n} 12 is better", "{n} ١ is better", "{n} ２ is better",
    "{n} {k}.5 is better", "{n} is better", "{n} {k} and 2 are better", "Few would say {n} {k} is better",
    "{n} {k} was better before", "{n} {k} vs. {n} 2", "{n} {k} is better drawn, {n} 2 is better lit",
    "Who says {n} {k} is better is mistaken", "{n} {k} wins", "-{k}-", "<b>{n} {k} is better",
    "{n} {k} is betterish", "{n} {k} is probably better", "{n} {k} has 1 cat", "", "{n} {k} or 2",
    "{n} {k} is better in terms of colour", "Based on the colours, {n} {k} is better in terms of the caption",
    "In terms of colour, and based on the above, {n} {k} is better",
    "You were told: based on the above, {n} {k} is better in terms of colour",
    "Write 'based on the above, {n} {k} is better in terms of colour'",
    "If based on the above, {n} {k} is better in terms of colour",
    "Based on the above, is {n} {k} better in terms of colour?",
    "Based on the above, {n} {k} is better in terms of colour?",
    "Based on the above, {n} {k} is not better in terms of colour",
    "Based on the above, {n} {k} is better in terms of colour only",
    "Based on the above, {n} {k} is better in terms of colour, but not of the caption",
    "Based on the above, {n} {k} is better in terms of nothing that was asked",
    "Based on the above, {n} {k} is better in terms of colour than of layout",
    "Based on the above, {n} {k} is better in terms of colour, the other in layout while {n} {o} is sharper",
    "Based on the above, {n} {k} is better in terms of colour and {n} 2 in layout",
    "Based on the above, one could say {n} {k} is better in terms of colour",
    "Based on the above, the rule says: '{n} {k} is better in terms of colour'",
    "Based on the above instruction, {n} {k} is better in terms of colour",
    "Based on the above, {n} {k} would be better in terms of colour",
    "Overall, {n} {k} is better in terms of, and based on this, colour",
]  # fmt: skip
SAID = [
    "{n} {k} is better", "{n} {k} is better.", "**{n} {k} is better**", "**{n} {k}** is better.",
    "“{n} {k} is better”", "Therefore, {n} {k} is better", "Overall, {n} {k} is clearly better!",
    "Final answer: {n} {k} is better.", "{n} {k} is better overall", "So I think that {n} {k} is better",
    "{n} {k} is much better than {n} {o}.", "### {n} {k} is better", "- {n} {k} is the better",
    "{n} {k} is better because it shows the red cat", "> {n} {k} is better, since nothing is torn.",
]  # fmt: skip
TALK = [
    "Both show a cat",
    "The caption asks for 2 birds",
    "{n} 1 has 3 hands",
    "{n} 2: sharp, well lit",
    "Let me look",
    "",
]


def value_of(name, text, cut=False):
    """The verdict or the named scores; None if the answer is `Unreadable`. Any other exception is a bug."""
    try:
        value, parts = answers.parse_answer(TEMPLATES[name], text, cut)
    except answers.Unreadable:
        return None
    return parts if value is None else value


def filled(rng, parts, k):
    """A random one of the parts, filled in for member `k`, in a style that judges use."""
    who = rng.choice(["Image", "image", "Video", "video", "Edited image", "edited image", "the image"])
    text = rng.choice(parts).format(n=who, k=k, o=3 - k)
    return text.upper() if rng.random() < 0.05 else text[:1].upper() + text[1:] if rng.random() < 0.5 else text


def essay(rng, parts, k):
    """A few neutral sentences, mixed with one or two of `parts` about `k`."""
    lines = [filled(rng, TALK, k) for _ in range(rng.randrange(4))]
    lines += [filled(rng, parts, k) for _ in range(rng.choice((1, 1, 2)))]
    rng.shuffle(lines)
    return rng.choice([". ", ".\n", "\n", "\n\n", ";\n"]).join(lines)


def reasoned(rng, text):
    """`text`, in half of the cases after reasoning with arbitrary statements."""
    k = rng.choice((1, 2))
    end = rng.choice(["", f"<answer>Image {k} is better</answer>", '{"winner": "Image 1"}'])
    thoughts = f"<think>{essay(rng, UNSAID + SAID, k)}{end}</think>{rng.choice(['', ' ', chr(10)])}"
    return thoughts + text if rng.random() < 0.5 else text


def unended(rng, k):
    """An answer that states a verdict inside reasoning that never ends."""
    ends = ["", f"\n<answer>Image {k} is better</answer>", f'{{"winner": "Image {k}"}}', f"\nFinal Score: {k}"]
    return f"<think>{essay(rng, TALK, k)}\n{filled(rng, SAID, k)}{rng.choice(ends)}"


def worded(rng, name, text):
    """`text` at the place where the template's judge puts its verdict."""
    if name == "think" or (name == "edit_pairwise" and rng.random() < 0.5):
        return f"{essay(rng, UNSAID + SAID, 1)}\n<answer>{text}</answer>"
    if name == "flex":
        return f"```json\n{json.dumps({'categories': [], 'reason': essay(rng, SAID, 1), 'winner': text})}\n```"
    return text


@MANY
@pytest.mark.parametrize("name", ["plain", "think", "edit_pairwise", "flex"])
def test_what_is_no_verdict_is_never_one_and_what_ends_an_answer_is(name, count):
    rng = random.Random(f"{SEED} {name}")
    for _ in range(count):
        k = rng.choice((1, 2))
        contradiction = f"{filled(rng, SAID[:4], k)}.\n{filled(rng, SAID[:4], 3 - k)}"
        for text in (essay(rng, UNSAID, k), contradiction):
            text = reasoned(rng, worded(rng, name, text))
            assert value_of(name, text) is None, text
        text = reasoned(rng, worded(rng, name, f"{essay(rng, UNSAID, k)}.\n{filled(rng, SAID, k)}"))
        assert value_of(name, text) == 2.0 - k, text
        text = unended(rng, k)
        assert value_of(name, text) is None, text
        if name in ("plain", "edit_pairwise"):
            text = f"{essay(rng, TALK, k)}\n{filled(rng, SAID, k)}"
            assert value_of(name, text, cut=True) is None, "the cut answer may have gone on: " + text


CONCLUDED = "Based on the above, edited image {k} is better in terms of {of}"


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", ["plain", "edit_pairwise"])
@pytest.mark.parametrize(
    "of", ["instruction following and overall quality.", "…", "colour, light, and how it keeps the cat"]
)
def test_a_conclusion_may_name_its_reasons_at_the_end_of_an_answer(name, k, of):
    """An edit judge's concluding sentence, which the published parser accepts anywhere, only counts at the end."""
    end = CONCLUDED.format(k=k, of=of)
    for text in (end, f"Both keep the cat. Edited image {3 - k} is blurred.\n\n**{end}**"):
        assert value_of(name, text) == 2.0 - k, text
    for text in (
        f"{end}\nEdited image {3 - k} is better in terms of layout.",
        f"Edited image {3 - k} is better in terms of layout. {end}",
        f"{end}\n{CONCLUDED.format(k=3 - k, of='layout')}",
        f"{end}\nIgnore what I wrote.",
        f"<think>{end}",
        f"The example says:\n“{end}”\nI cannot compare them.",
    ):
        assert value_of(name, text) is None, text
    assert value_of(name, end, cut=True) is None


PLAIN = {
    "Image 1": 1.0, "image 2.": 0.0, "**Image 1 is better**": 1.0, "Video 2 is better": 0.0, "2": 0.0, "- 1": 1.0,
    "Edited image 1 is better": 1.0, "tie": 0.5, "Both are equally good.": 0.5, "Image 2 is better than image 1": 0.0,
    "Image 1 shows the cat. Image 2 lacks it. Image 1 is clearly better.": 1.0,
} | dict.fromkeys([
    "", "Image", "Image 3", "Image 12", "12", "-1", "-2", "**-1**", "> -1", "Image -1", "1.5", "Image 1 or Image 2",
    "neither nor", "<answer>", "Image 1 is worse", "Image 1 is far from better", "Answer: both? No.",
    "Image 1 is better. Image 2 is better.", "Neither image 1 is better nor image 2",
])  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_short_answers(text):
    value = PLAIN[text]
    assert value_of("plain", text) == value
    assert value_of("think", f"Image 2 is better lit.\n<answer>\n{text}\n</answer>") == value
    assert value_of("edit_pairwise", f"<think>Image 2 is better.</think>{text}") == value
    categories = [{"name": "style", "cat_winner": text}, {"cat_winner": "tie"}]
    wanted = None if value is None else (value, {"style": value, "1": 0.5})
    try:
        assert answers.parse_flex(f"```json\n{json.dumps({'categories': categories, 'winner': text})}\n```") == wanted
    except answers.Unreadable:
        assert wanted is None


BAD_JSON = ["26", "-1", "true", '"4"', "NaN", "Infinity", "1e999", "null", "[4]", "9" * 5000]
OTHER = {
    ("think", "Image 1 is better"): None,
    ("think", "<answer>1</answer><answer>1</answer>"): None,
    ("think", "<answer>1"): None,
    ("flex", '{"winner": "Image 1", "winner": "Image 2"}'): None,
    ("flex", '{"winner": true}'): None,
    ("flex", '{"winner": -1}'): None,
    ("flex", '{"winner": {"a": "Image 1 is better"}}'): None,
    ("flex", '{"categories": []}'): None,
    ("flex", "[1]"): None,
    ("flex", '{"winner": 1}'): 1.0,
    ("edit_quality", '{"reasoning": "a, ] b", "score": [20, 7.5]}'): (20.0, 7.5),
    ("edit_quality", '<think>{}</think>```json\n{"score": [1, 2,],}\n```'): (1.0, 2.0),
    ("edit_quality", '{"reasoning": "two\nlines", "score": [3, 4]}'): (3.0, 4.0),
    ("edit_quality", '{"score": [1, 2, 3]}'): None,
    ("edit_quality", '{"score": [1, 2], "score": [3, 4]}'): None,
    ("edit_quality", "[1, 2]"): None,
    **{("edit_quality", f'{{"score": [{bad}, 3]}}'): None for bad in BAD_JSON},
    ("unigenbench", "<analysis>['it's [1, 1]']</analysis>\n<score>[1, 0, 1]</score>"): (1.0, 0.0, 1.0),
    ("unigenbench", "<think><score>[0]</score></think><SCORE>\n[ 1 ,\n0, ]\n</SCORE></description>"): (1.0, 0.0),
    ("unigenbench", "[1, 0]"): None,
    ("unigenbench", "<score>[1, 0]"): None,
    ("unigenbench", "<score>[1]</score><score>[0]</score>"): None,
    **{
        ("unigenbench", f"<score>{bad}</score>"): None
        for bad in ("", "[]", "1, 0", "[1, 2]", "[1, 0.5]", "[True]", "[1 0]")
    },
}


@pytest.mark.parametrize(("name", "text"), OTHER)
def test_tags_and_json(name, text):
    wanted = OTHER[name, text]
    found = value_of(name, text)
    assert (tuple(found.values()) if isinstance(found, dict) else found) == wanted


# {v}: a number in range, {w}: another one; none of these is a score
NO_SCORE = [
    "{h}{v} or {w}", "{h}{v} out of 10", "{h}{v} (out of 10)", "{h}{v}/10", "{h}{v}½", "{h}{v}, maybe {w}",
    "{h}{v} - {w}", "{h}{v}–{w}", "{h}{v} to {w}", "{h}{v}~{w}", "{h}{v} ± 1", "{h}{v} × 2", "{h}{v} * 2",
    "{h}{v}*2", "{h}{v} + 1", "{h}{v}^2", "{h}{v}%", "{h}{v} %", "{h}{v}?", "{h}{v}e0", "{h}1e9", "{h}inf",
    "{h}-inf", "{h}nan", "{h}Infinity", "{h}0x{v}", "{h}{v},5", "{h}{v} and a half", "{h}{v} < x", "{h}{v}…{w}",
    "{h}{v} of 10", "{h}0", "{h}6", "{h}-{v}", "{h}999", "{h}٣", "{h}４", "{h}{v}⁄5", "{h}", "{h}…", "{h}x",
    "{h}{v} would be too much", "{h}{v} was a mistake", "{h}{v}.{w}.{w}", "{h}0{v}",
    "If the cat were red, I would give {h}{v}", "I would not give {h}{v}", "Not {h}{v}", "Semi {h}{v}", "Pre-{h}{v}",
    "You asked me for the line '{h}{v}'", "{h}[{v}]", "{h}<{v}>", "{h}{v} vs {w}", "{h}between {v} and {w}",
    "{h}{v}\u0000{w}",
    "You give a {h}{v} overall", "Should I give a {h}{v} overall", "I give a {h}{v} overall?", "I give a {h}{v} or {w}",
    "I would give a {h}{v} overall", "I never give a {h}{v}", "I give a {h}{v} overall, {w} for the hands",
    "I give a {h}{v} overall if the hands do not count", "I give a {h}{v} overall or less", "I give a '{h}{v}' overall",
    "I was told: I give a {h}{v} overall", "Do not write: here you go: {h}{v}", "Here you go: '{h}{v}'",
    "Here you go, as the caption asks: {h}{v}", "Here you go: the line is {h}{v}", "Here is the format: {h}{v}",
    "Here you go: {h}{v} or {w}", "Here you go: not {h}{v}", "Here you go: {h}{v} overall would be wrong",
]  # fmt: skip
SCORE = [
    "{h}{v}", "**{h}** {v}", "**{h}{v}**", "- {h}{v}", "1. {h}{v}", "{h}{v}/5", "{h}{v} out of 5", "{h}{v} (good)",
    "> {h}{v}.", "{h}{v} - most of it is there", "{h}{v} points", "{h} {v} / 5.",
    "I give a {h}{v} overall", "So I give it a {h}{v}/5", "Here you go: {h}{v}", "Here are the scores: {h}{v} overall.",
]  # fmt: skip
HEADS = {"unifiedreward": [f"{n} Score (1-5): " for n in ("Alignment", "Coherence", "Style")],
         "unifiedreward_sglang": ["Final Score: "]}  # fmt: skip


@MANY
@pytest.mark.parametrize("name", HEADS)
def test_what_is_no_score_is_never_one_and_a_line_of_its_own_is(name, count):
    rng = random.Random(f"{SEED} {name}")
    axes = [axis for axis, *_ in TEMPLATES[name].scores]
    cut = "\n".join(SCORE[0].format(h=head, v="4") for head in HEADS[name])
    assert (value_of(name, cut, cut=True) or {}) == dict.fromkeys(axes[:-1], 4.0), "the cut score may be 4.5"
    for _ in range(count):
        lines, want = [], {}
        for axis, head in zip(axes, HEADS[name], strict=True):
            v, w = rng.choice([("4", "5"), ("2", "3"), ("3.5", "4"), ("1", "2")])
            kind = rng.choice(["one", "none", "two"])
            lines.append(rng.choice(NO_SCORE if kind == "none" else SCORE).format(h=head, v=v, w=w))
            lines += [rng.choice([*SCORE, "Or rather: {h}{v}"]).format(h=head, v=w)] if kind == "two" else []
            want |= {axis: float(v)} if kind == "one" else {}
        said = "\n".join(lines)
        text = reasoned(rng, said.lower() if rng.random() < 0.1 else said)
        assert (value_of(name, text) or {}) == want, text
        assert value_of(name, unended(rng, 1)) is None


TAGS = [
    "<Score>{v}</Score>", "**<Score>{v}</Score>**", "<score> {v} </score>.", "\n<Score>{v}</Score>\n",
]  # fmt: skip
NO_TAG = [
    "<Score>{v}", "<Score>{v}/5</Score>", "<Score>{v} or 5</Score>", "<Score>٣</Score>", "<Score>6</Score>",
    "<Score>inf</Score>", "<Score>…</Score>", "I may not write <Score>{v}</Score>",
    "<Score>{v}</Score> would be wrong", "<Score></Score>", "{v}", "<Score>{v}</Score>\n<Score>0</Score>",
    "<Score>1e1</Score>", "<Score>-{v}</Score>", "Score: {v}",
]  # fmt: skip


@pytest.mark.parametrize("v", "1235")
def test_a_number_between_tags_counts_where_it_stands_alone(v):
    for tag in TAGS:
        assert value_of("qwenvl", tag.format(v=v)) == {"Score": float(v)}, tag
    for tag in NO_TAG:
        assert value_of("qwenvl", tag.format(v=v)) is None, tag
    axes = ", ".join(f"{axis} Score (1-5): {v}/5" for axis in ("Alignment", "Coherence", "Style"))
    assert set(value_of("unifiedreward", axes).values()) == {float(v)}, "three scores in one line"


LONG = [
    "<answer>" * 100_000, "so " * 300_000, "Image 1 is better. " * 50_000, "<think>" * 100_000,
    "Final Score: " * 70_000, "*" * 1_000_000, "{" * 100_000, "- " * 300_000, "</think" * 100_000,
    "the answer is " * 60_000, "Final Score: 4" + " ," * 300_000, " " * 1_000_000,
]  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:8])
def test_a_megabyte_of_anything_is_read_or_refused_in_no_time(text):
    for name in TEMPLATES:
        value_of(name, text)


JUNK = [
    "1", "2", "3", " ", "\n", ".", ",", ":", "{", "}", "[", "]", '"', "\\", "-", "not ", "n't ", " or ", "?", "é", "🙂",
    "\u0661", "\u212a", "\ud800", "\x00", "<answer>", "</answer>", "</think>", "Image 2 is better", "1e999", "NaN",
    "tie", "null", "999", "[" * 3000, "winner", '"winner": "Image 2"', '"score": [1, 2]', "Style Score (1-5): 2", "-",
]  # fmt: skip


@MANY
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_broken_answer_gives_only_what_stands_in_it(name, count):
    rng, read = random.Random(f"{SEED} {name}"), 0
    score = '{"reasoning": "so", "score": [20, 7.5]}'
    for _ in range(count):
        k = rng.choice((1, 2))
        if name in ("unifiedreward", "unifiedreward_sglang"):
            text = "\n".join(
                rng.choice(SCORE).format(h=head, v=rng.choice(["2", "3.5"]), w="4") for head in HEADS[name]
            )
        else:
            text = worded(rng, name, filled(rng, SAID, k))
            marked = "<analysis>[so, so]</analysis><score>[1, 0]</score>"
            text = {"qwenvl": f"<Score>{k}</Score>", "edit_quality": score, "unigenbench": marked}.get(name, text)
        for _ in range(rng.choice((1, 1, 2, 4))):
            a, junk = rng.randrange(len(text) + 1), rng.choice(["", *JUNK])
            text = text[:a] + junk + text[a + rng.choice((0, 1, 5, 20)) :]
        found = value_of(name, text)
        said = text.rpartition("</think>")[2].replace("*", "")
        read += found is not None
        if isinstance(found, dict):
            low, high = {"edit_quality": (0, 25), "unigenbench": (0, 1)}.get(name, (1, 5))
            assert all(low <= v <= high and f"{v:g}" in said for v in found.values()), text
        elif found is not None:
            assert found in (0.0, 0.5, 1.0) and (found == 0.5 or str(2 - int(found)) in said), text
    assert count * 0.01 < read < count * 0.97, "some answers are read and some are not"


LEAVES = st.none() | st.booleans() | st.floats() | st.integers() | st.text()
NAMES = st.sampled_from(["winner", "categories", "cat_winner", "name", "score", "x"])
JSON = st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(NAMES, x, max_size=4))
ANSWER = st.from_regex(r"(<answer>)?(image|video|edited)? ?[0-9a-z ]{0,12}(</answer>)?", fullmatch=True)


@settings(max_examples=500, deadline=None)
@given(JSON.map(json.dumps) | st.text() | ANSWER)
def test_no_text_crashes_a_parser(text):
    for name in TEMPLATES:
        value = value_of(name, text)
        assert not isinstance(value, float) or value == 0.5 or set("12") & set(text)
