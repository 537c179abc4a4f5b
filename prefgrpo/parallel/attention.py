"""Sets a diffusers attention backend by name, the same in rollout and training, after checking its numerics.

Some backends run forward and backward without an error but drop the gradient of the attention branch, which no loss
curve shows. So a backend's outputs and gradients are compared with torch's attention in fp32, in the run's dtype and
with its kind of mask. Invariant: a run starts only with a backend whose gradients are correct, and every block of its
denoisers uses it.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import Attention, Config
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import Layout

SPLITTING = {
    "native", "_native_cudnn", "_native_flash", "flash", "flash_hub", "_flash_3_hub", "flash_varlen_hub",
    "_flash_3_varlen_hub",
}  # fmt: skip
"""Backends that support context parallelism; ring attention needs log-sum-exps, which native does not return."""
MASKING = {
    "native", "_native_cudnn", "_native_math", "flash_varlen", "flash_varlen_hub", "_flash_3_varlen_hub",
}  # fmt: skip
"""Backends that take a mask of padded keys."""
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Maximum error of an output or gradient, relative to its largest element."""
TOKENS = 256
"""Number of tokens of the check."""


def backends(cls: type[Adapter], layout: Layout) -> list[str]:
    """The backends that a family trains with under a layout, judged from its class alone."""
    if layout.context > 1 and (not cls.context_parallel or (layout.ring > 1 and cls.context_parallel != "ring")):
        return []
    allowed = set(get_args(Attention))
    if layout.context > 1:
        allowed &= SPLITTING
    if layout.ring > 1:
        allowed -= {"native"}
    padded = cls.attention_masks == "padding" and layout.context > 1  # texts are padded to a multiple of the processes
    if cls.attention_masks == "always" or padded:
        allowed &= MASKING
    if cls.attention_masks == "own":
        allowed &= {"native"}
    return [name for name in get_args(Attention) if name in allowed]


def unsupported(cls: type[Adapter], family: str, attention: str, layout: Layout) -> list[str]:
    """Why a family does not train under this layout, or with this backend."""
    allowed = backends(cls, layout)
    split = f"ring {layout.ring} × ulysses {layout.ulysses}"
    if not allowed:
        expected = "ulysses alone" if cls.context_parallel else "1 and 1"
        return [f"parallel.ulysses/ring: {family} does not train under {split}; expected {expected}"]
    if attention not in allowed:
        return [f"attention: {family} trains under {split} with {', '.join(allowed)}, got {attention}"]
    return []


def set_backend(adapter: Adapter, config: Config, layout: Layout, device: torch.device) -> None:
    """Set config.attention in every denoiser, after a check of its results. Raises ConfigError."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    name = config.attention
    if name != "native":
        transformer: Any = adapter.transformer
        model = transformer.config
        heads = model.get("num_attention_heads") or model.get("n_heads")
        width = model.get("attention_head_dim") or model["dim"] // heads
        shape = (min(config.rollout.batch_size, 2), TOKENS, heads // layout.ulysses, width)
        padded = adapter.attention_masks == "padding" and layout.context > 1
        masked = adapter.attention_masks == "always" or padded
        try:
            output, gradient = errors(name, shape, adapter.dtype, device, masked)
        except (RuntimeError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0][:300]
            raise ConfigError([f"attention: {name} does not run here: {reason}"]) from error
        if max(output, gradient) > LIMIT[adapter.dtype]:
            wrong = f"output by {output:.1%} and gradients by {gradient:.1%}"
            told = f"{name} is wrong on {list(shape)}: it differs from torch's own attention in its {wrong}"
            raise ConfigError([f"attention: {told}; expected native, or another backend"])
    adapter.dispatch_attention()
    before, _ = registry.get_active_backend()
    try:
        for module in adapter.modules().values():
            module.set_attention_backend(name)  # type: ignore[operator]
    finally:  # diffusers also sets that of all modules without their own
        registry.set_active_backend(before)


def errors(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, masked: bool = False
) -> tuple[float, float]:
    """Largest errors of a backend's output and of its gradients with respect to q, k and v [B, N, H, D], relative to
    the largest element; infinite if not finite. Raises whatever the backend raises. A missing gradient counts as 0.
    """
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]
    weight = torch.randn(shape, generator=generator).to(device)
    mask = None
    if masked:  # the last quarter of the first sample's keys is padding
        mask = torch.ones(shape[0], 1, 1, shape[1], dtype=torch.bool, device=device)
        mask[0, ..., -max(shape[1] // 4, 1) :] = False
    tested = [x.clone().requires_grad_() for x in inputs]
    with attention_backend(name):
        out = dispatch_attention_fn(*tested, attn_mask=mask)
    if out.requires_grad:
        (out.float() * weight).sum().backward()
    exact = [x.float().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in exact)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    (want * weight).sum().backward()
    return _error(out, want), max(_error(x.grad, y.grad) for x, y in zip(tested, exact, strict=True))


def _error(got: Tensor | None, want: Tensor | None) -> float:
    assert want is not None
    difference = want if got is None else got.float() - want
    error = float(difference.detach().abs().max() / want.detach().abs().max())
    return error if math.isfinite(error) else math.inf
