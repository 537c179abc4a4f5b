"""diffusers' rotary position embedding as one complex product, with fewer passes over memory.

diffusers rotates each pair (a, b) of channels as x·cos + (−b, a)·sin: the second operand is stacked from two strided
halves, and a bf16 tensor is cast to fp32 twice. Here a pair is a complex number, and its rotation is one product.
Invariant: equal to diffusers' function up to fp32 rounding; a gradient in bf16 is rounded once, not three times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from diffusers.models import embeddings
from torch import Tensor

stock = partial(embeddings.apply_rotary_emb)
"""diffusers' own function, out of reach of `rebind`."""


def rebind(new: dict[Callable[..., Any], Callable[..., Any]]) -> list[str]:
    """Replace every reference to f in an imported module, or in a class of it, by new[f]; returns the dotted names.

    Every reference, because `from x import f` copies it.
    """
    places = set()
    modules = {name: module for name, module in sys.modules.items() if issubclass(type(module), ModuleType)}
    for module_name, module in modules.items():
        owners: dict[str, Any] = {module_name: module}
        owners |= {f"{module_name}.{k}": v for k, v in list(vars(module).items()) if issubclass(type(v), type)}
        for owner_name, owner in owners.items():
            for name, value in list(vars(owner).items()):
                if type(value) is FunctionType and new.get(value, value) is not value:
                    setattr(owner, name, new[value])
                    places.add(f"{owner_name}.{name}")
    return sorted(places)


def apply_rotary_emb(
    x: Tensor,
    freqs_cis: Any,
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
    sequence_dim: int = 2,
) -> Tensor:
    """`diffusers.models.embeddings.apply_rotary_emb`: rotate x [B, H, S, D], or [B, S, H, D] if `sequence_dim` is 1.

    freqs_cis: cos and sin, each [S, D] fp32 with every value twice in a row. Other forms, and compiled code (inductor
    generates no complex arithmetic), use diffusers' own function.
    """
    fits = use_real and use_real_unbind_dim == -1 and sequence_dim in (1, 2) and freqs_cis[0].dtype == torch.float32
    if not fits or torch.compiler.is_compiling():
        return stock(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
    cos, sin = (part[:, ::2].to(x.device) for part in freqs_cis)
    turn = torch.complex(cos, sin).unsqueeze(2 - sequence_dim)  # [S, 1, D/2] or [1, S, D/2]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def fuse_rotary() -> list[str]:
    """Replace diffusers' function by `apply_rotary_emb` in every module of this process, imported now or later.

    Returns the dotted names that were replaced; none if it was done before.
    """
    if embeddings.apply_rotary_emb is apply_rotary_emb:
        return []
    return rebind({stock.func: apply_rotary_emb})


@contextmanager
def stock_rotary() -> Iterator[None]:
    """Context with diffusers' own function in every module, to compare with."""
    ours = apply_rotary_emb
    rebind({ours: stock.func})
    try:
        yield
    finally:
        rebind({stock.func: ours})
