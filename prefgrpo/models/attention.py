"""Attention kernels that a model may use: never cuDNN's, and only such as give exact outputs and gradients here.

Some backends of diffusers run forward and backward without an error but drop the gradient of the attention branch, or
return NaN at some sizes, which no loss curve shows. So `check` compares outputs and gradients with exact attention, in
a run's dtype and at its sizes, with its masks, and in the memory layouts of the models' blocks.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from prefgrpo.config.recipe import ConfigError

logging.getLogger("xformers").setLevel(logging.ERROR)  # diffusers imports it if it is there; `check` says what matters

LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Maximum error of an output or gradient, relative to its largest element."""
MOST_BYTES = 56 * 2**20
"""Maximum bytes of one of the check's 14 tensors (q, k, v, output, gradients, workspace), for 1 GiB in all with the
exact results; longer clips are checked with fewer heads."""
CHUNK = 2**23
"""Scores that the exact attention holds at once."""

_runs: list[bool] = []
"""Of every open `without_cudnn`, whether cuDNN attention was allowed before the first of them."""


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Context in which torch never chooses cuDNN attention: not in a denoiser, text encoder, judge or reward, and in no
    thread, as the flag is the process's. The end of the last context restores it.

    On Hopper its backward crashes or returns NaN (torch 2.11; pytorch#196678, #122695, #134001).
    """
    _runs.append(_runs[0] if _runs else torch.backends.cuda.cudnn_sdp_enabled())
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        allowed = _runs.pop()
        if not _runs:
            torch.backends.cuda.enable_cudnn_sdp(allowed)


class Case(NamedTuple):
    """Attention in a run: q [batch, queries, heads, width], k and v [batch, keys, heads, width], with a mask or not."""

    batch: int
    queries: int
    keys: int
    heads: int
    width: int
    masked: bool = False


def check(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if a backend does not run here, or is wrong."""
    try:
        output, gradient = errors(name, case, dtype, device)
    except (RuntimeError, ValueError, ImportError) as error:
        library = sys.modules.get("xformers._cpp_lib") if name == "xformers" else None
        broken = getattr(library, "_cpp_library_load_exception", None)  # built for another torch
        lines = str(broken or error).strip().splitlines()
        reason = " ".join(" ".join(lines[: 2 if broken else 1]).split())[:300]
        raise ConfigError([f"attention: {name} does not run here: {reason}"]) from error
    if max(output, gradient) > LIMIT[dtype]:
        where = ", ".join(f"{key} {value}" for key, value in case._asdict().items())
        wrong = f"output by {output:.1%} and gradients by {gradient:.1%}"
        message = f"{name} is wrong on {where}: it differs from exact attention in its {wrong}"
        raise ConfigError([f"attention: {message}; expected another backend"])


def errors(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Largest errors of a backend's output and of its gradients with respect to q, k and v, relative to the largest
    element, in the first and the last head; infinite if any element of any head is not finite. A missing gradient
    counts as 0. Raises whatever the backend raises.
    """
    fitting = MOST_BYTES // (case.batch * max(case.queries, case.keys) * case.width * dtype.itemsize)
    case = case._replace(heads=max(1, min(case.heads, fitting)))
    mask = None
    if case.masked:  # the last quarter of the first sample's keys is padding
        mask = torch.ones(case.batch, 1, 1, case.keys, dtype=torch.bool, device=device)
        mask[0, ..., -max(case.keys // 4, 1) :] = False
    inputs = _inputs(case, False, dtype, device)
    precise = torch.float64 if dtype == torch.float32 else torch.float32
    want: dict[tuple[int, int], list[Tensor]] = {}
    for b, h in {(0, 0), (case.batch - 1, case.heads - 1)}:
        q, k, v, upstream = (x[b, :, h].to(precise) for x in inputs)
        want[b, h] = _exact(q, k, v, upstream, None if mask is None else mask[b, 0, 0])
    del inputs
    worst = [0.0] * 4
    for sliced in (True, False):
        for i, x in enumerate(_computed(name, case, sliced, mask, dtype, device)):
            found = [relative_error(x[b, :, h], exact[i]) for (b, h), exact in want.items()]
            worst[i] = max(worst[i], *found) if bool(x.isfinite().all()) else math.inf
    return worst[0], max(worst[1:])


def _inputs(case: Case, sliced: bool, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v and the output's gradient; sliced: slices of one wider tensor, as blocks have that compute attention and
    MLP from one projection."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (4, case.batch, max(case.queries, case.keys), case.heads, case.width)
    values = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    if sliced:
        values = values.permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
    lengths = (case.queries, case.keys, case.keys, case.queries)
    return [x[:, :n] for x, n in zip(values, lengths, strict=True)]


def _computed(
    name: str, case: Case, sliced: bool, mask: Tensor | None, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """A backend's output, and its gradients of q, k and v. The output's gradient is a slice of a wider tensor, or a sum
    over two slices, as of text and image tokens."""
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    *inputs, upstream = _inputs(case, sliced, dtype, device)
    tested = [x.detach().requires_grad_() for x in inputs]
    with attention_backend(name):
        out = dispatch_attention_fn(*tested, attn_mask=mask)
    if out.requires_grad and sliced:
        out.backward(upstream)
    elif out.requires_grad:
        text = case.queries // 2
        parts = (slice(None, text), slice(text, None))
        torch.autograd.backward([out[:, part] for part in parts], [upstream[:, part] for part in parts])
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in tested)]


def _exact(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Attention of one head, and its gradients of q [N, D], k and v [M, D], in their dtype; mask [M]: False: padding.

    A few queries at a time, as all scores of a clip would need gigabytes.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = torch.empty_like(upstream)
    rows = max(1, CHUNK // len(k))
    for start in range(0, len(q), rows):
        some = slice(start, start + rows)
        scores = leaves[0][some] @ leaves[1].T * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        part = scores.softmax(-1) @ leaves[2]
        part.backward(upstream[some])
        out[some] = part.detach()
    return [out, *(x.grad for x in leaves if x.grad is not None)]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest error, relative to the largest element; infinite if any is not finite."""
    error = float((got - want).abs().max() / want.abs().max())
    return error if math.isfinite(error) else math.inf
