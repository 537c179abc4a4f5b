"""Sends every sample to the data-parallel rank that scores its group, while the next batch is generated.

One message per batch and receiver: uint8 [n, (F,) H, W, 3], the samples in batch order. All processes derive the
messages and their shapes from the same plan, so only pixels are sent. Samples are handed over on threads, so resizing
of source images and encoding for a judge never hold up the rollout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch.distributed import Work

from prefgrpo.parallel.world import World
from prefgrpo.rollout.batch import BatchPlan, Place
from prefgrpo.rollout.render import Images


@contextmanager
def media_exchange(
    world: World,
    planned: Sequence[BatchPlan],
    shape: tuple[int, ...],
    take: Callable[[Place, Images], object],
) -> Iterator[Callable[[BatchPlan, Images], None]]:
    """Yields `put`, to be called with every locally generated batch [B, (F,) H, W, 3]; it sends without waiting.

    shape: of a sample's pixels. take: called, on other threads, with (place, pixels) of every sample of `world.slots`.
    On exit, it has been called for all samples; what it raised is raised by the next `put`, or on exit.
    """

    def rows_of(batch: BatchPlan, dp_rank: int) -> list[int]:
        """Rows of the samples of a batch that are scored by a rank."""
        return [row for row, slot in enumerate(batch.slots) if world.owner(slot) == dp_rank]

    def hand_over(batch: BatchPlan, rows: list[int], pixels: Images) -> None:
        for row, image in zip(rows, pixels, strict=True):
            take(batch.places[row], image)

    def receive() -> None:
        try:
            for batch, rows, (tensor, work) in coming:
                work.wait()
                hand_over(batch, rows, np.asarray(tensor))
            received.set_result(None)
        except BaseException as error:  # noqa: BLE001  (raised where the result is asked for)
            received.set_exception(error)

    def put(batch: BatchPlan, media: Images) -> None:
        if media.shape[1:] != shape:
            raise RuntimeError(f"expected media of shape {shape}, the model made {media.shape[1:]}")
        for done in [work for work in works if work.done()]:
            done.result()
        for dp_rank in range(world.dp_size):
            rows = rows_of(batch, dp_rank)
            if dp_rank == world.dp_index:
                works.append(local.submit(hand_over, batch, rows, media[rows]))
            elif rows:
                sent.append(world.send(torch.from_numpy(media[rows]), dp_rank, batch.number))

    coming = [
        (b, rows, world.receive((len(rows), *shape), b.dp_rank, b.number))
        for b in planned
        if b.dp_rank != world.dp_index and (rows := rows_of(b, world.dp_index))
    ]
    sent: list[Work] = []
    received: Future[None] = Future()
    works = [received]
    threading.Thread(target=receive, daemon=True).start()
    with ThreadPoolExecutor(1, "samples") as local:
        yield put  # after an error inside, nothing is waited for: the other processes may have ended
        for work in works:
            work.result()
    for transfer in sent:
        transfer.wait()
