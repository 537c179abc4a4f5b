"""Ring attention: queries stay on their process, keys and values are passed around the ring.

    out = Σ_j exp(lse_j − lse) out_j        lse = log Σ_j exp lse_j        j: the processes of the ring

Process r holds the keys of process r + j in step j, and passes them on to process r − 1 while it computes; in the
backward pass their gradients travel along with them. Each step runs the chosen backend of diffusers.
diffusers' own ring (0.42.1) adds the gradients of keys and values to those of other tokens in rings of three and more,
without an error, and cannot be recomputed, as it reads its saved tensors twice.
Invariant: outputs, log-sum-exps and gradients are added in fp32, in an order that depends on the process alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def install() -> None:
    """Make diffusers use this ring attention, alone and with Ulysses."""
    from diffusers.models import attention_dispatch

    attention_dispatch.TemplatedRingAttention = RingAttention


class RingAttention(torch.autograd.Function):
    """Attention of q with the k and v of all processes of the ring, each [B, N, H, D], as diffusers calls it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        dropout: float,
        causal: bool,
        scale: float | None,
        grouped: bool,
        return_lse: bool,
        forward_op: Callable[..., tuple[Tensor, Tensor]],
        backward_op: Callable[..., tuple[Tensor, ...]],
        parallel: Any,
    ) -> Tensor:
        """The output in the dtype of q."""
        assert mask is None and not return_lse  # no denoiser of this package asks for them under a ring
        group = parallel.context_parallel_config._ring_mesh.get_group()
        options = (None, dropout, causal, scale, grouped, True)
        saving = _Context()
        total: tuple[Tensor, Tensor] | None = None
        both = torch.cat([key.flatten(), value.flatten()])
        for step in range(group.size()):
            arriving = _pass_on(both, group) if step < group.size() - 1 else None
            given = (saving, query, key, value, *options)
            part, part_lse = forward_op(*given, _save_ctx=step == 0, _parallel_config=parallel)
            total = _sum(total, part.float(), part_lse.float())
            if arriving is not None:
                both = arriving()
                key, value = _split(both, key, value)
        assert total is not None
        out = total[0].to(query.dtype)
        lse = total[1]
        *inputs, _, _ = saving.saved_tensors[:5]  # in the backend's layout
        ctx.save_for_backward(*inputs, out, lse, *saving.saved_tensors[5:])
        del saving.saved_tensors
        ctx.options = vars(saving)
        ctx.backward_op = backward_op
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v in their dtype."""
        group = ctx.group
        saved = _Context()
        saved.saved_tensors = ctx.saved_tensors  # read once: recomputed blocks give them once
        vars(saved).update(ctx.options)
        query, key, value, out, lse = saved.saved_tensors[:5]
        both = torch.cat([key.flatten(), value.flatten()])
        grad_query = torch.zeros(grad_out.shape, dtype=torch.float32, device=grad_out.device)
        returning: Callable[[], Tensor] | None = None
        for step in range(group.size()):
            arriving = _pass_on(both, group) if step < group.size() - 1 else None
            parts = ctx.backward_op(saved, grad_out, query=query, key=key, value=value, out=out, lse=lse)
            grad_query += parts[0]
            like = parts[1:3]
            grad_both = torch.cat([part.flatten() for part in like]).float()
            if returning is not None:
                grad_both += returning()
            returning = _pass_on(grad_both, group)
            if arriving is not None:
                both = arriving()
                key, value = _split(both, key, value)
        assert returning is not None
        grad_key, grad_value = _split(returning(), *like)
        gradients = (grad.to(grad_out.dtype) for grad in (grad_query, grad_key, grad_value))
        return *gradients, *(None,) * 9


class _Context:
    """Stands in for autograd's context in diffusers' attention ops, which save tensors and options in it."""

    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Any) -> None:
        """Like autograd's."""
        self.saved_tensors = tensors


def _sum(total: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, N, H, D] and log-sum-exps [B, N, H] over the keys so far and those of one more step."""
    if total is None:
        return out, lse
    share = torch.sigmoid(lse - total[1])
    return torch.lerp(total[0], out, share[..., None]), torch.logaddexp(total[1], lse)


def _pass_on(sent: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start to send a flat tensor to the previous process; the result waits for the next process's tensor."""
    size = group.size()
    rank = group.rank()
    to = [0] * size
    to[(rank - 1) % size] = sent.numel()
    of = [0] * size
    of[(rank + 1) % size] = sent.numel()
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, of, to, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return received

    return wait


def _split(both: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of a flat tensor, in the shapes of k and v."""
    return both[: key.numel()].view(key.shape), both[key.numel() :].view(value.shape)
