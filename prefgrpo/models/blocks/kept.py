"""Selective recomputation: cheap results are recomputed in the backward pass instead of being stored.

A norm, a rotation or an activation is one pass over memory, and its result is as large as its input, which is stored
anyway. Inside a block that `keeps_inputs`, `again(op, *args)` is op(*args), of which autograd stores only the
arguments.
Invariant: an op has the same bits whenever it runs, so gradients equal those of stored results.
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
_open: list[dict[int, tuple[_Result, int, Tensor]]] = []
"""For the block that runs forward: storage of a result → what computes it, which of its outputs it is, and the result
itself, so that its storage is not reused before the block has ended."""


class _Result:
    """What `again` has computed; recomputed at its first use in a backward pass, dropped after the last."""

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
            args = tree_map_only(_Place, _Place.tensor, self.args)
            with torch.no_grad():
                out = self.op(*args)
            self._value = (out,) if isinstance(out, Tensor) else out
        value = self._value[number]
        self._left -= 1
        if not self._left:
            self._value = ()
        return value


@dataclass(frozen=True)
class _Place:
    """A tensor in the memory of a result."""

    result: _Result
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor inside the recomputed output."""
        return self.result.output(self.number).as_strided(self.size, self.stride, self.offset)


def _pack(t: Tensor) -> Tensor | _Place:
    """What is stored for a tensor."""
    found = _open[-1].get(t.untyped_storage()._cdata) if _open else None
    if found is None:
        return t
    result, number, _ = found
    result.uses += 1
    return _Place(result, number, t.size(), t.stride(), int(t.storage_offset()))


def _unpack(kept: Tensor | _Place) -> Tensor:
    return kept.tensor() if isinstance(kept, _Place) else kept


def again(op: Callable[..., T], *args: Any) -> T:
    """op(*args), a new tensor or several."""
    out: Any = op(*args)
    if _open and torch.is_grad_enabled():
        result = _Result(op, tree_map_only(Tensor, lambda t: _pack(t.detach()), args))
        for number, t in enumerate((out,) if isinstance(out, Tensor) else out):
            _open[-1][t.untyped_storage()._cdata] = (result, number, t)
    return out


def keeps_inputs(forward: Callable[..., T]) -> Callable[..., T]:
    """A block's forward in which `again` keeps arguments instead of results, unless the block is recomputed as a whole
    (`recomputed`), which stores even less."""

    @wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> T:
        if not torch.is_grad_enabled() or getattr(self, "recomputed", False):
            return forward(self, *args, **kwargs)
        _open.append({})
        try:
            with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
                return forward(self, *args, **kwargs)
        finally:
            _open.pop()

    return run
