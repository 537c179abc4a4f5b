"""Sends every sample to the data-parallel index that scores its group, while the next batch is generated.

One message per batch and receiver: uint8 [n, (F,) H, W, 3], the samples in batch order. All processes derive the
messages and their shapes from the same plan, so only pixels are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import torch

from prefgrpo.parallel.world import Transfer, World
from prefgrpo.rollout.assignment import BatchPlan, Place
from prefgrpo.rollout.render import Images


class MediaExchange:
    """Context manager: `put` every locally generated batch; on exit, `take` has been called for all samples."""

    def __init__(
        self,
        world: World,
        planned: Sequence[BatchPlan],
        shape: Callable[[BatchPlan], tuple[int, ...]],
        take: Callable[[Place, Images], object],
    ) -> None:
        """shape: of a sample's pixels. take: called with (place, pixels) of every sample of `world.slots`; for samples
        from other processes, on a separate thread.
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

    def put(self, batch: BatchPlan, media: Images) -> None:
        """Send a locally generated batch [B, (F,) H, W, 3] without waiting."""
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

    def _rows(self, batch: BatchPlan, index: int) -> list[int]:
        """Rows of the samples of a batch that are scored on an index."""
        return [row for row, (p, _) in enumerate(batch.places) if self.world.owner(p) == index]

    def _receive(self) -> None:
        try:
            for batch, rows, transfer in self._coming:
                pixels = np.asarray(transfer.wait())
                for row, image in zip(rows, pixels, strict=True):
                    self.take(batch.places[row], image)
        except BaseException as error:  # noqa: BLE001  (re-raised in __exit__)
            self._error = error
