"""Sets a diffusers attention backend by name, the same in rollout and training, after checking its numerics.

Some backends run forward and backward without an error but drop the gradient of the attention branch, which no loss
curve shows. So a backend's outputs and gradients are compared with torch's attention in fp32, in the run's dtype and
with its kind of mask. diffusers also has one backend per process for modules without their own, which stays as it was.
Invariant: a run starts only with a backend whose gradients are correct, and every block of its denoisers uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import MASKING, SPLITTING, Attention, Config
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.mesh import Layout

LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Maximum error of an output or gradient, relative to its largest element."""
TOKENS = 256
"""Number of tokens of the check."""


def backends(cls: type[Adapter], layout: Layout) -> list[str]:
    """The backends that a family trains with under a layout, judged from its class alone."""
    if layout.context > 1 and (not cls.context_parallel or (layout.ring > 1 and cls.context_parallel != "ring")):
        return []
    named: list[str] = list(get_args(Attention))
    if layout.context > 1:
        named = [name for name in named if name in SPLITTING]
    if layout.ring > 1:
        named.remove("native")
    if cls.attention_masks == "own":
        named = [name for name in named if name == "native"]
    padded = cls.attention_masks == "padding" and layout.context > 1  # texts are padded to a multiple of the processes
    if cls.attention_masks == "always" or padded:
        named = [name for name in named if name in MASKING]
    return named


def unsupported(cls: type[Adapter], family: str, attention: str, layout: Layout) -> list[str]:
    """Why a family does not train with this backend; empty if it does, or if it does not support the layout at all."""
    known = backends(cls, layout)
    if not known or attention in known:
        return []
    why = {"own": "chooses its kernels itself", "always": "masks its text", "padding": "pads its text here"}
    reason = why.get(cls.attention_masks, "is split over processes")
    return [f"attention: {family} {reason}: expected one of {', '.join(known)}, got {attention}"]


def set_backend(adapter: Adapter, config: Config, layout: Layout, device: torch.device) -> None:
    """Set config.attention in every denoiser, after a check of its results. Raises ConfigError."""
    name = config.attention
    adapter.splits_lengths |= adapter.attention_masks == "padding" and name not in MASKING
    if name == "native":
        _set(adapter, name)
        return
    transformer: Any = adapter.transformer
    model = transformer.config
    heads = model.get("num_attention_heads") or model.get("n_heads")
    width = model.get("attention_head_dim") or model["dim"] // heads
    shape = (min(config.rollout.batch_size, 2), TOKENS, heads // layout.ulysses, width)
    masked = adapter.attention_masks in ("padding", "always") and name in MASKING
    try:
        if wrong := problem(name, shape, adapter.dtype, device, masked):
            raise ConfigError([f"attention: {name} {wrong}; expected native, or another backend"])
        adapter.dispatch_attention()
        _set(adapter, name)
    except (RuntimeError, ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).strip().splitlines()[0][:300]
        raise ConfigError([f"attention: {name} does not run here: {reason}"]) from error
    if ignoring := [kind for denoiser in _denoisers(adapter) for kind in _without(denoiser, adapter, name)]:
        raise ConfigError([f"attention: expected native: {ignoring[0]} of this model does not take {name}"])


def _denoisers(adapter: Adapter) -> list[Any]:
    return [getattr(adapter.pipe, name) for name in adapter.denoisers]


def _set(adapter: Adapter, name: str) -> None:
    with _process_backend_kept():
        for denoiser in _denoisers(adapter):
            denoiser.set_attention_backend(name)


@contextmanager
def _process_backend_kept() -> Iterator[None]:
    """Context that restores the backend of modules without their own, which `set_attention_backend` changes."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before, _ = registry.get_active_backend()
    try:
        yield
    finally:
        registry.set_active_backend(before)


def _without(denoiser: nn.Module, adapter: Adapter, name: str) -> Iterator[str]:
    """Attention classes in the denoiser's blocks that do not use the backend; text refiners keep torch's attention."""
    for block in adapter.blocks(denoiser):
        for module in block.modules():
            processor: Any = getattr(module, "processor", None)
            if processor is None or type(processor).__name__ == "AttnProcessor2_0":
                continue
            if getattr(processor, "_attention_backend", None) != name:
                yield type(processor).__name__


def problem(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, masked: bool) -> str:
    """What is wrong with a backend's results for queries, keys and values [B, N, H, D]; empty if nothing."""
    output, gradient = errors(name, shape, dtype, device, masked)
    limit, given = LIMIT[dtype], f"on {list(shape)}" + " with a mask" * masked
    if not gradient <= limit:
        return f"gives wrong gradients {given}: they differ by {gradient:.1%} from those of torch's own attention"
    if not output <= limit:
        return f"gives wrong results {given}: they differ by {output:.1%} from torch's own attention"
    return ""


def errors(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, masked: bool = False
) -> tuple[float, float]:
    """Largest errors of a backend's output and of its gradients with respect to q, k and v, relative to the largest
    element. Raises whatever the backend raises. A missing gradient counts as 0.
    """
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]
    weight = torch.randn(shape, generator=generator).to(device)
    mask = None
    if masked:  # the last quarter of the first sample's keys is padding
        mask = torch.ones(shape[0], 1, 1, shape[1], dtype=torch.bool, device=device)
        mask[0, ..., -max(shape[1] // 4, 1) :] = False
    own = [x.clone().requires_grad_() for x in inputs]
    with attention_backend(name):
        out = dispatch_attention_fn(*own, attn_mask=mask)
    if out.requires_grad:
        (out.float() * weight).sum().backward()
    exact = [x.float().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in exact)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    (want * weight).sum().backward()
    return _error(out, want), max(_error(x.grad, y.grad) for x, y in zip(own, exact, strict=True))


def _error(got: Tensor | None, want: Tensor | None) -> float:
    assert want is not None
    largest = float(want.detach().abs().max())
    difference = want if got is None else got.detach().float() - want
    error = float(difference.detach().abs().max()) / largest
    return error if math.isfinite(error) else math.inf
