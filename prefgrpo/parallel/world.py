"""The processes of a run, started by torchrun (gloo on CPUs, nccl on GPUs), and their mesh.

    processes = replicate × shard × ring × ulysses        data-parallel index = rank // (ring · ulysses)

The last dimensions vary fastest: the processes of a Ulysses group have consecutive ranks, hence share a machine. The
data-parallel index selects a process's share of the samples; context-parallel processes have the same one, generate the
same samples together, and the first of them represents all. Point-to-point messages are CPU tensors sent over gloo,
alongside GPU work. Invariant: every rank calls every collective the same number of times, whatever its share of the
data. Gradients are summed over replicas once per update, in which a rank without signal contributes zeros.
"""

from __future__ import annotations

import atexit
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config, JudgeConfig

T = TypeVar("T")
DEADLINES = 2.0
"""Time limit of collectives in units of judge.deadline_s, after which torch ends a process whose peer hangs: a process
may use its whole deadline while the others wait, and as much again for everything else that differs between ranks."""
BUCKET_BYTES = 2**28
"""Most bytes of gradients that are copied into one buffer to be summed over ranks (a larger gradient has its own)."""
DIMENSIONS = ("replicate", "shard", "ring", "ulysses")


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's dimensions."""

    replicate: int = 1
    shard: int = 1
    ring: int = 1
    ulysses: int = 1
    weight_shards: int = 1
    """Number of processes over which one copy of the denoisers' weights is sharded: shard × ring × ulysses if shard is
    above 1 or in full fine-tuning, where copies on context-parallel processes would be wasteful; 1: each has all."""
    fsdp: bool = False
    """Whether FSDP2 holds the weights: they are sharded, or fp32 masters of denoisers that compute in another dtype
    (on a mesh of one process, FSDP2 casts these for a forward and accumulates their gradients in fp32)."""

    @property
    def context(self) -> int:
        """Context-parallel size: number of processes that generate the same samples together."""
        return self.ring * self.ulysses

    @classmethod
    def of(cls, config: Config, processes: int) -> Layout:
        """The layout for a number of processes. Raises ConfigError unless shard × ring × ulysses divides it."""
        p = config.parallel
        inner = p.shard * p.ring * p.ulysses
        if processes % inner:
            sizes = f"shard {p.shard} × ring {p.ring} × ulysses {p.ulysses} = {inner}"
            advice = "start more, or set smaller sizes"
            raise ConfigError([f"parallel: expected a multiple of {sizes} processes, got {processes}; {advice}"])
        weight_shards = inner if config.shards_weights else 1
        return cls(
            processes // inner, p.shard, p.ring, p.ulysses, weight_shards, config.shards_weights or config.has_masters
        )

    def mesh(self, device: torch.device, patience: timedelta) -> DeviceMesh | None:
        """The mesh of an initialised process group; None if neither FSDP2 nor context parallelism needs one.

        It has the dimensions above 1, because each makes a process group for every one of its rows, both of context
        parallelism if there is any, and `shard` if FSDP2 holds weights that are not sharded. patience: time limit of
        the collectives of all its groups, also of those over several dimensions; torch's own would be 30 minutes.
        """
        if not self.fsdp and self.context == 1:
            return None
        needed = {"ring", "ulysses"} if self.context > 1 else {"shard"} if self.weight_shards == 1 else set()
        sizes = {name: getattr(self, name) for name in DIMENSIONS if getattr(self, name) > 1 or name in needed}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        groups = mesh.get_all_groups()
        if self.context > 1:
            groups.append(_context_group(mesh))
        if self.fsdp:
            groups.append(_weights_mesh(mesh).get_group())
        for group in groups:
            for kind in group._device_types:
                group._get_backend(kind)._set_default_timeout(patience)
        return mesh


def _weights_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All dimensions except the replicas, as one."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "replicate")
    return mesh[names]._flatten("weights") if len(names) > 1 else mesh[names[0]]


def _context_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Both dimensions of context parallelism as one; diffusers uses the same group."""
    return mesh["ring", "ulysses"]._flatten().get_group()


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int
    size: int
    device: torch.device
    layout: Layout = field(default_factory=Layout)
    mesh: DeviceMesh | None = None
    patience: timedelta = timedelta(seconds=DEADLINES * JudgeConfig.deadline_s)
    """Time limit of collectives."""

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def dp_index(self) -> int:
        """This process's data-parallel index, which selects its share of the samples."""
        return self.rank // self.layout.context

    @property
    def replica(self) -> int:
        """Number of the replica of the weights that this process has or holds a shard of."""
        return self.rank * self.layout.replicate // self.size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel shares."""
        return self.size // self.layout.context

    @property
    def is_dp_leader(self) -> bool:
        """Whether this is the first process of its share, which calls rewards and whose rows `gather` takes."""
        return self.rank % self.layout.context == 0

    @property
    def equal_forwards(self) -> bool:
        """Whether every process must run the same number of forwards and backwards, because weights are sharded."""
        return self.layout.weight_shards > 1

    def owner(self, slot: int) -> int:
        """The data-parallel index that owns a slot."""
        return slot % self.dp_size

    def slots(self, total: int) -> range:
        """This rank's share of `total` slots, assigned round-robin."""
        return range(self.dp_index, total, self.dp_size)

    def all_gather_object(self, mine: T) -> list[T]:
        """All-gather one object from every rank, in rank order."""
        items = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(items, mine)
        return items

    def any(self, flag: bool) -> bool:
        """True on all ranks if `flag` is True on one."""
        return self.any_of_each([flag])[0]

    def any_of_each(self, flags: Sequence[bool]) -> list[bool]:
        """Per flag, of which all ranks have the same number: True on all ranks if it is True on one."""
        if self.size == 1:
            return list(flags)
        found = torch.tensor(flags)
        dist.all_reduce(found, dist.ReduceOp.MAX)  # one message over gloo; objects would take two
        return [bool(flag) for flag in found]

    def gather(self, local: NDArray[np.float64]) -> NDArray[np.float64]:
        """All-gather the rows of all shares, in order of their index."""
        return np.concatenate(self.gather_items([local]))

    def in_slot_order(self, parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """The rows [n, …] of every share's `slots(total)`, gathered, as rows [total, …] in slot order."""
        rows = np.empty((sum(map(len, parts)), *parts[0].shape[1:]))
        for index, part in enumerate(parts):
            rows[index :: self.dp_size] = part
        return rows

    def gather_items(self, mine: Iterable[T]) -> list[T]:
        """All-gather the objects of all shares, in order of their index; their number may differ between shares."""
        return [item for part in self.all_gather_object(list(mine))[:: self.layout.context] for item in part]

    def send(self, tensor: Tensor, index: int, tag: int) -> dist.Work:
        """Start sending a CPU tensor to the leader of a share; does not wait. `tag` identifies the message."""
        work = dist.isend(tensor.contiguous(), index * self.layout.context, tag=tag)
        assert work is not None  # None is only for ranks outside the group
        return work

    def receive(self, shape: Sequence[int], index: int, tag: int) -> tuple[Tensor, dist.Work]:
        """Start receiving the message `tag` from the leader of a share into a uint8 CPU tensor; does not wait."""
        tensor = torch.empty(shape, dtype=torch.uint8)
        work = dist.irecv(tensor, index * self.layout.context, tag=tag)
        assert work is not None
        return tensor, work

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        """Replace every .grad by its sum over ranks. One that only some ranks have counts as 0 on the others; one that
        no rank has stays None, so that the optimiser leaves its weight alone.

        Those of FSDP2 (DTensors) are already summed over the shards, and are summed over the replicas.
        """
        exist = self.any_of_each([p.grad is not None for p in parameters])
        for p, exists in zip(parameters, exist, strict=True):
            if exists and p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in parameters if p.grad is not None]
        if self.size > 1:
            self._sum_(grad for grad in grads if not isinstance(grad, DTensor))
        if self.layout.fsdp and self.layout.replicate > 1:
            assert self.mesh is not None
            group = self.mesh["replicate"].get_group()
            self._sum_((grad.to_local() for grad in grads if isinstance(grad, DTensor)), group)

    def _sum_(self, tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Replace tensors by their sums over a group, in buckets of BUCKET_BYTES on the device."""
        for bucket in _take_tensors(list(tensors), BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket).to(self.device)
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))

    def weights_mesh(self) -> DeviceMesh:
        """The processes over which FSDP2 shards one copy of the weights."""
        assert self.mesh is not None
        return _weights_mesh(self.mesh)

    def maximum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its elementwise maximum over ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def gather_to_leader(self, part: Tensor) -> list[Tensor]:
        """The `part` of every context-parallel process of this share, on its leader; nothing on the others."""
        if self.layout.context == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.layout.context)] if self.is_dp_leader else []
        dist.gather(part.contiguous(), parts or None, group=self._context_group, group_dst=0)
        return parts

    def slice_of(self, tensor: Tensor) -> Tensor:
        """[B, …] → [B, ⌈D / n⌉], a copy of this process's part of each row, among the n context-parallel processes of
        its share, which all hold the tensor; the last parts are padded with 0. If n is 1, the tensor itself, or a copy
        of one that is a view of a larger tensor, so that only its own bytes are kept."""
        count = self.layout.context
        if count == 1:
            is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
            return tensor.clone() if is_part else tensor
        rows = tensor.flatten(1)
        each = -(-rows.shape[1] // count)
        first = self.rank % count * each
        mine = rows[:, first : first + each]
        return torch.nn.functional.pad(mine, (0, each - mine.shape[1])).clone()

    def whole(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor [B, *shape] of which every context-parallel process of this share passes its `slice_of`."""
        count = self.layout.context
        if count == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(count)]
        dist.all_gather(parts, part, group=self._context_group)
        return torch.cat(parts, 1)[:, : math.prod(shape)].reshape(-1, *shape).contiguous()

    @property
    def _context_group(self) -> dist.ProcessGroup:
        """The context-parallel processes of this share."""
        assert self.mesh is not None
        return _context_group(self.mesh)

    def on_main(self, work: Callable[[], T], failure: type[Exception]) -> T | None:
        """Run `work()` on rank 0 while the others wait and return None; if it raises `failure`, all ranks raise it."""
        problem = None
        result = None
        if self.main:
            try:
                result = work()
            except failure as error:
                problem = error
        if self.any(problem is not None):
            raise problem or failure("see the error message of rank 0")
        return result

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


def pick_device() -> torch.device:
    """This process's GPU; without one (or with CUDA_VISIBLE_DEVICES empty) the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def restart_count() -> int:
    """How many times torchrun has restarted this machine's processes after one of them failed (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join(config: Config | None = None) -> World:
    """This process's place among those that torchrun started; without `config`, for plain data parallelism.

    The first call joins their process group, which is kept until `leave`: a program may train several times. A single
    process gets a group of its own if FSDP2 holds its weights.
    Raises ConfigError if the section `parallel` does not fit the number of processes.
    """
    device = pick_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = Layout.of(config, size) if config else Layout(size)
    patience = timedelta(seconds=DEADLINES * (config or Config()).judge.deadline_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if size == 1 and layout.fsdp and not dist.is_initialized():
        alone = dist.HashStore()  # type: ignore[attr-defined]  # torch re-exports it without naming it
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    if size > 1 and not dist.is_initialized():
        store, rank, _ = next(rendezvous("env://", timeout=patience))
        store = PrefixStore(_name_of_start(store, rank, size), store)  # it keeps the addresses of earlier processes
        bound = device if device.type == "cuda" else None  # NCCL then connects here, and splits groups from this one
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience, device_id=bound)
        dist.all_reduce(torch.zeros(1, device=device))  # unreachable processes are noticed before the model loads
    if device.type == "cpu" and dist.is_initialized():
        atexit.register(leave)  # gloo's threads must not outlive the interpreter, and leaving it waits for nobody
    return World(int(os.environ.get("RANK", "0")), size, device, layout, layout.mesh(device, patience), patience)


def _name_of_start(store: Store, rank: int, size: int) -> str:
    """A name that the processes started together agree on, and that those of an earlier start did not have.

    Rank 0 chooses it and answers whoever asks, until all have it. Restart counts would not do, because torchrun counts
    a restart only on the machine whose process failed.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", mine)
        name = store.get(f"answer/{mine}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    lacking = list(range(1, size))
    while lacking:
        for other in lacking:
            question = store.get(f"asks/{other}").decode()  # possibly that of a process that has ended
            store.set(f"answer/{question}", mine)
        time.sleep(0.05)
        lacking = [other for other in lacking if not store.check([f"{mine}/{other}"])]
    return mine


def leave() -> None:
    """Leave the process group, if there is one, at the end of a command or program that succeeded.

    After an error on GPUs the group stays until the process ends: destroying an NCCL communicator waits for the other
    processes, which may be in a collective that this one has left.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
