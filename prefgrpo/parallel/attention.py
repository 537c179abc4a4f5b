"""Sets a diffusers attention backend by name, the same in rollout and training, after checking its numerics.

Some backends run forward and backward without an error but drop the gradient of the attention branch, which no loss
curve shows. So a backend's outputs and gradients are compared with torch's attention in fp32, on the run's shapes.
Invariant: a run starts only with a backend whose gradients are correct.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Config
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.mesh import Layout

LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Maximum error of an output or gradient, relative to its largest element."""


def set_backend(adapter: Adapter, config: Config, layout: Layout, device: torch.device) -> None:
    """Set config.attention in every denoiser, after a check on the run's shapes. Raises ConfigError."""
    if config.attention == "native":
        return
    transformer: Any = adapter.transformer
    model = transformer.config
    tokens = adapter.sequence(config.rollout) + (0 if "text_dim" in model else config.data.max_length)
    heads = model.get("num_attention_heads") or model.get("n_heads")
    if heads is None:
        raise ConfigError([f"attention: the {config.family} family supports only native"])
    width = model.get("attention_head_dim") or model["dim"] // heads
    shape = (config.rollout.batch_size, tokens, heads // layout.ulysses, width)
    try:
        if wrong := problem(config.attention, shape, adapter.dtype, device, masked=adapter.own_lengths):
            raise ConfigError([f"attention: {config.attention} {wrong}; expected native, or another backend"])
        for name in adapter.denoisers:
            getattr(adapter.pipe, name).set_attention_backend(config.attention)
    except (RuntimeError, ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).strip().splitlines()[0][:300]
        raise ConfigError([f"attention: {config.attention} does not run here: {reason}"]) from error


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
