"""Shards the denoisers' weights over processes with FSDP2, block by block.

With a LoRA, the frozen base is sharded and the LoRA is replicated as plain tensors, so gradients are bitwise equal to
those of an unsharded model. In full fine-tuning, the fp32 master weights are sharded and gathered in the compute dtype;
modules that diffusers keeps in fp32 (a few norms and tables) are replicated. fp32 masters that are not sharded are on a
mesh of one process, for the same casts. Gradients are summed over processes, never averaged. Invariant: gathered
weights are freed after every forward and backward, so none is stale after an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from prefgrpo.config.schema import ParallelConfig
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import World


def shard_weights(adapter: Adapter, world: World, parallel: ParallelConfig) -> None:
    """Shard the weights of all denoisers over the mesh, and move shards and replicated parameters to the device.

    Call it after everything that modifies blocks: LoRA, full fine-tuning, gradient checkpointing, context parallelism.
    """
    layout = world.layout
    if world.mesh is None or not layout.fsdp:
        return
    weights = world.mesh["shard", "ring", "ulysses"]._flatten("weights")
    mesh = world.mesh["replicate", "weights"] if layout.split > 1 and layout.replicate > 1 else weights
    offload = CPUOffloadPolicy(pin_memory=world.device.type != "cpu") if parallel.offload else OffloadPolicy()
    for name in adapter.denoisers:
        _shard(getattr(adapter.pipe, name), adapter, world.device, {"mesh": mesh, "offload_policy": offload})
    adapter.home = world.device
    adapter.equal_forwards = world.equal_forwards


def _shard(model: nn.Module, adapter: Adapter, device: torch.device, options: dict[str, Any]) -> None:
    replicated = set(replicated_parameters(model, adapter))
    low = any(p.requires_grad and p not in replicated for p in model.parameters()) and adapter.dtype != torch.float32
    options = options | {"ignored_params": replicated, "reshard_after_forward": True}
    if low:  # inputs are cast as in the stock pipeline, which keeps some in fp32
        options["mp_policy"] = MixedPrecisionPolicy(adapter.dtype, torch.float32, cast_forward_inputs=False)
    for part in [*adapter.blocks(model), model]:
        for p in part.parameters():  # one block at a time is fp32 and whole
            if p.requires_grad and not isinstance(p, DTensor):
                p.data = p.data.float()
        fully_shard(part, **options)
    for p in replicated:
        p.data = p.data.to(device, copy=True)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support pre-multiplied sums


def replicated_parameters(model: nn.Module, adapter: Adapter) -> Iterator[nn.Parameter]:
    """The parameters that are replicated: a LoRA, or of trained weights the ones that diffusers keeps in fp32."""
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    lora = adapter.has_lora()
    for name, p in model.named_parameters():
        if p.requires_grad and (lora or any(part in kept for part in name.split("."))):
            yield p


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is sharded, so that this process holds only a part of it."""
    return isinstance(tensor, DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, without a gradient; a collective, which all processes must call.

    Shards are gathered without DTensor's functional all-gather: on gloo, with torch 2.13, it rarely corrupts memory.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements[-1] != Shard(0) or not all(p.is_replicate() for p in tensor.placements[:-1]):
        return tensor.full_tensor()
    group, local = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1), tensor._local_tensor.detach()
    padded = local.new_zeros(-(-tensor.shape[0] // group.size()), *tensor.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[: tensor.shape[0]]


def to_local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's part of each tensor, without a copy, for elementwise reads and writes."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Shard `value`, which every process has in full, like the tensor `like`; no communication."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def full_copies(adapter: Adapter, world: World) -> dict[str, nn.Module]:
    """Unsharded CPU copies of the sharded denoisers, by name, on rank 0 (others: empty); all ranks must call it."""
    copies: dict[str, nn.Module] = {}
    for name in adapter.denoisers:
        model: nn.Module = getattr(adapter.pipe, name)
        if FSDPModule not in type(model).__mro__:
            continue
        state: dict[str, Tensor] = {}
        for key, value in model.state_dict().items():
            one = full_tensor(value)
            if world.main:
                state[key] = one.detach().cpu()
        if world.main:
            cls: Any = next(c for c in type(model).__mro__[1:] if not issubclass(c, FSDPModule))
            with torch.device("meta"):
                copies[name] = cls.from_config(model.config)
            copies[name].load_state_dict(state, assign=True)
    return copies
