"""The bytes that weights and optimiser take on this process's device, counted on the loaded model.

Activations, stored samples and in-process rewards come on top; `prefgrpo train RECIPE --dry-run` prints the real peak.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from prefgrpo.models.base import Adapter
from prefgrpo.parallel.shard import to_local
from prefgrpo.run.policy import Policy

GIB, MIB = 2**30, 2**20


def static_bytes(adapter: Adapter, policy: Policy) -> dict[str, int]:
    """Bytes per kind on the adapter's device, of sharded tensors those of this process's shard. Weights include
    buffers and the parts of the pipeline that are not trained; all other kinds exist for trained weights only."""
    kind_of_device = adapter.device.type

    def held(tensors: Iterable[Tensor]) -> int:
        return sum(t.nbytes for t in to_local(tensors) if t.device.type == kind_of_device)

    modules = [part for part in adapter.pipe.components.values() if isinstance(part, nn.Module)]
    trained = held(policy.params)
    return {
        "weights": sum(held(module.parameters()) + held(module.buffers()) for module in modules),
        "gradients": trained,
        "AdamW": 2 * trained,
        "EMA": held(policy.ema.values()),
        "old policy": held(policy.old.values()),
        "initial policy": held(policy.base.values()),
    }


def memory_line(adapter: Adapter, policy: Policy) -> str:
    """`static_bytes` as one line of text."""
    parts = static_bytes(adapter, policy)
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    listed = " + ".join(f"{kind} {size / unit:.3g}" for kind, size in parts.items() if size)
    return f"memory per process before activations: {listed} = {total / unit:.3g} {name}"


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
