"""Attention kernels that a model may use: never cuDNN's, and only those whose outputs and gradients are exact here.

Some backends of diffusers run forward and backward without an error but drop the gradient of the attention branch, or
return NaN at some sizes, which no loss curve shows. So `check` compares outputs and gradients with exact attention, in
a run's dtype and at its sizes, with its masks, and in the memory layouts of the models' blocks.

FlashAttention-3 and 4 replace torch's FlashAttention op, for the whole process and until the run ends (`activate`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from prefgrpo.config.recipe import ConfigError

logging.getLogger("xformers").setLevel(logging.ERROR)  # diffusers imports it if it is installed; no run uses it

LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Maximum error of an output or gradient, relative to its largest element."""
MOST_BYTES = 56 * 2**20
"""Maximum bytes of one of the check's 14 tensors (q, k, v, output, gradients, workspace), for 1 GiB in all with the
exact results; longer clips are checked with fewer heads."""
CHUNK = 2**23
"""Scores that the exact attention holds at once."""

FLASH = {"fa3": "FA3", "fa4": "FA4"}
"""`attention` → torch's name of the kernels that replace its own FlashAttention-2."""
NEEDS = {
    "fa3": "flash_attn_3, from PyTorch's own index of wheels or built from hopper/ of the flash-attention repository",
    "fa4": "flash-attn-4 as pinned: pip install -e '.[fa4]' in the checkout",
}
"""`attention` → the package that contains its kernels."""


class Before(NamedTuple):
    """This process's attention settings before its runs."""

    allowed: bool
    """Whether torch might choose cuDNN's kernels."""
    flash: str | None
    """torch's name of the FlashAttention kernels; None: its own."""


_runs: list[Before] = []
"""One entry per open `attention_of_a_run`: the settings before the first of them."""


@contextmanager
def attention_of_a_run() -> Iterator[None]:
    """Context in which torch never chooses cuDNN attention, in any model or thread: the flag is process-wide. When the
    last context ends, the flag and the kernels that `activate` replaced are restored.

    On Hopper cuDNN's backward crashes or returns NaN (torch 2.11; pytorch#196678, #122695, #134001).
    """
    now = Before(torch.backends.cuda.cudnn_sdp_enabled(), current_flash_attention_impl())
    _runs.append(_runs[0] if _runs else now)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        before = _runs.pop()
        if not _runs:
            torch.backends.cuda.enable_cudnn_sdp(before.allowed)
            _replace_flash(before.flash)


def activate(name: str, device: torch.device) -> None:
    """Replace torch's FlashAttention kernels by those of `fa3` or `fa4` until the `attention_of_a_run` ends; for other
    names, use the kernels from before the run.

    Raises ConfigError on a CPU, without the package, or if another open run of the process uses other kernels.
    """
    if name in FLASH and device.type != "cuda":
        raise ConfigError([f"attention: {name} is for GPUs, expected native on a {device.type}"])
    now = current_flash_attention_impl()
    wanted = FLASH.get(name, _runs[0].flash if _runs else now)
    if wanted == now:
        return
    if len(_runs) > 1:
        kernels = now or "torch's own FlashAttention"
        raise ConfigError(
            [f"attention: an open run uses {kernels}, and a process has one; close it before {name} starts"]
        )
    assert _runs, "called outside attention_of_a_run, which restores it"
    try:
        _replace_flash(wanted)
    except (ImportError, RuntimeError, ValueError, AttributeError) as error:  # what the package itself raises
        raise ConfigError([_refusal(name, error)]) from error


def leave_kernels_allowed() -> None:
    """Keep diffusers' `_native_flash` from forbidding torch's other attention kernels.

    diffusers forbids them process-wide while the backend runs, so that attention of a reward or judge in another
    thread, in fp32 or with a mask, finds no kernel. In bf16 without a mask, torch chooses FlashAttention anyway.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    stock = registry._backends[AttentionBackendName._NATIVE_FLASH]
    if hasattr(stock, "leaves_kernels_allowed"):
        return

    @wraps(stock)
    def flash(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        others = ("attn_mask", "_parallel_config", "return_lse")
        asked = [name for name in others if options.get(name) is not None and options[name] is not False]
        if asked or query.dtype != torch.bfloat16:
            return stock(query, key, value, **options)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        given = {name: value for name, value in options.items() if name not in others}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2)

    flash.leaves_kernels_allowed = True  # type: ignore[attr-defined]
    registry._backends[AttentionBackendName._NATIVE_FLASH] = flash


def _replace_flash(wanted: str | None) -> None:
    """Make torch's FlashAttention op run these kernels, or its own for None."""
    if wanted == current_flash_attention_impl():
        return
    if wanted is None:
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(wanted)


def _refusal(name: str, error: BaseException) -> str:
    """One line: why a backend does not run, and what it needs."""
    reason = " ".join(str(error).strip().partition("\n")[0].split())[:300] or type(error).__name__
    needs = f"; expected {NEEDS[name]}" if name in NEEDS else ""
    return f"attention: {name} does not run here: {reason}{needs}"


class Case(NamedTuple):
    """Attention in a run: q [batch, queries, heads, width], k and v [batch, keys, heads, width], with a mask or not."""

    batch: int
    queries: int
    keys: int
    heads: int
    width: int
    masked: bool = False


def check_kernels(name: str, case: Case, dtype: torch.dtype, device: torch.device, given: str = "") -> None:
    """Raise ConfigError if a diffusers backend does not run here, or computes something wrong.

    given: the value of `attention`, where it is not the backend's name.
    """
    shown = given or name
    try:
        output, gradient = kernel_errors(name, case, dtype, device)
    except Exception as error:  # kernels raise anything: FlashAttention-4 AssertionError, its compiler its own
        raise ConfigError([_refusal(shown, error)]) from error
    if max(output, gradient) > LIMIT[dtype]:
        where = ", ".join(f"{key} {value}" for key, value in case._asdict().items())
        wrong = f"output by {output:.1%} and gradients by {gradient:.1%}"
        message = f"{shown} is wrong on {where}: it differs from exact attention in its {wrong}"
        raise ConfigError([f"attention: {message}; expected another backend"])


def kernel_errors(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
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
    inputs = _inputs(case, "separate", dtype, device)
    precise = torch.float64 if dtype == torch.float32 else torch.float32
    want: dict[tuple[int, int], list[Tensor]] = {}
    for b, h in {(0, 0), (case.batch - 1, case.heads - 1)}:
        q, k, v, upstream = (x[b, :, h].to(precise) for x in inputs)
        want[b, h] = _exact(q, k, v, upstream, None if mask is None else mask[b, 0, 0])
    del inputs
    worst = [0.0] * 4
    for layout in LAYOUTS:
        for i, x in enumerate(_computed(name, case, layout, mask, dtype, device)):
            found = [relative_error(x[b, :, h], exact[i]) for (b, h), exact in want.items()]
            worst[i] = max(worst[i], *found) if bool(x.isfinite().all()) else math.inf
    return worst[0], max(worst[1:])


LAYOUTS = {
    "separate": (0, 1, 2, 3, 4),
    "sliced": (1, 2, 0, 3, 4),  # of one wider tensor, as in blocks that compute attention and MLP from one projection
    "tokens first": (0, 2, 1, 3, 4),  # as fused blocks get them under Ulysses
}
"""Order in memory of q, k, v and the output's gradient [4, B, S, H, D]."""


def _inputs(case: Case, layout: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v and the output's gradient, in one of LAYOUTS."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (4, case.batch, max(case.queries, case.keys), case.heads, case.width)
    values = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    order = LAYOUTS[layout]
    values = values.permute(order).contiguous().permute([order.index(axis) for axis in range(5)])
    lengths = (case.queries, case.keys, case.keys, case.queries)
    return [x[:, :n] for x, n in zip(values, lengths, strict=True)]


def _computed(
    name: str, case: Case, layout: str, mask: Tensor | None, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """A backend's output and gradients of q, k and v. The output's gradient has the same layout, or, for "separate", is
    a sum over two slices, as if text and image tokens were used apart."""
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    *inputs, upstream = _inputs(case, layout, dtype, device)
    tested = [x.detach().requires_grad_() for x in inputs]
    with attention_backend(name):
        out = dispatch_attention_fn(*tested, attn_mask=mask)
    if out.requires_grad and layout != "separate":
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
