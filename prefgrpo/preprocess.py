"""`prefgrpo preprocess RECIPE`: encode every prompt of a recipe once, into data.cache.

Works under torchrun: text number i of those not yet there belongs to rank i mod world size, so each is encoded once
for any world size, and a killed run is continued by the same command. Invariant: afterwards, training and evaluation
load no text encoder.
"""

from __future__ import annotations

from tqdm import tqdm

from prefgrpo import parallel
from prefgrpo.config import Config, ConfigError
from prefgrpo.data import Prompt, read_prompts
from prefgrpo.embed import Embeddings
from prefgrpo.loading import missing, open_adapter


def all_prompts(config: Config) -> list[Prompt]:
    """Prompts of training and evaluation. Raises DataError with the numbers of bad lines."""
    files = [config.data.prompts, config.eval.prompts, config.eval.final_prompts]
    return [prompt for file in dict.fromkeys(f for f in files if f) for prompt in read_prompts(file)]


def preprocess(config: Config) -> int:
    """Fill data.cache; returns the exit code. Raises ConfigError, DataError or ModelError."""
    if not config.data.cache:
        raise ConfigError(["data.cache: expected the folder to fill, got nothing"])
    prompts = all_prompts(config)
    world = parallel.start(config.device)
    try:
        todo = missing(config, prompts)
        world.barrier()  # every rank has looked before any rank writes
        mine = [todo[i] for i in range(world.rank, len(todo), world.size)]
        if mine:
            embeddings = Embeddings(open_adapter(config, world.device), config.data.max_length, config.data.cache, 1)
            for part in tqdm(mine, unit="prompt", dynamic_ncols=True, disable=None if world.main else True):
                images = part.images(config)
                embeddings.latents(images) if part.text is None else embeddings.text(part.text, images)
        world.barrier()
        if world.main:
            print(f"{len(todo)} texts encoded now; all of {len(prompts)} prompts are in {config.data.cache}")
    finally:
        parallel.stop()
    return 0
