"""`prefgrpo preprocess RECIPE`: encode every prompt, source image and sample from a file once, into data.cache.

Works under torchrun: uncached entry i belongs to rank i mod world size, so each is encoded once for any world size.
After an interruption, the same command continues. Invariant: afterwards, training and evaluation load no text encoder.
"""

from __future__ import annotations

from tqdm import tqdm

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.models.attention import attention_of_a_run
from prefgrpo.parallel import world as parallel
from prefgrpo.parallel.world import World
from prefgrpo.rollout.embeddings import Embeddings, Entry
from prefgrpo.rollout.source_images import prefetch
from prefgrpo.run.errors import model_errors, refuse
from prefgrpo.run.opening import open_adapter
from prefgrpo.run.source import open_source

AHEAD = 8
"""Entries whose source images are read while earlier ones are encoded."""


@attention_of_a_run()
def preprocess(config: Config) -> int:
    """Encode all prompts of a recipe once, into data.cache (also under torchrun)."""
    if not config.data.cache:
        raise ConfigError(["data.cache: expected a folder to write to, got nothing"])
    refuse(model_errors(config))
    world = parallel.join()
    source = open_source(config, world, every_set=True)
    embeddings = Embeddings(config, most_bytes=0)
    absent = embeddings.absent(source.entries())
    todo = world.all_gather_object(absent if world.main else [])[0]  # another run may be writing to the cache
    if mine := todo[world.dp_index :: world.dp_size]:
        _encode(config, embeddings, mine, world)
    world.barrier()
    if world.main:
        total = f"all of {len(source.prompts) + len(source.evaluated)} prompts are in {config.data.cache}"
        kinds = "texts, sources and samples" if config.data.pairs else "texts and sources"
        print(f"{len(todo)} {kinds} encoded now; {total}")
    return 0


def _encode(config: Config, embeddings: Embeddings, entries: list[Entry], world: World) -> None:
    """Encode this rank's entries; each cache shard is written when it is full, the last one at the end."""
    adapter = open_adapter(config, world.device)
    hidden = None if world.main else True
    try:
        with adapter.on_device("text_encoder", "vae"):
            for number, entry in enumerate(tqdm(entries, unit="prompt", dynamic_ncols=True, disable=hidden)):
                prefetch(later.sources for later in entries[number : number + AHEAD])
                embeddings.get(adapter, [entry])
    finally:
        embeddings.flush()  # also after Ctrl-C
