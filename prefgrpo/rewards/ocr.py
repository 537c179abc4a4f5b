"""`ocr` and `video_ocr`: does the image show the texts quoted in the prompt?

    value = 1 − min(d, n) / n    d: Levenshtein distance of the recognised text to the target, n: length of the target

Spaces and case are ignored. An image that contains every quoted text scores 1; otherwise several texts are joined in
the order that fits best. Source: Flow-GRPO (arXiv 2505.05470), which uses the first text between straight quotes.
Invariant: without text in the image it is 0; if OCR fails, or it is not clear what the prompt quotes, it is missing.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from prefgrpo.data.answer import Answer
from prefgrpo.data.media import Media
from prefgrpo.rewards.base import INSTALL, Question, Reward, RewardError, Sample, check_aspect_ratio, library

COLUMN = "ocr_text"
"""Column with the target text or a list of texts, for prompts that do not quote it clearly."""
EVERY = 4
"""Every n-th frame of a clip is read."""
LONGEST = 32
"""Largest aspect ratio, because engines enlarge the shorter side."""
OPENING = '"“„„”«»‹›「『＂'
CLOSING = '"”“””»«›‹」』＂'
"""Quotation marks of several languages, and those that close them."""
_QUOTED = re.compile("|".join(rf"(?<!\d){a}([^{a}{b}]*){b}" for a, b in zip(OPENING, CLOSING, strict=True)))
"""A quotation; a mark after a digit means inches."""
_UNPAIRED = re.compile(rf"(?<!\d)[{OPENING}{CLOSING}]")
_WORD = "0-9A-Za-zÀ-ɏ"
_SINGLE = re.compile(
    "|".join(
        rf"(?<![{_WORD}]){a}(?!\s|n{b})((?:[^{a}{b}\n]|(?<=[{_WORD}]){b}(?=[{_WORD}]))+)(?<!\s){b}(?![{_WORD}])"
        for a, b in ("''", "‘’", "‚‘", "＇＇", "``")
    )
)
"""A quotation in single marks or backticks; a mark between letters is an apostrophe, and 'n' is `and`."""
_MOST_ORDERED = 4
"""Of more texts than this, only the order in the prompt is tried."""
Distance = Callable[[str, str], int]
Read = Callable[[NDArray[np.uint8]], str]
"""uint8 RGB [H, W, 3] -> the text in it, line by line."""


def quoted(prompt: str) -> list[str]:
    """The texts in double quotation marks of any language; without any, those in single ones or backticks.

    Raises ValueError if a double quotation is not closed.
    """
    rest = _QUOTED.sub("", prompt)
    if unclosed := _UNPAIRED.search(rest):
        raise ValueError(f"the prompt does not close the quotation {rest[unclosed.start() :][:31]!r}")
    double = [text for texts in _QUOTED.findall(prompt) for text in texts if text]
    return double or [text for texts in _SINGLE.findall(prompt) for text in texts if text]


def targets(sample: Sample) -> list[str]:
    """The target texts without spaces, in lower case. Raises ValueError, with the reason, if there are none."""
    given = sample.meta.get(COLUMN)
    try:
        texts = quoted(sample.prompt) if given is None else given if isinstance(given, list) else [given]
    except ValueError as error:
        raise ValueError(f"{error}; give the text in a column '{COLUMN}'") from error
    wanted = [text for text in (plain(str(text)) for text in texts) if text]
    if not wanted:
        raise ValueError(f"the prompt quotes no text, and no column '{COLUMN}' names one")
    return wanted


def plain(text: str) -> str:
    """The text without spaces, in lower case, full-width letters as ordinary ones."""
    return "".join(unicodedata.normalize("NFKC", text).split()).lower()


def similarity(wanted: list[str], text: str, distance: Distance) -> float:
    """1 − min(d, n) / n for plain texts; several ones are joined in the order with the smallest distance."""
    orders = permutations(wanted) if len(wanted) <= _MOST_ORDERED else [wanted]
    closest = min(distance("".join(order), text) for order in orders)
    length = sum(map(len, wanted))
    return 1.0 - min(closest, length) / length


@dataclass(kw_only=True, eq=False)
class Ocr(Reward):
    """How much of the quoted text can be read in the image, 0 to 1. Part `exact`: 1 if exactly the targets are read.

    1 − Levenshtein distance to the text / its length; 1 if the image contains every text (Flow-GRPO, arXiv 2505.05470).
    A prompt whose quotation is unclear counts as missing. Lines are not turned, but the recogniser itself reads some
    letters upside down: nine words turned by 180° score 0.58 on average (`pytest tests/rewards/test_ocr.py -k head -s
    -o addopts=`).

    engine: rapidocr (includes its models) or paddleocr (downloads them). lang: language for paddleocr; rapidocr reads
    Latin script, Chinese and Japanese. workers: number of images read concurrently, one thread each. detect: false
    passes the whole image to the recogniser as one line of text (rapidocr only), about 75 times cheaper at 64×16
    pixels.
    """

    reads = (COLUMN,)
    engine: Literal["rapidocr", "paddleocr"] = "rapidocr"
    lang: str = "en"
    workers: PositiveInt = 4
    detect: bool = True

    def __post_init__(self) -> None:
        if not self.detect and self.engine != "rapidocr":
            raise RewardError(f"detect: false needs engine rapidocr; got '{self.engine}', which reads whole pages only")
        self._make = partial(ENGINES[self.engine], self.lang) if self.detect else partial(_rapidocr, detect=False)
        self._distance: Distance = library("rapidfuzz.distance", INSTALL).Levenshtein.distance
        self._local = threading.local()
        self._local.read = self._make()
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="ocr")

    def ask(self, asked: list[Question]) -> list[Answer]:
        """One score per sample; missing if the prompt quotes nothing or reading failed."""
        return list(self._threads.map(self._one, [sample for (sample,) in asked]))

    def check(self, sample: Sample) -> None:
        """Also rejects prompts without target text, and very long strips, which engines would enlarge without limit."""
        targets(sample)
        super().check(sample)
        check_aspect_ratio(sample.media, LONGEST)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def _one(self, sample: Sample) -> Answer:
        try:
            return self._value(sample.media, targets(sample))
        except Exception as error:  # noqa: BLE001  (the engines raise whatever cv2 and onnxruntime raise)
            return Answer(None, f"reading the image failed ({type(error).__name__}: {error})")

    def _value(self, media: Media, wanted: list[str]) -> Answer:
        text = self._text(media)
        closeness = similarity(wanted, text, self._distance)
        contained = all(target in text for target in wanted)
        return Answer(1.0 if contained else closeness, parts={"exact": float(closeness == 1.0)})

    def _text(self, image: Media) -> str:
        """The text read by this thread's engine."""
        if not hasattr(self._local, "read"):
            self._local.read = self._make()
        return plain(self._local.read(image.pixels))


class VideoOcr(Ocr):
    """How much of the quoted text can be read in the frames that show any of it, 0 to 1.

    `ocr` of every 4th frame; mean over the frames that score above 0.
    """

    takes = ("video",)

    def _value(self, media: Media, wanted: list[str]) -> Answer:
        values = [similarity(wanted, self._text(frame), self._distance) for frame in media.frames()[::EVERY]]
        shown = [v for v in values if v > 0]
        return Answer(sum(shown) / len(shown) if shown else 0.0, parts={"frames_shown": len(shown) / len(values)})


def _rapidocr(_: str = "", detect: bool = True) -> Read:
    """detect: False passes the image to the recogniser as one line of text, which is not padded to 320 pixels."""
    library("onnxruntime", INSTALL)
    threads = "EngineConfig.onnxruntime"  # it runs on the calling thread only
    params: dict[str, Any] = {f"{threads}.intra_op_num_threads": 1, f"{threads}.inter_op_num_threads": 1}
    # use_cls turns lines by 180°: upside-down text would be read as if it were upright
    params |= {"Global.log_level": "error", "Global.use_cls": False}
    steps = {}
    if not detect:
        params["Rec.rec_img_shape"] = [3, 48, 48]
        steps = {"use_det": False}
    engine = library("rapidocr", INSTALL).RapidOCR(params=params)

    def read(pixels: NDArray[np.uint8]) -> str:
        lines = engine(np.ascontiguousarray(pixels[..., ::-1]), **steps).txts  # it expects BGR, as cv2 reads files
        return " ".join(lines or ())

    return read


def _paddleocr(lang: str) -> Read:
    """A reader for PaddleOCR 3, or for 2.x (Flow-GRPO and Pref-GRPO install 2.9.1), which has another interface
    and can go when they install 3."""
    paddleocr = library("paddleocr", "paddleocr paddlepaddle").PaddleOCR
    third = hasattr(paddleocr, "predict")
    steps = {"use_doc_orientation_classify": False, "use_doc_unwarping": False, "use_textline_orientation": False}
    engine = paddleocr(lang=lang, **steps) if third else paddleocr(lang=lang, use_angle_cls=False, show_log=False)

    def read(pixels: NDArray[np.uint8]) -> str:
        image = np.ascontiguousarray(pixels[..., ::-1])
        if third:
            return " ".join(text for page in engine.predict(image) for text in page["rec_texts"])
        pages = engine.ocr(image, cls=False)  # None for a page without text; a line is (box, (text, confidence))
        return " ".join(line[1][0] for page in pages for line in page or ())

    return read


ENGINES: dict[str, Callable[[str], Read]] = {"rapidocr": _rapidocr, "paddleocr": _paddleocr}
"""Name -> (language) -> a reader for one thread."""
