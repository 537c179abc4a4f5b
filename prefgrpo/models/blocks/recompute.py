"""Selective recomputation: cheap results of a block are recomputed in the backward pass instead of being stored.

A norm, a rotation or an activation is one pass over memory, and its result as large as its input, which is stored
anyway. Inside a block that `recomputes`, `recomputed(op, *args)` is op(*args), of which autograd stores only the
arguments. Invariant: an op has the same bits whenever it runs, so gradients are those of stored results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

T = TypeVar("T")
_running: list[dict[int, tuple[Result, int, Tensor]]] = []
"""The blocks in their forward, innermost last: storage of a result → what computes it, which of its outputs it is, and
the result itself, whose storage is not reused before the block has ended."""


class Result:
    """What an op returned: recomputed at its first use in a backward pass, dropped at the last."""

    def __init__(self, op: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.op = op
        self.args = args
        self.uses = 0
        self._left = 0
        self._value: tuple[Tensor, ...] = ()

    def output(self, number: int) -> Tensor:
        """One of the outputs."""
        if not self._left:
            self._left = self.uses
            args = tree_map_only(View, View.tensor, self.args)
            with torch.no_grad():
                out = self.op(*args)
            self._value = (out,) if isinstance(out, Tensor) else out
        value = self._value[number]
        self._left -= 1
        if not self._left:
            self._value = ()
        return value


@dataclass(frozen=True)
class View:
    """A view of a result's output, which autograd stores in place of the tensor."""

    result: Result
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor, recomputed if it has to be."""
        return self.result.output(self.number).as_strided(self.size, self.stride, self.offset)


def _pack(t: Tensor) -> Tensor | View:
    """What is stored of a tensor."""
    found = _running[-1].get(t.untyped_storage()._cdata) if _running else None
    if found is None:
        return t
    result, number, _ = found
    result.uses += 1
    return View(result, number, t.size(), t.stride(), int(t.storage_offset()))


def _unpack(stored: Tensor | View) -> Tensor:
    return stored.tensor() if isinstance(stored, View) else stored


def recomputed(op: Callable[..., T], *args: Any) -> T:
    """op(*args), a new tensor or several, of which the block stores the arguments."""
    out: Any = op(*args)
    if _running and torch.is_grad_enabled():
        result = Result(op, tree_map_only(Tensor, lambda t: _pack(t.detach()), args))
        for number, t in enumerate((out,) if isinstance(out, Tensor) else out):
            _running[-1][t.untyped_storage()._cdata] = (result, number, t)
    return out


def recomputes(forward: Callable[..., T]) -> Callable[..., T]:
    """A block's forward in which `recomputed` stores arguments instead of results, unless gradient checkpointing
    recomputes the whole block (`checkpointed`), which stores even less."""

    @wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> T:
        if not torch.is_grad_enabled() or getattr(self, "checkpointed", False):
            return forward(self, *args, **kwargs)
        _running.append({})
        try:
            with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
                return forward(self, *args, **kwargs)
        finally:
            _running.pop()

    return run
