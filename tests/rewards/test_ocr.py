"""`ocr` and `video_ocr`, with the real OCR engine on rendered text, and their formula by hand.

Why these cases: an image without text scores 0, but if the OCR engine fails or the prompt quotes nothing, the score
must be missing, or the run trains on false zeros. The edit distance is checked against a plain dynamic programme.
"""

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from world import grey

from prefgrpo.data.media import Media
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.ocr import ENGINES, Ocr, VideoOcr, targets

ENGINES["plain"] = lambda lang: lambda pixels: bytes(pixels[0, :, 0]).decode("latin-1").rstrip("\0")


def written(text: str) -> Media:
    """An image whose first pixel row encodes `text` for the engine above."""
    row = np.frombuffer(text.encode("latin-1").ljust(40, b"\0"), np.uint8)
    return Media(np.repeat(np.repeat(row[None, :, None], 4, 0), 3, 2))


def drawn(text: str, size: int = 40, width: int = 320, height: int = 240) -> np.ndarray:
    image = Image.new("RGB", (width, height), (245, 240, 225))
    ImageDraw.Draw(image).text((16, 16), text, fill=(20, 30, 60), font=ImageFont.load_default(size))
    return np.asarray(image)


@pytest.fixture(scope="module")
def real():
    reward = build("ocr")["ocr"]
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def ocr():
    return Ocr(engine="plain")


def test_reads_drawn_text(real):
    right, wrong, none, low = real.score(
        [
            Sample('A sign that says "Hello World"', Media(drawn("HELLO WORLD"))),
            Sample('A sign that says "Closed"', Media(drawn("Hello World"))),
            Sample('A sign that says "Closed"', grey(200, 64)),
            Sample('A sign that says "Open 24 hours"', Media(drawn("Open 24"))),
        ]
    )
    assert right.value == 1.0
    assert 0.0 <= wrong.value < 0.5
    assert none.value == 0.0 and none.reason == ""
    assert low.value == pytest.approx(6 / 11)


WORDS = ("WELCOME", "Hello World", "OPEN", "SALE 50%", "Fresh Bread", "HOTEL", "stop", "Coffee Shop", "PIZZA")


@pytest.mark.full
def test_text_that_stands_on_its_head_is_not_read_as_if_it_did_not(real):
    """Rapidocr's classifier of lines turns them by 180°. What is left is what the recogniser itself reads, and words
    that are the same on their head."""
    upright = [Sample(f'"{word}"', Media(drawn(word, 40))) for word in WORDS]
    turned = [Sample(s.prompt, Media(s.media.pixels[::-1, ::-1])) for s in upright]
    values = {word: s.value for word, s in zip(WORDS, real.score(turned), strict=True)}
    print({word: f"{value:.2f}" for word, value in values.items()}, f"mean {np.mean([*values.values()]):.2f}")
    assert [s.value for s in real.score(upright)] == [1.0] * len(WORDS)
    assert values["WELCOME"] < 0.7 and np.mean([*values.values()]) < 0.75
    assert real.score([Sample('"SWIMS"', Media(drawn("SWIMS")[::-1, ::-1]))])[0].value == 1.0


def distance(a: str, b: str) -> int:
    """Levenshtein distance, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


letters = st.text("ab cdB", max_size=30)


@given(letters, letters)
def test_the_formula(ocr, wanted, shown):
    score = ocr.score([Sample(f'a page: "{wanted}"', written(shown))])[0]
    want, found = (t.replace(" ", "").lower() for t in (wanted, shown))
    if not want:
        assert score.value is None and "quotes no text" in score.reason
    else:
        near = 1.0 - min(distance(want, found), len(want)) / len(want)
        assert score.value == (1.0 if want in found else pytest.approx(near))


@given(st.lists(letters, min_size=1, max_size=12))
def test_the_formula_of_clips(shown):
    clip = Media(np.stack([written(t).pixels for t in shown]))
    score = VideoOcr(engine="plain", workers=1).score([Sample('"abcd"', clip)])[0]
    found = [t.replace(" ", "").lower() for t in shown[::4]]
    values = [v for t in found if (v := 1.0 - min(distance("abcd", t), 4) / 4) > 0]
    assert score.value == pytest.approx(sum(values) / len(values) if values else 0.0)
    assert score.parts == {"frames_shown": len(values) / len(found)}


TARGETS = {
    'A shop "Fresh Bread" and "more"': ["freshbread", "more"],
    "Ein Schild mit „Hallo“ und einer „Welt“": ["hallo", "welt"],
    "Ein Schild “Grüße 😀” dort": ["grüße😀"],
    "une enseigne « Boulangerie »": ["boulangerie"],
    "Ein »Café« und ein ›Bar‹": ["café", "bar"],
    "skylten ”Öppet”": ["öppet"],
    "看板上写着「营业中」和『欢迎』": ["营业中", "欢迎"],
    '写着"你好"的牌子': ["你好"],
    '5" by 7" and "x"': ["x"],
    'a 12" ruler next to a sign "HELLO"': ["hello"],
    'a 6\'2" man with a shirt that says "TALL 7"': ["tall7"],
    "the dog's bowl says 'Rex'": ["rex"],
    "a wall with ‘Don’t Stop’ on it": ["don’tstop"],
    "the dogs' wall says 'it's fine', the cats' `no`": ["it'sfine", "no"],
    "an „it says ‚ja‘“ wall": ["itsays‚ja‘"],
    "写着'你好'的牌子": ["你好"],
    "the '90s, rock 'n' roll": ValueError,
    '"my 12" record"': ValueError,
    'a "line\nbreak"': ["linebreak"],
    "no quotes": ValueError,
    'an unclosed "quote': ValueError,
    'an empty "" one': ValueError,
}


@pytest.mark.parametrize("prompt", TARGETS)
def test_targets(prompt):
    wanted = TARGETS[prompt]
    one = Sample(prompt, written(""))
    if wanted is ValueError:
        score = Ocr(engine="plain", workers=1).score([one])[0]
        assert score.value is None and "column 'ocr_text'" in score.reason
    else:
        assert targets(one) == wanted
    for column in ("Low TIDE", ["Low", "TIDE"]):
        wanted = ["lowtide"] if column == "Low TIDE" else ["low", "tide"]
        assert targets(Sample(prompt, written(""), meta={"ocr_text": column})) == wanted


def test_several_texts_count_together_in_the_order_that_fits_best(ocr):
    """All contained: 1. One of two missing, or both changed places and one letter is wrong: by length."""
    shown = ["WORLD, HELLO", "HELLO", "worldhallo"]
    scores = ocr.score([Sample('"Hello" over "World"', written(text)) for text in shown])
    assert [s.value for s in scores] == pytest.approx([1.0, 0.5, 0.9])


def test_a_reader_that_fails_is_missing_and_fails_alone():
    def broken(lang):
        def read(pixels):
            if pixels[0, 0, 0] == 0:
                raise RuntimeError("bad tensor")
            return "a"

        return read

    ENGINES["broken"] = broken
    scores = Ocr(engine="broken").score([Sample('"a"', written(t)) for t in ("x", "\0", "x")])
    assert [s.value for s in scores] == [1.0, None, 1.0]
    assert "reading the image failed (RuntimeError: bad tensor)" in scores[1].reason


class Paddle3:
    """PaddleOCR 3's interface; a stub, because the real models would have to be downloaded."""

    def __init__(self, *, lang, use_doc_orientation_classify, use_doc_unwarping, use_textline_orientation):
        assert lang == "en"

    def predict(self, image):
        assert image.dtype == np.uint8 and image[0, 0].tolist() == [3, 2, 1], "expected BGR"
        return [{"rec_texts": ["Low", "Tide"], "rec_scores": [0.9, 0.8]}]


class Paddle2:
    """The interface of PaddleOCR 2.9.1."""

    def __init__(self, *, lang, use_angle_cls, show_log):
        assert lang == "en"

    def ocr(self, image, cls):
        assert image.dtype == np.uint8 and image[0, 0].tolist() == [3, 2, 1] and not cls
        return [[([], ("Low", 0.9)), ([], ("Tide", 0.8))], None]


@pytest.mark.parametrize("version", [Paddle2, Paddle3])
def test_both_interfaces_of_paddleocr(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "paddleocr", types.SimpleNamespace(PaddleOCR=version))
    picture = Media(np.full((8, 8, 3), (1, 2, 3), np.uint8))
    assert Ocr(engine="paddleocr", workers=1).score([Sample('"low tide"', picture)])[0].value == 1.0
