"""Sets attention by name, the same in rollout and training, after checking it at the run's sizes.

A name is that of a backend of diffusers, or `fa3` and `fa4`: torch's FlashAttention op with other kernels.
Invariant: a run starts only with a backend whose gradients are correct, and every block of its denoisers uses it.
"""

from __future__ import annotations

import logging
from typing import Any, get_args

import torch

from prefgrpo.config.schema import Attention, Config
from prefgrpo.models.attention import FLASH, Case, activate, check_kernels, leave_kernels_allowed
from prefgrpo.models.base import Adapter
from prefgrpo.parallel.world import Layout

logging.getLogger("diffusers.models.modeling_utils").addFilter(lambda r: "experimental feature" not in r.getMessage())

SPLITTING = {"native", "_native_flash", "fa3", "fa4", "_flash_3_hub", "_flash_3_varlen_hub"}
"""Names that support context parallelism; ring attention needs log-sum-exps, which native does not return."""
MASKING = {"native", "_native_math", "_flash_3_varlen_hub"}
"""Names that support a mask of padded keys."""


def masked(cls: Adapter | type[Adapter], layout: Layout) -> bool:
    """Whether a family's blocks pass a mask to attention, or might, because they choose their own kernels."""
    if cls.attention_masks == "padding":  # texts are padded to a multiple of the processes
        return layout.context > 1
    return cls.attention_masks in ("always", "own")


def backend(name: str, device: torch.device, dtype: torch.dtype, masks: bool) -> str:
    """The diffusers backend that runs for a value of `attention`: the table in docs/scale.md.

    masks: whether blocks pass one (`masked`). native is a single kernel wherever one suffices, so torch's choice cannot
    change and Ulysses saves what its backward needs; diffusers' native would compute the forward again.
    """
    flash = device.type == "cuda" and dtype == torch.bfloat16 and not masks
    if name in FLASH or (name == "native" and flash):
        return "_native_flash"
    return name


def backends(cls: type[Adapter], layout: Layout) -> list[str]:
    """The backends that a family trains with under a layout, judged from its class alone."""
    if layout.context > 1 and (not cls.context_parallel or (layout.ring > 1 and cls.context_parallel != "ring")):
        return []
    allowed = set(get_args(Attention))
    if layout.context > 1:
        allowed &= SPLITTING
    if layout.ring > 1:
        allowed -= {"native"}
    if masked(cls, layout):
        allowed &= MASKING
    if cls.attention_masks == "own":
        allowed &= {"native"}
    return [name for name in get_args(Attention) if name in allowed]


def backend_errors(cls: type[Adapter], family: str, attention: str, layout: Layout) -> list[str]:
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


def set_backend(adapter: Adapter, config: Config, layout: Layout, device: torch.device) -> None:
    """Set config.attention in every denoiser, after a check of its results (on a CPU, none of native).

    Raises ConfigError.
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    activate(config.attention, device)
    leave_kernels_allowed()
    name = backend(config.attention, device, adapter.dtype, masked(adapter, layout))
    if name != "native" or device.type != "cpu":
        for case in cases(adapter, config, name, layout):
            check_kernels(name, case, adapter.dtype, device, given=config.attention)
    adapter.dispatch_attention()
    before, _ = registry.get_active_backend()
    try:
        for module in adapter.modules().values():
            module.set_attention_backend(name)  # type: ignore[operator]
    finally:  # diffusers also sets that of all modules without their own
        registry.set_active_backend(before)
