"""What the rewards of the CLIP family score in the registry test; tiny_rewards.py makes their checkpoints."""

import numpy as np
from reward_case import Case
from tiny_rewards import MAKERS

from prefgrpo.data.media import Media
from prefgrpo.rewards.base import Sample

GRID = 'Two cats, a 1x2 grid. Warm light. [LEFT]: a cat that says "hi." [RIGHT]: another cat sleeps.'


def picture(seed: int, high: int = 40, wide: int = 56) -> Media:
    """A smooth picture, so that resizing keeps what tells it from others."""
    coarse = np.random.default_rng(seed).integers(0, 256, (high // 8, wide // 8, 3), np.uint8)
    return Media(coarse.repeat(8, 0).repeat(8, 1))


def pictures() -> list[Sample]:
    """Two pictures of one prompt, one of another."""
    return [Sample(p, picture(k)) for k, p in enumerate(["a red cat", "a red cat", "two dogs on a hill"])]


def edits() -> list[Sample]:
    """Two edits of one source, one of two sources."""
    source = (picture(8),)
    more = Sample("add both", picture(2), (picture(8), picture(9)))
    return [Sample("add a hat", picture(0), source), Sample("add a hat", picture(1), source), more]


def grids() -> list[Sample]:
    """Two grids, and a prompt without one."""
    return [Sample(GRID, picture(k)) for k in range(2)] + [Sample("a 1920x1080 photo", picture(2))]


SAMPLES = {"image_similarity": edits, "subfig_clipT": grids, "subfig_clipI": grids, "subfig_dreamsim": grids}


def case(name: str) -> Case:
    return Case(lambda folder: MAKERS[name](folder / name), SAMPLES.get(name, pictures))


CASES = {name: case(name) for name in MAKERS}
