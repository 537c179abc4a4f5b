"""Sends every sample to the data-parallel index that scores its group, while the next batch is generated.

One message per batch and receiver: uint8 [n, (F,) H, W, 3], the samples in batch order. All processes derive the
messages and their shapes from the same plan, so only pixels are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from prefgrpo.parallel.world import Transfer, World
from prefgrpo.rollout.assignment import BatchPlan, Place
from prefgrpo.rollout.render import Images


@contextmanager
def media_exchange(
    world: World,
    planned: Sequence[BatchPlan],
    shape: Callable[[BatchPlan], tuple[int, ...]],
    take: Callable[[Place, Images], object],
) -> Iterator[Callable[[BatchPlan, Images], None]]:
    """Yields `put`, to be called with every locally generated batch [B, (F,) H, W, 3]; it sends without waiting.

    shape: of a sample's pixels. take: called with (place, pixels) of every sample of `world.slots`; for samples from
    other processes, on a separate thread. On exit, it has been called for all samples.
    """

    def rows_of(batch: BatchPlan, index: int) -> list[int]:
        """Rows of the samples of a batch that are scored on an index."""
        return [row for row, (p, _) in enumerate(batch.places) if world.owner(p) == index]

    coming = [
        (b, rows, world.receive((len(rows), *shape(b)), b.index, b.number))
        for b in planned
        if b.index != world.dp_index and (rows := rows_of(b, world.dp_index))
    ]
    sent: list[Transfer] = []
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            for batch, rows, transfer in coming:
                pixels = np.asarray(transfer.wait())
                for row, image in zip(rows, pixels, strict=True):
                    take(batch.places[row], image)
        except BaseException as error:  # noqa: BLE001  (re-raised below)
            errors.append(error)

    def put(batch: BatchPlan, media: Images) -> None:
        if media.shape[1:] != shape(batch):
            raise RuntimeError(f"expected media of shape {shape(batch)}, the model made {media.shape[1:]}")
        for index in range(world.dp_size):
            rows = rows_of(batch, index)
            if index == world.dp_index:
                for row in rows:
                    take(batch.places[row], media[row])
            elif rows:
                sent.append(world.send(torch.from_numpy(media[rows]), index, batch.number))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    yield put  # after an error inside, nothing is waited for: the other processes may have ended
    thread.join()
    for transfer in sent:
        transfer.wait()
    for error in errors:
        raise error
