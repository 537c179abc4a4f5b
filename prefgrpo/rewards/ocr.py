"""`ocr` and `video_ocr`: does the image show the text quoted in the prompt?

    value = 1 − min(d, n) / n    d: Levenshtein distance of the recognised text to the target, n: length of the target

Spaces and case are ignored. An image that contains the whole target scores 1. For a clip, every 4th frame is read; its
score is the mean over frames with a value above 0. Source: Flow-GRPO (arXiv 2505.05470). Invariant: if OCR fails or the
prompt quotes nothing, the score is missing; an image without text scores 0.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import PointwiseReward, RewardError, Sample, Score, library, too_long

COLUMN = "text"
"""Column with the target text, for prompts that do not quote it."""
INSTALL = "'prefgrpo[rewards]' (Python below 3.13; without libGL, opencv-python-headless in place of opencv-python)"
EVERY = 4
"""Every n-th frame of a clip is read."""
LONGEST = 32
"""Largest aspect ratio, because engines enlarge the shorter side."""
_QUOTED = re.compile('["“”]([^"“”]*)["“”]')
Distance = Callable[[str, str], int]
Read = Callable[[NDArray[np.uint8]], str]
"""uint8 RGB [H, W, 3] -> the text in it, line by line."""


def target(sample: Sample) -> str:
    """The target text without spaces, in lower case; '' if there is none."""
    quoted = _QUOTED.search(sample.prompt)
    given = sample.meta.get(COLUMN) or (quoted[1] if quoted else "")
    return plain(str(given))


def missing_target(sample: Sample) -> str:
    """Why a sample has no target; '' if it has one."""
    return "" if target(sample) else f"the prompt has no text in double quotes, and no column '{COLUMN}' names one"


def plain(text: str) -> str:
    """The text without spaces, in lower case."""
    return "".join(text.split()).lower()


def levenshtein() -> Distance:
    """rapidfuzz's distance; RewardError if it is not installed."""
    levenshtein: Distance = library("rapidfuzz.distance", INSTALL).Levenshtein.distance
    return levenshtein


def similarity(wanted: str, text: str, distance: Distance) -> float:
    """1 − min(d, n) / n for two plain texts."""
    return 1.0 - min(distance(wanted, text), len(wanted)) / len(wanted)


def image_value(wanted: str, text: str, distance: Distance) -> float:
    """Value of an image: 1 if it contains the whole target, else its closeness."""
    return 1.0 if wanted in text else similarity(wanted, text, distance)


@dataclass(kw_only=True, eq=False)
class Ocr(PointwiseReward):
    """How much of the quoted text can be read in the image, 0 to 1.

    engine: rapidocr (includes its models) or paddleocr (downloads them). lang: language for paddleocr; rapidocr reads
    English and Chinese. workers: number of images read concurrently, one thread each. detect: run text detection first;
    false: the whole image is passed to the recogniser as one line of text, which is many times cheaper (rapidocr only).
    Part `exact`: 1 if exactly the target is read.
    """

    engine: str = "rapidocr"
    lang: str = "en"
    workers: int = 4
    detect: bool = True

    def __post_init__(self) -> None:
        if self.engine not in ENGINES or self.workers < 1:
            message = f"engine must be one of {', '.join(ENGINES)} and workers at least 1"
            raise RewardError(f"{message}; got '{self.engine}' and {self.workers}")
        if not self.detect and self.engine != "rapidocr":
            raise RewardError(f"detect: false needs engine rapidocr; got '{self.engine}', which reads whole pages only")
        self._make = partial(ENGINES[self.engine], self.lang) if self.detect else partial(_rapidocr, "", detect=False)
        self._distance = levenshtein()
        self._local = threading.local()
        self._local.read = self._make()
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="ocr")

    def score(self, samples: list[Sample]) -> list[Score]:
        """One score per sample; missing if the prompt quotes nothing or reading failed."""
        return self.in_batches(samples, max(1, len(samples)), lambda some: self._threads.map(self._one, some))

    def refuse(self, sample: Sample) -> str:
        """Also rejects prompts without target text, and very long strips, which engines would enlarge without limit."""
        return super().refuse(sample) or missing_target(sample) or too_long(sample.media, LONGEST)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def _one(self, sample: Sample) -> Score:
        try:
            return self._value(sample.media, target(sample))
        except Exception as error:  # noqa: BLE001  (the engines raise whatever cv2 and onnxruntime raise)
            return Score(None, f"reading the image failed ({type(error).__name__}: {error})")

    def _value(self, media: Media, wanted: str) -> Score:
        text = self._text(media)
        return Score(image_value(wanted, text, self._distance), parts={"exact": float(text == wanted)})

    def _text(self, image: Media) -> str:
        """The text read by this thread's engine."""
        if not hasattr(self._local, "read"):
            self._local.read = self._make()
        return plain(self._local.read(image.pixels))


class VideoOcr(Ocr):
    """How much of the quoted text can be read in the frames that show any of it, 0 to 1."""

    takes = ("video",)

    def _value(self, media: Media, wanted: str) -> Score:
        values = [similarity(wanted, self._text(frame), self._distance) for frame in media.frames()[::EVERY]]
        shown = [v for v in values if v > 0]
        return Score(sum(shown) / len(shown) if shown else 0.0, parts={"frames_shown": len(shown) / len(values)})


def _rapidocr(_: str, detect: bool = True) -> Read:
    """detect: False passes the image to the recogniser as one line of text, which is not padded to 320 pixels."""
    shape, steps = ({}, {}) if detect else ({"rec_img_shape": [3, 48, 48]}, {"use_det": False, "use_cls": False})
    made = library("rapidocr_onnxruntime", INSTALL).RapidOCR
    engine = made(intra_op_num_threads=1, inter_op_num_threads=1, **shape)  # it runs on the calling thread only

    def read(pixels: NDArray[np.uint8]) -> str:
        lines, _ = engine(np.ascontiguousarray(pixels[..., ::-1]), **steps)  # it expects BGR, as cv2 reads files
        return " ".join(line[-2] for line in lines or [])  # (box, text, confidence), without box if not detected

    return read


def _paddleocr(lang: str) -> Read:
    plain_page = {"use_doc_orientation_classify": False, "use_doc_unwarping": False, "use_textline_orientation": False}
    engine = library("paddleocr", "paddleocr paddlepaddle").PaddleOCR(lang=lang, **plain_page)

    def read(pixels: NDArray[np.uint8]) -> str:
        pages = engine.predict(np.ascontiguousarray(pixels[..., ::-1]))
        return " ".join(text for page in pages for text in page["rec_texts"])

    return read


ENGINES: dict[str, Callable[[str], Read]] = {"rapidocr": _rapidocr, "paddleocr": _paddleocr}
"""Name -> (language) -> a reader for one thread."""
