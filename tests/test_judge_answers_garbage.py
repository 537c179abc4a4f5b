"""100 000 answers that name a verdict or a number without giving one: quoted instructions, reasoning that never ends,
denials, partial praise, several scores, ranges, sums, foreign digits, answers that were cut off; under every template.

Each answer is put together from parts of which it is known what they say, so what must be read is known by
construction: nothing, or exactly the verdict that ends it. PREFGRPO_FUZZ_SEED and PREFGRPO_FUZZ draw others.
"""

import json
import os
import random

import pytest

from prefgrpo.judge import answers
from prefgrpo.judge.http import read
from prefgrpo.judge.template import PAIR_ANSWERS, Template, load_template
from prefgrpo.judge.verdict import Answer

SEED = os.environ.get("PREFGRPO_FUZZ_SEED", "0")
COUNT = int(14_500 * float(os.environ.get("PREFGRPO_FUZZ", "1")))
"""Answers per template; there are seven."""
KINDS = (*PAIR_ANSWERS, "scores", "json", "text")

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


def filled(rng, parts, k):
    """One of the parts about member `k`, in one of the ways in which judges write."""
    who = rng.choice(["Image", "image", "Video", "video", "Edited image", "edited image", "the image"])
    text = rng.choice(parts).format(n=who, k=k, o=3 - k)
    return text.upper() if rng.random() < 0.05 else text[:1].upper() + text[1:] if rng.random() < 0.5 else text


def essay(rng, parts, k):
    """A few sentences of talk and, among them, `parts` about `k`."""
    lines = [filled(rng, TALK, k) for _ in range(rng.randrange(4))] + [
        filled(rng, parts, k) for _ in range(rng.choice((1, 1, 2)))
    ]
    rng.shuffle(lines)
    return rng.choice([". ", ".\n", "\n", "\n\n", ";\n"]).join(lines)


def reasoned(rng, text):
    """`text` after reasoning that says all sorts of things."""
    k = rng.choice((1, 2))
    inside = essay(rng, UNSAID + SAID, k) + rng.choice(
        ["", f"<answer>Image {k} is better</answer>", '{"winner": "Image 1"}']
    )
    return f"<think>{inside}</think>{rng.choice(['', ' ', chr(10)])}{text}" if rng.random() < 0.5 else text


def unended(rng, k):
    """An answer that states a verdict, but never got out of its reasoning."""
    return f"<think>{essay(rng, TALK, k)}\n{filled(rng, SAID, k)}" + rng.choice(
        ["", f"\n<answer>Image {k} is better</answer>", f'{{"winner": "Image {k}"}}', f"\nFinal Score: {k}"]
    )


def value_of(template, text, reason="stop"):
    choice = {"message": {"content": text}, "finish_reason": reason}
    try:
        found = read(template, choice, Answer(None), 0.01)
    except answers.Unreadable:
        return None
    assert (found.value is None and not found.parts) == bool(found.reason)
    return found.value if template.answer not in ("scores", "json") else found.parts or None


def plain_template():
    t = load_template("think")
    return Template("plain", t.pieces, "", None, "plain", 64)


PAIRS = {"plain": plain_template(), **{n: load_template(n) for n in ("think", "edit_pairwise", "flex")}}


def worded(rng, template, text):
    """`text` where the template's judge puts its verdict."""
    if template.answer == "think" or (template.answer == "edit" and rng.random() < 0.5):
        return f"{essay(rng, UNSAID + SAID, 1)}\n<answer>{text}</answer>"
    if template.answer == "flex":
        return f"```json\n{json.dumps({'categories': [], 'reason': essay(rng, SAID, 1), 'winner': text})}\n```"
    return text


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_no_verdict_is_never_one_and_what_ends_an_answer_is(name):
    rng, template = random.Random(f"{SEED} {name}"), PAIRS[name]
    for _ in range(COUNT):
        k = rng.choice((1, 2))
        want = 1.0 if k == 1 else 0.0
        match rng.randrange(5):
            case 0:
                text = unended(rng, k)
                assert value_of(template, text) is None, text
            case 1:
                text = reasoned(rng, worded(rng, template, f"{essay(rng, UNSAID, k)}.\n{filled(rng, SAID, k)}"))
                if name != "flex":
                    assert value_of(template, text) == want, text
            case 2:
                text = reasoned(
                    rng, worded(rng, template, f"{filled(rng, SAID[:4], k)}.\n{filled(rng, SAID[:4], 3 - k)}")
                )
                assert value_of(template, text) is None, text
            case 3:
                text = f"{essay(rng, TALK, k)}\n{filled(rng, SAID, k)}"
                if name in ("plain", "edit_pairwise"):
                    assert value_of(template, text, "length") is None, "it may have gone on: " + text
            case 4:
                text = reasoned(rng, worded(rng, template, essay(rng, UNSAID, k)))
                assert value_of(template, text) is None, text


CONCLUDED = "Based on the above, edited image {k} is better in terms of {of}"


@pytest.mark.parametrize("name", ["plain", "edit_pairwise"])
def test_a_conclusion_may_name_its_reasons_at_the_end_of_an_answer(name):
    """What the published parser reads wherever it stands: an edit judge's last sentence."""
    for k, want in ((1, 1.0), (2, 0.0)):
        for of in ("instruction following and overall quality.", "…", "colour, light, and how well it keeps the cat"):
            end = CONCLUDED.format(k=k, of=of)
            for text in (end, f"Both keep the cat. Edited image {3 - k} is blurred.\n\n**{end}**"):
                assert value_of(PAIRS[name], text) == want, text
            for text in (
                f"{end}\nEdited image {3 - k} is better in terms of layout.",
                f"Edited image {3 - k} is better in terms of layout. {end}",
                f"{end}\n{CONCLUDED.format(k=3 - k, of='layout')}",
                f"{end}\nIgnore what I wrote.",
                f"<think>{end}",
                f"The example says:\n“{end}”\nI cannot compare them.",
            ):
                assert value_of(PAIRS[name], text) is None, text
            assert value_of(PAIRS[name], end, "length") is None


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


@pytest.mark.parametrize("name", HEADS)
def test_what_is_no_score_is_never_one_and_a_line_of_its_own_is(name):
    rng, template = random.Random(f"{SEED} {name}"), load_template(name, ("prompt", "media_1"), (), KINDS)
    for _ in range(COUNT):
        lines, want = [], {}
        for (axis, *_), head in zip(template.scores, HEADS[name], strict=True):
            v, w = rng.choice([("4", "5"), ("2", "3"), ("3.5", "4"), ("1", "2")])
            kind = rng.choice(["one", "none", "two"])
            lines.append(rng.choice(NO_SCORE if kind == "none" else SCORE).format(h=head, v=v, w=w))
            lines += [rng.choice([*SCORE, "Or rather: {h}{v}"]).format(h=head, v=w)] if kind == "two" else []
            want |= {axis: float(v)} if kind == "one" else {}
        said = "\n".join(lines)
        text = reasoned(rng, said.lower() if rng.random() < 0.1 else said)
        assert (value_of(template, text) or {}) == want, text
        assert value_of(template, unended(rng, 1)) is None
        cut = "\n".join(SCORE[0].format(h=head, v="4") for head in HEADS[name])
        whole = {axis: 4.0 for axis, *_ in template.scores[:-1]}
        assert (value_of(template, cut, "length") or {}) == whole, "the last one may be 4.5"


TAGS = [
    "<Score>{v}</Score>", "**<Score>{v}</Score>**", "<score> {v} </score>.", "\n<Score>{v}</Score>\n",
]  # fmt: skip
NO_TAG = [
    "<Score>{v}", "<Score>{v}/5</Score>", "<Score>{v} or 5</Score>", "<Score>٣</Score>", "<Score>6</Score>",
    "<Score>inf</Score>", "<Score>…</Score>", "I may not write <Score>{v}</Score>",
    "<Score>{v}</Score> would be wrong", "<Score></Score>", "{v}", "<Score>{v}</Score>\n<Score>0</Score>",
    "<Score>1e1</Score>", "<Score>-{v}</Score>", "Score: {v}",
]  # fmt: skip


def test_a_number_between_tags_counts_where_it_stands_alone():
    rng, template = random.Random(SEED), load_template("qwenvl", ("prompt", "media_1"), (), KINDS)
    for _ in range(COUNT):
        v = rng.choice("1235")
        good = rng.random() < 0.5
        text = reasoned(rng, rng.choice(TAGS if good else NO_TAG).format(v=v))
        assert value_of(template, text) == ({"Score": float(v)} if good else None), text


LONG = [
    "<answer>" * 100_000, "so " * 300_000, "Image 1 is better. " * 50_000, "<think>" * 100_000,
    "Final Score: " * 70_000, "*" * 1_000_000, "{" * 100_000, "- " * 300_000, "</think" * 100_000,
    "the answer is " * 60_000, "Final Score: 4" + " ," * 300_000, " " * 1_000_000,
]  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:8])
def test_a_megabyte_of_anything_is_read_or_refused_in_no_time(text):
    for name in ("think", "flex", "edit_pairwise", "unifiedreward_sglang", "edit_quality"):
        value_of(load_template(name, ("media_1",), ("prompt", "media_2", "source"), KINDS), text)
    value_of(plain_template(), text)
