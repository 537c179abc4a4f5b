"""Gradient checkpointing of transformer blocks that does not repeat attention.

A recomputed block keeps its inputs and, while `Budget` has room, its attention outputs: as many bytes again, for the
most expensive part of the block. Attention over few keys is cheap and runs again, and so do kernels that are
not operators of torch.
Invariant: gradients have the same bits whether all activations, the inputs or the inputs and attention are kept.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # FlashAttention-3 and -4 replace it
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operators whose first arguments are queries and keys [B, H, S, D], and whose results the backward reads."""

KEEPING = ("native", "_native_flash", "fa3", "fa4")
"""Values of `attention` that run these operators."""


class Budget:
    """Bytes of attention outputs that a run's blocks may keep together (`limit`), keep now, and have kept at most."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.held = 0
        self.most = 0


class _Kept:
    """A queue of the attention results of one forward of a block."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._results: deque[tuple[Any, int]] = deque()

    def put(self, out: Any) -> None:
        """Append a result; None in its place if it exceeds the budget."""
        size = sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        if self._budget.held + size > self._budget.limit:
            self._results.append((None, 0))
            return
        self._budget.held += size
        self._budget.most = max(self._budget.most, self._budget.held)
        self._results.append((tree_map_only(Tensor, Tensor.detach, out), size))

    def take(self) -> Any:
        """Pop the next result; None if it was not kept, or if an earlier backward of the graph has popped it."""
        if not self._results:
            return None
        out, size = self._results.popleft()
        self._budget.held -= size
        return out

    def __del__(self) -> None:
        self._budget.held -= sum(size for _, size in self._results)  # of a graph freed without backward


class _Attention(TorchDispatchMode):
    """Keeps attention results in a block's forward, or returns them in its recomputation (`again`)."""

    def __init__(self, kept: _Kept, again: bool) -> None:
        super().__init__()
        self._kept = kept
        self._again = again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, unless its result was kept."""
        expensive = _is_expensive(func, args)
        known = self._kept.take() if expensive and self._again else None
        if known is not None:
            return known
        out = func(*args, **(kwargs or {}))
        if expensive and not self._again:
            self._kept.put(out)
        return out


def _is_expensive(func: Any, args: Any) -> bool:
    """Whether an operator call is attention over at least as many keys as queries."""
    return func in ATTENTION and args[0].shape[2] <= args[1].shape[2]


_here = threading.local()
"""mode: the dispatch mode for attention inside a recomputed block. Per thread, as autograd recomputes in its own."""


class _OnlyAttention:
    """Context of a block's forward in which attention alone runs in a dispatch mode: in one, every operator takes the
    host two to three times as long."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        _here.mode = self._mode

    def __exit__(self, *_: object) -> None:
        _here.mode = None


def _contexts(budget: Budget) -> tuple[_OnlyAttention, _OnlyAttention]:
    """The contexts of a block's forward and of its recomputation."""
    kept = _Kept(budget)
    return _OnlyAttention(_Attention(kept, False)), _OnlyAttention(_Attention(kept, True))


def _watched(attention: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function of diffusers, wrapped to run in the mode of the block that calls it."""

    @wraps(attention)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = None if torch.compiler.is_compiling() else getattr(_here, "mode", None)
        if mode is None:
            return attention(*args, **kwargs)
        with mode:
            return attention(*args, **kwargs)

    run.is_watched = True  # type: ignore[attr-defined]
    return run


def checkpoint_blocks(blocks: Iterable[nn.Module], share: float) -> None:
    """Recompute every block i at which floor((i + 1) · share) increases: for ½, every second one.

    Blocks keep their call arguments; diffusers' own gradient checkpointing drops some of them in some models.
    """
    for i, block in enumerate(blocks):
        if int((i + 1) * share) > int(i * share):
            block.forward = partial(_recomputed, block, block.forward)
            block.checkpointed = True  # type: ignore[assignment]  # a fused block then keeps nothing by itself


def keep_attention(blocks: Iterable[nn.Module], limit: float = math.inf) -> None:
    """Let the recomputed blocks keep attention outputs, at most this many bytes together."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    for name, attention in registry._backends.items():
        if not hasattr(attention, "is_watched"):
            registry._backends[name] = _watched(attention)
    budget = Budget(limit)
    for block in blocks:
        if getattr(block, "checkpointed", False):
            block.budget = budget  # type: ignore[assignment]


def budgets(blocks: Iterable[nn.Module]) -> list[Budget]:
    """The budget of each block that keeps attention; all share one."""
    return [block.budget for block in blocks if isinstance(getattr(block, "budget", None), Budget)]  # type: ignore[misc]


def _recomputed(block: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block's `forward` without keeping its activations for the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    budget = getattr(block, "budget", None)
    if budget is not None:
        kwargs["context_fn"] = partial(_contexts, budget)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)  # nothing is random
