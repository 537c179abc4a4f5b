"""The two worlds whose tiny pipelines `vae.py` and `base.py` train: scenes of one shape, and short words.

Their differences are defined here: sizes, vocabulary, how training examples are drawn and how captions are corrupted.
Invariant: neither file depends on which world it trains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefgrpo.tiny import scenes
from scripts.demo_world import text

Draw = Callable[[str, int, torch.Generator | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class World:
    """A world of small images with captions. Codes [n, k], long, describe what an image shows."""

    height: int
    width: int
    words: Sequence[str]
    """Vocabulary of the tokenizers; other letters are separate tokens."""
    t5_length: int
    """Longest caption in tokens."""
    latent_channels: int
    heads: int
    """Attention heads of 32 channels in the transformer."""
    single_blocks: int
    """Single-stream blocks in the transformer, after one double-stream block."""
    draw: Draw
    """(split, n, generator) -> images [n, 3, H, W] in [0, 1] and their codes."""
    noisy_captions: Callable[[Tensor, float], list[str]]
    """(codes, probability) -> one caption each, whose attributes are replaced at random with that probability."""
    prompts: Callable[[str], list[str]]
    """All captions of a split."""
    report: Callable[[Tensor, list[str]], str]
    """(images, captions) -> text with the share of images that match their captions."""
    matches_codes: Callable[[Tensor, Tensor], Tensor]
    """(images, codes) -> bool [n], whether an image is recognised as its codes."""


def _draw_scenes(split: str, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """n random scenes of a split: images [n, 3, 32, 32] in [0, 1] and combinations [n, 3]."""
    combos = torch.tensor(scenes.SPLITS[split])
    combos = combos[torch.randint(len(combos), (n,), generator=generator)]
    return scenes.render(combos, generator), combos


def corrupt_combos(combos: Tensor, probability: float, tries: int = 8) -> Tensor:
    """Replace each attribute by a random one with the given probability: [n, 3] -> [n, 3].

    Redraws results that are not train combinations (keeping the input after `tries` draws), so that
    the model does not learn to associate held-out captions with wrong images.
    """
    known = torch.zeros(scenes.COUNTS, dtype=torch.bool)
    known[tuple(torch.tensor(scenes.SPLITS["train"]).T)] = True
    size = (tries, *combos.shape)
    random = torch.stack([torch.randint(m, size[:2]) for m in scenes.COUNTS], -1)
    drawn = torch.where(torch.rand(size) < probability, random, combos)
    drawn = torch.cat([drawn, combos[None]])
    first = known[tuple(drawn.unbind(-1))].int().argmax(0)  # index of the first valid draw
    return drawn[first, torch.arange(len(combos))]


def _captions_of_scenes(combos: Tensor, probability: float) -> list[str]:
    template = torch.randint(len(scenes.TEMPLATES), (len(combos),)).tolist()
    shown = corrupt_combos(combos, probability).tolist()
    return [scenes.caption(scenes.Combo(*combo), t) for combo, t in zip(shown, template, strict=True)]


def _report_scenes(images: Tensor, texts: list[str]) -> str:
    correct = scenes.hits(images, texts)
    read = scenes.read(images)
    unreadable = (read == scenes.UNREADABLE).any(1).float().mean()
    colour, shape, place = correct.float().mean(0).tolist()
    return (
        f"all right {correct.all(1).float().mean():.3f} "
        f"(colour {colour:.2f} shape {shape:.2f} place {place:.2f}) unreadable {unreadable:.3f}"
    )


WORLDS: dict[str, World] = {
    "scenes": World(
        height=scenes.SIZE, width=scenes.SIZE, words=scenes.WORDS, t5_length=12,
        latent_channels=4, heads=3, single_blocks=3,
        draw=_draw_scenes, noisy_captions=_captions_of_scenes, prompts=scenes.prompts, report=_report_scenes,
        matches_codes=lambda images, combos: (scenes.read(images) == combos).all(1),
    ),
    "text": World(
        height=text.HEIGHT, width=text.WIDTH, words=text.VOCABULARY, t5_length=10,
        latent_channels=8, heads=2, single_blocks=2,
        draw=text.draw, prompts=text.prompts, report=text.report,
        noisy_captions=lambda codes, p: [text.prompt(word) for word in text.decode(text.corrupt(codes, p))],
        matches_codes=lambda images, codes: (text.read(images) == codes).all(1),
    ),
}  # fmt: skip
