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
from tiny_media import grey

from prefgrpo.data.media import Media
from prefgrpo.rewards import build
from prefgrpo.rewards.base import Sample
from prefgrpo.rewards.ocr import ENGINES, Ocr, VideoOcr, target

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
    pytest.importorskip("rapidocr_onnxruntime", reason="it has no release for this Python")
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
        assert score.value is None and "no text in double quotes" in score.reason
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


@pytest.mark.parametrize(
    ("prompt", "meta", "wanted"),
    [
        ('A shop "Fresh Bread" and "more"', {}, "freshbread"),
        ("Ein Schild “Grüße 😀” dort", {}, "grüße😀"),
        ('5" by 7" and "x"', {}, "by7"),
        ("no quotes", {"text": "Low TIDE"}, "lowtide"),
        ('with "both"', {"text": "Column"}, "column"),
        ('a "line\nbreak"', {}, "linebreak"),
        ("no quotes", {}, ""),
        ('an unclosed "quote', {}, ""),
        ('an empty "" one', {}, ""),
        ("no quotes", {"text": None}, ""),
    ],
)
def test_targets(prompt, meta, wanted):
    assert target(Sample(prompt, written(""), meta=meta)) == wanted


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


def test_paddleocr_is_called_as_its_third_version_wants(monkeypatch):
    """A stub with paddleocr 3's API, because the real models would have to be downloaded."""
    made = []

    class PaddleOCR:
        def __init__(self, **options):
            made.append(options)

        def predict(self, image):
            assert image.dtype == np.uint8 and image[0, 0].tolist() == [3, 2, 1], "expected BGR"
            return [{"rec_texts": ["Low", "Tide"], "rec_scores": [0.9, 0.8]}]

    monkeypatch.setitem(sys.modules, "paddleocr", types.SimpleNamespace(PaddleOCR=PaddleOCR))
    picture = Media(np.full((8, 8, 3), (1, 2, 3), np.uint8))
    assert Ocr(engine="paddleocr", workers=1).score([Sample('"low tide"', picture)])[0].value == 1.0
    assert made and made[0]["lang"] == "en"
