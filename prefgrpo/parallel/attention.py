"""Sets a diffusers attention backend by name, the same in rollout and training, after checking it at the run's sizes.

Invariant: a run starts only with a backend whose gradients are correct, and every block of its denoisers uses it.
"""

from __future__ import annotations

import logging
from typing import Any, get_args

import torch

from prefgrpo.config.schema import Attention, Config
from prefgrpo.models.attention import Case, check
from prefgrpo.models.base import Adapter, Masks
from prefgrpo.parallel.world import Layout

logging.getLogger("diffusers.models.modeling_utils").addFilter(lambda r: "experimental feature" not in r.getMessage())

SPLITTING = {"native", "_native_flash", "flash", "flash_hub", "_flash_3_hub", "flash_varlen_hub", "_flash_3_varlen_hub"}
"""Backends that support context parallelism; ring attention needs log-sum-exps, which native does not return."""
MASKING = {"native", "_native_math", "flash_varlen", "flash_varlen_hub", "_flash_3_varlen_hub"}
"""Backends that take a mask of padded keys; diffusers 0.42 adds xformers' as 0 and 1, which masks nothing."""


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


def cases(adapter: Adapter, config: Config, name: str, layout: Layout) -> list[Case]:
    """The attention of one process in the blocks, at the sizes of rollout and evaluation."""
    model: Any = adapter.transformer.config
    heads = model.get("num_attention_heads") or model["n_heads"]
    width = model.get("attention_head_dim") or (model.get("dim") or model["hidden_size"]) // heads
    batch = min(config.rollout.batch_size, 2)
    padded = adapter.attention_masks == "padding" and layout.context > 1
    masks = {True} if adapter.attention_masks == "always" else {False, padded}
    found: list[Case] = []
    for sizes in (config.rollout, config.eval_sampling):
        for queries, keys in adapter.attention_tokens(sizes, config.data.max_length):
            sizes_of_one = (batch, queries // layout.ring, keys // layout.ring)
            for masked in sorted(masks) if name in MASKING else (False,):
                found.append(Case(*sizes_of_one, heads // layout.ulysses, width, masked))
    return list(dict.fromkeys(found))


def chosen(name: str, masks: Masks, layout: Layout, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that runs: for native under Ulysses without masks on a GPU, torch's flash attention, because there
    native would compute every forward again in the backward pass."""
    flash = device.type == "cuda" and dtype == torch.bfloat16 and masks == "none" and layout.context > 1
    return "_native_flash" if flash and name == "native" else name


def set_backend(adapter: Adapter, config: Config, layout: Layout, device: torch.device) -> None:
    """Set config.attention in every denoiser, after a check of its results (on a CPU, none of native).

    Raises ConfigError.
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    name = chosen(config.attention, adapter.attention_masks, layout, device, adapter.dtype)
    if name != "native" or device.type != "cpu":
        for case in cases(adapter, config, name, layout):
            check(name, case, adapter.dtype, device)
    adapter.dispatch_attention()
    before, _ = registry.get_active_backend()
    try:
        for module in adapter.modules().values():
            module.set_attention_backend(name)  # type: ignore[operator]
    finally:  # diffusers also sets that of all modules without their own
        registry.set_active_backend(before)
