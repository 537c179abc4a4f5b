"""Sends every sample to the data-parallel rank that scores its group, while the next batch is generated.

One message per sample, from leader to leader of two shares: uint8 [(F,) H, W, 3]. All processes derive the messages and
their shapes from the same plan, so only pixels are sent. Samples are handed over on threads, so neither waiting for
the device, nor resizing of source images, nor encoding for a judge holds up the rollout.
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
from prefgrpo.rollout.assignment import BatchPlan, Place
from prefgrpo.rollout.render import Images, Pixels


def samples_thread(device: torch.device) -> ThreadPoolExecutor:
    """One thread that uses this process's GPU: a new thread would use GPU 0, and waiting for an event there would make
    a context (half a GB) on it."""
    if device.type != "cuda":
        return ThreadPoolExecutor(1, "samples")
    return ThreadPoolExecutor(1, "samples", initializer=torch.cuda.set_device, initargs=(device,))


@contextmanager
def media_exchange(
    world: World,
    planned: Sequence[BatchPlan],
    shape: tuple[int, ...],
    take: Callable[[Place, Images], None],
) -> Iterator[Callable[[Place, Pixels], None]]:
    """Yields `put`, to be called by the leader of a share with every sample [(F,) H, W, 3] of it; it does not wait.

    shape: that of a sample's pixels. take: called by the leader, on other threads, with (place, pixels) of every sample
    of `world.slots`. On exit, it has been called for all samples; what it raised is raised by the next `put`, or on
    exit.
    """

    def receive() -> None:
        try:
            for place, (tensor, work) in coming:
                work.wait()
                take(place, np.asarray(tensor))
            received.set_result(None)
        except BaseException as error:  # noqa: BLE001  (raised where the result is asked for)
            received.set_exception(error)

    def hand_over(place: Place, pixels: Pixels) -> None:
        image = pixels()
        if image.shape != shape:
            raise RuntimeError(f"expected media of shape {shape}, the model made {image.shape}")
        receiver = world.owner(place[0])
        if receiver == world.dp_index:
            take(place, image)
        else:
            sent.append(world.send(torch.from_numpy(image), receiver, tags[place]))

    def put(place: Place, pixels: Pixels) -> None:
        for done in [work for work in works if work.done()]:
            done.result()
        works.append(local.submit(hand_over, place, pixels))

    made_by = {place: batch.dp_rank for batch in planned for place in batch.places}
    tags = {place: number for number, place in enumerate(made_by)}
    mine = [place for place in made_by if world.is_dp_leader and world.owner(place[0]) == world.dp_index]
    coming = [
        (place, world.receive(shape, made_by[place], tags[place])) for place in mine if made_by[place] != world.dp_index
    ]
    sent: list[Work] = []
    received: Future[None] = Future()
    works = [received]
    threading.Thread(target=receive, daemon=True).start()
    with samples_thread(world.device) as local:
        yield put  # after an error inside, nothing is waited for: the other processes may have ended
        for work in works:
            work.result()
    for transfer in sent:
        transfer.wait()
