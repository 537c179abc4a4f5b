"""The trained weights in diffusers format, at the end of a run."""

from __future__ import annotations

from prefgrpo.data.atomic import write_folder
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.shard import full_copies
from prefgrpo.parallel.world import World
from prefgrpo.run.run_folder import RunFolder


def export_weights(adapter: Adapter, world: World, folder: RunFolder, lora: bool) -> None:
    """Write the weights that the adapter holds: a LoRA, or the whole pipeline. Every rank calls it; rank 0 writes, and
    gathers full copies of sharded weights in CPU memory."""
    copies = {} if lora or not world.layout.fsdp else full_copies(adapter, world)
    if not world.main:
        return
    if lora:
        write_folder(folder.product(lora), lambda inside: adapter.save_lora(str(inside)))
    else:
        write_folder(folder.product(lora), lambda inside: adapter.save_full(str(inside), copies))
