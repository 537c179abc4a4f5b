"""The pointwise ops of transformer blocks against diffusers' formulas in torch, at the shapes of FLUX and Wan.

For a GPU: on a CPU the ops are these formulas, and tests/project/test_benchmarks.py rehearses the cases there.
Before a case is offered, its result is checked to have the same bits with and without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Case, Results, randn
from prefgrpo.ops import gated_residual, layernorm_modulate, qk_norm_rope
from prefgrpo.ops.gated_residual import reference_residual
from prefgrpo.ops.layernorm_modulate import reference_modulate
from prefgrpo.ops.qk_norm_rope import reference_norm_rope

SHAPES = {"FLUX 1024² ×2": (2, 4608, 24, 128), "Wan 480p 81f": (1, 32760, 12, 128)}
"""(B, S, heads, channels of a head)."""
EPS = 1e-6
Inputs = dict[str, Tensor]


@dataclass
class Op:
    """An op and the formula that it replaces, as functions of the inputs below."""

    ours: Callable[[Inputs], tuple[Tensor, ...]]
    eager: Callable[[Inputs], tuple[Tensor, ...]]
    leaves: tuple[str, ...]
    """Inputs whose gradient is timed."""
    passes: tuple[int, int]
    """Tensors of tokens that a forward, and a forward with backward, read and write."""


def modulate(function: Callable[..., Tensor], i: Inputs) -> tuple[Tensor, ...]:
    """LayerNorm and modulation."""
    return (function(i["x"], i["shift"], i["scale"], EPS),)


def residual(function: Callable[..., Tensor], i: Inputs) -> tuple[Tensor, ...]:
    """x + gate · y."""
    return (function(i["x"], i["y"], i["gate"]),)


def heads(i: Inputs) -> list[Tensor]:
    """Queries, keys and the weights of their norms."""
    return [*(i[name].unflatten(2, i["like"].shape) for name in ("x", "y")), i["q_weight"], i["k_weight"]]


def eager_norm_rope(i: Inputs) -> tuple[Tensor, ...]:
    """RMS norm and rotary embedding of queries and keys."""
    return reference_norm_rope(heads(i), i["cos"], i["sin"], EPS, -1)


OPS = {
    "layernorm_modulate": Op(
        partial(modulate, layernorm_modulate), partial(modulate, reference_modulate), ("x",), (2, 5)
    ),
    "gated_residual": Op(partial(residual, gated_residual), partial(residual, reference_residual), ("y",), (3, 5)),
    "qk_norm_rope": Op(
        lambda i: qk_norm_rope(*heads(i), i["cos"], i["sin"], EPS), eager_norm_rope, ("x", "y"), (4, 10)
    ),
}


def inputs(shape: tuple[int, int, int, int], vector_dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """Tokens x and y in bf16, vectors, weights and tables of all ops; weights over all heads if vectors are fp32."""
    batch, tokens, count, dim = shape
    channels = count * dim
    rand = partial(randn, device=device, seed=seed)
    i = {name: rand(batch, tokens, channels, dtype=torch.bfloat16) for name in ("x", "y")}
    i["y"] = i["y"].flip(1)
    i |= dict(zip(("shift", "scale", "gate"), rand(batch, 3 * channels, dtype=vector_dtype).chunk(3, 1), strict=True))
    width = dim if vector_dtype == torch.bfloat16 else channels
    i |= {name: 1 + 0.1 * rand(width, dtype=torch.bfloat16) for name in ("q_weight", "k_weight")}
    angle = rand(tokens, dim // 2).repeat_interleave(2, 1)
    i |= {"cos": angle.cos(), "sin": angle.sin(), "like": torch.empty(count, dim)}
    upstream = rand(2, batch, tokens, count, dim, dtype=torch.bfloat16)
    return i | {"upstream 0": upstream[0], "upstream 1": upstream[1]}


def forward(function: Callable[[Inputs], tuple[Tensor, ...]], i: Inputs) -> Results:
    """The results without gradient."""
    with torch.no_grad():
        return {f"y{n}": t for n, t in enumerate(function(i))}


def training(function: Callable[[Inputs], tuple[Tensor, ...]], i: Inputs, leaves: tuple[str, ...]) -> Results:
    """The results and the gradients of the leaves."""
    held = {name: i[name].detach().requires_grad_() for name in leaves}
    out = function({**i, **held})
    upstream = [i[f"upstream {n}"].view(t.shape) for n, t in enumerate(out)]
    gradients = torch.autograd.grad(out, list(held.values()), upstream)
    return {f"y{n}": t for n, t in enumerate(out)} | {f"d{n}": t for n, t in enumerate(gradients)}


def truth(name: str, is_training: bool, i: Inputs, _: Results) -> Results:
    """The formula in fp64."""
    op = OPS[name]
    exact = {k: t.double() for k, t in i.items()}
    results = training(op.eager, exact, op.leaves) if is_training else forward(op.eager, exact)
    return {k: t.detach() for k, t in results.items()}


def cases(device: str) -> Iterator[Case]:
    """Each op at each shape, without and with gradient. Raises RuntimeError if the two differ in a bit."""
    for (shape_name, shape), (name, op) in ((s, o) for s in SHAPES.items() for o in OPS.items()):
        vector_dtype = torch.float32 if shape_name.startswith("Wan") else torch.bfloat16
        make = partial(inputs, shape, vector_dtype, device)
        fast = torch.compile(op.eager, dynamic=False)
        plain = forward(op.ours, make(0))
        trained = training(op.ours, make(0), op.leaves)
        if not all(torch.equal(t, trained[key]) for key, t in plain.items()):
            raise RuntimeError(f"{name}: other bits with gradient than without")
        for is_training in (False, True):
            functions = {"ours": op.ours, "eager": op.eager, "compile": fast}
            run = partial(training, leaves=op.leaves) if is_training else forward
            variants: dict[str, Any] = {k: partial(run, function) for k, function in functions.items()}
            size = op.passes[is_training] * torch.Size(shape).numel() * 2
            label = f"{name}{' with gradient' if is_training else ''}"
            dtypes = f"bf16, vectors {'bf16' if vector_dtype == torch.bfloat16 else 'fp32'}"
            yield Case(label, shape_name, dtypes, size, make, variants, partial(truth, name, is_training))
