"""Brings every sample to the data-parallel index that scores its group, while the next batch is made.

One message per batch and receiver: uint8 [n, (F,) H, W, 3], the samples in the order of the batch. All processes derive
messages and their shapes from the same plan, so nothing but pixels travels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import torch

from prefgrpo.parallel.world import Transfer, World
from prefgrpo.rollout.deal import Place, Planned
from prefgrpo.rollout.render import Images


class MediaExchange:
    """Use as a context: inside, `put` every batch that was made here; at the end, all samples have been taken."""

    def __init__(
        self,
        world: World,
        planned: Sequence[Planned],
        shape: Callable[[Planned], tuple[int, ...]],
        take: Callable[[Place, Images], object],
    ) -> None:
        """shape: of a sample's pixels. take: called with (place, pixels) of every sample of `world.slots`, for those
        that come from other processes on a thread of its own.
        """
        self.world, self.shape, self.take = world, shape, take
        self._sent: list[Transfer] = []
        self._coming = [
            (b, rows, world.receive((len(rows), *shape(b)), torch.uint8, b.index, b.number))
            for b in planned
            if b.index != world.dp_index and (rows := self._rows(b, world.dp_index))
        ]
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def put(self, batch: Planned, media: Images) -> None:
        """Hand over a batch [B, (F,) H, W, 3] that was made here; does not wait."""
        if media.shape[1:] != self.shape(batch):
            raise RuntimeError(f"expected media of shape {self.shape(batch)}, the model made {media.shape[1:]}")
        for index in range(self.world.dp_size):
            rows = self._rows(batch, index)
            if index == self.world.dp_index:
                for row in rows:
                    self.take(batch.places[row], media[row])
            elif rows:
                self._sent.append(self.world.send(torch.from_numpy(media[rows]), index, batch.number))

    def __enter__(self) -> MediaExchange:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._thread.join()
            for transfer in self._sent:
                transfer.wait()
            if self._error is not None:
                raise self._error

    def _rows(self, batch: Planned, index: int) -> list[int]:
        """The samples of a batch that are scored on an index."""
        return [row for row, (p, _) in enumerate(batch.places) if self.world.owner(p) == index]

    def _receive(self) -> None:
        try:
            for batch, rows, transfer in self._coming:
                pixels = np.asarray(transfer.wait())
                for row, image in zip(rows, pixels, strict=True):
                    self.take(batch.places[row], image)
        except BaseException as error:  # noqa: BLE001  (raised on the thread that makes the samples)
            self._error = error
