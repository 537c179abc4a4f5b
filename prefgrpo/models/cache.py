"""diffusers' caches in rollouts: a denoiser skips blocks whose output hardly changes from one step to the next.

Lossy: samples no longer follow the policy exactly, so only objectives without an importance ratio may train on them.
Invariants: outside `cached` a denoiser computes every block, and no cache state outlives a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from prefgrpo.config.recipe import ConfigError
from prefgrpo.config.schema import SamplingConfig

ATTENTION = r"[a-z_]*blocks\.\d+\.attn\d*"
"""Pattern of module names that TaylorSeer extrapolates; diffusers' own pattern matches no module of Wan or LTX."""


def check(denoiser: object, sampling: SamplingConfig) -> None:
    """Raise ConfigError if `rollout.cache` is set and diffusers has no cache for the denoiser."""
    if sampling.cache != "none" and not hasattr(denoiser, "enable_cache"):
        kind = type(denoiser).__name__
        raise ConfigError([f"rollout.cache: diffusers has no cache for {kind}: expected none, got {sampling.cache}"])


@contextmanager
def cached(denoisers: Sequence[Any], sampling: SamplingConfig) -> Iterator[None]:
    """Inside, the denoisers use `rollout.cache`; its state starts empty and is dropped at the end."""
    if sampling.cache == "none":
        yield
        return
    from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig

    config = (
        FirstBlockCacheConfig(threshold=sampling.cache_threshold)
        if sampling.cache == "first_block"
        else TaylorSeerCacheConfig(
            cache_interval=sampling.cache_interval,
            disable_cache_before_step=2,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=[ATTENTION],
        )
    )
    try:
        for denoiser in denoisers:
            denoiser.enable_cache(config)
        yield
    finally:
        for denoiser in denoisers:
            denoiser.disable_cache()


def with_cache_contexts(predict: Callable[..., torch.Tensor], denoiser: Any) -> Callable[..., torch.Tensor]:
    """`predict` with a separate cache state for each call within a step: the two halves of a guidance pair differ."""
    turns = count()

    def call(*given: Any) -> torch.Tensor:
        with denoiser.cache_context(f"forward {next(turns)}"):
            return predict(*given)

    return call
