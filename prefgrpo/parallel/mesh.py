"""Builds the device mesh from the config's `parallel` section, and checks its sizes by arithmetic.

    processes = replicate × shard × ring × ulysses        data-parallel index = rank // (ring · ulysses)

The last dimensions vary fastest: the processes of a Ulysses group have consecutive ranks, hence share a machine.
Weights are sharded over shard × ring × ulysses processes if shard is above 1 or in full fine-tuning (where replicas of
weights and optimiser on context-parallel processes would be wasteful). In full fine-tuning in bf16, FSDP2 also holds
weights that are not sharded, on a mesh of one process, as it casts fp32 masters for a forward and accumulates their
gradients in fp32. Invariant: no model weights are needed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, ParallelConfig, has_masters, splits

DIMENSIONS = ("replicate", "shard", "ring", "ulysses")


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's dimensions."""

    replicate: int = 1
    shard: int = 1
    ring: int = 1
    ulysses: int = 1
    split: int = 1
    """Number of processes over which one copy of the denoisers' weights is sharded; 1: each process has all of them."""
    fsdp: bool = False
    """Whether FSDP2 holds the weights: they are sharded, or fp32 masters of denoisers that compute in another dtype."""

    @property
    def context(self) -> int:
        """Context-parallel size: number of processes that generate the same samples together."""
        return self.ring * self.ulysses

    @property
    def data(self) -> int:
        """Data-parallel size, if the layout is that of a started run."""
        return self.replicate * self.shard

    @classmethod
    def of(cls, config: Config, processes: int) -> Layout:
        """The layout for a number of processes. Raises ConfigError unless it is replicate × shard × ring × ulysses."""
        p = config.parallel
        if wrong := problem(p, processes):
            raise ConfigError([wrong])
        inner = p.shard * p.ring * p.ulysses
        split = inner if splits(config) else 1
        fsdp = splits(config) or has_masters(config)
        return cls(processes // inner, p.shard, p.ring, p.ulysses, split, fsdp)


def problem(parallel: ParallelConfig, processes: int) -> str:
    """What is wrong with `parallel` for this number of processes; empty if nothing."""
    p, inner = parallel, parallel.shard * parallel.ring * parallel.ulysses
    sizes = f"shard {p.shard} × ring {p.ring} × ulysses {p.ulysses} = {inner}"
    if processes % inner:
        return f"parallel: expected a multiple of {sizes} processes, got {processes}; start more, or set smaller sizes"
    if p.replicate and processes != p.replicate * inner:
        return f"parallel.replicate: expected {processes // inner} ({processes} processes / {sizes}), got {p.replicate}"
    return ""


def device_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """The mesh of an initialised process group; None if neither FSDP2 nor context parallelism needs one."""
    if not layout.fsdp and layout.context == 1:
        return None
    sizes = (layout.replicate, layout.shard, layout.ring, layout.ulysses)
    return init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
