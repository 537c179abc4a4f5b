"""FLOP of a run's denoisers, counted in its first step, and the share of the GPU's peak that a step reaches (MFU).

One forward per denoising step of a sample in the rollout; forward and backward per trained step in the update. Only
products, convolutions and attention count (torch's formulas), and what gradient checkpointing computes again does not:
these are the FLOP of the model, not of the hardware. A LoRA's B inside `low_rank_gelu` is not seen, as the kernel is no
operator of torch. Texts, VAE, judges and rewards do not count, but their time does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from prefgrpo.config.schema import Config
from prefgrpo.models.attention import FLASH
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import World

PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Part of a GPU's name → its dense bf16 FLOP/s with fp32 accumulation, from NVIDIA's data sheets; first match."""
FORMULAS = flop_registry | {torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}
"""Operator → its FLOP by the shapes of its arguments; LoRA layers add to their base layer's output in place."""
OTHERS = ("MIG", "Laptop", "4090 D", "GB200")
"""Parts of the names of GPUs that are slower or faster than the one of PEAKS whose name they contain."""
COUNTED = ("native", "_native_flash", "_native_math", *FLASH)
"""Values of `attention` that run operators of torch, whose FLOP it knows; with others, no MFU is reported."""


def peak(device: torch.device) -> float | None:
    """FLOP/s of a GPU in PEAKS; None for others and for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if any(part in name for part in OTHERS):
        return None
    return next((value for part, value in PEAKS.items() if part in name), None)


def _recomputed() -> bool:
    """Whether this is a forward inside a backward: gradient checkpointing."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOP of what runs inside, and of backward passes started inside."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None and not _recomputed():
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


@contextmanager
def _forwards_counted(adapter: Adapter, counter: FlopCounter) -> Iterator[None]:
    """Context that counts the forwards of an adapter's denoisers, not its encoders and VAE."""
    real = adapter.velocity

    def velocity(*args: Any, **kwargs: Any) -> Any:
        with counter:
            return real(*args, **kwargs)

    adapter.velocity = velocity  # type: ignore[method-assign]
    try:
        yield
    finally:
        del adapter.velocity


class Throughput:
    """Speed of a run's steps on this process, and the share of the peak of its GPU."""

    def __init__(self, config: Config, adapter: Adapter, world: World) -> None:
        self._config = config
        self._adapter = adapter
        self._world = world
        counted = config.dtype == "bf16" and not config.compile and config.attention in COUNTED
        self._peak = peak(world.device) if counted else None
        self.per_sample: dict[str, float] = {}
        """FLOP per sample of "rollout", "reference" and "update", summed over the context-parallel processes."""

    @contextmanager
    def counting(self, kind: str, samples: int) -> Iterator[None]:
        """Context of one kind of work in a step, on this many samples of this process: "rollout", forwards of the
        "reference" policy, or "update". Counts the denoisers' FLOP the first time."""
        if self._peak is None or kind in self.per_sample or not samples:
            yield
            return
        context = self._world.layout.context
        counter = FlopCounter()
        inside = _forwards_counted(self._adapter, counter) if kind == "rollout" else counter
        with inside:
            yield
        self.per_sample[kind] = counter.total * context / samples

    def metrics(self, generated: int, trained: int, seconds: float) -> dict[str, float]:
        """Images or clips per second of a step over all processes, and MFU where it is known."""
        unit = "images" if self._adapter.frames(self._config.rollout) is None else "clips"
        out = {f"time/{unit}_per_s": generated / seconds}
        known = "rollout" in self.per_sample and ("update" in self.per_sample or not trained)
        if self._peak is not None and known:
            per_trained = self.per_sample.get("reference", 0.0) + self.per_sample.get("update", 0.0)
            flop = generated * self.per_sample["rollout"] + trained * per_trained
            out["time/mfu"] = flop / (seconds * self._peak * self._world.size)
        return out
