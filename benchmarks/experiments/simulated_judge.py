"""A judge for the demo's world with known truth, flaw, noise and position bias, which rates images or compares pairs.

    opinion = truth + flaw · (brightness − 0.25)          perceived at a look = opinion + noise · ε
    rating of an image        clip(round(3 + 5 · perceived), 1, 10)
    P(first is better)        σ((perceived first − perceived second + bias) / temperature)

truth is a continuous version of the world's own scorer (prefgrpo/tiny/scenes.py): 1 for a correct image, near 0 for a
wrong one. brightness, the mean of all pixels in 0 … 1, is not part of it, so a policy that raises the opinion through
brightness exploits the judge. ε is N(0, 1) and determined by the question: the same question about the same images gets
the same answer, in any process. Rating an image again is another question (like sampling again, or rephrasing it).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefgrpo.data.answer import Answer
from prefgrpo.rewards.base import Key, Question, Reward
from prefgrpo.rewards.pairs import Compares, rings
from prefgrpo.tiny.scenes import evidence, parse_caption
from scripts.demo_world.text import hits

USUAL = 0.25
"""Brightness at which the flaw has no effect; about that of the demo's starting policy."""
Floats = NDArray[np.float64]
Images = Sequence[NDArray[np.uint8]]


def truth(images: Images, prompts: Sequence[str]) -> list[float]:
    """Correctness of each image, 0 … 1: mean over colour, shape and position of σ(lead of the requested value over the
    best other one), reduced if the shape is too small or too large to be recognised. The scale of a lead is about a
    tenth of the distance between two values."""
    seen = evidence(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255.0)
    asked = torch.tensor([parse_caption(text) for text in prompts])
    values = ((-seen.colour, 0.1), (seen.shape, 0.05), (-seen.place, 2.0))
    leads = [_lead(value, asked[:, k]) / scale for k, (value, scale) in enumerate(values)]
    right = torch.sigmoid(torch.stack(leads)).mean(0)
    readable = torch.sigmoid((seen.pixels - 45) / 10) * torch.sigmoid((260 - seen.pixels) / 20)
    return (right * readable).tolist()


def _lead(values: Tensor, asked: Tensor) -> Tensor:
    """[n]: of values [n, k], that of the requested answer minus the largest other."""
    own = values.gather(1, asked[:, None])[:, 0]
    return own - values.scatter(1, asked[:, None], -math.inf).amax(1)


def brightness(images: Images, prompts: Sequence[str]) -> list[float]:
    """Mean of all pixels, 0 … 1."""
    del prompts
    return [float(image.mean()) / 255 for image in images]


@dataclass
class SimulatedJudge:
    """Parameters and opinions of a simulated judge. Public fields as in the module's equations."""

    flaw: float = 0.0
    noise: float = 0.1
    bias: float = 0.0
    temperature: float = 0.25
    calls: int = 0
    """Number of questions so far, or since it was reset to 0."""

    def calls_of_a_step(self, metrics: Mapping[str, float]) -> float:
        """Number of questions since the last time this was called."""
        del metrics
        asked = self.calls
        self.calls = 0
        return asked

    def opinion(self, images: Images, prompts: Sequence[str]) -> Floats:
        """Opinions [n], without noise."""
        flaw = self.flaw * (np.array(brightness(images, prompts)) - USUAL)
        return np.array(truth(images, prompts)) + flaw


@dataclass
class WordsJudge(SimulatedJudge):
    """A judge of the OCR demo's words, whose opinion is the share of letters that are right."""

    def opinion(self, images: Images, prompts: Sequence[str]) -> Floats:
        """Opinions [n], without noise."""
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255.0
        letters, _ = hits(pixels, list(prompts))
        return letters.double().numpy()


class Ratings(Reward):
    """Mean of `asks` ratings of an image, 1 … 10."""

    def __init__(self, judge: SimulatedJudge, asks: int) -> None:
        self.judge = judge
        self.asks = asks

    def ask(self, asked: list[Question]) -> list[Answer]:
        """One answer per sample."""
        samples = [sample for (sample,) in asked]
        images = [s.media.pixels for s in samples]
        opinions = self.judge.opinion(images, [s.prompt for s in samples])
        self.judge.calls += self.asks * len(samples)
        noise = np.array([[_normal(_digest(image), bytes([k])) for k in range(self.asks)] for image in images])
        ratings = np.clip(np.round(3 + 5 * (opinions[:, None] + self.judge.noise * noise)), 1, 10)
        return [Answer(float(value)) for value in ratings.mean(1)]


class WinRates(Compares):
    """`vlm_pairwise` with simulated answers: its plans, rates and comparisons."""

    def __init__(
        self,
        judge: SimulatedJudge,
        order: Literal["plan", "both", "index"] = "plan",
        plan: str = "both_orders",
        **options: Any,
    ) -> None:
        """order: which image of a pair is shown first: as the plan says, each in turn (two calls), or the one earlier
        in the group (as in Pref-GRPO). plan: as in Compares, or budget(n): n random pairs, balanced per member.
        options: round_verdicts and rate, as in Compares."""
        self.judge = judge
        self.order = order
        self.budget = int(plan[len("budget(") : -1]) if plan.startswith("budget(") else 0
        super().__init__("round_robin" if self.budget else plan, **options)

    def keys(self, size: int, seed: int) -> list[Key]:
        """The plan's pairs in this order."""
        chosen = random_pairs(size, seed, self.budget) if self.budget else super().keys(size, seed)
        if self.order == "both":
            return [pair for i, j in chosen for pair in ((i, j), (j, i))]
        return [(min(pair), max(pair)) for pair in chosen] if self.order == "index" else chosen

    def ask(self, asked: list[Question]) -> list[Answer]:
        """P(first is better) for each pair; the noise of two looks is one normal number with twice the variance."""
        j = self.judge
        samples = list(dict.fromkeys(sample for pair in asked for sample in pair))
        images = [sample.media.pixels for sample in samples]
        opinions = dict(zip(samples, j.opinion(images, [sample.prompt for sample in samples]), strict=True))
        digests = dict(zip(samples, map(_digest, images), strict=True))
        j.calls += len(asked)
        noise = math.sqrt(2) * j.noise
        leads = [opinions[a] - opinions[b] + noise * _normal(digests[a], digests[b]) + j.bias for a, b in asked]
        return [Answer(1 / (1 + math.exp(-lead / j.temperature))) for lead in leads]


def random_pairs(size: int, seed: int, n: int) -> list[Key]:
    """n different pairs, members as often first as second."""
    return [pair for ring in rings(size, seed) for pair in ring][:n]


def _digest(image: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=16).digest()


def _normal(*address: bytes) -> float:
    """The standard normal number of an address (Box-Muller)."""
    words = np.frombuffer(hashlib.blake2b(b"".join(address), digest_size=16).digest(), np.uint64)
    u, v = (int(words[0]) + 1) / 2**64, int(words[1]) / 2**64
    return math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
