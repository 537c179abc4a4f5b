"""Shards the denoisers' weights over processes with FSDP2, block by block.

With a LoRA, the frozen base is sharded and the LoRA is replicated as plain tensors, so gradients are bitwise equal to
those of an unsharded model. In full fine-tuning, the fp32 master weights are sharded and gathered in the compute dtype;
modules that diffusers keeps in fp32 (a few norms and tables) are replicated. fp32 masters that are not sharded are on a
mesh of one process, for the same casts. Gradients are summed, never averaged: over shards in every backward, or in the
last one of an update (`reduce_gradients`), over replicas once per update (`World.sum_gradients`). Invariant: gathered
weights are freed after every forward and backward, so none is stale after an update.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from prefgrpo.models.base import Adapter
from prefgrpo.models.fp8 import Fp8Linear, to_fp8
from prefgrpo.parallel.world import World

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
"""Blocks of FLUX return slices. An in-place change of one would skip a gather, but nothing makes one: the in-place sums
of LoRA layers are on the outputs of their own Linear, which is no module of FSDP2
(tests/parallel/test_parallelize.py compares)."""


def shard_weights(adapter: Adapter, world: World, offload: bool, fp8: bool) -> None:
    """Shard the weights of all denoisers within each replica, and move shards and replicated parameters to the device.

    Call it after everything that modifies blocks. offload: keep the shards in CPU memory. fp8: as `quantise_weights`.
    """
    mesh = world.weights_mesh()
    policy = CPUOffloadPolicy(pin_memory=world.device.type != "cpu") if offload else OffloadPolicy()
    for model in adapter.modules().values():
        _shard(model, adapter, mesh, policy, fp8)


def quantise_weights(adapter: Adapter) -> None:
    """Move the weights of all denoisers from mapped files to the device, one at a time: those of the Linear layers of
    the repeated blocks in fp8, without a copy of the model in another dtype."""
    for model in adapter.modules().values():
        in_fp32 = {p for p in model.parameters() if p.requires_grad} | _kept_in_fp32(model)
        for block in adapter.blocks(model):
            _place(block, adapter, in_fp32, fp8=True)
        _place(model, adapter, in_fp32, fp8=False)
        _place_buffers(model, adapter)


def _kept_in_fp32(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that diffusers keeps in fp32: a few norms and tables."""
    names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {p for name, p in model.named_parameters() if names & set(name.split("."))}


def _place(part: nn.Module, adapter: Adapter, in_fp32: set[nn.Parameter], fp8: bool) -> None:
    """Move parameters to the device and cast them there (torch would cast on the CPU first, slowly): to fp32 or to the
    adapter's dtype, or, if wanted, those of frozen Linear layers to fp8."""
    layers = [module for module in part.modules() if type(module) is nn.Linear and module.weight not in in_fp32]
    for layer in layers if fp8 else ():
        to_fp8(layer, adapter.device, adapter.dtype)
    in_fp8 = {p for module in part.modules() if isinstance(module, Fp8Linear) for p in module.parameters()}
    for p in part.parameters():
        if not isinstance(p, DTensor) and p not in in_fp8:
            p.data = p.data.to(adapter.device, copy=True).to(torch.float32 if p in in_fp32 else adapter.dtype)


def _place_buffers(model: nn.Module, adapter: Adapter) -> None:
    """Move buffers to the device; those of the file get the adapter's dtype."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                of_file = buffer.is_floating_point() and key not in module._non_persistent_buffers_set
                module._buffers[key] = buffer.to(adapter.device, adapter.dtype if of_file else buffer.dtype)


def _shard(model: nn.Module, adapter: Adapter, mesh: DeviceMesh, offload: OffloadPolicy, fp8: bool) -> None:
    """Shard one denoiser, a block at a time, except a LoRA, and of trained weights what diffusers keeps in fp32."""
    kept_in_fp32 = _kept_in_fp32(model)
    trainable = {p for p in model.parameters() if p.requires_grad}
    replicated = trainable if adapter.has_lora() else trainable & kept_in_fp32
    trained = trainable - replicated
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": replicated}
    if trained and adapter.dtype != torch.float32:  # inputs are cast as in the stock pipeline, which keeps some in fp32
        options["mp_policy"] = MixedPrecisionPolicy(adapter.dtype, torch.float32, cast_forward_inputs=False)
    in_fp32 = trainable | kept_in_fp32
    for part in [*adapter.blocks(model), model]:
        _place(part, adapter, in_fp32, fp8 and part is not model)
        fully_shard(part, reshard_after_forward=True, **options)
    for p in replicated:
        p.data = p.data.to(adapter.device, copy=True)
    _place_buffers(model, adapter)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support pre-multiplied sums


def reduce_gradients(adapter: Adapter, on: bool) -> None:
    """on: the next backward sums the gradients of sharded weights over the shards, with those accumulated before; off:
    it keeps them unsharded, in fp32, for a later backward of the same denoiser."""
    for model in adapter.modules().values():
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(on)


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is sharded, so that this process holds only a part of it."""
    return isinstance(tensor, DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, without a gradient; a collective, which all processes must call.

    Shards are gathered without DTensor's functional all-gather: on gloo, with torch 2.13, it rarely corrupts memory.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != (Shard(0),):
        return tensor.full_tensor()
    group = tensor.device_mesh.get_group()
    local = tensor._local_tensor.detach()
    padded = local.new_zeros(-(-tensor.shape[0] // group.size()), *tensor.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[: tensor.shape[0]]


def to_local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's part of each tensor, without a copy, for elementwise reads and writes."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def full_copies(adapter: Adapter, world: World) -> dict[str, nn.Module]:
    """Unsharded CPU copies of the sharded denoisers, by name, on rank 0 (others: empty); all ranks must call it."""
    copies: dict[str, nn.Module] = {}
    for name, model in adapter.modules().items():
        if FSDPModule not in type(model).__mro__:
            continue
        state: dict[str, Tensor] = {}
        for key, value in model.state_dict().items():
            gathered = full_tensor(value)
            if world.main:
                state[key] = gathered.detach().cpu()
        if world.main:
            cls: Any = next(c for c in type(model).__mro__[1:] if not issubclass(c, FSDPModule))
            with torch.device("meta"):
                copies[name] = cls.from_config(model.config)
            copies[name].load_state_dict(state, assign=True)
    return copies
