"""Train the tiny pairwise judge: `python -m scripts.demo_world.judge OUT --pool BASE.pt ...`.

Three stages, because with the pair loss alone accuracy stays at chance for a long time; auxiliary
heads, later discarded, supervise the steps. (1) The vision tower classifies colour, shape and place.
(2) All weights train on scene pairs: after layer 1 the token behind each image names the image's
and the caption's attributes, after layer 2 the three matches, and the last token gives the verdict.
(3) The same with half of the pairs from generator samples (`judge_data`).
Invariant: every pair is trained in both orders, and the target of a tie is 0.5.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from prefgrpo.tiny import scenes
from scripts.demo_world.judge_data import (
    TRAINING_COMBOS,
    Pairs,
    Pool,
    augment,
    augment_pairs,
    concatenate,
    load_pools,
    scene_pairs,
    subsample_ties,
)
from scripts.demo_world.judge_model import IMAGE_TOKENS, WIDTH, PairJudge
from scripts.demo_world.training import Schedule, fit, parameter_count

TIE_SHARE = 0.2  # share of ties kept for training


@dataclass(frozen=True)
class JudgeConfig:
    """What to train, and where to save it."""

    out: tyro.conf.Positional[Path]
    """Folder for the bf16 judge."""
    pool: tuple[Path, ...] = ()
    """Pool files of generator samples; without any, stage 3 is left out."""
    start: Path | None = None
    """Judge folder to start from; skips stages 1 and 2."""
    vision_steps: int = 800
    """Steps of stage 1, with 128 scenes each."""
    scene_steps: int = 1200
    """Steps of stage 2."""
    pool_steps: int = 1200
    """Steps of stage 3."""
    batch: int = 40
    """Pairs per step in stages 2 and 3, each in both orders."""
    lr: float = 1.5e-3
    """Peak learning rate of stage 2; stage 3 uses half of it, the vision tower 0.3 of both."""
    seed: int = 0
    """Seed of weights and data."""


class Probes(nn.Module):
    """Linear heads that exist in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = nn.Linear(IMAGE_TOKENS * WIDTH, sum(scenes.COUNTS))
        self.deep = nn.Linear(IMAGE_TOKENS * WIDTH, sum(scenes.COUNTS))
        self.shown = nn.Linear(WIDTH, sum(scenes.COUNTS))
        self.requested = nn.Linear(WIDTH, sum(scenes.COUNTS))
        self.match = nn.Linear(WIDTH, 3)


def attribute_loss(logits: Tensor, attributes: Tensor) -> Tensor:
    """Summed cross-entropy of colour, shape and place: [..., 16] against [..., 3]; -1 ignored."""
    losses = [
        F.cross_entropy(part.flatten(0, -2), target.flatten(), ignore_index=scenes.UNREADABLE)
        for part, target in zip(logits.split(scenes.COUNTS, -1), attributes.unbind(-1), strict=True)
    ]
    return torch.stack(losses).sum()


def train_vision(judge: PairJudge, probes: Probes, steps: int) -> float:
    """Stage 1: colour, shape and place are classified from both outputs of the vision tower."""

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        combos = torch.tensor(scenes.COMBOS)[torch.randint(len(scenes.COMBOS), (128,))]
        tokens, deep = judge.encode(augment(scenes.render(combos), 0.06))
        named = probes.merged(tokens.flatten(1))
        loss = attribute_loss(named, combos)
        loss = loss + 0.5 * attribute_loss(probes.deep(deep.flatten(1)), combos)
        guess = torch.stack([part.argmax(1) for part in named.split(scenes.COUNTS, 1)], 1)
        return loss, {"named": (guess == combos).float().mean().item()}

    groups = [([*judge.visual.parameters(), *probes.parameters()], 1.0)]
    return fit("judge vision", groups, step_loss, Schedule(steps, 2e-3, final=0.1), 100)


def draw_pairs(n: int, pool: Pool | None) -> Pairs:
    """n augmented training pairs, half of them generator samples when there is a pool."""
    share = n // 2 if pool is not None else 0
    drawn = subsample_ties(scene_pairs(3 * n, TRAINING_COMBOS), TIE_SHARE).rows(slice(n - share))
    pairs = augment_pairs(drawn, 0.06)
    if pool is None:
        return pairs
    drawn = subsample_ties(pool.pairs(4 * n), TIE_SHARE).rows(slice(share))
    return concatenate([pairs, augment_pairs(drawn, 0.02)])


def pair_loss(
    judge: PairJudge, probes: Probes, pairs: Pairs, template: int, attribute_weight: float
) -> tuple[Tensor, dict[str, float]]:
    """Loss of every pair in both orders: verdict, agreement of the orders, answer mass, probes."""
    n = len(pairs.requested)
    captions = [scenes.caption(scenes.Combo(*c), template) for c in pairs.requested.tolist()]
    tokens, deep = judge.encode(torch.cat([pairs.first, pairs.second]))  # [2n, 4, 128]
    swapped = tokens.roll(n, 0), deep.roll(n, 0)
    hidden, ids = judge.states((tokens, deep), swapped, captions * 2)  # rows: n as given, n swapped
    logit_difference, logits = judge.logits(hidden[-1])
    target = torch.cat([1 + pairs.margin.sign(), 1 - pairs.margin.sign()]) / 2
    verdict = F.binary_cross_entropy_with_logits(logit_difference, target)
    agreement = (logit_difference[:n] + logit_difference[n:]).square().mean()
    answers = logits[:, [judge.first, judge.second]].logsumexp(1)
    other_mass = (logits.logsumexp(1) - answers).mean()

    after_image = ids == judge.model.config.vision_end_token_id  # one token behind each image
    named, matched = (hidden[layer][after_image].view(2 * n, 2, -1) for layer in (1, 2))
    shown = torch.stack([pairs.shows_first, pairs.shows_second], 1)  # [n, 2, 3]
    shown = torch.cat([shown, shown.flip(1)])
    requested = torch.cat([pairs.requested] * 2)[:, None].expand(-1, 2, -1)
    attributes = attribute_loss(probes.shown(named), shown)
    attributes = attributes + attribute_loss(probes.requested(named), requested)
    match = F.binary_cross_entropy_with_logits(probes.match(matched), (shown == requested).float())
    loss = verdict + 0.05 * agreement + 0.2 * other_mass + match + attribute_weight * attributes
    decided = target != 0.5
    correct = ((logit_difference > 0) == (target > 0.5))[decided].float().mean().item()
    return loss, {"verdict": verdict.item(), "correct": correct, "agreement": agreement.item(), "match": match.item()}


def train_pairs(judge: PairJudge, probes: Probes, pool: Pool | None, batch: int, schedule: Schedule) -> float:
    """Stages 2 and 3: verdicts on pairs."""

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        weight = 0.3 if step < 0.6 * schedule.steps and pool is None else 0.05
        template = step % len(scenes.TEMPLATES)  # one template per step: captions of equal length
        return pair_loss(judge, probes, draw_pairs(batch, pool), template, weight)

    vision = list(judge.visual.parameters())
    seen = {id(p) for p in vision}
    rest = [p for p in judge.model.parameters() if id(p) not in seen]
    groups = [(vision, 0.3), ([*rest, *probes.parameters()], 1.0)]
    return fit("judge pool" if pool else "judge scenes", groups, step_loss, schedule, 100)


def train_judge(config: JudgeConfig) -> PairJudge:
    """Run all stages."""
    torch.manual_seed(config.seed)
    judge = PairJudge(config.start)
    probes = Probes()
    judge.train()
    print(f"judge: {parameter_count(judge.model)} parameters")
    seconds = 0.0
    if config.start is None:
        seconds += train_vision(judge, probes, config.vision_steps)
        schedule = Schedule(config.scene_steps, config.lr, warmup=100)
        seconds += train_pairs(judge, probes, None, config.batch, schedule)
    if config.pool:
        schedule = Schedule(config.pool_steps, config.lr / 2, warmup=100)
        pool = load_pools(config.pool)
        seconds += train_pairs(judge, probes, pool, config.batch, schedule)
    print(f"judge: {seconds:.0f} CPU seconds")
    return judge.eval()


def report(judge: PairJudge, name: str, pairs: Pairs) -> str:
    """Text with the accuracy on pairs that are not ties, per order and over both, and how often the order matters."""
    captions = [scenes.caption(scenes.Combo(*c), i % 3) for i, c in enumerate(pairs.requested.tolist())]
    forward = judge.prob(pairs.first, pairs.second, captions)
    backward = 1 - judge.prob(pairs.second, pairs.first, captions)
    decided = pairs.margin != 0
    better = pairs.margin > 0

    def share(right: Tensor, where: Tensor) -> float:
        return right[where].float().mean().item()

    both = (forward + backward > 1) == better
    margin_shares = [share(pairs.margin.abs() == d, decided) for d in (1, 2, 3)]
    by_margin = [share(both, pairs.margin.abs() == d) for d in (1, 2, 3)]
    flips = (forward > 0.5) != (backward > 0.5)
    return (
        f"judge {name}: correct {share((forward > 0.5) == better, decided):.3f} / "
        f"{share((backward > 0.5) == better, decided):.3f}, both orders {share(both, decided):.3f} "
        f"(margin 1/2/3: {' '.join(f'{v:.3f}' for v in by_margin)}; "
        f"shares {' '.join(f'{v:.2f}' for v in margin_shares)}), order changes the verdict "
        f"{share(flips, decided):.3f} of decided, {flips.float().mean():.3f} of all"
    )


def train(config: Annotated[JudgeConfig, tyro.conf.arg(name="")]) -> None:
    """Train, save, and report from the reloaded folder."""
    started = time.time()
    train_judge(config).save(config.out)
    judge = PairJudge(config.out).eval()
    torch.manual_seed(config.seed + 1)
    for split, combos in scenes.SPLITS.items():
        print(report(judge, f"{split} scenes", scene_pairs(3000, torch.tensor(combos), 0.0)))
    if config.pool:
        print(report(judge, "training pool", load_pools(config.pool).pairs(3000)))
    print(f"judge: {time.time() - started:.0f} s in all")


if __name__ == "__main__":
    tyro.cli(train, description=__doc__)
