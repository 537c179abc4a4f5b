"""Ulysses attention in fused blocks: a process has some tokens of all heads, and computes attention of some heads over
all tokens.

Tensors travel as [P, S, B, h, D], contiguous: P processes, S tokens of each, B samples, h heads of one process, D
channels. An all-to-all sends row p to process p, and what it receives is [P · S, B, h, D], whose strides attention
kernels can read, and which most of them give their output and gradients. `qk_norm_rope` stores q and k like this, so
only v and the output are copied, and in the backward pass their gradients; diffusers copies every tensor before and
after. Invariant: an all-to-all is started by every process in the same order, forward and backward, and its result is
not read before `wait_tensor`, which makes the current stream wait and keeps what is sent alive until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor


def _start(t: Tensor, group: str) -> Tensor:
    """Start an all-to-all of `t` [P, …] in a group; the result is valid after `_wait`."""
    rows = [1] * len(t)
    received: Tensor = torch.ops._c10d_functional.all_to_all_single(t.contiguous(), rows, rows, group)
    return received


def _wait(t: Tensor) -> Tensor:
    """The result of `_start`, once it has arrived."""
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(t)
    return arrived


class _Send(torch.autograd.Function):
    """Forward: start an all-to-all of [P, …]. Backward: wait for that of its gradient, which `_Receive` started."""

    @staticmethod
    def forward(ctx: Any, group: str, t: Tensor) -> Tensor:
        return _start(t, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _wait(grad)


class _Receive(torch.autograd.Function):
    """Forward: wait for the all-to-alls that `_Send` started. Backward: start those of the gradients, v's first: the
    backward of its projection runs while the others travel."""

    @staticmethod
    def forward(ctx: Any, group: str, *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(_wait(t) for t in sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        started: list[Tensor | None] = []
        for grad, wanted in zip(grads[::-1], ctx.needs_input_grad[:0:-1], strict=True):
            started.append(_start(grad, ctx.group) if wanted else None)
        return None, *started[::-1]


def _packed(streams: Sequence[Tensor], processes: int) -> Tensor:
    """Streams of tokens [B, Sᵢ, H, D], joined, as [P, S, B, h, D]."""
    batch, _, heads, width = streams[0].shape
    tokens = sum(t.shape[1] for t in streams)
    out = streams[0].new_empty(processes, tokens, batch, heads // processes, width)
    for t, place in zip(streams, out.split([t.shape[1] for t in streams], 1), strict=True):
        place.copy_(t.unflatten(2, (processes, -1)).permute(2, 1, 0, 3, 4))
    return out


def _unpacked(t: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """The streams of `_packed`, each contiguous."""
    return tuple(part.permute(2, 1, 0, 3, 4).flatten(2, 3).contiguous() for part in t.split(list(lengths), 1))


class _Pack(torch.autograd.Function):
    """`_packed`, differentiable."""

    @staticmethod
    def forward(ctx: Any, processes: int, *streams: Tensor) -> Tensor:
        ctx.lengths = [t.shape[1] for t in streams]
        return _packed(streams, processes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_unpacked(grad, ctx.lengths)


class _Unpack(torch.autograd.Function):
    """`_unpacked`, differentiable."""

    @staticmethod
    def forward(ctx: Any, lengths: Sequence[int], t: Tensor) -> tuple[Tensor, ...]:
        ctx.processes = len(t)
        return _unpacked(t, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _packed(grads, ctx.processes)


class Ulysses(NamedTuple):
    """The processes among which the heads are divided."""

    group: str
    """Name of their process group."""
    size: int
    """P, their number."""

    def send(self, t: Tensor) -> Tensor:
        """Start sending [P, S, B, h, D]: row p to process p."""
        sent: Tensor = _Send.apply(self.group, t)
        return sent

    def attend(self, q: Tensor, k: Tensor, streams: Sequence[Tensor], backend: Any) -> list[Tensor]:
        """Attention [B, Sᵢ, H · D] of each stream, from its values [B, Sᵢ, H, D], and q and k from `send`."""
        v = self.send(_Pack.apply(self.size, *streams))
        q, k, v = (t.flatten(0, 1).transpose(0, 1) for t in _Receive.apply(self.group, q, k, v))
        out = dispatch_attention_fn(q, k, v, backend=backend)
        by_process = out.transpose(0, 1).unflatten(0, (self.size, -1))
        (out,) = _Receive.apply(self.group, self.send(by_process))
        return [t.flatten(2) for t in _Unpack.apply([t.shape[1] for t in streams], out)]


def ulysses(attn: Any, mask: Tensor | None) -> Ulysses | None:
    """The processes over which Ulysses splits an attention module of diffusers. None without Ulysses, and where
    diffusers' own code splits attention: with a mask, or together with ring attention."""
    parallel = attn.processor._parallel_config
    if parallel is None or mask is not None:
        return None
    config = parallel.context_parallel_config
    if config.ring_degree > 1:
        return None
    return Ulysses(config._ulysses_mesh.get_group().group_name, config.ulysses_degree)
