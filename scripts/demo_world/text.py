"""The world of words: images of two to four capital letters, 64x16 pixels, their prompts, and template matching.

A prompt is `the word "CAB"`. Words are left-aligned, one letter per cell of 16x16 pixels, drawn with Pillow's default
font; position and brightness vary a little. 3000 words are drawn once and split into test (72), dev (72) and train.
Invariant: nothing here is learned or uses the OCR package: `Letters`, for evaluation specs, compares every cell with
rendered letters, so it is independent of the reward `ocr`. This file imports nothing from this folder, because recipes
load it by its path, scripts/demo_world/text.py:Letters.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Question, Reward, Sample

CELL = 16
CELLS = 4
HEIGHT, WIDTH = CELL, CELL * CELLS
LETTERS = "ABCDEFHKLMNPRSTU"
BLANK = len(LETTERS)  # codes of an empty cell, and of one that shows no letter
UNREADABLE = -1
FONT_SIZE = 14
_MAX_SHIFT = 2  # maximum offset of a letter from its template, in pixels
_MIN_CORRELATION = 0.6  # minimum correlation with a template
_MAX_BLANK_STD = 0.06  # an empty cell has a smaller standard deviation


def _words() -> list[str]:
    """3000 different words: all two-letter words, the rest half of three and half of four letters."""
    rng = random.Random(0)
    words = [a + b for a in LETTERS for b in LETTERS]
    seen = set(words)
    while len(words) < 3000:
        word = "".join(rng.choice(LETTERS) for _ in range(3 + len(words) % 2))
        if word not in seen:
            seen.add(word)
            words.append(word)
    rng.shuffle(words)
    return words


_WORDS = _words()
SPLITS: dict[str, list[str]] = {"test": _WORDS[:72], "dev": _WORDS[72:144], "train": _WORDS[144:]}
_HELD_OUT = {*SPLITS["test"], *SPLITS["dev"]}
VOCABULARY = ["the", "word"]


def prompt(word: str) -> str:
    """The prompt for a word."""
    return f'the word "{word}"'


def prompts(split: str) -> list[str]:
    """All prompts of a split ('train', 'dev' or 'test')."""
    return [prompt(word) for word in SPLITS[split]]


def parse_prompt(text: str) -> str:
    """The word of a prompt; raises ValueError if this world cannot draw it."""
    word = text.split('"')[1] if text.count('"') == 2 else ""
    if not 2 <= len(word) <= CELLS or set(word) - set(LETTERS):
        raise ValueError(f"expected a prompt such as {prompt('CAB')!r}, of 2 to {CELLS} of {LETTERS}; got {text!r}")
    return word


def encode(words: Sequence[str]) -> Tensor:
    """Words -> codes [n, 4] of their cells."""
    rows = [[LETTERS.index(letter) for letter in word] + [BLANK] * (CELLS - len(word)) for word in words]
    return torch.tensor(rows, dtype=torch.long).view(-1, CELLS)


def decode(codes: Tensor) -> list[str]:
    """Codes [n, 4] without unreadable cells -> words."""
    return ["".join(LETTERS[c] for c in row if c != BLANK) for row in codes.tolist()]


@cache
def glyphs() -> Tensor:
    """The letters and the blank, centred in their cells: [17, 16, 16] in [0, 1]."""
    font = ImageFont.load_default(FONT_SIZE)
    cells = []
    for letter in (*LETTERS, ""):
        cell = Image.new("L", (CELL, CELL))
        ImageDraw.Draw(cell).text((CELL / 2, CELL / 2), letter, 255, font, anchor="mm")
        cells.append(np.asarray(cell, np.float32) / 255)
    return torch.from_numpy(np.stack(cells))


def _shifted(x: Tensor, dy: int, dx: int) -> Tensor:
    """x [..., H, W] shifted down and to the right, padded with zeros."""
    h, w = x.shape[-2:]
    padded = F.pad(x, (max(dx, 0), max(-dx, 0), max(dy, 0), max(-dy, 0)))
    return padded[..., max(-dy, 0) : max(-dy, 0) + h, max(-dx, 0) : max(-dx, 0) + w]


def render(codes: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one image per row of codes [n, 4] -> float32 [n, 3, 16, 64] in [0, 1]; all shifted by at most one pixel."""
    n = len(codes)
    mask = glyphs()[codes].permute(0, 2, 1, 3).reshape(n, HEIGHT, WIDTH)
    shift = torch.randint(-1, 2, (n, 2), generator=generator)
    shifted = torch.stack([_shifted(mask, dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)])
    mask = shifted[(shift[:, 0] + 1) * 3 + shift[:, 1] + 1, torch.arange(n)][:, None]
    background = 0.1 + 0.15 * torch.rand(n, 1, 1, 1, generator=generator)
    foreground = 0.85 + 0.15 * torch.rand(n, 1, 1, 1, generator=generator)
    return (background + (foreground - background) * mask).expand(-1, 3, -1, -1).contiguous()


def draw(split: str, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """n random images of a split's words, [n, 3, 16, 64] in [0, 1], and their codes [n, 4]."""
    codes = encode(SPLITS[split])
    codes = codes[torch.randint(len(codes), (n,), generator=generator)]
    return render(codes, generator), codes


def corrupt(codes: Tensor, probability: float) -> Tensor:
    """Replace each letter by a random one with the given probability; words that would become held-out are kept."""
    drawn = torch.where(
        (codes != BLANK) & (torch.rand(codes.shape) < probability), torch.randint(len(LETTERS), codes.shape), codes
    )
    held_out = torch.tensor([word in _HELD_OUT for word in decode(drawn)])
    return torch.where(held_out[:, None], codes, drawn)


@cache
def _templates() -> Tensor:
    """Letters at all small shifts, [16 * 25, 256], each of mean 0 and norm 1."""
    span = range(-_MAX_SHIFT, _MAX_SHIFT + 1)
    all_shifts = torch.stack([_shifted(glyphs()[:BLANK], dy, dx) for dy in span for dx in span], 1)
    return _standardise(all_shifts.flatten(0, 1).flatten(1))


def _standardise(x: Tensor) -> Tensor:
    """Rows of mean 0 and norm 1."""
    return F.normalize(x - x.mean(-1, keepdim=True), dim=-1)


def read(images: Tensor) -> Tensor:
    """The letter, BLANK or UNREADABLE of each cell: [n, 3, 16, 64] in [0, 1] -> long [n, 4]."""
    grey = images.detach().float().cpu().nan_to_num(0.0).mean(1)
    if grey.shape[1:] != (HEIGHT, WIDTH):
        raise ValueError(f"expected images of shape [n, 3, {HEIGHT}, {WIDTH}], got {list(images.shape)}")
    cells = grey.view(-1, HEIGHT, CELLS, CELL).transpose(1, 2).flatten(2)  # [n, 4, 256]
    correlation, best = (_standardise(cells) @ _templates().T).max(-1)
    letter = torch.where(correlation > _MIN_CORRELATION, best // (2 * _MAX_SHIFT + 1) ** 2, UNREADABLE)
    return torch.where(cells.std(-1) < _MAX_BLANK_STD, BLANK, letter)


def hits(images: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Share of each prompt's letters that are in their cells [n], and whether all four cells are correct [n]."""
    requested = encode([parse_prompt(text) for text in texts])
    correct = read(images) == requested
    letters = requested != BLANK
    return (correct & letters).sum(1) / letters.sum(1), correct.all(1)


def report(images: Tensor, texts: Sequence[str]) -> str:
    """Text with the shares of correct words and letters, and of cells that show no letter."""
    letters, words = hits(images, texts)
    unreadable = (read(images) == UNREADABLE).float().mean()
    return f"all right {words.float().mean():.3f} (letters {letters.mean():.3f}) unreadable cells {unreadable:.3f}"


class Letters(Reward):
    """Share of the requested letters in their cells, by template matching; part `all`: whether all are."""

    probe: ClassVar[dict[str, Any]] = {"prompt": prompt("CAB")}

    def ask(self, asked: list[Question]) -> list[Answer]:
        """One answer per sample; missing if its prompt or size belongs to another world."""
        return [self._score_one(sample) for (sample,) in asked]

    def _score_one(self, sample: Sample) -> Answer:
        image = torch.from_numpy(np.ascontiguousarray(sample.media.pixels)).permute(2, 0, 1)[None].float() / 255.0
        try:
            letters, words = hits(image, [sample.prompt])
        except ValueError as error:
            return Answer(None, str(error))
        return Answer(float(letters[0]), parts={"all": float(words[0])})
